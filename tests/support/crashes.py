"""Stop a function at a chosen rename, as a crash of the process would, without changing the code under test."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class Crash(BaseException):
    """Stands for a crash of the process."""


class _Countdown:
    """Counts renames down while it is armed; the audit hook itself cannot be removed."""

    def __init__(self) -> None:
        self.left: int | None = None
        self.of_folders = False

    def hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.left is None or event != "os.rename":
            return
        if self.of_folders and not os.path.isdir(arguments[0]):  # noqa: PTH112
            return
        if self.left == 0:
            self.left = None
            raise Crash
        self.left -= 1


_countdown = _Countdown()
sys.addaudithook(_countdown.hook)


@contextmanager
def crash_at_rename(number: int, *, of_folders: bool = False) -> Iterator[None]:
    """Let `number` renames succeed and stop the block at the next one; fail if the block ends before."""
    _countdown.left, _countdown.of_folders = number, of_folders
    try:
        yield
    except Crash:
        return
    finally:
        _countdown.left = None
    raise AssertionError(f"the block has at most {number} renames")
