"""Cache entries are complete and unchanged, or they are made again."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from glasu.data.cache.arrays import Workspace
from glasu.data.cache.store import ABANDONED, Cache, make_key
from glasu.errors import DataError

ABOUT = {"kind": "test", "seed": 1}


SETTLED = -(10**18)  # every file counts as old enough to be trusted


@pytest.fixture
def cache(tmp_path):
    return Cache(tmp_path / "cache")


class Build:
    """Makes the same small entry each time, and counts how often."""

    def __init__(self):
        self.times = 0

    def __call__(self, workspace):
        self.times += 1
        numbers = workspace.writer("numbers", np.int32)
        for start in range(0, 100, 10):
            numbers.append(np.arange(start, start + 10))
        numbers.finish()
        workspace.keep("rows", np.linspace(0, 1, 12, dtype=np.float32).reshape(4, 3))
        workspace.keep("names", np.array(["x", "long"]))
        workspace.keep("nothing", np.empty(0, np.int64))
        workspace.keep("scratch", np.ones(5))
        workspace.drop("scratch")
        return {"sum": 4950}


def check(entry):
    assert entry.facts == {"sum": 4950}
    assert sorted(entry.arrays) == ["names", "nothing", "numbers", "rows"]
    np.testing.assert_array_equal(entry.arrays["numbers"], np.arange(100, dtype=np.int32))
    np.testing.assert_array_equal(entry.arrays["rows"], np.linspace(0, 1, 12, dtype=np.float32).reshape(4, 3))
    assert entry.arrays["names"].tolist() == ["x", "long"]
    assert entry.arrays["nothing"].shape == (0,)
    kinds = {name: array.dtype.str for name, array in entry.arrays.items()}
    assert kinds == {"names": "<U4", "nothing": "<i8", "numbers": "<i4", "rows": "<f4"}


def left_over(cache):
    return [path.name for path in cache.folder.iterdir() if path.name.startswith(".")]


def test_an_entry_is_made_once_and_opened_with_the_same_bits(cache):
    build = Build()
    for _ in range(3):
        check(cache.open(ABOUT, build))
    assert build.times == 1
    assert left_over(cache) == []


def test_the_arrays_of_an_entry_are_npy_files_that_cannot_be_written_to(cache):
    arrays = cache.open(ABOUT, Build()).arrays
    for name in ("numbers", "rows", "names"):
        assert not arrays[name].flags.writeable
        np.testing.assert_array_equal(np.load(cache.folder / make_key(ABOUT) / f"{name}.npy"), arrays[name])


def test_only_its_owner_may_read_an_entry(cache):
    cache.open(ABOUT, Build())
    assert (cache.folder / make_key(ABOUT)).stat().st_mode & 0o077 == 0


def test_another_description_is_another_entry(cache):
    assert len({make_key(ABOUT), make_key({**ABOUT, "seed": 2}), make_key({**ABOUT, "more": None})}) == 3
    build = Build()
    cache.open(ABOUT, build)
    cache.open({**ABOUT, "seed": 2}, build)
    assert build.times == 2


def change_a_byte(path):
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)


DAMAGE = {
    "an array is cut short": lambda place: os.truncate(place / "numbers.npy", 300),
    "an array is emptied": lambda place: os.truncate(place / "rows.npy", 0),
    "a byte of an array changed": lambda place: change_a_byte(place / "numbers.npy"),
    "an array is missing": lambda place: (place / "nothing.npy").unlink(),
    "an array is a folder": lambda place: ((place / "rows.npy").unlink(), (place / "rows.npy").mkdir()),
    "the manifest is missing": lambda place: (place / "entry.json").unlink(),
    "the manifest is empty": lambda place: (place / "entry.json").write_text(""),
    "the manifest is no text": lambda place: (place / "entry.json").write_bytes(b"\xff\xfe\n{}"),
    "the manifest says something else": lambda place: (place / "entry.json").write_text(
        (place / "entry.json").read_text().replace("4950", "4951")
    ),
    "a file stands in its place": lambda place: (shutil.rmtree(place), place.write_text("no folder")),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_entry_is_detected_and_rebuilt(cache, damage):
    build = Build()
    cache.open(ABOUT, build)
    damage(cache.folder / make_key(ABOUT))
    check(cache.open(ABOUT, build))
    check(cache.open(ABOUT, build))
    assert build.times == 2
    assert left_over(cache) == []


def test_an_entry_of_another_layout_is_rebuilt_under_the_same_key(cache):
    build = Build()
    cache.open(ABOUT, build)
    manifest = cache.folder / make_key(ABOUT) / "entry.json"
    content = json.loads(manifest.read_text().splitlines()[1])
    content["layout"] = 2
    text = json.dumps(content)
    manifest.write_text(f"{hashlib.sha256(text.encode()).hexdigest()}\n{text}\n")
    check(cache.open(ABOUT, build))
    assert build.times == 2


def test_a_conversion_that_fails_leaves_nothing_behind(cache):
    def fails(workspace):
        workspace.writer("numbers", np.int32).append(np.arange(10))
        raise DataError("no such column")

    with pytest.raises(DataError, match="no such column"):
        cache.open(ABOUT, fails)
    assert list(cache.folder.iterdir()) == []
    check(cache.open(ABOUT, Build()))


def test_many_threads_may_build_the_same_entry_at_the_same_time(cache):
    together = threading.Barrier(4)

    def build(workspace):
        together.wait(60)  # all four build at the same time
        return Build()(workspace)

    with ThreadPoolExecutor(4) as pool:
        entries = list(pool.map(lambda _: cache.open(ABOUT, build), range(4)))
    for entry in entries:
        check(entry)
    assert [path.name for path in cache.folder.iterdir()] == [make_key(ABOUT)]


def test_many_threads_may_rebuild_the_same_damaged_entry_at_the_same_time(cache):
    cache.open(ABOUT, Build())
    change_a_byte(cache.folder / make_key(ABOUT) / "numbers.npy")
    together = threading.Barrier(4)

    def build(workspace):
        together.wait(60)
        return Build()(workspace)

    with ThreadPoolExecutor(4) as pool:
        for entry in list(pool.map(lambda _: cache.open(ABOUT, build), range(4))):
            check(entry)
    assert [path.name for path in cache.folder.iterdir()] == [make_key(ABOUT)]


IN_A_PROCESS = """
import os, signal, sys, time
from pathlib import Path
import numpy as np
from glasu.data.cache.store import Cache

def build(workspace):
    numbers = workspace.writer("numbers", np.int32)
    numbers.append(np.arange(50))
    if sys.argv[1] == "is killed":
        workspace.keep("rows", np.ones(9))  # this one is complete
        os.kill(os.getpid(), signal.SIGKILL)
    Path(sys.argv[2], sys.argv[1]).touch()
    while len(list(Path(sys.argv[2]).iterdir())) < 2:  # both are at it
        time.sleep(0.01)
    numbers.append(np.arange(50, 100))
    numbers.finish()
    return {"sum": 4950}

print(Cache(Path(sys.argv[3])).open({"kind": "test", "seed": 1}, build).arrays["numbers"].sum())
"""


def start(*arguments):
    return subprocess.Popen([sys.executable, "-c", IN_A_PROCESS, *map(str, arguments)], stdout=subprocess.PIPE)


def test_what_a_killed_process_has_half_written_is_never_opened(cache, tmp_path):
    process = start("is killed", tmp_path, cache.root)
    process.communicate(timeout=120)
    assert process.returncode == -signal.SIGKILL
    assert len(left_over(cache)) == 1  # the half-written entry has a name that is never opened
    build = Build()
    check(cache.open(ABOUT, build))
    assert build.times == 1


def test_two_processes_may_build_the_same_entry_at_the_same_time(cache, tmp_path):
    (tmp_path / "here").mkdir()
    both = [start(name, tmp_path / "here", cache.root) for name in ("one", "other")]
    assert [process.communicate(timeout=120)[0].strip() for process in both] == [b"4950", b"4950"]
    assert [path.name for path in cache.folder.iterdir()] == [make_key(ABOUT)]


def test_a_folder_that_may_not_be_written_to_is_read(cache, monkeypatch):
    def refuse_access(*_, **__):
        raise PermissionError(errno.EACCES, "Permission denied")

    build = Build()
    cache.open(ABOUT, build)
    monkeypatch.setattr(tempfile, "mkdtemp", refuse_access)
    check(cache.open(ABOUT, build))
    assert build.times == 1
    check(cache.open({**ABOUT, "seed": 2}, build))  # in memory
    assert build.times == 2
    assert [path.name for path in cache.folder.iterdir()] == [make_key(ABOUT)]


def test_where_nothing_can_be_written_the_entry_is_made_in_memory(tmp_path):
    (tmp_path / "file").write_text("")
    cache = Cache(tmp_path / "file" / "cache")
    build = Build()
    check(cache.open(ABOUT, build))
    check(cache.open(ABOUT, build))
    assert build.times == 2


def test_the_environment_names_the_folder_of_the_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("GLASU_CACHE", str(tmp_path / "elsewhere"))
    check(Cache().open(ABOUT, Build()))
    assert (tmp_path / "elsewhere" / "store" / make_key(ABOUT)).is_dir()


def test_a_full_disk_is_reported_with_the_file_and_the_remedy(tmp_path):
    (tmp_path / "numbers.npy").symlink_to("/dev/full")
    workspace = Workspace(tmp_path)
    with pytest.raises(DataError, match=r"numbers\.npy: cannot be written \(No space left .*set GLASU_CACHE"):
        Build()(workspace)
    workspace.close()


def test_leftovers_of_killed_processes_are_removed_after_a_day(cache):
    for name, age in ((".old", 2 * ABANDONED), (".young", 60.0)):
        (cache.folder / name).mkdir(parents=True)
        (cache.folder / name / "numbers.npy").write_text("half")
        then = (cache.folder / name).stat().st_mtime - age
        os.utime(cache.folder / name, (then, then))
    cache.open(ABOUT, Build())
    assert left_over(cache) == [".young"]


def test_a_folder_that_another_process_renames_meanwhile_is_no_reason_to_keep_data_in_memory(cache, monkeypatch):
    (cache.folder / ".theirs").mkdir(parents=True)
    stat = Path.stat

    def stat_or_lose(path, **keys):
        if path.name == ".theirs":
            raise FileNotFoundError(path)
        return stat(path, **keys)

    monkeypatch.setattr(Path, "stat", stat_or_lose)
    cache.open(ABOUT, Build())
    assert [path.name for path in cache.folder.iterdir() if not path.name.startswith(".")]


@pytest.mark.parametrize("in_folder", [False, True], ids=["memory", "folder"])
def test_a_workspace_gives_back_the_appended_rows(tmp_path, in_folder):
    workspace = Workspace(tmp_path if in_folder else None)
    rows = workspace.writer("rows", np.float32, 3)
    for count in (0, 2, 1):
        rows.append(np.full((count, 3), count, np.float64))
    np.testing.assert_array_equal(rows.finish(), np.array([[2] * 3, [2] * 3, [1] * 3], np.float32))
    assert workspace.writer("empty", np.int64, 2).finish().shape == (0, 2)
    assert workspace.keep("again", workspace.arrays["rows"]) == "rows"  # no copy
    assert sorted(workspace.arrays) == ["empty", "rows"]


# Files


@pytest.fixture
def source(tmp_path):
    (tmp_path / "source.txt").write_text("1 2 3")
    return tmp_path / "source.txt"


def reader(source):
    build = Build()

    def read(workspace):
        workspace.keep("content", np.array(source.read_text().split(), np.int64))
        return build(workspace)

    return read, build


def content(cache, source, read):
    return cache.open_for_files([source], {"kind": "text"}, read).arrays["content"].tolist()


@pytest.fixture
def settled_cache(tmp_path):
    return Cache(tmp_path / "cache", settle_ns=SETTLED)


def test_a_changed_file_is_noticed_even_if_size_and_time_are_as_before(settled_cache, source):
    read, build = reader(source)
    assert content(settled_cache, source, read) == content(settled_cache, source, read) == [1, 2, 3]
    assert build.times == 1
    before = source.stat()
    source.write_text("4 5 6")
    os.utime(source, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert content(settled_cache, source, read) == [4, 5, 6]
    source.write_text("1 2 3")  # the first entry still exists
    assert content(settled_cache, source, read) == [1, 2, 3]
    assert build.times == 2


def test_a_copy_of_a_file_is_the_same_source(cache, source, tmp_path):
    read, build = reader(source)
    content(cache, source, read)
    shutil.copy(source, tmp_path / "copy.txt")
    assert content(cache, tmp_path / "copy.txt", read) == [1, 2, 3]
    assert build.times == 1


def test_a_settled_file_is_digested_once_and_a_recent_one_every_time(cache, settled_cache, source, monkeypatch):
    read, _ = reader(source)
    content(cache, source, read)
    reads = []
    digest = hashlib.file_digest
    monkeypatch.setattr(hashlib, "file_digest", lambda *args: reads.append(1) or digest(*args))
    for _ in range(2):
        content(cache, source, read)
    assert len(reads) == 2  # the file is too new: it could change without a new time stamp
    for _ in range(3):
        content(settled_cache, source, read)
    assert len(reads) == 3


def test_a_damaged_digest_is_recomputed(settled_cache, source):
    read, build = reader(source)
    content(settled_cache, source, read)
    manifests = list(settled_cache.folder.glob("*/entry.json"))
    assert len(manifests) == 2  # the content and the digest of the file
    for text in ("", "[]", '{"identity": 1}'):
        for manifest in manifests:
            manifest.write_text(text)
        assert content(settled_cache, source, read) == [1, 2, 3]
    assert build.times == 4


def test_a_file_that_changes_while_it_is_read_makes_no_entry(cache, source):
    def read(workspace):
        workspace.keep("content", np.arange(3))
        source.write_text("something longer")
        return {}

    with pytest.raises(DataError, match=r"source\.txt: changed while it was read"):
        content(cache, source, read)
    assert list(cache.folder.iterdir()) == []
