"""Algorithm 1: the rounds of a training, client and server.

`client_round` is one round t of a client. The functions around it agree on node sets, evaluate and save.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from glasu.config import TrainConfig
from glasu.data.methods import evaluates_once, find_method, keeps_scores
from glasu.errors import ProtocolError, TrainingError
from glasu.protocol.backward import await_backward, client_joint_round, server_backward
from glasu.protocol.combination import client_combination, server_combination
from glasu.protocol.evaluation import (
    client_selection,
    client_subsets,
    client_test,
    server_selection,
    server_subsets,
    server_test,
)
from glasu.protocol.final_test import client_final_test, server_final_test
from glasu.protocol.inference import await_inference, client_inference, server_inference
from glasu.protocol.key_agreement import client_key_agreement, server_key_agreement
from glasu.protocol.label_owner import client_gradient, server_gradient
from glasu.protocol.masked import client_comparison, server_comparison
from glasu.protocol.messages import Losses
from glasu.protocol.once import client_lower_stage, client_release, server_release
from glasu.protocol.presence import draw_present
from glasu.protocol.race import client_race, server_race
from glasu.protocol.requests import Interleave, Receive, RoundDone, Save, Script, Send, Timed
from glasu.protocol.sampling import (
    client_sampling,
    client_training_examples,
    divide_into_windows,
    draw_batches,
    find_known_rows,
    owner_leads,
    server_sampling,
    server_training_examples,
)
from glasu.protocol.update import local_update
from glasu.protocol.warm_start import client_warm_start, draw_common_classifier, server_warm_start
from glasu.wire.message_key import Phase

if TYPE_CHECKING:
    from glasu.model.aggregation import Aggregation
    from glasu.model.sampler import Sample
    from glasu.protocol.client import Client
    from glasu.protocol.server import Server
    from glasu.protocol.state import Progress

Agreement = TypeVar("Agreement")  # agreed node sets of a window: samples at a client, sizes at the server


def client_script(client: Client) -> Script[dict[str, float]]:
    """Client column: train to the last round, then test the selected weights; return the test metrics.

    A race may come first. It chooses the settings that the preset leaves open.
    """
    if client.stages is not None:
        yield from client_lower_stage(client, client_training)
        yield from client_release(client)
    else:
        if not client.is_alone:  # otherwise the parties agree on keys after they have trained
            yield from client_key_agreement(client)
            draw_common_classifier(client)
        yield from client_race(client, client_training)
    yield from client_training(client)
    return (yield from client_result(client))


def client_training(client: Client) -> Script[None]:
    """Train to the last round of the current candidate. Without aggregation layers this sends no message."""
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
    client.learner.forget_gathered()


def client_result(client: Client) -> Script[dict[str, float]]:
    """Test the selected weights, then compare the answers of the server; return the test metrics."""
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


def client_rounds(client: Client, samples: Sequence[Sample]) -> Script[None]:
    """Compute the rounds of one window."""
    progress, train = client.progress, client.config.train
    sends_losses = not (client.is_alone or keeps_scores(client.config))
    selects = not evaluates_once(client.config)
    for sample, upcoming in zip(samples, [*samples[1:], None], strict=True):
        losses = yield from client_round(client, sample, upcoming)
        loss = sum(losses) / len(losses) if losses else None
        if sends_losses:
            key = client.identity.key(Phase.TRAINING, sample.round)
            yield Send(Losses(key, client.release.numbers("losses", losses, key)))
        elif loss is not None:
            progress.losses += (loss,)
        progress.round = sample.round + 1
        if selects and is_evaluation_due(train, progress):
            yield from client_selection(client, loss)
        if is_save_due(train, progress):
            yield Save(client.state)
        yield RoundDone(sample.round, loss, client.name)
        if progress.stopped:
            return


def client_round(client: Client, sample: Sample, upcoming: Sample | None) -> Script[list[float]]:
    """Compute one round: JointInference, then Q local updates. Return the losses (empty without labels)."""
    with client.watch.measure("sampling"):
        batch = client.learner.gather(sample)
    client.learner.set_learning_rate(sample.round)
    present = draw_present(client.config, client.identity.num_clients, sample.round)
    aggregation = client.learner.aggregation.among(len(present))
    if client.identity.index not in present:
        return (yield from client_absent_round(client, sample, upcoming, aggregation))
    if client.config.train.backward == "joint":
        return (yield from client_joint_round(client, batch, upcoming, aggregation))
    step = client.learner.step(batch, 0)
    joint, exchanged = yield from client_inference(
        client, step, client.identity.key(Phase.TRAINING, sample.round), sample.nodes, upcoming
    )
    gradient = None
    if owner_leads(client.config):
        _, gradient = yield from client_gradient(client, batch, joint)
    others = {layer: aggregation.extract_others(each, sent.value) for layer, (each, sent) in exchanged.items()}
    # JointInference used the dropout masks of step 0. If all parties read the released values exactly, it was the
    # forward pass of step 0. Otherwise this client's part was rounded or noisy, and step 0 repeats the forward pass
    # without rounding and noise.
    forward = joint if client.release.transparent or not exchanged else None
    update = partial(local_update, client, batch, others=others, gradient=gradient, aggregation=aggregation)
    losses = [(yield from update(step, joint=forward))]
    for index in range(1, client.config.train.num_local_steps):
        losses.append((yield from update(client.learner.step(batch, index))))
    return losses if client.has_labels else []


def client_absent_round(
    client: Client, sample: Sample, upcoming: Sample | None, aggregation: Aggregation
) -> Script[list[float]]:
    """Follow a round without contributing to it and without taking a step.

    An absent label owner still computes the gradient at H[L], because the other clients have no loss.
    """
    batch, layers = client.learner.gather(sample), client.config.model.aggregation_layers
    num_rows = {layer: len(sample.nodes[layer + 1]) for layer in layers}
    joint = yield from await_inference(client, client.identity.key(Phase.TRAINING, sample.round), num_rows, upcoming)
    if client.config.train.backward == "joint":
        return (yield from await_backward(client, batch, joint, aggregation))
    losses: list[float] = []
    if client.identity.owner >= 0:
        losses, _ = yield from client_gradient(client, batch, joint)
    return losses


def server_script(server: Server) -> Script[None]:
    """Server column: serve all rounds, then the test of the selected model."""
    if server.config.train.release == "once":
        yield from server_release(server)
    else:
        yield from server_key_agreement(server)
        if not find_method(server.requested).averages:  # otherwise the parties train alone
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


def server_rounds(server: Server, window: range, sizes: dict[tuple[int, int], int]) -> Script[None]:
    """Serve the rounds of one window; `sizes` holds {(round, l): |S[l]|} of the agreed node sets."""
    progress, train = server.progress, server.config.train
    receives_losses, selects = not keeps_scores(server.config), not evaluates_once(server.config)
    for index in window:
        key, backward = server.identity.key(Phase.TRAINING, index), server.identity.key(Phase.BACKWARD, index)
        present = draw_present(server.config, len(server.roster), index)
        rows = yield from server_inference(server, key, find_known_rows(server, index, sizes), present)
        if train.backward == "joint":
            yield from server_backward(server, backward, rows, present)
        elif server.identity.owner >= 0:
            yield from server_gradient(server, backward, rows[server.aggregation_layers[-1]])
        loss = None
        if receives_losses:
            loss = _mean_loss(server, (yield Receive((Losses,), key)))
            progress.losses += (loss,)
        progress.round = index + 1
        if selects and is_evaluation_due(train, progress):
            yield from server_selection(server, loss)
        if is_save_due(train, progress):
            yield Save(server.state)
        yield RoundDone(index, loss)
        if progress.stopped:
            return


def _mean_loss(server: Server, messages: Sequence[Losses]) -> float:
    """Return the mean loss over the clients with labels. Refuse a loss that is not finite, except in a race."""
    means = []
    for message in messages:
        if not (np.isfinite(message.values).all() or server.progress.is_racing):
            server.refuse(
                message, "its loss is not finite; training diverged. Lower train.learning_rate.", TrainingError
            )
        if len(message.values):
            means.append(float(message.values.mean()))
    if not means:
        raise ProtocolError(f"{messages[0].key}: no party sent a loss.")
    return sum(means) / len(means)


def _run_windows(
    role: Client | Server,
    sample: Callable[[range], Script[Agreement]],
    compute: Callable[[range, Agreement], Script[None]],
) -> Script[None]:
    """Run all rounds of a role. The node sets of each window of rounds are agreed during the window before it.

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


def is_evaluation_due(train: TrainConfig, progress: Progress) -> bool:
    """Return whether the model is evaluated after the rounds so far."""
    return progress.round % train.evaluate_every == 0 or progress.round == progress.end(train)


def is_save_due(train: TrainConfig, progress: Progress) -> bool:
    """Return whether a role must be saved after the rounds so far."""
    every = train.checkpoint_every
    return every > 0 and (progress.round % every == 0 or progress.round == progress.end(train) or progress.stopped)
