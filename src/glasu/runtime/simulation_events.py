"""Pass the events of a simulation to its telemetry and its observer.

All roles report their events, but most events of different roles describe the same round or evaluation. So a table
names the roles whose events are recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from glasu.data.methods import evaluates_once, keeps_scores, trains_alone
from glasu.protocol.client import Client
from glasu.protocol.requests import CandidateStarted, Collapsed, Evaluated, Evaluating, Event, RoundDone, WarmStepDone
from glasu.runtime.telemetry import Telemetry

Observer = Callable[[Event], None]
PROGRESS_EVENTS = (Evaluating, WarmStepDone)  # events that the observer gets from every role


class EventRouter:
    """Passes events to the telemetry and the observer. A role is a party's name, or None for the server."""

    def __init__(
        self, clients: Sequence[Client], telemetry: Telemetry, observer: Observer | None, *, has_server: bool
    ) -> None:
        config = clients[0].requested
        everyone = {None, *(client.name for client in clients)}
        self.clients, self.telemetry, self.observer = clients, telemetry, observer
        self.alone = trains_alone(config)
        self.reporter = find_reporter(clients)
        self.recorded_roles = {self.reporter} if has_server else everyone
        self.roles_of_event: dict[type[Event], set[str | None]] = {  # other events: `recorded_roles`
            CandidateStarted: {None},  # while the server reports this event, all clients wait
            Collapsed: everyone,
            Evaluated: everyone if evaluates_once(config) else self.recorded_roles,  # each party has its own scores
        }

    def observe(self, role: str | None, event: Event) -> None:
        """Record an event if the telemetry needs it from this role, and pass it to the observer."""
        is_recorded = role in self.roles_of_event.get(type(event), self.recorded_roles)
        if is_recorded:
            if isinstance(event, CandidateStarted) and event.chosen:
                event = replace(event, releases=sum(each.release.ledger.count_releases() for each in self.clients))
            self.telemetry.observe(event)
        if self.observer is not None and (is_recorded or self.alone or isinstance(event, PROGRESS_EVENTS)):
            self.observer(self._complete(event))

    def _complete(self, event: Event) -> Event:
        """Return the event as the observer gets it: with the traffic of all roles so far."""
        if isinstance(event, RoundDone) and self.reporter is not None and not self.alone:
            event = replace(event, party=None)  # this client reports the round of all parties
        if isinstance(event, RoundDone | Evaluated):
            event = replace(event, bytes=self.telemetry.traffic.total_bytes)
        return event


def find_reporter(clients: Sequence[Client]) -> str | None:
    """Return the name of the role whose losses and metrics the report shows; None is the server.

    If the parties keep their scores, the server has no losses and metrics. Then the first client with labels reports.
    """
    if not keeps_scores(clients[0].requested):
        return None
    return next(client.name for client in clients if client.has_labels)
