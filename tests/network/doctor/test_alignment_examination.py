"""A dry run of an alignment finds ids, rules and machines that cannot be aligned, and sends no id."""

from __future__ import annotations

import threading

import pytest

from glasu.network.doctor.alignment import AlignmentDryRunParty, check_ids
from glasu.network.doctor.machine import check_group
from glasu.network.doctor.party import join_dry_run
from glasu.network.doctor.server import DryRunServer
from glasu.network.options import JoinOptions, Listening, ServeOptions
from glasu.network.purposes import ALIGNMENT_DRY_RUN
from glasu.network.serve import serve
from glasu.pki.kit import open_kit
from support.roles import Role
from support.tiny import tiny
from support.toy_run import logger

pytest.importorskip("rbcl")


def write_folder(folder, ids, more=""):
    folder.mkdir()
    (folder / "party.toml").write_text(f"name = {folder.name!r}\n{more}")
    (folder / "nodes.csv").write_text("id,x\n" + "".join(f"{each},1\n" for each in ids))
    (folder / "edges.csv").write_text("source,target\n")
    return folder


@pytest.mark.parametrize(
    ("ids", "most", "level", "words"),
    [
        (["a b", "c"], 5, "good", "2 different ids"),
        (["quentin", " quentin"], 5, "bad", "see that party's log"),
        (["quentin", '" "'], 5, "bad", "see that party's log"),
        (["quentin", "bob", "cy"], 2, "bad", "3 ids, but --max-ids here is 2"),
    ],
)
def test_ids_that_cannot_be_aligned_are_found_without_quoting_one(ids, most, level, words, tmp_path):
    finding, _ = check_ids(write_folder(tmp_path / "a", ids), most, logger([]))
    assert finding.level == level
    assert words in finding.text
    assert "quentin" not in finding.text


def examine(kits, folders):
    """Return the diagnosis of a dry run of an alignment with these folders: at the server, and at all parties."""
    ready, port = threading.Event(), []

    def observe(event):
        if isinstance(event, Listening):
            port.append(event.port)
            ready.set()

    options = ServeOptions(
        config=tiny()[0],
        kit=open_kit(kits / "server", "server"),
        listen="127.0.0.1:0",
        out=folders[0].parent / "server",
        wait=60.0,
        observer=observe,
    )
    own = [check_group(options.log)]
    server = Role("server", lambda: serve(DryRunServer(options, own, ALIGNMENT_DRY_RUN)))
    assert ready.wait(30)

    def take_part(folder):
        kit = open_kit(kits / folder.name, "party")
        party = JoinOptions(kit=kit, server=f"localhost:{port[0]}", out=folder, wait=60.0)
        return join_dry_run(AlignmentDryRunParty(party, 1000))

    roles = [Role(folder.name, lambda folder=folder: take_part(folder)) for folder in folders]
    heard = [role.outcome() for role in roles]
    return server.outcome(), heard


def test_parties_with_equal_rules_are_ready_and_all_are_informed(kits, tmp_path):
    folders = [write_folder(tmp_path / name, [f"p{row}" for row in range(5 + len(name))]) for name in "abc"]
    diagnosis, heard = examine(kits, folders)
    assert diagnosis.is_ready
    assert [each.summary("align") for each in heard] == [diagnosis.summary("align")] * 3
    lines = "\n".join(diagnosis.lines())
    assert lines.count("the package for alignments (glasu[psi]) is installed") == 4
    assert lines.count("6 different ids") == 3
    assert "p0" not in lines
    assert not (tmp_path / "server").exists()
    assert {path.name for path in folders[0].iterdir()} == {"party.toml", "nodes.csv", "edges.csv"}


def test_other_rules_at_one_party_are_found(kits, tmp_path):
    rules = {"b": 'id_case = "fold"\n'}
    folders = [write_folder(tmp_path / name, ["x", "y"], rules.get(name, "")) for name in "abc"]
    diagnosis, _ = examine(kits, folders)
    assert not diagnosis.is_ready
    assert "use the same id_unicode, id_case and id_whitespace in party.toml at all parties" in diagnosis.summary()
