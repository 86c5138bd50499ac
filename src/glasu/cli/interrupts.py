"""Interrupts of a command: SIGTERM is handled like Ctrl-C, and an interrupted command ends within a time limit.

docs/reliability.md promises this limit. It also holds if the main thread is inside a long operation, or waits for a
lock that an interrupted function still holds. Ending the process is always safe: files are written atomically, and a
run resumes from its last checkpoint.
"""

from __future__ import annotations

import math
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

EXIT_SECONDS = 9.0  # between an interrupt and the end of the process
INTERRUPTS = (signal.SIGINT, signal.SIGTERM)


class Terminated(KeyboardInterrupt):
    """Raised on SIGTERM, which is handled like Ctrl-C but has a different exit code."""


def find_exit_code(interruption: KeyboardInterrupt) -> int:
    """Return 128 plus the number of the signal, as shells do."""
    return 128 + (signal.SIGTERM if isinstance(interruption, Terminated) else signal.SIGINT)


@contextmanager
def handle_interrupts(seconds: float = EXIT_SECONDS) -> Iterator[None]:
    """Raise Terminated on SIGTERM, and end the process if the block still runs `seconds` after an interrupt.

    Args:
        seconds: the maximum time between an interrupt and the end of the process.
    """
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    terminate = signal.signal(signal.SIGTERM, _terminate)
    # When a signal arrives, Python writes its number here, even if the main thread cannot run the signal handler.
    descriptor = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    threading.Thread(target=_end_in_time, args=(reader, seconds), name="glasu-interrupts", daemon=True).start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(descriptor)
        signal.signal(signal.SIGTERM, terminate)
        writer.close()  # ends the thread


def _terminate(number: int, frame: FrameType | None) -> NoReturn:
    raise Terminated


def _end_in_time(reader: socket.socket, seconds: float) -> None:
    """End the process `seconds` after the first interrupt, unless the other end of the socket is closed earlier."""
    number, deadline = 0, math.inf
    with reader:
        while time.monotonic() < deadline:
            reader.settimeout(None if number == 0 else max(deadline - time.monotonic(), 0.001))
            try:
                content = reader.recv(1)
            except TimeoutError:
                continue
            if not content:
                return
            if number == 0 and content[0] in INTERRUPTS:
                number, deadline = content[0], time.monotonic() + seconds
    os.write(
        2, f"glasu: stopped {seconds:g} s after the interrupt. Start the same command again to continue.\n".encode()
    )
    os._exit(128 + number)
