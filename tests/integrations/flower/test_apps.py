"""Faults in the ServerApp and the ClientApp, tested without a SuperLink."""

from __future__ import annotations

import re
import socket
import threading
from types import SimpleNamespace

import pytest

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'glasu[flower]'")

from flwr.app import Error
from flwr.supercore.task_identity import TaskIdentity

from glasu.errors import ProtocolError, TrainingError, TransportError
from glasu.integrations.flower import party, server
from glasu.integrations.flower.settings import ServerSettings
from glasu.network.run_folder import FinishedPart, FinishedTraining
from glasu.records import read_record
from glasu.report import PartySummary

pytestmark = pytest.mark.slow
SERVING = SimpleNamespace(poll=lambda: None)
REPORT = {
    "party": "a",
    "parties": ["a", "b"],
    "run": "0a1b",
    "config": {},
    "privacy": {},
    "traffic": {"bytes_to_server": 10, "bytes_to_clients": 20, "messages": 3, "exchanges": 2},
    "seconds": {"total": 1.5},
    "weights_sha256": ["f00d"],
}
NODE = {"party": "/secret/place", "server": "localhost:1", "kit": "/secret/kit"}


class FakeGrid:
    """A SuperLink with some nodes. It returns the replies that the test provides."""

    def __init__(self, nodes=(), replies=(), taken=None):
        self.nodes, self.replies, self.taken, self.pushed = nodes, list(replies), taken, []

    def get_node_ids(self):
        return self.nodes

    def push_messages(self, messages):
        self.pushed = list(messages)
        return [f"message-{index}" for index in range(len(self.pushed))][: self.taken]

    def pull_messages(self, ids):
        return [self.replies.pop(0)] if self.replies else []


def answer_of(name: str, digest: str) -> SimpleNamespace:
    return SimpleNamespace(content={"facts": {"party": name, "weights_sha256": digest}})


@pytest.mark.parametrize(
    ("nodes", "words"), [((1, 2, 3), "3 SuperNodes are online"), ((1,), "only 1 of 2 SuperNodes (a, b) are online")]
)
def test_there_must_be_a_node_for_each_party_and_no_other(nodes, words):
    with pytest.raises(TransportError, match=re.escape(words)):
        server.wait_for_nodes(FakeGrid(nodes), ("a", "b"), 0.0, SERVING)
    assert server.wait_for_nodes(FakeGrid((9, 4)), ("a", "b"), 0.0, SERVING) == [4, 9]


def test_the_run_is_known_when_its_server_listens_and_not_from_an_earlier_process(tmp_path):
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        address = f"0.0.0.0:{listener.getsockname()[1]}"
        settings = ServerSettings(session="first", run="run.toml", listen=address, kit="kit", out=str(tmp_path))
        settings.folder.mkdir()
        (settings.folder / "serving.json").write_text('{"run": "0a1b"}')
        with pytest.raises(TrainingError, match="glasu serve ended with exit code 2"):
            server.wait_for_run(settings, SimpleNamespace(poll=lambda: 2, wait=lambda: 2))
        assert not server.accepts_connections(address)
        threading.Timer(0.1, listener.listen).start()
        assert server.wait_for_run(settings, SERVING) == "0a1b"


def test_every_node_gets_one_message_that_names_session_and_run_and_lives_long(monkeypatch):
    for part in ("_run_id", "_node_id", "_task_id"):
        monkeypatch.setattr(TaskIdentity, part, 1)
    grid = FakeGrid((4, 9))
    session = {"name": "first", "run": "0a1b"}
    assert server.open_session(grid, (4, 9), session) == {"message-0", "message-1"}
    assert [message.metadata.dst_node_id for message in grid.pushed] == [4, 9]
    assert all(dict(message.content["session"]) == session for message in grid.pushed)
    assert all(message.metadata.ttl > 7 * 86400 for message in grid.pushed)
    with pytest.raises(TransportError, match="accepted 1 of 2 messages"):
        server.open_session(FakeGrid((4, 9), taken=1), (4, 9), session)


def test_the_first_party_that_fails_ends_the_session():
    failed = SimpleNamespace(
        has_error=lambda: True, error=Error(1, "no"), metadata=SimpleNamespace(src_node_id=4, reply_to_message_id="m")
    )
    with pytest.raises(TrainingError, match="node 4: no"):
        server.collect_replies(FakeGrid(replies=[failed]), {"m", "n"}, SERVING)


def test_a_server_that_fails_ends_the_session():
    with pytest.raises(TrainingError, match="glasu serve ended with exit code 2"):
        server.collect_replies(FakeGrid(), {"m"}, SimpleNamespace(poll=lambda: 2, wait=lambda: 2))


def test_weights_that_differ_from_the_reported_digest_are_detected():
    report = FinishedTraining({}, (PartySummary("a", 3), PartySummary("b", 3)), ("f00d", "cafe"), {})
    server.check_weights(report, [answer_of("b", "cafe"), answer_of("a", "f00d")])
    for answers in ([answer_of("a", "f00d")], [answer_of("a", "cafe"), answer_of("b", "f00d")]):
        with pytest.raises(ProtocolError, match="weight digests sent over Flower"):
            server.check_weights(report, answers)


def test_a_party_tells_flower_what_it_cost_and_no_more():
    told = party.make_reply(read_record(FinishedPart, {**REPORT, "test": {"accuracy": 1.0}}, "report", partial=True))
    assert set(told) == {"metrics", "facts"}
    assert set(told["metrics"]) == {"bytes_to_server", "bytes_to_clients", "messages", "exchanges", "seconds"}
    assert dict(told["facts"]) == {"party": "a", "run": "0a1b", "weights_sha256": "f00d"}


@pytest.mark.parametrize(
    ("session", "node_config"),
    [({"name": "first", "run": "0a1b"}, NODE), ({"name": "..", "run": "0a1b"}, NODE), ({"name": "x", "run": "1"}, {})],
)
def test_the_server_receives_no_facts_about_a_partys_machine(session, node_config, capfd, tmp_path):
    own = {**node_config, **({"out": str(tmp_path)} if node_config else {})}
    with pytest.raises(RuntimeError) as caught:
        party.train(SimpleNamespace(content={"session": session}), SimpleNamespace(node_config=own))
    assert str(caught.value) == "this party could not take part; see the log of its SuperNode"
    assert "glasu join: " in capfd.readouterr().out
