"""Payloads of the handshake and state files: the strict reader gives one clear line for anything malformed."""

from __future__ import annotations

import errno
import json
import os
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from glasu.errors import CheckpointError, DataError
from glasu.network.facts import collect_server_facts
from glasu.network.handshake import (
    Code,
    HelloPayload,
    Process,
    RefusalError,
    ResultPayload,
    StatementPayload,
    WelcomePayload,
    read_payload,
)
from glasu.network.purposes import TRAINING
from glasu.network.run_folder import open_serving
from glasu.network.state_file import STARTS, JoiningRecord
from glasu.records import to_plain
from glasu.registry import Extension
from support.joining import open_joining

EXTENSION = Extension("mine", "1.0", "ab" * 32)
FACTS = replace(collect_server_facts(TRAINING, parties=3), extensions=(EXTENSION,))
PAYLOADS = [
    HelloPayload(facts=FACTS, process=Process(incarnation=2, name="x", before=("w",)), rounds={0: "start", 3: "ab"}),
    HelloPayload(facts=FACTS, process=None, finished=ResultPayload(weights_sha256="ab"), only="00", fresh=True),
    WelcomePayload(config={"train": {"seed": 1}}, roster=("a", "b"), index=1, run="00"),
    StatementPayload(digest="ab", settings={"train.seed": 1}, rounds={}, facts=FACTS),
    ResultPayload(received=3),
]


@pytest.mark.parametrize("payload", PAYLOADS, ids=lambda payload: type(payload).__name__)
def test_every_payload_survives_the_wire(payload):
    sent = json.loads(json.dumps(to_plain(payload)))
    assert read_payload(type(payload), sent, "a peer") == payload


@pytest.mark.parametrize(
    "change",
    [
        {"roster": 7},
        {"roster": ["a", 1]},
        {"index": "0"},
        {"index": -1},
        {"config": None},
        {"run": None},
        {"more": "\x1b[2J" * 1000},
    ],
    ids=str,
)
def test_a_malformed_welcome_is_refused_with_a_code_and_one_line(change):
    welcome = {"config": {}, "roster": ["a", "b"], "index": 0, "run": "00"}
    assert read_payload(WelcomePayload, welcome, "the welcome").index == 0
    with pytest.raises(RefusalError) as refused:
        read_payload(WelcomePayload, {**welcome, **change}, "the welcome")
    assert (refused.value.code, refused.value.exit_code) == (Code.INVALID_PAYLOAD, 2)
    assert str(refused.value).isprintable()
    assert len(str(refused.value)) < 2000


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b"{",
        b'{"run": 7}',
        b'{"attempt": "one"}',
        b'{"attempt": null}',
        b'{"processes": {"a": [1, "x"]}}',
        b'{"processes": 3}',
        b'{"roster": {}}',
        b'{"settings": {"train.seed": {}}}',
        b'{"unknown": 1}',
        b"[" * 100_000,
        b"\xff",
    ],
)
@pytest.mark.parametrize("open_state", [open_serving, lambda out: open_joining(out, "a")], ids=["serving", "joining"])
def test_a_damaged_state_file_is_named_in_one_line(content, open_state, tmp_path):
    name = "serving.json" if open_state is open_serving else "joining.json"
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError) as damaged:
        open_state(tmp_path)
    assert damaged.value.exit_code == 2
    assert str(damaged.value).startswith(f"{tmp_path / name}: ")
    assert len(str(damaged.value).splitlines()) == 1
    assert "Restore it, or start over" in str(damaged.value)


def test_a_state_file_keeps_every_field(tmp_path):
    serving = open_serving(tmp_path)
    process = Process(incarnation=1, name="x")
    serving.update(run="00", digest="d", settings={"train.seed": 1}, roster=("a",), attempt=4, processes={"a": process})
    assert open_serving(tmp_path).value == serving.value
    joining = open_joining(tmp_path, "a")
    joining.update(run="00", starts=("x", "y"), finished=ResultPayload(weights_sha256="ab"), closed=True)
    assert open_joining(tmp_path, "b").value == joining.value


def test_a_state_that_starts_over_reaches_the_disk_when_it_is_written(tmp_path):
    state = open_serving(tmp_path)
    state.update(run="00", attempt=4)
    state.start_over()
    state.update(run="11")
    assert open_serving(tmp_path).value.run == "00"
    state.write_pending()
    assert (open_serving(tmp_path).value.run, open_serving(tmp_path).value.attempt) == ("11", 0)


CHANGES = st.one_of(
    st.fixed_dictionaries({"incarnation": st.integers(1, 9), "starts": st.tuples(st.sampled_from("xyz"))}),
    st.fixed_dictionaries({"run": st.sampled_from(("00", "11")), "closed": st.booleans()}),
    st.fixed_dictionaries({"admitted": st.tuples(st.sampled_from("xyz")), "data": st.sampled_from(("d", None))}),
)


@settings(max_examples=25, deadline=None)
@given(before=st.lists(CHANGES, max_size=4), after=st.lists(CHANGES, max_size=4))
def test_a_party_that_starts_over_keeps_its_old_part_on_disk_and_counts_its_starts_there(before, after):
    with TemporaryDirectory() as folder:
        out = Path(folder)
        state = open_joining(out, "a")
        for change in before:
            state.update(**change)
        old, starts = state.value, {name: getattr(state.value, name) for name in STARTS}
        state.start_over(keep=STARTS)
        assert state.starts_over
        assert state.value == JoiningRecord(party="a", **starts)
        for change in after:
            state.update(**change)
            kept = {name: getattr(state.value, name) for name in STARTS}
            assert open_joining(out, "a").value == replace(old, **kept)
        state.write_pending()
        assert not state.starts_over
        assert open_joining(out, "a").value == state.value


def test_a_full_disk_is_an_error_that_names_the_file(tmp_path, monkeypatch):
    def fail(handle):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("os.fsync", fail)
    state = open_serving(tmp_path)
    with pytest.raises(CheckpointError, match="No space left on device") as full:
        state.update(run="00")
    assert str(full.value).startswith(f"{tmp_path / 'serving.json'}: ")
    assert str(tmp_path) not in full.value.public_message
    assert state.value.run is None
