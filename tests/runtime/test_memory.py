"""The estimate of the memory that samples need follows the samples that a run keeps."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from glasu import registry
from glasu.config import RunConfig, list_candidates, resolve
from glasu.data.graph import Graph
from glasu.data.party import PartyData, Splits
from glasu.errors import ConfigError
from glasu.model.draw_estimates import DrawEstimate
from glasu.model.sampler import Neighbor, Sampler
from glasu.runtime.memory import DRAW_OVERHEAD, check_memory, estimate_samples
from support.monolith import run
from support.tiny import settings, tiny_parties

GIB = 2**30
MIB = 2**20
WINDOW = 4


def measure_samples(config, parties):
    """Return the bytes of the samples of all rounds at the first client, without arrays that several rounds share."""
    samples = {}

    def arrange(clients):
        learner = clients[0].learner
        gather = learner.gather

        def see(sample, **keys):
            samples[sample.round] = sample
            return gather(sample, **keys)

        learner.gather = see

    run(config, parties, arrange=arrange)
    assert len(samples) == config.train.num_rounds
    sizes, holders = {}, Counter()
    for sample in samples.values():
        arrays = [*sample.nodes, *(array for draw in sample.draws for array in draw if array is not None)]
        sizes |= {id(array): array.nbytes for array in arrays}
        holders.update({id(array) for array in arrays})
    return sum(size for array, size in sizes.items() if holders[array] == 1)


@pytest.mark.parametrize(
    "keys",
    [
        {"sampler": "neighbor", "batch_size": 0, "fanout": 10**6},
        {"sampler": "neighbor", "batch_size": 0, "fanout": 3},
        {"sampler": "neighbor", "batch_size": 4, "fanout": 2},
        {"sampler": "neighbor", "batch_size": 4, "fanout": 2, "aggregation_layers": (0, 1, 2, 3)},
        {"sampler": "neighbor", "batch_size": 4, "fanout": 2, "aggregation_layers": (3,)},
        {"sampler": "neighbor", "batch_size": 4, "fanout": 2, "max_nodes": 100},
        {"sampler": "neighbor", "batch_size": 4, "fanout": 2, "sampling": "layer"},
        {"sampler": "neighbor", "batch_size": 0, "fanout": 10**6, "sampling": "layer"},
        {"sampler": "shared", "batch_size": 4, "fanout": 2},
        {"sampler": "shared", "batch_size": 0, "fanout": 10**6},
        {"sampler": "full", "batch_size": 4},
        {"sampler": "full", "batch_size": 200},
    ],
    ids=str,
)
def test_the_estimate_is_close_to_the_samples_that_two_windows_keep(keys):
    parties = tiny_parties(num_nodes=600, degree=10)
    config = settings(prefetch=WINDOW, num_rounds=2 * WINDOW, **keys)
    measured, estimated = measure_samples(config, parties), estimate_samples(config, parties[0])
    overhead = config.train.num_rounds * config.model.num_layers * DRAW_OVERHEAD
    assert 0.8 * measured < estimated < 1.5 * measured + overhead


def test_a_full_graph_with_a_constant_batch_keeps_one_sample_for_all_rounds():
    parties = tiny_parties(num_nodes=600, degree=10)
    config = settings(sampler="full", batch_size=0, prefetch=WINDOW, num_rounds=2 * WINDOW)
    assert measure_samples(config, parties) == 0
    assert estimate_samples(config, parties[0]) == 0


@pytest.mark.parametrize(("prefetch", "num_rounds", "kept"), [(0, 9, 1), (1, 9, 2), (4, 9, 8), (1024, 9, 9)])
def test_the_samples_of_this_window_and_of_the_next_are_kept(prefetch, num_rounds, kept):
    keys = {"sampler": "neighbor", "batch_size": 4, "fanout": 2}
    party = tiny_parties()[0]
    one_round = estimate_samples(settings(prefetch=0, **keys), party)
    assert estimate_samples(settings(prefetch=prefetch, num_rounds=num_rounds, **keys), party) == kept * one_round


def test_a_party_without_labels_expects_any_nodes_in_a_batch_of_all_training_nodes():
    config = settings(labels="b", sampler="neighbor", batch_size=0, num_layers=1, aggregation_layers=(0,))
    other, owner, _ = tiny_parties(num_nodes=600, owner="b")  # 300 nodes are training nodes
    assert estimate_samples(config, other) > 1.5 * estimate_samples(config, owner)


class FewNodes(Neighbor):
    """States its own estimate: seven nodes more in each layer, and 100 numbers."""

    @classmethod
    def estimate_draw(cls, train, counts, num_targets, *, constant_batch):
        return DrawEstimate(num_targets + 7, 100)


class Unknown(Neighbor):
    """States no estimate of its own."""

    estimate_draw = Sampler.estimate_draw


def test_the_estimate_of_a_registered_sampler_decides_and_without_one_a_draw_has_the_whole_graph():
    registry.register("sampler", "few-nodes", FewNodes)
    registry.register("sampler", "unknown", Unknown)
    party, keys = tiny_parties(num_nodes=600, degree=10)[0], {"batch_size": 4, "fanout": 2, "aggregation_layers": (3,)}
    few = estimate_samples(settings(sampler="few-nodes", prefetch=0, **keys), party)
    assert few == 8 * 4 + 4 * (8 * 100 + DRAW_OVERHEAD)  # the batch, and a draw for each of four layers
    whole = estimate_samples(settings(sampler="unknown", prefetch=0, **keys), party)
    assert whole > 3 * 8 * (2 * 600 + 2 * party.graph.num_edges)  # three lower layers read all nodes
    assert whole > estimate_samples(settings(sampler="neighbor", prefetch=0, **keys), party)


def make_large_party(num_nodes, num_edges):
    """Return a party with degrees from a skewed distribution. Its edge list takes no memory."""
    ids, share = np.arange(num_nodes), np.random.default_rng(0).lognormal(0, 1, num_nodes).cumsum()
    indptr = np.concatenate([[0], np.round(share / share[-1] * num_edges)]).astype(np.int64)
    graph = Graph.without_checks(indptr, np.broadcast_to(np.int32(0), num_edges))
    splits = Splits(*np.split(ids, [2 * num_nodes // 3, num_nodes - 10]))
    return PartyData("a", ids, np.ones((num_nodes, 1), np.float32), graph, ids % 5, tuple("vwxyz"), splits)


@pytest.fixture(scope="module")
def reddit():
    """A party with the size of Reddit."""
    return make_large_party(233_000, 114_000_000)


ORDINARY = {
    "defaults": {},
    "paper": {"preset": "paper"},
    "paper, by key": {"preset": "none", "sampler": "neighbor", "batch_size": 16, "fanout": 3, "num_rounds": 1024},
    "shared seed": {"preset": "none", "sampler": "shared", "batch_size": 16, "fanout": 3, "num_rounds": 1024},
    "full graph": {"sampler": "full", "batch_size": 0},
    "full graph, small batch": {"sampler": "full", "batch_size": 16},
}


@pytest.mark.parametrize("name", ORDINARY)
def test_the_samples_of_ordinary_settings_fit_into_two_gib(name, reddit):
    config, _ = resolve(RunConfig().replace(train=ORDINARY[name]), reddit.num_nodes)
    for candidate in list_candidates(config):
        assert estimate_samples(candidate, reddit) < 2 * GIB
    check_memory(RunConfig().replace(train=ORDINARY[name]), [reddit], 2 * GIB, "the limit is {limit}.")


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        (
            {"sampler": "neighbor", "batch_size": 0, "fanout": 10**6},
            r"train\.prefetch=400, train\.batch_size=0 \(all training nodes\), train\.fanout=1000000: the samples",
        ),
        ({"sampler": "full", "batch_size": 1000}, r"train\.prefetch=400, train\.batch_size=1000: the samples"),
    ],
)
def test_a_window_that_does_not_fit_is_refused_and_a_short_one_is_not(keys, words):
    parties = tiny_parties(num_nodes=3000, degree=30)[:1]
    keys = {"hidden": 6, "num_rounds": 10_000, **keys}
    check_memory(settings(prefetch=1, **keys), parties, 64 * MIB, "the limit is {limit}.")
    with pytest.raises(ConfigError, match=rf"{words} of 800 rounds need about .* [MG]iB, and the limit is 64\.0 MiB\."):
        check_memory(settings(prefetch=400, **keys), parties, 64 * MIB, "the limit is {limit}.")
