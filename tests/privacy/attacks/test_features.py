"""Features from representations, against scikit-learn and on planted data."""

from __future__ import annotations

import numpy as np
from sklearn.metrics import r2_score

from glasu.privacy.attacks.features import (
    choose_known,
    guess_features,
    measure_r2,
    measure_word_share,
    subtract_own,
)

NODES = 200


def test_a_linear_map_of_the_features_gives_them_all():
    rng = np.random.default_rng(0)
    features = rng.standard_normal((NODES, 5))
    observed = features @ rng.standard_normal((5, 12))
    known = choose_known(NODES, 0.5, 0)
    assert measure_r2(guess_features(observed, features, known), features[~known]) > 0.999


def test_noise_gives_nothing():
    rng = np.random.default_rng(0)
    features, known = rng.standard_normal((NODES, 5)), choose_known(NODES, 0.5, 0)
    guesses = guess_features(rng.standard_normal((NODES, 12)), features, known)
    assert abs(measure_r2(guesses, features[~known])) < 0.1


def test_features_at_unknown_nodes_are_not_read():
    rng = np.random.default_rng(0)
    features, observed, known = rng.random((NODES, 4)), rng.random((NODES, 6)), choose_known(NODES, 0.5, 0)
    hidden = np.where(known[:, None], features, np.nan)
    assert np.array_equal(guess_features(observed, hidden, known), guess_features(observed, features, known))


def test_without_observations_the_guess_is_the_mean_of_the_known_rows():
    features, known = np.random.default_rng(0).random((NODES, 4)), choose_known(NODES, 0.5, 0)
    guesses = guess_features(np.empty((NODES, 0)), features, known)
    np.testing.assert_allclose(guesses, np.tile(features[known].mean(axis=0), (len(guesses), 1)))


def test_r2_is_that_of_scikit_learn():
    rng = np.random.default_rng(0)
    truth, guesses = rng.random((30, 4)), rng.random((30, 4))
    np.testing.assert_allclose(measure_r2(guesses, truth), r2_score(truth, guesses))


def test_a_row_with_k_words_has_k_guesses():
    features = np.array([[1, 1, 0, 0], [0, 0, 0, 1]])
    guesses = np.array([[0.9, 0.1, 0.5, 0.2], [0.1, 0.2, 0.3, 0.4]])
    assert measure_word_share(guesses, features) == 2 / 3


def test_known_rows_are_the_given_share_and_depend_on_the_seed():
    one, other = choose_known(NODES, 0.25, 0), choose_known(NODES, 0.25, 1)
    assert one.sum() == other.sum() == 50
    assert not np.array_equal(one, other)


def test_with_two_parties_the_mean_minus_the_own_part_is_the_other_part():
    own, other = np.random.default_rng(0).random((2, 7, 3))
    np.testing.assert_allclose(subtract_own((own + other) / 2, own, 2), other)
