from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch

from glasu.config import ModelConfig
from glasu.model.aggregation import Aggregation, Concat, Mean, make_aggregation
from glasu.wire.encoding import Encoding
from glasu.wire.floats import BFloat16, Plain
from glasu.wire.int8 import Int8
from glasu.wire.message_key import SERVER, Key, Phase
from support.row_header import RowHeader

KINDS = [Mean, Concat]
KEY = Key(run=bytes(12), phase=Phase.TRAINING, client=0)
SIZES = [1, 2, 3, 5]


def partials_of(num_clients: int, dtype: type = np.float32) -> list[np.ndarray]:
    return list(np.random.default_rng(0).normal(size=(num_clients, 5, 4)).astype(dtype))


def aggregate(role: Aggregation, partials: list[np.ndarray]) -> np.ndarray:
    """Aggregate as the server does with plain floats."""
    return role.combine_partials(Plain("fp64" if partials[0].dtype == np.float64 else "fp32"), partials, KEY, 0)


def backpropagate(role: Aggregation, gradients: list[np.ndarray]) -> list[np.ndarray]:
    """Divide gradients at H[l+1] as the server does with plain floats."""
    return role.combine_gradients(Plain(), gradients, [KEY] * role.num_clients, 0)


def by_torch(kind: type[Mean | Concat], partials: list[torch.Tensor]) -> torch.Tensor:
    """Aggregate as a centralised network would."""
    return torch.stack(partials).mean(dim=0) if kind is Mean else torch.cat(partials, dim=1)


# The conformance suite: every aggregation passes it.


@pytest.mark.parametrize("num_clients", SIZES)
@pytest.mark.parametrize("kind", KINDS)
def test_merging_others_with_the_own_partial_gives_back_the_joint_representation(kind, num_clients):
    partials = partials_of(num_clients)
    joint = torch.from_numpy(aggregate(kind(num_clients), partials))
    for client, partial in enumerate(map(torch.from_numpy, partials)):
        role = kind(num_clients, client)
        merged = role.merge(role.extract_others(joint, partial), partial)
        torch.testing.assert_close(merged, joint, rtol=0, atol=0 if kind is Concat else 2e-7)


@pytest.mark.parametrize("num_clients", SIZES)
@pytest.mark.parametrize("kind", KINDS)
def test_the_server_aggregates_what_torch_would(kind, num_clients):
    partials = partials_of(num_clients, np.float64)
    expected = by_torch(kind, [torch.from_numpy(partial) for partial in partials])
    found = aggregate(kind(num_clients), partials)
    np.testing.assert_allclose(found, expected.numpy(), rtol=1e-14, atol=1e-15)
    assert found.shape[1] == 4 * kind(num_clients).widening


@pytest.mark.parametrize("kind", KINDS)
def test_others_do_not_depend_on_the_own_partial(kind):
    first = partials_of(3, np.float64)
    second = [first[0], first[1] + 1.0, first[2]]
    role = kind(3, 1)
    others = [
        role.extract_others(torch.from_numpy(aggregate(role, partials)), torch.from_numpy(partials[1]))
        for partials in (first, second)
    ]
    torch.testing.assert_close(*others)


@pytest.mark.parametrize("kind", KINDS)
def test_others_depend_on_every_other_client(kind):
    role, partials = kind(3, 1), partials_of(3)
    before = role.extract_others(torch.from_numpy(aggregate(role, partials)), torch.from_numpy(partials[1]))
    for client in (0, 2):
        changed = [partial + 1 if index == client else partial for index, partial in enumerate(partials)]
        after = role.extract_others(torch.from_numpy(aggregate(role, changed)), torch.from_numpy(changed[1]))
        assert not torch.allclose(before, after)


@pytest.mark.parametrize("num_clients", SIZES)
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_go_back_as_through_autograd(kind, num_clients):
    leaves = [torch.from_numpy(partial).requires_grad_() for partial in partials_of(num_clients)]
    joint = by_torch(kind, leaves)
    total = torch.randn_like(joint)
    joint.backward(total)
    for leaf, gradient in zip(leaves, backpropagate(kind(num_clients), [total.numpy()]), strict=True):
        np.testing.assert_allclose(gradient, leaf.grad.numpy(), rtol=1e-6)
        assert gradient.flags.c_contiguous
        assert gradient.dtype == np.float32


@pytest.mark.parametrize("kind", KINDS)
def test_in_a_local_update_the_gradient_reaches_the_own_partial_alone(kind):
    partials = partials_of(3)
    role, own = kind(3, 1), torch.from_numpy(partials[1]).requires_grad_()
    joint = torch.from_numpy(aggregate(role, partials)).requires_grad_()
    others = role.extract_others(joint, own)
    assert not others.requires_grad
    total = torch.randn(5, 4 * role.widening)
    role.merge(others, own).backward(total)
    np.testing.assert_allclose(own.grad.numpy(), backpropagate(role, [total.numpy()])[1], rtol=1e-6)
    assert joint.grad is None


@pytest.mark.parametrize("kind", KINDS)
def test_aggregating_leaves_the_partials_as_they_were(kind):
    partials = partials_of(3)
    before = [partial.copy() for partial in partials]
    aggregate(kind(3), partials)
    np.testing.assert_array_equal(partials, before)


# Properties of single aggregations.


def test_concat_moves_encoded_rows_without_rounding_them_again():
    encoding, partials = Int8(4), partials_of(3)
    payloads = [encoding.encode(partial, KEY) for partial in partials]
    sent = [encoding.decode(payload) for payload in payloads]
    joint = Concat(3).combine_partials(encoding, payloads, KEY, 0)
    np.testing.assert_array_equal(encoding.decode(joint), np.concatenate(sent, axis=1))


@pytest.mark.parametrize(
    "encoding", [Plain(), BFloat16(), Int8(4), Int8(4, stochastic=True), RowHeader()], ids=lambda each: each.name
)
@pytest.mark.parametrize("kind", KINDS)
def test_a_gradient_is_divided_as_if_it_were_decoded_added_and_encoded_for_every_client(kind, encoding):
    role, first_row = kind(3), 7
    keys = [KEY._replace(client=client) for client in range(3)]
    payloads = [
        encoding.encode(value, KEY) for value in np.random.default_rng(1).normal(size=(2, 5, 4 * role.widening))
    ]
    total = encoding.decode(payloads[0]) + encoding.decode(payloads[1])
    shares = [total / 3] * 3 if kind is Mean else np.split(total, 3, axis=1)
    for found, share, key in zip(
        role.combine_gradients(encoding, payloads, keys, first_row), shares, keys, strict=True
    ):
        np.testing.assert_array_equal(found, encoding.encode(share, key, first_row))


def test_the_mean_adds_in_client_order():
    values = [np.full((1, 1), value, np.float32) for value in (1e8, 1.0, -1e8)]
    assert aggregate(Mean(3), values).item() == 0.0  # the 1 is lost beside 1e8
    assert aggregate(Mean(3), [values[0], values[2], values[1]]).item() == np.float32(1) / np.float32(3)


def test_concat_stands_in_client_order():
    values = [np.full((1, 1), value, np.float32) for value in (3, 1, 2)]
    assert aggregate(Concat(3), values).tolist() == [[3, 1, 2]]


def test_the_mean_keeps_the_precision_of_its_partials():
    assert aggregate(Mean(3), partials_of(3)).dtype == np.float32
    assert aggregate(Mean(3), partials_of(3, np.float64)).dtype == np.float64


@pytest.mark.parametrize(("name", "kind"), [("mean", Mean), ("concat", Concat)])
def test_the_config_names_the_aggregation(name, kind):
    assert make_aggregation(ModelConfig(aggregation=name), 3, 2) == kind(3, 2)


@pytest.mark.parametrize("kind", [Mean, Concat])
def test_the_own_gradient_is_that_of_merge(kind):
    torch.manual_seed(0)
    values = partials_of(3)
    aggregation = kind(3, 1)
    joint = torch.from_numpy(aggregate(aggregation, values))
    partial = torch.from_numpy(values[1]).clone().requires_grad_()
    merged = aggregation.merge(aggregation.extract_others(joint, partial.detach()), partial)
    probe = torch.randn_like(joint)
    merged.backward(probe)
    torch.testing.assert_close(aggregation.own_gradient(probe), partial.grad)


def test_the_server_loads_neither_torch_nor_pyg_nor_numba():
    program = (
        "import glasu.protocol.server, glasu.protocol.message_bytes, glasu.runtime.telemetry;"
        "import glasu.model.aggregation, sys;"
        "loaded = {'torch', 'torch_geometric', 'numba'} & set(sys.modules); assert not loaded, loaded"
    )
    finished = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr


# The server's halves, on encoded tensors

ENCODINGS = [Plain(), Plain("fp64"), BFloat16(), Int8(4), Int8(4, stochastic=True, seed=3), RowHeader()]
ANSWER = Key(run=bytes(12), phase=Phase.TRAINING, client=SERVER, layer=1)


def encode_all(encoding: Encoding, values: list[np.ndarray]) -> list[np.ndarray]:
    return [encoding.encode(value, ANSWER._replace(client=client)) for client, value in enumerate(values)]


@pytest.mark.parametrize("encoding", ENCODINGS, ids=str)
@pytest.mark.parametrize("num_clients", SIZES)
@pytest.mark.parametrize("kind", KINDS)
def test_combined_partials_are_the_encoded_aggregate_of_the_decoded_ones(kind, num_clients, encoding):
    payloads = encode_all(encoding, partials_of(num_clients))
    aggregation = kind(num_clients)
    found = aggregation.combine_partials(encoding, payloads, ANSWER, 2)
    decoded = [torch.from_numpy(encoding.decode(payload)) for payload in payloads]
    if kind is Concat:  # nothing is rounded again
        np.testing.assert_array_equal(encoding.decode(found), by_torch(kind, decoded).numpy())
    else:
        total = sum(decoded[1:], start=decoded[0]).numpy() / decoded[0].numpy().dtype.type(num_clients)
        assert found.tobytes() == encoding.encode(total, ANSWER, 2).tobytes()
    assert encoding.find_error(found, 4 * aggregation.widening) == ""


@pytest.mark.parametrize("encoding", ENCODINGS, ids=str)
@pytest.mark.parametrize("num_clients", SIZES)
@pytest.mark.parametrize("kind", KINDS)
def test_combined_gradients_are_the_encoded_shares_of_the_summed_gradients(kind, num_clients, encoding):
    aggregation = kind(num_clients)
    rng = np.random.default_rng(1)
    payloads = encode_all(encoding, list(rng.normal(size=(num_clients, 5, 4 * aggregation.widening))))
    keys = [ANSWER.to_client(client) for client in range(num_clients)]
    shares = aggregation.combine_gradients(encoding, payloads, keys, 2)
    total = encoding.decode(payloads[0]).copy()
    for payload in payloads[1:]:
        total += encoding.decode(payload)
    stochastic = isinstance(encoding, Int8) and encoding.stochastic
    assert len(shares) == num_clients
    for client, share in enumerate(shares):
        block = total[:, 4 * client : 4 * client + 4]
        value = total / total.dtype.type(num_clients) if kind is Mean else block
        key = keys[client] if kind is Concat or stochastic else keys[0]
        assert share.tobytes() == encoding.encode(value, key, 2).tobytes()
        assert encoding.find_error(share, 4) == ""


@pytest.mark.parametrize("kind", KINDS)
def test_combined_gradients_are_those_of_autograd(kind):
    leaves = [torch.randn(5, 4, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    joint = by_torch(kind, leaves)
    gradients = [torch.randn_like(joint) for _ in range(3)]
    joint.backward(sum(gradients))
    keys = [ANSWER.to_client(client) for client in range(3)]
    payloads = [gradient.numpy() for gradient in gradients]
    shares = kind(3).combine_gradients(Plain("fp64"), payloads, keys, 0)
    for leaf, share in zip(leaves, shares, strict=True):
        np.testing.assert_allclose(share, leaf.grad.numpy(), rtol=1e-14, atol=1e-15)


@pytest.mark.parametrize("encoding", ENCODINGS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_combining_leaves_the_received_payloads_as_they_were(kind, encoding):
    aggregation = kind(3)
    partials = encode_all(encoding, partials_of(3))
    gradients = encode_all(encoding, [np.ones((5, 4 * aggregation.widening))] * 3)
    before = [payload.tobytes() for payload in (*partials, *gradients)]
    aggregation.combine_partials(encoding, partials, ANSWER, 0)
    aggregation.combine_gradients(encoding, gradients, [ANSWER] * 3, 0)
    assert [payload.tobytes() for payload in (*partials, *gradients)] == before
