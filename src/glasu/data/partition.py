"""Divide one graph among M clients: feature columns, edges, and splits; and pool the parties again."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import scipy.sparse as sp

from glasu.data.cache.arrays import Workspace
from glasu.data.graph import EDGE_BYTES, Graph, unite_graphs
from glasu.data.party import CheckedArrays, PartyData, Splits
from glasu.data.preprocessing import compact_features, mean_length, place_features
from glasu.errors import AlignmentError, ConfigError, DataError
from glasu.randomness import Stream

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray


def partition(
    whole: PartyData, num_clients: int, edge_fraction: float, seed: int, workspace: Workspace | None = None
) -> list[PartyData]:
    """Give each client ceil(d / M) feature columns and each edge with probability `edge_fraction`, independently.

    In a symmetric graph both directions of an edge are kept or dropped together. The clients are named a, b, c, ...
    Their arrays are made in the workspace; by default, in memory. The features of one client must fit into memory.
    """
    workspace = workspace or Workspace()
    bounds = pairwise(feature_bounds(whole.num_features, num_clients))
    graphs = divide_edges(whole.graph, num_clients, edge_fraction, seed, workspace)
    parties = []
    for client, (graph, (start, stop)) in enumerate(zip(graphs, bounds, strict=True)):
        block = compact_features(whole.features[:, start:stop])
        features = place_features(block, f"{client}.", workspace)
        party = replace(
            whole,
            name=name_client(client),
            features=features,
            feature_names=whole.feature_names[start:stop],
            graph=graph,
            checked=CheckedArrays(whole.ids, whole.ids_digest(), features, mean_length(block), graph),
        )
        parties.append(party)
    return parties


def feature_bounds(columns: int, num_clients: int) -> list[int]:
    """Return the bounds of the clients' column blocks: ceil(d / M) columns each as in the paper, else nearly equal."""
    if num_clients < 1:
        raise ConfigError(f"num_clients={num_clients}: at least one client must hold the data.")
    if columns < num_clients:
        raise DataError(f"{columns} feature columns cannot be divided among {num_clients} clients; use fewer clients.")
    width = -(-columns // num_clients)
    if width * (num_clients - 1) < columns:
        return [min(client * width, columns) for client in range(num_clients + 1)]
    return [client * columns // num_clients for client in range(num_clients + 1)]


def name_client(client: int) -> str:
    """Return a, b, ..., z, aa, ab, ... for client 0, 1, ..."""
    prefix, letter = divmod(client, 26)
    return (name_client(prefix - 1) if prefix else "") + chr(ord("a") + letter)


def pool_parties(parties: Sequence[PartyData]) -> PartyData:
    """Return the party "all" with every feature column and the union of the edges.

    Labels and splits come from the first party with labels.
    """
    digests = {party.ids_digest() for party in parties}
    if len(digests) != 1:
        raise AlignmentError("the parties list different nodes or orders of nodes; align them before pooling.")
    owner = next((party for party in parties if party.labels is not None), parties[0])
    blocks = [party.features for party in parties]
    features = sp.hstack(blocks, "csr") if any(sp.issparse(block) for block in blocks) else np.hstack(blocks)
    named = all(party.feature_names for party in parties)
    names = tuple(f"{party.name}.{column}" for party in parties for column in party.feature_names) if named else ()
    graph = unite_graphs([party.graph for party in parties])
    return replace(owner, name="all", features=features, graph=graph, feature_names=names)


def share_edges(parties: Sequence[PartyData]) -> list[PartyData]:
    """Give every party the union of all edges; each keeps its own features."""
    union = unite_graphs([party.graph for party in parties])
    return [replace(party, graph=union) for party in parties]


def divide_edges(graph: Graph, num_clients: int, edge_fraction: float, seed: int, workspace: Workspace) -> list[Graph]:
    """Give each client each edge with probability `edge_fraction`.

    In a symmetric graph the draw for the earlier direction of an edge decides for both. Beside the result, this takes
    one byte of memory per edge and pieces of bounded size.

    Args:
        graph: the undivided graph.
        num_clients: M.
        edge_fraction: the expected share of edges that each client gets; with 1, all clients share `graph`.
        seed: of the draws.
        workspace: receives the arrays `<client>.indptr`, `<client>.indices` and, with weights, `<client>.weights`.
    """
    if not 0 <= edge_fraction <= 1:
        raise ConfigError(f"edge_fraction={edge_fraction}: must lie in [0, 1].")
    if edge_fraction == 1:
        return [graph] * num_clients
    parts: list[Graph] = []
    piece_edges = max(1, workspace.piece_bytes // EDGE_BYTES)
    kept = np.empty(graph.num_edges, np.uint8)  # one bit per client
    for first in range(0, num_clients, 8):
        clients = range(first, min(first + 8, num_clients))
        above = _draw(graph, clients, edge_fraction, seed, kept, piece_edges)
        if not _copy_to_reverse(graph, above, kept, piece_edges):
            _draw(graph, clients, edge_fraction, seed, kept, piece_edges)  # directed: a draw for every edge
        parts += (_select(graph, kept, bit, f"{client}.", workspace) for bit, client in enumerate(clients))
    return parts


def _draw(
    graph: Graph, clients: range, edge_fraction: float, seed: int, kept: NDArray[np.uint8], piece_edges: int
) -> NDArray[np.int64]:
    """Draw the clients that keep each edge: bit b of `kept` stands for the b-th client.

    Returns:
        For each node, the position of its first edge from a node with a higher number.
    """
    streams = [Stream(seed, "edges", client=client).numpy() for client in clients]
    above = np.array(graph.indptr[:-1])
    for nodes, indptr in graph.node_pieces(piece_edges):
        edges = slice(indptr[0], indptr[-1])
        drawn = np.zeros(edges.stop - edges.start, np.uint8)
        for bit, stream in enumerate(streams):
            drawn |= (stream.random(len(drawn), np.float32) < edge_fraction).astype(np.uint8) << bit
        kept[edges] = drawn
        row = np.repeat(np.arange(nodes.start, nodes.stop, dtype=np.int32), np.diff(indptr))
        above[nodes] += _count_flags(graph.indices[edges] < row, indptr)
    return above


def _count_flags(flags: NDArray[np.bool_], indptr: NDArray[np.int64]) -> NDArray[np.int64]:
    """Count the true flags among each node's edges; `indptr` may begin above 0."""
    before = np.zeros(len(flags) + 1, np.int64)
    np.cumsum(flags, out=before[1:])
    return np.asarray(np.diff(before[indptr - indptr[0]]))


def _copy_to_reverse(graph: Graph, above: NDArray[np.int64], kept: NDArray[np.uint8], piece_edges: int) -> bool:
    """Copy the draw of each edge from a higher node to its reverse; return False if an edge has no reverse.

    Targets are visited in order, so one pass finds the reverse of every edge of a source.
    """
    following = above.copy()  # per node: its next edge from a higher node
    size = graph.num_nodes
    for nodes, indptr in graph.node_pieces(max(piece_edges, size)):
        sources = graph.indices[indptr[0] : indptr[-1]]
        row = np.repeat(np.arange(nodes.start, nodes.stop, dtype=np.int32), np.diff(indptr))
        lower = np.flatnonzero(sources < row)
        counts = above[nodes] - indptr[:-1]
        starts = np.concatenate([[0], np.cumsum(counts)])
        by_source = sp.csr_array((lower, sources[lower], starts), shape=(len(counts), size)).tocsc()  # O(edges + nodes)
        visits = np.diff(by_source.indptr)
        following_after = following + visits
        if (following_after > graph.indptr[1:]).any():
            return False
        reverse = np.arange(len(lower)) + np.repeat(following - by_source.indptr[:-1], visits)
        if not np.array_equal(graph.indices[reverse], by_source.indices + np.int32(nodes.start)):
            return False
        kept[indptr[0] + by_source.data] = kept[reverse]
        following = following_after
    return np.array_equal(following, graph.indptr[1:])


def _select(graph: Graph, kept: NDArray[np.uint8], bit: int, prefix: str, workspace: Workspace) -> Graph:
    """Return the graph of the edges that one client keeps, in their order."""
    indptr = workspace.writer(f"{prefix}indptr", np.int64)
    indices = workspace.writer(f"{prefix}indices", graph.indices.dtype)
    weights = None if graph.weights is None else workspace.writer(f"{prefix}weights", np.float32)
    indptr.append(np.zeros(1, np.int64))
    before = 0
    for _, own in graph.node_pieces(max(1, workspace.piece_bytes // EDGE_BYTES)):
        edges = slice(own[0], own[-1])
        chosen = (kept[edges] >> bit & 1).astype(bool)
        ends = before + np.cumsum(_count_flags(chosen, own))
        before = int(ends[-1])
        indptr.append(ends)
        indices.append(graph.indices[edges][chosen])
        if weights is not None and graph.weights is not None:
            weights.append(graph.weights[edges][chosen])
    return Graph.without_checks(indptr.finish(), indices.finish(), None if weights is None else weights.finish())


def draw_splits_per_class(
    labels: NDArray[np.int64], per_class: int, num_validation: int, num_test: int, seed: int
) -> Splits:
    """Draw `per_class` training nodes of each class, then validation and test nodes from the other labelled nodes."""
    rng = Stream(seed, "split").numpy()
    train = np.concatenate(
        [rng.permutation(np.flatnonzero(labels == label))[:per_class] for label in range(int(labels.max()) + 1)]
    )
    rest = rng.permutation(np.setdiff1d(np.flatnonzero(labels >= 0), train))
    validation, test = rest[:num_validation], rest[num_validation : num_validation + num_test]
    return Splits(np.sort(train), np.sort(validation), np.sort(test))


def draw_splits_by_fraction(labels: NDArray[np.int64], fractions: tuple[float, float, float], seed: int) -> Splits:
    """Draw fractions of the labelled nodes for training, validation and test, class by class.

    Every class with a labelled node gets at least one training node. Multi-label nodes are drawn as one class.
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
