"""Save the state of a role between two rounds, and verify it when it is read. Torch is loaded only for tensors.

file     magic, schema number, SHA-256 of schema number and body, body
body     a safetensors file: tensors and long lists of floats as arrays; the rest of the state as JSON in its metadata

A state is a frozen dataclass. Its fields and their types decide how it is saved, so a new field needs no code here. The
schema number is derived from the fields. So if the fields have changed since a checkpoint was written, it is refused.

Two rules make exact resume possible (docs/reliability.md). A role keeps its last two checkpoints. The checkpoint of
round t is durable before the role sends its first message of round t+1. If either rule were broken, a crash could leave
no round for which every role has a checkpoint. `Store` and `Saver` handle the state of one role, or the states of all
roles of a simulation together (`runtime/simulation_checkpoints.py`).
"""

from __future__ import annotations

import hashlib
import json
import logging
import struct
import sys
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, save

from glasu.errors import CheckpointError, ConfigError, DataError
from glasu.files import retry_without_descriptors, write_atomically
from glasu.records import SCALARS, RecordError, list_fields, parse_json, read_record, to_plain
from glasu.registry import Extension, require_extensions
from glasu.runtime.workers import PendingResult, Workers

CHECKPOINT_MAGIC, LAYOUT = b"GLCP", 8  # the layout number changes with the layout of a file, not with the states
HEAD, LENGTH = struct.Struct("<4sI32s"), struct.Struct("<Q")  # LENGTH: size of the JSON header of the safetensors body
KEPT = 2
SUFFIX = ".checkpoint"
ROUND, WARM = "round", "warm"  # what the number in a checkpoint's name counts: rounds, or steps of the warm start
START = "start"  # used as the digest of round 0
TENSOR = "$tensor"  # {TENSOR: name} in the JSON is a reference to the tensor of that name
FLOATS = "$floats"  # {FLOATS: name} is a reference to a long list of floats, such as the losses of all rounds
MANY_FLOATS = 64  # lists of at least this length are saved as arrays, which is ten times faster than JSON

Arrays = dict[str, NDArray[Any]]
T = TypeVar("T")


def to_arrays(state: Any) -> tuple[Arrays, Any]:
    """Split a state into named arrays and JSON values; `from_arrays` is the inverse."""
    arrays: Arrays = {}
    return arrays, _take_arrays(to_plain(state), "", arrays)


def from_arrays(cls: type[T], arrays: Mapping[str, NDArray[Any]], facts: object, source: str) -> T:
    """Build a state from named arrays and JSON values, or raise RecordError."""
    return read_record(cls, _put_arrays(facts, arrays), source, finite=False, names=_find_type_names())


class _NoTensor:
    """Takes the place of torch.Tensor if torch is not loaded. Then no state contains a tensor."""


def _find_type_names() -> dict[str, Any]:
    """Return the types that state modules import for type checking only.

    The server's state contains no tensor, so it can be saved without torch.
    """
    torch = sys.modules.get("torch")
    return {"Mapping": Mapping, "Tensor": _NoTensor if torch is None else torch.Tensor}


def find_schema(cls: type) -> int:
    """Return the schema number of a state class. It changes when a field of the class or of a nested record changes."""
    return zlib.crc32(repr((LAYOUT, list_fields(cls, _find_type_names()))).encode())


def _take_arrays(value: Any, path: str, arrays: Arrays) -> Any:
    """Replace every tensor and every long list of floats below `value` with a reference to an entry of `arrays`."""
    if type(value) in SCALARS:
        return value
    if isinstance(value, dict):
        return {key: _take_arrays(item, f"{path}/{key}", arrays) for key, item in value.items()}
    if isinstance(value, list):
        kinds = set(map(type, value))
        if kinds == {float} and len(value) >= MANY_FLOATS:
            return {FLOATS: _add_array(path, np.array(value), arrays)}
        if kinds <= SCALARS:
            return value
        return [_take_arrays(item, f"{path}/{index}", arrays) for index, item in enumerate(value)]
    torch = sys.modules.get("torch")  # None if torch was never imported; then there are no tensors
    if torch is None or not isinstance(value, torch.Tensor):
        return value
    return {TENSOR: _add_array(path, value.detach().contiguous().numpy(), arrays)}


def _add_array(path: str, array: NDArray[Any], arrays: Arrays) -> str:
    name = path.removeprefix("/")
    arrays[name] = array
    return name


def _put_arrays(value: Any, arrays: Mapping[str, NDArray[Any]]) -> Any:
    """Replace every reference below `value` with its content. `read_record` later refuses unknown references."""
    if isinstance(value, list):
        return [_put_arrays(item, arrays) for item in value]
    if not isinstance(value, dict):
        return value
    reference, name = next(iter(value.items()), (None, None))
    if len(value) == 1 and isinstance(name, str) and name in arrays:
        if reference == FLOATS:
            return arrays[name].tolist()
        if reference == TENSOR:
            import torch

            return torch.from_numpy(arrays[name].copy())  # the loaded array is a read-only view of the file's content
    return {key: _put_arrays(item, arrays) for key, item in value.items()}


@dataclass(frozen=True)
class CheckpointHeader:
    """The JSON part of a checkpoint file."""

    round: int
    owner: str  # role and run, to recognise a file in the wrong folder
    extensions: tuple[Extension, ...]  # the extensions that the run uses
    state: Any


class OldSchemaError(ConfigError):
    """A checkpoint was written by another version of this program."""


def write_checkpoint(round_index: int, owner: str, extensions: tuple[Extension, ...], state: Any) -> bytes:
    """Return the content of a checkpoint file."""
    arrays, facts = to_arrays(state)
    header = {**to_plain(CheckpointHeader(round_index, owner, extensions, None)), "state": facts}
    body = save(arrays, {"glasu": json.dumps(header)})
    schema = find_schema(type(state))
    return HEAD.pack(CHECKPOINT_MAGIC, schema, _digest(schema, body)) + body


def read_checkpoint(content: bytes, expected_schema: int) -> tuple[CheckpointHeader, Arrays]:
    """Return the parts of a checkpoint file, or raise ValueError if it is damaged."""
    if len(content) < HEAD.size:
        raise ValueError(f"it has {len(content)} bytes, and its head alone has {HEAD.size}")
    magic, schema, digest = HEAD.unpack_from(content)
    body = content[HEAD.size :]
    if magic != CHECKPOINT_MAGIC:
        raise ValueError("it is not a checkpoint")
    if digest != _digest(schema, body):
        raise ValueError("its SHA-256 does not match its content")
    if schema != expected_schema:
        raise OldSchemaError(f"has schema {schema:08x}, and this version of glasu reads {expected_schema:08x}")
    try:
        return _read_header(body), load(body)
    except (SafetensorError, RecordError, struct.error) as error:
        raise ValueError(f"it cannot be read: {error}") from None


def _digest(schema: int, body: bytes) -> bytes:
    return hashlib.sha256(struct.pack("<I", schema) + body).digest()


def _read_header(body: bytes) -> CheckpointHeader:
    """Read the checkpoint header, which is metadata in the JSON header of a safetensors body."""
    (length,) = LENGTH.unpack_from(body)
    header = parse_json(body[LENGTH.size : LENGTH.size + length], "the header")
    metadata = header.get("__metadata__") if isinstance(header, dict) else None
    text = metadata.get("glasu") if isinstance(metadata, dict) else None
    content = parse_json(text if isinstance(text, str) else "", "the metadata")
    return read_record(CheckpointHeader, content, "the metadata", finite=False)


class Store(Generic[T]):
    """The last two checkpoints of one owner and one kind, as files in one folder."""

    def __init__(
        self, cls: type[T], folder: Path, owner: str, extensions: tuple[Extension, ...] = (), *, kind: str = ROUND
    ) -> None:
        """Use a folder for the checkpoints of an owner.

        Args:
            cls: the type of the states.
            folder: the folder of the checkpoints.
            owner: a text that names the role and the run.
            extensions: the extensions that the run uses; every checkpoint records them.
            kind: ROUND or WARM. With WARM, all arguments named `round_index` count warm steps instead of rounds.
        """
        self.cls, self.folder, self.owner, self.extensions, self.kind = cls, folder, owner, extensions, kind
        self._saved: list[int] = []  # rounds whose files are known to belong to this owner, so they need not be read

    def save(self, round_index: int, state: T) -> str:
        """Write a checkpoint durably and return its digest. Keep only the last two checkpoints of this owner."""
        content = write_checkpoint(round_index, self.owner, self.extensions, state)
        path = self._path(round_index)
        try:
            write_atomically(path, content, mode=0o600)
            known = (*self._saved, round_index)
            found = [index for index in self._rounds() if index <= round_index]
            done = [index for index in found if index in known or not self._has_other_owner(index)]
            for old in done[:-KEPT]:
                self._path(old).unlink(missing_ok=True)
            self._saved = done[-KEPT:]
        except OSError as error:
            raise CheckpointError(
                f"{path}: the checkpoint cannot be written ({error.strerror}); earlier checkpoints are intact. "
                "Fix the cause and start the same command again: it resumes from the last intact checkpoint.",
                f"the checkpoint of round {round_index} cannot be written there ({error.strerror}); earlier "
                "checkpoints are intact. When the cause is fixed, start the same commands again.",
            ) from error
        return _format_hex(content)

    def load(self, round_index: int) -> T:
        """Read the state of a checkpoint. Refuse a checkpoint that is damaged or belongs to another owner."""
        header, arrays, _ = self._read(round_index)
        return from_arrays(self.cls, arrays, header.state, str(self._path(round_index)))

    def digests(self, log: logging.Logger | None = None) -> dict[int, str]:
        """Return {round: digest} of the intact checkpoints, in increasing order.

        Round 0 counts as a checkpoint until two later checkpoints exist, because the settings determine its state.

        Args:
            log: receives a warning about each damaged checkpoint; None: no warnings.
        """
        found, damaged = self._find_checkpoints()
        if log is not None:
            _warn_about(damaged, log)
        return found

    def open(self, every: int, log: logging.Logger) -> dict[int, str]:
        """Return `digests` for a run that resumes, and log a warning about each damaged checkpoint.

        Refuse a run whose checkpoints are all damaged, because only the user may decide to start over. A run that has
        written at most one checkpoint is not refused, because it can start again from round 0.

        Args:
            every: the number of rounds between two checkpoints.
            log: receives the warnings.
        """
        self.remove_partial_files()
        found, damaged = self._find_checkpoints()
        if damaged and not any(found) and max(self._rounds()) > every:
            raise ConfigError(
                f"{self.folder}: no checkpoint is intact, so this run cannot resume; restore one, or start over with "
                f"--fresh. {damaged[-1]}"
            )
        _warn_about(damaged, log)
        return found

    def clear(self) -> list[Path]:
        """Remove all checkpoints and return their paths."""
        removed = [self._path(round_index) for round_index in self._rounds()]
        for path in removed:
            path.unlink()
        self.remove_partial_files()
        return removed

    def remove_partial_files(self) -> None:
        """Remove temporary files of a killed process. The folder is locked, so no other process writes here."""
        for path in self.folder.glob(f".{self.kind}-*{SUFFIX}.*"):
            path.unlink(missing_ok=True)

    def _find_checkpoints(self) -> tuple[dict[int, str], list[str]]:
        """Return `digests`, and the errors of the damaged checkpoints."""
        found = {0: START} if len(self._rounds()) < KEPT else {}
        damaged: list[str] = []
        for round_index in self._rounds():
            try:
                found[round_index] = self._read(round_index)[2]
            except DataError as error:
                damaged.append(str(error))
        return found, damaged

    def _has_other_owner(self, round_index: int) -> bool:
        """Return whether a file names another owner; False for a damaged file."""
        path = self._path(round_index)
        try:
            with retry_without_descriptors(lambda: path.open("rb")) as file:
                file.seek(HEAD.size)
                start = file.read(LENGTH.size)
                length = min(LENGTH.unpack(start)[0], path.stat().st_size)
                return _read_header(start + file.read(length)).owner != self.owner
        except (OSError, RecordError, struct.error):
            return False

    def _read(self, round_index: int) -> tuple[CheckpointHeader, Arrays, str]:
        path = self._path(round_index)
        try:
            content = retry_without_descriptors(path.read_bytes)
            header, arrays = read_checkpoint(content, find_schema(self.cls))
            if (header.round, header.owner) != (round_index, self.owner):
                raise ValueError(f"it is the checkpoint of round {header.round} of {header.owner}, not of {self.owner}")
        except OSError as error:
            raise DataError(f"{path}: cannot be read ({error.strerror}).") from None
        except ValueError as error:
            raise DataError(f"{path}: is damaged or was replaced: {error}.") from None
        except OldSchemaError as error:
            raise OldSchemaError(
                f"{path}: {error}; finish the run with that version, or start over with --fresh."
            ) from None
        require_extensions(header.extensions, str(path))
        return header, arrays, _format_hex(content)

    def _path(self, round_index: int) -> Path:
        return self.folder / f"{self.kind}-{round_index:08d}{SUFFIX}"

    def _rounds(self) -> list[int]:
        try:  # `glob` would not report that the folder could not be opened
            files = retry_without_descriptors(lambda: [path.name for path in self.folder.iterdir()])
        except FileNotFoundError:
            return []
        names = [name.removeprefix(f"{self.kind}-").removesuffix(SUFFIX) for name in files if name.endswith(SUFFIX)]
        return sorted(int(name) for name in names if name.isdecimal())


class Saver(Generic[T]):
    """Writes checkpoints in the background, one at a time. `wait_until_durable` waits for the last one."""

    def __init__(self, store: Store[T]) -> None:
        self.store = store
        self._writer = Workers(1, "glasu-checkpoint")
        self._writing: PendingResult[str] | None = None

    def save(self, round_index: int, state: T, store: Store[T] | None = None) -> None:
        """Start to write a state, which must not change afterwards. If `store` is given, write to it instead."""
        self.wait_until_durable()
        self._writing = self._writer.submit((store or self.store).save, round_index, state)

    def wait_until_durable(self) -> None:
        """Wait until the last checkpoint is durable; raise CheckpointError if it cannot be written."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.wait()

    def close(self) -> None:
        """Stop the writing thread."""
        self._writer.close()


def refuse_unknown_checkpoints(folder: Path, state_file: str) -> None:
    """Refuse to start a run in a folder that has checkpoints, but no state file that identifies their run.

    Args:
        folder: the folder of the checkpoints.
        state_file: the name of the missing file.
    """
    names = ", ".join(sorted(path.name for path in folder.glob(f"*{SUFFIX}")))
    if names:
        raise ConfigError(
            f"{folder}: holds checkpoints of another run ({names}), and {state_file} is missing; restore {state_file}, "
            "choose another --out, or start over with --fresh, which removes them.",
            "holds checkpoints of an unknown run; give another --out, or --fresh, at the server and at every party",
        )


def find_common_round(available: Sequence[Mapping[int, str]]) -> int | None:
    """Return the latest round for which every role has a checkpoint, or None."""
    return max(set.intersection(*map(set, available)), default=None)


def _warn_about(damaged: Sequence[str], log: logging.Logger) -> None:
    for line in damaged:
        log.warning("not used: %s", line)


def _format_hex(content: bytes) -> str:
    digest: bytes = HEAD.unpack_from(content)[2]
    return digest.hex()
