"""The checkpoints of a party in a training run over the network."""

from __future__ import annotations

import logging
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from glasu.errors import CheckpointError, DataError
from glasu.network.log_lines import make_printable
from glasu.network.state_file import JoiningRecord, StateFile
from glasu.protocol.client import Client
from glasu.protocol.state import ClientState
from glasu.runtime.checkpointing import ROUND, START, WARM, Saver, Store
from glasu.runtime.telemetry import TelemetryState

ALONE = "alone"  # subfolder of the checkpoint folder


@dataclass(frozen=True, eq=False)
class PartyCheckpoint:
    """A checkpoint of a party."""

    client: ClientState
    telemetry: TelemetryState  # contains evaluations only if the scores stay at the parties


class PartyCheckpoints:
    """The checkpoints of the run that joining.json names.

    There are three kinds:

    - checkpoints of rounds: the party states them in the handshake, and the server proposes one of them;
    - checkpoints of the warm start: only the party uses them, because it has not sent any message yet;
    - checkpoints of a party that trains alone, in the subfolder ALONE: only the party uses them, because it sends no
      message in its rounds.
    """

    def __init__(self, folder: Path, state: StateFile[JoiningRecord], log: logging.Logger) -> None:
        """Nothing is read or written.

        Args:
            folder: the folder of the checkpoints.
            state: joining.json.
            log: receives a warning about each damaged checkpoint.
        """
        self._folder, self._state, self._log = folder, state, log
        self._client: Client | None = None
        self._saver: Saver[PartyCheckpoint] | None = None

    @property
    def is_open(self) -> bool:
        """Whether `open` was called."""
        return self._saver is not None

    def list_rounds(self) -> dict[int, str]:
        """Return {round: digest} of the intact checkpoints of rounds."""
        self.wait_until_durable()
        return {0: START} if self._state.value.run is None else self._store().digests(self._log)

    def clear(self) -> list[Path]:
        """Remove all checkpoints and return their paths."""
        return [path for store in self._list_stores() for path in store.clear()]

    def open(self, client: Client) -> None:
        """Prepare to write checkpoints of a client.

        Call this after joining.json names the run, because every checkpoint contains its id.
        """
        self._client = client
        for store in self._list_stores():
            store.remove_partial_files()
        self._saver = Saver(self._store(ALONE if client.is_alone else ""))

    def load_own(self) -> PartyCheckpoint | None:
        """Return the last checkpoint before the party's first message; None if there is none."""
        assert self._client is not None
        store = self._store(ALONE) if self._client.is_alone else self._store(kind=WARM)
        last = max(store.digests(self._log), default=0)
        return store.load(last) if last else None

    def load_round(self, round_index: int, digest: str | None) -> PartyCheckpoint:
        """Load the checkpoint of a round. Refuse it if the file is missing or does not have the digest."""
        store = self._store()
        found = store.digests().get(round_index)
        if found == digest:
            with suppress(DataError):  # raised if the file was damaged after the party stated it
                return store.load(round_index)
        raise CheckpointError(
            f"party {self._state.value.party!r}: the checkpoint of round {round_index} is missing or has changed: "
            f"expected SHA-256 {make_printable(digest, 64)}, found {found or 'none'}. Restore its --out folder, or "
            "start over with --fresh everywhere."
        )

    def save(self, checkpoint: PartyCheckpoint) -> None:
        """Start to write a checkpoint."""
        assert self._saver is not None  # a script runs only after `open`
        progress = checkpoint.client.progress
        if progress.warm_steps and not progress.round:
            self._saver.save(progress.warm_steps, checkpoint, self._store(kind=WARM))
        else:
            self._saver.save(progress.position, checkpoint)

    def wait_until_durable(self) -> None:
        """Wait until the last checkpoint is durable."""
        if self._saver is not None:
            self._saver.wait_until_durable()

    def close(self) -> None:
        """Stop the thread that writes checkpoints."""
        if self._saver is not None:
            self._saver.close()

    def _list_stores(self) -> list[Store[PartyCheckpoint]]:
        return [self._store(), self._store(ALONE), self._store(kind=WARM)]

    def _store(self, folder: str = "", kind: str = ROUND) -> Store[PartyCheckpoint]:
        """Return the checkpoints of one kind."""
        record = self._state.value
        owner = f"party {record.party} in run {record.run}"
        extensions = () if self._client is None else self._client.config.extensions()  # only `save` needs them
        return Store(PartyCheckpoint, self._folder / folder, owner, extensions, kind=kind)
