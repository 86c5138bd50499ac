"""Prediction between organisations: what one process would predict, and only for who may receive it."""

from __future__ import annotations

import csv
import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from glasu.data.folders import write_party
from glasu.data.query_ids import find_query_nodes
from glasu.errors import ConfigError, DataError, GlasuError, TransportError
from glasu.network import client_session as sessions
from glasu.network import join_prediction as predicting
from glasu.network import serve_prediction as serving
from glasu.network.compatibility import for_network
from glasu.network.join_prediction import join_prediction
from glasu.network.serve_prediction import serve_prediction
from glasu.pki.kit import open_kit
from glasu.pki.provision import add
from glasu.protocol import chunks as chunking
from glasu.protocol.message_bytes import encode
from glasu.protocol.messages import Scores
from glasu.runtime.simulation import simulate
from glasu.runtime.trained_model import TrainedModel
from network.test_runs import tiny
from support.cluster import Cluster, Killed, Role, SeenHub

serving.Hub = SeenHub
NOBODY = np.empty(0, np.int64)
ASKED = np.array([20, 3, 11, 3])


class Predicting(Cluster):
    """The roles of a prediction with the models that a run of the cluster has left."""

    def serve_prediction(self, **options):
        listened, port = [], options.pop("port", 0)
        said = self.lines.setdefault("server", [])
        options = {"wait": 60.0, "tell": said.append, "config": self.config, **options}
        config, kit = options.pop("config"), open_kit(self.kits / "server", "server")
        role = Role(
            lambda: serve_prediction(
                config, kit, f"127.0.0.1:{port}", self.folder / "server", listened=listened.append, **options
            ),
            "server",
        )
        while not listened and role.is_alive():
            role.join(0.02)
        self.port = listened[0] if listened else 0
        return role

    def ask(self, name, asked=NOBODY, **options):
        party = options.pop("party", None) or next(party for party in self.parties if party.name == name)
        kit = open_kit(self.kits / name, "party")
        said = self.lines.setdefault(name, [])
        options = {"wait": 60.0, "tell": said.append, **options}
        address, out = f"localhost:{self.port}", self.folder / options.pop("out", name)
        return Role(lambda: join_prediction(party, kit, address, out, asked, **options), name)

    def predict(self, **asked):
        server = self.serve_prediction()
        roles = {party.name: self.ask(party.name, asked.get(party.name, NOBODY)) for party in self.parties}
        found = {name: role.outcome() for name, role in roles.items()}
        return server.outcome(), found


def trained(kits, folder, **keys):
    """Train over the network, and return the cluster and the same model from one process."""
    config, parties = tiny(num_rounds=2, **keys)
    cluster = Predicting(config, parties, kits, folder)
    cluster.run()
    cluster.lines.clear()
    return cluster, TrainedModel.of(simulate(parties, config))


def read(path):
    with path.open() as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("keys", [{}, {"aggregation": "concat", "precision": "int8"}, {"precision": "bf16"}], ids=str)
def test_who_asks_receives_what_one_process_predicts_and_the_others_nothing(keys, kits, tmp_path):
    cluster, model = trained(kits, tmp_path, **keys)
    served, found = cluster.predict(b=ASKED)
    nodes = np.unique(ASKED)
    expected = model.predict_proba(cluster.parties, nodes)
    assert found["b"].nodes.tolist() == ASKED.tolist()
    assert np.array_equal(found["b"].probabilities, expected[np.searchsorted(nodes, ASKED)])
    rows = read(tmp_path / "b" / "predictions.csv")
    assert [int(row["id"]) for row in rows] == ASKED.tolist()
    assert rows[0]["prediction"] == max((float(rows[0][f"p_{name}"]), name) for name in model.classes)[1]
    for name in "ac":
        assert found[name].file is None
        assert found[name].probabilities.shape[0] == 0
        assert not (tmp_path / name / "predictions.csv").exists()
    assert served["nodes"] == 3


def test_each_of_several_who_ask_receives_its_own_nodes(kits, tmp_path):
    cluster, model = trained(kits, tmp_path)
    _, found = cluster.predict(a=np.array([1, 2]), c=np.array([23, 2, 0]))
    union = np.array([0, 1, 2, 23])
    expected = dict(zip(union.tolist(), model.predict_proba(cluster.parties, union), strict=True))
    assert np.array_equal(found["a"].probabilities, [expected[node] for node in (1, 2)])
    assert np.array_equal(found["c"].probabilities, [expected[node] for node in (23, 2, 0)])
    assert found["b"].file is None


def test_class_probabilities_do_not_even_travel_to_who_did_not_ask(kits, tmp_path, monkeypatch):
    cluster, _ = trained(kits, tmp_path)
    seen = {}
    exchange = predicting.Session.exchange

    def spy(session, messages):
        answers = exchange(session, messages)
        for answer in answers:
            if type(answer).__name__ == "JointScores":
                seen[session.kit.name] = answer.value.shape
        return answers

    monkeypatch.setattr(predicting.Session, "exchange", spy)
    cluster.predict(b=ASKED)
    assert seen == {"a": (0, 3), "b": (3, 3), "c": (0, 3)}


def test_a_server_that_goes_before_its_goodbye_costs_nobody_the_predictions(kits, tmp_path, monkeypatch):
    cluster, model = trained(kits, tmp_path)

    def killed(hub, seconds):
        raise Killed

    monkeypatch.setattr(SeenHub, "say_goodbye", killed)
    server = cluster.serve_prediction()
    roles = {name: cluster.ask(name, ASKED if name == "b" else NOBODY, wait=1.0) for name in "abc"}
    found = {name: role.outcome() for name, role in roles.items()}
    assert isinstance(server.error(), Killed)
    assert np.array_equal(found["b"].probabilities[1], model.predict_proba(cluster.parties, ASKED[1:2])[0])
    assert len(read(found["b"].file)) == len(ASKED)
    for name in "abc":
        assert cluster.lines[name][-1].endswith("The results of this party are complete.")


def test_another_roster_is_refused_in_one_printable_line(kits, tmp_path, monkeypatch):
    cluster, _ = trained(kits, tmp_path)
    server, opened = cluster.serve_prediction(), sessions.Session.open
    monkeypatch.setattr(sessions.Session, "open", lambda self: {**opened(self), "roster": ["\x1b[2J\n", "b", "c"]})
    error = cluster.ask("b").error()
    assert isinstance(error, ConfigError)
    assert "the server's roster is ?[2J?, b, c;" in str(error)
    assert str(error).isprintable()
    cluster.end(server)


def test_rows_travel_in_chunks_and_come_out_the_same(kits, tmp_path, monkeypatch):
    cluster, model = trained(kits, tmp_path)
    monkeypatch.setattr(chunking, "CHUNK_ROWS", 5)
    asked = np.arange(24)[::2]
    _, found = cluster.predict(a=asked, b=np.array([1]))
    nodes = np.union1d(asked, [1])
    expected = model.predict_proba(cluster.parties, nodes)
    assert np.array_equal(found["a"].probabilities, expected[np.isin(nodes, asked)])
    assert np.array_equal(found["b"].probabilities, expected[nodes == 1])


def test_with_labels_at_one_party_it_alone_receives_whoever_asks(kits, tmp_path):
    cluster, model = trained(kits, tmp_path, labels="b")
    _, found = cluster.predict(a=ASKED, b=np.array([0]))
    nodes = np.union1d(ASKED, [0])
    assert found["b"].nodes.tolist() == [0, *np.unique(ASKED)]
    expected = model.predict_proba(cluster.parties, nodes)
    assert np.array_equal(found["b"].probabilities, expected[np.searchsorted(nodes, found["b"].nodes)])
    for name in "ac":
        assert found[name].file is None
        assert found[name].probabilities.size == 0
    assert any("the labels are with party 'b': it alone receives" in line for line in cluster.lines["a"])


def test_the_report_counts_what_left_and_the_ledger_enters_it(kits, tmp_path):
    cluster, _ = trained(kits, tmp_path)
    served, _ = cluster.predict(b=ASKED)
    parts = {name: json.loads((tmp_path / name / "prediction.json").read_text()) for name in "abc"}
    for key in ("bytes_to_server", "bytes_to_clients", "messages"):
        assert sum(part["traffic"][key] for part in parts.values()) == served["traffic"][key]
    assert set(served["traffic"]["by_phase"]) == {"prediction"}
    assert {row["kind"] for row in parts["a"]["privacy"]["ledger"][0]["releases"]} == {
        "node sets",
        "representation",
        "probabilities",
    }
    assert (parts["b"]["asked"], parts["b"]["received"], parts["a"]["received"]) == (4, 4, 0)


def test_who_must_be_online_is_said_at_once_and_who_is_missing_is_named(kits, tmp_path, monkeypatch):
    monkeypatch.setattr("glasu.network.server_session.NAMED_AFTER", 0.3)
    cluster, _ = trained(kits, tmp_path)
    server, b = cluster.serve_prediction(wait=6.0), cluster.ask("b", ASKED)
    cluster.until("server", "this server and all of a, b, c must be online")
    cluster.until("b", "the server and a, c must be online, too")
    cluster.until("b", "waiting for a, c to join since")
    error = server.error()
    assert isinstance(error, TransportError)
    assert "for a, c to join" in str(error)
    assert "for a, c to join" in str(b.error())


def test_a_prediction_in_which_nobody_asks_is_refused_everywhere(kits, tmp_path):
    cluster, _ = trained(kits, tmp_path)
    server = cluster.serve_prediction()
    roles = [cluster.ask(name) for name in "abc"]
    for role in (server, *roles):
        error = role.error()
        assert isinstance(error, GlasuError)
        assert "no party asked for a node" in str(error)


def test_a_party_that_dies_in_the_middle_and_comes_back_is_awaited_and_all_predict_once_more(
    kits, tmp_path, monkeypatch
):
    cluster, model = trained(kits, tmp_path)
    exchange = predicting.Session.exchange

    runs, armed = [], [True]

    def dying(session, messages):
        if session.kit.name == "a":
            runs.append(messages[0].key.run)
        if session.kit.name == "b" and messages[0].key.layer == 1 and armed.pop():
            raise Killed
        return exchange(session, messages)

    monkeypatch.setattr(predicting.Session, "exchange", dying)
    server, others = cluster.serve_prediction(), [cluster.ask(name) for name in "ac"]
    assert isinstance(cluster.ask("b", ASKED).error(), Killed)
    armed.append(False)
    cluster.until("a", "b: the connection ended; its return is awaited")
    asked = np.array([4])  # what is asked for may be another thing now
    assert np.array_equal(cluster.ask("b", asked).outcome().probabilities, model.predict_proba(cluster.parties, asked))
    for role in (server, *others):
        role.outcome()
    assert any("predicting once more" in line for line in cluster.lines["a"])
    assert len(set(runs)) == 2  # what is sent in the two attempts has different keys


def test_parties_that_wait_stay_when_the_server_of_a_prediction_is_started_again(kits, tmp_path):
    cluster, _ = trained(kits, tmp_path)
    server, a = cluster.serve_prediction(), cluster.ask("a", NOBODY)
    b = cluster.ask("b", ASKED)
    for name in "ab":
        cluster.until(name, "waiting for them")
    SeenHub.last.fail(Killed())
    assert isinstance(server.error(), Killed)
    server, c = cluster.serve_prediction(port=cluster.port), cluster.ask("c", NOBODY)
    for role in (server, a, c):
        role.outcome()
    assert len(b.outcome().nodes) == len(ASKED)


def test_predictions_can_be_made_again_and_again(kits, tmp_path):
    cluster, _ = trained(kits, tmp_path)
    _, first = cluster.predict(b=ASKED)
    _, second = cluster.predict(b=ASKED)
    assert np.array_equal(first["b"].probabilities, second["b"].probabilities)


def test_without_a_finished_training_there_is_nothing_to_predict_with(kits, tmp_path):
    config, parties = tiny()
    error = Predicting(config, parties, kits, tmp_path).ask("a", ASKED).error()
    assert isinstance(error, ConfigError)
    assert "no finished training" in str(error)


def test_a_party_of_a_training_is_told_that_this_server_predicts(kits, tmp_path):
    cluster, _ = trained(kits, tmp_path)
    server = cluster.serve_prediction()
    error = cluster.join("a", out="fresh").error()
    assert isinstance(error, ConfigError)
    assert "purpose: the server prediction, a training" in str(error)
    cluster.end(server)


def test_a_server_serves_predictions_of_its_own_finished_training_only(kits, tmp_path):
    config, parties = tiny(num_rounds=2)
    cluster = Predicting(config, parties, kits, tmp_path)
    error = cluster.serve_prediction().error()
    assert isinstance(error, ConfigError)
    assert "holds no finished training" in str(error)
    assert not list((tmp_path / "server").glob("*.json"))


def test_a_server_does_not_predict_with_other_settings_or_parties_than_it_trained_with(kits, tmp_path):
    own = Path(shutil.copytree(kits, tmp_path / "kits"))
    cluster, _ = trained(own, tmp_path)
    error = cluster.serve_prediction(config=cluster.config.replace(train={"learning_rate": 0.25})).error()
    assert isinstance(error, ConfigError)
    assert "train.learning_rate = 0.1 there, 0.25 here" in str(error)
    add(own, ["d"])
    error = cluster.serve_prediction().error()
    assert isinstance(error, ConfigError)
    assert "it began with a, b, c; since then d added" in str(error)


def test_other_settings_than_the_training_had_are_declined(kits, tmp_path):
    cluster, _ = trained(kits, tmp_path)
    other, path = cluster.config.replace(train={"learning_rate": 0.25}), tmp_path / "server" / "serving.json"
    asked = for_network(other, ["a", "b", "c"])
    path.write_text(json.dumps({**json.loads(path.read_text()), "digest": asked.digest()}))
    server = cluster.serve_prediction(config=other)
    error = cluster.ask("a", ASKED).error()
    assert isinstance(error, ConfigError)
    assert "train.learning_rate: trained 0.1, got 0.25" in str(error)
    cluster.until("server", "a: declines to take part: the server's settings are not those of the training")
    cluster.end(server)


def test_models_of_two_trainings_are_not_mixed(kits, tmp_path):
    cluster, _ = trained(kits, tmp_path / "first")
    other, _ = trained(kits, tmp_path / "second")
    server = cluster.serve_prediction()
    other.port = cluster.port
    a = cluster.ask("a", ASKED)
    cluster.until("server", "a: prepared")
    error = other.ask("b").error()
    assert isinstance(error, ConfigError)
    assert "training:" in str(error)
    assert "its --out belongs to another training; give the folder of the one with which" in str(error)
    cluster.end(server, a)


def test_other_features_than_the_training_had_are_refused_before_anything_is_sent(kits, tmp_path):
    cluster, _ = trained(kits, tmp_path)
    wider = replace(cluster.parties[0], features=np.ones((24, 9), np.float32))
    error = cluster.ask("a", ASKED, party=wider).error()
    assert isinstance(error, DataError)
    assert "9 features" in str(error)


@pytest.mark.parametrize("header", ["id", "user"])
def test_asked_ids_are_found_by_the_column_of_the_party_or_id(header, tmp_path):
    _, parties = tiny()
    named = replace(parties[0], ids=np.array([f"n{index}" for index in range(24)]))
    write_party(named, tmp_path / "a")
    manifest, nodes = tmp_path / "a" / "party.toml", tmp_path / "ids.csv"
    manifest.write_text(manifest.read_text().replace('id = "id"', f'id = "{header}"'))
    nodes.write_text(f"{header}\nn7\nn0\nn7\n")
    assert find_query_nodes(nodes, tmp_path / "a", named).tolist() == [7, 0, 7]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("id\n1\n99\n", "row 2: is not the id of a node of this party"),
        ("id\n", "has no rows"),
        ("name\n1\n", "has no column 'id'"),
        ("id\nx\n", "row 1: is not an integer"),
    ],
)
def test_ids_that_cannot_be_asked_for_are_refused_by_row_and_not_by_value(content, words, tmp_path):
    _, parties = tiny()
    write_party(parties[0], tmp_path / "a")
    (tmp_path / "ids.csv").write_text(content)
    with pytest.raises(DataError, match=words) as caught:
        find_query_nodes(tmp_path / "ids.csv", tmp_path / "a", parties[0])
    assert "99" not in str(caught.value)


def test_a_file_of_asked_ids_is_a_table(tmp_path):
    _, parties = tiny()
    with pytest.raises(DataError, match=r"must end in \.parquet or \.csv"):
        find_query_nodes(tmp_path / "ids.txt", tmp_path, parties[0])


def test_a_fault_of_the_server_of_a_prediction_appears_at_every_party(kits, tmp_path, monkeypatch):
    cluster, _ = trained(kits, tmp_path)

    def full(path, *more, **options):
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(serving, "write_atomically", full)
    server = cluster.serve_prediction()
    roles = [cluster.ask(name, ASKED) for name in "abc"]
    assert isinstance(server.error(), OSError)
    for role in roles:
        assert "the server failed: OSError in the program (No space left on device)" in str(role.error())
        assert role.error().exit_code == 1


def test_a_prediction_that_waits_refuses_who_sent_what_cannot_be_and_goes_on_with_its_return(
    kits, tmp_path, monkeypatch
):
    cluster, model = trained(kits, tmp_path)
    left = [1]

    def spoil(message):
        if left and isinstance(message, Scores) and message.key.client == 1:
            left.clear()
            message = replace(message, value=np.full_like(message.value, np.nan))
        return encode(message)

    monkeypatch.setattr(sessions, "encode", spoil)
    server = cluster.serve_prediction(on_nonsense="wait")
    a, b, c = (cluster.ask(name, ASKED) for name in "abc")
    error = b.error()
    assert isinstance(error, ConfigError)
    assert "got NaN or infinity" in str(error)
    again = cluster.ask("b", ASKED)
    expected = model.predict_proba(cluster.parties, ASKED)
    for role in (a, again, c):
        assert np.array_equal(role.outcome().probabilities, expected)
    server.outcome()
