"""Row noise: its sensitivity, its distribution, and the pseudorandom function that makes it."""

from __future__ import annotations

import ast
import math
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.stats import chisquare

import glasu
from glasu.errors import TrainingError
from glasu.privacy.noise import (
    Mechanism,
    RowNoise,
    ScoreRepair,
    derive_noise_key,
    draw_noise,
    make_words,
    read_mechanism,
)
from glasu.secret import Secret
from glasu.wire.message_key import Key, Phase

KEY = Key(run=bytes(12), phase=Phase.TRAINING, client=0, round=3, layer=1)
SECRET = b"a secret of thirty-two bytes ..."
NODES = np.array([4, 9, 2])
NOISE = RowNoise(Mechanism(1.0, 0.5), "representation", SECRET)
ROWS = torch.from_numpy(np.random.default_rng(0).normal(size=(3, 8)))


def draw(noise=NOISE, rows=ROWS, key=KEY, nodes=NODES):
    """Return the noise of rows, in multiples of the step."""
    found, _ = noise.perturb(rows, key, nodes)
    return np.rint(found.numpy() / noise.mechanism.step).astype(int) - noise.mechanism.quantize(rows.numpy())


# Sensitivity


@pytest.mark.parametrize("multiplier", [0.01, 0.3, 1.0, 7.5])
@pytest.mark.parametrize("clip", [0.1, 1.0, 3.7])
def test_no_quantized_row_is_longer_than_the_clip_in_exact_arithmetic(clip, multiplier):
    rng, mechanism = np.random.default_rng(1), Mechanism(clip, multiplier)
    rows = np.concatenate([rng.normal(size=(200, 5)) * 10.0 ** rng.integers(-4, 5, (200, 1)), np.zeros((1, 5))])
    rows = np.concatenate([rows, np.eye(5) * clip, np.full((1, 5), 1e200)])
    for row in mechanism.quantize(rows).tolist():
        assert sum(n * n for n in row) * Fraction(mechanism.step) ** 2 <= Fraction(clip) ** 2


def test_quantizing_moves_no_value_of_a_short_row_by_a_step_or_away_from_zero():
    rows = np.random.default_rng(2).uniform(-0.3, 0.3, (100, 4))
    step = NOISE.mechanism.step
    found = NOISE.mechanism.quantize(rows) * step
    assert (np.abs(rows) - np.abs(found)).min() >= 0
    assert np.abs(rows - found).max() < step


def test_the_grid_depends_on_clip_and_multiplier_only_and_is_fine():
    for clip, multiplier in [(1.0, 1.0), (0.3, 2.2), (5.0, 0.01)]:
        mechanism = Mechanism(clip, multiplier)
        assert math.log2(mechanism.step).is_integer()
        assert 256 <= mechanism.deviation / mechanism.step < 512


def test_values_that_are_not_finite_do_not_leave():
    with pytest.raises(TrainingError, match="not a finite number"):
        NOISE.perturb(torch.tensor([[1.0, math.nan]]), KEY, np.array([0]))


# Distribution


@pytest.mark.parametrize("deviation", [256.0, 300.5, 511.9])
def test_noise_has_the_probabilities_of_the_discrete_gaussian(deviation):
    words = make_words([bytes([index]) * 32 for index in range(100)], 1000)
    drawn = draw_noise(words, deviation).ravel()
    edges = np.arange(-4, 5) * 128
    numbers = np.arange(-20_000, 20_001)
    weights = np.exp(-(numbers.astype(float) ** 2) / (2 * deviation**2))
    shares = weights / weights.sum()
    bins = np.searchsorted(edges, numbers, side="right")
    expected = np.bincount(bins, shares, minlength=10)
    counted = np.bincount(np.searchsorted(edges, drawn, side="right"), minlength=10)
    assert chisquare(counted, expected * len(drawn)).pvalue > 1e-3
    assert drawn.std() == pytest.approx(deviation, rel=0.01)


def test_the_greatest_and_smallest_random_words_give_the_tails_and_the_middle_gives_zero():
    ends = np.array([[0, 0], [2**64 - 1, 2**64 - 1], [2**63, 0]], np.uint64)
    low, high, middle = draw_noise(ends, 256.0)
    assert -14 * 256 <= low < -13 * 256
    assert 13 * 256 < high <= 14 * 256
    assert middle == 0


def test_where_the_high_halves_are_equal_the_low_half_decides():
    """P(n <= -bound) is far below 2^-64, so the first entries of the table have the high half 0."""
    words = np.array([[0, 0], [0, 2**32], [0, 2**63]], np.uint64)
    drawn = draw_noise(words, 256.0)
    assert drawn[0] < drawn[1] < drawn[2] < -9 * 256


def test_noise_is_added_on_the_grid_in_the_precision_of_the_rows():
    found, _ = NOISE.perturb(ROWS.float(), KEY, NODES)
    assert found.dtype == torch.float32
    steps = found.double() / NOISE.mechanism.step
    assert torch.equal(steps, steps.round())


# The pseudorandom function


def test_the_same_content_in_the_same_place_has_the_same_noise():
    assert np.array_equal(draw(), draw())


@pytest.mark.parametrize("change", [{"run": b"another run "}, {"attempt": 1}, {"incarnation": 2}, {"chunk": 3}])
def test_noise_does_not_depend_on_run_attempt_incarnation_or_chunk(change):
    """A receiver could average two different noises of one row."""
    assert np.array_equal(draw(), draw(key=KEY._replace(**change)))


@pytest.mark.parametrize("change", [{"phase": Phase.EVALUATION}, {"round": 4}, {"layer": 2}])
def test_another_place_has_other_noise(change):
    assert (draw() != draw(key=KEY._replace(**change))).mean() > 0.9


@pytest.mark.parametrize(
    "noise",
    [
        replace(NOISE, kind="probabilities"),
        replace(NOISE, secret=SECRET[::-1]),
        replace(NOISE, mechanism=Mechanism(1.0, 0.5 + 2**-40)),  # the same grid
        replace(NOISE, mechanism=Mechanism(1.0 + 2**-40, 0.5)),
    ],
    ids=["kind", "secret", "multiplier", "clip"],
)
def test_another_kind_secret_multiplier_or_clip_gives_other_noise(noise):
    """With equal noise, two releases would show the difference of the clean rows."""
    small = 0.01 * ROWS
    assert noise.mechanism.step == NOISE.mechanism.step
    assert (draw(rows=small) != draw(noise, small)).mean() > 0.9


def test_another_node_or_row_has_other_noise_and_the_other_rows_keep_theirs():
    moved = draw(nodes=np.array([4, 8, 2]))
    rows = ROWS.clone()
    rows[1, 0] += 0.5
    changed = draw(rows=rows)
    for other in (moved, changed):
        assert np.array_equal(other[[0, 2]], draw()[[0, 2]])
        assert (other[1] != draw()[1]).mean() > 0.9


def test_equal_digests_mean_equal_rows_in_one_place():
    _, first = NOISE.perturb(ROWS, KEY, NODES)
    _, again = NOISE.perturb(ROWS, KEY._replace(attempt=3), NODES)
    _, later = NOISE.perturb(ROWS, KEY._replace(round=4), NODES)
    digests = [first[start : start + 16] for start in range(0, len(first), 16)]
    assert first == again
    assert len({*digests, *(later[start : start + 16] for start in range(0, 48, 16))}) == 6


def test_noise_without_nodes_is_refused_and_the_secret_is_never_printed():
    with pytest.raises(ValueError, match="node of every row"):
        NOISE.perturb(ROWS, KEY, None)
    assert "secret" not in repr(NOISE)


def test_the_ledger_names_the_mechanism():
    mechanism = Mechanism(1e16, 1 / 3)
    assert read_mechanism(f"clip+{replace(NOISE, mechanism=mechanism).name}+repair+masks") == mechanism
    assert read_mechanism("clip") is None


def test_the_key_of_noise_comes_from_the_secret_alone_or_from_the_public_seed():
    secret = Secret(SECRET)
    assert derive_noise_key(secret, 0) == derive_noise_key(secret, 1) != derive_noise_key(None, 0)
    assert derive_noise_key(None, 0) != derive_noise_key(None, 1)


def test_repair_reads_nothing_but_the_noisy_values():
    double = ScoreRepair(lambda values: 2 * values)
    assert torch.equal(double(ROWS, KEY), 2 * ROWS)


# No other generator


def find_generators(source: str) -> list[str]:
    """Return the uses of random generators of numpy, torch and Python in a source."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name in ("random", "secrets", "numpy.random")]
        elif isinstance(node, ast.ImportFrom) and node.module in MODULES:
            found.append(node.module)
        elif isinstance(node, ast.Attribute) and node.attr in FORBIDDEN:
            found.append(node.attr)
    return found


MODULES = ("random", "numpy.random", "torch.random", "glasu.randomness")
FORBIDDEN = {
    *("random", "default_rng", "Generator", "manual_seed", "RandomState"),
    *("rand", "randn", "randint", "randperm", "normal", "normal_", "uniform_", "bernoulli", "multinomial", "rand_like"),
    *("randn_like", "random_", "exponential_", "dropout"),
}


def test_no_module_that_protects_releases_can_use_a_generator_of_numpy_or_torch():
    for path in sorted((Path(glasu.__file__).parent / "privacy").glob("*.py")):
        assert find_generators(path.read_text(encoding="utf-8")) == [], path.name


@pytest.mark.parametrize(
    "source",
    [
        "import numpy as np\nnp.random.default_rng()",
        "import torch\ntorch.randn(3)",
        "import random",
        "from numpy.random import Generator",
        "value.normal_()",
        "from glasu.randomness import Stream",
    ],
)
def test_the_check_finds_generators(source):
    assert find_generators(source)
