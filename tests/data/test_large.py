"""Large graphs are made in bounded memory, cached, and opened without being read."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import given, settings
from hypothesis import strategies as st

from glasu.config import DataConfig, ModelConfig, RunConfig, TrainConfig
from glasu.data.cache.arrays import Workspace
from glasu.data.cache.parties import compute_once, open_parties, partition_once, write_parties
from glasu.data.cache.store import Cache, CacheEntry
from glasu.data.edge_division import assign_edges, divide_edges
from glasu.data.folders import write_party
from glasu.data.graph import Graph, collect_edges
from glasu.data.partition import partition
from glasu.data.party import PartyData, Splits
from glasu.data.preprocessing import measure_mean_length
from glasu.data.sources.catalog import load_data
from glasu.data.sources.synthetic import draw_graph
from glasu.errors import DataError
from glasu.randomness import Stream
from glasu.runtime.simulation import train
from support.warm_process import run_program


@pytest.fixture
def cache(tmp_path):
    """Return a cache that converts every data set, of any size."""
    return Cache(tmp_path / "cache", min_bytes=0)


@pytest.fixture
def unused_cache(tmp_path):
    """Return a cache that converts no data set."""
    return Cache(tmp_path / "unused", min_bytes=10**12)


def random_graph(rng, num_nodes, num_edges, *, symmetric=True, weighted=False):
    ends = rng.integers(0, num_nodes, (2, num_edges))
    if symmetric:
        ends = np.concatenate([ends, ends[::-1]], axis=1)
    return Graph.from_edges(*ends, num_nodes, rng.random(ends.shape[1]) + 0.5 if weighted else None)


def assert_same_graph(one, other):
    for name in ("indptr", "indices", "weights", "degree"):
        first, second = getattr(one, name), getattr(other, name)
        assert (first is None) == (second is None)
        if first is not None:
            assert first.dtype == second.dtype
            np.testing.assert_array_equal(first, second)


# Collecting


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=20), max_size=5),
    st.sampled_from([1, 3, 7, 1000]),
)
def test_edges_collected_in_pieces_make_the_graph_of_all_edges(pieces, bucket_edges):
    arrays = [np.array(piece, np.int32).reshape(-1, 2).T for piece in pieces]
    all_edges = np.concatenate([np.empty((2, 0), np.int32), *arrays], axis=1)
    workspace = Workspace(piece_bytes=4 * bucket_edges)
    graph = collect_edges(((ends[0], ends[1]) for ends in arrays), 10, all_edges.shape[1], workspace)
    assert_same_graph(graph, Graph.from_edges(*all_edges, 10))


def test_collecting_in_a_folder_leaves_only_the_graph(tmp_path):
    ends = np.random.default_rng(0).integers(0, 50, (2, 500))
    graph = collect_edges([(ends[0], ends[1])], 50, 500, Workspace(tmp_path, piece_bytes=400))
    assert_same_graph(graph, Graph.from_edges(*ends, 50))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["indices.npy", "indptr.npy"]


# Dividing


def divide_at_once(graph, num_clients, edge_fraction, seed):
    """Divide the edges with all of them in memory: an independent implementation of `partition`."""
    source, target = graph.edge_index()
    place = {(int(s), int(t)): edge for edge, (s, t) in enumerate(zip(source, target, strict=True))}
    symmetric = all((t, s) in place for s, t in place)
    decides = [min(edge, place[t, s]) if symmetric else edge for (s, t), edge in place.items()]
    for client in range(num_clients):
        draws = Stream(seed, "edges", client=client).numpy().random(graph.num_edges, np.float32)
        chosen = (draws < edge_fraction)[decides]
        weights = None if graph.weights is None else graph.weights[chosen]
        yield Graph.from_edges(source[chosen], target[chosen], graph.num_nodes, weights)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    num_nodes=st.integers(1, 30),
    num_edges=st.integers(0, 200),
    symmetric=st.booleans(),
    weighted=st.booleans(),
    piece=st.sampled_from([1, 17, 10**6]),
    num_clients=st.sampled_from([1, 3, 10]),
)
def test_dividing_edges_in_pieces_gives_the_same_edges(
    seed, num_nodes, num_edges, symmetric, weighted, piece, num_clients
):
    graph = random_graph(np.random.default_rng(seed), num_nodes, num_edges, symmetric=symmetric, weighted=weighted)
    workspace = Workspace(piece_bytes=8 * piece)
    parts = divide_edges(graph, DataConfig(num_clients=num_clients, edge_fraction=0.7), seed, workspace)
    for part, expected in zip(parts, divide_at_once(graph, num_clients, 0.7, seed), strict=True):
        assert_same_graph(part, expected)


def assign_at_once(graph, num_clients, concentration, seed):
    """Assign the edges with all of them in memory: an independent implementation of `assign_edges`."""
    source, target = graph.edge_index()
    place = {(int(s), int(t)): edge for edge, (s, t) in enumerate(zip(source, target, strict=True))}
    symmetric = all((t, s) in place for s, t in place)
    decides = [min(edge, place[t, s]) if symmetric else edge for (s, t), edge in place.items()]
    shares = Stream(seed, "edge shares").numpy().dirichlet([concentration] * num_clients)
    draws = Stream(seed, "edge owners").numpy().random(graph.num_edges)
    owner = (draws[:, None] >= np.cumsum(shares)[:-1]).sum(axis=1)[decides]
    for client in range(num_clients):
        weights = None if graph.weights is None else graph.weights[owner == client]
        yield Graph.from_edges(source[owner == client], target[owner == client], graph.num_nodes, weights)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    num_nodes=st.integers(1, 30),
    num_edges=st.integers(0, 200),
    symmetric=st.booleans(),
    weighted=st.booleans(),
    piece=st.sampled_from([1, 17, 10**6]),
    num_clients=st.sampled_from([1, 3, 300]),
)
def test_assigning_edges_in_pieces_gives_the_same_edges(
    seed, num_nodes, num_edges, symmetric, weighted, piece, num_clients
):
    graph = random_graph(np.random.default_rng(seed), num_nodes, num_edges, symmetric=symmetric, weighted=weighted)
    data = DataConfig(num_clients=num_clients, partition="edges", concentration=0.7)
    parts = assign_edges(graph, data, seed, Workspace(piece_bytes=8 * piece))
    for part, expected in zip(parts, assign_at_once(graph, num_clients, 0.7, seed), strict=True):
        assert_same_graph(part, expected)


def test_a_graph_that_lacks_the_reverse_of_one_edge_is_directed():
    graph = random_graph(np.random.default_rng(0), 40, 150)
    source, target = graph.edge_index()
    for missing in (0, 57, graph.num_edges - 1):
        rest = np.arange(graph.num_edges) != missing
        lacking = Graph.from_edges(source[rest], target[rest], 40)
        (part,) = divide_edges(lacking, DataConfig(num_clients=1, edge_fraction=0.5), 3, Workspace())
        assert_same_graph(part, next(divide_at_once(lacking, 1, 0.5, 3)))


def test_dividing_in_a_folder_leaves_the_parts_and_nothing_else(tmp_path):
    graph = random_graph(np.random.default_rng(0), 40, 150)
    data = DataConfig(num_clients=2, edge_fraction=0.5)
    parts = divide_edges(graph, data, 0, Workspace(tmp_path))
    for part, expected in zip(parts, divide_edges(graph, data, 0, Workspace()), strict=True):
        assert_same_graph(part, expected)
    assert sorted(path.stem for path in tmp_path.iterdir()) == ["0.indices", "0.indptr", "1.indices", "1.indptr"]


# Writing and opening


def a_party(
    form="dense", *, weighted=False, name="clinic", multilabel=False, numbers=False, words=False, labelled=True
):
    rng = np.random.default_rng(7)
    features = rng.standard_normal((30, 8)).astype(np.float32)
    if form == "sparse":
        features[rng.random((30, 8)) < 0.9] = 0
        features[4] = 0
    labels = rng.integers(0, 2, (30, 3)) if multilabel else rng.integers(-1, 3, 30)
    if numbers:
        labels = np.where(labels < 0, np.nan, rng.standard_normal(30))
    return PartyData(
        name,
        np.array([f"id{number}" for number in range(30)]) if words else np.arange(30)[::-1].copy(),
        features,
        random_graph(rng, 30, 100, weighted=weighted),
        labels if labelled else None,
        ("x", "y", "z") if labelled and not numbers else (),
        Splits(np.arange(10), np.arange(10, 15), np.arange(20, 30)) if labelled else None,
        tuple(f"column{number}" for number in range(8)),
    )


def assert_same_party(one, other):
    assert (one.name, one.classes, one.feature_names) == (other.name, other.classes, other.feature_names)
    np.testing.assert_array_equal(one.ids, other.ids)
    assert one.ids.dtype == other.ids.dtype
    assert one.ids_digest() == other.ids_digest()
    assert sp.issparse(one.features) == sp.issparse(other.features)
    dense = [item.toarray() if sp.issparse(item) else item for item in (one.features, other.features)]
    np.testing.assert_array_equal(*dense)
    assert one.features.dtype == other.features.dtype == np.float32
    assert one.mean_length() == other.mean_length()
    assert_same_graph(one.graph, other.graph)
    assert (one.labels is None) == (other.labels is None)
    if one.labels is not None:
        np.testing.assert_array_equal(one.labels, other.labels)
    assert (one.splits is None) == (other.splits is None)
    if one.splits is not None:
        assert one.splits.digest() == other.splits.digest()


def write(workspace, parties, whole=None):
    """Return the entry that a workspace makes of the parties."""
    return CacheEntry("key", workspace.arrays, write_parties(workspace, parties, whole))


KINDS = {
    "dense": {},
    "sparse": {"form": "sparse"},
    "weighted": {"weighted": True},
    "multilabel": {"multilabel": True},
    "numbers": {"numbers": True},
    "with words as ids": {"words": True},
    "without labels": {"labelled": False},
}


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("piece", [100, 1 << 25])
def test_a_party_that_is_written_and_opened_is_the_same_party(tmp_path, kind, piece):
    before = a_party(**kind)
    (after,) = open_parties(write(Workspace(tmp_path, piece), [before]))
    assert_same_party(after, before)
    assert after.cache_key() == "key/0"
    (in_memory,) = open_parties(write(Workspace(piece_bytes=piece), [before]))
    assert_same_party(in_memory, before)


def test_arrays_that_parties_share_are_written_once(tmp_path):
    first = a_party()
    second = replace(first, name="other", features=first.features * 2)
    entry = write(Workspace(tmp_path), [first, second])
    for before, after in zip((first, second), open_parties(entry), strict=True):
        assert_same_party(after, before)
    assert "1.labels" not in entry.arrays
    assert "1.ids" not in entry.arrays


def test_a_changed_party_is_checked_and_loses_its_cache_key(tmp_path):
    (opened,) = open_parties(write(Workspace(tmp_path), [a_party()]))
    assert replace(opened, name="renamed", splits=None).cache_key() == "key/0"
    other = replace(opened, features=np.ones((30, 8)) * 2)
    assert other.cache_key() is None
    assert other.mean_length() == pytest.approx(np.sqrt(32))
    reordered = replace(opened, ids=np.arange(30))
    assert reordered.ids_digest() != opened.ids_digest()
    assert reordered.cache_key() is None
    assert replace(opened, graph=a_party(weighted=True).graph).cache_key() is None
    for changes, said in (
        ({"features": np.full((30, 8), np.nan)}, "NaN"),
        ({"ids": np.zeros(30, int)}, "distinct"),
        ({"labels": np.full(30, 3)}, "out of range"),
        ({"classes": ("x", "y")}, "out of range"),
        ({"splits": Splits(np.arange(3), np.arange(3), np.arange(3))}, "two splits"),
    ):
        with pytest.raises(DataError, match=said):
            replace(opened, **changes)


DIVISIONS = {
    "features": {"edge_fraction": 0.5},
    "features with all edges": {"edge_fraction": 1.0},
    "apart": {"partition": "apart"},
    "importance": {"partition": "importance", "concentration": 0.5},
    "correlation": {"partition": "correlation", "correlation": 0.4},
    "edges": {"partition": "edges", "concentration": 2.0},
}


@pytest.mark.parametrize("division", DIVISIONS.values(), ids=DIVISIONS)
@pytest.mark.parametrize("piece", [100, 1 << 25])
def test_a_cached_partition_equals_the_partition_in_memory(tmp_path, piece, division):
    whole = PartyData(
        "all",
        np.arange(30),
        sp.csr_array(np.diag(np.arange(1, 31)).astype(np.float32)[:, :9]),
        random_graph(np.random.default_rng(0), 30, 90),
        np.arange(30) % 3,
        ("x", "y", "z"),
        feature_names=tuple(f"column{number}" for number in range(9)),
    )
    data = DataConfig(**division)
    workspace = Workspace(tmp_path, piece)
    entry = write(workspace, partition(whole, data, 4, workspace), whole)
    opened = open_parties(entry, whole)
    for after, before in zip(opened, partition(whole, data, 4), strict=True):
        assert_same_party(after, before)
    assert [party.cache_key() for party in opened] == ["key/0", "key/1", "key/2"]
    assert ("0.indptr" in workspace.arrays) == (data.edge_fraction < 1)  # clients that share all edges store none
    assert not any(name.endswith(("ids", "labels")) for name in workspace.arrays)  # those of the whole graph


def test_the_mean_length_of_cached_features_is_the_one_in_memory():
    for form in ("dense", "sparse"):
        party = a_party(form)
        (opened,) = open_parties(write(Workspace(piece_bytes=40), [party]))
        assert opened.mean_length() == measure_mean_length(party.features)


# Whole data sets


def run_config(method="glasu", sampler="neighbor", batch_size=32, **data):
    return RunConfig(
        data=DataConfig(**data),
        model=ModelConfig(hidden=8, num_layers=2, aggregation_layers=(0, 1)),
        train=TrainConfig(method=method, num_rounds=2, num_local_steps=1, batch_size=batch_size, sampler=sampler),
    )


SIZES = {"name": "synthetic", "num_nodes": 400, "num_features": 12, "num_classes": 3}


@pytest.mark.parametrize(
    ("method", "sampler", "batch_size"),
    [
        ("glasu", "neighbor", 32),
        ("glasu", "neighbor", 0),
        ("glasu", "full", 0),
        ("glasu", "shared", 32),
        ("centralized", "neighbor", 32),
        ("simulated", "neighbor", 32),
        ("standalone", "neighbor", 32),
    ],
)
def test_a_cached_graph_trains_to_the_same_weights(cache, unused_cache, method, sampler, batch_size):
    config = run_config(method, sampler, batch_size, **SIZES)
    expected = load_data(config, cache=unused_cache)
    weights = train(expected.parties, config).weights_sha256
    assert not unused_cache.folder.exists()
    for _ in range(2):  # the first call makes the entries, the second opens them
        loaded = load_data(config, cache=cache)
        assert loaded.statistics == expected.statistics
        for after, before in zip(loaded.parties, expected.parties, strict=True):
            assert_same_party(after, before)
        assert train(loaded.parties, config).weights_sha256 == weights


@pytest.mark.parametrize("first", [False, True], ids=["after training", "before training"])
def test_a_cached_partition_serves_training_and_prediction(cache, unused_cache, first):
    config = run_config(**SIZES)
    for for_prediction in (first, not first, first):
        expected = load_data(config, for_prediction=for_prediction, cache=unused_cache).parties
        for after, before in zip(
            load_data(config, for_prediction=for_prediction, cache=cache).parties, expected, strict=True
        ):
            assert_same_party(after, before)


def test_a_cached_partition_has_the_splits_of_the_present_settings(cache, unused_cache):
    for fractions in ((0.6, 0.2, 0.2), (0.2, 0.4, 0.4)):
        config = run_config(split=fractions, **SIZES)
        for after, before in zip(
            load_data(config, cache=cache).parties, load_data(config, cache=unused_cache).parties, strict=True
        ):
            assert_same_party(after, before)


def write_folders(where, *, common=True):
    """Write the three parties of a graph; unless they have all nodes in common, each lacks some."""
    paths = []
    for number, owner in enumerate(load_data(run_config(**SIZES)).parties):
        if not common:
            rows = np.random.default_rng(number).permutation(400)[:350]
            owner = replace(
                owner,
                ids=owner.ids[rows],
                features=owner.features[rows],
                graph=owner.graph.restrict(rows),
                labels=owner.labels[rows],
                splits=None,
            )
        write_party(owner, where / owner.name, "csv")
        paths.append(str(where / owner.name))
    return tuple(paths)


@pytest.mark.parametrize("common", [True, False], ids=["with the same nodes", "with other nodes"])
@pytest.mark.parametrize("method", ["glasu", "simulated", "centralized"])
def test_cached_folders_equal_the_folders(tmp_path, cache, unused_cache, method, common):
    config = run_config(method, parties=write_folders(tmp_path, common=common))
    expected = load_data(config, cache=unused_cache)
    for _ in range(2):
        loaded = load_data(config, cache=cache)
        assert loaded.statistics == expected.statistics
        for after, before in zip(loaded.parties, expected.parties, strict=True):
            assert_same_party(after, before)


def test_a_changed_folder_is_noticed(tmp_path, cache):
    paths = write_folders(tmp_path)
    before = load_data(run_config(parties=paths), cache=cache).parties[1].graph.num_edges
    edges = tmp_path / "b" / "edges.csv"
    edges.write_text("".join(edges.read_text().splitlines(keepends=True)[:-10]))
    assert load_data(run_config(parties=paths), cache=cache).parties[1].graph.num_edges == before - 10
    (tmp_path / "b").rename(tmp_path / "renamed")
    (tmp_path / "renamed" / "party.toml").write_text(
        "".join(
            line
            for line in (tmp_path / "renamed" / "party.toml").read_text().splitlines(keepends=True)
            if not line.startswith("name")
        )
    )
    config = run_config(parties=(paths[0], str(tmp_path / "renamed"), paths[2]))
    assert [owner.name for owner in load_data(config, cache=cache).parties] == ["a", "renamed", "c"]


def test_missing_values_are_replaced_as_the_config_says(tmp_path, cache):
    paths = write_folders(tmp_path)
    nodes = tmp_path / "a" / "nodes.csv"
    header, first, *rest = nodes.read_text().splitlines()
    cells = first.split(",")
    nodes.write_text("\n".join([header, ",".join([cells[0], "", *cells[2:]]), *rest, ""]))
    configs = [run_config(parties=paths, missing=how) for how in ("zero", "mean")]
    zero, mean = (load_data(config, cache=cache).parties[0].features[0, 0] for config in configs)
    assert zero == 0.0
    assert mean != 0.0


def test_npz_sets_are_cached_whether_they_are_one_graph_or_several(tmp_path, cache, unused_cache):
    rng = np.random.default_rng(0)
    features = sp.csr_array((rng.random((60, 9)) < 0.3).astype(np.float32))
    arrays = {
        "y": rng.integers(0, 3, 60),
        "x_data": features.data,
        "x_indices": features.indices,
        "x_indptr": features.indptr,
        "x_shape": np.array(features.shape),
    }
    for name, relations in (("one", ["R"]), ("several", ["R", "S", "T"])):
        (tmp_path / name).mkdir()
        edges = {f"edges_{relation}": rng.integers(0, 60, (2, 150)) for relation in relations}
        weights = {"weight_R": rng.random(150) + 0.1}
        np.savez(tmp_path / name / f"{name}.npz", **arrays, **edges, **weights, relations=np.array(relations))
        for method in ("glasu", "simulated", "centralized"):
            config = run_config(method, name=name, root=str(tmp_path))
            expected = load_data(config, cache=unused_cache)
            for _ in range(2):
                loaded = load_data(config, cache=cache)
                assert loaded.statistics == expected.statistics
                for after, before in zip(loaded.parties, expected.parties, strict=True):
                    assert_same_party(after, before)
    # both sets, the two partitions of the one graph, and the number of linked pairs of the several
    assert len(list(cache.folder.glob("*/entry.json"))) == 5


class Untouchable(np.ndarray):
    """An array that must not be read: only its shape and type are allowed."""

    def __array_ufunc__(self, ufunc, *args, **keys):
        pytest.fail(f"{ufunc.__name__} of {self.shape}")

    def __array_function__(self, function, *args, **keys):
        pytest.fail(f"{function.__name__} of {self.shape}")

    def __getitem__(self, item):
        pytest.fail(f"items of {self.shape}")


class UntouchableCache(Cache):
    """A cache whose edges and features must not be read."""

    def open(self, about, build):
        entry = super().open(about, build)
        arrays = {
            name: array.view(Untouchable) if name.endswith(("indices", "weights", "x")) else array
            for name, array in entry.arrays.items()
        }
        return replace(entry, arrays=arrays)


def test_opening_reads_no_edge_and_no_feature(cache):
    config = run_config(**{**SIZES, "num_nodes": 4000, "average_degree": 60.0, "num_features": 30})
    load_data(config, cache=cache)
    parties = load_data(config, cache=UntouchableCache(cache.root, min_bytes=0)).parties
    assert all(isinstance(owner.features, Untouchable) for owner in parties)
    assert all(isinstance(owner.graph.indices, Untouchable) for owner in parties)


def test_opening_allocates_some_bytes_per_node_for_any_number_of_edges(cache):
    config = run_config(**{**SIZES, "num_nodes": 20_000, "average_degree": 60.0, "num_features": 30})
    load_data(config, cache=cache)  # makes the entries, and imports modules that are loaded on first use
    tracemalloc.start()
    try:
        parties = load_data(config, cache=cache).parties
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert sum(owner.graph.num_edges for owner in parties) > 2_500_000
    assert peak < 100 * 20_000


def print_memory_of_a_partition(folder: str, name: str) -> None:
    """Make and divide a graph in small pieces; print the peak of the memory, and the size of the parties."""
    cache = Cache(Path(folder), min_bytes=0, piece_bytes=1 << 17)
    config = run_config(**{**SIZES, "num_nodes": 3000, "average_degree": 400.0, "num_features": 300})
    load_data(run_config(**SIZES), cache=cache)  # imports modules that are loaded on first use
    tracemalloc.start()
    (whole,) = compute_once(cache, {"kind": "test"}, lambda workspace: [draw_graph(config, workspace, chunk=1 << 14)])
    parties = partition_once(cache, whole, DataConfig(partition=name), 0)
    peak = tracemalloc.get_traced_memory()[1]
    size = sum(4 * owner.graph.num_edges + owner.features.nbytes for owner in parties)
    print(peak, size)


@pytest.mark.parametrize(
    ("name", "size_above", "share"),
    [("features", 14_000_000, 0.3), ("apart", 8_000_000, 0.6), ("edges", 8_000_000, 0.6)],
)
def test_a_graph_is_made_and_divided_in_less_memory_than_its_size(tmp_path, name, size_above, share):
    """Run in a separate process, because tracemalloc counts all threads of this one."""
    program = "import sys; from data.test_large import print_memory_of_a_partition as run; run(*sys.argv[1:])"
    peak, size = map(int, run_program(program, tmp_path, [Path(__file__).parents[1]], [str(tmp_path), name]).split())
    assert size > size_above
    assert peak < share * size, (peak, size)
