from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from torch import Tensor, nn
from torch_geometric.nn import GATConv, GATv2Conv, GCN2Conv, GCNConv, SAGEConv, TransformerConv
from torch_geometric.utils import add_self_loops

from glasu import registry
from glasu.config import ModelConfig, RunConfig, TrainConfig, WireConfig
from glasu.data.graph import Graph
from glasu.errors import ConfigError
from glasu.model import exact
from glasu.model.backbones import BACKBONES
from glasu.model.blocks import Adjacency, Block, draw_all, draw_neighbors, make_labels
from glasu.model.dropout import make_no_dropout
from glasu.model.layers import (
    ConvolutionLayer,
    GATLayer,
    GCNIILayer,
    GCNLayer,
    Hidden,
    Layer,
    ResidualLayer,
    SAGELayer,
    multiply_sparse,
    take_rows,
)
from glasu.model.sampler import Sampler, find_sampler
from glasu.model.sparse import SparseRows
from glasu.model.split import ClientModel
from glasu.randomness import Stream
from glasu.wire.encoding import DOUBLE, SINGLE
from support.convolutions import register_convolution

NODES = 14
CLOSE = {"rtol": 1e-5, "atol": 1e-5}
Forward = Callable[..., Tensor]


def graph_of(kind: str) -> Graph:
    rng = np.random.default_rng(0)
    source, target = rng.integers(0, NODES, (2, 40))
    if kind == "isolated":  # nodes 10..13 have no edge
        source, target = source % 10, target % 10
    if kind == "no edges":
        source, target = source[:0], target[:0]
    if kind == "hub":  # node 3 has edges from all nodes
        source, target = np.arange(NODES), np.full(NODES, 3)
    if kind == "directed":
        return Graph.from_edges(source, target, NODES)
    both = np.concatenate([source, target]), np.concatenate([target, source])
    weights = rng.uniform(0.5, 2.0, len(both[0])).astype(np.float32) if kind == "weighted" else None
    return Graph.from_edges(*both, NODES, weights)


GRAPHS = ["symmetric", "directed", "isolated", "no edges", "hub"]


OWN = register_convolution(lambda a, b: GATv2Conv(a, b, add_self_loops=False))
OWNERS = {GCNLayer: "gcn", GCNIILayer: "gcnii", SAGELayer: "sage", GATLayer: "gat", ConvolutionLayer: OWN}


def adjacency_of(graph: Graph, layer: Layer) -> Adjacency:
    inner = layer.layer if isinstance(layer, ResidualLayer) else layer
    return Adjacency(graph, registry.load("backbone", OWNERS[type(inner)]).normalization, SINGLE)


def whole_block(graph: Graph, layer: Layer, targets: np.ndarray | None = None) -> Block:
    targets = np.arange(graph.num_nodes) if targets is None else targets
    draw = draw_all(graph, targets)
    return adjacency_of(graph, layer).block(targets, draw.nodes, draw)


@dataclass
class Pair:
    """One of our layers and PyG's layer of the same name, with the same weights."""

    ours: Layer
    theirs: nn.Module
    same: list[tuple[nn.Parameter, nn.Parameter, bool]]  # (ours, theirs, whether theirs is transposed)
    call: Forward  # theirs on (x, initial, edge_index, weights)

    def __post_init__(self) -> None:
        with torch.no_grad():
            for own, their, transposed in self.same:
                own.normal_()
                their.copy_((own.T if transposed else own).reshape(their.shape))
        assert len(self.same) == len(list(self.ours.parameters())) == len(list(self.theirs.parameters()))

    def own_gradients(self) -> list[Tensor]:
        return [own.grad for own, _, _ in self.same]

    def their_gradients(self) -> list[Tensor]:
        return [(their.grad.T if transposed else their.grad).reshape(own.shape) for own, their, transposed in self.same]


def gcn(width_in: int, width_out: int) -> Pair:
    ours, theirs = GCNLayer(width_in, width_out), GCNConv(width_in, width_out)
    same = [(ours.linear.weight, theirs.lin.weight, True), (ours.bias, theirs.bias, False)]
    return Pair(ours, theirs, same, lambda x, initial, edges, weights: theirs(x, edges, weights))


def gcnii(width: int, layer: int) -> Pair:
    ours = GCNIILayer(width, width, layer=layer, alpha=0.2, theta=0.7)
    theirs = GCN2Conv(width, alpha=0.2, theta=0.7, layer=layer + 1, shared_weights=True)
    same = [(ours.linear.weight, theirs.weight1, False)]
    return Pair(ours, theirs, same, lambda x, initial, edges, weights: theirs(x, initial, edges, weights))


def gat(width_in: int, width_out: int, heads: int, *, loops: bool = True) -> Pair:
    ours = GATLayer(width_in, width_out, heads=heads)
    theirs = GATConv(width_in, width_out // heads, heads=heads, concat=True, add_self_loops=loops)
    same = [
        (ours.linear.weight, theirs.lin.weight, True),
        (ours.attention_source, theirs.att_src, False),
        (ours.attention_target, theirs.att_dst, False),
        (ours.bias, theirs.bias, False),
    ]
    return Pair(ours, theirs, same, lambda x, initial, edges, weights: theirs(x, edges))


def gat_with_skip(width_in: int, width_out: int, heads: int) -> Pair:
    plain = gat(width_in, width_out, heads)
    ours = ResidualLayer(plain.ours, width_in, width_out)
    theirs = GATConv(width_in, width_out // heads, heads=heads, concat=True, residual=True)
    inner = [theirs.lin.weight, theirs.att_src, theirs.att_dst, theirs.bias]
    same = [(own, their, turned) for (own, _, turned), their in zip(plain.same, inner, strict=True)]
    same.append((ours.skip.weight, theirs.res.weight, True))
    return Pair(ours, theirs, same, lambda x, initial, edges, weights: theirs(x, edges))


def sage(width_in: int, width_out: int) -> Pair:
    ours, theirs = SAGELayer(width_in, width_out), SAGEConv(width_in, width_out, aggr="mean")
    same = [
        (ours.neighbors.weight, theirs.lin_l.weight, True),
        (ours.neighbors.bias, theirs.lin_l.bias, False),
        (ours.root.weight, theirs.lin_r.weight, True),
    ]
    return Pair(ours, theirs, same, lambda x, initial, edges, weights: theirs(x, edges))


PAIRS: dict[str, Callable[[], Pair]] = {
    "gcn that narrows": lambda: gcn(8, 4),
    "gcn that widens": lambda: gcn(4, 8),
    "gcnii at the first layer": lambda: gcnii(6, 0),
    "gcnii at the fourth layer": lambda: gcnii(6, 3),
    "gat with one head": lambda: gat(5, 6, 1),
    "gat with three heads": lambda: gat(5, 6, 3),
    "gat with a skip connection": lambda: gat_with_skip(5, 6, 2),
    "sage": lambda: sage(5, 6),
}


def width_of(pair: Pair) -> int:
    weight = pair.same[0][0]
    return weight.shape[0]


def assert_same_layer(pair: Pair, graph: Graph, targets: np.ndarray) -> None:
    """Compare the rows `targets` and the gradients of a random function of them."""
    torch.manual_seed(1)
    edges = torch.from_numpy(graph.edge_index())
    weights = None if graph.weights is None else torch.from_numpy(graph.weights)
    width = width_of(pair)
    x, initial = torch.randn(2, NODES, width)
    ours, theirs = [
        tuple(tensor.clone().requires_grad_() for tensor in (x, initial)) for _ in range(2)
    ]  # (H, H^0) as leaves
    own = pair.ours(ours[0], ours[1][torch.from_numpy(targets)], whole_block(graph, pair.ours, targets))
    their = pair.call(*theirs, edges, weights)[torch.from_numpy(targets)]
    torch.testing.assert_close(own, their, **CLOSE)
    probe = torch.randn_like(own)
    (own * probe).sum().backward()
    (their * probe).sum().backward()
    torch.testing.assert_close(ours[0].grad, theirs[0].grad, **CLOSE)
    torch.testing.assert_close(ours[1].grad, theirs[1].grad, **CLOSE)
    torch.testing.assert_close(pair.own_gradients(), pair.their_gradients(), **CLOSE)


@pytest.mark.parametrize("kind", GRAPHS)
@pytest.mark.parametrize("name", PAIRS)
def test_on_the_full_graph_a_layer_and_its_gradients_equal_pygs(name, kind):
    torch.manual_seed(0)
    assert_same_layer(PAIRS[name](), graph_of(kind), np.arange(NODES))


@pytest.mark.parametrize("name", ["gcn that narrows", "gcn that widens", "gcnii at the fourth layer"])
def test_edge_weights_count_as_in_pyg(name):
    torch.manual_seed(0)
    assert_same_layer(PAIRS[name](), graph_of("weighted"), np.arange(NODES))


@pytest.mark.parametrize("kind", ["directed", "isolated", "hub"])
@pytest.mark.parametrize("name", PAIRS)
def test_a_block_with_fewer_rows_than_columns_gives_those_rows_of_pygs_layer(name, kind):
    torch.manual_seed(0)
    assert_same_layer(PAIRS[name](), graph_of(kind), np.array([0, 3, 4, 11]))


@pytest.mark.parametrize("name", [name for name in PAIRS if not name.startswith("gcnii")])
def test_sparse_features_give_what_dense_ones_give_in_pyg(name):
    torch.manual_seed(0)
    pair, graph = PAIRS[name](), graph_of("directed")
    dense = np.random.default_rng(2).normal(size=(NODES, width_of(pair))).astype(np.float32)
    dense[np.random.default_rng(3).random(dense.shape) < 0.8] = 0
    own = pair.ours(SparseRows.of(sp.csr_array(dense)), None, whole_block(graph, pair.ours))
    their = pair.call(torch.from_numpy(dense), None, torch.from_numpy(graph.edge_index()), None)
    torch.testing.assert_close(own, their, **CLOSE)
    probe = torch.randn_like(own)
    (own * probe).sum().backward()
    (their * probe).sum().backward()
    torch.testing.assert_close(pair.own_gradients(), pair.their_gradients(), **CLOSE)


@pytest.mark.parametrize("name", ["gat", "sage"])
def test_on_a_drawn_block_attention_and_mean_equal_pyg_on_the_bipartite_pair(name):
    """With the scale deg / drawn, the block of the mean is exactly the mean over the drawn neighbours."""
    torch.manual_seed(0)
    pair, graph = (gat(5, 6, 2, loops=False) if name == "gat" else sage(5, 6)), graph_of("symmetric")
    targets = np.array([1, 2, 7, 9])
    draw = draw_neighbors(graph, targets, 2, 0, make_labels(NODES))
    block = adjacency_of(graph, pair.ours).block(targets, draw.nodes, draw)
    assert block.matrix.shape == (4, len(draw.nodes))
    assert len(draw.edges) < len(draw_all(graph, targets).edges)
    x = torch.randn(len(draw.nodes), 5)
    positions = torch.from_numpy(np.searchsorted(draw.nodes, targets))
    their = pair.theirs((x, x[positions]), torch.from_numpy(block.edge_index()))
    torch.testing.assert_close(pair.ours(x, None, block), their, **CLOSE)


def test_the_neighbours_of_a_weighted_graph_are_averaged_by_weight():
    graph = Graph.from_edges(np.array([1, 2]), np.array([0, 0]), 3, np.array([3.0, 1.0]))
    layer = SAGELayer(1, 1)
    with torch.no_grad():
        for parameter, value in ((layer.neighbors.weight, 1), (layer.neighbors.bias, 0), (layer.root.weight, 0)):
            parameter.fill_(value)
    mixed = layer(torch.tensor([[0.0], [4.0], [8.0]]), None, whole_block(graph, layer))
    torch.testing.assert_close(mixed, torch.tensor([[5.0], [0.0], [0.0]]))


def test_attention_survives_scores_that_would_overflow_exp():
    torch.manual_seed(0)
    pair, graph = gat(5, 6, 2), graph_of("symmetric")
    x = 1e3 * torch.randn(NODES, 5)
    own = pair.ours(x, None, whole_block(graph, pair.ours))
    assert own.isfinite().all()
    torch.testing.assert_close(own, pair.theirs(x, torch.from_numpy(graph.edge_index())), rtol=1e-5, atol=1e-2)


@pytest.mark.parametrize("make", [GATv2Conv, TransformerConv])
@pytest.mark.parametrize("form", ["dense", "sparse"])
def test_a_users_convolution_is_called_on_the_graph_with_self_loops(make, form):
    torch.manual_seed(0)
    extra = {"add_self_loops": False} if make is GATv2Conv else {}
    layer, graph = ConvolutionLayer(make(5, 3, heads=2, **extra), 6), graph_of("isolated")
    x = torch.randn(NODES, 5)
    edges, _ = add_self_loops(torch.from_numpy(graph.edge_index()), num_nodes=NODES)
    expected = layer.convolution(x, edges)
    hidden = x if form == "dense" else SparseRows.of(sp.csr_array(x.numpy()))
    torch.testing.assert_close(layer(hidden, None, whole_block(graph, layer)), expected, **CLOSE)
    some = np.array([2, 5, 12])
    torch.testing.assert_close(layer(hidden, None, whole_block(graph, layer, some)), expected[some], **CLOSE)


def test_after_concat_gcnii_first_reduces_to_the_hidden_width():
    torch.manual_seed(0)
    wide = GCNIILayer(18, 6, layer=1, alpha=0.2, theta=0.7)
    narrow = GCNIILayer(6, 6, layer=1, alpha=0.2, theta=0.7)
    narrow.linear = wide.linear
    x, initial, block = torch.randn(NODES, 18), torch.randn(NODES, 6), whole_block(graph_of("symmetric"), wide)
    reduced = x @ wide.reduce.weight + wide.reduce.bias
    torch.testing.assert_close(wide(x, initial, block), narrow(reduced, initial, block))
    assert narrow.reduce is None


def random_rows(shape: tuple[int, int], dtype: type = np.float64) -> tuple[sp.csr_array, SparseRows]:
    """Return a sparse matrix as scipy's and as ours."""
    matrix = sp.random_array(shape, density=0.4, rng=np.random.default_rng(0), format="csr", dtype=dtype)
    return matrix, SparseRows.of(matrix)


@pytest.mark.parametrize(("dtype", "close"), [(np.float32, 1e-5), (np.float64, 1e-12)])
@pytest.mark.parametrize("shape", [(4, 6), (60, 40), (3, 3), (5, 0), (0, 5)])
def test_a_sparse_product_and_its_gradients_equal_those_of_torch_and_scipy(shape, dtype, close):
    torch.manual_seed(0)
    theirs, ours = random_rows(shape, dtype)
    kind = torch.from_numpy(np.zeros(0, dtype)).dtype
    dense, plus, probe = (torch.randn(rows, 7, dtype=kind) for rows in (shape[1], shape[0], shape[0]))
    leaves = [[value.clone().requires_grad_() for value in (dense, plus)] for _ in range(2)]
    index = torch.from_numpy(np.stack(theirs.nonzero()))
    sparse = torch.sparse_coo_tensor(index, torch.from_numpy(theirs.data), shape, check_invariants=True)
    got = multiply_sparse(ours, leaves[0][0], leaves[0][1], 0.3)
    expected = torch.sparse.mm(sparse, leaves[1][0]) + 0.3 * leaves[1][1]
    (got * probe).sum().backward()
    (expected * probe).sum().backward()
    torch.testing.assert_close(got, expected, rtol=close, atol=close)
    for own, their in zip(*leaves, strict=True):
        torch.testing.assert_close(own.grad, their.grad, rtol=close, atol=close)
    np.testing.assert_allclose(ours @ dense.numpy(), theirs @ dense.numpy(), rtol=close, atol=close)
    np.testing.assert_array_equal(ours.toarray(), theirs.toarray())


@pytest.mark.parametrize("shape", [(4, 6), (6, 4), (3, 3)])
def test_the_sparse_product_has_the_gradient_that_finite_differences_find(shape):
    _, matrix = random_rows(shape)
    dense, plus = (torch.randn(rows, 3, dtype=torch.float64, requires_grad=True) for rows in (shape[1], shape[0]))
    assert torch.autograd.gradcheck(lambda *values: multiply_sparse(matrix, *values, 0.7), (dense, plus))
    torch.testing.assert_close(multiply_sparse(matrix, dense), torch.from_numpy(matrix.toarray()) @ dense)


def test_the_gradient_of_a_sparse_product_may_arrive_transposed():
    _, matrix = random_rows((4, 6))
    dense = torch.randn(6, 3, dtype=torch.float64, requires_grad=True)
    probe = torch.randn(3, 4, dtype=torch.float64)
    (multiply_sparse(matrix, dense).T * probe).sum().backward()
    torch.testing.assert_close(dense.grad, torch.from_numpy(matrix.toarray()).T @ probe.T)


@pytest.mark.parametrize(("rows", "columns"), [(4, 40), (39, 40)])
@pytest.mark.parametrize(("width_in", "width_out"), [(30, 3), (3, 30)])
def test_the_order_of_a_gcn_layers_products_changes_nothing_but_rounding(rows, columns, width_in, width_out):
    torch.manual_seed(0)
    rng, layer = np.random.default_rng(0), GCNLayer(width_in, width_out).double()
    source, target = rng.integers(0, columns, 200), rng.integers(0, rows, 200)
    graph, targets = Graph.from_edges(source, target, columns), np.arange(rows)
    block = Adjacency(graph, "symmetric", DOUBLE).block(targets, np.arange(columns), draw_all(graph, targets))
    hidden = torch.randn(columns, width_in, dtype=torch.float64)
    expected = torch.from_numpy(block.matrix.toarray()) @ hidden @ layer.linear.weight + layer.bias
    torch.testing.assert_close(layer(hidden, None, block), expected)
    torch.testing.assert_close(layer.propagate(layer.prepare(hidden), hidden, None, block), expected)


def exact_setting(backbone: str, graph: Graph, **keys: Any) -> tuple[ClientModel, Sampler]:
    config = ModelConfig(backbone=backbone, num_layers=1, hidden=6, aggregation_layers=(0,), heads=2, **keys)
    model = ClientModel(
        config,
        num_clients=2,
        num_features=5,
        num_outputs=3,
        stream=lambda purpose, layer: Stream(0, purpose, layer=layer),
    )
    train = TrainConfig(sampler="neighbor", batch_size=0)  # the graph may be too large for one product
    run = RunConfig(model=config, train=train, wire=WireConfig())
    return model, find_sampler(run.train)(run, graph, 0, run.train.seed)


def compute_hidden(
    model: ClientModel, sampler: Sampler, features: Hidden | exact.FeatureRows, targets: np.ndarray
) -> Tensor:
    """Return H[L] at the targets, and check that every report is about more rows than the one before."""
    features = features if isinstance(features, exact.FeatureRows) else in_memory(features)
    return finish_inference(exact.ExactInference(model, sampler, features, targets))


def finish_inference(step: exact.ExactInference) -> Tensor:
    hidden: Any = step.encode()
    shares = [0.0]

    def compute(layer: int) -> Iterator[None]:
        nonlocal hidden
        hidden = yield from step.layer_in_parts(layer, hidden, shares.append)

    for layer in range(step.model.config.num_layers):
        for _ in compute(layer):
            pass
    assert shares == sorted(set(shares))
    assert shares[-1] <= 1
    return hidden


def in_memory(features: Hidden) -> exact.FeatureRows:
    return exact.FeatureRows(features.shape, lambda nodes: take_rows(features, nodes), None)


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("form", ["dense", "sparse"])
@pytest.mark.parametrize("backbone", [*BACKBONES, OWN])
def test_a_layer_computed_in_chunks_equals_the_whole(backbone, form, residual):
    torch.manual_seed(0)
    graph = graph_of("symmetric")
    model, sampler = exact_setting(backbone, graph, residual=residual)
    dense = torch.randn(NODES, 5) * (torch.rand(NODES, 5) < 0.4)
    features = dense if form == "dense" else SparseRows.of(sp.csr_array(dense.numpy()))
    hidden, initial = model.encode(features, make_no_dropout())
    targets = np.array([0, 1, 2, 4, 5, 7, 8, 9, 12])
    at_rows = None if initial is None else initial[torch.from_numpy(targets)]
    whole = model.sublayer(0, hidden, at_rows, sampler.exact_block(targets), make_no_dropout())
    sampler.chunk_rows = 2
    sampler.chunk_edges = 7
    torch.testing.assert_close(compute_hidden(model, sampler, features, targets), whole, **CLOSE)


@pytest.mark.parametrize("backbone", [*(name for name in BACKBONES if name != "gcnii"), OWN])
def test_features_that_stay_where_they_lie_are_read_twice_at_most_however_many_products_need_them(backbone):
    torch.manual_seed(0)
    model, sampler = exact_setting(backbone, graph_of("symmetric"))
    features, asked = torch.randn(NODES, 5), []

    def read(nodes: np.ndarray) -> Tensor:
        asked.extend(nodes)
        return features[torch.from_numpy(nodes)]

    sampler.chunk_rows = 2
    targets = np.arange(NODES)
    lying = compute_hidden(model, sampler, exact.FeatureRows((NODES, 5), read, chunk_values=15), targets)
    torch.testing.assert_close(lying, compute_hidden(model, sampler, features, targets), **CLOSE)
    assert np.bincount(asked, minlength=NODES).max() <= 2  # to prepare them, and to mix them


@pytest.mark.parametrize(("rows", "edges"), [(3, 1000), (1000, 9), (4, 12), (1, 1), (1000, 1000)])
@pytest.mark.parametrize("kind", ["symmetric", "hub", "no edges"])
def test_chunks_take_every_row_once_and_exceed_the_bound_on_edges_only_for_a_single_row(kind, rows, edges, monkeypatch):
    graph = graph_of(kind)
    model, sampler = exact_setting("gcn", graph)
    asked: list[np.ndarray] = []
    build = sampler.exact_block
    monkeypatch.setattr(sampler, "exact_block", lambda targets: asked.append(targets) or build(targets))
    sampler.chunk_rows = rows
    sampler.chunk_edges = edges
    targets = np.arange(1, NODES)
    compute_hidden(model, sampler, torch.randn(NODES, 5), targets)
    np.testing.assert_array_equal(np.concatenate(asked), targets)
    degrees = np.diff(graph.indptr)
    for part in asked:
        assert len(part) <= rows
        assert len(part) == 1 or degrees[part].sum() <= edges


class Spy(nn.Module):
    """A convolution that counts the rows and edges of its input."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.inner, self.seen = SAGEConv(width, out), []

    def forward(self, x: tuple[Tensor, Tensor], edges: Tensor) -> Tensor:
        self.seen.append((len(x[0]), len(x[1]), edges.shape[1]))
        assert edges.numel() == 0 or edges[0].max() < len(x[0])
        return self.inner(x, edges)


def long_path(nodes: int) -> Graph:
    return Graph.from_edges(np.arange(nodes - 1), np.arange(1, nodes), nodes)


def test_a_users_convolution_is_shown_the_neighbourhood_of_a_chunk_and_no_more():
    graph, spy = long_path(1000), Spy(5, 6)
    model, sampler = exact_setting(OWN, graph)
    model.layers[0].convolution = spy
    sampler.chunk_rows = 10
    compute_hidden(model, sampler, torch.randn(1000, 5), np.arange(100, 130))
    assert spy.seen == [(11, 10, 20)] * 3  # ten rows and their predecessor; one edge and one self loop per row


def test_attention_looks_at_the_neighbourhood_of_a_chunk_and_no_more(monkeypatch):
    model, sampler = exact_setting("gat", long_path(1000))
    seen = []
    propagate = model.layers[0].propagate

    def see(prepared: Tensor, hidden: Tensor | None, initial: Tensor | None, block: Block) -> Tensor:
        assert hidden is None  # prepared once, not read again
        seen.append((len(prepared), block.matrix.shape))
        return propagate(prepared, hidden, initial, block)

    monkeypatch.setattr(model.layers[0], "propagate", see)
    sampler.chunk_rows = 10
    compute_hidden(model, sampler, torch.randn(1000, 5), np.arange(100, 130))
    assert seen == [(11, (10, 11))] * 3


@pytest.mark.parametrize(
    ("convolution", "said"),
    [
        (SAGEConv(5, 7), r"returned shape \(14, 7\) for 14 nodes; it must return one row of width 6"),
        (GATv2Conv(5, 6, heads=2, add_self_loops=False), r"returned shape \(14, 12\)"),
        (SAGEConv(5, 1), r"returned shape \(14, 1\)"),  # would broadcast
    ],
)
def test_a_convolution_of_the_wrong_width_is_refused(convolution, said):
    layer, graph = ConvolutionLayer(convolution, 6), graph_of("symmetric")
    with pytest.raises(ConfigError, match=said):
        layer(torch.randn(NODES, 5), None, whole_block(graph, layer))


def test_a_convolution_that_answers_for_the_sources_is_refused():
    class Sources(nn.Module):
        def forward(self, x: tuple[Tensor, Tensor], edges: Tensor) -> Tensor:
            return x[0]

    layer, graph = ConvolutionLayer(Sources(), 5), graph_of("symmetric")
    with pytest.raises(ConfigError, match=r"returned shape \(14, 5\) for 3 nodes"):
        layer(torch.randn(NODES, 5), None, whole_block(graph, layer, np.array([1, 4, 6])))


def test_an_exact_layer_over_no_rows_is_empty():
    model, sampler = exact_setting("sage", graph_of("symmetric"))
    result = compute_hidden(model, sampler, torch.randn(NODES, 5), np.empty(0, np.int64))
    assert result.shape == (0, 6)


@pytest.mark.parametrize("form", ["in memory", "stored"])
@pytest.mark.parametrize("backbone", ["gcn", "gcnii", "sage", "gat"])
def test_exact_inference_is_a_step_over_all_nodes(backbone, form):
    torch.manual_seed(0)
    graph, nodes = graph_of("symmetric"), np.array([7, 2, 9])
    config = ModelConfig(backbone=backbone, num_layers=2, hidden=6, aggregation_layers=(1,), heads=2)
    model = ClientModel(
        config, num_clients=2, num_features=5, num_outputs=3, stream=lambda name, layer: Stream(0, name, layer=layer)
    )
    run = RunConfig(model=config, train=TrainConfig(sampler="neighbor", batch_size=1))
    sampler, features = find_sampler(run.train)(run, graph, 0, run.train.seed), torch.randn(NODES, 5)
    stored = exact.FeatureRows((NODES, 5), lambda rows: features[torch.from_numpy(rows)])
    step = exact.ExactInference(model, sampler, in_memory(features) if form == "in memory" else stored, nodes)
    hidden = finish_inference(step)
    everything = np.arange(NODES)
    expected, initial = model.encode(features, make_no_dropout())
    for layer, targets in enumerate((everything, nodes)):
        rows = None if initial is None else initial[torch.from_numpy(targets)]
        expected = model.sublayer(layer, expected, rows, sampler.exact_block(targets), make_no_dropout())
    torch.testing.assert_close(hidden, expected, **CLOSE)
    torch.testing.assert_close(step.logits(hidden), model.classify(expected, make_no_dropout()), **CLOSE)
    assert not hidden.requires_grad


def test_long_exact_inference_reports_the_share_that_is_done():
    model, sampler = exact_setting("gcn", graph_of("symmetric"))
    sampler.chunk_rows = 4
    step = exact.ExactInference(model, sampler, torch.randn(NODES, 5), np.arange(NODES))
    shares = list(step.layer_in_parts(0, step.encode(), lambda share: share))
    assert shares == [pytest.approx(done / NODES) for done in (4, 8, 12, 14)]
