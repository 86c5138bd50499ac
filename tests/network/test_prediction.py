"""Prediction between organisations: the result of one process, and only for the parties that may receive it."""

from __future__ import annotations

import csv
import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from glasu.data.folders import find_query_nodes, write_party
from glasu.errors import ConfigError, DataError, GlasuError, TransportError
from glasu.network.compatibility import prepare_config_for_network
from glasu.network.handshake import Code, RefusalError
from glasu.network.join import PartyPerformer
from glasu.network.prediction_party import PredictionParty
from glasu.network.prediction_server import PredictionServer
from glasu.pki.provision import add
from glasu.protocol.messages import JointScores, Scores
from glasu.protocol.requests import Send
from support.cluster import NOBODY, Cluster
from support.roles import Killed
from support.tiny import tiny

ASKED = np.array([20, 3, 11, 3])


def read(path):
    with path.open() as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("keys", [{}, {"aggregation": "concat", "precision": "int8"}, {"precision": "bf16"}], ids=str)
def test_who_asks_receives_what_one_process_predicts_and_the_others_nothing(keys, train_once, tmp_path):
    cluster, model = train_once(**keys)
    served, found = cluster.predict(b=ASKED)
    nodes = np.unique(ASKED)
    expected = model.predict_proba(cluster.parties, nodes)
    assert found["b"].nodes.tolist() == ASKED.tolist()
    assert np.array_equal(found["b"].scores, expected[np.searchsorted(nodes, ASKED)])
    rows = read(tmp_path / "b" / "predictions.csv")
    assert [int(row["id"]) for row in rows] == ASKED.tolist()
    assert rows[0]["prediction"] == max((float(rows[0][f"p_{name}"]), name) for name in model.classes)[1]
    for name in "ac":
        assert found[name].file is None
        assert found[name].scores.shape[0] == 0
        assert not (tmp_path / name / "predictions.csv").exists()
    assert served.nodes == 3


def test_each_party_prepares_its_own_features_and_only_its_own_report_lists_it(train_once, tmp_path):
    cluster, model = train_once(features="auto")
    _, found = cluster.predict(b=ASKED)
    nodes = np.unique(ASKED)
    expected = model.predict_proba(cluster.parties, nodes)
    assert np.array_equal(found["b"].scores, expected[np.searchsorted(nodes, ASKED)])
    reports = {name: json.loads((tmp_path / name / "report.json").read_text()) for name in ("server", "a", "b", "c")}
    for name, party in zip("abc", cluster.parties, strict=True):
        assert reports[name]["prepared"]["standardized"] == party.num_features
    assert "prepared" not in (tmp_path / "server" / "report.json").read_text()


def test_each_of_several_who_ask_receives_its_own_nodes(train_once):
    cluster, model = train_once()
    _, found = cluster.predict(a=np.array([1, 2]), c=np.array([23, 2, 0]))
    union = np.array([0, 1, 2, 23])
    expected = dict(zip(union.tolist(), model.predict_proba(cluster.parties, union), strict=True))
    assert np.array_equal(found["a"].scores, [expected[node] for node in (1, 2)])
    assert np.array_equal(found["c"].scores, [expected[node] for node in (23, 2, 0)])
    assert found["b"].file is None


def test_class_probabilities_travel_only_to_parties_that_requested_them(train_once):
    cluster, _ = train_once()
    seen = {}

    class Seeing(PartyPerformer):
        def __call__(self, request):
            reply = super().__call__(request)
            if isinstance(reply, JointScores):
                seen[self.work.party.name] = reply.value.shape
            return reply

    server = cluster.serve_prediction()
    roles = [cluster.predict_with(name, ASKED if name == "b" else NOBODY, Seeing) for name in "abc"]
    for role in (server, *roles):
        role.outcome()
    assert seen == {"a": (0, 3), "b": (3, 3), "c": (0, 3)}


def test_parties_keep_their_predictions_if_the_server_dies_before_its_goodbye(train_once):
    cluster, model = train_once()

    class Dying(PredictionServer):
        def finish(self, result, finished):
            super().finish(result, finished)
            raise Killed

    server = cluster.serve_prediction(Dying)
    roles = {name: cluster.predict_with(name, ASKED if name == "b" else NOBODY, wait=1.0) for name in "abc"}
    found = {name: role.outcome() for name, role in roles.items()}
    assert isinstance(server.error(), Killed)
    assert np.array_equal(found["b"].scores[1], model.predict_proba(cluster.parties, ASKED[1:2])[0])
    assert len(read(found["b"].file)) == len(ASKED)
    for name in "abc":
        assert cluster.lines[name][-1].endswith("The results of this party are complete.")


def test_another_roster_is_refused_in_one_printable_line(train_once):
    cluster, _ = train_once()
    server = cluster.serve_prediction()

    class Told(PredictionParty):
        def welcome(self, welcome):
            super().welcome({**welcome, "roster": ["\x1b[2J\n", "b", "c"]})

    error = cluster.predict_with("b", role=Told).error()
    assert isinstance(error, RefusalError)
    assert error.code == Code.WRONG_ROSTER
    assert "the server's roster is ?[2J?, b, c." in str(error)
    assert str(error).isprintable()
    cluster.end(server)


def test_rows_travel_in_chunks_and_come_out_the_same(train_once):
    cluster, model = train_once(chunk_rows=5)
    asked = np.arange(24)[::2]
    _, found = cluster.predict(a=asked, b=np.array([1]))
    nodes = np.union1d(asked, [1])
    expected = model.predict_proba(cluster.parties, nodes)
    assert np.array_equal(found["a"].scores, expected[np.isin(nodes, asked)])
    assert np.array_equal(found["b"].scores, expected[nodes == 1])


def test_the_label_owner_alone_receives_predictions_whichever_party_requests_them(train_once):
    cluster, model = train_once(labels="b")
    _, found = cluster.predict(a=ASKED, b=np.array([0]))
    nodes = np.union1d(ASKED, [0])
    assert found["b"].nodes.tolist() == [0, *np.unique(ASKED)]
    expected = model.predict_proba(cluster.parties, nodes)
    assert np.array_equal(found["b"].scores, expected[np.searchsorted(nodes, found["b"].nodes)])
    for name in "ac":
        assert found[name].file is None
        assert found[name].scores.size == 0
    assert any("party 'b' has the labels and receives all predictions" in line for line in cluster.lines["a"])


def test_the_report_counts_what_left_and_the_ledger_enters_it(train_once, tmp_path):
    cluster, _ = train_once()
    served, _ = cluster.predict(b=ASKED)
    parts = {name: json.loads((tmp_path / name / "prediction.json").read_text()) for name in "abc"}
    for key in ("bytes_to_server", "bytes_to_clients", "messages"):
        assert sum(part["traffic"][key] for part in parts.values()) == served.traffic[key]
    assert set(served.traffic.by_phase) == {"prediction"}
    assert {row["kind"] for row in parts["a"]["privacy"]["ledger"][0]["releases"]} == {
        "node sets",
        "representation",
        "probabilities",
    }
    assert (parts["b"]["requested"], parts["b"]["received"], parts["a"]["received"]) == (4, 4, 0)


def test_every_role_logs_immediately_that_it_must_stay_online_and_names_missing_parties(train_once):
    cluster, _ = train_once()
    server, b = cluster.serve_prediction(wait=3.0), cluster.predict_with("b", ASKED)
    cluster.until("server", "this server and all of a, b, c must stay online")
    cluster.until("b", "the server and a, c must stay online")
    error = server.error()
    assert isinstance(error, TransportError)
    assert "for a, c to join" in str(error)
    assert "for a, c to join" in str(b.error())


def test_a_prediction_without_a_requesting_party_is_refused_everywhere(train_once):
    cluster, _ = train_once()
    server = cluster.serve_prediction()
    roles = [cluster.predict_with(name) for name in "abc"]
    for role in (server, *roles):
        error = role.error()
        assert isinstance(error, GlasuError)
        assert "no party requested a node" in str(error)


def test_the_others_wait_for_a_party_that_dies_and_then_all_predict_again(train_once):
    cluster, model = train_once()
    runs, armed = set(), [True]

    class Noting(PartyPerformer):
        def __call__(self, request):
            if isinstance(request, Send):
                runs.add(request.message.key.run)
            return super().__call__(request)

    class Dying(PartyPerformer):
        def __call__(self, request):
            if isinstance(request, Send) and request.message.key.layer == 1 and armed:
                armed.clear()
                raise Killed
            return super().__call__(request)

    server, others = cluster.serve_prediction(), [cluster.predict_with(name, NOBODY, Noting) for name in "ac"]
    assert isinstance(cluster.predict_with("b", ASKED, Dying).error(), Killed)
    cluster.until("a", "b: the connection ended")
    asked = np.array([4])  # the request may be another one now
    found = cluster.predict_with("b", asked).outcome()
    assert np.array_equal(found.scores, model.predict_proba(cluster.parties, asked))
    for role in (server, *others):
        role.outcome()
    assert len(runs) == 2  # the messages of the two attempts have different keys


def test_parties_that_wait_stay_when_the_server_of_a_prediction_is_restarted(train_once):
    cluster, _ = train_once()

    class Dying(PredictionServer):
        def plan(self, present):
            raise Killed

    server = cluster.serve_prediction(Dying)
    roles = {name: cluster.predict_with(name, ASKED if name == "b" else NOBODY) for name in "abc"}
    assert isinstance(server.error(), Killed)
    server = cluster.serve_prediction()
    found = {name: role.outcome() for name, role in roles.items()}
    server.outcome()
    assert len(found["b"].nodes) == len(ASKED)


def test_predictions_can_be_repeated(train_once):
    cluster, _ = train_once()
    _, first = cluster.predict(b=ASKED)
    _, second = cluster.predict(b=ASKED)
    assert np.array_equal(first["b"].scores, second["b"].scores)


def test_without_a_finished_training_there_is_nothing_to_predict_with(kits, tmp_path):
    config, parties = tiny()
    error = Cluster(config, parties, kits, tmp_path).predict_with("a", ASKED).error()
    assert isinstance(error, ConfigError)
    assert "no finished training" in str(error)


def test_a_party_refuses_to_predict_with_a_model_above_its_limit_of_memory(train_once):
    cluster, _ = train_once()
    error = cluster.predict_with("a", ASKED, max_memory=1000).error()
    assert isinstance(error, ConfigError)
    assert "model.hidden=" in str(error)
    assert "this party allows 1000 bytes. Raise the limit with --max-memory" in str(error)


def test_a_training_party_learns_that_the_server_serves_a_prediction(train_once):
    cluster, _ = train_once()
    server = cluster.serve_prediction()
    error = cluster.join("a", out="fresh").error()
    assert isinstance(error, ConfigError)
    assert "purpose: the server prediction, a training" in str(error)
    cluster.end(server)


def test_a_server_serves_predictions_of_its_own_finished_training_only(kits, tmp_path):
    config, parties = tiny(num_rounds=2)
    cluster = Cluster(config, parties, kits, tmp_path)
    error = cluster.serve_prediction().error()
    assert isinstance(error, ConfigError)
    assert "holds no finished training" in str(error)
    assert not list((tmp_path / "server").glob("*.json"))


def test_a_server_does_not_predict_with_other_settings_or_parties_than_it_trained_with(train_once, kits, tmp_path):
    own = Path(shutil.copytree(kits, tmp_path / "kits"))
    cluster, _ = train_once()
    cluster.kits = own
    error = cluster.serve_prediction(config=cluster.config.replace(train={"learning_rate": 0.25})).error()
    assert isinstance(error, ConfigError)
    assert "train.learning_rate = 0.1 there, 0.25 here" in str(error)
    add(own, ["d"])
    error = cluster.serve_prediction().error()
    assert isinstance(error, ConfigError)
    assert "it began with a, b, c; since then d added" in str(error)


def test_other_settings_than_the_training_had_are_declined(train_once, tmp_path):
    cluster, _ = train_once()
    other, path = cluster.config.replace(train={"learning_rate": 0.25}), tmp_path / "server" / "serving.json"
    asked = prepare_config_for_network(other, ["a", "b", "c"])
    path.write_text(json.dumps({**json.loads(path.read_text()), "digest": asked.digest()}))
    server = cluster.serve_prediction(config=other)
    error = cluster.predict_with("a", ASKED).error()
    assert isinstance(error, ConfigError)
    assert "train.learning_rate: a trained 0.1, the server 0.25" in str(error)
    cluster.until("server", "a: declines to take part: the server's settings are not the settings of the training")
    cluster.end(server)


def test_models_of_two_trainings_are_not_mixed(train_once, kits, tmp_path):
    cluster, _ = train_once()
    other = Cluster(cluster.config, cluster.parties, kits, tmp_path / "second")
    other.run()
    server = cluster.serve_prediction()
    other.port = cluster.port
    a = cluster.predict_with("a", ASKED)
    cluster.until("server", "a: prepared")
    error = other.predict_with("b").error()
    assert isinstance(error, ConfigError)
    assert "training:" in str(error)
    assert "the --out folder belongs to another training; give the folder of the training that" in str(error)
    cluster.end(server, a)


def test_other_features_than_the_training_had_are_refused_before_anything_is_sent(train_once):
    cluster, _ = train_once()
    wider = replace(cluster.parties[0], features=np.ones((24, 9), np.float32))
    error = cluster.predict_with("a", ASKED, party=wider).error()
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
        ("id\n1\n98765\n", "row 2: is not the id of a node of this party; remove the row"),
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
    assert "98765" not in str(caught.value)


def test_a_file_of_asked_ids_is_a_table(tmp_path):
    _, parties = tiny()
    with pytest.raises(DataError, match=r"must end in \.parquet or \.csv"):
        find_query_nodes(tmp_path / "ids.txt", tmp_path, parties[0])


def test_a_fault_of_the_server_of_a_prediction_appears_at_every_party(train_once, tmp_path):
    cluster, _ = train_once()

    class Failing(PredictionServer):
        def finish(self, result, finished):
            raise OSError(28, "No space left on device", str(tmp_path))

    server = cluster.serve_prediction(Failing)
    roles = [cluster.predict_with(name, ASKED) for name in "abc"]
    assert isinstance(server.error(), OSError)
    for role in roles:
        assert "the server failed: OSError in the program (No space left on device)" in str(role.error())
        assert role.error().exit_code == 1


def test_a_prediction_that_waits_drops_the_sender_of_an_invalid_message_and_continues_with_its_return(train_once):
    cluster, model = train_once()

    class Spoiling(PartyPerformer):
        def __call__(self, request):
            if isinstance(request, Send) and isinstance(request.message, Scores):
                value = np.full_like(request.message.value, np.nan)
                request = Send(replace(request.message, value=value))
            return super().__call__(request)

    server = cluster.serve_prediction(on_invalid_message="wait")
    a, b, c = (
        cluster.predict_with("a", ASKED),
        cluster.predict_with("b", ASKED, Spoiling),
        cluster.predict_with("c", ASKED),
    )
    error = b.error()
    assert isinstance(error, ConfigError)
    assert "class probabilities: expected values in 0..1, got nan" in str(error)
    again = cluster.predict_with("b", ASKED)
    expected = model.predict_proba(cluster.parties, ASKED)
    for role in (a, again, c):
        assert np.array_equal(role.outcome().scores, expected)
    server.outcome()
