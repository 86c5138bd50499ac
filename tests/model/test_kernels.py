"""Every compiled kernel equals its numpy oracle bit for bit, and restores its scratch array."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import given, settings
from hypothesis import strategies as st

from glasu.data.graph import Graph
from glasu.model import kernels
from glasu.model.blocks import draw_all, make_labels
from glasu.model.kernels import loops
from glasu.randomness import draw_distinct, split_key
from support import kernel_oracles as oracles
from support.draws import list_target_positions

NODES = 30
graphs = st.lists(st.tuples(st.integers(0, NODES - 1), st.integers(0, NODES - 1)), max_size=300).map(
    lambda pairs: Graph.from_edges(*np.array(pairs, np.int64).reshape(-1, 2).T, NODES)
)
node_sets = st.sets(st.integers(0, NODES - 1)).map(lambda chosen: np.array(sorted(chosen), np.int64))
keys = st.integers(0, 2**128 - 1).map(split_key)
quick = settings(deadline=None, max_examples=80)


def assert_equals_oracle(name: str, *args: Any, labels: bool = True) -> Any:
    """Call the kernel and its oracle with the same arguments; return the result."""
    found = []
    for path in (loops, oracles):
        scratch = [make_labels(NODES)] if labels else []
        found.append(getattr(path, name)(*args, *scratch))
        for own in scratch:
            assert (own == -1).all()
    first, second = (list(value) if isinstance(value, tuple) else [value] for value in found)
    if labels and name != "list_edges_between":  # new nodes come in any order
        first[0], second[0] = np.sort(first[0]), np.sort(second[0])
    for one, other in zip(first, second, strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)
    return first


NAMES = [name for name, value in vars(loops).items() if hasattr(value, "py_func") and not name.startswith("_")]


def test_every_kernel_has_an_oracle():
    assert len(NAMES) > 10
    for name in NAMES:
        assert getattr(kernels, name) is getattr(loops, name)
        assert callable(getattr(oracles, name))


@quick
@given(graphs, node_sets)
def test_all_edges_into_a_set_are_listed_row_by_row(graph, targets):
    draw = draw_all(graph, targets)
    starts, edges = oracles.list_edges_into(graph.indptr, targets)
    np.testing.assert_array_equal(draw.starts, starts)
    np.testing.assert_array_equal(draw.edges, edges)
    np.testing.assert_array_equal(graph.edge_index()[1][draw.edges], targets[list_target_positions(draw)])


@quick
@given(graphs, node_sets, st.integers(1, 8), keys)
def test_neighbours_are_drawn_alike(graph, targets, fanout, key):
    assert_equals_oracle("draw_neighbors", graph.indptr, graph.indices, targets, fanout, *key)


@quick
@given(graphs, node_sets, node_sets)
def test_edges_and_neighbours_are_listed_alike(graph, targets, others):
    assert_equals_oracle("list_neighbors_outside", graph.indptr, graph.indices, targets)
    assert_equals_oracle("list_edges_between", graph.indptr, graph.indices, targets, np.setdiff1d(others, targets))
    assert_equals_oracle("list_edges_between", graph.indptr, graph.indices, targets, np.union1d(others, targets))


@pytest.mark.parametrize("everything", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("kind", [0, 1, 2])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_blocks_are_filled_alike(dtype, kind, scaled, weighted, everything):
    rng = np.random.default_rng(0)
    graph = Graph.from_edges(*rng.integers(0, NODES, (2, 200)), NODES, rng.random(200))
    targets = np.array([1, 4, 5, 20])
    drawn, starts, edges, scale = oracles.draw_neighbors(
        graph.indptr, graph.indices, targets, 3, *split_key(1), make_labels(NODES)
    )
    nodes = np.arange(NODES) if everything else np.unique([*drawn, 2, 29])
    size = len(edges) + (len(targets) if kind != 1 else 0)
    weights, inverse = graph.weights if weighted else np.empty(0, np.float32), rng.random(NODES)
    scale = scale if scaled else np.empty(0)
    results = []
    for path in (loops, oracles):
        out = np.empty(5, np.int32), np.empty(size, np.int32), np.empty(size, dtype), np.empty(4, np.int64)
        labels = make_labels(NODES)
        path.fill_block(graph.indices, weights, targets, nodes, starts, edges, scale, inverse, kind, labels, *out)
        assert (labels == -1).all()
        results.append(out)
    for one, other in zip(*results, strict=True):
        np.testing.assert_array_equal(one, other)


@quick
@given(st.lists(st.integers(0, NODES - 1)))
def test_distinct_numbers_are_found_alike(numbers):
    (found,) = assert_equals_oracle("find_distinct", np.array(numbers, np.int32))
    assert found.tolist() == sorted(set(numbers))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("shape", [(1, 1), (7, 12), (40, 9), (0, 4), (5, 0)])
def test_products_and_rows_are_computed_alike(shape, dtype):
    rng = np.random.default_rng(2)
    matrix = sp.random_array(shape, density=0.3, rng=rng, format="csr", dtype=dtype)
    parts = matrix.indptr, matrix.indices, matrix.data
    rows = np.sort(rng.permutation(shape[0])[: shape[0] // 2])
    assert_equals_oracle("gather_rows", *parts, rows, labels=False)
    for name, read, written in (("add_product", 1, 0), ("add_transposed", 0, 1)):
        dense, start = (rng.standard_normal((shape[side], 5)).astype(dtype) for side in (read, written))
        totals = start.copy(), start.copy()
        for path, total in zip((loops, oracles), totals, strict=True):
            getattr(path, name)(*parts, dense, total)
        np.testing.assert_array_equal(*totals)
        expected = start + (matrix if name == "add_product" else matrix.T) @ dense
        np.testing.assert_allclose(totals[0], expected, rtol=1e-5 if dtype is np.float32 else 1e-12, atol=1e-6)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("count", [0, 1, 7, 8, 9, 1000])
def test_masks_are_drawn_alike(count, dtype):
    masks = np.empty(count, dtype), np.empty(count, dtype)
    for path, mask in zip((loops, oracles), masks, strict=True):
        path.fill_mask(*split_key(3**60), 77, dtype(256 / 179), mask)
    np.testing.assert_array_equal(*masks)
    assert set(np.unique(masks[0]).tolist()) <= {0.0, float(dtype(256 / 179))}


FIRST_RUN = """
import json, logging, sys
lines = []
class Lines(logging.Handler):
    def emit(self, record):
        lines.append([record.name, record.levelname, record.getMessage()])
logging.getLogger("glasu").addHandler(Lines())
logging.getLogger("glasu").setLevel("INFO")
import glasu
assert "numba" not in sys.modules
parties = glasu.load_parties(glasu.RunConfig(data=glasu.DataConfig(name="synthetic", num_nodes=60)))
assert "numba" not in sys.modules
train = glasu.TrainConfig(num_rounds=2, sampler="full", evaluate_every=2)
model = glasu.ModelConfig(backbone="gcn", num_layers=1, aggregation_layers=(0,), hidden=4)
for _ in range(2):
    glasu.train(parties, glasu.RunConfig(model=model, train=train))
from glasu import compiling
from glasu.model.kernels import loops
used = [name for name, loop in vars(loops).items() if getattr(loop, "signatures", ())]
print(json.dumps([compiling.compile_seconds(), used, lines]))
"""


def first_run(cache: Path) -> tuple[float, list[str], list[list[str]]]:
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(cache)}
    done = subprocess.run([sys.executable, "-c", FIRST_RUN], capture_output=True, check=True, env=environment)
    seconds, used, lines = json.loads(done.stdout)
    return seconds, used, lines


@pytest.mark.slow  # compiles with an empty cache
def test_the_first_run_compiles_only_the_kernels_it_uses_and_logs_one_line(tmp_path):
    seconds, used, lines = first_run(tmp_path)
    assert seconds > 0
    assert "fill_block" in used
    assert "adam_step" in used
    assert not [name for name in used if name.startswith(("gcnii", "draw", "sgd"))]
    assert [line[:2] for line in lines] == [["glasu.compiling", "WARNING"]]
    assert "compiling" in lines[0][2]
    assert "cached" in lines[0][2]
    seconds, again, lines = first_run(tmp_path)
    assert (seconds, lines) == (0, [])
    assert set(again) <= set(used)  # without the loops that only other loops call


@pytest.mark.parametrize("index", [np.int32, np.int64])
def test_stored_arrays_may_be_read_only(index):
    matrix = sp.random_array((NODES, NODES), density=0.3, rng=np.random.default_rng(0), dtype=np.float32).tocsr()
    graph = Graph.from_edges(*np.array(matrix.nonzero()), NODES)
    stored = [graph.indptr.astype(np.int64), graph.indices.astype(index)]
    parts = [matrix.indptr.astype(index), matrix.indices.astype(index), matrix.data]
    for array in (*stored, *parts):
        array.flags.writeable = False
    targets, key = np.arange(0, NODES, 4), split_key(5)
    assert_equals_oracle("draw_neighbors", *stored, targets, 2, *key)
    assert_equals_oracle("list_neighbors_outside", *stored, targets)
    assert_equals_oracle("list_edges_between", *stored, targets, np.arange(NODES))
    assert_equals_oracle("gather_rows", *parts, targets, labels=False)
    total = np.zeros((NODES, 2), np.float32)
    loops.add_product(*parts, np.eye(NODES, 2, dtype=np.float32), total)
    np.testing.assert_array_equal(total, matrix.toarray()[:, :2])


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("descent", [(0, 1), (1, -0.1), (0.9, -0.1)])
def test_encoders_are_computed_alike(descent, dtype):
    rng = np.random.default_rng(7)
    matrix = sp.csr_array(sp.random_array((NODES, NODES), density=0.2, rng=rng, dtype=dtype))
    parts = (matrix.indptr, matrix.indices, matrix.data)
    matrix.data[::3] = 0  # what dropout leaves
    weight, gradient = rng.standard_normal((2, NODES, 5)).astype(dtype)
    more, places = rng.standard_normal((7, 5)).astype(dtype), rng.permutation(NODES)[:7]
    kept, taken = dtype(descent[0]), dtype(descent[1])
    bias = rng.standard_normal(5).astype(dtype)
    found = []
    for path in (loops, oracles):
        result, at_bias, at_weight = np.empty((NODES, 5), dtype), np.ones(5, dtype), np.ones((NODES, 5), dtype)
        path.relu_linear(parts, weight, bias, result)
        path.relu_linear_gradients(parts, result, more, places, gradient.copy(), kept, taken, at_weight, at_bias)
        found.append((result, at_weight, at_bias))
    for one, other in zip(*found, strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("dropped", [False, True])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_layers_are_computed_alike(dtype, dropped):
    rng = np.random.default_rng(7)
    matrix = sp.csr_array(sp.random_array((12, NODES), density=0.2, rng=rng, dtype=dtype))
    parts, rows = (matrix.indptr, matrix.indices, matrix.data), rng.permutation(NODES)[:12]
    hidden, initial = rng.standard_normal((2, NODES, 5)).astype(dtype)
    weight, gradient = rng.standard_normal((5, 5)).astype(dtype), rng.standard_normal((12, 5)).astype(dtype)
    share, kept, turned = dtype(0.1), dtype(0.7), dtype(0.2)
    more, places = rng.standard_normal((4, 5)).astype(dtype), rng.permutation(12)[:4]
    found = []
    for path in (loops, oracles):
        drops = *split_key(9), np.uint8(100), dtype(1.6), np.empty((NODES, 5) if dropped else (0, 0), np.uint8)
        support, gated = np.empty((2, 12, 5), dtype)
        at_initial, at_hidden = np.empty((12, 5), dtype), np.empty((NODES, 5), dtype)
        path.gcnii_support(parts, hidden, drops, initial, rows, share, support)
        result = support @ weight
        path.gcnii_result(support, kept, turned, result)
        path.relu_gradient(gradient, result, turned, gated)
        at_support = gated @ weight.T
        about = share, kept, result, gradient, at_support, more, places
        path.gcnii_gradients(parts, drops, *about, at_initial, at_hidden)
        found.append((support, result, gated, at_support, at_initial, at_hidden, drops[4]))
    for one, other in zip(*found, strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)
        assert np.count_nonzero(one) > 0 or not one.size


@pytest.mark.parametrize("dropped", [False, True])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_input_of_a_classifier_and_its_gradient_have_the_same_mask(dtype, dropped):
    rng = np.random.default_rng(7)
    hidden, back = rng.standard_normal((2, 12, 9)).astype(dtype)
    gradient, found = rng.standard_normal((12, 4)).astype(dtype), []
    for path in (loops, oracles):
        drops = *split_key(9), np.uint8(100), dtype(1.6), np.empty((12, 9) if dropped else (0, 0), np.uint8)
        read, at_bias, at_hidden = np.empty((12, 9), dtype), np.ones(4, dtype), back.copy()
        path.apply_mask(hidden, drops, read)
        path.finish_classifier_gradients(gradient, drops, at_bias, at_hidden)
        found.append((read, at_bias, at_hidden))
    for one, other in zip(*found, strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)
    read, at_bias, at_hidden = found[0]
    close = {"rtol": 1e-5, "atol": 1e-6} if dtype is np.float32 else {"rtol": 1e-12, "atol": 1e-13}
    np.testing.assert_allclose(at_bias, gradient.sum(axis=0), **close)
    factors = np.divide(read, hidden)
    assert set(np.unique(factors.astype(float).round(4))) == ({0.0, 1.6} if dropped else {1.0})
    np.testing.assert_allclose(at_hidden, back * factors, **close)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_optimizers_step_alike(momentum, dtype):
    rng = np.random.default_rng(0)
    start, gradients = rng.standard_normal((2, 50)).astype(dtype)
    found = []
    for path in (loops, oracles):
        plain, adapted = start.copy(), start.copy()
        velocity = np.ones(50, dtype) if momentum else np.empty(0, dtype)
        mean, square = np.full((2, 50), 0.5, dtype)
        path.sgd_step(plain, gradients, velocity, dtype(0.1), dtype(momentum), dtype(0.01))
        settings = map(dtype, (0.1, 0.6, 0.9, 0.999, 1e-8, 0.01))
        path.adam_step(adapted, gradients, mean, square, *settings)
        found.append((plain, velocity, adapted, mean, square))
    for one, other in zip(*found, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("path", [loops, oracles])
def test_drawn_numbers_are_those_of_draw_distinct_where_they_are_distinct(path):
    told = set()
    for key in range(40):
        numbers = np.empty(12, np.int64)
        distinct = path.draw_numbers(*split_key(key << 64 | key), 100, numbers)
        assert distinct == (len(set(numbers.tolist())) == 12)
        assert (np.diff(numbers) >= 0).all()
        if distinct:
            np.testing.assert_array_equal(numbers, draw_distinct(key << 64 | key, 100, 12))
        told.add(bool(distinct))
    assert told == {True, False}


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_losses_are_computed_alike_to_rounding(dtype):
    rng = np.random.default_rng(0)
    logits, labels = (5 * rng.standard_normal((50, 4))).astype(dtype), rng.integers(0, 4, 50)
    gradients = np.empty((2, 50, 4), dtype)
    losses = [path.cross_entropy(logits, labels, out) for path, out in zip((loops, oracles), gradients, strict=True)]
    close = {"rtol": 1e-6 if dtype is np.float32 else 1e-14, "atol": 1e-7 if dtype is np.float32 else 1e-16}
    np.testing.assert_allclose(*losses, **close)
    np.testing.assert_allclose(*gradients, **close)


def test_a_fanout_above_every_degree_takes_all_and_needs_no_memory():
    graph = Graph.from_edges(*np.random.default_rng(0).integers(0, NODES, (2, 60)), NODES)
    targets = np.arange(NODES)
    _, _, edges, _ = assert_equals_oracle("draw_neighbors", graph.indptr, graph.indices, targets, 2**40, *split_key(1))
    assert len(edges) == graph.num_edges
