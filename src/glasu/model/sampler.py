"""Samplers draw the node sets of one client and build the blocks between them.

The server, which has no torch, imports this module to read class variables of samplers.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from glasu import registry
from glasu.config import RunConfig, TrainConfig
from glasu.data.graph import Graph
from glasu.errors import ConfigError
from glasu.model import kernels
from glasu.model.backbones import find_backbone
from glasu.model.blocks import (
    Adjacency,
    Block,
    Draw,
    NodeSet,
    draw_all,
    draw_induced,
    draw_layer,
    draw_neighbors,
    draw_shared,
    find_draw_error,
    thin_draw,
)
from glasu.model.draw_estimates import DrawEstimate, EdgeCounts
from glasu.model.task import Targets
from glasu.randomness import EVERYONE, SPARSE, Stream, draw_distinct, split_key
from glasu.secret import Secret
from glasu.wire.encodings import find_compute_dtype

log = logging.getLogger("glasu.model")
DENSELY_READ = 4  # a block of `exact_blocks` has all columns if it has at least one entry per 4 nodes of the graph


def draw_batch(config: RunConfig, examples: NodeSet, round_index: int) -> NodeSet:
    """Draw the batch of one round uniformly. All clients that know the training examples draw the same batch."""
    size = config.train.batch_size
    assert isinstance(size, int)
    if size == 0 or size >= len(examples):
        return examples
    key, population = Stream(config.train.seed, "batch", round=round_index).key(), len(examples)
    places: NodeSet = np.empty(size, np.int64)
    if SPARSE * size >= population or not kernels.draw_numbers(*split_key(key), population, places):
        places = draw_distinct(key, population, size)
    batch: NodeSet = examples[places]
    return batch


@dataclass(frozen=True, eq=False)
class Sample:
    """The agreed node sets S_m[0..L] of one round, the edges drawn for each layer, and the examples of the batch."""

    round: int
    nodes: tuple[NodeSet, ...]
    draws: tuple[Draw, ...]
    targets: Targets


class Sampler(ABC):
    """Draws S_m[l] from the neighbours of S[l+1] and builds the blocks between them.

    To add a sampler, register a subclass. It overrides `draw` and sets the class variables that the protocol reads. If
    layer l-1 aggregates, the input set S[l] of layer l must be the same at all clients. There are three ways to ensure
    this: the clients agree on the union of their draws (`agrees_on_node_sets`), all clients draw with one seed
    (`shares_draws`), or S[l] contains all nodes (`reads_whole_graph`).
    """

    agrees_on_node_sets: ClassVar[bool] = False  # the clients send proposals, and the server returns their union
    shares_draws: ClassVar[bool] = False  # every client can draw the same S[l] itself
    reads_whole_graph: ClassVar[bool] = False  # every S[l] with l < L contains all nodes, and all edges are used
    default_for: ClassVar[Literal["small graphs", "large graphs"] | None] = None  # where "auto" chooses this sampler
    chunk_rows = 8192  # maximum number of rows per block of `exact_blocks`
    chunk_edges = 2**20  # maximum number of edges per block of `exact_blocks`, if it has several rows

    def __init__(self, config: RunConfig, graph: Graph, client: int, private_seed: int | Secret) -> None:
        """Prepare to draw from the graph of client m.

        Args:
            config: the settings, resolved.
            graph: the client's graph.
            client: m.
            private_seed: the seed of draws that are not shared.
        """
        backbone = find_backbone(config.model)
        self.train, self.graph, self.client = config.train, graph, client
        self.private_seed = private_seed
        self.aggregation_layers = frozenset(config.model.aggregation_layers)
        self.adjacency = Adjacency(graph, backbone.normalization, find_compute_dtype(config))
        self._everything: NodeSet = np.arange(graph.num_nodes)
        if not backbone.uses_edge_weights and graph.weights is not None and (np.asarray(graph.weights) != 1).any():
            log.warning(
                'client %d: model.backbone="%s" ignores edge weights, and this graph has weights other than 1. '
                "To use them, choose %s.",
                client,
                config.model.backbone,
                " or ".join(registry.select("backbone", uses_edge_weights=True)),
            )

    @abstractmethod
    def draw(self, targets: NodeSet, round_index: int, layer: int, purpose: str = "neighbors") -> Draw:
        """Draw S_m[l] and the edges into S[l+1] = `targets`.

        Args:
            targets: S[l+1], sorted.
            round_index: t.
            layer: l.
            purpose: the name of the random stream. Training and evaluation draw from different streams.
        """

    def draw_and_check(self, targets: NodeSet, round_index: int, layer: int, purpose: str = "neighbors") -> Draw:
        """Call `draw`, and refuse an invalid result. Draws of GLASU's own samplers are valid, so they are not checked.

        Raises:
            ConfigError: the sampler of an extension returned an invalid draw.
        """
        draw = self.draw(targets, round_index, layer, purpose)
        if type(self) in SAMPLERS.values():
            return draw
        error = find_draw_error(self.graph, targets, draw)
        if not error and self.reads_whole_graph and len(draw.nodes) < self.graph.num_nodes:
            error = "nodes must contain all nodes of the graph, because reads_whole_graph is true"
        if error:
            method = f"train.sampler={self.train.sampler!r}: {type(self).__qualname__}.draw"
            raise ConfigError(f"{method} returned an invalid draw for layer {layer}: {error}. Correct the extension.")
        return draw

    @classmethod
    def estimate_draw(
        cls, train: TrainConfig, counts: EdgeCounts, num_targets: int, *, constant_batch: bool
    ) -> DrawEstimate:
        """Estimate the size of a draw in training. By default a draw contains all nodes and all edges into the targets.

        A subclass that draws less must override this method.

        Args:
            train: the settings.
            counts: the edges of the client's graph.
            num_targets: |S[l+1]|.
            constant_batch: whether all rounds have the same batch.
        """
        return DrawEstimate.of_edges(num_targets, counts.num_nodes, counts.count_entering(num_targets))

    def block(self, targets: NodeSet, nodes: NodeSet, draw: Draw) -> Block:
        """Build the block between S[l+1] = `targets` and the agreed S[l] = `nodes`."""
        if self.train.blocks == "induced":
            draw = draw_induced(self.graph, targets, nodes, self.adjacency.labels)
        return self.adjacency.block(targets, nodes, draw)

    def blocks(self, nodes: Sequence[NodeSet], draws: Sequence[Draw]) -> tuple[tuple[Block, ...], tuple[NodeSet, ...]]:
        """Build the blocks of a sample.

        Args:
            nodes: S_m[0..L], as agreed.
            draws: the edges drawn for each layer.

        Returns:
            The blocks, and the nodes of the rows of H_m[0..L].
        """
        parts = zip(nodes[1:], nodes[:-1], draws, strict=True)
        return tuple(self.block(targets, sources, draw) for targets, sources, draw in parts), tuple(nodes)

    def exact_blocks(self, targets: NodeSet) -> Iterator[tuple[slice, Block, NodeSet]]:
        """Build the blocks from all nodes to `targets`, with every edge, some rows at a time.

        Yields:
            The positions of the block's rows in `targets`, the block, and the nodes of its columns.
        """
        for rows in self._product_chunks(targets):
            block = self.exact_block(targets[rows])
            if DENSELY_READ * block.matrix.nnz < self.graph.num_nodes:
                yield rows, *block.compact(self.adjacency.labels)
            else:  # finding the columns that are read would take longer than reading all columns
                yield rows, block, self._everything

    def exact_block(self, targets: NodeSet) -> Block:
        """Build the block from all nodes to `targets`, with every edge."""
        draw = draw_all(self.graph, targets)
        return self.adjacency.block(targets, draw.nodes, draw)

    def _product_chunks(self, targets: NodeSet) -> Iterator[slice]:
        """Yield chunks of 1 to `chunk_rows` rows. A chunk of several rows has at most `chunk_edges` edges."""
        ends = np.cumsum(self.graph.indptr[targets + 1] - self.graph.indptr[targets])
        start = 0
        while start < len(targets):
            before = ends[start - 1] if start else 0
            stop = int(np.searchsorted(ends, before + self.chunk_edges, side="right"))
            stop = min(max(stop, start + 1), start + self.chunk_rows, len(targets))
            yield slice(start, stop)
            start = stop


def _build_used_rows(
    sampler: Sampler, nodes: Sequence[NodeSet], draws: Sequence[Draw]
) -> tuple[tuple[Block, ...], tuple[NodeSet, ...]]:
    """Build the blocks of a sample like `Sampler.blocks`, without rows of H_m[l] that nothing uses.

    These rows are neither shared with other clients nor read by this client's next layer.
    """
    kept = [nodes[-1]]
    blocks: list[Block] = []
    read: NDArray[np.int64] | None = None  # the rows of this layer's output that are kept; None: all
    for layer in reversed(range(len(draws))):
        block = sampler.block(nodes[layer + 1], nodes[layer], draws[layer])
        if read is not None:
            block = block.at(read)
        columns, read = nodes[layer], None
        if layer - 1 not in sampler.aggregation_layers:
            block, read = block.compact(sampler.adjacency.labels)
            columns = columns[read]
        blocks.insert(0, block)
        kept.insert(0, columns)
    return tuple(blocks), tuple(kept)


class FullGraph(Sampler):
    """Uses all nodes and edges. Blocks are kept, because only the block of the last layer can change between rounds."""

    reads_whole_graph = True
    default_for = "small graphs"

    def __init__(self, config: RunConfig, graph: Graph, client: int, private_seed: int | Secret) -> None:
        super().__init__(config, graph, client, private_seed)
        self._keeps_matrices = self.adjacency.normalization != "none"  # whether blocks are reused
        # The last draw and block for all nodes as targets (True), and for other targets such as a batch (False).
        self._draws: dict[bool, tuple[NodeSet, Draw]] = {}
        self._blocks: dict[bool, tuple[Draw, Block]] = {}
        self._sample: tuple[Sequence[Draw], tuple[Block, ...], tuple[NodeSet, ...]] | None = None

    def draw(self, targets: NodeSet, round_index: int, layer: int, purpose: str = "neighbors") -> Draw:
        everything = len(targets) == len(self._everything)
        kept = self._draws.get(everything)
        if kept is None or not np.array_equal(kept[0], targets):
            kept = self._draws[everything] = (targets, draw_all(self.graph, targets))
        return kept[1]

    @classmethod
    def estimate_draw(
        cls, train: TrainConfig, counts: EdgeCounts, num_targets: int, *, constant_batch: bool
    ) -> DrawEstimate:
        nodes = counts.num_nodes
        if constant_batch or num_targets == nodes:
            return DrawEstimate(nodes, 0)
        return DrawEstimate(nodes, nodes + num_targets + 1 + counts.count_entering(num_targets))  # without factors

    def block(self, targets: NodeSet, nodes: NodeSet, draw: Draw) -> Block:
        everything = len(targets) == len(self._everything)
        kept = self._blocks.get(everything)
        if kept is None or kept[0] is not draw:
            block = self.adjacency.block(targets, draw.nodes, draw)
            kept = self._blocks[everything] = (draw, block.add_dense_copy() if self._keeps_matrices else block)
        return kept[1]

    def blocks(self, nodes: Sequence[NodeSet], draws: Sequence[Draw]) -> tuple[tuple[Block, ...], tuple[NodeSet, ...]]:
        if self.train.batch_size != 0:
            return super().blocks(nodes, draws)
        if self._sample is None or any(old is not new for old, new in zip(self._sample[0], draws, strict=True)):
            blocks, kept = _build_used_rows(self, nodes, draws)
            if self._keeps_matrices:
                blocks = tuple(block.add_dense_copy() for block in blocks)
            self._sample = draws, blocks, kept
        return self._sample[1:]  # without a batch, a round usually has the same sample as the round before

    def exact_blocks(self, targets: NodeSet) -> Iterator[tuple[slice, Block, NodeSet]]:
        if not self._keeps_matrices:
            yield from super().exact_blocks(targets)
            return
        everything = self._everything
        whole = self.block(everything, everything, self.draw_and_check(everything, 0, 0))
        block, labels = whole.at(targets), self.adjacency.labels
        yield slice(None), *((block, everything) if block is whole else block.compact(labels))


class _Sampled(Sampler):
    """Draws some of the edges with a random key per round and layer."""

    def draw(self, targets: NodeSet, round_index: int, layer: int, purpose: str = "neighbors") -> Draw:
        train = self.train
        seed, sharer = (train.seed, EVERYONE) if self.shares_draws else (self.private_seed, self.client)
        stream = Stream(seed, purpose, round=round_index, layer=layer, client=sharer)
        draw = self._draw_edges(targets, stream.key())
        room = max(0, train.max_nodes - len(targets))
        if train.max_nodes == 0 or purpose != "neighbors" or len(draw.nodes) - len(targets) <= room:
            return draw  # evaluations ignore `max_nodes`: their many targets would leave no room for neighbours
        key = stream._replace(purpose=f"{purpose}, kept").key()
        return thin_draw(self.graph, targets, draw, room, key, self.adjacency.labels)

    @abstractmethod
    def _draw_edges(self, targets: NodeSet, key: int) -> Draw:
        """Draw edges into S[l+1] = `targets`; the draw is a function of the key."""

    @classmethod
    def estimate_draw(
        cls, train: TrainConfig, counts: EdgeCounts, num_targets: int, *, constant_batch: bool
    ) -> DrawEstimate:
        nodes, edges = cls._estimate_edges(train, counts, num_targets)
        if train.max_nodes and nodes > (limit := max(num_targets, train.max_nodes)):
            nodes, edges = limit, edges * limit // nodes
        return DrawEstimate.of_edges(num_targets, nodes, edges)

    @classmethod
    @abstractmethod
    def _estimate_edges(cls, train: TrainConfig, counts: EdgeCounts, num_targets: int) -> tuple[int, int]:
        """Estimate the numbers of nodes and edges of a draw, ignoring `train.max_nodes`."""


class Neighbor(_Sampled):
    """Draws from the neighbours of each target, or from the neighbours of all targets together (`train.sampling`)."""

    agrees_on_node_sets = True
    default_for = "large graphs"

    def _draw_edges(self, targets: NodeSet, key: int) -> Draw:
        draw_edges = draw_layer if self.train.sampling == "layer" else draw_neighbors
        return draw_edges(self.graph, targets, self.train.fanout, key, self.adjacency.labels)

    @classmethod
    def _estimate_edges(cls, train: TrainConfig, counts: EdgeCounts, num_targets: int) -> tuple[int, int]:
        if train.sampling != "layer":
            drawn = counts.count_drawn(num_targets)
            return min(counts.num_nodes, num_targets + drawn), drawn
        reached = min(counts.num_nodes, num_targets + counts.count_entering(num_targets))
        return _estimate_sources(train, counts, num_targets, reached)


class SharedSeed(_Sampled):
    """Draws from all nodes with a seed that all clients share, so no node set is sent."""

    shares_draws = True

    def blocks(self, nodes: Sequence[NodeSet], draws: Sequence[Draw]) -> tuple[tuple[Block, ...], tuple[NodeSet, ...]]:
        return _build_used_rows(self, nodes, draws)

    def _draw_edges(self, targets: NodeSet, key: int) -> Draw:
        return draw_shared(self.graph, targets, self.train.fanout, key, self.adjacency.labels)

    @classmethod
    def _estimate_edges(cls, train: TrainConfig, counts: EdgeCounts, num_targets: int) -> tuple[int, int]:
        return _estimate_sources(train, counts, num_targets, counts.num_nodes)


def _estimate_sources(train: TrainConfig, counts: EdgeCounts, num_targets: int, reached: int) -> tuple[int, int]:
    """Estimate the numbers of nodes and edges of a draw from `reached` nodes. The edges from drawn nodes are kept."""
    nodes = min(reached, num_targets * (1 + train.fanout))
    return nodes, counts.count_kept(num_targets, reached, nodes)


SAMPLERS: dict[str, type[Sampler]] = {"full": FullGraph, "neighbor": Neighbor, "shared": SharedSeed}


def find_sampler(train: TrainConfig) -> type[Sampler]:
    """Return the class of the sampler that the config names."""
    found: type[Sampler] = registry.load("sampler", train.sampler)
    return found
