"""Sign the requests of parties at the CA. The private keys of the parties are never here.

KITS/ca/        as in glasu.pki.provision; made with the first request
KITS/server/    the server's kit, with its key, made here
KITS/<party>/   files to return to the party: ca.pem, certificate.pem, kit.toml; none of them is secret
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

from glasu.errors import ConfigError
from glasu.pki.authority import KIT_DAYS
from glasu.pki.identity import check_roster
from glasu.pki.issued import IssuedCertificates
from glasu.pki.kit import CERTIFICATE, open_certificate
from glasu.pki.provision import (
    AUTHORITY,
    CertificateAuthority,
    PublicKeys,
    change_authority,
    make_federation,
    open_authority,
    truncate_to_seconds,
)
from glasu.pki.request import SigningRequest, read_request


@dataclass(frozen=True)
class SignedParty:
    """A certificate that the CA made for the key of a party."""

    name: str
    folder: Path  # the folder to send to the party
    expires: datetime
    key_fingerprint: str


def sign_requests(
    out: Path, requests: Sequence[Path], hosts: Sequence[str], *, days: int = KIT_DAYS, now: datetime | None = None
) -> list[SignedParty]:
    """Sign requests; the parties are appended to the roster in this order.

    A request of the same key renews the certificate of a party. Another key for the same name is refused until the
    earlier certificate is revoked or has expired.

    Args:
        out: the folder of the CA. If it has no CA, a CA and the kit of the server are made there first.
        requests: files that `glasu provision request` made.
        hosts: the DNS names and IP addresses of the server; only for a new CA.
        days: validity of the certificates.
        now: the current time by default.
    """
    now = truncate_to_seconds(now)
    found = [read_request(path) for path in requests]
    names = [request.name for request in found]
    for request in found:
        if names.count(request.name) > 1:
            others = ", ".join(each.source for each in found if each.name == request.name)
            raise ConfigError(f"{others}: are requests for one name, {request.name!r}; sign the one that is right.")
    check_roster(names)
    keys = {request.name: request.key for request in found}
    if not (out / AUTHORITY).is_dir():
        make_federation(out, names, hosts, days, now, keys)
    elif hosts:
        raise ConfigError(f"--host {hosts[0]}: {out} has a CA and a server already; use --renew server to change it.")
    else:
        with open_authority(out, now) as authority:
            _sign_more(authority, found, keys, days)
    return [
        SignedParty(name, out / name, open_certificate(out / name / CERTIFICATE).expires, request.fingerprint)
        for name, request in zip(names, found, strict=True)
    ]


def _sign_more(authority: CertificateAuthority, found: Sequence[SigningRequest], keys: PublicKeys, days: int) -> None:
    state = authority.state
    if state.trial:
        raise ConfigError(f"{authority.out}: its CA makes trial kits, with all private keys; choose another --ca.")
    for request in found:
        _refuse_second_key(state, request, authority.now)
    roster = (*state.roster, *(name for name in keys if name not in state.roster))
    check_roster(roster)
    names = list(keys)
    change_authority(authority, replace(state, roster=roster), issued=names, retired=names, days=days, keys=keys)


def _refuse_second_key(state: IssuedCertificates, request: SigningRequest, now: datetime) -> None:
    for item in state.issued:
        is_valid = item.name == request.name and not item.revoked and item.expires > now
        if is_valid and item.key != request.fingerprint:
            raise ConfigError(
                f"{request.source}: {request.name!r} has a certificate for another key, valid until "
                f"{item.expires:%Y-%m-%d}; if the party asked for a new key, use --revoke {request.name} first."
            )
