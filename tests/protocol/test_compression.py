"""Rounded tensors on the wire: one rounding per direction, the same values at every reader, and valid gradients."""

from __future__ import annotations

import dataclasses
import tracemalloc
from collections import defaultdict

import numpy as np
import pytest
import torch

from glasu.errors import ProtocolError, TrainingError
from glasu.protocol.backward import server_backward
from glasu.protocol.inference import server_inference
from glasu.protocol.messages import Gradient, Joint, JointGradient, JointScores, Partial, Scores, TensorMessage
from glasu.protocol.requests import Receive, Scatter
from glasu.protocol.server import Server, Sizes
from glasu.runtime.drive import advance
from glasu.runtime.simulation import simulate
from glasu.runtime.trained_model import TrainedModel
from glasu.wire.encodings import make_encodings
from glasu.wire.floats import BFloat16, Plain
from glasu.wire.int8 import Int8
from glasu.wire.message_key import Key, Phase
from glasu.wire.tensor_kinds import GRADIENT, REPRESENTATION
from support.monolith import identical, run, settings, tiny_parties
from support.spies import run_with_spies

HIDDEN, M = 6, 3
ROUNDED = ["bf16", "int8"]


def quick(**keys):
    return settings(**{"precision": "int8", "num_rounds": 2, "evaluate_every": 2, "hidden": HIDDEN, **keys})


def record_traffic(config, parties=None, **keys):
    """Return the traffic {kind: {(phase, round, layer, chunk): {sender: payload}}} and the run."""
    seen = defaultdict(lambda: defaultdict(dict))

    def carry(message):
        if isinstance(message, TensorMessage):
            key = message.key
            seen[type(message)][key.phase, key.round, key.layer, key.chunk][key.client] = message.value.copy()
        return message

    return seen, run(config, parties or tiny_parties(), carry=carry, **keys)


# --- one rounding each way ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ROUNDED)
def test_the_server_rounds_the_mean_of_what_was_sent_once_and_everyone_gets_the_same_bytes(precision):
    config = quick(precision=precision)
    seen, _ = record_traffic(config, scatter=3)
    encoding = make_encodings(config)[REPRESENTATION]
    assert len(seen[Partial]) == 2 * 2 + 2 * 2  # two rounds and two evaluations of two layers
    for about, partials in seen[Partial].items():
        sent = [encoding.decode(partials[client]) for client in range(M)]
        mean = (sent[0] + sent[1] + sent[2]) / np.float32(3)
        expected = encoding.encode(mean, Key(run=b"", phase=about[0], client=0))
        (joint,) = seen[Joint][about].values()  # one for all
        assert joint.tobytes() == expected.tobytes()


@pytest.mark.parametrize("precision", ["fp32", *ROUNDED])
def test_a_concatenation_is_what_was_sent_side_by_side_and_is_not_rounded_again(precision):
    config = quick(precision=precision, aggregation="concat")
    seen, _ = record_traffic(config, scatter=3)
    for about, partials in seen[Partial].items():
        (joint,) = seen[Joint][about].values()
        assert joint.tobytes() == np.concatenate([partials[client] for client in range(M)], axis=1).tobytes()


@pytest.mark.parametrize("precision", ROUNDED)
def test_the_label_owners_gradient_reaches_everyone_as_it_was_sent(precision):
    seen, _ = record_traffic(quick(precision=precision, labels="b"), tiny_parties(owner="b"), scatter=3)
    assert len(seen[Gradient]) == 2
    for about, gradients in seen[Gradient].items():
        assert list(gradients) == [1]
        assert seen[JointGradient][about].popitem()[1].tobytes() == gradients[1].tobytes()


@pytest.mark.parametrize("aggregation", ["mean", "concat"])
def test_gradients_are_rounded_by_numbers_of_their_own_message(aggregation):
    config = quick(backward="joint", aggregation=aggregation)
    seen, _ = record_traffic(config, scatter=3)
    encoding = make_encodings(config)[GRADIENT]
    assert encoding.stochastic
    for about, gradients in seen[Gradient].items():
        total = sum(encoding.decode(gradients[client]) for client in range(M))
        for sender, payload in seen[JointGradient][about].items():
            client = sender - 0x8000
            share = total / M if aggregation == "mean" else total[:, client * HIDDEN : (client + 1) * HIDDEN]
            step = np.abs(share).max(axis=1, keepdims=True) / 127
            assert (np.abs(encoding.decode(payload) - share) <= 1.001 * step).all()
    if aggregation == "mean":  # the same numbers for all, but each message has its own rounding
        for shares in seen[JointGradient].values():
            assert len({payload.tobytes() for payload in shares.values()}) == M


@pytest.mark.parametrize("precision", ROUNDED)
def test_class_probabilities_travel_as_computed(precision):
    seen, _ = record_traffic(quick(precision=precision))
    for kind in (Scores, JointScores):
        assert {payload.dtype.str for one in seen[kind].values() for payload in one.values()} == {"<f4"}


# --- the laws of the model hold for the sent values ----------------------------------------------------------------


@pytest.mark.parametrize("precision", ROUNDED)
@pytest.mark.parametrize("aggregation", ["mean", "concat"])
def test_all_clients_continue_with_the_same_bits_and_extract_what_they_sent(aggregation, precision):
    config = quick(precision=precision, aggregation=aggregation, num_local_steps=2)
    seen = {}

    def carry(message):
        if isinstance(message, Partial) and message.key.phase is Phase.TRAINING:
            seen[message.key.round, message.key.layer, message.key.client] = message.value.copy()
        return message

    _, spies = run_with_spies(config, tiny_parties(), scatter=4, carry=carry)
    encoding = make_encodings(config)[REPRESENTATION]
    for index, (t, layer) in enumerate([(0, 1), (0, 3), (1, 1), (1, 3)]):
        joints = [spy.extracted[index][0] for spy in spies]
        assert all(torch.equal(joint, joints[0]) for joint in joints)
        for m, spy in enumerate(spies):
            joint, sent, others = spy.extracted[index]
            assert torch.equal(sent, torch.from_numpy(encoding.decode(seen[t, layer, m])))
            merged = spy.inner.merge(others, sent)
            tolerance = 0 if aggregation == "concat" else 2e-7 * float(joint.abs().max())
            torch.testing.assert_close(merged, joint, rtol=0, atol=tolerance)


@pytest.mark.parametrize("aggregation", ["mean", "concat"])
def test_the_first_step_differs_from_the_joint_inference_by_the_own_rounding_alone(aggregation):
    config = quick(aggregation=aggregation, dropout=0.5, num_rounds=1, evaluate_every=1)
    _, spies = run_with_spies(config, tiny_parties(), scatter=5)
    for m, spy in enumerate(spies):
        joint, sent, _ = spy.extracted[0]
        _, own, merged = spy.merged[0]  # with the masks of the joint inference
        half_a_step = own.abs().max(dim=1, keepdim=True).values / 254 * 1.001
        assert ((own - sent).abs() <= half_a_step).all()
        assert not torch.equal(own, sent)
        moved = (merged - joint).abs()
        if aggregation == "mean":
            assert (moved <= half_a_step / M + 1e-6).all()
        else:
            columns = torch.arange(M * HIDDEN) // HIDDEN == m
            assert (moved[:, columns] <= half_a_step).all()
            assert (moved[:, ~columns] == 0).all()


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"aggregation": "concat"},
        {"backward": "joint"},
        {"backward": "joint", "aggregation": "concat"},
        {"labels": "b"},
        {"labels": "b", "backward": "joint"},
        {"sampler": "neighbor", "num_local_steps": 3},
        {"backbone": "gat"},
    ],
    ids=str,
)
def test_rounded_training_stays_near_the_exact_one(keys):
    parties = tiny_parties(owner=keys.get("labels"))
    losses = {
        precision: np.array(run(quick(precision=precision, num_rounds=8, **keys), parties).server.progress.losses)
        for precision in ("fp32", "bf16", "int8")
    }
    for precision in ROUNDED:
        np.testing.assert_allclose(losses[precision], losses["fp32"], rtol=0.03)
        assert (losses[precision] != losses["fp32"]).any()


@pytest.mark.parametrize("precision", ROUNDED)
def test_predictions_are_near_the_exact_ones_and_still_probabilities(precision):
    parties = tiny_parties()
    model = TrainedModel.of(simulate(parties, quick(precision="fp32", num_rounds=4)).clients)
    exact = model.predict_proba(parties)
    rounded = dataclasses.replace(model, config=model.config.replace(wire={"precision": precision}))
    found = rounded.predict_proba(parties)
    np.testing.assert_allclose(found, exact, atol=0.02)
    assert not np.array_equal(found, exact)
    np.testing.assert_allclose(found.sum(axis=1), 1, atol=1e-6)


# --- the server --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["fp32", *ROUNDED])
@pytest.mark.parametrize("backward", ["local", "joint"])
@pytest.mark.parametrize("aggregation", ["mean", "concat"])
def test_the_number_of_rows_per_chunk_changes_no_bit_of_a_sum(aggregation, backward, precision):
    config = quick(precision=precision, aggregation=aggregation, backward=backward)
    whole = run(config, tiny_parties())
    pieces = run(config.replace(wire={"chunk_rows": 5}), tiny_parties())
    assert identical(whole.final, pieces.final)
    assert whole.meter.by_kind["tensor"] == pieces.meter.by_kind["tensor"]


@pytest.mark.parametrize("what", ["aggregate", "backpropagate"])
@pytest.mark.parametrize("precision", ROUNDED)
def test_the_server_needs_little_more_memory_than_its_answer(precision, what):
    hidden = 32
    config = quick(precision=precision, hidden=hidden)
    rows = config.wire.chunk_rows
    server = Server(config, "abc", Sizes(1, 1, 1), bytes(12))
    kind, message = (REPRESENTATION, Partial) if what == "aggregate" else (GRADIENT, Gradient)
    value = np.ones((rows, hidden), np.float32)
    keys = [Key(run=bytes(12), phase=Phase.TRAINING, client=client) for client in range(M)]
    messages = [message(key, server.shapes.encodings[kind].encode(value, key)) for key in keys]
    layers = dict.fromkeys(server.aggregation_layers, rows)
    key = server.identity.key(Phase.TRAINING, 0)
    script = server_inference(server, key, layers) if what == "aggregate" else server_backward(server, key, layers)
    assert isinstance(advance(script), Receive)
    tracemalloc.start()
    try:
        answer = advance(script, messages)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    answers = answer.messages if isinstance(answer, Scatter) else [answer.message]
    size = sum(answer.value.nbytes for answer in answers)
    assert peak < size + 12 * rows * hidden * 4  # a few chunks of floats


def tamper_with(change, kind=Partial, client=1):
    """Return a `carry` that changes the tensor of one client's messages, or of the server's answers."""

    def carry(message):
        if isinstance(message, kind) and (message.key.client == client or kind is Joint):
            return dataclasses.replace(message, value=change(message.value.copy()))
        return message

    return carry


def with_step(step):
    def change(payload):
        payload[2, :4] = np.array([step], "<f4").view(np.int8)
        return payload

    return change


HOSTILE = {
    "floats": (lambda payload: np.ones((len(payload), HIDDEN), np.float32), "expected a matrix of i1, got .* f4"),
    "bf16": (lambda payload: np.ones((len(payload), HIDDEN), np.uint16), "expected a matrix of i1, got .* u2"),
    "narrow": (lambda payload: payload[:, :-1], "multiple of 10 bytes, got 9"),
    "wide": (lambda payload: np.concatenate([payload] * 2, axis=1), r"expected 6 columns, got 12|got \(24, 12\)"),
    "short": (lambda payload: payload[:-1], r"got (23|\(23, \d+\))"),
    "NaN": (with_step(np.nan), "step of a row is nan"),
    "infinite": (with_step(np.inf), "step of a row is inf"),
    "negative": (with_step(-1.0), "step of a row is -1"),
    "huge": (with_step(3e38), "step of a row is 3"),
}


@pytest.mark.parametrize("aggregation", ["mean", "concat"])
@pytest.mark.parametrize("name", HOSTILE)
def test_the_server_refuses_a_tensor_that_is_not_what_it_expects_and_names_the_party(name, aggregation):
    change, reason = HOSTILE[name]
    with pytest.raises(ProtocolError, match=f"party 'b', training round 0 layer 1 .*{reason}"):
        run(quick(aggregation=aggregation), tiny_parties(), carry=tamper_with(change))


@pytest.mark.parametrize("precision", ["fp32", "fp64", *ROUNDED])
def test_the_server_knows_the_width_even_if_all_clients_send_another(precision):
    def carry(message):
        if not isinstance(message, Partial):
            return message
        encoding = make_encodings(quick(precision=precision))[REPRESENTATION]
        value = encoding.encode(np.ones((24, 2 * HIDDEN)), message.key)
        return dataclasses.replace(message, value=value)

    with pytest.raises(ProtocolError, match=r"party 'a', .* representation: expected 6 columns, got 12"):
        run(quick(precision=precision), tiny_parties(), carry=carry)


@pytest.mark.parametrize("name", HOSTILE)
def test_a_client_refuses_an_answer_that_is_not_what_it_expects(name):
    change, reason = HOSTILE[name]
    with pytest.raises(ProtocolError, match=reason):
        run(quick(), tiny_parties(), carry=tamper_with(change, Joint))


@pytest.mark.parametrize("change", [lambda value: value[:, :1], lambda value: value[:-1], lambda value: value[:1]])
def test_a_plain_answer_of_another_shape_is_never_broadcast(change):
    with pytest.raises(ProtocolError, match=r"expected a representation of shape \(24, 6\), got \("):
        run(quick(precision="fp32"), tiny_parties(), carry=tamper_with(change, Joint))


@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
def test_an_answer_with_nan_is_refused_and_the_error_names_the_server(number):
    def spoil(value):
        value = value.copy()
        value[-1, 0] = number
        return value

    expected = (
        r"party 'a', training round 0 layer . chunk 0 from server: expected a representation of finite values, got"
    )
    with pytest.raises(TrainingError, match=expected):
        run(quick(precision="fp32"), tiny_parties(), carry=tamper_with(spoil, Joint))


@pytest.mark.parametrize("encoding", [Plain(), BFloat16()])
def test_large_numbers_whose_sum_is_none_are_numbers(encoding):
    large = np.full((4, 4), 3e38, np.float32)
    key = Key(run=bytes(12), phase=Phase.TRAINING, client=0)
    for value, finite in ((large, True), (large[:0], True), (np.where(np.eye(4) > 0, np.float32("inf"), large), False)):
        assert encoding.is_finite(encoding.encode(value, key)) is finite
    assert not encoding.is_finite(encoding.encode(np.array([[0, np.nan]], np.float32), key))


def test_a_gradient_from_someone_without_labels_is_refused():
    def carry(message):
        if message.key.phase is Phase.BACKWARD and message.key.client == 0:
            return Gradient(key=message.key, value=Int8(HIDDEN).encode(np.ones((12, HIDDEN), np.float32), message.key))
        return message

    expected = "party 'a', .*: expected a tensor from party 'b' alone, got a Gradient from party 'a'"
    with pytest.raises(ProtocolError, match=expected):
        run(quick(labels="b"), tiny_parties(owner="b"), carry=carry)


@pytest.mark.parametrize("keys", [{}, {"labels": "b"}, {"backward": "joint"}, {"aggregation": "concat"}], ids=str)
@pytest.mark.parametrize("precision", ROUNDED)
@pytest.mark.filterwarnings("ignore:.*(overflow|invalid value).*:RuntimeWarning")
def test_rounding_keeps_a_diverged_value(precision, keys):
    config = quick(precision=precision, num_rounds=6, learning_rate=1e30, evaluate_every=100, **keys)
    with pytest.raises(TrainingError, match=r"[Tt]raining diverged"):
        simulate(tiny_parties(owner=keys.get("labels")), config)
