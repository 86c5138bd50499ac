"""Register: what the CA remembers in ca.toml; the roster, the server's hosts, and every certificate it issued."""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import tomli_w

from glasu.errors import TransportError
from glasu.files import write_atomically
from glasu.pki.certificate import CertificateInfo

SCHEMA = 1


@dataclass(frozen=True, kw_only=True)
class Issued:
    """One certificate; a name has several of them over the years."""

    name: str
    serial: int
    expires: datetime
    revoked: datetime | None = None

    @classmethod
    def of(cls, own: CertificateInfo) -> Issued:
        assert own.name is not None
        return cls(name=own.name, serial=own.serial, expires=own.expires)


@dataclass(frozen=True, kw_only=True)
class Register:
    """The truth about a federation; the server's kit repeats the roster and what was revoked."""

    roster: tuple[str, ...]
    hosts: tuple[str, ...]
    issued: tuple[Issued, ...] = ()

    def with_issued(self, certificates: Iterable[CertificateInfo]) -> Register:
        """Enter new certificates."""
        return dataclasses.replace(self, issued=(*self.issued, *map(Issued.of, certificates)))

    def with_revoked(self, names: Iterable[str], now: datetime) -> Register:
        """Enter that no certificate issued so far to these parties is to be served."""
        gone = set(names)
        issued = (
            dataclasses.replace(item, revoked=now) if item.name in gone and not item.revoked else item
            for item in self.issued
        )
        return dataclasses.replace(self, issued=tuple(issued))

    def without(self, names: Iterable[str], now: datetime) -> Register:
        """Take parties off the roster; no certificate issued to them so far is to be served."""
        gone = set(names)
        roster = tuple(name for name in self.roster if name not in gone)
        return dataclasses.replace(self.with_revoked(gone, now), roster=roster)

    def still_good(self, name: str, but: int, now: datetime) -> bool:
        """Tell whether a certificate of this name besides the one of this serial number is neither revoked nor old."""
        others = (item for item in self.issued if item.name == name and item.serial != but)
        return any(not item.revoked and item.expires > now for item in others)

    def revoked(self) -> Mapping[int, datetime]:
        """Return the serial numbers that are not to be served, and since when."""
        return {item.serial: item.revoked for item in self.issued if item.revoked}

    def save(self, path: Path) -> None:
        """Replace ca.toml."""
        write_atomically(path, self.to_toml())

    def to_toml(self) -> bytes:
        """Return the contents of ca.toml."""
        issued = []
        for item in self.issued:
            entry: dict[str, Any] = {"name": item.name, "serial": f"{item.serial:x}", "expires": item.expires}
            issued.append({**entry, "revoked": item.revoked} if item.revoked else entry)
        content = {"schema": SCHEMA, "roster": list(self.roster), "hosts": list(self.hosts), "issued": issued}
        return tomli_w.dumps(content).encode()

    @classmethod
    def load(cls, path: Path) -> Register:
        """Read ca.toml."""
        try:
            content = tomllib.loads(path.read_text(encoding="utf-8"))
            if content["schema"] != SCHEMA:
                raise ValueError(f"schema {content['schema']!r}, but this version reads {SCHEMA}")
            issued = (Issued(**{**item, "serial": int(item["serial"], 16)}) for item in content["issued"])
            return cls(roster=tuple(content["roster"]), hosts=tuple(content["hosts"]), issued=tuple(issued))
        except (OSError, ValueError, KeyError, TypeError) as error:
            reason = f"{type(error).__name__}: {error}"
            raise TransportError(f"{path}: cannot be read ({reason}); restore it from a copy of the folder.") from None
