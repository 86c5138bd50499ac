"""Run all roles in one process. The server and the clients take turns; clients run in parallel, one thread each."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from glasu.protocol.messages import Message
from glasu.protocol.requests import Broadcast, Event, Receive, RoundDone, Save, Scatter, Script, Send, WarmStepDone
from glasu.runtime.delivery import UNCHANGED, Delivery
from glasu.runtime.drive import Actions, Finished, advance, check_contribution, to_actions
from glasu.runtime.telemetry import TrafficCounter
from glasu.runtime.workers import Workers
from glasu.timing import Stopwatch

MESSAGING = (Send, Receive, Broadcast, Scatter)
Perform = Callable[[Save | Event], None]  # carries out Save requests and events
Map = Callable[..., Iterable[Any]]  # with the signature of the built-in `map`


def count_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def open_client_map(workers: int = 1) -> Iterator[Map]:
    """Yield a `map` that runs clients in parallel, each on one torch thread.

    The bits of some matrix products depend on the number of torch threads. With one torch thread per client, results do
    not depend on the number of workers, because clients share no state.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        if workers == 1:
            yield map
        else:  # torch stores its number of threads per Python thread, so every worker sets it
            with Workers(workers, "glasu-client", lambda: torch.set_num_threads(1)) as pool:
                yield pool.map
    finally:
        torch.set_num_threads(before)


class ScriptRun:
    """The script of one role, which runs until it needs a message that has not arrived."""

    def __init__(
        self,
        name: str,
        script: Script[Any],
        watch: Stopwatch,
        perform: Perform | None = None,
        activity: str = "compute",
    ) -> None:
        """Prepare to run a script.

        Args:
            name: the name of the role.
            script: the script.
            watch: adds up the seconds of the script.
            perform: carries out the script's saves and events; None: ignore them.
            activity: the activity to which the seconds are added.
        """
        self.name, self.perform = name, perform
        self.actions: Actions[Any] = to_actions(script, watch, activity)
        self.action: Any = None  # the last action of the script
        self.result: Any = None  # the result of the script, when it has finished

    def advance(self, reply: Any = None) -> Any:
        """Resume the script and return its next action. If the action is a save or an event, perform it first."""
        self.action = action = advance(self.actions, reply)
        if isinstance(action, Finished):
            self.result = action.value
        elif self.perform is not None and not isinstance(action, MESSAGING):
            self.perform(action)
        return action

    @property
    def is_blocked(self) -> bool:
        """Whether the script waits for a message or has finished."""
        return isinstance(self.action, Receive | Finished)

    def run(self, inbox: deque[Message]) -> list[Message]:
        """Run until the script needs a message that has not arrived; return the messages that it sends.

        A script that sends nothing pauses at the end of each round or warm step. So clients that train alone stay in
        the same round, and one checkpoint can contain them all.
        """
        sent: list[Message] = []
        while not isinstance(self.action, Finished):
            reply: Any = None
            if isinstance(self.action, Receive):
                if not inbox:
                    break
                reply = inbox.popleft()
                self.action.check(type(reply), reply.key)
            action = self.advance(reply)
            if isinstance(action, Send):
                sent.append(action.message)
            elif isinstance(action, RoundDone | WarmStepDone) and not sent:
                break
        return sent


def run_together(
    server: ScriptRun,
    clients: Sequence[ScriptRun],
    traffic: TrafficCounter,
    each: Map = map,
    before_sending: Callable[[], None] | None = None,
    delivery: Delivery = UNCHANGED,
) -> None:
    """Run the server and all clients to the end.

    Args:
        server: the server.
        clients: the clients, in client order.
        traffic: counts messages.
        each: `map`, or a function like it that runs clients in parallel.
        before_sending: called before messages from clients are delivered, to wait until checkpoints are durable.
        delivery: delivers every message; it may record or change the message.
    """
    inboxes: list[deque[Message]] = [deque() for _ in clients]  # messages from each client
    outboxes: list[deque[Message]] = [deque() for _ in clients]  # messages to each client

    def take_turn() -> None:
        """Let all clients run until they wait, and deliver their messages."""
        for sent in run_until_blocked(clients, outboxes, each):
            if before_sending is not None and any(sent):
                before_sending()  # a checkpoint must be durable before later messages are delivered
            for inbox, messages in zip(inboxes, sent, strict=True):
                inbox.extend(map(delivery.to_server, messages))

    def receive(request: Receive) -> list[Message]:
        if not all(inboxes):
            take_turn()
        messages = [inbox.popleft() for inbox in inboxes]
        for index, message in enumerate(messages):
            check_contribution(request, message, index, clients[index].name)
            traffic.count_to_server(message)
        return messages

    def send(action: Broadcast | Scatter) -> None:
        messages = action.messages if isinstance(action, Scatter) else [action.message] * len(clients)
        for message in messages:
            traffic.count_to_clients(message)
        for outbox, message in zip(outboxes, delivery.to_clients(messages), strict=True):
            outbox.append(message)
        traffic.exchange(action)

    action = server.advance()
    while not isinstance(action, Finished):
        reply = None
        if isinstance(action, Receive):
            reply = receive(action)
        elif isinstance(action, Broadcast | Scatter):
            send(action)
        action = server.advance(reply)
    take_turn()  # the clients read the last answers


def run_alone(clients: Sequence[ScriptRun], each: Map = map) -> None:
    """Run clients to their end; they exchange no messages."""
    for sent in run_until_blocked(clients, [deque() for _ in clients], each):
        assert not any(sent), "clients without a server must not send messages"


def run_until_blocked(
    clients: Sequence[ScriptRun], inboxes: Sequence[deque[Message]], each: Map
) -> Iterator[list[list[Message]]]:
    """Run clients until all of them wait or have finished. At each pause, yield the messages that each client sent."""
    while True:
        yield list(each(ScriptRun.run, clients, inboxes))
        if all(client.is_blocked for client in clients):
            return
