"""A party's part of a training run: the handshake, its checkpoints, its client, and its report."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from glasu.config import LEFT_OPEN, RunConfig, describe_profile, list_candidates, list_open_keys, resolve
from glasu.data.methods import keeps_scores
from glasu.data.party import PartyData
from glasu.errors import ConfigError, ProtocolError, TransportError
from glasu.model.split import digest_weights
from glasu.network.compatibility import (
    compare_with_agreed,
    format_differences,
    read_offered_config,
    refuse_settings,
)
from glasu.network.control import ProposedAttempt, describe_start
from glasu.network.facts import Facts, collect_label_facts, collect_party_facts
from glasu.network.fencing import describe_process, note_welcome
from glasu.network.handshake import Code, HelloPayload, Payload, RefusalError, ResultPayload, WelcomePayload
from glasu.network.join import ClientWork
from glasu.network.log_lines import MAX_REASON, make_printable
from glasu.network.options import JoinOptions, Status
from glasu.network.party_checkpoints import PartyCheckpoint, PartyCheckpoints
from glasu.network.party_setup import check_place, resolve_for_party
from glasu.network.purposes import TRAINING
from glasu.network.run_folder import (
    CHECKPOINTS,
    NEW_RUN,
    FinishedPart,
    check_same_secret,
    continues_part,
    read_report,
)
from glasu.network.session_ledger import LedgerScope
from glasu.network.state_file import STARTS, write_named
from glasu.pki.key_signing import find_kit_error
from glasu.pki.kit import Kit
from glasu.pki.secret_file import make_secret
from glasu.protocol.key_agreement import agrees_on_classifier
from glasu.protocol.requests import CandidateStarted, Collapsed, Evaluated, Event, RoundDone, Script
from glasu.protocol.state import ClientState
from glasu.protocol.training import client_script
from glasu.records import to_plain
from glasu.report import GIVEN, SIGNED, SIGNED_TRIAL, SIGNED_UNPINNED, MaskSummary, PreparedColumns, PrivacySummary
from glasu.runtime.client_ledger import check_training
from glasu.runtime.report_builder import TrainingResult, build_party_report, summarize_race
from glasu.runtime.telemetry import TelemetryState
from glasu.runtime.trained_model import TrainedModel
from glasu.wire.message_key import ATTEMPTS

DEFAULTS = RunConfig().flatten()


class TrainingParty(ClientWork[FinishedPart]):
    """One process of a party in a training run. The first attempt assigns the party's folder to the run."""

    purpose = TRAINING

    def __init__(self, options: JoinOptions, party: PartyData) -> None:
        """Read the folder; nothing is written.

        Raises:
            ConfigError: the folder belongs to another run, or the run began with other data or another secret.
        """
        super().__init__(options, party)
        self._data, self._secret = party.data_digest(), options.kit.secret
        if options.fresh:
            self.state.start_over(keep=STARTS)  # the files of the earlier run stay until the new run begins
        elif continues_part(options.out, self.state.value, self._data, options.run):
            check_same_secret(options.kit, self.state.value)
        self._checkpoints = PartyCheckpoints(options.out / CHECKPOINTS, self.state, options.log)
        self._offered: WelcomePayload | None = None
        self._first: ClientState | None = None  # the state before the first round

    def start(self) -> None:
        """Count this start of the command, and make the party's secret if the kit has none yet."""
        super().start()
        if self._secret is None:
            self._secret = make_secret(self.options.kit.folder)

    # --- the handshake ----------------------------------------------------------------------

    def facts(self) -> Facts:
        """Return the facts of this party for the settings of the run."""
        party = self.client.party
        parties = self.client.identity.num_clients
        return collect_party_facts(party, self.purpose, self.id_keys, parties=parties, **collect_label_facts(party))

    def scope(self) -> LedgerScope:
        """Return the scope of the ledger entries. The run and the training are the same here."""
        run = self.client.identity.run.hex()
        return LedgerScope(run, run, self.purpose.name, self.client.requested.digest())

    def list_checkpoints(self) -> dict[int, str]:
        """Return the intact checkpoints of this run and their digests."""
        return self._checkpoints.list_rounds()

    def hello(self) -> Payload:
        """Return the hello of this process."""
        held = self.state.value
        return to_plain(
            HelloPayload(
                facts=collect_party_facts(self.party, self.purpose, self.id_keys),
                process=describe_process(held),
                run=held.run,
                only=self.options.run,
                fresh=self.state.starts_over,
                finished=held.finished,
                rounds=self.list_checkpoints(),
            )
        )

    def accept(self, offered: WelcomePayload) -> None:
        """Check the run that the server offers, and build the client for it."""
        try:
            run = bytes.fromhex(offered.run)
        except ValueError:
            why = "the server's welcome has a run id that is not hexadecimal."
            raise RefusalError(Code.INVALID_PAYLOAD, why) from None
        note_welcome(self.state)
        if self._offered is None:
            self.build_client(*self._resolve(offered), offered, secret=self._secret)
            check_training(self.client, self.options.policy)
            self._offered, self._first = offered, self.client.state()
        elif dataclasses.replace(offered, run=self._offered.run) != self._offered:
            raise TransportError(
                "the server has begun another run, with other settings, since this party joined; start the same "
                "command again."
            )
        self.client.identity.run = run  # a restarted server has a new run id if the run had not begun

    def _resolve(self, offered: WelcomePayload) -> tuple[RunConfig, PartyData]:
        """Check the offered settings, and resolve them for this party."""
        options, name = self.options, self.party.name
        config = read_offered_config(offered.config)
        check_place(name, offered, config)
        settings = {key: value for key, value in config.flatten().items() if key != LEFT_OPEN}
        shown = {key: value for key, value in settings.items() if value != DEFAULTS.get(key)}
        listed = ", ".join(f"{key} = {value!r}" for key, value in shown.items()) or "all defaults"
        options.log.info("the run: %s.", make_printable(listed, MAX_REASON))
        if profile := describe_profile(config):  # its values are numbers and names of choices, so the line is short
            options.log.info("%s.", profile)
        if left_open := list_open_keys(list_candidates(config)):
            options.log.info('train.preset = "%s" will decide %s.', config.train.preset, ", ".join(left_open))
        if options.expect is not None:
            refuse_settings(
                compare_with_agreed(name, options.expect, config),
                "the server's settings differ from --expect: {}; agree on one run file with the server's operator.",
            )
        config, party = resolve_for_party(config, self.party, options.max_memory)
        if self.state.value.digest not in (None, config.digest()):
            raise RefusalError(
                Code.DIFFERENT_SETTINGS,
                "the server's settings have changed since this run began. Restore them at the server, or start over "
                "with --fresh at the server and at every party.",
            )
        return config, party

    # --- checkpoints ------------------------------------------------------------------------

    def begin(self, attempt: ProposedAttempt) -> Script[dict[str, float]]:
        """Restore the checkpoint of an attempt and return the script that continues from it.

        A party that trains alone, or has not finished its warm start, continues from its own last checkpoint. The other
        roles need not know this checkpoint, because the party has not sent any message yet.
        """
        assert self._first is not None
        client, state, telemetry = self.client, self._first, TelemetryState()
        if attempt.present != client.identity.names:
            raise ProtocolError("the server omitted a party, but a training run needs all parties.")
        if not self._checkpoints.is_open:
            self._open_run()
        self.wait_until_durable()
        self.state.update(finished=None)  # results of an earlier attempt are computed again
        if attempt.round:
            checkpoint: PartyCheckpoint | None = self._checkpoints.load_round(attempt.round, attempt.digest)
        else:
            checkpoint = self._checkpoints.load_own()
        if checkpoint is not None:
            state, telemetry = checkpoint.client, checkpoint.telemetry
            if self.telemetry.traffic.messages == 0:  # this process has just started
                self.telemetry.restore_cost(telemetry.cost)
        self.telemetry.rewind(telemetry)
        client.restore(dataclasses.replace(state, incarnation=self.state.value.incarnation))
        client.identity.attempt = attempt.number % ATTEMPTS
        progress, start = client.progress, describe_start(client.progress)
        if progress.warm_steps and not progress.round:
            start = f"continuing after warm step {progress.warm_steps} of {client.config.train.warm_start}"
        self.options.log.info("attempt %d: all parties are connected; %s.", attempt.number, start)
        return client_script(client)

    def _open_run(self) -> None:
        """Assign the folder to the run. With --fresh, remove earlier checkpoints."""
        if self.state.starts_over and (removed := self._checkpoints.clear()):
            self.options.log.info("starting over: removed %s.", ", ".join(map(str, removed)))
        assert self._secret is not None  # see `start`
        self.state.update(
            run=self.client.identity.run.hex(),
            digest=self.client.requested.digest(),
            data=self._data,
            secret=self._secret.commitment(),
        )
        self.state.write_pending()
        note_welcome(self.state, begun=True)
        self._checkpoints.open(self.client)

    def save(self, state: ClientState) -> None:
        """Start to write a checkpoint."""
        self._checkpoints.save(PartyCheckpoint(state, self.telemetry.state()))

    def wait_until_durable(self) -> None:
        """Wait until the last checkpoint is durable."""
        self._checkpoints.wait_until_durable()

    # --- events and results -----------------------------------------------------------------

    def observe(self, event: Event) -> None:
        """Pass an event to the observer. After a round, also pass the status."""
        super().observe(event)
        if isinstance(event, Evaluated) and keeps_scores(self.client.requested):  # the server does not report these
            self.telemetry.observe(event)
        if isinstance(event, CandidateStarted):
            self.options.log.info("%s", self.telemetry.record_candidate(event))
        elif isinstance(event, Collapsed):
            self.options.log.warning("%s.", event)
        elif isinstance(event, RoundDone):
            client = self.client
            num_rounds, attempt = client.progress.end(client.config.train), client.identity.attempt
            self.options.emit(Status.of(self.telemetry, client.progress.round, num_rounds, attempt, event.loss))

    def finish(self, result: dict[str, float]) -> ResultPayload:
        """Write the selected weights and report.json."""
        client, digest = self.client, digest_weights(self.client.progress.best_weights)
        TrainedModel.of([client]).save(self.options.out / "model")
        prepared = PreparedColumns.of(client.data.preparation, client.party.feature_names)
        masks = MaskSummary.of(client.config, SIGNED, {client.name: client.release.sums.grids.clamped})
        warm_start_keys = (
            _describe_signatures(self.options.kit, client.identity.names)
            if agrees_on_classifier(client.config)
            else None
        )
        race = client.progress.race
        trained = TrainingResult(
            config=client.config,
            losses=[client.progress.losses],
            weights_sha256=(digest,),
            privacy=PrivacySummary.of(
                client.config, {client.name: client.release.ledger}, GIVEN, masks, warm_start_keys
            ),
            race=summarize_race(client, self.telemetry.race, None if race is None else {client.name: race.releases}),
        )
        report = build_party_report(self.telemetry, trained, client.identity, result, prepared)
        write_named(self.options.out / "report.json", report.to_json().encode())
        # The weights, and so the digest, depend on data without noise. If the run adds noise, only noisy rows may leave
        # the party.
        finished = ResultPayload(weights_sha256="" if client.requested.privacy.adds_noise else digest)
        self.state.update(finished=finished)
        return finished

    def close(self, *, finished: bool) -> None:
        """Stop the thread that writes checkpoints, and close the ledger. If the run is finished, remove checkpoints."""
        self._checkpoints.close()
        if finished:
            self.state.update(closed=True)
            self._checkpoints.clear()
        super().close(finished=finished)

    def result(self) -> FinishedPart | None:
        """Return the content of report.json, once it is written by this process or an earlier one."""
        return None if self.state.value.finished is None else read_report(FinishedPart, self.options.out)

    def find_earlier_result(self) -> FinishedPart | None:
        """Return the content of report.json, if an earlier process received the server's goodbye."""
        if not self.state.value.closed:
            return None
        out, report = self.options.out, read_report(FinishedPart, self.options.out)
        if self.options.expect is not None:
            config = RunConfig.from_dict(report.config, "the settings of the finished run")
            expect = self.options.expect.replace(data={"num_clients": config.data.num_clients})
            candidates = list_candidates(resolve(expect, self.party.num_nodes)[0])  # the run used one of them
            differences = min((compare_with_agreed(self.party.name, each, config) for each in candidates), key=len)
            if differences:
                raise ConfigError(
                    f"{out}: holds a finished run whose settings differ from --expect: "
                    f"{format_differences(differences)}; for another training give another --out."
                )
        self.options.log.info("%s: this run is finished, see report.json there; %s.", out, NEW_RUN)
        return report


def _describe_signatures(kit: Kit, names: Sequence[str]) -> str:
    """Return how the parties' keys are signed, in the words of the report."""
    if kit.trial:
        return SIGNED_TRIAL
    return SIGNED_UNPINNED if find_kit_error(kit, names) else SIGNED
