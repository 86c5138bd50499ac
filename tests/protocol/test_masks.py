"""Runs with masks in one process: the results of plain runs, and what reaches the server."""

from __future__ import annotations

import dataclasses
import hmac
import json
import logging

import numpy as np
import pytest
import torch
from scipy.stats import kstest

from glasu.errors import ConfigError, ProtocolError, TrainingError
from glasu.privacy.ledger import Ledger
from glasu.privacy.masking import join_parts
from glasu.protocol.key_agreement import client_key_agreement
from glasu.protocol.messages import (
    Decision,
    Gradient,
    Joint,
    JointGradient,
    JointScores,
    KeyOffers,
    Losses,
    Metrics,
    Partial,
    Proof,
    Proofs,
    Scores,
    Sealed,
    Verdict,
)
from glasu.protocol.presence import draw_present
from glasu.protocol.released_kinds import list_protections
from glasu.protocol.requests import Evaluated, RoundDone, Send
from glasu.runtime.baselines import compare_baselines, train_baselines
from glasu.runtime.drive import advance
from glasu.runtime.simulation import make_clients
from glasu.runtime.trained_model import TrainedModel
from glasu.wire.message_key import SERVER, Phase
from glasu.wire.ring import Ring
from support.masks import Watching, tiny_masked, use_masks
from support.tiny import simulate, tiny, tiny_parties

RUNS = [
    {},
    {"labels": "b"},
    {"backward": "joint"},
    {"backward": "joint", "labels": "b"},
    {"backward": "joint", "sampler": "shared", "num_local_steps": 3},
    {"aggregation_layers": (3,), "sampler": "neighbor"},
    {"chunk_rows": 7},
]


def weights_of(simulation):
    return [client.progress.best_weights for client in simulation.clients]


@pytest.mark.parametrize("keys", RUNS, ids=str)
def test_masks_change_the_result_by_the_rounding_of_the_grid_alone(keys):
    config, parties = tiny(**keys)
    plain, hidden = simulate(parties, config), simulate(parties, use_masks(config))
    for ours, theirs in zip(weights_of(hidden), weights_of(plain), strict=True):
        for name, tensor in theirs.items():
            torch.testing.assert_close(ours[name], tensor, rtol=1e-3, atol=1e-4)
    assert hidden.report.losses == pytest.approx(plain.report.losses, abs=1e-4)
    assert hidden.report.test.metrics == pytest.approx(plain.report.test.metrics, abs=1e-3)
    assert hidden.report.validation.round == plain.report.validation.round
    assert [entry.round for entry in hidden.report.history] == [entry.round for entry in plain.report.history]


@pytest.mark.parametrize("keys", [{}, {"backward": "joint", "labels": "b", "precision": "int8"}], ids=str)
def test_neither_a_blind_server_nor_the_size_of_chunks_nor_new_keys_change_a_bit(keys):
    config, parties = tiny_masked(**keys)
    runs = [
        config,
        config,
        use_masks(config, blind_server=True),
        config.replace(wire={**keys_of(config), "chunk_rows": 5}),
    ]
    assert len({simulate(parties, each).report.weights_sha256 for each in runs}) == 1


def keys_of(config):
    return {"precision": config.wire.precision}


@pytest.mark.parametrize(
    "keys", [{}, {"labels": "b"}, {"backward": "joint", "labels": "b"}, {"warm_start": 3}], ids=str
)
def test_no_loss_metric_or_plain_tensor_reaches_the_server(keys):
    config, parties = tiny_masked(blind=True, num_rounds=4, evaluate_every=1, **keys)
    seen = Watching()
    done = simulate(parties, config, carry=seen)
    assert not seen.of(Losses, Metrics, Verdict)
    for kind in (Partial, Gradient, Scores, Joint, JointGradient):
        for message in seen.of(kind):
            assert message.value.dtype == np.dtype("<u4")
    different = {id(each): each.value for each in seen.of(Partial, Joint)}  # a broadcast is one message
    uniform = np.concatenate([value.ravel() for value in different.values()]) / 2.0**32
    assert kstest(uniform, "uniform").pvalue > 1e-8
    owner = done.clients[1]
    if config.train.labels == "b":
        assert len(seen.of(Sealed)) > 3
        assert [row["protection"] for row in owner.release.ledger.list_totals() if row["kind"] == "gradient"].count(
            "sealed"
        ) == 1
    protections = {row["protection"] for client in done.clients for row in client.release.ledger.list_totals()}
    assert protections <= {"masks+blind", "sealed", "hmac", "none"}
    unprotected = {
        row["kind"]
        for client in done.clients
        for row in client.release.ledger.list_totals()
        if row["protection"] == "none"
    }
    assert unprotected <= {"node sets", "key"}  # public keys, which nobody signs in one process


def test_the_label_owners_gradient_is_not_in_any_message():
    config, parties = tiny(labels="b", num_rounds=2)
    open_run, hidden_run = Watching(), Watching()
    simulate(parties, config, carry=open_run)
    simulate(parties, use_masks(config), carry=hidden_run)
    canary = open_run.of(Gradient)[0].value[0].tobytes()[:8]
    assert any(canary in message.value.tobytes() for message in open_run.of(JointGradient))
    arrays = [getattr(each, field.name) for each in hidden_run.messages for field in dataclasses.fields(each)[1:]]
    assert not any(canary in array.tobytes() for array in arrays if isinstance(array, np.ndarray))


def test_a_server_that_splits_the_view_sees_noise_and_the_parties_notice():
    config, parties = tiny_masked(num_rounds=3, evaluate_every=1)
    ring, counted, sums = Ring(32, 3), {}, {}

    def split(message):
        if isinstance(message, Partial):
            total = sums.setdefault((message.key.phase, message.key.round, message.key.layer), [])
            total.append(message.value)
        if isinstance(message, Joint) and message.key.topic[1:4] == (Phase.TRAINING, 1, 1):
            counted[message.key] = counted.get(message.key, 0) + 1
            if counted[message.key] == 3:  # the third party gets another aggregate
                return dataclasses.replace(message, value=message.value + np.uint32(1))
        return message

    with pytest.raises(ProtocolError, match=r"found different metrics|class probabilities from the server: expected"):
        simulate(parties, config, carry=Watching(split))
    found = {place: ring.combine(each, 1, [None])[0] for place, each in sums.items()}

    def measure_spread(total):
        """Return how far sums are from their middle, as a share of the ring; noise has 0.25."""
        return float(np.abs(total.astype(np.float64) / 2.0**32 - 0.5).mean())

    places = list(found)  # in the order of the run
    last = places.index((Phase.TRAINING, 1, 1))
    assert max(measure_spread(found[place]) for place in places[: last + 1]) < 0.1
    noise = np.concatenate([found[place].ravel() for place in places[last + 1 :]])
    # The masks differ in every run. The mean of n uniform numbers has a standard error of 0.144 / sqrt(n).
    assert abs(measure_spread(noise) - 0.25) < 6 * 0.144 / noise.size**0.5


LAST = [{"release": "once", "aggregation_layers": (1,)}, {"dp_noise_multiplier": 1.0}, {}, {"method": "ensemble"}]


def split_last_scores(config, also=lambda message: message):
    """Return a carrier that changes the last class probabilities for the third party."""
    counted = []

    def split(message):
        is_last = message.key.phase is Phase.EVALUATION and message.key.round == config.train.num_rounds + 1
        if isinstance(message, JointScores) and is_last:
            counted.append(message)
            if len(counted) == 3:
                value = message.value.copy()
                value[0] += 1  # one step of the grid: far too little to be noticed in the metrics
                return dataclasses.replace(message, value=value)
        return also(message)

    return Watching(split)


@pytest.mark.parametrize("keys", LAST, ids=str)
def test_different_answers_in_the_last_exchange_are_noticed_at_the_end(keys):
    config, parties = tiny_masked(num_rounds=2, **keys)
    said = r"the proof of party '[abc]' does not match the answers that party '[abc]' has received, so the server sent"
    with pytest.raises(ProtocolError, match=said):
        simulate(parties, config, carry=split_last_scores(config))


def test_a_server_that_returns_a_partys_own_proof_is_noticed():
    config, parties = tiny_masked(num_rounds=2, release="once", aggregation_layers=(1,))
    proofs = []

    def echo(message):
        if isinstance(message, Proof):
            proofs.append(message.content.tobytes())
        if isinstance(message, Proofs):  # the party's own proof in each place; the carrier sees a, b, c in turn
            proofs.append(proofs[0])
            return dataclasses.replace(message, content=np.frombuffer(join_parts([proofs.pop(0)] * 3), np.uint8))
        return message

    with pytest.raises(ProtocolError, match=r"the proof of party '[abc]' does not match the answers"):
        simulate(parties, config, carry=split_last_scores(config, echo))


def test_the_comparison_costs_one_exchange_and_is_in_the_ledger():
    config, parties = tiny_masked(num_rounds=1)
    seen = Watching()
    done = simulate(parties, config, carry=seen)
    assert len(seen.of(Proof)) == 3
    assert {len(message.content) for message in seen.of(Proof)} == {16}
    (row,) = [row for row in done.clients[1].release.ledger.list_totals() if row["kind"] == "proof"]
    assert (row["releases"], row["bytes"], row["protection"]) == (1, 16, "hmac")
    assert list_protections(done.clients[1])["proof"] == "hmac"


def test_different_metrics_of_parties_are_detected_although_the_server_does_not_see_them():
    config, parties = tiny_masked(num_rounds=1, evaluate_every=1)

    def disagree(message):
        if isinstance(message, Decision) and message.key.client == 2:
            return dataclasses.replace(message, proof=message.proof ^ np.uint8(1))
        return message

    with pytest.raises(ProtocolError, match="parties 'a' and 'c' found different metrics, so their labels or splits"):
        simulate(parties, config, carry=Watching(disagree))


def test_a_changed_verdict_or_gradient_of_the_owner_is_refused():
    config, parties = tiny_masked(labels="b", num_rounds=2, evaluate_every=1)

    def lie(message):
        if isinstance(message, Decision) and message.key.client == SERVER:
            return dataclasses.replace(message, stop=not message.stop)
        return message

    with pytest.raises(ProtocolError, match="the server changed the label owner's verdict"):
        simulate(parties, config, carry=Watching(lie))

    def damage(message):
        if isinstance(message, Sealed) and message.key.layer == 4 and message.key.client == SERVER:
            return dataclasses.replace(message, content=message.content ^ np.uint8(1))
        return message

    with pytest.raises(ProtocolError, match="encrypted message of client 1 was modified in transit"):
        simulate(parties, config, carry=Watching(damage))


@pytest.mark.parametrize(("precision", "share"), [("fp32", 1.0), ("bf16", 0.5), ("int8", 0.27)])
def test_the_bytes_of_tensors_are_those_of_the_precision(precision, share):
    config, parties = tiny(precision="fp32", hidden=64, num_rounds=2)
    plain = simulate(parties, config).report.traffic.by_kind["tensor"]
    config, _ = tiny_masked(precision=precision, hidden=64, num_rounds=2)
    scores = 2 * 3 * 3 * 4 * (2 * 6 + 6)  # those of class probabilities stay
    found = simulate(parties, config).report.traffic.by_kind["tensor"]
    assert found - scores <= share * (plain - scores)


def test_early_stopping_and_history_follow_the_parties():
    config, parties = tiny(num_rounds=30, patience=2, evaluate_every=1, learning_rate=0.5)
    events = []
    plain, hidden = (
        simulate(parties, config).report,
        simulate(parties, use_masks(config), observer=events.append).report,
    )
    assert len(hidden.losses) == len(plain.losses) < 30
    assert len([event for event in events if isinstance(event, RoundDone)]) == len(plain.losses)
    assert {event.party for event in events if isinstance(event, RoundDone | Evaluated)} == {None}


def test_party_dropout_keeps_three_parties_in_every_sum():
    parties = tiny_parties(num_clients=5)
    config, _ = tiny(num_rounds=6, party_dropout=0.7)
    config = use_masks(config.replace(data={"features": "none", "num_clients": 5}))
    present = [draw_present(config, 5, index) for index in range(200)]
    assert min(map(len, present)) == 3
    assert {len(each) for each in present} >= {3, 4}
    assert len({each for each in present if len(each) == 3}) == 10
    done = simulate(parties, config)
    assert done.report.subsets is None
    with pytest.raises(ConfigError, match="party e is missing: after training with masks all parties predict together"):
        TrainedModel.of(done.clients).predict(parties[:4])


@pytest.mark.parametrize(
    "keys", [{}, {"labels": "b"}, {"method": "ensemble"}, {"warm_start": 2, "precision": "int8"}], ids=str
)
def test_a_saved_model_predicts_what_the_model_in_memory_predicts(keys, tmp_path):
    config, parties = tiny_masked(blind=True, **keys)
    model = TrainedModel.of(simulate(parties, config).clients)
    model.save(tmp_path)
    loaded = TrainedModel.load(tmp_path)
    assert loaded.ranges == model.ranges
    assert bool(model.ranges) == (config.train.method == "glasu")
    np.testing.assert_array_equal(loaded.scores(parties), model.scores(parties))


def test_two_parties_train_with_masks_if_they_accept_what_the_sum_reveals():
    config, _ = tiny()
    config = use_masks(config, allow_two_parties=True).replace(data={"features": "none", "num_clients": 2})
    assert simulate(tiny_parties(num_clients=2), config).report.privacy.masks is not None
    with pytest.raises(ConfigError, match=r"data.num_clients=2: .*allow_two_parties"):
        simulate(tiny_parties(num_clients=2), use_masks(tiny()[0]))


def test_an_ensemble_with_masks_has_the_scores_of_a_plain_one():
    config, parties = tiny(method="ensemble")
    plain, hidden = simulate(parties, config).report, simulate(parties, use_masks(config)).report
    assert hidden.weights_sha256 == plain.weights_sha256
    assert hidden.test.metrics == pytest.approx(plain.test.metrics, abs=1e-6)


def test_the_classifier_of_a_warm_start_derives_from_the_run_key():
    config, parties = tiny(warm_start=1)
    seeds = [{name: bytes([number]) * 32 for name in "abc"} for number in (1, 2)]

    def classifier(used, secrets):
        done = simulate(parties, used, secrets=secrets)
        return {client.keys.run_key for client in done.clients}, done.report.weights_sha256

    (first, _), (second, _) = (classifier(use_masks(config), secrets) for secrets in seeds)
    assert len(first) == len(second) == 1
    assert first != second
    assert classifier(config, seeds[0])[0] == first  # without masks, too
    assert classifier(config.replace(train={"warm_start": 0}), seeds[0])[0] == {None}


def test_a_resumed_simulation_has_the_bits_of_an_unbroken_one_and_new_keys(tmp_path):
    config, parties = tiny_masked(num_rounds=4, backward="joint", labels="b", precision="int8")

    class BrokenError(Exception):
        pass

    def stop(event):
        if isinstance(event, RoundDone) and event.round == 1:
            raise BrokenError

    first, second = Watching(), Watching()
    with pytest.raises(BrokenError):
        simulate(parties, config, checkpoints=tmp_path, observer=stop, carry=first)
    resumed = simulate(parties, config, checkpoints=tmp_path, carry=second)
    unbroken = simulate(parties, config)
    assert resumed.report.weights_sha256 == unbroken.report.weights_sha256
    assert resumed.report.history[-1].metrics == unbroken.report.history[-1].metrics
    sent = {(each.key.round, each.key.layer, each.key.client): each.value for each in first.of(Partial)}
    redone = [each for each in second.of(Partial) if (each.key.round, each.key.layer, each.key.client) in sent]
    for each in redone:
        assert not np.array_equal(each.value, sent[each.key.round, each.key.layer, each.key.client])


@pytest.mark.parametrize("keys", [{}, {"backward": "joint"}], ids=str)
def test_different_answers_before_a_restart_are_noticed_after_it(keys, tmp_path):
    config, parties = tiny_masked(num_rounds=4, evaluate_every=4, **keys)
    last, answers = config.model.aggregation_layers[-1], []

    def split_and_stop(message):
        if message.key.topic[1:3] == (Phase.TRAINING, 2):  # the checkpoint after round 1 is durable
            raise ConnectionError
        if isinstance(message, Joint) and message.key.topic[1:4] == (Phase.TRAINING, 1, last):
            answers.append(message)
            if len(answers) == 3:  # the third party gets another answer in the last exchange of round 1
                return dataclasses.replace(message, value=message.value + np.uint32(1))
        return message

    with pytest.raises(ConnectionError):
        simulate(parties, config, checkpoints=tmp_path, carry=split_and_stop)
    said = "sent the two parties different answers|found different metrics|class probabilities|training diverged"
    with pytest.raises((ProtocolError, TrainingError), match=said):  # the masks do not cancel, so sums are noise
        simulate(parties, config, checkpoints=tmp_path)


class OneKeySigner:
    """Signs for all parties with one key, so that only the signed content tells offers apart."""

    certificate = b"certificate"

    def sign(self, content: bytes) -> bytes:
        return hmac.digest(b"key", content, "sha256")

    def find_error(self, name: str, certificate: bytes, signature: bytes, content: bytes) -> str:
        return "" if hmac.compare_digest(signature, self.sign(content)) else "has an invalid signature"


def make_offers(config, parties, *, run=bytes(12), attempt=1, names=("a", "b", "c")):
    """Return the scripts of the key agreement of all clients, and their key offers."""
    clients = make_clients(config, parties)
    scripts, offers = [], []
    for client in clients:
        client.keys.signer = OneKeySigner()
        client.identity = dataclasses.replace(client.identity, names=names, run=run, attempt=attempt)
        scripts.append(client_key_agreement(client))
        offers.append(advance(scripts[-1]).message.content.tobytes())
    return scripts, offers


@pytest.mark.parametrize("fact", ["none", "run", "attempt", "roster", "settings", "sender"])
def test_the_signature_of_a_key_covers_run_attempt_roster_settings_and_sender(fact):
    config, parties = tiny_masked()
    scripts, offers = make_offers(config, parties)
    others = {
        "run": {"run": b"another run."},
        "attempt": {"attempt": 2},
        "roster": {"names": ("a", "b", "d")},
        "settings": {"config": config.replace(train={"learning_rate": 0.5})},
    }
    if fact in others:  # the server sends an offer that b has signed elsewhere
        offers[1] = make_offers(**{"config": config, "parties": parties, **others[fact]})[1][1]
    elif fact == "sender":
        offers[1:] = reversed(offers[1:])
    receive = advance(scripts[0])
    answer = KeyOffers(receive.key, np.frombuffer(join_parts(offers), np.uint8))
    if fact == "none":
        assert isinstance(advance(scripts[0], answer), Send)
    else:
        with pytest.raises(ProtocolError, match="the key of party 'b' has an invalid signature"):
            advance(scripts[0], answer)


def test_the_report_states_the_masks_and_counts_clamped_values():
    config, parties = tiny()
    config = use_masks(config, blind_server=True, range=0.001)
    found = json.loads(simulate(parties, config).report.to_json())["privacy"]
    assert found["secure_aggregation"] == "masks"
    assert found["masks"]["signatures"] == "none: all parties are in one process"
    assert found["masks"]["blind_server"] is True
    assert set(found["masks"]["clamped"]) == {"a", "b", "c"}
    assert max(found["masks"]["clamped"].values()) > 0


def test_the_preset_decides_by_rules_alone_and_baselines_are_compared(caplog):
    caplog.set_level(logging.INFO, "glasu.runtime.telemetry")
    _, parties = tiny()
    config = use_masks(tiny()[0].__class__())
    config = config.replace(train={"num_rounds": 4, "evaluate_every": 2}, model={"hidden": 8})
    report = simulate(parties, config).report
    assert report.race is not None
    assert (report.race.rounds, len(report.race.candidates)) == (0, 1)
    (line,) = [line for line in caplog.messages if "the preset chose" in line]
    assert "by rules, without a race: the server has no validation scores" in line
    assert f" and {sum(report.race.releases.values())} releases so far." in line
    baselines = train_baselines([report.config], lambda used: parties)
    assert baselines["ensemble"].test is not None
    assert "must know who contributes" in baselines["smooth"].refused
    assert "smooth not possible" in compare_baselines(report, baselines)


def test_ledgers_of_masked_runs_name_their_protection():
    config, parties = tiny_masked()
    ledger = simulate(parties, config).clients[0].release.ledger
    assert isinstance(ledger, Ledger)
    rows = [(row["kind"], row["protection"]) for row in ledger.list_totals()]
    assert {protection for kind, protection in rows if kind == "key"} == {"none", "sealed"}
    found = {kind: protection for kind, protection in rows if kind not in ("key", "node sets")}
    assert found == {"proof": "hmac", "representation": "masks", "probabilities": "masks", "verdict": "hmac"}
