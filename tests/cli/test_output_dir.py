"""An --out folder in which something else lies is refused in one line, before anything is written there."""

from __future__ import annotations

import json

import pytest

from cli.test_commands import SMALL_RUN, glasu, refused
from glasu.files import hold_folder
from glasu.pki.provision import provision


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """Return a folder with settings, data, kits, and one of every kind of result."""
    here = tmp_path_factory.mktemp("world")
    (here / "run.toml").write_text(SMALL_RUN)
    provision(here / "kits", ["a", "b", "c"], ["localhost"])
    assert glasu("split", here / "run.toml", "--out", here / "parties").returncode == 0
    assert glasu("train", here / "run.toml", "--out", here / "trained", "--quiet").returncode == 0
    for name, file, content in (
        ("server", "serving.json", {"run": "00", "closed": True}),
        ("joined", "joining.json", {"run": "00", "party": "b"}),
        ("unfinished", "checkpoints/run.json", {}),
    ):
        (here / name / file).parent.mkdir(parents=True)
        (here / name / file).write_text(json.dumps(content))
    (here / "joined" / "report.json").write_text('{"party": "b"}')
    (here / "server" / "report.json").write_text("{}")
    return here


HOLDS = {
    "trained": "results of glasu train",
    "unfinished": "results of glasu train",
    "server": "results of a server",
    "joined": "results of party 'b'",
    "kits/a": "a kit",
    "kits/ca": "the CA and the kits",
    "kits": "the CA and the kits",
    "parties/a": "a party's data",
}
OWN = {"train": ("trained", "unfinished"), "serve": ("server",), "doctor --listen": ("server",)}


def words(world, command, out):
    at_party = ["--server", "localhost:1", "--kit", world / "kits" / "a", "--out", out, "--wait", "0"]
    at_server = ["--listen", "127.0.0.1:0", "--kit", world / "kits" / "server", "--out", out, "--wait", "0"]
    return {
        "train": ["train", world / "run.toml", "--out", out],
        "serve": ["serve", world / "run.toml", *at_server],
        "serve --predict": ["serve", world / "run.toml", *at_server, "--predict"],
        "join": ["join", world / "parties" / "a", *at_party],
        "join --fresh": ["join", world / "parties" / "a", *at_party, "--fresh"],
        "join --predict": ["join", world / "parties" / "a", *at_party, "--predict"],
        "doctor --server": ["doctor", world / "parties" / "a", *at_party],
        "doctor --listen": ["doctor", world / "run.toml", *at_server],
    }[command]


COMMANDS = (
    "train",
    "serve",
    "serve --predict",
    "join",
    "join --fresh",
    "join --predict",
    "doctor --server",
    "doctor --listen",
)


def files(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("out", HOLDS)
def test_a_folder_of_another_role_or_kind_is_refused_and_left_as_it_is(world, command, out):
    if out in OWN.get(command.removesuffix(" --predict"), ()):
        pytest.skip("this is its own")
    before = files(world)
    refused(glasu(*words(world, command, world / out)), f"--out {world / out}: holds {HOLDS[out]}", "choose another")
    assert files(world) == before


def test_the_same_command_may_write_to_its_own_folder_again(world):
    assert glasu("train", world / "run.toml", "--out", world / "trained", "--quiet").returncode == 0


@pytest.mark.parametrize("name", ["nodes.parquet", "edges.csv"])
def test_predictions_are_not_written_over_a_partys_data(world, name):
    before = files(world / "parties")
    out = world / "parties" / "a" / name
    refused(glasu("predict", world / "trained", "--out", out), "is a party's data", "choose another file")
    assert files(world / "parties") == before
    assert glasu("predict", world / "trained", "--out", out.with_name("predictions.csv")).returncode == 0


def test_a_party_whose_folder_is_in_use_is_not_sent_to_another_folder(world):
    with hold_folder(world / "busy"):
        ended = glasu(*words(world, "join", world / "busy"))
    refused(ended, "another command is at work here; wait until it ends, or end it")


@pytest.mark.parametrize("out", ["parties/a", "server", "joined", "trained", "kits/a", "kits/ca"])
def test_kits_are_not_made_among_what_belongs_to_others(world, out):
    before = files(world)
    refused(glasu("provision", "--parties", "x", "--host", "h", "--out", world / out), f"--out {world / out}: holds ")
    assert files(world) == before
