"""Payloads of the handshake: what a party and the server state before messages flow, and the codes of refusals.

    party                       server
    Hello        ------>
                 <------        Welcome
    Prepared     ------>
    Finished     ------>

The session carries them as JSON objects. The strict reader checks every field.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, TypeVar

from glasu.network.facts import Facts
from glasu.network.findings import Findings
from glasu.network.handshake import Payload, RefusalError
from glasu.network.sanitize import SENTENCES, printable
from glasu.records import Bounds, Length, RecordError, read_record

Record = TypeVar("Record")
Number = Annotated[int, Bounds(0, 2**32 - 1)]
Name = Annotated[str, Length(200)]
Rounds = Annotated[Mapping[Number, Name], Length(100)]  # checkpoints and their digests
SAME_VERSION = "do both sides run the same version of GLASU?"


class Code(enum.StrEnum):
    """Why a process cannot take part. Programs compare these; the sentence beside the code is for people."""

    SECOND_PROCESS = "second_process"  # another process of this party takes part, or has taken part
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
    INVALID_PAYLOAD = "invalid_payload"


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
    """Party: who connects."""

    facts: Facts
    process: Process | None  # None in a dry run, which takes no part in fencing
    run: Name | None = None  # the run whose part its folder holds
    only: Name | None = None  # the only run that it wants to join
    fresh: bool = False  # it starts over once the run begins
    finished: Finished | None = None  # set once its results are written
    rounds: Rounds = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Welcome:
    """Server: the party is admitted to this run."""

    config: Mapping[str, Any]
    roster: tuple[Name, ...]
    index: Number  # the party's place in the roster
    run: Name
    now: float | None = None  # dry run: the server's clock


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """Party: it is ready to run these settings. Now it states all facts."""

    facts: Facts
    digest: Name = ""  # of the settings; empty in a dry run
    settings: Mapping[str, Any] = field(default_factory=dict)  # `RunConfig.flatten()`
    rounds: Rounds = field(default_factory=dict)
    findings: Findings = ()  # dry run


def read_payload(cls: type[Record], payload: Payload, source: str) -> Record:
    """Read the payload of a peer strictly; refuse a malformed one with one printable line."""
    try:
        return read_record(cls, payload, source)
    except RecordError as error:
        why = printable(error, SENTENCES).rstrip(".")
        raise RefusalError(Code.INVALID_PAYLOAD, f"{why}; {SAME_VERSION}") from None
