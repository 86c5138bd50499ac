"""The kernels as loops, compiled by numba. Integers are int64 and node labels int32 unless a caller says otherwise."""

from __future__ import annotations

from typing import Any

import numpy as np

from glasu import blas
from glasu.compiling import compiled
from glasu.model.kernels import arrays
from glasu.model.kernels.arrays import Constants, Drops, Matrix
from glasu.randomness import FIRST, GOLDEN, SECOND

Array = Any  # numba knows the types better than an annotation could
S11, S27, S30, S31 = np.uint64(11), np.uint64(27), np.uint64(30), np.uint64(31)
LOWEST = np.uint64(0xFF)


# Randomness: as in glasu.randomness, one word at a time.


@compiled
def _mix(value: np.uint64) -> Any:
    value = (value ^ (value >> S30)) * FIRST
    value = (value ^ (value >> S27)) * SECOND
    return value ^ (value >> S31)


@compiled
def _word(low: np.uint64, high: np.uint64, counter: int) -> Any:
    return _mix(_mix(low + np.uint64(counter) * GOLDEN) ^ high)


@compiled
def _below(word: np.uint64, bound: int) -> Any:
    return np.int64(np.float64(word >> S11) * 2.0**-53 * bound)


# Node sets and edges.


@compiled
def draw_numbers(low: np.uint64, high: np.uint64, population: int, numbers: Array) -> bool:
    """Write numbers below the population, sorted; tell whether they are distinct, and so what `draw_distinct` draws."""
    for k in range(len(numbers)):
        numbers[k] = _below(_word(low, high, k), population)
    numbers.sort()
    repeats = 0
    for k in range(1, len(numbers)):
        repeats += numbers[k] == numbers[k - 1]
    return repeats == 0


@compiled
def _merged(one: Array, other: Array) -> Array:
    """Return two sorted arrays as one; nothing is in both."""
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


@compiled
def draw_neighbors(
    indptr: Array, indices: Array, targets: Array, fanout: int, low: np.uint64, high: np.uint64, labels: Array
) -> tuple[Array, Array, Array, Array]:
    """Draw up to `fanout` edges into each of some sorted targets: (nodes, starts, edges, scale) of a `Draw`."""
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
            for step in range(fanout):  # Floyd: a number below top + 1, or top where that one was drawn before
                top = degree - fanout + step
                pick = first + _below(_word(low, high, row * fanout + step), top + 1)
                at = start + step  # the drawn ones are kept in order
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
    return _merged(targets, np.sort(fresh[:found])), starts, edges, scale


@compiled
def neighbors_outside(indptr: Array, indices: Array, targets: Array, labels: Array) -> Array:
    """Return the sources of edges into the targets that are no targets themselves, in any order."""
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


@compiled
def edges_between(
    indptr: Array, indices: Array, targets: Array, others: Array, labels: Array
) -> tuple[Array, Array, Array]:
    """List the edges into the targets from targets and others: (starts, edges, whether from others)."""
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


@compiled
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
    """Write the rows of a block: self loops first where there are any, then the drawn edges (see `Adjacency`)."""
    everything = len(nodes) == len(labels)  # then a node's position is its number
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


@compiled
def distinct(numbers: Array, labels: Array) -> Array:
    """Return the distinct ones among numbers below the number of nodes, in any order."""
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


# Sparse matrices by rows, and masks.


@compiled
def gather_rows(indptr: Array, indices: Array, data: Array, rows: Array) -> tuple[Array, Array, Array]:
    """Return some rows of a sparse matrix, as the arrays of another one."""
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


@compiled
def add_product(indptr: Array, indices: Array, data: Array, dense: Array, total: Array) -> None:
    """Add matrix @ dense to `total`, the entries of a row in their order."""
    for row in range(len(indptr) - 1):
        result = total[row]
        for k in range(indptr[row], indptr[row + 1]):
            value, source = data[k], dense[indices[k]]
            for column in range(len(result)):
                result[column] += value * source[column]


@compiled
def add_transposed(indptr: Array, indices: Array, data: Array, dense: Array, total: Array) -> None:
    """Add matrix.T @ dense to `total`, the entries of a column in the order of the rows."""
    for row in range(len(indptr) - 1):
        source = dense[row]
        for k in range(indptr[row], indptr[row + 1]):
            value, result = data[k], total[indices[k]]
            for column in range(len(source)):
                result[column] += value * source[column]


@compiled
def fill_bytes(low: np.uint64, high: np.uint64, draws: Array) -> None:
    """Write the bytes of the key's words, eight a word, lowest first."""
    whole = len(draws) // 8
    words = draws[: 8 * whole].view(np.uint64)
    for k in range(whole):
        words[k] = _word(low, high, k)
    if 8 * whole < len(draws):
        last = _word(low, high, whole)
        for k in range(8 * whole, len(draws)):
            draws[k] = (last >> np.uint64(8 * (k - 8 * whole))) & LOWEST


@compiled
def fill_mask(low: np.uint64, high: np.uint64, threshold: np.uint8, scale: Any, mask: Array) -> None:
    """Write `scale` where a byte of the key's words reaches the threshold, else 0."""
    draws = np.empty(len(mask), np.uint8)
    fill_bytes(low, high, draws)
    zero = scale - scale
    for k in range(len(mask)):
        mask[k] = scale if draws[k] >= threshold else zero


# Dense products: the same code that torch calls, with the same bits, but without the way there.

if blas.GEMM is None:
    dense_product = arrays.dense_product

    def around_products(loop: Any) -> Any:
        """Leave a function that calls products to Python."""
        return loop

else:
    around_products = compiled
    SGEMM, DGEMM = blas.GEMM
    PLAIN, TURNED = np.uint8(ord("n")), np.uint8(ord("t"))
    SINGLE, DOUBLE = np.dtype(np.float32), np.dtype(np.float64)

    @compiled
    def dense_product(
        left: Array, left_turned: bool, right: Array, right_turned: bool, kept: Any, taken: Any, out: Array
    ) -> None:
        """Make kept * out + taken * left @ right of `out`, with either factor transposed where `turned` says so."""
        depth, same = left.shape[0 if left_turned else 1], right.shape[1 if right_turned else 0]
        rows, columns = left.shape[1 if left_turned else 0], right.shape[0 if right_turned else 1]
        if depth != same or out.shape != (rows, columns):
            raise ValueError("the factors of a product do not fit.")
        alike = left.dtype == out.dtype and right.dtype == out.dtype
        if not (alike and (out.dtype == SINGLE or out.dtype == DOUBLE)):
            raise ValueError("the factors of a product and what it is added to must be floats of one precision.")
        if not (left.flags.c_contiguous and right.flags.c_contiguous and out.flags.c_contiguous):
            raise ValueError("the rows of a product must lie one after the other.")
        # BLAS counts by columns, and reads what lies here as the transposed: out^T = right^T left^T. It is given
        # addresses only; a BLAS of 32-bit integers finds them in the lower halves, which come first.
        turns = np.array([TURNED if right_turned else PLAIN, TURNED if left_turned else PLAIN])
        sizes = np.array([columns, rows, depth, max(1, right.shape[1]), max(1, left.shape[1]), max(1, columns)])
        factors = np.array([taken, kept], out.dtype)
        about = (
            *(turns.ctypes, turns[1:].ctypes, sizes.ctypes, sizes[1:].ctypes, sizes[2:].ctypes, factors.ctypes),
            *(right.ctypes, sizes[3:].ctypes, left.ctypes, sizes[4:].ctypes),
            *(factors[1:].ctypes, out.ctypes, sizes[5:].ctypes),
        )
        if out.itemsize == 4:
            SGEMM(*about)
        else:
            DGEMM(*about)


# Layers in one pass over the rows, for what a row needs is in the nearest cache by then.


@compiled
def rectified(matrix: Matrix, weight: Array, bias: Array, result: Array) -> None:
    """Write ReLU(matrix @ weight + bias)."""
    indptr, indices, data = matrix
    for row in range(len(indptr) - 1):
        total = result[row]
        total[:] = 0
        for k in range(indptr[row], indptr[row + 1]):
            value, source = data[k], weight[indices[k]]
            if value != 0:  # what was dropped is still stored
                for column in range(len(total)):
                    total[column] += value * source[column]
        for column in range(len(total)):
            value = total[column] + bias[column]
            total[column] = 0 if value < 0 else value  # what is not a number stays so, as everywhere


@compiled
def rectified_gradients(
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
    """Go back through `rectified`: make kept * target + taken * dL/dweight of `target`, write dL/dbias.

    The gradient at the result is what is given, to which `more` is added at some places.
    """
    indptr, indices, data = matrix
    if kept == 0:
        target[:] = 0  # whatever stood there
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


@compiled
def gcnii_support(
    matrix: Matrix, hidden: Array, drops: Drops, initial: Array, rows: Array, share: Any, support: Array
) -> None:
    """Write share * initial[rows] + matrix @ hidden, where `hidden` is first multiplied by a mask.

    The mask is `scale` where a byte of the key's words reaches the threshold, else 0. The bytes are written into
    `draws`, which has one for each value; none at all: no mask.
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


@compiled
def gcnii_result(support: Array, kept: Any, turned: Any, result: Array) -> None:
    """Make ReLU(kept * support + turned * result) of the result, which is support @ weight."""
    zero = kept - kept
    for row in range(len(result)):
        total, own = result[row], support[row]
        for column in range(len(total)):
            value = kept * own[column] + turned * total[column]
            total[column] = zero if value < 0 else value  # what is not a number stays so, as everywhere


@around_products
def gcnii_layer(
    matrix: Matrix,
    hidden: Array,
    drops: Drops,
    initial: Array,
    rows: Array,
    constants: Constants,
    weight: Array,
    support: Array,
    result: Array,
) -> None:
    """Write a layer's support (`gcnii_support`) and its result, ReLU(kept * support + turned * support @ weight)."""
    share, kept, turned = constants
    gcnii_support(matrix, hidden, drops, initial, rows, share, support)
    dense_product(support, False, weight, False, 0.0, 1.0, result)
    gcnii_result(support, kept, turned, result)


@compiled
def gate(gradient: Array, result: Array, factor: Any, gated: Array) -> None:
    """Write factor * gradient where the result of a ReLU is above zero, else 0."""
    zero = factor - factor
    for row in range(len(gated)):
        target, source, made = gated[row], gradient[row], result[row]
        for column in range(len(target)):
            target[column] = factor * source[column] if made[column] > 0 else zero


@compiled
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
    """Write into `at_hidden` and `at_initial` the gradients of what `gcnii_support` read: hidden and initial[rows].

    `at_support` is the share of the support's gradient that came through the weights; the rest is added to it. `more`
    is what later layers add to `at_initial`, and `places` the rows there that they read.
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


@around_products
def gcnii_layer_gradients(
    matrix: Matrix,
    drops: Drops,
    constants: Constants,
    weight: Array,
    result: Array,
    gradient: Array,
    gated: Array,
    more: Array,
    places: Array,
    at_initial: Array,
    at_hidden: Array,
) -> None:
    """Go back through `gcnii_layer`: write the gradients of what it read (see `gcnii_gradients`).

    The gradient of the weight is support^T gated, and is left to the caller.
    """
    share, kept, turned = constants
    gate(gradient, result, turned, gated)
    at_support = np.empty_like(gated)
    dense_product(gated, False, weight, True, 0.0, 1.0, at_support)
    gcnii_gradients(matrix, drops, share, kept, result, gradient, at_support, more, places, at_initial, at_hidden)


@compiled
def masked(hidden: Array, drops: Drops, read: Array) -> None:
    """Write `hidden` times the mask of `gcnii_support`, whose bytes are drawn."""
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


@around_products
def classifier(hidden: Array, drops: Drops, weight: Array, bias: Array, read: Array, result: Array) -> None:
    """Write what a linear layer reads, `hidden` times a mask, and what it makes of that: read @ weight + bias."""
    masked(hidden, drops, read)
    result[:] = bias
    dense_product(read, False, weight, False, 1.0, 1.0, result)


@compiled
def classifier_sums(gradient: Array, drops: Drops, at_bias: Array, at_hidden: Array) -> None:
    """Add up the gradient of a bias, and multiply that of what was read by the mask."""
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


@around_products
def classifier_gradients(
    read: Array,
    gradient: Array,
    drops: Drops,
    weight: Array,
    at_weight: Array,
    at_bias: Array,
    at_hidden: Array,
) -> None:
    """Write the gradients of what `classifier` read, given that of its result."""
    dense_product(read, True, gradient, False, 0.0, 1.0, at_weight)
    dense_product(gradient, False, weight, True, 0.0, 1.0, at_hidden)
    classifier_sums(gradient, drops, at_bias, at_hidden)


@compiled
def cross_entropy(logits: Array, labels: Array, gradient: Array) -> float:
    """Return the mean cross-entropy of classes, and write its gradient at the logits."""
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


# Optimisers.


@compiled
def descend(weights: Array, gradients: Array, velocity: Array, rate: Any, momentum: Any, decay: Any) -> None:
    """Take a step of SGD; weight decay is part of the gradient. Without momentum there is no velocity."""
    if len(velocity):
        for k in range(len(weights)):
            velocity[k] = momentum * velocity[k] + (gradients[k] + decay * weights[k])
            weights[k] -= rate * velocity[k]
    else:
        for k in range(len(weights)):
            weights[k] -= rate * (gradients[k] + decay * weights[k])


@compiled
def descend_adaptively(
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
    """Take a step of Adam: `rate` and `length` make up for means that began at zero; decay is part of the gradient."""
    one = length / length
    for k in range(len(weights)):
        gradient = gradients[k] + decay * weights[k]
        mean[k] = first * mean[k] + (one - first) * gradient
        square[k] = second * square[k] + (one - second) * (gradient * gradient)
        weights[k] -= rate * mean[k] / (np.sqrt(square[k]) / length + epsilon)
