"""RunConfig and its parts: read from TOML, frozen, and valid once constructed."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import hashlib
import json
import tomllib
import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from glasu import registry
from glasu.errors import ConfigError
from glasu.profiles import Profile
from glasu.records import Bounds, Checked, Choice, RecordError, describe, parse_toml

Part = typing.TypeVar("Part", bound=Checked)
Split = Literal["paper", "public"] | tuple[float, float, float]
Missing = Literal["refuse", "zero", "mean"]
EVERY_PARTY = "all"  # value of `train.labels` if no party is the only one with labels
MAX_COUNT = 2**31 - 1  # counts and index arrays are sent as 32-bit integers
Count = Annotated[int, Bounds(1, MAX_COUNT)]
Natural = Annotated[int, Bounds(0, MAX_COUNT)]
Seed = Annotated[int, Bounds(0, 2**63 - 1)]
Positive = Annotated[float, Bounds(0, ends="(]")]
NoiseMultiplier = Annotated[float, Bounds(0, 1000)]
LEAST_NOISE = 0.001
# Keys of [privacy] that have an effect only with noise.
NOISE_ONLY = (
    "dp_clip",
    "dp_noise_multiplier_gradients",
    "dp_clip_gradients",
    "dp_noise_multiplier_probabilities",
    "dp_clip_probabilities",
    "delta",
    "target_epsilon",
)
WHERE = ("root", "parties")  # keys of [data] that locate the data on this machine; they do not identify it
LEFT_OPEN = "keys that train.preset decides"
MAX_LAYERS = 1000
FEWEST_LEVELS = 16  # minimum number of levels of one party's integers in a hidden sum; fewer would round too coarsely
FEWEST_SUMMED = 3  # minimum number of parties in a hidden sum: the sum of two reveals each to the other
SMALL_GRAPH = 30_000  # nodes up to which "auto" means the full graph
SAMPLING_ONLY = ("sampling", "blocks", "sampled_evaluation")  # keys of [train] that only a sampler that samples reads


class Override(typing.TypedDict):
    """A setting that the method or the sampler replaced."""

    requested: Any
    used: Any


@dataclass(frozen=True, kw_only=True)
class DataConfig(Checked):
    """The data set, and how one graph is divided among the clients."""

    section = "data"
    name: str = ""
    parties: tuple[str, ...] = ()  # a folder per party, instead of a name
    root: str | None = None  # None: GLASU_DATA_ROOT, else "data"
    num_clients: Count = 3  # M
    edge_fraction: Annotated[float, Bounds(0, 1, "it is the share of the edges that each client gets")] = 0.8
    partition: Annotated[str, Choice("partition")] = "features"
    # Dirichlet parameter: "importance" draws the parties' shares of columns with it, and "edges" those of edges
    concentration: Annotated[float, Bounds(0.001, 1_000_000, "small values give unequal shares")] = 1.0
    # for "correlation": the share of columns that are distributed over all clients, away from correlated columns
    correlation: Annotated[float, Bounds(0, 1)] = 0.5
    split: Split = "paper"
    seed: Seed | None = None  # None: train.seed
    missing: Missing = "refuse"
    features: Literal["auto", "none"] = "auto"  # how each party prepares its feature columns
    num_nodes: Count = 10_000  # this and the next three: sizes of the "synthetic" graph
    average_degree: Annotated[float, Bounds(0, hint="0 means no edges")] = 10.0
    num_features: Count = 96
    num_classes: Annotated[int, Bounds(2, MAX_COUNT)] = 5

    def _check(self) -> None:
        if self.name and self.parties:
            raise ConfigError(
                f"data.name={self.name!r} and data.parties={list(self.parties)}: only one of them can name the data; "
                "remove the other."
            )
        most = "must be less than data.num_nodes, because a node has at most one edge to each other node."
        self._need("average_degree", self.average_degree <= max(self.num_nodes - 1, 10), most)  # 10: the default
        chosen = registry.load("partition", self.partition)
        for key in ("concentration", "correlation"):
            used = key in chosen.keys or getattr(self, key) == getattr(type(self), key)
            self._need(key, used, f"has no effect with data.partition={self.partition!r}; remove it.")
        if isinstance(self.split, tuple):
            fractions = min(self.split) >= 0 and self.split[0] > 0 and sum(self.split) <= 1 + 1e-9
            rule = "must be three shares (train, validation, test) with a sum of at most 1 and a positive first one."
            self._need("split", fractions, rule)


@dataclass(frozen=True, kw_only=True)
class ModelConfig(Checked):
    """The split graph neural network."""

    section = "model"
    backbone: Annotated[str, Choice("backbone")] = "gcnii"
    num_layers: Annotated[int, Bounds(1, MAX_LAYERS)] = 4  # L
    hidden: Count = 64
    aggregation: Annotated[str, Choice("aggregation")] = "mean"
    aggregation_layers: tuple[int, ...] = (1, 3)  # I, so K = 2
    dropout: Annotated[float, Bounds(0, 1, "0 turns dropout off", ends="[)")] = 0.5
    normalization: Literal["none", "layer"] = "none"
    input_scale: Literal["auto"] | Annotated[float, Bounds(0, hint='or "auto"', ends="(]")] = "auto"
    alpha: Annotated[float, Bounds(0, 1)] = 0.1  # gcnii: the share of the initial representation
    theta: Positive = 0.5  # gcnii: the paper's lambda
    heads: Count = 4  # gat
    residual: bool = False  # every layer adds its input at the same rows, times a separate weight matrix
    owner_layers: Annotated[int, Bounds(0, MAX_LAYERS)] = 0  # dense layers of the label owner before its classifier

    def _check(self) -> None:
        layers = self.aggregation_layers
        self.need_layers(list(layers) == sorted(set(layers)) and (not layers or layers[0] >= 0))
        self.need_layers(not layers or layers[-1] < self.num_layers)
        registry.load("backbone", self.backbone).check(self)

    def need_layers(self, condition: bool) -> None:
        """Raise the error about aggregation layers unless the condition holds."""
        last = self.num_layers - 1
        if not condition:
            raise ConfigError(
                f"model.aggregation_layers={list(self.aggregation_layers)}: must be increasing, lie in 0..{last} and "
                f"end with {last}, because all clients classify the same H[L]. To train without communication, use []."
            )


@dataclass(frozen=True, kw_only=True)
class TrainConfig(Checked):
    """The training: method, sampling, labels, optimizer and evaluation."""

    section = "train"
    preset: Annotated[str, Choice("preset")] = "auto"  # suggests values for keys that are not set
    method: Annotated[str, Choice("method")] = "glasu"
    num_rounds: Count = 100  # T
    num_local_steps: Count = 4  # Q
    batch_size: Literal["auto"] | Annotated[int, Bounds(0, MAX_COUNT, "0 means all training nodes")] = "auto"
    sampler: Literal["auto"] | Annotated[str, Choice("sampler")] = "auto"
    sampling: Literal["node", "layer"] = "node"
    blocks: Literal["drawn", "induced"] = "drawn"
    fanout: Count = 3
    max_nodes: Annotated[int, Bounds(0, MAX_COUNT, "0 means no limit")] = 0  # maximum size of S_m[l]
    backward: Literal["local", "joint"] = "local"
    # "once": parties train alone, release one representation, and train their upper layers on the fixed aggregate
    release: Literal["rounds", "once"] = "rounds"
    warm_start: Natural = 0  # local steps of every party alone, before round 0 and without messages
    party_dropout: Annotated[float, Bounds(0, 1, "0 means that all parties contribute to every round", ends="[)")] = 0.0
    labels: str = EVERY_PARTY  # or the name of the one party that has them
    task: Annotated[str, Choice("task")] = "multiclass"
    class_weights: Literal["none", "balanced"] | tuple[float, ...] = "none"  # class weights of the loss
    optimizer: Annotated[str, Choice("optimizer")] = "adam"
    learning_rate: Positive = 0.005
    weight_decay: Annotated[float, Bounds(0)] = 0.001
    momentum: Annotated[float, Bounds(0, 1, ends="[)")] = 0.0  # sgd only
    schedule: Annotated[str, Choice("schedule")] = "constant"
    patience: Natural = 4  # evaluations without improvement before the run stops; 0: never
    stop_at: Annotated[float, Bounds(0, 1, "it is a share, and 0 means never")] = 0.0  # stop at this validation score
    seed: Seed = 0
    evaluate_every: Count = 10
    evaluate_nodes: Natural = 0  # 0: all validation nodes, else a fixed random subset
    sampled_evaluation: bool = False
    checkpoint_every: Annotated[int, Bounds(0, MAX_COUNT, "0 means never")] = 1
    prefetch: Annotated[int, Bounds(0, 1024, "at most 1024 rounds fit into one message")] = 16

    @property
    def label_owner(self) -> str | None:
        """The name of the only party with labels; None if all parties have them."""
        return None if self.labels == EVERY_PARTY else self.labels

    @property
    def has_exact_gradients(self) -> bool:
        """Whether gradients are propagated through the server (`backward = "joint"`)."""
        return self.backward == "joint"

    @property
    def releases_once(self) -> bool:
        """Whether the parties train alone and release one representation (`release = "once"`)."""
        return self.release == "once"

    def _check(self) -> None:
        method = registry.load("method", self.method)
        whole_graph = f'train.sampler="{self.sampler}" reads all nodes'
        if self.max_nodes:
            fits = self.batch_size == "auto" or 0 < self.batch_size <= self.max_nodes
            rule = f"every node set contains the batch, and train.batch_size is {self.batch_size!r}; "
            self._need("max_nodes", fits, rule + "use a smaller batch (0 means all training nodes) or a higher limit.")
            others = quote(registry.select("sampler", reads_whole_graph=False))
            self._need("max_nodes", not reads_whole_graph(self.sampler), f"{whole_graph}; use {others}.")
        if reads_whole_graph(self.sampler):
            rule = f"has no effect, because {whole_graph}; remove it, or use another sampler."
            for key in SAMPLING_ONLY:
                self._need(key, getattr(self, key) == getattr(type(self), key), rule)
        self._need("labels", self.labels != "", 'must be "all" or the name of the party that has the labels.')
        everywhere = f'train.method="{self.method}" needs labels at every party.'
        self._need("labels", self.label_owner is None or not method.needs_all_labels, everywhere)
        if isinstance(self.class_weights, tuple):
            positive = min(self.class_weights, default=0) > 0
            self._need("class_weights", positive, "must be a list of numbers above 0, one per class.")
        if self.class_weights != "none":
            rule = f'train.task="{self.task}" has no class weights; remove them, or use a task with one class per node.'
            self._need("class_weights", registry.load("task", self.task).takes_class_weights, rule)


@dataclass(frozen=True, kw_only=True)
class WireConfig(Checked):
    """The encoding and size of tensor messages."""

    section = "wire"
    precision: Annotated[str, Choice("encoding")] = "fp32"  # fp64: compute and send float64, for exact checks
    chunk_rows: Count = 4096  # rows per message; affects the memory of the server, not the result
    feedback: bool = False  # whether rows that are sent repeatedly are sent as changes, in `feedback_bits` bits
    feedback_bits: Annotated[int, Bounds(2, 32)] = 4

    def _check(self) -> None:
        used = self.feedback or self.feedback_bits == type(self).feedback_bits
        self._need("feedback_bits", used, "has no effect without wire.feedback = true; remove it.")


@dataclass(frozen=True, kw_only=True)
class PrivacyConfig(Checked):
    """Protection of the tensors that leave a client."""

    section = "privacy"
    profile: Annotated[str, Choice("profile")] = "off"  # a set of settings; see glasu.profiles
    secure_aggregation: Annotated[str, Choice("secure aggregation")] = "none"
    dp_noise_multiplier: NoiseMultiplier = 0.0  # deviation of the noise of a released row, in multiples of its clip
    dp_clip: Positive = 1.0  # maximum L2 norm of a released row
    dp_noise_multiplier_gradients: NoiseMultiplier | None = None  # None: dp_noise_multiplier
    dp_clip_gradients: Positive | None = None  # None: dp_clip
    dp_noise_multiplier_probabilities: NoiseMultiplier | None = None  # None: dp_noise_multiplier
    dp_clip_probabilities: Positive = 1.0  # no row of class probabilities is longer
    release_probabilities: bool = True  # False: each party predicts with its own classifier
    delta: Annotated[float, Bounds(0, 1, ends="()")] = 1e-5
    target_epsilon: Positive | None = None  # a release that would exceed it is refused
    label_epsilon: Positive | None = None  # randomised response of the training labels; None: no change
    blind_server: bool = False  # masks: hide sums from the server as well; with ckks it never sees them
    allow_two_parties: bool = False  # hidden sums of two parties, each of which learns the other's values from the sum
    range: Positive = 8.0  # hidden sums: the largest absolute value on the first grid, before there is an aggregate

    @property
    def way_to_hide(self) -> Any:
        """The row of `glasu.privacy.secure_aggregation` that hides tensors from the server."""
        return registry.load("secure aggregation", self.secure_aggregation)

    @property
    def hides_parts(self) -> bool:
        """Whether the server adds the parts of parties without reading them, so that it sees no scores either."""
        return bool(self.way_to_hide.hides_parts)

    @property
    def adds_noise(self) -> bool:
        """Whether released rows are clipped and noise is added to them."""
        return self.dp_noise_multiplier > 0

    def _check(self) -> None:
        # A profile may set the keys that others depend on, so `RunConfig` repeats this after it applied the profile.
        if registry.load("profile", self.profile).is_empty and (faults := self.list_unused_keys()):
            raise ConfigError(" ".join(faults))
        for name in ("dp_noise_multiplier", "dp_noise_multiplier_gradients", "dp_noise_multiplier_probabilities"):
            value = getattr(self, name)
            enough = value is None or value >= LEAST_NOISE or (value == 0 and name == "dp_noise_multiplier")
            rule = f"must be at least {LEAST_NOISE}; less noise protects nothing."
            self._need(name, enough, rule + (" 0 means no noise." if name == "dp_noise_multiplier" else ""))

    def list_unused_keys(self) -> list[str]:
        """Return a fault for every key that is set and has no effect without another key."""
        ways = {way: registry.load("secure aggregation", way) for way in registry.choices("secure aggregation")}
        rules = {}
        for name in dict.fromkeys(name for way in ways.values() for name in way.config_keys):
            if name not in self.way_to_hide.config_keys:
                rules[name] = self._explain_hiding_key(name, [way for way in ways if name in ways[way].config_keys])
        if not self.adds_noise:
            rule = "has no effect without privacy.dp_noise_multiplier; set that, or remove it."
            rules.update(dict.fromkeys(NOISE_ONLY, rule))
        values = {name: getattr(self, name) for name in rules}
        return [
            f"privacy.{name}={describe(values[name])}: {rule}"
            for name, rule in rules.items()
            if values[name] != getattr(type(self), name)
        ]

    def _explain_hiding_key(self, name: str, ways: Sequence[str]) -> str:
        """Return why a key has no effect with this way to hide sums; it has one with `ways`."""
        if name == "blind_server" and self.way_to_hide.hides_sums:
            named = f'privacy.secure_aggregation = "{self.secure_aggregation}"'
            return f"has no effect with {named}: the server sees no sums; remove it."
        return f"has no effect without privacy.secure_aggregation = {quote(ways)}; remove it, or set that."


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """All settings of a run. Settings and data together determine the result."""

    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    wire: WireConfig = field(default_factory=WireConfig)
    privacy: PrivacyConfig = field(default_factory=PrivacyConfig)

    def __post_init__(self) -> None:
        self._apply_profile()
        silent = not self.model.aggregation_layers
        method = registry.load("method", self.train.method)
        if self.train.releases_once:
            self._check_once(method)
        else:
            self.model.need_layers(silent or self.model.aggregation_layers[-1] == self.model.num_layers - 1)
        trains_alone = method.prescribes("model", "aggregation_layers")  # it expects no gradient from other parties
        if silent and self.train.label_owner is not None and not trains_alone:
            raise ConfigError(
                f"train.labels={self.train.labels!r}: without aggregation layers the other parties get no gradient; "
                'add an aggregation layer, or use labels = "all".'
            )
        if silent and self.train.has_exact_gradients and not method.prescribes("train", "backward"):
            raise ConfigError(
                'train.backward="joint": without aggregation layers there is no server to send gradients to; '
                'use backward = "local".'
            )
        if self.train.party_dropout:
            named = f"train.party_dropout={self.train.party_dropout}"
            if silent:
                raise ConfigError(f"{named}: parties that train alone have no common rounds; remove it.")
            if not registry.load("aggregation", self.model.aggregation).allows_absence:
                others = quote(registry.select("aggregation", allows_absence=True))
                raise ConfigError(
                    f'{named}: with model.aggregation="{self.model.aggregation}" the columns of an absent party would '
                    f"be missing; use aggregation = {others}."
                )
        if self.model.owner_layers and self.train.label_owner is None and not method.prescribes("train", "labels"):
            raise ConfigError(
                f"model.owner_layers={self.model.owner_layers}: the layers belong to the only party with labels, but "
                'train.labels="all"; name that party in train.labels, or remove the key.'
            )
        if self.train.warm_start and not method.prescribes("train", "warm_start"):
            self._check_warm_start()
        if self.privacy.hides_parts and (not silent or method.averages):
            self._check_hiding()
        if self.wire.feedback and not silent:
            self._check_feedback()
        if self.privacy.label_epsilon is not None:
            rule = f'train.task="{self.train.task}" has no classes to draw from; remove it.'
            self.privacy._need("label_epsilon", registry.load("task", self.train.task).has_classes, rule)
        if method.smooths or self.privacy.adds_noise:
            self._check_examples(method)
        sends = not (silent or method.prescribes("model", "aggregation_layers")) or method.averages
        if self.privacy.adds_noise and sends:
            self._check_noise(method)
        rule = 'is possible only with train.release = "once", where every party has a classifier; remove it.'
        self.privacy._need(
            "release_probabilities", self.privacy.release_probabilities or self.train.releases_once, rule
        )

    def _check_once(self, method: Any) -> None:
        """Refuse settings that a run with one release cannot use. Other methods replace most of them."""
        model, train, named = self.model, self.train, 'train.release="once"'
        layers, last = model.aggregation_layers, model.num_layers - 1
        if method.prescribes("train", "release"):
            return
        chooses = registry.load("preset", train.preset).chooses_layer
        left_open = chooses and "aggregation_layers" not in model.given
        if not left_open and not (len(layers) == 1 and layers[0] < last):
            raise ConfigError(
                f"model.aggregation_layers={list(layers)}: {named} releases one layer and trains the layers above it; "
                f"use one layer of 0..{last - 1}, for example [{find_release_layer(model.num_layers)}]."
                if last
                else f"model.num_layers=1: {named} needs a layer to release and one above it; use 2 or more."
            )
        if train.label_owner is not None:
            raise ConfigError(
                f"train.labels={train.labels!r}: with {named} every party trains alone and needs labels; use labels = "
                '"all", or release = "rounds".'
            )
        unused = {
            "train.backward": (train.backward, "local"),
            "train.party_dropout": (train.party_dropout, 0.0),
            "train.warm_start": (train.warm_start, 0),
            "wire.feedback": (self.wire.feedback, False),
        }
        for key, (value, default) in unused.items():
            if value != default:
                raise ConfigError(f"{key}={describe(value)}: {named} has no rounds of messages; remove it.")

    def _check_examples(self, method: Any) -> None:
        """Refuse a task whose examples are not nodes, if every row of a prediction must belong to one node."""
        if registry.load("task", self.train.task).examples_are_nodes:
            return
        named = f'train.task="{self.train.task}": its examples are not nodes, and'
        if method.smooths:
            raise ConfigError(
                f'{named} train.method="{self.train.method}" propagates the predictions of nodes; use another method.'
            )
        raise ConfigError(
            f"{named} privacy.dp_noise_multiplier={self.privacy.dp_noise_multiplier} counts the releases of each node; "
            "remove it."
        )

    def _check_noise(self, method: Any) -> None:
        """Refuse settings under which something besides noisy rows would leave a party and depend on its data."""
        train, noise = self.train, f"privacy.dp_noise_multiplier={self.privacy.dp_noise_multiplier}"
        if self.wire.feedback:
            raise ConfigError(
                f"wire.feedback=true: with {noise} the change of a row would carry the error of earlier releases, "
                "which depends on clean rows; remove it."
            )
        if train.label_owner is not None:
            raise ConfigError(
                f"train.labels={train.labels!r}: with {noise} the label owner would release node sets without "
                'protection; use labels = "all".'
            )
        if not registry.load("task", train.task).has_classes:
            raise ConfigError(
                f'train.task="{train.task}": parties compare a digest of the mean and deviation of the labels, and '
                f"with {noise} only noisy rows may be released; use a task with classes."
            )
        if method.averages:
            raise ConfigError(
                f'train.method="{train.method}": with {noise} only noisy rows may be released, no metrics; use '
                'train.release = "once".'
            )
        draws = train.sampler != "auto" and registry.load("sampler", train.sampler).agrees_on_node_sets
        if not train.releases_once and draws and len(self.model.aggregation_layers) > 1:
            raise ConfigError(
                f'train.sampler="{train.sampler}": with {noise} the sampled node sets would be released without '
                f"protection, and they reveal edges; use sampler = {_list_samplers_without_agreement()}, or one "
                "aggregation layer."
            )
        if not train.releases_once and train.sampled_evaluation:
            raise ConfigError(f"train.sampled_evaluation=true: with {noise} only an exact test is possible; remove it.")
        if train.party_dropout:
            raise ConfigError(
                f"train.party_dropout={train.party_dropout}: after it the parties score subsets and send metrics, and "
                f"with {noise} only noisy rows may be released; remove it."
            )

    def _apply_profile(self) -> None:
        """Apply the settings of `privacy.profile`; refuse keys that contradict it, or have no effect with it."""
        profile: Profile = registry.load("profile", self.privacy.profile)
        named = f'privacy.profile="{self.privacy.profile}"'
        changes: dict[str, dict[str, Any]] = {}
        faults = []
        for section, key, value in profile.list_required(self.model.num_layers):
            part = getattr(self, section)
            if key in part.given and getattr(part, key) != value:
                found, wanted = describe(getattr(part, key)), describe(list(value) if type(value) is tuple else value)
                faults.append(f"{section}.{key}={found}: {named} needs {wanted}; remove the key, or the profile.")
            changes.setdefault(section, {})[key] = value
        for section, key, value in profile.list_suggested():
            if key not in getattr(self, section).given:
                changes.setdefault(section, {})[key] = value
        if not changes:
            return
        privacy = _set_keys(self.privacy, changes.get("privacy", {}))
        if profile.needs_noise and not privacy.adds_noise:
            faults.append(
                f"privacy.dp_noise_multiplier={describe(privacy.dp_noise_multiplier)}: {named} protects released rows "
                "with noise, and 0 means no noise; use a value above 0, or remove the key or the profile."
            )
        faults += privacy.list_unused_keys()
        if faults:
            raise ConfigError(" ".join(faults))
        for section, keys in changes.items():
            object.__setattr__(self, section, _set_keys(getattr(self, section), keys))

    def _check_feedback(self) -> None:
        """Refuse error feedback if rows differ from round to round, or if changes cannot be added."""
        train, named = self.train, "wire.feedback=true"
        whole = train.sampler == "auto" or reads_whole_graph(train.sampler)
        if not whole or train.batch_size not in ("auto", 0):
            others = quote(registry.select("sampler", reads_whole_graph=True))
            raise ConfigError(
                f"{named}: changes need the same rows in every round, and train.sampler={train.sampler!r} with "
                f"train.batch_size={train.batch_size!r} draws other rows; use sampler = {others} and batch_size = 0, "
                "or remove it."
            )
        if not registry.load("aggregation", self.model.aggregation).is_mean:
            raise ConfigError(
                f'{named}: the server adds changes, and model.aggregation="{self.model.aggregation}" is not a mean; '
                f"use aggregation = {_list_means()}."
            )
        if train.party_dropout:
            raise ConfigError(
                f"{named}: the mean over the parties that are present does not follow from changes; remove "
                f"train.party_dropout={train.party_dropout}."
            )

    def _check_hiding(self) -> None:
        """Refuse settings under which a hidden sum protects nothing, or cannot be read."""
        train, wire, hiding = self.train, self.wire, f'privacy.secure_aggregation="{self.privacy.secure_aggregation}"'
        aggregation, num_clients = self.model.aggregation, self.data.num_clients
        precision = registry.load("encoding", wire.precision)
        if not precision.can_be_hidden:
            raise ConfigError(
                f"wire.precision={wire.precision!r}: {hiding} adds integers, and this precision has none; use "
                f"precision = {quote(registry.select('encoding', can_be_hidden=True))}."
            )
        if wire.feedback:
            raise ConfigError(f"wire.feedback=true: {hiding} sends no changes; remove one of the two.")
        if not registry.load("aggregation", aggregation).is_mean:
            raise ConfigError(
                f'model.aggregation="{aggregation}": {hiding} hides a party in a sum, but here its columns are sent '
                f"separately; use aggregation = {_list_means()}."
            )
        draws = train.sampler != "auto" and registry.load("sampler", train.sampler).agrees_on_node_sets
        if not train.releases_once and draws and len(self.model.aggregation_layers) > 1:
            raise ConfigError(
                f'train.sampler="{train.sampler}": with {hiding} the agreed node sets of lower layers would still '
                f"reveal edges to the server; use sampler = {_list_samplers_without_agreement()}, or one aggregation "
                "layer."
            )
        fewest = 2 if self.privacy.allow_two_parties else FEWEST_SUMMED
        if num_clients < fewest:
            remedy = "; use three parties or more, or accept that with privacy.allow_two_parties = true."
            raise ConfigError(
                f"data.num_clients={num_clients}: {hiding} hides nothing here: from the mean of two parties each "
                f"computes the values of the other{remedy if num_clients == 2 else '; use three parties or more.'}"
            )
        if (levels := count_levels(precision.ring_bits, num_clients)) < FEWEST_LEVELS:
            raise ConfigError(
                f'wire.precision="{wire.precision}": with {hiding} each of {num_clients} parties has {levels} levels, '
                f"and {FEWEST_LEVELS} are needed; use a higher precision."
            )
        if error := self.privacy.way_to_hide.find_error(num_clients):
            ways = registry.select("secure aggregation", hides_parts=True)
            others = quote(way for way in ways if not registry.load("secure aggregation", way).find_error(num_clients))
            raise ConfigError(f"data.num_clients={num_clients}: with {hiding} {error}; use {others}.")
        if train.party_dropout and num_clients <= FEWEST_SUMMED:
            raise ConfigError(
                f"train.party_dropout={train.party_dropout}: with {hiding} at least {FEWEST_SUMMED} parties contribute "
                f"to every sum, but data.num_clients={num_clients}; remove it, or use more parties."
            )
        if registry.load("method", train.method).smooths:
            others = quote(registry.select("method", averages=True, smooths=False))
            raise ConfigError(
                f'train.method="{train.method}": with {hiding} the parties must know who contributes, and here a party '
                f"without edges contributes nothing; use method = {others}."
            )

    def _check_warm_start(self) -> None:
        named = f"train.warm_start={self.train.warm_start}"
        if not self.model.aggregation_layers:
            raise ConfigError(f"{named}: parties that train alone have no common rounds to prepare; remove it.")
        if self.train.label_owner is not None:
            raise ConfigError(
                f"{named}: with train.labels={self.train.labels!r} the other parties have no labels to train alone; "
                'remove it, or use labels = "all".'
            )
        if not registry.load("aggregation", self.model.aggregation).allows_absence:
            others = quote(registry.select("aggregation", allows_absence=True))
            raise ConfigError(
                f'{named}: with model.aggregation="{self.model.aggregation}" a classifier reads the representations of '
                f"all parties, so no party can train alone; remove it, or use aggregation = {others}."
            )

    @property
    def data_seed(self) -> int:
        """The seed of splits and edges."""
        return self.train.seed if self.data.seed is None else self.data.seed

    def replace(self, **changes: Mapping[str, Any]) -> Self:
        """Return a copy with changed keys: `config.replace(train={"seed": 1})`. These keys count as set by the user."""
        parts: dict[str, Any] = {name: _set_keys(getattr(self, name), keys) for name, keys in changes.items()}
        return dataclasses.replace(self, **parts)

    def to_dict(self, *, given: bool = False) -> dict[str, dict[str, Any]]:
        """Return the sections as plain values that JSON and TOML can hold.

        Args:
            given: omit the keys that were not set. A copy of the config needs this, because a preset may choose
                them.
        """
        found: dict[str, dict[str, Any]] = {}
        for item in dataclasses.fields(self):
            part: Checked = getattr(self, item.name)
            values = {key: getattr(part, key) for key in type(part).__dataclass_fields__}  # type: ignore[attr-defined]
            found[item.name] = {
                key: list(value) if isinstance(value, tuple) else value
                for key, value in values.items()
                if not given or key in part.given
            }
        return found

    @classmethod
    def from_dict(cls, sections: Mapping[str, Any], source: str = "the config") -> Self:
        """Build a config from nested dictionaries. ConfigError lists all unknown names and wrong values."""
        classes = {item.name: item.default_factory for item in dataclasses.fields(cls)}
        if not isinstance(sections, Mapping):
            raise ConfigError(
                f"{source}: the settings are {describe(sections)} and must be an object of sections, for example "
                f'{{"train": {{"seed": 1}}}}; known sections are {", ".join(sorted(classes))}.'
            )
        parts: dict[str, Any] = {}
        faults: list[str] = []
        for name, keys in sections.items():
            if name not in classes:
                faults.append(f"{source}: unknown section [{name}]{suggest(name, classes)}")
                continue
            if not isinstance(keys, Mapping):
                faults.append(f"{source}: {name}={describe(keys)}: must be a section, written [{name}].")
                continue
            kind: Any = classes[name]
            known = [item.name for item in dataclasses.fields(kind)]
            faults += [f"{source}: unknown key {name}.{key}{suggest(key, known)}" for key in keys if key not in known]
            try:
                parts[name] = kind(**{key: keys[key] for key in keys if key in known and keys[key] is not None})
            except ConfigError as error:
                faults.append(str(error))
        if faults:
            raise ConfigError(" ".join(faults))
        return cls(**parts)

    @classmethod
    def from_toml(cls, path: str | Path, overrides: Sequence[str] = ()) -> Self:
        """Read a TOML file and apply `section.key=value` overrides; relative paths are relative to the file."""
        path = Path(path)
        sections = read_sections(path)
        for override in overrides:
            _apply_override(sections, override)
        _make_absolute(sections, path)
        config = cls.from_dict(sections, f"{path} (or --set)" if overrides else str(path))
        if config.data.parties and "num_clients" in sections["data"]:  # the default does not conflict with the folders
            refuse_other_count(config.data.num_clients, len(config.data.parties), "data.parties lists")
        return config

    def apply_overrides(self, overrides: Sequence[str], sections: Sequence[str]) -> Self:
        """Return a copy with `section.key=value` overrides; relative paths are relative to the working folder.

        Args:
            overrides: texts like the arguments of --set.
            sections: the sections that may be changed.
        """
        changed: dict[str, Any] = {}
        for override in overrides:
            if override.partition(".")[0].strip() not in sections:
                raise ConfigError(f"--set {override}: only [{'], ['.join(sections)}] can be changed here.")
            _apply_override(changed, override)
        _make_absolute(changed, Path("-"))
        base = self.to_dict(given=True)
        for key, other in (("name", "parties"), ("parties", "name")):
            if key in changed.get("data", {}):  # the new source replaces the old one
                base["data"].pop(other, None)
        return self.from_dict({name: {**keys, **changed.get(name, {})} for name, keys in base.items()}, "--set")

    def extensions(self) -> tuple[registry.Extension, ...]:
        """Return the extensions that the settings use, sorted by name."""
        sections: list[Checked] = [getattr(self, part.name) for part in dataclasses.fields(self)]
        found = {registry.find_extension(*choice) for section in sections for choice in section.choices().items()}
        return tuple(sorted(found - {None}, key=str))  # type: ignore[arg-type]

    def digest(self) -> str:
        """Return the SHA-256 of the settings, in hexadecimal. The location of the data is not included."""
        return self._digest

    @functools.cached_property  # computed once, because every checkpoint holds it
    def _digest(self) -> str:
        settings: dict[str, Any] = self.to_dict()
        for key in WHERE:
            del settings["data"][key]
        candidates = list_candidates(self)
        if len(candidates) > 1 or candidates[0] != self:
            settings["candidates"] = [candidate._flatten() for candidate in candidates]
        return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()

    def flatten(self) -> dict[str, Any]:
        """Return the settings that the digest covers, one entry each: {"train.seed": 0}.

        Keys that the preset decides have their defaults here, and one more entry lists them. So a config that sets such
        a key to its default differs from one that does not set it.
        """
        found = self._flatten()
        left_open = list_open_keys(list_candidates(self))
        return {**found, LEFT_OPEN: left_open} if left_open else found

    def _flatten(self) -> dict[str, Any]:
        return {
            f"{section}.{key}": value
            for section, keys in self.to_dict().items()
            for key, value in keys.items()
            if section != "data" or key not in WHERE
        }


def _set_keys(part: Part, keys: Mapping[str, Any]) -> Part:
    """Return a section with changed keys, which count as given."""
    return type(part)(**{**{key: getattr(part, key) for key in part.given}, **keys})


def describe_profile(config: RunConfig) -> str:
    """Return the settings of `privacy.profile` in one line, as TOML; an empty string for "off"."""
    name = config.privacy.profile
    profile: Profile = registry.load("profile", name)
    found = []
    for section, key, value in [*profile.list_required(config.model.num_layers), *profile.list_suggested()]:
        used = getattr(getattr(config, section), key)
        note = "" if used == value else f" (set explicitly; {name} suggests {_write_toml(value)})"
        found.append(f"{section}.{key} = {_write_toml(used)}{note}")
    return f'privacy.profile = "{name}": {", ".join(found)}' if found else ""


def _write_toml(value: Any) -> str:
    """Return a setting as TOML. For these types, JSON is TOML."""
    return json.dumps(list(value) if isinstance(value, tuple) else value)


def list_candidates(config: RunConfig) -> tuple[RunConfig, ...]:
    """Return the settings between which `train.preset` decides, in order of preference; often there is only one."""
    candidates: tuple[RunConfig, ...] = registry.load("preset", config.train.preset).expand(config)
    return candidates


def list_open_keys(candidates: Sequence[RunConfig]) -> list[str]:
    """Return the names of the settings in which candidates differ, sorted."""
    flat = [candidate._flatten() for candidate in candidates]
    return sorted(key for key, value in flat[0].items() if any(other[key] != value for other in flat[1:]))


def read_sections(path: Path) -> dict[str, Any]:
    """Read a TOML file whose top level consists of sections."""
    try:
        return parse_toml(path.read_bytes(), str(path))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); give the path of a TOML file.") from None
    except RecordError as error:
        raise ConfigError(str(error)) from None


def reads_whole_graph(sampler: str) -> bool:
    """Return whether a sampler uses all nodes and edges; False for "auto", which is not resolved yet."""
    return sampler != "auto" and bool(registry.load("sampler", sampler).reads_whole_graph)


def quote(names: Iterable[str]) -> str:
    """Return names as alternatives in an error: "fp32", "bf16" or "int8"."""
    *first, last = (f'"{name}"' for name in names)
    return f"{', '.join(first)} or {last}" if first else last


def _list_means() -> str:
    return quote(registry.select("aggregation", is_mean=True))


def _list_samplers_without_agreement() -> str:
    return quote(registry.select("sampler", agrees_on_node_sets=False))


def find_release_layer(num_layers: int) -> int:
    """Return the layer that `train.release = "once"` releases by default: the middle layer."""
    return max(0, num_layers // 2 - 1)


def count_levels(bits: int, num_clients: int) -> int:
    """Return the number of values of one party's integer, so that the sum over all parties is below 2^bits."""
    return int((2**bits - 1) // num_clients)


def refuse_other_count(num_clients: int, found: int, where: str) -> None:
    """Refuse a `data.num_clients` that differs from the number of given parties."""
    if num_clients != found:
        raise ConfigError(
            f"data.num_clients={num_clients}: {where} {found}; remove data.num_clients, or set it to {found}. Only one "
            "graph can be divided among any number of clients."
        )


def _make_absolute(sections: dict[str, Any], file: Path) -> None:
    """Make the paths in [data] absolute; relative paths start at the folder of `file`."""
    data = sections.get("data")
    if isinstance(data, dict):
        if isinstance(data.get("root"), str):
            data["root"] = _resolve_path(file, data["root"])
        if isinstance(data.get("parties"), list):
            data["parties"] = [_resolve_path(file, item) if isinstance(item, str) else item for item in data["parties"]]


def _resolve_path(file: Path, path: str) -> str:
    try:
        return str((file.parent / Path(path).expanduser()).resolve())
    except (RuntimeError, ValueError) as error:  # an unknown user's home, a loop of links, a null character
        raise ConfigError(f"{file}: the path {path!r} is invalid: {error}") from None


def suggest(name: str, known: Iterable[str]) -> str:
    """Return the end of an error about an unknown name: the most similar known name, or all names."""
    match = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {match[0]!r}?" if match else f"; known are {', '.join(sorted(known))}."


def _apply_override(sections: dict[str, Any], override: str) -> None:
    """Put `section.key=value` into the sections. A value that is not valid TOML is a string."""
    path, equals, text = override.partition("=")
    section, dot, key = path.strip().partition(".")
    if not (equals and dot and section and key):
        raise ConfigError(f"--set {override}: must look like section.key=value, for example train.seed=1.")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except ValueError:  # not TOML
        value = text.strip()
    except RecursionError:
        raise ConfigError(f"--set {path.strip()}: the value is nested too deeply.") from None
    keys = sections.setdefault(section, {})
    if isinstance(keys, dict):
        keys[key] = value


def resolve(config: RunConfig, num_nodes: int) -> tuple[RunConfig, dict[str, Override]]:
    """Replace "auto" with its value for a graph of this size. `glasu.data.methods` applies `train.method`.

    If the preset has only one candidate, that candidate is applied as well. Otherwise a race decides
    (`glasu.protocol.race`).

    Returns:
        The resolved settings, and the settings that were replaced because the sampler reads the whole graph:
        {"train.sampled_evaluation": {"requested": True, "used": False}}.
    """
    candidates = list_candidates(config)
    config = candidates[0] if len(candidates) == 1 else config
    train = config.train
    small = num_nodes <= SMALL_GRAPH and not train.max_nodes  # a limit needs a sampler that samples
    large_batch = min(512, train.max_nodes or 512)
    sampler = train.sampler
    if sampler == "auto":
        sampler = next(registry.select("sampler", default_for="small graphs" if small else "large graphs"))
    batch_size = (0 if small else large_batch) if train.batch_size == "auto" else train.batch_size
    defaults = {key: getattr(TrainConfig, key) for key in SAMPLING_ONLY if reads_whole_graph(sampler)}
    unused = {key: value for key, value in defaults.items() if getattr(train, key) != value}
    overridden: dict[str, Override] = {
        f"train.{key}": {"requested": getattr(train, key), "used": value} for key, value in unused.items()
    }
    return config.replace(train={"sampler": sampler, "batch_size": batch_size, **unused}), overridden
