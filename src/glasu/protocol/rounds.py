"""Algorithm 1: the rounds of a training, client and server."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from glasu.config import TrainConfig
from glasu.protocol.backward import client_joint_round, server_backward
from glasu.protocol.evaluation import METRICS_LAYER, client_evaluation, server_evaluation
from glasu.protocol.inference import client_inference, server_inference
from glasu.protocol.label_owner import client_gradient, server_gradient
from glasu.protocol.messages import Losses, Verdict
from glasu.protocol.requests import (
    Broadcast,
    Evaluated,
    Interleave,
    Receive,
    RoundDone,
    Save,
    Script,
    Send,
    Timed,
)
from glasu.protocol.sampling import (
    client_sampling,
    client_training_nodes,
    server_sampling,
    server_training_nodes,
    windows,
)
from glasu.protocol.state import is_save_due
from glasu.protocol.update import local_update
from glasu.wire.message_key import Phase

if TYPE_CHECKING:
    from glasu.model.blocks import NodeSet
    from glasu.protocol.client import Client
    from glasu.protocol.sample import Sample
    from glasu.protocol.server import Server


def client_script(client: Client) -> Script[None]:
    """Train from the client's present round to the last one, then test the selected weights."""
    progress = client.progress
    if not progress.stopped:
        yield from client_rounds(client)
    client.learner.forget_gathered()
    client.learner.model.load_state_dict(progress.best_weights)
    test = client_evaluation(client, client.config.train.num_rounds + 1, "test")
    progress.test_metrics, _ = yield Timed(test, "evaluation")
    if progress.selection is not None:
        best, task = progress.selection.best_round, client.learner.task
        yield Evaluated(best, "test", progress.test_metrics, task.selected_by, party=client.name)


def client_rounds(client: Client) -> Script[None]:
    """Client column: rounds t, ..., T-1. The node sets of a window of rounds are agreed during the window before."""
    training_nodes = yield from client_training_nodes(client)
    samples: Sequence[Sample] = ()
    for window, following in windows(client.progress.round, client.config):
        if not samples:
            samples = yield from client_sampling(client, window, _batches(client, training_nodes, window))
        rounds = client_window(client, samples)
        if following and client.config.train.prefetch:
            agreement = client_sampling(client, following, _batches(client, training_nodes, following))
            _, samples = yield Interleave(rounds, agreement)
        else:
            yield from rounds
            samples = ()
        if client.progress.stopped:
            return


def _batches(client: Client, training_nodes: NodeSet, rounds: Sequence[int]) -> list[NodeSet]:
    """Draw S[L] for each round; empty at a client that does not know the training nodes."""
    return [client.learner.draw_batch(training_nodes, index) for index in rounds]


def client_window(client: Client, samples: Sequence[Sample]) -> Script[None]:
    """Compute the rounds of one window."""
    progress, train = client.progress, client.config.train
    for sample, upcoming in zip(samples, [*samples[1:], None], strict=True):
        losses = yield from client_round(client, sample, upcoming)
        if client.config.model.aggregation_layers:
            key = client.identity.key(Phase.TRAINING, sample.round)
            yield Send(Losses(key, client.release.numbers("losses", losses, key)))
        progress.round = sample.round + 1
        loss = sum(losses) / len(losses) if losses else None
        if is_evaluation_due(train, progress.round):
            yield from _client_selection(client, loss)
        if is_save_due(train, progress.round, stopped=progress.stopped):
            yield Save(client.state)
        yield RoundDone(sample.round, loss, client.name)
        if progress.stopped:
            return


def client_round(client: Client, sample: Sample, upcoming: Sample | None) -> Script[list[float]]:
    """Compute one round: JointInference, then Q local updates. Return the losses; none at a client without labels."""
    with client.watch.measure("sampling"):
        batch = client.learner.gather(sample)
    client.learner.set_learning_rate(sample.round)
    if client.config.train.backward == "joint":
        return (yield from client_joint_round(client, batch, upcoming))
    step = client.learner.step(batch, 0)
    joint, exchanged = yield from client_inference(
        client, step, client.identity.key(Phase.TRAINING, sample.round), upcoming
    )
    gradient = (yield from client_gradient(client, batch, joint)) if client.identity.owner >= 0 else None
    extract = client.learner.aggregation.extract_others
    others = {layer: extract(each, sent.value) for layer, (each, sent) in exchanged.items()}
    # Where all parties read the released values exactly, JointInference was the forward pass of step 0.
    forward = joint if client.release.transparent else None
    losses = [(yield from local_update(client, batch, step, others, joint=forward, gradient=gradient))]
    for index in range(1, client.config.train.num_local_steps):
        step = client.learner.step(batch, index)
        losses.append((yield from local_update(client, batch, step, others, gradient=gradient)))
    return losses if client.has_labels else []


def is_evaluation_due(train: TrainConfig, rounds_done: int) -> bool:
    """Return whether the model is evaluated after this number of rounds."""
    return rounds_done % train.evaluate_every == 0 or rounds_done == train.num_rounds


def _client_selection(client: Client, loss: float | None) -> Script[None]:
    """Evaluate on validation nodes; keep the weights if they are the best so far."""
    progress, train = client.progress, client.config.train
    evaluation = client_evaluation(client, progress.round, "validation")
    metrics, verdict = yield Timed(evaluation, "evaluation")
    if progress.selection is not None:
        selected_by = client.learner.task.selected_by
        progress.selection = progress.selection.after(metrics[selected_by.name], progress.round)
        improved = progress.selection.best_round == progress.round
        progress.stopped = progress.selection.stops(train)
        last = progress.stopped or progress.round == train.num_rounds
        yield Evaluated(progress.round, "validation", metrics, selected_by, loss, improved, client.name, last)
    else:
        improved, progress.stopped = verdict.improved, verdict.stop
    if improved:
        progress.best_weights = client.learner.weights()


def server_script(server: Server) -> Script[None]:
    """Serve all rounds, then the test of the selected model."""
    if not server.progress.stopped:
        yield from server_rounds(server)
    round_index = server.config.train.num_rounds + 1
    metrics = yield from server_evaluation(server, round_index, server.sizes.num_test)
    yield Evaluated(server.progress.selection.best_round, "test", metrics, server.task.selected_by)
    key = server.key(Phase.EVALUATION, round_index, METRICS_LAYER)
    yield Broadcast(Verdict(key, improved=False, stop=True))


def server_rounds(server: Server) -> Script[None]:
    """Server column: rounds t, ..., T-1."""
    yield from server_training_nodes(server)
    sizes: dict[tuple[int, int], int] | None = None
    for window, following in windows(server.progress.round, server.config):
        if sizes is None:
            sizes = yield from server_sampling(server, window)
        rounds = server_window(server, window, sizes)
        if following and server.config.train.prefetch:
            _, sizes = yield Interleave(rounds, server_sampling(server, following))
        else:
            yield from rounds
            sizes = None
        if server.progress.stopped:
            return


def server_window(server: Server, window: range, sizes: dict[tuple[int, int], int]) -> Script[None]:
    """Serve the rounds of one window; `sizes` holds {(round, l): |S[l]|} of the agreed node sets."""
    progress, train = server.progress, server.config.train
    for index in window:
        key = server.key(Phase.TRAINING, index)
        rows = yield from server_inference(server, key, server.known_rows(index, sizes))
        if train.backward == "joint":
            yield from server_backward(server, server.key(Phase.BACKWARD, index), rows)
        elif server.owner >= 0:
            last = server.aggregation_layers[-1]
            yield from server_gradient(server, server.key(Phase.BACKWARD, index), rows[last])
        loss = server.record_losses((yield Receive((Losses,), key)))
        progress.round = index + 1
        if is_evaluation_due(train, progress.round):
            yield from _server_selection(server, loss)
        if is_save_due(train, progress.round, stopped=progress.stopped):
            yield Save(server.state)
        yield RoundDone(index, loss)
        if progress.stopped:
            return


def _server_selection(server: Server, loss: float) -> Script[None]:
    """Evaluate on validation nodes, and tell the clients whether the model is the best so far."""
    progress, train = server.progress, server.config.train
    metrics = yield from server_evaluation(server, progress.round, server.sizes.num_validation)
    selected_by = server.task.selected_by
    progress.selection = progress.selection.after(metrics[selected_by.name], progress.round)
    improved, progress.stopped = progress.selection.best_round == progress.round, progress.selection.stops(train)
    last = progress.stopped or progress.round == train.num_rounds
    yield Evaluated(progress.round, "validation", metrics, selected_by, loss, improved, last=last)
    key = server.key(Phase.EVALUATION, progress.round, METRICS_LAYER)
    yield Broadcast(Verdict(key, improved=improved, stop=progress.stopped))
