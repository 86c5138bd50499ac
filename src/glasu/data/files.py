"""Write a file so that it is there whole or not at all, and hold a folder against a second process."""

from __future__ import annotations

import errno
import os
import sqlite3
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import TypeVar

from glasu.errors import ConfigError, DataError

T = TypeVar("T")
OUT_OF_DESCRIPTORS = (errno.EMFILE, errno.ENFILE)  # of the process, of the system; both pass
DESCRIPTORS_WITHIN = 10.0  # seconds
MANY_DESCRIPTORS = 1 << 16


def retry_without_descriptors(action: Callable[[], T], seconds: float = DESCRIPTORS_WITHIN) -> T:
    """Return `action()`, and repeat it for some seconds while no file descriptor is free."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            return action()
        except OSError as error:
            if error.errno not in OUT_OF_DESCRIPTORS or time.monotonic() > deadline:
                raise
        time.sleep(0.1)


def raise_descriptor_limit() -> None:
    """Let this process open as many files and connections as its hard limit allows, up to 65,536."""
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MANY_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MANY_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def write_atomically(path: Path, content: bytes, mode: int = 0o644) -> None:
    """Write beside the file, make it durable, and rename: a reader sees the old content or the new, nothing between.

    Once this returns, the content outlives a crash of the machine. Where no file descriptor is free, it waits for one.
    """
    retry_without_descriptors(lambda: _write_once(path, content, mode))


def _write_once(path: Path, content: bytes, mode: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        put_in_place(Path(name), path, mode)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def put_in_place(written: Path, path: Path, mode: int = 0o644) -> None:
    """Make a file durable that was written on the same disk, and rename it; the new name is durable, too."""
    written.chmod(mode)
    with written.open("r+b") as file:
        os.fsync(file.fileno())
    written.replace(path)
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
    with ExitStack() as stack:
        try:
            lock = stack.enter_context(closing(sqlite3.connect(folder / ".lock", timeout=0)))
            lock.execute("BEGIN EXCLUSIVE")
        except sqlite3.Error as error:
            raise _not_held(folder, error, advice) from None
        yield


def _not_held(folder: Path, error: sqlite3.Error, advice: str) -> ConfigError | DataError:
    if error.sqlite_errorcode & 0xFF == sqlite3.SQLITE_BUSY:  # the rest of the code says which kind of it
        return ConfigError(f"{folder}: another command is at work here; {advice}.")
    return DataError(
        f"{folder / '.lock'}: this folder cannot be held against a second command ({error}); mend that, remove the "
        "file if no command is at work here, or choose another --out."
    )
