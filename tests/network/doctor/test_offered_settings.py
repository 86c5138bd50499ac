"""A dry run reports to all roles even if a party cannot read the server's settings."""

from __future__ import annotations

from glasu.config import RunConfig
from glasu.network.doctor.party import DryRunParty
from glasu.network.handshake import WelcomePayload
from glasu.network.options import JoinOptions
from glasu.pki.kit import open_kit
from glasu.records import to_plain
from support.tiny import tiny_parties


def test_settings_that_name_a_choice_of_an_absent_extension_are_a_finding(kits, tmp_path, caplog):
    party = tiny_parties()[0]
    options = JoinOptions(kit=open_kit(kits / "a", "party"), server="localhost:1", out=tmp_path)
    role = DryRunParty(options, party)
    config = RunConfig().to_dict()
    config["train"]["sampler"] = "absent"
    role.hello()
    caplog.set_level("INFO", logger="glasu")
    role.welcome(to_plain(WelcomePayload(config=config, roster=("a", "b", "c"), index=0, run="00" * 16)))
    (finding,) = [found for found in role.findings if found.check == "settings"]
    assert finding.level == "bad"
    assert (finding.check, "cannot read them" in finding.text) == ("settings", True)
    assert "train.sampler='absent'" in caplog.text
    assert role.statement()["findings"]
