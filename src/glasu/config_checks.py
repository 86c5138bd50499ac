"""The rules that concern several sections of the settings.

RunConfig applies all of them. Each check yields its faults, one sentence each, and one error lists them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from glasu import registry
from glasu.config_sections import ConfigSections, ModelConfig, quote, reads_whole_graph
from glasu.errors import ConfigError
from glasu.profiles import Profile
from glasu.records import describe

# In a hidden sum, the server adds the parties' integers but cannot read those of a single party.
FEWEST_LEVELS = 16  # minimum number of values that an integer of one party can have; fewer would round too coarsely
FEWEST_SUMMED = 3  # minimum number of parties in a hidden sum; with two, each computes the other's values from the sum


class MethodRules(Protocol):
    """What the rules ask about `train.method` (`glasu.data.methods.Method`)."""

    @property
    def averages(self) -> bool: ...

    @property
    def smooths(self) -> bool: ...

    def prescribes(self, section: str, key: str) -> bool: ...


def check_sections(config: ConfigSections) -> None:
    """Raise ConfigError with all faults if settings of different sections do not fit together."""
    if faults := list(_list_faults(config)):
        raise ConfigError(" ".join(faults))


def _list_faults(config: ConfigSections) -> Iterator[str]:
    """Yield one sentence per fault."""
    model, train, privacy = config.model, config.train, config.privacy
    method: MethodRules = registry.load("method", train.method)
    releases_once = train.releases_once and not method.prescribes("train", "release")  # a method can replace "once"
    yield from _check_once(config) if releases_once else _check_rounds(config, method)
    if model.owner_layers and train.label_owner is None and not method.prescribes("train", "labels"):
        yield (
            f"model.owner_layers={model.owner_layers}: the layers belong to the only party with labels, but "
            'train.labels="all"; name that party in train.labels, or remove the key.'
        )
    if _has_hidden_sums(config, method):
        yield from _check_hiding(config, method)
    if privacy.label_epsilon is not None and not registry.load("task", train.task).has_classes:
        yield (
            f'privacy.label_epsilon={describe(privacy.label_epsilon)}: train.task="{train.task}" has no classes to '
            "draw from; remove it."
        )
    if method.smooths or privacy.adds_noise:
        yield from _check_examples(config, method)
    if _has_noisy_rows(config, method):
        yield from _check_noise(config, method)
    if not privacy.release_probabilities and not train.releases_once:
        yield (
            f"privacy.release_probabilities={describe(False)}: is possible only with train.release = "
            '"once", where every party has a classifier; remove it.'
        )


def _check_rounds(config: ConfigSections, method: MethodRules) -> Iterator[str]:
    """Refuse settings of rounds that contradict each other, masks, ckks or noise."""
    model, train = config.model, config.train
    silent = not model.aggregation_layers
    if not (silent or train.releases_once or model.aggregation_layers[-1] == model.num_layers - 1):
        yield model.describe_layer_fault()
    if silent and train.label_owner is not None and not method.prescribes("model", "aggregation_layers"):
        yield (
            f"train.labels={train.labels!r}: without aggregation layers the other parties get no gradient; "
            'add an aggregation layer, or use labels = "all".'
        )
    if train.label_owner is not None and _has_noisy_rows(config, method):
        noise = _name(config, "privacy", "dp_noise_multiplier")
        yield (
            f"train.labels={train.labels!r}: with {noise} the label owner would release node sets without "
            'protection; use labels = "all".'
        )
    if silent and train.has_exact_gradients and not method.prescribes("train", "backward"):
        yield (
            'train.backward="joint": without aggregation layers there is no server to send gradients to; '
            'use backward = "local".'
        )
    if train.party_dropout:
        yield from _check_dropout(config, method)
    if train.warm_start and not method.prescribes("train", "warm_start"):
        yield from _check_warm_start(config)
    if config.wire.feedback:
        yield from _check_feedback(config, method)


def _check_dropout(config: ConfigSections, method: MethodRules) -> Iterator[str]:
    """Refuse rounds with absent parties if they would not work, or would weaken a protection."""
    model, num_clients = config.model, config.data.num_clients
    named = f"train.party_dropout={config.train.party_dropout}"
    if not model.aggregation_layers:
        yield f"{named}: parties that train alone have no common rounds; remove it."
    elif not _allows_absence(model):
        yield (
            f'{named}: with model.aggregation="{model.aggregation}" the columns of an absent party would '
            f"be missing; use aggregation = {_list_aggregations_with_absence()}."
        )
    if _has_hidden_sums(config, method) and num_clients <= FEWEST_SUMMED:
        hiding = _name(config, "privacy", "secure_aggregation")
        yield (
            f"{named}: with {hiding} at least {FEWEST_SUMMED} parties contribute "
            f"to every sum, but data.num_clients={num_clients}; remove it, or use more parties."
        )
    if _has_noisy_rows(config, method):
        noise = _name(config, "privacy", "dp_noise_multiplier")
        yield (
            f"{named}: after the last round the parties send metrics of subsets of "
            f"the parties, but with {noise} only noisy rows may be released; remove it."
        )


def _check_once(config: ConfigSections) -> Iterator[str]:
    """Refuse settings that a run with `train.release = "once"` cannot use."""
    model, train, named = config.model, config.train, _name(config, "train", "release")
    layers, last = model.aggregation_layers, model.num_layers - 1
    chooses = registry.load("preset", train.preset).chooses_layer
    left_open = chooses and "aggregation_layers" not in model.given
    if not left_open and not (len(layers) == 1 and layers[0] < last):
        yield (
            f"model.aggregation_layers={list(layers)}: {named} releases one layer and trains the layers above it; "
            f"use one layer of 0..{last - 1}, for example [{find_release_layer(model.num_layers)}]."
            if last
            else f"model.num_layers=1: {named} needs a layer to release and one above it; use 2 or more."
        )
    if train.label_owner is not None:
        other = "remove the profile" if _find_profile(config, "train", "release") else 'release = "rounds"'
        yield (
            f"train.labels={train.labels!r}: with {named} every party trains alone and needs labels; use labels = "
            f'"all", or {other}.'
        )
    unused = {
        "train.backward": (train.backward, "local"),
        "train.party_dropout": (train.party_dropout, 0.0),
        "train.warm_start": (train.warm_start, 0),
        "wire.feedback": (config.wire.feedback, False),
    }
    for key, (value, default) in unused.items():
        if value != default:
            yield f"{key}={describe(value)}: {named} has no rounds of messages; remove it."


def _check_examples(config: ConfigSections, method: MethodRules) -> Iterator[str]:
    """Refuse a task whose examples are not nodes, because every row must belong to one node."""
    if registry.load("task", config.train.task).examples_are_nodes:
        return
    named = f'train.task="{config.train.task}": its examples are not nodes, and'
    if method.smooths:
        yield f'{named} train.method="{config.train.method}" propagates the predictions of nodes; use another method.'
    if config.privacy.adds_noise:
        yield (
            f"{named} privacy.dp_noise_multiplier={config.privacy.dp_noise_multiplier} counts the releases of each "
            "node; remove it."
        )


def _check_noise(config: ConfigSections, method: MethodRules) -> Iterator[str]:
    """Refuse settings with which a party would send noisy rows and also other values that depend on its data."""
    train, noise = config.train, _name(config, "privacy", "dp_noise_multiplier")
    if not registry.load("task", train.task).has_classes:
        yield (
            f'train.task="{train.task}": parties compare a digest of the mean and deviation of the labels, and '
            f"with {noise} only noisy rows may be released; use a task with classes."
        )
    if method.averages:
        yield (
            f'train.method="{train.method}": with {noise} only noisy rows may be released, no metrics; use '
            'train.release = "once".'
        )
    if _agrees_on_lower_layers(config):
        yield (
            f'train.sampler="{train.sampler}": with {noise} the sampled node sets would be released without '
            f"protection, and they reveal edges; use sampler = {_list_samplers_without_agreement()}, or one "
            "aggregation layer."
        )
    if not train.releases_once and train.sampled_evaluation:
        yield f"train.sampled_evaluation=true: with {noise} the test must be exact; remove it."


def _check_feedback(config: ConfigSections, method: MethodRules) -> Iterator[str]:
    """Refuse error feedback if rows change between rounds, the server cannot add changes, or rows are protected."""
    train, named = config.train, "wire.feedback=true"
    if _has_hidden_sums(config, method):
        yield f"{named}: {_name(config, 'privacy', 'secure_aggregation')} sends no changes; remove one of the two."
    if _has_noisy_rows(config, method):
        yield (
            f"{named}: with {_name(config, 'privacy', 'dp_noise_multiplier')} the change that is sent for a row would "
            "contain the error of its last release, and this error depends on clean rows; remove it."
        )
    if not config.model.aggregation_layers:
        return
    if not (train.sampler == "auto" or reads_whole_graph(train.sampler)) or train.batch_size not in ("auto", 0):
        others = quote(registry.select("sampler", reads_whole_graph=True))
        yield (
            f"{named}: sends each row as the change since its last release, so every round must use the same rows, but "
            f"train.sampler={train.sampler!r} with train.batch_size={train.batch_size!r} draws different rows; use "
            f"sampler = {others} and batch_size = 0, or remove wire.feedback."
        )
    if not _is_mean(config.model):
        yield (
            f'{named}: the server adds changes, and model.aggregation="{config.model.aggregation}" is not a mean; '
            f"use aggregation = {_list_means()}."
        )
    if train.party_dropout:
        yield (
            f"{named}: the mean over the parties that are present does not follow from changes; remove "
            f"train.party_dropout={train.party_dropout}."
        )


def _check_hiding(config: ConfigSections, method: MethodRules) -> Iterator[str]:
    """Refuse settings with which a hidden sum would protect no party, or the parties could not use it."""
    train, wire, hiding = config.train, config.wire, _name(config, "privacy", "secure_aggregation")
    num_clients = config.data.num_clients
    precision = registry.load("encoding", wire.precision)
    if not precision.can_be_hidden:
        yield (
            f"wire.precision={wire.precision!r}: {hiding} adds integers, but this precision sends none; use "
            f"precision = {quote(registry.select('encoding', can_be_hidden=True))}."
        )
    elif (levels := precision.count_levels(num_clients)) < FEWEST_LEVELS:
        yield (
            f'wire.precision="{wire.precision}": with {hiding} each of {num_clients} parties has {levels} levels, '
            f"and {FEWEST_LEVELS} are needed; use a higher precision."
        )
    if not _is_mean(config.model):
        yield (
            f'model.aggregation="{config.model.aggregation}": {hiding} hides a party in a sum, but here its columns '
            f"are sent separately; use aggregation = {_list_means()}."
        )
    if _agrees_on_lower_layers(config):
        yield (
            f'train.sampler="{train.sampler}": with {hiding} the agreed node sets of lower layers would still '
            f"reveal edges to the server; use sampler = {_list_samplers_without_agreement()}, or one aggregation "
            "layer."
        )
    fewest = 2 if config.privacy.allow_two_parties else FEWEST_SUMMED
    if num_clients < fewest:
        remedy = "; use three parties or more, or allow this with privacy.allow_two_parties = true."
        yield (
            f"data.num_clients={num_clients}: {hiding} hides nothing here: with two parties, each can compute the "
            f"values of the other from the mean{remedy if num_clients == 2 else '; use three parties or more.'}"
        )
    if error := config.privacy.way_to_hide.find_error(num_clients):
        ways = registry.select("secure aggregation", hides_parts=True)
        others = quote(way for way in ways if not registry.load("secure aggregation", way).find_error(num_clients))
        yield f"data.num_clients={num_clients}: with {hiding} {error}; use {others}."
    if method.smooths:
        others = quote(registry.select("method", averages=True, smooths=False))
        yield (
            f'train.method="{train.method}": with {hiding} the parties must know who contributes, and here a party '
            f"without edges contributes nothing; use method = {others}."
        )


def _check_warm_start(config: ConfigSections) -> Iterator[str]:
    """Refuse a warm start if a party cannot train alone, or has no common rounds to prepare."""
    named = f"train.warm_start={config.train.warm_start}"
    if not config.model.aggregation_layers:
        yield f"{named}: parties that train alone have no common rounds to prepare; remove it."
        return
    if config.train.label_owner is not None:
        yield (
            f"{named}: with train.labels={config.train.labels!r} the other parties have no labels to train alone; "
            'remove it, or use labels = "all".'
        )
    if not _allows_absence(config.model):
        yield (
            f'{named}: with model.aggregation="{config.model.aggregation}" a classifier reads the representations of '
            "all parties, so no party can train alone; remove it, or use aggregation = "
            f"{_list_aggregations_with_absence()}."
        )


def _name(config: ConfigSections, section: str, key: str) -> str:
    """Name a setting and its value in an error, and the profile that set it."""
    value = getattr(getattr(config, section), key)
    shown = f'"{value}"' if isinstance(value, str) else str(value)
    profile = _find_profile(config, section, key)
    return f"{section}.{key}={shown}" + (f' (set by privacy.profile="{profile}")' if profile else "")


def _find_profile(config: ConfigSections, section: str, key: str) -> str | None:
    """Return the name of the profile that set a key to its value; None if no profile did."""
    profile: Profile = registry.load("profile", config.privacy.profile)
    return config.privacy.profile if profile.sets(section, key, getattr(getattr(config, section), key)) else None


def _has_hidden_sums(config: ConfigSections, method: MethodRules) -> bool:
    """Return whether the parties send parts of hidden sums."""
    return config.privacy.hides_parts and (bool(config.model.aggregation_layers) or method.averages)


def _has_noisy_rows(config: ConfigSections, method: MethodRules) -> bool:
    """Return whether the parties send noisy rows."""
    aggregates = config.model.aggregation_layers and not method.prescribes("model", "aggregation_layers")
    return config.privacy.adds_noise and (bool(aggregates) or method.averages)


def _agrees_on_lower_layers(config: ConfigSections) -> bool:
    """Return whether the parties agree on sampled node sets of layers below the last layer that aggregates."""
    train = config.train
    draws = train.sampler != "auto" and registry.load("sampler", train.sampler).agrees_on_node_sets
    return draws and not train.releases_once and len(config.model.aggregation_layers) > 1


def _is_mean(model: ModelConfig) -> bool:
    return bool(registry.load("aggregation", model.aggregation).is_mean)


def _list_means() -> str:
    return quote(registry.select("aggregation", is_mean=True))


def _allows_absence(model: ModelConfig) -> bool:
    return bool(registry.load("aggregation", model.aggregation).allows_absence)


def _list_aggregations_with_absence() -> str:
    return quote(registry.select("aggregation", allows_absence=True))


def _list_samplers_without_agreement() -> str:
    return quote(registry.select("sampler", agrees_on_node_sets=False))


def find_release_layer(num_layers: int) -> int:
    """Return the layer that `train.release = "once"` releases by default: the middle layer."""
    return max(0, num_layers // 2 - 1)
