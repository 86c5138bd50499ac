"""Prediction between organisations when parties stay away: the others answer after `--wait`, and the answer says so."""

from __future__ import annotations

import dataclasses
import json
import time

import numpy as np
import pytest

from glasu.errors import AbsenceError, AlignmentError, ProtocolError, TrainingError
from glasu.network.handshake import Code, RefusalError
from glasu.network.join import PartyPerformer
from glasu.network.prediction_party import PredictionParty
from glasu.network.prediction_server import PredictionServer
from glasu.network.run_folder import read_subsets
from glasu.network.training_party import TrainingParty
from glasu.protocol.messages import JointScores
from glasu.protocol.requests import Send
from glasu.report import SubsetScores
from support.cluster import NOBODY, Cluster
from support.roles import Killed
from support.tiny import tiny

ASKED = np.array([20, 3, 11, 3])
WAIT = 2.0  # seconds


class Serving(PredictionServer):
    """A server that ends soon after the prediction."""

    goodbye_seconds = 0.5


@pytest.fixture
def train(train_once):
    """Return a function that trains over the network with party dropout."""
    return lambda **keys: train_once(**{"party_dropout": 0.4, **keys})


def predict_in_one_process(cluster, model, names, asked=ASKED):
    nodes = np.unique(asked)
    found = model.predict_proba([party for party in cluster.parties if party.name in names], nodes)
    return found[np.searchsorted(nodes, asked)]


def read_result(cluster, role):
    return json.loads((cluster.folder / role / "prediction.json").read_text())


@pytest.mark.parametrize("keys", [{}, {"precision": "int8"}, {"chunk_rows": 5}, {"aggregation_layers": (3,)}], ids=str)
def test_the_parties_that_are_there_answer_with_the_bits_of_one_process_and_list_the_missing_one(keys, train):
    cluster, model = train(**keys)
    begun = time.monotonic()
    server = cluster.serve_prediction(Serving, wait=WAIT)
    a, c = cluster.predict_with("a"), cluster.predict_with("c", ASKED)
    found = c.outcome()
    assert time.monotonic() - begun < 20  # the wait, and the time to compute on a busy machine
    assert np.array_equal(found.scores, predict_in_one_process(cluster, model, "ac"))
    assert found.missing == ("b",)
    assert a.outcome().file is None
    assert server.outcome().missing == ("b",)
    stored = dict(model.find_subset(["a", "c"]).metrics)
    for role in ("server", "a", "c"):
        assert read_result(cluster, role)["parties"] == ["a", "b", "c"]
        assert read_result(cluster, role)["missing"] == ["b"]
        assert read_result(cluster, role)["validation"] == pytest.approx(stored)
        listed = ", ".join(f"{name} {value:.3f}" for name, value in stored.items())
        cluster.until(role, f"predicted without b; validation scores of the parties present: {listed}.")
    cluster.until("a", "continuing without b: no connection for 2 s.")
    cluster.until("server", "attempt 1: all parties except b are connected")


def test_one_party_alone_can_answer(train):
    cluster, model = train()
    server = cluster.serve_prediction(Serving, wait=WAIT)
    found = cluster.predict_with("b", ASKED).outcome()
    assert np.array_equal(found.scores, predict_in_one_process(cluster, model, "b"))
    assert server.outcome().missing == found.missing == ("a", "c")
    assert read_result(cluster, "b")["validation"] == pytest.approx(dict(model.find_subset("b").metrics))


def test_a_prediction_of_all_parties_has_no_mark(train):
    cluster, model = train()
    served, found = cluster.predict(b=ASKED)
    assert np.array_equal(found["b"].scores, predict_in_one_process(cluster, model, "abc"))
    assert served.missing == found["b"].missing == ()
    assert read_result(cluster, "b")["missing"] == []
    assert "validation" not in read_result(cluster, "b")
    assert not any("predicted without" in line for lines in cluster.lines.values() for line in lines)


def test_with_labels_at_one_party_only_it_receives_scores_and_only_it_and_the_server_know_the_stored_ones(train):
    cluster, model = train(labels="b")
    received = []

    class Seeing(PartyPerformer):
        def __call__(self, request):
            reply = super().__call__(request)
            if isinstance(reply, JointScores):
                received.append(self.work.party.name)
            return reply

    server = cluster.serve_prediction(Serving, wait=WAIT)
    b, c = cluster.predict_with("b", NOBODY, Seeing), cluster.predict_with("c", ASKED, Seeing)
    found, nodes = b.outcome(), np.unique(ASKED)
    assert found.nodes.tolist() == nodes.tolist()
    assert np.array_equal(found.scores, predict_in_one_process(cluster, model, "bc", nodes))
    assert c.outcome().file is None
    assert received == []  # the owner's scores are its own
    server.outcome()
    for role in ("server", "b"):
        assert read_result(cluster, role)["validation"] == pytest.approx(dict(model.find_subset("bc").metrics))
    assert "validation" not in read_result(cluster, "c")
    cluster.until("c", "predicted without a; validation scores of the parties present: unknown.")


def test_without_the_label_owner_there_is_no_prediction_and_every_role_reports_it(train, tmp_path):
    cluster, _ = train(labels="b")
    server = cluster.serve_prediction(Serving, wait=WAIT)
    roles = [cluster.predict_with(name, ASKED) for name in "ac"]
    error = server.error()
    assert isinstance(error, AbsenceError)
    for role in (server, *roles):
        assert "waited 2 s for b to join" in str(role.error())
        assert "Party b is missing; it has the labels, and only its classifier can predict." in str(role.error())
        assert role.error().exit_code == 1
    assert not list(tmp_path.glob("*/prediction.json"))


def test_without_party_dropout_all_parties_are_needed(train):
    cluster, _ = train(party_dropout=0.0)
    server = cluster.serve_prediction(Serving, wait=WAIT)
    roles = [cluster.predict_with(name, ASKED) for name in "ac"]
    for role in (server, *roles):
        assert "after training with train.party_dropout" in str(role.error())
    assert not any("continuing without" in line for line in cluster.lines["server"])


def test_a_party_that_dies_in_the_middle_is_awaited_and_the_others_predict_without_it(train):
    cluster, model = train()

    class Dying(PartyPerformer):
        def __call__(self, request):
            if isinstance(request, Send) and request.message.key.layer == 3:
                raise Killed
            return super().__call__(request)

    server = cluster.serve_prediction(Serving, wait=WAIT)
    a, c = cluster.predict_with("a", ASKED), cluster.predict_with("c")
    assert isinstance(cluster.predict_with("b", ASKED, Dying).error(), Killed)
    assert np.array_equal(a.outcome().scores, predict_in_one_process(cluster, model, "ac"))
    assert c.outcome().missing == server.outcome().missing == ("b",)
    cluster.until("server", "attempt 2: all parties except b are connected")
    ledger = read_result(cluster, "a")["privacy"]["ledger"][0]["releases"]
    assert sum(row["releases"] for row in ledger if row["kind"] == "node sets") == 2  # both attempts are entered


def test_a_party_that_returns_before_the_end_takes_part_in_the_next_attempt(train):
    cluster, model = train()
    late, returned = [], []

    class Waiting(PartyPerformer):  # when the attempt without b is under way, b comes
        def __call__(self, request):
            if isinstance(request, Send) and request.message.key.layer == 3 and not returned:
                returned.append(True)
                late.append(cluster.predict_with("b", ASKED))
                cluster.until("server", "b: connected")
            return super().__call__(request)

    server = cluster.serve_prediction(Serving, wait=WAIT)
    a, c = cluster.predict_with("a", ASKED, Waiting), cluster.predict_with("c")
    expected = predict_in_one_process(cluster, model, "abc")
    assert np.array_equal(a.outcome().scores, expected)
    assert np.array_equal(late[0].outcome().scores, expected)
    assert c.outcome().missing == server.outcome().missing == ()
    assert read_result(cluster, "a")["missing"] == []
    cluster.until("server", "attempt 2: all parties are connected")


def test_a_party_that_connects_after_the_end_learns_that_the_prediction_is_complete(train):
    cluster, _ = train()

    class Lingering(PredictionServer):
        goodbye_seconds = 5.0

    server = cluster.serve_prediction(Lingering, wait=WAIT)
    for role in [cluster.predict_with(name, ASKED) for name in "ac"]:
        assert role.outcome().missing == ("b",)
    error = cluster.predict_with("b", ASKED).error()
    assert isinstance(error, RefusalError)
    assert error.code == Code.RUN_FINISHED
    assert "this prediction is complete" in str(error)
    server.outcome()


@pytest.mark.parametrize(
    ("proposed", "words"),
    [
        (("a", "b"), "proposed a prediction by a, b; expected some of a, b, c in this order, including c"),
        (("c", "a"), "in this order"),
        (("c", "d"), "proposed a prediction by c, d"),
        ((), "proposed a prediction by no party"),
        (("\x1b[2J", "c"), r"by \?\[2J, c"),
    ],
)
def test_a_party_refuses_parties_that_cannot_be_those_of_an_attempt(proposed, words, train):
    cluster, _ = train()

    class Misled(PredictionParty):
        def begin(self, attempt):
            return super().begin(dataclasses.replace(attempt, present=proposed))

    server = cluster.serve_prediction(Serving)
    a, b, c = cluster.predict_with("a"), cluster.predict_with("b"), cluster.predict_with("c", ASKED, role=Misled)
    with pytest.raises(ProtocolError, match=words) as caught:
        c.outcome()
    assert str(caught.value).isprintable()
    for role in (server, a, b):
        assert isinstance(role.error(), TrainingError)


def test_a_party_whose_model_has_never_seen_fewer_parties_refuses_to_predict_with_some(train):
    cluster, _ = train(party_dropout=0.0)

    class Misled(PredictionParty):
        def begin(self, attempt):
            return super().begin(dataclasses.replace(attempt, present=("a", "c")))

    server = cluster.serve_prediction(Serving)
    roles = [cluster.predict_with("a"), cluster.predict_with("b")]
    error = cluster.predict_with("c", ASKED, role=Misled).error()
    assert isinstance(error, AlignmentError)
    assert "after training with train.party_dropout" in str(error)
    for role in (server, *roles):
        assert isinstance(role.error(), TrainingError)


def test_a_party_refuses_a_training_that_leaves_out_another_one(kits, tmp_path):
    config, parties = tiny(num_rounds=2, party_dropout=0.4)
    cluster = Cluster(config, parties, kits, tmp_path)

    class Misled(TrainingParty):
        def begin(self, attempt):
            return super().begin(dataclasses.replace(attempt, present=("a", "c")))

    server = cluster.serve()
    roles = [cluster.join("a"), cluster.join("b")]
    assert "a training run needs all parties" in str(cluster.join("c", Misled).error())
    for role in (server, *roles):
        assert isinstance(role.error(), TrainingError)


def test_the_server_reads_the_stored_scores_from_its_report(tmp_path):
    (tmp_path / "report.json").write_text('{"subsets": [{"parties": ["a", "c"], "accuracy": 0.5, "auc": null}]}')
    assert read_subsets(tmp_path) == [SubsetScores(("a", "c"), {"accuracy": 0.5})]


@pytest.mark.parametrize("content", ["", "[]", '{"subsets": 1}', '{"subsets": [1]}', '{"subsets": [{"parties": 2}]}'])
def test_without_a_readable_report_the_stored_scores_are_unknown(content, tmp_path):
    assert read_subsets(tmp_path) == []
    (tmp_path / "report.json").write_text(content)
    assert read_subsets(tmp_path) == []
