from __future__ import annotations

import numpy as np
from sklearn.metrics import roc_auc_score

from glasu.privacy.attacks.membership import count_common, measure_certainty


def test_nodes_in_the_sets_of_all_clients_are_those_of_the_batches():
    rng, members = np.random.default_rng(0), np.arange(50) < 20
    rounds = []
    for _ in range(60):
        batch = rng.choice(20, 5, replace=False)
        rounds.append([np.union1d(batch, rng.choice(50, 6, replace=False)) for _ in range(3)])
    assert roc_auc_score(members, count_common(rounds, 50)) > 0.95


def test_certainty_is_the_greatest_probability():
    assert measure_certainty(np.array([[0.2, 0.8], [0.5, 0.5]])).tolist() == [0.8, 0.5]
