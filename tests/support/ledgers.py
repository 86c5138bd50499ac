"""A sink in memory, and a reader of ledger files."""

from __future__ import annotations

from pathlib import Path

from glasu.privacy.ledger import START_OF_CHAIN, Entry, LedgerRecord, read_line
from glasu.protocol.messages import Message
from glasu.runtime.ledger_file import read_ledger_file


class Lines:
    """Keeps the lines of a ledger."""

    def __init__(self) -> None:
        self.lines: list[bytes] = []
        self.synced = 0  # lines that were durable at the last sync

    def append(self, line: bytes) -> None:
        self.lines.append(line)

    def sync(self) -> None:
        self.synced = len(self.lines)

    def read(self) -> list[LedgerRecord]:
        """Return the records; refuse a broken chain."""
        records, chain = [], START_OF_CHAIN
        for number, line in enumerate(self.lines, 1):
            record, chain = read_line(line, chain, f"line {number}")
            records.append(record)
        return records


def list_entries(path: Path) -> list[Entry]:
    """Return the releases in a ledger file; refuse a broken chain."""
    return [found.record for found in read_ledger_file(path) if isinstance(getattr(found, "record", None), Entry)]


class Notes:
    """Notes every message of a run in one process, in place of a network."""

    def __init__(self) -> None:
        self.messages: list[Message] = []

    def carry(self, message: Message) -> Message:
        self.messages.append(message)
        return message
