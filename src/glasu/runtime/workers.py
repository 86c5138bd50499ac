"""Run functions in background threads so that an interrupt of the main thread cannot leave a lock held.

Ctrl-C and SIGTERM raise an exception in the main thread, between any two of its instructions. The locks of
`concurrent.futures` are written in Python. If the exception arrives after such a lock was taken and before its `with`
block begins, the lock is never released, and the program waits for its threads forever. `SimpleQueue` is written in C,
so it has no such moment.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from queue import SimpleQueue
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

T = TypeVar("T")


class PendingResult(Generic[T]):
    """A function that runs, or will run, in another thread."""

    def __init__(self, function: Callable[..., T], arguments: tuple[Any, ...]) -> None:
        self._function, self._arguments = function, arguments
        self._outcome: SimpleQueue[Callable[[], T]] = SimpleQueue()

    def run(self) -> None:
        """Run the function and store its result or its exception."""
        try:
            result = self._function(*self._arguments)
        except BaseException as error:
            self._outcome.put(lambda error=error: _raise(error))  # type: ignore[misc]  # a default binds the error
        else:
            self._outcome.put(lambda: result)

    def await_outcome(self) -> Callable[[], T]:
        """Wait for the end; return a function that returns the result or raises the exception. Call this once."""
        return self._outcome.get()

    def wait(self) -> T:
        """Wait for the result and return it, or raise the exception of the function. Call this once."""
        return self.await_outcome()()


class Workers:
    """Threads that run functions in the order in which they are submitted. A `with` block closes them."""

    def __init__(self, count: int, name: str, prepare: Callable[[], None] | None = None) -> None:
        """Prepare the threads; they start when functions are submitted.

        Args:
            count: the number of threads.
            name: the prefix of the threads' names.
            prepare: called in each thread before the first function.
        """
        self._count, self._name, self._prepare = count, name, prepare
        self._waiting: SimpleQueue[PendingResult[Any] | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []

    def submit(self, function: Callable[..., T], *arguments: Any) -> PendingResult[T]:
        """Run a function in the next free thread."""
        pending = PendingResult(function, arguments)
        self._waiting.put(pending)
        if len(self._threads) < self._count:
            thread = threading.Thread(target=self._run, name=f"{self._name}_{len(self._threads)}", daemon=True)
            thread.start()
            self._threads.append(thread)
        return pending

    def map(self, function: Callable[..., T], *arguments: Iterable[Any]) -> list[T]:
        """Return the same results as the built-in `map`, as a list. The calls run in parallel.

        If calls fail, the first exception is raised after all calls have ended. So no client is still computing when
        the caller closes the client's files.
        """
        pending = [self.submit(function, *each) for each in zip(*arguments, strict=True)]
        outcomes = [each.await_outcome() for each in pending]
        return [outcome() for outcome in outcomes]

    def close(self) -> None:
        """Wait for all submitted functions, then end the threads."""
        for _ in self._threads:
            self._waiting.put(None)
        for thread in self._threads:
            thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run(self) -> None:
        if self._prepare is not None:
            self._prepare()
        while (pending := self._waiting.get()) is not None:
            pending.run()
            del pending  # otherwise the last result would stay in memory until the next function


def _raise(error: BaseException) -> Any:
    raise error
