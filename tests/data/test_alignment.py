from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from glasu.data.alignment import align_in_clear, check_parties, keep_labels
from glasu.data.graph import Graph
from glasu.data.party import PartyData, Splits
from glasu.errors import AlignmentError, ConfigError, DataError


def party(name, ids, **changes):
    """Return a party whose feature is the number in its id, and whose edges form a path."""
    ids = np.asarray(ids)
    count = len(ids)
    features = np.array([[float(str(item).strip("u"))] for item in ids])
    graph = Graph.from_edges(np.arange(count - 1), np.arange(1, count), count)
    labels, splits = np.arange(count) % 2, Splits(np.array([0, 1]), np.array([2]), np.arange(3, count))
    fields = {"labels": labels, "classes": ("x", "y"), "splits": splits}
    return PartyData(name, ids, features, graph, **{**fields, **changes})


def test_parties_in_one_order_stay_as_they_are():
    parties = [party("a", [3, 1, 2]), party("b", [3, 1, 2])]
    assert all(after is before for after, before in zip(align_in_clear(parties), parties, strict=True))


def test_parties_are_restricted_to_their_common_ids_in_sorted_order():
    first, second = align_in_clear([party("a", [5, 1, 9, 3]), party("b", [3, 4, 5, 1])])
    assert first.ids.tolist() == second.ids.tolist() == [1, 3, 5]
    assert first.features.ravel().tolist() == second.features.ravel().tolist() == [1.0, 3.0, 5.0]
    assert first.labels.tolist() == [1, 1, 0]
    # the path 5 -> 1 -> 9 -> 3 keeps 5 -> 1; the path 3 -> 4 -> 5 -> 1 keeps 5 -> 1
    assert first.graph.edge_index().tolist() == second.graph.edge_index().tolist() == [[2], [0]]
    assert first.splits.train.tolist() == [0, 2]
    assert first.splits.validation.tolist() == []
    assert first.splits.test.tolist() == [1]


def test_aligned_parties_do_not_depend_on_the_order_of_rows():
    rows = np.random.default_rng(0).permutation(8)
    first, second = align_in_clear([party("a", np.arange(8)), party("b", np.arange(8)[rows])])
    np.testing.assert_array_equal(first.features, second.features)


def test_string_ids_align_too():
    first, _ = align_in_clear([party("a", ["u2", "u10", "u1"]), party("b", ["u1", "u2", "u3"])])
    assert first.ids.tolist() == ["u1", "u2"]


@pytest.mark.parametrize(
    ("ids", "said"), [([7, 8, 9], r"no id in common; .* run glasu align"), (["0", "1", "2"], "a: numbers, b: strings")]
)
def test_parties_without_common_ids_are_refused(ids, said):
    with pytest.raises(AlignmentError, match=said):
        align_in_clear([party("a", [0, 1, 2]), party("b", ids)])


def test_parties_that_agree_may_train():
    parties = [party("a", [3, 1, 2, 4]), party("b", [3, 1, 2, 4])]
    check_parties(parties)
    check_parties(keep_labels(parties, "b"), "b")


def test_only_the_label_owner_keeps_labels_classes_and_splits():
    first, second = keep_labels([party("a", [3, 1, 2, 4]), party("b", [3, 1, 2, 4])], "b")
    assert (first.labels, first.classes, first.splits) == (None, (), None)
    assert second.labels is not None


@pytest.mark.parametrize("use", [check_parties, keep_labels])
def test_an_unknown_label_owner_is_refused_with_the_names(use):
    with pytest.raises(ConfigError, match='"a", "b"'):
        use([party("a", [3, 1, 2]), party("b", [3, 1, 2])], "c")


A = party("a", [0, 1, 2, 3])


@pytest.mark.parametrize(
    ("other", "kind", "said"),
    [
        (party("a", [0, 1, 2, 3]), DataError, "not distinct"),
        (replace(A, name="all"), DataError, "party 'all': train.labels = .all. means all parties"),
        (party("b", [0, 1, 2]), AlignmentError, "4 nodes, 'b' has 3"),
        (party("b", [0, 1, 3, 2]), AlignmentError, "different ids or different orders"),
        (
            replace(A, name="b", labels=None, classes=()),
            DataError,
            "'b' has no labels; with labels: a; train.labels must",
        ),
        (replace(A, name="b", splits=None), DataError, "has no splits"),
        (replace(A, name="b", classes=("y", "x")), DataError, "classes of 'a' and 'b' differ"),
        (replace(A, name="b", labels=np.array([0, 1, 1, 1])), DataError, "labels of 'a' and 'b' differ"),
        (
            replace(A, name="b", splits=Splits(np.array([0]), np.array([2]), np.array([3]))),
            DataError,
            "splits of 'a' and 'b' differ",
        ),
        (
            replace(A, name="b", splits=Splits(np.array([], int), np.array([2]), np.array([3]))),
            DataError,
            "no node is in the training split",
        ),
        (replace(A, name="b", labels=np.array([-1, -1, 0, 1])), DataError, "no training node has a known label"),
    ],
)
def test_parties_that_cannot_train_together_are_refused(other, kind, said):
    with pytest.raises(kind, match=said):
        check_parties([A, other])


def test_splits_without_a_known_label_are_refused_unless_their_fraction_is_zero():
    parties = [replace(A, labels=np.array([0, 1, -1, 0]))]
    with pytest.raises(DataError, match=r"party 'a': no validation node .*: 2 train, 0 validation, 1 test\); choose"):
        check_parties(parties)
    with pytest.raises(DataError, match=r"0 validation, 1 test\); choose other splits, or set the fraction to 0"):
        check_parties(parties, split=(0.6, 0.2, 0.2))
    check_parties(parties, split=(0.8, 0.0, 0.2))
    empty = [replace(A, splits=Splits(np.array([0]), np.array([1]), np.array([], int)))]
    with pytest.raises(DataError, match="no test node"):
        check_parties(empty)


def test_a_class_per_node_suggests_numeric_labels():
    classes = tuple(f"{number}.5" for number in range(4))
    splits = Splits(np.arange(4), np.array([], int), np.array([], int))
    with pytest.raises(
        DataError, match=r'no validation and no test .* 4 labelled nodes have 4 classes.*label_type = "n'
    ):
        check_parties([replace(A, labels=np.arange(4), classes=classes, splits=splits)])


def test_no_party_at_all_is_refused():
    with pytest.raises(ConfigError, match="no parties"):
        check_parties([])


def multilabel(name, labels):
    return replace(A, name=name, labels=np.asarray(labels), classes=("x", "y"))


def test_a_node_with_an_unknown_column_teaches_nothing():
    known, half = [[0, 1]] * 4, [[0, -1], [-1, 1], [0, 1], [1, 1]]  # nodes 0 and 1 train
    check_parties([multilabel("a", known)], task="multilabel")
    with pytest.raises(DataError, match="no training node has a known label"):
        check_parties([multilabel("a", half)], task="multilabel")
    one = [[0, -1], [1, 1], [0, 1], [1, 1]]
    check_parties([multilabel("a", one)], task="multilabel")


@pytest.mark.parametrize(
    ("parties", "task", "fitting"),
    [
        ([A], "multilabel", "multiclass"),
        ([multilabel("a", [[0, 1]] * 4)], "multiclass", "multilabel"),
        ([replace(A, labels=np.array([0, 1, 2, 0]), classes=("x", "y", "z"))], "binary", "multiclass"),
        ([A], "regression", "multiclass"),
        ([replace(A, labels=np.array([0.5, np.nan, 1.0, 2.0]), classes=())], "multiclass", "regression"),
    ],
)
def test_a_task_that_does_not_fit_the_labels_is_refused_with_the_one_that_does(parties, task, fitting):
    check_parties(parties, task=fitting)
    with pytest.raises(ConfigError, match=f'train.task="{task}": party .a. must have .*set train.task = "{fitting}"'):
        check_parties(parties, task=task)


def test_numbers_must_be_equal_at_all_parties_and_unknown_ones_are_equal():
    numbers = np.array([0.5, np.nan, 1.0, 2.0])
    a, b = (replace(A, name=name, labels=numbers.copy(), classes=()) for name in "ab")
    check_parties([a, b], task="regression")
    with pytest.raises(DataError, match="labels of 'a' and 'b' differ"):
        check_parties([a, replace(b, labels=numbers + 1e-9)], task="regression")
    with pytest.raises(DataError, match="no training node has a known label"):
        check_parties([replace(a, labels=np.full(4, np.nan))], task="regression")


def test_a_regression_over_classes_names_both_remedies():
    with pytest.raises(ConfigError, match=r"must have one number per node, but has one class.*label_type"):
        check_parties([A], task="regression")


def test_restricted_parties_keep_the_names_of_their_columns():
    first, _ = align_in_clear([party("a", [5, 1, 9], feature_names=("f",)), party("b", [9, 5, 7])])
    assert first.feature_names == ("f",)
