"""Tasks: the loss, the metrics and the form of labels and predictions.

This module imports without torch. The server reads the metric names, the selecting score and the check of scores.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from glasu import registry
from glasu.data.party import PartyData, have_labels
from glasu.model import kernels

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from glasu.config import TrainConfig

ScoreRows = NDArray[Any]  # shape (n, C): one row per node, one column per output of the head
Labels = NDArray[np.int64]


@dataclass(frozen=True)
class Metric:
    """A number that measures predictions against labels."""

    name: str  # in report.json
    title: str  # in tables and lines for people
    is_share: bool = True  # in 0..1, and shown as a percentage

    def format(self, value: float) -> str:
        """Format a value; NaN, which means no data, as a dash."""
        if math.isnan(value):
            return "-"
        return f"{100 * value:.1f} %" if self.is_share else f"{value:.4g}"


ACCURACY, MACRO_F1, MICRO_F1 = (
    Metric("accuracy", "accuracy"),
    Metric("macro_f1", "macro F1"),
    Metric("micro_f1", "micro F1"),
)
LOSS = Metric("loss", "loss", is_share=False)


class Task(ABC):
    """A learning task. Subclass it and register the class to add a task."""

    metrics: ClassVar[tuple[Metric, ...]]  # in the order of the message; reports list the first for every client
    selected_by: ClassVar[Metric]  # its greatest value on the validation nodes selects the model
    label_form: ClassVar[str]  # for errors: "party 'a' has <label_form> per node"

    # Labels and examples.

    @abstractmethod
    def accepts(self, labels: Labels) -> bool:
        """Return whether an array of labels has the form of this task."""

    @abstractmethod
    def unknown_labels(self, num_nodes: int, classes: Sequence[str]) -> Labels:
        """Return labels that are all unknown (-1). A prediction uses them in place of labels."""

    def training_examples(self, labels: Labels, split: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the examples of the training split that the task can learn from: those with a known label.

        Splits hold examples. An example is a position in the labels.
        """
        examples: NDArray[np.int64] = split[have_labels(labels[split])]
        return examples

    def nodes_of(self, party: PartyData, examples: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the nodes whose H[L] the head reads for these examples. Here every example is a node.

        `NodeData.labels` reads the labels of a batch at its nodes, so a task with other examples also changes that.
        """
        return examples

    def head_width(self, classes: Sequence[str]) -> int:
        """Return the number of outputs of the classifier."""
        return len(classes)

    def label_tensor(self, labels: Labels, dtype: torch.dtype) -> Tensor:
        """Return labels as `loss_and_gradient` needs them; `dtype` is the precision of the model."""
        import torch

        return torch.from_numpy(labels)

    # Loss and scores.

    @abstractmethod
    def loss_and_gradient(self, logits: Tensor, labels: Tensor) -> tuple[float, Tensor]:
        """Return the mean loss of a batch and its gradient at the logits."""

    @abstractmethod
    def scores(self, logits: Tensor) -> Tensor:
        """Return the class probabilities that a client releases in place of its logits."""

    @abstractmethod
    def find_score_error(self, scores: ScoreRows) -> str:
        """Return the reason why `scores` are invalid for this task, or an empty string.

        Bounds allow for rounding in the precision of `scores`. One party that sends 1e30 would otherwise decide every
        mean, and with it every prediction and the selected model.
        """

    def evaluate(self, scores: ScoreRows, labels: Labels) -> dict[str, float]:
        """Return the metrics, in the order of `metrics`; nodes with an unknown label (-1) do not count."""
        known = have_labels(labels)
        if not known.any():
            return {metric.name: math.nan for metric in self.metrics}
        return self.measure(scores[known].astype(np.float64), labels[known])

    @abstractmethod
    def measure(self, scores: ScoreRows, labels: Labels) -> dict[str, float]:
        """Return the metrics of one or more nodes with known labels."""

    # Predictions.

    @abstractmethod
    def predict(self, scores: ScoreRows, classes: Sequence[str]) -> NDArray[Any]:
        """Return the predictions for Python, one row per node."""

    @abstractmethod
    def describe(self, scores: ScoreRows, classes: Sequence[str]) -> list[str]:
        """Return the predictions for a table, one text per node."""

    def columns(self, scores: ScoreRows, classes: Sequence[str]) -> dict[str, Any]:
        """Return the columns of a table of predictions, without the ids."""
        predicted: dict[str, Any] = {"prediction": self.describe(scores, classes)}
        return predicted | {f"p_{name}": scores[:, index] for index, name in enumerate(classes)}


class Multiclass(Task):
    """Every node has one class: softmax and cross-entropy."""

    metrics = (ACCURACY, MACRO_F1, LOSS)
    selected_by = ACCURACY
    label_form = "one label"

    def accepts(self, labels: Labels) -> bool:
        return labels.ndim == 1

    def loss_and_gradient(self, logits: Tensor, labels: Tensor) -> tuple[float, Tensor]:
        import torch

        gradient = torch.empty_like(logits)
        return float(kernels.cross_entropy(logits.numpy(), labels.numpy(), gradient.numpy())), gradient

    def scores(self, logits: Tensor) -> Tensor:
        return logits.softmax(dim=1)

    def find_score_error(self, scores: ScoreRows) -> str:
        if error := _find_range_error(scores):
            return error
        sums = scores.sum(axis=1, dtype=np.float64)
        worst = float(sums[np.abs(sums - 1).argmax()]) if len(sums) else 1.0
        if abs(worst - 1) > _tolerance(scores):
            return f"expected rows that sum to 1, got a row that sums to {worst:.6g}"
        return ""

    def measure(self, scores: ScoreRows, labels: Labels) -> dict[str, float]:
        classes = np.arange(scores.shape[1])
        truth, predicted = labels[:, None] == classes, scores.argmax(axis=1)[:, None] == classes
        accuracy = float((truth & predicted).any(axis=1).mean())
        likelihood = scores[np.arange(len(labels)), labels]
        return {"accuracy": accuracy, "macro_f1": _macro_f1(truth, predicted), "loss": _mean_loss(likelihood)}

    def unknown_labels(self, num_nodes: int, classes: Sequence[str]) -> Labels:
        return np.full(num_nodes, -1, np.int64)

    def predict(self, scores: ScoreRows, classes: Sequence[str]) -> NDArray[Any]:
        """Return class names, shape (n,)."""
        names: NDArray[Any] = np.asarray(classes)[scores.argmax(axis=1)]
        return names

    def describe(self, scores: ScoreRows, classes: Sequence[str]) -> list[str]:
        return [classes[index] for index in scores.argmax(axis=1)]


class Multilabel(Task):
    """Every node has any number of classes: a sigmoid and a binary cross-entropy per class.

    The accuracy is the share of correct yes-or-no decisions.
    """

    metrics = (ACCURACY, MACRO_F1, MICRO_F1, LOSS)
    selected_by = MICRO_F1
    label_form = "one column of 0 and 1 per class"

    def accepts(self, labels: Labels) -> bool:
        return labels.ndim == 2

    def label_tensor(self, labels: Labels, dtype: torch.dtype) -> Tensor:
        return super().label_tensor(labels, dtype).to(dtype)

    def loss_and_gradient(self, logits: Tensor, labels: Tensor) -> tuple[float, Tensor]:
        from torch.nn.functional import binary_cross_entropy_with_logits

        loss = binary_cross_entropy_with_logits(logits, labels)
        return loss.item(), logits.sigmoid().sub_(labels).div_(logits.numel())

    def scores(self, logits: Tensor) -> Tensor:
        return logits.sigmoid()

    def find_score_error(self, scores: ScoreRows) -> str:
        return _find_range_error(scores)

    def measure(self, scores: ScoreRows, labels: Labels) -> dict[str, float]:
        truth, predicted = labels == 1, scores > 0.5
        hits, either = (truth & predicted).sum(), truth.sum(axis=0) + predicted.sum(axis=0)
        return {
            "accuracy": float((truth == predicted).mean()),
            "macro_f1": _macro_f1(truth, predicted),
            "micro_f1": float(2 * hits / max(1, either.sum())),
            "loss": _mean_loss(np.where(truth, scores, 1 - scores)),
        }

    def unknown_labels(self, num_nodes: int, classes: Sequence[str]) -> Labels:
        return np.full((num_nodes, len(classes)), -1, np.int64)

    def predict(self, scores: ScoreRows, classes: Sequence[str]) -> NDArray[Any]:
        """Return 0 or 1 for each class, shape (n, C)."""
        return (scores > 0.5).astype(np.int64)

    def describe(self, scores: ScoreRows, classes: Sequence[str]) -> list[str]:
        decided = self.predict(scores, classes)
        return [" ".join(name for name, yes in zip(classes, row, strict=True) if yes) for row in decided]


TASKS: dict[str, type[Task]] = {"multiclass": Multiclass, "multilabel": Multilabel}


def task_of(train: TrainConfig) -> Task:
    """Return the task that the config names."""
    found: Task = registry.load("task", train.task)()
    return found


def _macro_f1(truth: NDArray[np.bool_], predicted: NDArray[np.bool_]) -> float:
    """Return the mean F1 of the classes that occur in the labels or in the predictions."""
    hits, either = (truth & predicted).sum(axis=0), truth.sum(axis=0) + predicted.sum(axis=0)
    present = either > 0
    return float((2 * hits[present] / either[present]).sum() / max(1, present.sum()))


def _mean_loss(likelihood: NDArray[np.float64]) -> float:
    """Return the mean negative log-likelihood; a likelihood of 0 counts as the smallest positive float."""
    return float(-np.log(np.maximum(likelihood, np.finfo(np.float64).tiny)).mean())


def _tolerance(scores: ScoreRows) -> float:
    """Return the rounding error that a score or a sum of scores may have; a sum's grows with the number of classes."""
    return 4.0 * float(np.finfo(scores.dtype).eps) * (8 + int(scores.shape[1]))


def _find_range_error(scores: ScoreRows) -> str:
    if not scores.size:
        return ""
    lowest, highest = float(scores.min()), float(scores.max())
    if not (lowest >= 0 and highest <= 1 + _tolerance(scores)):  # NaN fails both comparisons
        return f"expected values in 0..1, got {highest if lowest >= 0 else lowest:.6g}"
    return ""
