from __future__ import annotations

import numpy as np
import pytest

from glasu.protocol.message_bytes import encode
from support.monolith import ALL_LAYERS, NUM_CLASSES, keep_samples, run, settings, tiny_parties

HEADER, SECTION, LOSS, NODE = 48, 12, 8, 1  # bytes; all ids here are below 128
VALUE = {"fp32": 4, "fp64": 8, "bf16": 2}
M, N, HIDDEN = 3, 24, 6
TRAIN, VALIDATION, TEST = 12, 6, 6


def tensor(rows, columns, precision):
    """Return the bytes of a message that carries one tensor; int8: 4 more for every client's row."""
    row = columns + 4 * columns // HIDDEN if precision == "int8" else columns * VALUE[precision]
    return HEADER + SECTION + rows * row


def evaluation_bytes(config, rows, precision, owner):
    """Return the bytes of one evaluation: (to the server, to the clients)."""
    layers, wide = config.model.aggregation_layers, HIDDEN * (M if config.model.aggregation == "concat" else 1)
    up = down = 0
    if owner:  # the owner proposes the nodes; the others propose empty sets
        up += M * (HEADER + SECTION) + NODE * rows
        down += M * (HEADER + SECTION + NODE * rows)
    for layer in layers:
        asked = rows if layer == layers[-1] else N
        up += M * tensor(asked, HIDDEN, precision)
        down += M * tensor(asked, wide, precision)
    if not owner:
        scores = tensor(rows, NUM_CLASSES, "fp64" if precision == "fp64" else "fp32")
        up, down = up + M * scores, down + M * scores
    up += M * (HEADER + SECTION) + 3 * 8 * (1 if owner else M)  # accuracy, macro F1, loss
    down += M * (HEADER + 2 * (SECTION + 1))  # the verdict: two flags
    return up, down


def training_bytes(config, rows, precision, owner):
    """Return the bytes of one round without node sets: (to the server, to the clients); `rows` is {layer: |S[l+1]|}."""
    layers, wide = config.model.aggregation_layers, HIDDEN * (M if config.model.aggregation == "concat" else 1)
    up = sum(M * tensor(rows[layer], HIDDEN, precision) for layer in layers)
    down = sum(M * tensor(rows[layer], wide, precision) for layer in layers)
    senders = 1 if owner else M
    up += M * (HEADER + SECTION) + senders * LOSS * config.train.num_local_steps
    top = layers[-1]
    if config.train.backward == "joint":
        for layer in layers:
            gradients = 1 if owner and layer == top else M
            up += gradients * tensor(rows[layer], wide, precision) + (M - gradients) * HEADER
            down += M * tensor(rows[layer], HIDDEN, precision)
    elif owner:
        up += tensor(rows[top], wide, precision) + (M - 1) * HEADER
        down += M * tensor(rows[top], wide, precision)
    return up, down


@pytest.mark.parametrize(("backward", "steps"), [("local", 1), ("local", 3), ("joint", 1)])
@pytest.mark.parametrize("layers", [(3,), (1, 3), ALL_LAYERS])
@pytest.mark.parametrize(
    ("aggregation", "precision"),
    [("mean", "fp32"), ("mean", "int8"), ("concat", "fp64"), ("concat", "int8"), ("concat", "bf16")],
)
@pytest.mark.parametrize("owner", [None, "b"])
def test_a_run_sends_the_bytes_of_a_closed_formula(owner, aggregation, layers, backward, steps, precision):
    config = settings(
        aggregation=aggregation,
        aggregation_layers=layers,
        backward=backward,
        num_local_steps=steps,
        labels=owner or "all",
        precision=precision,
        num_rounds=3,
        evaluate_every=2,
        prefetch=2,
    )
    done = run(config, tiny_parties(owner=owner))
    rows = {layer: TRAIN if layer == 3 else N for layer in layers}
    up, down = (3 * part for part in training_bytes(config, rows, precision, owner))
    for nodes in (VALIDATION, VALIDATION, TEST):  # after rounds 2 and 3, and the test
        more_up, more_down = evaluation_bytes(config, nodes, precision, owner)
        up, down = up + more_up, down + more_down
    up += 8 * (1 if owner else M)  # with the test: whether the model has learned nothing
    if owner:  # the batches of three rounds in two agreements: one for rounds 0 and 1, one for round 2
        up += 2 * M * HEADER + 3 * (M * SECTION + NODE * TRAIN)
        down += 2 * M * HEADER + 3 * M * (SECTION + NODE * TRAIN)
    assert done.meter.bytes_to_server == up
    assert done.meter.bytes_to_clients == down


@pytest.mark.parametrize("owner", [None, "c"])
@pytest.mark.parametrize("sampling", ["node", "layer"])
@pytest.mark.parametrize("layers", [(3,), (1, 3), ALL_LAYERS])
def test_index_bytes_are_those_of_every_proposed_node_and_of_every_node_of_a_union_at_every_client(
    layers, sampling, owner
):
    keys = {"sampler": "neighbor", "sampling": sampling, "fanout": 1, "batch_size": 4, "labels": owner or "all"}
    config = settings(aggregation_layers=layers, num_rounds=5, prefetch=2, **keys)
    samples = [[] for _ in range(M)]
    done = run(config, tiny_parties(owner=owner), arrange=keep_samples(samples))
    expected = 0
    for own in samples:
        for sample in own:
            agreed = [layer + 1 for layer in layers[:-1]]
            expected += sum(NODE * len(sample.draws[index].nodes) for index in agreed)  # proposed
            expected += sum(NODE * len(sample.nodes[index]) for index in agreed)  # the union, to this client
    if owner:
        expected += 5 * (1 + M) * NODE * 4  # the batch, to the server and to every client
        expected += (1 + M) * NODE * (VALIDATION + TEST)  # which nodes are evaluated
    assert done.meter.by_kind["index"] == expected
    assert (expected > 0) == (len(layers) > 1 or owner is not None)


def round_bytes(**keys):
    """Return the tensor bytes of one round: what a second round adds to a run of one."""
    runs = [run(settings(num_rounds=rounds, hidden=HIDDEN, **keys), tiny_parties()) for rounds in (1, 2)]
    return runs[1].meter.by_kind["tensor"] - runs[0].meter.by_kind["tensor"]


@pytest.mark.parametrize("sampler", ["full", "shared"])
@pytest.mark.parametrize("steps", [1, 4])
@pytest.mark.parametrize("layers", [(3,), (1, 3), (2, 3)])
def test_tensor_bytes_per_local_update_fall_by_q_times_the_rows_at_all_layers_over_those_at_i(layers, steps, sampler):
    keys = {"sampler": sampler, "batch_size": 2, "fanout": 1}
    always = round_bytes(aggregation_layers=ALL_LAYERS, **keys)  # Q = 1
    lazily = round_bytes(aggregation_layers=layers, num_local_steps=steps, **keys) / steps
    rows = {"full": [N, N, N, 2], "shared": [16, 8, 4, 2]}[sampler]  # shared: |S[l]| = (1 + fanout) |S[l+1]|
    assert always == 2 * M * sum(rows) * HIDDEN * 8
    assert always / lazily == pytest.approx(steps * sum(rows) / sum(rows[layer] for layer in layers))


def test_with_equal_sets_everywhere_the_saving_is_the_papers_q_l_over_k():
    keys = {"sampler": "full", "batch_size": 0}
    parties = tiny_parties()
    everyone = type(parties[0].splits)(np.arange(N - 2), np.array([N - 2]), np.array([N - 1]))
    parties = [type(one)(**{**vars(one), "splits": everyone}) for one in parties]

    def cost(layers, steps):
        runs = [
            run(settings(aggregation_layers=layers, num_local_steps=steps, num_rounds=rounds, **keys), parties)
            for rounds in (1, 2)
        ]
        return (runs[1].meter.by_kind["tensor"] - runs[0].meter.by_kind["tensor"]) / steps

    # here S[L] is all but two of the nodes, so the factor is QL/K to within a few per cent
    assert cost(ALL_LAYERS, 1) / cost((1, 3), 4) == pytest.approx(4 * 4 / 2, rel=0.05)


@pytest.mark.parametrize("keys", [{}, {"backward": "joint"}, {"num_local_steps": 4}, {"sampler": "neighbor"}])
@pytest.mark.parametrize("owner", [None, "a"])
def test_bytes_by_kind_and_by_phase_each_add_up_to_all_bytes(owner, keys):
    sent = []

    def carry(message):
        sent.append(len(encode(message)))
        return message

    config = settings(labels=owner or "all", num_rounds=4, evaluate_every=2, prefetch=3, **keys)
    meter = run(config, tiny_parties(owner=owner), carry=carry).meter
    total = meter.bytes_to_server + meter.bytes_to_clients
    assert sum(meter.by_kind.values()) == total
    assert sum(meter.by_phase.values()) == total
    assert sum(sent) == total  # and they are the bytes that would travel
    assert meter.messages == len(sent)
    assert set(meter.by_kind) <= {"header", "tensor", "index", "loss", "metrics", "verdict"}
    assert set(meter.by_phase) <= {"sampling", "training", "evaluation"}
