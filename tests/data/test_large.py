"""Large graphs: made in pieces of bounded memory, stored, and opened without being read."""

from __future__ import annotations

import subprocess
import sys
import tracemalloc
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import given, settings
from hypothesis import strategies as st

from glasu.config import DataConfig, ModelConfig, RunConfig, TrainConfig
from glasu.data import edges, party
from glasu.data.cache import conversion, workspace
from glasu.data.cache import entries as cache_module
from glasu.data.cache.conversion import open_parties, open_whole, write_parties, write_whole
from glasu.data.cache.store import Entry
from glasu.data.cache.workspace import Folder, Memory
from glasu.data.edges import collected, divide_edges
from glasu.data.folders import write_party
from glasu.data.partition import WholeGraph, partition
from glasu.data.party import Graph, PartyData, Splits, mean_length
from glasu.data.sources import synthetic
from glasu.data.sources.catalog import load
from glasu.randomness import Stream
from glasu.runtime.simulation import train


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("GLASU_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "store"


@pytest.fixture
def everything_is_large(cache, monkeypatch):
    """Store every data set, whatever its size."""
    monkeypatch.setattr(cache_module, "WORTH_CONVERTING", 0)
    monkeypatch.setattr(cache_module, "WORTH_DRAWING_ONCE", 0)
    return cache


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
def test_edges_collected_in_pieces_make_the_graph_of_all_of_them(pieces, bucket_edges):
    arrays = [np.array(piece, np.int32).reshape(-1, 2).T for piece in pieces]
    all_edges = np.concatenate([np.empty((2, 0), np.int32), *arrays], axis=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(edges, "BUCKET_EDGES", bucket_edges)
        graph = collected(((ends[0], ends[1]) for ends in arrays), 10, all_edges.shape[1], Memory())
    assert_same_graph(graph, Graph.from_edges(*all_edges, 10))


def test_collecting_in_a_folder_leaves_the_graph_and_nothing_else(tmp_path, monkeypatch):
    monkeypatch.setattr(edges, "BUCKET_EDGES", 100)
    ends = np.random.default_rng(0).integers(0, 50, (2, 500))
    graph = collected([(ends[0], ends[1])], 50, 500, Folder(tmp_path))
    assert_same_graph(graph, Graph.from_edges(*ends, 50))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["indices.npy", "indptr.npy"]


# Dividing


def divided_at_once(graph, num_clients, edge_fraction, seed):
    """Divide the edges with all of them in memory: the plain reading of what `partition` promises."""
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
def test_edges_divided_in_pieces_are_those_divided_at_once(
    seed, num_nodes, num_edges, symmetric, weighted, piece, num_clients
):
    graph = random_graph(np.random.default_rng(seed), num_nodes, num_edges, symmetric=symmetric, weighted=weighted)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("glasu.data.party.PIECE_EDGES", piece)
        patch.setattr("glasu.data.edges.PIECE_EDGES", piece)
        parts = divide_edges(graph, [str(client) for client in range(num_clients)], 0.7, seed, Memory())
    for part, expected in zip(parts, divided_at_once(graph, num_clients, 0.7, seed), strict=True):
        assert_same_graph(part, expected)


def test_a_graph_that_lacks_the_reverse_of_one_edge_is_directed():
    graph = random_graph(np.random.default_rng(0), 40, 150)
    source, target = graph.edge_index()
    for missing in (0, 57, graph.num_edges - 1):
        rest = np.arange(graph.num_edges) != missing
        lacking = Graph.from_edges(source[rest], target[rest], 40)
        (part,) = divide_edges(lacking, ["a"], 0.5, 3, Memory())
        assert_same_graph(part, next(divided_at_once(lacking, 1, 0.5, 3)))


def test_dividing_in_a_folder_leaves_the_parts_and_nothing_else(tmp_path):
    graph = random_graph(np.random.default_rng(0), 40, 150)
    parts = divide_edges(graph, ["a", "b"], 0.5, 0, Folder(tmp_path))
    for part, expected in zip(parts, divide_edges(graph, ["a", "b"], 0.5, 0, Memory()), strict=True):
        assert_same_graph(part, expected)
    assert sorted(path.stem for path in tmp_path.iterdir()) == ["a.indices", "a.indptr", "b.indices", "b.indptr"]


# Writing and opening


def a_party(form="dense", *, weighted=False, name="clinic", multilabel=False, words=False, labelled=True):
    rng = np.random.default_rng(7)
    features = rng.standard_normal((30, 8)).astype(np.float32)
    if form == "sparse":
        features[rng.random((30, 8)) < 0.9] = 0
        features[4] = 0
    labels = rng.integers(0, 2, (30, 3)) if multilabel else rng.integers(-1, 3, 30)
    return PartyData(
        name,
        np.array([f"id{number}" for number in range(30)]) if words else np.arange(30)[::-1].copy(),
        features,
        random_graph(rng, 30, 100, weighted=weighted),
        labels if labelled else None,
        ("x", "y", "z") if labelled else (),
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
        assert one.splits.facts == Splits(other.splits.train, other.splits.validation, other.splits.test).facts


def through(place, data, write):
    """Return the entry that a workspace makes of the data."""
    facts = write(place, data)
    return Entry("key", place.arrays, facts)


KINDS = {
    "dense": {},
    "sparse": {"form": "sparse"},
    "weighted": {"weighted": True},
    "multilabel": {"multilabel": True},
    "with words as ids": {"words": True},
    "without labels": {"labelled": False},
}


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("piece", [100, 1 << 25])
def test_a_party_that_is_written_and_opened_is_the_same_party(tmp_path, monkeypatch, kind, piece):
    monkeypatch.setattr(conversion, "PIECE_BYTES", piece)
    monkeypatch.setattr(workspace, "PIECE_BYTES", piece)
    before = a_party(**kind)
    (after,) = open_parties(through(Folder(tmp_path), [before], write_parties))
    assert_same_party(after, before)
    assert after.stored_as() == "key/0"


def test_what_parties_share_is_written_once(tmp_path):
    first = a_party()
    second = replace(first, name="other", features=first.features * 2)
    entry = through(Folder(tmp_path), [first, second], write_parties)
    for before, after in zip((first, second), open_parties(entry), strict=True):
        assert_same_party(after, before)
    assert "1.labels" not in entry.arrays
    assert "1.ids" not in entry.arrays


def test_a_stored_party_that_is_changed_is_checked_and_is_not_taken_for_the_stored_one(tmp_path):
    (opened,) = open_parties(through(Folder(tmp_path), [a_party()], write_parties))
    assert replace(opened, name="renamed", splits=None).stored_as() == "key/0"
    other = replace(opened, features=np.ones((30, 8)) * 2)
    assert other.stored_as() is None
    assert other.mean_length() == pytest.approx(np.sqrt(32))
    reordered = replace(opened, ids=np.arange(30))
    assert reordered.ids_digest() != opened.ids_digest()
    assert reordered.stored_as() is None
    assert replace(opened, graph=a_party(weighted=True).graph).stored_as() is None
    for changes, said in (
        ({"features": np.full((30, 8), np.nan)}, "NaN"),
        ({"ids": np.zeros(30, int)}, "distinct"),
        ({"labels": np.full(30, 3)}, "out of range"),
        ({"classes": ("x", "y")}, "out of range"),
        ({"splits": Splits(np.arange(3), np.arange(3), np.arange(3))}, "two splits"),
    ):
        with pytest.raises(party.DataError, match=said):
            replace(opened, **changes)


def test_features_are_stored_in_the_form_that_a_party_in_memory_has(tmp_path):
    whole = WholeGraph(
        np.arange(30),
        sp.csr_array(np.diag(np.arange(1, 31)).astype(np.float32)[:, :9]),
        random_graph(np.random.default_rng(0), 30, 90),
        np.arange(30) % 3,
        ("x", "y", "z"),
    )
    place = Folder(tmp_path)
    facts = conversion.write_division(place, whole, 3, 0.5, 4)
    opened = conversion.open_division(Entry("key", place.arrays, facts), whole)
    for after, before in zip(opened, partition(whole, 3, 0.5, 4), strict=True):
        assert_same_party(after, before)
    again = open_whole(through(Memory(), whole, write_whole))
    assert_same_party(again.as_party(), whole.as_party())


@pytest.mark.parametrize("form", ["dense", "sparse"])
def test_the_mean_length_does_not_depend_on_pieces(monkeypatch, form):
    features = a_party(form).features
    at_once = mean_length(features)
    monkeypatch.setattr(workspace, "PIECE_BYTES", 40)
    assert mean_length(features) == at_once


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
def test_a_stored_graph_trains_to_the_same_weights(monkeypatch, cache, method, sampler, batch_size):
    config = run_config(method, sampler, batch_size, **SIZES)
    expected = load(config)
    weights = train(expected.parties, config).weights_sha256
    assert not cache.exists()
    monkeypatch.setattr(cache_module, "WORTH_DRAWING_ONCE", 0)
    for _ in range(2):  # it is made, and it is opened
        loaded = load(config)
        assert loaded.statistics == expected.statistics
        for after, before in zip(loaded.parties, expected.parties, strict=True):
            assert_same_party(after, before)
        assert train(loaded.parties, config).weights_sha256 == weights


def write_folders(where, *, common=True):
    """Write the three parties of a graph; unless they have all nodes in common, each lacks some."""
    paths = []
    for number, owner in enumerate(load(run_config(**SIZES)).parties):
        if not common:
            rows = np.random.default_rng(number).permutation(400)[:350]
            owner = replace(
                owner,
                ids=owner.ids[rows],
                features=owner.features[rows],
                graph=owner.graph.restricted_to(rows),
                labels=owner.labels[rows],
                splits=None,
            )
        write_party(owner, where / owner.name, "csv")
        paths.append(str(where / owner.name))
    return tuple(paths)


@pytest.mark.parametrize("common", [True, False], ids=["with the same nodes", "with other nodes"])
@pytest.mark.parametrize("method", ["glasu", "simulated", "centralized"])
def test_stored_folders_are_the_folders(tmp_path, cache, monkeypatch, method, common):
    config = run_config(method, parties=write_folders(tmp_path, common=common))
    expected = load(config)
    monkeypatch.setattr(cache_module, "WORTH_CONVERTING", 0)
    for _ in range(2):
        loaded = load(config)
        assert loaded.statistics == expected.statistics
        for after, before in zip(loaded.parties, expected.parties, strict=True):
            assert_same_party(after, before)


def test_a_changed_folder_is_noticed(tmp_path, everything_is_large):
    paths = write_folders(tmp_path)
    before = load(run_config(parties=paths)).parties[1].graph.num_edges
    edges = tmp_path / "b" / "edges.csv"
    edges.write_text("".join(edges.read_text().splitlines(keepends=True)[:-10]))
    assert load(run_config(parties=paths)).parties[1].graph.num_edges == before - 10
    (tmp_path / "b").rename(tmp_path / "renamed")
    (tmp_path / "renamed" / "party.toml").write_text(
        "".join(
            line
            for line in (tmp_path / "renamed" / "party.toml").read_text().splitlines(keepends=True)
            if not line.startswith("name")
        )
    )
    names = [owner.name for owner in load(run_config(parties=(paths[0], str(tmp_path / "renamed"), paths[2]))).parties]
    assert names == ["a", "renamed", "c"]


def test_missing_values_are_replaced_as_this_run_asks(tmp_path, everything_is_large):
    paths = write_folders(tmp_path)
    nodes = tmp_path / "a" / "nodes.csv"
    header, first, *rest = nodes.read_text().splitlines()
    cells = first.split(",")
    nodes.write_text("\n".join([header, ",".join([cells[0], "", *cells[2:]]), *rest, ""]))
    zero, mean = (load(run_config(parties=paths, missing=how)).parties[0].features[0, 0] for how in ("zero", "mean"))
    assert zero == 0.0
    assert mean != 0.0


def test_npz_sets_are_stored_whether_they_are_one_graph_or_several(tmp_path, everything_is_large):
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
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(cache_module, "WORTH_CONVERTING", 10**12)
                expected = load(config)
            for _ in range(2):
                loaded = load(config)
                assert loaded.statistics == expected.statistics
                for after, before in zip(loaded.parties, expected.parties, strict=True):
                    assert_same_party(after, before)
    assert len(list(everything_is_large.glob("*/entry.json"))) > 5


class Untouchable(np.ndarray):
    """An array that nobody may read: only its shape, its type and who it is."""

    def __array_ufunc__(self, ufunc, *args, **keys):
        pytest.fail(f"{ufunc.__name__} of {self.shape}")

    def __array_function__(self, function, *args, **keys):
        pytest.fail(f"{function.__name__} of {self.shape}")

    def __getitem__(self, item):
        pytest.fail(f"items of {self.shape}")


def test_opening_reads_no_edge_and_no_feature(everything_is_large, monkeypatch):
    config = run_config(**{**SIZES, "num_nodes": 4000, "average_degree": 60.0, "num_features": 30})
    load(config)
    original = conversion.open_division

    def guarded(entry, whole):
        arrays = {
            name: array.view(Untouchable) if name.endswith(("indices", "weights", "x")) else array
            for name, array in entry.arrays.items()
        }
        return original(replace(entry, arrays=arrays), whole)

    monkeypatch.setattr(cache_module, "open_division", guarded)
    parties = load(config).parties
    assert all(isinstance(owner.features, Untouchable) for owner in parties)
    assert all(isinstance(owner.graph.indices, Untouchable) for owner in parties)


def test_opening_allocates_a_few_bytes_per_node_whatever_the_edges(everything_is_large):
    config = run_config(**{**SIZES, "num_nodes": 20_000, "average_degree": 60.0, "num_features": 30})
    load(config)  # makes it, and loads what is imported late
    tracemalloc.start()
    try:
        parties = load(config).parties
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert sum(owner.graph.num_edges for owner in parties) > 2_500_000
    assert peak < 20 * 20_000


def print_memory_of_a_load() -> None:
    """Make and divide a graph in small pieces; print the most memory that this took, and what the graph takes."""
    cache_module.WORTH_CONVERTING = cache_module.WORTH_DRAWING_ONCE = 0
    synthetic.CHUNK, edges.BUCKET_EDGES = 1 << 14, 1 << 15
    party.PIECE_EDGES = edges.PIECE_EDGES = 1 << 14
    workspace.PIECE_BYTES = conversion.PIECE_BYTES = 1 << 17
    config = run_config(**{**SIZES, "num_nodes": 3000, "average_degree": 400.0, "num_features": 300})
    load(run_config(**SIZES))  # loads what is imported late
    tracemalloc.start()
    parties = load(config).parties
    peak = tracemalloc.get_traced_memory()[1]
    raw = sum(4 * owner.graph.num_edges + owner.features.nbytes for owner in parties)
    print(peak, raw)


def test_a_graph_is_made_and_divided_in_less_memory_than_it_takes(cache):
    """In a process of its own: what is traced is traced in all threads, and other tests may have left some here."""
    code = "from data.test_large import print_memory_of_a_load; print_memory_of_a_load()"
    tests = Path(__file__).parents[1]
    done = subprocess.run([sys.executable, "-c", code], cwd=tests, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    peak, raw = map(int, done.stdout.split())
    assert raw > 14_000_000
    assert peak < 0.3 * raw
