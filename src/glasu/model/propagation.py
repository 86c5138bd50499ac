"""Personalised PageRank over one party's edges: propagate class probabilities or labels, and choose alpha.

The server, which has no torch, imports this module to read ALPHAS.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

from glasu.data.graph import Graph
from glasu.data.party import PartyData
from glasu.model.sparse import SparseRows
from glasu.model.task import ScoreRows, Task

ALPHAS = (1.0, 0.8, 0.5, 0.3, 0.2, 0.1)  # 1 leaves the scores unchanged
PROPAGATING = ALPHAS[1:]  # the values of alpha that change the scores
STEPS = 10  # more steps change validation scores less than a change of the seed (docs/experiments.md)


def propagate(graph: Graph, scores: ScoreRows, alpha: float, steps: int = STEPS) -> ScoreRows:
    """Mix the scores of each node with the scores of its neighbours.

    Z <- alpha P + (1 - alpha) D^-1 (A + I) Z, starting from Z = P; D counts the self loop.

    The random-walk normalisation makes every row of Z a weighted mean of rows of P. So probabilities stay
    probabilities, and a node without edges keeps its row.

    Args:
        graph: E_m; A[i, j] is the weight of the edge from j to i.
        scores: P, shape (N, C).
        alpha: the weight of P.
        steps: number of times that Z is updated.

    Returns:
        Z, in the precision of P. It is computed in double precision.
    """
    if alpha == 1:
        return scores
    weights = np.ones(graph.num_edges) if graph.weights is None else np.asarray(graph.weights, np.float64)
    edges = SparseRows(np.asarray(graph.indptr), np.asarray(graph.indices), weights, graph.num_nodes)
    share = (1 - alpha) / (graph.degree[:, None] + 1)
    start = scores.astype(np.float64)
    spread = start
    for _ in range(steps):
        spread = alpha * start + share * (edges @ spread + spread)
    return spread.astype(scores.dtype)


def choose_alpha(score: Callable[[float], float], alphas: Iterable[float] = ALPHAS) -> float:
    """Return the alpha with the largest score; among equal scores, or if all are NaN, the first alpha."""
    scores = {alpha: score(alpha) for alpha in alphas}
    return max(scores, key=lambda alpha: np.nan_to_num(scores[alpha], nan=-np.inf))


def start_from_labels(task: Task, party: PartyData) -> ScoreRows:
    """Return the scores from which plain label propagation starts.

    A training node has the scores of its label. Every other node has the mean of these scores: the class frequencies.
    """
    assert party.labels is not None
    assert party.splits is not None
    examples = task.training_examples(party.labels, party.splits.train)
    known = task.label_scores(party.labels[examples], party.classes)
    scores = np.tile(known.mean(axis=0), (party.num_nodes, 1))
    scores[examples] = known
    return scores
