"""Prepared features: the rules by column, the laws that make them safe, and the record that is saved with a model."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import scipy.sparse as sp
from sklearn.preprocessing import RobustScaler, StandardScaler

from glasu.data.preprocessing import (
    LIMIT,
    Preparation,
    choose_measured_rows,
    compact_features,
    fit_preparation,
    measure_mean_length,
    measure_prepared,
)
from glasu.errors import DataError
from glasu.records import read_record, to_plain
from support.warm_process import run_program

NODES = 400


def columns(seed=0):
    """Return one column of each kind."""
    rng = np.random.default_rng(seed)
    words = rng.random(NODES) < 0.1
    return {
        "timestamp": rng.normal(1.7e9, 2e7, NODES),
        "heavy tail": rng.standard_cauchy(NODES),
        "constant": np.full(NODES, 3.0),
        "zero": np.zeros(NODES),
        "word": words,
        "frequent word": rng.random(NODES) < 0.7,
        "count": rng.poisson(0.3, NODES),
        "tf-idf": words * rng.uniform(0.01, 0.1, NODES),
        "mostly seven": np.where(rng.random(NODES) < 0.7, 7.0, rng.normal(size=NODES)),
        "one or two": rng.integers(1, 3, NODES),
        "no or five": 5 * rng.integers(0, 2, NODES),
        "age": rng.integers(18, 90, NODES),
        "sum": rng.exponential(1e5, NODES),
    }


def matrix(*names, seed=0):
    found = columns(seed)
    return np.stack([found[name] for name in names or found], axis=1).astype(np.float32)


def prepare(features, preparation=None, dtype=np.float64):
    """Return the prepared features as a dense matrix."""
    preparation = preparation or fit_preparation(features)
    if isinstance(features, np.ndarray):
        return preparation.apply(features, dtype)
    indptr, indices, data = preparation.apply_sparse(features.indptr, features.indices, features.data, dtype)
    return sp.csr_array((data, indices, indptr), shape=(len(indptr) - 1, preparation.width)).toarray()


def prepare_column(name, seed=0):
    prepared = prepare(matrix(name, seed=seed))
    assert prepared.shape == (NODES, 1)
    return prepared[:, 0]


# Rules


@pytest.mark.parametrize("name", ["timestamp", "heavy tail", "age", "sum"])
def test_a_numeric_column_is_prepared_as_by_scikit_learns_robust_scaler_and_clipped(name):
    raw = matrix(name).astype(np.float64)
    expected = RobustScaler(unit_variance=True).fit_transform(raw)[:, 0]
    np.testing.assert_allclose(prepare_column(name), np.clip(expected, -LIMIT, LIMIT), rtol=1e-12, atol=1e-12)


def test_a_normal_column_is_prepared_nearly_as_by_scikit_learns_standard_scaler():
    raw = np.random.default_rng(1).normal(40, 7, (20_000, 1)).astype(np.float32)
    np.testing.assert_allclose(prepare(raw), StandardScaler().fit_transform(raw), atol=0.1)


@pytest.mark.parametrize("name", ["word", "frequent word"])
def test_an_indicator_is_left_alone(name):
    np.testing.assert_array_equal(prepare_column(name), columns()[name])


@pytest.mark.parametrize(("name", "zero", "one"), [("one or two", 1, 2), ("no or five", 0, 5)])
def test_a_column_with_two_values_becomes_an_indicator(name, zero, one):
    raw = columns()[name]
    np.testing.assert_array_equal(prepare_column(name), np.where(raw == one, 1, 0))
    assert set(raw) == {zero, one}


@pytest.mark.parametrize("name", ["count", "tf-idf"])
def test_zeros_of_a_sparse_column_stay_zeros_and_the_median_of_the_others_becomes_one(name):
    raw, prepared = columns()[name], prepare_column(name)
    np.testing.assert_array_equal(prepared == 0, raw == 0)
    assert np.median(prepared[prepared != 0]) == pytest.approx(1)
    assert (prepared >= 0).all()


def test_the_value_that_most_nodes_have_becomes_zero():
    raw, prepared = columns()["mostly seven"], prepare_column("mostly seven")
    np.testing.assert_array_equal(prepared == 0, raw == 7)
    assert np.median(np.abs(prepared[raw != 7])) == pytest.approx(1)


def test_constant_columns_are_dropped():
    preparation = fit_preparation(matrix("age", "constant", "word", "zero"))
    assert preparation.dropped == (1, 3)
    assert preparation.width == 2
    np.testing.assert_array_equal(prepare(matrix("age", "constant", "word", "zero")), prepare(matrix("age", "word")))


@pytest.mark.parametrize("form", [np.asarray, sp.csr_array])
def test_a_party_without_information_keeps_one_column_of_ones(form):
    for names in (("constant", "zero"), ("zero", "constant"), ("zero",)):
        np.testing.assert_array_equal(prepare(form(matrix(*names))), np.ones((NODES, 1)))


def test_one_hot_columns_are_left_alone():
    hot = np.eye(5, dtype=np.float32)[np.random.default_rng(0).integers(0, 5, NODES)]
    np.testing.assert_array_equal(prepare(hot), hot)


def test_one_value_out_of_many_moves_no_other_prepared_value():
    raw = matrix("age")
    other = raw.copy()
    other[7] = 1e30
    before, after = prepare(raw), prepare(other)
    assert after[7] == LIMIT
    keep = np.arange(NODES) != 7
    assert np.abs(before - after)[keep].max() < 0.05


# Laws


def test_a_column_is_prepared_independently_of_the_others():
    together = prepare(matrix())
    alone = [prepare_column(name) for name in columns() if name not in ("constant", "zero")]
    np.testing.assert_array_equal(together, np.stack(alone, axis=1))


def test_a_column_of_timestamps_leaves_the_prepared_values_of_a_bag_of_words_unchanged():
    rng = np.random.default_rng(0)
    words = sp.csr_array((rng.random((NODES, 300)) < 0.02) * rng.integers(1, 4, (NODES, 300)), dtype=np.float32)
    stamps = sp.csr_array(matrix("timestamp"))
    more = compact_features(sp.hstack([words, stamps]))
    assert sp.issparse(more)
    before, after = prepare(words), prepare(more)
    np.testing.assert_array_equal(before, after[:, :-1])
    np.testing.assert_array_equal(after[:, -1], prepare_column("timestamp"))
    # The unit of all columns, which `input_scale = "auto"` uses, changes little.
    lengths = [measure_prepared(features, fit_preparation(features)) for features in (words, more)]
    assert lengths[1] == pytest.approx(lengths[0], rel=0.2)


def test_the_order_of_the_nodes_does_not_matter():
    order = np.random.default_rng(0).permutation(NODES)
    for form in (np.asarray, sp.csr_array):
        first, second = fit_preparation(form(matrix())), fit_preparation(form(matrix()[order]))
        assert first == second


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_dense_and_sparse_storage_give_the_same_preparation_and_values(dtype):
    dense, sparse = matrix(), sp.csr_array(matrix())
    assert fit_preparation(dense) == fit_preparation(sparse)
    preparation = replace(fit_preparation(dense), input_scale=0.7)
    one, other = prepare(dense, preparation, dtype), prepare(sparse, preparation, dtype)
    np.testing.assert_array_equal(one, other)
    assert one.dtype == other.dtype == dtype


def test_the_size_of_the_blocks_that_are_read_does_not_matter():
    for form in (np.asarray, sp.csr_array):
        assert fit_preparation(form(matrix()), piece_bytes=500) == fit_preparation(form(matrix()))


def test_sparse_features_stay_sparse():
    rng = np.random.default_rng(0)
    words = sp.csr_array((rng.random((NODES, 300)) < 0.02) * rng.uniform(0.1, 2, (NODES, 300)), dtype=np.float32)
    indptr, indices, data = fit_preparation(words).apply_sparse(words.indptr, words.indices, words.data, np.float32)
    np.testing.assert_array_equal(indptr, words.indptr)
    np.testing.assert_array_equal(indices, words.indices)
    assert len(data) == words.nnz


def test_a_preparation_can_be_applied_to_some_rows_in_any_order():
    rows = np.array([17, 3, 3, 250])
    for form in (np.asarray, sp.csr_array):
        features = form(matrix())
        preparation = fit_preparation(features)
        np.testing.assert_array_equal(prepare(features[rows], preparation), prepare(features, preparation)[rows])


def test_a_preparation_of_other_data_is_the_fitted_one():
    preparation = fit_preparation(matrix("age", "count", "constant"))
    new = matrix("age", "count", "timestamp", seed=1).astype(np.float64)
    (centre, _), (spread, unit) = preparation.centre, preparation.spread
    prepared = prepare(new, preparation)
    np.testing.assert_allclose(prepared[:, 0], np.clip((new[:, 0] - centre) / spread, -LIMIT, LIMIT), rtol=1e-12)
    np.testing.assert_allclose(prepared[:, 1], np.clip(new[:, 1] / unit, -LIMIT, LIMIT), rtol=1e-12)
    assert prepared.shape[1] == 2  # the column that was constant in training says nothing


def test_medians_of_a_large_graph_are_measured_at_evenly_spaced_nodes_and_ranges_at_all(tmp_path):
    count = 150_000
    raw = np.random.default_rng(0).normal(5, 2, (count, 2)).astype(np.float32)
    raw[:, 1] = 0
    raw[1, 1] = 3  # not among the measured nodes
    rows = choose_measured_rows(count)
    assert len(rows) == 1 << 16
    assert 1 not in rows
    preparation = fit_preparation(raw)
    assert preparation.scaled == (0, 1)
    scaler = RobustScaler(unit_variance=True).fit(raw[rows, :1].astype(np.float64))
    assert preparation.centre[0] == pytest.approx(scaler.center_[0])
    assert preparation.spread == pytest.approx((scaler.scale_[0], 3))


def print_memory_of_a_preparation(folder: str) -> None:
    """Fit a memory map in small pieces; print the peak of the memory, and the size of the map."""
    import tracemalloc

    path = Path(folder) / "x.npy"
    np.save(path, np.random.default_rng(0).normal(size=(60_000, 100)).astype(np.float32))
    features = np.asarray(np.lib.format.open_memmap(path, mode="r"))
    tracemalloc.start()
    preparation = fit_preparation(features, piece_bytes=1 << 18)
    measure_prepared(features, preparation, piece_bytes=1 << 18)
    print(tracemalloc.get_traced_memory()[1], features.nbytes)


def test_a_memory_map_is_prepared_in_less_memory_than_its_size(tmp_path):
    """Run in a separate process, because tracemalloc counts all threads of this one."""
    program = "import sys; from data.test_preprocessing import print_memory_of_a_preparation as run; run(sys.argv[1])"
    peak, size = map(int, run_program(program, tmp_path, [Path(__file__).parents[1]], [str(tmp_path)]).split())
    assert peak < 0.3 * size


# The record


def test_a_preparation_survives_json():
    preparation = replace(fit_preparation(matrix()), input_scale=0.3)
    assert preparation.count_kinds() == {"unchanged": 2, "scaled": 3, "standardized": 6, "dropped": 2}
    text = json.dumps(to_plain(preparation))
    assert read_record(Preparation, json.loads(text), "a model") == preparation


@pytest.mark.parametrize(
    "fields",
    [
        {"dropped": (3,)},
        {"dropped": (0, 0)},
        {"dropped": (1,), "scaled": (1,), "centre": (0.0,), "spread": (1.0,)},
        {"scaled": (1,), "centre": (0.0,)},
        {"scaled": (1,), "centre": (0.0,), "spread": (0.0,)},
    ],
)
def test_a_preparation_that_cannot_be_applied_is_refused(fields):
    with pytest.raises(DataError, match=r"distinct columns|positive spread"):
        Preparation(3, 1.0, **fields)


# The unit of raw features


@pytest.mark.parametrize("form", [np.asarray, sp.csr_array])
def test_a_huge_column_does_not_count_for_the_length_of_raw_rows(form):
    raw = np.random.default_rng(0).normal(size=(NODES, 6)).astype(np.float32)
    expected = np.linalg.norm(raw.astype(np.float64), axis=1).mean()
    assert measure_mean_length(form(raw)) == pytest.approx(expected)
    assert measure_mean_length(form(np.hstack([raw, matrix("timestamp")]))) == pytest.approx(expected)
