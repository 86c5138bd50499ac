"""Write files durably, lock a folder for one process, and set the limits of the process."""

from __future__ import annotations

import errno
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from filelock import FileLock, Timeout

from glasu.errors import ConfigError, DataError

LOCK = ".lock"
OTHER_COMMAND = "wait until it ends, or end it"  # advice if the user cannot choose another folder
T = TypeVar("T")
OUT_OF_DESCRIPTORS = (errno.EMFILE, errno.ENFILE)  # the process, or the system, has too many open files for now
DESCRIPTORS_WITHIN = 10.0  # seconds for which an action is repeated while no file descriptor is free
MANY_DESCRIPTORS = 1 << 16
M_ARENA_MAX = -8  # a constant of malloc.h


def retry_without_descriptors(action: Callable[[], T]) -> T:
    """Return `action()`, and repeat it for some seconds while no file descriptor is free."""
    deadline = time.monotonic() + DESCRIPTORS_WITHIN
    while True:
        try:
            return action()
        except OSError as error:
            if error.errno not in OUT_OF_DESCRIPTORS or time.monotonic() > deadline:
                raise
        time.sleep(0.1)


def raise_descriptor_limit() -> None:
    """Raise the limit of open files and connections to the hard limit of this process, at most 65,536."""
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MANY_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MANY_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def read_descriptor_limit() -> int:
    """Return how many files and connections this process may open, at most 65,536."""
    try:
        import resource
    except ImportError:
        return MANY_DESCRIPTORS
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MANY_DESCRIPTORS if soft == resource.RLIM_INFINITY else min(soft, MANY_DESCRIPTORS)


def share_one_heap() -> None:
    """Make all threads allocate from one heap. Only glibc has this setting; with other libraries nothing changes.

    By default, glibc gives each thread a separate heap, and a freed block stays in its heap. Several threads of gRPC
    accept connections. So a server under a flood of connections would use three times the memory.
    """
    import ctypes

    if os.name == "posix" and (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)):
        mallopt(M_ARENA_MAX, 1)


def write_atomically(path: Path, content: bytes, mode: int = 0o644) -> None:
    """Write a file durably. A reader sees the old content or the new content, never a part.

    It waits while no file descriptor is free.

    Raises:
        OSError: the file cannot be written. Its `filename` is `path`, even if the system names no file (full disk).
    """
    retry_without_descriptors(lambda: _write_once(path, content, mode))


def _write_once(path: Path, content: bytes, mode: int) -> None:
    folder = path.parent
    with name_file(path):
        try:
            handle, name = tempfile.mkstemp(dir=folder, prefix=f".{path.name}.")
        except FileNotFoundError:
            folder.mkdir(parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(dir=folder, prefix=f".{path.name}.")
        temporary = Path(name)
        try:
            try:
                write_whole(handle, content)
                temporary.chmod(mode)
                sync_handle(handle)
            finally:
                os.close(handle)
            temporary.replace(path)
            sync_folder(folder)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise


def write_whole(handle: int, content: bytes) -> None:
    """Write all bytes to an open file; one system call may write only a part."""
    view = memoryview(content)
    while view:
        view = view[os.write(handle, view) :]


def put_in_place(temporary: Path, path: Path, mode: int = 0o644) -> None:
    """Rename a complete file on the same file system; sync the file before the rename and the folder after it."""
    with name_file(path):
        temporary.chmod(mode)
        sync_file(temporary)
        temporary.replace(path)
        sync_folder(path.parent)


def remove_loaded_library(path: str) -> None:
    """Remove the file of a library that this process has loaded. On POSIX systems the library stays loaded."""
    if os.name == "posix":
        Path(path).unlink(missing_ok=True)


def sync_handle(handle: int, *, data_only: bool = False) -> None:
    """Wait until an open file or folder is on disk.

    Args:
        handle: its file descriptor.
        data_only: if the system supports it, skip metadata that a reader does not need, such as the time of the last
            change.
    """
    sync = getattr(os, "fdatasync", os.fsync) if data_only else os.fsync
    sync(handle)


def sync_file(path: Path) -> None:
    """Wait until the content of a file is on disk."""
    with path.open("r+b") as file:
        sync_handle(file.fileno())


def sync_folder(folder: Path) -> None:
    """Wait until the names in a folder are on disk; only POSIX systems can sync a folder."""
    if os.name == "posix":
        handle = os.open(folder, os.O_RDONLY)
        try:
            sync_handle(handle)
        finally:
            os.close(handle)


@contextmanager
def name_file(path: Path) -> Iterator[None]:
    """Set the file name of an OSError to `path`. The error of a failed write names no file, or a temporary file."""
    try:
        yield
    except OSError as error:
        if error.errno is None:  # raised by another library
            raise OSError(f"{path}: {error}") from error
        raise OSError(error.errno, error.strerror, str(path)) from error


@contextmanager
def hold_folder(folder: Path, advice: str = "wait for it, or choose another --out") -> Iterator[None]:
    """Lock a folder for this process. The system releases the lock when the process ends, even after kill -9.

    At the end, the lock file is removed, and also the folder if it is empty and this function has created it.

    Args:
        folder: created if it does not exist.
        advice: what to do if another process holds the folder.

    Raises:
        ConfigError: another process, or another caller in this process, holds the folder.
        DataError: the lock file cannot be used.
    """
    is_new = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    # No fallback to a lock that consists in the existence of a file: after kill -9, this file would block the folder.
    lock = FileLock(folder / LOCK, blocking=False, fallback_to_soft=False)
    try:
        lock.acquire()
    except Timeout:
        raise ConfigError(f"{folder}: another command is using this folder; {advice}.") from None
    except (OSError, NotImplementedError) as error:
        why = getattr(error, "strerror", None) or error
        raise DataError(
            f"{folder / LOCK}: cannot lock this folder ({why}). Fix the cause, or remove the file if no command is "
            "running here."
        ) from None
    try:
        yield
    finally:
        with suppress(OSError):  # removal is safe: filelock refuses a lock on a removed file
            (folder / LOCK).unlink()
            if is_new:
                folder.rmdir()
        lock.release()
