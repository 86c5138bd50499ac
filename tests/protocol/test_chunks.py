"""Tensors travel in chunks of rows: sent together, answered one by one, and nothing else can be seen of it."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest

from glasu.errors import ProtocolError
from glasu.protocol import chunks
from glasu.protocol.message_bytes import decode, encode
from glasu.protocol.messages import Gradient, JointGradient, Partial, TensorMessage
from glasu.runtime.simulation import simulate
from support.monolith import run, settings, tiny_parties

MODES = [
    *({"aggregation": kind, "labels": who} for kind, who in itertools.product(("mean", "concat"), ("all", "b"))),
    *({"backward": "joint", "aggregation": kind, "labels": "b"} for kind in ("mean", "concat")),
    {"backward": "joint"},
]
RIDERS = {"sampler": "neighbor", "prefetch": 2, "fanout": 2, "batch_size": 5, "num_rounds": 5}


def quick(**keys):
    """Return the settings and parties of a run with evaluations, and with losses that ride along."""
    steps = 1 if keys.get("backward") == "joint" else 2
    config = settings(**{"num_rounds": 3, "evaluate_every": 2, "num_local_steps": steps, "dropout": 0.5, **keys})
    return config, tiny_parties(owner=None if config.train.labels == "all" else config.train.labels)


def outcome(config, parties, rows, monkeypatch):
    """Return what a run in chunks of so many rows found, and the messages that carried tensors."""
    seen = []

    def carry(message):
        seen.append(message)
        return decode(encode(message))

    monkeypatch.setattr(chunks, "CHUNK_ROWS", rows)
    report = simulate(parties, config, carry=carry).report
    return report, [message for message in seen if isinstance(message, TensorMessage)]


@pytest.mark.parametrize("precision", ["fp32", "fp64", "bf16", "int8"])
@pytest.mark.parametrize("keys", MODES, ids=str)
def test_the_size_of_the_chunks_changes_no_bit_and_no_number_of_exchanges(keys, precision, monkeypatch):
    for more, rows in (({}, 5), ({}, 24), (RIDERS, 3)):  # all 24 nodes fill a chunk: an empty one is the last
        if rows == 24 and precision != "int8":
            continue
        config, parties = quick(precision=precision, **keys, **more)
        whole, _ = outcome(config, parties, 8192, monkeypatch)
        report, tensors = outcome(config, parties, rows, monkeypatch)
        assert report.weights_sha256 == whole.weights_sha256
        assert (report.losses, report.test) == (whole.losses, whole.test)
        for key in ("exchanges", "exchanges_by_phase"):
            assert report.traffic[key] == whole.traffic[key]
        assert report.privacy == whole.privacy  # the ledgers, too: a tensor is released once
        assert max(len(message.value) for message in tensors) <= rows


@pytest.mark.parametrize("keys", [{}, {"labels": "b"}, {"backward": "joint"}], ids=str)
def test_training_tensors_travel_in_chunks_like_those_of_evaluation(keys, monkeypatch):
    config, parties = quick(**keys)
    _, tensors = outcome(config, parties, 7, monkeypatch)
    kinds = {Partial} | ({Gradient, JointGradient} if keys else set())
    for kind in kinds:
        found = {m.key.chunk for m in tensors if isinstance(m, kind) and m.key.phase.reported == "training"}
        assert {0, 1} <= found


def test_node_sets_ride_on_the_first_of_the_messages_that_are_sent_together(monkeypatch):
    config, parties = quick(**RIDERS)
    _, tensors = outcome(config, parties, 2, monkeypatch)
    carriers = [message.key for message in tensors if message.node_sets]
    assert carriers
    assert {key.chunk for key in carriers} == {0}
    assert any(message.key.chunk for message in tensors if message.key.round == carriers[0].round)


@pytest.mark.parametrize("rows", [0, 1, 4, 5, 6, 10])
def test_chunks_cover_all_rows_once_and_only_the_last_is_not_full(rows, monkeypatch):
    monkeypatch.setattr(chunks, "CHUNK_ROWS", 5)
    found = chunks.message_chunks(rows)
    assert np.concatenate([np.arange(100)[part] for part in found]).tolist() == list(range(rows))
    assert [part.stop - part.start == 5 for part in found] == [True] * (len(found) - 1) + [False]
    assert [chunks.first_row(chunk) for chunk in range(len(found))] == [part.start for part in found]


@pytest.mark.parametrize(
    ("phase", "sampler", "expected"),
    [("training", "shared", "at most 5 rows"), ("training", "full", "5 rows"), ("evaluation", "full", "5 rows")],
)
def test_a_chunk_of_too_many_rows_is_refused_before_it_is_added_up(phase, sampler, expected, monkeypatch):
    monkeypatch.setattr(chunks, "CHUNK_ROWS", 5)
    config, parties = quick(sampler=sampler)

    def carry(message):
        if isinstance(message, Partial) and message.key.phase.reported == phase and message.key.chunk == 1:
            return dataclasses.replace(message, value=np.ones((6, 6)))
        return message

    words = rf"party 'a', {phase} round \d layer 1 chunk 1 .*: expected {expected}, got 6"
    with pytest.raises(ProtocolError, match=words):
        run(config, parties, carry=carry)


def test_a_steady_round_costs_one_exchange_per_aggregation_layer_however_many_messages_it_takes(monkeypatch):
    monkeypatch.setattr(chunks, "CHUNK_ROWS", 2)
    found = {}
    for rounds in (4, 8):
        config, parties = quick(**{**RIDERS, "num_rounds": rounds, "evaluate_every": 1000})
        found[rounds] = run(config, parties).meter.exchanges_by_phase["training"]
    assert (found[8] - found[4]) / 4 == 2.0
