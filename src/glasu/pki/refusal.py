"""Check the certificate of a peer after the TLS handshake.

TLS has checked signature and validity. It knows neither the roster nor the names nor the revocations.
"""

from __future__ import annotations

from datetime import UTC, datetime

from cryptography import x509

from glasu.pki.certificate import CertificateInfo, read_certificate
from glasu.pki.identity import Role, role_of
from glasu.pki.kit import Kit


def find_refusal(
    peer_certificate_pem: bytes | None, kit: Kit, *, claimed: str | None = None, now: datetime | None = None
) -> str:
    """Return the reason why the peer is refused, or an empty string if it is accepted.

    Args:
        peer_certificate_pem: `auth_context()["x509_pem_cert"][0]`; None if the peer sent no certificate.
        kit: the own kit. A server accepts the parties of its roster, a party accepts the server.
        claimed: the name that the peer claims to have; it must be the name in the certificate.
        now: the present by default.
    """
    if not peer_certificate_pem:
        return "no certificate was presented"
    peer = read_certificate(peer_certificate_pem)
    if peer is None:
        return "the presented certificate cannot be read"
    wanted: Role = "party" if kit.role == "server" else "server"
    return (
        _find_issuer_error(peer, x509.load_pem_x509_certificate(kit.ca_pem))
        or _find_validity_error(peer, now or datetime.now(UTC))
        or _find_role_error(peer, wanted)
        or _find_admission_error(peer, kit)
        or _find_name_error(peer, claimed)
    )


def read_peer_name(peer_certificate_pem: bytes) -> str | None:
    """Return the name in a certificate, valid or not; call `find_refusal` first."""
    peer = read_certificate(peer_certificate_pem)
    return None if peer is None else peer.name


def _find_issuer_error(peer: CertificateInfo, authority: x509.Certificate) -> str:
    if peer.is_issued_by(authority):
        return ""
    if peer.is_self_signed:
        return "the certificate is self-signed, not signed by the CA of this kit"
    return f"the certificate was signed by another CA ({peer.issuer!r})"


def _find_validity_error(peer: CertificateInfo, now: datetime) -> str:
    reason = peer.validity_error(now)
    return f"the certificate {reason}" if reason else ""


def _find_role_error(peer: CertificateInfo, wanted: Role) -> str:
    if peer.name is None:
        return "the certificate names neither a party nor the server"
    if peer.role != role_of(peer.name):
        return f"the certificate names {peer.name!r}, but is not for the use of a {role_of(peer.name)}"
    return "" if peer.role == wanted else f"the certificate is a {peer.role}'s, and a {wanted}'s is needed here"


def _find_admission_error(peer: CertificateInfo, kit: Kit) -> str:
    if kit.role == "server" and peer.name not in kit.roster:
        return f"party {peer.name!r} is not on the roster ({', '.join(kit.roster)})"
    if peer.serial in kit.revoked:
        again = f"`glasu provision --renew {peer.name}`"
        return f"the certificate of {peer.name!r} is revoked (serial {peer.serial:x}); ask for a new kit ({again})"
    return ""


def _find_name_error(peer: CertificateInfo, claimed: str | None) -> str:
    if claimed in (None, peer.name):
        return ""
    return f"the peer calls itself {claimed!r}, but its certificate is that of {peer.name!r}"
