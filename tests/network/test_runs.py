"""In one process and over gRPC with mutual TLS: the same weights, figures and bytes."""

from __future__ import annotations

import itertools
import subprocess
import sys

import pytest

from glasu.runtime.simulation import simulate
from runtime.test_inprocess import note_batches
from support.cluster import Cluster
from support.monolith import settings, tiny_parties

MODES = list(itertools.product(("mean", "concat"), ("all", "b"), ("full", "neighbor", "shared")))


def tiny(**keys):
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
    return settings(**keys), tiny_parties(owner=None if labels == "all" else labels)


def same_run(served, simulated):
    """Assert that a run over the network found and cost what the simulation did."""
    assert served.weights_sha256 == simulated.weights_sha256
    assert served.losses == simulated.losses
    assert (served.test, served.validation) == (simulated.test, simulated.validation)
    assert served.traffic == simulated.traffic
    counted = [{key: value for key, value in entry.items() if key != "seconds"} for entry in simulated.history]
    assert [{key: value for key, value in entry.items() if key != "seconds"} for entry in served.history] == counted


@pytest.mark.parametrize(("aggregation", "labels", "sampler"), MODES, ids=lambda value: value)
def test_a_run_over_the_network_is_the_run_in_one_process(aggregation, labels, sampler, kits, tmp_path):
    config, parties = tiny(aggregation=aggregation, labels=labels, sampler=sampler)
    served, reports = Cluster(config, parties, kits, tmp_path).run()
    same_run(served, simulate(parties, config).report)
    assert tuple(report["weights_sha256"][0] for report in reports.values()) == served.weights_sha256
    traffic = [report["traffic"] for report in reports.values()]
    for key in ("bytes_to_server", "bytes_to_clients", "messages"):
        assert sum(each[key] for each in traffic) == served.traffic[key]
    assert {each["exchanges"] for each in traffic} == {served.traffic["exchanges"]}


def test_a_party_gathers_what_the_next_round_reads_while_it_waits(kits, tmp_path, monkeypatch):
    gathered = note_batches(monkeypatch)
    config, parties = tiny(sampler="neighbor")
    Cluster(config, parties, kits, tmp_path).run()
    assert sorted(gathered) == sorted((party.name, *rounds) for party in parties for rounds in ((0, 0), (0, 1), (1, 2)))


@pytest.mark.parametrize("keys", [{"backward": "joint", "num_local_steps": 1}, {"precision": "int8"}], ids=str)
def test_exact_gradients_and_eight_bits_travel_too(keys, kits, tmp_path):
    config, parties = tiny(**keys)
    served, _ = Cluster(config, parties, kits, tmp_path).run()
    same_run(served, simulate(parties, config).report)


def test_the_servers_report_says_what_had_no_effect(kits, tmp_path):
    config, parties = tiny(num_rounds=1)
    config = config.replace(train={"sampler": "auto", "sampled_evaluation": True})
    served, _ = Cluster(config, parties, kits, tmp_path).run()
    simulated = simulate(parties, config).report
    assert served.overridden == simulated.overridden == {"train.sampled_evaluation": {"asked": True, "used": False}}
    same_run(served, simulated)


def test_the_server_loads_neither_torch_nor_pyg():
    code = (
        "import sys; import glasu.cli.serve, glasu.network.serve, glasu.network.serve_prediction;"
        "found = {'torch', 'torch_geometric', 'pyarrow', 'sklearn', 'plotly'} & set(sys.modules); assert not found"
    )
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr
