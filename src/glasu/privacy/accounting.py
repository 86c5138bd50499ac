"""Accounting of differential privacy: the epsilon of a row, computed from the entries of the ledger.

The unit is one released row: the values that one party releases about one node. Each release of a row is a Gaussian
mechanism. Its multiplier z is the deviation of the noise divided by the clip. Several releases of a row have the
epsilon of one Gaussian mechanism with multiplier z, where

    1 / z^2 = 1 / z_1^2 + 1 / z_2^2 + ...

This is the epsilon if the row may become zero; the sensitivity is then the clip. If the row may become any other row,
the sensitivity is twice the clip, and the multiplier is z / 2. No amplification by sampling is claimed.

The same clean row (before noise) in the same place (phase, round, layer and node) counts once. A repeated round with
the same content sends the same bytes and does not count again. A repeated round with different content counts again.

The noise is discrete. Its Renyi divergences are at most those of the continuous Gaussian (Canonne, Kamath and Steinke
2020), and its grid has at least 256 steps per deviation, so the epsilon of the continuous mechanism is used.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from glasu.errors import ConfigError, GlasuError
from glasu.privacy.ledger import Entry, Rule
from glasu.privacy.noise import read_mechanism

UNIT = "one released row of one party, not a node, an edge or the weights"
_PRECISE = 1e-9  # allowed relative error: a release that reaches the target exactly must pass despite rounding


class BudgetError(GlasuError):
    """A release would exceed `privacy.target_epsilon`."""

    code = "privacy_budget"
    exit_code = 2
    public_default = "its privacy budget does not allow the next release; see that party's log."


@dataclass(frozen=True)
class SpentEpsilon:
    """The largest epsilon of any row, as the report shows it."""

    unit: str
    epsilon_zeroed: float
    epsilon_replaced: float
    delta: float
    releases: int  # number of releases of that row
    rows: int  # number of rows with at least one release
    target_epsilon: float | None = None

    def __str__(self) -> str:
        times = "once" if self.releases == 1 else f"{self.releases} times"
        return (
            f"epsilon {self.epsilon_zeroed:.3g} if a row becomes zero, {self.epsilon_replaced:.3g} if it becomes "
            f"another row; delta {self.delta:g}; the row was released {times}. The guarantee is for {self.unit}"
        )


@functools.lru_cache(maxsize=256)
def compute_epsilon(multiplier: float, delta: float) -> float:
    """Return the epsilon of one Gaussian mechanism with this multiplier, as `dp-accounting` computes it."""
    if multiplier == math.inf:
        return 0.0
    # For small multipliers, the package does not finish computing privacy loss distributions. Use its closed form.
    return float(load_accounting().get_epsilon_gaussian(multiplier, delta))


def load_accounting() -> Any:
    """Return the module dp_accounting, or raise ConfigError with the command that installs it."""
    try:
        import dp_accounting
    except ImportError:
        raise ConfigError(
            "privacy.dp_noise_multiplier: the accounting needs the package dp-accounting, which is not installed; "
            "pip install 'glasu[dp]'."
        ) from None
    return dp_accounting


@dataclass
class Accountant:
    """A ledger rule that adds up the releases of every row, and refuses a release that would exceed the target."""

    delta: float
    target: float | None = None
    _seen: set[bytes] = field(default_factory=set, repr=False)
    _spent: dict[int, tuple[int, float]] = field(default_factory=dict, repr=False)  # by node: (releases, 1 / z^2)
    _limit: float = field(init=False, repr=False)  # the largest allowed 1 / z^2

    def __post_init__(self) -> None:
        compute_epsilon(1.0, self.delta)  # report a missing package before the training starts
        # A replaced row has twice the sensitivity of a zeroed one, see `_compute_replaced`.
        self._limit = math.inf if self.target is None else (2 * find_multiplier(self.target, self.delta)) ** -2

    def check_plan(self, multipliers: Mapping[float, int]) -> None:
        """Refuse a run whose settings are certain to lead to an epsilon above the target.

        Args:
            multipliers: for each noise multiplier, the number of releases that some row will certainly have.
        """
        releases, spent = sum(multipliers.values()), sum(count * z**-2 for z, count in multipliers.items())
        if spent > self._limit * (1 + _PRECISE):
            times = "once" if releases == 1 else f"{releases} times"
            raise BudgetError(
                f"with the settings of this run some row is released at least {times}. The epsilon of a replaced row "
                f"is then at least {self._compute_replaced(spent):.3g} (delta {self.delta:g}), above "
                f"privacy.target_epsilon={self.target:g}. Nothing was sent. Use more noise, fewer releases or a higher "
                "target."
            )

    def check(self, entry: Entry) -> None:
        """Refuse a release after which the epsilon of a row would exceed the target."""
        for node, _, price in self._list_new(entry):
            releases, spent = self._spent.get(node, (0, 0.0))
            if spent + price > self._limit * (1 + _PRECISE):
                before, after = (self._compute_replaced(each) for each in (spent, spent + price))
                raise BudgetError(
                    f"the release of {entry.kind} in {entry.phase} round {entry.round} would raise the epsilon of a "
                    f"replaced row from {before:.3g} to {after:.3g} (delta {self.delta:g}, {releases} releases before),"
                    f" above privacy.target_epsilon={self.target:g}. Nothing was sent. Use more noise, fewer releases "
                    "or a higher target."
                )

    def add(self, entry: Entry) -> None:
        """Count a release that was recorded."""
        for node, digest, price in self._list_new(entry):
            releases, spent = self._spent.get(node, (0, 0.0))
            self._seen.add(digest)
            self._spent[node] = releases + 1, spent + price

    def _list_new(self, entry: Entry) -> list[tuple[int, bytes, float]]:
        """Return (node, digest, 1 / z^2) for every row of the entry whose digest was not recorded before."""
        mechanism, nodes = read_mechanism(entry.protection), entry.unpack_nodes()
        if mechanism is None or nodes is None:
            return []
        price, found = mechanism.multiplier**-2, []
        for node, digest in zip(nodes.tolist(), entry.list_row_digests(), strict=True):
            if digest not in self._seen:
                found.append((node, digest, price))
        return found

    def _compute_replaced(self, spent: float) -> float:
        """Return the epsilon of a row that may become any other row. The sensitivity is twice the clip."""
        return compute_epsilon(to_multiplier(spent) / 2, self.delta)

    def summarize(self) -> SpentEpsilon:
        """Return the largest epsilon of any row, and how often that row was released."""
        releases, spent = max(self._spent.values(), key=lambda each: each[1], default=(0, 0.0))
        return SpentEpsilon(
            unit=UNIT,
            epsilon_zeroed=compute_epsilon(to_multiplier(spent), self.delta),
            epsilon_replaced=self._compute_replaced(spent),
            delta=self.delta,
            releases=releases,
            rows=len(self._spent),
            target_epsilon=self.target,
        )


def find_spent(rules: Iterable[Rule]) -> SpentEpsilon | None:
    """Return the summary of the accountant among the rules of a ledger; None if there is no accountant."""
    return next((rule.summarize() for rule in rules if isinstance(rule, Accountant)), None)


def to_multiplier(spent: float) -> float:
    """Return z, given 1 / z^2; infinity for a row that was never released."""
    return spent**-0.5 if spent else math.inf


def find_multiplier(epsilon: float, delta: float, releases: int = 1) -> float:
    """Return the smallest multiplier for which `releases` releases of a row have at most this epsilon.

    This is the epsilon if the row may become zero.
    """
    return float(load_accounting().get_sigma_gaussian(epsilon, delta)) * math.sqrt(releases)
