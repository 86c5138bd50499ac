"""How well predictions fit: accuracy, F1 and loss from class probabilities, for one label or several per node."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

NAMES = {
    "multiclass": ("accuracy", "macro_f1", "loss"),
    "multilabel": ("accuracy", "macro_f1", "micro_f1", "loss"),
}
SELECTED_BY = {"multiclass": "accuracy", "multilabel": "micro_f1"}


def evaluate(probabilities: NDArray[Any], labels: NDArray[np.int64], task: str) -> dict[str, float]:
    """Score class probabilities against labels; nodes with an unknown label (-1) do not count.

    Args:
        probabilities: shape (n, C).
        labels: shape (n,), or (n, C) of 0 and 1 for a multi-label task.
        task: "multiclass" or "multilabel"; the accuracy of the latter is the share of right yes-or-no decisions.
    """
    from glasu.data.party import labelled  # loads scipy, which a server installation does not have

    known = labelled(labels)
    probabilities, labels = probabilities[known].astype(np.float64), labels[known]
    if not len(labels):
        return dict.fromkeys(NAMES[task], float("nan"))
    classes = np.arange(probabilities.shape[1])
    tiny = np.finfo(np.float64).tiny
    if task == "multilabel":
        truth, said = labels == 1, probabilities > 0.5
        likelihood = np.where(truth, probabilities, 1 - probabilities)
    else:
        truth, said = labels[:, None] == classes, probabilities.argmax(axis=1)[:, None] == classes
        likelihood = probabilities[np.arange(len(labels)), labels]
    hits, either = (truth & said).sum(axis=0), truth.sum(axis=0) + said.sum(axis=0)
    present = either > 0
    result = {
        "accuracy": float((truth == said).mean() if task == "multilabel" else (truth & said).any(axis=1).mean()),
        "macro_f1": float((2 * hits[present] / either[present]).sum() / max(1, present.sum())),
        "loss": float(-np.log(np.maximum(likelihood, tiny)).mean()),
    }
    if task == "multilabel":
        result["micro_f1"] = float(2 * hits.sum() / max(1, either.sum()))
    return {name: result[name] for name in NAMES[task]}
