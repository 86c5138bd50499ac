"""The server's end of all streams: who is there, what has come from whom, and what is to be sent; no torch here.

Threads of gRPC put in what arrives, the thread of the run takes it out; one lock guards everything. What takes long,
reading what came and writing answers, is done without it.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

from glasu.config import RunConfig
from glasu.errors import (
    AbsenceError,
    CheckpointError,
    DataError,
    EquivocationError,
    GlasuError,
    ProtocolError,
    TrainingError,
    public_reason,
)
from glasu.files import OUT_OF_DESCRIPTORS
from glasu.network.admission import Admission, check_head
from glasu.network.compatibility import Facts
from glasu.network.deduplication import Receipts
from glasu.network.fencing import Fence
from glasu.network.frames import (
    CONTROL,
    CONTROL_BYTES,
    PIECE,
    RECEIPT,
    ROOM,
    Assembler,
    Limits,
    control,
    pieces,
    read_control,
)
from glasu.network.peer import Hello, Link, Statement, Stream, read_hello, stated_facts, stated_rounds
from glasu.network.sanitize import SENTENCES, printable, printable_lines
from glasu.network.state_file import Durable
from glasu.protocol.message_bytes import Head, decode, encode
from glasu.protocol.messages import Awaited, Message

Tell = Callable[[str], None]
OnNonsense = Literal["stop", "wait"]
NAMED_AFTER = 10.0  # seconds after which a party that is awaited is named; then less often, but
NAMED_EVERY = 60.0  # at least so often: whoever hears it knows that the server is alive


class NewProcess(Exception):  # noqa: N818 - not an error: the run goes on in another attempt
    """A process of the run was started again."""


class Hub:
    """All parties of one run, at the server."""

    def __init__(
        self,
        roster: Sequence[str],
        own_facts: Facts,
        welcome: Mapping[str, Any],
        durable: Durable,
        rounds: Callable[[], Mapping[int, str]],
        tell: Tell,
        on_nonsense: OnNonsense = "stop",
        waited: Callable[[float], None] = lambda seconds: None,
        clock: Callable[[], float] = time.monotonic,
        settings: Callable[[int], RunConfig] | None = None,
    ) -> None:
        """Expect the parties of the roster.

        Args:
            roster: names, in client order.
            own_facts: what a party must have in common with the server.
            welcome: what an accepted party is told about the run.
            durable: remembers which process of each party is known, "incarnations".
            rounds: returns the server's own checkpoints.
            tell: is told what happens, in lines.
            on_nonsense: whether a message that cannot be stops the run, or the run waits for its sender to come back.
            waited: is told how long parties were waited for, at least every second of it.
            clock: tells seconds.
            settings: returns those that a party of so many nodes must be prepared for; None: any.
        """
        self.waited = waited
        self.links = {name: Link(name, index, away_since=clock()) for index, name in enumerate(roster)}
        self.own_facts, self.welcome = own_facts, welcome
        self.durable, self.fence = durable, Fence(durable)
        self.admission = Admission(own_facts, welcome, rounds, self.fence, settings)
        self.tell, self.on_nonsense, self.clock = tell, on_nonsense, clock
        self.changed = threading.Condition()
        self.begin: dict[str, Any] | None = None  # the present attempt, as it was proposed
        self.digests: dict[str, str | None] = {}  # of the checkpoints that it begins with
        self.awaited: Awaited | None = None  # what every party is to send now; None: anything
        self.limits: Limits | None = None  # how long messages may be
        self.under_way = False
        self.closing = False
        self.leaving = False
        self.refused = 0  # connections and processes
        self.failure: GlasuError | None = None
        self._new_process = False

    # --- called by the threads of gRPC ------------------------------------------------------------------------------

    def attach(self, name: str, stream: Stream, frames: Iterator[bytes]) -> None:
        """Read a party's frames until its stream ends; the first one must be its hello."""
        link = self.links[name]
        try:
            for frame in frames:
                if not self._take(link, stream, frame):
                    break
                with self.changed:
                    self.changed.notify_all()
                    self._wait_for_room(link, stream)
        except Exception as error:  # whatever it is: this thread must not end without anybody hearing why
            self._reject(link, stream, error)
        finally:
            self._detach(link, stream)

    def _reject(self, link: Link, stream: Stream, error: Exception) -> None:
        """Stop the run because of what came on a stream, or refuse who sent it; it was refused before it was used.

        What was never accepted is refused, and stops nobody.
        """
        why = printable(public_reason(error), SENTENCES)
        with self.changed:
            if isinstance(error, OSError) and error.errno in OUT_OF_DESCRIPTORS:  # it passes; the party tries again
                self.tell(f"party {link.name!r}: its connection was dropped: {why}.")
            elif isinstance(error, OSError):  # this is not the party's doing
                self._stop(stream, TrainingError(f"the server failed when party {link.name!r} came: {why}"))
            elif link.stream is stream and not self._may_return(error):
                kind = type(error) if isinstance(error, GlasuError) else ProtocolError
                self._stop(stream, kind(f"party {link.name!r}: {why}"))
            elif link.stream is stream:
                self._expel(link, why)
            elif not stream.accepted:  # else another one has taken its place, and that one is not to blame
                self._refuse(link, stream, why, [])

    def _stop(self, stream: Stream, error: GlasuError) -> None:
        """Note why the run cannot go on, and tell it on a stream that is closed now; the rest hear it at the end."""
        self.fail(error)
        stream.send_soon(control("stopped", why=error.public))

    def _may_return(self, error: Exception) -> bool:
        """Tell whether the run waits for a party after such an error; of two contents under one key, one is a lie."""
        return self.on_nonsense == "wait" and not isinstance(error, EquivocationError)

    def _expel(self, link: Link, why: str) -> None:
        """Refuse the process that takes part; its place stays its folder's, and the run waits for its return."""
        if link.stream is not None:
            self._refuse(link, link.stream, why, [])
        link.stream, link.away_since = None, self.clock()
        link.hello, link.facts, link.prepared, link.ready = None, {}, None, 0
        self.changed.notify_all()

    def turned_away(self, line: str) -> None:
        """Note a connection that was refused because of its certificate."""
        with self.changed:
            self.refused += 1
        self.tell(line)

    def connected(self) -> dict[str, bool]:
        """Tell which parties have a stream."""
        with self.changed:
            return {name: link.stream is not None for name, link in self.links.items()}

    def _detach(self, link: Link, stream: Stream) -> None:
        with self.changed:
            if link.stream is stream:
                link.stream, link.away_since = None, self.clock()
                if not self.closing and not self.leaving and self.failure is None:
                    self._say(f"{link.name}: the connection ended; its return is awaited.", but=link)
            stream.close()
            self.changed.notify_all()

    def _take(self, link: Link, stream: Stream, frame: bytes) -> bool:
        """Take a frame of a stream; return whether the stream goes on."""
        kind = frame[0] if frame else -1
        fields = read_control(frame, CONTROL_BYTES) if kind == CONTROL else {}
        with self.changed:
            if link.stream is not stream:  # it is new, or another one has taken its place
                return kind == CONTROL and not stream.accepted and self._hello(link, stream, fields)
            if kind == CONTROL:
                return self._control(link, fields)
            if kind == RECEIPT:
                link.receipts.received(frame[1:])
                return True
        if kind != PIECE:
            raise ProtocolError(f"frame of unknown kind {kind}.")
        self._piece(link, stream, frame)
        return True

    def _wait_for_room(self, link: Link, stream: Stream) -> None:
        while stream.open and link.stream is stream and link.waiting_bytes() > ROOM:
            self.changed.wait(1.0)

    def _hello(self, link: Link, stream: Stream, fields: dict[str, Any]) -> bool:
        """Accept a party's process, or tell it and everyone why not."""
        if fields["kind"] == "examine":  # no process of the run: nobody else needs to hear of it
            purpose = self.own_facts.get("purpose", "training")
            why = f"a {purpose} is under way there; start glasu doctor at the server instead of glasu serve."
            stream.send(control("refused", why=why, table=[]))
            return False
        hello = read_hello(fields)
        if self.failure is not None:
            stream.send(control("stopped", why=self.failure.public))
            return False
        again = self.fence.is_known(link.name, hello) and link.hello is not None
        why, table = self.admission.objection(link, hello, self.links.values(), closing=self.closing)
        if why:
            self._refuse(link, stream, why, table)
            return False
        self._replace(link, stream, hello)
        link.hello, link.facts = hello, {**link.facts, **hello.facts} if again else hello.facts
        link.refused = ""
        if not again:
            link.prepared, link.ready, link.finished, link.compared = None, 0, None, False
            self._new_process = self._new_process or self.under_way
        self.tell(f"{link.name}: connected {'again' if again else f'(start {hello.process[0]})'}.")
        stream.send(control("welcome", **self.welcome, index=link.index))
        self._bring_up_to_date(link, stream, hello, again=again)
        return True

    def _bring_up_to_date(self, link: Link, stream: Stream, hello: Hello, *, again: bool) -> None:
        """Tell a party that was accepted what is going on."""
        if self.closing:
            self._dismiss(link)
        elif not self.under_way:
            stream.send(control("report"))
        elif again and self.begin is not None:
            if hello.attempt == self.begin["attempt"]:
                link.ready = hello.attempt
                link.finished = hello.finished or link.finished
            else:
                stream.send(self._begin_frame(link))

    def _replace(self, link: Link, stream: Stream, hello: Hello) -> None:
        """Let this stream be the party's; an earlier one is told and ended."""
        is_new = not self.fence.is_known(link.name, hello)
        self.fence.admit(link.name, hello)
        if link.stream is not None:
            if is_new:
                why = f"a newer process of party {link.name!r} (start {hello.process[0]}) has taken its place."
                link.stream.send(control("refused", why=why, table=[]))
            link.stream.close()
        link.stream, stream.accepted = stream, True
        link.receipts.begin_stream()
        link.assembler = Assembler(link.assembler.limit)

    def _refuse(self, link: Link, stream: Stream, why: str, table: list[str]) -> None:
        """Tell a party's process, and everyone, why it cannot take part."""
        with self.changed:
            why = printable(why, SENTENCES)
            self.refused += 1
            if why != link.refused:  # one that comes again and again is told of once
                link.refused = why
                for line in table:
                    self.tell(line)
                self._say(f"{link.name}: not accepted: {why}", but=link if link.stream in (None, stream) else None)
            stream.send_soon(control("refused", why=why, table=table, run=self.welcome["run"]))
            stream.close()

    def _prepared(self, link: Link, fields: dict[str, Any]) -> bool:
        """Note that a party is ready to run these settings; now it states everything that must be equal."""
        facts = stated_facts(fields)
        why, table = self.admission.unfitness(link, fields, facts, self.links.values())
        if why and link.stream is not None:
            self._refuse(link, link.stream, why, table)
            self._withdraw(link)
            return False
        if link.prepared is None:
            self.tell(f"{link.name}: prepared.")
            if not link.compared:
                for line in self.admission.other_builds(link, facts, self.links.values()):
                    self._say(line, but=None)
                link.compared = True
        link.prepared, link.rounds, link.facts = str(fields.get("digest")), stated_rounds(fields), facts
        return True

    def _control(self, link: Link, fields: dict[str, Any]) -> bool:
        """Take what a party says of itself; return whether its stream goes on."""
        kind = fields["kind"]
        if kind == "prepared":
            return self._prepared(link, fields)
        attempt = self.begin["attempt"] if self.begin is not None else 0
        if kind == "ready" and self.begin is not None and fields.get("attempt") == attempt:
            if fields.get("digest") != self.digests.get(link.name):
                expected, got = self.digests.get(link.name), printable(fields.get("digest"), 64)
                where = f"checkpoint of round {self.begin['round']}"
                raise ProtocolError(f"it confirmed another {where}: expected SHA-256 {expected}, got {got}.")
            link.ready = attempt
        elif kind == "finished" and link.ready == attempt > 0:  # else of an attempt that is over
            link.finished = fields
        elif kind == "failed":
            why = printable(fields.get("why"), SENTENCES)
            self.failure = self.failure or TrainingError(f"party {link.name!r} failed: {why}")
        elif kind == "declined":
            self._withdraw(link)
            link.refused = printable(fields.get("why"), SENTENCES)
            for line in printable_lines(fields.get("table")):
                self.tell(line)
            self._say(f"{link.name}: declines to take part: {link.refused}", but=link)
            return False
        elif kind not in ("ready", "finished"):  # those are of an attempt that is over
            raise ProtocolError(f"control frame of unknown kind {printable(kind, 60)!r}.")
        return True

    def _withdraw(self, link: Link) -> None:
        """Take back that a process was accepted: it does not fit, or does not want to."""
        link.hello, link.facts, link.prepared = None, {}, None
        self.fence.withdraw(link.name)

    def _piece(self, link: Link, stream: Stream, frame: bytes) -> None:
        """Take a piece, with the last one the message; what is refused is named beside what is awaited."""
        try:
            with self.changed:
                begin = self.begin
                if link.stream is not stream or begin is None or link.ready != begin["attempt"]:
                    return  # it is of an attempt that is over
                whole = link.assembler.add(frame, lambda head, size: self._admits(link, head, size))
                head = link.assembler.head
            if whole is None:
                return
            message, digest = decode(whole, head), hashlib.sha256(whole).digest()
            with self.changed:
                if link.stream is stream and self.begin is begin:
                    self._message(link, message, len(whole), digest)
        except ProtocolError as error:
            now = "no message" if self.awaited is None else str(self.awaited)
            raise type(error)(f"{now} is awaited: {error}") from None

    def _admits(self, link: Link, head: Head, size: int) -> bool:
        """Refuse a message that cannot be, by its header, before anything is allocated for it."""
        assert self.begin is not None
        check_head(link, head, size, self.begin["attempt"], self.awaited, self.limits)
        return True

    def _message(self, link: Link, message: Message, size: int, digest: bytes) -> None:
        if link.receipts.take(message.key, digest):
            link.inbox.append((message, size + sum(nodes.nbytes for nodes in message.node_sets)))
            return
        for frame in link.receipts.repeated(message.key):
            link.send(frame)

    # --- called by the thread of the run ----------------------------------------------------------------------------

    def fail(self, error: GlasuError) -> None:
        """Note why the run cannot go on; the thread of the run will raise it."""
        with self.changed:
            self.failure = self.failure or error
            self.changed.notify_all()

    def sets_aside(self, error: GlasuError) -> bool:
        """Refuse the party whose message was the cause, where the run is to wait for it; else return False."""
        link = self.links.get(error.party)
        if link is None or not self._may_return(error):
            return False
        with self.changed:
            self._expel(link, error.public)
        self.tell(f"the run goes on from the last common checkpoint when {link.name} is back with what is right.")
        return True

    def gather(self, wait: float) -> dict[str, Statement]:
        """Wait until every party is there and prepared, and return what each of them states.

        A process that comes after that may say something else, and the run begins once more.
        """

        def missing() -> list[Link]:
            return [link for link in self.links.values() if link.stream is None or link.prepared is None]

        with self.changed:
            self.under_way = self._new_process = False
            for link in self.links.values():
                link.prepared = None
                link.send(control("report"))
            self._await(missing, wait, "to join")
            self.under_way = True
            return {link.name: link.statement() for link in self.links.values()}

    def propose(
        self, attempt: int, round_index: int, awaited: Awaited | None = None, limits: Limits | None = None
    ) -> None:
        """Begin an attempt after a round of which everyone has a checkpoint.

        Args:
            attempt: its number.
            round_index: after which round it goes on.
            awaited: what every party is to send first; None: anything.
            limits: how long messages may be; None: as long as the links' assemblers allow.
        """
        with self.changed:
            self.awaited, self.limits = awaited, limits
            self.begin = {"attempt": attempt, "round": round_index}
            self.fence.settle()
            for link in self.links.values():
                self.digests[link.name] = link.rounds.get(round_index)
                link.inbox.clear()
                if limits is not None:
                    link.assembler = Assembler(limits.largest)
                link.receipts, link.ready, link.finished = Receipts(), 0, None
                link.send(self._begin_frame(link))

    def _begin_frame(self, link: Link) -> bytes:
        assert self.begin is not None
        return control("begin", **self.begin, digest=self.digests[link.name])

    def confirmed(self, wait: float) -> None:
        """Wait until every party has confirmed the attempt."""
        with self.changed:
            begin = self.begin
            assert begin is not None
            self._await(
                lambda: [link for link in self.links.values() if link.ready != begin["attempt"]],
                wait,
                f"to go on after round {begin['round']}",
            )

    def collect(self, wait: float, what: str) -> list[Message]:
        """Return the next message of every party, in client order, when they have taken the earlier answers."""
        with self.changed:
            self._await(lambda: [link for link in self.links.values() if not link.inbox], wait, what)
            self._await(
                lambda: [link for link in self.links.values() if link.receipts.under_way > ROOM],
                wait,
                f"to take the answers sent {what}",
            )
            messages = [link.inbox.popleft()[0] for link in self.links.values()]
            self.changed.notify_all()
            return messages

    def answer(self, messages: Sequence[Message], answers: Sequence[Message], awaited: Awaited | None = None) -> None:
        """Send every party the answer to its message, and remember it until it has arrived; now `awaited` is."""
        encoded: dict[int, tuple[bytes, ...]] = {}
        for answer in answers:  # one answer to all is one object, and the same frames for all
            if id(answer) not in encoded:
                encoded[id(answer)] = tuple(pieces(encode(answer)))
        with self.changed:
            self.awaited = awaited
            for link, message, answer in zip(self.links.values(), messages, answers, strict=True):
                frames = encoded[id(answer)]
                link.receipts.answered(message.key, frames)
                for frame in frames:
                    link.send(frame)

    def results(self, wait: float) -> list[dict[str, Any]]:
        """Wait until every party has written its results, and return what they report."""
        with self.changed:
            self._await(lambda: [link for link in self.links.values() if link.finished is None], wait, "to finish")
            return [link.finished or {} for link in self.links.values()]

    def say_goodbye(self, seconds: float) -> None:
        """Let the parties go; wait a little for them to hang up, and for those who are away to come and hear it."""
        with self.changed:
            self.closing = True
            for link in self.links.values():
                self._dismiss(link)
            deadline = self.clock() + seconds
            while self.clock() < deadline:
                if all(link.dismissed and link.stream is None for link in self.links.values()):
                    return
                self.changed.wait(0.2)

    def _dismiss(self, link: Link) -> None:
        if link.stream is not None:
            link.send(control("goodbye"))
            link.dismissed = True

    def leave(self) -> None:
        """This process is interrupted: that streams end is its own doing, and the parties await the next one."""
        with self.changed:
            self.leaving = True

    def announce_failure(self, error: Exception, seconds: float) -> None:
        """Tell every party why the run ends, ahead of most of what was still to be sent; wait for it to hang up."""
        why = public_reason(error)
        if not isinstance(error, GlasuError) or isinstance(error, CheckpointError | DataError):
            why = f"the server failed: {why}"
        with self.changed:
            self.failure = self.failure or TrainingError(why)  # whoever comes now hears it, too
            for link in self.links.values():
                if link.stream is not None:
                    link.stream.send_soon(control("stopped", why=why))
            deadline = self.clock() + seconds
            while any(link.stream is not None for link in self.links.values()) and self.clock() < deadline:
                self.changed.wait(0.2)

    def _say(self, line: str, but: Link | None) -> None:
        """Tell the log and every party except one."""
        self.tell(line)
        for link in self.links.values():
            if link is not but:
                link.send(control("notice", line=line))

    def _await(self, missing: Callable[[], list[Link]], wait: float, what: str) -> None:
        """Wait until nobody is missing, and name who is; give up when one has had no stream for `wait` seconds.

        Who has a stream is alive, or gRPC would have ended it: it may take as long as it needs.
        """
        since, named, last = self.clock(), NAMED_AFTER, None
        while True:
            if self.failure is not None:
                raise self.failure
            if self._new_process and self.under_way:
                raise NewProcess
            absent = missing()
            if not absent:
                return
            now, names = self.clock(), ", ".join(link.name for link in absent)
            if names != last:
                since, named, last = (now if last is not None else since), NAMED_AFTER, names
            gone = [link for link in absent if link.stream is None]
            left = min((link.away_since + wait - now for link in gone), default=wait)
            if left <= 0:
                reasons = "; ".join(f"{link.name}: {link.refused}" for link in gone if link.refused)
                raise AbsenceError(
                    f"waited {wait:.0f} s for {', '.join(link.name for link in gone)} {what}"
                    f"{f' ({reasons})' if reasons else ''}; nothing that was saved is lost. Start what is "
                    "missing, and the same command again."
                )
            if now - since >= named:
                state = "; ".join(
                    f"{link.name} is {'connected' if link.stream is not None else 'not connected'}" for link in absent
                )
                self._say(f"waiting for {names} {what} since {now - since:.0f} s ({state}).", but=None)
                named = min(2 * named, named + NAMED_EVERY)
            self.changed.wait(min(1.0, max(0.05, left)))
            self.waited(self.clock() - now)
