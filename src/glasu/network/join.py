"""A party between machines: connect, agree on the run, and take part in attempts until every party is finished."""

from __future__ import annotations

from typing import Any

from glasu.config import RunConfig, resolve
from glasu.errors import ConfigError, DataError, GlasuError, TransportError
from glasu.network.client_session import ClientSession, NewAttempt
from glasu.network.compatibility import compare_with_agreed, in_one_line
from glasu.network.connection import Dialing
from glasu.network.control import ProposedAttempt
from glasu.network.fencing import count_start
from glasu.network.handshake import Payload
from glasu.network.options import JoinOptions
from glasu.network.party_role import PartyPerformer, PartyRole
from glasu.network.prediction_party import Predicted, PredictionParty, Query
from glasu.network.training_party import TrainingParty
from glasu.records import parse_json, to_plain
from glasu.runtime.drive import drive
from glasu.runtime.inprocess import one_thread_each


def join(options: JoinOptions) -> dict[str, Any]:
    """Take part in one training to its end, write report.json and model/, and return the content of report.json."""
    _check_name(options)
    return join_as(TrainingParty(options))


def join_as(
    role: TrainingParty, performer: type[PartyPerformer] = PartyPerformer, dialing: Dialing | None = None
) -> dict[str, Any]:
    """Take part in one training as a role that may state, compute or send something else than `TrainingParty` does.

    Args:
        role: the party's.
        performer: performs the requests of its script.
        dialing: how to connect; None: as the role's options say.
    """
    options = role.options
    with one_thread_each():
        if role.run.is_closed:
            report = read_report(options)
            _check_finished_settings(options, report)
            options.log.info("%s: this run is finished; --fresh takes part in another one.", options.out)
            return report
        count_start(role.run.state)
        finished = False
        try:
            _take_part(options, role, performer, dialing)
            finished = True
        except TransportError as error:
            if not role.run.is_finished:
                raise
            options.log.info("%s The results of this party are complete.", error)
        finally:
            role.close(finished=finished)
    return read_report(options)


def join_prediction(options: JoinOptions, query: Query) -> Predicted:
    """Take part in one prediction; write prediction.json and, if this party receives any, predictions.<format>."""
    _check_name(options)
    return join_prediction_as(PredictionParty(options, query))


def join_prediction_as(role: PredictionParty, performer: type[PartyPerformer] = PartyPerformer) -> Predicted:
    """Take part in one prediction as a role that may send something else than `PredictionParty` does."""
    options = role.options
    with one_thread_each():
        count_start(role.state)
        try:
            _take_part(options, role, performer)
        except TransportError as error:
            if role.predicted is None:
                raise
            options.log.info("%s The results of this party are complete.", error)
        if role.predicted is None:
            raise ConfigError("the server ended the prediction before this party took part in it; start it again.")
        return role.predicted


def _check_name(options: JoinOptions) -> None:
    if options.party.name != options.kit.name:
        raise ConfigError(
            f"the data belongs to party {options.party.name!r} and the kit to party {options.kit.name!r}; use the kit "
            f"of {options.party.name!r}."
        )


class _Declining:
    """A role's handshake that remembers the error with which the role declined the server's offer."""

    def __init__(self, role: PartyRole) -> None:
        self._role = role
        self.hello, self.statement = role.hello, role.statement
        self.declined: GlasuError | None = None

    def welcome(self, welcome: Payload) -> None:
        try:
            self._role.welcome(welcome)
        except GlasuError as error:
            self.declined = error
            raise


def _take_part(
    options: JoinOptions,
    role: PartyRole,
    performer: type[PartyPerformer] = PartyPerformer,
    dialing: Dialing | None = None,
) -> None:
    """Run attempts until the server says that every party is finished."""
    handshake = _Declining(role)
    dialing = dialing or Dialing(options.kit, options.server, options.wait, options.log)
    session = ClientSession(dialing, handshake)
    try:
        session.open()
        session.prepare(role.limits.check)
        attempt = session.await_attempt()
        while attempt is not None:  # None: every party is finished
            attempt = _run_attempt(session, role, attempt, performer(session, role))
    except Exception as error:
        if handshake.declined is not None:
            session.decline(handshake.declined)
        else:
            session.fail(error)
        raise
    finally:
        session.close()


def _run_attempt(
    session: ClientSession, role: PartyRole, attempt: ProposedAttempt, perform: PartyPerformer
) -> ProposedAttempt | None:
    """Run one attempt; return the next one, or None when every party is finished."""
    try:
        script = role.begin(attempt)
        session.confirm(attempt)
        result = drive(script, perform, role.watch)
        perform.count_exchange()
        session.finish(attempt, to_plain(role.finish(result)))
        session.await_dismissal()
    except NewAttempt as proposed:
        return proposed.attempt
    return None


def read_report(options: JoinOptions) -> dict[str, Any]:
    """Read report.json of a finished party."""
    path = options.out / "report.json"
    try:
        report = parse_json(path.read_bytes(), str(path))
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}); restore it.") from None
    if not isinstance(report, dict):
        raise DataError(f"{path}: is not a report; restore it.")
    return report


def _check_finished_settings(options: JoinOptions, report: dict[str, Any]) -> None:
    """Refuse to call a run finished that had other settings than those of --expect."""
    if options.expect is None:
        return
    config = RunConfig.from_dict(report.get("config", {}), "the settings of the finished run")
    expect = options.expect.replace(data={"num_clients": config.data.num_clients})
    differences = compare_with_agreed(config, resolve(expect, options.party.num_nodes)[0])
    if differences:
        raise ConfigError(
            f"{options.out}: holds a finished run with other settings than those of --expect: "
            f"{in_one_line(differences)}; for another training give another --out."
        )
