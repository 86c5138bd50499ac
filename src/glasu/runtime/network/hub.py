"""The server's end of all streams: who is there, what has come from whom, and what is to be sent; no torch here.

Threads of gRPC put in what arrives, the thread of the run takes it out; one lock guards everything.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from glasu.errors import AbsenceError, GlasuError, ProtocolError, TrainingError
from glasu.protocol.messages import Message
from glasu.runtime.network.durable import Durable
from glasu.runtime.network.frames import CONTROL, PIECE, RECEIPT, Assembler, control, pieces, read_control
from glasu.runtime.network.handshake import Facts, differences, in_one_line, remedy, two_columns
from glasu.runtime.network.links import Hello, Link, Stream, read_hello, stated_facts, stated_rounds
from glasu.runtime.network.receipts import Receipts
from glasu.runtime.wire import decode, encode

Tell = Callable[[str], None]
NAMED_AFTER = 10.0  # seconds after which a party that is awaited is named
ROOM = 32 << 20  # bytes of one party's messages that wait to be used; then its stream is not read


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
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Expect the parties of the roster.

        Args:
            roster: names, in client order.
            own_facts: what a party must have in common with the server.
            welcome: what an accepted party is told about the run.
            durable: remembers the incarnations of the parties, "incarnations".
            rounds: returns the server's own checkpoints.
            tell: is told what happens, in lines.
            clock: tells seconds.
        """
        self.links = {name: Link(name, index) for index, name in enumerate(roster)}
        self.own_facts, self.welcome, self.durable, self.rounds = own_facts, welcome, durable, rounds
        self.tell, self.clock = tell, clock
        self.changed = threading.Condition()
        self.begin: dict[str, Any] | None = None  # the present attempt, as it was proposed
        self.digests: dict[str, str | None] = {}  # of the checkpoints that it begins with
        self.under_way = False
        self.closing = False
        self.refused = 0  # connections and processes
        self.failure: GlasuError | None = None
        self._new_process = False

    # --- called by the threads of gRPC ------------------------------------------------------------------------------

    def attach(self, name: str, stream: Stream, frames: Iterator[bytes]) -> None:
        """Read a party's frames until its stream ends; the first one must be its hello."""
        link = self.links[name]
        try:
            for frame in frames:
                with self.changed:
                    if not self._take(link, stream, frame):
                        break
                    self.changed.notify_all()
                    self._wait_for_room(link, stream)
        except GlasuError as error:
            if link.stream is stream:
                self.fail(type(error)(f"party {name!r}: {error}"))  # it will be told by `announce_failure`
            else:  # it was never accepted, and stops nobody
                self._refuse(link, stream, str(error), [])
        else:
            self._detach(link, stream)

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
                link.stream = None
                if not self.closing:
                    self._say(f"{link.name}: the connection ended; its return is awaited.", but=link)
            stream.close()
            self.changed.notify_all()

    def _take(self, link: Link, stream: Stream, frame: bytes) -> bool:
        kind = frame[0] if frame else -1
        if link.stream is not stream:
            return kind == CONTROL and self._hello(link, stream, read_control(frame))
        if kind == PIECE:
            if self.begin is not None and link.ready == self.begin["attempt"]:  # else of an attempt that is over
                whole = link.assembler.add(frame)
                if whole is not None:
                    self._message(link, whole)
        elif kind == RECEIPT:
            link.receipts.received(frame[1:])
        elif kind == CONTROL:
            self._control(link, read_control(frame))
        else:
            raise ProtocolError(f"frame of unknown kind {kind}.")
        return True

    def _wait_for_room(self, link: Link, stream: Stream) -> None:
        while stream.open and link.stream is stream and link.waiting_bytes() > ROOM:
            self.changed.wait(1.0)

    def _hello(self, link: Link, stream: Stream, fields: dict[str, Any]) -> bool:
        """Accept a party's process, or tell it and everyone why not."""
        hello = read_hello(fields)
        known = (*self.durable["incarnations"].get(link.name, (0, "")),)
        again = hello.process == known and link.hello is not None
        why, table = self._objection(link, hello, known)
        if why:
            self._refuse(link, stream, why, table)
            return False
        self._replace(link, stream, hello.process, known)
        link.hello, link.facts = hello, {**link.facts, **hello.facts} if again else hello.facts
        link.refused = ""
        if not again:
            link.prepared, link.ready, link.finished = None, 0, None
            self._new_process = self._new_process or self.under_way
        self.tell(f"{link.name}: connected {'again' if again else f'(start {hello.process[0]})'}.")
        stream.send(control("welcome", **self.welcome, index=link.index))
        self._bring_up_to_date(link, stream, hello, again=again)
        return True

    def _objection(self, link: Link, hello: Hello, known: tuple[Any, ...]) -> tuple[str, list[str]]:
        """Return why a process cannot take part, in a sentence and perhaps in two columns; else nothing."""
        start = hello.process[0]
        if hello.process != known and start <= known[0]:
            return (
                f"another process of party {link.name!r} takes part, or has taken part, in this run (its start "
                f"{known[0]}, this is start {start} of another folder); stop one of them, and go on with the "
                "--out folder of the other."
            ), []
        if hello.run not in (None, self.welcome["run"]):
            return (
                "its --out folder holds a party's part of another run; choose another --out, or start over with "
                "--fresh at this party."
            ), []
        if self.closing:  # a party of this run may come once more to hear that all is done
            return "" if hello.finished else "this run is finished; the server begins another one with --fresh.", []
        why, table = self._difference(link, hello.facts)
        if not why and not set(hello.rounds) & set(self.rounds()):
            here, there = (", ".join(map(str, own)) for own in (self.rounds(), hello.rounds))
            why = (
                f"it has checkpoints after rounds {there}, the server after rounds {here}: none in common. Restore "
                "the --out folder of whoever lost it, or start over with --fresh everywhere."
            )
        return why, table

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

    def _replace(self, link: Link, stream: Stream, process: tuple[int, str], known: tuple[Any, ...]) -> None:
        """Let this stream be the party's; an earlier one is told and ended."""
        if link.stream is not None:
            if process != known:
                why = f"a newer process of party {link.name!r} (start {process[0]}) has taken its place."
                link.stream.send(control("refused", why=why, table=[]))
            link.stream.close()
        if process != known:
            self.durable.update(incarnations={**self.durable["incarnations"], link.name: list(process)})
        link.stream = stream
        link.assembler = Assembler(link.assembler.limit)

    def _refuse(self, link: Link, stream: Stream, why: str, table: list[str]) -> None:
        """Tell a party's process, and everyone, why it cannot take part."""
        with self.changed:
            link.refused = why
            self.refused += 1
            for line in table:
                self.tell(line)
            self._say(f"{link.name}: not accepted: {why}", but=link)
            stream.send(control("refused", why=why, table=table))
            stream.close()

    def _difference(self, link: Link, facts: Facts) -> tuple[str, list[str]]:
        """Return in what a party differs from the server or from another party, in a sentence and in two columns."""
        others = {other.name: other.facts for other in self.links.values() if other is not link and other.hello}
        for whose, stated in {"the server": self.own_facts, **others}.items():
            rows = differences(stated, facts)
            if rows:
                sentence = f"it differs from {whose}: {in_one_line(rows, whose, link.name)}{remedy(rows)}."
                return sentence, two_columns(rows, whose, link.name)
        return "", []

    def _prepared(self, link: Link, fields: dict[str, Any]) -> None:
        """Note that a party is ready to run these settings; now it states everything that must be equal."""
        facts = stated_facts(fields)
        why, table = self._difference(link, facts)
        if why and link.stream is not None:
            self._refuse(link, link.stream, why, table)
            link.hello, link.facts = None, {}
        else:
            if link.prepared is None:
                self.tell(f"{link.name}: prepared.")
            link.prepared, link.rounds, link.facts = str(fields.get("digest")), stated_rounds(fields), facts

    def _control(self, link: Link, fields: dict[str, Any]) -> None:
        kind = fields["kind"]
        if kind == "prepared":
            self._prepared(link, fields)
        elif kind == "ready" and self.begin is not None and fields.get("attempt") == self.begin["attempt"]:
            if fields.get("digest") != self.digests.get(link.name):
                raise ProtocolError(f"it confirmed another checkpoint than the one of round {self.begin['round']}.")
            link.ready = self.begin["attempt"]
        elif kind == "finished":
            link.finished = fields
        elif kind == "failed":
            error = TrainingError if fields.get("exit_code") == 1 else ProtocolError
            why = f"party {link.name!r} failed: {str(fields.get('why'))[:2000]}"
            self.failure = self.failure or error(why)
        elif kind == "declined":
            link.hello = None
            link.refused = str(fields.get("why"))[:2000]
            self._say(f"{link.name}: declines to take part: {link.refused}", but=link)

    def _message(self, link: Link, content: bytes) -> None:
        message = decode(content)
        key, begin, hello = message.key, self.begin, link.hello
        assert begin is not None
        assert hello is not None
        expected = (begin["attempt"] % 65536, hello.process[0], link.index)
        if (key.attempt, key.incarnation, key.client) != expected:
            raise ProtocolError(
                f"{key}: expected attempt, start and client {expected}, "
                f"got {(key.attempt, key.incarnation, key.client)}."
            )
        if link.receipts.take(key, hashlib.sha256(content).digest()):
            link.inbox.append((message, len(content)))
            return
        answer = link.receipts.answer(key)
        if answer is not None:
            for piece in pieces(answer):
                link.send(piece)

    # --- called by the thread of the run ----------------------------------------------------------------------------

    def fail(self, error: GlasuError) -> None:
        """Note why the run cannot go on; the thread of the run will raise it."""
        with self.changed:
            self.failure = self.failure or error
            self.changed.notify_all()

    def gather(self, wait: float) -> dict[str, dict[int, str]]:
        """Wait until every party is there and prepared, and return their checkpoints and digests."""

        def missing() -> list[Link]:
            return [link for link in self.links.values() if link.stream is None or link.prepared is None]

        with self.changed:
            self.under_way = self._new_process = False
            for link in self.links.values():
                link.prepared = None
                link.send(control("report"))
            self._await(missing, wait, "to join")
            self.under_way = True
            return {link.name: link.rounds for link in self.links.values()}

    def propose(self, attempt: int, round_index: int) -> None:
        """Begin an attempt after a round of which everyone has a checkpoint."""
        with self.changed:
            self.begin = {"attempt": attempt, "round": round_index}
            for link in self.links.values():
                self.digests[link.name] = link.rounds.get(round_index)
                link.inbox.clear()
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
        """Return the next message of every party, in client order."""
        with self.changed:
            self._await(lambda: [link for link in self.links.values() if not link.inbox], wait, what)
            messages = [link.inbox.popleft()[0] for link in self.links.values()]
            self.changed.notify_all()
            return messages

    def answer(self, messages: Sequence[Message], answers: Sequence[Message]) -> None:
        """Send every party the answer to its message, and remember it until it has arrived."""
        encoded: dict[int, bytes] = {}
        for answer in answers:  # one answer to all is one object
            if id(answer) not in encoded:
                encoded[id(answer)] = encode(answer)
        with self.changed:
            for link, message, answer in zip(self.links.values(), messages, answers, strict=True):
                content = encoded[id(answer)]
                link.receipts.answered(message.key, content)
                for piece in pieces(content):
                    link.send(piece)

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

    def announce_failure(self, error: GlasuError) -> None:
        """Tell every party why the run ends."""
        with self.changed:
            for link in self.links.values():
                link.send(control("stopped", why=str(error), exit_code=error.exit_code))
                if link.stream is not None:
                    link.stream.close()

    def _say(self, line: str, but: Link | None) -> None:
        """Tell the log and every party except one."""
        self.tell(line)
        for link in self.links.values():
            if link is not but:
                link.send(control("notice", line=line))

    def _await(self, missing: Callable[[], list[Link]], wait: float, what: str) -> None:
        """Wait until nobody is missing; name who is, after a while, and give up after `wait` seconds of no change."""
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
            if now - since >= wait:
                reasons = "; ".join(f"{link.name}: {link.refused}" for link in absent if link.refused)
                raise AbsenceError(
                    f"waited {wait:.0f} s for {names} {what}{f' ({reasons})' if reasons else ''}; everything up to the "
                    "last checkpoint is kept. Start what is missing, and the same command again."
                )
            if now - since >= named:
                state = "; ".join(
                    f"{link.name} is {'connected' if link.stream is not None else 'not connected'}" for link in absent
                )
                self._say(f"waiting for {names} {what} since {now - since:.0f} s ({state}).", but=None)
                named *= 2
            self.changed.wait(min(1.0, max(0.05, since + wait - now)))
