"""A party loads exactly the checkpoint that it stated, and keeps the checkpoints before its first message apart."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest

from glasu.config import RunConfig
from glasu.errors import CheckpointError
from glasu.network.party_checkpoints import ALONE, PartyCheckpoint, PartyCheckpoints
from glasu.network.state_file import JoiningRecord, StateFile
from glasu.runtime.checkpointing import START
from glasu.runtime.simulation import make_clients, prepare_run
from glasu.runtime.telemetry import TelemetryState
from support.tiny import tiny_parties


@pytest.fixture
def state(tmp_path):
    return StateFile(tmp_path / "joining.json", JoiningRecord(party="a", run="00ff"))


def make_client(**train):
    parties = tiny_parties()
    config = prepare_run(RunConfig.from_dict({"train": {"preset": "none", **train}}), parties).config
    return make_clients(config, parties)[0]


def save(checkpoints, client, **progress):
    """Save the state of a client at another place of the run."""
    own = client.state()
    checkpoints.save(PartyCheckpoint(replace(own, progress=replace(own.progress, **progress)), TelemetryState()))
    checkpoints.wait_until_durable()


@pytest.fixture
def checkpoints(tmp_path, state):
    opened = PartyCheckpoints(tmp_path / "checkpoints", state, logging.getLogger("test"))
    yield opened
    opened.close()


def test_a_round_is_loaded_if_it_has_the_stated_digest(checkpoints):
    client = make_client()
    checkpoints.open(client)
    save(checkpoints, client, round=3)
    stated = checkpoints.list_rounds()
    assert stated.keys() == {0, 3}
    assert checkpoints.load_round(3, stated[3]).client.progress.round == 3
    assert checkpoints.load_own() is None


@pytest.mark.parametrize("fault", ["another digest", "missing", "damaged"])
def test_a_round_that_differs_from_the_statement_is_refused_with_the_remedy(checkpoints, tmp_path, fault):
    client = make_client()
    checkpoints.open(client)
    save(checkpoints, client, round=3)
    digest = checkpoints.list_rounds()[3]
    (file,) = (tmp_path / "checkpoints").glob("*.checkpoint")
    if fault == "another digest":
        digest = "0" * 64
    elif fault == "missing":
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(
        CheckpointError, match="party 'a': the checkpoint of round 3 is missing or has changed"
    ) as caught:
        checkpoints.load_round(3, digest)
    assert "start over with --fresh everywhere" in str(caught.value)


def test_a_checkpoint_of_the_warm_start_is_not_stated(checkpoints):
    client = make_client(warm_start=5)
    checkpoints.open(client)
    save(checkpoints, client, warm_steps=4)
    assert checkpoints.list_rounds() == {0: START}
    assert checkpoints.load_own().client.progress.warm_steps == 4


def test_a_party_that_trains_alone_keeps_its_checkpoints_in_a_subfolder(checkpoints, tmp_path):
    client = make_client(method="ensemble")
    assert client.is_alone
    checkpoints.open(client)
    save(checkpoints, client, round=2)
    assert len(list((tmp_path / "checkpoints" / ALONE).glob("*.checkpoint"))) == 1
    assert checkpoints.list_rounds() == {0: START}
    assert checkpoints.load_own().client.progress.round == 2
    assert len(checkpoints.clear()) == 1
    assert checkpoints.load_own() is None


def test_before_a_run_only_its_start_is_stated(checkpoints, state):
    state.update(run=None)
    assert checkpoints.list_rounds() == {0: START}
    assert not checkpoints.is_open
