"""A party's part of a prediction: compute with its trained weights, and write the probabilities that it receives."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from glasu.config import resolve
from glasu.data.party import PartyData
from glasu.errors import ConfigError, DataError
from glasu.model.blocks import NodeSet
from glasu.network.compatibility import compare_settings, derive_attempt_run, read_offered_config, refuse_settings
from glasu.network.control import ProposedAttempt
from glasu.network.facts import Facts, digest_names
from glasu.network.fencing import describe_process, note_welcome
from glasu.network.handshake import Code, Finished, Hello, Payload, Prepared, RefusalError, Welcome, read_payload
from glasu.network.log_lines import SENTENCES, printable
from glasu.network.options import JoinOptions
from glasu.network.party_setup import build_client, party_facts
from glasu.network.run_folder import open_joining
from glasu.network.state_file import write_named
from glasu.network.training_party import limits_of
from glasu.protocol.client import Client
from glasu.protocol.limits import Limits
from glasu.protocol.prediction import client_request
from glasu.protocol.requests import Event, Script, Timed
from glasu.records import parse_json, read_record, to_plain
from glasu.report import LedgerSummary, Seconds, Traffic, versions
from glasu.runtime.checkpointing import START
from glasu.runtime.predictions import write_predictions
from glasu.runtime.telemetry import Telemetry
from glasu.runtime.trained_model import TrainedModel, load_weights
from glasu.timing import Stopwatch
from glasu.wire.message_key import ATTEMPTS


@dataclass(frozen=True, eq=False)
class Query:
    """The nodes whose class probabilities a party requests."""

    nodes: NodeSet  # positions; empty: the party only helps the others
    file_format: str = "csv"  # or "parquet"


@dataclass(frozen=True, eq=False)
class Predicted:
    """The class probabilities that a party received; none if it requested none, or another party has the labels."""

    nodes: NodeSet  # positions: first the requested ones in their order, then those that others requested
    probabilities: NDArray[Any]
    file: Path | None


@dataclass(frozen=True, kw_only=True)
class PartyPredictionReport:
    """prediction.json of a party."""

    party: str
    parties: tuple[str, ...]
    training: str
    requested: int
    received: int
    traffic: Traffic
    seconds: Seconds
    ledger: LedgerSummary
    versions: Mapping[str, str]

    def to_json(self) -> str:
        """Return the content of prediction.json."""
        values = to_plain(self)
        ledger = values.pop("ledger")
        values |= {
            "traffic": self.traffic.to_dict(),
            "seconds": self.seconds.to_dict(),
            "privacy": {"ledger": [ledger]},
        }
        return json.dumps(values, indent=2) + "\n"


class PredictionParty:
    """One process of a party in a prediction."""

    def __init__(self, options: JoinOptions, query: Query) -> None:
        """Load the trained model of the folder.

        Raises:
            ConfigError: the folder holds no finished training of this party.
            DataError: the party's data does not fit the model.
        """
        self.options = options
        self.query = dataclasses.replace(query, nodes=np.asarray(query.nodes, np.int64))
        self.state = open_joining(options.out, options.party.name)
        if self.state.value.finished is None or self.state.value.run is None:
            raise ConfigError(
                f"{options.out}: holds no finished training of this party; --out must be the folder of a finished "
                "`glasu join`."
            )
        self.model = TrainedModel.load(options.out)
        self.party = _with_classes(self.model, options.party)
        self.roster = _read_roster(options.out)
        self.telemetry = Telemetry(options.clock)
        self._client: Client | None = None
        self._run = ""  # of the present server process
        self.predicted: Predicted | None = None

    def hello(self) -> Payload:
        """Return the hello of this process."""
        process = describe_process(self.state.value)
        return to_plain(Hello(facts=self._facts(), process=process, rounds={0: START}))

    def _facts(self) -> Facts:
        classes = self.model.classes
        about_classes = {"classes": len(classes), "class_names": digest_names(classes)} if classes else {}
        return party_facts(self.party, "prediction", training=self.state.value.run, **about_classes)

    def welcome(self, welcome: Payload) -> None:
        """Check that the server predicts with the training of this model, and build the client."""
        offered = read_payload(Welcome, welcome, "the server's welcome")
        note_welcome(self.state)
        self._check(offered)
        self._run = offered.run
        if self._client is None:
            config, scale = self.model.config, self.model.scales[0]
            client = build_client(config, self.party, offered.index, offered.roster, self.options.clock, scale)
            load_weights(client, self.model.weights[0])
            client.identity.incarnation = self.state.value.incarnation
            self.telemetry.add_watch(client.watch)
            self._client = client
            others = ", ".join(name for name in self.roster if name != self.party.name)
            self.options.log.info(
                "prediction: the server and %s must stay online until it is done; waiting for them.", others
            )

    def _check(self, offered: Welcome) -> None:
        if offered.roster != self.roster:
            raise RefusalError(
                Code.WRONG_ROSTER,
                f"the model was trained by the parties {', '.join(self.roster)}; the server's roster is "
                f"{printable(', '.join(offered.roster), SENTENCES)}. Restore the server's kit.toml of that time, or "
                "change the roster with `glasu provision --add` or `--remove`.",
            )
        config, _ = resolve(read_offered_config(offered.config), self.party.num_nodes)
        refuse_settings(
            compare_settings({"trained": self.model.config.flatten(), "got": config.flatten()}),
            "the server's settings are not those of the training: {}.",
            (f"{self.party.name} trained", "the server"),
        )

    def statement(self) -> Payload:
        """Return the facts and settings with which this party is ready to predict."""
        config = self.model.config
        return to_plain(
            Prepared(digest=config.digest(), settings=config.flatten(), rounds={0: START}, facts=self._facts())
        )

    @property
    def client(self) -> Client:
        """This party's client; the session calls `welcome` first."""
        assert self._client is not None
        return self._client

    @property
    def watch(self) -> Stopwatch:
        """Adds up the computing time of the script."""
        return self.client.watch

    @property
    def limits(self) -> Limits:
        """The greatest sizes of the server's messages."""
        return limits_of(self.client)

    def begin(self, attempt: ProposedAttempt) -> Script[tuple[NodeSet, NDArray[Any]]]:
        """Return the script of an attempt; each attempt has its own run id."""
        identity = self.client.identity
        identity.attempt = attempt.number % ATTEMPTS
        identity.run = derive_attempt_run(self._run, attempt.number)
        return _request(self.client, self.query.nodes)

    def save(self, state: Any) -> None:
        """A prediction saves nothing."""
        raise AssertionError("a prediction has no state")

    def settle(self) -> None:
        """Do nothing: a prediction has no checkpoint."""

    def observe(self, event: Event) -> None:
        """Pass an event on."""
        self.options.emit(event)

    def finish(self, result: tuple[NodeSet, NDArray[Any]]) -> Finished:
        """Write predictions.<format> and prediction.json."""
        nodes, probabilities = result
        client, requested, file = self.client, self.query.nodes, None
        if len(nodes):
            order = np.concatenate([requested, np.setdiff1d(nodes, requested)])
            nodes, probabilities = order, probabilities[np.searchsorted(nodes, order)]
            file = self.options.out / f"predictions.{self.query.file_format}"
            ids, train = self.party.ids[nodes], client.config.train
            write_predictions(file, ids, probabilities, self.model.classes, train)
        elif len(requested):
            owner = client.identity.names[client.identity.owner]
            self.options.log.info("party %r has the labels and receives the class probabilities; this one none.", owner)
        self.predicted = Predicted(nodes, probabilities, file)
        self._write_report(len(nodes))
        return Finished(received=len(nodes))

    def _write_report(self, received: int) -> None:
        client, cost = self.client, self.telemetry.cost()
        report = PartyPredictionReport(
            party=client.name,
            parties=self.roster,
            training=str(self.state.value.run),
            requested=len(self.query.nodes),
            received=received,
            traffic=cost.traffic,
            seconds=cost.seconds,
            ledger=LedgerSummary.of(client.name, client.release.ledger),
            versions=versions(),
        )
        write_named(self.options.out / "prediction.json", report.to_json().encode())

    def close(self, *, finished: bool) -> None:
        """Do nothing: a prediction starts no thread."""


def _request(client: Client, nodes: NodeSet) -> Script[tuple[NodeSet, NDArray[Any]]]:
    result: tuple[NodeSet, NDArray[Any]] = yield Timed(client_request(client, nodes), "evaluation")
    return result


def _with_classes(model: TrainedModel, party: PartyData) -> PartyData:
    """Return the party with the classes of the model; without labels where the model has no classifier."""
    model.check_data([party])
    if model.classes:
        return model.add_unknown_labels([party])[0]
    return dataclasses.replace(party, labels=None, classes=(), splits=None)


@dataclass(frozen=True)
class _ReportedParties:
    parties: tuple[str, ...]


def _read_roster(out: Path) -> tuple[str, ...]:
    """Return the parties of the training, in client order, from report.json."""
    path = out / "report.json"
    try:
        report = parse_json(path.read_bytes(), str(path))
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}); restore the folder of `glasu join`.") from None
    parties = {"parties": report.get("parties")} if isinstance(report, dict) else {}
    return read_record(_ReportedParties, parties, str(path)).parties
