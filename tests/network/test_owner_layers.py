from __future__ import annotations

import numpy as np
import pytest

from glasu.runtime.trained_model import TrainedModel
from support.cluster import Cluster
from support.kits import simulate_with_secrets
from support.tiny import assert_same_run, tiny


@pytest.mark.parametrize("backward", ["local", "joint"])
def test_a_deeper_head_over_the_network_ends_with_the_bits_of_one_process(backward, kits, tmp_path):
    config, parties = tiny(labels="b", owner_layers=2, backbone="gcnii", backward=backward)
    cluster = Cluster(config, parties, kits, tmp_path)
    served, _ = cluster.run()
    here = simulate_with_secrets(parties, config)
    assert_same_run(served, here.report)
    _, found = cluster.predict(b=np.array([2, 5]))
    assert np.array_equal(found["b"].scores, TrainedModel.of(here.clients).scores(parties, np.array([2, 5])))
