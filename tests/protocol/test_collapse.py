"""A selected model that has learned nothing is reported, and nothing more about it reaches the server."""

from __future__ import annotations

import numpy as np
import pytest

from glasu.errors import ProtocolError
from glasu.protocol.messages import Metrics
from support.collapsed import make_collapsing_run
from support.tiny import settings, simulate, tiny_parties

WARNING = "no better than one prediction for all nodes"


@pytest.mark.parametrize("labels", ["all", "b"])
def test_the_report_warns_of_a_model_that_has_learned_nothing(labels):
    config, parties = make_collapsing_run(labels=labels)
    sent: list = []

    def keep(message):
        sent.append(message)
        return message

    (note,) = simulate(parties, config, carry=keep).report.notes
    assert WARNING in note
    owners = 3 if labels == "all" else 1
    longer = [message for message in sent if isinstance(message, Metrics) and len(message.values) == 4]
    assert len(longer) == owners  # accuracy, macro_f1, loss and the flag, once, with the test
    assert {message.key.round for message in longer} == {config.train.num_rounds + 1}


def test_a_party_that_trained_alone_is_named_with_remedies_that_apply_to_it():
    config, parties = make_collapsing_run(method="standalone")
    notes = simulate(parties, config).report.notes
    assert len(notes) == len(parties)
    for party, note in zip(parties, notes, strict=True):
        assert f"selected model of party {party.name!r} is no better" in note
    assert all("train.learning_rate" in note and "train.backward" not in note for note in notes)


def test_a_model_that_has_learned_something_sends_the_flag_0():
    sent: list = []

    def keep(message):
        sent.append(message)
        return message

    config = settings(num_rounds=10, evaluate_every=5, backbone="sage", optimizer="adam")
    assert simulate(tiny_parties(num_nodes=100), config, carry=keep).report.notes == ()
    flags = [message.values[3:].tolist() for message in sent if isinstance(message, Metrics)]
    assert flags == 2 * 3 * [[]] + 3 * [[0.0]]  # two evaluations and the test of three parties


def test_another_number_than_the_flag_is_refused():
    config, parties = make_collapsing_run()

    def change(message):
        if isinstance(message, Metrics) and len(message.values) == 4:
            return Metrics(message.key, np.array([*message.values[:3], 2.0]))
        return message

    with pytest.raises(ProtocolError, match="expected 3 metrics and one flag"):
        simulate(parties, config, carry=change)
