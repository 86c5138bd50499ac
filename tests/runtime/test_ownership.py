"""Runs do not change the caller's labels and files."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import glasu
from support.monolith import settings, tiny_parties


def parties_with_other_labels_at_the_first():
    parties = tiny_parties()
    other = np.arange(parties[0].num_nodes) % 2
    return [replace(parties[0], labels=other, classes=("yes", "no")), *parties[1:]]


@pytest.mark.parametrize("method", ["glasu", "centralized"])
def test_only_the_named_owners_labels_count(method):
    parties = parties_with_other_labels_at_the_first()
    config = settings(num_rounds=3).replace(train={"labels": parties[2].name, "method": method})
    model = glasu.GLASUClassifier(
        config=config, **{key: getattr(config.model, key) for key in ("backbone", "num_layers", "hidden")}
    ).fit(parties)
    assert model.classes_.tolist() == list(parties[2].classes)
    assert model.score(parties) == pytest.approx(model.report_.test.accuracy)


def test_saving_a_model_touches_no_file_but_its_own(tmp_path):
    from glasu.runtime.simulation import simulate

    foreign = tmp_path / "foreign.safetensors"
    foreign.write_bytes(b"not ours")
    config = settings(num_rounds=1)
    model = glasu.TrainedModel.of(simulate(tiny_parties(), config).clients)
    model.save(tmp_path)
    assert foreign.read_bytes() == b"not ours"
    fewer = simulate(tiny_parties()[:2], config)
    glasu.TrainedModel.of(fewer.clients).save(tmp_path)
    assert not (tmp_path / f"{model.names[2]}.safetensors").exists()
    assert glasu.TrainedModel.load(tmp_path).names == model.names[:2]
