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
from glasu.wire.tensor_kinds import PROBABILITIES, REPRESENTATION

KEY = Key(run=bytes(12), phase=Phase.TRAINING, client=0, round=3, layer=1)
SECRET = b"a secret of thirty-two bytes ..."
NODES = np.array([4, 9, 2])
NOISE = RowNoise(Mechanism(1.0, 0.5), REPRESENTATION, SECRET)
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


def test_quantizing_changes_no_value_of_a_short_row_by_a_whole_step_or_away_from_zero():
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
        replace(NOISE, kind=PROBABILITIES),
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

MODULES = (  # modules that draw random numbers
    *("random", "secrets", "numpy.random", "scipy.stats", "sklearn", "glasu.randomness"),
    *("torch.random", "torch.cuda.random", "torch.distributions", "torch.quasirandom", "torch.utils.data"),
)
# The attacks protect nothing. They draw from seeded generators: those of glasu and of scikit-learn. Generators of numpy
# and torch are forbidden there, too.
ALLOWED_IN_ATTACKS = ("glasu.randomness", "sklearn")
NUMPY = {
    name for kind in (np.random, np.random.Generator, np.random.RandomState) for name in dir(kind) if name[0] != "_"
}
ORDINARY = {"bytes", "f", "get_state", "power", "seed", "set_state", "spawn", "test"}  # names with other meanings
SAMPLING = (NUMPY - ORDINARY) | {
    *("random", "random_", "urandom", "getrandbits", "betavariate", "gauss", "choices", "rvs", "rsample"),
    *("rand", "rand_like", "randn", "randn_like", "randint", "randint_like", "randperm", "make_tensor"),
    *("normal", "normal_", "poisson"),
    *("bernoulli", "bernoulli_", "binomial", "multinomial", "uniform_", "cauchy_", "log_normal_", "geometric_"),
    *("exponential_", "sparse_", "native_dropout", "rrelu", "rrelu_", "gumbel_softmax", "default_generator"),
    *("manual_seed", "manual_seed_all", "initial_seed", "fork_rng", "set_rng_state", "get_rng_state"),
    *("random_array", "scaled_dot_product_attention"),
}
DYNAMIC = ("getattr", "import_module", "__import__", "attrgetter", "methodcaller")  # they take names as strings


def find_generators(source: str, allowed: tuple[str, ...] = ()) -> list[str]:
    """Return the uses of random generators in a source, except those of the allowed modules.

    It finds imports of modules that draw random numbers, imports of sampling functions, attributes with the name of a
    sampling function, and both as strings in `getattr` and `import_module`.
    """
    tree, found = ast.parse(source), []
    forbidden = [module for module in MODULES if module not in allowed]
    aliases: dict[str, str] = {}  # name in the source -> what it stands for

    def check(path: str) -> None:
        is_module = any(f"{path}.".startswith(f"{module}.") for module in forbidden)
        is_layer = path.startswith("torch.nn.") and not path.startswith("torch.nn.functional")  # draws its weights
        if is_module or is_layer or _is_sampling(path.rpartition(".")[2]):
            found.append(path)

    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                check(alias.name)
                bound = alias.asname or alias.name.partition(".")[0]
                aliases[bound] = alias.name if alias.asname else bound
        elif isinstance(node, ast.ImportFrom):
            module = f"glasu.{node.module}" if node.level else str(node.module)
            is_own = module.partition(".")[0] == "glasu"
            for alias in node.names:
                path = aliases[alias.asname or alias.name] = f"{module}.{alias.name}"
                check(path)
                if alias.name == "*" and not is_own:
                    found.append(path)  # it may import a generator
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            check(_write_path(node, aliases))
        elif isinstance(node, ast.Call) and _write_path(node.func, {}).rpartition(".")[2] in DYNAMIC:
            for each in node.args:
                if isinstance(each, ast.Constant) and isinstance(each.value, str):
                    check(each.value)
    return found


def _is_sampling(name: str) -> bool:
    return name in SAMPLING or "dropout" in name.lower()


def _write_path(node: ast.expr, aliases: dict[str, str]) -> str:
    """Return an expression such as np.random.rand with the full names of its modules."""
    if isinstance(node, ast.Attribute):
        return f"{_write_path(node.value, aliases)}.{node.attr}"
    return aliases.get(node.id, node.id) if isinstance(node, ast.Name) else "?"


def test_no_module_that_protects_releases_can_use_a_generator_of_numpy_or_torch():
    folder = Path(glasu.__file__).parent / "privacy"
    sources = sorted(folder.rglob("*.py"))
    assert {"noise.py", "attacks/labels.py"} <= {path.relative_to(folder).as_posix() for path in sources}
    for path in sources:
        allowed = ALLOWED_IN_ATTACKS if path.parent.name == "attacks" else ()
        assert find_generators(path.read_text(encoding="utf-8"), allowed) == [], path.relative_to(folder)


@pytest.mark.parametrize(
    "source",
    [
        "import numpy as np\nnp.random.default_rng()",
        "import numpy.random as r",
        "import numpy.random",
        "from numpy import random",
        "from numpy import random as ordinary",
        "from numpy.random import Generator",
        "from numpy import *",
        "rng.standard_normal(3)",
        "rng.integers(3)",
        "import torch\ntorch.randn(3)",
        "import torch as t\nt.poisson(rates)",
        "import torch\ntorch.randint_like(value, 3)",
        "import torch\ntorch.default_generator",
        "import torch.random as r",
        "from torch import randn",
        "from torch import randn as ordinary",
        "from torch import random",
        "from torch import *",
        "value.normal_()",
        "value.cauchy_()",
        "value.log_normal_()",
        "value.geometric_(0.5)",
        "value.bernoulli_()",
        "torch.empty(3).exponential_()",
        "import torch\ntorch.distributions.Normal(0, 1)",
        "from torch import distributions",
        "from torch.distributions import Laplace",
        "import torch.distributions as d",
        "import torch\ntorch.nn.init.xavier_uniform_(value)",
        "from torch import nn\nnn.init.trunc_normal_(value)",
        "import torch.nn as layers\nlayers.Linear(2, 3)",
        "from torch.nn import init",
        "from torch.nn.init import normal_ as fill",
        "from torch.nn.functional import dropout",
        "import torch.nn.functional as F\nF.alpha_dropout(value)",
        "import torch\ngetattr(torch, 'randn')(3)",
        "import importlib\nimportlib.import_module('numpy.random')",
        "def draw():\n    from torch import rand\n    return rand(3)",
        "import random",
        "from random import gauss",
        "import secrets",
        "import os\nos.urandom(8)",
        "from scipy.stats import norm",
        "import scipy.sparse as sp\nsp.random(3, 3)",
        "from sklearn.cluster import KMeans",
        "from glasu.randomness import Stream",
        "from glasu import randomness",
        "from ..randomness import Stream",
    ],
)
def test_the_check_finds_generators(source):
    assert find_generators(source)


@pytest.mark.parametrize(
    "source",
    [
        "import numpy as np\nnp.power(np.float64(2), 3).tobytes()",
        "import torch\ntorch.nn.functional.one_hot(torch.zeros(3))",
        "from glasu.privacy.labels import randomize_labels\nself.seed = 3",
    ],
)
def test_the_check_accepts_code_that_draws_nothing(source):
    assert find_generators(source) == []


def test_the_check_of_the_attacks_allows_only_seeded_generators_of_glasu_and_scikit_learn():
    for source in ("from sklearn.cluster import KMeans", "from glasu.randomness import Stream"):
        assert find_generators(source, ALLOWED_IN_ATTACKS) == []
    for source in ("from numpy import random", "import torch\ntorch.randn(3)", "import random"):
        assert find_generators(source, ALLOWED_IN_ATTACKS)


def test_the_check_knows_every_method_of_a_tensor_that_takes_a_generator():
    documented = {name for name in dir(torch.Tensor) if "generator=None" in str(getattr(torch.Tensor, name).__doc__)}
    assert len(documented) > 8
    assert documented <= SAMPLING
