"""Simulate a run: all parties in one process, with the same scripts, messages and counts as between machines."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from glasu.compiling import compile_seconds, read_clock
from glasu.config import RunConfig, list_candidates, resolve
from glasu.data.methods import PreparedRun, apply_method, has_server, trains_alone
from glasu.data.party import PartyData, hide_labels
from glasu.data.preprocessing import Preparation
from glasu.errors import ConfigError, DataError
from glasu.model.backbones import find_backbone
from glasu.model.split import digest_weights
from glasu.protocol.client import Client
from glasu.protocol.key_agreement import agrees_on_classifier
from glasu.protocol.requests import Event, Save
from glasu.protocol.server import Server, Sizes
from glasu.protocol.state import Progress
from glasu.protocol.training import client_script, server_script
from glasu.report import DERIVED, GIVEN, UNSIGNED, MaskSummary, PartySummary, PreparedColumns, PrivacySummary, RunReport
from glasu.runtime.client_ledger import check_training, keep_ledgers, sync_ledgers
from glasu.runtime.delivery import UNCHANGED, Delivery, RecordedDelivery
from glasu.runtime.inprocess import (
    Map,
    ScriptRun,
    count_cores,
    open_client_map,
    run_alone,
    run_together,
)
from glasu.runtime.ledger_file import LEDGERS
from glasu.runtime.memory import check_memory, read_total_memory
from glasu.runtime.policy_file import PolicyFile
from glasu.runtime.report_builder import TrainingResult, build_run_report, summarize_race
from glasu.runtime.simulation_checkpoints import SimulationCheckpoints
from glasu.runtime.simulation_events import EventRouter, Observer, find_reporter
from glasu.runtime.telemetry import Telemetry, TrafficCounter
from glasu.runtime.transcript import TranscriptWriter
from glasu.secret import SECRET_BYTES, Secret
from glasu.timing import Clock, Stopwatch
from glasu.wire.message_key import RUN_BYTES


@dataclass(frozen=True, kw_only=True)
class SimulationOptions:
    """Options of a simulation. Only `secrets` and `delivery` can change weights and messages."""

    observer: Observer | None = None  # called with every round and evaluation, perhaps from another thread
    workers: int | None = None  # clients that compute at the same time; None: one per core
    notes: Sequence[str] = ()  # lines about the data for the report
    clock: Clock = field(default=read_clock)  # the default clock stops while kernels compile
    traffic: TrafficCounter | None = None  # a counter that the caller reads during the run
    checkpoints: Path | None = None  # folder of the saved states, from which a run resumes; None: save nothing
    fresh: bool = False  # remove earlier checkpoints and start over
    delivery: Delivery = UNCHANGED  # delivers every message; may change messages, to simulate a dishonest server
    transcript: Path | None = None  # folder in which every message is recorded; None: nothing is recorded
    secrets: Mapping[str, bytes] | None = None  # by party; None: all draws are derived from `train.seed`
    ledgers: Path | None = None  # folder of the parties' ledgers; None: a subfolder of `checkpoints`, or memory
    policies: Mapping[str, PolicyFile] = field(default_factory=dict)  # by party
    trained: Sequence[Client] = ()  # clients that already trained alone with these settings and keep their weights


@dataclass(frozen=True)
class Simulation:
    """A finished run: its report, and the clients with the selected weights."""

    report: RunReport
    clients: tuple[Client, ...]


def simulate(parties: Sequence[PartyData], config: RunConfig, options: SimulationOptions | None = None) -> Simulation:
    """Train one model over all parties in this process.

    Args:
        parties: the data of each party, aligned.
        config: the settings.
        options: see `SimulationOptions`.
    """
    options = options or SimulationOptions()
    prepared = prepare_run(check_config(config), check_party_list(parties))
    config, parties = prepared.config, prepared.parties
    check_memory(config, parties, read_total_memory(), "this machine has {limit}. Choose smaller values.")
    secrets = _read_secrets(options.secrets, parties)
    telemetry = Telemetry(options.clock, options.traffic, compiling=compile_seconds)
    with open_client_map(_count_workers(config, len(parties), options.workers)) as each:
        digests = [_remove_test_labels(party).data_digest() for party in parties]
        run = derive_run(config.digest(), *digests, *(secret.commitment() for secret in secrets.values()))
        clients = make_clients(config, parties, options.clock, secrets=secrets, run=run)
        for client in clients:
            check_training(client, options.policies.get(client.name))
        for client, other in zip(clients, options.trained, strict=False):
            client.progress = replace(other.progress, stopped=True)
        server = make_server(config, clients) if has_server(config) else None
        for client in clients:
            telemetry.add_watch(client.watch)
        commitments = {name: secret.commitment() for name, secret in secrets.items()}
        with (
            _open_checkpoints(options, clients, server, telemetry, commitments) as checkpoints,
            _keep_ledgers(options, clients),
            _open_transcript(options, clients, server) as delivery,
        ):
            _run_scripts(clients, server, telemetry, checkpoints, options, each, delivery)
    report = _build_report(prepared, clients, server, telemetry, options)
    return Simulation(report, tuple(clients))


def train(
    parties: Sequence[PartyData],
    config: RunConfig | None = None,
    *,
    observer: Observer | None = None,
    workers: int | None = None,
    checkpoints: str | Path | None = None,
    secrets: Mapping[str, bytes] | None = None,
    clock: Clock = read_clock,
) -> RunReport:
    """Train one model over all parties in this process and return the report.

    Args:
        parties: the data of each party, from `split_vertically`, `load_parties` or `read_party`.
        config: the settings.
        observer: called with every round and evaluation, perhaps from another thread.
        workers: number of clients that compute at the same time; by default one per core. It does not change the
            result.
        checkpoints: folder to save the state in, every `train.checkpoint_every` rounds. If the folder contains
            checkpoints of this run, training resumes from the last one. None: save nothing.
        secrets: 32 bytes for each party, by name. Initial weights, dropout masks, neighbour draws and rounding are
            derived from the secrets, as over a network. None: they are derived from `train.seed`.
        clock: returns seconds. The default counts wall time, but stops while kernels compile; `time.process_time`
            counts CPU seconds.
    """
    options = SimulationOptions(
        observer=observer,
        workers=workers,
        checkpoints=None if checkpoints is None else Path(checkpoints),
        secrets=secrets,
        clock=clock,
    )
    return simulate(parties, RunConfig() if config is None else config, options).report


def check_party_list(parties: Sequence[PartyData]) -> list[PartyData]:
    """Return the parties as a list, or raise DataError with a hint if this is not a list of parties."""
    if isinstance(parties, (list, tuple)) and parties and all(isinstance(party, PartyData) for party in parties):
        return list(parties)
    problem = "is an empty" if isinstance(parties, (list, tuple)) and not parties else "must be a"
    raise DataError(
        f"parties {problem} list of PartyData; glasu.split_vertically(data, num_clients=3) makes one from a PyG graph, "
        "and glasu.read_party(folder) reads one party."
    )


def check_config(config: RunConfig) -> RunConfig:
    """Return the config, or raise ConfigError with a hint if it is not a RunConfig but, for example, a dictionary."""
    if isinstance(config, RunConfig):
        return config
    raise ConfigError("config must be a glasu.RunConfig; glasu.RunConfig.from_dict builds one from a dictionary.")


def prepare_run(config: RunConfig, parties: Sequence[PartyData]) -> PreparedRun:
    """Check the parties, apply the method, and replace "auto" with its value for this graph."""
    prepared = apply_method(config, parties)
    resolved, unused = resolve(prepared.config, prepared.parties[0].num_nodes)
    return PreparedRun(resolved, prepared.parties, {**unused, **prepared.overridden})


def make_clients(
    config: RunConfig,
    parties: Sequence[PartyData],
    clock: Clock = time.perf_counter,
    preparations: Sequence[Preparation] | None = None,
    secrets: Mapping[str, Secret] | None = None,
    run: bytes | None = None,
) -> list[Client]:
    """Build one client per party from a resolved config and checked parties.

    `run` is the id of the run; None: it depends on the settings only.
    """
    secrets = secrets or {}
    names = [party.name for party in parties]
    clients = [
        Client(
            config,
            party,
            index=index,
            names=names,
            watch=Stopwatch(clock),
            preparation=None if preparations is None else preparations[index],
            secret=secrets.get(party.name),
        )
        for index, party in enumerate(parties)
    ]
    if run is not None:
        for client in clients:
            client.identity.run = run
    return clients


def _read_secrets(secrets: Mapping[str, bytes] | None, parties: Sequence[PartyData]) -> dict[str, Secret]:
    """Return the secrets by party, in client order; empty if no secrets are given. Refuse wrong names and lengths."""
    if secrets is None:
        return {}
    names = [party.name for party in parties]
    if set(secrets) != set(names):
        got = ", ".join(map(str, secrets)) or "no party"
        raise ConfigError(f"secrets: must name the parties {', '.join(names)}; got {got}.")
    for name, secret in secrets.items():
        if not isinstance(secret, bytes) or len(secret) != SECRET_BYTES:
            raise ConfigError(
                f"secrets[{name!r}]: must be {SECRET_BYTES} bytes; secrets.token_bytes({SECRET_BYTES}) makes them."
            )
    return {name: Secret(secrets[name]) for name in names}


def make_server(config: RunConfig, clients: Sequence[Client]) -> Server:
    """Build the server for these clients. The server receives the numbers of nodes, but no data."""
    knows = next(client for client in clients if client.has_labels)
    sizes = Sizes(
        num_nodes=knows.party.num_nodes,
        num_validation=len(knows.data.validation_examples()),
        num_test=len(knows.data.test_examples()),
    )
    return Server(config, knows.identity.names, sizes, knows.identity.run)


def derive_run(*digests: str) -> bytes:
    """Return the id of a run, given the digests of all inputs that determine its messages.

    So two messages with the same message key always have the same content.
    """
    return hashlib.sha256("\0".join(digests).encode()).digest()[:RUN_BYTES]


def _remove_test_labels(party: PartyData) -> PartyData:
    """Remove the test labels, so that the run id does not depend on them. Training does not read them."""
    if party.labels is None or party.splits is None:
        return party
    return replace(party, labels=hide_labels(party.labels, party.splits.test))


@contextmanager
def _open_checkpoints(
    options: SimulationOptions,
    clients: Sequence[Client],
    server: Server | None,
    telemetry: Telemetry,
    secrets: Mapping[str, str],
) -> Iterator[SimulationCheckpoints | None]:
    """Restore all roles from the last checkpoint, if there is one, and save them while the block runs.

    Args:
        options: the options of the simulation.
        clients: all clients.
        server: the server; None if there is none.
        telemetry: the telemetry of the run.
        secrets: the commitments of the secrets, by party; empty if no secrets are given.
    """
    config = clients[0].requested
    if options.checkpoints is None or not config.train.checkpoint_every:
        yield None
        return
    data = {client.name: client.party.data_digest() for client in clients}
    # If parties train alone, the server has nothing to save, because it receives no message before the last round.
    serves_rounds = server is not None and not trains_alone(config)
    checkpoints = SimulationCheckpoints(
        options.checkpoints, config, data, telemetry, server=serves_rounds, secrets=secrets
    )
    state = checkpoints.open(fresh=options.fresh)
    if state is not None:
        for client in clients:
            client.restore(state.clients[client.name])
        if server is not None and state.server is not None:
            server.restore(state.server)
    with checkpoints.wait_at_exit():
        yield checkpoints


def _keep_ledgers(options: SimulationOptions, clients: Sequence[Client]) -> AbstractContextManager[None]:
    """Attach ledgers to all clients while the block runs.

    The files are in the folder `options.ledgers`. If it is None, they are in a subfolder of `options.checkpoints`.
    """
    folder = options.ledgers
    if folder is None and options.checkpoints is not None and clients[0].requested.train.checkpoint_every:
        folder = options.checkpoints / LEDGERS
    return keep_ledgers(clients, folder, options.policies, "training", fresh=options.fresh)


@contextmanager
def _open_transcript(
    options: SimulationOptions, clients: Sequence[Client], server: Server | None
) -> Iterator[Delivery]:
    """Yield the delivery of the options. It records the messages if the options name a folder and there is a server."""
    if options.transcript is None or server is None:
        yield options.delivery
        return
    about = clients[0].requested, server.roster, server.identity.run, server.sizes.num_nodes
    writer = TranscriptWriter(options.transcript, *about, fresh=server.progress == Progress())
    for client in clients:
        client.release.observe_clear = partial(writer.write_clear, client.identity.index)
    try:
        yield RecordedDelivery(options.delivery, writer)
        writer.record_settings(_find_final_settings(clients[0]), clients[0].identity.earlier_rounds)
    finally:
        for client in clients:
            client.release.observe_clear = None
        writer.close()


def _find_final_settings(client: Client) -> RunConfig:
    """Return the settings of a finished run: the only candidate, or the winner of the race."""
    candidates = list_candidates(client.requested)
    return candidates[0] if len(candidates) == 1 else client.config


def _run_scripts(
    clients: Sequence[Client],
    server: Server | None,
    telemetry: Telemetry,
    checkpoints: SimulationCheckpoints | None,
    options: SimulationOptions,
    each: Map,
    delivery: Delivery,
) -> None:
    """Run the scripts of all roles to their end."""
    events = EventRouter(clients, telemetry, options.observer, has_server=server is not None)

    def perform(role: str | None, action: Save | Event) -> None:
        """Perform the action of a client, or of the server (None)."""
        if not isinstance(action, Save):
            events.observe(role, action)
        elif checkpoints is not None:
            checkpoints.save(role, action.take_state())

    def wait_until_durable() -> None:
        if checkpoints is not None:
            checkpoints.wait_until_durable()
        sync_ledgers(clients)

    running = [
        ScriptRun(client.name, client_script(client), client.watch, partial(perform, client.name)) for client in clients
    ]
    if server is None:
        run_alone(running, each)
    else:
        serving = ScriptRun("server", server_script(server), telemetry.watch, partial(perform, None), "communication")
        run_together(serving, running, telemetry.traffic, each, wait_until_durable, delivery)


def _build_report(
    prepared: PreparedRun,
    clients: Sequence[Client],
    server: Server | None,
    telemetry: Telemetry,
    options: SimulationOptions,
) -> RunReport:
    config = clients[0].config
    reports = server is not None and find_reporter(clients) is None
    ledgers = {client.name: client.release.ledger for client in clients}
    masks = MaskSummary.of(config, UNSIGNED, {client.name: client.release.sums.grids.clamped for client in clients})
    warm_start_keys = UNSIGNED if agrees_on_classifier(config) else None
    releases = {each.name: each.progress.race.releases for each in clients if each.progress.race is not None}
    result = TrainingResult(
        config=config,
        losses=[server.progress.losses] if server and reports else [client.progress.losses for client in clients],
        weights_sha256=tuple(digest_weights(client.progress.best_weights) for client in clients),
        privacy=PrivacySummary.of(
            config, ledgers, DERIVED if options.secrets is None else GIVEN, masks, warm_start_keys
        ),
        race=None if server is None else summarize_race(server, telemetry.race, releases),
    )
    return build_run_report(telemetry, result, list(map(_summarize, clients)), prepared.overridden, options.notes)


def _count_workers(config: RunConfig, num_clients: int, requested: int | None) -> int:
    """Return the number of clients that compute at the same time."""
    if any(find_backbone(each.model).uses_torch_generator for each in list_candidates(config)):
        return 1
    return max(1, min(num_clients, count_cores() if requested is None else requested))


def _summarize(client: Client) -> PartySummary:
    party = client.party
    return PartySummary(
        name=party.name,
        nodes=party.num_nodes,
        features=party.num_features,
        edges=party.graph.num_edges,
        labels=party.labels is not None,
        prepared=PreparedColumns.of(client.data.preparation, party.feature_names),
    )
