"""The kernels of glasu.model in plain numpy: oracles that the compiled loops are compared with."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from glasu.randomness import draw_words, find_members, scale_words

Ids = NDArray[np.int64]
Labels = NDArray[np.int32]
Array = NDArray[Any]
Matrix = tuple[Array, Array, Array]  # a sparse matrix by rows: indptr, indices, data
Drops = tuple[np.uint64, np.uint64, np.uint8, Any, Array]  # a mask: its key, threshold and scale, a byte per value


def draw_numbers(low: np.uint64, high: np.uint64, population: int, numbers: Ids) -> bool:
    numbers[:] = np.sort(scale_words(draw_words(low, high, np.arange(len(numbers))), population))
    return bool((numbers[1:] > numbers[:-1]).all())


def draw_neighbors(
    indptr: Array, indices: Array, targets: Ids, fanout: int, low: np.uint64, high: np.uint64, labels: Labels
) -> tuple[Ids, Ids, Ids, NDArray[np.float64]]:
    first = indptr[targets]
    degrees = indptr[targets + 1] - first
    counts = np.minimum(degrees, fanout)
    starts = _starts(counts)
    edges = _runs(first, counts, starts)  # the first ones; right where all are taken
    crowded = np.flatnonzero(degrees > fanout)
    chosen = np.empty((len(crowded), fanout if len(crowded) else 0), np.int64)
    for step in range(fanout if len(crowded) else 0):  # Floyd: below top + 1, or top where that one was drawn before
        top = degrees[crowded] - fanout + step
        pick = scale_words(draw_words(low, high, crowded * fanout + step), top + 1)
        again = (chosen[:, :step] == pick[:, None]).any(axis=1)
        chosen[:, step] = np.where(again, top, pick)
    if len(crowded):
        edges[starts[crowded][:, None] + np.arange(fanout)] = first[crowded][:, None] + np.sort(chosen, axis=1)
    scale = np.repeat(degrees / np.maximum(counts, 1), counts)
    nodes = np.sort(np.concatenate([targets, _fresh(indices[edges], targets)]))
    return nodes, starts, edges, scale


def _fresh(sources: NDArray[np.integer], targets: Ids) -> Ids:
    found = np.unique(sources).astype(np.int64)
    fresh: Ids = found[~find_members(targets, found)]
    return fresh


def _starts(counts: Ids) -> Ids:
    starts = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=starts[1:])
    return starts


def _runs(first: Ids, counts: Ids, starts: Ids) -> Ids:
    return np.arange(starts[-1]) + np.repeat(first - starts[:-1], counts)


def list_edges_into(indptr: Array, targets: Ids) -> tuple[Ids, Ids]:
    first = indptr[targets]
    degrees = indptr[targets + 1] - first
    starts = _starts(degrees)
    return starts, _runs(first, degrees, starts)


def list_neighbors_outside(indptr: Array, indices: Array, targets: Ids, labels: Labels) -> Ids:
    _, edges = list_edges_into(indptr, targets)
    return _fresh(indices[edges], targets)


def list_edges_between(
    indptr: Array, indices: Array, targets: Ids, others: Ids, labels: Labels
) -> tuple[Ids, Ids, NDArray[np.bool_]]:
    starts, edges = list_edges_into(indptr, targets)
    rows = np.repeat(np.arange(len(targets)), np.diff(starts))
    labels[others] = 1
    labels[targets] = 0
    found = labels[indices[edges]]
    labels[others] = -1
    labels[targets] = -1
    used = found >= 0
    return _starts(np.bincount(rows[used], minlength=len(targets))), edges[used], found[used] == 1


def fill_block(
    indices: Array,
    weights: Array,
    targets: Ids,
    nodes: Ids,
    starts: Ids,
    edges: Ids,
    scale: NDArray[np.float64],
    inverse: NDArray[np.float64],
    kind: int,
    labels: Labels,
    indptr: Array,
    columns: Array,
    values: Array,
    positions: Ids,
) -> None:
    sources, counts = indices[edges], np.diff(starts)
    own: Array = targets  # correct if all nodes are present: then a node's position is its number
    others = sources
    if len(nodes) < len(labels):
        labels[nodes] = np.arange(len(nodes))
        own, others = labels[targets], labels[sources]
        labels[nodes] = -1
    shares = np.ones(len(edges))
    if kind != 0:
        shares = scale if len(scale) else shares
        shares = shares * weights[edges] if len(weights) else shares
        shares = shares * np.repeat(inverse[targets], counts)
        shares = shares * inverse[sources] if kind == 2 else shares
    positions[:] = own
    loops = kind != 1  # mean has no self loops
    indptr[:] = starts + np.arange(len(starts)) if loops else starts
    at = np.arange(len(edges))
    if loops:
        columns[indptr[:-1]] = own
        values[indptr[:-1]] = inverse[targets] * inverse[targets] if kind == 2 else 1.0
        at += np.repeat(np.arange(1, len(counts) + 1), counts)
    columns[at], values[at] = others, shares


def find_distinct(numbers: NDArray[np.integer], labels: Labels) -> Ids:
    return np.unique(numbers).astype(np.int64)


def gather_rows(indptr: Array, indices: Array, data: Array, rows: Ids) -> tuple[Array, Array, Array]:
    first, counts = indptr[rows].astype(np.int64), (indptr[rows + 1] - indptr[rows]).astype(np.int64)
    starts = _starts(counts)
    at = _runs(first, counts, starts)
    return starts.astype(indptr.dtype), indices[at], data[at]


def add_product(indptr: Array, indices: Array, data: Array, dense: Array, total: Array) -> None:
    counts = np.diff(indptr)
    rows = np.argsort(-counts, kind="stable")  # the longest first: those with a k-th entry come before the others
    for k in range(int(counts.max(initial=0))):
        rows = rows[: np.searchsorted(-counts[rows], -k)]
        at = indptr[rows] + k
        total[rows] += data[at][:, None] * dense[indices[at]]


def add_transposed(indptr: Array, indices: Array, data: Array, dense: Array, total: Array) -> None:
    order = np.argsort(indices, kind="stable")
    rows = np.repeat(np.arange(len(indptr) - 1), np.diff(indptr))
    add_product(_starts(np.bincount(indices, minlength=len(total))), rows[order], data[order], dense, total)


def fill_mask(low: np.uint64, high: np.uint64, threshold: np.uint8, scale: Any, mask: Array) -> None:
    draws = np.empty(len(mask), np.uint8)
    fill_bytes(low, high, draws)
    np.multiply(draws >= threshold, scale, out=mask)


def fill_bytes(low: np.uint64, high: np.uint64, draws: NDArray[np.uint8]) -> None:
    found = draw_words(low, high, np.arange(-(-len(draws) // 8))).astype("<u8", copy=False)
    draws[:] = found.view(np.uint8)[: len(draws)]


def relu_linear(matrix: Matrix, weight: Array, bias: Array, result: Array) -> None:
    indptr, indices, data = matrix
    result[:] = 0
    add_product(indptr, indices, data, weight, result)
    np.maximum(result + bias, 0, out=result)


def relu_linear_gradients(
    matrix: Matrix,
    result: Array,
    more: Array,
    places: Ids,
    gradient: Array,
    kept: Any,
    taken: Any,
    target: Array,
    bias: Array,
) -> None:
    indptr, indices, data = matrix
    target[:] = kept * target if kept else 0
    bias[:] = 0
    gradient[places] += more
    gated = np.where(result > 0, gradient, 0)
    for row in gated:  # one row after the other: numpy's own sum adds in another order
        bias += row
    add_transposed(indptr, indices, taken * data, gated, target)


def gcnii_support(
    matrix: Matrix, hidden: Array, drops: Drops, initial: Array, rows: Ids, share: Any, support: Array
) -> None:
    indptr, indices, data = matrix
    low, high, threshold, scale, draws = drops
    if len(draws):
        fill_bytes(low, high, draws.reshape(-1))
    np.multiply(initial[rows], share, out=support)
    read = hidden * _factors(draws, threshold, scale, hidden.dtype) if len(draws) else hidden
    add_product(indptr, indices, data, read, support)


def gcnii_result(support: Array, kept: Any, turned: Any, result: Array) -> None:
    np.maximum(kept * support + turned * result, 0, out=result)


def relu_gradient(gradient: Array, result: Array, factor: Any, gated: Array) -> None:
    gated[:] = np.where(result > 0, factor * gradient, 0)


def gcnii_gradients(
    matrix: Matrix,
    drops: Drops,
    share: Any,
    kept: Any,
    result: Array,
    gradient: Array,
    at_support: Array,
    more: Array,
    places: Ids,
    at_initial: Array,
    at_hidden: Array,
) -> None:
    indptr, indices, data = matrix
    _, _, threshold, scale, draws = drops
    at_support += np.where(result > 0, kept * gradient, 0)
    np.multiply(at_support, share, out=at_initial)
    at_initial[places] += more
    at_hidden[:] = 0
    add_transposed(indptr, indices, data, at_support, at_hidden)
    if len(draws):
        at_hidden *= _factors(draws, threshold, scale, at_hidden.dtype)


def apply_mask(hidden: Array, drops: Drops, read: Array) -> None:
    low, high, threshold, scale, draws = drops
    if len(draws):
        fill_bytes(low, high, draws.reshape(-1))
    read[:] = hidden * _factors(draws, threshold, scale, hidden.dtype) if len(draws) else hidden


def finish_classifier_gradients(gradient: Array, drops: Drops, at_bias: Array, at_hidden: Array) -> None:
    _, _, threshold, scale, draws = drops
    at_bias[:] = 0
    for row in gradient:  # one row after the other: numpy's own sum adds in another order
        at_bias += row
    if len(draws):
        at_hidden *= _factors(draws, threshold, scale, at_hidden.dtype)


def _factors(draws: Array, threshold: np.uint8, scale: Any, dtype: np.dtype[Any]) -> Array:
    factors: Array = np.multiply(draws >= threshold, scale, dtype=dtype)
    return factors


def cross_entropy(logits: Array, labels: Ids, gradient: Array) -> float:
    rows, shifted = np.arange(len(logits)), logits - logits.max(axis=1, keepdims=True)
    np.exp(shifted, out=gradient)
    lengths = gradient.sum(axis=1, keepdims=True)
    gradient /= lengths
    gradient[rows, labels] -= 1
    gradient /= len(logits)
    return float((np.log(lengths[:, 0]) - shifted[rows, labels]).mean(dtype=np.float64))


def sgd_step(weights: Array, gradients: Array, velocity: Array, rate: Any, momentum: Any, decay: Any) -> None:
    gradients = gradients + decay * weights
    if len(velocity):
        velocity *= momentum
        velocity += gradients
        gradients = velocity
    weights -= rate * gradients


def adam_step(
    weights: Array,
    gradients: Array,
    mean: Array,
    square: Array,
    rate: Any,
    length: Any,
    first: Any,
    second: Any,
    epsilon: Any,
    decay: Any,
) -> None:
    gradient, one = gradients + decay * weights, weights.dtype.type(1)
    mean *= first
    mean += (one - first) * gradient
    square *= second
    square += (one - second) * (gradient * gradient)
    weights -= rate * mean / (np.sqrt(square) / length + epsilon)
