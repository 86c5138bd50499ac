"""The race of `train.preset`: every candidate trains for some rounds, and their validation scores are compared.

A candidate is a set of settings. The parties first describe their data by a few numbers, and the server keeps the
candidates that fit (`glasu.data.presets`). If more than one candidate is left, they run one after the other from round
0. The preferred candidate runs last. It wins unless another candidate is better by more than one standard error. If it
wins, it continues. Any other winner starts again from round 0, because its weights were not kept. Either way, the run
ends with the weights that the winner's settings give without a race.

Some settings do not allow a race (`find_race_obstacle`). With masks, for example, the server sees no scores. Then the
preferred candidate is chosen without a race.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from glasu.config import list_candidates
from glasu.data.presets import (
    Situation,
    count_race_rounds,
    describe_situation,
    find_race_obstacle,
    list_chosen,
    order_candidates,
)
from glasu.errors import ProtocolError, TrainingError
from glasu.protocol.messages import Candidates, PartySituation
from glasu.protocol.receiving import receive_answer
from glasu.protocol.requests import Broadcast, CandidateStarted, Receive, Script, Send
from glasu.protocol.state import DIVERGED, Race
from glasu.wire.message_key import Phase

if TYPE_CHECKING:
    from glasu.config import TrainConfig
    from glasu.protocol.client import Client
    from glasu.protocol.server import Server

FIRST_LAYER, LAST_LAYER = 0, 1  # used as `layer` in the keys of the first and the last message of a race


def client_race(client: Client, train: Callable[[Client], Script[None]]) -> Script[None]:
    """Client column: describe the data, train with each candidate, and adopt the winner's settings.

    Args:
        client: the client.
        train: trains to the last round of the current candidate.
    """
    progress, num_candidates = client.progress, len(list_candidates(client.requested))
    if num_candidates == 1:
        return
    if progress.race is None:
        key = client.identity.key(Phase.CONTROL, 0, FIRST_LAYER)
        labels_nodes = client.has_labels and client.data.task.examples_are_nodes
        own = describe_situation(client.requested, client.data.party, labels_nodes=labels_nodes)
        yield Send(PartySituation(key, client.release.numbers("situation", own.to_numbers(), key)))
        answer = yield from receive_answer(client, Candidates, key)
        progress.race = _start_race(_read_positions(answer, num_candidates), client.release.ledger.count_releases())
    yield from _run_candidates(client, train)
    if progress.race.chosen is None:
        key = client.identity.key(Phase.CONTROL, progress.round, LAST_LAYER)
        answer = yield from receive_answer(client, Candidates, key)
        yield _decide(client, _read_winner(answer, progress.race), client.release.ledger.count_releases())


def server_race(server: Server, train: Callable[[Server], Script[None]]) -> Script[None]:
    """Server column: choose the candidates that race, serve the training of each, and announce the winner."""
    progress = server.progress
    if len(list_candidates(server.requested)) == 1:
        return
    if progress.race is None:
        key = server.identity.key(Phase.CONTROL, 0, FIRST_LAYER)
        stated = _read_situations(server, (yield Receive((PartySituation,), key)))
        order = order_candidates(server.requested, stated)
        yield Broadcast(Candidates(key, np.array(order, "<f8")))
        progress.race = _start_race(order)
    yield from _run_candidates(server, train)
    if progress.race.chosen is None:
        key = server.identity.key(Phase.CONTROL, progress.round, LAST_LAYER)
        progress.race = dataclasses.replace(progress.race, scores=(*progress.race.scores, _score(server)))
        winner = choose_winner(server, progress.race)
        yield Broadcast(Candidates(key, np.array([winner], "<f8")))
        yield _decide(server, winner)


def choose_winner(server: Server, race: Race) -> int:
    """Return the preferred candidate, unless another candidate is better by more than one standard error.

    The score of a candidate is the score of its best evaluation. Without validation nodes, scores are NaN, and the
    preferred candidate wins. Candidates that diverged are ignored.

    Raises:
        TrainingError: all candidates diverged.
    """
    scores = dict(zip(race.order, reversed(race.scores), strict=True))
    left = [each for each in race.order if scores[each] != DIVERGED]
    if not left:
        listed = ", ".join(list_chosen(list_candidates(server.requested), race.candidate))
        raise TrainingError(
            "training diverged with all candidates of train.preset. Lower train.learning_rate, check the features, or "
            f'set {listed} yourself, with train.preset = "none".'
        )
    preferred = left[0]
    challenger = max(left, key=lambda each: scores[each])
    error = server.task.selected_by.standard_error(scores[preferred], server.sizes.num_validation)
    return challenger if scores[challenger] > scores[preferred] + error else preferred


def _run_candidates(role: Any, train: Callable[[Any], Script[None]]) -> Script[None]:
    """Train with every candidate that has not run yet. The preferred candidate runs last.

    A resumed run continues with the candidate that was interrupted.
    """
    progress = role.progress
    while True:
        if progress.round == 0:
            role.adopt_candidate()
            yield _describe_candidate(role)
        if progress.race.chosen is not None:
            return
        yield from train(role)
        if progress.race.is_last:
            return
        score = _score(role)
        race = progress.race
        progress.race = dataclasses.replace(race, finished=race.finished + 1, scores=(*race.scores, score))
        progress.start_over(_find_last_number(role.config.train))


def _find_last_number(train: TrainConfig) -> int:
    """Return the largest round number that message keys of a candidate contain during the race.

    The largest number belongs to the evaluation after the last round or, after a warm start, to the evaluation of the
    ensemble (`glasu.protocol.scoring`).
    """
    return train.num_rounds + 2 if train.warm_start else count_race_rounds(train)


def _score(role: Client | Server) -> float:
    """Return the best validation score of the current candidate; NaN at a client, which does not know the score."""
    if role.progress.diverged:
        return DIVERGED
    best = role.progress.selection.best
    return math.nan if best is None else best


def _start_race(order: Sequence[int], releases: int = 0) -> Race:
    return Race(tuple(order), chosen=order[0] if len(order) == 1 else None, releases=releases)


def _decide(role: Client | Server, winner: int, releases: int = 0) -> CandidateStarted:
    """End the race. The winner starts again from round 0, unless it is the candidate that ran last."""
    progress = role.progress
    race = progress.race
    assert race is not None
    progress.race = dataclasses.replace(race, chosen=winner, releases=releases)
    if winner != race.candidate:
        progress.start_over(_find_last_number(role.config.train))
        role.adopt_candidate()
    return _describe_candidate(role)


def _describe_candidate(role: Client | Server) -> CandidateStarted:
    progress = role.progress
    race = progress.race
    assert race is not None
    scores = dict(zip(reversed(race.order), race.scores, strict=False))
    own = scores.pop(race.candidate, None) if len(scores) == len(race.order) else None
    return CandidateStarted(
        list_chosen(list_candidates(role.requested), race.candidate),
        progress.end(role.config.train),
        chosen=race.chosen is not None,
        restarts=progress.round == 0,
        score=own,
        other_scores=() if own is None else tuple(scores.values()),
        obstacle=find_race_obstacle(role.requested) if len(race.order) == 1 else None,
        # `releases` is 0 only at the server, because every client has released its situation.
        releases=None if race.chosen is None else race.releases or None,
    )


def _read_positions(message: Candidates, count: int) -> list[int]:
    """Read positions in the list of candidates; refuse other numbers."""
    values = message.values.tolist()
    if not values or len(set(values)) < len(values) or not {*values} <= {*map(float, range(count))}:
        raise ProtocolError(f"{message.key}: expected positions of candidates in 0..{count - 1}, got {values}.")
    return [int(value) for value in values]


def _read_winner(message: Candidates, race: Race) -> int:
    """Read the position of the winner; refuse a candidate that was not in the race."""
    values = message.values.tolist()
    if len(values) != 1 or values[0] not in race.order:
        raise ProtocolError(f"{message.key}: expected one candidate of {list(race.order)}, got {values}.")
    return int(values[0])


def _read_situations(server: Server, found: Sequence[PartySituation]) -> list[Situation]:
    stated = []
    for message in found:
        situation = Situation.from_numbers(message.values.tolist())
        if situation is None:
            server.refuse(message, f"expected a description of its data, got the numbers {message.values.tolist()}.")
        stated.append(situation)
    return stated
