"""Secrets of the parties in one process: which draws they decide, and what the public seed still tells."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from glasu import registry
from glasu.errors import ConfigError
from glasu.model.sampler import Neighbor, draw_batch
from glasu.protocol.messages import Gradient, Joint
from glasu.protocol.requests import RoundDone
from glasu.runtime.simulation import make_clients, train
from glasu.secret import Secret
from glasu.wire.message_key import Phase
from glasu.wire.tensor_kinds import GRADIENT
from support.kits import secrets_of, simulate_with_secrets
from support.tiny import assert_same_run, settings, simulate, tiny, tiny_parties

SECRETS = secrets_of("abc")
OTHERS = {**SECRETS, "a": bytes(32)}
NODES = np.arange(24)


def clients_of(config, secrets):
    found = {name: Secret(value) for name, value in secrets.items()}
    return make_clients(config, tiny_parties(owner=None if config.train.labels == "all" else "b"), secrets=found)


def weights_of(client, *, classifier):
    weights = client.learner.weights()
    return {name: value for name, value in weights.items() if name.startswith("classifier") == classifier}


def equal(first, second):
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


# Which draws are private


def test_first_weights_derive_from_the_own_secret_alone():
    config = settings()
    first, other, public = (clients_of(config, secrets) for secrets in (SECRETS, OTHERS, {}))
    assert not equal(*(weights_of(each[0], classifier=False) for each in (first, other)))
    assert equal(*(weights_of(each[1], classifier=False) for each in (first, other)))
    for index in range(3):
        assert not equal(*(weights_of(each[index], classifier=False) for each in (first, public)))


def test_parties_with_one_secret_still_draw_their_own_weights():
    first, second, _ = clients_of(settings(), dict.fromkeys("abc", bytes(32)))
    assert not torch.equal(
        first.learner.weights()["layers.2.linear.weight"], second.learner.weights()["layers.2.linear.weight"]
    )


def test_the_first_classifier_is_common_where_several_parties_have_labels():
    public, *private = (clients_of(settings(), secrets) for secrets in ({}, SECRETS, OTHERS))
    for clients in private:
        for client in clients:
            assert equal(weights_of(client, classifier=True), weights_of(public[0], classifier=True))


def test_the_first_classifier_of_a_label_owner_derives_from_its_secret():
    config = settings(labels="b")
    public, first, same, other = (
        weights_of(clients_of(config, secrets)[1], classifier=True)
        for secrets in ({}, SECRETS, OTHERS, {**SECRETS, "b": bytes(32)})
    )
    assert equal(first, same)
    assert not equal(first, other)
    assert not equal(first, public)


@pytest.mark.parametrize("sampler", ["neighbor", "shared"])
def test_neighbours_are_private_unless_the_sampler_shares_them(sampler):
    config = settings(sampler=sampler, fanout=1)
    drawn = [clients_of(config, secrets)[0].learner.sampler for secrets in (SECRETS, OTHERS, {})]
    found = [[each.draw(NODES[:9], index, 3).nodes.tolist() for index in range(9)] for each in drawn]
    assert (found[0] == found[1] == found[2]) == (sampler == "shared")
    assert (found[0] != found[1] != found[2] != found[0]) == (sampler == "neighbor")


class EarlyStream(Neighbor):
    """Makes the stream of its draws in the constructor."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.stream_seed = self.private_seed


def test_a_sampler_has_the_private_seed_in_its_constructor():
    registry.register("sampler", "early-stream", EarlyStream)
    for client in clients_of(settings(sampler="early-stream"), SECRETS):
        assert client.learner.sampler.stream_seed == client.keys.private_seed


def test_dropout_masks_are_private_and_differ_between_rounds():
    ones = torch.ones(40, 40)
    first, other, public = (
        [clients_of(settings(dropout=0.5), secrets)[0].learner.dropout(index, 0)(ones, 1) for index in (0, 1)]
        for secrets in (SECRETS, OTHERS, {})
    )
    masks = [*first, *other, *public]
    assert not any(torch.equal(one, two) for index, one in enumerate(masks) for two in masks[:index])


def test_stochastic_rounding_is_private_at_a_client_and_readers_need_no_secret():
    config = settings(precision="int8", backward="joint", num_local_steps=1)
    value = torch.linspace(-1, 1, 60).reshape(10, 6)
    first, other, public = (clients_of(config, secrets)[0].release for secrets in (SECRETS, OTHERS, {}))
    key = clients_of(config, {})[0].identity.key(Phase.BACKWARD, 0, 3)
    sent = [release.tensor(GRADIENT, value, key).payload for release in (first, other, public)]
    assert not any(np.array_equal(sent[one], sent[two]) for one, two in ((0, 1), (0, 2), (1, 2)))
    assert torch.equal(*(release.read(GRADIENT, key, sent[0]) for release in (first, public)))


def test_batches_and_the_validation_subset_are_common():
    config = settings(batch_size=4, evaluate_nodes=3)
    first, public = (clients_of(config, secrets)[0] for secrets in (SECRETS, {}))
    examples = first.data.training_examples()
    for index in range(3):
        expected = draw_batch(public.config, examples, index)
        np.testing.assert_array_equal(draw_batch(first.config, examples, index), expected)
    subsets = [each.data.validation_examples() for each in (first, public)]
    np.testing.assert_array_equal(*subsets)


def test_another_seed_gives_other_private_draws():
    first, other = (clients_of(settings(seed=seed), SECRETS)[0] for seed in (0, 1))
    assert not equal(*(weights_of(each, classifier=False) for each in (first, other)))


# A run with secrets


def test_equal_secrets_give_equal_runs_and_other_secrets_other_runs():
    config, parties = tiny(sampler="neighbor")
    first, again = (simulate_with_secrets(parties, config).report for _ in range(2))
    assert_same_run(first, again)
    other = simulate(parties, config, secrets=OTHERS).report
    assert other.weights_sha256 != first.weights_sha256
    assert simulate(parties, config).report.weights_sha256 != first.weights_sha256


def test_the_report_says_where_private_draws_come_from():
    config, parties = tiny()
    assert train(parties, config).to_dict()["privacy"]["secrets"] == "derived from the seed"
    assert train(parties, config, secrets=SECRETS).to_dict()["privacy"]["secrets"] == "given"


@pytest.mark.parametrize(
    ("secrets", "words"),
    [
        ({}, "must name the parties a, b, c; got no party"),
        ({"a": bytes(32)}, "must name the parties a, b, c; got a"),
        ({**SECRETS, "d": bytes(32)}, "must name the parties a, b, c; got a, b, c, d"),
        ({**SECRETS, "b": bytes(31)}, r"secrets\['b'\]: must be 32 bytes"),
        ({**SECRETS, "b": "x" * 32}, r"secrets\['b'\]: must be 32 bytes"),
    ],
)
def test_secrets_of_wrong_names_or_lengths_are_refused(secrets, words):
    config, parties = tiny()
    with pytest.raises(ConfigError, match=words):
        train(parties, config, secrets=secrets)


def stop_after(last):
    def observe(event):
        if isinstance(event, RoundDone) and event.round == last:
            raise KeyboardInterrupt

    return observe


def test_a_resumed_run_has_the_bits_of_an_unbroken_one(tmp_path):
    config, parties = tiny(sampler="neighbor", num_rounds=4)
    with pytest.raises(KeyboardInterrupt):
        simulate_with_secrets(parties, config, checkpoints=tmp_path, observer=stop_after(2))
    assert list(tmp_path.glob("*.checkpoint"))
    resumed = simulate_with_secrets(parties, config, checkpoints=tmp_path).report
    whole = simulate_with_secrets(parties, config).report
    assert (resumed.weights_sha256, resumed.losses) == (whole.weights_sha256, whole.losses)


@pytest.mark.parametrize("secrets", [None, OTHERS], ids=["missing", "changed"])
def test_a_missing_or_changed_secret_is_refused_on_resume(secrets, tmp_path):
    config, parties = tiny(num_rounds=4)
    with pytest.raises(KeyboardInterrupt):
        simulate_with_secrets(parties, config, checkpoints=tmp_path, observer=stop_after(2))
    before = sorted(path.name for path in tmp_path.iterdir())
    with pytest.raises(ConfigError, match="other settings, data or secrets: secret of a = ") as caught:
        simulate(parties, config, secrets=secrets, checkpoints=tmp_path)
    assert "\n" not in str(caught.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_no_file_of_a_run_has_a_secret_or_what_derives_from_it(tmp_path):
    config, parties = tiny(num_rounds=4)
    with pytest.raises(KeyboardInterrupt):
        simulate_with_secrets(parties, config, checkpoints=tmp_path, observer=stop_after(2))
    content = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    report = simulate_with_secrets(parties, config, checkpoints=tmp_path).report.to_json().encode()
    for value in SECRETS.values():
        for secret in (Secret(value), Secret(value).derive("training", config.train.seed)):
            for form in (secret.value, secret.value.hex().encode()):
                assert form not in content
                assert form not in report


# The attack of issue 16: labels from the first gradient of a label owner, by a server that knows the public seed


def guess_labels(config, parties, **options):
    """Return the labels that a server reads off the first gradient, if the classifier is that of the public seed.

    G = (softmax(H W + b) - Y) W^T / n. W has full column rank, so Y follows from G, H and W.
    """
    seen = {}

    def listen(message):
        if isinstance(message, Gradient | Joint):
            seen.setdefault(type(message), torch.from_numpy(np.array(message.value)))
        return message

    simulate(parties, config, carry=listen, **options)
    guessed = clients_of(config, {})[1].learner.model.classifier
    weight, bias = (value.detach() for value in (guessed.weight, guessed.bias))
    joint, gradient = seen[Joint], seen[Gradient]
    probabilities = torch.softmax(joint @ weight + bias, dim=1)
    one_hot = probabilities - len(joint) * gradient @ torch.linalg.pinv(weight.T)
    return one_hot.argmax(dim=1).numpy()


def test_the_first_gradient_of_a_label_owner_reveals_its_labels_only_without_a_secret():
    config = settings(labels="b", num_layers=2, aggregation_layers=(1,))
    parties = tiny_parties(owner="b")
    owner = parties[1]
    truth = owner.labels[owner.splits.train]
    known = guess_labels(config, parties)
    assert (known == truth).all()
    wrong = guess_labels(config, parties, secrets=SECRETS)
    assert (wrong == truth).mean() < 0.75
