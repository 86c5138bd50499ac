from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import given, settings
from hypothesis import strategies as st

from glasu.data.graph import Graph
from glasu.model.blocks import (
    Adjacency,
    Block,
    Draw,
    draw_all,
    draw_induced,
    draw_layer,
    draw_neighbors,
    draw_shared,
    list_edges_into,
    make_labels,
    thin_draw,
)
from glasu.randomness import Stream
from glasu.wire.encoding import DOUBLE, SINGLE
from support.draws import list_target_positions

NODES = 12
DRAWS: dict[str, Callable[..., Draw]] = {"node": draw_neighbors, "layer": draw_layer, "shared": draw_shared}


def make_bounded_draw(kind: str) -> Callable[..., Draw]:
    """Draw up to three neighbours per node, and keep at most two new nodes."""

    def draw_bounded(graph: Graph, targets: np.ndarray, fanout: int, key: int, labels: np.ndarray) -> Draw:
        draw = DRAWS[kind](graph, targets, 3 * fanout, key, labels)
        return thin_draw(graph, targets, draw, 2, Stream(key % 2**63, "kept").key(), labels)

    return draw_bounded


BOUNDED = {f"{kind}, bounded": make_bounded_draw(kind) for kind in ("node", "layer", "shared")}
TARGETS = np.array([0, 2, 3, 7])


def random_graph(*, weighted: bool = False, seed: int = 0) -> Graph:
    """Build a directed graph in which node 0 has edges from all nodes and nodes 10 and 11 have none."""
    rng = np.random.default_rng(seed)
    source, target = rng.integers(0, NODES, (2, 60))
    source, target = np.append(source, np.arange(NODES)), np.append(target % 10, np.zeros(NODES, int))
    weights = rng.uniform(0.5, 2.0, len(source)) if weighted else None
    return Graph.from_edges(source, target, NODES, weights)


def dense_matrix(graph: Graph, normalization: str) -> np.ndarray:
    """Return the dense A(E) of the whole graph."""
    A = np.zeros((graph.num_nodes, graph.num_nodes))
    source, target = graph.edge_index()
    A[target, source] = 1.0 if graph.weights is None or normalization == "none" else graph.weights
    if normalization == "none":
        return A + np.eye(len(A))
    degree = A.sum(axis=1)
    if normalization == "mean":
        return A / np.where(degree > 0, degree, 1)[:, None]
    root = np.diag((degree + 1) ** -0.5)
    return root @ (A + np.eye(len(A))) @ root


def block_of(graph: Graph, normalization: str, targets: np.ndarray, nodes: np.ndarray, draw: Draw) -> Block:
    return Adjacency(graph, normalization, DOUBLE).block(targets, nodes, draw)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("normalization", ["symmetric", "mean", "none"])
def test_the_block_of_all_edges_holds_rows_of_the_normalised_matrix(normalization, weighted):
    graph = random_graph(weighted=weighted)
    draw = draw_all(graph, TARGETS)
    block = block_of(graph, normalization, TARGETS, draw.nodes, draw)
    np.testing.assert_allclose(block.matrix.toarray(), dense_matrix(graph, normalization)[TARGETS], rtol=1e-12)


@pytest.mark.parametrize("normalization", ["symmetric", "mean", "none"])
def test_an_induced_block_holds_every_edge_between_its_sets_normalised_by_full_degrees(normalization):
    graph, nodes = random_graph(weighted=True), np.array([0, 2, 3, 4, 7, 11])
    block = block_of(graph, normalization, TARGETS, nodes, draw_induced(graph, TARGETS, nodes, make_labels(NODES)))
    expected = dense_matrix(graph, normalization)[np.ix_(TARGETS, nodes)]
    np.testing.assert_allclose(block.matrix.toarray(), expected, rtol=1e-12)


@pytest.mark.parametrize("draw_edges", DRAWS.values(), ids=DRAWS)
@pytest.mark.parametrize("normalization", ["symmetric", "mean", "none"])
def test_a_drawn_block_is_the_full_matrix_at_the_drawn_edges_times_their_scale(draw_edges, normalization):
    graph = random_graph(weighted=True)
    draw = draw_edges(graph, TARGETS, 1, 0, make_labels(NODES))
    scale = np.ones(len(draw.edges)) if normalization == "none" else draw.scale
    block = block_of(graph, normalization, TARGETS, draw.nodes, draw)
    full = dense_matrix(graph, normalization)[TARGETS]
    expected = np.zeros((len(TARGETS), NODES))
    sources = graph.indices[draw.edges]
    expected[list_target_positions(draw), sources] = full[list_target_positions(draw), sources] * scale
    rows = np.arange(len(TARGETS))
    expected[rows, TARGETS] = full[rows, TARGETS]  # self loops are never scaled; `mean` has none
    np.testing.assert_allclose(block.matrix.toarray(), expected[:, draw.nodes], rtol=1e-12)


@pytest.mark.parametrize("draw_edges", DRAWS.values(), ids=DRAWS)
def test_columns_that_others_added_to_the_union_stay_empty(draw_edges):
    graph = random_graph()
    draw = draw_edges(graph, TARGETS, 1, 0, make_labels(NODES))
    everyone = np.arange(NODES - 1)  # not all nodes, so that positions differ from node numbers
    others = np.setdiff1d(everyone, draw.nodes)
    nodes = np.union1d(draw.nodes, everyone)
    assert len(others)
    own = block_of(graph, "symmetric", TARGETS, draw.nodes, draw)
    united = block_of(graph, "symmetric", TARGETS, nodes, draw)
    np.testing.assert_array_equal(united.matrix.toarray()[:, np.searchsorted(nodes, others)], 0)
    np.testing.assert_array_equal(united.matrix.toarray()[:, np.searchsorted(nodes, draw.nodes)], own.matrix.toarray())


@pytest.mark.parametrize("normalization", ["symmetric", "mean", "none"])
def test_a_block_knows_where_its_rows_stand_among_its_columns(normalization):
    graph = random_graph()
    draw = draw_neighbors(graph, TARGETS, 1, 0, make_labels(NODES))
    block = block_of(graph, normalization, TARGETS, draw.nodes, draw)
    np.testing.assert_array_equal(draw.nodes[block.positions], TARGETS)
    assert block.matrix.shape == (len(TARGETS), len(draw.nodes))
    source, target = block.edge_index()
    expected = np.zeros(block.matrix.shape, bool)
    expected[target, source] = True
    np.testing.assert_array_equal(expected, block.matrix.toarray() != 0)


@pytest.mark.parametrize(("double", "dtype"), [(True, np.float64), (False, np.float32)])
def test_a_block_has_the_precision_that_was_asked_for(double, dtype):
    draw = draw_all(random_graph(), TARGETS)
    block = Adjacency(random_graph(), "symmetric", DOUBLE if double else SINGLE).block(TARGETS, draw.nodes, draw)
    assert block.matrix.dtype == dtype


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 7), st.integers(0, 7)), max_size=30), st.sets(st.integers(0, 7)))
def test_the_edges_into_some_nodes_are_those_of_the_edge_list(pairs, chosen):
    source, target = np.array(pairs, np.int64).reshape(-1, 2).T
    graph, targets = Graph.from_edges(source, target, 8), np.array(sorted(chosen), np.int64)
    starts, edges = list_edges_into(graph, targets)
    np.testing.assert_array_equal(edges, np.flatnonzero(np.isin(graph.edge_index()[1], targets)))
    np.testing.assert_array_equal(np.repeat(targets, np.diff(starts)), graph.edge_index()[1][edges])


# Unbiased blocks: E[A(E[l]) H | S[l+1]] = A H at the rows S[l+1].


def distance_in_errors(graph: Graph, draw_edges: Callable[..., Draw], normalization: str, *, scaled: bool) -> float:
    """Return the largest distance between the mean of 800 sampled products and the full product, in standard errors."""
    H = np.random.default_rng(1).normal(size=(NODES, 2))
    adjacency = Adjacency(graph, normalization, DOUBLE)
    products = []
    for index in range(800):
        draw = draw_edges(graph, TARGETS, 1, Stream(2, "neighbors", round=index).key(), adjacency.labels)
        draw = draw if scaled else Draw(draw.nodes, draw.starts, draw.edges)
        products.append(adjacency.block(TARGETS, draw.nodes, draw).matrix @ H[draw.nodes])
    error = np.std(products, axis=0, ddof=1) / len(products) ** 0.5
    difference = np.abs(np.mean(products, axis=0) - (dense_matrix(graph, normalization) @ H)[TARGETS])
    return float((difference / np.maximum(error, 1e-12)).max())


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("normalization", ["symmetric", "mean"])
@pytest.mark.parametrize("draw_edges", [*DRAWS.values(), *BOUNDED.values()], ids=[*DRAWS, *BOUNDED])
def test_the_expected_block_is_the_full_matrix(draw_edges, normalization, weighted):
    graph = random_graph(weighted=weighted)
    assert distance_in_errors(graph, draw_edges, normalization, scaled=True) < 5


@pytest.mark.parametrize("normalization", ["symmetric", "mean"])
@pytest.mark.parametrize("draw_edges", DRAWS.values(), ids=DRAWS)
def test_without_the_scale_the_same_draws_are_visibly_biased(draw_edges, normalization):
    assert distance_in_errors(random_graph(), draw_edges, normalization, scaled=False) > 20


@pytest.mark.parametrize("draw_edges", DRAWS.values(), ids=DRAWS)
@pytest.mark.parametrize("normalization", ["symmetric", "mean"])
def test_with_a_fanout_beyond_every_degree_nothing_is_random(draw_edges, normalization):
    graph = random_graph(weighted=True)
    draw = draw_edges(graph, TARGETS, NODES, 0, make_labels(NODES))
    block = block_of(graph, normalization, TARGETS, draw.nodes, draw)
    expected = dense_matrix(graph, normalization)[np.ix_(TARGETS, draw.nodes)]
    np.testing.assert_allclose(block.matrix.toarray(), expected, rtol=1e-12)


# Degenerate graphs.


def test_the_degree_of_a_node_does_not_depend_on_heavy_edges_elsewhere():
    weights = np.array([1e18, 1.0, 3.0])
    graph = Graph.from_edges(np.array([1, 3, 4]), np.array([0, 2, 2]), 5, weights)
    draw = draw_all(graph, np.arange(5))
    for normalization in ("symmetric", "mean"):
        block = block_of(graph, normalization, np.arange(5), draw.nodes, draw)
        np.testing.assert_allclose(block.matrix.toarray()[2], dense_matrix(graph, normalization)[2], rtol=1e-6)


@pytest.mark.parametrize("normalization", ["symmetric", "mean", "none"])
@pytest.mark.parametrize("draw_edges", DRAWS.values(), ids=DRAWS)
def test_a_party_without_edges_has_self_loops_only(draw_edges, normalization):
    graph = Graph.from_edges(np.empty(0, int), np.empty(0, int), NODES)
    draw = draw_edges(graph, TARGETS, 2, 0, make_labels(NODES))
    block = block_of(graph, normalization, TARGETS, draw.nodes, draw)
    loops = sp.csr_array((np.ones(4), (np.arange(4), block.positions)), shape=block.matrix.shape)
    np.testing.assert_array_equal(block.matrix.toarray(), (0 if normalization == "mean" else 1) * loops.toarray())


@pytest.mark.parametrize("draw_edges", [draw_all, *DRAWS.values()], ids=["all", *DRAWS])
def test_a_node_with_all_neighbours_and_an_isolated_node_share_a_block(draw_edges):
    graph = Graph.from_edges(np.arange(1, 10), np.zeros(9, int), 11)  # node 10 is isolated
    targets = np.array([0, 10])
    extra = () if draw_edges is draw_all else (3, 0, make_labels(11))
    draw = draw_edges(graph, targets, *extra)
    block = block_of(graph, "symmetric", targets, draw.nodes, draw)
    row = block.matrix.toarray()
    assert row[0, block.positions[0]] == pytest.approx(1 / 10)
    np.testing.assert_array_equal(np.flatnonzero(row[1]), block.positions[1])
    assert row[1, block.positions[1]] == 1


def test_a_batch_may_be_empty():
    graph, nobody = random_graph(), np.empty(0, np.int64)
    drawn = [draw_edges(graph, nobody, 2, 0, make_labels(NODES)) for draw_edges in DRAWS.values()]
    for draw in (draw_all(graph, nobody), *drawn):
        block = block_of(graph, "symmetric", nobody, draw.nodes, draw)
        assert block.matrix.shape == (0, len(draw.nodes))


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("normalization", ["symmetric", "mean", "none"])
@pytest.mark.parametrize("targets", [TARGETS, np.array([10, 11]), np.arange(NODES), np.empty(0, np.int64)], ids=len)
def test_a_compact_block_times_the_rows_it_reads_is_the_block_times_all_rows(targets, normalization, weighted):
    graph = random_graph(weighted=weighted)
    draw = draw_all(graph, targets)
    block = block_of(graph, normalization, targets, draw.nodes, draw)
    small, columns = block.compact(make_labels(NODES))
    rows = np.random.default_rng(1).standard_normal((NODES, 3))
    np.testing.assert_array_equal(small.matrix @ rows[columns], block.matrix @ rows)
    np.testing.assert_array_equal(rows[columns][small.positions], rows[targets])
    np.testing.assert_array_equal(columns[small.edge_index()[0]], block.edge_index()[0])
    np.testing.assert_array_equal(small.edge_index()[1], block.edge_index()[1])
    assert set(columns) == set(targets) | set(graph.indices[list_edges_into(graph, targets)[1]])
    assert (np.diff(columns) > 0).all()
    assert small.matrix.shape == (len(targets), len(columns))
