"""The settings of the recorded runs: each changes a few keys of BASE and trains in about a second.

None stops early (`train.patience`, `train.stop_at`): the number of rounds, and so the traffic, must not depend on the
CPU.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

BASE: dict[str, Any] = {
    "data.name": "synthetic",
    "data.num_nodes": 120,
    "data.average_degree": 6.0,
    "data.num_features": 12,
    "data.num_classes": 3,
    "data.split": [0.4, 0.3, 0.3],
    "data.features": "none",  # as in older versions, which refuse the key; see CHANGES.md
    "model.hidden": 8,
    # These are the defaults. Written out, they leave a preset nothing to choose, and older versions accept them.
    "model.backbone": "gcnii",
    "model.num_layers": 4,
    "model.aggregation_layers": [1, 3],
    "train.backward": "local",
    "train.weight_decay": 0.001,
    "train.patience": 0,
    "train.num_rounds": 4,
    "train.num_local_steps": 2,
    "train.evaluate_every": 2,
    "train.learning_rate": 0.02,
    "train.seed": 7,
}


@dataclass(frozen=True)
class Setting:
    """One recorded run: its keys, the form of its data, and how it is run."""

    keys: dict[str, Any] = field(default_factory=dict)
    data: Literal["built-in", "split", "multilabel", "weighted"] = "built-in"  # all but the first: party folders
    party: str | None = None  # glasu predict --party
    killed: bool = False  # killed by SIGKILL during a checkpoint, then started again


def _use_sampler(sampler: str = "neighbor", **train: Any) -> dict[str, Any]:
    return {"train.sampler": sampler, "train.batch_size": 16, **{f"train.{key}": value for key, value in train.items()}}


def _gcn(*layers: int, num_layers: int = 2) -> dict[str, Any]:
    return {"model.backbone": "gcn", "model.num_layers": num_layers, "model.aggregation_layers": list(layers)}


SETTINGS: dict[str, Setting] = {
    # samplers
    "default": Setting(),
    "full_batches": Setting({"train.sampler": "full", "train.batch_size": 20}),
    "neighbor_node": Setting(_use_sampler(fanout=2)),
    "neighbor_layer": Setting(_use_sampler(sampling="layer", fanout=2)),
    "neighbor_induced": Setting(_use_sampler(blocks="induced", fanout=2)),
    "neighbor_bounded": Setting(_use_sampler(max_nodes=40, fanout=4)),
    "neighbor_no_prefetch": Setting(_use_sampler(prefetch=0)),
    "neighbor_prefetch_2": Setting(_use_sampler(prefetch=2, num_rounds=6)),
    "shared_node": Setting(_use_sampler("shared", fanout=2)),
    "shared_layer_induced": Setting(_use_sampler("shared", sampling="layer", blocks="induced")),
    "sampled_evaluation": Setting(_use_sampler(sampled_evaluation=True, evaluate_nodes=20)),
    "shared_sampled_evaluation": Setting(_use_sampler("shared", sampled_evaluation=True)),
    "evaluate_some_nodes": Setting({"train.evaluate_nodes": 10, "train.evaluate_every": 1}),
    # backbones
    "gcn": Setting(_gcn(0, 1)),
    "gcn_residual_normalized": Setting(
        _gcn(1, 2, num_layers=3) | {"model.residual": True, "model.normalization": "layer"}
    ),
    "gat": Setting(_gcn(1) | {"model.backbone": "gat", "model.heads": 2}),
    "gat_neighbor": Setting(_gcn(0, 1) | _use_sampler() | {"model.backbone": "gat", "model.heads": 4}),
    "sage": Setting(_gcn(0, 1) | {"model.backbone": "sage", "model.dropout": 0.0}),
    "sage_neighbor_residual": Setting(_gcn(1) | _use_sampler() | {"model.backbone": "sage", "model.residual": True}),
    "gcnii_normalized": Setting({"model.normalization": "layer", "model.alpha": 0.2, "model.theta": 1.0}),
    "gcnii_input_scale": Setting({"model.input_scale": 0.5, "model.dropout": 0.0}),
    # aggregations and their number
    "one_aggregation": Setting({"model.aggregation_layers": [3]}),
    "every_layer": Setting({"model.aggregation_layers": [0, 1, 2, 3]}),
    "concat": Setting({"model.aggregation": "concat"}),
    "concat_neighbor_gcn": Setting(_gcn(0, 1) | _use_sampler() | {"model.aggregation": "concat"}),
    "two_clients": Setting({"data.num_clients": 2}),
    "five_clients": Setting({"data.num_clients": 5, "data.edge_fraction": 0.4, "data.seed": 3}),
    # precisions
    "fp64": Setting({"wire.precision": "fp64"}),
    "bf16": Setting({"wire.precision": "bf16"}),
    "int8": Setting({"wire.precision": "int8"}),
    "int8_concat": Setting(_use_sampler() | {"wire.precision": "int8", "model.aggregation": "concat"}),
    "bf16_joint": Setting({"wire.precision": "bf16", "train.backward": "joint", "train.num_local_steps": 1}),
    "int8_joint_gcn": Setting(
        _gcn(0, 1) | {"wire.precision": "int8", "train.backward": "joint", "train.num_local_steps": 1}
    ),
    # gradients and labels
    "joint": Setting({"train.backward": "joint", "train.num_local_steps": 1}),
    "joint_neighbor_concat": Setting(
        _use_sampler(backward="joint", num_local_steps=1) | {"model.aggregation": "concat", "wire.precision": "fp64"}
    ),
    "labels_at_one_party": Setting({"train.labels": "b"}),
    "labels_at_one_party_joint": Setting(
        {"train.labels": "a", "train.backward": "joint", "train.num_local_steps": 1, "model.aggregation_layers": [0, 3]}
    ),
    "labels_at_one_party_neighbor_int8": Setting(_use_sampler(labels="c") | {"wire.precision": "int8"}),
    # methods
    "centralized": Setting({"train.method": "centralized"}),
    "centralized_neighbor_sage": Setting(_gcn(1) | _use_sampler(method="centralized") | {"model.backbone": "sage"}),
    "standalone": Setting({"train.method": "standalone"}, party="b"),
    "standalone_neighbor": Setting(_use_sampler(method="standalone"), party="c"),
    "simulated": Setting({"train.method": "simulated"}),
    "simulated_gcn": Setting(_gcn(0, 1) | {"train.method": "simulated"}),
    # optimisers and schedules
    "sgd": Setting({"train.optimizer": "sgd", "train.weight_decay": 0.0, "train.schedule": "step"}),
    "momentum_cosine": Setting({"train.optimizer": "sgd", "train.momentum": 0.9, "train.schedule": "cosine"}),
    "adam_cosine_single_step": Setting({"train.schedule": "cosine", "train.num_local_steps": 1}),
    # data
    "demo": Setting(
        {"data.name": "demo", "model.num_layers": 2, "model.aggregation_layers": [1], "train.num_rounds": 3}
    ),
    "chunked": Setting(
        _gcn(0, 1) | {"data.num_nodes": 4200, "model.hidden": 4, "train.num_rounds": 2, "train.sampler": "full"}
    ),
    "chunked_int8_joint": Setting(
        {
            **_gcn(0, 1),
            "data.num_nodes": 4200,
            "model.hidden": 4,
            "train.num_rounds": 2,
            "train.num_local_steps": 1,
            "train.backward": "joint",
            "wire.precision": "int8",
        }
    ),
    "party_folders": Setting(data="split"),
    "multilabel": Setting({"train.task": "multilabel"}, data="multilabel"),
    "multilabel_at_one_party": Setting(
        _use_sampler(task="multilabel", labels="east") | {"wire.precision": "bf16"}, data="multilabel"
    ),
    "edge_weights": Setting(_gcn(0, 1), data="weighted"),
    "edge_weights_neighbor": Setting(_use_sampler(), data="weighted"),
    # prepared features
    "prepared": Setting({"data.features": "auto"}),
    "prepared_killed": Setting(_use_sampler(num_rounds=6) | {"data.features": "auto"}, data="weighted", killed=True),
    # checkpoints
    "killed": Setting({"train.num_rounds": 6, "train.evaluate_every": 1}, killed=True),
    "killed_neighbor": Setting(_use_sampler(num_rounds=6, prefetch=4, labels="b"), killed=True),
    "killed_standalone": Setting(_use_sampler(num_rounds=6, method="standalone"), party="a", killed=True),
}
