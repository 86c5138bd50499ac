"""One graph becomes M parties, each with a block of feature columns and a sample of the edges; and the way back."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import scipy.sparse as sp

from glasu.data.cache.workspace import Memory
from glasu.data.edges import divide_edges
from glasu.data.party import Features, Graph, Known, PartyData, Splits, compact
from glasu.errors import AlignmentError, ConfigError, DataError
from glasu.randomness import Stream

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray
    from torch_geometric.data import Data


@dataclass(frozen=True, eq=False)
class WholeGraph:
    """One undivided graph; the fields mean what they mean in `PartyData`."""

    ids: NDArray[np.int64] | NDArray[np.str_]
    features: Features  # X, shape (N, d)
    graph: Graph
    labels: NDArray[np.int64] | None = None
    classes: tuple[str, ...] = ()
    splits: Splits | None = None
    known: Known | None = None

    @classmethod
    def from_pyg(cls, data: Data) -> Self:
        """Convert a PyG graph; an `edge_attr` of several columns is not used."""
        if not hasattr(data, "edge_index"):
            raise DataError(f"a {type(data).__name__} is no graph; pass a torch_geometric.data.Data.")
        for key in ("x", "edge_index"):
            if data.get(key) is None:
                raise DataError(
                    f"the PyG graph has no {key}; a party needs features and edges, even if there are none."
                )
        features = _features_of(data.x)
        source, target = _array(data.edge_index)
        graph = Graph.from_edges(source, target, features.shape[0], _edge_weights_of(data))
        labels, classes = _labels_of(data.get("y"))
        return cls(np.arange(features.shape[0]), features, graph, labels, classes, _splits_of(data))

    def as_party(self, name: str = "all") -> PartyData:
        """Return one party that holds everything."""
        return PartyData(
            name, self.ids, self.features, self.graph, self.labels, self.classes, self.splits, known=self.known
        )


def split_vertically(data: Data, num_clients: int = 3, edge_fraction: float = 0.8, seed: int = 0) -> list[PartyData]:
    """Divide a PyG graph among clients named a, b, c, ...: `partition` of `WholeGraph.from_pyg`."""
    return partition(WholeGraph.from_pyg(data), num_clients, edge_fraction, seed)


def partition(whole: WholeGraph, num_clients: int, edge_fraction: float, seed: int) -> list[PartyData]:
    """Give each client ceil(d / M) feature columns and each edge with probability `edge_fraction`, independently.

    In a symmetric graph an edge is kept or dropped in both directions together.
    """
    bounds = feature_bounds(whole.features.shape[1], num_clients)
    names = [party_name(client) for client in range(num_clients)]
    graphs = divide_edges(whole.graph, names, edge_fraction, seed, Memory())
    return [
        replace(whole, features=whole.features[:, start:stop], graph=graph).as_party(name)
        for name, graph, (start, stop) in zip(names, graphs, pairwise(bounds), strict=True)
    ]


def feature_bounds(columns: int, num_clients: int) -> list[int]:
    """Return where the clients' column blocks begin and end: ceil(d / M) each as in the paper, else nearly equal."""
    if num_clients < 1:
        raise ConfigError(f"num_clients={num_clients}: at least one client must hold the data.")
    if columns < num_clients:
        raise DataError(f"{columns} feature columns cannot be divided among {num_clients} clients; use fewer clients.")
    width = -(-columns // num_clients)
    if width * (num_clients - 1) < columns:
        return [min(client * width, columns) for client in range(num_clients + 1)]
    return [client * columns // num_clients for client in range(num_clients + 1)]


def party_name(client: int) -> str:
    """Return a, b, ..., z, aa, ab, ... for client 0, 1, ..."""
    prefix, letter = divmod(client, 26)
    return (party_name(prefix - 1) if prefix else "") + chr(ord("a") + letter)


def pool_parties(parties: Sequence[PartyData]) -> PartyData:
    """Bring all parties' data to one place: the party "all" has every column and the union of the edges.

    Labels and splits come from the first party that has labels.
    """
    digests = {party.ids_digest() for party in parties}
    if len(digests) != 1:
        raise AlignmentError("the parties list different nodes, or in different orders; align them before pooling.")
    owner = next((party for party in parties if party.labels is not None), parties[0])
    blocks = [party.features for party in parties]
    features = sp.hstack(blocks, "csr") if any(sp.issparse(block) for block in blocks) else np.hstack(blocks)
    named = all(party.feature_names for party in parties)
    names = tuple(f"{party.name}.{column}" for party in parties for column in party.feature_names) if named else ()
    graph = union_of_edges([party.graph for party in parties])
    return replace(owner, name="all", features=features, graph=graph, feature_names=names)


def share_edges(parties: Sequence[PartyData]) -> list[PartyData]:
    """Give every party the union of all edges; features stay where they are."""
    union = union_of_edges([party.graph for party in parties])
    return [replace(party, graph=union) for party in parties]


def union_of_edges(graphs: Sequence[Graph]) -> Graph:
    """Return all edges that some graph has; of several weights the largest counts, and no weight counts as 1.

    The largest, not the sum: parties that hold the same edge of one graph give that graph's weight back.
    """
    nodes = graphs[0].num_nodes
    if all(graph is graphs[0] for graph in graphs):
        return graphs[0]
    if all(graph.weights is None for graph in graphs):
        union = sp.csr_array((nodes, nodes), dtype=bool)
        for graph in graphs:  # O(E): both operands are sorted
            union = union + sp.csr_array((np.ones(graph.num_edges, bool), graph.indices, graph.indptr), union.shape)
        return Graph(union.indptr.astype(np.int64), union.indices.astype(np.int32, copy=False))
    source, target = np.concatenate([graph.edge_index() for graph in graphs], axis=1)
    keys, where = np.unique(target * nodes + source, return_inverse=True)
    weights = np.full(len(keys), -np.inf, np.float32)
    ones = [np.ones(graph.num_edges, np.float32) for graph in graphs]
    held = [one if graph.weights is None else graph.weights for one, graph in zip(ones, graphs, strict=True)]
    np.maximum.at(weights, where, np.concatenate(held))
    return Graph.from_edges(keys % nodes, keys // nodes, nodes, weights)


def splits_per_class(
    labels: NDArray[np.int64], per_class: int, num_validation: int, num_test: int, seed: int
) -> Splits:
    """Draw `per_class` training nodes of each class, then validation and test nodes from the rest of the labelled."""
    rng = Stream(seed, "split").numpy()
    train = np.concatenate(
        [rng.permutation(np.flatnonzero(labels == label))[:per_class] for label in range(int(labels.max()) + 1)]
    )
    rest = rng.permutation(np.setdiff1d(np.flatnonzero(labels >= 0), train))
    validation, test = rest[:num_validation], rest[num_validation : num_validation + num_test]
    return Splits(np.sort(train), np.sort(validation), np.sort(test))


def splits_by_fraction(labels: NDArray[np.int64], fractions: tuple[float, float, float], seed: int) -> Splits:
    """Draw shares of the labelled nodes for train, validation and test, class by class.

    Every class with a labelled node has at least one training node. Multi-label nodes are drawn all together.
    """
    if labels.ndim == 2:
        groups = [np.flatnonzero((labels >= 0).all(axis=1))]
    else:
        groups = [np.flatnonzero(labels == label) for label in np.unique(labels[labels >= 0])]
    rng = Stream(seed, "split").numpy()
    parts: list[list[NDArray[np.int64]]] = [[], [], []]
    for group in groups:
        bounds = np.rint(np.cumsum(fractions) * len(group)).astype(int)
        bounds = np.maximum(bounds, min(1, len(group)))
        for part, nodes in zip(parts, np.split(rng.permutation(group), bounds), strict=False):
            part.append(nodes)
    train, validation, test = (np.sort(np.concatenate([*part, np.empty(0, np.int64)])) for part in parts)
    return Splits(train, validation, test)


def _array(value: Any) -> NDArray[Any]:
    """Return a tensor, wherever it lives, or anything like an array as numpy."""
    return value.detach().cpu().numpy() if hasattr(value, "detach") else np.asarray(value)


def _features_of(x: Any) -> Features:
    if not sp.issparse(x) and str(getattr(x, "layout", "")) not in ("", "torch.strided"):
        x = x.to_sparse_coo().coalesce()
        x = sp.coo_array((_array(x.values()), _array(x.indices())), shape=tuple(x.shape))
    if len(x.shape) != 2:
        raise DataError(f"x of shape {tuple(x.shape)}: features need one row per node and one column per feature.")
    return compact(x if sp.issparse(x) else _array(x))


def _edge_weights_of(data: Data) -> NDArray[np.floating] | None:
    for key in ("edge_weight", "edge_attr"):
        weights = data.get(key)
        if weights is not None and (weights.ndim == 1 or (weights.ndim == 2 and weights.shape[1] == 1)):
            if len(weights) != data.edge_index.shape[1]:
                raise DataError(f"{len(weights)} values in {key} for {data.edge_index.shape[1]} edges.")
            return _array(weights).reshape(-1)
    return None


def _labels_of(y: Any) -> tuple[NDArray[np.int64] | None, tuple[str, ...]]:
    """Return labels and class names 0, 1, ...; of two dimensions and several columns: multi-label."""
    if y is None:
        return None, ()
    values = _array(y)
    if values.ndim == 2 and values.shape[1] == 1:
        values = values[:, 0]
    labels = np.where(np.isfinite(values), values, -1).astype(np.int64)
    if not np.array_equal(labels, values):
        raise DataError("y holds values that are no class numbers; use integers 0, 1, ..., and -1 where unknown.")
    count = labels.shape[1] if labels.ndim == 2 else int(labels.max(initial=-1)) + 1
    return labels, tuple(str(label) for label in range(count))


def _splits_of(data: Data) -> Splits | None:
    parts = []
    for key in ("train_mask", "val_mask", "test_mask"):
        mask = data.get(key)
        if mask is not None and mask.ndim != 1:
            raise DataError(f"{key} of shape {tuple(mask.shape)} holds several splits; choose one, as {key}[:, 0].")
        parts.append(np.empty(0, np.int64) if mask is None else np.flatnonzero(_array(mask)))
    return Splits(*parts) if any(data.get(key) is not None for key in ("train_mask", "val_mask", "test_mask")) else None
