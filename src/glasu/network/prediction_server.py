"""The server's part of a prediction with the parties' trained models. Torch is not loaded here."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from glasu.config import resolve
from glasu.network.admission import Admission
from glasu.network.compatibility import config_for_network, derive_attempt_run
from glasu.network.facts import server_facts
from glasu.network.handshake import Finished
from glasu.network.options import ServeOptions
from glasu.network.run_folder import open_predicting, open_serving, require_finished_training
from glasu.network.server_role import Plan
from glasu.network.state_file import write_named
from glasu.protocol.limits import Limits
from glasu.protocol.prediction import server_request
from glasu.protocol.requests import Event
from glasu.protocol.server import Server, Sizes
from glasu.records import to_plain
from glasu.report import Seconds, Traffic, versions
from glasu.runtime.checkpointing import START
from glasu.runtime.telemetry import SERVER_PARTS, Telemetry
from glasu.wire.message_key import RUN_BYTES


@dataclass(frozen=True, kw_only=True)
class ServerPredictionReport:
    """prediction.json of a server."""

    parties: tuple[str, ...]
    nodes: int
    traffic: Traffic
    seconds: Seconds
    versions: Mapping[str, str]

    def to_json(self) -> str:
        """Return the content of prediction.json."""
        values = {**to_plain(self), "traffic": self.traffic.to_dict(), "seconds": self.seconds.to_dict()}
        return json.dumps(values, indent=2) + "\n"


class PredictionServer:
    """One process of the server of a prediction. It keeps no checkpoints: a prediction that breaks starts again."""

    is_finished = False

    def __init__(self, options: ServeOptions) -> None:
        """Check that the folder holds the finished training of these settings and parties."""
        self.options, roster = options, options.kit.roster
        self.config = config_for_network(options.config, roster)
        training = require_finished_training(options.out, open_serving(options.out).value, self.config, roster)
        self.state = open_predicting(options.out)
        self.run = secrets.token_hex(RUN_BYTES)
        self.telemetry = Telemetry(options.clock, parts=SERVER_PARTS)
        self.admission = Admission(
            server_facts(versions(), "prediction", training=training),
            self.config,
            roster,
            self.state,
            lambda: {0: START},
            lambda num_nodes: resolve(self.config, num_nodes)[0],
        )

    def pin(self) -> None:
        """Begin a prediction. Each process serves a separate prediction, and any folder may take part."""
        self.state.update(run=self.run, processes={}, attempt=0)
        parties = ", ".join(self.options.kit.roster)
        self.options.log.info("prediction: this server and all of %s must stay online until it is done.", parties)

    def plan(self) -> Plan:
        """Plan an attempt with a new run id, because a repeated request may have other contents."""
        stated = [prepared.facts for prepared in self.admission.collect_statements().values()]
        num_nodes = next(facts.nodes for facts in stated if facts.nodes is not None)
        num_classes = next((facts.classes for facts in stated if facts.classes is not None), 0)
        self.state.update(attempt=self.state.value.attempt + 1)
        attempt, roster = self.state.value.attempt, self.options.kit.roster
        config, _ = resolve(self.config, num_nodes)
        run = derive_attempt_run(self.run, attempt)
        server = Server(config, roster, Sizes(num_nodes, 0, 0), run)
        return Plan(
            attempt=attempt,
            round=0,
            digests=(START,) * len(roster),
            limits=Limits.of_run(config, num_nodes, num_classes, len(roster)),
            script=server_request(server),
        )

    def save(self, state: Any) -> None:
        """A prediction saves nothing."""
        raise AssertionError("a prediction has no state")

    def settle(self) -> None:
        """Do nothing: a prediction has no checkpoint."""

    def observe(self, event: Event) -> None:
        """Pass an event on."""
        self.options.emit(event)

    def finish(self, result: int, finished: Sequence[Finished]) -> ServerPredictionReport:
        """Write prediction.json."""
        cost = self.telemetry.cost()
        report = ServerPredictionReport(
            parties=self.options.kit.roster,
            nodes=result,
            traffic=cost.traffic,
            seconds=cost.seconds,
            versions=versions(),
        )
        write_named(self.options.out / "prediction.json", report.to_json().encode())
        return report

    def close(self, *, finished: bool) -> None:
        """Do nothing: a prediction starts no thread."""
