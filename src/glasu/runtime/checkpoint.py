"""Save a state between two rounds so that a crash cannot spoil it, and verify it when it is read.

file     magic, schema version, SHA-256 of the body, body
body     safetensors: the arrays, and everything else as JSON in its metadata

Neither torch nor PyG is loaded here.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, save

from glasu.errors import CheckpointError, ConfigError, DataError
from glasu.files import retry_without_descriptors, write_atomically

MAGIC, SCHEMA = b"GLCP", 1
HEAD, LENGTH = struct.Struct("<4sI32s"), struct.Struct("<Q")  # the latter of the JSON with which the body begins
KEPT = 2  # with one, or with a checkpoint that is not durable in time, there may be no round that all roles have
SUFFIX = ".checkpoint"
START = "start"  # stands for the digest of round 0


@dataclass(frozen=True, eq=False)
class Snapshot:
    """What there is to know about one role, or about several, after `round` rounds."""

    round: int
    owner: str  # whose state, of which run: a file in the wrong place is recognised by it
    arrays: Mapping[str, NDArray[Any]]
    facts: Mapping[str, Any]  # plain values, as JSON has them


def pack(snapshot: Snapshot) -> bytes:
    """Return the content of a checkpoint file."""
    about = {"round": snapshot.round, "owner": snapshot.owner, "facts": snapshot.facts}
    body = save(dict(snapshot.arrays), {"glasu": json.dumps(about)})
    return HEAD.pack(MAGIC, SCHEMA, _digest(body)) + body


def unpack(content: bytes) -> Snapshot:
    """Return what the content says, or raise ValueError where it is not what was written."""
    if len(content) < HEAD.size:
        raise ValueError(f"it has {len(content)} bytes, and its head alone has {HEAD.size}")
    magic, schema, digest = HEAD.unpack_from(content)
    body = content[HEAD.size :]
    if magic != MAGIC:
        raise ValueError("it is not a checkpoint")
    if schema != SCHEMA:
        raise ValueError(f"it has schema {schema}, and this version reads {SCHEMA}")
    if digest != _digest(body):
        raise ValueError("its SHA-256 is not the one that was written")
    try:
        about = json.loads(_metadata(body)["glasu"])
        return Snapshot(about["round"], about["owner"], load(body), about["facts"])
    except (SafetensorError, KeyError, TypeError, struct.error) as error:
        raise ValueError(f"it cannot be read: {error}") from None


def _digest(body: bytes) -> bytes:
    return hashlib.sha256(struct.pack("<I", SCHEMA) + body).digest()


def _metadata(body: bytes) -> Any:
    """Return the metadata of a safetensors file, which stands in its JSON header."""
    (length,) = LENGTH.unpack_from(body)
    return json.loads(body[LENGTH.size : LENGTH.size + length])["__metadata__"]


class Store:
    """The checkpoints of one owner in one folder: the last two, each in a file of its own."""

    def __init__(self, folder: Path, owner: str) -> None:
        self.folder, self.owner = folder, owner

    def save(self, round_index: int, arrays: Mapping[str, NDArray[Any]], facts: Mapping[str, Any]) -> str:
        """Write a checkpoint and return its digest; it is durable then, and the last two of this owner are left."""
        content = pack(Snapshot(round_index, self.owner, arrays, facts))
        path = self._path(round_index)
        try:
            write_atomically(path, content, mode=0o600)
            done = [index for index in self._rounds() if index <= round_index and not self._is_anothers(index)]
            for old in done[:-KEPT]:
                self._path(old).unlink(missing_ok=True)
        except OSError as error:
            raise CheckpointError(
                f"{path}: the checkpoint cannot be written ({error.strerror}); earlier ones are intact. "
                "Mend that and start the same command again: it goes on from there.",
                f"the checkpoint of round {round_index} cannot be written there ({error.strerror}); earlier ones are "
                "intact. When that is mended, start the same commands again.",
            ) from error
        return _hex(content)

    def load(self, round_index: int) -> Snapshot:
        """Read a checkpoint, or refuse one that is damaged or belongs elsewhere."""
        return self._read(round_index)[0]

    def digests(self, damaged: list[str] | None = None) -> dict[int, str]:
        """Return {round: digest} of the intact checkpoints, in rising order; what is wrong with others is appended.

        The beginning counts as a checkpoint, round 0, until two later ones are there: the settings decide it.
        """
        found = {0: START} if len(self._rounds()) < KEPT else {}
        for round_index in self._rounds():
            try:
                found[round_index] = self._read(round_index)[1]
            except DataError as error:
                if damaged is not None:
                    damaged.append(str(error))
        return found

    def opened(self, every: int, tell: Callable[[str], None]) -> dict[int, str]:
        """Return `digests` for a run that goes on, and tell what is not used; refuse where nothing is left.

        With a checkpoint every so many rounds, the beginning is the one before the first, and stands in for it. A run
        that was further is not started over without being asked.
        """
        self.sweep()
        damaged: list[str] = []
        found = self.digests(damaged)
        for line in damaged:
            tell(f"not used: {line}")
        if damaged and not any(found) and max(self._rounds()) > every:
            raise ConfigError(
                f"{self.folder}: no checkpoint is intact, so this run cannot go on; restore one, or start over with "
                f"--fresh. {damaged[-1]}"
            )
        return found

    def clear(self) -> list[Path]:
        """Remove all checkpoints and return what was removed."""
        removed = [self._path(round_index) for round_index in self._rounds()]
        for path in removed:
            path.unlink()
        self.sweep()
        return removed

    def sweep(self) -> None:
        """Remove what a killed process had begun to write; nobody else writes here now, for the folder is held."""
        for path in self.folder.glob(f".round-*{SUFFIX}.*"):
            path.unlink(missing_ok=True)

    def _is_anothers(self, round_index: int) -> bool:
        """Tell whether a file says of itself that it belongs elsewhere; one that is damaged says nothing."""
        try:
            with retry_without_descriptors(lambda: self._path(round_index).open("rb")) as file:
                file.seek(HEAD.size)
                start = file.read(LENGTH.size)
                length = min(LENGTH.unpack(start)[0], self._path(round_index).stat().st_size)
                return bool(json.loads(_metadata(start + file.read(length))["glasu"])["owner"] != self.owner)
        except (OSError, ValueError, KeyError, TypeError, struct.error):
            return False

    def _read(self, round_index: int) -> tuple[Snapshot, str]:
        path = self._path(round_index)
        try:
            content = retry_without_descriptors(path.read_bytes)
            snapshot = unpack(content)
            if (snapshot.round, snapshot.owner) != (round_index, self.owner):
                raise ValueError(
                    f"it is the checkpoint of round {snapshot.round} of {snapshot.owner}, not of {self.owner}"
                )
        except OSError as error:
            raise DataError(f"{path}: cannot be read ({error.strerror}).") from None
        except ValueError as error:
            raise DataError(f"{path}: is damaged or was exchanged: {error}.") from None
        return snapshot, _hex(content)

    def _path(self, round_index: int) -> Path:
        return self.folder / f"round-{round_index:08d}{SUFFIX}"

    def _rounds(self) -> list[int]:
        try:  # `glob` would hide that the folder could not be opened
            files = retry_without_descriptors(lambda: [path.name for path in self.folder.iterdir()])
        except FileNotFoundError:
            return []
        names = [name.removeprefix("round-").removesuffix(SUFFIX) for name in files if name.endswith(SUFFIX)]
        return sorted(int(name) for name in names if name.isdecimal())


def refuse_to_begin_among_others(folder: Path, memory: str) -> None:
    """Refuse to begin a run where checkpoints lie, for they are another's.

    Args:
        folder: of the checkpoints.
        memory: the file that should say whose they are, and does not.
    """
    names = ", ".join(sorted(path.name for path in folder.glob(f"round-*{SUFFIX}")))
    if names:
        raise ConfigError(
            f"{folder}: holds checkpoints of another run ({names}), and nothing says of which; restore {memory}, "
            "choose another --out, or start over with --fresh, which removes them."
        )


def _hex(content: bytes) -> str:
    digest: bytes = HEAD.unpack_from(content)[2]
    return digest.hex()


def greatest_common(available: Sequence[Mapping[int, str]]) -> int | None:
    """Return the greatest round of which everyone has a checkpoint, or None."""
    return max(set.intersection(*map(set, available)), default=None)
