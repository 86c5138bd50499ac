"""Save the states of all roles of a simulation together, and find the state from which a simulation resumes."""

from __future__ import annotations

import json
import logging
import shutil
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from glasu.config import RunConfig, list_candidates
from glasu.errors import CheckpointError, ConfigError, TrainingError
from glasu.files import hold_folder, write_atomically
from glasu.protocol.state import ClientState, ServerState
from glasu.records import RecordError, parse_json, read_record, to_plain
from glasu.runtime.checkpointing import SUFFIX, WARM, Saver, Store
from glasu.runtime.output_dir import list_differences
from glasu.runtime.telemetry import Cost, Telemetry, TelemetryState

RUN_FILE = "run.json"
log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class SimulationState:
    """The states of all roles after the same round. For a client that stopped early, this is its last state."""

    clients: Mapping[str, ClientState]
    server: ServerState | None
    telemetry: TelemetryState


@dataclass(frozen=True)
class RunFile:
    """The content of run.json: the inputs that determine a run, and the cost of an interrupted process.

    Only a run with the same inputs can resume from the checkpoints in this folder.
    """

    settings: Mapping[str, Any]
    data: Mapping[str, str]  # digests by party
    secrets: Mapping[str, str] = field(default_factory=dict)  # commitments by party; empty if the run has no secrets
    round: int = 0  # round of the last checkpoint of the interrupted process
    cost: Cost | None = None

    def to_names(self) -> dict[str, Any]:
        """Return the inputs by name, as plain values."""
        data = {f"data of {party}": digest for party, digest in self.data.items()}
        secrets = {f"secret of {party}": commitment for party, commitment in self.secrets.items()}
        return {**to_plain(self)["settings"], **data, **secrets}


class SimulationCheckpoints:
    """Collects the states of all roles after a round and writes them in the background.

    Roles save from their own threads. The last role that saves a round starts the writing. The runtime calls
    `wait_until_durable` before a role sends its next message.
    """

    def __init__(
        self,
        folder: Path,
        config: RunConfig,
        data: Mapping[str, str],
        telemetry: Telemetry,
        *,
        server: bool,
        secrets: Mapping[str, str] | None = None,
    ) -> None:
        """Prepare to save a run; `open` reads the folder.

        Args:
            folder: a folder for checkpoints only; the caller has locked it.
            config: the resolved settings.
            data: digests of the parties' data, by party, in client order.
            telemetry: the telemetry, which is saved with the roles.
            server: whether a server takes part in the rounds, so that it saves its state.
            secrets: commitments of the parties' secrets, by party; None if no secrets were given.
        """
        self.config, self.telemetry = config, telemetry
        self._run = RunFile(config.flatten(), data, secrets or {})
        owner = f"a run with settings {config.digest()}"
        self._saver = Saver(Store(SimulationState, folder, owner, config.extensions()))
        self._warm_store = Store(SimulationState, folder, owner, config.extensions(), kind=WARM)
        self._names: list[str | None] = [*data, None] if server else [*data]
        self._lock = threading.Lock()
        self._latest: dict[str | None, Any] = {}  # the last state by party; the key None is the server
        self._saved = 0  # round of the last checkpoint
        self._saved_steps = 0  # number of warm steps in the last checkpoint of the warm start

    @property
    def store(self) -> Store[SimulationState]:
        """The checkpoints after rounds."""
        return self._saver.store

    @property
    def folder(self) -> Path:
        return self.store.folder

    def open(self, *, fresh: bool = False) -> SimulationState | None:
        """Return the state to resume from, or None if there is no checkpoint. Restore the telemetry.

        Args:
            fresh: remove earlier checkpoints and start over.
        """
        if fresh:
            removed = [*self.store.clear(), *self._warm_store.clear()]
            if removed:
                log.warning("starting over: removed %s.", ", ".join(map(str, removed)))
        elif (there := self._find_this_run()) is not None:
            self._run = there
        known = self.store.open(self.config.train.checkpoint_every, log)
        self._write_run()
        self._warm_store.remove_partial_files()
        self._saved, warm = max(known, default=0), max(self._warm_store.digests(log), default=0)
        state = None
        if self._saved:
            state = self.store.load(self._saved)
            progress = next(iter(state.clients.values())).progress
            config = self.config
            if progress.race is not None:  # candidates of a preset differ in the number of rounds
                config = list_candidates(config)[progress.race.candidate]
            log.info("resuming after %s.", progress.describe_position(progress.end(config.train)))
        elif warm:
            self._saved_steps, state = warm, self._warm_store.load(warm)
            log.info("resuming after warm step %d of %d.", warm, self.config.train.warm_start)
        if state is not None:
            self._latest.update(state.clients)
            if state.server is not None:
                self._latest[None] = state.server
            self.telemetry.restore(state.telemetry)
        if self._run.cost is not None and self._run.round >= self._saved:
            self.telemetry.restore_cost(self._run.cost)
        return state

    def _find_this_run(self) -> RunFile | None:
        """Return run.json if it is intact and has the inputs of this run, or else None.

        Raise ConfigError if the inputs differ and the folder contains checkpoints of the other run.
        """
        try:
            content = parse_json((self.folder / RUN_FILE).read_bytes(), RUN_FILE)
            there = read_record(RunFile, content, RUN_FILE, finite=False)
        except (OSError, RecordError):
            return None
        before, now = there.to_names(), self._run.to_names()
        pairs = {name: (before.get(name), now.get(name)) for name in sorted({*before, *now})}
        differences = {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
        if not differences:
            return there
        if not any(self.folder.glob(f"*{SUFFIX}")):
            return None
        raise ConfigError(
            f"{self.folder}: holds an unfinished run with other settings, data or secrets: "
            f"{list_differences(differences)}. Continue with the values of that run, choose another --out, or start "
            "over with --fresh, which removes its checkpoints."
        )

    def _write_run(self) -> None:
        write_atomically(self.folder / RUN_FILE, json.dumps(to_plain(self._run), indent=1).encode())

    def save(self, name: str | None, state: ClientState | ServerState) -> None:
        """Store the state of a role after a round. When all roles have saved a round, start to write its checkpoint.

        Args:
            name: the party; None is the server.
            state: the state.
        """
        with self._lock:
            self._latest[name] = state
            if state.progress.round == 0 and isinstance(state, ClientState) and state.progress.warm_steps:
                self._save_warm(state.progress.warm_steps)
                return
            if len(self._latest) < len(self._names):
                return
            newest = max(each.progress.position for each in self._latest.values())
            # A role that has stopped saves nothing more, unless it continues with the next candidate of a race.
            earlier = max(each.progress.earlier_rounds for each in self._latest.values())
            complete = all(
                each.progress.position == newest or (each.progress.stopped and each.progress.earlier_rounds == earlier)
                for each in self._latest.values()
            )
            if not complete or newest <= self._saved:
                return
            self._saved = newest
            together = self._join_states()
        self._saver.save(newest, together)

    def _save_warm(self, steps: int) -> None:
        """Save all clients once each has taken this number of warm steps. The server has nothing to save yet."""
        clients = [self._latest.get(name) for name in self._names if name is not None]
        complete = all(each is not None and each.progress.warm_steps == steps for each in clients)
        if complete and steps > self._saved_steps:
            self._saved_steps = steps
            self._saver.save(steps, self._join_states(), self._warm_store)

    def _join_states(self) -> SimulationState:
        return SimulationState(
            clients={client: self._latest[client] for client in self._names if client is not None},
            server=self._latest.get(None),
            telemetry=self.telemetry.state(),
        )

    def wait_until_durable(self) -> None:
        """Wait until the last checkpoint is durable; raise CheckpointError if it cannot be written."""
        self._saver.wait_until_durable()

    @contextmanager
    def wait_at_exit(self) -> Iterator[None]:
        """Wait for the last checkpoint after the block. If the block fails, save the cost of the run instead.

        If the run diverged, remove its checkpoints, because a resumed run would diverge again. After that, a run with
        changed settings can use the folder.
        """
        try:
            yield
            self.wait_until_durable()
        except BaseException as error:
            self._saver.close()
            with suppress(OSError):  # report the original error even if the cost cannot be saved
                if isinstance(error, TrainingError) and not isinstance(error, CheckpointError):
                    removed = ", ".join(map(str, [*self.store.clear(), *self._warm_store.clear()]))
                    if removed:
                        log.warning("a resumed run would fail again: removed %s. Change the settings.", removed)
                else:  # the report of the resumed run includes the cost of rounds that it repeats
                    self._run = replace(self._run, round=self._saved, cost=self.telemetry.cost())
                    self._write_run()
            raise
        self._saver.close()


@contextmanager
def hold_checkpoint_folder(folder: Path) -> Iterator[Path]:
    """Lock the folder of a run's checkpoints. At the end, remove the folder if it contains no checkpoint."""
    with hold_folder(folder):
        try:
            yield folder
        finally:
            if not any(folder.glob(f"*{SUFFIX}")):
                shutil.rmtree(folder, ignore_errors=True)
