"""The boundary between a session and its role: how a party and a server come to an agreement before messages flow.

A session (`ServerSession`, `ClientSession`) moves frames, keeps states and reconnects. A role (training, prediction,
dry run) implements one of the two protocols below and decides which processes take part. Payloads are JSON objects: the
session parses the bytes, the role reads the fields.

    party                                   server
    ClientHandshake.hello        ------>    ServerHandshake.admit      may raise RefusalError
    ClientHandshake.welcome      <------    the payload that `admit` returned
    ClientSession.prepare        ------>    ServerHandshake.prepare    may raise RefusalError
    ClientSession.await_attempt  <------    ServerSession.begin_attempt
    ClientSession.confirm        ------>    digest of the checkpoint, compared by the session
    ClientSession.finish         ------>    ServerSession.collect_results

A stream that breaks and is opened again by the same two processes goes through none of this: both sides resend the
frames that were not acknowledged.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from glasu.errors import ConfigError

Payload = Mapping[str, object]  # a JSON object; the role reads its fields with a strict reader


class RefusalError(ConfigError):
    """A process does not fit the run. The session sends it the reason and keeps waiting for the party."""

    def __init__(self, code: str, reason: str, table: Sequence[str] = ()) -> None:
        """Refuse a process.

        Args:
            code: what programs read, for example "other_settings".
            reason: one sentence for people; every party may read it.
            table: lines of a comparison in two columns; shown at the server and at the refused party.
        """
        super().__init__(reason)
        self.code, self.table = code, tuple(table)


class ServerHandshake(Protocol):
    """The server's decisions about processes of parties.

    The session holds its lock during every call. So calls never overlap, and they must neither wait nor call the
    session. `party` is the name in the peer's certificate and stands in the roster.
    """

    def admit(self, party: str, hello: Payload, *, closing: bool) -> Payload:
        """Admit a process and return the welcome for it, or raise `RefusalError`.

        The session calls this for every process that it does not know: a new one, a restarted one, and all after a
        restart of the server. It does not call it when the same process opens a new stream. When the call returns,
        the decision must be durable (fencing). A new process takes the place of the earlier one of its party.

        Args:
            party: the name in the peer's certificate.
            hello: what `ClientHandshake.hello` returned there.
            closing: the run is over; only processes that need to hear so should be admitted.
        """
        ...

    def prepare(self, party: str, statement: Payload) -> Sequence[str]:
        """Check the statement of a party that is ready to run, or raise `RefusalError`; keep it for the next attempt.

        Returns:
            Lines for the logs of the server and of every party, for example about other builds of a library.
        """
        ...

    def withdraw(self, party: str) -> None:
        """Forget the admitted process of a party: it declined, or `prepare` refused it."""
        ...

    def settle(self) -> None:
        """Note that an attempt begins with the admitted processes: from now on their places are theirs."""
        ...


class ClientHandshake(Protocol):
    """A party's side of the same decisions. All methods are called in the thread that uses the session."""

    def hello(self) -> Payload:
        """Return the statement of this process about itself. Called before every connection."""
        ...

    def welcome(self, welcome: Payload) -> None:
        """Take the welcome of a server process that is new to this party: the first one, and after its restarts.

        Raise a `GlasuError` to end the session, for example where the server now offers other settings.
        """
        ...

    def statement(self) -> Payload:
        """Return the statement for `ServerHandshake.prepare`. Called by `prepare` and before each new attempt."""
        ...
