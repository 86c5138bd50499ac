"""Tiny runs: settings and parties of a training that takes a fraction of a second, and comparisons of two runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np

from glasu.config import DataConfig, ModelConfig, PrivacyConfig, RunConfig, TrainConfig, WireConfig, resolve
from glasu.data.graph import Graph
from glasu.data.methods import override_settings
from glasu.data.party import PartyData, Splits, hide_labels
from glasu.protocol.messages import Message
from glasu.runtime.delivery import Delivery
from glasu.runtime.simulation import Simulation, SimulationOptions
from glasu.runtime.simulation import simulate as simulate_run
from support.deliveries import apply_to_messages

NUM_CLASSES = 3


def tiny_parties(
    num_clients: int = 3,
    num_nodes: int = 24,
    *,
    seed: int = 0,
    owner: str | None = None,
    degree: float = 2.5,
    task: str = "multiclass",
) -> list[PartyData]:
    """Return parties a, b, c, ... with their own widths and their own directed edges; the second one's are weighted.

    The last three nodes have no edge anywhere. With `owner`, only that party has labels and splits. `task` decides the
    form of the labels; of binary and numeric ones, two of the training nodes have none.
    """
    rng = np.random.default_rng(seed)
    columns = [rng.standard_normal((num_nodes, 4 + m % 3)) for m in range(num_clients)]
    pattern = sum(block @ rng.standard_normal((block.shape[1], NUM_CLASSES)) for block in columns)
    labels, classes = pattern.argmax(axis=1), tuple(f"class {index}" for index in range(NUM_CLASSES))
    if task == "binary":
        labels, classes = (pattern[:, 0] > 1).astype(np.int64), ("no", "yes")
    elif task == "regression":
        labels, classes = 5e6 + 1000 * pattern[:, 0], ()
    train, validation, test = np.split(rng.permutation(num_nodes), [num_nodes // 2, 3 * num_nodes // 4])
    splits = Splits(np.sort(train), np.sort(validation), np.sort(test))
    labels = labels if task == "multiclass" else hide_labels(labels, train[:2])
    parties = []
    for m, block in enumerate(columns):
        source, target = rng.integers(0, num_nodes - 3, (2, round(num_nodes * degree)))
        weights = rng.uniform(0.5, 2.0, len(source)) if m == 1 else None
        graph, name = Graph.from_edges(source, target, num_nodes, weights), chr(ord("a") + m)
        told = (labels, classes, splits) if owner in (None, name) else (None, (), None)
        parties.append(PartyData(name, np.arange(num_nodes), block, graph, *told))
    return parties


def simulate(
    parties: Sequence[PartyData],
    config: RunConfig,
    *,
    carry: Callable[[Message], Message] | None = None,
    delivery: Delivery | None = None,
    **options: Any,
) -> Simulation:
    """Simulate a run with these fields of `SimulationOptions`. `carry` is applied to every message."""
    return simulate_run(parties, config, SimulationOptions(delivery=delivery or apply_to_messages(carry), **options))


def settings(**keys: Any) -> RunConfig:
    """Return a resolved config in double precision without sampling and dropout; keys of any section are changed.

    Features are raw, so that independent implementations can read them from the parties.
    """
    keys = {
        "backbone": "gcn",
        "num_layers": 4,
        "aggregation_layers": (1, 3),
        "aggregation": "mean",
        "normalization": "none",
        "hidden": 6,
        "heads": 2,
        "dropout": 0.0,
        "input_scale": 1.0,
        "num_rounds": 1,
        "num_local_steps": 1,
        "batch_size": 0,
        "sampler": "full",
        "optimizer": "sgd",
        "learning_rate": 0.1,
        "weight_decay": 0.0,
        "schedule": "constant",
        "evaluate_every": 1000,
        "precision": "fp64",
        "preset": "none",
        "patience": 0,
        **keys,
    }
    data = DataConfig(features=keys.pop("features", "none"))
    parts = {"model": ModelConfig, "train": TrainConfig, "wire": WireConfig, "privacy": PrivacyConfig}
    known = {name: {item.name for item in fields(kind)} for name, kind in parts.items()}
    assert set(keys) <= set.union(*known.values()), keys
    sections = {name: {key: keys[key] for key in keys if key in known[name]} for name in parts}
    config = RunConfig(data=data, **{name: kind(**sections[name]) for name, kind in parts.items()})
    return override_settings(resolve(config, num_nodes=100)[0])[0]


def tiny(**keys: Any) -> tuple[RunConfig, list[PartyData]]:
    """Return the settings and parties of a run of three rounds."""
    keys = {
        "aggregation_layers": (1, 3),
        "num_local_steps": 2,
        "dropout": 0.5,
        "num_rounds": 3,
        "evaluate_every": 2,
        "prefetch": 2,
        "fanout": 1,
        "batch_size": 4,
        "precision": "fp32",
        **keys,
    }
    labels = keys.get("labels", "all")
    task = keys.get("task", "multiclass")
    return settings(**keys), tiny_parties(owner=None if labels == "all" else labels, task=task)


def assert_same_end(served: Any, simulated: Any) -> None:
    """Assert that a run over the network, interrupted or not, has the results of the simulation."""
    assert served.weights_sha256 == simulated.weights_sha256
    assert served.losses == simulated.losses
    assert (served.test, served.validation) == (simulated.test, simulated.validation)
    got, expected = ([(entry.round, entry.loss, entry.metrics) for entry in run.history] for run in (served, simulated))
    assert got == expected


def assert_same_run(served: Any, simulated: Any) -> None:
    """Assert that an uninterrupted run over the network has the traffic of the simulation.

    Only the offers of keys differ: over the network they have a signature and a certificate.
    """
    assert_same_end(served, simulated)
    got, expected = served.traffic, simulated.traffic
    offered = got.bytes_to_server - expected.bytes_to_server  # the server forwards the offers to every client
    assert (offered > 0) == ("keys" in expected.by_kind)
    longer = offered * (1 + len(served.parties))
    if longer:
        by_kind = {**expected.by_kind, "keys": expected.by_kind["keys"] + longer}
        by_phase = {**expected.by_phase, "control": expected.by_phase["control"] + longer}
        to_server, to_clients = got.bytes_to_server, expected.bytes_to_clients + longer - offered
        expected = replace(
            expected, bytes_to_server=to_server, bytes_to_clients=to_clients, by_kind=by_kind, by_phase=by_phase
        )
    assert got == expected
    costs = [[(entry["bytes"], entry["exchanges"]) for entry in run.history] for run in (served, simulated)]
    assert costs[0] == [(size + longer, exchanges) for size, exchanges in costs[1]]
