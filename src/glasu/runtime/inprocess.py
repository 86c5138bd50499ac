"""Run all roles in one process: the server's turn, then all clients in parallel, one thread each."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch

from glasu.protocol.messages import Message
from glasu.protocol.requests import Broadcast, Event, Receive, RoundDone, Save, Scatter, Script, Send
from glasu.runtime.drive import Actions, Finished, advance, check_answer, check_contribution, resolve
from glasu.runtime.telemetry import TrafficCounter
from glasu.timing import Stopwatch

Perform = Callable[[Save | Event], None]  # carries out Save requests and events
Carry = Callable[[Message], Message]
Map = Callable[..., Iterable[Any]]  # with the signature of the built-in `map`


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def one_thread_each(workers: int = 1) -> Iterator[Map]:
    """Yield a `map` that runs clients in parallel, each on one torch thread.

    The bits of some products depend on the number of threads. With one thread per client they do not depend on the
    number of workers either, because clients share nothing.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        if workers == 1:
            yield map
        else:  # torch's setting is per thread
            with ThreadPoolExecutor(workers, "glasu-client", lambda: torch.set_num_threads(1)) as pool:
                yield pool.map
    finally:
        torch.set_num_threads(before)


class Running:
    """A client's script between two turns."""

    def __init__(self, script: Script[Any], perform: Perform, watch: Stopwatch, name: str = "compute") -> None:
        self.actions: Actions[Any] = resolve(script, watch, name)
        self.perform = perform
        self.action: Any = None  # the action that waits for an answer
        self.result: Any = None  # of the script, when it has finished

    @property
    def finished(self) -> bool:
        return isinstance(self.action, Finished)

    def run(self, inbox: deque[Message]) -> list[Message]:
        """Run until the script needs a message that has not arrived; return the messages that it sends."""
        sent: list[Message] = []
        reply: Any = None
        while not self.finished:
            if isinstance(self.action, Receive):
                if not inbox:
                    return sent
                reply = check_answer(self.action, inbox.popleft())
            self.action, reply = advance(self.actions, reply), None
            if isinstance(self.action, Send):
                sent.append(self.action.message)
            elif isinstance(self.action, Finished):
                self.result = self.action.value
            elif not isinstance(self.action, Receive):
                self.perform(self.action)
        return sent

    def run_round(self) -> bool:
        """Run a script without messages to the end of its round; return whether it continues."""
        while True:
            self.action = advance(self.actions)
            if isinstance(self.action, Finished):
                self.result = self.action.value
                return False
            self.perform(self.action)
            if isinstance(self.action, RoundDone):
                return True


def run_together(
    server: Script[Any],
    clients: Sequence[Running],
    roster: Sequence[str],
    traffic: TrafficCounter,
    watch: Stopwatch,
    perform: Perform,
    each: Map = map,
    before_sending: Callable[[], None] | None = None,
    carry: Carry | None = None,
) -> Any:
    """Run the server and all clients to the end; return the result of the server's script.

    Args:
        server: the server's script.
        clients: the clients, in client order.
        roster: the names of the parties.
        traffic: counts messages.
        watch: adds up the server's seconds.
        perform: carries out the server's saves and events.
        each: `map`, or a `map` that runs clients in parallel.
        before_sending: called before the messages of a turn are delivered; it waits for checkpoints.
        carry: maps every message to the one that is delivered; None: no change.
    """
    actions = resolve(server, watch, "communication")
    inboxes: list[deque[Message]] = [deque() for _ in clients]  # of the server, one per client
    outboxes: list[deque[Message]] = [deque() for _ in clients]  # of the server, to each client

    def take_turn() -> None:
        """Let all clients run until they wait, and deliver their messages."""
        sent = list(each(Running.run, clients, outboxes))
        if before_sending is not None:
            before_sending()
        for inbox, messages in zip(inboxes, sent, strict=True):
            inbox.extend(messages if carry is None else map(carry, messages))

    def receive(request: Receive) -> list[Message]:
        if not all(inboxes):
            take_turn()
        messages = [inbox.popleft() for inbox in inboxes]
        for client, message in enumerate(messages):
            check_contribution(request, message, client, roster[client])
            traffic.sent_to_server(message)
        return messages

    def send(messages: Sequence[Message], *, rides: bool) -> None:
        for outbox, message in zip(outboxes, messages, strict=True):
            traffic.sent_to_clients(message)
            outbox.append(message if carry is None else carry(message))
        if not rides and messages[0].key.chunk == 0:
            traffic.exchange(messages[0].key)

    action: Any = advance(actions)
    while not isinstance(action, Finished):
        reply: Any = None
        if isinstance(action, Receive):
            reply = receive(action)
        elif isinstance(action, Broadcast):
            send([action.message] * len(clients), rides=action.rides)
        elif isinstance(action, Scatter):
            send(action.messages, rides=action.rides)
        else:
            perform(action)
        action = advance(actions, reply)
    take_turn()  # the clients read the last answers
    return action.value


def run_alone(clients: Sequence[Running], each: Map = map, after_round: Callable[[], None] | None = None) -> None:
    """Run clients that send nothing, round by round, to the end; `after_round` is called after every round of all."""
    running = list(clients)
    while running:
        continues = list(each(Running.run_round, running))
        running = [client for client, more in zip(running, continues, strict=True) if more]
        if after_round is not None:
            after_round()
