"""The config of the SuperNode decides which party it is. A message can only name a session."""

from __future__ import annotations

import pytest

from glasu.integrations.flower.settings import PartySettings, ServerSettings
from glasu.records import RecordError

NODE = {"party": "/data/a", "server": "glasu.example.org:9443", "kit": "/kits/a", "out": "/runs"}
RUN = {"session": "first", "run": "run.toml", "listen": "0.0.0.0:9443", "kit": "/kits/server", "out": "/runs"}
OPENED = {"name": "first", "run": "0a1b"}


def test_a_party_joins_with_the_folder_kit_and_server_of_its_own_node():
    words = PartySettings.read({**NODE, "expect": "/run.toml", "wait": 30}, OPENED).build_command()
    assert words[:2] == ["join", "/data/a"]
    options = dict(zip(words[2::2], words[3::2], strict=True))
    assert options == {
        "--server": "glasu.example.org:9443",
        "--kit": "/kits/a",
        "--out": "/runs/first",
        "--run": "0a1b",
        "--expect": "/run.toml",
        "--wait": "30.0",
    }


def test_other_fields_of_a_message_are_ignored():
    hostile = {**OPENED, "party": "/data/b", "kit": "/kits/b", "server": "elsewhere:1", "out": "/etc"}
    assert PartySettings.read(NODE, hostile) == PartySettings.read(NODE, OPENED)


@pytest.mark.parametrize("name", ["", ".", "..", "../other", "a/b", "/etc", "-x", "a b", "a\n", "a" * 65, None, 3])
def test_a_session_cannot_name_a_folder_elsewhere(name):
    with pytest.raises(RecordError, match=r"session(\.name)?="):
        PartySettings.read(NODE, {**OPENED, "name": name})
    with pytest.raises(RecordError, match="session="):
        ServerSettings.read({**RUN, "session": name})


@pytest.mark.parametrize("run", ["", "--fresh", "0A", "zz", None])
def test_a_run_is_named_by_its_id(run):
    with pytest.raises(RecordError, match="run="):
        PartySettings.read(NODE, {**OPENED, "run": run})


@pytest.mark.parametrize("key", sorted(NODE))
def test_a_node_that_does_not_say_all_is_refused(key):
    with pytest.raises(RecordError, match=f"--node-config: {key}: is missing"):
        PartySettings.read({name: value for name, value in NODE.items() if name != key}, OPENED)
    with pytest.raises(RecordError, match=f"--node-config: {key}: has length 0"):
        PartySettings.read({**NODE, key: ""}, OPENED)


def test_a_key_that_is_not_known_is_refused():
    with pytest.raises(RecordError, match=r"--node-config: has the unknown key 'partition-id'; known keys are party, "):
        PartySettings.read({**NODE, "partition-id": 0}, OPENED)
    with pytest.raises(RecordError, match="the run's config: has the unknown key 'rounds'"):
        ServerSettings.read({**RUN, "rounds": 3})


def test_the_server_is_given_overrides_as_on_the_command_line():
    settings = ServerSettings.read({**RUN, "wait": 5, "set": "train.seed=1 'model.aggregation_layers=[1, 3]'"})
    assert settings.build_command() == [
        *("serve", "run.toml", "--listen", "0.0.0.0:9443", "--kit", "/kits/server", "--out", "/runs/first"),
        *("--wait", "5.0", "--set", "train.seed=1", "--set", "model.aggregation_layers=[1, 3]"),
    ]


@pytest.mark.parametrize("wait", [0, -1, True, "soon"])
def test_the_server_waits_a_number_of_seconds(wait):
    with pytest.raises(RecordError, match="wait="):
        ServerSettings.read({**RUN, "wait": wait})
