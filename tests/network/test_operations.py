"""Operation: a status file after every round at every role, and metrics for Prometheus at the server."""

from __future__ import annotations

import importlib.util
import re
import socket
import urllib.request
from dataclasses import replace

import pytest

from glasu.errors import ConfigError
from glasu.integrations.prometheus import parse_metrics_address, refuse_shared_address, serve_metrics
from glasu.network.options import Status
from glasu.runtime.telemetry import PARTS
from support.cluster import Cluster
from support.tiny import tiny

ANYWHERE = ("127.0.0.1", 0)


def scrape(port):
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain")
        return answer.read().decode()


def value(text, name):
    return float(re.search(rf"^{re.escape(name)} (\S+)$", text, re.MULTILINE).group(1))


def watched_run(cluster):
    """Run, scrape after every round and at the end, and return the report, the scrapes and every role's statuses."""
    texts, seen = [], {name: [] for name in ("server", "a", "b", "c")}

    def look():
        return cluster.serving[-1].view() if cluster.serving else None

    with serve_metrics(ANYWHERE, look) as port:
        texts.append(scrape(port))

        def note(name):
            def observe(event):
                if isinstance(event, Status):
                    seen[name].append(event)
                    if name == "server":
                        texts.append(scrape(port))

            return observe

        server = cluster.serve(observer=note("server"))
        for role in [cluster.join(name, observer=note(name)) for name in "abc"]:
            role.outcome()
        report = server.outcome()
        texts.append(scrape(port))
    return report, texts, seen


@pytest.fixture(scope="module")
def run(request, tmp_path_factory):
    kits = request.getfixturevalue("kits")
    config, parties = tiny()
    return watched_run(Cluster(config, parties, kits, tmp_path_factory.mktemp("run")))


def test_before_a_run_begins_only_the_version_is_exported(run):
    _, texts, _ = run
    assert "glasu_info{version=" in texts[0]
    assert "glasu_rounds_done" not in texts[0]


def test_prometheus_reads_the_rounds_as_they_are_done(run):
    _, texts, _ = run
    assert [value(text, "glasu_rounds_done") for text in texts[1:]] == [1, 2, 3, 3]
    assert [value(text, "glasu_finished") for text in texts[1:]] == [0, 0, 0, 1]
    assert value(texts[1], "glasu_rounds_planned") == 3
    assert value(texts[1], 'glasu_party_connected{party="a"}') == 1
    assert value(texts[1], "glasu_attempt") == 1


def test_what_prometheus_reads_in_the_end_is_what_the_report_says(run):
    report, texts, _ = run
    last = texts[-1]
    assert value(last, 'glasu_bytes_total{direction="to_server"}') == report.traffic["bytes_to_server"]
    assert value(last, 'glasu_bytes_total{direction="to_clients"}') == report.traffic["bytes_to_clients"]
    assert value(last, "glasu_messages_total") == report.traffic["messages"]
    assert value(last, "glasu_exchanges_total") == report.traffic["exchanges"]
    assert value(last, "glasu_loss") == report.losses[-1]
    assert value(last, 'glasu_validation{metric="accuracy"}') == report.history[-1]["val_accuracy"]
    for phase, moved in report.traffic["by_phase"].items():
        assert value(last, f'glasu_phase_bytes_total{{phase="{phase}"}}') == moved


def test_the_server_counts_what_it_does_and_how_long_it_waits(run):
    report, texts, _ = run
    seconds = report.seconds
    assert set(seconds) == {"total", "waiting", "communication"}
    assert seconds["waiting"] > seconds["communication"] > 0
    assert 0.5 * seconds["total"] < seconds["waiting"] + seconds["communication"] <= seconds["total"]
    assert set(re.findall(r'^glasu_seconds_total\{part="(\w+)"\}', texts[-1], re.M)) == {"waiting", "communication"}


def test_a_party_counts_every_second_for_one_activity(kits, tmp_path):
    config, parties = tiny()
    _, reports = Cluster(config, parties, kits, tmp_path).run()
    for report in reports.values():
        total, *parts = (report["seconds"][name] for name in ("total", *PARTS))
        assert all(part > 0 for part in parts)
        assert sum(parts) <= total


def test_labels_name_parties_phases_and_metrics_and_nothing_else(run):
    _, texts, _ = run
    found = set(re.findall(r'^glasu_\w+\{(\w+)="', "\n".join(texts), re.MULTILINE))
    assert found == {"version", "party", "direction", "phase", "part", "metric"}


def test_every_role_has_one_status_per_round(run):
    report, _, seen = run
    for statuses in seen.values():
        assert [status.round for status in statuses] == [1, 2, 3]
        sent = [status.bytes_to_server for status in statuses]
        assert sent == sorted(sent)
        assert sent[0] > 0
    assert seen["a"][0].loss is not None
    assert seen["server"][-1].bytes_to_server <= report.traffic["bytes_to_server"]
    line = seen["a"][-1].line()
    assert re.fullmatch(r"round 3/3 done, loss \d\.\d{3}, \d\.\d\d MB to the server, \d\.\d\d MB back, \d+\.\d s", line)


def test_a_party_that_was_refused_is_counted(kits, tmp_path):
    config, parties = tiny()
    cluster = Cluster(config, parties, kits, tmp_path)
    server, a = cluster.serve(), cluster.join("a")
    cluster.until("server", "a: prepared")
    look = cluster.serving[-1].view
    assert look().refused == 0
    cluster.join("b", party=replace(parties[1], ids=parties[1].ids[::-1].copy())).error()
    view = look()
    assert view.refused == 1
    assert view.connected == {"a": True, "b": False, "c": False}
    cluster.end(server, a)


@pytest.mark.parametrize(
    ("text", "address"),
    [("9464", ("127.0.0.1", 9464)), ("0.0.0.0:9464", ("0.0.0.0", 9464)), ("[::1]:0", ("::1", 0))],
)
def test_metrics_are_for_this_machine_unless_a_host_is_given(text, address):
    assert parse_metrics_address(text) == address


@pytest.mark.parametrize("text", ["", "x", "70000", "host:", "host:x"])
def test_an_address_that_is_none_is_refused(text):
    with pytest.raises(ConfigError, match="--metrics"):
        parse_metrics_address(text)


@pytest.mark.parametrize(("metrics", "listen"), [("9443", "0.0.0.0:9443"), ("[::1]:9443", "[::1]:9443")])
def test_metrics_where_the_parties_are_to_come_are_refused(metrics, listen):
    with pytest.raises(ConfigError, match="equals --listen"):
        refuse_shared_address(metrics, listen)
    refuse_shared_address("9464", listen)
    refuse_shared_address("0", "127.0.0.1:0")


def test_a_port_that_is_taken_is_refused():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = ("127.0.0.1", taken.getsockname()[1])
        with pytest.raises(ConfigError, match="choose another port"), serve_metrics(address, lambda: None):
            pass


def test_without_the_package_its_extra_is_named(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"glasu\[metrics\]"), serve_metrics(ANYWHERE, lambda: None):
        pass
