"""Randomised response: the owner replaces training labels once, before anything is computed from them.

A label with k possible values keeps its value with probability e^epsilon / (e^epsilon + k - 1) and otherwise becomes
one of the others, with equal probabilities. The result is epsilon-differentially private for one label. In a multilabel
task, each of the C entries of a row (0 or 1) gets epsilon / C, so the whole row has epsilon.

The draw is a function of the party's secret, the node and the label. Repeated runs give the same labels, so an attacker
cannot average over repeated runs. Labels of validation and test nodes are not changed: they select and measure the
model.
"""

from __future__ import annotations

import hmac
import math
import struct
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from glasu.data.party import PartyData

_PLACE_OF_LABEL = struct.Struct("<qqd")  # node, column, epsilon


def randomize_training_labels(party: PartyData, epsilon: float, secret: bytes) -> PartyData:
    """Return the party with randomised labels of its training nodes; unknown labels stay unknown."""
    if party.labels is None or party.splits is None:
        return party
    labels, nodes = party.labels.astype(np.int64), party.splits.train
    if labels.ndim == 1:
        labels[nodes] = randomize_labels(labels[nodes], nodes, len(party.classes), epsilon, secret)
    else:
        share = epsilon / labels.shape[1]
        for column in range(labels.shape[1]):
            labels[nodes, column] = randomize_labels(labels[nodes, column], nodes, 2, share, secret, column)
    return replace(party, labels=labels)


def randomize_labels(
    labels: NDArray[np.integer],
    nodes: NDArray[np.integer],
    num_classes: int,
    epsilon: float,
    secret: bytes,
    column: int = 0,
) -> NDArray[np.integer]:
    """Apply randomised response to labels 0..num_classes-1; a negative label is unknown and stays unknown.

    Args:
        labels: one per node.
        nodes: their positions.
        num_classes: k.
        epsilon: the privacy parameter of one label.
        secret: the secret of the party.
        column: the column of the labels in a multilabel task.
    """
    changed = labels.copy()
    for place, (node, label) in enumerate(zip(nodes.tolist(), labels.tolist(), strict=True)):
        if label < 0:
            continue
        message = b"glasu label\0" + _PLACE_OF_LABEL.pack(node, column, epsilon) + struct.pack("<q", label)
        drawn = hmac.digest(secret, message, "sha256")
        if int.from_bytes(drawn[:16], "little") * 2.0**-128 >= compute_keep_probability(num_classes, epsilon):
            other = int.from_bytes(drawn[16:], "little") * (num_classes - 1) >> 128  # uniform in 0..k-2
            changed[place] = other + (other >= label)
    return changed


def compute_keep_probability(num_classes: int, epsilon: float) -> float:
    """Return the probability that a label keeps its value: e^epsilon / (e^epsilon + k - 1)."""
    return 1 / (1 + (num_classes - 1) * math.exp(-epsilon))
