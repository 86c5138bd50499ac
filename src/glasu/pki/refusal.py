"""Check the certificate of a peer after the TLS handshake.

TLS has checked the signature and the validity of the certificate. It does not know the roster and the revocations.
"""

from __future__ import annotations

from datetime import UTC, datetime

from cryptography import x509

from glasu.pki.certificate import CertificateInfo, read_certificate
from glasu.pki.fingerprint import fingerprint_key, format_fingerprint, matches_fingerprint
from glasu.pki.identity import Role, find_role
from glasu.pki.kit import Kit


def find_refusal(peer_certificate_pem: bytes | None, kit: Kit, *, now: datetime | None = None) -> str:
    """Return the reason why the peer is refused, or an empty string if it is accepted.

    Args:
        peer_certificate_pem: `auth_context()["x509_pem_cert"][0]`; None if the peer sent no certificate.
        kit: the kit of this role. A server accepts the parties of its roster, a party accepts the server.
        now: the time at which the certificate must be valid; None: the current time.
    """
    if not peer_certificate_pem:
        return "no certificate was presented"
    peer = read_certificate(peer_certificate_pem)
    if peer is None:
        return "the presented certificate cannot be read"
    if not peer.is_issued_by(x509.load_pem_x509_certificate(kit.ca_pem)):
        if peer.is_self_signed:
            return "the certificate is self-signed, not signed by the CA of this kit"
        return f"the certificate was signed by another CA ({peer.issuer!r})"
    if reason := peer.validity_error(now or datetime.now(UTC)):
        return f"the certificate {reason}"
    return _find_identity_error(peer, kit)


def read_peer_name(peer_certificate_pem: bytes) -> str | None:
    """Return the name in a certificate, even if the certificate is not valid; `find_refusal` checks it."""
    peer = read_certificate(peer_certificate_pem)
    return None if peer is None else peer.name


def _find_identity_error(peer: CertificateInfo, kit: Kit) -> str:
    wanted: Role = "party" if kit.role == "server" else "server"
    if peer.name is None:
        return "the certificate names neither a party nor the server"
    if peer.role != find_role(peer.name):
        return f"the certificate names {peer.name!r}, but its key usage does not fit a {find_role(peer.name)}"
    if peer.role != wanted:
        return f"the certificate belongs to a {peer.role}, but the certificate of a {wanted} is needed here"
    if kit.role == "server" and peer.name not in kit.roster:
        return f"party {peer.name!r} is not on the roster ({', '.join(kit.roster)})"
    if peer.serial in kit.revoked:
        again = f"`glasu provision --renew {peer.name}`"
        return f"the certificate of {peer.name!r} is revoked (serial {peer.serial}); ask for a new kit ({again})"
    return find_pin_error(peer, kit)


def find_pin_error(peer: CertificateInfo, kit: Kit) -> str:
    """Return an error text if this kit pins another key for the peer, or an empty string."""
    pinned, key = kit.pins.get(peer.name or ""), peer.certificate.public_key()
    if pinned is None or matches_fingerprint(pinned, key):
        return ""
    found = format_fingerprint(fingerprint_key(key))
    return f"the key of {peer.name!r} is {found}, but this kit pins {format_fingerprint(pinned)}"
