from __future__ import annotations

import itertools
import tracemalloc
from collections import Counter
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

from glasu.config import ModelConfig, RunConfig, TrainConfig
from glasu.data.graph import Graph
from glasu.errors import ConfigError
from glasu.model.blocks import (
    Adjacency,
    Draw,
    draw_layer,
    draw_neighbors,
    draw_shared,
    find_draw_error,
    make_labels,
    thin_draw,
)
from glasu.model.sampler import SAMPLERS, FullGraph, Neighbor, Sampler, draw_batch, find_sampler
from glasu.randomness import Stream
from glasu.wire.encoding import SINGLE
from support.draws import list_target_positions

NODES = 10
DRAWS = {"node": draw_neighbors, "layer": draw_layer, "shared": draw_shared}
graphs = st.lists(st.tuples(st.integers(0, NODES - 1), st.integers(0, NODES - 1)), max_size=60).map(
    lambda pairs: Graph.from_edges(*np.array(pairs, np.int64).reshape(-1, 2).T, NODES)
)
node_sets = st.sets(st.integers(0, NODES - 1)).map(lambda chosen: np.array(sorted(chosen), np.int64))
situation = given(graphs, node_sets, st.integers(1, 5), st.integers(0, 1000))
quick = settings(deadline=None, max_examples=60)


def star(degree: int) -> Graph:
    """Return a graph in which node 0 has edges from nodes 1..degree."""
    return Graph.from_edges(np.arange(1, degree + 1), np.zeros(degree, int), degree + 1)


def sampler(graph: Graph, client: int = 0, **train: object) -> Sampler:
    config = RunConfig(train=TrainConfig(**{"sampler": "neighbor", "fanout": 2, "batch_size": 4, **train}))
    return find_sampler(config.train)(config, graph, client, config.train.seed)


def keys(count: int) -> Iterator[int]:
    """List the keys of this number of rounds."""
    return (Stream(5, "neighbors", round=index).key() for index in range(count))


def ring(num_nodes: int) -> Graph:
    """Build a graph in which every node has edges from the next four."""
    around = np.sort((np.arange(num_nodes)[:, None] + np.arange(1, 5)) % num_nodes, axis=1)
    return Graph(np.arange(0, 4 * num_nodes + 1, 4), around.ravel().astype(np.int32))


# Laws of every sampler.


@pytest.mark.parametrize("kind", DRAWS)
@quick
@situation
def test_a_drawn_set_is_sorted_and_contains_the_set_it_was_drawn_for(kind, graph, targets, fanout, seed):
    draw = DRAWS[kind](graph, targets, fanout, seed, make_labels(NODES))
    assert (np.diff(draw.nodes) > 0).all()
    assert np.isin(targets, draw.nodes).all()
    assert draw.nodes.dtype == np.int64


@pytest.mark.parametrize("kind", DRAWS)
@quick
@situation
def test_drawn_edges_are_distinct_edges_of_the_graph_between_the_two_sets(kind, graph, targets, fanout, seed):
    draw = DRAWS[kind](graph, targets, fanout, seed, make_labels(NODES))
    source, target = graph.edge_index()[:, draw.edges]
    np.testing.assert_array_equal(targets[list_target_positions(draw)], target)
    assert np.isin(source, draw.nodes).all()
    assert len(np.unique(draw.edges)) == len(draw.edges)
    assert (np.diff(list_target_positions(draw)) >= 0).all()


@quick
@situation
def test_node_wise_sampling_takes_as_many_neighbours_of_each_node_as_the_fanout_allows(graph, targets, fanout, seed):
    draw = draw_neighbors(graph, targets, fanout, seed, make_labels(NODES))
    degrees = np.diff(graph.indptr)[targets]
    np.testing.assert_array_equal(
        np.bincount(list_target_positions(draw), minlength=len(targets)), np.minimum(degrees, fanout)
    )
    np.testing.assert_array_equal(draw.nodes, np.union1d(targets, graph.indices[draw.edges]))
    np.testing.assert_allclose(draw.scale, (degrees / np.clip(degrees, 1, fanout))[list_target_positions(draw)])


@quick
@situation
def test_layer_wise_sampling_draws_new_neighbours_of_the_set_as_a_whole(graph, targets, fanout, seed):
    draw = draw_layer(graph, targets, fanout, seed, make_labels(NODES))
    source, target = graph.edge_index()
    candidates = np.setdiff1d(source[np.isin(target, targets)], targets)
    drawn = np.setdiff1d(draw.nodes, targets)
    assert len(drawn) == min(len(candidates), fanout * len(targets))
    assert np.isin(drawn, candidates).all()
    np.testing.assert_array_equal(draw.edges, np.flatnonzero(np.isin(target, targets) & np.isin(source, draw.nodes)))
    inside = np.isin(source[draw.edges], targets)
    np.testing.assert_allclose(draw.scale, np.where(inside, 1, len(candidates) / max(1, len(drawn))))


@quick
@situation
def test_shared_sampling_draws_from_all_other_nodes(graph, targets, fanout, seed):
    draw = draw_shared(graph, targets, fanout, seed, make_labels(NODES))
    source, target = graph.edge_index()
    count = min(NODES - len(targets), fanout * len(targets))
    assert len(draw.nodes) == len(targets) + count
    np.testing.assert_array_equal(draw.edges, np.flatnonzero(np.isin(target, targets) & np.isin(source, draw.nodes)))
    inside = np.isin(source[draw.edges], targets)
    np.testing.assert_allclose(draw.scale, np.where(inside, 1, (NODES - len(targets)) / max(1, count)))


@quick
@given(graphs, graphs, node_sets, st.integers(1, 3), st.integers(0, 3), st.integers(0, 3))
def test_a_shared_set_is_the_same_at_clients_with_other_edges(one, other, targets, fanout, round_index, layer):
    first = sampler(one, 0, sampler="shared", fanout=fanout).draw(targets, round_index, layer)
    second = sampler(other, 1, sampler="shared", fanout=fanout).draw(targets, round_index, layer)
    np.testing.assert_array_equal(first.nodes, second.nodes)


# Uniformity: every subset is equally likely; fixed seeds, rejected at one in ten thousand.


def assert_uniform(counts: Counter, possible: int) -> None:
    assert len(counts) <= possible
    observed = list(counts.values()) + [0] * (possible - len(counts))
    assert chisquare(observed).pvalue > 1e-4


@pytest.mark.parametrize(("degree", "fanout"), [(4, 3), (4, 1), (5, 2), (7, 3), (6, 5), (3, 2)])
def test_node_wise_sampling_draws_every_subset_of_the_neighbours_equally_often(degree, fanout):
    graph, labels = star(degree), make_labels(degree + 1)
    targets = np.zeros(1, np.int64)
    draws = (draw_neighbors(graph, targets, fanout, key, labels) for key in keys(3000))
    counts = Counter(tuple(draw.nodes[1:].tolist()) for draw in draws)
    assert_uniform(counts, len(list(itertools.combinations(range(degree), fanout))))


def test_two_nodes_draw_independently_of_each_other():
    source, target = np.meshgrid(np.arange(2, 6), np.arange(2))
    graph, labels = Graph.from_edges(source.ravel(), target.ravel(), 6), make_labels(6)
    counts: Counter = Counter()
    for key in keys(3000):
        draw = draw_neighbors(graph, np.arange(2), 3, key, labels)
        missing = [
            (set(range(2, 6)) - set(graph.indices[draw.edges[list_target_positions(draw) == row]].tolist()))
            for row in (0, 1)
        ]
        counts[tuple(missing[0] | {0}), tuple(missing[1] | {1})] += 1
    assert_uniform(counts, 16)


def test_layer_wise_sampling_draws_every_subset_of_the_candidates_equally_often():
    source, target = np.array([2, 3, 4, 4, 5, 1]), np.array([0, 0, 0, 1, 1, 0])  # 4 appears twice, 1 is inside
    graph, labels = Graph.from_edges(source, target, 9), make_labels(9)
    draws = (draw_layer(graph, np.arange(2), 1, key, labels) for key in keys(3000))
    assert_uniform(Counter(tuple(draw.nodes.tolist()) for draw in draws), 6)


def test_shared_sampling_draws_every_subset_of_the_other_nodes_equally_often():
    graph, labels = star(6), make_labels(7)
    draws = (draw_shared(graph, np.array([3]), 2, key, labels) for key in keys(3000))
    assert_uniform(Counter(tuple(draw.nodes.tolist()) for draw in draws), 15)


# A limit on new nodes: a draw keeps fewer of them and scales their edges up.


@pytest.mark.parametrize("kind", DRAWS)
@quick
@given(graphs, node_sets, st.integers(1, 5), st.integers(0, 1000), st.integers(0, NODES))
def test_a_thinned_draw_keeps_the_set_it_was_drawn_for_and_no_more_new_nodes_than_there_is_room_for(
    kind, graph, targets, fanout, seed, room
):
    labels = make_labels(NODES)
    draw = DRAWS[kind](graph, targets, fanout, seed, labels)
    small = thin_draw(graph, targets, draw, room, seed + 1, labels)
    assert (labels == -1).all()
    added, kept = (len(each.nodes) - len(targets) for each in (draw, small))
    assert kept == min(added, room)
    assert np.isin(targets, small.nodes).all()
    assert np.isin(small.nodes, draw.nodes).all()
    assert (np.diff(small.nodes) > 0).all()
    sources = graph.indices[draw.edges]
    used = np.isin(sources, small.nodes)
    np.testing.assert_array_equal(small.edges, draw.edges[used])
    np.testing.assert_array_equal(list_target_positions(small), list_target_positions(draw)[used])
    heavier = np.where(np.isin(sources, targets), 1.0, added / max(1, kept))
    np.testing.assert_allclose(small.scale, (draw.scale * heavier)[used])


def test_of_the_new_nodes_every_part_is_kept_equally_often():
    graph, labels, targets = star(6), make_labels(7), np.zeros(1, np.int64)
    draw = draw_neighbors(graph, targets, 5, 1, labels)
    kept = (thin_draw(graph, targets, draw, 2, key, labels).nodes.tolist() for key in keys(3000))
    assert_uniform(Counter(tuple(nodes) for nodes in kept), 10)


# Draws of an extension.


@pytest.mark.parametrize("kind", DRAWS)
@quick
@situation
def test_a_draw_of_glasu_has_no_error(kind, graph, targets, fanout, seed):
    assert not find_draw_error(graph, targets, DRAWS[kind](graph, targets, fanout, seed, make_labels(NODES)))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda draw: tuple(draw), "it must be a glasu.model.blocks.Draw, got tuple"),
        (lambda draw: draw._replace(nodes=draw.nodes.tolist()), "nodes must be a vector of signed integers"),
        (lambda draw: draw._replace(edges=draw.edges.astype(float)), "edges must be a vector of signed integers"),
        (lambda draw: draw._replace(nodes=draw.nodes[::-1]), "nodes must be sorted, distinct numbers of nodes"),
        (
            lambda draw: draw._replace(nodes=np.append(draw.nodes, 12)),
            "nodes must be sorted, distinct numbers of nodes",
        ),
        (lambda draw: draw._replace(nodes=draw.nodes[1:]), "nodes must contain all targets"),
        (lambda draw: draw._replace(nodes=draw.nodes[:-1]), "nodes must contain the sources of all edges"),
        (lambda draw: draw._replace(starts=draw.starts[:-1]), "targets, 4, got 3"),
        (lambda draw: draw._replace(starts=draw.starts + 1), "starts must begin with 0, never decrease and end with"),
        (lambda draw: draw._replace(starts=np.array([0, 6, 4, 6])), "starts must begin with 0, never decrease"),
        (lambda draw: draw._replace(edges=draw.edges + 10**6), "must be positions in row i of the graph"),
        (lambda draw: draw._replace(edges=draw.edges + 4), "must be positions in row i of the graph"),
        (lambda draw: draw._replace(edges=-draw.edges), "must be positions in row i of the graph"),
        (lambda draw: draw._replace(scale=draw.scale[1:]), "a finite float per edge"),
        (lambda draw: draw._replace(scale=draw.scale * np.nan), "a finite float per edge"),
    ],
)
def test_an_invalid_draw_of_an_extension_is_refused_with_the_name_of_the_sampler(change, said):
    class Changed(Neighbor):
        def draw(self, targets, round_index, layer, purpose="neighbors"):
            return change(super().draw(targets, round_index, layer, purpose))

    config = RunConfig(train=TrainConfig(sampler="neighbor", fanout=2))
    with pytest.raises(ConfigError, match=r"^train\.sampler='neighbor': .*Changed\.draw returned an invalid") as caught:
        Changed(config, ring(12), 0, 0).draw_and_check(np.array([0, 5, 6]), 0, 1)
    assert said in str(caught.value)


def test_a_sampler_that_states_to_read_all_nodes_must_draw_all_nodes():
    class Some(FullGraph):
        def draw(self, targets, round_index, layer, purpose="neighbors"):
            return Draw(targets, np.zeros(len(targets) + 1, int), np.empty(0, int))

    config = RunConfig(train=TrainConfig(sampler="full"))
    with pytest.raises(ConfigError, match="nodes must contain all nodes of the graph, because reads_whole_graph"):
        Some(config, ring(12), 0, 0).draw_and_check(np.array([0, 5]), 0, 1)


@pytest.mark.parametrize("settings", [{"sampling": "node"}, {"sampling": "layer"}, {"sampler": "shared"}], ids=str)
def test_no_set_exceeds_the_bound_unless_the_set_above_does(settings):
    targets = np.arange(0, 400, 20)
    free, bounded = sampler(ring(400), **settings), sampler(ring(400), max_nodes=30, **settings)
    assert len(free.draw(targets, 0, 0).nodes) > 30
    assert len(bounded.draw(targets, 0, 0).nodes) == 30
    many = np.arange(0, 400, 10)
    draw = bounded.draw(many, 0, 0)
    np.testing.assert_array_equal(draw.nodes, many)
    assert np.isin(ring(400).indices[draw.edges], many).all()


def test_a_bound_that_is_not_reached_changes_nothing():
    targets = np.arange(0, 400, 20)
    free, bounded = (sampler(ring(400), max_nodes=bound).draw(targets, 0, 0) for bound in (0, 300))
    np.testing.assert_array_equal(free.edges, bounded.edges)
    np.testing.assert_array_equal(free.scale, bounded.scale)


# The sampler of one client.


@pytest.mark.parametrize("name", SAMPLERS)
def test_the_config_names_the_sampler(name):
    assert type(sampler(ring(20), sampler=name)) is SAMPLERS[name]


@pytest.mark.parametrize("name", SAMPLERS)
def test_a_sampler_says_how_clients_come_to_the_same_node_sets(name):
    kind = SAMPLERS[name]
    assert kind.agrees_on_node_sets + kind.shares_draws + kind.reads_whole_graph == 1
    one, other, targets = ring(40), star(39), np.array([3, 7])
    first, second = (sampler(graph, m, sampler=name).draw(targets, 0, 0).nodes for m, graph in enumerate((one, other)))
    assert np.array_equal(first, second) == (not kind.agrees_on_node_sets)
    assert (len(first) == 40) == kind.reads_whole_graph


@pytest.mark.parametrize("sampling", ["node", "layer"])
def test_the_same_round_and_layer_draw_the_same_edges_again_and_others_do_not(sampling):
    graph, targets = ring(400), np.arange(0, 400, 20)
    reference = sampler(graph, sampling=sampling).draw(targets, 3, 1)
    again = sampler(graph, sampling=sampling).draw(targets, 3, 1)
    np.testing.assert_array_equal(reference.edges, again.edges)
    others = [
        sampler(graph, sampling=sampling).draw(targets, 4, 1),
        sampler(graph, sampling=sampling).draw(targets, 3, 2),
        sampler(graph, 1, sampling=sampling).draw(targets, 3, 1),
        sampler(graph, sampling=sampling, seed=1).draw(targets, 3, 1),
    ]
    for other in others:
        assert not np.array_equal(reference.edges, other.edges)


def test_the_config_chooses_between_node_wise_and_layer_wise_draws():
    graph, targets = star(9), np.arange(2)
    assert len(sampler(graph, sampling="node").draw(targets, 0, 0).edges) == 2
    assert len(sampler(graph, sampling="layer").draw(targets, 0, 0).nodes) == 2 + 4


def test_induced_blocks_use_edges_that_were_not_drawn():
    graph, targets = ring(20), np.arange(5)
    client = sampler(graph, blocks="induced", fanout=1)
    draw = client.draw(targets, 0, 0)
    block = client.block(targets, draw.nodes, draw)
    source, target = graph.edge_index()
    between = np.isin(source, draw.nodes) & np.isin(target, targets)
    assert block.matrix.nnz == between.sum() + len(targets) > len(draw.edges) + len(targets)


def test_the_full_sampler_uses_all_nodes_and_all_edges_whatever_was_asked_before():
    graph = ring(20)
    client, fresh = sampler(graph, sampler="full"), Adjacency(graph, "symmetric", SINGLE)
    for targets in (np.arange(20), np.array([1, 2]), np.array([3, 4]), np.arange(20), np.array([1, 2])):
        draw = client.draw(targets, 0, 0)
        np.testing.assert_array_equal(draw.nodes, np.arange(20))
        block = client.block(targets, draw.nodes, draw)
        expected = fresh.block(targets, draw.nodes, draw)
        np.testing.assert_array_equal(block.matrix.toarray(), expected.matrix.toarray())
        np.testing.assert_array_equal(block.positions, targets)
        assert block.matrix.nnz == 5 * len(targets)
        np.testing.assert_array_equal(client.exact_block(targets).matrix.toarray(), expected.matrix.toarray())


def chain(blocks, hidden: np.ndarray) -> np.ndarray:
    for block in blocks:
        hidden = block.matrix @ hidden
    return hidden


@pytest.mark.parametrize("aggregation_layers", [(3,), (1, 3), (0, 1, 2, 3)])
@pytest.mark.parametrize("kind", ["full", "shared", "neighbor"])
def test_rows_that_a_client_neither_shares_nor_reads_are_left_out_and_nothing_else_changes(kind, aggregation_layers):
    graph, train = ring(40), TrainConfig(sampler=kind, fanout=2, batch_size=0)
    config = RunConfig(model=ModelConfig(aggregation_layers=aggregation_layers), train=train)
    client = find_sampler(config.train)(config, graph, 0, config.train.seed)
    for batch in (np.array([3, 7]), np.array([3, 7]), np.array([20])):
        nodes, draws = [batch], []
        for layer in reversed(range(4)):
            draws.insert(0, client.draw(nodes[0], 0, layer))
            nodes.insert(0, draws[0].nodes)
        blocks, kept = client.blocks(nodes, draws)
        whole = [client.block(nodes[layer + 1], nodes[layer], draws[layer]) for layer in range(4)]
        features = np.random.default_rng(0).random((40, 3))
        np.testing.assert_allclose(chain(blocks, features[kept[0]]), chain(whole, features[nodes[0]]), rtol=1e-6)
        for layer, block in enumerate(blocks):
            assert block.matrix.shape == (len(kept[layer + 1]), len(kept[layer]))
            np.testing.assert_array_equal(kept[layer][block.positions], kept[layer + 1])
            if layer - 1 in aggregation_layers:
                np.testing.assert_array_equal(kept[layer], nodes[layer])  # shared: the others need it
            else:
                assert len(np.unique(block.matrix.indices)) == len(kept[layer])


def test_a_crowded_block_is_multiplied_as_a_dense_matrix_with_the_same_result():
    crowded, sparse = (sampler(ring(size), sampler="full") for size in (8, 200))
    for client, dense in ((crowded, True), (sparse, False)):
        everything = np.arange(client.graph.num_nodes)
        block = client.block(everything, everything, client.draw(everything, 0, 0))
        assert (block.dense is not None) == dense
    np.testing.assert_array_equal(crowded.exact_block(np.arange(8)).add_dense_copy().dense, block_of(crowded).toarray())


def test_a_dense_block_is_held_once():
    client = sampler(ring(8), sampler="full", batch_size=0)
    everything = np.arange(8)
    whole = client.block(everything, everything, client.draw(everything, 0, 0))
    assert whole.add_dense_copy() is whole
    assert whole.at(everything) is whole
    assert whole.compact(client.adjacency.labels)[0] is whole
    draws = [client.draw(everything, 0, layer) for layer in range(4)]
    blocks, _ = client.blocks([everything] * 5, draws)
    assert all(block is whole for block in blocks)
    ((_, exact, _),) = client.exact_blocks(everything)
    assert exact is whole


def block_of(client: Sampler):
    return client.exact_block(np.arange(client.graph.num_nodes)).matrix


def test_a_batch_is_a_sorted_part_of_the_training_nodes_the_same_for_everyone():
    config, nodes = RunConfig(train=TrainConfig(batch_size=5)), np.arange(3, 60, 3)
    batches = [draw_batch(config, nodes, index) for index in range(4)]
    for index, batch in enumerate(batches):
        assert len(batch) == 5
        assert (np.diff(batch) > 0).all()
        assert np.isin(batch, nodes).all()
        np.testing.assert_array_equal(batch, draw_batch(config, nodes, index))
    assert len({tuple(batch.tolist()) for batch in batches}) == 4


@pytest.mark.parametrize("size", [0, 19, 100])
def test_a_batch_of_zero_or_too_many_is_all_training_nodes(size):
    nodes = np.arange(3, 60, 3)
    np.testing.assert_array_equal(draw_batch(RunConfig(train=TrainConfig(batch_size=size)), nodes, 1), nodes)


def test_over_the_rounds_every_training_node_is_in_the_batch_equally_often():
    config, nodes = RunConfig(train=TrainConfig(batch_size=2)), np.arange(5)
    counts = Counter(tuple(draw_batch(config, nodes, index).tolist()) for index in range(2000))
    assert_uniform(counts, 10)


# Cost: a draw costs time in proportion to its own size, not to the size of the graph.


def peak_bytes(kind: str, graph: Graph, targets: np.ndarray) -> int:
    adjacency = Adjacency(graph, "symmetric", SINGLE)  # and the scratch array, which is allocated once
    tracemalloc.start()
    try:
        draw = DRAWS[kind](graph, targets, 3, 0, adjacency.labels)
        adjacency.block(targets, draw.nodes, draw)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("kind", DRAWS)
def test_drawing_from_a_hundred_times_larger_graph_needs_no_more_memory(kind):
    targets = np.arange(0, 10_000, 20)
    peak_bytes(kind, ring(10_000), targets)  # the memory that the first call allocates once
    small, large = (peak_bytes(kind, ring(size), targets) for size in (10_000, 1_000_000))
    assert large < 2 * small
