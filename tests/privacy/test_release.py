from __future__ import annotations

import hashlib

import numpy as np
import pytest
import torch

from glasu.config import ModelConfig, RunConfig, TrainConfig, WireConfig
from glasu.data.party import Graph, PartyData, Splits
from glasu.errors import TrainingError
from glasu.model.aggregation import Mean
from glasu.model.sampler import Sample
from glasu.model.task import Targets
from glasu.privacy.ledger import Ledger
from glasu.privacy.release import Clip, HiddenSums, Protection, Release
from glasu.protocol.client import Client
from glasu.protocol.update import Others, local_update
from glasu.runtime.drive import advance
from glasu.timing import Stopwatch
from glasu.wire import ids
from glasu.wire.encoding import Encoding
from glasu.wire.encodings import use_for_all_kinds
from glasu.wire.floats import BFloat16, Plain
from glasu.wire.int8 import Int8
from glasu.wire.message_key import Key, Phase
from glasu.wire.ring import Ring
from glasu.wire.tensor_kinds import GRADIENT, OWNER_GRADIENT, PROBABILITIES, REPRESENTATION
from support.ledgers import Lines
from support.masks import key_of, make_masks
from support.perturbations import Rounding, row_noise

KEY = Key(run=bytes(12), phase=Phase.TRAINING, client=0, round=3, layer=1)
SECRET = b"a secret of thirty-two bytes ..."
NODES = np.array([2, 3, 5, 7])
OTHER_KEYS = [
    KEY._replace(**change)
    for change in (
        {"run": bytes(11) + b"1"},
        {"phase": Phase.EVALUATION},
        {"client": 1},
        {"round": 4},
        {"layer": 2},
        {"chunk": 1},
    )
]
REPEATS = [KEY._replace(**change) for change in ({"incarnation": 1}, {"attempt": 1})]


def make_release(encoding: Encoding, protection: Protection) -> Release:
    """Return a gate with the same encoding and protection for all kinds of tensors."""
    return Release(use_for_all_kinds(encoding), use_for_all_kinds(protection))


def noisy_release() -> Release:
    return make_release(Plain(), Protection(Clip(1.0), row_noise(0.1, secret=SECRET), [Rounding(8)]))


# The gate


def test_a_plain_release_sends_the_tensor_as_it_is():
    value = torch.randn(4, 3)
    sent = Release(use_for_all_kinds(Plain())).tensor(REPRESENTATION, value, KEY)
    assert sent.payload.dtype == "<f4"
    np.testing.assert_array_equal(sent.payload, value.numpy())
    assert torch.equal(sent.value, value)


def test_a_tensor_is_clipped_then_noised_then_rounded():
    value = 3 * torch.randn(4, 3)
    expected = Rounding(8)(row_noise(0.1, secret=SECRET).perturb(Clip(1.0)(value), KEY, NODES)[0], KEY)
    assert torch.equal(noisy_release().tensor(REPRESENTATION, value, KEY, NODES).value, expected)
    assert not torch.allclose(expected, value)


@pytest.mark.parametrize("encoding", [Plain(), Plain("fp64"), BFloat16(), Int8(3), Int8(3, stochastic=True)], ids=str)
def test_what_a_client_keeps_as_sent_is_what_the_receiver_decodes(encoding):
    value = 3 * torch.randn(4, 3)
    release = make_release(encoding, Protection(Clip(1.0), row_noise(0.1, secret=SECRET)))
    sent = release.tensor(REPRESENTATION, value, KEY, NODES)
    travelled = np.frombuffer(sent.payload.tobytes(), sent.payload.dtype).reshape(sent.payload.shape)
    np.testing.assert_array_equal(sent.value.numpy(), encoding.decode(travelled))


@pytest.mark.parametrize("kind", [REPRESENTATION, GRADIENT, PROBABILITIES])
def test_each_kind_of_tensor_travels_in_its_own_encoding(kind):
    encodings = {**use_for_all_kinds(Plain()), kind: BFloat16()}
    dtypes = {each: Release(encodings).tensor(each, torch.randn(2, 3), KEY).payload.dtype.str for each in encodings}
    assert dtypes == {**dict.fromkeys(encodings, "<f4"), kind: "<u2"}


@pytest.mark.parametrize(("encoding", "size"), [(Plain(), 40 * 4), (BFloat16(), 40 * 2), (Int8(4), 10 * (4 + 4))])
def test_the_ledger_counts_the_bytes_that_travel(encoding, size):
    release = Release(use_for_all_kinds(encoding))
    release.tensor(REPRESENTATION, torch.randn(10, 4), KEY)
    assert [(row["rows"], row["bytes"]) for row in release.ledger.list_totals()] == [(10, size)]


def test_what_int8_cannot_say_does_not_leave_the_gate_and_is_not_in_the_ledger():
    release, value = Release(use_for_all_kinds(Int8(3))), torch.randn(4, 3)
    value[2, 1] = torch.nan
    with pytest.raises(TrainingError, match=r"training round 3 layer 1 .* client 0: .* not a finite number"):
        release.tensor(REPRESENTATION, value, KEY)
    assert release.ledger.list_totals() == []


def test_a_lossy_encoding_changes_what_was_sent_and_a_faithful_one_does_not():
    value = torch.randn(4, 3)
    for encoding, faithful in ((Plain(), True), (BFloat16(), False), (Int8(3), False)):
        sent = Release(use_for_all_kinds(encoding)).tensor(REPRESENTATION, value, KEY)
        assert torch.equal(sent.value, value) == faithful
        torch.testing.assert_close(sent.value, value, rtol=0, atol=float(value.abs().max()) / 127)


def test_extracting_from_what_was_sent_leaves_exactly_the_others_part():
    """Extracting from the clean tensor would leave a part of the own noise among the others."""
    own, other = torch.randn(2, 4, 3)
    sent, theirs = (noisy_release().tensor(REPRESENTATION, tensor, KEY, NODES) for tensor in (own, other))
    joint = torch.from_numpy((sent.payload + theirs.payload) / 2)
    torch.testing.assert_close(Mean(2, 0).extract_others(joint, sent.value), theirs.value / 2)
    assert not torch.allclose(Mean(2, 0).extract_others(joint, own), theirs.value / 2, atol=1e-3)


def test_masks_change_what_travels_but_neither_the_sum_nor_the_own_contribution():
    ring, values = Ring(32, 2), torch.randn(2, 4, 3)
    gates = [Release(use_for_all_kinds(ring), sums=HiddenSums(hiding=hiding)) for hiding in make_masks(2)]
    sent = [
        gate.tensor(REPRESENTATION, value, key_of(m)) for m, (gate, value) in enumerate(zip(gates, values, strict=True))
    ]
    (total,) = ring.combine([each.payload for each in sent], 1, [key_of(0)])
    np.testing.assert_array_equal(total, sent[0].unmasked + sent[1].unmasked)
    for each, value in zip(sent, values, strict=True):
        torch.testing.assert_close(each.value, value, rtol=0, atol=1e-6)
        assert not (each.payload == each.unmasked).any()
    joint = gates[0].read(REPRESENTATION, key_of(0), total, num_summed=2)
    torch.testing.assert_close(Mean(2, 0).extract_others(joint, sent[0].value), sent[1].value / 2)


def test_only_the_kinds_whose_encoding_is_a_ring_are_hidden_and_the_ledger_says_which():
    encodings = {**use_for_all_kinds(Plain()), REPRESENTATION: Ring(32, 2)}
    gate, value = Release(encodings, sums=HiddenSums(hiding=make_masks(2)[0])), torch.ones(2, 2)
    for kind in (GRADIENT, PROBABILITIES):
        assert (gate.tensor(kind, value, key_of(0)).payload == 1).all()
    gate.tensor(REPRESENTATION, value, key_of(0))
    found = {row["kind"]: row["protection"] for row in gate.ledger.list_totals()}
    assert found == {"gradient": "none", "probabilities": "none", "representation": "masks"}


def test_the_owner_gradient_is_encrypted_instead_of_masked():
    gate = make_release(Plain(), Protection(Clip(1.0)))
    gate.encodings = {**gate.encodings, OWNER_GRADIENT: Plain()}
    gate.sums.hiding = make_masks(2)[0]
    sent, chunks = gate.sealed_gradient(torch.ones(2, 2) / 8, KEY, lambda encoded: [encoded.tobytes()[::-1]])
    assert chunks == [sent.payload.tobytes()[::-1]]
    assert torch.equal(sent.value, torch.ones(2, 2) / 8)
    (row,) = gate.ledger.list_totals()
    assert (row["kind"], row["protection"], row["bytes"]) == ("gradient", "clip+sealed", 16)


def test_each_kind_of_tensor_has_its_own_clip_and_noise():
    protections = {
        REPRESENTATION: Protection(Clip(0.5), row_noise(0.1, 0.5)),
        GRADIENT: Protection(Clip(2.0)),
        PROBABILITIES: Protection(noise=row_noise(0.3)),
    }
    gate, value = Release(use_for_all_kinds(Plain()), protections), 5 * torch.randn(4, 3)
    expected = {
        REPRESENTATION: row_noise(0.1, 0.5).perturb(Clip(0.5)(value), KEY, NODES)[0],
        GRADIENT: Clip(2.0)(value),
        PROBABILITIES: row_noise(0.3).perturb(value, KEY, NODES)[0],
    }
    for kind, wanted in expected.items():
        assert torch.equal(gate.tensor(kind, value, KEY, NODES).value, wanted)
    found = {row["kind"]: row["protection"] for row in gate.ledger.list_totals()}
    assert found == {
        "representation": "clip+noise+norm=0.5+multiplier=0.2",
        "gradient": "clip",
        "probabilities": "noise+norm=1.0+multiplier=0.3",
    }
    assert torch.equal(gate.clip(value), Clip(0.5)(value))  # LocalUpdate clips representations only
    assert not gate.transparent
    assert Release(gate.encodings, {GRADIENT: protections[REPRESENTATION]}).transparent


def test_a_released_tensor_has_no_gradient_and_the_own_one_stays_as_it_was():
    value = (3 * torch.randn(4, 3)).requires_grad_()
    before = value.detach().clone()
    sent = noisy_release().tensor(REPRESENTATION, value, KEY, NODES)
    assert not sent.value.requires_grad
    assert torch.equal(value.detach(), before)


def test_node_sets_and_numbers_pass_the_gate_too():
    release = Release(use_for_all_kinds(Plain()))
    sets = release.node_sets([np.array([1, 5]), np.array([], np.int64)], KEY)
    assert [nodes.dtype.str for nodes in sets] == ["<i4", "<i4"]
    assert [nodes.tolist() for nodes in sets] == [[1, 5], []]
    assert release.node_sets([np.array([700, 5, 1])], KEY)[0].tolist() == [1, 5, 700]
    losses = release.numbers("losses", [0.5, 0.25], KEY)
    assert losses.dtype == "<f8"
    assert [(row["kind"], row["rows"], row["bytes"]) for row in release.ledger.list_totals()] == [
        ("losses", 2, 16),
        ("node sets", 5, 2 + 4),  # gaps of one byte, but for 700
    ]


@pytest.mark.parametrize(
    ("release", "name"),
    [
        (Release(use_for_all_kinds(Plain())), "none"),
        (make_release(Plain(), Protection(Clip(1.0))), "clip"),
        (make_release(Plain(), Protection(perturbations=[Rounding(8)])), "rounding"),
        (noisy_release(), "clip+noise+norm=1.0+multiplier=0.1+rounding"),
    ],
)
def test_the_protection_names_what_was_done_in_its_order(release, name):
    assert release.find_protection(REPRESENTATION).describe() == name
    release.tensor(REPRESENTATION, torch.ones(2, 2), KEY, NODES[:2])
    assert release.ledger.list_totals()[0]["protection"] == name


# Clip


def test_each_row_is_clipped_by_itself():
    value = torch.tensor([[3.0, 4.0], [0.3, 0.4], [0.0, 0.0], [-30.0, 40.0]])
    torch.testing.assert_close(Clip(1.0)(value), torch.tensor([[0.6, 0.8], [0.3, 0.4], [0.0, 0.0], [-0.6, 0.8]]))


def test_a_row_inside_the_ball_is_not_touched():
    value = torch.randn(50, 4) / 10
    assert torch.equal(Clip(1.0)(value), value)


def test_no_clipped_row_is_longer_than_allowed():
    clipped = Clip(0.7)(10 * torch.randn(500, 4, dtype=torch.float64))
    assert clipped.norm(dim=1).max() <= 0.7 * (1 + 1e-15)


def test_clipping_has_the_gradient_that_finite_differences_find():
    value = torch.tensor([[3.0, 4.0], [0.3, 0.4], [-1.0, 2.0]], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(Clip(1.0), (value,))


def test_a_row_of_zeros_has_a_finite_gradient():
    value = torch.zeros(1, 3, requires_grad=True)
    Clip(1.0)(value).sum().backward()
    assert torch.equal(value.grad, torch.ones(1, 3))


def test_a_local_update_passes_the_clip_but_neither_noise_nor_rounding():
    partial = (3 * torch.randn(4, 3)).requires_grad_()
    passed = noisy_release().clip(partial)
    assert torch.equal(passed, Clip(1.0)(partial))
    assert passed.requires_grad
    assert make_release(Plain(), Protection(perturbations=[Rounding(2)])).clip(partial) is partial


def test_the_loss_of_a_local_update_is_that_of_the_clipped_partial():
    nodes = np.arange(6)
    party = PartyData(
        name="a",
        ids=nodes,
        features=np.random.default_rng(0).normal(size=(6, 4)),
        graph=Graph.from_edges(nodes, (nodes + 1) % 6, 6),
        labels=nodes % 3,
        classes=("x", "y", "z"),
        splits=Splits(nodes, nodes[:0], nodes[:0]),
    )
    config = RunConfig(
        model=ModelConfig(backbone="gcn", num_layers=1, aggregation_layers=(0,), hidden=5, dropout=0.0),
        train=TrainConfig(sampler="full", batch_size=0),
        wire=WireConfig(precision="fp64"),
    )
    client = Client(config, party, index=0, names="ab", watch=Stopwatch(lambda: 0.0))
    client.release = make_release(Plain("fp64"), Protection(Clip(0.3), row_noise(0.5, 0.3)))
    batch = client.learner.gather(
        Sample(0, (nodes, nodes), (client.learner.sampler.draw(nodes, 0, 0),), Targets.of_nodes(nodes))
    )
    others = Others(client.learner.aggregation, {1: torch.randn(6, 5, dtype=torch.float64)})
    client.learner.optimizer.step = lambda parts: None
    loss = advance(local_update(client, batch, client.learner.step(batch, 0), others)).value

    partial = client.learner.model.layers[0](batch.features, None, batch.blocks[0]).relu()
    assert partial.norm(dim=1).max() > 0.3
    clipped = torch.stack([0.3 * row / row.norm() if row.detach().norm() > 0.3 else row for row in partial])
    logits = client.learner.model.classifier(others.parts[1] + clipped / 2)
    expected = torch.nn.functional.cross_entropy(logits, torch.from_numpy(nodes % 3))
    assert loss == pytest.approx(expected.item(), rel=1e-12)
    weight = client.learner.model.layers[0].linear.weight
    torch.testing.assert_close(weight.grad, torch.autograd.grad(expected, weight)[0])


# The ledger


def test_the_ledger_adds_up_by_phase_kind_layer_and_protection():
    release = noisy_release()
    for key in (KEY, KEY._replace(round=4), KEY._replace(layer=3)):
        release.tensor(REPRESENTATION, torch.ones(5, 2), key, np.arange(5))
    release.tensor(GRADIENT, torch.ones(5, 2), KEY._replace(phase=Phase.BACKWARD), np.arange(5))
    rows = {(row["phase"], row["kind"], row["layer"]): row for row in release.ledger.list_totals()}
    assert {key: (row["releases"], row["rows"], row["bytes"]) for key, row in rows.items()} == {
        ("training", "representation", 1): (2, 10, 80),
        ("training", "representation", 3): (1, 5, 40),
        ("training", "gradient", 1): (1, 5, 40),
    }
    assert {row["protection"] for row in rows.values()} == {"clip+noise+norm=1.0+multiplier=0.1+rounding"}


def test_two_gates_share_no_ledger():
    first, second = Release(use_for_all_kinds(Plain())), Release(use_for_all_kinds(Plain()))
    first.tensor(REPRESENTATION, torch.ones(1, 1), KEY)
    assert first.ledger.length == 1
    assert second.ledger.list_totals() == []
    assert second.ledger.length == 0


def test_the_ledger_gets_the_digest_of_the_sent_bytes():
    lines = Lines()
    release = Release(use_for_all_kinds(Plain()), ledger=Ledger(lines))
    sent = release.tensor(REPRESENTATION, torch.arange(6.0).view(3, 2), KEY)
    sets = release.node_sets([np.array([3, 4, 200])], KEY)
    losses = release.numbers("losses", [0.5], KEY)
    points = release.points("blinded ids", np.arange(64, dtype=np.uint8).reshape(2, 32), KEY)
    contents = [sent.payload.tobytes(), ids.encode(sets[0]).tobytes(), losses.tobytes(), points.tobytes()]
    entries = lines.read()
    assert [entry.sha256 for entry in entries] == [hashlib.sha256(content).hexdigest() for content in contents]
    assert [entry.size for entry in entries] == [len(content) for content in contents]
    assert [(entry.rows, entry.columns) for entry in entries] == [(3, 2), (3, 1), (1, 1), (2, 32)]
