"""GLASUClassifier and GLASURegressor: training and prediction with scikit-learn's conventions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.utils.validation import check_is_fitted

from glasu.config import ModelConfig, RunConfig, TrainConfig
from glasu.data.party import PartyData
from glasu.model.blocks import NodeSet
from glasu.model.task import make_task
from glasu.report import RunReport
from glasu.runtime.simulation import check_config, simulate
from glasu.runtime.trained_model import TrainedModel


class _Estimator(BaseEstimator):  # type: ignore[misc]
    """One model over several parties. `fit` and `predict` take the list of parties instead of X.

    Labels and splits belong to the parties: `fit` trains on the training nodes and selects the weights with the best
    score on the validation nodes. A parameter that is None takes its value from `config`, or else from the defaults of
    `RunConfig`. After `fit`, `report_` is the `RunReport` and `model_` the `TrainedModel`.
    """

    model_: TrainedModel
    report_: RunReport

    def __init__(
        self,
        backbone: str | None = None,
        num_layers: int | None = None,
        hidden: int | None = None,
        aggregation: str | None = None,
        aggregation_layers: tuple[int, ...] | None = None,
        dropout: float | None = None,
        num_rounds: int | None = None,
        num_local_steps: int | None = None,
        learning_rate: float | None = None,
        seed: int | None = None,
        config: RunConfig | None = None,
    ) -> None:
        self.backbone = backbone
        self.num_layers = num_layers
        self.hidden = hidden
        self.aggregation = aggregation
        self.aggregation_layers = aggregation_layers
        self.dropout = dropout
        self.num_rounds = num_rounds
        self.num_local_steps = num_local_steps
        self.learning_rate = learning_rate
        self.seed = seed
        self.config = config

    def make_config(self) -> RunConfig:
        """Return the settings with which `fit` trains: `config` with the values of all parameters that are set."""
        own = {key: value for key, value in self.get_params(deep=False).items() if value is not None}
        model = {key: own[key] for key in own if key in ModelConfig.__dataclass_fields__}
        train = {key: own[key] for key in own if key in TrainConfig.__dataclass_fields__}
        return check_config(RunConfig() if self.config is None else self.config).replace(model=model, train=train)

    def fit(self, parties: Sequence[PartyData], y: None = None) -> Self:
        """Train on the parties' labels; `y` exists only for scikit-learn and is ignored."""
        simulation = simulate(parties, self.make_config())
        self.report_, self.model_ = simulation.report, TrainedModel.of(simulation.clients)
        return self

    def predict(self, parties: Sequence[PartyData], nodes: NodeSet | None = None) -> NDArray[Any]:
        """Return the predictions for the nodes (all by default)."""
        check_is_fitted(self)
        return self.model_.predict(parties, nodes)

    def _score(self, parties: Sequence[PartyData], nodes: NodeSet | None) -> float:
        check_is_fitted(self)
        owner = self.make_config().train.label_owner
        party = next(party for party in parties if party.labels is not None and owner in (None, party.name))
        assert party.labels is not None
        if nodes is None:
            nodes = party.splits.test if party.splits is not None else np.arange(party.num_nodes)
        task = make_task(self.model_.config.train)
        return task.evaluate(self.model_.scores(parties, nodes), party.labels[nodes])[task.scored_by.name]


class GLASUClassifier(ClassifierMixin, _Estimator):  # type: ignore[misc]
    """One classifier over several parties. `fit` and `predict` take the list of parties instead of X.

    Labels and splits belong to the parties: `fit` trains on the training nodes and selects the weights with the best
    score on the validation nodes. A parameter that is None takes its value from `config`, or else from the defaults of
    `RunConfig`. After `fit`, `report_` is the `RunReport`, `model_` the `TrainedModel`, and `classes_` has the
    names of the classes. `predict` returns class names, or 0 and 1 per class for a multi-label task.
    """

    classes_: NDArray[Any]

    def fit(self, parties: Sequence[PartyData], y: None = None) -> Self:
        """Train on the parties' labels; `y` exists only for scikit-learn and is ignored."""
        super().fit(parties)
        self.classes_ = np.asarray(self.model_.classes)
        return self

    def predict_proba(self, parties: Sequence[PartyData], nodes: NodeSet | None = None) -> NDArray[Any]:
        """Return class probabilities of the nodes (all by default), in the order of `classes_`."""
        check_is_fitted(self)
        return self.model_.predict_proba(parties, nodes)

    def score(self, parties: Sequence[PartyData], y: None = None, nodes: NodeSet | None = None) -> float:
        """Return the accuracy (multi-label: micro-F1) on the test nodes of the parties, or on the given nodes."""
        return self._score(parties, nodes)


class GLASURegressor(RegressorMixin, _Estimator):  # type: ignore[misc]
    """One regression model over several parties. The labels are floats.

    See `GLASUClassifier` for the parameters. The task is always `regression`, even if `config` names another task.
    `predict` returns numbers in the unit of the labels.
    """

    def make_config(self) -> RunConfig:
        """Return the settings with which `fit` trains: `config` with the values of all parameters that are set."""
        return super().make_config().replace(train={"task": "regression"})

    def score(self, parties: Sequence[PartyData], y: None = None, nodes: NodeSet | None = None) -> float:
        """Return R^2 on the test nodes of the parties, or on the given nodes."""
        return self._score(parties, nodes)
