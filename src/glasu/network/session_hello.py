"""The first frame of each direction: the sender's process, and the number of frames it has received."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

from glasu.errors import ProtocolError
from glasu.network.frames import Control
from glasu.network.handshake import Payload

PROTOCOL = 1  # of frames and control messages; other versions are refused
MOST = 2**63
Value = TypeVar("Value")


@dataclass(frozen=True)
class Hello:
    """The first frame of a party."""

    process: str  # the name that its session gave itself
    server: str | None  # the server process that it talked to before
    received: int  # frames of that server
    payload: Payload


@dataclass(frozen=True)
class Welcome:
    """The first frame of the server, if it accepts the party."""

    run: str
    server: str  # the name that the server's process gave itself
    resumed: bool  # both sides continue the numbering
    received: int  # frames of the party
    payload: Payload


def read_hello(control: Control) -> Hello:
    """Return the hello of a party, or refuse it."""
    if control.kind != "hello":
        raise ProtocolError(f"expected a hello, got {control.kind[:60]!r}.")
    fields = control.fields
    _check_protocol(fields)
    return Hello(
        process=_read(fields, "process", str),
        server=None if fields.get("server") is None else _read(fields, "server", str),
        received=_read_count(fields, "received"),
        payload=_read(fields, "payload", dict),
    )


def read_welcome(control: Control) -> Welcome:
    """Return the welcome of the server, or refuse it."""
    fields = control.fields
    _check_protocol(fields)
    return Welcome(
        run=_read(fields, "run", str),
        server=_read(fields, "server", str),
        resumed=_read(fields, "resumed", bool),
        received=_read_count(fields, "received"),
        payload=_read(fields, "payload", dict),
    )


def _check_protocol(fields: Payload) -> None:
    if (found := fields.get("protocol")) != PROTOCOL:
        raise ProtocolError(
            f"the other side speaks session protocol {str(found)[:20]!r}, this side {PROTOCOL}; use the same version "
            "of GLASU at the server and at every party."
        )


def _read(fields: Payload, name: str, kind: type[Value]) -> Value:
    value = fields.get(name)
    if not isinstance(value, kind) or (isinstance(value, str) and not 0 < len(value) <= 64):
        raise ProtocolError(f"field {name!r}: expected {kind.__name__}, got {str(value)[:60]!r}.")
    return value


def _read_count(fields: Payload, name: str) -> int:
    value = _read(fields, name, int)
    if isinstance(value, bool) or not 0 <= value < MOST:
        raise ProtocolError(f"field {name!r}: expected a count, got {str(value)[:60]!r}.")
    return value
