"""A whole training run, client and server columns: keys, race, warm start, the rounds of Algorithm 1, and the test.

`rounds.py` contains the rounds. A run with `train.release = "once"` consists of the stages in `once.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from glasu.data.methods import evaluates_once, find_method
from glasu.protocol.combination import client_combination, server_combination
from glasu.protocol.evaluation import (
    client_subsets,
    client_test,
    server_subsets,
    server_test,
)
from glasu.protocol.final_test import client_final_test, server_final_test
from glasu.protocol.key_agreement import client_key_agreement, server_key_agreement
from glasu.protocol.masked import client_comparison, server_comparison
from glasu.protocol.once import client_aggregate, client_lower_stage, server_aggregate
from glasu.protocol.race import client_race, server_race
from glasu.protocol.requests import Interleave, Save, Script, Timed
from glasu.protocol.rounds import client_rounds, server_rounds
from glasu.protocol.sampling import (
    client_sampling,
    client_training_examples,
    divide_into_windows,
    draw_batches,
    server_sampling,
    server_training_examples,
)
from glasu.protocol.warm_start import client_warm_start, draw_common_classifier, server_warm_start

if TYPE_CHECKING:
    from glasu.protocol.client import Client
    from glasu.protocol.server import Server

Agreement = TypeVar("Agreement")  # node sets for some successive rounds: samples at a client, sizes at the server


def client_script(client: Client) -> Script[dict[str, float]]:
    """Client column: train to the last round, then test the selected weights; return the test metrics.

    A race may come first. It chooses the settings that the preset leaves open.
    """
    if client.stages is not None:
        yield from client_lower_stage(client, client_training)
        yield from client_key_agreement(client)
        yield from client_aggregate(client)
    else:
        if not client.is_alone:  # parties that train alone agree on keys after they have trained
            yield from client_key_agreement(client)
            draw_common_classifier(client)
        yield from client_race(client, client_training)
    yield from client_training(client)
    return (yield from client_result(client))


def client_training(client: Client) -> Script[None]:
    """Train to the last round of the current candidate. Without aggregation layers, no message is sent."""
    progress = client.progress
    if not (client.has_labels or client.config.model.aggregation_layers):  # nothing to learn from
        progress.stopped, progress.best_weights = True, client.learner.weights()
        if client.config.train.checkpoint_every:
            yield Save(client.state)
    yield from client_warm_start(client)
    if not progress.stopped:
        examples = yield from client_training_examples(client)
        yield from _run_windows(
            client,
            lambda window: client_sampling(client, window, draw_batches(client, examples, window)),
            lambda window, samples: client_rounds(client, samples),
        )


def client_result(client: Client) -> Script[dict[str, float]]:
    """Test the selected weights, then check that all clients received the same answers; return the test metrics."""
    metrics = yield from _client_measurement(client)
    yield from client_comparison(client)
    return metrics


def _client_measurement(client: Client) -> Script[dict[str, float]]:
    """Test the selected weights, alone or jointly, depending on the method; return the test metrics."""
    if evaluates_once(client.requested):
        measured: dict[str, float] = yield Timed(client_final_test(client), "evaluation")
        return measured
    if not find_method(client.requested).averages:
        metrics = yield from client_test(client)
        yield Timed(client_subsets(client), "evaluation")
        return metrics
    combined: dict[str, float] = yield Timed(client_combination(client), "evaluation")
    return combined


def server_script(server: Server) -> Script[None]:
    """Server column: serve all rounds, then the test of the selected model."""
    yield from server_key_agreement(server)
    if server.config.train.releases_once:
        yield from server_aggregate(server)
    elif not find_method(server.requested).averages:  # if the method averages, the parties train alone
        yield from server_race(server, server_training)
        yield from server_training(server)
    yield from server_result(server)


def server_result(server: Server) -> Script[None]:
    """Server column of `client_result`."""
    if evaluates_once(server.config):
        yield from server_final_test(server)
    elif find_method(server.requested).averages:
        yield from server_combination(server)
    else:
        yield from server_test(server)
        yield from server_subsets(server)
    yield from server_comparison(server)


def server_training(server: Server) -> Script[None]:
    """Serve the rounds of the current candidate."""
    yield from server_warm_start(server)
    if not server.progress.stopped:
        yield from server_training_examples(server)
        yield from _run_windows(
            server,
            lambda window: server_sampling(server, window),
            lambda window, sizes: server_rounds(server, window, sizes),
        )


def _run_windows(
    role: Client | Server,
    sample: Callable[[range], Script[Agreement]],
    compute: Callable[[range, Agreement], Script[None]],
) -> Script[None]:
    """Run all rounds of a role, window by window.

    A window is a group of successive rounds (`train.prefetch`). During each window, the clients agree on the node sets
    of the next window.

    Args:
        role: the client or the server.
        sample: agrees on the node sets of a window.
        compute: computes the rounds of a window, given the agreement.
    """
    agreed: Agreement | None = None
    train = role.config.train
    for window, following in divide_into_windows(role.progress.round, role.progress.end(train), train.prefetch):
        if agreed is None:
            agreed = yield from sample(window)
        rounds, agreed = compute(window, agreed), None
        if following and train.prefetch:
            _, agreed = yield Interleave(rounds, sample(following))
        else:
            yield from rounds
        if role.progress.stopped:
            return
