"""The server's part of a training run: its state file, checkpoints, telemetry and report. Torch is not loaded here."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from glasu.config import describe_profile, resolve
from glasu.data.methods import override_settings
from glasu.errors import CheckpointError
from glasu.network.compatibility import prepare_config_for_network, refuse_kit
from glasu.network.facts import collect_server_facts
from glasu.network.handshake import ResultPayload
from glasu.network.options import ServeOptions, Status, View
from glasu.network.purposes import TRAINING
from glasu.network.roster import Attempt
from glasu.network.run_folder import CHECKPOINTS, NEW_RUN, continues_run, open_serving
from glasu.network.serve import ServerPerformer, ServerScriptWork
from glasu.network.server_session import ServerSession
from glasu.network.state_file import write_named
from glasu.protocol.requests import Evaluated, Event, RoundDone, Script
from glasu.protocol.server import Server
from glasu.protocol.state import Progress, ServerState
from glasu.protocol.training import server_script
from glasu.report import SIGNED, MaskSummary, PartySummary, PrivacySummary, RunReport
from glasu.runtime.checkpointing import START, Saver, Store, find_common_round
from glasu.runtime.report_builder import TrainingResult, build_run_report, summarize_race
from glasu.runtime.telemetry import TelemetryState
from glasu.wire.message_key import RUN_BYTES


@dataclass(frozen=True, eq=False)
class ServerCheckpoint:
    """A checkpoint of the server."""

    server: ServerState
    telemetry: TelemetryState


class TrainingServer(ServerScriptWork[RunReport | None]):
    """One server process of a training run. Its report is None if an earlier process finished the run."""

    purpose = TRAINING

    def __init__(self, options: ServeOptions) -> None:
        """Read the folder; nothing is written before `begin`.

        Raises:
            ConfigError: the settings cannot run between machines, or the folder belongs to another run.
        """
        roster = options.kit.roster
        config = prepare_config_for_network(options.config, roster)
        refuse_kit(options.kit, config)
        state = open_serving(options.out)
        if options.fresh:
            state.start_over()
        resumes = not options.fresh and continues_run(options.out, state.value, config, roster)
        run = str(state.value.run) if resumes else secrets.token_hex(RUN_BYTES)
        facts = collect_server_facts(self.purpose, parties=len(roster))
        super().__init__(options, facts, config, run, state, scope=run)
        self.saver = Saver(
            Store(ServerCheckpoint, options.out / CHECKPOINTS, f"the server of run {run}", config.extensions())
        )
        self._scores: Mapping[str, float] = {}  # scores of the last evaluation on validation nodes
        self._server: Server | None = None  # the server of the current attempt
        if resumes:
            self._open_checkpoints()

    def _open_checkpoints(self) -> None:
        saved = max(self.saver.store.open(self.config.train.checkpoint_every, self.options.log))
        if saved and not self.is_finished:
            checkpoint = self.saver.store.load(saved)
            self.telemetry.restore_cost(checkpoint.telemetry.cost)
            last = checkpoint.server.progress.describe_position()
            self.options.log.info(
                "resuming after %s, or from the checkpoint before it, once all parties are connected.", last
            )

    @property
    def is_finished(self) -> bool:
        """Whether the folder holds the results of this run."""
        return self.state.value.closed

    @property
    def progress(self) -> Progress | None:
        """The progress of the server in the current attempt."""
        return None if self._server is None else self._server.progress

    def begin(self) -> None:
        """Assign the folder to the run. With --fresh, the old content is replaced only when all parties have joined."""
        if self.is_finished:
            out = self.options.out
            self.options.log.info("%s: this run is finished, see report.json there; %s.", out, NEW_RUN)
        elif profile := describe_profile(self.config):
            self.options.log.info("%s.", profile)
        if self.state.value.run == self.run:  # the run continues
            return
        self.state.update(
            run=self.run,
            digest=self.config.digest(),
            settings=self.config.flatten(),
            roster=self.options.kit.roster,
            attempt=0,
            processes={},
            closed=False,
        )

    def run_session(self, session: ServerSession, perform: ServerPerformer) -> RunReport | None:
        """Run the training. If it is finished, only send the goodbye to parties that have not received it."""
        return None if self.is_finished else super().run_session(session, perform)

    def list_checkpoints(self) -> dict[int, str]:
        """Return the checkpoints of this run and their digests."""
        return {0: START} if self.state.starts_over else self.saver.store.digests()

    def plan(self, present: Sequence[str]) -> tuple[Attempt, Script[None]]:
        """Choose the latest round for which all roles have a checkpoint, and build the server for it."""
        self.saver.wait_until_durable()
        statements = self.admission.collect_statements(present)
        common = self._find_common_round({party: stated.rounds for party, stated in statements.items()})
        if self.state.starts_over:
            removed = self.saver.store.clear()
            if removed:
                self.options.log.info("starting over: removed %s.", ", ".join(map(str, removed)))
            self.state.write_pending()
        number = self.count_attempt()
        server, limits = self.build_server(statements, bytes.fromhex(self.run))
        telemetry = TelemetryState()
        if common:
            checkpoint = self.saver.store.load(common)
            server.restore(checkpoint.server)
            telemetry = checkpoint.telemetry
        self.telemetry.rewind(telemetry)
        self._server = server
        digests = {party: stated.rounds[common] for party, stated in statements.items()}
        return Attempt(number, common, digests, limits.check), server_script(server)

    def _find_common_round(self, stated: Mapping[str, Mapping[int, str]]) -> int:
        common = find_common_round([self.list_checkpoints(), *stated.values()])
        if common is None:
            roles = {"server": self.list_checkpoints(), **stated}
            listed = "; ".join(f"{role}: {', '.join(map(str, own)) or 'none'}" for role, own in roles.items())
            raise CheckpointError(
                f"no checkpoint is common to all roles ({listed}). Restore the folder that lost its checkpoints, or "
                "start over with --fresh everywhere."
            )
        return common

    def save(self, state: ServerState) -> None:
        """Start to write a checkpoint."""
        self.saver.save(state.progress.position, ServerCheckpoint(state, self.telemetry.state()))

    def wait_until_durable(self) -> None:
        """Wait until the last checkpoint is durable."""
        self.saver.wait_until_durable()

    def observe(self, event: Event) -> None:
        """Record an event of the script."""
        self.telemetry.observe(event)
        super().observe(event)
        if isinstance(event, Evaluated) and event.split == "validation":
            self._scores = event.metrics
        elif isinstance(event, RoundDone):
            self.options.emit(self._status())

    def finish(self, result: None, finished: Sequence[ResultPayload]) -> RunReport:
        """Write report.json, and record that the run is finished."""
        report = self._build_report([each.weights_sha256 for each in finished])
        write_named(self.options.out / "report.json", report.to_json().encode())
        self.state.update(closed=True)
        return report

    def _build_report(self, weights_sha256: Sequence[str]) -> RunReport:
        server = self._server
        assert server is not None
        _, overridden = override_settings(self.options.config)
        overridden |= resolve(self.config, server.sizes.num_nodes)[1]
        parties = [
            PartySummary(name, server.sizes.num_nodes, labels=server.identity.has_labels(index))
            for index, name in enumerate(server.roster)
        ]
        result = TrainingResult(
            config=server.config,
            losses=[server.progress.losses],
            weights_sha256=tuple(weights_sha256),
            privacy=PrivacySummary.of(server.config, masks=MaskSummary.of(server.config, SIGNED)),
            race=summarize_race(server, self.telemetry.race),
        )
        return build_run_report(self.telemetry, result, parties, overridden)

    def close(self, *, finished: bool) -> None:
        """Stop the thread that writes checkpoints. If the run is finished, remove its checkpoints."""
        self.saver.close()
        if finished:
            self.saver.store.clear()

    def view(self, session: ServerSession) -> View:
        """Return the current state of the server. Any thread may call it."""
        return View(
            status=self._status(),
            connected=session.list_connected(),
            refused=session.refused,
            traffic=self.telemetry.traffic.snapshot(),
            seconds=self.telemetry.seconds(),
            scores=self._scores,
            finished=self.state.value.closed,
        )

    def _status(self) -> Status:
        server, attempt = self._server, self.state.value.attempt
        if server is None:
            return Status.of(self.telemetry, 0, self.config.train.num_rounds, attempt, None)
        progress, loss = server.progress, next(iter(server.progress.losses[-1:]), None)
        return Status.of(self.telemetry, progress.round, progress.end(server.config.train), attempt, loss)
