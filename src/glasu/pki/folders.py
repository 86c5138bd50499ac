"""Folders with private keys: complete when they appear, readable only by their owner, and never deleted."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

from glasu.errors import ConfigError
from glasu.files import hold_folder, sync_folder, write_atomically

RETIRED = "retired"


@contextmanager
def open_staging(out: Path) -> Iterator[Path]:
    """Lock a folder against a second command; yield a temporary folder inside it for incomplete kits."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        temporary = tempfile.TemporaryDirectory(dir=out, prefix=".new-")
    except OSError as error:
        raise ConfigError(f"--out {out}: cannot be written to ({error.strerror}); choose another folder.") from None
    with temporary as name, hold_folder(out, "wait for it"):
        Path(name).chmod(0o700)
        yield Path(name)


def write_folder(folder: Path, public: Mapping[str, bytes], private: Mapping[str, bytes]) -> None:
    """Write files durably into a new private folder. Their permissions do not depend on the umask."""
    _make_private(folder)
    for contents, mode in ((public, 0o644), (private, 0o600)):
        for name, content in contents.items():
            write_atomically(folder / name, content, mode)


def move_folder(folder: Path, place: Path) -> None:
    """Rename a complete folder. After a crash, either the whole folder or nothing is at the new place."""
    folder.rename(place)
    sync_folder(place.parent)


def retire_folder(folder: Path, now: datetime) -> None:
    """Move a folder to retired/<name>-<time>; do nothing if it does not exist."""
    if not folder.is_dir():
        return
    retired = folder.parent / RETIRED
    if not retired.is_dir():
        _make_private(retired)
    stamp, count = f"{folder.name}-{now:%Y%m%dT%H%M%SZ}", 1
    while (place := retired / (stamp if count == 1 else f"{stamp}-{count}")).exists():
        count += 1
    move_folder(folder, place)


def _make_private(folder: Path) -> None:
    folder.mkdir(mode=0o700)
    folder.chmod(0o700)  # the umask may have removed permissions of the owner
