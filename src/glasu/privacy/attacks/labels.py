"""Infer labels from the gradient at H[L] that one label owner sends, and from H[L] itself.

With a linear classifier, the gradient of node i is g_i = (p_i - y_i) W^T / n. So its direction depends on the label,
and gradients of nodes with the same label point in similar directions. If the head has dense layers before the
classifier, the gradient is g_i = J_i^T (p_i - y_i) / n, where J_i is the Jacobian of the head.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment
from sklearn.cluster import KMeans
from sklearn.linear_model import LogisticRegression

from glasu.privacy.attacks.result import Classes, Values
from glasu.randomness import Stream, draw_distinct, draw_words

MATCHING_STEPS, MATCHING_ROUNDS = 150, 6


def normalize_rows(gradients: Values) -> Values:
    """Return the rows scaled to length 1; rows of zeros stay zero."""
    lengths = np.linalg.norm(gradients, axis=1, keepdims=True)
    scaled: Values = gradients / np.maximum(lengths, 1e-30)
    return scaled


def cluster_rows(rows: Values, num_classes: int, seed: int) -> Classes:
    """Divide rows into as many clusters as there are classes (k-means)."""
    state = Stream(seed, "k-means").torch_seed() % 2**32
    found: Classes = KMeans(num_classes, n_init=4, random_state=state).fit(rows).labels_.astype(np.int64)
    return found


def match_classes(guesses: Classes, labels: Classes, num_classes: int) -> float:
    """Return the accuracy under the best assignment of clusters to classes, which the attacker does not know."""
    table = np.zeros((num_classes, num_classes), np.int64)
    np.add.at(table, (guesses, labels), 1)
    rows, columns = linear_sum_assignment(table, maximize=True)
    return float(table[rows, columns].sum() / max(1, len(labels)))


def shuffle_labels(labels: Classes, seed: int) -> Classes:
    """Return the labels in a random order: a guess that uses only the class sizes."""
    words = draw_words(*Stream(seed, "shuffled labels").key_halves(), np.arange(len(labels)))
    return labels[np.argsort(words)]


def solve_labels(gradients: Values, joint: Values, weight: Values, bias: Values) -> Classes:
    """Return the labels, given the classifier.

    Try every class at every node: the correct class explains the node's gradient best. Where an entry of a gradient is
    exactly zero, the owner's dropout removed this entry of H[L]. Dropout scaled the other entries by a factor, which is
    estimated here.

    Args:
        gradients: G, a row per node.
        joint: H[L], the same rows.
        weight: W, shape (width, C).
        bias: shape (C,).
    """
    kept = gradients != 0
    share = max(float(kept.mean()), 1e-9)
    read = np.where(kept, joint / share, 0.0) if share < 1 - 1e-9 else joint
    scores = read @ weight + bias
    scores = np.exp(scores - scores.max(axis=1, keepdims=True))
    probabilities = scores / scores.sum(axis=1, keepdims=True)
    seen, errors = normalize_rows(gradients), []
    for label in range(weight.shape[1]):
        expected = (probabilities - np.eye(weight.shape[1])[label]) @ weight.T
        errors.append(np.square(seen - normalize_rows(np.where(kept, expected, 0.0))).sum(axis=1))
    best: Classes = np.argmin(errors, axis=0)
    return best


def match_gradients(gradients: Values, joint: Values, num_classes: int, seed: int) -> Classes:
    """Return labels up to a permutation of the classes, by gradient matching.

    Start with clusters as labels. Fit a linear classifier to the gradients and labels, then fit the labels to the
    gradients and the classifier, and repeat.
    """
    guesses = cluster_rows(normalize_rows(gradients), num_classes, seed)
    for _ in range(MATCHING_ROUNDS):
        weight, bias = _fit_classifier(gradients, joint, guesses, num_classes)
        better = solve_labels(gradients, joint, weight, bias)
        if np.array_equal(better, guesses) or len(np.unique(better)) < num_classes:
            break
        guesses = better
    return guesses


def _fit_classifier(gradients: Values, joint: Values, labels: Classes, num_classes: int) -> tuple[Values, Values]:
    """Return the classifier (W, b) whose gradients at H[L], with these labels, are nearest to the given gradients."""
    seen, hidden = (torch.from_numpy(np.asarray(each, np.float64)) for each in (gradients, joint))
    target = torch.nn.functional.one_hot(torch.from_numpy(labels), num_classes).double()
    kept = (seen != 0).double()
    share = kept.mean().clamp(min=1e-9)
    hidden = hidden * kept / share if share < 1 else hidden
    seen = seen * len(seen)
    seen = seen / seen.norm(dim=1).mean().clamp(min=1e-30)
    means = torch.stack([seen[target[:, each] > 0].mean(dim=0) for each in range(num_classes)])
    # Gradients of a class point away from its column of W, so start from their negative means.
    weight = (-means.nan_to_num()).t().contiguous().requires_grad_()
    bias = torch.zeros(num_classes, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.Adam([weight, bias], lr=0.05)
    with torch.enable_grad():
        for _ in range(MATCHING_STEPS):
            optimizer.zero_grad()
            scores = hidden @ weight + bias
            expected = (scores.softmax(dim=1) - target) @ weight.t() * kept
            loss = (expected - seen).square().sum() / len(seen)
            loss.backward()
            optimizer.step()
    return weight.detach().numpy(), bias.detach().numpy()


def choose_labelled(labels: Classes, per_class: int, seed: int) -> NDArray[np.bool_]:
    """Draw a few nodes of each class. The attacker knows the labels of these nodes."""
    known = np.zeros(len(labels), bool)
    for each in np.unique(labels):
        members = np.flatnonzero(labels == each)
        key = Stream(seed, "known labels", step=int(each)).key()
        known[members[draw_distinct(key, len(members), min(per_class, len(members)))]] = True
    return known


def complete_model(rows: Values, labels: Classes, known: NDArray[np.bool_]) -> Classes:
    """Train a classifier on the few known labels, and return its guesses for the other nodes.

    It is trained three times. The second and the third time, its own most confident guesses are added (self-training).

    Args:
        rows: the attacker's data about each node, a row per node.
        labels: the labels of all nodes. Only labels of known nodes are read.
        known: the nodes whose labels the attacker knows.
    """
    if not rows.shape[1]:
        values, counts = np.unique(labels[known], return_counts=True)
        return np.full(int((~known).sum()), values[counts.argmax()], np.int64)
    deviation = rows.std(axis=0)
    scaled = (rows - rows.mean(axis=0)) / np.where(deviation > 1e-12, deviation, 1.0)
    used, guesses = known.copy(), labels.copy()
    for share in (0.3, 0.6, 1.0):
        model = LogisticRegression(max_iter=300).fit(scaled[used], guesses[used])
        probabilities = model.predict_proba(scaled)
        best = model.classes_[probabilities.argmax(axis=1)].astype(np.int64)
        certain = probabilities.max(axis=1) >= np.quantile(probabilities.max(axis=1), 1 - share)
        guesses, used = np.where(known, labels, best), known | certain
    return guesses[~known]
