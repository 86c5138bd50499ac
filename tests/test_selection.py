"""Test labels are read once per run, after the model is selected, and affect only the final score."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from glasu.config import ModelConfig, RunConfig, TrainConfig
from glasu.data.sources.demo import draw_news_service
from glasu.protocol.requests import Evaluated
from glasu.protocol.training import client_script
from glasu.runtime.inprocess import ScriptRun, run_alone
from glasu.runtime.simulation import make_clients, make_server, prepare_run
from support.monolith import run_roles
from support.tiny import simulate

METHODS = {
    "GLASU Q=4": {},
    "GLASU Q=1, joint backward": {"num_local_steps": 1, "backward": "joint"},
    "GLASU, sampled": {"sampler": "neighbor", "batch_size": 8, "sampled_evaluation": True},
    "GLASU, early stopping": {"num_rounds": 40, "patience": 1, "learning_rate": 0.1},
    "labels at one party": {"labels": "reading"},
    "labels at one party, shared sampler": {"labels": "reading", "sampler": "shared", "batch_size": 8},
    "centralized": {"method": "centralized"},
    "standalone": {"method": "standalone"},
    "simulated": {"method": "simulated"},
}
of_every_method = pytest.mark.parametrize("keys", METHODS.values(), ids=METHODS)


def settings(keys):
    train = {"num_rounds": 4, "evaluate_every": 2, "learning_rate": 0.02, **keys}
    return RunConfig(model=ModelConfig(hidden=8, dropout=0.2), train=TrainConfig(**train))


def small_parties():
    return draw_news_service(seed=0, num_users=300)


def with_test_labels_permuted(parties):
    """Return the parties with permuted labels of the test nodes, the same permutation at all of them."""
    labels, nodes = parties[0].labels.copy(), parties[0].splits.test
    labels[nodes] = np.random.default_rng(0).permutation(labels[nodes])
    assert (labels[nodes] != parties[0].labels[nodes]).mean() > 0.5
    return [replace(party, labels=labels) for party in parties]


def run(parties, keys):
    return simulate(parties, settings(keys), clock=lambda: 0.0)  # all seconds are zero and can be compared


# --- only the final score ----------------------------------------------------------------------------------------


@of_every_method
def test_permuting_the_test_labels_changes_nothing_but_the_test_scores(keys):
    parties = small_parties()
    as_they_are, permuted = run(parties, keys), run(with_test_labels_permuted(parties), keys)
    first, second = as_they_are.report.to_dict(), permuted.report.to_dict()
    scores, other_scores = first.pop("test"), second.pop("test")
    assert scores.pop("round", None) == other_scores.pop("round", None)
    assert scores != other_scores  # otherwise the test labels were never read
    assert first == second  # weights, history, losses, traffic, ledger and all the rest
    assert len(first["history"]) > 1
    for client, other in zip(as_they_are.clients, permuted.clients, strict=True):
        assert all(np.array_equal(own, other.learner.weights()[name]) for name, own in client.learner.weights().items())


# --- read once, at the very end ----------------------------------------------------------------------------------


class WatchedLabels:
    """Labels that record the split of every access."""

    def __init__(self, labels, splits):
        self._labels, self.readings, self.dtype = labels, [], labels.dtype
        self._split_of = np.full(len(labels), "unused", object)
        for name in ("train", "validation", "test"):
            self._split_of[getattr(splits, name)] = name
        self._num_test = len(splits.test)

    def __getitem__(self, nodes):
        found = self._split_of[nodes]
        if "test" in found:
            assert len(found) == self._num_test
        self.readings.append("+".join(sorted(set(found))))
        return self._labels[nodes]


def watch_labels(party):
    if party.labels is not None:
        party = replace(party)
        object.__setattr__(party, "labels", WatchedLabels(party.labels, party.splits))
    return party


@of_every_method
def test_every_party_reads_the_test_labels_once_after_all_else(keys):
    prepared = prepare_run(settings(keys), small_parties())
    config, evaluations = prepared.config, Counter()
    clients = make_clients(config, [watch_labels(party) for party in prepared.parties])

    def see(client, action):
        if isinstance(action, Evaluated) and action.split == "validation":
            evaluations[client.name if client else "server"] += 1

    if config.model.aggregation_layers:
        server = make_server(config, clients)
        run_roles(clients, server, see, lambda action: see(None, action))
    else:
        run_alone(
            [ScriptRun(client.name, client_script(client), client.watch, partial(see, client)) for client in clients]
        )
    readers = [client for client in clients if client.party.labels is not None]
    assert len(readers) == (1 if "labels" in keys or keys.get("method") == "centralized" else 3)
    for client in readers:
        readings = client.party.labels.readings
        assert set(readings) == {"train", "validation", "test"}  # and never two splits at the same time
        propagates = keys.get("method") == "standalone" and client.party.graph.num_edges > 0
        tested = 2 if propagates else 1  # the model, and propagated labels
        assert readings[-tested:] == ["test"] * tested
        assert readings.count("test") == tested
        least = evaluations["server"] or evaluations[client.name]
        assert least > 1
        assert readings.count("validation") == least or (propagates and readings.count("validation") > least)
