"""ledger.jsonl: the ledger of a party as a file. It is append-only and verified when it is opened. Torch is not loaded.

A line is written and synced before the messages of its release are sent. A crash can leave an incomplete last line. The
release of this line was not sent, because the sync had not returned. If only the newline is missing, `open_ledger` adds
it. Otherwise `open_ledger` moves the line into a `Repair` record, so nothing that was written is lost.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from glasu.errors import CheckpointError, DataError
from glasu.files import retry_without_descriptors, sync_folder, sync_handle, write_whole
from glasu.privacy.ledger import (
    LEDGER_FORMAT,
    START_OF_CHAIN,
    BrokenChainError,
    End,
    Ledger,
    LedgerError,
    LedgerRecord,
    Opening,
    Repair,
    Rule,
    read_line,
)

LEDGER = "ledger.jsonl"
LEDGERS = "ledger"  # folder with a ledger for each party, if all parties are in one process
SALT_BYTES = 32
RESTORE_LEDGER = (
    "Restore the original file, or move this file to another folder. Then a new ledger begins, and limits and epsilon "
    "count from zero."
)


class LedgerFile:
    """Stores the lines of a ledger. Nothing is written before the first `sync`."""

    def __init__(self, path: Path, *, durable: bool = True) -> None:
        """Append to a file.

        Args:
            path: the path of the file, which need not exist.
            durable: whether `sync` waits for the disk. If False, only `close` does.
        """
        self.path, self._durable = path, durable
        # The lines to write, and an unfinished write: the size of the file before it, and its content. A signal can
        # interrupt `sync` anywhere, so both change in one assignment. Otherwise lines could be written twice.
        self._state: tuple[tuple[bytes, ...], tuple[int, bytes] | None] = (), None
        self._handle: int | None = None

    def append(self, line: bytes) -> None:
        """Add a line, which the next `sync` writes."""
        lines, unfinished = self._state
        self._state = (*lines, line), unfinished

    def sync(self) -> None:
        """Write all pending lines. If the file is durable, wait until they are on disk."""
        lines, unfinished = self._state
        if not lines:
            return
        try:
            handle = self._open() if self._handle is None else self._handle
            if unfinished is not None:
                self._remove_write(handle, *unfinished)
            before, content = os.fstat(handle).st_size, b"".join(lines)
            self._state = lines, (before, content)
            try:
                write_whole(handle, content)
                if self._durable:
                    sync_handle(handle, data_only=True)
            except BaseException:
                with suppress(OSError):  # the process may end without another call, and leave an incomplete line
                    os.ftruncate(handle, before)
                raise
        except OSError as error:
            raise CheckpointError(
                f"{self.path}: the ledger cannot be written ({error.strerror}), so nothing was sent. Fix the cause and "
                "start the same command again.",
                f"its ledger cannot be written there ({error.strerror}), so it sent nothing.",
            ) from error
        self._state = (), None

    def _remove_write(self, handle: int, before: int, content: bytes) -> None:
        """Remove what an interrupted `sync` has written. Lines of another process stay in the file."""
        with self.path.open("rb") as file:
            file.seek(before)
            if content.startswith(file.read()):
                os.ftruncate(handle, before)

    def close(self) -> None:
        """Write all pending lines, wait until they are on disk, and close the file."""
        self.sync()
        if self._handle is not None:
            with suppress(OSError):
                sync_handle(self._handle)
            os.close(self._handle)
            self._handle = None

    def _open(self) -> int:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        is_new = not self.path.exists()
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
        self._handle = retry_without_descriptors(lambda: os.open(self.path, flags, 0o600))
        if is_new:
            sync_folder(self.path.parent)
        return self._handle


@dataclass(frozen=True, eq=False)
class StoredRecord:
    """A record of a ledger file."""

    number: int  # line number, from 1
    record: LedgerRecord
    chain: str  # the chain value after this record


@dataclass(frozen=True)
class Fragment:
    """An incomplete last line."""

    start: int  # position of its first byte
    content: bytes


def read_ledger_file(path: Path) -> Iterator[StoredRecord | Fragment]:
    """Yield the records of a file, and an incomplete last line if there is one.

    Raises:
        LedgerError: a record was changed, moved or omitted.
        DataError: the file cannot be read.
    """
    chain, position = START_OF_CHAIN, 0
    try:
        with retry_without_descriptors(lambda: path.open("rb")) as file:
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):
                    yield Fragment(position, line)
                    return
                record, chain = read_line(line, chain, f"{path}, line {number}")
                if (number == 1) is not isinstance(record, Opening):
                    raise BrokenChainError(
                        f"{path}, line {number}: a ledger must have one opening, as its first record."
                    )
                yield StoredRecord(number, record, chain.hex())
                position += len(line)
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}); restore it.") from None


def open_ledger(
    path: Path,
    party: str,
    rules: Sequence[Rule] = (),
    *,
    policy: str = "",
    durable: bool = True,
) -> Ledger:
    """Open the ledger in a file, restore the totals of its last run, and pass all its entries to the rules.

    An incomplete last line is repaired at once. Nothing else is written before the first sync of the ledger.

    Args:
        path: the path of the file; a new ledger begins if it does not exist.
        party: the owner; the ledger of another party is refused.
        rules: the rules that check every release.
        policy: the SHA-256 of the party's policy file; empty if there is none.
        durable: whether a sync waits for the disk.
    """
    sink = LedgerFile(path, durable=durable)
    ledger = Ledger(sink, rules, time.time, policy)
    fragment = None
    try:
        for found in read_ledger_file(path) if path.exists() else ():
            if isinstance(found, Fragment):
                fragment = found
                break
            ledger.length, ledger.chain = found.number, bytes.fromhex(found.chain)
            if isinstance(found.record, Opening) and found.record.party != party:
                owner = found.record.party
                raise LedgerError(f"{path}: is the ledger of party {owner!r}, not of {party!r}; choose another folder.")
            ledger.count_record(found.record)
    except BrokenChainError as error:
        raise LedgerError(f"{error} {RESTORE_LEDGER}") from None
    if fragment is not None:
        _repair(path, fragment, ledger)
    if ledger.length == 0:
        ledger.write(Opening(format=LEDGER_FORMAT, party=party, salt=secrets.token_bytes(SALT_BYTES)))
    return ledger


def _repair(path: Path, fragment: Fragment, ledger: Ledger) -> None:
    """Complete the last line, or move it into a `Repair` record."""
    line = fragment.content + b"\n"
    try:
        record, chain = read_line(line, ledger.chain, f"{path}, line {ledger.length + 1}")
    except LedgerError:
        os.truncate(path, fragment.start)
        if fragment.start:
            ledger.write(Repair(fragment=fragment.content))
    else:
        with path.open("ab") as file:
            file.write(b"\n")
        ledger.length, ledger.chain = ledger.length + 1, chain
        ledger.count_record(record)
    ledger.sync()


def close_ledger(ledger: Ledger) -> None:
    """Close the file of a ledger, if it has one."""
    if isinstance(ledger.sink, LedgerFile):
        ledger.sink.close()


@contextmanager
def keep_run(ledgers: Mapping[str, Ledger]) -> Iterator[None]:
    """Exchange the heads of all ledgers of one process before and after a run, record the end, and close the files.

    The head of a ledger is its last chain value. If the block fails, the files are closed, and the run counts as
    unfinished.
    """
    try:
        _exchange_heads(ledgers)
        yield
        for ledger in ledgers.values():
            ledger.write(End())
        _exchange_heads(ledgers)
    finally:
        for ledger in ledgers.values():
            close_ledger(ledger)


def _exchange_heads(ledgers: Mapping[str, Ledger]) -> None:
    """Sync the ledgers of one process, and record in each ledger the heads of all other ledgers."""
    for ledger in ledgers.values():
        ledger.sync()
    heads = {name: ledger.head for name, ledger in ledgers.items()}
    for name, ledger in ledgers.items():
        ledger.record_heads({other: head for other, head in heads.items() if other != name})


def list_ledger_files(folder: Path) -> Mapping[str, Path]:
    """Return {party name: ledger file} of a run's folder, sorted by name.

    The folder may belong to one party. Then the name of its ledger is the empty string.
    """
    found = {path.stem: path for path in sorted((folder / LEDGERS).glob("*.jsonl"))}
    if (folder / LEDGER).is_file():
        found[""] = folder / LEDGER
    return found
