"""A training whose parties are started by Flower: a real SuperLink, real SuperNodes, the real `flwr run`."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from glasu.config import RunConfig
from glasu.data.folders import write_party
from glasu.data.sources.catalog import load_parties
from support.fleet import Fleet, write_node_key
from support.kits import make_kits, simulate_with_secrets
from support.small import SMALL

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'glasu[flower]'")
pytestmark = pytest.mark.slow

NAMES = ("a", "b", "c")
SETTINGS = (
    SMALL
    + """\
aggregation_layers = [0, 1]
[train]
num_rounds = 12
evaluate_every = 6
"""
)


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Return a SuperLink with a registered SuperNode for each of three parties; all end with the module."""
    folder = tmp_path_factory.mktemp("fleet")
    make_kits(folder / "kits", NAMES, ["localhost", "127.0.0.1"])
    (folder / "run.toml").write_text(SETTINGS)
    for party in load_parties(RunConfig.from_toml(folder / "run.toml")):
        write_party(party, folder / "parties" / party.name)
    made = Fleet(folder, folder / "kits")
    try:
        made.superlink()
        for name in NAMES:
            write_node_key(folder / name)
            made.register(name)
            made.supernode(name)
        yield made
    finally:
        made.stop()


def in_one_process(folder: Path, *overrides: str) -> list[str]:
    parties = load_parties(RunConfig.from_toml(folder / "run.toml"))  # the folders' content does not depend on the seed
    return list(
        simulate_with_secrets(parties, RunConfig.from_toml(folder / "run.toml", overrides)).report.weights_sha256
    )


def weights_of(folder: Path, session: str, name: str) -> list[str]:
    return json.loads((folder / "runs" / name / session / "report.json").read_text())["weights_sha256"]


SESSIONS = {  # between them every sampler, both ways to sample neighbours, both aggregations, labels everywhere or not
    "mean, everywhere, neighbor": ["train.sampler=neighbor"],
    "mean, everywhere, neighbor by layer": ["train.sampler=neighbor", "train.sampling=layer"],
    "mean, everywhere, shared": ["train.sampler=shared"],
    "mean, at b, full": ["train.sampler=full", "train.labels=b", "train.seed=3"],
    "concat, everywhere, full": ["train.sampler=full", "model.aggregation=concat"],
    "concat, everywhere, neighbor": ["train.sampler=neighbor", "model.aggregation=concat"],
    "concat, at a, shared": ["train.sampler=shared", "model.aggregation=concat", "train.labels=a"],
}


@pytest.mark.parametrize("name", SESSIONS)
def test_a_session_ends_with_the_weights_of_a_run_in_one_process(fleet, name):
    overrides, session = SESSIONS[name], f"session-{list(SESSIONS).index(name)}"
    before = {party: fleet.log(party).count("Receiving: train message") for party in NAMES}
    done = fleet.run(session, set=" ".join(overrides))
    said = done.stdout + done.stderr
    assert (fleet.folder / "runs" / "server" / session / "report.json").is_file(), said
    expected = in_one_process(fleet.folder, *overrides)
    assert weights_of(fleet.folder, session, "server") == expected, said
    for index, party in enumerate(NAMES):
        assert weights_of(fleet.folder, session, party) == [expected[index]]
        assert fleet.log(party).count("Receiving: train message") == before[party] + 1  # not one per step
        assert f"glasu: {party} (node " in said
        assert f"weights {expected[index]}" in said


def test_a_key_that_was_not_registered_is_refused(fleet):
    shutil.copytree(fleet.folder / "parties" / "a", fleet.folder / "parties" / "stranger")
    write_node_key(fleet.folder / "stranger")
    fleet.supernode("stranger", kit=str(fleet.kits / "a"))
    process = fleet.running.pop("stranger")
    try:
        assert process.wait(60) != 0
    finally:
        process.kill()
    assert "Failed to activate SuperNode" in fleet.log("stranger")


def test_a_party_that_cannot_take_part_ends_the_session_for_all_and_it_can_be_resumed(fleet):
    manifest, aside = fleet.folder / "parties" / "c" / "party.toml", fleet.folder / "party.toml"
    manifest.rename(aside)
    try:
        said = fleet.run("again").stdout
    finally:
        aside.rename(manifest)
    assert "this party could not take part; see the log of its SuperNode" in said
    assert str(fleet.folder / "parties") not in said  # only the party knows the path of its data
    assert str(manifest) in fleet.log("c")
    said = fleet.run("again").stdout
    assert weights_of(fleet.folder, "again", "server") == in_one_process(fleet.folder), said


def test_flwr_stop_ends_every_command_of_the_session_and_it_can_be_resumed(fleet):
    changes = ("train.num_rounds=1200", "train.patience=0")  # long enough to last until `flwr stop` has started
    run = fleet.begin("stopped", set=" ".join(changes))
    fleet.wait(lambda: all("round 5/1200 done" in fleet.since(name) for name in NAMES), "five rounds are done")
    assert len(fleet.commands()) == 4
    assert fleet.flwr("stop", run, "test").returncode == 0
    fleet.wait(lambda: not fleet.commands(), "all commands have ended", 90)
    said = fleet.run("stopped", set=" ".join(changes)).stdout
    assert "continuing after round" in said
    assert "continuing after round 0." not in said
    assert weights_of(fleet.folder, "stopped", "server") == in_one_process(fleet.folder, *changes)
