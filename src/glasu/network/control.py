"""Control messages of a session: one frozen dataclass for each kind.

    party                       server
    Hello            ------>
                     <------    Welcome
    Statement        ------>
                     <------    ProposedAttempt    (or StatementRequest: send another Statement first)
    Confirmation     ------>
    PartyResult      ------>
                     <------    Goodbye

Hello, welcome, notices and the last message of a stream are outside the numbered sequence and may be lost.

The role reads a `Payload` later (`handshake.py`). A malformed hello or statement is a reason to refuse its sender, not
an error of the run, and the fields of a goodbye depend on the purpose.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from glasu.errors import ProtocolError
from glasu.network.facts import Short
from glasu.network.handshake import Payload, ResultPayload
from glasu.network.id_keys import IdShare
from glasu.network.log_lines import MAX_LINES, MAX_REASON, make_printable
from glasu.network.signatures import SignedHead
from glasu.pki.identity import MAX_PARTIES
from glasu.protocol.state import Progress
from glasu.records import Bounds, Length, RecordError, parse_json, read_record, to_plain
from glasu.wire.message_key import RUN_BYTES

PROTOCOL = 4  # version of frames and control messages; other versions are refused
ProcessName = Annotated[str, Length(64)]
FrameCount = Annotated[int, Bounds(0, 2**63 - 1)]
Digest = Annotated[str, Length(200)]


@dataclass(frozen=True, kw_only=True)
class Hello:
    """The first frame of a party on every stream."""

    process: ProcessName  # the random name of the party's process
    received: FrameCount  # number of frames received from `server`
    payload: Payload
    server: ProcessName | None = None  # the server process of the previous stream
    protocol: int = PROTOCOL


@dataclass(frozen=True, kw_only=True)
class Welcome:
    """The first frame of the server, if it accepts the party."""

    run: ProcessName
    server: ProcessName  # the random name of the server's process
    resumed: bool  # whether both sides continue the numbering of frames
    received: FrameCount  # number of frames received from the party
    payload: Payload
    protocol: int = PROTOCOL


@dataclass(frozen=True)
class Statement:
    """Sent by a party that is ready to run, with its facts, settings and checkpoints."""

    payload: Payload


@dataclass(frozen=True)
class StatementRequest:
    """Sent by the server to request another `Statement`, for example because another attempt follows.

    If the request contains key shares, the party also states HMACs of its ids for the other parties
    (`glasu.network.id_keys`).
    """

    shares: Annotated[Mapping[str, IdShare], Length(MAX_PARTIES)] = field(default_factory=dict)  # by party


@dataclass(frozen=True)
class ProposedAttempt:
    """Sent by the server to propose an attempt: its parties, and the round after which it continues."""

    number: Annotated[int, Bounds(1, 2**31 - 1)]
    round: Annotated[int, Bounds(0, 2**32 - 1)]
    present: Annotated[tuple[Short, ...], Length(MAX_PARTIES)]  # the parties of this attempt, in client order
    digest: Digest | None = None  # digest of this party's checkpoint of that round
    # the ledger heads that the parties stated, by party
    ledgers: Annotated[Mapping[str, SignedHead], Length(MAX_PARTIES)] = field(default_factory=dict)


@dataclass(frozen=True)
class Confirmation:
    """Sent by a party that has loaded the proposed checkpoint."""

    attempt: FrameCount
    digest: Digest | None = None


@dataclass(frozen=True)
class PartyResult:
    """Sent by a party that has written its results."""

    attempt: FrameCount
    payload: ResultPayload


@dataclass(frozen=True)
class Goodbye:
    """Sent by the server when the run is complete."""

    payload: Payload


@dataclass(frozen=True)
class Notice:
    """Sent by the server: a line for the party's log."""

    line: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "line", make_printable(self.line, MAX_REASON))


@dataclass(frozen=True)
class StreamEnd:
    """Why a stream ends: a code for programs, and printable text for people."""

    code: str
    reason: str
    table: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "code", make_printable(self.code, 60))
        object.__setattr__(self, "reason", make_printable(self.reason, MAX_REASON))
        object.__setattr__(self, "table", tuple(map(make_printable, self.table[:MAX_LINES])))


@dataclass(frozen=True)
class Failed(StreamEnd):
    """Sent by a party that has failed. The run then fails as well."""


@dataclass(frozen=True)
class Declined(StreamEnd):
    """Sent by a party that declines the server's offer. The run keeps waiting for the party."""


@dataclass(frozen=True)
class Refused(StreamEnd):
    """Sent by the server to a process that it refuses."""

    run: ProcessName = ""


@dataclass(frozen=True)
class Stopped(StreamEnd):
    """Sent by the server when the run has failed."""


CONTROLS: dict[str, type[Any]] = {  # by the name in the message
    cls.__name__: cls
    for cls in (
        Hello,
        Welcome,
        Statement,
        StatementRequest,
        ProposedAttempt,
        Confirmation,
        PartyResult,
        Goodbye,
        Notice,
        Failed,
        Declined,
        Refused,
        Stopped,
    )
}


def pack_control(message: object) -> bytes:
    """Return the body of a control frame."""
    return json.dumps({**to_plain(message), "kind": type(message).__name__}).encode()


def read_control(body: bytes | memoryview, most: int) -> Any:
    """Parse and check a control message. A body of more than `most` bytes is refused without parsing it."""
    if len(body) > most:
        raise ProtocolError(f"control frame: expected at most {most} bytes, got {len(body)}.")
    try:
        fields = parse_json(bytes(body), "control frame")
        kind = fields.pop("kind", None) if isinstance(fields, dict) else None
        if not isinstance(fields, dict) or not isinstance(kind, str) or kind not in CONTROLS:
            raise ProtocolError(f"control message of unknown kind {make_printable(kind, 60)!r}.")
        cls = CONTROLS[kind]
        if cls in (Hello, Welcome) and (found := fields.get("protocol")) != PROTOCOL:
            raise ProtocolError(
                f"the other side uses session protocol {make_printable(found, 20)!r}, this side {PROTOCOL}; use the "
                "same version of GLASU at the server and at every party."
            )
        return read_record(cls, fields, f"control message {kind!r}")
    except RecordError as error:
        raise ProtocolError(make_printable(error, MAX_REASON)) from None


def refuse_control(message: object) -> ProtocolError:
    """Return the error for a control message that is not allowed now, or that this side must not send."""
    return ProtocolError(f"control message {type(message).__name__!r}: it is not expected now.")


def derive_attempt_run(run: str, attempt: int) -> bytes:
    """Return the run id of one attempt of a prediction or an alignment, so that attempts share no message keys."""
    return hashlib.sha256(f"{run} attempt {attempt}".encode()).digest()[:RUN_BYTES]


def describe_start(progress: Progress | None) -> str:
    """Describe where an attempt begins; `progress` is None if the purpose has no rounds."""
    if progress is None:
        return "starting"
    if not progress.round:
        return "starting with the first round"
    return f"continuing after {progress.describe_position()}"
