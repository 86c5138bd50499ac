"""A party's folder during a training: joining.json, and the checkpoints of its run."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

from glasu.errors import CheckpointError, DataError
from glasu.network.control import ProposedAttempt
from glasu.network.fencing import note_welcome
from glasu.network.log_lines import printable
from glasu.network.options import JoinOptions
from glasu.network.run_folder import CHECKPOINTS, check_party_folder, open_joining
from glasu.protocol.client import Client
from glasu.protocol.state import ClientState
from glasu.registry import Extension
from glasu.runtime.checkpointing import START, Saver, Store
from glasu.runtime.telemetry import Cost


@dataclass(frozen=True, eq=False)
class PartyCheckpoint:
    """A checkpoint of a party."""

    client: ClientState
    cost: Cost


class PartyRun:
    """The folder of one party. It belongs to a run from the first attempt on."""

    def __init__(self, options: JoinOptions) -> None:
        """Read the folder.

        Raises:
            FolderError: the folder belongs to another run, or the run began with other data.
        """
        self._options = options
        self.state = open_joining(options.out, options.party.name)
        self.fresh = options.fresh  # until the run begins: only then is the earlier content removed
        self._data = options.party.data_digest()
        if not self.fresh:
            check_party_folder(options.out, self.state.value, self._data, options.run)
        self._saver: Saver | None = None  # None until the run begins

    @property
    def is_finished(self) -> bool:
        """Whether the results of this party are written, by this process or an earlier one."""
        return not self.fresh and self.state.value.finished is not None

    @property
    def is_closed(self) -> bool:
        """Whether an earlier process heard that the run is finished everywhere."""
        return not self.fresh and self.state.value.closed

    def rounds(self) -> dict[int, str]:
        """Return the intact checkpoints of this run and their digests."""
        self.settle()
        if self.fresh or self.state.value.run is None:
            return {0: START}
        damaged: list[str] = []
        rounds = self._store().digests(damaged)
        for line in damaged:
            self._options.log.warning("not used: %s", line)
        return rounds

    def start(self, client: Client) -> None:
        """Let the folder belong to the run, which begins now; with --fresh, remove the earlier content."""
        if self._saver is not None:
            return
        if self.fresh:
            removed = self._store().clear()
            if removed:
                self._options.log.info("starting over: removed %s.", ", ".join(map(str, removed)))
            self.state.update(finished=None, closed=False)
        self.state.update(run=client.identity.run.hex(), digest=client.config.digest(), data=self._data)
        note_welcome(self.state, begun=True)
        self.fresh = False
        store = self._store(client.config.extensions())
        store.remove_partial_files()
        self._saver = Saver(store)

    def load(self, attempt: ProposedAttempt) -> PartyCheckpoint:
        """Load the checkpoint that the server proposed, if it is still the same."""
        store = self._store()
        found = store.digests().get(attempt.round)
        if found == attempt.digest:
            with suppress(DataError):  # it was intact a moment ago
                return store.load(attempt.round, PartyCheckpoint)
        raise CheckpointError(
            f"party {self._options.party.name!r}: the checkpoint of round {attempt.round} is missing or has changed: "
            f"expected SHA-256 {printable(attempt.digest, 64)}, found {found or 'none'}. Restore its --out folder, or "
            "start over with --fresh everywhere."
        )

    def save(self, state: ClientState, cost: Cost) -> None:
        """Start to write a checkpoint."""
        assert self._saver is not None  # a script runs only after `start`
        self._saver.save(state.round, PartyCheckpoint(state, cost))

    def settle(self) -> None:
        """Wait until the last checkpoint is durable."""
        if self._saver is not None:
            self._saver.settle()

    def close(self, *, finished: bool) -> None:
        """Stop the writing thread; after a finished run, remove the checkpoints."""
        if self._saver is not None:
            self._saver.close()
        if finished:
            self.state.update(closed=True)
            self._store().clear()

    def _store(self, extensions: tuple[Extension, ...] = ()) -> Store:
        """Return the checkpoints of the run that joining.json names; `extensions` is for writing."""
        owner = f"party {self._options.party.name} in run {self.state.value.run}"
        return Store(self._options.out / CHECKPOINTS, owner, extensions)
