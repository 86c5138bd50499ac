"""Epsilon from ledger entries, against an independent computation; and the refusal before the target is passed."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.optimize import brentq
from scipy.stats import norm

from glasu.privacy.accounting import Accountant, BudgetError, compute_epsilon, find_multiplier
from glasu.privacy.ledger import Ledger
from glasu.privacy.noise import Mechanism, RowNoise
from glasu.privacy.release import Protection, Release
from glasu.wire.encodings import use_for_all_kinds
from glasu.wire.floats import Plain
from glasu.wire.message_key import Key, Phase
from glasu.wire.tensor_kinds import PROBABILITIES, REPRESENTATION
from support.ledgers import Lines

pytest.importorskip("dp_accounting")
KEY = Key(run=bytes(12), phase=Phase.TRAINING, client=0, round=0, layer=1)
SECRET, DELTA = b"a secret of thirty-two bytes ...", 1e-5
ROWS = torch.from_numpy(np.random.default_rng(0).normal(size=(4, 3)))


def epsilon_of(multiplier, delta=DELTA):
    """Return epsilon of the Gaussian mechanism by Balle and Wang (2018), Theorem 8, with our own root finder."""

    def excess(epsilon):
        shift, scale = epsilon * multiplier, 1 / (2 * multiplier)
        second = epsilon + norm.logcdf(-scale - shift)
        return norm.cdf(scale - shift) - math.exp(second) - delta

    return brentq(excess, 0, 1e5, xtol=1e-12)


def make_gate(multiplier=1.0, target=None, sink=None, clip=1.0):
    rule = Accountant(DELTA, target)
    noise = {kind: RowNoise(Mechanism(clip, multiplier), kind, SECRET) for kind in (REPRESENTATION, PROBABILITIES)}
    protections = {kind: Protection(noise=each) for kind, each in noise.items()}
    return Release(use_for_all_kinds(Plain("fp64")), protections, Ledger(sink, (rule,)), (rule,)), rule


@pytest.mark.parametrize(("multiplier", "releases"), [(0.1, 1), (0.6, 1), (1.0, 20), (4.0, 120), (26.8, 2000)])
def test_epsilon_is_that_of_an_independent_computation(multiplier, releases):
    gate, rule = make_gate(multiplier)
    count = min(releases, 20)
    for index in range(count):
        gate.tensor(REPRESENTATION, ROWS, KEY._replace(round=index), np.arange(4))
    spent, composed = rule.summarize(), multiplier / math.sqrt(count)
    assert spent.releases == count
    assert spent.epsilon_zeroed == pytest.approx(epsilon_of(composed), rel=1e-6)
    assert spent.epsilon_replaced == pytest.approx(epsilon_of(composed / 2), rel=1e-6)
    assert compute_epsilon(multiplier / math.sqrt(releases), DELTA) == pytest.approx(
        epsilon_of(multiplier / math.sqrt(releases)), rel=1e-6
    )


def test_kinds_with_different_multipliers_compose():
    rule = Accountant(DELTA)
    protections = {
        REPRESENTATION: Protection(noise=RowNoise(Mechanism(1.0, 1.0), REPRESENTATION, SECRET)),
        PROBABILITIES: Protection(noise=RowNoise(Mechanism(0.5, 3.0), PROBABILITIES, SECRET)),
    }
    gate = Release(use_for_all_kinds(Plain()), protections, Ledger(rules=(rule,)))
    for kind in protections:
        gate.tensor(kind, ROWS, KEY, np.arange(4))
    assert rule.summarize().epsilon_zeroed == pytest.approx(epsilon_of((1 + 1 / 9) ** -0.5), rel=1e-6)


def test_a_repeated_row_counts_once_and_one_with_other_content_again():
    gate, rule = make_gate()
    gate.tensor(REPRESENTATION, ROWS, KEY, np.arange(4))
    gate.tensor(REPRESENTATION, ROWS, KEY._replace(attempt=1, incarnation=2, run=b"another run "), np.arange(4))
    assert rule.summarize().releases == 1
    changed = ROWS.clone()
    changed[2] += 1
    gate.tensor(REPRESENTATION, changed, KEY._replace(attempt=2), np.arange(4))
    assert rule.summarize().releases == 2  # of node 2
    gate.tensor(REPRESENTATION, ROWS[:2], KEY._replace(round=1), np.arange(2))
    gate.tensor(REPRESENTATION, ROWS[:2], KEY._replace(round=2), np.arange(2))
    assert rule.summarize().releases == 3  # of nodes 0 and 1
    assert rule.summarize().rows == 4


def test_the_order_of_rows_does_not_matter():
    gate, rule = make_gate()
    order = np.array([2, 0, 3, 1])
    gate.tensor(REPRESENTATION, ROWS, KEY, np.arange(4))
    gate.tensor(REPRESENTATION, ROWS[order], KEY, order)
    assert rule.summarize().releases == 1


def test_a_release_that_would_pass_the_target_is_refused_and_not_entered():
    target = epsilon_of(1 / math.sqrt(3) / 2)  # of a replaced row, after three releases
    lines = Lines()
    gate, rule = make_gate(target=target, sink=lines)
    for index in range(3):
        gate.tensor(REPRESENTATION, ROWS, KEY._replace(round=index), np.arange(4))
    with pytest.raises(
        BudgetError, match=r"probabilities in training round 3 would raise .* Nothing was sent"
    ) as caught:
        gate.tensor(PROBABILITIES, ROWS, KEY._replace(round=3), np.arange(4))
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 2
    assert len(lines.lines) == 3
    assert rule.summarize().epsilon_replaced == pytest.approx(target)
    gate.tensor(REPRESENTATION, ROWS, KEY._replace(round=2, attempt=1), np.arange(4))  # a repeat costs nothing


def test_an_accountant_that_reads_the_ledger_again_has_the_same_sum():
    lines = Lines()
    gate, rule = make_gate(0.7, sink=lines)
    for index in range(3):
        gate.tensor(REPRESENTATION, ROWS, KEY._replace(round=index // 2), np.arange(4))
    again = Accountant(DELTA)
    for record in lines.read():
        again.add(record)
    assert again.summarize() == rule.summarize()
    assert again.summarize().releases == 2


def test_the_smallest_multiplier_for_an_epsilon_is_that_of_the_table_in_the_docs():
    for releases, multiplier in [(1, 0.6), (10, 1.9), (120, 6.6), (2000, 26.8)]:
        assert find_multiplier(8.0, DELTA, releases) == pytest.approx(multiplier, rel=0.02)


def test_discrete_noise_has_at_most_the_delta_of_the_continuous_one():
    """Sum the excess probability of integers for a shift of the whole clip, and compare it with the closed form."""
    mechanism = Mechanism(1.0, 0.8)
    deviation, shift = mechanism.deviation / mechanism.step, 1 / mechanism.step
    numbers = np.arange(-20_000, 20_001)
    weights = np.exp(-(numbers.astype(float) ** 2) / (2 * deviation**2))
    shares, moved = weights / weights.sum(), np.roll(weights, int(shift)) / weights.sum()
    epsilon = compute_epsilon(mechanism.multiplier, DELTA)
    assert np.maximum(moved - math.exp(epsilon) * shares, 0).sum() <= DELTA * (1 + 1e-4)


def test_the_summary_says_for_what_it_holds():
    gate, rule = make_gate()
    gate.tensor(REPRESENTATION, ROWS, KEY, np.arange(4))
    said = str(rule.summarize())
    for part in ("epsilon 4.38 if a row becomes zero", "10", "delta 1e-05", "released once", "not a node, an edge"):
        assert part in said
    assert Accountant(DELTA).summarize().epsilon_replaced == 0
