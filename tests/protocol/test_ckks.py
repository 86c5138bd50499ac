"""Runs with encryption in one process: the bits of masks, what reaches the server, and what is refused."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest

from glasu.ckks_parameters import CKKS
from glasu.errors import ConfigError, ProtocolError
from glasu.privacy.policy import Policy, PolicyError
from glasu.protocol.messages import (
    Agreed,
    Gradient,
    Joint,
    JointGradient,
    Losses,
    Metrics,
    Partial,
    Scores,
    Sealed,
    Verdict,
)
from glasu.protocol.released_kinds import list_protections
from glasu.protocol.requests import RoundDone
from glasu.runtime.trained_model import TrainedModel
from glasu.wire.ciphertexts import SHAPE_WORDS, Ciphertexts
from glasu.wire.message_key import SERVER, Phase
from support.masks import SHARE_PRIMES, Watching, use_encryption, use_masks
from support.tiny import simulate, tiny, tiny_parties

ONCE = {"release": "once", "aggregation_layers": (1,), "num_rounds": 2}
RUNS = [
    {},
    {"labels": "b", "chunk_rows": 7},
    {"backward": "joint", "labels": "b", "precision": "int8"},
    {"aggregation_layers": (3,), "sampler": "neighbor", "precision": "bf16"},
    {"method": "ensemble"},
    {"warm_start": 2},
    ONCE,
    {**ONCE, "dp_noise_multiplier": 1.0},
]


@pytest.mark.parametrize("keys", RUNS, ids=str)
def test_a_run_with_encryption_has_the_bits_of_a_run_with_masks(keys):
    config, parties = tiny(**keys)
    ours, theirs = simulate(parties, use_encryption(config)).report, simulate(parties, use_masks(config)).report
    assert ours.weights_sha256 == theirs.weights_sha256
    assert (ours.losses, ours.test.metrics) == (theirs.losses, theirs.test.metrics)
    assert [entry.metrics for entry in ours.history] == [entry.metrics for entry in theirs.history]
    assert (ours.traffic.exchanges, ours.traffic.messages) == (theirs.traffic.exchanges, theirs.traffic.messages)
    assert ours.privacy.masks.clamped == theirs.privacy.masks.clamped


def test_party_dropout_has_the_bits_of_masks_and_no_subset_is_scored():
    parties = tiny_parties(num_clients=5)
    config = tiny(num_rounds=4, party_dropout=0.5)[0].replace(data={"features": "none", "num_clients": 5})
    ours, theirs = simulate(parties, use_encryption(config)), simulate(parties, use_masks(config))
    assert ours.report.weights_sha256 == theirs.report.weights_sha256
    assert ours.report.subsets is None
    with pytest.raises(ConfigError, match="party e is missing: after training with ckks all parties predict together"):
        TrainedModel.of(ours.clients).predict(parties[:4])


@pytest.mark.parametrize("keys", [{}, {"backward": "joint", "labels": "b"}], ids=str)
def test_the_server_sees_neither_numbers_nor_the_key_nor_scores(keys):
    config, parties = tiny(num_rounds=2, evaluate_every=1, **keys)
    seen = Watching()
    done = simulate(parties, use_encryption(config), carry=seen)
    assert not seen.of(Losses, Metrics, Verdict)
    for message in seen.of(Partial, Gradient, Scores, Joint, JointGradient):
        assert message.value.dtype == np.dtype("<u8")
        assert message.value.shape[1] == SHAPE_WORDS + 2 * CKKS.degree
    (secret,) = {client.release.sums.hiding.cipher.secret for client in done.clients}
    arrays = [getattr(each, field.name) for each in seen.messages for field in dataclasses.fields(each)[1:]]
    content = b"".join(array.tobytes() for array in arrays if isinstance(array, np.ndarray))
    assert not any(secret[start : start + 32] in content for start in range(0, len(secret), 4096))
    rows = [row for client in done.clients for row in client.release.ledger.list_totals()]
    assert {row["protection"] for row in rows} <= {"ckks", "sealed", "hmac", "none"}
    assert {row["kind"] for row in rows if row["protection"] == "none"} <= {"node sets", "key"}
    assert {row["protection"] for row in rows if row["kind"] in ("representation", "probabilities")} == {"ckks"}


def test_every_attempt_has_a_new_key():
    config, parties = tiny(num_rounds=1)
    first, second = (
        simulate(parties, use_encryption(config)).clients[1].release.sums.hiding.cipher.secret for _ in range(2)
    )
    assert first != second


def test_a_resumed_simulation_has_the_bits_of_an_unbroken_one(tmp_path):
    config, parties = tiny(num_rounds=4, backward="joint", labels="b", precision="int8")

    class BrokenError(Exception):
        pass

    def stop(event):
        if isinstance(event, RoundDone) and event.round == 1:
            raise BrokenError

    with pytest.raises(BrokenError):
        simulate(parties, use_encryption(config), checkpoints=tmp_path, observer=stop)
    resumed = simulate(parties, use_encryption(config), checkpoints=tmp_path).report
    unbroken = simulate(parties, use_masks(config)).report
    assert resumed.weights_sha256 == unbroken.weights_sha256
    assert resumed.history[-1].metrics == unbroken.history[-1].metrics


def change_value(kind, client, change):
    """Return a carrier that changes the tensors of one kind from one sender."""

    def carry(message):
        if isinstance(message, kind) and message.key.client == client:
            return dataclasses.replace(message, value=change(message.value.copy()))
        return message

    return Watching(carry)


def put_large(value):
    value[0, -1] = CKKS.modulus
    return value


def count_more_rows(value):
    value[:, 0] += 1
    return value


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (put_large, "a coefficient of a ciphertext is not below the modulus"),
        (lambda value: value[:, :-8], "expected ciphertexts of 8194 words, got 8186"),
        (lambda value: np.concatenate([value, value]), "expected 1 ciphertexts for"),
        (count_more_rows, "rows, got"),
    ],
)
def test_the_server_refuses_a_malformed_ciphertext_and_names_the_party(change, said):
    config, parties = tiny(num_rounds=1)
    with pytest.raises(ProtocolError, match=rf"party 'b'.*{said}"):
        simulate(parties, use_encryption(config), carry=change_value(Partial, 1, change))


def test_parties_refuse_a_sum_that_the_server_changed():
    config, parties = tiny(num_rounds=1)

    def shift(value):
        value[:, SHAPE_WORDS:] = (value[:, SHAPE_WORDS:] + np.uint64(2**50)) % np.uint64(CKKS.modulus)
        return value

    with pytest.raises(ProtocolError, match="this is not the sum of the parties' tensors"):
        simulate(parties, use_encryption(config), carry=change_value(Joint, SERVER, shift))


class ActiveServer:
    """Replaces one sum, for all parties or for the third one; `find` returns the other sum."""

    def __init__(self, find, receivers=(1, 2, 3), round_index=1):
        self.find, self.receivers, self.round = find, receivers, round_index
        self.parts, self.sums, self.counted, self.replaced = {}, {}, 0, 0

    def __call__(self, message):
        if isinstance(message, Partial) and message.key.phase is Phase.TRAINING:
            self.parts.setdefault((message.key.round, message.key.layer), []).append(message.value)
        if isinstance(message, Joint) and message.key.phase is Phase.TRAINING:
            self.sums.setdefault((message.key.round, message.key.layer), message.value)
            if (message.key.round, message.key.layer) == (self.round, 1):
                self.counted += 1
                if self.counted in self.receivers:
                    self.replaced += 1
                    return dataclasses.replace(message, value=self.find(self, message.value))
        return message


def leave_out(server, value):
    return Ciphertexts(32, 3).combine(server.parts[server.round, 1][:2], 1, [None])[0]


def send_one_part(server, value):
    return server.parts[server.round, 1][0]


def repeat(server, value):
    return server.sums[0, 1]


def add_number(number):
    """Add to every number: a constant polynomial is constant in the form of ciphertexts that SEAL uses."""

    def find(server, value):
        changed, first = value.copy(), slice(SHAPE_WORDS, SHAPE_WORDS + CKKS.degree)
        step = np.uint64((number << CKKS.scale_bits) % CKKS.modulus)
        changed[:, first] = (changed[:, first] + step) % np.uint64(CKKS.modulus)
        return changed

    return find


add_one, add_prime = add_number(1), add_number(SHARE_PRIMES[0])


def send_zeros(server, value):
    changed = value.copy()
    changed[:, SHAPE_WORDS:] = 0
    return changed


@pytest.mark.parametrize("keys", [{}, {"labels": "b"}, {"labels": "b", "backward": "joint"}], ids=str)
@pytest.mark.parametrize("receivers", [(1, 2, 3), (3,)], ids=["all", "third"])
@pytest.mark.parametrize("find", [leave_out, send_one_part, repeat, add_one, add_prime, send_zeros])
def test_parties_refuse_a_sum_that_is_not_that_of_all_parties_in_this_exchange(find, receivers, keys):
    config, parties = tiny(num_rounds=2, evaluate_every=2, **keys)
    server = ActiveServer(find, receivers)
    with pytest.raises(ProtocolError, match=r"layer 1.*: this is not the sum of the parties' tensors: the server left"):
        simulate(parties, use_encryption(config), carry=server)
    assert server.replaced >= 1


@pytest.mark.parametrize("find", [leave_out, send_one_part, add_one, add_prime, send_zeros])
def test_one_release_refuses_such_a_sum_as_well(find):
    config, parties = tiny(**ONCE)
    with pytest.raises(ProtocolError, match="this is not the sum of the parties' tensors"):
        simulate(parties, use_encryption(config), carry=ActiveServer(find, (3,), 0))


def test_parties_that_receive_different_node_sets_notice_it_at_the_next_sum():
    config, parties = tiny(num_rounds=2, evaluate_every=1, labels="b")
    counted = []

    def split(message):
        if isinstance(message, Agreed) and message.key.phase is Phase.EVALUATION:
            counted.append(message)
            if len(counted) == 3:  # the third party gets the same number of other nodes
                (nodes,) = message.node_sets
                others = np.setdiff1d(np.arange(nodes.max() + 2), nodes)[:1]
                return dataclasses.replace(message, node_sets=(np.union1d(nodes[1:], others).astype(nodes.dtype),))
        return message

    with pytest.raises(ProtocolError, match="this is not the sum of the parties' tensors"):
        simulate(parties, use_encryption(config), carry=Watching(split))


def test_a_changed_key_is_refused():
    config, parties = tiny(num_rounds=1)

    def damage(message):
        if isinstance(message, Sealed) and message.key.client == SERVER:
            content = message.content.copy()
            content[-1] ^= 1  # of the encrypted key
            return dataclasses.replace(message, content=content)
        return message

    with pytest.raises(ProtocolError, match="the group key was modified in transit"):
        simulate(parties, use_encryption(config), carry=Watching(damage))


@pytest.mark.parametrize("keys", [{}, {"labels": "b"}, {"method": "ensemble"}, ONCE], ids=str)
def test_a_saved_model_predicts_what_the_model_in_memory_predicts(keys, tmp_path):
    config, parties = tiny(**keys)
    model = TrainedModel.of(simulate(parties, use_encryption(config)).clients)
    model.save(tmp_path)
    scores = TrainedModel.load(tmp_path).scores(parties)
    np.testing.assert_array_equal(scores, model.scores(parties))
    other = TrainedModel.of(simulate(parties, use_masks(config)).clients)
    np.testing.assert_array_equal(scores, other.scores(parties))


def test_the_report_names_the_encryption():
    config, parties = tiny(num_rounds=1)
    found = json.loads(simulate(parties, use_encryption(config)).report.to_json())["privacy"]
    assert found["secure_aggregation"] == "ckks"
    assert found["masks"]["blind_server"] is True
    assert found["masks"]["signatures"] == "none: all parties are in one process"


def test_a_policy_that_requires_masks_refuses_encryption_and_one_that_requires_it_does_not():
    config, parties = tiny(num_rounds=1)
    protections = list_protections(simulate(parties, use_encryption(config)).clients[0])
    assert protections["representation"] == "ckks"
    Policy(require={"representation": ("ckks",)}).check_settings(protections)
    with pytest.raises(PolicyError, match=r"require.representation = \['masks'\]: its protection is 'ckks'"):
        Policy(require={"representation": ("masks",)}).check_settings(protections)
