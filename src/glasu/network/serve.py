"""The server's side of a session over the network: one loop for training, prediction, alignment and the dry run.

A `ServerWork` admits parties and computes. `serve` listens, gathers the parties and runs attempts until one succeeds.
Torch is not loaded here.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Generic, TypeVar

from glasu.config import RunConfig, resolve
from glasu.errors import GlasuError, TrainingError
from glasu.network.admission import Admission
from glasu.network.admission_policy import AdmissionPolicy, Refuse, ServedRun
from glasu.network.control import describe_start
from glasu.network.facts import Facts
from glasu.network.fencing import Fence
from glasu.network.handshake import GoodbyePayload, Payload, ResultPayload, StatementPayload
from glasu.network.options import Listening, ServeOptions, Serving, View
from glasu.network.purposes import Purpose
from glasu.network.recorded_heads import RecordedHeads
from glasu.network.roster import Attempt, RestartAttempt
from glasu.network.server_session import ServerSession
from glasu.network.signatures import SignedHead
from glasu.network.state_file import ServingRecord, StateFile
from glasu.network.transport import Listener
from glasu.protocol.limits import Limits
from glasu.protocol.requests import Broadcast, Event, Receive, Save, Scatter, Script
from glasu.protocol.server import Server, Sizes
from glasu.protocol.state import Progress
from glasu.records import to_plain
from glasu.runtime.checkpointing import START
from glasu.runtime.drive import drive
from glasu.runtime.telemetry import SERVER_PARTS, Telemetry

ReportT = TypeVar("ReportT")


class ServerWork(ABC, Generic[ReportT]):
    """The work of a server in a session. The default methods save nothing."""

    goodbye_seconds = 10.0  # time for the parties to receive the end of the run and to disconnect

    def __init__(self, options: ServeOptions, served: ServedRun, policy: AdmissionPolicy) -> None:
        """Prepare for the parties of the roster.

        Args:
            options: the options of the command.
            served: the run that the server offers to the parties.
            policy: decides what the server does with a process that does not fit the run.
        """
        self.options, self.config, self.run = options, served.config, served.run
        self.telemetry = Telemetry(options.clock, parts=SERVER_PARTS)
        self.admission = Admission(served, policy)

    @property
    def is_finished(self) -> bool:
        """Whether an earlier process has finished this run."""
        return False

    def list_checkpoints(self) -> dict[int, str]:
        """Return the server's checkpoints and their digests."""
        return {0: START}

    def begin(self) -> None:
        """Begin the run in the folder. Called after the address is bound, before parties can connect."""

    @abstractmethod
    def run_session(self, session: ServerSession, perform: ServerPerformer) -> ReportT:
        """Run the session with the parties, and return the report."""

    def save(self, state: Any) -> None:
        """Start to write a checkpoint. Work whose script yields `Save` implements this."""
        raise NotImplementedError

    def wait_until_durable(self) -> None:
        """Wait until the last saved state is durable."""

    def observe(self, event: Event) -> None:
        """Pass an event of the script to the observer."""
        self.options.emit(event)

    @abstractmethod
    def build_goodbye(self, report: ReportT) -> Payload:
        """Return the payload of the goodbye to every party."""

    def close(self, *, finished: bool) -> None:
        """Stop threads and close files. `finished` is True if every party has its results."""

    def view(self, session: ServerSession) -> View | None:
        """Return the current state of the server, for monitoring. Any thread may call it."""
        return None


class ServerScriptWork(ServerWork[ReportT]):
    """Work that runs a script together with the parties: training, prediction, alignment.

    It runs the script in attempts, refuses parties that do not fit the run, and records the admitted processes and the
    heads of the parties' ledgers.
    """

    purpose: ClassVar[Purpose]

    def __init__(
        self,
        options: ServeOptions,
        facts: Facts,
        config: RunConfig,
        run: str,
        state: StateFile[ServingRecord],
        scope: str = "",
    ) -> None:
        """Prepare for the parties of the roster.

        Args:
            options: the options of the command.
            facts: the facts of the server.
            config: the settings that the parties receive.
            run: the id of the run.
            state: records the admitted processes and the ledgers.
            scope: the id of the training that the ledger heads belong to; empty in an alignment.
        """
        self.state = state
        served = ServedRun(self.purpose, facts, config, options.kit.roster, run, self.list_checkpoints)
        self.recorded_heads = RecordedHeads(state, scope)
        super().__init__(options, served, Refuse(served, Fence(state), self.recorded_heads))
        self.ledgers: Mapping[str, SignedHead] = {}  # the heads of the parties that have finished

    @property
    def progress(self) -> Progress | None:
        """The progress at the start of the planned attempt; None if the purpose has no rounds."""
        return None

    def run_session(self, session: ServerSession, perform: ServerPerformer) -> ReportT:
        """Run attempts until one succeeds."""
        log, watch = self.options.log, self.telemetry.watch
        while True:
            try:
                with watch.measure("waiting"):
                    present = session.gather()
                attempt, script = self.plan(present)
                attempt = self.add_ledgers(attempt)
                with watch.measure("waiting"):
                    session.begin_attempt(attempt)
                missing = ", ".join(name for name in self.options.kit.roster if name not in attempt.present)
                who = f"all parties except {missing}" if missing else "all parties"
                log.info("attempt %d: %s are connected; %s.", attempt.number, who, describe_start(self.progress))
                result = drive(script, perform, watch, "communication")
                with watch.measure("waiting"):
                    results = session.collect_results()
                self.note_results(results)
                return self.finish(result, list(results.values()))
            except RestartAttempt:
                log.info("the parties changed: all roles return to the last common checkpoint.")
            except GlasuError as error:
                if not session.drop_sender(error):
                    raise

    @abstractmethod
    def plan(self, present: Sequence[str]) -> tuple[Attempt, Script[Any]]:
        """Return the next attempt and its script. The present parties have stated their facts and checkpoints."""

    @abstractmethod
    def finish(self, result: Any, finished: Sequence[ResultPayload]) -> ReportT:
        """Write the report, from the script's result and the results of the parties."""

    def begin(self) -> None:
        """Begin a new run in the folder. Processes that were admitted to an earlier run are forgotten.

        Training, which later processes can resume, overrides this.
        """
        self.state.update(run=self.run, processes={}, attempt=0)
        log, parties = self.options.log, ", ".join(self.options.kit.roster)
        log.info("%s: this server and all of %s must stay online until it is done.", self.purpose.name, parties)

    def count_attempt(self) -> int:
        """Count an attempt durably, and return its number."""
        self.state.update(attempt=self.state.value.attempt + 1)
        return self.state.value.attempt

    def add_ledgers(self, attempt: Attempt) -> Attempt:
        """Store the heads of the parties' ledgers durably, and return the attempt with these heads."""
        statements = self.admission.collect_statements(attempt.present)
        heads = {party: stated.ledger for party, stated in statements.items() if stated.ledger is not None}
        self._keep_heads(heads)
        return dataclasses.replace(attempt, ledgers=heads)

    def note_results(self, results: Mapping[str, ResultPayload]) -> None:
        """Store the last heads of the parties' ledgers. The goodbye forwards them to all parties."""
        self.ledgers = {party: result.ledger for party, result in results.items() if result.ledger is not None}
        self._keep_heads(self.ledgers)

    def _keep_heads(self, heads: Mapping[str, SignedHead]) -> None:
        self.recorded_heads.keep({party: signed.head for party, signed in heads.items()})

    def build_goodbye(self, report: ReportT) -> Payload:
        """Return the payload of the goodbye to every party: the last heads of all ledgers."""
        return to_plain(GoodbyePayload(ledgers=self.ledgers))

    def build_server(self, statements: Mapping[str, StatementPayload], run: bytes) -> tuple[Server, Limits]:
        """Build the server of an attempt from the parties' statements; return it and the limits of message sizes."""
        facts, roster = [stated.facts for stated in statements.values()], tuple(statements)

        def find_fact(name: str) -> int:
            return next((getattr(own, name) for own in facts if getattr(own, name) is not None), 0)

        num_nodes, validation = find_fact("nodes"), find_fact("validation_nodes")
        config, _ = resolve(self.config, num_nodes)
        subset = config.train.evaluate_nodes
        sizes = Sizes(num_nodes, min(subset, validation) if subset else validation, find_fact("test_nodes"))
        limits = Limits.of_run(config, num_nodes, find_fact("classes"), len(roster))
        return Server(config, roster, sizes, run), limits


class ServerPerformer:
    """Performs the requests of a server's script over a session."""

    def __init__(self, session: ServerSession, work: ServerWork[Any]) -> None:
        self.session, self.work = session, work

    def __call__(self, request: Any) -> Any:
        """Perform one request and return its result."""
        work, telemetry = self.work, self.work.telemetry
        match request:
            case Receive():
                with telemetry.watch.measure("waiting"):
                    messages = self.session.receive(request)
                for message in messages:
                    telemetry.traffic.count_to_server(message)
                return messages
            case Broadcast(message):
                work.wait_until_durable()  # a checkpoint must be durable before the next message is sent
                telemetry.traffic.count_to_clients(message, self.session.num_present)
                telemetry.traffic.exchange(request)
                with telemetry.watch.measure("communication"):
                    self.session.broadcast(message)
            case Scatter(messages):
                work.wait_until_durable()
                for message in messages:
                    telemetry.traffic.count_to_clients(message)
                telemetry.traffic.exchange(request)
                with telemetry.watch.measure("communication"):
                    self.session.scatter(messages)
            case Save(take_state):
                work.save(take_state())
            case _:
                work.observe(request)
        return None


def serve(work: ServerWork[ReportT], performer: type[ServerPerformer] = ServerPerformer) -> ReportT:
    """Serve one session to its end and return its report.

    Args:
        work: training, prediction, alignment or dry run.
        performer: performs the requests of its script.
    """
    options = work.options
    session = ServerSession(
        options.kit.roster,
        work.admission,
        work.run,
        wait=options.wait,
        log=options.log,
        on_invalid_message=options.on_invalid_message,
    )
    options.emit(Serving(lambda: work.view(session), lambda why: session.announce_failure(TrainingError(why), 0.0)))
    finished = False
    with Listener(session.host, options.kit, options.listen) as listener:
        work.begin()  # after the address is bound, so that a bad --listen changes no folder
        listener.start()
        parties = f"{', '.join(options.kit.roster)} to connect within {options.wait:.0f} s"
        whom = "parties that still need the result of the finished run" if work.is_finished else parties
        options.log.info("listening on %s:%d, waiting for %s", options.listen.rpartition(":")[0], listener.port, whom)
        options.emit(Listening(listener.port))
        try:
            report = work.run_session(session, performer(session, work))
            session.close_run(work.goodbye_seconds, work.build_goodbye(report))
            finished = True
        except Exception as error:  # every exception, even a full disk or a bug: the parties must not wait forever
            session.announce_failure(error, work.goodbye_seconds)
            raise
        except KeyboardInterrupt:
            session.leave()
            raise
        finally:
            work.close(finished=finished)
        return report
