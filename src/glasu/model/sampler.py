"""Sampler: the node sets and blocks of one client, drawn as the config asks."""

from __future__ import annotations

import numpy as np

from glasu.config import RunConfig
from glasu.data.party import Graph
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
)
from glasu.randomness import EVERYONE, Stream, draw_distinct


def training_batch(config: RunConfig, training_nodes: NodeSet, round_index: int) -> NodeSet:
    """Draw S[L], uniformly and independently in every round, the same at everyone who knows the training nodes."""
    size = config.train.batch_size
    assert isinstance(size, int)
    if size == 0 or size >= len(training_nodes):
        return training_nodes
    rng = Stream(config.train.seed, "batch", round=round_index).numpy()
    batch: NodeSet = training_nodes[draw_distinct(rng, len(training_nodes), size)]
    return batch


class Sampler:
    """Draws S_m[l] from the neighbours of S[l+1] and builds the blocks in between."""

    def __init__(self, config: RunConfig, graph: Graph, client: int, normalization: Normalization) -> None:
        self.train, self.graph, self.client = config.train, graph, client
        self.adjacency = Adjacency(graph, normalization, double=config.wire.precision == "fp64")
        self._everything: NodeSet = np.arange(graph.num_nodes)
        self._draws: dict[bool, tuple[NodeSet, Draw]] = {}  # sampler "full" meets the same two sets again and again:
        self._blocks: dict[bool, tuple[Draw, Block]] = {}  # all nodes (True), and the batch of all training nodes

    def draw(self, targets: NodeSet, round_index: int, layer: int, purpose: str = "neighbors") -> Draw:
        """Draw S_m[l] and the edges into S[l+1] = `targets`."""
        kind, fanout = self.train.sampler, self.train.fanout
        if kind == "full":
            return self._draw_whole(targets)
        sharer = EVERYONE if kind == "shared" else self.client
        rng = Stream(self.train.seed, purpose, round=round_index, layer=layer, client=sharer).numpy()
        if kind == "shared":
            return draw_shared(self.graph, targets, fanout, rng)
        return (draw_layer if self.train.sampling == "layer" else draw_neighbors)(self.graph, targets, fanout, rng)

    def block(self, targets: NodeSet, nodes: NodeSet, draw: Draw) -> Block:
        """Build the block between S[l+1] = `targets` and the agreed S[l] = `nodes`."""
        if self.train.sampler == "full":
            return self._block_whole(targets, draw)
        if self.train.blocks == "induced":
            draw = induced(self.graph, targets, nodes)
        return self.adjacency.block(targets, nodes, draw)

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
            kept = self._blocks[everything] = (draw, self.adjacency.block(targets, draw.nodes, draw))
        return kept[1]
