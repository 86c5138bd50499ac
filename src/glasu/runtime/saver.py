"""Write checkpoints while the computation goes on; whoever sends next waits for them."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

from glasu.config import TrainConfig
from glasu.runtime.checkpoint import Store
from glasu.runtime.states import Arrays, Facts


class Role(Protocol):
    """A client or the server: something with a state between rounds."""

    round: int
    stopped: bool

    def state(self) -> Any: ...

    def restore(self, state: Any) -> None: ...


def is_due(role: Role, train: TrainConfig) -> bool:
    """Tell whether a role that has just finished a round is to be saved."""
    every = train.checkpoint_every
    return every > 0 and (role.round % every == 0 or role.round == train.num_rounds or role.stopped)


class Saver:
    """One checkpoint at a time is under way; `settle` returns when it is durable."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self._writer = ThreadPoolExecutor(1, "glasu-checkpoint")
        self._writing: Future[str] | None = None

    def save(self, round_index: int, state: tuple[Arrays, Facts]) -> None:
        """Begin to write the state after so many rounds."""
        self.settle()
        self._writing = self._writer.submit(self.store.save, round_index, *state)

    def settle(self) -> None:
        """Wait until the last checkpoint is durable; raise where it could not be written."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def close(self) -> None:
        """Let no thread outlive the run."""
        self._writer.shutdown(wait=True)
