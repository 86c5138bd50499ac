"""Where arrays are made piece by piece: in memory, or in files that are memory maps once they are complete."""

from __future__ import annotations

import hashlib
import math
import os
from abc import ABC, abstractmethod
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from glasu.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path
    from typing import BinaryIO

    from numpy.typing import DTypeLike, NDArray

PIECE_BYTES = 1 << 25  # how much of a large array is worked on at a time
SUFFIX = ".npy"
MINIMAL_HEADER = 64  # bytes, of any .npy file


class Growing(ABC):
    """An array that is written from its first row to its last."""

    @abstractmethod
    def append(self, rows: NDArray[Any]) -> None:
        """Write more rows; they are converted to the array's type."""

    @abstractmethod
    def finish(self) -> NDArray[Any]:
        """Return the whole array; nothing can be appended any more."""


class Workspace(ABC):
    """Makes arrays by name; what is finished and not dropped is the result of a conversion."""

    arrays: dict[str, NDArray[Any]]

    @abstractmethod
    def growing(self, name: str, dtype: DTypeLike, width: int | None = None) -> Growing:
        """Begin an array of numbers or, with a width, of rows of numbers."""

    @abstractmethod
    def scratch(self, name: str, dtype: DTypeLike, length: int) -> NDArray[Any]:
        """Return an array of zeros to write into; `drop` it when it has served."""

    @abstractmethod
    def drop(self, name: str) -> None:
        """Forget an array."""

    def keep(self, name: str, array: NDArray[Any]) -> NDArray[Any]:
        """Copy an array piece by piece, unless it was made here under this name."""
        if self.arrays.get(name) is array:
            return array
        growing = self.growing(name, array.dtype, array.shape[1] if array.ndim == 2 else None)
        for rows in row_pieces(array):
            growing.append(array[rows])
        return growing.finish()


def row_pieces(array: NDArray[Any]) -> list[slice]:
    """Divide the rows of an array into pieces of bounded size; at least one, perhaps empty."""
    length = len(array)
    size = max(1, PIECE_BYTES // max(1, array.itemsize * int(np.prod(array.shape[1:], dtype=np.int64))))
    return [slice(start, min(start + size, length)) for start in range(0, max(1, length), size)]


class Memory(Workspace):
    """Arrays in memory."""

    def __init__(self) -> None:
        self.arrays = {}

    def growing(self, name: str, dtype: DTypeLike, width: int | None = None) -> Growing:
        return _InMemory(self, name, np.dtype(dtype), width)

    def scratch(self, name: str, dtype: DTypeLike, length: int) -> NDArray[Any]:
        return np.zeros(length, dtype)

    def drop(self, name: str) -> None:
        self.arrays.pop(name, None)


class _InMemory(Growing):
    def __init__(self, workspace: Memory, name: str, dtype: np.dtype[Any], width: int | None) -> None:
        self._workspace, self._name, self._width = workspace, name, width
        self._values = np.empty(0, dtype)

    def append(self, rows: NDArray[Any]) -> None:
        before = len(self._values)
        self._values.resize(before + rows.size, refcheck=False)  # a large block is moved by the system, not copied
        self._values[before:] = rows.reshape(-1)

    def finish(self) -> NDArray[Any]:
        array = self._values if self._width is None else self._values.reshape(-1, self._width)
        self._workspace.arrays[self._name] = array
        return array


@dataclass(frozen=True)
class Written:
    """What a file must hold for its array to be the one that was written."""

    dtype: str
    shape: tuple[int, ...]
    sha256: str  # of the values, without the file's header


class Folder(Workspace):
    """Arrays as `.npy` files of one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.arrays = {}
        self.written: dict[str, Written] = {}
        self.files = ExitStack()  # closes what an interrupted conversion left open

    def path(self, name: str) -> Path:
        """Return the file of an array."""
        return self.folder / f"{name}{SUFFIX}"

    def growing(self, name: str, dtype: DTypeLike, width: int | None = None) -> Growing:
        return _InFile(self, name, np.dtype(dtype), width)

    def scratch(self, name: str, dtype: DTypeLike, length: int) -> NDArray[Any]:
        if length == 0:
            return np.zeros(0, dtype)
        with _writing(self.path(name)), self.path(name).open("wb+") as file:
            if hasattr(os, "posix_fallocate"):  # a full disk is an error now, and not a signal later
                os.posix_fallocate(file.fileno(), 0, np.dtype(dtype).itemsize * length)
            return np.asarray(np.memmap(file, dtype, "w+", shape=(length,)))

    def drop(self, name: str) -> None:
        self.arrays.pop(name, None)
        self.written.pop(name, None)
        self.path(name).unlink(missing_ok=True)


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Say what to do where a file cannot be written."""
    try:
        yield
    except OSError as error:
        raise DataError(
            f"{path}: cannot be written ({error.strerror or error}); make room, or set GLASU_CACHE to another folder."
        ) from error


class _InFile(Growing):
    def __init__(self, workspace: Folder, name: str, dtype: np.dtype[Any], width: int | None) -> None:
        self._workspace, self._name, self._dtype, self._width = workspace, name, dtype, width
        self._count, self._digest, self._path = 0, hashlib.sha256(), workspace.path(name)
        with _writing(self._path):
            self._file = self._path.open("wb")
            workspace.files.callback(self._abandon)
            self._start = self._write_header()

    def _shape(self) -> tuple[int, ...]:
        return (self._count,) if self._width is None else (self._count // self._width, self._width)

    def _write_header(self) -> int:
        """Write the header of the array as it is now; numpy leaves room for any number of rows."""
        descr = np.lib.format.dtype_to_descr(self._dtype)
        header = {"descr": descr, "fortran_order": False, "shape": self._shape()}
        np.lib.format.write_array_header_1_0(self._file, header)
        return self._file.tell()

    def _abandon(self) -> None:
        with suppress(OSError):  # of a full disk, whoever wrote has heard
            self._file.close()

    def append(self, rows: NDArray[Any]) -> None:
        values = np.ascontiguousarray(rows, self._dtype)
        content = values.reshape(-1).view(np.uint8).data
        with _writing(self._path):
            self._file.write(content)
        self._digest.update(content)
        self._count += values.size

    def finish(self) -> NDArray[Any]:
        with _writing(self._path):
            self._file.seek(0)
            assert self._write_header() == self._start
            self._file.close()
        self._workspace.written[self._name] = Written(self._dtype.str, self._shape(), self._digest.hexdigest())
        array = mapped(self._path, self._workspace.written[self._name])
        self._workspace.arrays[self._name] = array
        return array


def mapped(path: Path, written: Written) -> NDArray[Any]:
    """Open an `.npy` file, whose header says what `written` says, as a memory map; nothing of it is read now."""
    dtype, size = np.dtype(written.dtype), path.stat().st_size
    offset = size - dtype.itemsize * math.prod(written.shape)
    if offset < MINIMAL_HEADER:
        raise ValueError(f"{path}: {size} bytes are too few for {written.shape} of {dtype}")
    return np.asarray(np.memmap(path, dtype, "r", offset, written.shape))


def values_sha256(path: Path) -> str:
    """Return the SHA-256 of the values of an `.npy` file."""
    with path.open("rb") as file:
        _skip_header(file)
        return hashlib.file_digest(file, "sha256").hexdigest()


def _skip_header(file: BinaryIO) -> None:
    np.lib.format.read_magic(file)
    np.lib.format.read_array_header_1_0(file)
