"""Why a certificate that a peer presented is not served: for the log, and as a second look after the TLS library's.

TLS refuses most of these in the handshake; it knows neither the roster, nor the names, nor what was revoked.
"""

from __future__ import annotations

from datetime import UTC, datetime

from cryptography import x509

from glasu.pki.certificate import CertificateInfo, read_certificate
from glasu.pki.identity import Role, role_of
from glasu.pki.kit import Kit


def refusal(
    peer_certificate_pem: bytes | None, kit: Kit, *, claimed: str | None = None, now: datetime | None = None
) -> str:
    """Return why the peer is not served, or an empty string if it is.

    Args:
        peer_certificate_pem: what TLS received, `auth_context()["x509_pem_cert"][0]`; None where there is nothing.
        kit: the own kit; a server serves the parties of its roster, a party talks to the server.
        claimed: the name that the peer gives itself, if it does; it must be the certificate's.
        now: by default the present.
    """
    if not peer_certificate_pem:
        return "no certificate was presented"
    peer = read_certificate(peer_certificate_pem)
    if peer is None:
        return "what was presented cannot be read as a certificate"
    wanted: Role = "party" if kit.role == "server" else "server"
    return (
        _not_ours(peer, x509.load_pem_x509_certificate(kit.ca_pem))
        or _stated("certificate", peer.outdated(now or datetime.now(UTC)))
        or _wrong_bearer(peer, wanted)
        or _not_admitted(peer, kit)
        or _false_claim(peer, claimed)
    )


def peer_name(peer_certificate_pem: bytes) -> str | None:
    """Return whom a certificate names, valid or not; ask `refusal` first."""
    peer = read_certificate(peer_certificate_pem)
    return None if peer is None else peer.name


def _not_ours(peer: CertificateInfo, authority: x509.Certificate) -> str:
    if peer.issued_by(authority):
        return ""
    if peer.is_self_signed:
        return "the certificate is self-signed, not signed by the CA of this kit"
    return f"the certificate was signed by another CA ({peer.issuer!r})"


def _stated(what: str, predicate: str) -> str:
    return f"the {what} {predicate}" if predicate else ""


def _wrong_bearer(peer: CertificateInfo, wanted: Role) -> str:
    if peer.name is None:
        return "the certificate names neither a party nor the server"
    if peer.role != role_of(peer.name):
        return f"the certificate names {peer.name!r}, but is not for the use of a {role_of(peer.name)}"
    return "" if peer.role == wanted else f"the certificate is a {peer.role}'s, and a {wanted}'s is needed here"


def _not_admitted(peer: CertificateInfo, kit: Kit) -> str:
    if kit.role == "server" and peer.name not in kit.roster:
        return f"party {peer.name!r} is not on the roster ({', '.join(kit.roster)})"
    if peer.serial in kit.revoked:
        again = f"`glasu provision --renew {peer.name}`"
        return f"the certificate of {peer.name!r} is revoked (serial {peer.serial:x}); ask for a new kit ({again})"
    return ""


def _false_claim(peer: CertificateInfo, claimed: str | None) -> str:
    if claimed in (None, peer.name):
        return ""
    return f"the peer calls itself {claimed!r}, but its certificate is that of {peer.name!r}"
