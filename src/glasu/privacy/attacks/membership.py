"""Infer membership: which nodes were training nodes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from glasu.privacy.attacks.result import Values


def count_common(node_sets: Sequence[Sequence[NDArray[np.int64]]], num_nodes: int) -> Values:
    """Return a score per node: (rounds in which all clients propose it) / (1 + rounds in which any client does).

    All proposals of a round contain its batch, and a batch contains only training nodes. So training nodes tend to
    have high scores.

    Args:
        node_sets: for each round, one set per client.
        num_nodes: N.
    """
    common, any_set = np.zeros(num_nodes), np.zeros(num_nodes)
    for sets in node_sets:
        found = np.bincount(np.concatenate(sets), minlength=num_nodes)
        common += found == len(sets)
        any_set += found > 0
    scores: Values = common / (any_set + 1)
    return scores


def measure_certainty(probabilities: Values) -> Values:
    """Return the largest class probability of each row. A model is often more certain at its training nodes."""
    greatest: Values = probabilities.max(axis=1)
    return greatest
