"""A folder is held by one command at a time; a write waits for a file descriptor."""

from __future__ import annotations

import errno
import os
import resource
import sqlite3
import threading
from contextlib import contextmanager
from pathlib import Path

import pytest

from glasu.data.files import held, raise_descriptor_limit, retry_without_descriptors, write_atomically
from glasu.errors import ConfigError, DataError


def test_a_folder_that_is_held_is_another_commands_until_that_ends(tmp_path):
    with held(tmp_path), pytest.raises(ConfigError, match="another command is at work here"), held(tmp_path):
        pass
    with held(tmp_path):
        pass


FLAWS = {
    "unable to open database file": Path.mkdir,
    "file is not a database": lambda lock: lock.write_bytes(b"no database" * 100),
}


@pytest.mark.parametrize("why", FLAWS)
def test_a_lock_that_cannot_be_used_is_not_taken_for_a_command_at_work(why, tmp_path):
    FLAWS[why](tmp_path / ".lock")
    with pytest.raises(DataError, match=rf"\.lock: .*\({why}\)") as caught, held(tmp_path):
        pass
    assert "another command" not in str(caught.value)


@pytest.mark.parametrize("code", [sqlite3.SQLITE_IOERR, sqlite3.SQLITE_READONLY])
def test_a_disk_that_fails_is_not_taken_for_a_command_at_work(code, tmp_path, monkeypatch):
    error = sqlite3.OperationalError("the disk's own words")
    error.sqlite_errorcode = code

    class Failing(sqlite3.Connection):
        def execute(self, *words):
            raise error

    connect = sqlite3.connect
    monkeypatch.setattr(sqlite3, "connect", lambda path, timeout: connect(path, timeout, factory=Failing))
    with pytest.raises(DataError, match="the disk's own words"), held(tmp_path):
        pass


def test_what_goes_wrong_while_a_folder_is_held_is_told_as_it_is(tmp_path):
    with pytest.raises(sqlite3.OperationalError, match="somebody else's"), held(tmp_path):
        raise sqlite3.OperationalError("somebody else's")


@contextmanager
def descriptor_limit(count):
    """Let this process have so many open files at most while the block lasts."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (count, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def open_without_end(folder, descriptors):
    while True:
        descriptors.append(os.open(folder, os.O_RDONLY))


def test_a_write_waits_until_a_file_descriptor_is_free(tmp_path):
    taken = os.open(tmp_path, os.O_RDONLY)
    with descriptor_limit(taken + 1):
        more = []
        with pytest.raises(OSError, match="Too many open files"):
            open_without_end(tmp_path, more)  # lower numbers may be free
        release = threading.Timer(0.5, lambda: [os.close(each) for each in (taken, *more)])
        release.start()
        write_atomically(tmp_path / "file", b"content")
        release.join()
    assert (tmp_path / "file").read_bytes() == b"content"


def test_other_errors_are_not_retried():
    calls = []

    def fail():
        calls.append(1)
        raise FileNotFoundError(errno.ENOENT, "gone")

    with pytest.raises(FileNotFoundError):
        retry_without_descriptors(fail)
    assert len(calls) == 1


def test_the_soft_limit_of_descriptors_is_raised_to_the_hard_one():
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with descriptor_limit(256):
        raise_descriptor_limit()
        soft, same = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert same == hard
    assert soft == (2**16 if hard == resource.RLIM_INFINITY else min(hard, 2**16))
