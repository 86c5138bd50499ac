from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from glasu.errors import ProtocolError
from glasu.protocol.messages import Agreed, Proposal
from glasu.runtime.simulation import simulate
from glasu.wire.message_key import Phase
from support.monolith import ALL_LAYERS, identical, keep_samples, run, settings, tiny_parties

N, TRAIN, VALIDATION, TEST = 24, 12, 6, 6
HEADER, SECTION, NODE = 48, 12, 1  # bytes; all ids here are below 128


def run_with_sampler(**keys):
    """Run with a neighbour sampler; return the run and the samples of every client, in the order of the rounds."""
    config = settings(**{"sampler": "neighbor", "fanout": 2, "batch_size": 3, "num_rounds": 4, **keys})
    samples = [[] for _ in range(3)]

    labels = keys.get("labels", "all")
    parties = tiny_parties(owner=None if labels == "all" else labels)
    return run(config, parties, arrange=keep_samples(samples)), samples


KINDS = [
    {"sampler": "neighbor", "sampling": "node"},
    {"sampler": "neighbor", "sampling": "layer"},
    {"sampler": "neighbor", "blocks": "induced"},
    {"sampler": "neighbor", "sampling": "node", "labels": "b"},
    {"sampler": "shared"},
    {"sampler": "shared", "labels": "b"},
    {"sampler": "full"},
    {"sampler": "full", "labels": "b"},
]


@pytest.mark.parametrize("layers", [(3,), (1, 3), ALL_LAYERS])
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_all_clients_hold_the_same_sets_where_they_aggregate_and_every_set_contains_the_next(kind, layers):
    _, samples = run_with_sampler(aggregation_layers=layers, num_rounds=2, **kind)
    for of_round in zip(*samples, strict=True):
        assert len({sample.round for sample in of_round}) == 1
        for layer in layers:
            for sample in of_round[1:]:
                np.testing.assert_array_equal(sample.nodes[layer + 1], of_round[0].nodes[layer + 1])
        for sample in of_round:
            assert len(sample.nodes) == 5
            for nodes in sample.nodes:
                np.testing.assert_array_equal(nodes, np.unique(nodes))  # sorted and distinct
            for lower, upper in zip(sample.nodes, sample.nodes[1:], strict=False):
                assert np.isin(upper, lower).all()


@given(seed=st.integers(0, 2**31), fanout=st.integers(1, 4), layerwise=st.booleans())
@hypothesis_settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_the_agreed_set_is_the_union_of_what_the_clients_drew_from_their_own_neighbours(seed, fanout, layerwise):
    keys = {"seed": seed, "fanout": fanout, "sampling": "layer" if layerwise else "node", "num_rounds": 2}
    _, samples = run_with_sampler(aggregation_layers=(0, 2, 3), **keys)
    parties = tiny_parties()
    for of_round in zip(*samples, strict=True):
        for layer in (0, 2):  # S[1] and S[3] are agreed; S[4] is the batch
            drawn = [sample.draws[layer + 1].nodes for sample in of_round]
            np.testing.assert_array_equal(of_round[0].nodes[layer + 1], np.unique(np.concatenate(drawn)))
        for sample, party in zip(of_round, parties, strict=True):
            source, target = party.graph.edge_index()
            for layer in range(4):
                upper, found = sample.nodes[layer + 1], sample.draws[layer].nodes
                neighbours = source[np.isin(target, upper)]
                assert np.isin(found, np.concatenate([upper, neighbours])).all()
                limit = len(upper) * (1 + fanout)
                assert len(found) <= limit


def test_below_the_lowest_aggregation_the_clients_sets_may_differ():
    _, samples = run_with_sampler(aggregation_layers=(2, 3))
    first = [own[0] for own in samples]
    assert len({sample.nodes[0].tobytes() for sample in first}) > 1
    assert len({sample.nodes[3].tobytes() for sample in first}) == 1


def test_batches_are_drawn_anew_in_every_round_from_the_training_nodes_alone():
    for labels in ("all", "b"):
        _, samples = run_with_sampler(aggregation_layers=(3,), num_rounds=8, labels=labels)
        train = tiny_parties()[0].splits.train
        batches = [sample.nodes[-1] for sample in samples[0]]
        assert all(len(batch) == 3 and np.isin(batch, train).all() for batch in batches)
        assert len({batch.tobytes() for batch in batches}) > 4


def test_a_block_uses_the_edges_the_client_drew_itself_and_an_induced_one_all_between_the_sets():
    parties = tiny_parties()
    for blocks in ("drawn", "induced"):
        done, samples = run_with_sampler(aggregation_layers=(1, 3), fanout=1, blocks=blocks)
        for m, (client, party) in enumerate(zip(done.clients, parties, strict=True)):
            sample = samples[m][0]
            source, target = party.graph.edge_index()
            for layer in range(4):
                rows, columns = sample.nodes[layer + 1], sample.nodes[layer]
                matrix = client.learner.sampler.block(rows, columns, sample.draws[layer]).matrix.toarray()
                np.fill_diagonal(between := np.isin(np.arange(N), columns)[None, :] & edges_of(source, target), True)
                allowed = between[np.ix_(rows, columns)]
                used = matrix != 0
                if blocks == "induced":
                    np.testing.assert_array_equal(used, allowed)
                else:
                    assert (used <= allowed).all()
                    assert (used.sum(axis=1) <= 2).all()  # its self loop and one neighbour


def edges_of(source, target):
    dense = np.zeros((N, N), bool)
    dense[target, source] = True
    return dense


@pytest.mark.parametrize(
    "spoil",
    [
        lambda nodes: np.append(nodes, np.int32(N)),  # no such node
        lambda nodes: np.append(np.int32(-1), nodes),
        lambda nodes: nodes[::-1],
        lambda nodes: nodes[1:],  # without a node that was proposed
        lambda nodes: np.repeat(nodes, 2),
    ],
)
def test_an_agreed_set_that_is_no_union_is_refused(spoil):
    def carry(message):
        if isinstance(message, Agreed):
            return dataclasses.replace(message, node_sets=tuple(map(spoil, message.node_sets)))
        return message

    config = settings(sampler="neighbor", fanout=2, batch_size=3, aggregation_layers=(1, 3))
    with pytest.raises(ProtocolError, match=r"must be sorted, lie in 0\.\.23 and contain this party\'s proposal"):
        run(config, tiny_parties(), carry=carry)


def test_evaluation_nodes_that_cannot_be_are_refused_before_a_loop_reads_them():
    def carry(message):
        if isinstance(message, Agreed) and message.key.phase is Phase.EVALUATION:
            return dataclasses.replace(message, node_sets=(np.array([0, 10**6], np.int32),))
        return message

    config = settings(sampler="neighbor", labels="b", sampled_evaluation=True, aggregation_layers=(1, 3))
    with pytest.raises(ProtocolError, match=r"must be sorted, lie in 0\.\.23"):
        run(config, tiny_parties(owner="b"), carry=carry)


# --- traffic -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layers", [(1, 3), ALL_LAYERS])
def test_with_a_shared_sampler_no_index_travels(layers):
    done, _ = run_with_sampler(sampler="shared", aggregation_layers=layers, evaluate_every=2)
    assert done.meter.by_kind["index"] == 0
    assert done.meter.by_phase["sampling"] == 0
    assert done.meter.exchanges_by_phase["sampling"] == 0


@pytest.mark.parametrize("prefetch", [0, 1, 3, 16])
def test_with_a_shared_sampler_a_label_owner_publishes_the_training_nodes_exactly_once(prefetch):
    published = []

    def see(message):
        if isinstance(message, Proposal | Agreed) and message.key.phase is Phase.SAMPLING:
            published.append([nodes.copy() for nodes in message.node_sets])
        return message

    keys = {"sampler": "shared", "labels": "b", "prefetch": prefetch, "num_rounds": 5, "batch_size": 3, "fanout": 1}
    done = run(settings(aggregation_layers=(1, 3), **keys), tiny_parties(owner="b"), carry=see)
    train = tiny_parties()[1].splits.train
    assert [len(sets) for sets in published] == [1] * 6  # three proposals, three unions, one set each
    assert [len(sets[0]) for sets in published] == [0, len(train), 0, *[len(train)] * 3]
    for sets in published[3:]:
        np.testing.assert_array_equal(sets[0], train)
    assert done.meter.by_phase["sampling"] == 6 * (HEADER + SECTION) + 4 * NODE * TRAIN
    assert done.meter.exchanges_by_phase["sampling"] == 1


@pytest.mark.parametrize("layers", [(3,), (0, 2, 3)])
@pytest.mark.parametrize(
    ("keys", "per_round", "first"),  # each (a, b) stands for a K + b
    [
        ({"sampler": "neighbor"}, (1, 0), (1, -1)),
        ({"sampler": "neighbor", "num_local_steps": 3}, (1, 0), (1, -1)),
        ({"sampler": "neighbor", "backward": "joint"}, (2, 0), (1, -1)),
        ({"sampler": "neighbor", "labels": "b"}, (1, 1), (1, 0)),  # one more: the owner's batch
        ({"sampler": "neighbor", "labels": "b", "backward": "joint"}, (2, 0), (1, 0)),
        ({"sampler": "full"}, (1, 0), (0, 0)),
        ({"sampler": "full", "labels": "b"}, (1, 1), (0, 1)),
        ({"sampler": "shared"}, (1, 0), (0, 0)),
        ({"sampler": "shared", "labels": "b"}, (1, 1), (0, 1)),
    ],
    ids=str,
)
def test_a_round_costs_k_exchanges_and_the_first_agreement_k_minus_1_once(keys, per_round, first, layers):
    done, _ = run_with_sampler(aggregation_layers=layers, num_rounds=3, prefetch=1, **keys)
    K = len(layers)
    assert done.meter.exchanges_by_phase["training"] == 3 * (per_round[0] * K + per_round[1])
    assert done.meter.exchanges_by_phase["sampling"] == first[0] * K + first[1]


def test_without_prefetch_every_round_pays_for_its_agreement():
    done, _ = run_with_sampler(aggregation_layers=(0, 2, 3), prefetch=0)
    assert done.meter.exchanges_by_phase["sampling"] == 4 * 2
    assert done.meter.exchanges_by_phase["training"] == 4 * 3


@pytest.mark.parametrize(
    "keys",
    [
        {"sampling": "node"},
        {"sampling": "layer"},
        {"blocks": "induced"},
        {"labels": "b"},
        {"backward": "joint"},
        {"sampler": "full"},
        {"sampler": "shared", "labels": "c"},
    ],
    ids=str,
)
def test_prefetching_changes_neither_a_weight_nor_an_index_byte(keys):
    keys = {"aggregation_layers": (1, 3), "num_rounds": 4, "evaluate_every": 2, "dropout": 0.5, **keys}
    runs = [run_with_sampler(prefetch=prefetch, **keys)[0] for prefetch in (0, 1, 3, 16)]
    for other in runs[1:]:
        assert identical(other.final, runs[0].final)
        assert other.server.progress.losses == runs[0].server.progress.losses
        assert other.meter.by_kind["index"] == runs[0].meter.by_kind["index"]
        assert other.meter.by_kind["tensor"] == runs[0].meter.by_kind["tensor"]


@pytest.mark.parametrize(
    ("keys", "precision"),
    [({}, "fp64"), ({}, "int8"), ({"num_local_steps": 4}, "int8"), ({"sampling": "layer"}, "fp64")],
    ids=str,
)
def test_a_report_counts_two_exchanges_per_round_for_two_layers_and_the_same_weights_for_any_prefetch(keys, precision):
    rounds, reports = 12, {}
    for prefetch in (0, 1, 16):
        config = settings(
            aggregation_layers=(1, 3),
            num_rounds=rounds,
            evaluate_every=4,
            dropout=0.5,
            prefetch=prefetch,
            precision=precision,
            **{"sampler": "neighbor", "fanout": 2, "batch_size": 3, **keys},
        )
        reports[prefetch] = json.loads(simulate(tiny_parties(), config).report.to_json())
    steady = {prefetch: report["traffic"]["exchanges_by_phase"] for prefetch, report in reports.items()}
    assert {prefetch: found["training"] / rounds for prefetch, found in steady.items()} == {0: 2.0, 1: 2.0, 16: 2.0}
    assert {prefetch: found["sampling"] for prefetch, found in steady.items()} == {0: rounds, 1: 1, 16: 1}
    for prefetch in (1, 16):  # between two evaluations: four rounds, and the exchanges of one evaluation
        points = [entry["exchanges"] for entry in reports[prefetch]["history"]]
        evaluation = 2 + 1 + 1  # two layers, probabilities, metrics; the last is counted after the history's entry
        assert points[0] == 1 + 4 * 2 + evaluation - 1
        assert np.diff(points).tolist() == [4 * 2 + evaluation] * 2
    assert len({tuple(report["weights_sha256"]) for report in reports.values()}) == 1
    assert len({tuple(report["losses"]) for report in reports.values()}) == 1


# --- sampled evaluation ------------------------------------------------------------------------------------------


def evaluations(**keys):
    done, _ = run_with_sampler(aggregation_layers=(1, 3), evaluate_every=2, **keys)
    return [(event.split, event.metrics) for event in done.events if hasattr(event, "metrics")]


@pytest.mark.parametrize("labels", ["all", "b"])
@pytest.mark.parametrize("sampler", ["neighbor", "shared"])
def test_sampled_evaluation_with_a_fanout_above_every_degree_is_exact(sampler, labels):
    keys = {"sampler": sampler, "fanout": 100, "labels": labels}
    exact, drawn = evaluations(**keys), evaluations(sampled_evaluation=True, **keys)
    assert [split for split, _ in drawn] == ["validation", "validation", "test"]
    for (_, found), (_, expected) in zip(drawn, exact, strict=True):
        assert found == pytest.approx(expected, rel=1e-9)


def test_a_bound_on_the_nodes_of_training_does_not_hold_in_evaluation():
    done, _ = run_with_sampler(aggregation_layers=(1, 3), fanout=2, max_nodes=4)
    sampler, nodes = done.clients[0].learner.sampler, np.arange(8)
    assert len(sampler.draw(nodes, 0, 1, "neighbors").nodes) == 8
    assert len(sampler.draw(nodes, 0, 1, "evaluation neighbors").nodes) > 8


@pytest.mark.parametrize("sampling", ["node", "layer"])
def test_sampled_evaluation_sees_sampled_neighbours_only(sampling):
    keys = {"fanout": 1, "sampling": sampling}
    exact, drawn = evaluations(**keys), evaluations(sampled_evaluation=True, **keys)
    assert [split for split, _ in drawn] == [split for split, _ in exact]
    assert drawn[0][1]["loss"] != pytest.approx(exact[0][1]["loss"], rel=1e-6)


@pytest.mark.parametrize("keys", [{"sampling": "node"}, {"sampling": "layer"}, {"sampler": "shared"}], ids=str)
def test_evaluation_draws_from_a_stream_of_its_own(keys):
    done, _ = run_with_sampler(aggregation_layers=(1, 3), fanout=1, **keys)
    nodes, differ = np.arange(4), 0
    for client in done.clients:
        for layer in range(4):
            train, evaluation = (
                client.learner.sampler.draw(nodes, 2, layer, p) for p in ("neighbors", "evaluation neighbors")
            )
            np.testing.assert_array_equal(client.learner.sampler.draw(nodes, 2, layer).edges, train.edges)
            differ += not np.array_equal(train.edges, evaluation.edges)
    assert differ >= 6


@pytest.mark.parametrize("keys", [{}, {"labels": "b"}, {"sampler": "shared"}, {"backward": "joint"}], ids=str)
def test_sampled_evaluation_does_not_touch_the_training(keys):
    keys = {"aggregation_layers": (1, 3), "evaluate_every": 1, "dropout": 0.5, **keys}
    exact, drawn = (run_with_sampler(sampled_evaluation=value, **keys)[0] for value in (False, True))
    assert identical(exact.final, drawn.final)
    assert exact.server.progress.losses == drawn.server.progress.losses
