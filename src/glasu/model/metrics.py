"""How well predictions fit: accuracy, F1 and loss from class probabilities, for one label or several per node."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from glasu.data.party import labelled

NAMES = {
    "multiclass": ("accuracy", "macro_f1", "loss"),
    "multilabel": ("accuracy", "macro_f1", "micro_f1", "loss"),
}
SELECTED_BY = {"multiclass": "accuracy", "multilabel": "micro_f1"}


def find_probability_error(values: NDArray[Any], task: str) -> str:
    """Return why `values` cannot be class probabilities, or an empty string.

    Every value must lie in [0, 1]. The rows of a multi-class task must also sum to 1. Both bounds allow for rounding
    in the precision of `values`; the error of a sum grows with the number of classes.

    Args:
        values: float array of shape (n, C).
        task: "multiclass" or "multilabel".
    """
    if not values.size:
        return ""
    tolerance = 4 * float(np.finfo(values.dtype).eps) * (8 + values.shape[1])
    lowest, highest = float(values.min()), float(values.max())
    if not (lowest >= 0 and highest <= 1 + tolerance):  # NaN fails both comparisons
        return f"expected values in 0..1, got {highest if lowest >= 0 else lowest:.6g}"
    if task == "multiclass":
        sums = values.sum(axis=1, dtype=np.float64)
        worst = float(sums[np.abs(sums - 1).argmax()])
        if abs(worst - 1) > tolerance:
            return f"expected rows that sum to 1, got a row that sums to {worst:.6g}"
    return ""


def evaluate(probabilities: NDArray[Any], labels: NDArray[np.int64], task: str) -> dict[str, float]:
    """Score class probabilities against labels; nodes with an unknown label (-1) do not count.

    Args:
        probabilities: shape (n, C).
        labels: shape (n,), or (n, C) of 0 and 1 for a multi-label task.
        task: "multiclass" or "multilabel"; the accuracy of the latter is the share of right yes-or-no decisions.
    """
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
