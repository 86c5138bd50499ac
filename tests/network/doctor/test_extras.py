"""A missing extra is a finding that names the command to install it, and no other finding hides it."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path

from glasu.network.doctor.machine import check_extras, check_group
from support.masks import use_encryption
from support.tiny import tiny

SUPPORT = Path(__file__).parents[2]
CHILD = """
import json, logging, sys
from importlib.abc import MetaPathFinder
from pathlib import Path

kits, missing = Path(sys.argv[1]), sys.argv[2:]

class Missing(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.partition(".")[0] in missing:
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Missing())
from glasu.network.doctor.machine import check_group
from glasu.network.doctor.party import DryRunParty
from glasu.network.handshake import WelcomePayload
from glasu.network.options import JoinOptions
from glasu.pki.kit import open_kit
from support.masks import use_encryption
from support.tiny import tiny

def examine(config, party):
    options = JoinOptions(kit=open_kit(kits / "a"), server="localhost:1", out=kits / "new")
    dry = DryRunParty(options, party)
    dry.hello()
    dry.accept(WelcomePayload(config=config.to_dict(), roster=("a", "b", "c"), index=0, run="00"))
    return [(finding.check, finding.level, finding.text) for finding in dry.findings]

config, parties = tiny()
noisy, _ = tiny(dp_noise_multiplier=1.0)
group = check_group(logging.getLogger("test"))
found = {
    "psi": [(group.check, group.level, group.text)],
    "ckks": examine(use_encryption(config), parties[0]),
    "dp": examine(noisy, parties[0]),
}
print(json.dumps(found))
"""


def examine_without(kits, *missing):
    """Return the findings of a party in a process that cannot import some packages, by extra."""
    command = [sys.executable, "-c", CHILD, str(kits), *missing]
    paths = ":".join([str(SUPPORT), *filter(None, sys.path)])
    finished = subprocess.run(
        command, capture_output=True, text=True, check=False, env={"PYTHONPATH": paths, "PATH": "/usr/bin:/bin"}
    )
    assert finished.returncode == 0, finished.stderr
    found = json.loads(finished.stdout)
    return {
        extra: {check: (level, said) for check, level, said in findings if check in ("extra", "settings")}
        for extra, findings in found.items()
    }


def test_an_installed_extra_is_good():
    log = logging.getLogger("test")
    found = [check_group(log), *check_extras(use_encryption(tiny(dp_noise_multiplier=1.0)[0]), log)]
    assert [(finding.check, finding.level) for finding in found] == [("extra", "good")] * 3
    assert check_extras(tiny()[0], log) == []


def test_a_missing_extra_is_a_finding_that_names_it(kits):
    found = examine_without(kits, "tenseal", "rbcl", "dp_accounting")
    for extra, package in (("psi", "rbcl"), ("ckks", "tenseal"), ("dp", "dp-accounting")):
        level, said = found[extra]["extra"]
        assert level == "bad"
        assert f"the package {package}, which is not installed; pip install 'glasu[{extra}]'" in said
        assert "settings" not in found[extra]  # the data would be blamed
