"""ca.toml: the roster, the server's hosts and every certificate that the CA issued."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import tomli_w

from glasu.errors import TransportError
from glasu.files import write_atomically
from glasu.pki.certificate import CertificateInfo
from glasu.pki.documents import read_document
from glasu.records import to_plain

SCHEMA = 1


@dataclass(frozen=True, kw_only=True)
class Issued:
    """One certificate. A name has several over the years."""

    name: str
    serial: str  # hexadecimal: TOML integers have 64 bits, and serial numbers 159
    expires: datetime
    revoked: datetime | None = None

    @classmethod
    def of(cls, own: CertificateInfo) -> Issued:
        assert own.name is not None
        return cls(name=own.name, serial=f"{own.serial:x}", expires=own.expires)


@dataclass(frozen=True, kw_only=True)
class IssuedCertificates:
    """The state of a CA. It decides; the server's kit repeats the roster and the revocations."""

    schema: int = SCHEMA
    roster: tuple[str, ...]
    hosts: tuple[str, ...]
    issued: tuple[Issued, ...] = ()

    def with_issued(self, certificates: Iterable[CertificateInfo]) -> IssuedCertificates:
        """Add new certificates."""
        return dataclasses.replace(self, issued=(*self.issued, *map(Issued.of, certificates)))

    def with_revoked(self, names: Iterable[str], now: datetime) -> IssuedCertificates:
        """Revoke every certificate issued so far to these parties."""
        gone = set(names)
        issued = (
            dataclasses.replace(item, revoked=now) if item.name in gone and not item.revoked else item
            for item in self.issued
        )
        return dataclasses.replace(self, issued=tuple(issued))

    def without(self, names: Iterable[str], now: datetime) -> IssuedCertificates:
        """Remove parties from the roster and revoke their certificates."""
        gone = set(names)
        roster = tuple(name for name in self.roster if name not in gone)
        return dataclasses.replace(self.with_revoked(gone, now), roster=roster)

    def has_other_valid(self, name: str, serial: int, now: datetime) -> bool:
        """Return True if a certificate of this name with another serial number is valid and not revoked."""
        others = (item for item in self.issued if item.name == name and int(item.serial, 16) != serial)
        return any(not item.revoked and item.expires > now for item in others)

    def revoked_serials(self) -> Mapping[int, datetime]:
        """Return the revoked serial numbers and the times of revocation."""
        times = {int(item.serial, 16): item.revoked for item in self.issued}
        return {serial: time for serial, time in times.items() if time}

    def save(self, path: Path) -> None:
        """Replace ca.toml."""
        write_atomically(path, self.to_toml())

    def to_toml(self) -> bytes:
        """Return the contents of ca.toml."""
        return tomli_w.dumps(to_plain(self)).encode()

    @classmethod
    def load(cls, path: Path) -> IssuedCertificates:
        """Read ca.toml."""
        advice = "restore it from a copy of the folder"
        try:
            found = read_document(cls, path, path.read_bytes(), SCHEMA, advice)
            found.revoked_serials()
        except OSError as error:
            raise TransportError(f"{path}: cannot be read ({error.strerror}); {advice}.") from None
        except ValueError:
            raise TransportError(f"{path}: a serial number is not hexadecimal; {advice}.") from None
        return found
