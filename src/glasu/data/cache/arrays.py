"""Write arrays in pieces of bounded size: to memory, or to `.npy` files that are opened as memory maps."""

from __future__ import annotations

import threading
from contextlib import contextmanager, suppress
from io import BytesIO
from typing import TYPE_CHECKING, Any

import numpy as np

from glasu.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path
    from typing import BinaryIO

    from numpy.typing import DTypeLike, NDArray

ARRAY_PIECE = 1 << 25  # bytes; large arrays are processed in pieces of about this size
ARRAY_SUFFIX = ".npy"


class Workspace:
    """Named arrays. They are stored as `.npy` files in a folder, or in memory if there is no folder."""

    def __init__(self, folder: Path | None = None, piece_bytes: int = ARRAY_PIECE) -> None:
        self.folder, self.piece_bytes = folder, piece_bytes
        self.arrays: dict[str, NDArray[Any]] = {}  # the finished arrays
        self._writers: list[ArrayWriter] = []

    def writer(self, name: str, dtype: DTypeLike, width: int | None = None) -> ArrayWriter:
        """Start an array of shape (n,) or, with `width`, (n, width). The rows are appended later."""
        writer = ArrayWriter(self, name, np.dtype(dtype), width)
        self._writers.append(writer)
        return writer

    def keep(self, name: str, array: NDArray[Any]) -> str:
        """Copy an array in pieces, unless this workspace already holds it; return its name in this workspace."""
        for known, held in self.arrays.items():
            if held is array:
                return known
        writer = self.writer(name, array.dtype, array.shape[1] if array.ndim == 2 else None)
        for rows in divide_rows(array, self.piece_bytes):
            writer.append(array[rows])
        writer.finish()
        return name

    def drop(self, name: str) -> None:
        """Delete an array."""
        self.arrays.pop(name, None)
        if self.folder is not None:
            (self.folder / f"{name}{ARRAY_SUFFIX}").unlink(missing_ok=True)

    def close(self) -> None:
        """Close the files that an interrupted conversion left open."""
        for writer in self._writers:
            writer.close()


class ArrayWriter:
    """Writes an array from its first row to its last, in the `.npy` format."""

    def __init__(self, workspace: Workspace, name: str, dtype: np.dtype[Any], width: int | None) -> None:
        self._workspace, self._name, self._dtype, self._width = workspace, name, dtype, width
        self._path = None if workspace.folder is None else workspace.folder / f"{name}{ARRAY_SUFFIX}"
        self._count = 0
        with _explain_failed_write(self._path):
            self._file: BinaryIO = BytesIO() if self._path is None else self._path.open("wb")
            self._start = self._write_header()

    def append(self, rows: NDArray[Any]) -> None:
        """Write more rows, converted to the type of the array."""
        values = np.ascontiguousarray(rows, self._dtype)
        with _explain_failed_write(self._path):
            self._file.write(values.reshape(-1).view(np.uint8).data)
        self._count += values.size

    def finish(self) -> NDArray[Any]:
        """Return the whole array; no rows can be appended afterwards."""
        with _explain_failed_write(self._path):
            self._file.seek(0)
            assert self._write_header() == self._start
            if self._path is None:
                assert isinstance(self._file, BytesIO)
                array = np.frombuffer(self._file.getbuffer()[self._start :], self._dtype).reshape(self._shape)
            else:
                self._file.close()
                array = map_array(self._path)
        self._workspace.arrays[self._name] = array
        return array

    def close(self) -> None:
        """Close the file."""
        with suppress(OSError):  # the write has already reported a full disk
            self._file.close()

    @property
    def _shape(self) -> tuple[int, ...]:
        return (self._count,) if self._width is None else (self._count // self._width, self._width)

    def _write_header(self) -> int:
        """Write the header for the current shape; numpy pads it, so its size does not depend on the number of rows."""
        descr = np.lib.format.dtype_to_descr(self._dtype)
        header = {"descr": descr, "fortran_order": False, "shape": self._shape}
        np.lib.format.write_array_header_1_0(self._file, header)
        return self._file.tell()


def divide_rows(array: NDArray[Any], piece_bytes: int = ARRAY_PIECE) -> list[slice]:
    """Divide the rows of an array into pieces of bounded size; an array without rows has one empty piece."""
    length = len(array)
    size = max(1, piece_bytes // max(1, array.itemsize * int(np.prod(array.shape[1:], dtype=np.int64))))
    return [slice(start, min(start + size, length)) for start in range(0, max(1, length), size)]


# numpy parses the header with `ast`. In Python 3.11 this can raise SystemError if two threads parse at the same time.
_PARSING = threading.Lock()


def map_array(path: Path) -> NDArray[Any]:
    """Open an `.npy` file as a read-only memory map; only its header is read."""
    with _PARSING:
        return np.asarray(np.lib.format.open_memmap(path, mode="r"))


@contextmanager
def _explain_failed_write(path: Path | None) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DataError(
            f"{path}: cannot be written ({error.strerror or error}); free disk space, or set GLASU_CACHE to another "
            "folder."
        ) from None
