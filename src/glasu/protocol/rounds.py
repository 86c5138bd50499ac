"""Algorithm 1 in the role of one client: sample, infer together, take Q steps alone, begin the next round unasked."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from glasu.model.metrics import SELECTED_BY
from glasu.protocol.backward import client_joint_round
from glasu.protocol.client import Client
from glasu.protocol.evaluation import client_evaluation
from glasu.protocol.inference import client_inference
from glasu.protocol.label_owner import client_gradient
from glasu.protocol.messages import Evaluated, Exchange, RoundDone, Script, Verdict, timed
from glasu.protocol.sampling import (
    Agreement,
    Sample,
    client_sampling,
    publish_training_nodes,
    ride_along,
    windows,
)
from glasu.protocol.update import local_update


def client_script(client: Client) -> Script:
    """Train from the client's present round to the end, select the best weights, and test them."""
    return timed(_whole_training(client), client.watch.measure("compute"))


def _whole_training(client: Client) -> Script:
    if not client.stopped:
        yield from client_rounds(client)
    client.forget_ahead()
    client.model.load_state_dict(client.best_weights)
    client.tested, _ = yield from _evaluation(client, client.config.train.num_rounds + 1, "test")
    if client.selection is not None:
        yield Evaluated(client.selection.best_round, "test", client.tested, party=client.party.name)


def _evaluation(client: Client, round_index: int, split: str) -> Exchange[tuple[dict[str, float], Verdict | None]]:
    return timed(client_evaluation(client, round_index, split), client.watch.measure("evaluation"))


def client_rounds(client: Client) -> Script:
    """Rounds t, t+1, ..., T-1; their node sets are agreed a window ahead."""
    config = client.config
    if config.train.labels != "all" and config.train.sampler == "shared":
        client.training_nodes = yield from publish_training_nodes(client)
    ahead: Agreement | None = None
    coming = list(windows(client.round, config))
    for index, window in enumerate(coming):
        samples = ahead.samples if ahead else (yield from client_sampling(client, window))
        later = coming[index + 1 : index + 2] if config.train.prefetch else []
        ahead = Agreement(client_sampling(client, later[0])) if later else None
        for position, sample in enumerate(samples):
            client.coming = partial(_next_sample, samples[position + 1 :], ahead)
            client.losses = yield from ride_along(client_round(client, sample), ahead)
            client.round = sample.round + 1
            loss = _mean(client.losses)  # now: an evaluation's messages take the losses along
            yield from _evaluate_when_due(client)
            yield RoundDone(sample.round, loss, client.party.name)
            if client.stopped:
                return


def _next_sample(samples: Sequence[Sample], ahead: Agreement | None) -> Sample | None:
    """Return the sample of the next round: of this window, or of the next one as soon as it is agreed."""
    following = samples or (ahead.samples if ahead else ())
    return following[0] if following else None


def client_round(client: Client, sample: Sample) -> Exchange[list[float]]:
    """One round; returns the losses of its steps, which ride on the next message."""
    batch = client.batch(sample)
    client.set_learning_rate(sample.round)
    if client.config.train.backward == "joint":
        return (yield from client_joint_round(client, batch))
    first = client.passes(batch, 0)
    joint, exchanged = yield from client_inference(client, first, batch.round)
    gradient = (yield from client_gradient(client, batch, joint)) if client.owner >= 0 else None
    others = {layer: client.aggregation.extract_others(each, sent.value) for layer, (each, sent) in exchanged.items()}
    # where everyone reads what was computed, the joint inference was the forward pass of step 0
    done = joint if client.release.transparent else None
    losses = [local_update(client, batch, first, others, joint=done, gradient=gradient)]
    for step in range(1, client.config.train.num_local_steps):
        losses.append(local_update(client, batch, client.passes(batch, step), others, gradient=gradient))
    return losses if client.has_labels else []


def _evaluate_when_due(client: Client) -> Script:
    """Evaluate every `evaluate_every` rounds and after the last; keep the weights where they are the best so far."""
    train, done = client.config.train, client.round
    if done % train.evaluate_every and done != train.num_rounds:
        return
    metrics, verdict = yield from _evaluation(client, done, "validation")
    if verdict is None:
        assert client.selection is not None
        client.selection = client.selection.after(metrics[SELECTED_BY[train.task]], done)
        improved, client.stopped = client.selection.best_round == done, client.selection.stops(train)
        yield Evaluated(done, "validation", metrics, _mean(client.losses), improved, client.party.name)
    else:
        improved, client.stopped = verdict.improved, verdict.stop
    if improved:
        client.best_weights = client.weights()


def _mean(losses: list[float]) -> float | None:
    return sum(losses) / len(losses) if losses else None
