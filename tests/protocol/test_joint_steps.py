"""Exact gradients with several local steps per round (`backward = "joint"`, Q > 1)."""

from __future__ import annotations

import itertools

import pytest
import torch

from support.messages import with_valid_scores
from support.monolith import (
    ALL_LAYERS,
    Monolith,
    assert_same,
    identical,
    keep_samples,
    run,
    settings,
    tiny_parties,
)
from support.spies import run_with_spies

M, Q = 3, 4


def joint(**keys):
    return settings(**{"backward": "joint", "num_local_steps": Q, **keys})


def parties_of(config, **keys):
    return tiny_parties(owner=None if config.train.labels == "all" else config.train.labels, **keys)


class Sampled(Monolith):
    """The dense model on the blocks of one round: A, X and y of the sampled nodes."""

    def use(self, batches):
        """Read these batches, one per client."""
        self.batches = batches
        dense = [batch.features for batch in batches]
        self.X = [value if isinstance(value, torch.Tensor) else torch.from_numpy(value.toarray()) for value in dense]

    def partial(self, m, layer, H, initial):
        self.A[m] = torch.from_numpy(self.batches[m].blocks[layer].matrix.toarray())
        if initial is not None:
            initial = initial[torch.from_numpy(self.batches[m].initial_rows[layer])]
        return super().partial(m, layer, H, initial)

    def loss(self, m, H):
        y = self.batches[m].labels
        return -self.logits(m, H).log_softmax(dim=1)[torch.arange(len(y)), y].mean()

    def own_part(self, m, at_joint):
        """Return the gradient at H_m^+[l], given the gradient at H[l+1]."""
        if self.model.aggregation == "mean":
            return at_joint / M
        width = at_joint.shape[1] // M
        return at_joint[:, m * width : (m + 1) * width]

    def replace_own(self, m, parts, part):
        """Return H[l+1] of all parts, with client m's one replaced."""
        return self.aggregate([part if other == m else parts[other] for other in range(M)])

    def round(self, optimizer, steps):
        """Step 0 descends the summed losses. Step q descends L_m + sum of <C_m[l], H_m^+[l]>, all else as received."""
        clients, layers, aggregating = range(M), range(self.model.num_layers), self.model.aggregation_layers
        labelled = [m for m in clients if "classifier.weight" in self.weights[m]]
        hidden, initial = (list(values) for values in zip(*(self.start(m) for m in clients), strict=True))
        received, copies = {}, {}
        for layer in layers:
            hidden = [self.partial(m, layer, hidden[m], initial[m]) for m in clients]
            if layer in aggregating:
                received[layer] = [part.detach() for part in hidden]
                whole = self.aggregate(hidden)
                hidden = [whole.clone() for _ in clients]  # a copy per client has that client's gradient
                copies[layer] = hidden
        losses = [[self.loss(m, hidden[m])] for m in labelled]
        leaves = [copy for layer in aggregating for copy in copies[layer]]
        weights = [value for own in self.weights for value in own.values()]
        found = torch.autograd.grad(sum(loss for (loss,) in losses), [*weights, *leaves], materialize_grads=True)
        at = dict(zip([(m, layer) for layer in aggregating for m in clients], found[len(weights) :], strict=True))
        C = {(m, layer): self.own_part(m, sum(at[other, layer] for other in clients if other != m)) for m, layer in at}
        descend(optimizer, weights, found)
        for _ in range(1, steps):
            total = 0.0
            for m in clients:
                H, initial = self.start(m)
                for layer in layers:
                    part = H = self.partial(m, layer, H, initial)
                    if layer in aggregating:
                        total = total + (C[m, layer] * part).sum()
                        H = self.replace_own(m, received[layer], part)
                if m in labelled:
                    losses[labelled.index(m)].append(self.loss(m, H))
                    total = total + losses[labelled.index(m)][-1]
            descend(optimizer, weights, torch.autograd.grad(total, weights, materialize_grads=True))
        return sum(sum(own).item() / len(own) for own in losses) / len(losses)


def descend(optimizer, weights, gradients):
    for weight, gradient in zip(weights, gradients, strict=False):
        weight.grad = gradient
    optimizer.step()


def compare(config, parties, *, rounds=3):
    """Compare a run with the dense program, round by round."""
    samples = [[] for _ in range(M)]
    done = run(config, parties, scatter=21, arrange=keep_samples(samples))
    whole = Sampled(config, parties, done.initial)
    train = config.train
    kind = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}[train.optimizer]
    keys = {"lr": train.learning_rate, "weight_decay": train.weight_decay, "foreach": False}
    optimizer = kind([value for own in whole.weights for value in own.values()], **keys)
    losses = []
    for index in range(rounds):
        own = [(client.learner, kept[index]) for client, kept in zip(done.clients, samples, strict=True)]
        whole.use([learner.gather(sample) for learner, sample in own])
        losses.append(whole.round(optimizer, train.num_local_steps))
        assert_same([weights[index] for weights in done.after_round], whole.weights)
    assert done.server.progress.losses == pytest.approx(losses, rel=1e-9)
    assert not identical(done.initial, done.final)


CHOICES = (
    ["mean", "concat"],
    [(3,), (1, 3), ALL_LAYERS],
    ["all", "b"],
    ["sgd", "adam"],
    ["full", "neighbor", "shared"],
)


def mark_combination(places):
    """Return the choices at these places; combinations whose sum is a multiple of 3 hold all pairs, others are slow."""
    marks = () if sum(places) % 3 == 0 else pytest.mark.slow
    return pytest.param(*(values[place] for values, place in zip(CHOICES, places, strict=True)), marks=marks)


@pytest.mark.parametrize(
    ("aggregation", "layers", "labels", "optimizer", "sampler"),
    list(map(mark_combination, itertools.product(*(range(len(values)) for values in CHOICES)))),
)
def test_rounds_of_several_exact_steps_equal_a_dense_program(aggregation, layers, labels, optimizer, sampler):
    config = joint(
        backbone="gcnii",  # with `mean`, a fused step; with `concat`, autograd
        aggregation=aggregation,
        aggregation_layers=layers,
        labels=labels,
        optimizer=optimizer,
        learning_rate=0.03,
        weight_decay=0.01,
        num_rounds=3,
        sampler=sampler,
        **({} if sampler == "full" else {"batch_size": 8, "fanout": 2}),
    )
    compare(config, parties_of(config, num_nodes=48))  # blocks are sparse, as fused steps need them


@pytest.mark.parametrize("labels", ["all", "b"])
@pytest.mark.parametrize("aggregation", ["mean", "concat"])
def test_a_backbone_without_a_fused_step_takes_the_same_steps(aggregation, labels):
    config = joint(backbone="gcn", aggregation=aggregation, labels=labels, num_rounds=3, normalization="layer")
    compare(config, parties_of(config))


# --- a solved problem ----------------------------------------------------------------------------------------------


class Smooth(Monolith):
    """A gcn with tanh. Minima of ReLU networks often lie at kinks, where no gradient vanishes."""

    def partial(self, m, layer, H, initial):
        W = {key: self.weights[m][f"layers.{layer}.{key}"] for key in ("linear.weight", "bias")}
        return torch.tanh(self.A[m] @ H @ W["linear.weight"] + W["bias"])

    def objective(self):
        """Return the summed losses plus weight decay."""
        decay = self.config.train.weight_decay / 2
        return sum(self.losses().values()) + decay * sum(leaf.square().sum() for leaf in self.leaves)

    @property
    def leaves(self):
        return [value for own in self.weights for value in own.values()]

    def solve(self):
        """Find weights at which the exact gradient is below 1e-10: L-BFGS, then Newton's method."""
        search = torch.optim.LBFGS(self.leaves, max_iter=500, tolerance_change=0, line_search_fn="strong_wolfe")

        def closure():
            search.zero_grad()
            self.objective().backward()
            return self.objective()

        search.step(closure)
        for _ in range(4):
            gradient = self._flat(torch.autograd.grad(self.objective(), self.leaves, create_graph=True))
            hessian = [torch.autograd.grad(one, self.leaves, retain_graph=True) for one in gradient]
            change = torch.linalg.solve(torch.stack([self._flat(row) for row in hessian]), gradient)
            with torch.no_grad():
                for leaf, part in zip(self.leaves, change.split([leaf.numel() for leaf in self.leaves]), strict=True):
                    leaf -= part.view(leaf.shape)
        gradient = self._flat(torch.autograd.grad(self.objective(), self.leaves))
        assert gradient.abs().max() < 1e-10

    def _flat(self, parts):
        return torch.cat([part.ravel() for part in parts])


@pytest.mark.parametrize(
    ("aggregation", "labels"),
    [
        ("mean", "all"),
        ("concat", "b"),
        pytest.param("mean", "b", marks=pytest.mark.slow),
        pytest.param("concat", "all", marks=pytest.mark.slow),
    ],
)
def test_a_solution_is_a_fixed_point_of_exact_steps_but_not_of_local_ones(aggregation, labels):
    keys = {"aggregation": aggregation, "labels": labels, "num_layers": 2, "aggregation_layers": (0, 1), "hidden": 3}
    config = joint(learning_rate=0.3, weight_decay=0.02, **keys)
    parties = parties_of(config)
    whole = Smooth(config, parties, run(config, parties, scatter=3).initial)
    whole.solve()

    def start(clients):
        for client, weights in zip(clients, whole.weights, strict=True):
            client.learner.model.activation = torch.tanh
            client.learner.model.load_state_dict(weights)

    def largest_move(**train):
        done = run(config.replace(train=train), parties, arrange=start)
        pairs = zip(done.initial, done.final, strict=True)
        return max((before[key] - after[key]).abs().max().item() for before, after in pairs for key in before)

    assert all(own["layers.0.linear.weight"].abs().max() > 0.1 for own in whole.weights)  # not the zero model
    assert largest_move() < 1e-8
    assert largest_move(backward="local") > 1e-4


# --- dropout and traffic -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backbone", ["gcn", "gcnii"])
@pytest.mark.parametrize("aggregation", ["mean", "concat"])
def test_all_steps_have_the_dropout_masks_of_the_joint_inference(aggregation, backbone):
    keys = {"aggregation": aggregation, "backbone": backbone, "dropout": 0.5, "num_rounds": 2}
    config = joint(learning_rate=1e-300, **keys)  # weights stand still
    _, spies = run_with_spies(config, tiny_parties(), scatter=13, carry=with_valid_scores())
    for spy in spies:
        assert len(spy.extracted) == 4  # two rounds, two layers
        assert len(spy.merged) == 2 * 2 * (Q - 1)
        for t in range(2):
            joints = [joint for joint, _, _ in spy.extracted[2 * t : 2 * t + 2]]
            merged = [merged for _, _, merged in spy.merged[6 * t : 6 * t + 6]]
            for position, again in enumerate(merged):
                torch.testing.assert_close(again, joints[position % 2], rtol=1e-12, atol=1e-12)
        assert (spy.extracted[0][1] - spy.extracted[2][1]).abs().max() > 1e-3  # another round, other masks


@pytest.mark.parametrize("labels", ["all", "b"])
def test_more_local_steps_cost_no_exchange_and_only_the_bytes_of_their_losses(labels):
    one, many = (run(joint(labels=labels, num_local_steps=steps), parties_of(joint(labels=labels))) for steps in (1, Q))
    assert one.meter.exchanges == many.meter.exchanges
    losses = 8 * (Q - 1) * (M if labels == "all" else 1)
    assert many.meter.total_bytes == one.meter.total_bytes + losses
