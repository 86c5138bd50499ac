"""Fingerprints of public keys, for people who compare them over the telephone.

The fingerprint of a key is the SHA-256 of its public half (DER, SubjectPublicKeyInfo). A renewed certificate of the
same key has the same fingerprint. People see the first 96 bits, in six groups of four hexadecimal digits. With openssl:

    openssl x509 -in certificate.pem -noout -pubkey | openssl pkey -pubin -outform DER | sha256sum | cut -c -24
"""

from __future__ import annotations

import hashlib
import re
from typing import Any

from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from glasu.errors import ConfigError

SHOWN_DIGITS = 24  # 96 bits
FEWEST_DIGITS = 20  # 80 bits
_GROUP = 4


def fingerprint_key(key: Any) -> str:
    """Return the SHA-256 of a public key, 64 hexadecimal digits."""
    content = key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    return hashlib.sha256(content).hexdigest()


def format_fingerprint(digits: str) -> str:
    """Return the part of a fingerprint that people compare: 3f2a-91bc-0d4e-77aa-1290-aa11."""
    shown = digits[:SHOWN_DIGITS]
    return "-".join(shown[start : start + _GROUP] for start in range(0, len(shown), _GROUP))


def parse_fingerprint(text: str, source: str) -> str:
    """Return the digits of a fingerprint that a person typed. It must have at least 80 bits.

    Args:
        text: hexadecimal digits; hyphens, colons and spaces may separate groups.
        source: where the text comes from, for the error.
    """
    digits = re.sub("[-: ]", "", text).lower()
    if not re.fullmatch("[0-9a-f]*", digits) or not FEWEST_DIGITS <= len(digits) <= 64:
        raise ConfigError(
            f"{source}: {text!r} is not a fingerprint of {FEWEST_DIGITS} to 64 hexadecimal digits; use the "
            "fingerprint that `glasu provision request` or `glasu provision pin` printed at the owner of the key."
        )
    return digits


def matches_fingerprint(digits: str, key: Any) -> bool:
    """Return whether a public key has a fingerprint that begins with these digits."""
    return fingerprint_key(key).startswith(digits)
