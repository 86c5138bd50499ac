"""The secret of a party over the network: made at first use, kept, and never sent or written elsewhere."""

from __future__ import annotations

import json
import shutil
import stat
from pathlib import Path

import pytest

from glasu.errors import ConfigError, TransportError
from glasu.network.doctor.machine import check_joining_folder
from glasu.network.options import JoinOptions
from glasu.pki.kit import open_kit
from glasu.pki.secret_file import SECRET
from glasu.secret import Secret
from support.cluster import Cluster
from support.kits import secrets_of, simulate_with_secrets, write_secret
from support.tiny import assert_same_end, assert_same_run, simulate, tiny


@pytest.fixture
def own_kits(kits: Path, tmp_path: Path) -> Path:
    """Return a copy of the kits, to be changed."""
    return Path(shutil.copytree(kits, tmp_path / "kits"))


def read_all(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())


def test_a_party_makes_its_secret_at_its_first_use_and_keeps_it(own_kits, tmp_path):
    config, parties = tiny()
    for name in "abc":
        (own_kits / name / SECRET).unlink()
    first, _ = Cluster(config, parties, own_kits, tmp_path / "first").run()
    secrets = {name: bytes.fromhex((own_kits / name / SECRET).read_text()) for name in "abc"}
    assert len({*secrets.values()}) == 3
    assert {stat.S_IMODE((own_kits / name / SECRET).stat().st_mode) for name in "abc"} == {0o600}
    assert sorted(path.name for path in (own_kits / "a").iterdir() if SECRET in path.name) == [SECRET]
    assert not (own_kits / "server" / SECRET).exists()
    assert_same_run(first, simulate(parties, config, secrets=secrets).report)
    second, _ = Cluster(config, parties, own_kits, tmp_path / "second").run()
    assert_same_run(second, first)


def test_the_bits_of_a_served_run_do_not_follow_from_its_public_seed(kits, tmp_path):
    config, parties = tiny()
    served, reports = Cluster(config, parties, kits, tmp_path).run()
    plain = simulate(parties, config).report
    assert not {*served.weights_sha256} & {*plain.weights_sha256}
    assert {report["privacy"]["secrets"] for report in reports.values()} == {"given"}
    assert "secrets" not in served.to_dict()["privacy"]


def test_no_folder_log_or_report_has_a_secret(stopped_cluster):
    secrets = [Secret(value) for value in secrets_of("abc").values()]
    secrets += [secret.derive("training", stopped_cluster.config.train.seed) for secret in secrets]
    before = read_all(stopped_cluster.folder)  # with checkpoints
    stopped_cluster.run()
    written = before + read_all(stopped_cluster.folder) + json.dumps(stopped_cluster.lines).encode()
    for secret in secrets:
        assert secret.value not in written
        assert secret.value.hex().encode() not in written


def test_a_resumed_run_has_the_bits_of_an_unbroken_one(stopped_cluster):
    report, _ = stopped_cluster.run()
    assert any("continuing after round 3." in line for line in stopped_cluster.lines["server"])
    assert_same_end(report, simulate_with_secrets(stopped_cluster.parties, stopped_cluster.config).report)


@pytest.mark.parametrize("state", ["missing", "changed"])
def test_a_missing_or_changed_secret_is_refused_on_resume(state, stopped_cluster, own_kits):
    if state == "missing":
        (own_kits / "b" / SECRET).unlink()
    else:
        write_secret(own_kits / "b", bytes(32))
    stopped_cluster.kits = own_kits
    error = stopped_cluster.join("b").error()
    said = {"missing": "is missing", "changed": "has changed since this run began"}[state]
    assert isinstance(error, ConfigError)
    assert str(error) == (
        f"{own_kits / 'b' / SECRET}: {said}; restore it, or start over with --fresh at the server and at every party."
    )
    assert str(own_kits) not in error.public_message
    assert (own_kits / "b" / SECRET).exists() == (state == "changed")  # it is not made again
    options = JoinOptions(kit=open_kit(own_kits / "b"), server="localhost:1", out=stopped_cluster.folder / "b")
    (finding,) = check_joining_folder(options, None)
    assert (finding.check, finding.level) == ("folder", "bad")
    assert said in finding.text

    write_secret(own_kits / "b", secrets_of("b")["b"])
    report, _ = stopped_cluster.run()
    assert_same_end(report, simulate_with_secrets(stopped_cluster.parties, stopped_cluster.config).report)


def test_a_run_that_starts_over_may_have_another_secret(stopped_cluster, own_kits):
    write_secret(own_kits / "b", bytes(32))
    stopped_cluster.kits = own_kits
    roles = [stopped_cluster.serve(fresh=True), *(stopped_cluster.join(name, fresh=True) for name in "abc")]
    report = roles[0].outcome()
    secrets = {**secrets_of("abc"), "b": bytes(32)}
    assert_same_end(report, simulate(stopped_cluster.parties, stopped_cluster.config, secrets=secrets).report)


def test_a_finished_run_can_be_read_without_its_secret(own_kits, tmp_path):
    config, parties = tiny()
    cluster = Cluster(config, parties, own_kits, tmp_path)
    _, reports = cluster.run()
    (own_kits / "b" / SECRET).unlink()
    assert cluster.join("b").outcome() == reports["b"]
    assert not (own_kits / "b" / SECRET).exists()


def test_a_kit_that_cannot_be_written_needs_a_secret_before_its_first_use(own_kits, tmp_path, monkeypatch):
    config, parties = tiny()
    (own_kits / "b" / SECRET).unlink()

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    kit = open_kit(own_kits / "b", "party")
    monkeypatch.setattr("os.link", refuse)  # tests may run as root, which may write everywhere
    monkeypatch.setattr("os.access", lambda path, mode: path != own_kits / "b")
    error = Cluster(config, parties, own_kits, tmp_path, port=1).join("b").error()
    assert isinstance(error, TransportError)
    assert str(error) == (
        f"{own_kits / 'b' / SECRET}: cannot be written (Permission denied); run `glasu provision secret KIT` once "
        "where the kit can be written."
    )
    assert [path.name for path in (own_kits / "b").iterdir() if "secret" in path.name] == []
    (finding, *_) = check_joining_folder(JoinOptions(kit=kit, server="localhost:1", out=tmp_path / "b"), None)
    assert (finding.check, finding.level) == ("secret", "bad")
