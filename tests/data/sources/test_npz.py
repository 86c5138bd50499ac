"""Data sets as one .npz file: reading, dividing, and refusing bad files."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.sparse as sp

from glasu.config import DataConfig, RunConfig, TrainConfig
from glasu.data.graph import make_undirected
from glasu.data.sources.catalog import load_data, load_parties
from glasu.data.sources.npz import read_npz
from glasu.errors import ConfigError, DataError
from support.whole import load_whole


def config(name, root, *, method="glasu", labels="all", **data):
    return RunConfig(
        data=DataConfig(name=name, root=str(root), **data), train=TrainConfig(method=method, labels=labels)
    )


def edges(party):
    return set(zip(*party.graph.edge_index().tolist(), strict=True))


def write(root, name="own", *, relations=("R", "S"), nodes=40, without=(), **changed):
    """Write a small data set and return its arrays."""
    rng = np.random.default_rng(0)
    x = sp.random_array((nodes, 7), density=0.4, rng=rng, format="csr")
    arrays = {
        "num_nodes": np.int64(nodes),
        "y": np.arange(nodes) % 2,
        "relations": np.array(relations),
        "x_data": x.data,
        "x_indices": x.indices,
        "x_indptr": x.indptr,
        "x_shape": np.array(x.shape),
        "feature_blocks": np.array([0, 5, 7]),
    }
    for shift, relation in enumerate(relations, start=1):
        arrays[f"edges_{relation}"] = np.array([[i, i + shift] for i in range(nodes - shift)], np.int32).T
    arrays = {key: value for key, value in {**arrays, **changed}.items() if key not in without}
    (root / name).mkdir(parents=True, exist_ok=True)
    np.savez(root / name / f"{name}.npz", **arrays)
    return arrays


def test_floats_are_numbers_to_predict_and_are_split_as_one_group(tmp_path):
    y = np.linspace(0, 1, 40, dtype=np.float32)
    y[3] = np.nan
    write(tmp_path, y=y, train_idx=np.arange(20), val_idx=np.arange(20, 30), test_idx=np.arange(30, 40))
    changed = {"train": {"task": "regression"}}
    public, drawn = (
        load_parties(config("own", tmp_path, split=split).replace(**changed))[0]
        for split in ("public", (0.5, 0.2, 0.3))
    )
    np.testing.assert_array_equal(public.labels, y.astype(np.float64))
    assert public.classes == ()
    assert public.splits.train.tolist() == [0, 1, 2, *range(4, 20)]
    assert [len(drawn.splits.train), len(drawn.splits.test)] == [20, 12]
    with pytest.raises(ConfigError, match=r'set train\.task = "regression"'):
        load_parties(config("own", tmp_path))


def test_each_relation_becomes_a_party_with_its_graph_and_its_columns(tmp_path):
    written = write(tmp_path)
    parties = load_parties(config("own", tmp_path))
    assert [(party.name, party.num_features, party.graph.num_edges) for party in parties] == [
        ("a", 5, 78),
        ("b", 2, 76),
    ]
    x = sp.csr_array(tuple(written[key] for key in ("x_data", "x_indices", "x_indptr")), shape=(40, 7)).toarray()
    np.testing.assert_allclose(np.asarray(parties[0].features), x[:, :5], rtol=1e-6)
    np.testing.assert_array_equal(parties[1].labels, written["y"])
    assert edges(parties[1]) == {(i, i + 2) for i in range(38)} | {(i + 2, i) for i in range(38)}


def test_one_relation_is_divided_like_a_citation_graph(tmp_path):
    write(tmp_path, relations=("R",))
    whole = load_whole(config("own", tmp_path))
    assert (whole.features.shape, whole.graph.num_edges) == ((40, 7), 78)
    parties = load_parties(config("own", tmp_path, num_clients=2, edge_fraction=0.5))
    assert [party.num_features for party in parties] == [4, 3]
    assert all(0 < party.graph.num_edges < 78 for party in parties)


def test_the_method_decides_who_sees_what(tmp_path):
    write(tmp_path)
    union = set.union(*map(edges, load_parties(config("own", tmp_path))))
    (everything,) = load_parties(config("own", tmp_path, method="centralized"))
    assert (everything.num_features, edges(everything)) == (7, union)
    assert all(edges(party) == union for party in load_parties(config("own", tmp_path, method="simulated")))
    assert [len(edges(party)) for party in load_parties(config("own", tmp_path, method="standalone"))] == [78, 76]
    owned = load_parties(config("own", tmp_path, labels="b"))
    assert [party.labels is None for party in owned] == [True, False]


def test_weights_are_kept_in_both_directions_and_a_repeated_edge_counts_once(tmp_path):
    graph = make_undirected(np.array([[0, 2, 1, 1], [1, 1, 2, 1]]), 3, np.array([0.5, 0.25, 0.75, 1.0], np.float32))
    assert graph.edge_index().T.tolist() == [[1, 0], [0, 1], [2, 1], [1, 2]]
    assert graph.weights.tolist() == [0.5, 0.5, 0.75, 0.75]
    plain = make_undirected(np.array([[0, 2, 1, 1], [1, 1, 2, 1]]), 3)
    assert plain.edge_index().tolist() == graph.edge_index().tolist()
    write(tmp_path, weight_R=np.full(39, 0.5, np.float32))
    parties = load_parties(config("own", tmp_path))
    assert set(parties[0].graph.weights.tolist()) == {0.5}
    assert parties[1].graph.weights is None


def test_blocks_that_do_not_fit_the_relations_become_nearly_equal(tmp_path):
    write(tmp_path, feature_blocks=np.array([0, 2, 5, 7]))
    assert [party.num_features for party in load_parties(config("own", tmp_path))] == [3, 4]


def test_the_sources_own_split_is_the_public_one(tmp_path):
    write(tmp_path)
    with pytest.raises(ConfigError, match="'own' has no public split"):
        load_parties(config("own", tmp_path, split="public"))
    write(tmp_path, train_idx=np.array([3, 1]), val_idx=np.array([5]), test_idx=np.array([9, 8]))
    splits = load_parties(config("own", tmp_path, split="public"))[1].splits
    assert [part.tolist() for part in (splits.train, splits.validation, splits.test)] == [[1, 3], [5], [8, 9]]
    drawn = load_parties(config("own", tmp_path))[0].splits
    assert [len(part) for part in (drawn.train, drawn.validation, drawn.test)] == [24, 8, 8]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"without": ("y",)}, "has no y"),
        ({"without": ("edges_S",)}, "has no edges_S"),
        ({"without": ("x_indptr",)}, "has no x_indptr"),
        ({"relations": ()}, "names no relation"),
        ({"num_nodes": np.int64(41)}, "41 nodes, 40 labels"),
        ({"edges_R": np.zeros((3, 4), int)}, "edges_R of shape"),
        ({"edges_R": np.array([[0], [40]])}, "numbered 0..39"),
        ({"weight_R": np.ones(3)}, "with E weights"),
        ({"x_shape": np.array([40, 2])}, "not a CSR matrix"),
        ({"y": np.array([None] * 40)}, "without pickle"),
    ],
)
def test_a_file_that_is_not_of_the_format_is_refused(tmp_path, changes, said):
    write(tmp_path, **changes)
    with pytest.raises(DataError, match=said):
        load_parties(config("own", tmp_path))


def test_a_file_that_is_no_archive_is_refused(tmp_path):
    write(tmp_path)
    (tmp_path / "own" / "own.npz").write_text("not a zip file")
    with pytest.raises(DataError, match=r"cannot be read as \.npz"):
        load_parties(config("own", tmp_path))


def test_a_name_without_a_file_says_where_to_put_one_and_which_there_are(tmp_path):
    write(tmp_path)
    with pytest.raises(ConfigError, match="did you mean 'own'") as caught:
        load_parties(config("owm", tmp_path))
    assert str(tmp_path / "owm" / "owm.npz") in str(caught.value)
    with pytest.raises(ConfigError, match="no such data set"):
        load_parties(config("../own", tmp_path / "own"))


def test_dblp_has_its_relations(data_root):
    loaded = load_data(config("dblp_authors", data_root))
    assert [party.graph.num_edges // 2 for party in loaded.parties] == [3528, 2498219, 3519757]
    assert [party.num_features for party in loaded.parties] == [112, 112, 110]
    found = loaded.statistics
    assert (found.nodes, found.edges, found.features, found.classes) == (4057, 4473770, 334, 4)
    splits = loaded.parties[0].splits
    assert [len(part) for part in (splits.train, splits.validation, splits.test)] == [240, 500, 1000]


def test_imdb_and_facebook_have_their_numbers(data_root):
    movies = load_data(config("imdb_movies", data_root))
    assert [party.graph.num_edges // 2 for party in movies.parties] == [46615, 8119, 404536]
    assert (movies.statistics.nodes, movies.statistics.edges, movies.statistics.features) == (4780, 456199, 1232)
    pages = load_whole(config("facebook_pages", data_root))
    assert (len(pages.ids), pages.graph.num_edges, pages.features.shape[1]) == (22470, 2 * 170823, 4714)
    assert np.bincount(pages.labels).tolist() == [6495, 6880, 5768, 3327]
    assert pages.classes == ("company", "government", "politician", "tvshow")


def test_labels_without_graphs_are_no_data_set(data_root):
    with pytest.raises(DataError, match="has no x_data"):
        read_npz(data_root / "heri_amsterdam_labels" / "heri_amsterdam_labels.npz")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"train_idx": np.array([999]), "val_idx": np.array([1]), "test_idx": np.array([2])}, "train_idx"),
        ({"train_idx": np.array([-1]), "val_idx": np.array([1]), "test_idx": np.array([2])}, "train_idx"),
        ({"y": np.zeros((4, 2), np.int64)}, "y of shape"),
        ({"y": np.array(list("abab"))}, "y of shape"),
        ({"x_shape": np.int64(4)}, "x_shape"),
        ({"num_nodes": np.array([4, 4])}, "num_nodes"),
        ({"relations": np.array(["r", "r"])}, "relations"),
        ({"edges_r": np.array([[0.0, 1.0], [1.0, 2.0]])}, "edges_r"),
        ({"edges_r": np.array([[0, 9], [1, 2]])}, "edges_r"),
    ],
)
def test_an_array_of_the_wrong_kind_is_refused_by_name(tmp_path, changes, words):
    features = sp.csr_array(np.eye(4, dtype=np.float32))
    good = {
        "y": np.array([0, 1, 0, 1]),
        "relations": np.array(["r"]),
        "edges_r": np.array([[0, 1], [1, 2]]),
        "x_data": features.data,
        "x_indices": features.indices,
        "x_indptr": features.indptr,
        "x_shape": np.array([4, 4]),
    }
    np.savez(tmp_path / "good.npz", **good)
    assert read_npz(tmp_path / "good.npz")[0].labels.tolist() == [0, 1, 0, 1]
    np.savez(tmp_path / "bad.npz", **(good | changes))
    with pytest.raises(DataError, match=rf"bad\.npz: .*{words}"):
        read_npz(tmp_path / "bad.npz")


def test_splits_may_be_masks_and_whole_numbers_may_be_weights(tmp_path):
    features = sp.csr_array(np.eye(4, dtype=np.float32))
    np.savez(
        tmp_path / "masks.npz",
        y=np.array([0, 1, 0, 1]),
        relations=np.array("r"),
        edges_r=np.array([[0, 0], [1, 1]]),
        weight_r=np.array([0, 5], np.uint8),
        x_data=features.data,
        x_indices=features.indices,
        x_indptr=features.indptr,
        x_shape=np.array([4, 4]),
        class_names=np.array([10, 20]),
        train_idx=np.array([True, True, False, False]),
        val_idx=np.array([False, False, True, False]),
        test_idx=np.array([False, False, False, True]),
    )
    (found,) = read_npz(tmp_path / "masks.npz")
    assert found.splits is not None
    assert found.splits.train.tolist() == [0, 1]
    assert found.graph.weights.tolist() == [5.0, 5.0]
    assert found.classes == ("10", "20")
