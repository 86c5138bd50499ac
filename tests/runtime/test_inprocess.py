"""Clients compute at once, one torch thread each, and nothing of it can be seen in the result."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from contextlib import suppress

import pytest
import torch

from glasu.config import DataConfig, ModelConfig, RunConfig, TrainConfig, resolve
from glasu.data.sources.catalog import load_parties
from glasu.protocol.client import Client
from glasu.protocol.rounds import client_script
from glasu.protocol.server import server_script
from glasu.runtime.inprocess import run_in_process
from glasu.runtime.meter import Meter
from glasu.runtime.simulation import make_clients, make_server, simulate
from glasu.timing import Stopwatch


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
    passes = Client.passes

    def spy(self, *arguments):
        seen.add((threading.current_thread().name, torch.get_num_threads()))
        return passes(self, *arguments)

    monkeypatch.setattr(Client, "passes", spy)
    config = RunConfig(data=DataConfig(name="demo"), model=ModelConfig(hidden=8), train=TrainConfig(num_rounds=1))
    simulate(load_parties(config), config, workers=2)
    assert {threads for _, threads in seen} == {1}
    assert len({name for name, _ in seen if name.startswith("glasu-client")}) == 2


def note_batches(monkeypatch):
    """Return a list to which every gathering of a batch to learn from adds: whose, in which round, for which."""
    found, gather = [], Client.gather

    def note(self, sample, *, to_learn=True):
        if to_learn:
            found.append((self.party.name, self.round, sample.round))
        return gather(self, sample, to_learn=to_learn)

    monkeypatch.setattr(Client, "gather", note)
    return found


@pytest.mark.parametrize(("prefetch", "ahead"), [(0, 0), (1, 1), (2, 1), (16, 1)])
@pytest.mark.parametrize("backward", ["joint", "local"])
def test_what_the_next_round_reads_is_gathered_once_and_as_soon_as_it_is_agreed(prefetch, ahead, backward, monkeypatch):
    gathered = note_batches(monkeypatch)
    config = RunConfig(
        data=DataConfig(name="demo"),
        model=ModelConfig(num_layers=2, aggregation_layers=(0, 1), hidden=8),
        train=TrainConfig(
            num_rounds=5,
            num_local_steps=1,
            backward=backward,
            sampler="neighbor",
            batch_size=8,
            prefetch=prefetch,
            evaluate_every=2,
        ),
    )
    simulate(load_parties(config), config)
    by_party = {name: [rounds for owner, *rounds in gathered if owner == name] for name, *_ in gathered}
    assert len(by_party) == 3
    for rounds in by_party.values():
        assert rounds == [[max(0, index - ahead), index] for index in range(5)]


@pytest.mark.parametrize("ending", ["the last round", "early", "going back"])
def test_what_was_ahead_is_forgotten_when_it_does_not_come(ending, monkeypatch):
    gathered = note_batches(monkeypatch)
    stop_at = 0.01 if ending == "early" else 0.0
    train = TrainConfig(num_rounds=8, sampler="neighbor", batch_size=8, evaluate_every=2, stop_at=stop_at)
    config = resolve(RunConfig(model=ModelConfig(hidden=8), train=train), 1500)[0]
    clients = make_clients(config, load_parties(RunConfig(data=DataConfig(name="demo"))))
    scripts, ahead = [client_script(client) for client in clients], [client.look_ahead for client in clients]
    states = [client.state() for client in clients]
    rounds = []

    def leave(event):
        rounds.append(event)
        if ending == "going back" and len(rounds) == 3:
            raise KeyboardInterrupt

    server = server_script(make_server(config, clients))
    with suppress(KeyboardInterrupt):
        run_in_process(server, scripts, Meter(), Stopwatch(lambda: 0.0), leave, meanwhile=ahead)
    if ending == "going back":
        for client, state in zip(clients, states, strict=True):
            client.restore(state)
    before = len(gathered)
    assert before == 3 * {"the last round": 8, "early": 3, "going back": 3}[ending]
    for client in clients:
        client.look_ahead()
        assert client._ready is None
    assert len(gathered) == before


TWICE = """
import glasu
train = glasu.TrainConfig(num_rounds=2, sampler="neighbor", batch_size=64)
config = glasu.RunConfig(data=glasu.DataConfig(name="demo"), model=glasu.ModelConfig(hidden=192), train=train)
parties = glasu.load_parties(config)
digests = {glasu.train(parties, config).weights_sha256 for _ in range(2)}
assert len(digests) == 1, digests
"""


@pytest.mark.parametrize("threads", ["1", "2"])
def test_the_first_run_of_a_process_has_the_bits_of_the_second_however_many_threads_a_library_would_take(threads):
    taking = {"OPENBLAS_NUM_THREADS": threads, "OMP_NUM_THREADS": threads}
    subprocess.run([sys.executable, "-c", TWICE], check=True, env={**os.environ, **taking})
