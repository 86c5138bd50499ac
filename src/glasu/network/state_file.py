"""State files: records that outlive the process of a role. A file contains one record and is replaced as a whole."""

from __future__ import annotations

import dataclasses
import json
import threading
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

from glasu.errors import CheckpointError, DataError
from glasu.files import write_atomically
from glasu.network.handshake import Process, ResultPayload
from glasu.privacy.ledger import LedgerHead
from glasu.records import FlatSettings, RecordError, parse_json, read_record, to_plain

RecordT = TypeVar("RecordT", bound="ServingRecord | JoiningRecord")


@dataclass(frozen=True, kw_only=True)
class ServingRecord:
    """The run of a server, as recorded in serving.json, predicting.json or aligning.json."""

    run: str | None = None
    digest: str | None = None  # digest of the settings
    settings: FlatSettings = field(default_factory=dict)  # `RunConfig.flatten()`
    roster: tuple[str, ...] = ()
    attempt: int = 0  # number of the last attempt
    processes: Mapping[str, Process] = field(default_factory=dict)  # the last admitted process, by party
    closed: bool = False  # the run is finished
    ledger_scope: str = ""  # the training that `ledgers` belongs to; empty in an alignment
    ledgers: Mapping[str, LedgerHead] = field(default_factory=dict)  # the last ledger head that each party stated

    @property
    def has_begun(self) -> bool:
        """Whether a party has joined the run. From then on, the settings of the run are fixed."""
        return bool(self.processes) or self.attempt > 0 or self.closed


@dataclass(frozen=True, kw_only=True)
class JoiningRecord:
    """A party's part of a run, as recorded in joining.json, or in aligning.json next to the party's tables."""

    party: str
    incarnation: int = 0  # counts the starts of the command in this folder
    starts: tuple[str, ...] = ()  # names of the last processes, the current one last
    admitted: tuple[str, ...] = ()  # names of processes that a server has admitted
    run: str | None = None
    digest: str | None = None  # digest of the settings
    data: str | None = None  # digest of the party's data
    secret: str | None = None  # commitment to the party's secret, see `Secret.commitment`
    finished: ResultPayload | None = None  # set once the party's results are written
    closed: bool = False  # whether the server's goodbye was received


STARTS = ("incarnation", "starts", "admitted")  # fields of `JoiningRecord` that do not belong to a single run


class StateFile(Generic[RecordT]):
    """A record in a file. Every change is durable before `update` returns.

    Any thread may call the methods. A change reads the record, writes the file and replaces the record under one lock;
    otherwise one of two concurrent changes could overwrite the other. `roster.py` describes the lock order.
    """

    def __init__(self, path: Path, initial: RecordT) -> None:
        """Read the file. If there is no file, the record is `initial`.

        Raises:
            DataError: the file cannot be read, or its content is not a record of this kind.
        """
        self._path, self._initial = path, initial
        self._old: dict[str, Any] = {}  # values that `start_over` has reset in memory, but not in the file
        self._lock = threading.Lock()
        self.value = _read(path, initial)

    @property
    def starts_over(self) -> bool:
        """Whether the file still contains values that `start_over` has reset in memory."""
        return bool(self._old)

    def update(self, **changes: Any) -> None:
        """Change some fields. The change is durable, except for fields that `start_over` has reset."""
        with self._lock:
            changed = dataclasses.replace(self.value, **changes)
            if not changes.keys() <= self._old.keys():
                self._write(dataclasses.replace(changed, **self._old))
            self.value = changed

    def start_over(self, keep: Collection[str] = ()) -> None:
        """Reset all fields except `keep` in memory. The file keeps the old values until `write_pending`."""
        with self._lock:
            old = vars(self.value)
            self._old = {name: old[name] for name in old if name not in keep}
            self.value = dataclasses.replace(self._initial, **{name: old[name] for name in keep})

    def write_pending(self) -> None:
        """Write the fields that `start_over` has reset."""
        with self._lock:
            if self._old:
                self._write(self.value)
                self._old = {}

    def _write(self, record: RecordT) -> None:
        write_named(self._path, json.dumps(to_plain(record), indent=1).encode(), mode=0o600)


def write_named(path: Path, content: bytes, mode: int = 0o644) -> None:
    """Write a file atomically. An error, for example of a full disk, names the file."""
    try:
        write_atomically(path, content, mode)
    except OSError as error:
        raise CheckpointError(
            f"{path}: cannot be written ({error.strerror}). Fix that and start the same command again.",
            f"{path.name} cannot be written there ({error.strerror}).",
        ) from error


def _read(path: Path, initial: RecordT) -> RecordT:
    try:
        return read_record(type(initial), parse_json(path.read_bytes(), str(path)), str(path))
    except FileNotFoundError:
        return initial
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}). Fix that or choose another --out.") from None
    except RecordError as error:
        raise DataError(
            f"{str(error).rstrip('.')}. The file is damaged, or another version of GLASU wrote it. Restore it, or "
            "start over with another --out."
        ) from None
