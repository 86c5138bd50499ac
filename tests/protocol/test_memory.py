"""The memory of a training round depends on its batch, not on the size of the graph."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

from glasu.data.party import Graph, PartyData, Splits
from support.monolith import run, settings


class Enough(Exception):  # noqa: N818
    """The measured round is complete."""


def large_parties(num_nodes):
    """Return three parties with two features and about four random edges per node."""
    rng = np.random.default_rng(0)
    ids, labels = np.arange(num_nodes), rng.integers(0, 3, num_nodes)
    train, validation, test = np.split(rng.permutation(num_nodes), [num_nodes // 2, 3 * num_nodes // 4])
    told = (labels, ("x", "y", "z"), Splits(np.sort(train), np.sort(validation), np.sort(test)))
    return [
        PartyData(
            name,
            ids,
            rng.standard_normal((num_nodes, 2), np.float32),
            Graph.from_edges(*rng.integers(0, num_nodes, (2, 4 * num_nodes)), num_nodes),
            *told,
        )
        for name in "abc"
    ]


@pytest.fixture(scope="module")
def parties():
    return {num_nodes: large_parties(num_nodes) for num_nodes in (20_000, 200_000)}


def peak_of_one_round(parties, **keys):
    """Return the peak allocation of one round of all clients and the server, after two warm-up rounds."""
    config = settings(
        **{"num_layers": 2, "aggregation_layers": (0, 1), "batch_size": 16, "fanout": 2, "num_rounds": 100, **keys}
    )
    peaks = []

    def arrange(clients):
        begin = clients[0].learner.set_learning_rate  # is called once per round

        def see(round_index):
            if round_index == 2:
                tracemalloc.start()
            elif round_index == 3:
                peaks.append(tracemalloc.get_traced_memory()[1])
                raise Enough
            begin(round_index)

        clients[0].learner.set_learning_rate = see

    try:
        with pytest.raises(Enough):
            run(config, parties, arrange=arrange)
    finally:
        tracemalloc.stop()
    return peaks[0]


@pytest.mark.parametrize(
    "keys",
    [
        {"sampler": "neighbor"},
        {"sampler": "neighbor", "sampling": "layer"},
        {"sampler": "neighbor", "prefetch": 0},
        {"sampler": "shared"},
        {"sampler": "shared", "backward": "joint"},
        {"sampler": "neighbor", "num_local_steps": 4, "dropout": 0.5, "backbone": "gcnii"},
    ],
    ids=str,
)
def test_a_round_over_ten_times_as_many_nodes_allocates_less_than_twice_as_much(parties, keys):
    small, large = (peak_of_one_round(parties[num_nodes], **{"prefetch": 1, **keys}) for num_nodes in parties)
    assert large < 2 * small
    assert large < 200_000 * 4  # not even four bytes per node
