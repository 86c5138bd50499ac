"""Profiles: named sets of ordinary settings that a run contains in full."""

import pytest

from glasu import ConfigError, RunConfig
from glasu.config import describe_profile
from glasu.profiles import PROFILES
from glasu.records import describe

PROTECTED = sorted(set(PROFILES) - {"off"})


def with_profile(profile, **sections):
    sections = {**sections, "privacy": {"profile": profile, **sections.get("privacy", {})}}
    return RunConfig.from_dict(sections)


@pytest.mark.parametrize("profile", PROTECTED)
def test_every_profile_but_off_hides_sums_from_the_server(profile):
    privacy = with_profile(profile).privacy
    assert (privacy.secure_aggregation, privacy.blind_server) == ("masks", True)


def test_off_changes_nothing_and_is_the_default():
    assert with_profile("off") == RunConfig()
    assert describe_profile(RunConfig()) == ""


@pytest.mark.parametrize("num_layers", [2, 4])
def test_lean_aggregates_at_the_last_layer_only(num_layers):
    config = with_profile("lean", model={"num_layers": num_layers, "aggregation_layers": [num_layers - 1]})
    assert config.model.aggregation_layers == (num_layers - 1,)


def test_lean_narrows_what_parties_exchange_unless_keys_say_otherwise():
    lean, wide = with_profile("lean"), with_profile("lean", model={"hidden": 64}, wire={"precision": "bf16"})
    assert (lean.model.hidden, lean.train.evaluate_every, lean.wire.precision) == (16, 50, "int8")
    assert (wide.model.hidden, wide.train.evaluate_every, wide.wire.precision) == (64, 50, "bf16")


def test_all_keys_that_contradict_a_profile_are_refused_together():
    with pytest.raises(ConfigError) as caught:
        with_profile("lean", model={"aggregation_layers": [1, 3]}, privacy={"blind_server": False})
    assert 'privacy.blind_server=false: privacy.profile="lean" needs true' in str(caught.value)
    assert 'model.aggregation_layers=[1, 3]: privacy.profile="lean" needs [3]; remove the key' in str(caught.value)


def test_all_faults_of_a_run_with_one_release_are_listed_together_and_name_the_profile():
    train = {"backward": "joint", "labels": "a", "party_dropout": 0.2}
    with pytest.raises(ConfigError) as caught:
        with_profile("dp", model={"aggregation_layers": [0, 1]}, train=train)
    said, named = str(caught.value), 'train.release="once" (set by privacy.profile="dp")'
    assert f"model.aggregation_layers=[0, 1]: {named} releases one layer" in said
    assert f"train.labels='a': with {named} every party trains alone" in said
    assert "or remove the profile." in said
    for key in ("backward='joint'", "party_dropout=0.2"):
        assert f"train.{key}: {named} has no rounds of messages; remove it." in said
    with pytest.raises(ConfigError) as caught:
        RunConfig.from_dict({"train": {"release": "once", "backward": "joint"}, "model": {"aggregation_layers": [1]}})
    assert "profile" not in str(caught.value)


def test_a_setting_that_a_profile_made_is_named_with_the_profile():
    masks = 'privacy.secure_aggregation="masks" (set by privacy.profile="lean")'
    with pytest.raises(ConfigError) as caught:
        with_profile("lean", wire={"precision": "fp64"})
    assert f"wire.precision='fp64': {masks} adds integers" in str(caught.value)


@pytest.mark.parametrize("changes", [{}, {"target_epsilon": 8.0}], ids=str)
@pytest.mark.parametrize("multiplier", [0, 0.0])
def test_dp_without_noise_is_refused(multiplier, changes):
    with pytest.raises(ConfigError) as caught:
        with_profile("dp", privacy={"dp_noise_multiplier": multiplier, **changes})
    said = str(caught.value)
    assert 'privacy.dp_noise_multiplier=0.0: privacy.profile="dp" protects released rows with noise' in said
    assert "use a value above 0, or remove the key or the profile." in said
    assert ("target_epsilon=8.0: has no effect" in said) == bool(changes)


@pytest.mark.parametrize("multiplier", [0.001, 0.6, 4.0])
def test_dp_accepts_any_noise(multiplier):
    privacy = with_profile("dp", privacy={"dp_noise_multiplier": multiplier}).privacy
    assert (privacy.dp_noise_multiplier, privacy.adds_noise) == (multiplier, True)


NOISE_KEYS = {"target_epsilon": 16.0, "delta": 1e-6, "dp_clip": 0.5, "dp_clip_probabilities": 0.5}
SUM_KEYS = {"range": 4.0, "allow_two_parties": True}


@pytest.mark.parametrize(
    ("profile", "keys"),
    [("dp", NOISE_KEYS), ("dp", SUM_KEYS), ("dp", NOISE_KEYS | SUM_KEYS), ("server", SUM_KEYS), ("lean", SUM_KEYS)],
    ids=str,
)
def test_a_key_may_depend_on_a_setting_of_the_profile(profile, keys):
    config = with_profile(profile, privacy=keys)
    assert {key: getattr(config.privacy, key) for key in keys} == keys
    assert config.replace(train={"seed": 1}).privacy == config.privacy
    assert with_profile(profile, data={"num_clients": 2}, privacy=SUM_KEYS).data.num_clients == 2


@pytest.mark.parametrize("profile", sorted(set(PROFILES) - {"dp"}))
def test_all_keys_that_have_no_effect_with_a_profile_are_refused_together(profile):
    keys = NOISE_KEYS if profile != "off" else NOISE_KEYS | SUM_KEYS
    with pytest.raises(ConfigError) as caught:
        with_profile(profile, privacy=keys)
    for key, value in keys.items():
        assert f"privacy.{key}={describe(value)}: has no effect without privacy." in str(caught.value)
    assert with_profile(profile).privacy.target_epsilon is None


def test_contradictions_and_keys_without_effect_are_refused_together():
    with pytest.raises(ConfigError) as caught:
        with_profile("server", privacy={"blind_server": False, "dp_clip": 0.5})
    assert 'privacy.blind_server=false: privacy.profile="server" needs true' in str(caught.value)
    assert "privacy.dp_clip=0.5: has no effect without privacy.dp_noise_multiplier" in str(caught.value)


def test_a_key_without_effect_is_listed_with_faults_of_other_sections():
    with pytest.raises(ConfigError) as caught:
        RunConfig.from_dict({"train": {"num_rounds": 0}, "privacy": {"dp_clip": 0.5}})
    assert "train.num_rounds=0" in str(caught.value)
    assert "privacy.dp_clip=0.5" in str(caught.value)


@pytest.mark.parametrize("profile", PROTECTED)
def test_every_profile_needs_masks_because_encryption_protects_less_against_collusion(profile):
    with pytest.raises(ConfigError, match=f"secure_aggregation='ckks': privacy.profile=\"{profile}\" needs 'masks'"):
        with_profile(profile, privacy={"secure_aggregation": "ckks"})


@pytest.mark.parametrize("profile", PROTECTED)
def test_a_copy_of_the_settings_is_equal(profile):
    config = with_profile(profile, data={"name": "cora"})
    assert RunConfig.from_dict(config.to_dict(given=True)) == config
    assert RunConfig.from_dict(config.to_dict(given=True)).digest() == config.digest()
    assert config.replace(train={"seed": 1}).privacy == config.privacy


@pytest.mark.parametrize("profile", PROTECTED)
def test_the_settings_written_out_give_the_same_run(profile):
    written = {}
    for section, key, value in [*PROFILES[profile].list_required(4), *PROFILES[profile].list_suggested()]:
        written.setdefault(section, {})[key] = value
    assert RunConfig.from_dict(written).replace(privacy={"profile": profile}) == with_profile(profile)


@pytest.mark.parametrize("profile", PROTECTED)
def test_the_settings_of_a_profile_are_printed_in_full(profile):
    line = describe_profile(with_profile(profile))
    for section, key, _ in [*PROFILES[profile].list_required(4), *PROFILES[profile].list_suggested()]:
        assert f"{section}.{key} = " in line


@pytest.mark.parametrize("profile", PROTECTED)
def test_no_profile_leaves_a_race_to_the_server(profile):
    from glasu.config import list_candidates
    from glasu.data.presets import Homophily, Situation, order_candidates

    config = with_profile(profile)
    assert len(order_candidates(config, [Situation(True, True, Homophily.HIGH)] * 3)) == 1
    assert all(each.privacy == config.privacy for each in list_candidates(config))
