"""One release: the two stages against parties that train alone, and what travels."""

from __future__ import annotations

import html
from dataclasses import replace

import numpy as np
import pytest
import torch

from glasu.errors import DataError
from glasu.html_report import render_report
from glasu.privacy.accounting import BudgetError
from glasu.protocol.messages import Joint, JointScores, Partial, Scores
from glasu.runtime.trained_model import TrainedModel
from support.monolith import Monolith, identical
from support.tiny import settings, simulate, tiny_parties

KEYS = {"release": "once", "aggregation_layers": (1,), "num_rounds": 4, "evaluate_every": 2, "num_local_steps": 2}
NOISY = {"dp_noise_multiplier": 1.0}


def once(parties=None, carry=None, **keys):
    return simulate(tiny_parties() if parties is None else parties, settings(**{**KEYS, **keys}), carry=carry)


def part(weights, prefix):
    return {name.removeprefix(prefix): value for name, value in weights.items() if name.startswith(prefix)}


def recorder():
    seen = []
    return seen, lambda message: seen.append(message) or message


@pytest.mark.parametrize("aggregation", ["mean", "concat"])
@pytest.mark.parametrize("backbone", ["gcn", "gcnii"])
def test_both_stages_are_parties_that_train_alone_the_second_on_the_aggregate(aggregation, backbone):
    keys = {"aggregation": aggregation, "backbone": backbone}
    parties, done = tiny_parties(), once(**keys)
    found = [client.progress.best_weights for client in done.clients]
    alone = {**KEYS, **keys, "release": "rounds", "aggregation_layers": (), "num_layers": 2, "method": "standalone"}
    first = simulate(parties, settings(**alone))
    lower = [part(weights, "lower.") for weights in found]
    if aggregation == "concat":
        assert identical(lower, [client.progress.best_weights for client in first.clients])
    partials = []
    for m, party in enumerate(parties):
        whole = Monolith(settings(**alone), [party], [lower[m]])
        hidden, initial = whole.start(0)
        for layer in range(2):
            hidden = whole.partial(0, layer, hidden, initial)
        partials.append(hidden.detach())
    aggregated = []
    for m, party in enumerate(parties):
        others = [partial for index, partial in enumerate(partials) if index != m]
        share = torch.stack(others).sum(dim=0) / 3 if aggregation == "mean" else torch.cat(others, dim=1)
        aggregated.append(replace(party, features=torch.cat([partials[m], share], dim=1).numpy()))
    second = simulate(aggregated, settings(**alone))
    for client, weights in zip(second.clients, found, strict=True):
        upper = part(weights, "upper.")
        assert upper.keys() == client.progress.best_weights.keys()
        for name, value in client.progress.best_weights.items():
            torch.testing.assert_close(upper[name], value, rtol=1e-9, atol=1e-9)
    assert done.report.test.per_client == pytest.approx(second.report.test.per_client)


def test_with_a_mean_all_parties_train_the_lower_layers_against_one_fixed_classifier():
    lowers = [part(client.progress.best_weights, "lower.classifier.") for client in once().clients]
    assert lowers[0]
    assert identical(lowers[:1] * 2, lowers[1:])
    lowers = [part(client.progress.best_weights, "lower.classifier.") for client in once(aggregation="concat").clients]
    assert not identical(lowers[:1], lowers[1:2])


@pytest.mark.parametrize(
    "keys", [{}, NOISY, {"aggregation": "concat"}, {"sampler": "neighbor", "batch_size": 4}], ids=str
)
def test_representations_and_probabilities_travel_once_and_nothing_else(keys):
    seen, carry = recorder()
    done = once(carry=carry, **keys)
    assert [type(message) for message in seen if message.key.client < 3] == [Partial] * 3 + [Scores] * 3
    assert {type(message) for message in seen} == {Partial, Joint, Scores, JointScores}
    widening = 3 if keys.get("aggregation") == "concat" else 1
    nodes, rows, header = 24, 12, 60
    expected = 8 * (nodes * 6 * (1 + widening) + rows * 3 * 2) + 4 * header
    assert done.report.traffic.total_bytes == 3 * expected
    kinds = {(row["phase"], row["kind"]) for ledger in done.report.privacy.ledger for row in ledger.releases}
    assert kinds == {("training", "representation"), ("evaluation", "probabilities")}


def test_the_rounds_of_both_stages_have_different_numbers():
    assert [entry.round for entry in once().report.history] == [2, 4, 4 + 1 + 2, 4 + 1 + 4]


def test_without_a_release_of_probabilities_each_party_predicts_alone():
    seen, carry = recorder()
    done = once(carry=carry, release_probabilities=False)
    assert {type(message) for message in seen} == {Partial, Joint}
    assert done.report.test.accuracy == pytest.approx(np.mean(done.report.test.per_client))
    assert once().report.test.per_client == done.report.test.per_client


@pytest.mark.parametrize("keys", [{}, NOISY, {"aggregation": "concat", **NOISY}], ids=str)
def test_a_saved_model_predicts_what_training_found_and_repeats_the_release(keys, tmp_path):
    parties, done = tiny_parties(), once(**keys)
    TrainedModel.of(done.clients).save(tmp_path)
    model, nodes = TrainedModel.load(tmp_path), parties[0].splits.test
    scores = model.predict_proba(parties, nodes)
    if not keys:
        accuracy = (scores.argmax(axis=1) == parties[0].labels[nodes]).mean()
        assert accuracy == pytest.approx(done.report.test.accuracy)
    assert model.config.train.release == "once"
    assert np.array_equal(scores, model.predict_proba(parties, nodes))


def test_weights_of_another_kind_of_model_are_refused(tmp_path):
    TrainedModel.of(once().clients).save(tmp_path)
    model = TrainedModel.load(tmp_path)
    broken = replace(model, weights=tuple(part(weights, "lower.") for weights in model.weights))
    with pytest.raises(DataError, match="do not fit the model"):
        broken.predict_proba(tiny_parties())


def test_redone_content_repeats_its_noise_and_other_content_has_fresh_noise():
    def partials(parties, **keys):
        seen, carry = recorder()
        once(parties, carry, **NOISY, **keys)
        return [message.value for message in seen if isinstance(message, Partial)]

    first, again, other = partials(None), partials(None), partials(None, learning_rate=0.05)
    assert all(np.array_equal(*pair) for pair in zip(first, again, strict=True))
    assert all((one != two).mean() > 0.5 for one, two in zip(first, other, strict=True))  # some rows stay zero


def test_the_report_states_epsilon_unit_delta_and_releases():
    spent = once(**NOISY).report.to_dict()["privacy"]["differential_privacy"]
    assert spent["epsilon_zeroed"] == pytest.approx(6.57, abs=0.01)
    assert spent["epsilon_replaced"] == pytest.approx(15.5, abs=0.1)
    assert (spent["releases"], spent["rows"], spent["delta"]) == (2, 24, 1e-5)
    assert "not a node, an edge or the weights" in spent["unit"]
    assert "differential_privacy" not in once().report.to_dict()["privacy"]


def test_the_page_and_the_line_of_a_report_state_it_too():
    report = once(**NOISY).report
    said = str(report.privacy.differential_privacy)
    assert said.startswith("differential privacy of party a: epsilon 6.57 if a row becomes zero, 15.5 if it becomes")
    page = render_report("title", "introduction", {"noisy": report, "plain": once().report})
    assert f"noisy: {html.escape(said)}" in page


ROUNDS = {"release": "rounds", "num_rounds": 3, "evaluate_every": 1, "aggregation_layers": (3,)}


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"dp_noise_multiplier_probabilities": 2.0},
        {"release_probabilities": False},
        {"secure_aggregation": "masks", "precision": "fp32"},
        ROUNDS,
        {**ROUNDS, "num_rounds": 1},
    ],
    ids=str,
)
def test_a_target_that_the_settings_pass_is_refused_before_the_training(keys):
    keys = {**NOISY, **keys}
    spent = once(**keys).report.privacy.differential_privacy.spent
    events: list = []
    config = settings(**{**KEYS, **keys, "target_epsilon": 0.99 * spent.epsilon_replaced})
    with pytest.raises(BudgetError, match=r"released at least .* above privacy\.target_epsilon") as caught:
        simulate(tiny_parties(), config, observer=events.append)
    assert not events
    assert f"at least {spent.epsilon_replaced:.3g} (delta 1e-05)" in str(caught.value)
    again = once(**keys, target_epsilon=1.01 * spent.epsilon_replaced).report
    assert again.privacy.differential_privacy.spent.releases == spent.releases


def test_a_release_that_would_pass_the_target_is_never_sent_where_the_settings_do_not_decide():
    seen, carry = recorder()
    keys = {**NOISY, **ROUNDS, "aggregation_layers": (1, 3), "backward": "joint", "num_local_steps": 1}
    with pytest.raises(BudgetError, match=r"would raise the epsilon .* above privacy\.target_epsilon"):
        once(carry=carry, target_epsilon=25.0, **keys)
    assert {Partial, Joint} <= {type(message) for message in seen}


@pytest.mark.parametrize("keys", [{"aggregation_layers": (3,)}, {"aggregation_layers": (1, 3), "backward": "joint"}])
def test_rounds_with_noise_send_noisy_tensors_only(keys):
    seen, carry = recorder()
    config = settings(num_rounds=3, evaluate_every=1, **NOISY, **keys)
    report = simulate(tiny_parties(), config, carry=carry).report
    names = {type(message).__name__ for message in seen if message.key.client < 3}
    assert names == {"Partial", "Scores", *(["Gradient"] if "backward" in keys else [])}
    protections = {row["protection"] for ledger in report.privacy.ledger for row in ledger.releases}
    assert all("noise" in each.split("+") for each in protections)
    assert len(report.losses) == 3
    assert report.privacy.differential_privacy.spent.releases == (3 if "backward" not in keys else 13)
