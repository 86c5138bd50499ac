"""Cache entries on disk. An entry is a folder whose name is a digest of everything that decides its content.

<cache>/store/<key>/entry.json   how the entry was made, its array files, and all values that are not arrays (its facts)
<cache>/store/<key>/<name>.npy   one array each

An entry is complete when it appears, and never changes. Deleting it is safe: the next run makes it again.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from glasu import __version__
from glasu.data.cache.arrays import ARRAY_PIECE, ARRAY_SUFFIX, Workspace, map_array
from glasu.errors import DataError
from glasu.files import sync_file, sync_folder, write_atomically
from glasu.records import RecordError, parse_json, read_record, to_plain

CONTENT = 2  # version of the conversions; a new number gives every entry a new key
ENTRY_FILE = "entry.json"
MAX_BUILDS = 3  # attempts to make an entry if other processes damage it
ABANDONED = 24 * 3600.0  # seconds after which an unfinished entry is deleted
EntryFacts: TypeAlias = dict[str, Any]  # the values of an entry that are not arrays, as a JSON object


@dataclass(frozen=True, eq=False)
class CacheEntry:
    """The arrays of an entry by name, and its other values (`facts`)."""

    key: str
    arrays: Mapping[str, NDArray[Any]]
    facts: EntryFacts


@dataclass(frozen=True)
class Stamp:
    """The properties of an array file that change with its content."""

    size: int
    mtime_ns: int


@dataclass(frozen=True)
class EntryManifest:
    """The content of entry.json."""

    about: Any
    arrays: Mapping[str, Stamp]
    facts: Any
    layout: Literal[3] = 3  # version of the file layout; entries of another layout are made again, under the same key


@dataclass(frozen=True)
class Cache:
    """A folder of entries, and the limits that decide when and how entries are made."""

    root: Path = field(default_factory=lambda: find_cache_folder())
    min_bytes: int = 4_000_000  # smaller data is not cached: reading it takes less than a quarter of a second
    piece_bytes: int = ARRAY_PIECE
    settle_ns: int = 2_000_000_000  # a file that changed within this time may change again without a new time stamp

    @property
    def folder(self) -> Path:
        return self.root / "store"

    def open(self, about: Mapping[str, object], build: Callable[[Workspace], EntryFacts]) -> CacheEntry:
        """Open an entry; make it first if it does not exist or is damaged.

        Several processes may make one entry at the same time. They all use the entry of the first process that
        finishes. If the cache folder cannot be written, the entry is made in memory.

        Args:
            about: all inputs that decide the content, as JSON.
            build: writes the arrays to a workspace, and returns all other values of the entry, its facts.
        """
        key = make_key(about)
        place = self.folder / key
        for _ in range(MAX_BUILDS):
            entry = _open(place)
            if entry is not None:
                return entry
            temporary = _make_temporary_folder(place)
            if temporary is None:
                break
            try:
                _write_entry(Workspace(temporary, self.piece_bytes), about, build)
                _publish(temporary, place)
            finally:
                shutil.rmtree(temporary, ignore_errors=True)
        workspace = Workspace(piece_bytes=self.piece_bytes)
        return CacheEntry(key, workspace.arrays, build(workspace))

    def open_for_files(
        self, files: Sequence[Path], about: Mapping[str, object], build: Callable[[Workspace], EntryFacts]
    ) -> CacheEntry:
        """Open or make an entry whose content depends only on these files and on `about`."""
        before = [_identify(file) for file in files]
        digests = [self._digest_file(file, identity) for file, identity in zip(files, before, strict=True)]

        def build_from_unchanged_files(workspace: Workspace) -> EntryFacts:
            facts = build(workspace)
            for file, identity in zip(files, before, strict=True):
                if _identify(file) != identity:
                    raise DataError(f"{file}: changed while it was read; wait until it is complete.")
            return facts

        return self.open({**about, "files": digests}, build_from_unchanged_files)

    def is_worth_caching(self, files: Sequence[Path]) -> bool:
        """Return whether files are large enough to convert. False if a file is missing: the reader reports this."""
        return all(file.is_file() for file in files) and sum(file.stat().st_size for file in files) >= self.min_bytes

    def _digest_file(self, file: Path, identity: EntryFacts) -> str:
        """Return the SHA-256 of a file. The digest is a cache entry, so an unchanged file is not read again."""

        def read(_: Workspace) -> EntryFacts:
            with file.open("rb") as content:
                return {"sha256": hashlib.file_digest(content, "sha256").hexdigest()}

        settled = time.time_ns() - max(identity["mtime_ns"], identity["ctime_ns"]) > self.settle_ns
        facts = self.open({"kind": "digest", **identity}, read).facts if settled else read(Workspace())
        return str(facts["sha256"])


def make_key(about: Mapping[str, object]) -> str:
    """Return the name of an entry: a digest of its description and of the versions of glasu and numpy."""
    decides = {"format": CONTENT, "glasu": __version__, "numpy": np.__version__, **about}
    return _hash_text(json.dumps(decides, sort_keys=True))[:40]


def find_cache_folder() -> Path:
    """Return the folder of downloads and converted data: GLASU_CACHE, or else the cache folder of the user."""
    own = os.environ.get("GLASU_CACHE")
    return Path(own) if own else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "glasu"


def _write_entry(workspace: Workspace, about: Mapping[str, object], build: Callable[[Workspace], EntryFacts]) -> None:
    """Write an entry and wait until it is on disk."""
    folder = workspace.folder
    assert folder is not None
    try:
        facts = build(workspace)
    finally:
        workspace.close()
    stamps = {}
    for name in workspace.arrays:
        sync_file(folder / f"{name}{ARRAY_SUFFIX}")
        stamps[name] = _read_stamp(folder / f"{name}{ARRAY_SUFFIX}")
    text = json.dumps(to_plain(EntryManifest(about, stamps, facts)))
    write_atomically(folder / ENTRY_FILE, f"{_hash_text(text)}\n{text}\n".encode())


def _open(place: Path) -> CacheEntry | None:
    """Open an entry without reading its arrays; return None if it is missing, incomplete or changed."""
    try:
        digest, text = (place / ENTRY_FILE).read_text(encoding="utf-8").rstrip("\n").split("\n")
        if _hash_text(text) != digest:
            return None
        manifest = read_record(EntryManifest, parse_json(text, str(place)), str(place))
        arrays = {}
        for name, stamp in manifest.arrays.items():
            path = place / f"{name}{ARRAY_SUFFIX}"
            if _read_stamp(path) != stamp:
                return None
            arrays[name] = map_array(path)
    except (OSError, ValueError, RecordError):
        return None
    return CacheEntry(place.name, arrays, manifest.facts)


def _make_temporary_folder(place: Path) -> Path | None:
    """Return a new private folder next to the entry, or None if it cannot be made; delete old temporary folders."""
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        for old in place.parent.glob(".*"):
            with suppress(OSError):  # another process may have renamed it
                if time.time() - old.stat().st_mtime > ABANDONED:
                    shutil.rmtree(old, ignore_errors=True)
        return Path(tempfile.mkdtemp(dir=place.parent, prefix=f".{place.name[:8]}-"))
    except OSError:
        return None


def _publish(temporary: Path, place: Path) -> None:
    """Rename an entry to its final path, unless another process has put an intact entry there."""
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
            return  # another process was faster; the caller opens the entry of that process
        finally:
            shutil.rmtree(aside, ignore_errors=True)
    sync_folder(place.parent)


def _hash_text(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _read_stamp(path: Path) -> Stamp:
    found = path.stat()
    return Stamp(found.st_size, found.st_mtime_ns)


def _identify(file: Path) -> EntryFacts:
    """Return the properties of a file that change with its content."""
    found = file.stat()
    times = {"size": found.st_size, "mtime_ns": found.st_mtime_ns, "ctime_ns": found.st_ctime_ns}
    return {"path": str(file.resolve()), **times, "inode": found.st_ino, "device": found.st_dev}
