"""Write arrays in pieces of bounded size: to memory, or to `.npy` files that are opened as memory maps."""

from __future__ import annotations

import os
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from glasu.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from numpy.typing import DTypeLike, NDArray

PIECE_BYTES = 1 << 25  # size of the pieces in which large arrays are processed
SUFFIX = ".npy"


class ArrayWriter(Protocol):
    """Writes an array from its first row to its last."""

    def append(self, rows: NDArray[Any]) -> None:
        """Write more rows, converted to the type of the array."""

    def finish(self) -> NDArray[Any]:
        """Return the whole array; no rows can be appended afterwards."""


class Workspace:
    """Arrays by name, in memory."""

    def __init__(self, piece_bytes: int = PIECE_BYTES) -> None:
        self.piece_bytes = piece_bytes
        self.arrays: dict[str, NDArray[Any]] = {}  # the finished arrays

    def writer(self, name: str, dtype: DTypeLike, width: int | None = None) -> ArrayWriter:
        """Start an array: of numbers, or of rows of `width` numbers."""
        return _MemoryWriter(self, name, np.dtype(dtype), width)

    def zeros(self, name: str, dtype: DTypeLike, length: int) -> NDArray[Any]:
        """Return a temporary array that can be written; `drop` it after use."""
        return np.zeros(length, dtype)

    def drop(self, name: str) -> None:
        """Delete an array."""
        self.arrays.pop(name, None)

    def keep(self, name: str, array: NDArray[Any]) -> NDArray[Any]:
        """Copy an array in pieces; an array that this workspace holds under this name is not copied."""
        if self.arrays.get(name) is array:
            return array
        writer = self.writer(name, array.dtype, array.shape[1] if array.ndim == 2 else None)
        for rows in row_pieces(array, self.piece_bytes):
            writer.append(array[rows])
        return writer.finish()


class FolderWorkspace(Workspace):
    """Arrays by name, as `.npy` files of one folder."""

    def __init__(self, folder: Path, piece_bytes: int = PIECE_BYTES) -> None:
        super().__init__(piece_bytes)
        self.folder = folder
        self._writers: list[_FileWriter] = []

    def path(self, name: str) -> Path:
        """Return the file of an array."""
        return self.folder / f"{name}{SUFFIX}"

    def writer(self, name: str, dtype: DTypeLike, width: int | None = None) -> ArrayWriter:
        writer = _FileWriter(self, name, np.dtype(dtype), width)
        self._writers.append(writer)
        return writer

    def zeros(self, name: str, dtype: DTypeLike, length: int) -> NDArray[Any]:
        if length == 0:
            return np.zeros(0, dtype)
        with _explain_failed_write(self.path(name)), self.path(name).open("wb+") as file:
            if hasattr(os, "posix_fallocate"):  # a full disk must fail here; in a memory map it would be a SIGBUS
                os.posix_fallocate(file.fileno(), 0, np.dtype(dtype).itemsize * length)
            return np.asarray(np.memmap(file, dtype, "w+", shape=(length,)))

    def drop(self, name: str) -> None:
        super().drop(name)
        self.path(name).unlink(missing_ok=True)

    def close(self) -> None:
        """Close the files that an interrupted conversion left open."""
        for writer in self._writers:
            writer.close()


def row_pieces(array: NDArray[Any], piece_bytes: int = PIECE_BYTES) -> list[slice]:
    """Divide the rows of an array into pieces of bounded size; an array without rows has one empty piece."""
    length = len(array)
    size = max(1, piece_bytes // max(1, array.itemsize * int(np.prod(array.shape[1:], dtype=np.int64))))
    return [slice(start, min(start + size, length)) for start in range(0, max(1, length), size)]


def map_array(path: Path) -> NDArray[Any]:
    """Open an `.npy` file as a read-only memory map; only its header is read."""
    return np.asarray(np.lib.format.open_memmap(path, mode="r"))


class _MemoryWriter:
    def __init__(self, workspace: Workspace, name: str, dtype: np.dtype[Any], width: int | None) -> None:
        self._workspace, self._name, self._width = workspace, name, width
        self._values = np.empty(0, dtype)

    def append(self, rows: NDArray[Any]) -> None:
        before = len(self._values)
        self._values.resize(before + rows.size, refcheck=False)  # the system moves a large block without a copy
        self._values[before:] = rows.reshape(-1)

    def finish(self) -> NDArray[Any]:
        array = self._values if self._width is None else self._values.reshape(-1, self._width)
        self._workspace.arrays[self._name] = array
        return array


class _FileWriter:
    def __init__(self, workspace: FolderWorkspace, name: str, dtype: np.dtype[Any], width: int | None) -> None:
        self._workspace, self._name, self._dtype, self._width = workspace, name, dtype, width
        self._path, self._count = workspace.path(name), 0
        with _explain_failed_write(self._path):
            self._file = self._path.open("wb")
            self._start = self._write_header()

    def _write_header(self) -> int:
        """Write the header for the present shape; numpy pads it, so its size does not depend on the number of rows."""
        shape = (self._count,) if self._width is None else (self._count // self._width, self._width)
        descr = np.lib.format.dtype_to_descr(self._dtype)
        np.lib.format.write_array_header_1_0(self._file, {"descr": descr, "fortran_order": False, "shape": shape})
        return self._file.tell()

    def append(self, rows: NDArray[Any]) -> None:
        values = np.ascontiguousarray(rows, self._dtype)
        with _explain_failed_write(self._path):
            self._file.write(values.reshape(-1).view(np.uint8).data)
        self._count += values.size

    def finish(self) -> NDArray[Any]:
        with _explain_failed_write(self._path):
            self._file.seek(0)
            assert self._write_header() == self._start
            self._file.close()
        array = map_array(self._path)
        self._workspace.arrays[self._name] = array
        return array

    def close(self) -> None:
        with suppress(OSError):  # a full disk was reported by the write
            self._file.close()


@contextmanager
def _explain_failed_write(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DataError(
            f"{path}: cannot be written ({error.strerror or error}); free disk space, or set GLASU_CACHE to another "
            "folder."
        ) from None
