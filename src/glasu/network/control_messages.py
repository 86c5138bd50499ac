"""Control messages between a party and the server: one frozen dataclass per message, JSON on the wire.

party -> server    Hello, Prepared, Ready, Finished, Failed, Declined
server -> party    Welcome, StatusRequest, Begin, Notice, Goodbye, Refused, Stopped

A frame holds one JSON object with the name of the message under "kind". Unknown kinds and fields are refused.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, get_args

from glasu.errors import ProtocolError
from glasu.network.facts import Facts
from glasu.network.sanitize import SENTENCES, printable
from glasu.records import Bounds, Length, RecordError, parse_json, read_record, to_plain

Number = Annotated[int, Bounds(0, 2**32 - 1)]
Name = Annotated[str, Length(200)]
Sentence = Annotated[str, Length(4000)]
Table = Annotated[tuple[Sentence, ...], Length(50)]
Rounds = Annotated[Mapping[Number, Name], Length(100)]  # checkpoints and their digests
SAME_VERSION = "do both sides run the same version of GLASU?"


class Code(enum.StrEnum):
    """Why a run, or a party's part in it, ended. Code compares these; the sentence beside them is for people."""

    SECOND_PROCESS = "second_process"  # another process of this party takes part, or has taken part
    REPLACED = "replaced"  # a newer process of this party has taken over
    UNWANTED_RUN = "unwanted_run"  # the party wants another run (--run)
    OTHER_RUN = "other_run"  # the party's folder belongs to another run
    RUN_FINISHED = "run_finished"
    RUN_STARTED = "run_started"  # the party asks for a fresh start, and the run is past its start
    OTHER_PURPOSE = "other_purpose"  # training, prediction or dry run
    DIFFERENT_FACTS = "different_facts"
    DIFFERENT_SETTINGS = "different_settings"
    INVALID_SETTINGS = "invalid_settings"  # the settings cannot run on this data
    WRONG_ROSTER = "wrong_roster"
    NO_COMMON_CHECKPOINT = "no_common_checkpoint"
    INVALID_MESSAGE = "invalid_message"
    EQUIVOCATION = "equivocation"  # one key, two contents
    UNUSABLE_DATA = "unusable_data"
    CHECKPOINT_FAILED = "checkpoint_failed"
    ABSENT = "absent"  # a party did not come in time
    PARTY_FAILED = "party_failed"
    SERVER_FAILED = "server_failed"


@dataclass(frozen=True, kw_only=True)
class Process:
    """One process of a party: the fencing token."""

    incarnation: Annotated[int, Bounds(1, 2**32 - 1)]  # counts the starts of the command in one folder, from 1
    name: Name  # random
    before: Annotated[tuple[Name, ...], Length(1000)] = ()  # earlier processes of the same folder


@dataclass(frozen=True, kw_only=True)
class Finished:
    """Party: its results are written."""

    weights_sha256: Name = ""  # training
    received: Number = 0  # prediction: the number of nodes whose class probabilities it received


@dataclass(frozen=True, kw_only=True)
class Hello:
    """Party: the first message on every stream."""

    facts: Facts
    process: Process | None  # None in a dry run, which takes no part in fencing
    run: Name | None = None  # the run whose part its folder holds
    only: Name | None = None  # the only run that it wants to join
    fresh: bool = False  # it starts over once the run begins
    attempt: Number = 0  # the last attempt that it confirmed
    finished: Finished | None = None  # set once its results are written
    rounds: Rounds = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """Party: it is ready to run these settings. Now it states all facts."""

    digest: Name  # of the settings
    settings: Mapping[str, Any]  # `RunConfig.comparable()`
    rounds: Rounds
    facts: Facts


@dataclass(frozen=True, kw_only=True)
class Ready:
    """Party: it has restored the checkpoint of an attempt."""

    attempt: Number
    digest: Name


@dataclass(frozen=True, kw_only=True)
class Failed:
    """Party: it cannot go on. Only the public part of the error is sent."""

    code: Name
    why: Sentence


@dataclass(frozen=True, kw_only=True)
class Declined:
    """Party: it will not take part in this run."""

    code: Name
    why: Sentence
    table: Table = ()


@dataclass(frozen=True, kw_only=True)
class Welcome:
    """Server: the party is accepted."""

    config: Mapping[str, Any]
    roster: tuple[Name, ...]
    index: Number
    run: Name
    now: float | None = None  # dry run: the server's clock


@dataclass(frozen=True)
class StatusRequest:
    """Server: send `Prepared` again."""


@dataclass(frozen=True, kw_only=True)
class Begin:
    """Server: start an attempt from the checkpoint of a round."""

    attempt: Number
    round: Number
    digest: Name  # of this party's checkpoint


@dataclass(frozen=True, kw_only=True)
class Notice:
    """Server: a line for people."""

    line: Sentence


@dataclass(frozen=True)
class Goodbye:
    """Server: every party is finished."""


@dataclass(frozen=True, kw_only=True)
class Refused:
    """Server: this process cannot take part."""

    code: Name
    why: Sentence
    table: Table = ()
    run: Name | None = None


@dataclass(frozen=True, kw_only=True)
class Stopped:
    """Server: the run has ended for everyone."""

    code: Name
    why: Sentence


FromParty = Hello | Prepared | Ready | Finished | Failed | Declined
FromServer = Welcome | StatusRequest | Begin | Notice | Goodbye | Refused | Stopped
ControlMessage = FromParty | FromServer
KINDS: dict[str, type[Any]] = {kind.__name__: kind for kind in (*get_args(FromParty), *get_args(FromServer))}


def encode_control(message: ControlMessage) -> bytes:
    """Return a control message as JSON."""
    return json.dumps({"kind": type(message).__name__, **to_plain(message)}, allow_nan=False).encode()


def decode_control(content: bytes, source: str) -> ControlMessage:
    """Read a control message.

    Args:
        content: the JSON text; the caller has checked its length.
        source: the sender, for error messages.

    Raises:
        ProtocolError: the text is not a control message. The error is one printable line.
    """
    try:
        fields = parse_json(content, source)
        if not isinstance(fields, dict):
            raise ProtocolError(f"{source}: a control message of {len(content)} bytes is not an object.")
        name = fields.pop("kind", None)
        if not isinstance(name, str) or name not in KINDS:
            raise ProtocolError(f"{source}: unknown kind of control message {printable(name, 60)!r}; {SAME_VERSION}")
        message: ControlMessage = read_record(KINDS[name], fields, f"{source}: {name}")
        return message
    except RecordError as error:
        raise ProtocolError(f"{printable(error, SENTENCES).rstrip('.')}; {SAME_VERSION}") from None
