"""Write checkpoints while the computation goes on; whoever sends next waits for them."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

from glasu.runtime.checkpoint import Store
from glasu.runtime.states import Arrays, Facts


class RoleProgress(Protocol):
    """The round and the end of a role."""

    round: int
    stopped: bool


class Role(Protocol):
    """A client or the server."""

    @property
    def progress(self) -> RoleProgress: ...

    def state(self) -> Any: ...

    def restore(self, state: Any) -> None: ...


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
