"""Message <-> bytes: a fixed header, then little-endian arrays as they travel; no pickle, nothing of unknown size.

header (48 bytes)   magic, version, kind, number of sections, key, length of what follows
section (12 bytes)  tag, dtype, rows, columns (0: a vector); then rows x columns values

Tensors come here encoded already (`glasu.wire.encodings`), for everyone computes with the values as they were encoded;
node sets become bytes here (`glasu.wire.ids`), which changes none of them.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from glasu.errors import ProtocolError
from glasu.protocol.messages import (
    NO_NUMBERS,
    Agreed,
    Gradient,
    Joint,
    JointGradient,
    JointScores,
    Message,
    Metrics,
    Partial,
    Proposal,
    Scores,
    TensorMessage,
    Verdict,
    Waiting,
)
from glasu.wire import ids
from glasu.wire.message_key import RUN_BYTES, Key, Phase

MAGIC, VERSION = b"GLSU", 2  # any change of what bytes mean is another version; there is no reading of older ones
HEADER = struct.Struct(f"<4sBBH{RUN_BYTES}sIBxHIhHIQ")
SECTION = struct.Struct("<BBxxII")
KINDS: dict[int, type[Message]] = dict(
    enumerate(
        [Partial, Joint, Gradient, JointGradient, Scores, JointScores, Proposal, Agreed, Metrics, Verdict, Waiting]
    )
)
CODES = {kind: code for code, kind in KINDS.items()}
TAGS = ("tensor", "index", "loss", "metrics", "verdict")
DTYPES = ("<f4", "<f8", "<u2", "|i1", "|u1")
_PHASES = frozenset(Phase)
Buffer = bytes | bytearray | memoryview
EXPECTED = {
    "tensor": ("<f4", "<f8", "<u2", "|i1"),  # fp32, fp64, bf16, int8
    "index": ("|u1",),
    "loss": ("<f8",),
    "metrics": ("<f8",),
    "verdict": ("|u1",),
}


def sections(message: Message) -> list[tuple[str, NDArray[Any]]]:
    """List the arrays of a message, in the order in which they travel; node sets not yet as bytes."""
    arrays: list[tuple[str, NDArray[Any]]] = []
    if isinstance(message, TensorMessage):
        arrays.append(("tensor", message.value))
    elif isinstance(message, Metrics):
        arrays.append(("metrics", message.values))
    elif isinstance(message, Verdict):
        arrays.append(("verdict", np.array([message.improved, message.stop], np.uint8)))
    if len(message.losses):
        arrays.append(("loss", message.losses))
    if message.node_sets:
        arrays += [("index", nodes) for nodes in message.node_sets]
    return arrays


class Head(NamedTuple):
    """What a header says."""

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
    for tag, array in sections(message):
        array = ids.encode(array) if tag == "index" else array
        dtype = DTYPES.index(array.dtype.newbyteorder("<").str)
        columns = array.shape[1] if array.ndim == 2 else 0
        body += [
            SECTION.pack(TAGS.index(tag), dtype, len(array), columns),
            np.ascontiguousarray(array, DTYPES[dtype]).data,
        ]
        count += 1
        length += SECTION.size + array.nbytes
    key = message.key
    header = HEADER.pack(
        MAGIC,
        VERSION,
        CODES[type(message)],
        count,
        key.run,
        key.incarnation,
        key.phase,
        key.attempt,
        key.round,
        key.layer,
        key.client,
        key.chunk,
        length,
    )
    return b"".join((header, *body))


def read_header(data: Buffer, size: int) -> Head:
    """Return what the header of a message of `size` bytes says, or refuse it; the rest need not be there yet."""
    present = min(size, len(data))
    if present < HEADER.size:
        raise ProtocolError(f"message of {present} bytes: a header alone has {HEADER.size}.")
    magic, version, code, count, run, incarnation, phase, attempt, round_index, layer, client, chunk, length = (
        HEADER.unpack_from(data)
    )
    if magic != MAGIC or version != VERSION:
        raise ProtocolError(
            f"message of another format or version: expected {MAGIC!r} version {VERSION}, got {magic!r} version "
            f"{version}."
        )
    if code not in KINDS or phase not in _PHASES:
        raise ProtocolError(
            f"message of unknown kind {code} or phase {phase}: expected a kind of 0..{len(KINDS) - 1} and a phase of "
            f"0..{len(_PHASES) - 1}."
        )
    key = Key(
        run=run,
        phase=Phase(phase),
        client=client,
        round=round_index,
        layer=layer,
        chunk=chunk,
        incarnation=incarnation,
        attempt=attempt,
    )
    head = Head(KINDS[code], key, count, length)
    if length != size - HEADER.size:
        raise ProtocolError(
            f"{head}: message declares {length} bytes after its header, but carries {size - HEADER.size}."
        )
    return head


def room_for(size: int) -> memoryview:
    """Return room for a message; its first array will lie where arrays of all types may lie."""
    lead = -(HEADER.size + SECTION.size) % 16
    return memoryview(bytearray(lead + size))[lead:]


def decode(data: Buffer, head: Head | None = None) -> Message:
    """Return the message that the bytes stand for, or refuse them; nothing is allocated before lengths are checked.

    Args:
        data: what has come. The arrays of the message lie in it, if it can be written to; else in a copy.
        head: what its header says, where that has been read already.
    """
    head = head or read_header(data, len(data))
    view = memoryview(data)
    if view.readonly:
        view = room_for(len(data))
        view[:] = data
    try:
        return _message(head.kind, head.key, list(_arrays(view, head.sections)))
    except ProtocolError as error:
        raise ProtocolError(f"{head}: {error}") from None


def _arrays(data: memoryview, count: int) -> Iterator[tuple[str, NDArray[Any]]]:
    position = HEADER.size
    for index in range(count):
        if position + SECTION.size > len(data):
            left = len(data) - position
            raise ProtocolError(
                f"message ends inside the header of section {index}: expected {SECTION.size} bytes, got {left}."
            )
        tag, dtype, rows, columns = SECTION.unpack_from(data, position)
        position += SECTION.size
        if tag >= len(TAGS) or dtype >= len(DTYPES) or DTYPES[dtype] not in EXPECTED[TAGS[tag]]:
            known = "; ".join(f"{TAGS.index(name)} {name} of {', '.join(kinds)}" for name, kinds in EXPECTED.items())
            got = DTYPES[dtype] if dtype < len(DTYPES) else dtype
            raise ProtocolError(
                f"section {index} of unknown tag or unexpected type: expected {known}; got {tag} of {got}."
            )
        if (TAGS[tag] == "tensor") != (columns > 0):
            raise ProtocolError(
                f"{TAGS[tag]} section of {columns} columns: expected {'some' if TAGS[tag] == 'tensor' else 'none'}; "
                "tensors have columns, all others are vectors."
            )
        values = rows * max(1, columns)
        size = values * np.dtype(DTYPES[dtype]).itemsize
        if position + size > len(data):
            raise ProtocolError(f"{TAGS[tag]} section declares {size} bytes, but {len(data) - position} are left.")
        array = np.frombuffer(data, DTYPES[dtype], values, position)
        if not array.flags.aligned:  # small ones, behind others
            array = array.copy()
        yield TAGS[tag], array.reshape(rows, columns) if columns else array
        position += size
    if position != len(data):
        raise ProtocolError(f"message carries {len(data) - position} bytes after its last section; expected none.")


def _message(kind: type[Message], key: Key, arrays: list[tuple[str, NDArray[Any]]]) -> Message:
    by_tag: dict[str, list[NDArray[Any]]] = {tag: [] for tag in TAGS}
    for tag, array in arrays:
        by_tag[tag].append(array)
    own = {"tensor": 0, "metrics": 0, "verdict": 0}
    fields: dict[str, Any] = {}
    if issubclass(kind, TensorMessage):
        own["tensor"] = 1
    elif kind is Metrics:
        own["metrics"] = 1
    elif kind is Verdict:
        own["verdict"] = 1
    for tag, wanted in own.items():
        if len(by_tag[tag]) != wanted:
            raise ProtocolError(f"expected {wanted} {tag} section(s), got {len(by_tag[tag])}.")
    if len(by_tag["loss"]) > 1:
        raise ProtocolError(f"expected losses in one section at most, got {len(by_tag['loss'])}.")
    if own["tensor"]:
        fields["value"] = by_tag["tensor"][0]
    elif own["metrics"]:
        fields["values"] = by_tag["metrics"][0]
    elif own["verdict"]:
        if len(by_tag["verdict"][0]) != 2:
            raise ProtocolError(f"expected a verdict of two flags, got {len(by_tag['verdict'][0])}.")
        fields["improved"], fields["stop"] = (bool(flag) for flag in by_tag["verdict"][0])
    losses = by_tag["loss"][0] if by_tag["loss"] else NO_NUMBERS
    return kind(key=key, losses=losses, node_sets=tuple(ids.decode(data) for data in by_tag["index"]), **fields)


def measured(message: Message) -> list[tuple[str, str, int]]:
    """Split the encoded size of a message into (kind, phase, bytes); what is agreed ahead counts as sampling."""
    phase = message.key.phase.reported
    sizes = [(tag, phase, array.nbytes) for tag, array in sections(message) if tag != "index"]
    sizes.append(("header", phase, HEADER.size + SECTION.size * len(sizes)))
    if message.node_sets:
        about = "sampling" if phase == "training" else phase
        sizes.append(("header", about, SECTION.size * len(message.node_sets)))
        sizes.append(("index", about, sum(map(ids.encoded_size, message.node_sets))))
    return sizes
