"""All parties in one process: drive the scripts, count what they would send, and report."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from glasu.config import RunConfig, resolve
from glasu.data.alignment import check_parties
from glasu.data.partition import pool_parties, share_edges
from glasu.data.party import PartyData
from glasu.model.layers import Convolution
from glasu.model.split import weights_digest
from glasu.protocol.actor import Client, run_id
from glasu.protocol.client import client_script
from glasu.protocol.messages import ClientScript, Evaluated, Event, Message, RoundDone, ServerScript
from glasu.protocol.server import Server, Sizes, server_script
from glasu.report import RunReport, SplitScores, versions
from glasu.runtime.meter import Meter
from glasu.timing import Clock, Stopwatch

Observer = Callable[[Event], None]
Carry = Callable[[Message], Message]


def run_in_process(
    server: ServerScript,
    clients: Sequence[ClientScript],
    meter: Meter,
    watch: Stopwatch,
    observe: Observer = lambda event: None,
    carry: Carry = lambda message: message,
) -> None:
    """Drive both roles to the end; over a network, the list of messages becomes an await.

    Args:
        server: the server's script.
        clients: one script per client, in client order.
        meter: counts what is sent.
        watch: where the server's seconds are added up.
        observe: is told the server's events.
        carry: what the wire does to a message.
    """
    _advance(server, None, observe)
    outboxes = [deque(_advance(client, None)) for client in clients]
    together = [list(box) for box in outboxes]
    inboxes: list[list[Message]] = [[] for _ in clients]
    while any(outboxes):
        messages = [carry(box.popleft()) for box in outboxes]
        with watch.measure("communication"):
            for message in messages:
                meter.to_server(message)
            answers = _advance(server, messages, observe)
            for answer in answers:
                meter.to_client(answer)
        for client, answer in enumerate(answers):
            inboxes[client].append(carry(answer))
        if not any(outboxes):  # every client has all the answers to what it sent together
            meter.exchanged(together[0])
            outboxes = [deque(_advance(client, inbox)) for client, inbox in zip(clients, inboxes, strict=True)]
            together = [list(box) for box in outboxes]
            inboxes = [[] for _ in clients]


def _advance(
    script: ClientScript | ServerScript, answers: Sequence[Message] | None, observe: Observer = lambda event: None
) -> Sequence[Message]:
    """Resume a script until it has messages to send; the end is an empty list."""
    try:
        item = next(script) if answers is None else script.send(answers)
        while isinstance(item, (RoundDone, Evaluated)):
            observe(item)
            item = next(script)
    except StopIteration:
        return ()
    return item


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute on one torch thread: some kernels change bits with the number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@dataclass(frozen=True)
class Simulation:
    """A finished run: its report, and the clients with the selected weights."""

    report: RunReport
    clients: tuple[Client, ...]


def prepare(config: RunConfig, parties: Sequence[PartyData]) -> list[PartyData]:
    """Give the parties what the method prescribes: everything to one, or all edges to everyone."""
    if config.train.method == "centralized" and len(parties) > 1:
        return [pool_parties(parties)]
    if config.train.method == "simulated":
        return share_edges(parties)
    return list(parties)


def make_clients(
    config: RunConfig,
    parties: Sequence[PartyData],
    watch: Stopwatch,
    convolution: Convolution | None = None,
    scales: Sequence[float] | None = None,
) -> list[Client]:
    """Build one client per party, for a resolved config and checked parties."""
    classes = next(party.classes for party in parties if party.labels is not None)
    names = [party.name for party in parties]
    return [
        Client(
            config,
            party,
            index=index,
            names=names,
            num_outputs=len(classes),
            watch=watch,
            convolution=convolution,
            scale=None if scales is None else scales[index],
        )
        for index, party in enumerate(parties)
    ]


def simulate(
    parties: Sequence[PartyData],
    config: RunConfig,
    *,
    convolution: Convolution | None = None,
    observe: Observer = lambda event: None,
    clock: Clock = time.perf_counter,
) -> Simulation:
    """Train one model over all parties in this process.

    Args:
        parties: what each party owns, aligned.
        config: the settings.
        convolution: builds the layers of backbone "custom": (width in, width out) -> PyG convolution.
        observe: is told of every round and evaluation.
        clock: tells the seconds for the report.
    """
    parties = prepare(config, parties)
    config, overridden = resolve(config, parties[0].num_nodes)
    config = config.replace(data={"num_clients": len(parties)})
    check_parties(parties, config.train.labels)
    watch, meter, start = Stopwatch(clock), Meter(), clock()
    recorder = _Recorder(meter, lambda: clock() - start, observe)
    with one_thread():
        clients = make_clients(config, parties, watch, convolution)
        scripts = [client_script(client) for client in clients]
        if config.model.aggregation_layers:
            server = make_server(config, clients)
            run_in_process(server_script(server), scripts, meter, watch, recorder)
            losses = tuple(server.losses)
        else:
            for script in scripts:
                recorder.next_client()
                _advance(script, None, recorder)
            losses = ()
    seconds = {name: watch.seconds[name] for name in ("sampling", "compute", "communication", "evaluation")}
    report = RunReport(
        config=config.to_dict(),
        overridden=overridden,
        parties=tuple(_describe(party) for party in parties),
        test=recorder.scores("test"),
        validation=recorder.scores("validation"),
        history=recorder.history(),
        losses=losses,
        traffic=meter.to_dict(),
        seconds={"total": clock() - start, **seconds},
        weights_sha256=tuple(weights_digest(client.best_weights) for client in clients),
        privacy={
            "secure_aggregation": config.privacy.secure_aggregation,
            "ledger": [
                {
                    "party": client.party.name,
                    "head": client.release.ledger.head.hex(),
                    "releases": client.release.ledger.rows(),
                }
                for client in clients
            ],
        },
        versions=versions(),
    )
    return Simulation(report, tuple(clients))


def make_server(config: RunConfig, clients: Sequence[Client]) -> Server:
    """Build the server for these clients: it learns counts, no data."""
    knows = next(client for client in clients if client.has_labels)
    sizes = Sizes(
        num_nodes=knows.party.num_nodes,
        num_validation=len(knows.evaluation_nodes("validation")),
        num_test=len(knows.evaluation_nodes("test")),
    )
    return Server(config, knows.names, sizes, run_id(config))


def _describe(party: PartyData) -> dict[str, Any]:
    return {
        "name": party.name,
        "nodes": party.num_nodes,
        "features": party.num_features,
        "edges": party.graph.num_edges,
        "labels": party.labels is not None,
    }


class _Recorder:
    """Gathers what the evaluations found, with the bytes and seconds spent until then."""

    def __init__(self, meter: Meter, elapsed: Callable[[], float], observe: Observer) -> None:
        self.meter, self.elapsed, self.observe = meter, elapsed, observe
        self.per_client: list[list[tuple[Evaluated, int, float]]] = [[]]

    def next_client(self) -> None:
        """Begin with another client that trains alone."""
        if self.per_client[-1]:
            self.per_client.append([])

    def __call__(self, event: Event) -> None:
        if isinstance(event, Evaluated):
            self.per_client[-1].append((event, self.meter.total, self.elapsed()))
        self.observe(event)

    def scores(self, split: str) -> SplitScores:
        """Return the scores of the selected model; the mean where clients were selected alone."""
        found = []
        for events in self.per_client:
            chosen = [event for event, _, _ in events if event.split == split and (split == "test" or event.improved)]
            found.append(chosen[-1])
        mean = {name: sum(event.metrics[name] for event in found) / len(found) for name in found[0].metrics}
        alone = tuple(event.metrics["accuracy"] for event in found) if len(found) > 1 else None
        return SplitScores(**mean, round=max(event.round for event in found), per_client=alone)

    def history(self) -> tuple[dict[str, Any], ...]:
        """Return one entry per evaluation; the mean over clients that trained alone."""
        rounds = sorted({event.round for events in self.per_client for event, _, _ in events if event.split != "test"})
        entries = []
        for round_index in rounds:
            found = [
                entry
                for events in self.per_client
                for entry in events
                if entry[0].round == round_index and entry[0].split != "test"
            ]
            size = len(found)
            entry: dict[str, Any] = {
                "round": round_index,
                "loss": sum(event.loss or 0.0 for event, _, _ in found) / size,
            }
            for name in found[0][0].metrics:
                entry[f"val_{name}"] = sum(event.metrics[name] for event, _, _ in found) / size
            entry["bytes"] = max(moved for _, moved, _ in found)
            entry["seconds"] = max(seconds for _, _, seconds in found)
            entries.append(entry)
        return tuple(entries)


def train(
    parties: Sequence[PartyData],
    config: RunConfig | None = None,
    *,
    convolution: Convolution | None = None,
    observe: Observer = lambda event: None,
) -> RunReport:
    """Train one model over all parties in this process and return what it found and cost.

    Args:
        parties: what each party owns, as `split_vertically`, `load_parties` or `read_party` gives it.
        config: the settings; the defaults are what works best.
        convolution: for backbone "custom": (width in, width out) -> a PyG convolution without self loops of its own.
        observe: is told of every round and evaluation.
    """
    return simulate(parties, config or RunConfig(), convolution=convolution, observe=observe).report
