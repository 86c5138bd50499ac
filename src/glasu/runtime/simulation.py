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
from glasu.errors import DataError
from glasu.model.layers import Convolution
from glasu.model.split import weights_digest
from glasu.protocol.actor import Client, run_id
from glasu.protocol.client import client_script
from glasu.protocol.messages import Evaluated, Event, Message, RoundDone, Script
from glasu.protocol.server import Server, Sizes, server_script
from glasu.report import RunReport, SplitScores, versions
from glasu.runtime.meter import Meter
from glasu.timing import Clock, Stopwatch

Observer = Callable[[Event], None]
Carry = Callable[[Message], Message]


def run_in_process(
    server: Script,
    clients: Sequence[Script],
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
    script: Script, answers: Sequence[Message] | None, observe: Observer = lambda event: None
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


def as_parties(parties: Sequence[PartyData]) -> list[PartyData]:
    """Return the parties as a list, or say how to make them out of what was given."""
    if isinstance(parties, (list, tuple)) and parties and all(isinstance(party, PartyData) for party in parties):
        return list(parties)
    raise DataError(
        "parties must be a list of PartyData; glasu.split_vertically(data, num_clients=3) makes one of a PyG graph, "
        "glasu.read_party(folder) reads one."
    )


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
    parties = as_parties(parties)
    pooled = config.train.method == "centralized" and len(parties) == 1  # whoever had the labels
    check_parties(parties, "all" if pooled else config.train.labels, config.train.task)
    parties = prepare(config, parties)
    asked = config.data.num_clients
    config, overridden = resolve(config, parties[0].num_nodes)
    if config.data.num_clients != len(parties):
        overridden["data.num_clients"] = {"asked": asked, "used": len(parties)}
        config = config.replace(data={"num_clients": len(parties)})
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
            losses = recorder.mean_losses()
    alone = not config.model.aggregation_layers and config.train.method != "centralized"
    seconds = {name: watch.seconds[name] for name in ("sampling", "compute", "communication", "evaluation")}
    report = RunReport(
        config=config.to_dict(),
        overridden=overridden,
        parties=tuple(_describe(party) for party in parties),
        test=recorder.scores("test", alone=alone),
        validation=recorder.scores("validation", alone=alone),
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
        self.evaluations: list[list[tuple[Evaluated, int, float]]] = [[]]  # one list, or one per client alone
        self.losses: list[list[float]] = [[]]

    def next_client(self) -> None:
        """Begin with another client that trains alone."""
        if self.evaluations[-1]:
            self.evaluations.append([])
            self.losses.append([])

    def __call__(self, event: Event) -> None:
        if isinstance(event, Evaluated):
            self.evaluations[-1].append((event, self.meter.total, self.elapsed()))
        elif event.loss is not None:
            self.losses[-1].append(event.loss)
        self.observe(event)

    def mean_losses(self) -> tuple[float, ...]:
        """Return the mean loss of every round, over the clients that trained in it."""
        rounds = range(max(len(losses) for losses in self.losses))
        found = [[losses[index] for losses in self.losses if index < len(losses)] for index in rounds]
        return tuple(sum(losses) / len(losses) for losses in found)

    def scores(self, split: str, *, alone: bool) -> SplitScores:
        """Return the scores of the selected model; the mean where every client was selected alone."""
        found = []
        for events in self.evaluations:
            chosen = [event for event, _, _ in events if event.split == split and (split == "test" or event.improved)]
            found.append(chosen[-1])
        mean = {name: sum(event.metrics[name] for event in found) / len(found) for name in found[0].metrics}
        rounds = {event.round for event in found}
        return SplitScores(
            **mean,
            round=rounds.pop() if len(rounds) == 1 else None,
            per_client=tuple(event.metrics["accuracy"] for event in found) if alone else None,
        )

    def history(self) -> tuple[dict[str, Any], ...]:
        """Return one entry per evaluation; of clients alone the mean, a client that has stopped keeping its figures."""
        per_client = [[item for item in events if item[0].split == "validation"] for events in self.evaluations]
        entries = []
        for round_index in sorted({event.round for events in per_client for event, _, _ in events}):
            found = [next(item for item in reversed(events) if item[0].round <= round_index) for events in per_client]
            entry: dict[str, Any] = {
                "round": round_index,
                "loss": sum(event.loss or 0.0 for event, _, _ in found) / len(found),
            }
            for name in found[0][0].metrics:
                entry[f"val_{name}"] = sum(event.metrics[name] for event, _, _ in found) / len(found)
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
