"""Drive scripts in one process: the server's turn, then all clients at once, one thread each."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch

from glasu.protocol.messages import Evaluating, Event, Message, RoundDone, Script
from glasu.runtime.meter import Meter
from glasu.timing import Stopwatch

Observer = Callable[[Event], None]
Carry = Callable[[Message], Message]
Map = Callable[..., Iterable[Any]]  # as the built-in `map`


def cores() -> int:
    """Return how many cores this process may use, where the system tells; else how many there are."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def one_thread_each(workers: int = 1) -> Iterator[Map]:
    """Yield a `map` that runs clients in parallel, each on one thread of torch.

    Some products change bits with the number of threads; with one each, bits do not depend on the workers either, for
    clients share nothing.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        if workers == 1:
            yield map
        else:  # torch's setting is one of each thread
            with ThreadPoolExecutor(workers, "glasu-client", lambda: torch.set_num_threads(1)) as pool:
                yield pool.map
    finally:
        torch.set_num_threads(before)


def run_in_process(
    server: Script,
    clients: Sequence[Script],
    meter: Meter,
    watch: Stopwatch,
    observe: Observer = lambda event: None,
    carry: Carry | None = None,
    each: Map = map,
    observers: Sequence[Observer] | None = None,
    before_sending: Callable[[], None] = lambda: None,
    meanwhile: Sequence[Callable[[], None]] | None = None,
) -> None:
    """Drive both roles to the end; over a network, the list of messages becomes an await.

    Args:
        server: the server's script.
        clients: one script per client, in client order.
        meter: counts what is sent.
        watch: where the server's seconds are added up.
        observe: is told the server's events, and how far clients are with a long evaluation, from their threads.
        carry: what the wire does to a message; None: nothing.
        each: `map`, or one that runs clients in parallel.
        observers: are told the clients' events, one for each client.
        before_sending: is called whenever clients are about to send.
        meanwhile: is called whenever clients have sent, one for each client: what it can do before it is answered.
    """
    idle: Sequence[Callable[[], None]] = meanwhile or [lambda: None] * len(clients)
    own: Sequence[Observer] = observers or [lambda event: None] * len(clients)
    told = [_told_to(observer, observe) for observer in own]
    _advance(server, None, observe)
    outboxes = [deque(messages) for messages in each(_turn, clients, [None] * len(clients), told, idle)]
    while any(outboxes):
        before_sending()
        together = tuple(outboxes[0])
        inboxes: list[list[Message]] = [[] for _ in clients]
        while any(outboxes):  # until every client has all the answers to what it sent together
            messages = [box.popleft() for box in outboxes]
            messages = messages if carry is None else list(map(carry, messages))
            with watch.measure("communication"):
                for message in messages:
                    meter.to_server(message)
                answers = _advance(server, messages, observe)
                for answer in answers:
                    meter.to_client(answer)
            for inbox, answer in zip(inboxes, answers, strict=True):
                inbox.append(answer if carry is None else carry(answer))
        meter.exchanged(together)
        outboxes = [deque(messages) for messages in each(_turn, clients, inboxes, told, idle)]


def _told_to(own: Observer, observe: Observer) -> Observer:
    """Return who is told a client's events: its own observer, and of long evaluations also the run's."""

    def notice(event: Event) -> None:
        own(event)
        if isinstance(event, Evaluating):  # the rest the server tells
            observe(event)

    return notice


def run_alone(
    clients: Sequence[Script],
    observe: Observer = lambda event: None,
    each: Map = map,
    after_round: Callable[[], None] = lambda: None,
) -> None:
    """Drive clients that send nothing, round by round, to the end; `after_round` is called when all are through one."""
    running = list(clients)
    while running:
        going_on = list(each(lambda script: _one_round(script, observe), running))
        running = [script for script, goes_on in zip(running, going_on, strict=True) if goes_on]
        after_round()


def _one_round(script: Script, observe: Observer) -> bool:
    """Drive a script to the end of its round; False where it has ended."""
    for item in script:
        assert isinstance(item, Event)  # alone, nobody sends anything
        observe(item)
        if isinstance(item, RoundDone):
            return True
    return False


def _turn(
    script: Script, answers: Sequence[Message] | None, observe: Observer, idle: Callable[[], None]
) -> Sequence[Message]:
    """Resume a client's script until it has messages to send, and then do what needs no answer."""
    messages = _advance(script, answers, observe)
    idle()
    return messages


def _advance(
    script: Script, answers: Sequence[Message] | None, observe: Observer = lambda event: None
) -> Sequence[Message]:
    """Resume a script until it has messages to send; the end is an empty list."""
    try:
        item = next(script) if answers is None else script.send(answers)
        while isinstance(item, Event):
            observe(item)
            item = next(script)
    except StopIteration:
        return ()
    return item
