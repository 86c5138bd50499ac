"""Transcripts: what is recorded, who sees it, and files that are refused."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from glasu.errors import ConfigError, DataError
from glasu.privacy.policy import PolicyError
from glasu.protocol.messages import Agreed, Gradient, Joint, JointGradient, Losses, Partial, Proposal, TensorMessage
from glasu.protocol.requests import RoundDone
from glasu.runtime.delivery import Delivery
from glasu.runtime.policy_file import read_policy
from glasu.runtime.transcript import MANIFEST_FILE, MESSAGE_FILE, RECORD, RecordedRun
from glasu.wire.message_key import ALL_CLIENTS, SERVER, TO_ONE, Phase
from support.commands import SMALL_RUN, assert_refused, glasu
from support.masks import tiny_masked
from support.tiny import simulate, tiny

SECRETS = {"a": b"\x11" * 32, "b": b"\x22" * 32, "c": b"\x33" * 32}


@pytest.fixture
def recorded_run(tmp_path):
    config, parties = tiny(labels="b", sampler="neighbor", chunk_rows=3)
    report = simulate(parties, config, transcript=tmp_path, secrets=SECRETS).report
    return RecordedRun(tmp_path), report


def test_every_message_is_recorded_with_the_bytes_that_the_report_counts(recorded_run):
    transcript, report = recorded_run
    to_server = [each for each in transcript.entries if each.receiver == SERVER]
    to_clients = [each for each in transcript.entries if each.receiver != SERVER]
    copies = [3 if each.receiver == ALL_CLIENTS else 1 for each in to_clients]
    assert len(to_server) + sum(copies) == report.traffic["messages"]
    assert sum(each.stop - each.start for each in to_server) == report.traffic["bytes_to_server"]
    sizes = [(each.stop - each.start) * count for each, count in zip(to_clients, copies, strict=True)]
    assert sum(sizes) == report.traffic["bytes_to_clients"]


def test_recording_changes_no_bit(recorded_run):
    config, parties = tiny(labels="b", sampler="neighbor", chunk_rows=3)
    assert simulate(parties, config, secrets=SECRETS).report.weights_sha256 == recorded_run[1].weights_sha256


def test_the_server_sees_all_messages_and_a_party_its_own_and_those_it_received(recorded_run):
    transcript, _ = recorded_run
    server, party = transcript.view("server"), transcript.view("c")
    assert {entry.sender for entry, _ in server.messages(Proposal)} == {0, 1, 2}
    assert {entry.sender for entry, _ in party.messages(Proposal)} == {2}
    assert not list(party.messages(Gradient))  # the label owner's, which only the server receives
    assert len(list(party.messages(JointGradient))) == len(list(server.messages(JointGradient)))
    assert len(list(party.messages(Agreed))) == len(list(server.messages(Agreed)))
    assert all(entry.sender == 2 for entry, _ in party.messages(Losses))
    with pytest.raises(ConfigError, match="role 'd': the roles of this transcript are server, a, b, c"):
        transcript.view("d")


def test_chunks_are_put_together_and_the_mean_of_the_parts_is_the_aggregate(recorded_run):
    view = recorded_run[0].view("server")
    joint = view.matrices(Joint, Phase.TRAINING)[0]
    place = joint.key.round, joint.key.layer
    parts = [each for each in view.matrices(Partial, Phase.TRAINING) if (each.key.round, each.key.layer) == place]
    assert [part.sender for part in parts] == [0, 1, 2]
    assert len(joint.rows) > 3
    np.testing.assert_allclose(np.mean([part.rows for part in parts], axis=0), joint.rows, rtol=1e-5, atol=1e-6)


def test_the_files_hold_no_secret_and_only_their_owner_can_read_them(recorded_run, tmp_path):
    for name in (MANIFEST_FILE, MESSAGE_FILE):
        content = (tmp_path / name).read_bytes()
        assert not any(secret in content or secret.hex().encode() in content for secret in SECRETS.values())
        assert (tmp_path / name).stat().st_mode & 0o777 == 0o600


class ZerosForOneClient(Delivery):
    """Replaces the aggregates that client 1 gets by zeros."""

    def to_clients(self, messages):
        zeros = [replace(each, value=each.value * 0) if isinstance(each, Joint) else each for each in messages]
        return [zeros[client] if client == 1 else each for client, each in enumerate(messages)]


def test_messages_to_single_parties_are_recorded_one_by_one(tmp_path):
    config, parties = tiny(num_rounds=1)

    simulate(parties, config, transcript=tmp_path, delivery=ZerosForOneClient())
    transcript = RecordedRun(tmp_path)
    first, second = (transcript.view(role).matrices(Joint, Phase.TRAINING)[0].rows for role in "ab")
    assert first.any()
    assert not second.any()


def test_a_resumed_run_appends_and_a_repeated_message_counts_once(tmp_path):
    config, parties = tiny()
    simulate(parties, config, transcript=tmp_path / "whole")
    count = 0

    def crash(message):
        nonlocal count
        count += 1
        if count == 40:
            raise RuntimeError("killed")
        return message

    files = {"checkpoints": tmp_path / "saved", "transcript": tmp_path / "resumed"}
    with pytest.raises(RuntimeError, match="killed"):
        simulate(parties, config, carry=crash, **files)
    with (tmp_path / "resumed" / MESSAGE_FILE).open("ab") as file:
        file.write(RECORD.pack(SERVER, 500) + b"half a message")  # the process was killed while it wrote
    simulate(parties, config, **files)
    whole, resumed = (RecordedRun(tmp_path / name).view("server") for name in ("whole", "resumed"))
    assert len(resumed.entries) > len(whole.entries)
    for kind in (Partial, Joint):
        one, other = (view.matrices(kind) for view in (whole, resumed))
        assert len(one) == len(other)
        for left, right in zip(one, other, strict=True):
            assert np.array_equal(left.rows, right.rows)


HIDDEN = {"num_rounds": 2, "evaluate_every": 1}


def test_a_party_sees_its_own_tensors_in_the_clear_and_the_server_none(tmp_path):
    config, parties = tiny_masked(**HIDDEN)
    simulate(parties, config, transcript=tmp_path)
    transcript = RecordedRun(tmp_path)
    assert not any(entry.is_clear for entry in transcript.view("server").entries)
    for index, role in enumerate("abc"):
        clear = [entry for entry in transcript.view(role).entries if issubclass(entry.kind, TensorMessage)]
        assert {entry.receiver for entry in clear} == {TO_ONE + index}
        assert {entry.sender for entry in clear} == {index, SERVER}
    parts = [transcript.view(role).matrices(Partial, Phase.TRAINING)[0].rows for role in "abc"]
    joint = transcript.view("a").matrices(Joint, Phase.TRAINING)[0].rows
    np.testing.assert_allclose(np.mean(parts, axis=0), joint, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("receiver", [TO_ONE + 3, TO_ONE + 1], ids=["unknown party", "part of another party"])
def test_a_tensor_in_the_clear_of_another_party_is_refused(tmp_path, receiver):
    config, parties = tiny_masked(**HIDDEN)
    simulate(parties, config, transcript=tmp_path)
    first = next(each for each in RecordedRun(tmp_path).entries if each.receiver == TO_ONE and each.sender == 0)

    def change(content):
        content[first.start - RECORD.size : first.start] = RECORD.pack(receiver, first.stop - first.start)

    change_file(tmp_path, change)
    with pytest.raises(DataError, match=r"expected an unprotected tensor of a client 0\.\.2"):
        RecordedRun(tmp_path)


def test_a_transcript_without_tensors_in_the_clear_has_no_view_of_a_party(tmp_path):
    config, parties = tiny_masked(**HIDDEN)
    simulate(parties, config, transcript=tmp_path)

    def remove_clear(content):
        kept = (each for each in RecordedRun(tmp_path).entries if not each.is_clear)
        return b"".join(content[each.start - RECORD.size : each.stop] for each in kept)

    change_file(tmp_path, remove_clear)
    with pytest.raises(DataError, match="does not contain what the parties read from hidden sums"):
        RecordedRun(tmp_path).view("a")


def test_a_masked_run_that_is_resumed_records_the_same_tensors(tmp_path):
    config, parties = tiny_masked(num_rounds=4, checkpoint_every=1)
    simulate(parties, config, transcript=tmp_path / "whole")

    def crash(event):
        if isinstance(event, RoundDone) and event.round == 2:
            raise RuntimeError("killed")

    files = {"checkpoints": tmp_path / "saved", "transcript": tmp_path / "resumed"}
    with pytest.raises(RuntimeError, match="killed"):
        simulate(parties, config, observer=crash, **files)
    simulate(parties, config, **files)
    one, other = (RecordedRun(tmp_path / name).view("b").matrices(Joint) for name in ("whole", "resumed"))
    assert len(one) == len(other)
    for left, right in zip(one, other, strict=True):
        assert np.array_equal(left.rows, right.rows)


def test_a_release_that_the_policy_refuses_is_not_in_the_transcript(tmp_path):
    config, parties = tiny_masked(**HIDDEN)
    (tmp_path / "policy.toml").write_text("min_rows = 1000\n")
    policy = read_policy(tmp_path / "policy.toml")
    with pytest.raises(PolicyError):
        simulate(parties, config, transcript=tmp_path / "transcript", policies={"a": policy})
    assert not [each for each in RecordedRun(tmp_path / "transcript").entries if each.receiver == TO_ONE]


def change_file(folder, change):
    path = folder / MESSAGE_FILE
    content = bytearray(path.read_bytes())
    changed = change(content)
    path.write_bytes(content if changed is None else changed)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda content: content[:-1], "are left"),
        (lambda content: content + b"\0", "expected 10 bytes of a record, got 1"),
        (lambda content: content.__setitem__(slice(10, 14), b"PICK"), "another format"),
        (lambda content: content.__setitem__(slice(0, 2), b"\x01\x00"), "to the server"),
        (lambda content: content.__setitem__(slice(2, 10), (2**60).to_bytes(8, "little")), "is declared"),
    ],
)
def test_a_damaged_file_is_refused_with_its_place(recorded_run, tmp_path, change, words):
    change_file(tmp_path, change)
    with pytest.raises(DataError, match=rf"messages.bin, byte \d+: .*{words}"):
        RecordedRun(tmp_path)


def test_messages_of_another_run_or_version_are_refused(recorded_run, tmp_path):
    manifest = json.loads((tmp_path / MANIFEST_FILE).read_text())
    (tmp_path / MANIFEST_FILE).write_text(json.dumps({**manifest, "run": "00" * 12}))
    with pytest.raises(DataError, match="got one of another run"):
        RecordedRun(tmp_path)
    (tmp_path / MANIFEST_FILE).write_text(json.dumps({**manifest, "format": 1}))
    with pytest.raises(DataError, match="another version; record the run again"):
        RecordedRun(tmp_path)
    (tmp_path / MANIFEST_FILE).write_text(json.dumps({**manifest, "secret": "x"}))
    with pytest.raises(DataError, match="secret"):
        RecordedRun(tmp_path)


def test_a_folder_without_a_transcript_names_the_option_that_records_one(tmp_path):
    with pytest.raises(DataError, match="record one with glasu train --transcript"):
        RecordedRun(tmp_path / "nothing")


def test_the_command_records_only_on_request_and_an_audit_attacks_the_record(tmp_path):
    run = tmp_path / "run.toml"
    run.write_text(SMALL_RUN)
    assert glasu("train", run, "--out", tmp_path / "plain", "--quiet").returncode == 0
    assert not (tmp_path / "plain" / "transcript").exists()
    assert glasu("train", run, "--out", tmp_path / "recorded", "--quiet", "--transcript").returncode == 0
    assert RecordedRun(tmp_path / "recorded" / "transcript").view("a").matrices(Joint)
    audit = glasu("audit", tmp_path / "recorded", "--attack")
    assert audit.returncode == 0, audit.stderr
    expected = ("features: one evaluation", "training nodes from predictions", "edges from index sets")
    for words in (*expected, "view of a: sums, view split"):
        assert words in audit.stdout
        assert words in (tmp_path / "recorded" / "audit.html").read_text()
    by_b = glasu("audit", tmp_path / "recorded", "--attack", "--role", "b", "--json")
    assert {each["role"] for each in json.loads(by_b.stdout)["attacks"]} == {"b", "requester"}
    assert_refused(glasu("audit", tmp_path / "recorded", "--role", "b"), "--role b: needs --attack")
    assert_refused(
        glasu("audit", tmp_path / "recorded", "--attack", "--role", "x"), "role 'x': the roles of this transcript"
    )
    found = json.loads(glasu("audit", tmp_path / "recorded", "--attack", "--json").stdout)
    assert {"server", "c"} <= {each["role"] for each in found["attacks"]}
    assert_refused(glasu("audit", tmp_path / "plain", "--attack"), "record one with glasu train --transcript")
