"""Sampler: the node sets and blocks of one client, drawn as the config asks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from glasu.config import RunConfig
from glasu.data.graph import Graph
from glasu.model import kernels
from glasu.model.blocks import (
    Adjacency,
    Block,
    Draw,
    NodeSet,
    Normalization,
    draw_layer,
    draw_neighbors,
    draw_shared,
    edges_into,
    induced,
    thinned,
)
from glasu.randomness import EVERYONE, SPARSE, Stream, draw_distinct, halves

CHUNK_ROWS = 8192  # rows per exact product
CHUNK_EDGES = 2**20  # edges per exact product
DENSELY_READ = 4  # exact products with a quarter as many edges as there are nodes, or more, read all nodes' rows


def training_batch(config: RunConfig, training_nodes: NodeSet, round_index: int) -> NodeSet:
    """Draw S[L], uniformly and independently in every round, the same at everyone who knows the training nodes."""
    size = config.train.batch_size
    assert isinstance(size, int)
    if size == 0 or size >= len(training_nodes):
        return training_nodes
    key, population = Stream(config.train.seed, "batch", round=round_index).key(), len(training_nodes)
    places: NodeSet = np.empty(size, np.int64)
    if SPARSE * size >= population or not kernels.draw_numbers(*halves(key), population, places):
        places = draw_distinct(key, population, size)
    batch: NodeSet = training_nodes[places]
    return batch


class Sampler:
    """Draws S_m[l] from the neighbours of S[l+1] and builds the blocks in between."""

    def __init__(self, config: RunConfig, graph: Graph, client: int, normalization: Normalization) -> None:
        self.train, self.graph, self.client = config.train, graph, client
        self.aggregation_layers = frozenset(config.model.aggregation_layers)
        self.adjacency = Adjacency(graph, normalization, double=config.wire.precision == "fp64")
        self._everything: NodeSet = np.arange(graph.num_nodes)
        self._draws: dict[bool, tuple[NodeSet, Draw]] = {}  # sampler "full" meets the same two sets again and again:
        self._blocks: dict[bool, tuple[Draw, Block]] = {}  # all nodes (True), and the batch of all training nodes
        full = config.train.sampler == "full"
        self.keeps_matrices = full and normalization != "none"  # the whole graph's, for training and evaluation
        self._repeats = full and config.train.batch_size == 0  # the same sample in every round
        self._may_leave_out = self._repeats or config.train.sampler == "shared"  # "neighbor" reads all that it draws
        self._sample: tuple[Sequence[Draw], tuple[Block, ...], tuple[NodeSet, ...]] | None = None

    def draw(self, targets: NodeSet, round_index: int, layer: int, purpose: str = "neighbors") -> Draw:
        """Draw S_m[l] and the edges into S[l+1] = `targets`."""
        train, labels = self.train, self.adjacency.labels
        if train.sampler == "full":
            return self._draw_whole(targets)
        sharer = EVERYONE if train.sampler == "shared" else self.client
        stream = Stream(train.seed, purpose, round=round_index, layer=layer, client=sharer)
        if train.sampler == "shared":
            draw = draw_shared(self.graph, targets, train.fanout, stream.key(), labels)
        elif train.sampling == "layer":
            draw = draw_layer(self.graph, targets, train.fanout, stream.key(), labels)
        else:
            draw = draw_neighbors(self.graph, targets, train.fanout, stream.key(), labels)
        room = max(0, train.max_nodes - len(targets))
        if train.max_nodes == 0 or purpose != "neighbors" or len(draw.nodes) - len(targets) <= room:
            return draw  # an evaluation asks for so many nodes that a bound would leave them no neighbours
        return thinned(self.graph, targets, draw, room, stream._replace(purpose=f"{purpose}, kept").key(), labels)

    def block(self, targets: NodeSet, nodes: NodeSet, draw: Draw) -> Block:
        """Build the block between S[l+1] = `targets` and the agreed S[l] = `nodes`."""
        if self.train.sampler == "full":
            return self._block_whole(targets, draw)
        if self.train.blocks == "induced":
            draw = induced(self.graph, targets, nodes, self.adjacency.labels)
        return self.adjacency.block(targets, nodes, draw)

    def blocks(self, nodes: Sequence[NodeSet], draws: Sequence[Draw]) -> tuple[tuple[Block, ...], tuple[NodeSet, ...]]:
        """Build the blocks of a sample, leaving out rows of H_m[l] that this client neither shares nor reads.

        Args:
            nodes: S_m[0..L], as agreed.
            draws: the edges drawn for each layer.

        Returns:
            The blocks, and the nodes of the rows of H_m[0..L].
        """
        if self._sample is not None and all(old is new for old, new in zip(self._sample[0], draws, strict=True)):
            return self._sample[1:]  # every round is like the last
        kept = [nodes[-1]]
        blocks: list[Block] = []
        read: NDArray[np.int64] | None = None  # which rows of the layer's output are kept; None: all
        for layer in reversed(range(len(draws))):
            block = self.block(nodes[layer + 1], nodes[layer], draws[layer])
            if read is not None:
                block = block.at(read)
            columns, read = nodes[layer], None
            if self._may_leave_out and layer - 1 not in self.aggregation_layers:
                block, read = block.compact(self.adjacency.labels)
                columns = columns[read]
            blocks.insert(0, block.densified() if self.keeps_matrices else block)
            kept.insert(0, columns)
        if self._repeats:
            self._sample = draws, tuple(blocks), tuple(kept)
        return tuple(blocks), tuple(kept)

    def exact_blocks(self, targets: NodeSet) -> Iterator[tuple[slice, Block, NodeSet]]:
        """Build the blocks from all nodes to `targets`, with every edge, some rows at a time.

        Yields:
            Which of the targets are the block's rows, the block, and the nodes that are its columns.
        """
        if self.keeps_matrices:
            whole = self._block_whole(self._everything, self._draw_whole(self._everything))
            asked, labels = whole.at(targets), self.adjacency.labels
            yield slice(None), *((asked, self._everything) if asked is whole else asked.compact(labels))
            return
        for rows in _product_chunks(self.graph, targets):
            block = self.exact_block(targets[rows])
            if DENSELY_READ * block.matrix.nnz < self.graph.num_nodes:
                yield rows, *block.compact(self.adjacency.labels)
            else:  # it reads so many nodes that finding out which ones would cost more than it saves
                yield rows, block, self._everything

    def exact_block(self, targets: NodeSet) -> Block:
        """Build the block from all nodes to `targets`, with every edge."""
        draw = Draw(self._everything, *edges_into(self.graph, targets))
        return self.adjacency.block(targets, draw.nodes, draw)

    def _draw_whole(self, targets: NodeSet) -> Draw:
        everything = len(targets) == self.graph.num_nodes
        kept = self._draws.get(everything)
        if kept is None or not np.array_equal(kept[0], targets):
            kept = self._draws[everything] = (targets, Draw(self._everything, *edges_into(self.graph, targets)))
        return kept[1]

    def _block_whole(self, targets: NodeSet, draw: Draw) -> Block:
        everything = len(targets) == self.graph.num_nodes
        kept = self._blocks.get(everything)
        if kept is None or kept[0] is not draw:
            block = self.adjacency.block(targets, draw.nodes, draw)
            kept = self._blocks[everything] = (draw, block.densified() if self.keeps_matrices else block)
        return kept[1]


def _product_chunks(graph: Graph, targets: NodeSet) -> Iterator[slice]:
    """Divide rows so that no chunk has too many rows, nor too many edges unless a single row has."""
    ends = np.cumsum(graph.indptr[targets + 1] - graph.indptr[targets])
    start = 0
    while start < len(targets):
        before = ends[start - 1] if start else 0
        stop = int(np.searchsorted(ends, before + CHUNK_EDGES, side="right"))
        stop = min(max(stop, start + 1), start + CHUNK_ROWS, len(targets))
        yield slice(start, stop)
        start = stop
