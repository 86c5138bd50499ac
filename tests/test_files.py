"""A folder is held by one command at a time, and whoever cannot hold it is told why."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from glasu.errors import ConfigError, DataError
from glasu.files import held


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
