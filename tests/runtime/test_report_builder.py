"""Reports contain the cost and the evaluations that the telemetry recorded, and the scores of the selected models."""

from __future__ import annotations

import pytest

from glasu.config import RunConfig
from glasu.model.task import ACCURACY
from glasu.privacy.ledger import Ledger
from glasu.protocol.requests import Evaluated
from glasu.protocol.state import Identity
from glasu.report import GIVEN, PartySummary, PreparedColumns, PrivacySummary, Seconds, Traffic
from glasu.runtime.report_builder import TrainingResult, build_party_report, build_run_report
from glasu.runtime.telemetry import Cost, Telemetry


def evaluated(round_index, accuracy, party=None, *, split="validation", improved=False):
    metrics = {"accuracy": accuracy, "macro_f1": accuracy, "loss": 1 - accuracy}
    return Evaluated(round_index, split, metrics, ACCURACY, 0.5, improved, party)


def make_telemetry():
    """Return the telemetry of a role that sent 40 bytes in 2 exchanges and 5 seconds, before its first evaluation."""
    telemetry = Telemetry(lambda: 0.0)
    telemetry.restore_cost(Cost(Traffic(bytes_to_server=40, exchanges=2), Seconds(5.0)))
    return telemetry


def make_result(config, losses=((0.7,),), ledgers=None):
    return TrainingResult(
        config=config,
        losses=losses,
        weights_sha256=("digest",),
        privacy=PrivacySummary.of(config, ledgers, GIVEN),
    )


def test_a_party_report_has_the_cost_and_the_ledger_of_the_party():
    telemetry, identity = make_telemetry(), Identity(("a", "b"), "a", 1, bytes(12))
    prepared = PreparedColumns(unchanged=3, scaled=0, standardized=2, dropped=("age",))
    result = make_result(RunConfig(), ledgers={"b": Ledger()})
    report = build_party_report(telemetry, result, identity, {}, prepared)
    assert (report.party, report.parties, report.run) == ("b", ("a", "b"), bytes(12).hex())
    assert (report.traffic, report.seconds) == (telemetry.cost().traffic, telemetry.cost().seconds)
    assert report.test is None  # only party "a" has labels
    assert [ledger.party for ledger in report.privacy.ledger] == ["b"]
    assert report.to_dict()["prepared"] == {"unchanged": 3, "scaled": 0, "standardized": 2, "dropped": ["age"]}


def test_an_entry_of_the_history_has_the_cost_until_then():
    telemetry = make_telemetry()
    telemetry.observe(evaluated(1, 0.5, improved=True))
    telemetry.traffic.bytes_to_server += 1  # the test after the last round
    telemetry.observe(evaluated(3, 0.5, split="test"))
    (entry,) = build_run_report(telemetry, make_result(RunConfig()), (), {}).history
    assert entry.to_dict() == {
        "round": 1, "loss": 0.5, "val_accuracy": 0.5, "val_macro_f1": 0.5, "val_loss": 0.5, "bytes": 40,
        "exchanges": 2, "seconds": 5.0,
    }  # fmt: skip


def test_parties_alone_are_averaged_and_listed_in_their_order():
    telemetry = make_telemetry()
    telemetry.observe(evaluated(1, 0.8, "b", improved=True))
    telemetry.observe(evaluated(1, 0.4, "a", improved=True))
    telemetry.observe(evaluated(2, 0.6, "a", improved=True))
    telemetry.observe(evaluated(3, 0.9, "a", split="test"))
    telemetry.observe(evaluated(3, 0.5, "b", split="test"))
    alone = RunConfig().replace(train={"method": "standalone"}, model={"aggregation_layers": ()})
    parties = [PartySummary(name, nodes=4) for name in "ab"]
    measured = build_run_report(telemetry, make_result(alone, losses=[[1.0, 2.0], [3.0]]), parties, {})
    assert measured.validation.per_client == (0.6, 0.8)
    assert measured.validation.accuracy == pytest.approx(0.7)
    assert measured.validation.round is None  # each has its own
    assert measured.test.per_client == (0.9, 0.5)
    assert measured.losses == (2.0, 2.0)  # in the second round one party trained
    assert [entry.metrics["accuracy"] for entry in measured.history] == pytest.approx([0.6, 0.7])
