"""Test few combinations of several choices: each pair of values occurs, and the other combinations are slow tests."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest


def cover_pairs(*choices: Sequence[Any]) -> list[Any]:
    """Return all combinations as parameters; those that are not needed to cover all pairs of values are slow."""
    places = list(itertools.product(*(range(len(values)) for values in choices)))
    missing = set().union(*map(_list_pairs, places))
    quick = set()
    while missing:
        best = max(places, key=lambda place: len(_list_pairs(place) & missing))
        quick.add(best)
        missing -= _list_pairs(best)
    return [
        pytest.param(
            *(values[index] for values, index in zip(choices, place, strict=True)),
            marks=() if place in quick else pytest.mark.slow,
        )
        for place in places
    ]


def _list_pairs(place: Sequence[int]) -> set[tuple[tuple[int, int], ...]]:
    return set(itertools.combinations(enumerate(place), 2))
