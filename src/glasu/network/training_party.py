"""A party's part of a training: the handshake, its client, and its report."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from glasu.config import RunConfig
from glasu.data.party import PartyData
from glasu.errors import TransportError
from glasu.model.split import weights_digest
from glasu.network.compatibility import (
    compare_with_agreed,
    read_offered_config,
    refuse_settings,
    refuse_unfit_for_network,
)
from glasu.network.control import ProposedAttempt, describe_start
from glasu.network.fencing import describe_process, note_welcome
from glasu.network.handshake import Code, Finished, Hello, Payload, Prepared, RefusalError, Welcome, read_payload
from glasu.network.log_lines import SENTENCES, printable
from glasu.network.options import JoinOptions
from glasu.network.party_run import PartyRun
from glasu.network.party_setup import build_client, check_memory, label_facts, party_facts, resolve_for_party
from glasu.network.state_file import write_named
from glasu.network.status import Status
from glasu.protocol.client import Client
from glasu.protocol.limits import Limits
from glasu.protocol.requests import Event, RoundDone, Script
from glasu.protocol.rounds import client_script
from glasu.protocol.state import ClientState
from glasu.records import to_plain
from glasu.report import LedgerSummary, SplitScores, build_party_report
from glasu.runtime.telemetry import Telemetry
from glasu.runtime.trained_model import TrainedModel
from glasu.timing import Stopwatch
from glasu.wire.message_key import ATTEMPTS

DEFAULTS = RunConfig().flatten()


@dataclass(frozen=True, eq=False)
class Offer:
    """The run that the server offered, and this party's client for it."""

    welcome: Welcome
    client: Client
    first: ClientState  # before the first round


class TrainingParty:
    """One process of a party in a training."""

    def __init__(self, options: JoinOptions) -> None:
        """Read the folder; nothing is written.

        Raises:
            FolderError: the folder belongs to another run, or the run began with other data.
        """
        self.options, self.run = options, PartyRun(options)
        self.telemetry = Telemetry(options.clock)
        self._offer: Offer | None = None
        self._attempt = 0

    def hello(self) -> Payload:
        """Return the hello of this process."""
        held, fresh = self.run.state.value, self.run.fresh
        return to_plain(
            Hello(
                facts=party_facts(self.options.party, "training"),
                process=describe_process(held),
                run=None if fresh else held.run,
                only=self.options.run,
                fresh=fresh,
                finished=None if fresh else held.finished,
                rounds=self.run.rounds(),
            )
        )

    def welcome(self, welcome: Payload) -> None:
        """Check the run that the server offers, and build the client for it."""
        offered = read_payload(Welcome, welcome, "the server's welcome")
        run = read_run_id(offered)
        note_welcome(self.run.state)
        if self._offer is None:
            config, party = self._accept(offered)
            client = build_client(config, party, offered.index, offered.roster, self.options.clock)
            client.identity.incarnation = self.run.state.value.incarnation
            self.telemetry.add_watch(client.watch)
            self._offer = Offer(offered, client, client.state())
        elif dataclasses.replace(offered, run=self._offer.welcome.run) != self._offer.welcome:
            raise TransportError(
                "the server has begun another run, with other settings, since this party joined; start the same "
                "command again."
            )
        self.client.identity.run = run  # a restarted server has a new run id if the run had not begun

    def statement(self) -> Payload:
        """Return the facts, settings and checkpoints with which this party is ready to run."""
        client, party = self.client, self.client.party
        facts = party_facts(party, "training", parties=client.identity.num_clients, **label_facts(party))
        settings = client.config.flatten()
        return to_plain(
            Prepared(digest=client.config.digest(), settings=settings, rounds=self.run.rounds(), facts=facts)
        )

    def _accept(self, offered: Welcome) -> tuple[RunConfig, PartyData]:
        """Check the offered settings, and resolve them for this party."""
        options = self.options
        config = read_offered_config(offered.config)
        refuse_unfit_for_network(config)
        check_place(options.party.name, offered.roster, offered.index, config.data.num_clients)
        shown = {name: value for name, value in config.flatten().items() if value != DEFAULTS.get(name)}
        listed = ", ".join(f"{name} = {value!r}" for name, value in shown.items()) or "all defaults"
        options.log.info("the run: %s.", printable(listed, SENTENCES))
        if options.expect is not None:
            refuse_settings(
                compare_with_agreed(config, options.expect),
                "the server's settings differ from --expect: {}; agree on one run file with the server's operator.",
                (f"{options.party.name} expects", "the server"),
            )
        check_memory(config, options.party, options.max_memory)
        config, party = resolve_for_party(config, options.party)
        if not self.run.fresh and self.run.state.value.digest not in (None, config.digest()):
            raise RefusalError(
                Code.DIFFERENT_SETTINGS,
                "the server's settings are not those with which this run began. Serve those again, or start over with "
                "--fresh at the server and at every party.",
            )
        return config, party

    @property
    def client(self) -> Client:
        """This party's client; the session calls `welcome` first."""
        assert self._offer is not None
        return self._offer.client

    @property
    def watch(self) -> Stopwatch:
        """Adds up the computing time of the script."""
        return self.client.watch

    @property
    def limits(self) -> Limits:
        """The greatest sizes of the server's messages."""
        return limits_of(self.client)

    def begin(self, attempt: ProposedAttempt) -> Script[None]:
        """Restore the checkpoint of an attempt and return the script that continues from it."""
        assert self._offer is not None
        client, state = self.client, self._offer.first
        self.run.start(client)
        self.run.settle()
        self.run.state.update(finished=None)  # results of an earlier attempt are computed again
        if attempt.round:
            checkpoint = self.run.load(attempt)
            state = checkpoint.client
            if self.telemetry.traffic.messages == 0:  # this process has just started
                self.telemetry.restore_cost(checkpoint.cost)
        client.restore(dataclasses.replace(state, incarnation=self.run.state.value.incarnation))
        self._attempt = attempt.number
        client.identity.attempt = attempt.number % ATTEMPTS
        self.options.log.info(
            "attempt %d: all parties are connected; %s.", attempt.number, describe_start(attempt.round)
        )
        return client_script(client)

    def save(self, state: ClientState) -> None:
        """Start to write a checkpoint."""
        self.run.save(state, self.telemetry.cost())

    def settle(self) -> None:
        """Wait until the last checkpoint is durable."""
        self.run.settle()

    def observe(self, event: Event) -> None:
        """Pass an event on, and the status after a round."""
        self.options.emit(event)
        if isinstance(event, RoundDone):
            self.options.emit(self._status(event))

    def _status(self, done: RoundDone) -> Status:
        client, traffic = self.client, self.telemetry.traffic
        return Status(
            round=client.progress.round,
            num_rounds=client.config.train.num_rounds,
            attempt=self._attempt,
            loss=done.loss,
            bytes_to_server=traffic.bytes_to_server,
            bytes_to_clients=traffic.bytes_to_clients,
            seconds=self.telemetry.elapsed(),
        )

    def finish(self, result: None) -> Finished:
        """Write the selected weights and report.json."""
        client, party, weights = self.client, self.client.party, self.client.progress.best_weights
        TrainedModel(
            config=client.config,
            classes=party.classes,
            names=(party.name,),
            scales=(client.data.scale,),
            num_features=(party.num_features,),
            columns=(party.columns_digest(),),
            weights=(weights,),
        ).save(self.options.out / "model")
        digest, cost = weights_digest(weights), self.telemetry.cost()
        report = build_party_report(
            client.config,
            party=party.name,
            parties=client.identity.names,
            run=client.identity.run.hex(),
            test=_read_scores(client.progress.test_metrics),
            traffic=cost.traffic,
            seconds=cost.seconds,
            weights_sha256=digest,
            ledger=LedgerSummary.of(party.name, client.release.ledger),
        )
        write_named(self.options.out / "report.json", report.to_json().encode())
        finished = Finished(weights_sha256=digest)
        self.run.state.update(finished=finished)
        return finished

    def close(self, *, finished: bool) -> None:
        """Stop the writing thread; after a finished run, remove the checkpoints."""
        self.run.close(finished=finished)


def _read_scores(metrics: Mapping[str, float]) -> SplitScores | None:
    """Return the test scores; None at a client without labels."""
    return SplitScores(metrics) if metrics else None


def limits_of(client: Client) -> Limits:
    """Return the greatest sizes of the messages that a client may receive."""
    party = client.party
    return Limits.of_run(client.config, party.num_nodes, len(party.classes), client.identity.num_clients)


def read_run_id(welcome: Welcome) -> bytes:
    """Return the run id of a welcome."""
    try:
        return bytes.fromhex(welcome.run)
    except ValueError:
        raise RefusalError(Code.INVALID_PAYLOAD, "the server's welcome has a run id that is not hexadecimal.") from None


def check_place(name: str, roster: Sequence[str], index: int, num_clients: int) -> None:
    """Refuse a roster in which this party has another name, or whose length is not the number of clients."""
    listed = printable(", ".join(roster), SENTENCES)
    if len(roster) != num_clients or index >= num_clients:
        raise RefusalError(
            Code.WRONG_ROSTER,
            f"the server's roster ({listed}; this party is number {index}) does not fit its settings, "
            f"data.num_clients={num_clients}; all parties must see the same roster.",
        )
    if roster[index] != name:
        raise RefusalError(
            Code.WRONG_ROSTER,
            f"the server's roster ({listed}) lists this party as {printable(roster[index])!r}, the name in its "
            f"certificate; use the kit of {name!r}.",
        )
