"""The store: converted data as memory maps in the cache folder, each entry named by a digest of all that decides it.

<cache>/store/<key>/entry.json   what the entry is made of, its arrays and their digests, and facts about them
<cache>/store/<key>/<name>.npy   one array each

An entry appears whole or not at all, and is never changed. It can be deleted at any time: it is made again.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from glasu import __version__
from glasu.data.cache.workspace import SUFFIX, Folder, Memory, Workspace, Written, mapped, values_sha256
from glasu.data.paths import cache_folder
from glasu.errors import DataError
from glasu.files import write_atomically

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import NDArray

FORMAT = 1  # of the entries; another number makes all of them anew
MANIFEST = "entry.json"
ATTEMPTS = 3  # of making an entry that others damage as often
ABANDONED = 24 * 3600.0  # seconds after which an unfinished entry is nobody's any more
SETTLED = 2_000_000_000  # ns that a file must have been left alone for its times to tell whether it changes


@dataclass(frozen=True, eq=False)
class Entry:
    """Arrays by name, and plain facts about them."""

    key: str
    arrays: Mapping[str, NDArray[Any]]
    facts: dict[str, Any]


def key_of(about: Mapping[str, Any]) -> str:
    """Return the name of the entry that is made of this, by this version."""
    decides = {"format": FORMAT, "glasu": __version__, "numpy": np.__version__, **about}
    return hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()[:40]


def stored(about: Mapping[str, Any], build: Callable[[Workspace], dict[str, Any]]) -> Entry:
    """Open an entry; where there is none, or a damaged one, make it first.

    Several processes may do so at once: the first to be ready wins, and all read the same bits. Where the cache cannot
    be written to, the entry is made in memory.

    Args:
        about: everything that decides the entry's content, as JSON can hold it.
        build: writes the arrays to a workspace, and returns the facts.
    """
    key = key_of(about)
    place = cache_folder() / "store" / key
    for _ in range(ATTEMPTS):
        entry = _open(place)
        if entry is not None:
            return entry
        temporary = _temporary_folder(place)
        if temporary is None:
            break
        try:
            _make(temporary, about, build)
            _publish(temporary, place)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    memory = Memory()
    facts = build(memory)
    return Entry(key, memory.arrays, facts)


def _make(folder: Path, about: Mapping[str, Any], build: Callable[[Workspace], dict[str, Any]]) -> None:
    """Write a whole entry and see that it is on the disk."""
    workspace = Folder(folder)
    with workspace.files:
        facts = build(workspace)
    arrays = {}
    for name, written in workspace.written.items():
        _to_disk(workspace.path(name))
        arrays[name] = dataclasses.asdict(written) | _stamp(workspace.path(name))
    _write_manifest(folder, {"about": dict(about), "arrays": arrays, "facts": facts})
    _to_disk(folder)


def _stamp(path: Path) -> dict[str, int]:
    found = path.stat()
    return {"size": found.st_size, "mtime_ns": found.st_mtime_ns}


def _write_manifest(folder: Path, content: Mapping[str, Any]) -> None:
    text = json.dumps(content)
    digest = hashlib.sha256(text.encode()).hexdigest()
    write_atomically(folder / MANIFEST, f"{digest}\n{text}\n".encode())


def _to_disk(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _open(place: Path) -> Entry | None:
    """Open an entry without reading its arrays, or return None where it is not there, not whole, or not as written.

    A file that was touched since is read and compared with its digest.
    """
    try:
        digest, text = (place / MANIFEST).read_text(encoding="utf-8").rstrip("\n").split("\n")
        if hashlib.sha256(text.encode()).hexdigest() != digest:
            return None
        content = json.loads(text)
        arrays, touched = {}, False
        for name, said in content["arrays"].items():
            path = place / f"{name}{SUFFIX}"
            written = Written(said["dtype"], tuple(said["shape"]), said["sha256"])
            stamp = _stamp(path)
            if stamp["size"] != said["size"]:
                return None
            if stamp["mtime_ns"] != said["mtime_ns"]:
                if values_sha256(path) != written.sha256:
                    return None
                touched = True
                said.update(stamp)
            arrays[name] = mapped(path, written)
    except (OSError, ValueError):
        return None
    if touched:
        with suppress(OSError):  # or it is read again the next time
            _write_manifest(place, content)
    return Entry(place.name, arrays, content["facts"])


def _temporary_folder(place: Path) -> Path | None:
    """Return a fresh folder beside the place, readable by its owner only; None where none can be made."""
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        for left in place.parent.glob(".*"):
            with suppress(OSError):  # it may be another process's, and gone by now
                if time.time() - left.stat().st_mtime > ABANDONED:
                    shutil.rmtree(left, ignore_errors=True)
        return Path(tempfile.mkdtemp(dir=place.parent, prefix=f".{place.name[:8]}-"))
    except OSError:
        return None


def _publish(temporary: Path, place: Path) -> None:
    """Let the entry appear at its place, unless a good one has appeared meanwhile."""
    try:
        temporary.rename(place)
    except OSError:
        if _open(place) is not None:
            return
        aside = Path(tempfile.mkdtemp(dir=place.parent, prefix=".damaged-"))
        try:
            place.rename(aside / "entry")
            temporary.rename(place)
        except OSError:
            return  # another process was faster; the caller looks again
        finally:
            shutil.rmtree(aside, ignore_errors=True)
    _to_disk(place.parent)


def stored_from_files(
    files: Sequence[Path], about: Mapping[str, Any], build: Callable[[Workspace], dict[str, Any]]
) -> Entry:
    """Open or make an entry that the content of these files decides, and what `about` says; see `stored`."""
    before = [_identity(file) for file in files]
    digests = [_file_digest(file, identity) for file, identity in zip(files, before, strict=True)]

    def build_unchanged(workspace: Workspace) -> dict[str, Any]:
        facts = build(workspace)
        for file, identity in zip(files, before, strict=True):
            if _identity(file) != identity:
                raise DataError(f"{file}: has changed while it was read; wait until it is complete.")
        return facts

    return stored({**about, "files": digests}, build_unchanged)


def _file_digest(file: Path, identity: dict[str, Any]) -> str:
    """Return the SHA-256 of a file; of one that is the same as when it was last read, without reading it."""
    name = hashlib.sha256(identity["path"].encode()).hexdigest()[:40]
    note = cache_folder() / "store" / "digests" / f"{name}.json"
    with suppress(OSError, ValueError, KeyError, TypeError):  # never seen, or the note is damaged
        noted = json.loads(note.read_text(encoding="utf-8"))
        if noted["identity"] == identity:
            return str(noted["sha256"])
    with file.open("rb") as content:
        digest = hashlib.file_digest(content, "sha256").hexdigest()
    if time.time_ns() - max(identity["mtime_ns"], identity["ctime_ns"]) > SETTLED:
        with suppress(OSError):  # or it is read again the next time
            write_atomically(note, json.dumps({"identity": identity, "sha256": digest}).encode())
    return digest


def _identity(file: Path) -> dict[str, Any]:
    """Return what changes when a file's content does."""
    found = file.stat()
    return {
        "path": str(file.resolve()),
        "size": found.st_size,
        "mtime_ns": found.st_mtime_ns,
        "ctime_ns": found.st_ctime_ns,
        "inode": found.st_ino,
        "device": found.st_dev,
    }
