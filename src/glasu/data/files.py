"""Write a file so that it is there whole or not at all, and hold a folder against a second process."""

from __future__ import annotations

import os
import sqlite3
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from glasu.errors import ConfigError


def write_atomically(path: Path, content: bytes, mode: int = 0o644) -> None:
    """Write beside the file, make it durable, and rename: a reader sees the old content or the new, nothing between.

    Once this returns, the content outlives a crash of the machine.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        Path(name).chmod(mode)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    _make_names_durable(path.parent)


def _make_names_durable(folder: Path) -> None:
    """Let a rename in the folder outlive a crash of the machine, where the system can promise that."""
    if os.name == "posix":
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


@contextmanager
def held(folder: Path, advice: str = "wait for it, or choose another --out") -> Iterator[None]:
    """Hold a folder while a command works in it; SQLite's lock ends with the process, however that ends.

    Args:
        folder: which is made if need be.
        advice: what to do when another command is at work there.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with closing(sqlite3.connect(folder / ".lock", timeout=0)) as lock:
        try:
            lock.execute("BEGIN EXCLUSIVE")
        except sqlite3.OperationalError:
            raise ConfigError(f"{folder}: another command is at work here; {advice}.") from None
        yield
