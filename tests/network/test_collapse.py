"""The server of a run over gRPC says that the selected model has learned nothing."""

from __future__ import annotations

import json
import logging

import pytest

from support.cluster import Cluster
from support.collapsed import make_collapsing_run
from support.kits import simulate_with_secrets
from support.tiny import assert_same_run

WARNING = "no better than one prediction for all nodes"


@pytest.mark.parametrize("labels", ["all", "b"])
def test_the_server_reports_and_logs_a_model_that_has_learned_nothing(labels, kits, tmp_path, caplog):
    config, parties = make_collapsing_run(labels=labels)
    cluster = Cluster(config, parties, kits, tmp_path)
    with caplog.at_level(logging.WARNING, "glasu.runtime.telemetry"):
        served, _ = cluster.run()
    assert [WARNING in note for note in served.notes] == [True]
    written = json.loads((tmp_path / "server" / "report.json").read_text())
    assert [WARNING in note for note in written["notes"]] == [True]
    assert sum(WARNING in record.getMessage() for record in caplog.records) >= 1
    told = [name for name in "abc" if any(WARNING in line for line in cluster.lines[name])]
    assert told == (["a", "b", "c"] if labels == "all" else ["b"])
    assert_same_run(served, simulate_with_secrets(parties, config).report)
