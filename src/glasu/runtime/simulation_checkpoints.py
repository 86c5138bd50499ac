"""Checkpoints of a simulation: the states of all roles after a round are one file, from which the run resumes."""

from __future__ import annotations

import json
import logging
import shutil
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from glasu.config import RunConfig
from glasu.data.party import PartyData
from glasu.errors import CheckpointError, ConfigError, TrainingError
from glasu.files import hold_folder, write_atomically
from glasu.protocol.state import ClientState, ServerState
from glasu.records import RecordError, parse_json, read_record, to_plain
from glasu.runtime.checkpointing import SUFFIX, Saver, Store
from glasu.runtime.telemetry import Cost, Telemetry, TelemetryState

RUN_FILE, COST_FILE = "run.json", "cost.json"
SHOWN_DIFFERENCES = 4
log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class SimulationState:
    """All roles of a simulation after the same round; a client that stopped early keeps its last state."""

    clients: Mapping[str, ClientState]
    server: ServerState | None
    telemetry: TelemetryState


@dataclass(frozen=True)
class RunIdentity:
    """Settings and data that decide a run. Another run cannot resume from its checkpoints."""

    settings: Mapping[str, Any]
    data: Mapping[str, str]  # digests by party


@dataclass(frozen=True)
class InterruptedCost:
    """The cost of a process that was interrupted after its last checkpoint."""

    round: int  # of that checkpoint
    cost: Cost


class SimulationCheckpoints:
    """Collects the states of all roles after a round and writes them in the background.

    Roles save from their own threads. The last role of a round starts the writing. `settle` waits until it is
    durable; the runtime calls it before a role sends its next message.
    """

    def __init__(
        self, folder: Path, config: RunConfig, parties: Sequence[PartyData], telemetry: Telemetry, *, server: bool
    ) -> None:
        """Prepare to save a run; `open` reads the folder.

        Args:
            folder: for checkpoints only; the caller holds its lock.
            config: the resolved settings.
            parties: the data of all parties.
            telemetry: saved with the roles.
            server: whether the run has a server.
        """
        self.folder, self.telemetry, self.train = folder, telemetry, config.train
        self.identity = RunIdentity(config.flatten(), {party.name: party.data_digest() for party in parties})
        self.store = Store(folder, f"a run with settings {config.digest()}", config.extensions())
        self._names: list[str | None] = [party.name for party in parties] + ([None] if server else [])
        self._saver = Saver(self.store)
        self._lock = threading.Lock()
        self._latest: dict[str | None, Any] = {}  # None: the server
        self._saved = 0  # round of the last checkpoint

    def open(self, *, fresh: bool = False) -> SimulationState | None:
        """Return the state to resume from, or None at the beginning; restore the telemetry.

        Args:
            fresh: remove earlier checkpoints and start over.
        """
        if fresh:
            removed = self.store.clear()
            (self.folder / COST_FILE).unlink(missing_ok=True)
            if removed:
                log.info("starting over: removed %s.", ", ".join(map(str, removed)))
        known: dict[int, str] = {}
        if self._holds_this_run():
            known, unused = self.store.open(self.train.checkpoint_every)
            for line in unused:
                log.warning("%s", line)
        write_atomically(self.folder / RUN_FILE, json.dumps(to_plain(self.identity), indent=1).encode())
        state = None
        if any(known):
            self._saved = max(known)
            state = self.store.load(self._saved, SimulationState)
            self._latest.update(state.clients)
            if state.server is not None:
                self._latest[None] = state.server
            self.telemetry.restore(state.telemetry)
            log.info("resuming after round %d of %d.", self._saved, self.train.num_rounds)
        interrupted = self._read(COST_FILE, InterruptedCost)
        if interrupted is not None and interrupted.round >= self._saved:
            self.telemetry.restore_cost(interrupted.cost)
        return state

    def _holds_this_run(self) -> bool:
        """Return whether the folder holds this run; refuse to mix it with another unfinished run."""
        there = self._read(RUN_FILE, RunIdentity)
        has_checkpoints = any(self.folder.glob(f"*{SUFFIX}"))
        if there is None:
            return has_checkpoints
        differences = [
            *find_differences(there.settings, to_plain(self.identity)["settings"]),
            *find_differences(there.data, self.identity.data),
        ]
        if not differences:
            return True
        if not has_checkpoints:
            (self.folder / COST_FILE).unlink(missing_ok=True)
            return False
        raise ConfigError(
            f"{self.folder}: holds an unfinished run with other settings or data: {list_differences(differences)}. "
            "Continue with those, choose another --out, or start over with --fresh, which removes its checkpoints."
        )

    def _read(self, name: str, cls: type[Any]) -> Any:
        """Read a small file of the folder, or return None if it is missing or damaged."""
        try:
            return read_record(cls, parse_json((self.folder / name).read_bytes(), name), name, finite=False)
        except (OSError, RecordError):
            return None

    def save(self, name: str | None, state: ClientState | ServerState) -> None:
        """Take the state of a role after a round; None is the server. The last role starts the writing."""
        with self._lock:
            self._latest[name] = state
            if len(self._latest) < len(self._names):
                return
            newest = max(each.round for each in self._latest.values())
            complete = all(each.round == newest or each.stopped for each in self._latest.values())
            if not complete or newest <= self._saved:
                return
            self._saved = newest
            together = SimulationState(
                clients={client: self._latest[client] for client in self._names if client is not None},
                server=self._latest.get(None),
                telemetry=self.telemetry.state(),
            )
        self._saver.save(newest, together)

    def settle(self) -> None:
        """Wait until the last checkpoint is durable; raise CheckpointError if it cannot be written."""
        self._saver.settle()

    def save_cost(self) -> None:
        """Save the cost of an interrupted process, because its repeated rounds count too."""
        interrupted = InterruptedCost(self._saved, self.telemetry.cost())
        write_atomically(self.folder / COST_FILE, json.dumps(to_plain(interrupted)).encode())

    @contextmanager
    def running(self) -> Iterator[None]:
        """Settle after the run. If it fails, save its cost; if it diverged, remove the checkpoints.

        A run that diverged would diverge again, and without checkpoints other settings can use the folder.
        """
        try:
            yield
            self.settle()
        except BaseException as error:
            self._saver.close()
            with suppress(OSError):  # show the first error, not that the cost cannot be saved
                if isinstance(error, TrainingError) and not isinstance(error, CheckpointError):
                    removed = ", ".join(map(str, self.store.clear()))
                    if removed:
                        log.info("a resumed run would fail again: removed %s. Change the settings.", removed)
                else:
                    self.save_cost()
            raise
        self._saver.close()


@contextmanager
def checkpoint_folder(folder: Path) -> Iterator[Path]:
    """Lock the folder of a run's checkpoints; remove it at the end if it has no checkpoint."""
    with hold_folder(folder):
        try:
            yield folder
        finally:
            if not any(folder.glob(f"*{SUFFIX}")):
                shutil.rmtree(folder, ignore_errors=True)


def find_differences(there: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    """Return one phrase per setting that differs."""
    return [
        f"{name} = {there.get(name)!r} there, {here.get(name)!r} here"
        for name in sorted({*there, *here})
        if there.get(name) != here.get(name)
    ]


def list_differences(differences: Sequence[str]) -> str:
    """Join the first differences in one line."""
    more = len(differences) - SHOWN_DIFFERENCES
    return "; ".join(differences[:SHOWN_DIFFERENCES]) + (f"; and {more} more" if more > 0 else "")
