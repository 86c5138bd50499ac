"""Compiled loops over arrays. Integers are int64 and node labels int32 unless a comment states another type.

All loops are in one file although they serve several purposes. Numba caches compiled functions on disk and compiles a
function again when its file changes, but not when a function that it calls changes in another file. So a function and
the functions that it calls, such as `_word`, must stay in one file.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from glasu.compiling import compile_loop
from glasu.randomness import FIRST, GOLDEN, SECOND
from glasu.wire.encoding import Array

Matrix = tuple[Array, Array, Array]  # a sparse matrix by rows: indptr, indices, data
Drops = tuple[np.uint64, np.uint64, np.uint8, Any, Array]  # a dropout mask: key halves, threshold, scale, random bytes
S11, S27, S30, S31 = np.uint64(11), np.uint64(27), np.uint64(30), np.uint64(31)
LOWEST = np.uint64(0xFF)


# Random words: the functions of glasu.randomness for a single word.


@compile_loop
def _mix(value: np.uint64) -> Any:
    value = (value ^ (value >> S30)) * FIRST
    value = (value ^ (value >> S27)) * SECOND
    return value ^ (value >> S31)


@compile_loop
def _word(low: np.uint64, high: np.uint64, counter: int) -> Any:
    return _mix(_mix(low + np.uint64(counter) * GOLDEN) ^ high)


@compile_loop
def _below(word: np.uint64, bound: int) -> Any:
    return np.int64(np.float64(word >> S11) * 2.0**-53 * bound)


# Node sets and edges. `labels` holds one number per node, -1 between two calls. A loop resets exactly the entries that
# it changed, so its cost does not depend on the size of the graph.


@compile_loop
def draw_numbers(low: np.uint64, high: np.uint64, population: int, numbers: Array) -> bool:
    """Write sorted random numbers below `population`; return whether they are distinct.

    If the numbers are distinct, they equal the result of `randomness.draw_distinct` with this key.
    """
    for k in range(len(numbers)):
        numbers[k] = _below(_word(low, high, k), population)
    numbers.sort()
    repeats = 0
    for k in range(1, len(numbers)):
        repeats += numbers[k] == numbers[k - 1]
    return repeats == 0


@compile_loop
def _merge(one: Array, other: Array) -> Array:
    """Merge two sorted arrays that have no number in common."""
    both = np.empty(len(one) + len(other), np.int64)
    left = right = 0
    for k in range(len(both)):
        if right == len(other) or (left < len(one) and one[left] < other[right]):
            both[k] = one[left]
            left += 1
        else:
            both[k] = other[right]
            right += 1
    return both


@compile_loop
def draw_neighbors(
    indptr: Array, indices: Array, targets: Array, fanout: int, low: np.uint64, high: np.uint64, labels: Array
) -> tuple[Array, Array, Array, Array]:
    """Draw up to `fanout` edges into each target; return (nodes, starts, edges, scale) of a `Draw`.

    The targets must be sorted.
    """
    starts = np.empty(len(targets) + 1, np.int64)
    starts[0] = 0
    for row in range(len(targets)):
        degree = indptr[targets[row] + 1] - indptr[targets[row]]
        starts[row + 1] = starts[row] + min(degree, fanout)
        labels[targets[row]] = 0
    edges = np.empty(starts[-1], np.int64)
    scale = np.empty(starts[-1], np.float64)
    fresh = np.empty(starts[-1], np.int64)
    found = 0
    for row in range(len(targets)):
        first, start, stop = indptr[targets[row]], starts[row], starts[row + 1]
        degree = indptr[targets[row] + 1] - first
        if degree <= fanout:
            for k in range(start, stop):
                edges[k] = first + k - start
        else:
            for step in range(fanout):  # Floyd's algorithm: pick from 0..top; if the pick was drawn before, take top
                top = degree - fanout + step
                pick = first + _below(_word(low, high, row * fanout + step), top + 1)
                at = start + step  # insertion keeps the drawn edges sorted
                while at > start and edges[at - 1] > pick:
                    at -= 1
                if at > start and edges[at - 1] == pick:
                    edges[start + step] = first + top
                else:
                    for k in range(start + step, at, -1):
                        edges[k] = edges[k - 1]
                    edges[at] = pick
        for k in range(start, stop):
            scale[k] = degree / (stop - start)
            source = indices[edges[k]]
            if labels[source] < 0:
                labels[source] = 0
                fresh[found] = source
                found += 1
    for k in range(found):
        labels[fresh[k]] = -1
    for node in targets:
        labels[node] = -1
    return _merge(targets, np.sort(fresh[:found])), starts, edges, scale


@compile_loop
def list_neighbors_outside(indptr: Array, indices: Array, targets: Array, labels: Array) -> Array:
    """Return the sources of edges into the targets, without the targets themselves, in any order."""
    most = 0
    for node in targets:
        labels[node] = 0
        most += indptr[node + 1] - indptr[node]
    fresh = np.empty(most, np.int64)
    found = 0
    for node in targets:
        for edge in range(indptr[node], indptr[node + 1]):
            source = indices[edge]
            if labels[source] < 0:
                labels[source] = 0
                fresh[found] = source
                found += 1
    for k in range(found):
        labels[fresh[k]] = -1
    for node in targets:
        labels[node] = -1
    return fresh[:found].copy()


@compile_loop
def list_edges_between(
    indptr: Array, indices: Array, targets: Array, others: Array, labels: Array
) -> tuple[Array, Array, Array]:
    """List the edges into `targets` from `targets` and `others`; return (starts, edges, outside).

    `outside` states for each edge whether it comes from `others`.
    """
    most = 0
    for node in others:
        labels[node] = 1
    for node in targets:
        labels[node] = 0
        most += indptr[node + 1] - indptr[node]
    starts = np.empty(len(targets) + 1, np.int64)
    edges = np.empty(most, np.int64)
    outside = np.empty(most, np.bool_)
    found = starts[0] = 0
    for row in range(len(targets)):
        for edge in range(indptr[targets[row]], indptr[targets[row] + 1]):
            label = labels[indices[edge]]
            if label >= 0:
                edges[found] = edge
                outside[found] = label == 1
                found += 1
        starts[row + 1] = found
    for node in others:
        labels[node] = -1
    for node in targets:
        labels[node] = -1
    return starts, edges[:found].copy(), outside[:found].copy()


@compile_loop
def fill_block(
    indices: Array,
    weights: Array,
    targets: Array,
    nodes: Array,
    starts: Array,
    edges: Array,
    scale: Array,
    inverse: Array,
    kind: int,
    labels: Array,
    indptr: Array,
    columns: Array,
    values: Array,
    positions: Array,
) -> None:
    """Write the rows of a block (see `Adjacency`). In each row, the self loop precedes the drawn edges."""
    everything = len(nodes) == len(labels)  # then the position of a node is its number
    if not everything:
        for position in range(len(nodes)):
            labels[nodes[position]] = position
    found = indptr[0] = 0
    for row in range(len(targets)):
        target = targets[row]
        own = target if everything else labels[target]
        positions[row] = own
        if kind != 1:  # mean has no self loops
            columns[found] = own
            values[found] = inverse[target] * inverse[target] if kind == 2 else 1.0
            found += 1
        for k in range(starts[row], starts[row + 1]):
            source = indices[edges[k]]
            value = 1.0
            if kind != 0:
                if len(scale):
                    value = scale[k]
                if len(weights):
                    value = value * weights[edges[k]]
                value = value * inverse[target]
                if kind == 2:
                    value = value * inverse[source]
            columns[found] = source if everything else labels[source]
            values[found] = value
            found += 1
        indptr[row + 1] = found
    if not everything:
        for node in nodes:
            labels[node] = -1


@compile_loop
def find_distinct(numbers: Array, labels: Array) -> Array:
    """Return the distinct node numbers in `numbers`, in any order."""
    fresh = np.empty(min(len(numbers), len(labels)), np.int64)
    found = 0
    for number in numbers:
        if labels[number] < 0:
            labels[number] = 0
            fresh[found] = number
            found += 1
    for k in range(found):
        labels[fresh[k]] = -1
    return fresh[:found].copy()


# Sparse matrices by rows, and dropout masks.


@compile_loop
def gather_rows(indptr: Array, indices: Array, data: Array, rows: Array) -> tuple[Array, Array, Array]:
    """Return some rows of a sparse matrix as (indptr, indices, data)."""
    starts = np.empty(len(rows) + 1, indptr.dtype)
    starts[0] = 0
    for k in range(len(rows)):
        starts[k + 1] = starts[k] + indptr[rows[k] + 1] - indptr[rows[k]]
    columns, values = np.empty(starts[-1], indices.dtype), np.empty(starts[-1], data.dtype)
    for k in range(len(rows)):
        first = indptr[rows[k]]
        for at in range(starts[k], starts[k + 1]):
            columns[at] = indices[first + at - starts[k]]
            values[at] = data[first + at - starts[k]]
    return starts, columns, values


@compile_loop
def add_product(indptr: Array, indices: Array, data: Array, dense: Array, total: Array) -> None:
    """Add matrix @ dense to `total`.

    The entries of a row are added in the order in which they are stored, so the bits of the sum are always the same.
    """
    for row in range(len(indptr) - 1):
        result = total[row]
        for k in range(indptr[row], indptr[row + 1]):
            value, source = data[k], dense[indices[k]]
            for column in range(len(result)):
                result[column] += value * source[column]


@compile_loop
def add_transposed(indptr: Array, indices: Array, data: Array, dense: Array, total: Array) -> None:
    """Add matrix.T @ dense to `total`; the entries of a column are added in the order of the rows."""
    for row in range(len(indptr) - 1):
        source = dense[row]
        for k in range(indptr[row], indptr[row + 1]):
            value, result = data[k], total[indices[k]]
            for column in range(len(source)):
                result[column] += value * source[column]


@compile_loop
def fill_bytes(low: np.uint64, high: np.uint64, draws: Array) -> None:
    """Write the random bytes of a key: eight bytes per random word, the lowest byte first."""
    whole = len(draws) // 8
    words = draws[: 8 * whole].view(np.uint64)
    for k in range(whole):
        words[k] = _word(low, high, k)
    if 8 * whole < len(draws):
        last = _word(low, high, whole)
        for k in range(8 * whole, len(draws)):
            draws[k] = (last >> np.uint64(8 * (k - 8 * whole))) & LOWEST


@compile_loop
def fill_mask(low: np.uint64, high: np.uint64, threshold: np.uint8, scale: Any, mask: Array) -> None:
    """Write a dropout mask: `scale` where the random byte is at least `threshold`, else 0."""
    draws = np.empty(len(mask), np.uint8)
    fill_bytes(low, high, draws)
    zero = scale - scale
    for k in range(len(mask)):
        mask[k] = scale if draws[k] >= threshold else zero


# Layers. Each loop finishes one row before it reads the next, so that the row stays in the processor's cache. The speed
# of single loops has not been compared with torch and numpy. To compare whole rounds of two checkouts, run
# `benchmarks/compare_trees.py --cases 'round: Q = 1, lean'`.


@compile_loop
def relu_linear(matrix: Matrix, weight: Array, bias: Array, result: Array) -> None:
    """Write ReLU(matrix @ weight + bias)."""
    indptr, indices, data = matrix
    for row in range(len(indptr) - 1):
        total = result[row]
        total[:] = 0
        for k in range(indptr[row], indptr[row + 1]):
            value, source = data[k], weight[indices[k]]
            if value != 0:  # dropped values are stored as zeros
                for column in range(len(total)):
                    total[column] += value * source[column]
        for column in range(len(total)):
            value = total[column] + bias[column]
            total[column] = 0 if value < 0 else value  # NaN stays NaN


@compile_loop
def relu_linear_gradients(
    matrix: Matrix,
    result: Array,
    more: Array,
    places: Array,
    gradient: Array,
    kept: Any,
    taken: Any,
    target: Array,
    bias: Array,
) -> None:
    """Compute the gradients of `relu_linear`: target <- kept * target + taken * dL/dweight, bias <- dL/dbias.

    The gradient at the result is `gradient`, with `more` added at the rows `places`.
    """
    indptr, indices, data = matrix
    if kept == 0:
        target[:] = 0  # not 0 * target, which would keep a NaN
    elif kept != 1:
        target *= kept
    bias[:] = 0
    for row in range(len(places)):
        total, other = gradient[places[row]], more[row]
        for column in range(len(total)):
            total[column] += other[column]
    gated = np.empty_like(bias)
    for row in range(len(indptr) - 1):
        made, found = result[row], gradient[row]
        for column in range(len(gated)):
            gated[column] = found[column] if made[column] > 0 else 0
            bias[column] += gated[column]
        for k in range(indptr[row], indptr[row + 1]):
            value, total = taken * data[k], target[indices[k]]
            if value != 0:
                for column in range(len(gated)):
                    total[column] += value * gated[column]


@compile_loop
def gcnii_support(
    matrix: Matrix, hidden: Array, drops: Drops, initial: Array, rows: Array, share: Any, support: Array
) -> None:
    """Write share * initial[rows] + matrix @ (hidden * mask).

    The mask equals the result of `fill_mask`. Its random bytes are written into `draws`, the last part of `drops`, one
    per value of `hidden`, because the backward pass needs the same mask. An empty `draws` means no mask.
    """
    indptr, indices, data = matrix
    low, high, threshold, scale, draws = drops
    zero = scale - scale
    if len(draws):
        fill_bytes(low, high, draws.reshape(-1))
    for row in range(len(indptr) - 1):
        total, own = support[row], initial[rows[row]]
        for column in range(len(total)):
            total[column] = own[column] * share
        for k in range(indptr[row], indptr[row + 1]):
            value, source = data[k], hidden[indices[k]]
            if len(draws):
                drawn = draws[indices[k]]
                for column in range(len(total)):
                    total[column] += value * (source[column] * (scale if drawn[column] >= threshold else zero))
            else:
                for column in range(len(total)):
                    total[column] += value * source[column]


@compile_loop
def gcnii_result(support: Array, kept: Any, transformed: Any, result: Array) -> None:
    """Write ReLU(kept * support + transformed * result) into `result`. On entry, `result` contains support @ weight."""
    zero = kept - kept
    for row in range(len(result)):
        total, own = result[row], support[row]
        for column in range(len(total)):
            value = kept * own[column] + transformed * total[column]
            total[column] = zero if value < 0 else value  # NaN stays NaN


@compile_loop
def relu_gradient(gradient: Array, result: Array, factor: Any, gated: Array) -> None:
    """Write factor * gradient where the result of a ReLU is positive, else 0."""
    zero = factor - factor
    for row in range(len(gated)):
        target, source, made = gated[row], gradient[row], result[row]
        for column in range(len(target)):
            target[column] = factor * source[column] if made[column] > 0 else zero


@compile_loop
def gcnii_gradients(
    matrix: Matrix,
    drops: Drops,
    share: Any,
    kept: Any,
    result: Array,
    gradient: Array,
    at_support: Array,
    more: Array,
    places: Array,
    at_initial: Array,
    at_hidden: Array,
) -> None:
    """Write the gradients of `gcnii_support`.

    `at_hidden` receives the gradient at `hidden`, and `at_initial` receives the gradient at `initial[rows]`.

    The gradient at the support has two parts. On entry, `at_support` contains the part from support @ weight. This
    function adds the part from kept * support. It also adds `more`, the contribution of later layers, to the rows
    `places` of `at_initial`.
    """
    indptr, indices, data = matrix
    _, _, threshold, scale, draws = drops
    zero = scale - scale
    at_hidden[:] = zero
    for row in range(len(indptr) - 1):
        source, own, made, first = at_support[row], gradient[row], result[row], at_initial[row]
        for column in range(len(source)):
            source[column] += kept * own[column] if made[column] > 0 else zero
            first[column] = source[column] * share
        for k in range(indptr[row], indptr[row + 1]):
            value, total = data[k], at_hidden[indices[k]]
            for column in range(len(source)):
                total[column] += value * source[column]
    for row in range(len(draws)):
        drawn, total = draws[row], at_hidden[row]
        for column in range(len(total)):
            total[column] *= scale if drawn[column] >= threshold else zero
    for row in range(len(places)):
        first, other = at_initial[places[row]], more[row]
        for column in range(len(first)):
            first[column] += other[column]


@compile_loop
def apply_mask(hidden: Array, drops: Drops, read: Array) -> None:
    """Write hidden * mask into `read`, and the random bytes of the mask into `draws` (see `gcnii_support`)."""
    low, high, threshold, scale, draws = drops
    zero = scale - scale
    if len(draws):
        fill_bytes(low, high, draws.reshape(-1))
    for row in range(len(hidden)):
        source, target = hidden[row], read[row]
        for column in range(len(source)):
            target[column] = source[column]
        if len(draws):
            drawn = draws[row]
            for column in range(len(target)):
                target[column] *= scale if drawn[column] >= threshold else zero


@compile_loop
def finish_classifier_gradients(gradient: Array, drops: Drops, at_bias: Array, at_hidden: Array) -> None:
    """Write the gradient at the bias, and multiply the gradient at the input by its dropout mask."""
    _, _, threshold, scale, draws = drops
    zero = scale - scale
    at_bias[:] = zero
    for row in range(len(gradient)):
        for column in range(len(at_bias)):
            at_bias[column] += gradient[row, column]
    for row in range(len(draws)):
        drawn, total = draws[row], at_hidden[row]
        for column in range(len(total)):
            total[column] *= scale if drawn[column] >= threshold else zero


@compile_loop
def cross_entropy(logits: Array, labels: Array, gradient: Array) -> float:
    """Return the mean cross-entropy of the labels, which are class numbers; write its gradient at the logits."""
    total = 0.0
    for row in range(len(logits)):
        own, target = logits[row], gradient[row]
        largest = own.max()
        length = largest - largest
        for column in range(len(own)):
            target[column] = np.exp(own[column] - largest)
            length += target[column]
        total += np.log(length) - (own[labels[row]] - largest)
        for column in range(len(own)):
            target[column] = (target[column] / length - (1 if column == labels[row] else 0)) / len(logits)
    return total / len(logits)


# Optimizers.


@compile_loop
def sgd_step(weights: Array, gradients: Array, velocity: Array, rate: Any, momentum: Any, decay: Any) -> None:
    """Take a step of SGD. Weight decay is added to the gradient. Without momentum, `velocity` is empty."""
    if len(velocity):
        for k in range(len(weights)):
            velocity[k] = momentum * velocity[k] + (gradients[k] + decay * weights[k])
            weights[k] -= rate * velocity[k]
    else:
        for k in range(len(weights)):
            weights[k] -= rate * (gradients[k] + decay * weights[k])


@compile_loop
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
    """Take a step of Adam. `rate` and `length` include its bias correction. Weight decay is added to the gradient."""
    one = length / length
    for k in range(len(weights)):
        gradient = gradients[k] + decay * weights[k]
        mean[k] = first * mean[k] + (one - first) * gradient
        square[k] = second * square[k] + (one - second) * (gradient * gradient)
        weights[k] -= rate * mean[k] / (np.sqrt(square[k]) / length + epsilon)
