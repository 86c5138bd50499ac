"""Sign requests from the parties and the server at the CA. The private keys for the requests never reach the CA.

KITS/ca/        as in glasu.pki.provision; made with the first request
KITS/server/    after a request from the server: the files to send back; otherwise its kit, with a key made here
KITS/<party>/   the files to send back to the party: ca.pem, certificate.pem, kit.toml; none of them is secret
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

from glasu.errors import ConfigError
from glasu.pki.authority import KIT_DAYS
from glasu.pki.identity import SERVER_NAME, check_roster
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
class SignedRequest:
    """A certificate that the CA made for the key in a request."""

    name: str  # name of the party, or SERVER_NAME
    folder: Path  # the folder to send back
    expires: datetime
    key_fingerprint: str


def sign_requests(
    out: Path, requests: Sequence[Path], hosts: Sequence[str], *, days: int = KIT_DAYS, now: datetime | None = None
) -> list[SignedRequest]:
    """Sign requests of parties, and perhaps of the server. New parties are appended to the roster in this order.

    If a name already has a certificate for the key in the request, the certificate is renewed. Another key for the same
    name is refused until the earlier certificate is revoked or has expired. One exception: the server may replace a key
    that the CA made.

    Args:
        out: the folder of the CA. If it has no CA, a CA and the kit of the server are made there first.
        requests: files that `glasu provision request` made.
        hosts: the DNS names and IP addresses of the server; only for a new CA, or with a request from the server.
        days: validity of the certificates.
        now: the time of the signature; None: the current time.
    """
    now = truncate_to_seconds(now)
    found = [read_request(path) for path in requests]
    names = [request.name for request in found]
    for request in found:
        if names.count(request.name) > 1:
            others = ", ".join(each.source for each in found if each.name == request.name)
            raise ConfigError(f"{others}: are requests for one name, {request.name!r}; sign only the correct request.")
    parties = [name for name in names if name != SERVER_NAME]
    keys = {request.name: request.key for request in found}
    if not (out / AUTHORITY).is_dir():
        if not parties:
            raise ConfigError(
                f"{out}: a new CA needs the request of at least one party; sign it together with this request."
            )
        check_roster(parties)
        make_federation(out, parties, hosts, days, now, keys)
    elif hosts and SERVER_NAME not in names:
        raise ConfigError(
            f"--host {hosts[0]}: {out} has a CA and a server already; to change the hosts, sign a request from the "
            "server, or use --renew server if its key was made here."
        )
    else:
        with open_authority(out, now) as authority:
            _sign_more(authority, found, keys, hosts, days)
    return [
        SignedRequest(name, out / name, open_certificate(out / name / CERTIFICATE).expires, request.fingerprint)
        for name, request in zip(names, found, strict=True)
    ]


def _sign_more(
    authority: CertificateAuthority,
    found: Sequence[SigningRequest],
    keys: PublicKeys,
    hosts: Sequence[str],
    days: int,
) -> None:
    state = authority.state
    if state.trial:
        raise ConfigError(f"{authority.out}: its CA makes trial kits and has all private keys; choose another --ca.")
    for request in found:
        _refuse_second_key(state, request, authority.now)
    roster = (*state.roster, *(name for name in keys if name not in (SERVER_NAME, *state.roster)))
    check_roster(roster)
    names, state = list(keys), replace(state, roster=roster, hosts=tuple(hosts) or state.hosts)
    change_authority(authority, state, issued=names, retired=names, days=days, keys=keys)


def _refuse_second_key(state: IssuedCertificates, request: SigningRequest, now: datetime) -> None:
    for item in state.issued:
        is_valid = item.name == request.name and not item.revoked and item.expires > now
        if request.name == SERVER_NAME and item.key is None:
            continue  # the CA made that key; the server may replace it with its own key
        if is_valid and item.key != request.fingerprint:
            remedy = f"if the party asked for a new key, use --revoke {request.name} first."
            if request.name == SERVER_NAME:  # revoking would not help, because parties read no revocation list
                remedy = "if that key is lost, make a new CA and new kits in another --ca."
            raise ConfigError(
                f"{request.source}: {request.name!r} has a certificate for another key, valid until "
                f"{item.expires:%Y-%m-%d}; {remedy}"
            )
