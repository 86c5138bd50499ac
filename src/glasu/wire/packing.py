"""Pack integers of a few bits into rows of bytes, without unused bits between the integers."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


def pack_integers(numbers: NDArray[np.int64], bits: int) -> NDArray[np.uint8]:
    """Pack integers of 0..2^bits - 1 row by row, the lowest bits first."""
    rows, columns = numbers.shape
    size = _find_item_size(bits)
    items = numbers.astype(f"<u{size}")[:, :, None].view(np.uint8)
    spread = np.unpackbits(items, axis=2, count=bits, bitorder="little")
    return np.packbits(spread.reshape(rows, columns * bits), axis=1, bitorder="little")


def unpack_integers(payload: NDArray[np.uint8], columns: int, bits: int) -> NDArray[np.int64]:
    """Return the integers that `pack_integers` packed."""
    rows = len(payload)
    spread = np.unpackbits(payload, axis=1, count=columns * bits, bitorder="little").reshape(rows, columns, bits)
    packed = np.packbits(spread, axis=2, bitorder="little")
    items: NDArray[Any] = np.zeros((rows, columns, _find_item_size(bits)), np.uint8)
    items[:, :, : packed.shape[2]] = packed
    return items.view(f"<u{items.shape[2]}").reshape(rows, columns).astype(np.int64)


def _find_item_size(bits: int) -> int:
    return next(size for size in (1, 2, 4, 8) if 8 * size >= bits)
