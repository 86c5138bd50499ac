"""The server between machines: listen, gather the parties, run attempts until one succeeds. No torch here."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from glasu.errors import GlasuError, TrainingError
from glasu.network.control import describe_start
from glasu.network.handshake import Finished, read_payload
from glasu.network.options import Listening, ServeOptions, Serving
from glasu.network.prediction_server import PredictionServer, ServerPredictionReport
from glasu.network.roster import RestartAttempt
from glasu.network.server_role import ServerPerformer, ServerRole
from glasu.network.server_session import ServerSession
from glasu.network.status import View
from glasu.network.training_server import TrainingServer
from glasu.network.transport import Listener
from glasu.report import RunReport
from glasu.runtime.drive import drive

GOODBYE_SECONDS = 10.0  # for the parties to hear that the run has ended, and to hang up
Report = TypeVar("Report")


def serve(options: ServeOptions) -> RunReport | None:
    """Serve one training to its end and write report.json; return None if it was finished before."""
    return serve_as(TrainingServer(options))


def serve_as(role: TrainingServer, performer: type[ServerPerformer] = ServerPerformer) -> RunReport | None:
    """Serve one training as a role that may do something else than `TrainingServer` does.

    Args:
        role: the server's.
        performer: performs the requests of its script.
    """
    options, session = role.options, _open_session(role.options, role)
    options.emit(Serving(lambda: _view(role, session), lambda why: session.announce_failure(TrainingError(why), 0.0)))
    if not role.is_finished:
        return _serve_run(options, role, session, performer)
    options.log.info("%s: this run is finished, see report.json there; --fresh starts another one.", options.out)
    with _listen(options, role, session):
        session.dismiss(GOODBYE_SECONDS)
    role.close(finished=True)
    return None


def serve_prediction(options: ServeOptions) -> ServerPredictionReport:
    """Serve one prediction with the parties' trained models and write prediction.json."""
    return serve_prediction_as(PredictionServer(options))


def serve_prediction_as(role: PredictionServer) -> ServerPredictionReport:
    """Serve one prediction as a role that may do something else than `PredictionServer` does."""
    options, session = role.options, _open_session(role.options, role)
    options.emit(Serving(None, lambda why: session.announce_failure(TrainingError(why), 0.0)))
    return _serve_run(options, role, session)


def _open_session(options: ServeOptions, role: ServerRole[Any]) -> ServerSession:
    """Return the session of a role."""
    return ServerSession(
        options.kit.roster,
        role.admission,
        role.run,
        wait=options.wait,
        log=options.log,
        on_invalid_message=options.on_invalid_message,
    )


def _serve_run(
    options: ServeOptions,
    role: ServerRole[Report],
    session: ServerSession,
    performer: type[ServerPerformer] = ServerPerformer,
) -> Report:
    finished = False
    with _listen(options, role, session):
        try:
            report = _run_attempts(options, role, session, performer(session, role))
            session.dismiss(GOODBYE_SECONDS)
            finished = True
        except Exception as error:  # also a full disk or a bug: no party must wait for more
            session.announce_failure(error, GOODBYE_SECONDS)
            raise
        except KeyboardInterrupt:
            session.leave()
            raise
        finally:
            role.close(finished=finished)
        return report


@contextmanager
def _listen(options: ServeOptions, role: ServerRole[Any], session: ServerSession) -> Iterator[None]:
    """Accept connections of parties."""
    with Listener(session.host, options.kit, options.listen) as listener:
        if not role.is_finished:
            role.pin()  # after the address is bound: a bad --listen changes no folder
        listener.start()
        options.emit(Listening(listener.port, finished=role.is_finished))
        yield


def _run_attempts(
    options: ServeOptions, role: ServerRole[Report], session: ServerSession, perform: ServerPerformer
) -> Report:
    """Run attempts until one succeeds."""
    waiting = role.telemetry.watch.measure("waiting")
    while True:
        try:
            with waiting:
                session.gather()
            plan = role.plan()
            with waiting:
                session.begin_attempt(plan.attempt, plan.round, plan.digests, plan.limits.check)
            options.log.info("attempt %d: all parties are connected; %s.", plan.attempt, describe_start(plan.round))
            result = drive(plan.script, perform, role.telemetry.watch, "communication")
            with waiting:
                results = session.collect_results()
            return role.finish(result, [read_payload(Finished, each, "the result of a party") for each in results])
        except RestartAttempt:
            options.log.info("a process was restarted: all roles return to the last common checkpoint.")
        except GlasuError as error:
            if not session.set_aside(error):
                raise


def _view(role: TrainingServer, session: ServerSession) -> View:
    """Return the server at this moment; any thread may call it."""
    traffic, seconds = role.telemetry.traffic, role.telemetry.seconds()
    return View(
        status=role.status(),
        connected=session.connected(),
        refused=session.refused,
        messages=traffic.messages,
        exchanges=traffic.exchanges,
        bytes_by_phase=dict(traffic.by_phase),
        seconds_by_part=dict(seconds.parts),
        scores=role.scores,
        finished=role.state.value.closed,
    )
