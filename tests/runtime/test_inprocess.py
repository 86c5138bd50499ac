"""Clients compute in parallel, with one torch thread per client, and the result does not depend on it."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import time
from contextlib import suppress

import pytest
import torch

from glasu.config import DataConfig, ModelConfig, RunConfig, TrainConfig, resolve
from glasu.data.sources.catalog import load_parties
from glasu.protocol.learner import Batch
from glasu.protocol.requests import RoundDone
from glasu.protocol.training import client_script, server_script
from glasu.runtime.inprocess import ScriptRun, run_together
from glasu.runtime.simulation import make_clients, make_server
from glasu.runtime.telemetry import TrafficCounter
from glasu.timing import Stopwatch
from support.tiny import simulate


@pytest.mark.parametrize("method", ["glasu", "simulated", "standalone"])
def test_the_number_of_clients_that_compute_in_parallel_changes_no_bit(method):
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


def test_every_client_computes_on_one_thread():
    seen = set()

    def clock():  # every client reads it while it computes
        seen.add((threading.current_thread().name, torch.get_num_threads()))
        return time.perf_counter()

    config = RunConfig(data=DataConfig(name="demo"), model=ModelConfig(hidden=8), train=TrainConfig(num_rounds=1))
    simulate(load_parties(config), config, workers=2, clock=clock)
    clients = {(name, threads) for name, threads in seen if name.startswith("glasu-client")}
    assert {threads for _, threads in clients} == {1}
    assert len(clients) == 2


class NotedData:
    """The data of a client; notes the round of the client whenever a batch reads its labels."""

    def __init__(self, client):
        self.client, self.inner, self.rounds = client, client.learner.data, []

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def labels(self, nodes):
        self.rounds.append(self.client.progress.round)
        return self.inner.labels(nodes)


def train_noted(config, perform=lambda action: None):
    """Train on the demo data; return the clients, and for each one the rounds in which it gathered a batch."""
    config = resolve(config, 1500)[0]
    clients = make_clients(config, load_parties(RunConfig(data=DataConfig(name="demo"))))
    noted = [NotedData(client) for client in clients]
    for client, data in zip(clients, noted, strict=True):
        client.learner.data = data
    server = make_server(config, clients)
    running = [ScriptRun(client.name, client_script(client), client.watch) for client in clients]
    serving = ScriptRun("server", server_script(server), Stopwatch(lambda: 0.0), perform)
    with suppress(KeyboardInterrupt):
        run_together(serving, running, TrafficCounter())
    return clients, [data.rounds for data in noted]


@pytest.mark.parametrize(("prefetch", "ahead"), [(0, 0), (1, 0), (2, 1), (16, 1)])
@pytest.mark.parametrize("backward", ["joint", "local"])
def test_the_batch_of_the_next_round_is_gathered_once_while_an_answer_travels(prefetch, ahead, backward):
    config = RunConfig(
        model=ModelConfig(num_layers=2, aggregation_layers=(0, 1), hidden=8),
        train=TrainConfig(
            preset="none",
            num_rounds=5,
            num_local_steps=1,
            backward=backward,
            sampler="neighbor",
            batch_size=8,
            prefetch=prefetch,
            evaluate_every=2,
        ),
    )
    _, rounds = train_noted(config)
    for own in rounds:
        assert len(own) == 5
        windows = max(1, prefetch)
        first_of_a_window = {index for index in range(5) if index % windows == 0}
        assert own == [index if index in first_of_a_window else index - ahead for index in range(5)]


@pytest.mark.parametrize("ending", ["the last round", "early", "interrupted"])
def test_a_batch_that_was_gathered_ahead_is_not_kept_after_the_end(ending):
    train = TrainConfig(
        preset="none",
        num_rounds=8,
        sampler="neighbor",
        batch_size=8,
        evaluate_every=2,
        stop_at=0.01 if ending == "early" else 0.0,
    )
    done = []

    def leave(action):
        done.append(action)
        if ending == "interrupted" and sum(isinstance(each, RoundDone) for each in done) == 3:
            raise KeyboardInterrupt

    clients, rounds = train_noted(RunConfig(model=ModelConfig(hidden=8), train=train), leave)
    assert {len(own) for own in rounds} == {{"the last round": 8, "early": 3, "interrupted": 5}[ending]}
    if ending == "interrupted":
        for client in clients:
            client.restore(client.state())
    gc.collect()
    assert not any(type(item) is Batch for item in gc.get_objects())


TWICE = """
import glasu
train = glasu.TrainConfig(num_rounds=2, sampler="neighbor", batch_size=64)
config = glasu.RunConfig(data=glasu.DataConfig(name="demo"), model=glasu.ModelConfig(hidden=192), train=train)
parties = glasu.load_parties(config)
digests = {glasu.train(parties, config).weights_sha256 for _ in range(2)}
assert len(digests) == 1, digests
"""


def test_the_first_run_of_a_process_has_the_bits_of_the_second_however_many_threads_a_library_would_take():
    taking = {"OPENBLAS_NUM_THREADS": "2", "OMP_NUM_THREADS": "2"}  # the runs themselves use one thread
    subprocess.run([sys.executable, "-c", TWICE], check=True, env={**os.environ, **taking})
