"""Cache entries on disk. An entry is a folder whose name is a digest of everything that decides its content.

<cache>/store/<key>/entry.json   how the entry was made, the digests of its arrays, and facts about them
<cache>/store/<key>/<name>.npy   one array each

An entry is complete when it appears, and never changes. Deleting it is safe: the next run makes it again.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from glasu import __version__
from glasu.data.cache.arrays import PIECE_BYTES, SUFFIX, FolderWorkspace, Workspace, map_array
from glasu.data.paths import cache_folder
from glasu.errors import DataError
from glasu.files import sync_file, sync_folder, write_atomically

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import NDArray

CONTENT = 1  # version of the conversions; a new number gives every entry a new key
LAYOUT = 2  # of the files of an entry; entries of another layout are made again, under the same key
MANIFEST = "entry.json"
ATTEMPTS = 3  # at making an entry, if other processes keep damaging it
ABANDONED = 24 * 3600.0  # seconds after which an unfinished entry is deleted
Facts: TypeAlias = dict[str, Any]  # a JSON object


@dataclass(frozen=True, eq=False)
class Entry:
    """Arrays by name, and facts about them."""

    key: str
    arrays: Mapping[str, NDArray[Any]]
    facts: Facts


@dataclass(frozen=True)
class Cache:
    """A folder of entries, and the limits that decide when and how entries are made."""

    root: Path = field(default_factory=cache_folder)
    min_bytes: int = 4_000_000  # smaller data is read again each time, which takes less than a quarter of a second
    piece_bytes: int = PIECE_BYTES
    settle_ns: int = 2_000_000_000  # a file changed more recently may change again without a new time stamp

    @property
    def folder(self) -> Path:
        return self.root / "store"

    def open(self, about: Mapping[str, object], build: Callable[[Workspace], Facts]) -> Entry:
        """Open an entry; make it first if it does not exist or is damaged.

        Several processes may make one entry at the same time: the first one to finish wins, and all read the same bits.
        If the cache folder cannot be written, the entry is made in memory.

        Args:
            about: everything that decides the content, as JSON.
            build: writes the arrays to a workspace, and returns the facts.
        """
        key = make_key(about)
        place = self.folder / key
        for _ in range(ATTEMPTS):
            entry = _open(place)
            if entry is not None:
                return entry
            temporary = _make_temporary_folder(place)
            if temporary is None:
                break
            try:
                _write_entry(FolderWorkspace(temporary, self.piece_bytes), about, build)
                _publish(temporary, place)
            finally:
                shutil.rmtree(temporary, ignore_errors=True)
        workspace = Workspace(self.piece_bytes)
        return Entry(key, workspace.arrays, build(workspace))

    def open_for_files(
        self, files: Sequence[Path], about: Mapping[str, object], build: Callable[[Workspace], Facts]
    ) -> Entry:
        """Open or make an entry that the content of these files and `about` decide."""
        before = [_identify(file) for file in files]
        digests = [self._digest_file(file, identity) for file, identity in zip(files, before, strict=True)]

        def build_from_unchanged_files(workspace: Workspace) -> Facts:
            facts = build(workspace)
            for file, identity in zip(files, before, strict=True):
                if _identify(file) != identity:
                    raise DataError(f"{file}: changed while it was read; wait until it is complete.")
            return facts

        return self.open({**about, "files": digests}, build_from_unchanged_files)

    def covers(self, files: Sequence[Path]) -> bool:
        """Return whether files are large enough to convert; a missing file is the reader's to report."""
        return all(file.is_file() for file in files) and sum(file.stat().st_size for file in files) >= self.min_bytes

    def _digest_file(self, file: Path, identity: Facts) -> str:
        """Return the SHA-256 of a file; an unchanged file is not read again."""
        name = hashlib.sha256(identity["path"].encode()).hexdigest()[:40]
        note = self.folder / "digests" / f"{name}.json"
        with suppress(OSError, ValueError, KeyError, TypeError):  # no note, or a damaged one
            noted = json.loads(note.read_text(encoding="utf-8"))
            if noted["identity"] == identity:
                return str(noted["sha256"])
        digest = _sha256(file)
        if time.time_ns() - max(identity["mtime_ns"], identity["ctime_ns"]) > self.settle_ns:
            with suppress(OSError):  # then the next run reads the file again
                write_atomically(note, json.dumps({"identity": identity, "sha256": digest}).encode())
        return digest


def make_key(about: Mapping[str, object]) -> str:
    """Return the name of an entry: a digest of its description and of the versions that make it."""
    decides = {"format": CONTENT, "glasu": __version__, "numpy": np.__version__, **about}
    return hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()[:40]


def _write_entry(workspace: FolderWorkspace, about: Mapping[str, object], build: Callable[[Workspace], Facts]) -> None:
    """Write an entry and wait until it is on disk."""
    try:
        facts = build(workspace)
    finally:
        workspace.close()
    arrays = {}
    for name in workspace.arrays:
        path = workspace.path(name)
        sync_file(path)
        arrays[name] = {"sha256": _sha256(path), **_stamp(path)}
    _write_manifest(workspace.folder, {"layout": LAYOUT, "about": dict(about), "arrays": arrays, "facts": facts})


def _write_manifest(folder: Path, content: Facts) -> None:
    text = json.dumps(content)
    digest = hashlib.sha256(text.encode()).hexdigest()
    write_atomically(folder / MANIFEST, f"{digest}\n{text}\n".encode())


def _open(place: Path) -> Entry | None:
    """Open an entry without reading its arrays; return None if it is missing, incomplete or changed.

    An array file with a new time stamp is read and compared with its digest.
    """
    try:
        digest, text = (place / MANIFEST).read_text(encoding="utf-8").rstrip("\n").split("\n")
        if hashlib.sha256(text.encode()).hexdigest() != digest:
            return None
        content = json.loads(text)
        if content.get("layout") != LAYOUT:
            return None
        arrays, touched = {}, False
        for name, noted in content["arrays"].items():
            path = place / f"{name}{SUFFIX}"
            stamp = _stamp(path)
            if stamp["size"] != noted["size"]:
                return None
            if stamp["mtime_ns"] != noted["mtime_ns"]:
                if _sha256(path) != noted["sha256"]:
                    return None
                touched = True
                noted.update(stamp)
            arrays[name] = map_array(path)
    except (OSError, ValueError):
        return None
    if touched:
        with suppress(OSError):  # then the next run reads the file again
            _write_manifest(place, content)
    return Entry(place.name, arrays, content["facts"])


def _make_temporary_folder(place: Path) -> Path | None:
    """Return a new folder beside the place, private to its owner, or None if it cannot be made; delete old ones."""
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
    """Rename an entry to its place, unless another process has put a good one there."""
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
    sync_folder(place.parent)


def _sha256(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def _stamp(path: Path) -> dict[str, int]:
    found = path.stat()
    return {"size": found.st_size, "mtime_ns": found.st_mtime_ns}


def _identify(file: Path) -> Facts:
    """Return the properties of a file that change with its content."""
    found = file.stat()
    owner = {"ctime_ns": found.st_ctime_ns, "inode": found.st_ino, "device": found.st_dev}
    return {"path": str(file.resolve()), **_stamp(file), **owner}
