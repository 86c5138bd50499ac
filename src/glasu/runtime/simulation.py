"""All parties in one process: drive the scripts, count what they would send, and report."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from glasu.config import RunConfig, resolve
from glasu.data.alignment import check_parties, keep_labels
from glasu.data.digest import data_digest
from glasu.data.partition import pool_parties, share_edges
from glasu.data.party import PartyData
from glasu.errors import DataError
from glasu.model.layers import Convolution
from glasu.model.split import weights_digest
from glasu.protocol.client import Client
from glasu.protocol.requests import Evaluating, Event, Save
from glasu.protocol.rounds import client_script, server_script
from glasu.protocol.server import Server, Sizes
from glasu.report import RunReport, versions
from glasu.runtime.accounts import Accounts
from glasu.runtime.inprocess import Carry, Perform, Running, cores, one_thread_each, run_alone, run_together
from glasu.runtime.keeper import SERVER, Keeper, Tell, keeping
from glasu.runtime.meter import Meter
from glasu.runtime.saver import Role
from glasu.timing import Clock, Stopwatch
from glasu.wire.message_key import RUN_BYTES

Observer = Callable[[Event], None]


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
    clock: Clock = time.perf_counter,
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
            watch=Stopwatch(clock),
            convolution=convolution,
            scale=None if scales is None else scales[index],
        )
        for index, party in enumerate(parties)
    ]


def name_run(clients: Sequence[Client], *digests: str) -> None:
    """Name a run in one process by the digests of all that decides what is sent: then one key has one content."""
    run = hashlib.sha256("\0".join(digests).encode()).digest()[:RUN_BYTES]
    for client in clients:
        client.identity.run = run


def _without_test_labels(party: PartyData) -> PartyData:
    """Return what training reads: the labels of the test split are read once, at the end, and do not name the run."""
    if party.labels is None or party.splits is None:
        return party
    labels = party.labels.copy()
    labels[party.splits.test] = -1
    return replace(party, labels=labels)


def simulate(
    parties: Sequence[PartyData],
    config: RunConfig,
    *,
    convolution: Convolution | None = None,
    observe: Observer = lambda event: None,
    workers: int | None = None,
    notes: Sequence[str] = (),
    clock: Clock = time.perf_counter,
    meter: Meter | None = None,
    checkpoints: Path | None = None,
    fresh: bool = False,
    tell: Tell = lambda line: None,
    carry: Carry | None = None,
) -> Simulation:
    """Train one model over all parties in this process.

    Args:
        parties: what each party owns, aligned.
        config: the settings.
        convolution: builds the layers of backbone "custom": (width in, width out) -> PyG convolution.
        observe: is told of every round and evaluation, perhaps from another thread.
        workers: how many clients compute at once; by default as many as there are cores. It changes no bit.
        notes: what a reader of the report should know about the data.
        clock: tells the seconds for the report.
        meter: counts what is sent, for a caller who reads it while the run lasts.
        checkpoints: the folder to save states in, and to go on from where it holds this run; None: save nothing.
        fresh: start over, whatever the folder holds.
        tell: is told in one line what became of earlier checkpoints.
        carry: replaces every message, as a wire might.
    """
    parties = as_parties(parties)
    pooled = config.train.method == "centralized" and len(parties) == 1  # whoever had the labels
    labels = "all" if pooled else config.train.labels
    check_parties(parties, labels, config.train.task)
    parties = prepare(config, keep_labels(parties, labels))
    asked = config.data.num_clients
    config, overridden = resolve(config, parties[0].num_nodes)
    if config.data.num_clients != len(parties):
        overridden["data.num_clients"] = {"asked": asked, "used": len(parties)}
        config = config.replace(data={"num_clients": len(parties)})
    joint = bool(config.model.aggregation_layers)
    names: list[str | None] = [party.name for party in parties]
    accounts = Accounts(clock, [None] if joint else names, meter or Meter())
    with one_thread_each(_workers(config, len(parties), workers)) as each, ExitStack() as stack:
        clients = make_clients(config, parties, clock, convolution)
        name_run(clients, config.digest(), *(data_digest(_without_test_labels(party)) for party in parties))
        server = make_server(config, clients) if joint else None
        watches = [client.watch for client in clients]
        keeper = None
        if checkpoints is not None and config.train.checkpoint_every:
            roles: dict[str, Role] = {client.party.name: client for client in clients}
            if server is not None:
                roles[SERVER] = server
            keeper = Keeper(checkpoints, config, parties, roles, lambda: accounts.state(watches))
            counted = keeper.open(fresh=fresh, tell=tell)
            if counted is not None:
                accounts.restore(counted)
            stack.enter_context(keeping(keeper, tell))

        def note(event: Event) -> None:
            accounts.recorder(event)
            observe(event)

        def performer(name: str, *, joint: bool) -> Perform:
            """Return the function that saves the states of a role and passes its events on."""

            def perform(action: Save | Event) -> None:
                if isinstance(action, Save):
                    if keeper is not None and joint:
                        keeper.save(name, action.state)
                elif name == SERVER or not joint:
                    note(action)
                elif isinstance(action, Evaluating):  # the server reports the other events
                    observe(action)

            return perform

        running = [
            Running(client_script(client), performer(client.name, joint=joint), client.watch) for client in clients
        ]
        if server is None:
            run_alone(running, each, keeper.after_round if keeper else None)
        else:
            run_together(
                server_script(server),
                running,
                server.roster,
                accounts.meter,
                accounts.watch,
                performer(SERVER, joint=True),
                each,
                keeper.settle if keeper else None,
                carry,
            )
    losses = tuple(server.progress.losses) if server is not None else accounts.recorder.mean_losses()
    alone = not joint and config.train.method != "centralized"
    report = RunReport(
        config=config.to_dict(),
        overridden=overridden,
        parties=tuple(_describe(party) for party in parties),
        notes=tuple(notes),
        test=accounts.recorder.scores("test", alone=alone),
        validation=accounts.recorder.scores("validation", alone=alone),
        history=accounts.recorder.history(),
        losses=losses,
        traffic=accounts.meter.to_dict(),
        seconds=accounts.seconds(watches),
        weights_sha256=tuple(weights_digest(client.progress.best_weights) for client in clients),
        privacy={
            "secure_aggregation": config.privacy.secure_aggregation,
            "ledger": [_ledger(client) for client in clients],
        },
        versions=versions(),
    )
    return Simulation(report, tuple(clients))


def _ledger(client: Client) -> dict[str, Any]:
    ledger = client.release.ledger
    return {"party": client.party.name, "head": ledger.head.hex(), "releases": ledger.rows()}


def _workers(config: RunConfig, num_clients: int, asked: int | None) -> int:
    """Return how many clients compute at once."""
    if config.model.backbone == "custom":  # layers of other libraries draw from torch's one generator
        return 1
    return max(1, min(num_clients, cores() if asked is None else asked))


def make_server(config: RunConfig, clients: Sequence[Client]) -> Server:
    """Build the server for these clients: it learns counts, no data."""
    knows = next(client for client in clients if client.has_labels)
    sizes = Sizes(
        num_nodes=knows.party.num_nodes,
        num_validation=len(knows.data.evaluation_nodes("validation")),
        num_test=len(knows.data.evaluation_nodes("test")),
    )
    return Server(config, knows.identity.names, sizes, knows.identity.run)


def _describe(party: PartyData) -> dict[str, Any]:
    return {
        "name": party.name,
        "nodes": party.num_nodes,
        "features": party.num_features,
        "edges": party.graph.num_edges,
        "labels": party.labels is not None,
    }


def train(
    parties: Sequence[PartyData],
    config: RunConfig | None = None,
    *,
    convolution: Convolution | None = None,
    observe: Observer = lambda event: None,
    workers: int | None = None,
    checkpoints: str | Path | None = None,
) -> RunReport:
    """Train one model over all parties in this process and return what it found and cost.

    Args:
        parties: what each party owns, as `split_vertically`, `load_parties` or `read_party` gives it.
        config: the settings; the defaults are what works best.
        convolution: for backbone "custom": (width in, width out) -> a PyG convolution without self loops of its own.
        observe: is told of every round and evaluation, perhaps from another thread.
        workers: how many clients compute at once; by default as many as there are cores. It changes no bit.
        checkpoints: a folder to save the state in, every `train.checkpoint_every` rounds; where it holds this run,
            training goes on from there. None: nothing is saved.
    """
    folder = None if checkpoints is None else Path(checkpoints)
    return simulate(
        parties,
        config or RunConfig(),
        convolution=convolution,
        observe=observe,
        workers=workers,
        checkpoints=folder,
    ).report
