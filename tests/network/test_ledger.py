"""Ledgers between machines: entered before anything leaves, remembered by the others, and never rolled back."""

from __future__ import annotations

import dataclasses
import hashlib
import json

import pytest

from glasu.errors import ProtocolError
from glasu.network.handshake import Code, RefusalError
from glasu.network.join import PartyPerformer
from glasu.network.training_party import TrainingParty
from glasu.network.training_server import TrainingServer
from glasu.privacy.ledger import LedgerError, PeerHeads, Start
from glasu.privacy.policy import Policy, PolicyError
from glasu.protocol.message_bytes import encode
from glasu.protocol.messages import Chosen, Losses, Scores, TensorMessage
from glasu.protocol.requests import RoundDone, Send
from glasu.runtime.audit import audit_folder
from glasu.runtime.ledger_file import read_ledger_file
from glasu.runtime.policy_file import PolicyFile
from support.cluster import Cluster
from support.kits import simulate_with_secrets
from support.ledgers import list_entries
from support.roles import Killed, Role
from support.tiny import assert_same_end, tiny


def list_failures(cluster, name, *peers) -> list[str]:
    folders = [cluster.folder / peer for peer in peers]
    return [f"{check.check}: {check.text}" for check in audit_folder(cluster.folder / name, folders).failures]


def cut_tail(cluster, name, lines) -> None:
    path = cluster.folder / name / "ledger.jsonl"
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:-lines]))


class Watching(PartyPerformer):
    """Looks at the ledger file when messages have just left."""

    def send(self, messages):
        super().send(messages)
        entered = {entry.sha256 for entry in list_entries(self.work.options.out / "ledger.jsonl")}
        for message in messages:
            if isinstance(message, TensorMessage | Losses):
                content = message.value if isinstance(message, TensorMessage) else message.values
                assert hashlib.sha256(content.tobytes()).hexdigest() in entered


def test_everything_that_leaves_is_in_the_file_before(kits, tmp_path):
    config, parties = tiny(sampler="neighbor", labels="b")
    cluster = Cluster(config, parties, kits, tmp_path)
    server, roles = cluster.serve(), [cluster.join(name, performer=Watching) for name in "abc"]
    for role in roles:
        role.outcome()
    served = server.outcome()
    assert served.weights_sha256 == simulate_with_secrets(parties, config).report.weights_sha256
    for name, others in zip("abc", ("bc", "ac", "ab"), strict=True):
        assert list_failures(cluster, name, *others, "server") == []
        said = {check.check for check in audit_folder(tmp_path / name).checks if check.level == "good"}
        assert said >= {f"chain of {name}", "report.json"}
        records = [found.record for found in read_ledger_file(tmp_path / name / "ledger.jsonl")]
        heads = [record.heads for record in records if isinstance(record, PeerHeads)]
        assert [set(each) for each in heads] == [set(others)] * 2  # at the start and at the end
        assert min(head.length for head in heads[-1].values()) > 5


def test_a_party_that_dies_and_returns_leaves_a_longer_valid_ledger(kits, tmp_path):
    config, parties = tiny()
    cluster = Cluster(config, parties, kits, tmp_path)
    server, a, c = cluster.serve(), cluster.join("a"), cluster.join("c")
    left = [1]

    def die(event):
        if left and isinstance(event, RoundDone) and event.round == 1:
            left.clear()
            raise Killed

    assert isinstance(cluster.join("b", observer=die).error(), Killed)
    before = (tmp_path / "b" / "ledger.jsonl").read_bytes()
    b = cluster.join("b")
    for role in (a, b, c):
        role.outcome()
    assert_same_end(server.outcome(), simulate_with_secrets(parties, config).report)
    assert (tmp_path / "b" / "ledger.jsonl").read_bytes().startswith(before)
    starts = [found.record for found in read_ledger_file(tmp_path / "b" / "ledger.jsonl")]
    assert [each.resumes for each in starts if isinstance(each, Start)] == [False, True]
    assert list_failures(cluster, "b", "a", "c", "server") == []
    stated = json.loads((tmp_path / "b" / "report.json").read_text())["privacy"]["ledger"][0]["releases"]
    assert sum(row["bytes"] for row in stated) == sum(entry.size for entry in list_entries(tmp_path / "b/ledger.jsonl"))


def predict_with_a_cut_ledger(cluster) -> tuple[Role, dict[str, Role]]:
    """Train, cut the end of b's ledger, and start a prediction."""
    cluster.run()
    cut_tail(cluster, "b", 6)
    cluster.port = 0
    return cluster.serve_prediction(), {name: cluster.predict_with(name) for name in "abc"}


def test_the_server_refuses_a_party_whose_ledger_was_cut(kits, tmp_path):
    config, parties = tiny()
    cluster = Cluster(config, parties, kits, tmp_path)
    server, roles = predict_with_a_cut_ledger(cluster)
    error = roles["b"].error()
    assert isinstance(error, RefusalError)
    assert error.code == Code.CUT_LEDGER
    assert "records before, and has" in str(error)
    assert "Restore its ledger file" in str(error)
    cluster.end(server, roles["a"], roles["c"])
    assert any("the server saw" in each for each in list_failures(cluster, "b", "server"))
    assert any("a saw" in each for each in list_failures(cluster, "b", "a"))


class Forgetful(TrainingServer):
    """Does not remember the ledgers."""

    def note_results(self, results):
        super().note_results(results)
        self.state.update(ledgers={})


def test_a_party_refuses_a_peer_whose_ledger_was_cut_if_the_server_forgets(kits, tmp_path):
    config, parties = tiny()
    cluster = Cluster(config, parties, kits, tmp_path)
    server, roles = cluster.serve(Forgetful), [cluster.join(name) for name in "abc"]
    for role in (*roles, server):
        role.outcome()
    cut_tail(cluster, "b", 6)
    cluster.port = 0
    server, roles = cluster.serve_prediction(), [cluster.predict_with(name) for name in "abc"]
    errors = [role.error() for role in roles]
    assert any(isinstance(error, LedgerError) for error in errors)
    for error in (*errors, server.error()):
        assert "party 'b'" in str(error)
        assert "its ledger differs from the one that it stated before" in str(error)


def test_a_changed_ledger_is_refused_at_its_party(stopped_cluster):
    path = stopped_cluster.folder / "c" / "ledger.jsonl"
    path.write_bytes(path.read_bytes().replace(b'"rows":', b'"rows":1', 1))
    server = stopped_cluster.serve()
    error = stopped_cluster.join("c").error()
    assert isinstance(error, LedgerError)
    assert "does not follow from the records before it" in str(error)
    assert error.exit_code == 1
    stopped_cluster.end(server)


class ForgetsOneLedger(TrainingParty):
    """Receives an attempt from which the server left out a ledger."""

    def open_attempt(self, attempt):
        object.__setattr__(attempt, "ledgers", {name: head for name, head in attempt.ledgers.items() if name != "a"})
        super().open_attempt(attempt)


def test_a_server_that_leaves_out_a_ledger_is_noticed(kits, tmp_path):
    config, parties = tiny()
    cluster = Cluster(config, parties, kits, tmp_path)
    server, a, c = cluster.serve(), cluster.join("a"), cluster.join("c")
    error = cluster.join("b", role=ForgetsOneLedger).error()
    assert isinstance(error, ProtocolError)
    assert "did not forward the ledger head of a" in str(error)
    for role in (server, a, c):
        assert role.error() is not None


def change_head(heads):
    """Return signed heads in which that of b is shorter, with the signature of the true one."""
    shorter = dataclasses.replace(heads["b"].head, length=1, chain="0" * 64)
    return {**heads, "b": dataclasses.replace(heads["b"], head=shorter)}


class ReceivesChangedHead(TrainingParty):
    """Receives an attempt in which the server changed the ledger head of b."""

    def open_attempt(self, attempt):
        super().open_attempt(dataclasses.replace(attempt, ledgers=change_head(attempt.ledgers)))


@pytest.mark.parametrize("kind", ["kits", "pinned_kits"])
def test_a_ledger_head_that_the_server_changed_is_refused(kind, request, tmp_path):
    config, parties = tiny()
    cluster = Cluster(config, parties, request.getfixturevalue(kind), tmp_path)
    server, a, b = cluster.serve(), cluster.join("a"), cluster.join("b")
    error = cluster.join("c", role=ReceivesChangedHead).error()
    assert isinstance(error, ProtocolError)
    said = "the ledger head of party 'b' has a signature that is not valid for this statement"
    assert said in str(error)
    for role in (server, a, b):
        assert said in str(role.error())


class ChangesLastHead(TrainingServer):
    """Changes the ledger head of b in its goodbye."""

    def build_goodbye(self, report):
        self.ledgers = change_head(self.ledgers)
        return super().build_goodbye(report)


class RepeatsFirstHead(TrainingServer):
    """Forwards the head of b at the start of the attempt as that at its end."""

    def add_ledgers(self, attempt):
        attempt = super().add_ledgers(attempt)
        self.first = attempt.ledgers
        return attempt

    def build_goodbye(self, report):
        self.ledgers = {**self.ledgers, "b": self.first["b"]}
        return super().build_goodbye(report)


@pytest.mark.parametrize("role", [ChangesLastHead, RepeatsFirstHead])
def test_a_last_head_that_the_server_changed_is_not_recorded_and_the_log_tells(role, kits, tmp_path):
    config, parties = tiny(num_rounds=1)
    cluster = Cluster(config, parties, kits, tmp_path)
    server, roles = cluster.serve(role), [cluster.join(name) for name in "abc"]
    for each in (*roles, server):
        each.outcome()  # the results are complete
    for name in "ac":
        assert any(
            "the ledger head of party 'b' has a signature that is not valid" in line for line in cluster.lines[name]
        )
        records = [found.record for found in read_ledger_file(tmp_path / name / "ledger.jsonl")]
        assert len([record for record in records if isinstance(record, PeerHeads)]) == 1  # at the start alone


class OmitsLastHead(TrainingServer):
    """Leaves the ledger head of b out of its goodbye."""

    def build_goodbye(self, report):
        self.ledgers = {party: head for party, head in self.ledgers.items() if party != "b"}
        return super().build_goodbye(report)


def test_a_last_head_that_the_server_omits_is_named_in_the_log_and_the_others_are_recorded(kits, tmp_path):
    config, parties = tiny(num_rounds=1)
    cluster = Cluster(config, parties, kits, tmp_path)
    server, roles = cluster.serve(OmitsLastHead), [cluster.join(name) for name in "abc"]
    for each in (*roles, server):
        each.outcome()  # the results are complete
    said = "the server did not forward the last ledger head of b;"
    assert [any(said in line for line in cluster.lines[name]) for name in "abc"] == [True, False, True]
    records = [found.record for found in read_ledger_file(tmp_path / "a" / "ledger.jsonl")]
    assert [set(record.heads) for record in records if isinstance(record, PeerHeads)] == [{"b", "c"}, {"c"}]


class Sending(PartyPerformer):
    """Keeps every message that leaves."""

    sent: list = []  # noqa: RUF012 - of all parties of one test

    def __call__(self, request):
        result = super().__call__(request)
        if isinstance(request, Send):
            self.sent.append((self.work.options.kit.name, request.message, encode(request.message)))
        return result


@pytest.fixture
def sending_class():
    return type("Sending", (Sending,), {"sent": []})


def test_a_policy_that_forbids_a_kind_is_refused_at_the_handshake(kits, tmp_path, sending_class):
    config, parties = tiny()
    cluster = Cluster(config, parties, kits, tmp_path)
    policy = PolicyFile(tmp_path / "policy.toml", Policy(forbid=("losses",)), "digest")
    server, a = cluster.serve(), cluster.join("a", performer=sending_class)
    cluster.until("server", "a: prepared")  # otherwise a may connect after the notice about b
    error = cluster.join("b", performer=sending_class, policy=policy).error()
    assert isinstance(error, PolicyError)
    assert "forbid = ['losses']" in str(error)
    cluster.until("a", "its policy: forbid = ['losses']")
    cluster.end(server, a)
    assert sending_class.sent == []


def test_a_forbidden_kind_that_the_settings_do_not_show_stops_the_run_with_no_byte_of_it_sent(
    kits, tmp_path, sending_class
):
    config, parties = tiny(method="smooth", labels="b", num_rounds=1)
    cluster = Cluster(config, parties, kits, tmp_path)
    policy = PolicyFile(tmp_path / "policy.toml", Policy(forbid=("alpha",)), "digest")
    server, a, c = cluster.serve(), cluster.join("a"), cluster.join("c")
    error = cluster.join("b", performer=sending_class, policy=policy).error()
    assert isinstance(error, PolicyError)
    assert "forbid = ['alpha']: this kind must not be released" in str(error)
    for role in (server, a, c):
        assert "forbid = ['alpha']" in str(role.error())
    kinds = {type(message) for _, message, _ in sending_class.sent}
    assert Scores in kinds  # the run had begun
    assert Chosen not in kinds
    assert {entry.kind for entry in list_entries(tmp_path / "b" / "ledger.jsonl")} >= {"probabilities"}
    assert not [entry for entry in list_entries(tmp_path / "b" / "ledger.jsonl") if entry.kind == "alpha"]


def test_a_policy_stops_a_run_before_the_forbidden_release_leaves(kits, tmp_path, sending_class):
    config, parties = tiny(patience=1)
    cluster = Cluster(config, parties, kits, tmp_path)
    policy = PolicyFile(tmp_path / "policy.toml", Policy(max_releases_per_row=2), "digest")
    server, a, c = cluster.serve(), cluster.join("a"), cluster.join("c")
    error = cluster.join("b", performer=sending_class, policy=policy).error()
    assert isinstance(error, PolicyError)
    assert "max_releases_per_row = 2" in str(error)
    for role in (server, a, c):
        assert "max_releases_per_row = 2" in str(role.error())
    by_layer: dict[int, int] = {}
    for _, message, _ in sending_class.sent:
        if isinstance(message, TensorMessage):
            by_layer[message.key.layer] = by_layer.get(message.key.layer, 0) + 1
    assert max(by_layer.values()) == 2
    assert list_failures(cluster, "b") == []
