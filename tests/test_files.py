"""Files are written whole, and one process at a time works in a folder; a write waits for a file descriptor."""

from __future__ import annotations

import errno
import os
import re
import resource
import signal
import subprocess
import sys
import textwrap
import threading
from contextlib import contextmanager
from pathlib import Path

import pytest

import glasu
from glasu.errors import ConfigError, DataError
from glasu.files import (
    hold_folder,
    put_in_place,
    raise_descriptor_limit,
    read_descriptor_limit,
    retry_without_descriptors,
    sync_handle,
    write_atomically,
)


def test_a_folder_has_one_holder_at_a_time(tmp_path):
    busy = pytest.raises(ConfigError, match="another command is using this folder")
    with hold_folder(tmp_path), busy, hold_folder(tmp_path):
        pass
    with hold_folder(tmp_path):
        pass


def test_a_lock_leaves_no_file_and_no_empty_folder(tmp_path):
    (tmp_path / "file").touch()
    with hold_folder(tmp_path), hold_folder(tmp_path / "new"):
        assert {path.name for path in tmp_path.iterdir()} == {"file", "new", ".lock"}
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    (tmp_path / "old").mkdir()
    with hold_folder(tmp_path / "old"), hold_folder(tmp_path / "kept"):
        (tmp_path / "kept" / "result").touch()
    assert {path.name for path in tmp_path.iterdir()} == {"file", "old", "kept"}


def test_the_error_names_the_folder_and_the_remedy(tmp_path):
    with hold_folder(tmp_path), pytest.raises(ConfigError) as caught, hold_folder(tmp_path, "wait for it"):
        pass
    assert str(caught.value) == f"{tmp_path}: another command is using this folder; wait for it."


def test_a_failure_inside_releases_the_folder_and_is_not_changed(tmp_path):
    with pytest.raises(OSError, match="a fault of the caller"), hold_folder(tmp_path):
        raise OSError("a fault of the caller")
    with hold_folder(tmp_path):
        pass


HOLD = """
import sys, time
from pathlib import Path
from glasu.files import hold_folder
with hold_folder(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(120)
"""


def test_another_process_holds_a_folder_until_it_is_killed(tmp_path):
    with subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout.readline() == b"held\n"
            with pytest.raises(ConfigError, match="another command"), hold_folder(tmp_path):
                pass
        finally:
            process.send_signal(signal.SIGKILL)
    with hold_folder(tmp_path):
        pass


def test_an_unusable_lock_file_is_not_reported_as_another_command(tmp_path):
    (tmp_path / ".lock").mkdir()
    unusable = pytest.raises(DataError, match=r"\.lock: cannot lock this folder \(Is a directory\)")
    with unusable as caught, hold_folder(tmp_path):
        pass
    assert "another command" not in str(caught.value)


def test_a_file_is_replaced_whole_and_gets_its_mode(tmp_path):
    path = tmp_path / "deep" / "file"
    write_atomically(path, b"old")
    write_atomically(path, b"new", 0o600)
    assert path.read_bytes() == b"new"
    assert path.stat().st_mode & 0o777 == 0o600
    assert [item.name for item in path.parent.iterdir()] == ["file"]


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
        assert read_descriptor_limit() == soft
    assert same == hard
    assert soft == (2**16 if hard == resource.RLIM_INFINITY else min(hard, 2**16))


LIMITED = """
import resource, sys
from pathlib import Path
from glasu.files import write_atomically
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))  # write() then fails with EFBIG
try:
    write_atomically(Path(sys.argv[1]), bytes(5000))
except OSError as error:
    print(error.errno, error)
"""


@pytest.mark.skipif(not hasattr(resource, "RLIMIT_FSIZE"), reason="needs a limit of file sizes")
def test_a_write_that_fails_names_the_file_and_keeps_the_old_content(tmp_path):
    path = tmp_path / "report.json"
    write_atomically(path, b"old")
    code = "import signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)" + textwrap.dedent(LIMITED)
    run = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True)
    assert run.stdout.split()[0] == str(errno.EFBIG)
    assert run.stdout.strip().endswith(f"'{path}'")
    assert path.read_bytes() == b"old"
    assert [item.name for item in tmp_path.iterdir()] == ["report.json"]


def test_a_full_disk_names_the_file(tmp_path):
    (tmp_path / "place").mkdir()
    (tmp_path / "new").write_bytes(b"x")
    with pytest.raises(OSError, match="place") as caught:
        put_in_place(tmp_path / "new", tmp_path / "place")
    assert caught.value.filename == os.fspath(tmp_path / "place")
    assert Path(tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("data_only", "has_fdatasync", "called"),
    [(False, True, "fsync"), (True, True, "fdatasync"), (True, False, "fsync"), (False, False, "fsync")],
)
def test_a_sync_of_the_data_alone_needs_a_system_that_can_do_it(data_only, has_fdatasync, called, monkeypatch):
    calls = []
    monkeypatch.setattr("os.fsync", lambda handle: calls.append(("fsync", handle)))
    monkeypatch.setattr("os.fdatasync", lambda handle: calls.append(("fdatasync", handle)), raising=False)
    if not has_fdatasync:
        monkeypatch.delattr("os.fdatasync")
    sync_handle(7, data_only=data_only)
    assert calls == [(called, 7)]


def test_only_one_function_syncs():
    sources = Path(glasu.__file__).parent.rglob("*.py")
    lines = [(path.name, line) for path in sources for line in path.read_text(encoding="utf-8").splitlines()]
    assert [(name, line) for name, line in lines if re.search(r"\bf(data)?sync\b", line)] == [
        ("files.py", '    sync = getattr(os, "fdatasync", os.fsync) if data_only else os.fsync')
    ]
