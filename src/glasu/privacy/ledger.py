"""The ledger of releases: their kind, number of rows, bytes and protection."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any

from glasu.wire.message_key import Key


@dataclass
class Ledger:
    """Totals by kind of release, and a hash chain over all releases.

    The size of the totals does not grow with the run. Two ledgers with the same head recorded the same releases.
    """

    head: bytes = bytes(32)
    totals: dict[tuple[str, str, int, str], tuple[int, int, int]] = field(default_factory=dict)

    def record(self, kind: str, key: Key, *, rows: int, size: int, protection: str) -> None:
        """Record one release of `rows` rows in `size` bytes."""
        entry = f"{kind}|{rows}|{size}|{protection}".encode()
        self.head = hashlib.sha256(self.head + key.pack() + entry).digest()
        place = key.phase.reported, kind, key.layer, protection
        releases, all_rows, all_bytes = self.totals.get(place, (0, 0, 0))
        self.totals[place] = releases + 1, all_rows + rows, all_bytes + size

    def copy(self) -> Ledger:
        """Return a copy that later releases do not change."""
        return Ledger(self.head, dict(self.totals))

    def rows(self) -> list[dict[str, Any]]:
        """Return the totals, one dictionary per kind of release."""
        return [
            {
                "phase": phase,
                "kind": kind,
                "layer": layer,
                "protection": protection,
                "releases": releases,
                "rows": rows,
                "bytes": size,
            }
            for (phase, kind, layer, protection), (releases, rows, size) in sorted(self.totals.items())
        ]
