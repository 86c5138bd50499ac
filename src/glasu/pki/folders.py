"""Folders with keys in them: written whole, readable by their owner only, moved into place, put aside, not deleted."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

from glasu.errors import ConfigError
from glasu.files import hold_folder

RETIRED = "retired"


@contextmanager
def at_work(out: Path) -> Iterator[Path]:
    """Hold a folder against a second command, and lend one inside it that vanishes."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        temporary = tempfile.TemporaryDirectory(dir=out, prefix=".new-")
    except OSError as error:
        raise ConfigError(f"--out {out}: cannot be written to ({error.strerror}); choose another folder.") from None
    with temporary as name, hold_folder(out, "wait for it"):
        Path(name).chmod(0o700)
        yield Path(name)


def write_folder(folder: Path, public: Mapping[str, bytes], private: Mapping[str, bytes]) -> None:
    """Write files durably into a new folder that is its owner's alone, whatever the umask."""
    _make_private(folder)
    for contents, mode in ((public, 0o644), (private, 0o600)):
        for name, content in contents.items():
            handle = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(handle, "wb") as file:
                os.fchmod(handle, mode)
                file.write(content)
                file.flush()
                os.fsync(handle)
    _make_durable(folder)


def move(folder: Path, place: Path) -> None:
    """Move a complete folder to where it belongs; a kit is there whole or not at all."""
    folder.rename(place)
    _make_durable(place.parent)


def retire(folder: Path, now: datetime) -> None:
    """Put a folder aside, under its name and the time; it may have left long ago."""
    if not folder.is_dir():
        return
    shelf = folder.parent / RETIRED
    if not shelf.is_dir():
        _make_private(shelf)
    stamp, count = f"{folder.name}-{now:%Y%m%dT%H%M%SZ}", 1
    while (place := shelf / (stamp if count == 1 else f"{stamp}-{count}")).exists():
        count += 1
    move(folder, place)


def _make_private(folder: Path) -> None:
    folder.mkdir(mode=0o700)
    folder.chmod(0o700)  # an umask may have taken more than it should


def _make_durable(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
