"""Encode messages as bytes: a fixed header, then little-endian arrays. No pickle, and no data of unknown size.

`glasu.protocol.fields` shows the layout. Tensors arrive here in their wire encoding, because all roles compute with the
encoded values.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from glasu.errors import ProtocolError
from glasu.protocol.fields import HEADER, SECTION, NodeSetsField
from glasu.protocol.messages import MESSAGES, Message
from glasu.wire.encoding import DTYPES
from glasu.wire.message_key import Key

MAGIC, VERSION = b"GLSU", 4  # the version of the layout of headers and sections; other versions are refused
CODES = {kind: code for code, kind in enumerate(MESSAGES)}
TAGS = tuple(dict.fromkeys(content.tag for kind in MESSAGES for content in kind.contents().values()))
TAG_CODES = {tag: code for code, tag in enumerate(TAGS)}
ITEM_SIZES = tuple(np.dtype(name).itemsize for name in DTYPES)
Buffer = bytes | bytearray | memoryview


def compute_format_number(kinds: Sequence[type[Message]] = MESSAGES) -> int:
    """Return a 31-bit number that changes if the format of any message changes. Roles compare it in the handshake."""
    listed = [
        (kind.__name__, [(name, type(item).__name__, item.tag, item.dtypes) for name, item in kind.contents().items()])
        for kind in kinds
    ]
    return zlib.crc32(repr((VERSION, DTYPES, listed)).encode()) >> 1


class Head(NamedTuple):
    """The header of a message."""

    kind: type[Message]
    key: Key
    sections: int
    length: int  # bytes after the header

    def __str__(self) -> str:
        return f"{self.kind.__name__} for {self.key}"


def encode(message: Message) -> bytes:
    """Return the message as bytes."""
    body: list[bytes | memoryview] = []
    count = length = 0
    for name, content in message.contents().items():
        for array in content.to_sections(getattr(message, name)):
            dtype = _find_dtype_code(array.dtype)
            columns = array.shape[1] if array.ndim == 2 else 0
            body += [
                SECTION.pack(TAG_CODES[content.tag], dtype, len(array), columns),
                np.ascontiguousarray(array, DTYPES[dtype]).data,
            ]
            count += 1
            length += SECTION.size + array.nbytes
    header = HEADER.pack(MAGIC, VERSION, CODES[type(message)], count, message.key.pack(), length)
    return b"".join((header, *body))


@cache
def _find_dtype_code(dtype: np.dtype[Any]) -> int:
    """Return the position of a dtype in DTYPES; arrays are sent in little-endian order."""
    return DTYPES.index(dtype.newbyteorder("<").str)


def read_header(data: Buffer, size: int) -> Head:
    """Read the header of a message of `size` bytes; `data` holds at least its beginning."""
    present = min(size, len(data))
    if present < HEADER.size:
        raise ProtocolError(f"message of {present} bytes: a header alone has {HEADER.size}.")
    magic, version, code, count, packed, length = HEADER.unpack_from(data)
    if magic != MAGIC or version != VERSION:
        raise ProtocolError(
            f"message of another format or version: expected {MAGIC!r} version {VERSION}, got {magic!r} version "
            f"{version}."
        )
    if code >= len(MESSAGES):
        raise ProtocolError(f"message of unknown kind {code}: expected 0..{len(MESSAGES) - 1}.")
    try:
        key = Key.unpack(packed)
    except ValueError as error:
        raise ProtocolError(f"message of an unknown phase: {error}.") from None
    head = Head(MESSAGES[code], key, count, length)
    if HEADER.size + length != size:
        raise ProtocolError(
            f"{head}: the header declares {length} bytes after it, but the message has {size - HEADER.size}."
        )
    return head


def allocate(size: int) -> memoryview:
    """Return a buffer for a message, placed so that the first array of the message is aligned for every dtype."""
    lead = -(HEADER.size + SECTION.size) % 16
    return memoryview(bytearray(lead + size))[lead:]


def decode(data: Buffer, head: Head | None = None) -> Message:
    """Decode a message. Lengths are checked before anything is allocated.

    Args:
        data: the encoded message. If `data` is writable, the decoded arrays are views of it; otherwise they are copies.
        head: the message's header, if it has been read already.
    """
    head = head or read_header(data, len(data))
    view = memoryview(data)
    if view.readonly:
        view = allocate(len(data))
        view[:] = data
    try:
        return _build_message(head, list(_read_sections(view, head.sections)))
    except ProtocolError as error:
        raise ProtocolError(f"{head}: {error}") from None


def _read_sections(data: memoryview, count: int) -> Iterator[tuple[int, str, NDArray[Any]]]:
    """Yield the tag, the dtype and the array of every section."""
    position = HEADER.size
    for index in range(count):
        if position + SECTION.size > len(data):
            left = len(data) - position
            raise ProtocolError(
                f"message ends inside the header of section {index}: expected {SECTION.size} bytes, got {left}."
            )
        tag, dtype, rows, columns = SECTION.unpack_from(data, position)
        position += SECTION.size
        if dtype >= len(DTYPES):
            raise ProtocolError(f"section {index} of unknown dtype {dtype}: expected 0..{len(DTYPES) - 1}.")
        values = rows * max(1, columns)
        size = values * ITEM_SIZES[dtype]
        if position + size > len(data):
            raise ProtocolError(f"section {index} declares {size} bytes, but {len(data) - position} are left.")
        array = np.frombuffer(data, DTYPES[dtype], values, position)
        if not array.flags.aligned:  # possible from the second section on
            array = array.copy()
        yield tag, DTYPES[dtype], array.reshape(rows, columns) if columns else array
        position += size
    if position != len(data):
        raise ProtocolError(f"message carries {len(data) - position} bytes after its last section; expected none.")


def _build_message(head: Head, sections: list[tuple[int, str, NDArray[Any]]]) -> Message:
    """Build a message from its sections, in the order of its fields."""
    contents = head.kind.contents()
    variable = any(isinstance(content, NodeSetsField) for content in contents.values())
    if len(sections) < len(contents) - variable or (len(sections) > len(contents) and not variable):
        raise ProtocolError(f"expected {len(contents)} section(s), got {len(sections)}.")
    values: list[Any] = []
    for content in contents.values():
        count = len(sections) if isinstance(content, NodeSetsField) else 1
        taken, sections = sections[:count], sections[count:]
        for tag, dtype, _ in taken:
            if tag != TAG_CODES[content.tag] or dtype not in content.dtypes:
                known = TAGS[tag] if tag < len(TAGS) else tag
                raise ProtocolError(
                    f"expected a {content.tag} section of {' or '.join(content.dtypes)}, got {known} of {dtype}."
                )
        values.append(content.from_sections([array for *_, array in taken]))
    return head.kind(head.key, *values)
