"""Tensors travel in chunks of rows. The chunks are sent together, and their size changes no result."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest

from glasu.errors import ProtocolError
from glasu.protocol.chunks import split_rows
from glasu.protocol.message_bytes import decode, encode
from glasu.protocol.messages import Gradient, Joint, JointGradient, JointScores, Partial, Proposal, TensorMessage
from support.monolith import identical, run, settings, tiny_parties

MODES = [
    *({"aggregation": kind, "labels": who} for kind, who in itertools.product(("mean", "concat"), ("all", "b"))),
    *({"backward": "joint", "aggregation": kind, "labels": "b"} for kind in ("mean", "concat")),
    {"backward": "joint"},
]
RIDERS = {"sampler": "neighbor", "prefetch": 2, "fanout": 2, "batch_size": 5, "num_rounds": 5}


def quick(**keys):
    """Return the settings and parties of a run with evaluations, and several local steps."""
    steps = 1 if keys.get("backward") == "joint" else 2
    config = settings(**{"num_rounds": 3, "evaluate_every": 2, "num_local_steps": steps, "dropout": 0.5, **keys})
    return config, tiny_parties(owner=None if config.train.labels == "all" else config.train.labels)


def outcome(config, parties, rows):
    """Return a run with chunks of this number of rows, and its messages."""
    seen = []

    def carry(message):
        seen.append(message)
        return decode(encode(message))

    return run(config.replace(wire={"chunk_rows": rows}), parties, carry=carry), seen


def tensors_of(messages):
    return [message for message in messages if isinstance(message, TensorMessage)]


@pytest.mark.parametrize(
    ("precision", "keys"),
    [
        *itertools.product(["int8"], MODES),  # rounding depends on the position of a row
        *itertools.product(["fp32", "fp64", "bf16"], (MODES[0], MODES[3])),
    ],
    ids=str,
)
def test_the_size_of_the_chunks_changes_no_bit_and_no_number_of_exchanges(precision, keys):
    for more, rows in (({}, 5), ({}, 24), (RIDERS, 3)):  # all 24 nodes fill a chunk: an empty one is the last
        if rows == 24 and precision != "int8":
            continue
        config, parties = quick(precision=precision, **keys, **more)
        whole, _ = outcome(config, parties, 8192)
        cut, sent = outcome(config, parties, rows)
        assert identical(cut.final, whole.final)
        assert cut.events == whole.events  # losses and metrics of every evaluation
        assert cut.meter.exchanges == whole.meter.exchanges
        assert cut.meter.exchanges_by_phase == whole.meter.exchanges_by_phase
        for one, other in zip(cut.clients, whole.clients, strict=True):
            assert one.release.ledger.totals == other.release.ledger.totals  # a tensor is released once
        assert max(len(message.value) for message in tensors_of(sent)) <= rows


@pytest.mark.parametrize("keys", [{}, {"labels": "b"}, {"backward": "joint"}], ids=str)
def test_training_tensors_travel_in_chunks_like_those_of_evaluation(keys):
    config, parties = quick(**keys)
    _, sent = outcome(config, parties, 7)
    kinds = {Partial} | ({Gradient, JointGradient} if keys else set())
    for kind in kinds:
        found = {m.key.chunk for m in tensors_of(sent) if isinstance(m, kind) and m.key.phase.reported == "training"}
        assert {0, 1} <= found


def test_node_sets_travel_before_the_tensor_of_the_exchange_that_they_join():
    config, parties = quick(**RIDERS)
    _, sent = outcome(config, parties, 2)
    for client in range(3):
        own = [message for message in sent if message.key.client == client]
        first = next(place for place, message in enumerate(own) if isinstance(message, Partial))
        joined = [place for place, message in enumerate(own) if isinstance(message, Proposal) and place > first]
        assert joined
        for place in joined:  # the next message is the first chunk of a tensor
            assert isinstance(own[place + 1], Partial)
            assert own[place + 1].key.chunk == 0
    assert any(message.key.chunk for message in tensors_of(sent))


@pytest.mark.parametrize("rows", [0, 1, 4, 5, 6, 10])
def test_chunks_cover_all_rows_once_and_only_the_last_is_not_full(rows):
    found = split_rows(rows, 5)
    assert np.concatenate([np.arange(100)[part] for part in found]).tolist() == list(range(rows))
    assert [part.stop - part.start == 5 for part in found] == [True] * (len(found) - 1) + [False]
    assert [part.start for part in found] == [5 * chunk for chunk in range(len(found))]


@pytest.mark.parametrize(
    ("phase", "sampler", "expected"),
    [("training", "shared", "at most 5 rows"), ("training", "full", "5 rows"), ("evaluation", "full", "5 rows")],
)
def test_a_chunk_of_too_many_rows_is_refused_before_it_is_added_up(phase, sampler, expected):
    config, parties = quick(sampler=sampler, chunk_rows=5)

    def carry(message):
        if isinstance(message, Partial) and message.key.phase.reported == phase and message.key.chunk == 1:
            return dataclasses.replace(message, value=np.ones((6, 6)))
        return message

    words = rf"party 'a', {phase} round \d layer 1 chunk 1 .*: expected {expected}, got 6"
    with pytest.raises(ProtocolError, match=words):
        run(config, parties, carry=carry)


def test_a_client_that_does_not_know_the_columns_refuses_chunks_of_different_widths():
    config, parties = quick(labels="b", method="smooth", aggregation_layers=(), chunk_rows=5)

    def carry(message):
        if isinstance(message, JointScores) and message.key.chunk == 2:
            return dataclasses.replace(message, value=np.full((len(message.value), 4), 0.25))
        return message

    with pytest.raises(ProtocolError, match=r"chunk 2.*: expected a probabilities of shape \(5, 3\), got \(5, 4\)"):
        run(config, parties, carry=carry)


@pytest.mark.parametrize("chunk", [0, 4])  # the last one has no rows
def test_a_chunk_without_columns_is_refused(chunk):
    config, parties = quick(chunk_rows=6)

    def carry(message):
        if isinstance(message, Joint) and message.key.chunk == chunk:
            return dataclasses.replace(message, value=message.value[:, :0])
        return message

    with pytest.raises(ProtocolError, match=r"expected a representation of shape \(\d, 6\), got \(\d, 0\)"):
        run(config, parties, carry=carry)


def test_a_steady_round_costs_one_exchange_per_aggregation_layer_however_many_messages_it_takes():
    found = {}
    for rounds in (4, 8):
        config, parties = quick(**{**RIDERS, "num_rounds": rounds, "evaluate_every": 1000, "chunk_rows": 2})
        found[rounds] = run(config, parties).meter.exchanges_by_phase["training"]
    assert (found[8] - found[4]) / 4 == 2.0
