"""A sink in memory, to look at the lines of a ledger."""

from __future__ import annotations

from glasu.privacy.ledger import START_OF_CHAIN, Record, read_line


class Lines:
    """Keeps the lines of a ledger."""

    def __init__(self) -> None:
        self.lines: list[bytes] = []
        self.synced = 0  # lines that were durable at the last sync

    def append(self, line: bytes) -> None:
        self.lines.append(line)

    def sync(self) -> None:
        self.synced = len(self.lines)

    def read(self) -> list[Record]:
        """Return the records; refuse a broken chain."""
        records, chain = [], START_OF_CHAIN
        for number, line in enumerate(self.lines, 1):
            record, chain = read_line(line, chain, f"line {number}")
            records.append(record)
        return records
