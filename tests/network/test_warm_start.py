"""Warm start over gRPC: the bits and bytes of one process, resume, and prediction by the ensemble."""

from __future__ import annotations

import numpy as np
import pytest

from glasu.network.training_party import TrainingParty
from glasu.network.training_server import TrainingServer
from glasu.protocol.requests import Evaluated, RoundDone, WarmStepDone
from glasu.runtime.simulation import make_clients
from glasu.runtime.trained_model import TrainedModel
from support.cluster import Cluster
from support.kits import simulate_with_secrets
from support.monolith import identical
from support.roles import Killed
from support.tiny import assert_same_end, assert_same_run, tiny

RUNS = [
    {"backbone": "gcnii", "optimizer": "adam", "learning_rate": 0.01},
    {"backbone": "sage", "sampler": "neighbor", "backward": "joint"},
    {"backbone": "gcnii", "sampler": "shared", "precision": "int8"},
]
EXACT = {"optimizer": "adam", "dropout": 0.0, "batch_size": 0}
SELECTIONS = {
    "ensemble": {"warm_start": 60, "num_rounds": 3, "learning_rate": 0.5, "evaluate_every": 1},  # rounds make it worse
    "joint": {"warm_start": 1, "num_rounds": 30, "learning_rate": 0.02, "evaluate_every": 5},
}


@pytest.mark.parametrize("keys", RUNS, ids=str)
def test_the_run_over_the_network_is_the_run_in_one_process(keys, kits, tmp_path):
    config, parties = tiny(warm_start=5, **keys)
    served, _ = Cluster(config, parties, kits, tmp_path).run()
    simulated = simulate_with_secrets(parties, config).report
    assert_same_run(served, simulated)
    assert served.warm_start == simulated.warm_start
    assert served.warm_start.steps == 5
    assert served.history[0].round == 0


@pytest.mark.parametrize(
    ("folder", "signatures"), [("kits", "signed, by keys of trial kits"), ("pinned_kits", "signed, by pinned keys")]
)
def test_all_parties_have_one_first_classifier_that_does_not_follow_from_the_seed(
    folder, signatures, request, tmp_path
):
    config, parties = tiny(warm_start=2, backbone="gcnii")
    first: list[dict] = []

    class Watched(TrainingParty):
        def observe(self, event):
            super().observe(event)
            if isinstance(event, WarmStepDone) and event.step == 1:  # warm steps do not change the classifier
                first.append(self.client.learner.classifier_weights())

    cluster = Cluster(config, parties, request.getfixturevalue(folder), tmp_path)
    server = cluster.serve()
    reports = [role.outcome() for role in [cluster.join(name, role=Watched) for name in "abc"]]
    simulated = simulate_with_secrets(parties, config)
    assert server.outcome().weights_sha256 == simulated.report.weights_sha256
    assert len(first) == 3
    assert identical(first, [first[0]] * 3)
    from_seed = make_clients(config, parties)[0].learner.classifier_weights()
    assert from_seed.keys() == first[0].keys()
    assert not identical([from_seed], first[:1])
    for own in reports:
        keys = [entry for entry in own["privacy"]["ledger"][0]["releases"] if entry["kind"] == "key"]
        assert {entry["protection"] for entry in keys} == {"signed", *(["sealed"] if own["party"] == "a" else [])}
        assert own["privacy"]["warm_start_keys"] == signatures
    assert simulated.report.privacy.warm_start_keys == "none: all parties are in one process"


@pytest.mark.parametrize(("when", "saved"), [(3, 2), (6, 6)])
def test_a_party_killed_in_its_warm_start_resumes_from_its_own_checkpoint(when, saved, kits, tmp_path):
    config, parties = tiny(warm_start=6, **RUNS[0])

    class Dying(TrainingParty):
        def observe(self, event):
            super().observe(event)
            if isinstance(event, WarmStepDone) and event.step == when:
                raise Killed

    cluster = Cluster(config, parties, kits, tmp_path)
    server = cluster.serve()
    others = [cluster.join(name) for name in "ac"]
    assert isinstance(cluster.join("b", role=Dying).error(), Killed)
    steps: list[int] = []
    again = cluster.join("b", observer=lambda event: isinstance(event, WarmStepDone) and steps.append(event.step))
    for role in (*others, again):
        role.outcome()
    assert_same_end(server.outcome(), simulate_with_secrets(parties, config).report)
    assert steps == list(range(saved + 1, 7))
    assert any(f"continuing after warm step {saved} of 6" in line for line in cluster.lines["b"])
    assert not list((tmp_path / "b").rglob("*.checkpoint"))


def test_a_server_killed_at_the_first_evaluation_repeats_it_and_no_warm_step_is_repeated(kits, tmp_path):
    config, parties = tiny(warm_start=4, **RUNS[0])

    class Dying(TrainingServer):
        def observe(self, event):
            super().observe(event)
            if isinstance(event, Evaluated) and not event.ensemble:
                raise Killed

    cluster = Cluster(config, parties, kits, tmp_path)
    steps: list[int] = []
    server = cluster.serve(role=Dying)
    observers = {"a": lambda event: isinstance(event, WarmStepDone) and steps.append(event.step)}
    roles = [cluster.join(name, observer=observers.get(name)) for name in "abc"]
    assert isinstance(server.error(), Killed)
    server = cluster.serve()
    for role in roles:
        role.outcome()
    assert_same_end(server.outcome(), simulate_with_secrets(parties, config).report)
    assert steps == [1, 2, 3, 4]


def test_a_party_killed_in_a_round_does_not_return_to_its_warm_start(kits, tmp_path):
    config, parties = tiny(warm_start=4, **RUNS[0])

    class Dying(TrainingParty):
        def observe(self, event):
            super().observe(event)
            if isinstance(event, RoundDone) and event.round == 1:
                raise Killed

    cluster = Cluster(config, parties, kits, tmp_path)
    server = cluster.serve()
    others = [cluster.join(name) for name in "ac"]
    assert isinstance(cluster.join("b", role=Dying).error(), Killed)
    events: list[object] = []
    again = cluster.join("b", observer=events.append)
    for role in (*others, again):
        role.outcome()
    assert_same_end(server.outcome(), simulate_with_secrets(parties, config).report)
    assert not [event for event in events if isinstance(event, WarmStepDone)]


@pytest.mark.parametrize("selected", SELECTIONS)
def test_prediction_uses_the_selected_model(selected, kits, tmp_path):
    config, parties = tiny(**EXACT, **SELECTIONS[selected])
    cluster = Cluster(config, parties, kits, tmp_path)
    served, _ = cluster.run()
    assert served.warm_start.selected == selected
    model, nodes = TrainedModel.of(simulate_with_secrets(parties, config).clients), np.array([3, 11, 20])
    assert TrainedModel.load(tmp_path / "b").ensemble == model.ensemble == (selected == "ensemble")
    report, found = cluster.predict(b=nodes, c=nodes[:1])
    assert np.array_equal(found["b"].scores, model.predict_proba(parties, nodes))
    assert np.array_equal(found["c"].scores, found["b"].scores[:1])
    layers = config.model.aggregation_layers if selected == "joint" else ()
    assert report.traffic.exchanges == 2 + len(layers)  # the requested nodes, the layers, the scores
