"""Collect the edges of a large graph, in whatever order they come, and sort them in bounded memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from glasu.data.party import Graph, distinct

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

    from glasu.data.workspace import Workspace

BUCKET_EDGES = 1 << 23  # edges that are sorted at a time


def collected(
    ends: Iterable[tuple[NDArray[np.integer], NDArray[np.integer]]],
    num_nodes: int,
    num_edges: int,
    workspace: Workspace,
) -> Graph:
    """Return the graph of all edges: no self loops, none twice; the same as `Graph.from_edges` makes of them.

    The edges are first divided by their targets into buckets, which the workspace holds, and then sorted bucket by
    bucket. This takes O(N) memory besides the pieces, and 8 bytes per edge in the workspace while it lasts.

    Args:
        ends: pieces of the list of edges: sources and targets, within 0..N-1.
        num_nodes: N.
        num_edges: about how many edges there will be.
        workspace: where the arrays `indptr` and `indices` are made.
    """
    num_buckets = max(1, min(num_nodes, -(-num_edges // BUCKET_EDGES)))
    bounds = np.arange(num_buckets + 1) * num_nodes // num_buckets  # the first target of each bucket
    buckets = [workspace.growing(f"bucket{number}", np.int64) for number in range(num_buckets)]
    for source, target in ends:
        kept = source != target
        keys = target[kept].astype(np.int64)
        keys *= num_nodes
        keys += source[kept]
        keys.sort()
        for bucket, piece in zip(buckets, np.split(keys, np.searchsorted(keys, bounds[1:-1] * num_nodes)), strict=True):
            bucket.append(piece)
    indptr, indices = workspace.growing("indptr", np.int64), workspace.growing("indices", np.int32)
    indptr.append(np.zeros(1, np.int64))
    before = 0
    for number, bucket in enumerate(buckets):
        keys = distinct(np.array(bucket.finish()))
        workspace.drop(f"bucket{number}")
        first, last = bounds[number], bounds[number + 1]
        indptr.append(before + np.searchsorted(keys, np.arange(first + 1, last + 1) * num_nodes))
        indices.append((keys % num_nodes).astype(np.int32))
        before += len(keys)
    return Graph(indptr.finish(), indices.finish())
