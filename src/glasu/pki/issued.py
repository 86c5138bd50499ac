"""ca.toml: the roster, the server's hosts and every certificate that the CA issued."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

import tomli_w

from glasu.errors import DataError
from glasu.pki.kit import read_document
from glasu.records import to_plain

ISSUED_SCHEMA = 1


@dataclass(frozen=True, kw_only=True)
class Issued:
    """One certificate. Over the years, several certificates are issued for a name."""

    name: str
    serial: str  # hexadecimal
    expires: datetime
    key: str | None = None  # SHA-256 of the public key in a signing request; None: the CA made the key
    revoked: datetime | None = None

    def __post_init__(self) -> None:
        if not re.fullmatch("[0-9a-f]+", self.serial):
            raise DataError("a serial number is not hexadecimal")


@dataclass(frozen=True, kw_only=True)
class IssuedCertificates:
    """The state of a CA.

    The server's kit holds copies of the roster and the revocations; this file is authoritative.
    """

    schema: int = ISSUED_SCHEMA
    roster: tuple[str, ...]
    hosts: tuple[str, ...]
    trial: bool = True  # True: the CA makes the keys of the parties; False: the CA signs their requests
    issued: tuple[Issued, ...] = ()

    def revoke(self, names: Collection[str], now: datetime) -> IssuedCertificates:
        """Return the state in which all certificates of these parties are revoked."""
        issued = (
            replace(item, revoked=now) if item.name in names and not item.revoked else item for item in self.issued
        )
        return replace(self, issued=tuple(issued))

    def has_own_key(self, name: str) -> bool:
        """Return whether the last certificate of this name is for a key that was not made at the CA."""
        keys = [item.key for item in self.issued if item.name == name]
        return bool(keys) and keys[-1] is not None

    def has_other_valid(self, name: str, serial: str, now: datetime) -> bool:
        """Return True if a certificate of this name with another serial number is valid and not revoked."""
        others = (item for item in self.issued if item.name == name and item.serial != serial)
        return any(not item.revoked and item.expires > now for item in others)

    def revoked_serials(self) -> dict[str, datetime]:
        """Return the revoked serial numbers and the times of revocation."""
        return {item.serial: item.revoked for item in self.issued if item.revoked}

    def to_toml(self) -> bytes:
        """Return the contents of ca.toml."""
        return tomli_w.dumps(to_plain(self)).encode()


def read_issued(path: Path) -> IssuedCertificates:
    """Read ca.toml."""
    return read_document(IssuedCertificates, path, ISSUED_SCHEMA, "restore it from a copy of the folder")
