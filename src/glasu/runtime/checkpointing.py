"""Save the state of a role between two rounds, and verify it when it is read. Torch is loaded only for tensors.

file     magic, schema version, SHA-256 of schema version and body, body
body     safetensors: the arrays of the state, and everything else as JSON in its metadata

A state is a frozen dataclass. Its fields and their types decide how it is saved, so a new field needs no code here.

Two rules make exact resume possible (RELIABILITY.md, rule 2). A role keeps its last two checkpoints. The checkpoint of
round t is durable before the role sends its first message of round t+1. Without either, there can be a crash after
which no round is common to all roles.
"""

from __future__ import annotations

import hashlib
import json
import struct
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, save

from glasu.errors import CheckpointError, ConfigError, DataError
from glasu.files import retry_without_descriptors, write_atomically
from glasu.records import RecordError, parse_json, read_record, to_plain
from glasu.registry import Extension, require_extensions

MAGIC, SCHEMA = b"GLCP", 2
HEAD, LENGTH = struct.Struct("<4sI32s"), struct.Struct("<Q")  # LENGTH: of the JSON header of the safetensors body
KEPT = 2
SUFFIX = ".checkpoint"
START = "start"  # stands for the digest of round 0
TENSOR, ARRAY = "$tensor", "$array"  # {TENSOR: name} in the JSON stands for the array of that name

Arrays = dict[str, NDArray[Any]]
T = TypeVar("T")


def to_arrays(state: Any) -> tuple[Arrays, Any]:
    """Split a state into named arrays and JSON values; `from_arrays` is the inverse."""
    arrays: Arrays = {}
    return arrays, _take_arrays(to_plain(state), "", arrays)


def from_arrays(cls: type[T], arrays: Mapping[str, NDArray[Any]], facts: object, source: str) -> T:
    """Build a state from named arrays and JSON values, or raise RecordError."""
    # State modules import these names for type checking only. The server's state has no tensor and needs no torch.
    names: dict[str, Any] = {"Mapping": Mapping, "NDArray": NDArray, "Any": Any, "Tensor": _NoTensor}
    if arrays:
        import torch

        names["Tensor"] = torch.Tensor
    return read_record(cls, _put_arrays(facts, arrays), source, finite=False, names=names)


class _NoTensor:
    """Stands for torch.Tensor where a state holds no tensor."""


def _is_tensor(value: object) -> bool:
    torch = sys.modules.get("torch")  # if torch was never imported, there is no tensor
    return torch is not None and isinstance(value, torch.Tensor)


def _take_arrays(value: Any, path: str, arrays: Arrays) -> Any:
    """Replace every array below `value` by a reference to an entry of `arrays`."""
    if isinstance(value, dict):
        return {key: _take_arrays(item, f"{path}/{key}", arrays) for key, item in value.items()}
    if isinstance(value, list):
        return [_take_arrays(item, f"{path}/{index}", arrays) for index, item in enumerate(value)]
    name = path.removeprefix("/")
    if _is_tensor(value):
        arrays[name] = value.detach().contiguous().numpy()
        return {TENSOR: name}
    if isinstance(value, np.ndarray):
        arrays[name] = np.ascontiguousarray(value).reshape(value.shape)
        return {ARRAY: name}
    return value


def _put_arrays(value: Any, arrays: Mapping[str, NDArray[Any]]) -> Any:
    """Replace every reference below `value` by its array; a reference to nothing stays and is refused later."""
    if isinstance(value, dict):
        if len(value) == 1:
            ((kind, name),) = value.items()
            if kind in (TENSOR, ARRAY) and isinstance(name, str) and name in arrays:
                return _to_tensor(arrays[name]) if kind == TENSOR else arrays[name].copy()
        return {key: _put_arrays(item, arrays) for key, item in value.items()}
    return [_put_arrays(item, arrays) for item in value] if isinstance(value, list) else value


def _to_tensor(array: NDArray[Any]) -> Any:
    import torch

    return torch.from_numpy(array.copy())  # the loaded array is a read-only view of the file's content


@dataclass(frozen=True)
class About:
    """The JSON part of a checkpoint file."""

    round: int
    owner: str  # role and run; a file in the wrong folder is recognised by it
    extensions: tuple[Extension, ...]  # that the run uses
    state: Any


class OldSchemaError(ConfigError):
    """A checkpoint was written by another version of this program."""


def pack(round_index: int, owner: str, extensions: tuple[Extension, ...], state: Any) -> bytes:
    """Return the content of a checkpoint file."""
    arrays, facts = to_arrays(state)
    body = save(arrays, {"glasu": json.dumps(to_plain(About(round_index, owner, extensions, facts)))})
    return HEAD.pack(MAGIC, SCHEMA, _digest(SCHEMA, body)) + body


def unpack(content: bytes) -> tuple[About, Arrays]:
    """Return the parts of a checkpoint file, or raise ValueError if it is damaged."""
    if len(content) < HEAD.size:
        raise ValueError(f"it has {len(content)} bytes, and its head alone has {HEAD.size}")
    magic, schema, digest = HEAD.unpack_from(content)
    body = content[HEAD.size :]
    if magic != MAGIC:
        raise ValueError("it is not a checkpoint")
    if digest != _digest(schema, body):
        raise ValueError("its SHA-256 does not match its content")
    if schema != SCHEMA:
        raise OldSchemaError(f"has schema {schema}, and this version of glasu reads {SCHEMA}")
    try:
        return _read_about(body), load(body)
    except (SafetensorError, RecordError, struct.error) as error:
        raise ValueError(f"it cannot be read: {error}") from None


def _digest(schema: int, body: bytes) -> bytes:
    return hashlib.sha256(struct.pack("<I", schema) + body).digest()


def _read_about(body: bytes) -> About:
    """Read the metadata of a safetensors body, which is in its JSON header."""
    (length,) = LENGTH.unpack_from(body)
    header = parse_json(body[LENGTH.size : LENGTH.size + length], "the header")
    metadata = header.get("__metadata__") if isinstance(header, dict) else None
    text = metadata.get("glasu") if isinstance(metadata, dict) else None
    about = parse_json(text if isinstance(text, str) else "", "the metadata")
    return read_record(About, about, "the metadata", finite=False)


class Store:
    """The checkpoints of one owner in one folder: the last two, one file each."""

    def __init__(self, folder: Path, owner: str, extensions: tuple[Extension, ...] = ()) -> None:
        """Use a folder.

        Args:
            folder: of the checkpoints.
            owner: role and run.
            extensions: that the run uses; every checkpoint records them.
        """
        self.folder, self.owner, self.extensions = folder, owner, extensions

    def save(self, round_index: int, state: Any) -> str:
        """Write a checkpoint durably, remove all but the last two of this owner, and return its digest."""
        content = pack(round_index, self.owner, self.extensions, state)
        path = self._path(round_index)
        try:
            write_atomically(path, content, mode=0o600)
            done = [index for index in self._rounds() if index <= round_index and not self._has_other_owner(index)]
            for old in done[:-KEPT]:
                self._path(old).unlink(missing_ok=True)
        except OSError as error:
            raise CheckpointError(
                f"{path}: the checkpoint cannot be written ({error.strerror}); earlier ones are intact. "
                "Fix the cause and start the same command again: it resumes from there.",
                f"the checkpoint of round {round_index} cannot be written there ({error.strerror}); earlier ones are "
                "intact. When the cause is fixed, start the same commands again.",
            ) from error
        return _hex(content)

    def load(self, round_index: int, cls: type[T]) -> T:
        """Read the state of a checkpoint; refuse one that is damaged or belongs to another owner."""
        about, arrays, _ = self._read(round_index)
        return from_arrays(cls, arrays, about.state, str(self._path(round_index)))

    def digests(self, damaged: list[str] | None = None) -> dict[int, str]:
        """Return {round: digest} of the intact checkpoints, in increasing order.

        Round 0 counts as a checkpoint until there are two later ones: the settings determine it.

        Args:
            damaged: a message about each damaged checkpoint is appended.
        """
        found = {0: START} if len(self._rounds()) < KEPT else {}
        for round_index in self._rounds():
            try:
                found[round_index] = self._read(round_index)[2]
            except DataError as error:
                if damaged is not None:
                    damaged.append(str(error))
        return found

    def open(self, every: int) -> tuple[dict[int, str], list[str]]:
        """Return `digests` of a run that resumes, and a line about each checkpoint that is not used.

        Refuse a run that has no intact checkpoint: it must not start over unless the user says so. The exception is
        a run of which only the first checkpoint was ever due, because round 0 stands in for it.

        Args:
            every: the number of rounds between two checkpoints.
        """
        self.remove_partial_files()
        damaged: list[str] = []
        found = self.digests(damaged)
        if damaged and not any(found) and max(self._rounds()) > every:
            raise ConfigError(
                f"{self.folder}: no checkpoint is intact, so this run cannot resume; restore one, or start over with "
                f"--fresh. {damaged[-1]}"
            )
        return found, [f"not used: {line}" for line in damaged]

    def clear(self) -> list[Path]:
        """Remove all checkpoints and return their paths."""
        removed = [self._path(round_index) for round_index in self._rounds()]
        for path in removed:
            path.unlink()
        self.remove_partial_files()
        return removed

    def remove_partial_files(self) -> None:
        """Remove temporary files of a killed process. The folder is locked, so no other process writes here."""
        for path in self.folder.glob(f".round-*{SUFFIX}.*"):
            path.unlink(missing_ok=True)

    def _has_other_owner(self, round_index: int) -> bool:
        """Return whether a file names another owner; a damaged file names none."""
        path = self._path(round_index)
        try:
            with retry_without_descriptors(lambda: path.open("rb")) as file:
                file.seek(HEAD.size)
                start = file.read(LENGTH.size)
                length = min(LENGTH.unpack(start)[0], path.stat().st_size)
                return _read_about(start + file.read(length)).owner != self.owner
        except (OSError, RecordError, struct.error):
            return False

    def _read(self, round_index: int) -> tuple[About, Arrays, str]:
        path = self._path(round_index)
        try:
            content = retry_without_descriptors(path.read_bytes)
            about, arrays = unpack(content)
            if (about.round, about.owner) != (round_index, self.owner):
                raise ValueError(f"it is the checkpoint of round {about.round} of {about.owner}, not of {self.owner}")
        except OSError as error:
            raise DataError(f"{path}: cannot be read ({error.strerror}).") from None
        except ValueError as error:
            raise DataError(f"{path}: is damaged or was exchanged: {error}.") from None
        except OldSchemaError as error:
            raise OldSchemaError(
                f"{path}: {error}; finish the run with that version, or start over with --fresh."
            ) from None
        require_extensions(about.extensions, str(path))
        return about, arrays, _hex(content)

    def _path(self, round_index: int) -> Path:
        return self.folder / f"round-{round_index:08d}{SUFFIX}"

    def _rounds(self) -> list[int]:
        try:  # `glob` would hide that the folder could not be opened
            files = retry_without_descriptors(lambda: [path.name for path in self.folder.iterdir()])
        except FileNotFoundError:
            return []
        names = [name.removeprefix("round-").removesuffix(SUFFIX) for name in files if name.endswith(SUFFIX)]
        return sorted(int(name) for name in names if name.isdecimal())


class Saver:
    """Writes one checkpoint at a time in the background; `settle` waits until it is durable."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self._writer = ThreadPoolExecutor(1, "glasu-checkpoint")
        self._writing: Future[str] | None = None

    def save(self, round_index: int, state: Any) -> None:
        """Start to write a state, which must not change any more."""
        self.settle()
        self._writing = self._writer.submit(self.store.save, round_index, state)

    def settle(self) -> None:
        """Wait until the last checkpoint is durable; raise CheckpointError if it cannot be written."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def close(self) -> None:
        """Stop the writing thread."""
        self._writer.shutdown(wait=True)


def refuse_unknown_checkpoints(folder: Path, state_file: str) -> None:
    """Refuse to start a run in a folder that has checkpoints, but no state file that identifies their run.

    Args:
        folder: of the checkpoints.
        state_file: the name of the missing file.
    """
    names = ", ".join(sorted(path.name for path in folder.glob(f"round-*{SUFFIX}")))
    if names:
        raise ConfigError(
            f"{folder}: holds checkpoints of another run ({names}), and {state_file} is missing; restore {state_file}, "
            "choose another --out, or start over with --fresh, which removes them.",
            "holds checkpoints of an unknown run; give another --out, or --fresh, at the server and at every party",
        )


def find_common_round(available: Sequence[Mapping[int, str]]) -> int | None:
    """Return the greatest round of which every role has a checkpoint, or None."""
    return max(set.intersection(*map(set, available)), default=None)


def _hex(content: bytes) -> str:
    digest: bytes = HEAD.unpack_from(content)[2]
    return digest.hex()
