"""The server's part of a prediction with the parties' trained models. Torch is not loaded here."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import replace

from glasu.network.compatibility import prepare_config_for_network, refuse_kit
from glasu.network.control import derive_attempt_run
from glasu.network.facts import collect_server_facts
from glasu.network.handshake import ResultPayload
from glasu.network.options import ServeOptions
from glasu.network.purposes import PREDICTION
from glasu.network.roster import Attempt
from glasu.network.run_folder import open_serving, read_subsets, read_trained_config, require_finished_training
from glasu.network.serve import ServerScriptWork
from glasu.network.state_file import ServingRecord, StateFile, write_named
from glasu.protocol.prediction import server_request
from glasu.protocol.requests import Script
from glasu.report import PredictionReport, describe_missing
from glasu.runtime.checkpointing import START
from glasu.runtime.output_dir import PREDICTING
from glasu.runtime.report_builder import build_prediction_report
from glasu.wire.message_key import RUN_BYTES


class PredictionServer(ServerScriptWork[PredictionReport]):
    """One server process of a prediction. It keeps no checkpoints: an interrupted prediction starts again."""

    purpose = PREDICTION

    def __init__(self, options: ServeOptions) -> None:
        """Check that the folder contains a finished training with these settings and parties."""
        roster = options.kit.roster
        config = prepare_config_for_network(options.config, roster)
        refuse_kit(options.kit, config)
        self._trained = open_serving(options.out).value
        training = require_finished_training(options.out, self._trained, config, roster)
        config = read_trained_config(options.out, config)
        self._subsets = read_subsets(options.out) if config.train.party_dropout else []
        self._present: tuple[str, ...] = ()  # the parties of the last attempt
        facts = collect_server_facts(self.purpose, training=training)
        run = secrets.token_hex(RUN_BYTES)
        state = StateFile(options.out / PREDICTING, ServingRecord())
        super().__init__(options, facts, config, run, state, scope=training)

    def begin(self) -> None:
        """Begin a prediction."""
        super().begin()
        if self.state.value.ledger_scope != self._trained.ledger_scope:  # the record is from an earlier training
            self.state.update(ledger_scope=self._trained.ledger_scope, ledgers=self._trained.ledgers)
        if self.config.train.party_dropout:
            name = self.config.train.label_owner
            owner = "" if name is None else f" Party {name} is always required, because it has the labels."
            self.options.log.info(
                "prediction: if a party has no connection for %.0f s, the other parties continue without it.%s",
                self.options.wait,
                owner,
            )

    def plan(self, present: Sequence[str]) -> tuple[Attempt, Script[int]]:
        """Plan an attempt with a new run id, so that no message key of an earlier attempt is used for other contents.

        The present parties are the clients of this attempt, as if the roster listed only them.
        """
        statements, self._present = self.admission.collect_statements(present), tuple(present)
        number = self.count_attempt()
        server, limits = self.build_server(statements, derive_attempt_run(self.run, number))
        # Each party states which model was selected. The statements agree, because the handshake has compared them.
        server.progress.ensemble = any(stated.facts.selected == "ensemble" for stated in statements.values())
        return Attempt(number, 0, dict.fromkeys(statements, START), limits.check), server_request(server)

    def finish(self, result: int, finished: Sequence[ResultPayload]) -> PredictionReport:
        """Write prediction.json."""
        common = build_prediction_report(self.telemetry, self.options.kit.roster, self._present, self._subsets)
        report = replace(common, nodes=result)
        if report.missing:
            self.options.log.info("%s", describe_missing(report.missing, report.validation))
        write_named(self.options.out / "prediction.json", report.to_json().encode())
        return report
