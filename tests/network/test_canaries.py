"""Canaries in features, labels and ids appear neither on the wire, nor at the server, nor in logs or ledgers."""

from __future__ import annotations

import dataclasses
import json
import struct
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest

from glasu.data.tables import write_table
from glasu.network.alignment_party import AlignmentParty
from glasu.network.join import PartyPerformer
from glasu.network.prediction_party import PredictionParty
from glasu.network.training_party import TrainingParty
from glasu.privacy.policy import Policy
from glasu.protocol.message_bytes import encode
from glasu.protocol.messages import Partial
from glasu.protocol.requests import Send
from glasu.records import to_plain
from glasu.runtime.audit import audit_folder
from glasu.runtime.audit_page import render_audit_page, render_text
from glasu.runtime.policy_file import PolicyFile
from glasu.wire.message_key import Key, Phase
from support.cluster import Cluster
from support.tiny import tiny

NOW = datetime(2026, 1, 2, tzinfo=UTC)
NUMBER, ID, LABEL = 97531.8642, "P-canary-", "canarydiagnosis"
CANARIES = (
    struct.pack("<f", NUMBER),
    struct.pack("<d", NUMBER),
    b"97531.8",
    ID.encode(),
    LABEL.encode(),
)


def plant(party):
    """Return a party whose ids, class names and features contain canaries."""
    ids = np.array([f"{ID}{number:04d}" for number in range(party.num_nodes)])
    features = np.array(party.features)
    features[::5, 1] = NUMBER
    classes = tuple(f"{LABEL} {name}" for name in party.classes)
    return dataclasses.replace(party, ids=ids, features=features, classes=classes)


def find_canaries(content: bytes) -> list[bytes]:
    return [canary for canary in CANARIES if canary in content]


class Recording(PartyPerformer):
    """Keeps the bytes of every message that leaves."""

    def __call__(self, request):
        result = super().__call__(request)
        if isinstance(request, Send):
            self.work.sent.append(encode(request.message))
        return result


class Noting:
    """Keeps everything that a party states outside of messages, in the list `sent`."""

    def hello(self):
        return self.note(super().hello())

    def statement(self):
        return self.note(super().statement())

    def finish(self, result):
        finished = super().finish(result)
        self.note(to_plain(finished))
        return finished

    def note(self, payload):
        self.sent.append(json.dumps(payload).encode())
        return payload


def record(kind, sent):
    """Return a class of work whose processes all keep what they send in this list."""
    return type(f"Recording{kind.__name__}", (Noting, kind), {"sent": sent})


def read_files(*folders: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for folder in folders for path in folder.rglob("*") if path.is_file()}


MASKS = {"secure_aggregation": "masks"}
ONCE = {"features": "auto", "release": "once", "aggregation_layers": (1,)}
RUNS = {
    "plain": ({"sampler": "neighbor", "features": "auto"}, {}),
    "masks": ({"features": "auto", "precision": "int8"}, {**MASKS, "blind_server": True}),
    "masks, one owner": ({"features": "auto", "labels": "b"}, MASKS),
    "one release with noise": (ONCE, {"profile": "dp", "label_epsilon": 2.0}),
    "one release with noise, noisy probabilities": (ONCE, {"dp_noise_multiplier": 1.0}),
}


@pytest.mark.parametrize("name", RUNS)
def test_no_canary_leaves_a_party(name, pinned_kits, tmp_path):
    keys, privacy = RUNS[name]
    config, parties = tiny(**keys)
    cluster = Cluster(config.replace(privacy=privacy), [plant(party) for party in parties], pinned_kits, tmp_path)
    sent = []
    policy = PolicyFile(tmp_path / "policy.toml", Policy(max_releases_per_row=1000), "digest")
    run(
        cluster.serve(),
        [cluster.join(name, record(TrainingParty, sent), Recording, policy=policy) for name in "abc"],
    )
    assert len(sent) > 15
    assert find_canaries(b"\n".join(sent)) == []
    assert_clean(cluster, *(tmp_path / name for name in "abc"))
    trained, cluster.port = len(sent), 0
    run(
        cluster.serve_prediction(),
        [cluster.predict_with(name, [5, 10, 3], Recording, record(PredictionParty, sent)) for name in "abc"],
    )
    assert len(sent) > trained + 6
    assert find_canaries(b"\n".join(sent)) == []
    assert_clean(cluster, *(tmp_path / name for name in "abc"))
    for name in "abc":
        for file in ("report.json", "joining.json", "prediction.json"):
            assert find_canaries((tmp_path / name / file).read_bytes()) == []


def run(server, roles):
    """Wait until all roles are done."""
    for role in (*roles, server):
        role.outcome()


def assert_clean(cluster, *parties):
    """Find no canary at the server, in the logs, and in the ledgers of the parties and their audits."""
    stored = read_files(cluster.folder / "server")
    assert stored
    assert {path: found for path, content in stored.items() if (found := find_canaries(content))} == {}
    assert find_canaries("\n".join(line for lines in cluster.lines.values() for line in lines).encode()) == []
    for folder in parties:
        assert find_canaries((folder / "ledger.jsonl").read_bytes()) == []
        audit = audit_folder(folder)
        assert audit.failures == []
        assert find_canaries((render_text(audit) + render_audit_page(audit, NOW)).encode()) == []


def write_planted_folder(folder, party, first):
    """Write the tables of a planted party, whose ids begin with this number."""
    planted = plant(party)
    ids = [f"{ID}{number:04d}" for number in range(first, first + party.num_nodes)]
    columns = {"id": ids, **{f"x{at}": planted.features[:, at] for at in range(planted.num_features)}}
    source, target = planted.graph.edge_index()
    folder.mkdir(parents=True)
    write_table(columns, folder / "nodes.parquet")
    write_table({"source": [ids[at] for at in source], "target": [ids[at] for at in target]}, folder / "edges.parquet")
    (folder / "party.toml").write_text("")
    return folder


@pytest.mark.parametrize("max_ids", [1000, 20], ids=["done", "refused"])
def test_no_canary_leaves_a_party_in_an_alignment(max_ids, kits, tmp_path):
    config, parties = tiny(chunk_rows=7)
    folders = [write_planted_folder(tmp_path / each.name, each, first) for first, each in enumerate(parties)]
    cluster, sent = Cluster(config, (), kits, tmp_path), []
    server = cluster.serve_alignment()
    roles = [
        cluster.align_with(*each, max_ids=max_ids, performer=Recording, role=record(AlignmentParty, sent))
        for each in zip("abc", folders, strict=True)
    ]
    errors = [role.error() for role in (*roles, server)]
    assert [error is None for error in errors] == [max_ids == 1000] * 4
    assert find_canaries("\n".join(map(str, errors)).encode()) == []
    assert len(sent) > (30 if max_ids == 1000 else 5)
    assert find_canaries(b"\n".join(sent)) == []
    assert_clean(cluster, *folders)


@pytest.mark.parametrize("privacy", [{}, MASKS], ids=["plain", "masks"])
def test_no_canary_is_in_an_error_of_a_stopped_run(privacy, pinned_kits, tmp_path):
    config, parties = tiny()
    cluster = Cluster(config.replace(privacy=privacy), [plant(party) for party in parties], pinned_kits, tmp_path)
    policy = PolicyFile(tmp_path / "policy.toml", Policy(max_releases_per_row=1), "digest")
    server, a, c = cluster.serve(), cluster.join("a"), cluster.join("c")
    b = cluster.join("b", policy=policy)
    for role in (server, a, b, c):
        assert "max_releases_per_row = 1" in str(role.error())
        assert find_canaries(str(role.error()).encode()) == []
    assert find_canaries("\n".join(line for lines in cluster.lines.values() for line in lines).encode()) == []


def test_the_search_finds_a_planted_leak():
    _, parties = tiny()
    leak = Partial(Key(bytes(12), Phase.TRAINING, 0), plant(parties[0]).features.astype("<f4"))
    assert find_canaries(encode(leak)) == [struct.pack("<f", NUMBER)]
    assert find_canaries(json.dumps({"ids": plant(parties[0]).ids.tolist()}).encode()) == [ID.encode()]
