"""`data.features`: what a run trains on, reports, saves, and applies to new data."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import scipy.sparse as sp

import glasu
from glasu.data.preprocessing import fit_preparation
from glasu.model.sparse import SparseRows
from glasu.protocol.learner import NodeData
from glasu.runtime.trained_model import TrainedModel
from support.tiny import settings, simulate, tiny_parties

TIME, CONSTANT = 4, 5  # positions of two of the added columns


def odd_parties(form=np.asarray):
    """Return three parties with four numbers, a time, a constant and a word per node."""
    rng, parties = np.random.default_rng(5), []
    for party in tiny_parties():
        count = party.num_nodes
        added = [rng.normal(1.7e9, 1e7, count), np.full(count, 2.0), rng.random(count) < 0.2]
        features = np.column_stack([party.features[:, :4], *added]).astype(np.float32)
        parties.append(replace(party, features=form(features)))
    return parties


def train(parties, **keys):
    keys = {"num_rounds": 3, "precision": "fp32", "optimizer": "adam", "features": "auto", **keys}
    return simulate(parties, settings(**keys))


@pytest.mark.parametrize("sampler", ["full", "neighbor"])
@pytest.mark.parametrize("method", ["glasu", "standalone", "centralized"])
def test_a_run_with_auto_equals_a_run_on_features_that_were_prepared_before(method, sampler):
    parties, keys = odd_parties(), {"method": method, "sampler": sampler, "batch_size": 6, "input_scale": 0.5}
    before = [replace(one, features=fit_preparation(one.features).apply(one.features, np.float32)) for one in parties]
    done, expected = train(parties, **keys), train(before, features="none", **keys)
    assert done.report.weights_sha256 == expected.report.weights_sha256
    assert done.report.test == expected.report.test


def test_the_automatic_scale_is_the_one_of_the_prepared_rows():
    config = settings(features="auto", input_scale="auto")
    for party in odd_parties():
        rows = NodeData(config, party, has_labels=True).features(np.arange(party.num_nodes))
        assert np.linalg.norm(rows.numpy(), axis=1).mean() == pytest.approx(3)


def _dense(rows):
    return rows.toarray() if isinstance(rows, SparseRows) else rows.numpy()


@pytest.mark.parametrize("form", [np.asarray, sp.csr_array])
def test_gathered_rows_are_the_rows_of_the_whole(form):
    nodes = np.array([2, 3, 11, 20])
    for party in odd_parties(form):
        data = NodeData(settings(features="auto"), party, has_labels=True)
        whole, some = (_dense(data.features(chosen)) for chosen in (np.arange(24), nodes))
        np.testing.assert_array_equal(whole[nodes], some)
        if form is np.asarray:
            np.testing.assert_array_equal(data.preparation.apply(party.features[nodes], some.dtype.type), some)


def test_a_model_predicts_with_the_stored_preparation_and_not_with_one_of_the_new_data(tmp_path):
    parties = odd_parties()
    model = TrainedModel.of(train(parties).clients)
    model.save(tmp_path)
    again = TrainedModel.load(tmp_path)
    assert [client.preparation for client in again.clients] == [client.preparation for client in model.clients]
    probabilities = model.predict_proba(parties)
    np.testing.assert_array_equal(again.predict_proba(parties), probabilities)
    # A preparation of the new data would undo the shift, and would keep the column that is constant no more.
    shifted = [replace(one, features=one.features + np.float32(3) * (np.arange(7) < 4)) for one in parties]
    assert not np.allclose(again.predict_proba(shifted), probabilities)
    changed = [one.features.copy() for one in parties]
    for features in changed:
        features[:, CONSTANT] = np.arange(24)
    varied = [replace(one, features=features) for one, features in zip(parties, changed, strict=True)]
    np.testing.assert_array_equal(again.predict_proba(varied), probabilities)


def test_the_estimator_predicts_with_the_stored_preparation():
    parties = odd_parties()
    model = glasu.GLASUClassifier(hidden=8, num_rounds=2).fit(parties)
    assert model.model_.config.data.features == "auto"
    later = [one.features.copy() for one in parties]
    for features in later:
        features[:, TIME] += 1e9  # clipped: the latest time that the model knows
    moved = [replace(one, features=features) for one, features in zip(parties, later, strict=True)]
    one, other = model.predict_proba(parties), model.predict_proba(moved)
    assert not np.allclose(one, other)
    later[0][:, TIME] += 1e9
    moved[0] = replace(parties[0], features=later[0])
    np.testing.assert_array_equal(model.predict_proba(moved), other)


def test_the_report_lists_what_was_done_at_each_party():
    named = tuple(f"column {number}" for number in range(7))
    parties = odd_parties()
    parties[0] = replace(parties[0], feature_names=named)
    report = train(parties).report.to_dict()
    found = {"unchanged": 1, "scaled": 0, "standardized": 5}
    assert [party["prepared"] for party in report["parties"]] == [
        {**found, "dropped": ["column 5"]},
        {**found, "dropped": [5]},
        {**found, "dropped": [5]},
    ]
    raw = train(parties, features="none").report.to_dict()
    assert raw["parties"][0]["prepared"] == {"unchanged": 7, "scaled": 0, "standardized": 0, "dropped": []}


def test_raw_features_stay_raw():
    for party in odd_parties():
        data = NodeData(settings(features="none"), party, has_labels=True)
        np.testing.assert_array_equal(data.features(np.arange(24)).numpy(), party.features)
