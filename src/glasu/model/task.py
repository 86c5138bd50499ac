"""Tasks: the loss, the metrics and the form of labels and predictions.

The server, which has no torch, imports this module. It uses the metric names, `selection_score` and `find_score_error`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from glasu import registry
from glasu.data.party import Labels, PartyData, are_numbers, have_labels, measure_labels
from glasu.errors import ConfigError
from glasu.model import kernels

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from glasu.config import TrainConfig
    from glasu.data.tables import Columns

ScoreRows = NDArray[Any]  # shape (n, `Task.num_scores`): one row per node
# Bound on the absolute value of a standardised prediction that a client releases. If there are at most 10,000 labels,
# no standardised label exceeds it.
MAX_DEVIATIONS = 100.0
MIN_JUDGED = 20  # on fewer nodes, even a good model may be no better than the most frequent class


@dataclass(frozen=True)
class Metric:
    """A number that measures predictions against labels."""

    name: str  # the name in report.json
    title: str  # the name in tables and log lines
    is_share: bool = True  # whether it lies in 0..1 and is shown as a percentage
    can_be_undefined: bool = False  # whether it can be NaN although labels are known

    def standard_error(self, value: float, count: int) -> float:
        """Return a standard error of the metric on `count` nodes.

        For a share of nodes, it is the standard error of a binomial proportion after adding one success and one
        failure. For other metrics, such as ROC AUC and R2, it is the largest standard error of a share,
        0.5 / sqrt(count), so that a small difference between two models is not significant.
        """
        if not self.is_share or math.isnan(value):
            return 0.5 / math.sqrt(max(count, 1))
        share = (count * value + 1) / (count + 2)
        return math.sqrt(share * (1 - share) / max(count, 1))

    def format(self, value: float) -> str:
        """Format a value. NaN means no data and becomes a dash."""
        if math.isnan(value):
            return "-"
        return f"{100 * value:.1f} %" if self.is_share else f"{value:.4g}"

    def format_difference(self, value: float, other: float) -> str:
        """Format `value - other`. The rounded values are subtracted, so that the three displayed numbers agree."""
        if math.isnan(value) or math.isnan(other):
            return "-"
        shown, less = (float(self.format(each).removesuffix(" %")) for each in (value, other))
        return f"{shown - less:+.1f} points" if self.is_share else f"{shown - less:+.4g}"


ACCURACY, MACRO_F1, MICRO_F1 = (
    Metric("accuracy", "accuracy"),
    Metric("macro_f1", "macro F1"),
    Metric("micro_f1", "micro F1"),
)
LOSS = Metric("loss", "loss", is_share=False)
ROC_AUC = Metric("roc_auc", "ROC AUC", is_share=False, can_be_undefined=True)  # undefined without nodes of both classes
AVERAGE_PRECISION = Metric("average_precision", "average precision", is_share=False)
MSE = Metric("mse", "MSE", is_share=False)
R2 = Metric("r2", "R2", is_share=False, can_be_undefined=True)  # undefined with fewer than two nodes


@dataclass(frozen=True, eq=False)
class Targets:
    """Examples to learn from or to predict, and the nodes whose rows of H[L] the head reads for these examples."""

    nodes: NDArray[np.int64]  # S[L]
    examples: NDArray[np.int64]  # positions in the labels; they have no meaning at a client without labels
    rows: NDArray[np.int64] | None = None  # (n,) or (n, k): the rows of each example; None: example i has row i

    @classmethod
    def of_nodes(cls, nodes: NDArray[np.int64]) -> Targets:
        """Return targets whose examples are the nodes themselves."""
        return cls(nodes, nodes)

    def read_rows(self, outputs: Tensor) -> Tensor:
        """Return the head's outputs for each example, given its outputs at the nodes."""
        return outputs if self.rows is None else outputs[self.rows]

    def add_rows(self, gradient: Tensor) -> Tensor:
        """Return the gradient at the outputs for the nodes, given the gradient at the outputs for the examples."""
        import torch

        if self.rows is None:
            return gradient
        total = gradient.new_zeros(len(self.nodes), gradient.shape[-1])
        return total.index_add_(0, torch.from_numpy(self.rows.ravel()), gradient.reshape(-1, gradient.shape[-1]))


class Task(ABC):
    """A learning task. To add a task, register a subclass."""

    metrics: ClassVar[tuple[Metric, ...]]  # in their order in messages; reports list the first one for every client
    selected_by: ClassVar[Metric]  # the model with the largest validation value of this metric is selected
    falls_back_to: ClassVar[Metric] = LOSS  # if `selected_by` is undefined, the lowest value of this metric decides
    scored_by: ClassVar[Metric] = ACCURACY  # the metric that `score` of an estimator returns, as in scikit-learn
    label_form: ClassVar[str]  # for errors: "party 'a' must have <label_form>"
    label_remedy: ClassVar[str] = ""  # for errors: another way to get labels of this form
    scores_name: ClassVar[str] = "class probabilities"  # for errors
    has_classes: ClassVar[bool] = True  # whether labels come from a finite set
    examples_are_nodes: ClassVar[bool] = True  # whether example i is node i; if not, override `find_targets`
    takes_class_weights: ClassVar[bool] = False  # whether `train.class_weights` has an effect
    scale: Tensor | None = None  # mean and deviation of numeric labels; a client saves it with its weights

    # Labels and examples.

    @abstractmethod
    def accepts(self, labels: Labels, classes: Sequence[str]) -> bool:
        """Return whether labels have the form that this task requires."""

    def fit(self, labels: Labels, classes: Sequence[str], train: TrainConfig) -> None:
        """Compute constants of the loss from the known training labels. A client with labels calls this once."""
        return  # by default the loss needs nothing

    @abstractmethod
    def unknown_labels(self, num_nodes: int, classes: Sequence[str]) -> Labels:
        """Return labels that are all unknown (-1 or NaN), for predictions without labels."""

    def training_examples(self, labels: Labels, split: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the examples of the training split that have a known label.

        A split is an array of examples. An example is a position in the labels.
        """
        examples: NDArray[np.int64] = split[have_labels(labels[split])]
        return examples

    def find_targets(self, party: PartyData, examples: NDArray[np.int64]) -> Targets:
        """Return these examples with the nodes whose rows of H[L] the head reads. By default every example is a node.

        An override must return sorted, distinct nodes. A client without labels calls it with an empty array.
        """
        return Targets.of_nodes(examples)

    def head_width(self, classes: Sequence[str]) -> int:
        """Return the number of outputs of the classifier."""
        return len(classes)

    def num_scores(self, num_classes: int) -> int:
        """Return the number of scores of a node in a message."""
        return num_classes

    def label_tensor(self, labels: Labels, dtype: torch.dtype) -> Tensor:
        """Return labels as `loss_and_gradient` needs them; `dtype` is the precision of the model."""
        import torch

        return torch.from_numpy(labels)

    def label_scores(self, labels: Labels, classes: Sequence[str]) -> ScoreRows:
        """Return the scores of a prediction that gives each label with certainty, one row per label."""
        return labels.reshape(len(labels), -1).astype(np.float64)

    # Loss and scores.

    @abstractmethod
    def loss_and_gradient(self, logits: Tensor, labels: Tensor) -> tuple[float, Tensor]:
        """Return the mean loss of a batch and its gradient at `logits`, which are the result of `Targets.read_rows`."""

    @abstractmethod
    def scores(self, logits: Tensor) -> Tensor:
        """Return the scores that a client releases instead of its logits, for example class probabilities."""

    def convert_scores(self, scores: ScoreRows) -> ScoreRows:
        """Convert scores to the unit of the labels. Metrics and predictions use the result."""
        return scores

    @abstractmethod
    def find_score_error(self, scores: ScoreRows) -> str:
        """Return the reason why `scores` are invalid for this task, or an empty string.

        The bounds allow for rounding errors in the precision of `scores`. Without this check, a party that sends 1e30
        would determine every mean, and so every prediction and the selected model.
        """

    def repair_scores(self, scores: ScoreRows) -> ScoreRows:
        """Return the valid scores that are nearest to noisy scores. `find_score_error` accepts the result."""
        return np.clip(scores, 0.0, 1.0)

    def evaluate(self, scores: ScoreRows, labels: Labels) -> dict[str, float]:
        """Return the metrics in the order of `self.metrics`. Nodes with an unknown label are ignored."""
        known = have_labels(labels)
        if not known.any():
            return {metric.name: math.nan for metric in self.metrics}
        return self.measure(scores[known].astype(np.float64), labels[known])

    @abstractmethod
    def measure(self, scores: ScoreRows, labels: Labels) -> dict[str, float]:
        """Return the metrics over one or more nodes, all with known labels."""

    def selection_score(self, metrics: Mapping[str, float]) -> float:
        """Return the number whose largest value selects the model; NaN if no validation node has a known label."""
        score = metrics[self.selected_by.name]
        return -metrics.get(self.falls_back_to.name, math.nan) if math.isnan(score) else score

    def is_collapsed(self, metrics: Mapping[str, float], labels: Labels, classes: Sequence[str]) -> bool:
        """Return whether a model has learned nothing: it is no better than one constant prediction for all nodes.

        The constant prediction is the mean of the labels. If nodes have one class each, it predicts the most frequent
        class. A model is better if its metric is larger by more than one standard error.

        Args:
            metrics: the metrics of the model on nodes with these labels.
            labels: the labels. Unknown labels are ignored.
            classes: the names of the classes.
        """
        labels = labels[have_labels(labels)]
        if len(labels) < MIN_JUDGED or (labels == labels[0]).all():
            return False
        mean = self.convert_scores(self.label_scores(labels, classes)).mean(axis=0)
        constant = self.measure(np.tile(mean, (len(labels), 1)), labels)[self.selected_by.name]
        error = self.selected_by.standard_error(constant, len(labels))
        return metrics[self.selected_by.name] <= constant + error

    # Predictions.

    @abstractmethod
    def predict(self, scores: ScoreRows, classes: Sequence[str]) -> NDArray[Any]:
        """Return the predictions that the Python API shows, one row per node."""

    def columns(self, scores: ScoreRows, classes: Sequence[str]) -> Columns:
        """Return the columns of a table of predictions, without the ids: one value per row of `scores`.

        If the task has classes, the values of the column "prediction" are text that names classes.
        """
        predicted: Columns = {"prediction": self.predict(scores, classes).tolist()}
        return predicted | {f"p_{name}": scores[:, index] for index, name in enumerate(classes)}


def check_predictions(task: Task, labels: Labels, classes: Sequence[str]) -> None:
    """Predict these known labels of a new task. So an error in its predictions is found before training.

    Raises:
        ConfigError: a prediction, or the result of `unknown_labels`, has the wrong form.
    """
    unknown = task.unknown_labels(len(labels), classes)
    columns = task.columns(task.convert_scores(task.label_scores(labels, classes)), classes)
    faults = []
    if not isinstance(unknown, np.ndarray) or unknown.shape != labels.shape or have_labels(unknown).any():
        faults.append("unknown_labels must return -1 or NaN for every node, in the form of the labels")
    if any(len(column) != len(labels) for column in columns.values()):
        faults.append("every column of columns must have one value per row of scores")
    if task.has_classes and not all(isinstance(value, str) for value in columns.get("prediction", [None])):
        faults.append("predict must return names of classes, or columns must convert its result to text")
    if faults:
        raise ConfigError(f"The task {type(task).__qualname__}: {'; '.join(faults)}. Correct the extension.")


class Multiclass(Task):
    """Every node has one class. The loss is the cross-entropy of a softmax."""

    metrics: ClassVar[tuple[Metric, ...]] = (ACCURACY, MACRO_F1, LOSS)
    selected_by = ACCURACY
    label_form = "one class per node"
    takes_class_weights = True
    weights: Tensor | None = None  # one weight per class; their mean over the training labels is 1

    def accepts(self, labels: Labels, classes: Sequence[str]) -> bool:
        return labels.ndim == 1 and labels.dtype.kind in "iu"

    def fit(self, labels: Labels, classes: Sequence[str], train: TrainConfig) -> None:
        import torch

        if train.class_weights != "none":
            self.weights = torch.from_numpy(_weigh_classes(train.class_weights, labels, len(classes)))

    def label_scores(self, labels: Labels, classes: Sequence[str]) -> ScoreRows:
        return np.eye(len(classes))[labels]

    def loss_and_gradient(self, logits: Tensor, labels: Tensor) -> tuple[float, Tensor]:
        """Return the mean of w[y] times the cross-entropy, and its gradient; w is 1 without `train.class_weights`."""
        import torch

        gradient = torch.empty_like(logits)
        loss = float(kernels.cross_entropy(logits.numpy(), labels.numpy(), gradient.numpy()))
        if self.weights is None:
            return loss, gradient
        own = self.weights[labels].to(logits.dtype)
        losses = torch.nn.functional.cross_entropy(logits, labels, reduction="none")
        return float((own * losses).mean()), gradient * own[:, None]

    def scores(self, logits: Tensor) -> Tensor:
        return logits.softmax(dim=1)

    def find_score_error(self, scores: ScoreRows) -> str:
        if error := _find_range_error(scores):
            return error
        sums = scores.sum(axis=1, dtype=np.float64)
        worst = float(sums[np.abs(sums - 1).argmax()]) if len(sums) else 1.0
        if abs(worst - 1) > _find_tolerance(scores):
            return f"expected rows that sum to 1, got a row that sums to {worst:.6g}"
        return ""

    def repair_scores(self, scores: ScoreRows) -> ScoreRows:
        """Project rows onto the simplex: subtract a constant from each row and set negative values to 0.

        The constant is chosen so that the row then sums to 1.
        """
        falling = -np.sort(-scores, axis=1)
        excess = (np.cumsum(falling, axis=1) - 1) / np.arange(1, scores.shape[1] + 1)
        last = np.count_nonzero(falling > excess, axis=1) - 1
        nearest: ScoreRows = np.maximum(scores - excess[np.arange(len(scores)), last][:, None], 0)
        valid: ScoreRows = nearest / np.maximum(nearest.sum(axis=1, keepdims=True), np.finfo(np.float64).tiny)
        return valid

    def measure(self, scores: ScoreRows, labels: Labels) -> dict[str, float]:
        classes = np.arange(scores.shape[1])
        truth, predicted = labels[:, None] == classes, scores.argmax(axis=1)[:, None] == classes
        accuracy = float((truth & predicted).any(axis=1).mean())
        likelihood = scores[np.arange(len(labels)), labels]
        return {
            "accuracy": accuracy,
            "macro_f1": _measure_macro_f1(truth, predicted),
            "loss": _measure_mean_loss(likelihood),
        }

    def unknown_labels(self, num_nodes: int, classes: Sequence[str]) -> Labels:
        return np.full(num_nodes, -1, np.int64)

    def predict(self, scores: ScoreRows, classes: Sequence[str]) -> NDArray[Any]:
        """Return class names, shape (n,)."""
        names: NDArray[Any] = np.asarray(classes)[scores.argmax(axis=1)]
        return names


class Binary(Multiclass):
    """Every node has one of two classes. The model has one logit, and the loss is the binary cross-entropy.

    The logit belongs to the second class, which is the positive class. It is equivalent to two logits, the first of
    which is always 0. So losses, scores and checks are inherited from `Multiclass`.
    """

    metrics = (ROC_AUC, AVERAGE_PRECISION, ACCURACY, MACRO_F1, LOSS)
    selected_by = ROC_AUC
    label_form = "one of two classes per node"

    def accepts(self, labels: Labels, classes: Sequence[str]) -> bool:
        return super().accepts(labels, classes) and len(classes) == 2

    def head_width(self, classes: Sequence[str]) -> int:
        return 1

    def loss_and_gradient(self, logits: Tensor, labels: Tensor) -> tuple[float, Tensor]:
        loss, gradient = super().loss_and_gradient(_add_zero_logit(logits), labels)
        return loss, gradient[:, 1:].contiguous()

    def scores(self, logits: Tensor) -> Tensor:
        return super().scores(_add_zero_logit(logits))

    def measure(self, scores: ScoreRows, labels: Labels) -> dict[str, float]:
        ranked = measure_ranking(scores[:, 1], labels == 1)
        return {**ranked, **super().measure(scores, labels)}


class Multilabel(Task):
    """Every node has any number of classes. The loss is the mean binary cross-entropy of the classes.

    The accuracy is the share of correct yes-or-no decisions.
    """

    metrics = (ACCURACY, MACRO_F1, MICRO_F1, LOSS)
    selected_by = scored_by = MICRO_F1
    label_form = "one column of 0 and 1 per class"

    def accepts(self, labels: Labels, classes: Sequence[str]) -> bool:
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
            "macro_f1": _measure_macro_f1(truth, predicted),
            "micro_f1": float(2 * hits / max(1, either.sum())),
            "loss": _measure_mean_loss(np.where(truth, scores, 1 - scores)),
        }

    def unknown_labels(self, num_nodes: int, classes: Sequence[str]) -> Labels:
        return np.full((num_nodes, len(classes)), -1, np.int64)

    def predict(self, scores: ScoreRows, classes: Sequence[str]) -> NDArray[Any]:
        """Return 0 or 1 for each class, shape (n, C)."""
        return (scores > 0.5).astype(np.int64)

    def columns(self, scores: ScoreRows, classes: Sequence[str]) -> Columns:
        columns, decided = super().columns(scores, classes), self.predict(scores, classes)
        columns["prediction"] = [" ".join(compress(classes, row)) for row in decided]
        return columns


class Regression(Task):
    """Every node has a number. The loss is the squared error of standardised labels, z = (y - mean) / deviation.

    Mean and deviation are computed from the training labels, so the loss does not depend on the unit of the labels. A
    client releases standardised predictions. The server can check their range without knowing the labels.
    """

    metrics = (R2, MSE)
    selected_by = scored_by = R2
    falls_back_to = MSE
    label_form = "one number per node"
    label_remedy = 'or, for numbers, write label_type = "number" in party.toml or pass an array of floats'
    scores_name = "predictions"
    has_classes = False

    def accepts(self, labels: Labels, classes: Sequence[str]) -> bool:
        return labels.ndim == 1 and are_numbers(labels)

    def fit(self, labels: Labels, classes: Sequence[str], train: TrainConfig) -> None:
        import torch

        # In a prediction there are no labels; the scale is restored with the weights.
        self.scale = torch.tensor(measure_labels(labels) if len(labels) else (0.0, 1.0), dtype=torch.float64)

    def head_width(self, classes: Sequence[str]) -> int:
        return 1

    def num_scores(self, num_classes: int) -> int:
        return 1

    def label_scores(self, labels: Labels, classes: Sequence[str]) -> ScoreRows:
        assert self.scale is not None
        mean, deviation = self.scale.tolist()
        return super().label_scores(((labels - mean) / deviation).clip(-MAX_DEVIATIONS, MAX_DEVIATIONS), classes)

    def label_tensor(self, labels: Labels, dtype: torch.dtype) -> Tensor:
        assert self.scale is not None
        mean, deviation = self.scale
        standardized: Tensor = (super().label_tensor(labels, dtype) - mean) / deviation
        return standardized.to(dtype)

    def loss_and_gradient(self, logits: Tensor, labels: Tensor) -> tuple[float, Tensor]:
        error = logits - labels[:, None]
        return float(error.square().mean()), error * (2 / len(error))

    def scores(self, logits: Tensor) -> Tensor:
        """Return standardised predictions, clamped to -100..100. NaN and infinity are kept as signs of divergence."""
        return logits.clamp(-MAX_DEVIATIONS, MAX_DEVIATIONS).where(logits.isfinite(), logits)

    def convert_scores(self, scores: ScoreRows) -> ScoreRows:
        assert self.scale is not None
        mean, deviation = self.scale.tolist()
        converted: ScoreRows = scores.astype(np.float64) * deviation + mean
        return converted

    def find_score_error(self, scores: ScoreRows) -> str:
        return _find_range_error(scores, -MAX_DEVIATIONS, MAX_DEVIATIONS)

    def repair_scores(self, scores: ScoreRows) -> ScoreRows:
        return np.clip(scores, -MAX_DEVIATIONS, MAX_DEVIATIONS)

    def measure(self, scores: ScoreRows, labels: Labels) -> dict[str, float]:
        error, spread = np.square(labels - scores[:, 0]), np.square(labels - labels.mean())
        if len(labels) < 2:
            r2 = math.nan
        elif spread.any():
            r2 = float(1 - error.sum() / spread.sum())
        else:  # all labels are equal; scikit-learn returns the same values
            r2 = 0.0 if error.any() else 1.0
        return {"r2": r2, "mse": float(error.mean())}

    def unknown_labels(self, num_nodes: int, classes: Sequence[str]) -> Labels:
        return np.full(num_nodes, math.nan)

    def predict(self, scores: ScoreRows, classes: Sequence[str]) -> NDArray[Any]:
        """Return numbers in the unit of the labels, shape (n,)."""
        numbers: NDArray[Any] = scores[:, 0]
        return numbers

    def columns(self, scores: ScoreRows, classes: Sequence[str]) -> Columns:
        return {"prediction": self.predict(scores, classes)}


TASKS: dict[str, type[Task]] = {
    "multiclass": Multiclass,
    "multilabel": Multilabel,
    "binary": Binary,
    "regression": Regression,
}


def make_task(train: TrainConfig) -> Task:
    """Return the task that the config names."""
    found: Task = registry.load("task", train.task)()
    return found


def measure_ranking(scores: NDArray[np.float64], positive: NDArray[np.bool_]) -> dict[str, float]:
    """Return the area under the ROC curve and the average precision. Nodes with equal scores share a threshold.

    If all nodes are positive or all are negative, the area is undefined (NaN). If none is positive, the precision is 0.
    """
    _, place = np.unique(-scores, return_inverse=True)  # thresholds, from the largest score down
    hits = np.bincount(place, positive).astype(np.int64)
    misses = np.bincount(place, ~positive).astype(np.int64)
    num_hits, num_misses = int(hits.sum()), int(misses.sum())
    pairs = int((hits * (2 * (num_misses - np.cumsum(misses)) + misses)).sum())  # a pair with equal scores counts half
    precision = np.cumsum(hits) / np.cumsum(hits + misses)
    return {
        "roc_auc": pairs / (2 * num_hits * num_misses) if num_hits and num_misses else math.nan,
        "average_precision": float((hits * precision).sum() / max(1, num_hits)),
    }


def _weigh_classes(
    weights: Literal["none", "balanced"] | Sequence[float], labels: Labels, num_classes: int
) -> NDArray[np.float64]:
    """Return the weights of the classes, scaled so that their mean over the labels is 1.

    "balanced" gives a class the weight n / (number of classes that occur * number of labels in this class). This is
    scikit-learn's definition.
    """
    counts = np.bincount(labels, minlength=num_classes)
    if isinstance(weights, str):
        given = np.divide(1.0, counts, out=np.zeros(num_classes), where=counts > 0)
    else:
        given = np.asarray(weights, np.float64)
    if len(given) != num_classes:
        raise ConfigError(
            f"train.class_weights={list(weights)}: there are {num_classes} classes; give one weight per class, in the "
            "order of the classes."
        )
    scaled: NDArray[np.float64] = given * (counts.sum() / max((given * counts).sum(), np.finfo(np.float64).tiny))
    return scaled


def _add_zero_logit(logits: Tensor) -> Tensor:
    """Return the logits of both classes, given the logits of the second class."""
    import torch

    return torch.cat([torch.zeros_like(logits), logits], dim=1)


def _measure_macro_f1(truth: NDArray[np.bool_], predicted: NDArray[np.bool_]) -> float:
    """Return the mean F1 of the classes that occur in the labels or in the predictions."""
    hits, either = (truth & predicted).sum(axis=0), truth.sum(axis=0) + predicted.sum(axis=0)
    present = either > 0
    return float((2 * hits[present] / either[present]).sum() / max(1, present.sum()))


def _measure_mean_loss(likelihood: NDArray[np.float64]) -> float:
    """Return the mean negative log-likelihood; a likelihood of 0 counts as the smallest positive float."""
    return float(-np.log(np.maximum(likelihood, np.finfo(np.float64).tiny)).mean())


def _find_tolerance(scores: ScoreRows) -> float:
    """Return the allowed rounding error of a score or of a sum of scores. It grows with the number of classes."""
    return 4.0 * float(np.finfo(scores.dtype).eps) * (8 + int(scores.shape[1]))


def _find_range_error(scores: ScoreRows, least: float = 0, most: float = 1) -> str:
    if not scores.size:
        return ""
    lowest, highest = float(scores.min()), float(scores.max())
    margin = _find_tolerance(scores) * most
    if not (lowest >= least - (margin if least else 0) and highest <= most + margin):  # NaN fails both comparisons
        return f"expected values in {least:g}..{most:g}, got {highest if lowest >= least else lowest:.6g}"
    return ""
