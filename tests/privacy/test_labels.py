"""Randomised response: the share of labels that change, and what decides it."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from glasu.privacy.labels import compute_keep_probability, randomize_labels, randomize_training_labels
from support.tiny import settings, simulate, tiny_parties

NODES = np.arange(20_000)
SECRET = b"a secret of thirty-two bytes ..."


@pytest.mark.parametrize("num_classes", [2, 3, 7])
@pytest.mark.parametrize("epsilon", [0.5, 2.0, 4.0])
def test_the_share_of_kept_labels_is_that_of_the_formula_and_the_others_are_uniform(num_classes, epsilon):
    labels = NODES % num_classes
    found = randomize_labels(labels, NODES, num_classes, epsilon, SECRET)
    kept = math.exp(epsilon) / (math.exp(epsilon) + num_classes - 1)
    assert compute_keep_probability(num_classes, epsilon) == pytest.approx(kept)
    assert (found == labels).mean() == pytest.approx(kept, abs=5 * math.sqrt(kept * (1 - kept) / len(NODES)))
    moves = np.bincount((found - labels) % num_classes, minlength=num_classes)[1:]
    share = (1 - kept) / (num_classes - 1)
    assert np.abs(moves / len(NODES) - share).max() < 5 * math.sqrt(share / len(NODES))
    assert found.min() >= 0
    assert found.max() < num_classes


def test_the_draw_is_a_function_of_secret_id_and_label():
    labels = NODES % 3
    first = randomize_labels(labels, NODES, 3, 1.0, SECRET)
    assert np.array_equal(first, randomize_labels(labels, NODES, 3, 1.0, SECRET))
    order = np.random.default_rng(0).permutation(len(NODES))
    assert np.array_equal(first[order], randomize_labels(labels[order], NODES[order], 3, 1.0, SECRET))
    for other in (
        randomize_labels(labels, NODES, 3, 1.0, SECRET[::-1]),
        randomize_labels(labels, NODES + 1, 3, 1.0, SECRET),
    ):
        assert (first != other).mean() > 0.3


@pytest.mark.parametrize("columns", [1, 4])
@pytest.mark.parametrize("as_text", [False, True])
def test_the_draw_of_a_node_does_not_depend_on_the_order_of_the_rows(columns, as_text):
    rng = np.random.default_rng(0)
    (party,) = tiny_parties(1, num_nodes=400)
    ids = rng.permutation(10_000)[:400]
    labels, classes = party.labels, party.classes
    if columns > 1:
        labels, classes = rng.integers(0, 2, (400, columns)), tuple("abcd")
    party = replace(
        party, ids=np.array([f"node {each}" for each in ids]) if as_text else ids, labels=labels, classes=classes
    )
    order = rng.permutation(400)
    here = randomize_training_labels(party, 0.5, SECRET)
    there = randomize_training_labels(party.restrict(order), 0.5, SECRET)
    assert np.array_equal(here.labels[order], there.labels)
    assert (here.labels != party.labels).any()
    some = np.sort(order[:200])  # another alignment has other rows as well
    assert np.array_equal(here.labels[some], randomize_training_labels(party.restrict(some), 0.5, SECRET).labels)


def test_an_integer_id_and_its_text_have_the_same_draw_and_other_texts_do_not():
    labels, texts = NODES % 3, NODES.astype(np.str_)  # an alignment turns integers into texts
    first = randomize_labels(labels, NODES, 3, 1.0, SECRET)
    assert np.array_equal(first, randomize_labels(labels, texts, 3, 1.0, SECRET))
    for form in ("0{}", "+{}", " {}", "{}.0", "9999999999999999999{}", "node {}", "\ud800{}"):
        other = np.array([form.format(each) for each in NODES])
        assert (first != randomize_labels(labels, other, 3, 1.0, SECRET)).mean() > 0.3


def test_an_unknown_label_stays_unknown():
    labels = np.where(NODES % 2, NODES % 3, -1)
    found = randomize_labels(labels, NODES, 3, 0.1, SECRET)
    assert np.array_equal(found < 0, labels < 0)


def test_only_training_labels_change_and_the_party_keeps_its_own():
    party = tiny_parties(num_nodes=400)[0]
    before = party.labels.copy()
    found = randomize_training_labels(party, 0.5, SECRET)
    rest = np.setdiff1d(np.arange(400), party.splits.train)
    assert np.array_equal(found.labels[rest], before[rest])
    assert (found.labels != before)[party.splits.train].mean() > 0.3
    assert np.array_equal(party.labels, before)


def test_several_classes_of_a_node_share_its_epsilon():
    party = tiny_parties(num_nodes=400)[0]
    rows = np.random.default_rng(0).integers(0, 2, (400, 4))
    found = randomize_training_labels(
        type(party)(**{**vars(party), "labels": rows, "classes": tuple("abcd")}), 4.0, SECRET
    )
    kept = (found.labels == rows)[party.splits.train].mean()
    assert kept == pytest.approx(math.e / (math.e + 1), abs=0.06)


def test_a_run_with_randomised_labels_repeats_itself_and_differs_from_one_without():
    keys = {"num_rounds": 2, "evaluate_every": 1}
    secrets = {name: bytes([index]) * 32 for index, name in enumerate("abc")}

    def digests(secrets=secrets, **more):
        return simulate(tiny_parties(), settings(**keys, **more), secrets=secrets).report.weights_sha256

    assert digests(label_epsilon=1.0) == digests(label_epsilon=1.0) != digests()
    assert digests(label_epsilon=1.0) != digests(label_epsilon=2.0)
