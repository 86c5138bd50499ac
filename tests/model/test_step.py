"""A step computes the values and gradients of the plain network, even when it pauses between layers."""

from __future__ import annotations

import dataclasses
from functools import partial

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from torch import Tensor, nn

from glasu.config import ModelConfig, RunConfig, TrainConfig
from glasu.data.graph import Graph
from glasu.model.blocks import Adjacency, Block, draw_all
from glasu.model.dropout import Dropout, make_no_dropout
from glasu.model.fused.gcnii import FusedStep, FusedWeights
from glasu.model.optimizer import lay_out_weights, make_optimizer
from glasu.model.sparse import SparseRows
from glasu.model.split import ClientModel
from glasu.model.step import AutogradStep, Inputs, Step, Steps
from glasu.model.task import TASKS
from glasu.randomness import Stream
from glasu.wire.encoding import DOUBLE, SINGLE

NODES, WIDTH, FEATURES, LAYERS, CLASSES = 40, 6, 9, 3, 4
SIZES = (NODES, 30, 20, 12)  # rows of H[0..L]
dropouts = pytest.mark.parametrize("rate", [0.0, 0.3])


def model_of(dtype: torch.dtype = torch.float64, **keys: object) -> ClientModel:
    given = {"backbone": "gcnii", "num_layers": LAYERS, "hidden": WIDTH, "aggregation_layers": (LAYERS - 1,), **keys}
    model = ClientModel(
        ModelConfig(**given),  # type: ignore[arg-type]
        num_clients=3,
        num_features=FEATURES,
        num_outputs=CLASSES,
        stream=lambda purpose, layer: Stream(0, purpose, layer=layer),
    ).to(dtype)
    for weight in model.parameters():
        if weight.ndim == 1:
            nn.init.uniform_(weight, 0.1, 0.2)  # biases, and norms that change their input
    lay_out_weights(model)
    return model


def dropout_of(rate: float) -> Dropout:
    return Dropout(rate, lambda layer: Stream(1, "dropout", layer=layer)) if rate else make_no_dropout()


def block_of(model: ClientModel, layer: int) -> Block:
    rng = np.random.default_rng(layer)
    graph = Graph.from_edges(rng.integers(0, SIZES[layer], 160), rng.integers(0, SIZES[layer], 160), SIZES[layer])
    double = next(model.parameters()).dtype == torch.float64
    adjacency = Adjacency(graph, model.backbone.normalization, DOUBLE if double else SINGLE)
    targets = np.sort(rng.permutation(SIZES[layer])[: SIZES[layer + 1]])
    return adjacency.block(targets, np.arange(SIZES[layer]), draw_all(graph, targets))


def inputs_of(model: ClientModel, *, dense: bool = False) -> Inputs:
    kind = np.float64 if next(model.parameters()).dtype == torch.float64 else np.float32
    values = sp.random_array((NODES, FEATURES), density=0.3, rng=np.random.default_rng(1), dtype=kind)
    blocks = tuple(block_of(model, layer) for layer in range(LAYERS))
    rows = [blocks[0].positions]
    for block in blocks[1:]:
        rows.append(rows[-1][block.positions])
    features = torch.from_numpy(values.toarray()) if dense else SparseRows.of(sp.csr_array(values))
    return Inputs(features, blocks, tuple(rows))


def make_fused_step(model: ClientModel, inputs: Inputs, dropout: Dropout) -> Step:
    weights = FusedWeights.of(model)
    assert weights is not None
    return FusedStep(weights, inputs, dropout)


def compute_logits(model: ClientModel, inputs: Inputs, dropout: Dropout) -> Tensor:
    """Return the logits, with one autograd graph over all layers."""
    hidden, initial = model.encode(inputs.features, dropout)
    for layer, (block, rows) in enumerate(zip(inputs.blocks, inputs.initial_rows, strict=True)):
        at_rows = None if initial is None else initial[torch.from_numpy(rows)]
        hidden = model.sublayer(layer, hidden, at_rows, block, dropout)
    assert isinstance(hidden, Tensor)
    return model.classify(hidden, dropout)


def forward(passing: Step) -> Tensor:
    hidden = passing.encode()
    for layer in range(LAYERS):
        hidden = passing.layer(layer, hidden)
    assert isinstance(hidden, Tensor)
    return passing.logits(hidden)


def back(passing: Step, gradient: Tensor) -> None:
    passing.begin_backward()
    found: Tensor | None = passing.backward_classifier(gradient)
    for layer in reversed(range(LAYERS)):
        assert found is not None
        found = passing.backward_layer(layer, found)
    passing.backward_encoder(found)


def gradients(model: ClientModel) -> dict[str, Tensor]:
    return {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}


WAYS = {
    "fused": (make_fused_step, {}),
    "fused, layer norms": (make_fused_step, {"normalization": "layer"}),
    "autograd": (AutogradStep, {}),
    "autograd, layer norms": (AutogradStep, {"normalization": "layer"}),
    "gcn": (AutogradStep, {"backbone": "gcn"}),
    "gat": (AutogradStep, {"backbone": "gat", "heads": 2}),
    "sage with skips": (AutogradStep, {"backbone": "sage", "residual": True}),
}


@dropouts
@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_values_and_gradients_are_those_of_the_plain_network(way, dense, rate):
    make, keys = WAYS[way]
    model = model_of(**keys)
    inputs, dropout = inputs_of(model, dense=dense), dropout_of(rate)
    logits = compute_logits(model, inputs, dropout)
    probe = torch.randn(logits.shape, dtype=logits.dtype, generator=torch.Generator().manual_seed(0))
    model.zero_grad(set_to_none=False)
    logits.backward(probe)
    expected = gradients(model)
    for _ in range(2):  # values left by an earlier step do not matter
        passing = make(model, inputs, dropout)
        torch.testing.assert_close(forward(passing), logits.detach())
        back(passing, probe)
    found = gradients(model)
    assert found.keys() == expected.keys() == dict(model.named_parameters()).keys()
    for name, gradient in expected.items():
        assert gradient.count_nonzero() > 0, name
        torch.testing.assert_close(found[name], gradient)


@dropouts
def test_single_precision_is_near(rate):
    model = model_of(torch.float32)
    inputs, dropout = inputs_of(model), dropout_of(rate)
    passing = make_fused_step(model, inputs, dropout)
    logits = compute_logits(model, inputs, dropout)
    assert logits.dtype == torch.float32
    torch.testing.assert_close(forward(passing), logits.detach())


@pytest.mark.parametrize("make", [make_fused_step, AutogradStep])
def test_the_gradient_between_two_layers_is_that_of_finite_differences(make):
    model, dropout = model_of(), dropout_of(0.3)
    inputs = inputs_of(model)
    layer = 1

    def value(hidden: Tensor) -> tuple[Step, Tensor]:
        passing = make(model, inputs, dropout)
        passing.encode()
        return passing, passing.layer(layer, hidden)

    torch.manual_seed(0)
    hidden, probe = (torch.randn(SIZES[size], WIDTH, dtype=torch.float64) for size in (layer, layer + 1))
    passing, _ = value(hidden)
    found = passing.backward_layer(layer, probe)
    assert found is not None
    for row, column in ((0, 0), (3, 4), (29, 5)):
        step = torch.zeros_like(hidden)
        step[row, column] = 1e-6
        rise = (value(hidden + step)[1] - value(hidden - step)[1]).mul(probe).sum() / 2e-6
        assert found[row, column].item() == pytest.approx(rise.item(), rel=1e-6, abs=1e-8)


@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("decay", [0.0, 0.01])
def test_plain_descent_is_part_of_going_back_and_ends_where_torch_does(decay, dense):
    model, twin = model_of(), model_of()
    twin.load_state_dict(model.state_dict())
    inputs, dropout = inputs_of(model, dense=dense), dropout_of(0.3)
    keys = {"optimizer": "sgd", "momentum": 0.0, "learning_rate": 0.1, "weight_decay": decay}
    own = make_optimizer(RunConfig(train=TrainConfig(**keys)), model)
    other = torch.optim.SGD(twin.parameters(), lr=0.1, weight_decay=decay)
    weights = FusedWeights.of(model, in_place=own.is_plain)
    assert weights is not None
    for step in range(3):
        own.learning_rate = other.param_groups[0]["lr"] = 0.1 / (1 + step)
        passing = FusedStep(weights, inputs, dropout, own.descent)
        probe = torch.randn(12, CLASSES, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        torch.testing.assert_close(forward(passing), compute_logits(twin, inputs, dropout).detach())
        back(passing, probe)
        own.step(passing.pending)
        other.zero_grad()
        compute_logits(twin, inputs, dropout).backward(probe)
        other.step()
    for (name, weight), expected in zip(model.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(weight, expected, msg=lambda text, name=name: f"{name}: {text}")


def test_nothing_changes_before_all_gradients_are_known():
    model = model_of()
    weights, inputs = FusedWeights.of(model, in_place=True), inputs_of(model)
    assert weights is not None
    before = [weight.detach().clone() for weight in model.parameters()]
    passing = FusedStep(weights, inputs, make_no_dropout(), (1.0, -0.1))
    found: Tensor | None = passing.backward_classifier(torch.ones_like(forward(passing)))
    for layer in reversed(range(LAYERS)):
        assert found is not None
        found = passing.backward_layer(layer, found)
    assert all(map(torch.equal, model.parameters(), before))
    passing.backward_encoder(found)
    changed = [not torch.equal(weight, old) for weight, old in zip(model.parameters(), before, strict=True)]
    names = [name for (name, _), new in zip(model.named_parameters(), changed, strict=True) if new]
    assert names == ["encoder.weight", *(f"layers.{layer}.linear.weight" for layer in range(LAYERS))]


@pytest.mark.parametrize("dense", [False, True])
def test_a_fused_step_does_not_read_the_gradients_that_it_overwrites(dense):
    model = model_of()
    passing = make_fused_step(model, inputs_of(model, dense=dense), make_no_dropout())
    for weight in model.parameters():
        assert weight.grad is not None
        weight.grad.fill_(torch.nan)
    back(passing, torch.ones_like(forward(passing)))
    assert all(gradient.isfinite().all() for gradient in gradients(model).values())


def test_what_is_not_a_number_stays_so():
    model = model_of()
    assert model.encoder is not None
    nn.init.constant_(model.encoder.bias, torch.nan)
    assert forward(make_fused_step(model, inputs_of(model), make_no_dropout())).isnan().all()


@pytest.mark.parametrize(
    "keys",
    [
        {"alpha": 0.6},
        {"aggregation": "concat", "aggregation_layers": (0, LAYERS - 1)},
        {"backbone": "gcn"},
        {"residual": True},
    ],
)
def test_layers_with_another_order_of_sums_or_another_weight_use_autograd(keys):
    assert FusedWeights.of(model_of(**keys)) is None


def test_a_way_that_only_goes_forward_keeps_no_tape():
    model = model_of(backbone="gcn")
    passing = AutogradStep(model, inputs_of(model), make_no_dropout(), recording=False)
    logits = forward(passing)
    assert not logits.requires_grad
    with pytest.raises(KeyError):  # there is nothing to go back through
        back(passing, torch.ones_like(logits))


@pytest.mark.parametrize(
    ("keys", "kind"), [({}, FusedStep), ({"alpha": 0.6}, AutogradStep), ({"backbone": "sage"}, AutogradStep)]
)
def test_the_backbone_and_the_settings_decide_which_step_is_made(keys, kind):
    model = model_of(**keys)
    steps = Steps(model, make_optimizer(RunConfig(), model))
    assert type(steps.make(inputs_of(model), make_no_dropout())) is kind


def test_blocks_that_are_held_dense_use_autograd():
    model = model_of()
    inputs = inputs_of(model)
    first = dataclasses.replace(inputs.blocks[0], dense=inputs.blocks[0].matrix.toarray())
    inputs = dataclasses.replace(inputs, blocks=(first, *inputs.blocks[1:]))
    steps = Steps(model, make_optimizer(RunConfig(), model))
    assert type(steps.make(inputs, make_no_dropout())) is AutogradStep


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_fused_and_an_autograd_step_change_the_weights_alike(momentum):
    config = RunConfig(train=TrainConfig(optimizer="sgd", momentum=momentum, learning_rate=0.1, weight_decay=0.01))
    found = []
    for make in (lambda model, optimizer: Steps(model, optimizer).make, lambda model, _: partial(AutogradStep, model)):
        torch.manual_seed(0)  # of the biases that `model_of` draws
        model = model_of()
        optimizer = make_optimizer(config, model)
        maker = make(model, optimizer)
        for number in range(2):
            passing = maker(inputs_of(model), dropout_of(0.3))
            logits = forward(passing)
            back(passing, torch.full_like(logits, 0.1 * (number + 1)))
            optimizer.step(passing.pending)
        found.append(model.state_dict())
    for name, weight in found[0].items():
        torch.testing.assert_close(weight, found[1][name], msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("task", ["multiclass", "multilabel"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_loss_and_its_gradient_are_those_of_torch(task, dtype):
    torch.manual_seed(0)
    logits = (20 * torch.randn(9, CLASSES, dtype=dtype)).requires_grad_()
    labels = torch.randint(CLASSES, (9,))
    wanted = nn.functional.cross_entropy
    if task == "multilabel":
        labels, wanted = (torch.rand(9, CLASSES) < 0.3).to(dtype), nn.functional.binary_cross_entropy_with_logits
    loss = wanted(logits, labels)
    loss.backward()
    value, gradient = TASKS[task]().loss_and_gradient(logits.detach(), labels)
    assert value == pytest.approx(loss.item(), rel=1e-6 if dtype == torch.float32 else 1e-12)
    torch.testing.assert_close(gradient, logits.grad)
