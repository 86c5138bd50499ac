"""Clients compute at once, one torch thread each, and nothing of it can be seen in the result."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest
import torch

from glasu.config import DataConfig, ModelConfig, RunConfig, TrainConfig
from glasu.data.datasets import load_parties
from glasu.protocol.actor import Client
from glasu.runtime.simulation import simulate


@pytest.mark.parametrize("method", ["glasu", "simulated", "standalone"])
def test_the_number_of_clients_that_compute_at_once_changes_no_bit(method):
    config = RunConfig(
        data=DataConfig(name="demo"),
        model=ModelConfig(num_layers=2, aggregation_layers=(0, 1), hidden=16),
        train=TrainConfig(method=method, num_rounds=3, evaluate_every=2),
    )
    parties = load_parties(config)
    alone, at_once = (simulate(parties, config, workers=workers).report for workers in (1, 3))
    assert at_once.weights_sha256 == alone.weights_sha256
    assert at_once.losses == alone.losses
    assert at_once.traffic == alone.traffic
    assert [entry["val_accuracy"] for entry in at_once.history] == [entry["val_accuracy"] for entry in alone.history]


def test_every_client_computes_on_one_thread(monkeypatch):
    seen = set()
    compute = Client.partial

    def spy(self, *arguments):
        seen.add((threading.current_thread().name, torch.get_num_threads()))
        return compute(self, *arguments)

    monkeypatch.setattr(Client, "partial", spy)
    config = RunConfig(data=DataConfig(name="demo"), model=ModelConfig(hidden=8), train=TrainConfig(num_rounds=1))
    simulate(load_parties(config), config, workers=2)
    assert {threads for _, threads in seen} == {1}
    assert len({name for name, _ in seen if name.startswith("glasu-client")}) == 2


TWICE = """
import glasu
from glasu.compiling import COMPILES
train = glasu.TrainConfig(num_rounds=2, sampler="neighbor", batch_size=64)
config = glasu.RunConfig(data=glasu.DataConfig(name="demo"), model=glasu.ModelConfig(hidden=192), train=train)
parties = glasu.load_parties(config)
digests = {glasu.train(parties, config).weights_sha256 for _ in range(2)}
assert COMPILES and len(digests) == 1, digests
"""


@pytest.mark.parametrize("threads", ["1", "2"])
def test_the_first_run_of_a_process_has_the_bits_of_the_second_however_many_threads_a_library_would_take(threads):
    taking = {"OPENBLAS_NUM_THREADS": threads, "OMP_NUM_THREADS": threads}
    subprocess.run([sys.executable, "-c", TWICE], check=True, env={**os.environ, **taking})
