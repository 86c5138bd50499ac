"""Public grids of masked tensors: rounding, ranges that all clients derive alike, and clamped values."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from glasu.errors import ProtocolError, TrainingError
from glasu.privacy.column_grids import ColumnGrids
from glasu.privacy.release import Release
from glasu.secret import Secret
from glasu.wire.encodings import use_for_all_kinds
from glasu.wire.ring import Ring
from glasu.wire.tensor_kinds import GRADIENT, PROBABILITIES, REPRESENTATION
from support.masks import key_of

M = 3


def exchange(grids, values, kind=REPRESENTATION, ring=None, layer=1):
    """Release the values of all clients; return what each reads, and the contributions."""
    ring = ring or Ring(32, M)
    sent = [
        own.to_integers(kind, each, key_of(m, layer), ring)
        for m, (own, each) in enumerate(zip(grids, values, strict=True))
    ]
    (total,) = ring.combine([numbers for numbers, _ in sent], 1, [key_of(0)])
    return [own.to_mean(kind, total, key_of(m, layer), ring, M) for m, own in enumerate(grids)], [
        own for _, own in sent
    ]


def normal(seed=0, rows=50, columns=6, scale=1.0):
    return scale * torch.randn(M, rows, columns, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("bits", "largest"), [(32, 1e-6), (16, 2e-3), (8, 0.15)])
def test_all_clients_read_the_same_mean_and_it_is_close_to_the_exact_one(bits, largest):
    grids = [ColumnGrids(seed=m) for m in range(M)]
    for seed in range(3):
        values = normal(seed)
        joint, own = exchange(grids, values, ring=Ring(bits, M))
        assert all(torch.equal(each, joint[0]) for each in joint)
        if seed:  # in the first exchange the range is a constant
            assert (joint[0] - values.mean(dim=0)).abs().max() < largest * 3
        torch.testing.assert_close(torch.stack(own).mean(dim=0), joint[0])
    ranges = [each.ranges["representation", 1] for each in grids]
    assert all(torch.equal(each, ranges[0]) for each in ranges)


def test_the_range_follows_the_aggregate_up_and_down_per_column():
    grids = [ColumnGrids() for _ in range(M)]
    scales = torch.tensor([1.0, 100.0, 30.0, 1e-9])
    for seed in range(8):
        exchange(grids, normal(seed, columns=4, scale=scales))
    found = grids[0].ranges["representation", 1]
    assert found[1] > 100
    assert found[2] < found[1]
    torch.testing.assert_close(found[3], found[1] / 16)  # a constant column keeps a share of the largest range
    assert grids[0].ranges.keys() == {("representation", 1)}


@pytest.mark.parametrize("bits", [8, 16, 32])
def test_a_range_that_is_too_small_for_one_party_grows(bits):
    grids, value = [ColumnGrids(first_range=0.01) for _ in range(M)], torch.zeros(M, 4, 2)
    value[1] = 5.0
    for _ in range(60):
        joint, _ = exchange(grids, value, ring=Ring(bits, M))
    torch.testing.assert_close(joint[0], value.mean(dim=0), rtol=0.1, atol=0.0)
    assert [own.clamped > 0 for own in grids] == [False, True, False]  # a party counts its own values


def test_zero_and_one_are_exact_and_scores_keep_their_range():
    grids = [ColumnGrids(first_range=8.0) for _ in range(M)]
    scores = torch.tensor([[0.0, 1.0], [1.0, 0.0]]).expand(M, 2, 2)
    for _ in range(2):
        joint, _ = exchange(grids, scores, kind=PROBABILITIES)
        assert torch.equal(joint[0], scores[0])
    assert grids[0].ranges == {}


def test_gradients_are_rounded_without_bias_under_the_secret_of_the_party():
    ring, value = Ring(8, M), torch.full((4000, 1), 0.3)
    drawn = []
    for secret in (bytes(32), b"1" * 32):
        grids = ColumnGrids(first_range=4000 * 42.0, seed=Secret(secret))  # a step of 1
        drawn.append(grids.to_integers(GRADIENT, value, key_of(0), ring)[1])
        again = ColumnGrids(first_range=4000 * 42.0, seed=Secret(secret))
        assert torch.equal(again.to_integers(GRADIENT, value, key_of(0), ring)[1], drawn[-1])
        assert set(drawn[-1].unique().tolist()) == {0.0, 1.0}
        assert abs(drawn[-1].mean() - 0.3) < 4 * (0.3 * 0.7 / 4000) ** 0.5
    assert not torch.equal(*drawn)
    nearest = ColumnGrids(first_range=42.0).to_integers(REPRESENTATION, value, key_of(0), ring)[1]
    assert not nearest.any()


def test_values_that_are_not_finite_are_refused_before_anything_is_sent():
    for bad in (torch.nan, torch.inf):
        with pytest.raises(TrainingError, match="not a finite number; training diverged"):
            ColumnGrids().to_integers(REPRESENTATION, torch.tensor([[1.0, bad]]), key_of(0), Ring(32, M))


def test_an_empty_tensor_is_sent_and_changes_no_range():
    joint, _ = exchange([ColumnGrids() for _ in range(M)], torch.zeros(M, 0, 2))
    assert joint[0].shape == (0, 2)


def test_without_agreed_keys_nothing_is_released():
    release = Release(use_for_all_kinds(Ring(32, M)))
    with pytest.raises(ProtocolError, match="have not agreed on keys; nothing was sent"):
        release.tensor(REPRESENTATION, torch.ones(2, 2), key_of(0))
    assert release.ledger.list_totals() == []


def test_the_integers_stay_below_the_levels_of_a_party():
    ring = Ring(8, M)
    numbers, _ = ColumnGrids(first_range=1.0).to_integers(REPRESENTATION, normal()[0] * 9, key_of(0), ring)
    assert numbers.min() >= 0
    assert numbers.max() < ring.levels
    assert numbers.dtype == np.uint8
