from __future__ import annotations

import re
import tomllib
from dataclasses import replace

import numpy as np
import pytest
from torch_geometric.nn import SAGEConv

from glasu.errors import AlignmentError, ConfigError, DataError
from glasu.runtime.meter import Meter
from glasu.runtime.simulation import simulate
from glasu.runtime.trained import TrainedModel
from protocol.monolith import Monolith, settings, tiny_parties

KINDS = {
    "mean": {"aggregation_layers": (1, 3)},
    "concat": {"aggregation_layers": (1, 3), "aggregation": "concat", "backbone": "gcnii", "normalization": "layer"},
    "labels at one party": {"aggregation_layers": (3,), "labels": "b", "backbone": "sage"},
    "standalone": {"method": "standalone"},
    "centralized": {"method": "centralized"},
    "simulated": {"method": "simulated", "backbone": "gat"},
    "input scale": {"aggregation_layers": (1, 3), "input_scale": "auto"},
    "custom": {"aggregation_layers": (1, 3), "backbone": "custom"},
}


def fitted(name="mean"):
    keys = KINDS[name]
    convolution = SAGEConv if name == "custom" else None
    parties = tiny_parties(owner=keys.get("labels"))
    config = settings(num_rounds=3, precision="fp32", optimizer="adam", **keys)
    done = simulate(parties, config, convolution=convolution)
    return TrainedModel.of(done, convolution), parties, done


@pytest.fixture
def folder(tmp_path):
    model, _, _ = fitted()
    model.save(tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parametrize("name", KINDS)
def test_a_model_read_from_its_folder_predicts_the_same_bits(tmp_path, name):
    model, parties, _ = fitted(name)
    model.save(tmp_path / "deep" / "model")
    again = TrainedModel.load(tmp_path / "deep" / "model", model.convolution)
    probabilities = model.predict_proba(parties)
    assert probabilities.shape == (24, 3)
    np.testing.assert_allclose(probabilities.sum(axis=1), 1, rtol=1e-5)
    assert np.array_equal(again.predict_proba(parties), probabilities)
    assert np.array_equal(again.predict(parties), model.predict(parties))
    assert again.config == model.config
    assert (again.classes, again.names, again.scales) == (model.classes, model.names, model.scales)


@pytest.mark.parametrize("name", [name for name in KINDS if name != "custom"])
def test_predictions_score_on_the_test_nodes_what_the_report_says(name):
    model, parties, done = fitted(name)
    labelled = next(one for one in parties if one.labels is not None)
    nodes = labelled.splits.test
    right = model.predict(parties, nodes) == np.asarray(labelled.classes)[labelled.labels[nodes]]
    if name == "standalone":  # the report tells how each client does alone; together they vote
        own = [
            Monolith(model.config, [one], [w]).probabilities() for one, w in zip(parties, as_double(model), strict=True)
        ]
        np.testing.assert_allclose(model.predict_proba(parties), np.mean([np.asarray(p) for p in own], 0), atol=1e-5)
    else:
        assert done.report.test.accuracy == pytest.approx(right.mean())


def as_double(model):
    return [{key: value.double() for key, value in own.items()} for own in model.weights]


@pytest.mark.parametrize("name", ["mean", "labels at one party"])
def test_prediction_needs_no_labels(name):
    model, parties, _ = fitted(name)
    blind = [replace(one, labels=None, classes=(), splits=None) for one in parties]
    assert np.array_equal(model.predict_proba(blind), model.predict_proba(parties))


def test_prediction_is_metered_as_prediction():
    model, parties, _ = fitted()
    meter = Meter()
    model.predict_proba(parties, np.arange(5), meter)
    assert set(meter.by_phase) == {"prediction"}
    assert meter.exchanges == 3  # two aggregation layers and the probabilities
    assert meter.by_kind["tensor"] == 2 * 3 * 4 * ((24 + 5) * 6 + 5 * 3)


def test_a_folder_that_is_saved_to_again_holds_the_later_model(folder):
    later, parties, _ = fitted("input scale")
    later.save(folder)
    assert np.array_equal(TrainedModel.load(folder).predict_proba(parties), later.predict_proba(parties))


# --- what is refused ---------------------------------------------------------------------------------------------


def test_other_parties_than_those_that_trained_are_refused():
    model, parties, _ = fitted()
    with pytest.raises(AlignmentError, match="trained by the parties a, b, c; got a, c, b"):
        model.predict_proba([parties[0], parties[2], parties[1]])
    with pytest.raises(AlignmentError, match="got a, b"):
        model.predict_proba(parties[:2])


def test_another_number_of_features_is_refused():
    model, parties, _ = fitted()
    wider = replace(parties[1], features=np.ones((24, 9)))
    with pytest.raises(DataError, match="party 'b': 9 features, but the model was trained with 5"):
        model.predict_proba([parties[0], wider, parties[2]])


def test_parties_in_different_orders_are_refused():
    model, parties, _ = fitted()
    turned = replace(parties[2], ids=parties[2].ids[::-1].copy())
    with pytest.raises(AlignmentError, match="another order"):
        model.predict_proba([*parties[:2], turned])


def test_a_folder_of_another_schema_is_refused(folder):
    manifest = folder / "model.toml"
    text = manifest.read_text()
    assert tomllib.loads(text)["schema"] == 1
    manifest.write_text(text.replace("schema = 1", "schema = 2"))
    with pytest.raises(ConfigError, match=r"model\.toml: schema 2 is not known here"):
        TrainedModel.load(folder)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("schema = 1", ""),
        ("schema = 1", "schema = "),  # not TOML
        (r"classes = \[[^\]]*\]", ""),
        (r"input_scale = [^,]+, num", "num"),
        (r"client = \[(.|\n)*?\n\]\n", ""),
        (r"name = \"a\", ", ""),
    ],
)
def test_a_damaged_manifest_is_refused(folder, old, new):
    manifest = folder / "model.toml"
    text = manifest.read_text()
    damaged = re.sub(old, new, text)
    assert damaged != text
    manifest.write_text(damaged)
    with pytest.raises(DataError, match="is not a model folder of GLASU"):
        TrainedModel.load(folder)


def test_an_unknown_setting_in_a_manifest_is_refused(folder):
    manifest = folder / "model.toml"
    manifest.write_text(manifest.read_text().replace("num_layers", "number_of_layers"))
    with pytest.raises(ConfigError, match=r"unknown key model\.number_of_layers"):
        TrainedModel.load(folder)


@pytest.mark.parametrize("damage", [lambda data: data[: len(data) // 2], lambda data: b"", lambda data: b"x" + data])
def test_damaged_weights_are_refused(folder, damage):
    file = folder / "b.safetensors"
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(DataError, match="is not a model folder of GLASU"):
        TrainedModel.load(folder)


def test_weights_of_another_shape_are_refused(folder):
    """The file of party b in the place of that of party a: both are valid, but do not fit."""
    (folder / "a.safetensors").write_bytes((folder / "b.safetensors").read_bytes())
    with pytest.raises(DataError, match=r"party 'a': its weights do not fit"):
        TrainedModel.load(folder).predict_proba(tiny_parties())


@pytest.mark.parametrize("missing", ["model.toml", "c.safetensors"])
def test_a_missing_file_is_named(folder, missing):
    (folder / missing).unlink()
    with pytest.raises(DataError, match=missing):
        TrainedModel.load(folder)


def test_the_file_of_a_client_cannot_point_out_of_the_folder(folder):
    manifest = folder / "model.toml"
    manifest.write_text(manifest.read_text().replace('"a.safetensors"', '"../../a.safetensors"'))
    TrainedModel.load(folder)  # reads the file of that name in the folder itself


def test_prediction_keeps_the_input_scale_of_the_training_whatever_the_new_features_are():
    model, parties, _ = fitted("input scale")
    assert len(set(model.scales)) == 3  # "auto" gave each party its own
    doubled = [replace(one, features=2 * one.features) for one in parties]
    rescaled = replace(model, scales=tuple(2 * scale for scale in model.scales))
    assert np.array_equal(model.predict_proba(doubled), rescaled.predict_proba(parties))
    assert not np.array_equal(model.predict_proba(doubled), model.predict_proba(parties))


@pytest.mark.parametrize("keys", [{"sampling": "node"}, {"sampling": "layer"}, {"sampler": "shared"}], ids=str)
def test_a_sampled_prediction_does_not_depend_on_the_order_in_which_nodes_are_asked_for(keys):
    config = settings(
        **{"aggregation_layers": (1, 3), "sampler": "neighbor", "fanout": 1, "sampled_evaluation": True, **keys}
    )
    parties = tiny_parties()
    model = TrainedModel.of(simulate(parties, config))
    nodes = np.array([17, 3, 22, 0, 9, 3])  # in no order, one of them twice
    once = np.unique(nodes)
    expected = model.predict_proba(parties, once)[np.searchsorted(once, nodes)]
    np.testing.assert_allclose(model.predict_proba(parties, nodes), expected, rtol=1e-12)


@pytest.mark.parametrize("name", ["../up", "sales/eu", "sales\\eu", "..", ".hidden", "", "x" * 101, "nul\0"])
def test_a_party_whose_name_could_lead_out_of_a_model_folder_is_refused(name):
    with pytest.raises(DataError, match="files bear a party's name"):
        replace(tiny_parties()[0], name=name)


@pytest.mark.parametrize("name", ["Sales EU", "München", "a.b", "x" * 100])
def test_other_names_of_parties_survive_the_folder(tmp_path, name):
    first, *others = tiny_parties()
    model = TrainedModel.of(simulate([replace(first, name=name), *others], settings(aggregation_layers=(3,))))
    model.save(tmp_path)
    assert TrainedModel.load(tmp_path).names == (name, "b", "c")
