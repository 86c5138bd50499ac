"""A toy federation over real sessions: every round the server returns the mean of the parties' arrays, in chunks.

Each party mixes the mean into its own array and saves it. The result is a function of the start values, so a run that
was broken and resumed must end with the same bytes as one in memory.
"""

from __future__ import annotations

import hashlib
import logging
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from glasu.errors import GlasuError, ProtocolError
from glasu.network.client_session import ClientSession, NewAttempt
from glasu.network.connection import ConnectOptions
from glasu.network.control import ProposedAttempt
from glasu.network.handshake import Payload, RefusalError, ResultPayload
from glasu.network.id_keys import IdShare
from glasu.network.roster import Attempt, RestartAttempt
from glasu.network.server_session import ServerSession
from glasu.network.transport import ClientStream, Listener
from glasu.pki.kit import open_kit
from glasu.protocol.message_bytes import Head
from glasu.protocol.messages import Joint, Partial
from glasu.protocol.requests import Receive
from glasu.wire.message_key import SERVER, Key, Phase
from support.log_lines import LineHandler
from support.ports import choose_port
from support.roles import Killed, Role

RUN = "ab" * 12
Checkpoints = dict[int, np.ndarray]


def key(round_index: int, chunk: int, client: int = SERVER, attempt: int = 0) -> Key:
    return Key(bytes.fromhex(RUN), Phase.TRAINING, client, round_index, 0, chunk, attempt=attempt)


def digest(array: np.ndarray) -> str:
    return hashlib.sha256(array.tobytes()).hexdigest()


@dataclass(frozen=True)
class Toy:
    """Sizes of a run."""

    parties: str = "abc"
    num_rounds: int = 5
    chunks: int = 3
    rows: int = 50
    columns: int = 4

    def start(self, client: int) -> np.ndarray:
        return np.random.default_rng(client).random((self.chunks, self.rows, self.columns), np.float32)

    def mix(self, own: np.ndarray, mean: np.ndarray, client: int) -> np.ndarray:
        return (own * np.float32(0.5) + mean * np.float32(client + 1)).astype(np.float32)

    def compute_expected_digests(self) -> list[str]:
        """Return the digests of all parties after an unbroken run."""
        arrays = [self.start(client) for client in range(len(self.parties))]
        for _ in range(self.num_rounds):
            mean = combine(arrays)
            arrays = [self.mix(own, mean, client) for client, own in enumerate(arrays)]
        return [digest(own) for own in arrays]

    @property
    def max_bytes(self) -> int:
        return 100 + self.rows * self.columns * 4

    def check_limits(self, head: Head, size: int) -> None:
        if size > self.max_bytes:
            raise ProtocolError(f"{head}: expected at most {self.max_bytes} bytes, got {size}.")


def combine(values: Sequence[np.ndarray]) -> np.ndarray:
    total = values[0].copy()
    for value in values[1:]:
        total += value
    return total / np.float32(len(values))


@dataclass
class ToyServerHandshake:
    """Admits every process, newest first."""

    statements: dict[str, Payload] = field(default_factory=dict)
    refuse: Callable[[str, Payload], RefusalError | None] = lambda party, payload: None
    withdrawn: list[str] = field(default_factory=list)
    needs: Collection[str] | None = None  # the parties without which the others do not continue; None: all

    def admit(self, party: str, hello: Payload) -> Payload:
        if (refusal := self.refuse(party, hello)) is not None:
            raise refusal
        return {"party": party}

    def admit_finished(self, party: str, hello: Payload) -> Payload:
        return self.admit(party, hello)

    def prepare(self, party: str, statement: Payload) -> Sequence[str]:
        if (refusal := self.refuse(party, statement)) is not None:
            raise refusal
        self.statements[party] = statement
        return ()

    def withdraw(self, party: str) -> None:
        self.withdrawn.append(party)

    def find_comparison(self, prepared: Sequence[str]) -> None:
        return None

    def record_attempt(self) -> None:
        pass

    def find_absence_error(self, present: Sequence[str]) -> str | None:
        return None if self.needs is not None and set(self.needs) <= set(present) else "All are needed."


@dataclass
class ToyClientHandshake:
    """States the checkpoints of a party."""

    name: str
    checkpoints: Checkpoints
    decline: GlasuError | None = None  # the answer to every welcome
    welcomed: list[Payload] = field(default_factory=list)

    def hello(self) -> Payload:
        return {"name": self.name}

    def welcome(self, welcome: Payload) -> None:
        if self.decline is not None:
            raise self.decline
        self.welcomed.append(welcome)

    def store_shares(self, shares: Mapping[str, IdShare]) -> None:
        raise AssertionError("the toy server has no shares")

    def statement(self) -> Payload:
        return {"rounds": {str(index): digest(value) for index, value in self.checkpoints.items()}}


class ToyServer:
    """One process of the toy server."""

    def __init__(
        self,
        toy: Toy,
        kits: Path,
        state: dict[str, int],
        *,
        listen: str = "localhost:0",
        handshake: ToyServerHandshake | None = None,
        max_connections: int | None = None,
        after: Callable[[str, int, int], None] = lambda what, round_index, chunk: None,
        **options: Any,
    ) -> None:
        """Listen.

        Args:
            toy: the sizes.
            kits: folder of the kits.
            state: survives a restart: the number of the last attempt, the last round.
            listen: the address.
            handshake: decides who takes part.
            max_connections: of TCP; None: the default of the listener.
            after: called after every receive and broadcast; raises Killed to crash.
            options: of the session.
        """
        self.toy, self.state, self.after = toy, state, after
        self.log: list[str] = []
        self.handshake = handshake or ToyServerHandshake()
        options = {"wait": 20.0, **options}
        self.session = ServerSession(toy.parties, self.handshake, RUN, log=logger(self.log), **options)
        self.listener = Listener(self.session.host, open_kit(kits / "server"), listen, max_connections)
        self.port = self.listener.port
        self.listener.start()

    def serve(self) -> list[ResultPayload]:
        """Run to the end."""
        with self.listener:
            try:
                results = self._finish()
                self.session.close_run(2.0)
                return results
            except Killed:
                self.session.leave()
                raise
            except Exception as error:
                self.session.announce_failure(error, 2.0)
                raise

    def _finish(self) -> list[ResultPayload]:
        while True:
            try:
                common, digests = self._common(self.session.gather())
                self.state["attempt"] = self.state.get("attempt", 0) + 1
                self.session.begin_attempt(Attempt(self.state["attempt"], common, digests, self.toy.check_limits))
                for index in range(common, self.toy.num_rounds):
                    self.run_round(index)
                return list(self.session.collect_results().values())
            except RestartAttempt:
                self.log.append("restart")

    def _common(self, present: Sequence[str]) -> tuple[int, dict[str, str]]:
        rounds: dict[str, Mapping[str, str]] = {name: self.handshake.statements[name]["rounds"] for name in present}
        common = max(int(index) for index in set.intersection(*(set(own) for own in rounds.values())))
        return common, {name: own[str(common)] for name, own in rounds.items()}

    def run_round(self, index: int) -> None:
        for chunk in range(self.toy.chunks):
            partials = self.session.receive(Receive((Partial,), key(index, chunk)))
            self.after("receive", index, chunk)
            self.session.broadcast(Joint(key=key(index, chunk), value=combine([one.value for one in partials])))
            self.after("broadcast", index, chunk)


class ToyParty:
    """One process of a toy party."""

    def __init__(
        self,
        toy: Toy,
        kits: Path,
        name: str,
        port: int,
        checkpoints: Checkpoints,
        *,
        after: Callable[[str, int, int], None] = lambda what, round_index, chunk: None,
        **options: Any,
    ) -> None:
        self.toy, self.name, self.client, self.after = toy, name, toy.parties.index(name), after
        self.checkpoints = checkpoints
        self.checkpoints.setdefault(0, toy.start(self.client))
        self.log: list[str] = []
        self.handshake = ToyClientHandshake(name, checkpoints)
        options = {"wait": 20.0, "log": logger(self.log), **options}
        connect_options = ConnectOptions(open_kit(kits / name), f"localhost:{port}", **options)
        self.session = ClientSession(connect_options, self.handshake)
        self.attempts = 0

    def join(self) -> str:
        """Take part to the end; return the digest of the result."""
        session = self.session
        try:
            session.open()
            self.after("open", 0, 0)
            session.prepare(self.toy.check_limits)
            proposed = session.await_attempt()
            while proposed is not None:
                try:
                    result = self._attempt(proposed)
                    session.finish(proposed, ResultPayload(weights_sha256=result))
                    self.after("finish", 0, 0)
                    proposed = session.await_attempt()
                except NewAttempt as another:
                    proposed = another.attempt
            return digest(self.checkpoints[self.toy.num_rounds])
        except Killed:
            raise
        except Exception as error:
            session.fail(error)
            raise
        finally:
            session.close()

    def _attempt(self, proposed: ProposedAttempt) -> str:
        self.attempts += 1
        own = self.checkpoints[proposed.round]
        assert digest(own) == proposed.digest
        for later in [index for index in self.checkpoints if index > proposed.round]:
            del self.checkpoints[later]
        self.session.confirm(proposed)
        for index in range(proposed.round, self.toy.num_rounds):
            own = self.run_round(index, own, proposed.number)
            self.checkpoints[index + 1] = own
            for old in sorted(self.checkpoints)[:-2]:
                del self.checkpoints[old]
            self.after("save", index, 0)
        return digest(own)

    def run_round(self, index: int, own: np.ndarray, attempt: int) -> np.ndarray:
        for chunk in range(self.toy.chunks):
            self.session.send([Partial(key=key(index, chunk, self.client, attempt), value=own[chunk])])
            self.after("send", index, chunk)
        means = []
        for chunk in range(self.toy.chunks):
            means.append(self.session.receive(Receive((Joint,), key(index, chunk))).value)
            self.after("receive", index, chunk)
        return self.toy.mix(own, np.stack(means), self.client)


def logger(lines: list[str]) -> logging.Logger:
    """Return a logger that appends its lines to a list."""
    found = logging.Logger("toy")
    found.addHandler(LineHandler(lines.append))
    return found


@dataclass
class Federation:
    """A toy run: a server, its parties, and the state that survives crashes."""

    toy: Toy
    kits: Path
    state: dict[str, int] = field(default_factory=dict)
    checkpoints: dict[str, Checkpoints] = field(default_factory=dict)
    servers: list[ToyServer] = field(default_factory=list)
    parties: dict[str, list[ToyParty]] = field(default_factory=dict)

    @property
    def port(self) -> int:
        return self.servers[-1].port

    def serve(self, **options: Any) -> Role:
        listen = f"localhost:{self.port if self.servers else choose_port()}"
        server = ToyServer(self.toy, self.kits, self.state, **{"listen": listen, **options})
        self.servers.append(server)
        return Role("server", server.serve)

    def join(self, name: str, **options: Any) -> Role:
        kept = self.checkpoints.setdefault(name, {})
        party = ToyParty(self.toy, self.kits, name, self.port, kept, **options)
        self.parties.setdefault(name, []).append(party)
        return Role(name, party.join)

    def finish(self, server: Role, parties: Sequence[Role]) -> None:
        """Wait for the end, and check that every result is that of an unbroken run."""
        assert [role.outcome() for role in parties] == self.toy.compute_expected_digests()
        assert [result.weights_sha256 for result in server.outcome()] == self.toy.compute_expected_digests()


def break_streams_after(limits: Sequence[int | None]) -> Callable[..., ClientStream]:
    """Return a `connect` function whose streams break after this number of frames in both directions; None: never."""
    left, lock = list(limits), threading.Lock()

    def connect(kit: Any, address: str, outgoing: Any, arrive: Any) -> ClientStream:
        limit, count = (left.pop(0) if left else None), 0
        holder: list[ClientStream] = []
        ready = threading.Event()

        def step() -> bool:
            nonlocal count
            with lock:
                count += 1
                return limit is not None and count > limit

        def break_stream() -> None:
            ready.wait(5)
            threading.Thread(target=holder[0].close, daemon=True).start()

        yield_frames = outgoing.yield_frames

        def send_until_break() -> Any:
            for frame in yield_frames():
                if step():
                    break_stream()
                    return
                yield frame

        outgoing.yield_frames = send_until_break

        def arrive_until_break(stream: ClientStream, event: Any) -> None:
            if isinstance(event, bytes) and step():
                break_stream()
                return
            arrive(stream, event)

        stream = ClientStream(kit, address, outgoing, arrive_until_break)
        holder.append(stream)
        ready.set()
        return stream

    return connect
