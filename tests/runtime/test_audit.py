"""The audit of a run's folder: totals, and every planted change of a ledger is noticed."""

from __future__ import annotations

import hashlib
import json
from contextlib import nullcontext
from datetime import UTC, datetime

import pytest

from glasu.errors import ConfigError
from glasu.privacy.policy import Policy, PolicyError
from glasu.protocol.messages import TensorMessage
from glasu.runtime.audit import audit_folder
from glasu.runtime.audit_page import render_audit_page, render_text
from glasu.runtime.policy_file import PolicyFile
from support.ledgers import Notes, list_entries
from support.tiny import simulate, tiny


def train(folder, **options):
    """Run a tiny training in a folder; write its report as `glasu train` does."""
    config, parties = tiny()
    done = simulate(parties, config, ledgers=folder / "ledger", **options)
    (folder / "report.json").write_text(done.report.to_json())
    return done


@pytest.fixture(scope="module")
def trained_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    return folder, train(folder)


@pytest.fixture
def run_dir(trained_run, tmp_path):
    """Return a copy of the trained folder."""
    folder, _ = trained_run
    (tmp_path / "ledger").mkdir()
    for path in (folder / "report.json", *(folder / "ledger").iterdir()):
        (tmp_path / path.relative_to(folder)).write_bytes(path.read_bytes())
    return tmp_path


def list_failures(folder, *peers) -> list[str]:
    return [f"{check.check}: {check.text}" for check in audit_folder(folder, peers).failures]


def test_a_ledger_file_changes_no_weight(trained_run):
    config, parties = tiny()
    assert simulate(parties, config).report.weights_sha256 == trained_run[1].report.weights_sha256


def test_the_totals_are_those_of_the_report_and_of_the_traffic(run_dir, trained_run):
    audit, report = audit_folder(run_dir), trained_run[1].report
    assert audit.failures == []
    assert [ledger.party for ledger in audit.ledgers] == ["a", "b", "c"]
    for ledger, stated in zip(audit.ledgers, report.privacy.ledger, strict=True):
        (run,) = ledger.runs
        found = {(each.phase, each.kind, each.layer, each.protection): each for each in run.totals}
        assert len(found) == len(stated.releases)
        for row in stated.releases:
            each = found[row["phase"], row["kind"], row["layer"], row["protection"]]
            assert (each.releases, each.rows, each.bytes) == (row["releases"], row["rows"], row["bytes"])
        assert (run.purpose, run.processes, run.finished) == ("training", 1, True)
    entered = sum(run.size for ledger in audit.ledgers for run in ledger.runs)
    assert entered == report.traffic.bytes_to_server - report.traffic.headers_to_server > 0


def test_the_text_and_the_page_list_every_kind_and_check(run_dir):
    audit = audit_folder(run_dir)
    text, page = render_text(audit), render_audit_page(audit, datetime(2026, 1, 2, tzinfo=UTC))
    for word in ("representation", "losses", "evaluation", "none", "OK"):
        assert word in text
        assert word in page
    passed = sum(check.level == "good" for check in audit.checks)
    assert f"{passed} checks passed: no record was changed, moved or omitted.\n" in text
    assert "<script" not in page
    assert "http" not in page
    assert json.loads(json.dumps(audit.ledgers[0].to_dict(), default=dict))["length"] == audit.ledgers[0].length


def damage(run_dir, change) -> None:
    path = run_dir / "ledger" / "b.jsonl"
    path.write_bytes(b"".join(change(path.read_bytes().splitlines(keepends=True))))


def test_a_changed_entry_is_found(run_dir):
    damage(run_dir, lambda lines: [*lines[:4], lines[4].replace(b'"rows":', b'"rows":1', 1), *lines[5:]])
    (failure,) = list_failures(run_dir)[:1]
    assert "chain of b" in failure
    assert "line 5: does not follow" in failure


def test_a_missing_entry_is_found(run_dir):
    damage(run_dir, lambda lines: lines[:4] + lines[5:])
    assert "line 5: does not follow" in list_failures(run_dir)[0]


@pytest.mark.parametrize("kept", [-1, -4])
def test_a_cut_tail_is_found_by_the_report_or_by_the_memory_of_others(run_dir, kept):
    damage(run_dir, lambda lines: lines[:kept])
    failures = list_failures(run_dir)
    assert any("report.json: b: the ledger had" in each for each in failures)
    if kept == -4:  # the last record of each ledger holds the heads of the others before it
        assert any("recorded heads of b: a saw" in each for each in failures)


def test_a_tail_that_was_cut_and_written_anew_is_found(run_dir):
    """A party cuts its ledger and lets a shorter run take the place of the end: the chain is valid again."""
    damage(run_dir, lambda lines: lines[:5])
    with pytest.raises(Exception, match=r"its ledger differs from the one .* or move the file to another folder"):
        train(run_dir)
    for name in "ac":
        (run_dir / "ledger" / f"{name}.jsonl").rename(run_dir / f"{name}.jsonl")
    (run_dir / "report.json").unlink()
    train(run_dir)
    for name in "ac":
        (run_dir / f"{name}.jsonl").replace(run_dir / "ledger" / f"{name}.jsonl")
    assert any("recorded heads of b" in each and "saw" in each for each in list_failures(run_dir))


def test_an_audit_without_recorded_heads_does_not_claim_that_the_end_is_complete(run_dir, tmp_path_factory):
    alone = tmp_path_factory.mktemp("alone")
    lines = (run_dir / "ledger" / "b.jsonl").read_bytes().splitlines(keepends=True)
    (alone / "ledger.jsonl").write_bytes(b"".join(lines[:-3]))
    audit = audit_folder(alone)
    for text in (render_text(audit), render_audit_page(audit, datetime(2026, 1, 2, tzinfo=UTC))):
        assert "1 check passed: no record before the last one was changed, moved or omitted. " in text
        assert "SKIPPED" in text
    audit = audit_folder(alone, [run_dir])  # the heads that a and c recorded show the cut
    assert {check.level for check in audit.checks} == {"good", "bad"}


def test_less_in_the_ledger_than_in_the_traffic_is_a_failure_and_more_is_a_note(run_dir):
    report = json.loads((run_dir / "report.json").read_text())
    for change, failed in ((1, True), (-1, False)):
        traffic = {**report["traffic"], "bytes_to_server": report["traffic"]["bytes_to_server"] + change}
        (run_dir / "report.json").write_text(json.dumps({**report, "traffic": traffic}))
        assert any("only" in each for each in list_failures(run_dir)) is failed


def test_unknown_keys_of_a_report_are_accepted(run_dir):
    before = audit_folder(run_dir).checks
    report = json.loads((run_dir / "report.json").read_text())
    for part in (report, report["traffic"], report["privacy"], *report["privacy"]["ledger"]):
        part["a key of a later version"] = [{"x": None}]
    (run_dir / "report.json").write_text(json.dumps(report))
    assert audit_folder(run_dir).checks == before


def test_another_training_in_the_folder_continues_the_ledger(run_dir):
    train(run_dir)
    audit = audit_folder(run_dir)
    assert audit.failures == []
    assert [len(ledger.runs) for ledger in audit.ledgers] == [2, 2, 2]


def test_a_folder_without_a_ledger_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="holds no ledger"):
        audit_folder(tmp_path)


def test_other_folders_must_hold_a_memory(run_dir, tmp_path_factory):
    with pytest.raises(ConfigError, match=r"--peers .* holds neither"):
        audit_folder(run_dir, [tmp_path_factory.mktemp("empty")])


@pytest.mark.parametrize(
    "rules", [{"max_evaluations": 2}, {"min_rows": 10}, {"max_rows": 23}, {"max_releases_per_row": 1}], ids=str
)
def test_a_policy_stops_a_run_and_nothing_of_the_release_travels(tmp_path, rules):
    config, parties = tiny(stop_at=1.0)  # so that the settings alone do not show the number of evaluations
    policy, notes = PolicyFile(tmp_path / "policy.toml", Policy(**rules), "digest"), Notes()
    with pytest.raises(PolicyError, match=next(iter(rules))):
        simulate(parties, config, ledgers=tmp_path, policies={"b": policy}, carry=notes.carry)
    entered = {entry.sha256 for entry in list_entries(tmp_path / "b.jsonl")}
    tensors = [each for each in notes.messages if each.key.client == 1 and isinstance(each, TensorMessage)]
    assert {hashlib.sha256(each.value.tobytes()).hexdigest() for each in tensors} <= entered


@pytest.mark.parametrize(
    ("settings", "count"),
    [
        (
            {"num_rounds": 4, "evaluate_every": 2, "patience": 4},
            3,
        ),  # four evaluations without improvement are impossible
        ({"num_rounds": 5, "evaluate_every": 2, "patience": 0}, 4),
        ({"num_rounds": 2, "evaluate_every": 2, "warm_start": 2}, 4),
        ({"num_rounds": 2, "evaluate_every": 2, "party_dropout": 0.5}, 5),
        ({"num_rounds": 40, "evaluate_every": 1, "patience": 2, "learning_rate": 1e-12}, 4),  # no improvement
    ],
    ids=str,
)
def test_a_policy_with_one_evaluation_less_than_a_run_has_refuses_it_at_the_start(tmp_path, settings, count):
    config, parties = tiny(**settings)
    for limit, notes in ((count, Notes()), (count - 1, Notes())):
        policy = PolicyFile(tmp_path / "policy.toml", Policy(max_evaluations=limit), "digest")
        allowed = (
            nullcontext()
            if limit == count
            else pytest.raises(PolicyError, match=f"needs at least {count} evaluations, including its test")
        )
        with allowed:
            simulate(parties, config, policies={"b": policy}, carry=notes.carry)
        assert bool(notes.messages) is (limit == count)


def test_a_forbidden_kind_is_refused_before_anything_travels(tmp_path):
    config, parties = tiny()
    policy, notes = PolicyFile(tmp_path / "policy.toml", Policy(forbid=("probabilities",)), "digest"), Notes()
    with pytest.raises(PolicyError, match="forbid"):
        simulate(parties, config, policies={"c": policy}, carry=notes.carry)
    assert notes.messages == []
