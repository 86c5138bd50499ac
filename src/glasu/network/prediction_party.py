"""A party's part of a prediction: compute with the trained weights, and write the received predictions."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from glasu.config import resolve
from glasu.data.party import PartyData
from glasu.errors import ConfigError, ProtocolError
from glasu.model.blocks import NodeSet
from glasu.network.compatibility import THE_SERVER, compare_settings, read_offered_config, refuse_settings
from glasu.network.control import ProposedAttempt, derive_attempt_run
from glasu.network.facts import Facts, LabelFacts, collect_class_facts, collect_party_facts
from glasu.network.fencing import note_welcome
from glasu.network.handshake import Code, RefusalError, ResultPayload, WelcomePayload
from glasu.network.join import ClientWork
from glasu.network.log_lines import MAX_REASON, make_printable
from glasu.network.options import JoinOptions
from glasu.network.party_setup import find_memory_limit
from glasu.network.purposes import PREDICTION
from glasu.network.run_folder import FinishedPart, read_report, refuse_other_secret
from glasu.network.session_ledger import LedgerScope
from glasu.network.state_file import write_named
from glasu.protocol.client import Client
from glasu.protocol.prediction import client_request
from glasu.protocol.presence import check_present
from glasu.protocol.requests import Script, Timed
from glasu.report import LedgerSummary, describe_missing
from glasu.runtime.memory import check_prediction_memory
from glasu.runtime.report_builder import build_prediction_report
from glasu.runtime.trained_model import MODEL_FILE, TrainedModel, load_weights, write_predictions
from glasu.wire.message_key import ATTEMPTS


@dataclass(frozen=True, eq=False)
class Query:
    """The nodes whose scores a party requests."""

    nodes: NodeSet  # row numbers; empty if the party only helps the other parties
    file_format: str = "csv"  # or "parquet"


@dataclass(frozen=True, eq=False)
class Predicted:
    """The scores that a party received: class probabilities, or numbers in the unit of the labels.

    If one party has the labels, it receives the scores of all nodes that any party requested, and the other parties
    receive none. If all parties have the labels, each party receives the scores of the nodes that it requested.
    """

    nodes: NodeSet  # row numbers: nodes that this party requested, in that order, then nodes that only others requested
    scores: NDArray[Any]
    file: Path | None
    missing: tuple[str, ...] = ()  # parties of the training that were absent from the prediction


class PredictionParty(ClientWork[Predicted]):
    """One process of a party in a prediction."""

    purpose = PREDICTION

    def __init__(self, options: JoinOptions, party: PartyData, query: Query) -> None:
        """Load the trained model of the folder.

        Raises:
            ConfigError: the folder contains no finished training of this party, the training used another secret, or
                the model needs more memory than this party allows.
            DataError: the party's data does not fit the model.
        """
        super().__init__(options, party)
        self.query = dataclasses.replace(query, nodes=np.asarray(query.nodes, np.int64))
        if self.state.value.finished is None or self.state.value.run is None:
            raise ConfigError(
                f"{options.out}: holds no finished training of this party; --out must be the folder of a finished "
                "`glasu join`."
            )
        # Without a secret, the noise of released rows would follow from the public seed. With another secret, a row
        # from the training would be released again with different noise, and the mean of both releases has less noise.
        remedy = "restore the file that this training used, or train again"
        refuse_other_secret(options.kit, self.state.value, "the training", remedy)
        self.model = TrainedModel.load(options.out)
        self.party = _add_classes(self.model, party)
        advice = "this party allows {limit}. Raise the limit with --max-memory, "
        advice += f"or if the settings were changed, restore {MODEL_FILE}."
        check_prediction_memory(self.model.config, [party], find_memory_limit(options.max_memory), advice)
        self.roster = read_report(FinishedPart, options.out).parties
        self._run = ""  # run id of the current server process
        self._predicted: Predicted | None = None

    def facts(self) -> Facts:
        """Return the facts about this party's data, and about the training and the classes of its model."""
        about_classes: LabelFacts = {} if self.party.labels is None else collect_class_facts(self.model.classes)
        if self.model.config.train.warm_start:
            about_classes["selected"] = "ensemble" if self.model.ensemble else "joint"
        return collect_party_facts(
            self.party, self.purpose, self.id_keys, training=self.state.value.run, **about_classes
        )

    def scope(self) -> LedgerScope:
        """Return the scope of the ledger entries. The prediction belongs to the training of the model."""
        return LedgerScope(self._run, str(self.state.value.run), self.purpose.name, self.client.requested.digest())

    def accept(self, offered: WelcomePayload) -> None:
        """Check that the server has the roster and settings of this model's training, and build the client."""
        note_welcome(self.state)
        if offered.roster != self.roster:
            raise RefusalError(
                Code.WRONG_ROSTER,
                f"the model was trained by the parties {', '.join(self.roster)}; the server's roster is "
                f"{make_printable(', '.join(offered.roster), MAX_REASON)}. Restore the kit.toml that the server had "
                "then, or change the roster with `glasu provision --add` or `--remove`.",
            )
        config, _ = resolve(read_offered_config(offered.config), self.party.num_nodes)
        refuse_settings(
            compare_settings({f"{self.party.name} trained": self.model.config.flatten(), THE_SERVER: config.flatten()}),
            "the server's settings are not the settings of the training: {}.",
        )
        self._run = offered.run
        if self._client is None:
            preparation, secret = self.model.clients[0].preparation, self.options.kit.secret
            self.build_client(self.model.config, self.party, offered, preparation, secret)
            load_weights(self.client, self.model.clients[0], self.model.weights[0], self.model)
            others = ", ".join(name for name in self.roster if name != self.party.name)
            self.options.log.info(
                "prediction: the server and %s must stay online until it is done; this party is waiting for them.",
                others,
            )

    def begin(self, attempt: ProposedAttempt) -> Script[tuple[NodeSet, NDArray[Any]]]:
        """Return the script of an attempt. Each attempt has its own run id.

        Raises:
            ProtocolError: the proposed parties are not in the roster, not in its order, or do not include this party.
            AlignmentError: parties are missing, and the model was trained without party dropout.
            ConfigError: the label owner is missing.
        """
        present = attempt.present
        if present != tuple(name for name in self.roster if name in present) or self.party.name not in present:
            raise ProtocolError(
                f"the server proposed a prediction by {make_printable(', '.join(present), MAX_REASON) or 'no party'}; "
                f"expected some of {', '.join(self.roster)} in this order, including {self.party.name}."
            )
        if present != self.roster:
            check_present(self.model.config, self.roster, present)
        self.client.restrict_clients(present)
        identity = self.client.identity
        identity.attempt = attempt.number % ATTEMPTS
        identity.run = derive_attempt_run(self._run, attempt.number)
        return _request(self.client, self.query.nodes)

    def finish(self, result: tuple[NodeSet, NDArray[Any]]) -> ResultPayload:
        """Write predictions.<format> and prediction.json."""
        nodes, scores = result
        client, requested, file = self.client, self.query.nodes, None
        if len(nodes):
            order = np.concatenate([requested, np.setdiff1d(nodes, requested)])
            nodes, scores = order, scores[np.searchsorted(nodes, order)]
            file = self.options.out / f"predictions.{self.query.file_format}"
            ids, train = self.party.ids[nodes], client.config.train
            write_predictions(file, ids, scores, self.model.classes, train)
        elif len(requested):
            owner = client.identity.label_owner
            self.options.log.info("party %r has the labels and receives all predictions; this party gets none.", owner)
        report = dataclasses.replace(
            build_prediction_report(self.telemetry, self.roster, client.identity.names, self.model.subsets),
            party=client.name,
            training=self.state.value.run,
            requested=len(requested),
            received=len(nodes),
            privacy={"ledger": (LedgerSummary.of(client.name, client.release.ledger),)},
        )
        if report.missing:
            self.options.log.info("%s", describe_missing(report.missing, report.validation))
        write_named(self.options.out / "prediction.json", report.to_json().encode())
        self._predicted = Predicted(nodes, scores, file, report.missing)
        return ResultPayload(received=len(nodes))

    def result(self) -> Predicted | None:
        """Return the scores, once they are written."""
        return self._predicted


def _request(client: Client, nodes: NodeSet) -> Script[tuple[NodeSet, NDArray[Any]]]:
    result: tuple[NodeSet, NDArray[Any]] = yield Timed(client_request(client, nodes), "evaluation")
    return result


def _add_classes(model: TrainedModel, party: PartyData) -> PartyData:
    """Return the party with the classes of the model, or without labels if another party has the classifier."""
    model.check_data([party])
    if model.config.train.label_owner in (None, party.name):
        return model.add_unknown_labels([party])[0]
    return dataclasses.replace(party, labels=None, classes=(), splits=None)
