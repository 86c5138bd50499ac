"""Randomised response: a party randomises its training labels once, before anything is computed from them.

A label with k possible values keeps its value with probability e^epsilon / (e^epsilon + k - 1). Otherwise it becomes
one of the other k - 1 values, with equal probabilities. The result is epsilon-differentially private for one label. In
a multilabel task, each of the C entries of a row (0 or 1) gets epsilon / C, so the whole row has epsilon.

The draw is a function of the party's secret, the id of the node, the label and epsilon. Repeated runs give the same
labels, even if an alignment has changed the order of the rows. So an attacker cannot average over repeated runs. The
labels of validation and test nodes are not randomised, because they select and measure the model.
"""

from __future__ import annotations

import hashlib
import hmac
import math
import struct
from contextlib import suppress
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from glasu.data.party import PartyData

_PLACE_OF_LABEL = struct.Struct("<qdq")  # column, epsilon, label


def randomize_training_labels(party: PartyData, epsilon: float, secret: bytes) -> PartyData:
    """Return the party with randomised labels of its training nodes; unknown labels stay unknown."""
    if party.labels is None or party.splits is None:
        return party
    labels, nodes = party.labels.astype(np.int64), party.splits.train
    ids = party.ids[nodes]
    if labels.ndim == 1:
        labels[nodes] = randomize_labels(labels[nodes], ids, len(party.classes), epsilon, secret)
    else:
        share = epsilon / labels.shape[1]
        for column in range(labels.shape[1]):
            labels[nodes, column] = randomize_labels(labels[nodes, column], ids, 2, share, secret, column)
    return replace(party, labels=labels)


def randomize_labels(
    labels: NDArray[np.integer],
    ids: NDArray[np.int64] | NDArray[np.str_],
    num_classes: int,
    epsilon: float,
    secret: bytes,
    column: int = 0,
) -> NDArray[np.integer]:
    """Apply randomised response to labels 0..num_classes-1; a negative label is unknown and stays unknown.

    Args:
        labels: one per node.
        ids: the ids of the nodes, or the row numbers if the data has no ids.
        num_classes: k.
        epsilon: the privacy parameter of one label.
        secret: the secret of the party.
        column: the column of the labels in a multilabel task.
    """
    changed = labels.copy()
    for place, (node_id, label) in enumerate(zip(ids.tolist(), labels.tolist(), strict=True)):
        if label < 0:
            continue
        message = b"glasu label\0" + _encode_id(node_id) + _PLACE_OF_LABEL.pack(column, epsilon, label)
        drawn = hmac.digest(secret, message, "sha256")
        if int.from_bytes(drawn[:16], "little") * 2.0**-128 >= compute_keep_probability(num_classes, epsilon):
            other = int.from_bytes(drawn[16:], "little") * (num_classes - 1) >> 128  # uniform in 0..k-2
            changed[place] = other + (other >= label)
    return changed


def _encode_id(node_id: int | str) -> bytes:
    """Return an id as 8 bytes if it is an integer, else as 32 bytes.

    An alignment turns integer ids into strings. Therefore 5 and "5" have the same bytes.
    """
    text = str(node_id)
    with suppress(ValueError, struct.error):  # not an integer, or an integer of more than 64 bits
        if str(number := int(text)) == text:
            return struct.pack("<q", number)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()


def compute_keep_probability(num_classes: int, epsilon: float) -> float:
    """Return the probability that a label keeps its value: e^epsilon / (e^epsilon + k - 1)."""
    return 1 / (1 + (num_classes - 1) * math.exp(-epsilon))
