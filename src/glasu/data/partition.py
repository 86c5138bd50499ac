"""Divide the feature columns and edges of one graph among M clients, draw splits, and pool parties.

A partition is a row of PARTITIONS. No other module contains code for a particular partition. Importing this module
does not load scipy, because a server without scipy reads the table.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from numpy.typing import NDArray

from glasu import registry
from glasu.data.cache.arrays import Workspace, divide_rows
from glasu.data.edge_division import assign_edges, divide_edges, draw_shares
from glasu.data.graph import Graph, unite_graphs
from glasu.data.party import CheckedArrays, Labels, PartyData, Splits, are_numbers, have_labels
from glasu.data.preprocessing import Features, compact_features, measure_mean_length, place_features
from glasu.errors import AlignmentError, ConfigError, DataError
from glasu.randomness import Stream, draw_distinct

if TYPE_CHECKING:
    from glasu.config import DataConfig

FeatureColumns: TypeAlias = slice | NDArray[np.int64]  # feature columns of a client
CONSTANT = "constant"  # the column of a client without features
MAX_COMPARED = 5_000  # limit of columns for "correlation"; comparing all pairs of 5,000 columns takes 800 MB


@dataclass(frozen=True)
class Partition:
    """One way to divide a graph among clients.

    The function `columns` chooses the feature columns of each client, and `graphs` chooses the edges. Both read the
    settings of [data] and a seed. A client without columns gets one constant column.
    """

    columns: Callable[[Features, DataConfig, int], Sequence[FeatureColumns]]
    graphs: Callable[[Graph, DataConfig, int, Workspace], Sequence[Graph]]
    keys: tuple[str, ...] = ()  # the keys of [data] that decide the result, in addition to num_clients
    keeps_parties: bool = False  # whether it accepts a data set that already consists of parties, and keeps them
    draws: Callable[[DataConfig], bool] = lambda data: True  # whether the result depends on the seed


def partition(whole: PartyData, data: DataConfig, seed: int, workspace: Workspace | None = None) -> list[PartyData]:
    """Divide a graph among clients with the partition that `data.partition` names. The clients are named a, b, c, ...

    Args:
        whole: the undivided graph.
        data: the settings num_clients and partition, and the keys that the partition reads.
        seed: the seed of all draws.
        workspace: stores the arrays of the clients; None: in memory. The features of one client must fit into memory.
    """
    workspace = workspace or Workspace()
    chosen: Partition = registry.load("partition", data.partition)
    columns = chosen.columns(whole.features, data, seed)
    graphs = chosen.graphs(whole.graph, data, seed, workspace)
    parties = []
    for client, (graph, own) in enumerate(zip(graphs, columns, strict=True)):
        block, names = _take_columns(whole, own)
        features = place_features(block, f"{client}.", workspace)
        party = replace(
            whole,
            name=name_client(client),
            features=features,
            feature_names=names,
            graph=graph,
            checked=CheckedArrays(whole.ids, whole.ids_digest(), features, measure_mean_length(block), graph),
        )
        parties.append(party)
    return parties


def _take_columns(whole: PartyData, own: FeatureColumns) -> tuple[Features, tuple[str, ...]]:
    """Return the columns of a client and their names. If the client has no columns, return one constant column."""
    numbers = np.arange(whole.num_features)[own]
    if not len(numbers):
        return np.ones((whole.num_nodes, 1), np.float32), (CONSTANT,) if whole.feature_names else ()
    names = tuple(whole.feature_names[number] for number in numbers) if whole.feature_names else ()
    return compact_features(whole.features[:, own]), names


def find_column_bounds(columns: int, num_clients: int) -> list[int]:
    """Return the bounds of the clients' column blocks.

    A block has ceil(d / M) columns, as in the paper. If this leaves no column for the last client, the blocks are
    nearly equal instead.
    """
    if columns < num_clients:
        raise DataError(f"{columns} feature columns cannot be divided among {num_clients} clients; use fewer clients.")
    width = -(-columns // num_clients)
    if width * (num_clients - 1) < columns:
        return [min(client * width, columns) for client in range(num_clients + 1)]
    return [client * columns // num_clients for client in range(num_clients + 1)]


def _cut_columns(features: Features, data: DataConfig, seed: int) -> list[FeatureColumns]:
    """Give each client a block of columns."""
    return [slice(start, stop) for start, stop in pairwise(find_column_bounds(features.shape[1], data.num_clients))]


def _cut_columns_for_all_but_one(features: Features, data: DataConfig, seed: int) -> list[FeatureColumns]:
    """Give each client except the last a block of columns."""
    if data.num_clients < 2:
        raise ConfigError(
            f'data.num_clients={data.num_clients}: data.partition="{data.partition}" puts features and edges at '
            "different clients, so it needs at least 2."
        )
    bounds = pairwise(find_column_bounds(features.shape[1], data.num_clients - 1))
    return [*(slice(start, stop) for start, stop in bounds), slice(0)]


def _give_edges_to_last_client(graph: Graph, data: DataConfig, seed: int, workspace: Workspace) -> list[Graph]:
    """Give all edges to the last client, and none to the others."""
    empty = Graph(np.zeros(graph.num_nodes + 1, np.int64), np.empty(0, np.int32))
    return [*[empty] * (data.num_clients - 1), graph]


def _draw_columns(features: Features, data: DataConfig, seed: int) -> list[FeatureColumns]:
    """Give each column to a random client. Each client gets at least one column.

    The clients' shares of the columns are drawn from a Dirichlet distribution. This is the split by importance of
    VertiBench (Wu et al. 2024). Its alpha is `data.concentration`.
    """
    count, clients = features.shape[1], data.num_clients
    find_column_bounds(count, clients)  # refuses too few columns
    shares = draw_shares(clients, data.concentration, Stream(seed, "column shares"))
    draws = Stream(seed, "column owners").numpy()
    owner = np.asarray(np.searchsorted(np.cumsum(shares)[:-1], draws.random(count), side="right"))
    owner[draws.permutation(count)[:clients]] = np.arange(clients)
    return [np.flatnonzero(owner == client) for client in range(clients)]


def _cluster_columns(features: Features, data: DataConfig, seed: int) -> list[FeatureColumns]:
    """Give each client a block of correlated columns, then redistribute a share of all columns over the clients.

    The share is `data.correlation`. With 0, correlated columns stay at one client. With 1, all columns are
    redistributed, and correlated columns are at different clients. The number of columns per client does not change.
    """
    bounds = find_column_bounds(features.shape[1], data.num_clients)
    order = _order_by_correlation(features)
    owner = np.repeat(np.arange(data.num_clients), np.diff(bounds))  # the client at each position of the order
    key = Stream(seed, "dealt columns").key()
    dealt = draw_distinct(key, len(order), round(data.correlation * len(order)))
    owners = owner[dealt]
    counts = np.bincount(owners, minlength=data.num_clients)
    rank = np.concatenate([np.arange(count) for count in counts])  # `owners` is sorted
    owner[dealt] = owners[np.argsort((rank + 0.5) / counts[owners], kind="stable")]
    return [np.sort(order[owner == client]) for client in range(data.num_clients)]


def _order_by_correlation(features: Features) -> NDArray[np.int64]:
    """Order columns by average linkage of 1 - |correlation|, so that correlated columns are near each other."""
    from scipy.cluster.hierarchy import leaves_list, linkage

    count = features.shape[1]
    if count > MAX_COMPARED:
        raise DataError(
            f'data.partition="correlation": {count} feature columns, but this partition compares all pairs of columns '
            f'and accepts at most {MAX_COMPARED}. Use data.partition = "importance".'
        )
    if count < 2:
        return np.arange(count)
    distance = 1 - np.abs(correlate_columns(features))
    return np.asarray(leaves_list(linkage(distance[np.triu_indices(count, 1)], "average")), np.int64)


def correlate_columns(features: Features) -> NDArray[np.float64]:
    """Return the Pearson correlation of all pairs of columns, rounded to six digits; 0 for a constant column.

    Rounding makes the results equal on machines whose libraries add numbers in different orders.
    """
    nodes, count = features.shape
    products, sums = np.zeros((count, count)), np.zeros(count)
    if isinstance(features, np.ndarray):
        for rows in divide_rows(features):
            piece = features[rows].astype(np.float64)
            products += piece.T @ piece
            sums += piece.sum(axis=0)
    else:
        exact = features.astype(np.float64)
        products += (exact.T @ exact).toarray()
        sums += exact.sum(axis=0)
    mean = sums / nodes
    covariance = products / nodes - np.outer(mean, mean)
    deviation = np.sqrt(np.maximum(covariance.diagonal(), 0))
    deviation[deviation <= 1e-6 * np.sqrt(products.diagonal() / nodes)] = np.inf  # constant up to rounding
    return np.asarray((covariance / np.outer(deviation, deviation)).round(6))


def _refuse_one_graph(features: Features, data: DataConfig, seed: int) -> list[FeatureColumns]:
    raise ConfigError(
        f'data.partition="{data.partition}": needs a data set of several relations, such as dblp_authors, but the data '
        'is one graph with one relation. For one graph use "features" or "apart".'
    )


PARTITIONS: dict[str, Partition] = {
    "features": Partition(  # the partition of the paper
        _cut_columns, divide_edges, ("edge_fraction",), True, lambda data: data.edge_fraction < 1
    ),
    "apart": Partition(_cut_columns_for_all_but_one, _give_edges_to_last_client, draws=lambda data: False),
    "relations": Partition(_refuse_one_graph, divide_edges, keeps_parties=True),
    "importance": Partition(_draw_columns, divide_edges, ("edge_fraction", "concentration")),
    "correlation": Partition(_cluster_columns, divide_edges, ("edge_fraction", "correlation")),
    "edges": Partition(_cut_columns, assign_edges, ("concentration",)),
}


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
        raise AlignmentError("the parties list different nodes or different orders; align them before pooling.")
    import scipy.sparse as sp

    owner = next((party for party in parties if party.labels is not None), parties[0])
    blocks = [party.features for party in parties]
    features = sp.hstack(blocks, "csr") if any(sp.issparse(block) for block in blocks) else np.hstack(blocks)
    named = all(party.feature_names for party in parties)
    names = tuple(f"{party.name}.{column}" for party in parties for column in party.feature_names) if named else ()
    graph = unite_graphs([party.graph for party in parties])
    return replace(owner, name="all", features=features, graph=graph, feature_names=names)


def share_edges(parties: Sequence[PartyData]) -> list[PartyData]:
    """Give every party the union of all edges. Features do not change. A party that has all edges is returned as is."""
    union = unite_graphs([party.graph for party in parties])
    same = (party.graph.indices is union.indices and party.graph.weights is union.weights for party in parties)
    return [party if has_all else replace(party, graph=union) for party, has_all in zip(parties, same, strict=True)]


def draw_splits_per_class(labels: Labels, per_class: int, num_validation: int, num_test: int, seed: int) -> Splits:
    """Draw `per_class` training nodes of each class, then validation and test nodes from the other labelled nodes."""
    rng = Stream(seed, "split").numpy()
    train = np.concatenate(
        [rng.permutation(np.flatnonzero(labels == label))[:per_class] for label in range(int(labels.max()) + 1)]
    )
    rest = rng.permutation(np.setdiff1d(np.flatnonzero(labels >= 0), train))
    validation, test = rest[:num_validation], rest[num_validation : num_validation + num_test]
    return Splits(np.sort(train), np.sort(validation), np.sort(test))


def draw_splits_by_fraction(labels: Labels, fractions: tuple[float, float, float], seed: int) -> Splits:
    """Draw fractions of the labelled nodes for training, validation and test, class by class.

    Every class with a labelled node gets at least one training node. In multi-label and regression tasks, all labelled
    nodes are treated as one class.
    """
    if labels.ndim == 2 or are_numbers(labels):
        groups = [np.flatnonzero(have_labels(labels))]
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
