"""In one process and over gRPC with mutual TLS: the same weights, figures and bytes."""

from __future__ import annotations

import subprocess
import sys

import pytest

from glasu.network.join import PartyPerformer
from support.cluster import Cluster
from support.kits import simulate_with_secrets
from support.pairs import cover_pairs
from support.tiny import assert_same_end, assert_same_run, tiny

MODES = cover_pairs(("mean", "concat"), ("all", "b"), ("full", "neighbor", "shared"))


@pytest.mark.parametrize(("aggregation", "labels", "sampler"), MODES, ids=lambda value: value)
def test_a_run_over_the_network_is_the_run_in_one_process(aggregation, labels, sampler, kits, tmp_path):
    config, parties = tiny(aggregation=aggregation, labels=labels, sampler=sampler)
    served, reports = Cluster(config, parties, kits, tmp_path).run()
    assert_same_run(served, simulate_with_secrets(parties, config).report)
    assert tuple(report["weights_sha256"][0] for report in reports.values()) == served.weights_sha256
    traffic = [report["traffic"] for report in reports.values()]
    for key in ("bytes_to_server", "bytes_to_clients", "messages"):
        assert sum(each[key] for each in traffic) == served.traffic[key]
    for each in traffic:
        assert each["exchanges"] == served.traffic["exchanges"]
        assert each["exchanges_by_phase"] == served.traffic["exchanges_by_phase"]


@pytest.mark.parametrize(
    "keys",
    [
        {"backward": "joint", "num_local_steps": 1},
        {"backward": "joint", "precision": "int8"},
        {"feedback": True, "batch_size": 0, "num_rounds": 5},
    ],
    ids=str,
)
def test_exact_gradients_and_eight_bits_travel_too(keys, kits, tmp_path):
    config, parties = tiny(**keys)
    served, _ = Cluster(config, parties, kits, tmp_path).run()
    assert_same_run(served, simulate_with_secrets(parties, config).report)


CHUNKED = [
    {"aggregation": "mean"},
    {"aggregation": "concat", "sampler": "neighbor", "precision": "fp64"},
    {"labels": "b", "precision": "bf16", "aggregation": "concat"},
    {"backward": "joint", "num_local_steps": 1, "precision": "int8", "aggregation": "concat"},
    {"backward": "joint", "precision": "int8", "labels": "b", "sampler": "neighbor"},
    {"feedback": True, "batch_size": 0, "num_rounds": 5, "precision": "int8"},
]


@pytest.mark.parametrize("keys", CHUNKED, ids=str)
def test_chunks_over_the_network_give_the_weights_of_one_chunk_in_one_process(keys, kits, tmp_path):
    config, parties = tiny(**keys)
    whole = simulate_with_secrets(parties, config).report
    served, _ = Cluster(config.replace(wire={"chunk_rows": 3}), parties, kits, tmp_path).run()
    assert served.weights_sha256 == whole.weights_sha256
    assert (served.losses, served.test) == (whole.losses, whole.test)
    assert served.traffic["exchanges_by_phase"] == whole.traffic["exchanges_by_phase"]
    assert served.traffic["messages"] > whole.traffic["messages"]


def test_the_messages_of_an_exchange_leave_together(kits, tmp_path):
    """Node-set proposals and losses join the messages that the party must send anyway."""
    sent = []

    class Counting(PartyPerformer):
        def send(self, messages):
            sent.append([type(message).__name__ for message in messages])
            super().send(messages)

    config, parties = tiny(sampler="neighbor", num_rounds=4, prefetch=2)
    cluster = Cluster(config, parties, kits, tmp_path)
    server, *roles = cluster.serve(), cluster.join("a", performer=Counting), cluster.join("b"), cluster.join("c")
    assert_same_end(server.outcome(), simulate_with_secrets(parties, config).report)
    traffic = roles[0].outcome()["traffic"]
    assert len(sent) <= traffic["exchanges"] + 1
    assert ["Losses", "Partial"] in sent
    assert any("Proposal" in names and "Partial" in names for names in sent)


def test_the_servers_report_lists_settings_without_effect(kits, tmp_path):
    config, parties = tiny(num_rounds=1)
    config = config.replace(train={"sampler": "auto", "sampled_evaluation": True})
    served, _ = Cluster(config, parties, kits, tmp_path).run()
    simulated = simulate_with_secrets(parties, config).report
    assert served.overridden == simulated.overridden == {"train.sampled_evaluation": {"requested": True, "used": False}}
    assert_same_run(served, simulated)


def test_the_server_loads_neither_torch_nor_pyg():
    code = (
        "import sys; import glasu.cli.serve, glasu.network.serve, glasu.network.doctor.server;"
        "found = {'torch', 'torch_geometric', 'pyarrow', 'sklearn', 'plotly'} & set(sys.modules); assert not found"
    )
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr
