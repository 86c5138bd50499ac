"""Canaries in features, labels and ids appear neither on the wire, nor at the server, nor in logs or ledgers."""

from __future__ import annotations

import dataclasses
import json
import struct
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

from glasu.network.join import PartyPerformer
from glasu.network.training_party import TrainingParty
from glasu.privacy.policy import Policy
from glasu.protocol.message_bytes import encode
from glasu.protocol.messages import Partial
from glasu.protocol.requests import Send
from glasu.runtime.audit import audit_folder
from glasu.runtime.audit_page import render_page, render_text
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
            self.purpose.sent.append(encode(request.message))
        return result


class RecordingParty(TrainingParty):
    """Keeps everything that a party states outside of messages."""

    everything: list = []  # noqa: RUF012 - of all parties of one test

    def __init__(self, *args):
        super().__init__(*args)
        self.sent = self.everything

    def hello(self):
        return self.note(super().hello())

    def statement(self):
        return self.note(super().statement())

    def finish(self, result):
        finished = super().finish(result)
        self.note(dataclasses.asdict(finished))
        return finished

    def note(self, payload):
        self.sent.append(json.dumps(payload).encode())
        return payload


def read_files(*folders: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for folder in folders for path in folder.rglob("*") if path.is_file()}


def test_no_canary_leaves_a_party(kits, tmp_path):
    config, parties = tiny(sampler="neighbor", features="auto")
    cluster = Cluster(config, [plant(party) for party in parties], kits, tmp_path)
    role = type("RecordingParty", (RecordingParty,), {"everything": []})
    policy = PolicyFile(tmp_path / "policy.toml", Policy(max_releases_per_row=1000), "digest")
    server = cluster.serve()
    roles = [cluster.join(name, role=role, performer=Recording, policy=policy) for name in "abc"]
    for each in roles:
        each.outcome()
    server.outcome()
    assert len(role.everything) > 30
    assert [found for content in role.everything if (found := find_canaries(content))] == []
    stored = read_files(tmp_path / "server")
    assert {path: found for path, content in stored.items() if (found := find_canaries(content))} == {}
    assert find_canaries("\n".join(line for lines in cluster.lines.values() for line in lines).encode()) == []
    for name in "abc":
        for file in ("ledger.jsonl", "report.json", "joining.json"):
            assert find_canaries((tmp_path / name / file).read_bytes()) == []
        audit = audit_folder(tmp_path / name)
        assert audit.failures == []
        assert find_canaries((render_text(audit) + render_page(audit, NOW)).encode()) == []


def test_no_canary_is_in_an_error_of_a_stopped_run(kits, tmp_path):
    config, parties = tiny()
    cluster = Cluster(config, [plant(party) for party in parties], kits, tmp_path)
    policy = PolicyFile(tmp_path / "policy.toml", Policy(max_releases_per_row=1), "digest")
    server, a, c = cluster.serve(), cluster.join("a"), cluster.join("c")
    b = cluster.join("b", policy=policy)
    for role in (server, a, b, c):
        assert find_canaries(str(role.error()).encode()) == []
    assert find_canaries("\n".join(line for lines in cluster.lines.values() for line in lines).encode()) == []


def test_the_search_finds_a_planted_leak():
    _, parties = tiny()
    leak = Partial(Key(bytes(12), Phase.TRAINING, 0), plant(parties[0]).features.astype("<f4"))
    assert find_canaries(encode(leak)) == [struct.pack("<f", NUMBER)]
    assert find_canaries(json.dumps({"ids": plant(parties[0]).ids.tolist()}).encode()) == [ID.encode()]
