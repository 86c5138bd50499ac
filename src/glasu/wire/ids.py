"""Node sets as bytes: the gaps between rising ids, 7 bits to a byte; lossless, and at most one id per byte.

ids 3, 4, 200 -> gaps 3, 0, 195 -> 03 00 c3 01

A gap is the id less its predecessor less one (the first: the id itself), so that bytes can say nothing but distinct ids
in rising order. It travels with its lowest 7 bits first; the top bit of a byte says that another one follows. A gap has
one encoding only: the last of several bytes is never zero.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from glasu.errors import ProtocolError

LARGEST = 2**31 - 1
MOST_BYTES = 5  # of one gap: 31 bits
AT_ONCE = 1 << 16  # bytes that are decoded together: what is in between lies in the processor's cache
_STEPS = np.array([2 ** (7 * count) for count in range(1, MOST_BYTES)], np.int64)


def encode(nodes: NDArray[Any]) -> NDArray[np.uint8]:
    """Return distinct rising ids as bytes."""
    gaps = _gaps(nodes)
    lengths = 1 + np.searchsorted(_STEPS, gaps, side="right")
    ends = np.cumsum(lengths)
    result = np.empty(int(ends[-1]) if len(ends) else 0, np.uint8)
    starts = ends - lengths
    for place in range(int(lengths.max(initial=0))):
        here = lengths > place
        more = (lengths[here] > place + 1).astype(np.uint8) << 7
        result[starts[here] + place] = ((gaps[here] >> (7 * place)) & 0x7F).astype(np.uint8) | more
    return result


def encoded_size(nodes: NDArray[Any]) -> int:
    """Return how many bytes `encode` makes of the ids."""
    gaps = _gaps(nodes)
    size, largest = len(gaps), gaps.max(initial=0)
    for step in _STEPS:
        if largest < step:
            break
        size += int(np.count_nonzero(gaps >= step))
    return size


def decode(data: NDArray[np.uint8]) -> NDArray[np.int32]:
    """Return the ids that the bytes stand for, or refuse them; memory is four bytes per id, and a little."""
    if len(data) and data[-1] >= 0x80:
        raise ProtocolError("node set ends inside an id.")
    nodes = np.empty(np.count_nonzero(data < 0x80), np.int32)
    position = filled = 0
    before = -1
    while position < len(data):
        gaps, size = _whole_gaps(data[position : position + AT_ONCE])
        part = np.cumsum(gaps + 1) + before
        if part[-1] > LARGEST:
            raise ProtocolError(f"node set with the id {part[np.argmax(part > LARGEST)]}; ids end at {LARGEST}.")
        nodes[filled : filled + len(part)] = part
        before, position, filled = part[-1], position + size, filled + len(part)
    return nodes


def _whole_gaps(data: NDArray[np.uint8]) -> tuple[NDArray[np.int64], int]:
    """Return the gaps that bytes stand for, and how many bytes those are; the last gap may go on after them."""
    ends = np.flatnonzero(data < 0x80)
    size = int(ends[-1]) + 1 if len(ends) else 0
    starts = np.concatenate([np.zeros(min(1, len(ends)), np.int64), ends[:-1] + 1])
    lengths = ends - starts + 1
    most = int(lengths.max(initial=len(data) - size))
    if most > MOST_BYTES:
        raise ProtocolError(f"node set with a gap of {most} bytes; {MOST_BYTES} hold every id.")
    gaps = np.zeros(len(ends), np.int64)
    for place in range(most):
        here = lengths > place
        gaps[here] |= (data[starts[here] + place].astype(np.int64) & 0x7F) << (7 * place)
    if ((lengths > 1) & (data[ends] == 0)).any():
        raise ProtocolError("node set with a gap that is written longer than it needs to be.")
    if gaps.max(initial=0) > LARGEST:  # before the sum: it cannot overflow then
        raise ProtocolError(f"node set with a gap of {gaps.max()}; ids end at {LARGEST}.")
    return gaps, size


def rises(nodes: NDArray[Any]) -> bool:
    """Tell whether the ids are distinct and in rising order."""
    return bool((nodes[1:] > nodes[:-1]).all())


def _gaps(nodes: NDArray[Any]) -> NDArray[np.int64]:
    if len(nodes) and not (rises(nodes) and nodes[0] >= 0 and nodes[-1] <= LARGEST):
        raise ProtocolError(f"a node set must rise within 0..{LARGEST}, every id once.")
    gaps = nodes.astype(np.int64)
    gaps[1:] -= gaps[:-1] + 1
    return gaps
