"""The stopwatch adds up the times of a given clock."""

from __future__ import annotations

import itertools

import pytest

from glasu.timing import Stopwatch


@pytest.fixture
def watch():
    return Stopwatch(itertools.count().__next__)  # every reading of the clock takes a second


def test_an_inner_measurement_is_taken_off_the_outer_one(watch):
    with watch.measure("compute"):  # 0
        with watch.measure("sampling"):  # 1 to 2
            pass
        with watch.measure("sampling"):  # 3 to 4
            pass
    assert watch.seconds == {"compute": 3, "sampling": 2}  # until 5


def test_a_measurement_inside_one_of_the_same_name_counts_once(watch):
    with watch.measure("compute"), watch.measure("compute"):
        pass
    assert watch.seconds == {"compute": 3}


def test_an_error_ends_the_measurement_and_is_passed_on(watch):
    with pytest.raises(ValueError, match="why"), watch.measure("compute"):
        raise ValueError("why")
    with watch.measure("sampling"):
        pass
    assert watch.seconds == {"compute": 1, "sampling": 1}


def test_time_between_measurements_is_not_counted(watch):
    for _ in range(3):
        with watch.measure("compute"):
            pass
        watch.clock()
    assert watch.seconds == {"compute": 3}
