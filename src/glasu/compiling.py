"""Compile numerical functions, called loops here, with numba. A loop is compiled at its first call and cached on disk.

The first run on a machine compiles for some seconds and logs one line about it. `read_clock` stops during this time, so
the measured time of a run does not include it. `compile_seconds` returns it.
"""

from __future__ import annotations

import logging
import multiprocessing
from collections.abc import Callable
from typing import Any, TypeVar

import numba
from numba.core import event

from glasu.timing import PausableClock

Loop = TypeVar("Loop", bound=Callable[..., Any])
LOGGER = logging.getLogger(__name__)  # used only for the message about the first compilation; --quiet silences it
read_clock = PausableClock()  # stops while this process compiles GLASU's loops
compile_seconds = read_clock.paused_seconds  # 0 if all loops are cached


def compile_loop(loop: Loop) -> Loop:
    """Compile a function at its first call.

    The loop runs on one thread without the GIL. It adds numbers in the written order, so results have the same bits in
    every run.
    """
    try:
        result: Loop = numba.njit(cache=True, nogil=True, error_model="numpy")(loop)
    except RuntimeError:  # numba found no folder to write to
        _listener.caches = False
        result = numba.njit(nogil=True, error_model="numpy")(loop)
    return result


class _CompileListener(event.Listener):  # type: ignore[misc]
    """Measures compilations. Numba sends no event for a function that it loads from the cache."""

    def __init__(self) -> None:
        self.caches = True
        self._depth = 0  # compiling a function also compiles the functions that it calls; numba locks out other threads
        self._announced = False

    def on_start(self, found: Any) -> None:
        if _is_own(found):
            if self._depth == 0:
                read_clock.pause()
                self._announce()
            self._depth += 1

    def on_end(self, found: Any) -> None:
        if _is_own(found):
            self._depth -= 1
            if self._depth == 0:
                read_clock.resume()

    def _announce(self) -> None:
        if not self._announced:
            self._announced = True
            # The level is WARNING, because without a handler Python shows no lower level, and the user would see
            # nothing during the compilation. In worker processes the level is lower, because each of them would repeat
            # the line.
            level = logging.WARNING if multiprocessing.parent_process() is None else logging.INFO
            kept = "is cached" if self.caches else "cannot be cached: set NUMBA_CACHE_DIR to a folder you can write to"
            LOGGER.log(level, "compiling numerical kernels for the first time; this takes about 20 s and %s", kept)


def _is_own(found: Any) -> bool:
    return str(found.data["dispatcher"].py_func.__module__).startswith("glasu.")


_listener = _CompileListener()
event.register("numba:compile", _listener)
