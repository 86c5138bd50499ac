"""Look at the log of the library while a block runs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class LineHandler(logging.Handler):
    """Passes every message of a logger to a function."""

    def __init__(self, receive: Callable[[str], object]) -> None:
        super().__init__()
        self._receive = receive

    def emit(self, record: logging.LogRecord) -> None:
        self._receive(record.getMessage())


@contextmanager
def on_log(receive: Callable[[str], object], name: str = "glasu.experiments") -> Iterator[None]:
    """Call `receive` with every message of a logger; an exception that it raises stops the code that logs.

    The level stays at INFO afterwards, because another thread may still look at the same logger.
    """
    logger, handler = logging.getLogger(name), LineHandler(receive)
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
