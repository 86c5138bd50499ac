"""The disclosure ledger: what left a client, how many rows and bytes of it, and under which protection."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any

from glasu.wire.message_key import Key


@dataclass
class Ledger:
    """Totals by kind of release, and a hash chain over every single one.

    The totals stay small however long a run is; two ledgers with one head have entered the same releases.
    """

    head: bytes = bytes(32)
    totals: dict[tuple[str, str, int, str], list[int]] = field(default_factory=dict)

    def enter(self, kind: str, key: Key, *, rows: int, size: int, protection: str) -> None:
        """Enter one release of `rows` rows in `size` bytes."""
        entry = f"{kind}|{rows}|{size}|{protection}".encode()
        self.head = hashlib.sha256(self.head + key.pack() + entry).digest()
        total = self.totals.setdefault((key.phase.reported, kind, key.layer, protection), [0, 0, 0])
        total[0] += 1
        total[1] += rows
        total[2] += size

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
