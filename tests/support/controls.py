"""Control messages as plain JSON, so that tests can send and read what no dataclass would hold."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from glasu.network.control import PROTOCOL
from glasu.network.frames import CONTROL, pack_frame


class Control(NamedTuple):
    """A control message as it travels: its kind and its other fields."""

    kind: str
    fields: dict[str, Any]


def pack_control(kind: str, **fields: object) -> bytes:
    """Return the body of a control frame."""
    return json.dumps({**fields, "kind": kind}).encode()


def read_control(body: bytes | memoryview) -> Control:
    """Return the control message of a frame's body."""
    fields = json.loads(bytes(body))
    return Control(fields.pop("kind"), fields)


def pack_unnumbered(kind: str, **fields: object) -> bytes:
    """Return a control message as a frame outside the sequence."""
    return pack_frame(CONTROL, pack_control(kind, **fields))


def hello(**changes: object) -> bytes:
    """Return the first frame of a party."""
    fields = {"protocol": PROTOCOL, "process": "p1", "server": None, "received": 0, "payload": {}}
    return pack_unnumbered("Hello", **{**fields, **changes})


def pack_numbered(*bodies: tuple[str, dict[str, Any]], first: int = 1) -> list[bytes]:
    """Return control messages in the sequence of one side."""
    return [
        pack_frame(CONTROL, pack_control(kind, **fields), number=first + index)
        for index, (kind, fields) in enumerate(bodies)
    ]
