"""A role in a thread of this process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any


class Killed(BaseException):
    """Ends a role as a crash would, without a message."""


class Role(threading.Thread):
    """A role in a separate thread, with its result or error."""

    def __init__(self, name: str, work: Callable[[], Any]) -> None:
        super().__init__(name=name, daemon=True)
        self._work, self._result = work, None
        self._error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self._result = self._work()
        except BaseException as error:
            self._error = error

    def error(self, seconds: float = 120) -> BaseException | None:
        """Wait for the end and return the error, if there was one."""
        self.join(seconds)
        assert not self.is_alive(), f"{self.name} hangs"
        return self._error

    def outcome(self, seconds: float = 120) -> Any:
        """Wait for the end and return the result, or raise the error."""
        if (error := self.error(seconds)) is not None:
            raise error
        return self._result
