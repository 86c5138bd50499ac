"""Edges from index sets, on planted graphs."""

from __future__ import annotations

import numpy as np
import pytest

from glasu.privacy.attacks.edges import Draws, encode_edges, measure_edge_share, put_first, rank_pairs

NODES = 60


def plant(rounds: int, *, known: bool) -> tuple[np.ndarray, Draws]:
    """Return the edges of a ring with chords, and the sets of a client that draws one neighbour of each target."""
    rng = np.random.default_rng(0)
    source = np.concatenate([np.arange(NODES), np.arange(0, NODES, 3)])
    target = np.concatenate([(np.arange(NODES) + 1) % NODES, (np.arange(0, NODES, 3) + 17) % NODES])
    neighbors = [np.concatenate([target[source == node], source[target == node]]) for node in range(NODES)]
    batches = [np.sort(rng.choice(NODES, 4, replace=False)) for _ in range(rounds)]
    drawn = [np.union1d(batch, [rng.choice(neighbors[node]) for node in batch]) for batch in batches]
    return encode_edges(source, target, NODES), Draws(batches if known else None, drawn)


@pytest.mark.parametrize(("known", "least"), [(True, 0.9), (False, 0.7)])
def test_neighbours_that_are_drawn_together_are_found(known, least):
    edges, draws = plant(2000, known=known)
    assert measure_edge_share(rank_pairs([draws], NODES), edges) >= least


def test_draws_that_do_not_depend_on_the_graph_give_no_edges():
    rng = np.random.default_rng(1)
    edges, draws = plant(500, known=True)
    drawn = [np.union1d(batch, rng.choice(NODES, 4, replace=False)) for batch in draws.targets]
    chance = len(edges) / (NODES * (NODES - 1) / 2)
    assert measure_edge_share(rank_pairs([Draws(draws.targets, drawn)], NODES), edges) <= 4 * chance


def test_without_sets_there_is_nothing_to_rank():
    assert rank_pairs([], NODES).size == 0
    assert measure_edge_share(rank_pairs([], NODES), np.array([1, 2])) == 0


def test_an_edge_counts_once_whatever_its_direction_and_a_loop_never():
    assert encode_edges(np.array([1, 2, 3]), np.array([2, 1, 3]), 10).tolist() == [12]


def test_own_edges_are_guessed_first_and_only_once():
    assert put_first(np.array([5, 7]), np.array([7, 3, 1])).tolist() == [5, 7, 3, 1]


def test_the_share_counts_as_many_guesses_as_there_are_edges():
    assert measure_edge_share(np.array([1, 9, 2]), np.array([1, 2])) == 0.5
