"""Sign keys and statements with the key of a kit. Check a peer's signature together with its certificate and pin.

A pin is the fingerprint of a peer's key; see glasu.pki.pins.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from typing import Any

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from glasu.pki.certificate import read_certificate
from glasu.pki.fingerprint import matches_fingerprint
from glasu.pki.kit import Kit

ALGORITHM = ec.ECDSA(SHA256())


@dataclass(frozen=True)
class KitSigner:
    """Signs for the party of a kit, and checks the signatures of peers."""

    kit: Kit
    requires_pins: bool = True  # False: for a peer without a pin, the CA's signature is enough
    content_name: str = "this run, attempt, roster and these settings"  # what is signed, for errors

    @property
    def certificate(self) -> bytes:
        """The certificate of the party, in PEM form."""
        return self.kit.certificate_pem

    @cached_property
    def _authority(self) -> x509.Certificate:
        return x509.load_pem_x509_certificate(self.kit.ca_pem)

    def sign(self, content: bytes) -> bytes:
        """Return the signature of the party (ECDSA with SHA-256)."""
        key: Any = load_pem_private_key(self.kit.key_pem, password=None)
        signature: bytes = key.sign(content, ALGORITHM)
        return signature

    def find_error(self, name: str, certificate: bytes, signature: bytes, content: bytes) -> str:
        """Return why the signature of this peer is not valid, or an empty string."""
        if not signature or not certificate:
            return "is not signed"
        found = read_certificate(certificate)
        if found is None or not found.is_issued_by(self._authority):
            return "comes with a certificate that the CA of this kit has not signed"
        if (found.role, found.name) != ("party", name):
            return "comes with the certificate of another role or party"
        if reason := found.validity_error(datetime.now(UTC)):
            return f"comes with a certificate that {reason}"
        key: Any = found.certificate.public_key()
        pin = self.kit.pins.get(name)
        if pin is None and self.requires_pins:
            return f"is not pinned here; run `glasu provision pin {self.kit.folder} --peers {name}=FINGERPRINT`"
        if pin is not None and not matches_fingerprint(pin, key):
            return "comes with a certificate for a key that is not the pinned key"
        try:
            key.verify(signature, content, ALGORITHM)
        except (InvalidSignature, TypeError, ValueError):
            return f"has a signature that is not valid for {self.content_name}"
        return ""


def find_kit_error(kit: Kit, roster: Sequence[str]) -> str:
    """Return the reason why a kit cannot be used for secure aggregation between machines, or an empty string."""
    if kit.trial:
        return (
            "this is a trial kit: the operator of the CA made its private key and could read hidden tensors; "
            "make the key with `glasu provision request`, and pin the other parties' keys with `glasu provision pin`"
        )
    missing = [name for name in roster if name not in (kit.name, *kit.pins)]
    if kit.role == "party" and missing:
        listed = " ".join(f"{name}=FINGERPRINT" for name in missing)
        return (
            f"the keys of {', '.join(missing)} are not pinned in this kit, so the operator of the CA could "
            f"impersonate a party; compare fingerprints and run `glasu provision pin KIT --peers {listed}`"
        )
    return ""
