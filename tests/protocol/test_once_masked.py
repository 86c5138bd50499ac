"""One release with masks and noise: the result of the run without masks, and what reaches the server."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.stats import kstest

from glasu.protocol.messages import Joint, JointScores, KeyOffer, Partial, Scores, Sealed
from glasu.protocol.requests import RoundDone
from glasu.runtime.trained_model import TrainedModel
from glasu.wire.message_key import SERVER
from support.masks import use_masks
from support.tiny import simulate, tiny

ONCE = {"release": "once", "aggregation_layers": (1,), "num_rounds": 4, "evaluate_every": 2, "num_local_steps": 2}
ROUNDS = {"aggregation_layers": (1, 3), "backward": "joint", "num_rounds": 3, "evaluate_every": 1}
NOISE = {"dp_noise_multiplier": 1.0}


def recorder():
    seen = []
    return seen, lambda message: seen.append(message) or message


@pytest.mark.parametrize("keys", [ONCE, {**ONCE, **NOISE}], ids=str)
def test_masks_change_the_result_by_the_rounding_of_the_grid_alone(keys):
    config, parties = tiny(**keys)
    plain = simulate(parties, config)
    found = [simulate(parties, use_masks(config, blind_server=blind)) for blind in (False, True)]
    assert found[0].report.weights_sha256 == found[1].report.weights_sha256
    for ours, theirs in zip(found[0].clients, plain.clients, strict=True):
        for name, tensor in theirs.progress.best_weights.items():
            torch.testing.assert_close(ours.progress.best_weights[name], tensor, rtol=1e-3, atol=1e-4)
    assert found[0].report.losses == pytest.approx(plain.report.losses, abs=1e-4)
    if "dp_noise_multiplier" not in keys:  # a row that differs in one bit has another noise
        assert found[0].report.test.metrics == pytest.approx(plain.report.test.metrics, abs=1e-3)
    spent = [each.report.privacy.differential_privacy for each in (plain, found[0])]
    assert spent[0] == spent[1]


@pytest.mark.parametrize("keys", [ONCE, ROUNDS], ids=str)
def test_with_masks_and_noise_only_keys_and_masked_noisy_rows_leave(keys):
    seen, carry = recorder()
    config, parties = tiny(**keys, **NOISE)
    done = simulate(parties, use_masks(config, blind_server=True), carry=carry)
    names = {type(message).__name__ for message in seen if message.key.client < 3}
    assert names - {"Gradient"} == {"KeyOffer", "Sealed", "Waiting", "Partial", "Scores", "Proof"}
    kinds = Partial | Joint | Scores | JointScores
    values = {each.key: each.value.ravel() for each in seen if isinstance(each, kinds)}  # a broadcast counts once
    assert kstest(np.concatenate([*values.values()]) / 2.0**32, "uniform").pvalue > 1e-8
    for ledger in done.report.privacy.ledger:
        for row in ledger.releases:
            parts = row["protection"].split("+")
            assert row["kind"] in ("key", "proof") or ("noise" in parts and parts[-2:] == ["masks", "blind"])
    summary = done.report.to_dict()["privacy"]["masks"]
    assert summary.get("clamped") is None  # the number depends on data


def test_every_attempt_agrees_on_keys_first_and_a_saved_model_repeats_the_release(tmp_path):
    seen, carry = recorder()
    config, parties = tiny(**ONCE, **NOISE)
    done = simulate(parties, use_masks(config), carry=carry)
    order = [type(each) for each in seen if each.key.client != SERVER]
    first = [order.index(kind) for kind in (KeyOffer, Sealed, Partial, Scores)]
    assert first == sorted(first)
    TrainedModel.of(done.clients).save(tmp_path)
    model = TrainedModel.load(tmp_path)
    again = model.predict_proba(parties)
    assert np.array_equal(again, model.predict_proba(parties))


def test_a_resumed_run_repeats_the_release_on_the_same_grid(tmp_path):
    plain, parties = tiny(**ONCE, **NOISE, precision="int8", checkpoint_every=1)
    config = use_masks(plain, blind_server=True)

    def interrupt(event):
        if isinstance(event, RoundDone) and event.round == 2:
            counts["rounds"] += 1
            if counts["rounds"] == 4:  # three parties end round 2 of the lower stage, then one of the upper stage
                raise KeyboardInterrupt

    counts = {"rounds": 0}
    with pytest.raises(KeyboardInterrupt):
        simulate(parties, config, checkpoints=tmp_path, observer=interrupt)
    resumed = simulate(parties, config, checkpoints=tmp_path)
    assert resumed.report.weights_sha256 == simulate(parties, config).report.weights_sha256
