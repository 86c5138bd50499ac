"""The handshake of a party and the server before the first message, as an interface between session and role.

A session (`ServerSession`, `ClientSession`) sends frames, keeps states and reconnects. It asks its role (training,
prediction, alignment or dry run) for all decisions, for example whether a process is admitted. For this, the role
implements `ServerHandshake` or `ClientHandshake`. Payloads are JSON objects in the control messages of `control.py`.
The role reads them strictly into the dataclasses below. Only a `ResultPayload` is read by the session.

    party                                   server
    ClientHandshake.hello        ------>    ServerHandshake.admit      HelloPayload; may raise RefusalError
    ClientHandshake.welcome      <------    the payload that `admit` returned: WelcomePayload
    ClientSession.prepare        ------>    ServerHandshake.prepare    StatementPayload; may raise RefusalError
    ClientSession.await_attempt  <------    ServerSession.begin_attempt
    ClientSession.confirm        ------>    digest of the checkpoint, compared by the session
    ClientSession.finish         ------>    ServerSession.collect_results: ResultPayload

If a stream breaks and the same two processes open a new stream, there is no new handshake: both sides resend the frames
that were not acknowledged.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Protocol, TypeVar

from glasu.errors import ConfigError
from glasu.network.facts import Facts, Short
from glasu.network.findings import Findings
from glasu.network.id_keys import IdShare
from glasu.network.log_lines import MAX_REASON, make_printable
from glasu.network.signatures import SignedHead
from glasu.records import Bounds, FlatSettings, Length, RecordError, read_record

Payload = Mapping[str, Any]  # a JSON object
PayloadT = TypeVar("PayloadT")
Number = Annotated[int, Bounds(0, 2**32 - 1)]
Rounds = Annotated[Mapping[Number, Short], Length(100)]  # checkpoints and their digests
SAME_VERSION = "do both sides run the same version of GLASU?"


class Code(enum.StrEnum):
    """Why a process is refused. Programs compare the code; people read the sentence that is sent with the code."""

    SECOND_PROCESS = "second_process"  # the run already has, or had, a process of this party from another folder
    UNWANTED_RUN = "unwanted_run"  # the party may only join another run (--run)
    OTHER_RUN = "other_run"  # the party's folder belongs to another run
    RUN_FINISHED = "run_finished"
    RUN_STARTED = "run_started"  # the party asks for a fresh start, but the run has begun
    OTHER_PURPOSE = "other_purpose"  # the process has another purpose than the server, for example a dry run
    DIFFERENT_FACTS = "different_facts"
    DIFFERENT_SETTINGS = "different_settings"
    INVALID_SETTINGS = "invalid_settings"  # the settings cannot run on this data
    WRONG_ROSTER = "wrong_roster"
    NO_COMMON_CHECKPOINT = "no_common_checkpoint"
    INVALID_PAYLOAD = "invalid_payload"
    INVALID_HELLO = "invalid_hello"  # the first frame of a stream is not a valid hello
    INVALID_MESSAGE = "invalid_message"
    CUT_LEDGER = "cut_ledger"  # the party's ledger was truncated or replaced
    REPLACED = "replaced"  # a newer process of the party was admitted


class RefusalError(ConfigError):
    """A process does not fit the run. The session sends the reason to the process and still waits for the party."""

    def __init__(self, code: str, reason: str, table: Sequence[str] = ()) -> None:
        """Refuse a process.

        Args:
            code: a `Code`, or the code that a server sent.
            reason: one sentence for people; every party may read it.
            table: lines of a table with two columns; shown at the server and at the refused party.
        """
        super().__init__(reason, code=code)
        self.table = tuple(table)


@dataclass(frozen=True, kw_only=True)
class Process:
    """The fencing token: identifies one process of a party."""

    incarnation: Annotated[int, Bounds(1, 2**32 - 1)]  # counts the starts of the command in one folder, from 1
    name: Short  # random
    before: Annotated[tuple[Short, ...], Length(1000)] = ()  # earlier processes of the same folder


@dataclass(frozen=True, kw_only=True)
class ResultPayload:
    """Sent by a party when it has written its results."""

    weights_sha256: Short = ""  # training: digest of the selected weights; empty if noise is added
    ledger: SignedHead | None = None  # head of the party's ledger after it wrote its results
    received: Number = 0  # prediction: number of nodes whose scores the party received; alignment: number of common ids


@dataclass(frozen=True, kw_only=True)
class HelloPayload:
    """Sent by a party to describe the process that connects."""

    facts: Facts
    process: Process | None  # None in a dry run, which has no fencing
    run: Short | None = None  # the run that the party's folder belongs to
    only: Short | None = None  # the only run that the party may join (--run); None: any run
    fresh: bool = False  # whether the party removes earlier checkpoints when the run begins
    finished: ResultPayload | None = None  # set once the party's results are written
    rounds: Rounds = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class WelcomePayload:
    """Sent by the server to admit a party to this run."""

    config: Mapping[str, Any]
    roster: tuple[Short, ...]
    index: Number  # the party's place in the roster
    run: Short
    now: float | None = None  # the time of the server's clock; only in a dry run


@dataclass(frozen=True, kw_only=True)
class StatementPayload:
    """Sent by a party that is ready to run these settings. It contains all facts of the party."""

    facts: Facts
    digest: Short = ""  # digest of the settings; empty in a dry run
    settings: FlatSettings = field(default_factory=dict)  # `RunConfig.flatten()`
    rounds: Rounds = field(default_factory=dict)
    ledger: SignedHead | None = None  # head of the party's durable ledger; None in a dry run
    findings: Findings = ()  # the party's findings in a dry run


@dataclass(frozen=True, kw_only=True)
class GoodbyePayload:
    """Sent by the server when the run is finished, with the last heads of the parties' ledgers."""

    ledgers: Mapping[str, SignedHead] = field(default_factory=dict)


def read_payload(cls: type[PayloadT], payload: Payload, source: str) -> PayloadT:
    """Read the payload of a peer strictly. The error for a malformed payload is one printable line."""
    try:
        return read_record(cls, payload, source)
    except RecordError as error:
        why = make_printable(error, MAX_REASON).rstrip(".")
        raise RefusalError(Code.INVALID_PAYLOAD, f"{why}; {SAME_VERSION}") from None


class ServerHandshake(Protocol):
    """The server's side of the handshake: admit or refuse the processes of parties.

    The session holds its lock during every call. So calls never overlap, and they must neither wait nor call the
    session. `party` is the name in the peer's certificate and is in the roster.
    """

    def admit(self, party: str, hello: Payload) -> Payload:
        """Admit a process and return the welcome for it, or raise `RefusalError`.

        The session calls this method for every process that it does not know. After a restart of the server, it knows
        none, and it forgets a process that it drops. When a known process opens a new stream, the method is not called.
        When the call returns, the decision must be durable (fencing). A new process replaces the earlier process of its
        party.

        Args:
            party: the name in the peer's certificate.
            hello: the result of `ClientHandshake.hello` at the party.
        """
        ...

    def admit_finished(self, party: str, hello: Payload) -> Payload:
        """Admit a process to a run that is complete.

        Admit only a process that has its results but does not know yet that the run is complete.
        """
        ...

    def prepare(self, party: str, statement: Payload) -> Sequence[str]:
        """Check and keep the statement of a party that is ready to run, or raise `RefusalError`.

        Returns:
            Lines for the logs of the server and of every party, for example about different builds of a library.
        """
        ...

    def withdraw(self, party: str) -> None:
        """Forget a party's process that declined the run, was refused by `prepare`, or is omitted from the run."""
        ...

    def find_comparison(self, prepared: Sequence[str]) -> tuple[str, Mapping[str, IdShare]] | None:
        """Return a prepared party that must compare its ids with another party, and the key shares that it needs.

        None means that no comparison is missing. The session calls this method after every statement, and sends the
        shares to the returned party.
        """
        ...

    def record_attempt(self) -> None:
        """Record that an attempt begins. From then on, the admitted processes cannot be withdrawn."""
        ...

    def find_absence_error(self, present: Sequence[str]) -> str | None:
        """If the present parties cannot continue alone, return the reason as a sentence, otherwise None.

        The session calls this when a party has had no connection for too long.
        """
        ...


class ClientHandshake(Protocol):
    """The party's side of the handshake. All methods are called in the thread that uses the session."""

    def hello(self) -> Payload:
        """Return the payload of this process's hello. Called before every connection."""
        ...

    def welcome(self, welcome: Payload) -> None:
        """Process the welcome of a server process that is new to this party: the first one, or a restarted one.

        Raise a `GlasuError` to end the session, for example if the server now offers other settings.
        """
        ...

    def store_shares(self, shares: Mapping[str, IdShare]) -> None:
        """Check and store the key shares of all parties. The next statement contains HMACs of the ids for them."""
        ...

    def statement(self) -> Payload:
        """Return the statement for `ServerHandshake.prepare`. Called by `prepare` and before each new attempt."""
        ...
