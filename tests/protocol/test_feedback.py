"""Error feedback: changes of a few bits, one joint representation at all clients, and no error that stays."""

from __future__ import annotations

import dataclasses
from collections import defaultdict

import numpy as np
import pytest
import torch

from glasu.config import RunConfig, resolve
from glasu.errors import ConfigError, ProtocolError, TrainingError
from glasu.privacy.release import Release
from glasu.protocol.message_bytes import decode, encode
from glasu.protocol.messages import Change, Joint, JointChange, Partial
from glasu.runtime.simulation import simulate
from glasu.runtime.trained_model import TrainedModel
from glasu.wire.encodings import use_for_all_kinds
from glasu.wire.floats import Plain
from glasu.wire.integers import Integers
from glasu.wire.message_key import Key, Phase
from glasu.wire.tensor_kinds import CHANGE, REPRESENTATION
from support.monolith import identical, run, settings, tiny_parties
from support.spies import run_with_spies

HIDDEN, M = 6, 3


def quick(**keys):
    return settings(
        **{"precision": "fp32", "feedback": True, "num_rounds": 6, "evaluate_every": 2, "hidden": HIDDEN, **keys}
    )


def integers_of(payload, bits, offset):
    """Return the integers of a payload, by plain arithmetic on one long integer per row."""
    rows = [int.from_bytes(row.tobytes(), "little") for row in payload]
    return np.array([[(row >> (bits * place) & ((1 << bits) - 1)) - offset for place in range(HIDDEN)] for row in rows])


# --- messages ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("bits", "sum_bits"), [(2, 3), (3, 5), (4, 6)])
def test_the_answer_is_the_sum_of_the_changes(bits, sum_bits):
    sent, answers = defaultdict(dict), {}

    def carry(message):
        about = message.key.phase, message.key.round, message.key.layer
        if isinstance(message, Change):
            sent[about][message.key.client] = integers_of(message.value, bits, 2 ** (bits - 1) - 1)
        elif isinstance(message, JointChange):
            answers[about] = integers_of(message.value, sum_bits, M * (2 ** (bits - 1) - 1))
        return message

    run(quick(feedback_bits=bits), tiny_parties(), carry=carry, scatter=1)
    # two layers: rounds 1 to 5, and the second and third evaluation
    assert (
        sorted(answers)
        == sorted(sent)
        == sorted(
            [(Phase.TRAINING, t, layer) for t in range(1, 6) for layer in (1, 3)]
            + [(Phase.EVALUATION, t, layer) for t in (4, 6) for layer in (1, 3)]
        )
    )
    for about, each in sent.items():
        np.testing.assert_array_equal(answers[about], each[0] + each[1] + each[2])
    assert any(numbers.any() for each in sent.values() for numbers in each.values())


def test_the_first_release_of_rows_and_the_test_have_the_usual_encoding():
    seen = defaultdict(set)

    def carry(message):
        if isinstance(message, Partial | Joint):
            seen[message.key.phase].add(message.key.round)
            assert message.value.dtype == np.float32
        return message

    run(quick(), tiny_parties(), carry=carry)
    assert seen == {Phase.TRAINING: {0}, Phase.EVALUATION: {2, 7}}  # the test has round 7


# --- one joint representation ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("keys", [{}, {"feedback_bits": 2}, {"precision": "int8"}, {"labels": "b"}], ids=str)
def test_all_clients_continue_with_the_same_bits_and_extract_what_their_peers_know_of_them(keys):
    parties = tiny_parties(owner=keys.get("labels"))
    done, spies = run_with_spies(quick(dropout=0.5, num_local_steps=2, **keys), parties, scatter=4)
    assert len(spies[0].extracted) == 2 * 6
    for index in range(2 * 6):
        joints = [spy.extracted[index][0] for spy in spies]
        assert all(torch.equal(joint, joints[0]) for joint in joints)
        known = sum(spy.extracted[index][1].double() for spy in spies) / M
        error = 1e-6 if keys.get("precision") != "int8" else 0.02  # of the first joint, which the server rounds
        torch.testing.assert_close(joints[0].double(), known, rtol=0, atol=error * float(known.abs().max() + 1))
    for place, reference in done.clients[0].release.references.items():
        for client in done.clients[1:]:
            other = client.release.references[place]
            assert torch.equal(other.joint, reference.joint)
            assert torch.equal(other.step, reference.step)


# --- the error does not stay -----------------------------------------------------------------------------------------


def minimise(rounds, bits, *, feedback):
    """Minimise |mean of H_m - target|^2 over H_1, ..., H_M with released values; return the greatest error.

    Without feedback, every round sends the integers of the values themselves, on a grid that covers the target.
    """
    rng = np.random.default_rng(0)
    target = torch.from_numpy(rng.standard_normal((20, HIDDEN)))
    values = [torch.from_numpy(rng.standard_normal((20, HIDDEN))) for _ in range(M)]
    integers = Integers(HIDDEN, bits, M)
    encodings = {**use_for_all_kinds(Plain("fp64")), CHANGE: integers}
    gates = [Release(encodings, feedback=True) for _ in range(M)]
    step = float(target.abs().max()) / integers.largest
    for t in range(rounds):
        key = Key(run=bytes(12), phase=Phase.TRAINING, client=0, round=t, layer=1)
        if feedback:
            kind = CHANGE if t else REPRESENTATION
            sent = [gate.tensor(kind, value, key) for gate, value in zip(gates, values, strict=True)]
            (answer,) = encodings[kind].combine([each.payload for each in sent], M, [key])
            joint = gates[0].read(kind, key, answer, sent=sent[0])
            for gate, part in zip(gates[1:], sent[1:], strict=True):
                assert torch.equal(gate.read(kind, key, answer, sent=part), joint)
        else:
            payloads = [integers.encode(np.rint(value.numpy() / step), key) for value in values]
            (answer,) = integers.combine(payloads, M, [key])
            joint = torch.from_numpy(step * integers.answer.decode(answer) / M)
        values = [value - 0.5 * (joint - target) for value in values]
    mean = sum(values) / M
    return float((mean - target).abs().max())


def test_error_feedback_reaches_the_optimum_where_rounding_to_two_bits_does_not():
    assert minimise(200, 2, feedback=True) < 1e-6
    assert minimise(200, 2, feedback=False) > 0.1


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_training_with_few_bits_ends_near_the_loss_of_plain_training(bits):
    keys = {"num_rounds": 80, "evaluate_every": 80, "aggregation_layers": (3,)}
    plain = run(quick(feedback=False, **keys), tiny_parties()).server.progress.losses
    found = run(quick(feedback_bits=bits, **keys), tiny_parties()).server.progress.losses
    assert found[0] == pytest.approx(plain[0], rel=1e-6)  # step 0 adds its own part again: equal up to rounding
    assert found[0] - found[-1] > 0.7 * (plain[0] - plain[-1])


@pytest.mark.parametrize("keys", [{}, {"backward": "joint"}, {"labels": "b"}, {"dropout": 0.5}], ids=str)
def test_a_grid_of_32_bits_gives_plain_training_up_to_rounding(keys):
    parties = tiny_parties(owner=keys.get("labels"))
    plain = run(quick(feedback=False, num_local_steps=2, **keys), parties, scatter=2)
    fine = run(quick(feedback_bits=32, num_local_steps=2, **keys), parties, scatter=2)
    for got, expected in zip(fine.final, plain.final, strict=True):
        for name in expected:
            torch.testing.assert_close(got[name], expected[name], rtol=1e-4, atol=1e-5)


def test_values_outside_of_the_grid_are_counted_and_come_later():
    gate = Release({**use_for_all_kinds(Plain()), CHANGE: Integers(1, 2, 1)}, feedback=True)
    value = torch.ones(4, 1)
    for t, wanted in enumerate([1.0] + 12 * [100.0]):
        key = Key(run=bytes(12), phase=Phase.TRAINING, client=0, round=t, layer=1)
        kind = CHANGE if t else REPRESENTATION
        sent = gate.tensor(kind, wanted * value, key)
        joint = gate.read(kind, key, gate.encodings[kind].combine([sent.payload], 1, [key])[0], sent=sent)
        torch.testing.assert_close(joint, sent.value)
    assert gate.references["TRAINING", 1].clamped > 0
    torch.testing.assert_close(joint, 100 * value, rtol=0.1, atol=0)


def test_a_column_that_was_constant_can_change_again():
    gate = Release({**use_for_all_kinds(Plain()), CHANGE: Integers(2, 4, 1)}, feedback=True)
    for t in range(60):
        key = Key(run=bytes(12), phase=Phase.TRAINING, client=0, round=t, layer=1)
        kind = CHANGE if t else REPRESENTATION
        value = torch.tensor([[float(np.sin(t)), float(t >= 40)]] * 3)
        sent = gate.tensor(kind, value, key)
        joint = gate.read(kind, key, gate.encodings[kind].combine([sent.payload], 1, [key])[0], sent=sent)
    torch.testing.assert_close(joint[:, 1], torch.ones(3), rtol=0, atol=0.05)


# --- bits, chunks, predictions ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("keys", [{}, {"labels": "b"}, {"backward": "joint", "precision": "int8"}], ids=str)
def test_neither_the_size_of_chunks_nor_the_way_as_bytes_changes_a_bit(keys):
    parties = tiny_parties(owner=keys.get("labels"))
    config = quick(dropout=0.5, num_local_steps=2, **keys)
    whole = run(config, parties)
    pieces = run(config.replace(wire={"chunk_rows": 5}), parties)
    travelled = run(config, parties, carry=lambda message: decode(encode(message)))
    assert identical(whole.final, pieces.final)
    assert identical(whole.final, travelled.final)
    assert whole.meter.by_kind["tensor"] == pieces.meter.by_kind["tensor"]


def test_predictions_of_the_trained_model_do_not_depend_on_feedback():
    parties = tiny_parties()
    model = TrainedModel.of(simulate(parties, quick()).clients)
    plain = dataclasses.replace(model, config=model.config.replace(wire={"feedback": False}))
    np.testing.assert_array_equal(model.predict_proba(parties), plain.predict_proba(parties))


# --- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ({"sampler": "neighbor"}, "every round must use the same rows, but train.sampler='neighbor'"),
        ({"batch_size": 4}, r'train.batch_size=4 draws different rows; use sampler = "full".* and batch_size = 0'),
        ({"aggregation": "concat"}, r'the server adds changes, and model.aggregation="concat" is not a mean'),
        ({"party_dropout": 0.5}, "does not follow from changes; remove train.party_dropout=0.5"),
        ({"feedback": False, "feedback_bits": 3}, "feedback_bits=3: has no effect without wire.feedback = true"),
        ({"feedback_bits": 1}, "feedback_bits=1: must lie in"),
    ],
)
def test_settings_for_which_changes_do_not_add_up_are_refused(keys, reason):
    with pytest.raises(ConfigError, match=reason):
        quick(**keys)


def test_a_graph_that_is_sampled_by_default_is_refused_when_its_size_is_known():
    config = RunConfig().replace(wire={"feedback": True})
    assert resolve(config, 1000)[0].train.sampler == "full"
    with pytest.raises(ConfigError, match="every round must use the same rows"):
        resolve(config, 1_000_000)


def test_parties_that_train_alone_ignore_feedback():
    assert simulate(tiny_parties(), quick(method="ensemble", num_rounds=1)).report.test.accuracy >= 0


def test_a_change_that_is_not_one_is_refused_with_the_name_of_the_party():
    def carry(message):
        if isinstance(message, Change) and message.key.client == 1:
            return dataclasses.replace(message, value=message.value | np.uint8(0x0F))
        return message

    with pytest.raises(ProtocolError, match=r"party 'b', training round 1 layer 1 .* expected integers of 0..14, got"):
        run(quick(), tiny_parties(), carry=carry)


@pytest.mark.filterwarnings("ignore:.*(overflow|invalid value).*:RuntimeWarning")
def test_rounding_keeps_a_diverged_value():
    with pytest.raises(TrainingError, match=r"[Tt]raining diverged"):
        simulate(tiny_parties(), quick(learning_rate=1e30, evaluate_every=100))
