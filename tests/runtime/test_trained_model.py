from __future__ import annotations

import re
import tomllib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from torch_geometric.nn import SAGEConv

from glasu.config import TrainConfig
from glasu.errors import AlignmentError, ConfigError, DataError
from glasu.runtime.telemetry import TrafficCounter
from glasu.runtime.trained_model import TrainedModel, write_predictions
from support.convolutions import register_convolution
from support.monolith import Monolith, settings, tiny_parties
from support.tiny import simulate

KINDS = {
    "mean": {"aggregation_layers": (1, 3)},
    "concat": {"aggregation_layers": (1, 3), "aggregation": "concat", "backbone": "gcnii", "normalization": "layer"},
    "labels at one party": {"aggregation_layers": (3,), "labels": "b", "backbone": "sage"},
    "deep head": {"aggregation_layers": (1, 3), "labels": "b", "owner_layers": 2},
    "standalone": {"method": "standalone"},
    "centralized": {"method": "centralized"},
    "simulated": {"method": "simulated", "backbone": "gat"},
    "input scale": {"aggregation_layers": (1, 3), "input_scale": "auto"},
    "own convolution": {"aggregation_layers": (1, 3), "backbone": register_convolution(SAGEConv)},
}


def train_model(name="mean"):
    keys = KINDS[name]
    parties = tiny_parties(owner=keys.get("labels"))
    config = settings(num_rounds=3, precision="fp32", optimizer="adam", **keys)
    done = simulate(parties, config)
    return TrainedModel.of(done.clients), parties, done


@pytest.fixture
def folder(tmp_path):
    model, _, _ = train_model()
    model.save(tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parametrize("name", KINDS)
def test_a_model_read_from_its_folder_predicts_the_same_bits(tmp_path, name):
    model, parties, _ = train_model(name)
    model.save(tmp_path / "deep" / "model")
    again = TrainedModel.load(tmp_path / "deep" / "model")
    who = {"party": "b"} if name == "standalone" else {}
    probabilities = model.predict_proba(parties, **who)
    assert probabilities.shape == (24, 3)
    np.testing.assert_allclose(probabilities.sum(axis=1), 1, rtol=1e-5)
    assert np.array_equal(again.predict_proba(parties, **who), probabilities)
    assert np.array_equal(again.predict(parties, **who), model.predict(parties, **who))
    assert again.config == model.config
    assert (again.classes, again.clients) == (model.classes, model.clients)


@pytest.mark.parametrize("name", KINDS)
def test_predictions_score_on_the_test_nodes_what_the_report_says(name):
    model, parties, done = train_model(name)
    labelled = next(one for one in parties if one.labels is not None)
    nodes = labelled.splits.test
    truth = np.asarray(labelled.classes)[labelled.labels[nodes]]
    whose = model.names if name == "standalone" else [None]
    right = [(model.predict(parties, nodes, party=party) == truth).mean() for party in whose]
    assert done.report.test.accuracy == pytest.approx(np.mean(right))
    if name == "standalone":
        assert done.report.test.per_client == pytest.approx(tuple(right))


def test_after_standalone_training_each_party_predicts_with_its_own_model():
    model, parties, _ = train_model("standalone")
    for party, weights in zip(parties, as_double(model), strict=True):
        expected = Monolith(model.config, [party], [weights]).probabilities().numpy()
        np.testing.assert_allclose(model.predict_proba(parties, party=party.name), expected, atol=1e-5)
    answers = [model.predict_proba(parties, party=name) for name in model.names]
    assert not np.allclose(answers[0], answers[1])


@pytest.mark.parametrize(("party", "named"), [(None, r"party=NAME\) is missing"), ("z", "party='z'")])
def test_a_standalone_model_requires_the_name_of_the_predicting_party(party, named):
    model, parties, _ = train_model("standalone")
    with pytest.raises(ConfigError, match=f"{named}: each party with labels trained its own model.*: a, b, c"):
        model.predict_proba(parties, party=party)
    with pytest.raises(ConfigError, match="a, b, c"):
        model.predict(parties, party=party)


def as_double(model):
    return [{key: value.double() for key, value in own.items()} for own in model.weights]


@pytest.mark.parametrize("name", ["mean", "labels at one party"])
def test_prediction_needs_no_labels(name):
    model, parties, _ = train_model(name)
    blind = [replace(one, labels=None, classes=(), splits=None) for one in parties]
    assert np.array_equal(model.predict_proba(blind), model.predict_proba(parties))


def test_prediction_is_metered_as_prediction():
    model, parties, _ = train_model()
    meter = TrafficCounter()
    model.predict_proba(parties, np.arange(5), traffic=meter)
    assert set(meter.by_phase) == {"prediction"}
    assert meter.exchanges == 3  # two aggregation layers and the probabilities
    assert meter.by_kind["tensor"] == 2 * 3 * 4 * ((24 + 5) * 6 + 5 * 3)


def test_a_folder_that_is_saved_to_again_holds_the_later_model(folder):
    later, parties, _ = train_model("input scale")
    later.save(folder)
    assert np.array_equal(TrainedModel.load(folder).predict_proba(parties), later.predict_proba(parties))


def test_weights_of_a_former_model_do_not_stay_and_other_files_do(folder):
    (folder / "notes.txt").write_text("mine")
    later, _, _ = train_model("centralized")
    later.save(folder)
    assert sorted(path.name for path in folder.iterdir()) == ["all.safetensors", "model.toml", "notes.txt"]


def test_a_model_is_read_from_its_folder_or_from_the_folder_of_the_run(folder):
    inside, outside = TrainedModel.load(folder), TrainedModel.load(str(folder.parent))
    parties = tiny_parties()
    assert np.array_equal(inside.predict_proba(parties), outside.predict_proba(parties))


# --- requested nodes ---------------------------------------------------------------------------------------------


def test_nodes_are_asked_for_by_position_or_by_a_mask():
    model, parties, _ = train_model()
    everything = model.predict_proba(parties)
    np.testing.assert_array_equal(model.predict_proba(parties, np.arange(24)), everything)
    mask = np.arange(24) % 3 == 1
    np.testing.assert_allclose(model.predict_proba(parties, mask), everything[mask], rtol=1e-6)
    np.testing.assert_array_equal(
        model.predict_proba(parties, mask), model.predict_proba(parties, np.flatnonzero(mask))
    )
    for positions in ([3, 1, 3], (5,), np.array([7, 2], np.uint8), np.empty(0, np.int64)):
        np.testing.assert_allclose(
            model.predict_proba(parties, positions), everything[np.asarray(positions)], rtol=1e-6
        )
    assert model.predict(parties, np.zeros(24, bool)).shape == (0,)


@pytest.mark.parametrize(
    ("nodes", "said"),
    [
        ([0, 24], r"position 24, but positions are 0\.\.23"),
        ([-1, 3], r"position -1, but positions are 0\.\.23"),
        ([0.0, 1.0], "positions .integers., or a mask"),
        (["0"], "positions .integers., or a mask"),
        ([[0, 1]], "positions .integers., or a mask"),
        (3, "positions .integers., or a mask"),
        (np.ones(23, bool), r"mask has shape \(23,\), but needs one value for each of the 24 nodes"),
        (np.ones((24, 1), bool), r"mask has shape \(24, 1\), but needs one value for each of the 24 nodes"),
    ],
)
def test_other_ways_to_ask_for_nodes_are_refused(nodes, said):
    model, parties, _ = train_model()
    with pytest.raises(DataError, match=said):
        model.predict_proba(parties, nodes)


# --- columns -----------------------------------------------------------------------------------------------------


def with_names(parties):
    return [
        replace(one, feature_names=tuple(f"{one.name}{column}" for column in range(one.num_features)))
        for one in parties
    ]


@pytest.mark.parametrize(
    "rename", [lambda names: (names[1], names[0], *names[2:]), lambda names: ("other", *names[1:]), lambda names: ()]
)
@pytest.mark.parametrize("through_a_folder", [False, True])
def test_renamed_and_reordered_columns_are_refused(tmp_path, rename, through_a_folder):
    parties = with_names(tiny_parties())
    model = TrainedModel.of(simulate(parties, settings(precision="fp32")).clients)
    if through_a_folder:
        model.save(tmp_path)
        model = TrainedModel.load(tmp_path)
    model.predict_proba(parties)
    odd = replace(parties[1], feature_names=rename(parties[1].feature_names))
    with pytest.raises(
        DataError, match="party 'b': the names or the order of its feature columns have changed since training"
    ):
        model.predict_proba([parties[0], odd, parties[2]])


def test_columns_that_had_no_names_in_training_may_have_some_later():
    model, parties, _ = train_model()
    assert np.array_equal(model.predict_proba(with_names(parties)), model.predict_proba(parties))


def test_of_pooled_columns_the_names_are_compared_too():
    parties = with_names(tiny_parties())
    model = TrainedModel.of(simulate(parties, settings(method="centralized", precision="fp32")).clients)
    model.predict_proba(parties)
    with pytest.raises(DataError, match="party 'all': the names or the order of its feature columns"):
        model.predict_proba([parties[0], replace(parties[1], feature_names=("p", "q", "r", "s", "t")), parties[2]])


# --- refused models ----------------------------------------------------------------------------------------------


def test_other_parties_than_those_that_trained_are_refused():
    model, parties, _ = train_model()
    with pytest.raises(
        AlignmentError, match=r"trained by the parties a, b, c; got a, c, b. List them in the order of the training"
    ):
        model.predict_proba([parties[0], parties[2], parties[1]])
    with pytest.raises(AlignmentError, match=r"got a, b\. Add c\."):
        model.predict_proba(parties[:2])
    with pytest.raises(AlignmentError, match=r'got a, b_, c\. .* set name = "b" in the party\.toml of b_\.$'):
        model.predict_proba([parties[0], replace(parties[1], name="b_"), parties[2]])


def test_another_number_of_features_is_refused():
    model, parties, _ = train_model()
    wider = replace(parties[1], features=np.ones((24, 9)))
    with pytest.raises(DataError, match="party 'b': 9 features, but the model was trained with 5"):
        model.predict_proba([parties[0], wider, parties[2]])


def test_parties_in_different_orders_are_refused():
    model, parties, _ = train_model()
    turned = replace(parties[2], ids=parties[2].ids[::-1].copy())
    with pytest.raises(AlignmentError, match="different orders"):
        model.predict_proba([*parties[:2], turned])


def test_a_folder_of_another_schema_is_refused(folder):
    manifest = folder / "model.toml"
    text = manifest.read_text()
    assert tomllib.loads(text)["schema"] == 2
    manifest.write_text(text.replace("schema = 2", "schema = 1"))
    with pytest.raises(ConfigError, match=r"model\.toml: has schema 1, and this version of glasu reads 2"):
        TrainedModel.load(folder)


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        ("schema = 2", "", "schema: is missing"),
        ("schema = 2", 'schema = "2"', "schema='2': must be 2"),
        ("schema = 2", "schema = ", "is not valid TOML"),
        ("schema = 2", "schema = 2\nextra = 2", "has the unknown key 'extra'"),
        ("schema = 2", f"schema = 2\nextra = {'[' * 3000}{']' * 3000}", "is nested too deeply"),
        (r"classes = \[[^\]]*\]", "", "classes: is missing"),
        (r"classes = \[[^\]]*\]", "classes = [1]", r"classes\[0\]=1: must be a string"),
        (r"input_scale = .*\n", "", r"client\[0\]\.preparation\.input_scale: is missing; client\[1\]\."),
        (
            r"input_scale = .*\n",
            "input_scale = nan\n",
            r"client\[0\]\.preparation\.input_scale=nan: must be a finite number",
        ),
        ("spread = .*\n", "spread = [0.0]\n", r"client\[0\]\.preparation: centre, spread: each scaled column needs"),
        (r"num_columns = .*\n", "num_columns = -1\n", r"client\[0\]\.preparation\.num_columns=-1: must lie in \[0, "),
        (r"weights_sha256 = .*\n", "", r"client\[2\]\.weights_sha256: is missing"),
        (
            r"columns_sha256 = .*\n",
            "columns_sha256 = []\n",
            r"columns_sha256=\[.*\]: must be a string",
        ),
        (r"\[\[client\]\](.|\n)*", "", "client: is missing"),
        (r"\[\[client\]\](.|\n)*", "[client]\nname = 1", "client=\\{.*\\}: must be a list"),
        (r"name = \"a\"\n", "", r"client\[0\]\.name: is missing"),
        (r"name = \"a\"\n", 'name = "../a"\n', r"client\[0\]: party '\.\./a': "),
        (r"\[config.wire\]", "[config]\nwire = 3\n[config.other]", "config"),
    ],
)
def test_a_damaged_manifest_is_refused_with_the_place_of_every_fault(folder, old, new, fault):
    manifest = folder / "model.toml"
    text = manifest.read_text()
    damaged = re.sub(old, lambda match: new, text)
    assert damaged != text
    manifest.write_text(damaged)
    with pytest.raises(DataError, match=rf"model\.toml: .*{fault}") as raised:
        TrainedModel.load(folder)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(("key", "value"), [("hidden", 2**31 - 1), ("hidden", 20_000), ("num_layers", 1000)])
def test_a_manifest_with_the_settings_of_a_larger_model_is_refused_before_it_is_built(folder, key, value):
    manifest = folder / "model.toml"
    text = re.sub(rf"\b{key} = \d+", f"{key} = {value}", manifest.read_text())
    if key == "num_layers":
        text = re.sub(r"aggregation_layers = \[[^\]]*\]", f"aggregation_layers = [{value - 1}]", text)
    manifest.write_text(text)
    with pytest.raises(DataError, match=rf"model\.toml: config\.model\..*{value}.*at least \d+ weights, and a\."):
        TrainedModel.load(folder)


def test_an_absurd_width_of_a_registered_backbone_is_refused_before_memory_is_allocated(tmp_path):
    model, parties, _ = train_model("own convolution")
    model.save(tmp_path)
    manifest = tmp_path / "model.toml"
    manifest.write_text(re.sub(r"\bhidden = \d+", f"hidden = {2**31 - 1}", manifest.read_text()))
    changed = TrainedModel.load(tmp_path)
    with pytest.raises(ConfigError, match=rf"model\.hidden={2**31 - 1}, .* needs at least .* restore model\.toml\."):
        changed.predict_proba(parties)


def test_an_unknown_setting_in_a_manifest_is_refused(folder):
    manifest = folder / "model.toml"
    manifest.write_text(manifest.read_text().replace("num_layers", "number_of_layers"))
    with pytest.raises(ConfigError, match=r"unknown key model\.number_of_layers"):
        TrainedModel.load(folder)


@pytest.mark.parametrize("damage", [lambda data: data[: len(data) // 2], lambda data: b"", lambda data: b"x" + data])
def test_damaged_weights_are_refused(folder, damage):
    file = folder / "b.safetensors"
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(DataError, match=r"b\.safetensors: is damaged"):
        TrainedModel.load(folder)


def test_weights_of_another_party_are_refused(folder):
    """The file of party b in the place of that of party a: both are valid."""
    (folder / "a.safetensors").write_bytes((folder / "b.safetensors").read_bytes())
    with pytest.raises(DataError, match=r"a\.safetensors: its weights do not match the digest in model\.toml"):
        TrainedModel.load(folder)


def test_weights_of_another_run_are_refused(folder, tmp_path):
    """The same parties and shapes with another seed: only the digest differs."""
    other = TrainedModel.of(simulate(tiny_parties(), settings(seed=1, precision="fp32", **KINDS["mean"])).clients)
    other.save(tmp_path / "other")
    (folder / "c.safetensors").write_bytes((tmp_path / "other" / "c.safetensors").read_bytes())
    with pytest.raises(DataError, match=r"c\.safetensors: its weights do not match the digest in model\.toml"):
        TrainedModel.load(folder)
    TrainedModel.load(tmp_path / "other")


def test_every_clients_weights_are_named_by_their_digest(folder):
    model, _, done = train_model()
    manifest = tomllib.loads((folder / "model.toml").read_text())
    assert tuple(client["weights_sha256"] for client in manifest["client"]) == done.report.weights_sha256
    assert model.names == tuple(client["name"] for client in manifest["client"])


def test_weights_of_another_shape_are_refused():
    model, parties, _ = train_model()
    swapped = replace(model, weights=(model.weights[1], model.weights[0], model.weights[2]))
    with pytest.raises(DataError, match=r"party 'a': its weights do not fit"):
        swapped.predict_proba(parties)


@pytest.mark.parametrize("missing", ["model.toml", "c.safetensors"])
def test_a_missing_file_is_named(folder, missing):
    (folder / missing).unlink()
    with pytest.raises(DataError, match=missing):
        TrainedModel.load(folder)


def test_a_folder_without_a_model_says_where_one_was_looked_for_and_who_writes_it(tmp_path):
    said = rf"{re.escape(str(tmp_path))}: holds no model, neither model/model\.toml nor .*`glasu join`"
    with pytest.raises(DataError, match=said):
        TrainedModel.load(tmp_path)


def test_models_and_predictions_are_their_owners_alone(folder, tmp_path):
    write_predictions(tmp_path / "p.csv", np.arange(2), np.eye(2), ("x", "y"), TrainConfig())
    write_predictions(tmp_path / "p.parquet", np.arange(2), np.eye(2), ("x", "y"), TrainConfig())
    written = [*folder.iterdir(), *tmp_path.glob("p.*")]
    assert len(written) == 6
    assert {path.stat().st_mode & 0o777 for path in written} == {0o600}


@pytest.mark.parametrize("name", ["p.csv", "p.parquet"])
def test_predictions_are_durable_before_they_have_their_name_and_so_is_the_name_in_the_end(name, tmp_path, monkeypatch):
    done, replace_file = [], Path.replace

    def fsync(handle):
        done.append(Path(f"/proc/self/fd/{handle}").resolve())

    def rename(written, path):
        done.append((written, path))
        return replace_file(written, path)

    monkeypatch.setattr("os.fsync", fsync)
    monkeypatch.setattr(Path, "replace", rename)
    write_predictions(tmp_path / name, np.arange(2), np.eye(2), ("x", "y"), TrainConfig())
    written = done[0]
    assert done == [written, (written, tmp_path / name), tmp_path]
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_the_file_of_a_client_cannot_point_out_of_the_folder(folder):
    manifest = folder / "model.toml"
    manifest.write_text(manifest.read_text().replace('"a.safetensors"', '"../../a.safetensors"'))
    TrainedModel.load(folder)  # reads the file of that name in the folder itself


def test_prediction_keeps_the_input_scale_of_the_training_whatever_the_new_features_are():
    model, parties, _ = train_model("input scale")
    scales = [client.preparation.input_scale for client in model.clients]
    assert len(set(scales)) == 3  # "auto" gave each party its own
    doubled = [replace(one, features=2 * one.features) for one in parties]
    twice = [replace(client.preparation, input_scale=2 * client.preparation.input_scale) for client in model.clients]
    rescaled = replace(
        model,
        clients=tuple(replace(client, preparation=own) for client, own in zip(model.clients, twice, strict=True)),
    )
    assert np.array_equal(model.predict_proba(doubled), rescaled.predict_proba(parties))
    assert not np.array_equal(model.predict_proba(doubled), model.predict_proba(parties))


@pytest.mark.parametrize("keys", [{"sampling": "node"}, {"sampling": "layer"}, {"sampler": "shared"}], ids=str)
def test_prediction_is_exact_though_evaluation_was_sampled_and_answers_in_the_asked_order(keys):
    config = settings(
        **{"aggregation_layers": (1, 3), "sampler": "neighbor", "fanout": 1, "sampled_evaluation": True, **keys}
    )
    parties = tiny_parties()
    model = TrainedModel.of(simulate(parties, config).clients)
    assert model.config.train.sampled_evaluation
    nodes = np.array([17, 3, 22, 0, 9, 3])  # unsorted, with one duplicate
    expected = Monolith(model.config, parties, model.weights).probabilities().numpy()
    np.testing.assert_allclose(model.predict_proba(parties, nodes), expected[nodes], rtol=1e-9)
    meter = TrafficCounter()
    model.predict_proba(parties, traffic=meter)
    assert meter.by_kind["index"] == 0  # no node set was agreed upon


@pytest.mark.parametrize("name", ["../up", "sales/eu", "sales\\eu", "..", ".hidden", "", "x" * 101, "nul\0"])
def test_a_party_whose_name_could_lead_out_of_a_model_folder_is_refused(name):
    with pytest.raises(DataError, match="the name is used in file names"):
        replace(tiny_parties()[0], name=name)


@pytest.mark.parametrize("name", ["Sales EU", "München", "a.b", "x" * 100])
def test_other_names_of_parties_survive_the_folder(tmp_path, name):
    first, *others = tiny_parties()
    model = TrainedModel.of(simulate([replace(first, name=name), *others], settings(aggregation_layers=(3,))).clients)
    model.save(tmp_path)
    assert TrainedModel.load(tmp_path).names == (name, "b", "c")
