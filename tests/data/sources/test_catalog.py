from __future__ import annotations

import os
import shutil
import subprocess
import sys
import traceback
from pathlib import Path

import numpy as np
import pytest
import scipy.sparse as sp

from glasu.config import DataConfig, RunConfig, TrainConfig
from glasu.data.folders import write_party
from glasu.data.party import PartyData
from glasu.data.sources import SOURCES, DataSource, find_source
from glasu.data.sources.catalog import load_parties
from glasu.errors import AlignmentError, ConfigError, DataError
from support.whole import load_whole

SIZES = {"num_nodes": 300, "num_features": 9, "num_classes": 3}


def config(*, method="glasu", labels="all", task="multiclass", **data):
    return RunConfig(data=DataConfig(**data), train=TrainConfig(method=method, labels=labels, task=task))


def edges(party):
    return set(zip(*party.graph.edge_index().tolist(), strict=True))


@pytest.mark.parametrize(
    ("name", "nodes", "num_edges", "features", "classes", "train"),
    [
        ("cora", 2708, 10556, 1433, 7, 420),
        ("citeseer", 3327, 9104, 3703, 6, 504),
        ("pubmed", 19717, 88648, 500, 3, 960),
    ],
)
def test_planetoid_has_the_papers_numbers(data_root, name, nodes, num_edges, features, classes, train):
    whole = load_whole(config(name=name, root=str(data_root)))
    assert whole.features.shape == (nodes, features)
    assert whole.graph.num_edges == num_edges
    assert len(whole.classes) == classes
    sizes = [len(part) for part in (whole.splits.train, whole.splits.validation, whole.splits.test)]
    assert sizes == [train, 500, 1000]
    assert len(set(np.bincount(whole.labels[whole.splits.train]))) == 1


def test_the_public_split_of_cora_has_140_labels_and_fractions_have_theirs(data_root):
    public = load_whole(config(name="cora", root=str(data_root), split="public")).splits
    assert [len(part) for part in (public.train, public.validation, public.test)] == [140, 500, 1000]
    assert public.train.tolist() == list(range(140))
    shares = load_whole(config(name="cora", root=str(data_root), split=(0.5, 0.25, 0.25))).splits
    assert abs(len(shares.train) - 1354) <= 7


def test_reading_writes_nothing_beside_the_raw_files(data_root):
    load_parties(config(name="cora", root=str(data_root)))
    assert [path.name for path in (data_root / "planetoid" / "Cora").iterdir()] == ["raw"]


def test_the_root_in_the_config_beats_the_environment(data_root, monkeypatch, tmp_path):
    monkeypatch.setenv("GLASU_DATA_ROOT", str(tmp_path))
    assert load_whole(config(name="cora", root=str(data_root))).features.shape == (2708, 1433)


def test_the_environment_says_where_data_is(data_root, monkeypatch):
    monkeypatch.setenv("GLASU_DATA_ROOT", str(data_root))
    assert sp.issparse(load_parties(config(name="cora"))[0].features)


@pytest.fixture
def nowhere(monkeypatch, tmp_path):
    """Make the data root and the cache empty, and every download fail."""
    from torch_geometric.datasets import Planetoid

    monkeypatch.setattr(Planetoid, "url", (tmp_path / "no such folder").as_uri())
    monkeypatch.setenv("GLASU_DATA_ROOT", str(tmp_path / "root"))
    monkeypatch.setenv("GLASU_CACHE", str(tmp_path / "cache"))
    return tmp_path


def test_files_that_cannot_be_had_are_named_with_where_to_get_and_put_them(nowhere):
    with pytest.raises(DataError) as caught:
        load_parties(config(name="citeseer"))
    for said in ("ind.citeseer.allx", "kimiyoung/planetoid", str(nowhere / "root/planetoid/CiteSeer/raw")):
        assert said in str(caught.value)


def test_a_failed_download_shows_no_error_of_another_library(nowhere):
    with pytest.raises(DataError) as caught:
        load_parties(config(name="citeseer"))
    shown = "".join(traceback.format_exception(caught.value))
    assert shown.count("Traceback") == 1
    assert "\n" not in str(caught.value)


def test_files_in_the_cache_are_used(data_root, nowhere):
    (nowhere / "cache").symlink_to(data_root)
    assert load_whole(config(name="cora")).graph.num_edges == 10556


def test_damaged_files_are_reported(nowhere):
    folder = nowhere / "root" / "planetoid" / "Cora" / "raw"
    folder.mkdir(parents=True)
    for suffix in ("x", "tx", "allx", "y", "ty", "ally", "graph", "test.index"):
        (folder / f"ind.cora.{suffix}").write_text("not a pickle")
    with pytest.raises(DataError, match="cannot be read"):
        load_parties(config(name="cora"))


def test_unknown_names_are_refused_with_a_suggestion():
    with pytest.raises(ConfigError, match="did you mean 'cora'"):
        load_parties(config(name="coar"))
    with pytest.raises(ConfigError, match=f"known are {', '.join(SOURCES)}"):
        load_parties(config(name="atlantis"))
    with pytest.raises(ConfigError, match="name a data set"):
        load_parties(config())


def test_the_method_decides_who_sees_what_of_one_graph():
    whole = load_whole(config(name="synthetic", **SIZES))
    (everything,) = load_parties(config(name="synthetic", method="centralized", **SIZES))
    assert (everything.name, edges(everything)) == ("all", edges(whole))
    assert everything.num_features == 9
    for method in ("glasu", "standalone"):
        parties = load_parties(config(name="synthetic", method=method, **SIZES))
        assert [party.name for party in parties] == ["a", "b", "c"]
        assert all(edges(party) < edges(whole) for party in parties)
    simulated = load_parties(config(name="synthetic", method="simulated", **SIZES))
    assert all(edges(party) == edges(whole) for party in simulated)
    assert [party.num_features for party in simulated] == [3, 3, 3]


def test_the_method_decides_who_sees_what_of_the_demo():
    parties = load_parties(config(name="demo"))
    union = set.union(*map(edges, parties))
    (pooled,) = load_parties(config(name="demo", method="centralized"))
    assert (pooled.num_features, edges(pooled)) == (sum(party.num_features for party in parties), union)
    assert all(edges(party) == union for party in load_parties(config(name="demo", method="simulated")))


def test_splits_and_edges_follow_the_data_seed_only():
    first = load_parties(RunConfig(data=DataConfig(name="synthetic", seed=5, **SIZES), train=TrainConfig(seed=1)))
    second = load_parties(RunConfig(data=DataConfig(name="synthetic", seed=5, **SIZES), train=TrainConfig(seed=2)))
    assert first[0].splits.digest() == second[0].splits.digest()
    assert edges(first[0]) == edges(second[0])


def test_only_the_named_party_keeps_labels():
    parties = load_parties(config(name="demo", labels="follower"))
    assert [party.labels is None for party in parties] == [True, False, True]
    with pytest.raises(ConfigError, match='"profile", "follower", "reading"'):
        load_parties(config(name="demo", labels="b"))


def test_the_demo_may_be_split_otherwise_and_has_no_public_split():
    splits = load_parties(config(name="demo", split=(0.5, 0.1, 0.4)))[0].splits
    assert abs(len(splits.train) - 1200) <= 3
    for name in ("demo", "synthetic"):
        with pytest.raises(ConfigError, match=r'data.split="public"'):
            load_parties(config(name=name, split="public"))


@pytest.fixture
def folders(tmp_path):
    """Write the demo's departments as folders and return their paths."""
    for party in load_parties(config(name="demo")):
        write_party(party, tmp_path / party.name)
    return [str(tmp_path / name) for name in ("profile", "follower", "reading")]


def test_folders_train_as_the_data_they_were_written_from(folders):
    for method in ("glasu", "centralized", "simulated"):
        named = load_parties(config(name="demo", method=method))
        read = load_parties(config(parties=tuple(folders), method=method))
        for before, after in zip(named, read, strict=True):
            np.testing.assert_array_equal(before.features, after.features)
            np.testing.assert_array_equal(before.graph.indices, after.graph.indices)
            assert (before.ids_digest(), before.splits.digest()) == (after.ids_digest(), after.splits.digest())


def own_party(folder, name, rows, *, labelled=True):
    whole = load_whole(config(name="synthetic", **SIZES))
    write_party(
        PartyData(
            name,
            whole.ids[rows],
            whole.features[rows],
            whole.graph.restrict(rows),
            whole.labels[rows] if labelled else None,
            whole.classes if labelled else (),
        ),
        folder / name,
    )
    return str(folder / name)


def test_folders_in_other_orders_are_aligned_and_split_by_class(tmp_path):
    paths = (own_party(tmp_path, "x", np.arange(200)), own_party(tmp_path, "y", np.arange(299, 49, -1)))
    first, second = load_parties(config(parties=paths))
    assert first.ids.tolist() == second.ids.tolist() == list(range(50, 200))
    assert first.splits.digest() == second.splits.digest()
    assert abs(len(first.splits.train) - 90) <= 3


def test_the_label_owner_among_folders_may_be_the_only_one_with_labels(tmp_path):
    rows = np.arange(100)
    paths = (own_party(tmp_path, "x", rows, labelled=False), own_party(tmp_path, "y", rows))
    assert [party.labels is None for party in load_parties(config(parties=paths, labels="y"))] == [True, False]
    assert load_parties(config(parties=paths, method="centralized"))[0].labels is not None
    with pytest.raises(DataError, match="'x' has no labels"):
        load_parties(config(parties=paths))
    with pytest.raises(DataError, match="'x' has no labels"):
        load_parties(config(parties=paths, labels="x"))


def test_folders_without_a_common_node_are_refused(tmp_path):
    paths = (own_party(tmp_path, "x", np.arange(50)), own_party(tmp_path, "y", np.arange(60, 90)))
    with pytest.raises(AlignmentError, match="no id in common"):
        load_parties(config(parties=paths))


def test_the_task_must_fit_the_labels():
    with pytest.raises(ConfigError, match=r'train\.task="multilabel": .*set train\.task = "multiclass"'):
        load_parties(config(name="synthetic", task="multilabel", **SIZES))


def test_without_edges_every_party_has_its_columns_only():
    parties = load_parties(config(name="synthetic", edge_fraction=0.0, **SIZES))
    assert [(party.num_features, party.graph.num_edges) for party in parties] == [(3, 0)] * 3
    simulated = load_parties(config(name="synthetic", edge_fraction=0.0, method="simulated", **SIZES))
    assert all(party.graph.num_edges > 0 for party in simulated)


def test_for_prediction_neither_labels_nor_splits_are_needed(tmp_path):
    paths = tuple(own_party(tmp_path, name, np.arange(100), labelled=False) for name in "xy")
    with pytest.raises(DataError, match="'x' has no labels"):
        load_parties(config(parties=paths))
    parties = load_parties(config(parties=paths), for_prediction=True)
    assert [(party.name, party.num_nodes, party.labels) for party in parties] == [("x", 100, None), ("y", 100, None)]


def test_a_download_is_used_only_if_it_is_the_published_files(data_root, tmp_path, monkeypatch):
    from torch_geometric.datasets import Planetoid

    source, cache = tmp_path / "source", tmp_path / "cache"
    shutil.copytree(data_root / "planetoid" / "Cora" / "raw", source)
    monkeypatch.setattr(Planetoid, "url", source.as_uri())
    monkeypatch.setenv("GLASU_DATA_ROOT", str(tmp_path / "root"))
    monkeypatch.setenv("GLASU_CACHE", str(cache))
    assert load_whole(config(name="cora")).graph.num_edges == 10556
    shutil.rmtree(cache)
    (source / "ind.cora.y").chmod(0o644)
    (source / "ind.cora.y").write_bytes(b"cposix\nsystem\n(S'true'\ntR.")  # a pickle that would run a command
    monkeypatch.setattr("torch_geometric.io.read_planetoid_data", lambda *_: pytest.fail("it was read"))
    with pytest.raises(DataError, match="the download failed"):
        load_whole(config(name="cora"))
    assert not list(cache.rglob("ind.cora.*"))


EXTENSION = """
import numpy as np
from glasu import Graph, PartyData, registry
from glasu.data.sources import DataSource, RawData

def read(config, cache):
    ring = Graph.from_edges(np.arange(12), np.roll(np.arange(12), 1), 12)
    return RawData([PartyData("all", np.arange(12), np.eye(12), ring, np.arange(12) % 2, ("even", "odd"))], "a ring")

registry.register("data", "ring", DataSource(read))
"""


def test_an_extension_adds_a_data_set_that_commands_can_name(tmp_path):
    (tmp_path / "my_data.py").write_text(EXTENSION)
    (tmp_path / "run.toml").write_text('[data]\nname = "ring"\n')
    command = [sys.executable, "-m", "glasu.cli.main", "split", "run.toml", "--out", "parties"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}

    def run(*more):
        return subprocess.run([*command, *more], cwd=tmp_path, env=environment, capture_output=True, text=True)

    done = run("--extension", "my_data")
    assert done.returncode == 0, done.stderr
    assert "ring: 12 nodes, 12 directed edges, 12 features, 2 classes" in done.stderr
    assert "a ring" in done.stderr
    assert sorted(path.name for path in (tmp_path / "parties").iterdir()) == ["a", "b", "c"]
    assert "data.name='ring': no such data set" in run().stderr  # without the extension


def test_every_source_can_be_loaded_and_is_documented():
    text = (Path(__file__).parents[3] / "docs" / "datasets.md").read_text()
    for name in SOURCES:
        assert isinstance(find_source(name), DataSource)
        assert f"`{name}`" in text
