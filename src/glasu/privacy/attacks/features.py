"""Infer features from representations, by ridge regression from released rows to a party's feature rows.

The attacker knows the features of some nodes, for example because half of the party's customers are also customers of
the attacker. It fits

    X ~ Z B,   B = (Z^T Z + penalty I)^-1 Z^T X     at the known nodes

A row of Z contains everything that the attacker knows about a node: the released rows of one or several evaluations,
and the attacker's own features. The attacker then guesses X at the other nodes. The penalty is chosen by the squared
error on a fifth of the known nodes.

The smallest penalty is nearly zero: 1e-5 times the number of fitted rows, which is the sum of squares of a column of Z
(deviation 1). The fit with this penalty replaces the linear probe, a regression without penalty. The probe has no
unique solution if columns are linearly dependent.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from glasu.privacy.attacks.result import Values
from glasu.randomness import Stream, draw_distinct

PENALTIES = (0.01, 0.1, 1.0, 10.0, 100.0, 1000.0)  # multiplied by (number of fitted rows / 1000)


def choose_known(num_nodes: int, share: float, seed: int) -> NDArray[np.bool_]:
    """Draw the nodes whose features the attacker knows."""
    known = np.zeros(num_nodes, bool)
    known[draw_distinct(Stream(seed, "known rows").key(), num_nodes, round(share * num_nodes))] = True
    return known


def guess_features(observed: Values, features: Values, known: NDArray[np.bool_]) -> Values:
    """Return the guessed features of the nodes that are not known, in node order.

    Args:
        observed: Z, a row per node.
        features: X. Only the rows of known nodes are read.
        known: the nodes whose features the attacker knows.
    """
    inside = np.flatnonzero(known)
    held_out = inside[::5]
    fitted = np.setdiff1d(inside, held_out)
    scaled = _standardize(observed, inside)
    errors = []
    for penalty in PENALTIES:
        tried = _fit(scaled[fitted], features[fitted], penalty)(scaled[held_out])
        errors.append(float(np.square(tried - features[held_out]).mean()))
    best = PENALTIES[int(np.argmin(errors))]
    guesses: Values = _fit(scaled[inside], features[inside], best)(scaled[~known])
    return guesses


def _standardize(observed: Values, rows: NDArray[np.int64]) -> Values:
    mean, deviation = observed[rows].mean(axis=0), observed[rows].std(axis=0)
    varies = deviation > 1e-9
    scaled: Values = (observed[:, varies] - mean[varies]) / deviation[varies]
    return scaled.astype(np.float64)


def _fit(observed: Values, features: Values, penalty: float) -> Callable[[Values], Values]:
    """Return the fitted function from rows of Z to rows of X."""
    mean = features.mean(axis=0, dtype=np.float64)
    if not observed.shape[1]:
        return lambda rows: np.broadcast_to(mean, (len(rows), len(mean)))
    gram = observed.T @ observed
    gram[np.diag_indices_from(gram)] += penalty * len(observed) / 1000
    weights = np.linalg.solve(gram, observed.T @ (features - mean))
    return lambda rows: rows @ weights + mean


def measure_word_share(guesses: Values, features: Values) -> float:
    """Return the share of the nonzero features that are among the highest guesses of their row.

    In a row with k nonzero features, the k highest guesses count. If all rows have the same k, random guesses score the
    density of the matrix: its share of nonzero values.
    """
    present = features != 0
    counts = present.sum(axis=1)
    places = np.argsort(np.argsort(-guesses, axis=1, kind="stable"), axis=1, kind="stable")
    return float((present & (places < counts[:, None])).sum() / max(1, counts.sum()))


def measure_r2(guesses: Values, features: Values) -> float:
    """Return R^2, the mean over the columns that vary."""
    spread = np.square(features - features.mean(axis=0)).sum(axis=0)
    error = np.square(guesses - features).sum(axis=0)
    varies = spread > 1e-12
    return float((1 - error[varies] / spread[varies]).mean()) if varies.any() else 0.0


def subtract_own(joint: Values, own: Values, num_clients: int) -> Values:
    """Return the mean of the other clients' partials: (M H[l+1] - H_m^+[l]) / (M - 1)."""
    others: Values = (num_clients * joint - own) / (num_clients - 1)
    return others


def join_columns(*blocks: Values) -> Values:
    """Join the columns of the attacker's matrices. Every matrix has one row per node."""
    return np.concatenate([np.asarray(block, np.float64) for block in blocks], axis=1)
