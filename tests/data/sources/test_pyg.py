"""PyG data sets by name, from files that are already in the cache: no test needs the network."""

from __future__ import annotations

import traceback

import numpy as np
import pytest
import scipy.sparse as sp

from glasu.config import DataConfig, RunConfig
from glasu.data.sources.catalog import load_data, load_parties
from glasu.errors import ConfigError, DataError
from support.whole import load_whole


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """Make the data root and the cache empty, and every download fail."""

    def unreachable(*args, **kwargs):
        raise ConnectionError("no route")

    monkeypatch.setattr("urllib.request.urlopen", unreachable)
    monkeypatch.setenv("GLASU_DATA_ROOT", str(tmp_path / "root"))
    monkeypatch.setenv("GLASU_CACHE", str(tmp_path / "cache"))
    (tmp_path / "root").mkdir()
    return tmp_path / "cache"


def config(name, **data):
    return RunConfig(data=DataConfig(name=name, **data))


def write_coauthor(folder, nodes=30):
    """Write the raw file of Coauthor CS, small."""
    rng = np.random.default_rng(0)
    attributes = sp.random_array((nodes, 9), density=0.5, rng=rng, format="csr")
    links = sp.random_array((nodes, nodes), density=0.1, rng=rng, format="csr")
    stored = {"labels": np.arange(nodes) % 3}
    for name, matrix in (("attr", attributes), ("adj", links)):
        stored |= {f"{name}_{key}": getattr(matrix, key) for key in ("data", "indices", "indptr", "shape")}
    folder.mkdir(parents=True)
    np.savez(folder / "ms_academic_cs.npz", **stored)


def test_a_set_in_the_cache_is_read_and_divided(cache):
    write_coauthor(cache / "pyg" / "Coauthor" / "CS" / "raw")
    whole = load_whole(config("pyg:Coauthor/CS"))
    assert (whole.features.shape, len(whole.classes)) == ((30, 9), 3)
    parties = load_parties(config("pyg:Coauthor/CS"))
    assert [party.num_features for party in parties] == [3, 3, 3]
    assert [len(part) for part in (whole.splits.train, whole.splits.validation, whole.splits.test)] == [18, 6, 6]
    assert list((cache.parent / "root").iterdir()) == []


def test_a_set_that_cannot_be_downloaded_says_what_to_fetch_and_where_to_put_it(cache, capsys):
    with pytest.raises(DataError) as caught:
        load_parties(config("pyg:Coauthor/CS"))
    for said in ("ms_academic_cs.npz", "gnn-benchmark", str(cache / "pyg" / "Coauthor" / "CS" / "raw")):
        assert said in str(caught.value)
    assert capsys.readouterr().err == ""
    assert "".join(traceback.format_exception(caught.value)).count("Traceback") == 1


def test_a_damaged_file_is_reported_with_where_it_lies(cache):
    raw = cache / "pyg" / "Coauthor" / "CS" / "raw"
    raw.mkdir(parents=True)
    (raw / "ms_academic_cs.npz").write_text("no archive")
    with pytest.raises(DataError, match="remove them and try again") as caught:
        load_parties(config("pyg:Coauthor/CS"))
    assert str(cache / "pyg" / "Coauthor") in str(caught.value)


def test_a_set_without_files_needs_no_folder_and_its_public_split_may_be_too_small(cache):
    loaded = load_data(config("pyg:KarateClub", split=(0.5, 0.25, 0.25)))
    assert (loaded.statistics.nodes, loaded.statistics.edges, loaded.statistics.classes) == (34, 156, 4)
    with pytest.raises(DataError, match=r"4 train, 0 validation, 0 test\); choose other splits"):  # its public split
        load_data(config("pyg:KarateClub", split="public"))
    assert not cache.exists()


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("pyg:Coautor/CS", "did you mean pyg:Coauthor"),
        ("pyg:", "torch_geometric.datasets has no ''"),
        ("pyg:Coauthor", "takes a name: pyg:Coauthor/NAME"),
        ("pyg:Actor/film", "takes no name"),
        ("pyg:MD17", "takes a name"),
        ("pyg:StochasticBlockModelDataset", "also needs block_sizes, edge_probs"),
    ],
)
def test_names_that_lead_to_no_set_are_refused(cache, name, said):
    with pytest.raises(ConfigError, match=said):
        load_parties(config(name))


def test_a_set_of_many_graphs_is_refused(cache, monkeypatch):
    from torch_geometric import datasets

    class Many(datasets.FakeDataset):
        def __init__(self):
            super().__init__(num_graphs=3, avg_num_nodes=5)

    monkeypatch.setattr(datasets, "FakeDataset", Many)
    with pytest.raises(DataError, match="has 3 graphs"):
        load_parties(config("pyg:FakeDataset"))
