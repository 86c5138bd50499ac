"""Encode node sets as bytes: the gaps between increasing ids, with 7 bits of a gap in each byte.

ids 3, 4, 200 -> gaps 3, 0, 195 -> 03 00 c3 01

A gap is the id minus its predecessor minus one; the first gap is the first id. So any valid bytes decode to distinct,
increasing ids. The lowest 7 bits of a gap come first; the top bit of a byte is set if another byte follows. Each gap
has exactly one encoding, because the last of several bytes must not be zero.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from glasu.errors import ProtocolError

LARGEST = 2**31 - 1
MOST_BYTES = 5  # bytes of the largest gap, which has 31 bits
AT_ONCE = 1 << 16  # bytes decoded together; the intermediate arrays then fit in the processor's cache
_STEPS = np.array([2 ** (7 * count) for count in range(1, MOST_BYTES)], np.int64)


def encode(nodes: NDArray[Any]) -> NDArray[np.uint8]:
    """Return distinct, increasing ids as bytes."""
    gaps = _find_gaps(nodes)
    if gaps.max(initial=0) < 0x80:  # every gap has one byte: the usual case
        return gaps.astype(np.uint8)
    lengths = 1 + np.searchsorted(_STEPS, gaps, side="right")
    ends = np.cumsum(lengths)
    result = np.empty(int(ends[-1]) if len(ends) else 0, np.uint8)
    starts = ends - lengths
    for place in range(int(lengths.max(initial=0))):
        here = lengths > place
        more = (lengths[here] > place + 1).astype(np.uint8) << 7
        result[starts[here] + place] = ((gaps[here] >> (7 * place)) & 0x7F).astype(np.uint8) | more
    return result


def measure_encoded(nodes: NDArray[Any]) -> int:
    """Return the number of bytes that `encode` returns."""
    gaps = _find_gaps(nodes)
    size, largest = len(gaps), gaps.max(initial=0)
    for step in _STEPS:
        if largest < step:
            break
        size += int(np.count_nonzero(gaps >= step))
    return size


def decode(data: NDArray[np.uint8], at_once: int = AT_ONCE) -> NDArray[np.int32]:
    """Decode ids; refuse invalid bytes.

    Args:
        data: the encoded ids.
        at_once: number of bytes to decode together, at least MOST_BYTES + 1. It limits memory, not the result.
    """
    if len(data) and data[-1] >= 0x80:
        raise ProtocolError("node set ends inside an id.")
    nodes = np.empty(np.count_nonzero(data < 0x80), np.int32)
    position = filled = 0
    before = -1
    while position < len(data):
        gaps, size = _read_gaps(data[position : position + at_once])
        part = np.cumsum(gaps + 1) + before
        if part[-1] > LARGEST:
            raise ProtocolError(f"node set with the id {part[np.argmax(part > LARGEST)]}: the largest id is {LARGEST}.")
        nodes[filled : filled + len(part)] = part
        before, position, filled = part[-1], position + size, filled + len(part)
    return nodes


def _read_gaps(data: NDArray[np.uint8]) -> tuple[NDArray[np.int64], int]:
    """Return the complete gaps in `data`, and their total size in bytes. Ignore an incomplete gap at the end."""
    if data.max(initial=0) < 0x80:  # every gap has one byte: the usual case
        return data.astype(np.int64), len(data)
    ends = np.flatnonzero(data < 0x80)
    size = int(ends[-1]) + 1 if len(ends) else 0
    starts = np.concatenate([np.zeros(min(1, len(ends)), np.int64), ends[:-1] + 1])
    lengths = ends - starts + 1
    most = int(lengths.max(initial=len(data) - size))
    if most > MOST_BYTES:
        raise ProtocolError(f"node set with a gap of {most} bytes: expected at most {MOST_BYTES}.")
    gaps = np.zeros(len(ends), np.int64)
    for place in range(most):
        here = lengths > place
        gaps[here] |= (data[starts[here] + place].astype(np.int64) & 0x7F) << (7 * place)
    if ((lengths > 1) & (data[ends] == 0)).any():
        raise ProtocolError("node set with a gap that is longer than necessary: its last byte is zero.")
    if gaps.max(initial=0) > LARGEST:  # checked before the sum, which could overflow
        raise ProtocolError(f"node set with a gap of {gaps.max()}: the largest id is {LARGEST}.")
    return gaps, size


def is_increasing(nodes: NDArray[Any]) -> bool:
    """Return whether every id is greater than its predecessor."""
    return bool((nodes[1:] > nodes[:-1]).all())


def _find_gaps(nodes: NDArray[Any]) -> NDArray[np.int64]:
    if len(nodes) and not (is_increasing(nodes) and nodes[0] >= 0 and nodes[-1] <= LARGEST):
        raise ProtocolError(f"node set must contain increasing ids in 0..{LARGEST}.")
    gaps = nodes.astype(np.int64)
    gaps[1:] -= gaps[:-1] + 1
    return gaps
