"""A policy refuses releases before they are entered, and settings before a run begins."""

from __future__ import annotations

from typing import get_args

import numpy as np
import pytest

from glasu.errors import ConfigError
from glasu.privacy.blinding import BLINDED
from glasu.privacy.encryption import CKKS_NAME
from glasu.privacy.ledger import Ledger
from glasu.privacy.masking import name_masks
from glasu.privacy.noise import Mechanism, RowNoise, ScoreRepair
from glasu.privacy.policy import Policy, PolicyError, PolicyRule, ProtectionName
from glasu.privacy.release import Clip
from glasu.protocol.masked import PROOF_PROTECTION
from glasu.runtime.policy_file import find_policies, find_policy, read_policy
from glasu.wire.message_key import Key, Phase
from support.ledgers import Lines

KEY = Key(bytes(12), Phase.TRAINING, 0, 0, 1)


def guard(**rules) -> Ledger:
    return Ledger(Lines(), [PolicyRule(Policy(**rules), "policy.toml")])


def enter(ledger: Ledger, kind: str = "representation", key: Key = KEY, rows: int = 5, **more) -> None:
    ledger.record(kind, key, lambda: (bytes(4 * rows),), size=4 * rows, rows=rows, **more)


def assert_refused(ledger: Ledger, rule: str, **release) -> None:
    before = ledger.head
    with pytest.raises(PolicyError, match=rule):
        enter(ledger, **release)
    assert ledger.head == before


def test_a_forbidden_kind_does_not_leave_and_the_error_names_the_rule():
    ledger = guard(forbid=("gradient",))
    enter(ledger)
    assert_refused(ledger, r"policy.toml: forbid = \['gradient'\].*nothing was sent", kind="gradient")


def test_a_release_without_content_is_allowed():
    ledger = guard(forbid=("metrics",), min_rows=3)
    enter(ledger, "metrics", rows=0)
    assert_refused(ledger, "forbid", kind="metrics", rows=1)


def test_a_required_protection_must_be_among_those_of_the_release():
    ledger = guard(require={"representation": ("masks", "noise")})
    enter(ledger, protection="clip+noise+masks")
    enter(ledger, "losses")
    found = r"require.representation = \['masks', 'noise'\]: its protection is 'clip\+masks'"
    assert_refused(ledger, found, protection="clip+masks")
    assert_refused(ledger, "require.representation", protection="unmasks+noise")


def test_the_number_of_rows_of_a_tensor_is_bounded():
    ledger = guard(min_rows=3, max_rows=6)
    enter(ledger, rows=3)
    enter(ledger, rows=6)
    enter(ledger, "losses", rows=1)
    assert_refused(ledger, "min_rows = 3: it has 2 rows", rows=2)
    assert_refused(ledger, "max_rows = 6: it has 7 rows", rows=7)


def test_an_evaluation_counts_once_and_a_redone_one_again():
    ledger = guard(max_evaluations=2)
    first, redone = KEY._replace(phase=Phase.EVALUATION), KEY._replace(phase=Phase.EVALUATION, attempt=1)
    for layer in (1, 3):
        enter(ledger, key=first.at(layer))
    enter(ledger, key=redone)
    enter(ledger)  # training is no evaluation
    assert_refused(ledger, "max_evaluations = 2: this would be evaluation 3", key=KEY._replace(phase=Phase.PREDICTION))
    said = "a prediction has no settings to change, and limits also count the releases and evaluations of the training"
    assert_refused(ledger, said, key=KEY._replace(phase=Phase.PREDICTION))
    enter(ledger, "metrics", key=first._replace(round=9), rows=1)


def test_releases_of_a_row_are_counted_by_kind_and_layer():
    ledger = guard(max_releases_per_row=2)
    enter(ledger, nodes=np.array([0, 1, 2, 3, 4]))
    enter(ledger, nodes=np.array([3, 4, 5, 6, 7]))
    assert_refused(ledger, "max_releases_per_row = 2: one of its rows was released 2 times", nodes=np.array([2, 4, 8]))
    enter(ledger, nodes=np.array([0, 1, 9]))
    enter(ledger, key=KEY.at(3), nodes=np.array([3, 4]))
    enter(ledger, "probabilities", nodes=np.array([3, 4]))


def test_a_release_of_unknown_nodes_counts_for_every_row():
    ledger = guard(max_releases_per_row=2)
    enter(ledger)
    enter(ledger, nodes=np.array([0, 1]))
    assert_refused(ledger, "max_releases_per_row", nodes=np.array([1, 2]))
    enter(ledger, nodes=np.array([2, 3]))
    assert_refused(ledger, "max_releases_per_row")


def test_limits_count_the_entries_of_earlier_processes():
    earlier, policy = Lines(), Policy(max_evaluations=1)
    enter(Ledger(earlier), key=KEY._replace(phase=Phase.EVALUATION))
    rule = PolicyRule(policy)
    ledger = Ledger(Lines(), [rule])
    for record in earlier.read():
        ledger.count_record(record)
    assert_refused(ledger, "max_evaluations", key=KEY._replace(phase=Phase.EVALUATION, round=1))


def test_settings_that_lead_to_a_forbidden_release_are_refused():
    policy = Policy(forbid=("gradient",), require={"representation": ("masks",)}, max_evaluations=3)
    policy.check_settings({"representation": "masks", "losses": "none"}, 3)
    with pytest.raises(PolicyError, match="forbid"):
        policy.check_settings({"gradient": "masks"})
    with pytest.raises(PolicyError, match=r"require\.representation"):
        policy.check_settings({"representation": "none"})
    with pytest.raises(
        PolicyError, match="max_evaluations = 3: the run needs at least 4 evaluations, including its test"
    ):
        policy.check_settings({}, 4)


def test_a_policy_can_require_every_protection_that_a_ledger_records():
    noise = RowNoise(Mechanism(1.0, 2.0), "representation", bytes(32))
    parts = [Clip(1.0), noise, ScoreRepair(lambda scores: scores)]
    names = [part.name for part in parts] + [name_masks(blind=True), CKKS_NAME, PROOF_PROTECTION, BLINDED]
    recorded = {part for name in names for part in name.split("+") if "=" not in part}
    assert recorded | {"sealed", "signed"} == set(get_args(ProtectionName))


@pytest.mark.parametrize(
    ("text", "faults"),
    [
        ('forbid = ["gradients"]', ["forbid[0]='gradients'"]),
        ("min_rows = -1\nmax_rows = 1.5\nmax_ids = true", ["min_rows=-1", "max_rows=1.5", "max_ids=true"]),
        ("forbidden = []\nmin_row = 3", ["unknown key 'forbidden'", "unknown key 'min_row'"]),
        (
            'forbid = ["x"]\n[require]\ngradients = ["masks"]\nchange = ["masks", "masked"]',
            [
                "forbid[0]='x'",
                "require: has the unknown key 'gradients'; known keys are representation, change, gradient, ",
                "require.change[1]='masked': must be \"clip\" or ",
            ],
        ),
        ('require = "masks"', ["require='masks'"]),
        ("forbid = [", ["is not valid TOML"]),
    ],
)
def test_a_policy_file_is_read_strictly_and_all_faults_are_listed(tmp_path, text, faults):
    path = tmp_path / "policy.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_policy(path)
    assert all(fault in str(caught.value) for fault in (str(path), *faults)), caught.value


def test_a_party_has_one_policy_beside_its_data_or_in_its_kit(tmp_path):
    data, kit = tmp_path / "data", tmp_path / "kit"
    for folder in (data, kit):
        folder.mkdir()
    assert find_policy(None, data, kit) is None
    (kit / "policy.toml").write_text("min_rows = 2")
    assert find_policy(None, data, kit).policy == Policy(min_rows=2)
    (data / "policy.toml").write_text("min_rows = 3")
    with pytest.raises(ConfigError, match="a party has one policy"):
        find_policy(None, data, kit)
    assert find_policy(kit / "policy.toml", data, kit).policy == Policy(min_rows=2)
    with pytest.raises(ConfigError, match="cannot be read"):
        find_policy(tmp_path / "missing.toml", data)
    assert set(find_policies(None, [data, tmp_path], ["a", "b"])) == {"a"}
    assert set(find_policies(kit / "policy.toml", [], ["a", "b"])) == {"a", "b"}
