"""The sections of the settings: the keys, their defaults, and the rules that need one section only."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from glasu import registry
from glasu.errors import ConfigError
from glasu.records import Bounds, Checked, Choice, describe

Split = Literal["paper", "public"] | tuple[float, float, float]
Missing = Literal["refuse", "zero", "mean"]
EVERY_PARTY = "all"  # value of `train.labels` if all parties have labels
MAX_COUNT = 2**31 - 1  # counts and index arrays are sent as 32-bit integers
Count = Annotated[int, Bounds(1, MAX_COUNT)]
Natural = Annotated[int, Bounds(0, MAX_COUNT)]
Seed = Annotated[int, Bounds(0, 2**63 - 1)]
Positive = Annotated[float, Bounds(0, ends="(]")]
NoiseMultiplier = Annotated[float, Bounds(0, 1000)]
LEAST_NOISE = 0.001
MAX_LAYERS = 1000
SAMPLING_ONLY = ("sampling", "blocks", "sampled_evaluation")  # keys of [train] without effect on the whole graph
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
    # Dirichlet parameter of the clients' shares: of the columns if partition = "importance", of the edges if "edges"
    concentration: Annotated[float, Bounds(0.001, 1_000_000, "small values give unequal shares")] = 1.0
    # if partition = "correlation": the share of the columns that are redistributed. Without redistribution, correlated
    # columns are at one client; redistribution puts them at different clients.
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
            rule = "must be three shares (train, validation, test) with a sum of at most 1; train must be above 0."
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
    alpha: Annotated[float, Bounds(0, 1)] = 0.1  # gcnii: share of the initial representation
    theta: Positive = 0.5  # gcnii: lambda of the GCNII paper
    heads: Count = 4  # number of attention heads of gat
    residual: bool = False  # every layer also adds H[l] W, its input at the same nodes times another weight matrix W
    owner_layers: Annotated[int, Bounds(0, MAX_LAYERS)] = 0  # dense layers of the label owner before its classifier

    def _check(self) -> None:
        layers = self.aggregation_layers
        rising = list(layers) == sorted(set(layers))
        if not rising or (layers and not 0 <= layers[0] <= layers[-1] < self.num_layers):
            raise ConfigError(self.describe_layer_fault())
        registry.load("backbone", self.backbone).check(self)

    def describe_layer_fault(self) -> str:
        """Return the error about aggregation layers."""
        last = self.num_layers - 1
        return (
            f"model.aggregation_layers={list(self.aggregation_layers)}: must be increasing, lie in 0..{last} and "
            f"end with {last}, because all clients classify the same H[L]. To train without communication, use []."
        )


@dataclass(frozen=True, kw_only=True)
class TrainConfig(Checked):
    """The settings of the training: method, sampling, labels, optimizer and evaluation."""

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
    max_nodes: Annotated[int, Bounds(0, MAX_COUNT, "0 means no limit")] = 0  # maximum size of a node set S_m[l]
    backward: Literal["local", "joint"] = "local"
    # "once": parties train alone, release one representation, and train their upper layers on the fixed aggregate
    release: Literal["rounds", "once"] = "rounds"
    warm_start: Natural = 0  # local steps of every party alone, before round 0 and without messages
    party_dropout: Annotated[float, Bounds(0, 1, "0 means that all parties contribute to every round", ends="[)")] = 0.0
    labels: str = EVERY_PARTY  # or the name of the only party that has labels
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
    evaluate_nodes: Natural = 0  # size of the fixed random subset of validation nodes that is evaluated; 0: all
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
    profile: Annotated[str, Choice("profile")] = "off"  # name of a set of settings; see glasu.profiles
    secure_aggregation: Annotated[str, Choice("secure aggregation")] = "none"
    dp_noise_multiplier: NoiseMultiplier = 0.0  # deviation of the noise of a released row, in multiples of its clip
    dp_clip: Positive = 1.0  # maximum L2 norm of a released row
    dp_noise_multiplier_gradients: NoiseMultiplier | None = None  # None: dp_noise_multiplier
    dp_clip_gradients: Positive | None = None  # None: dp_clip
    dp_noise_multiplier_probabilities: NoiseMultiplier | None = None  # None: dp_noise_multiplier
    dp_clip_probabilities: Positive = 1.0  # the norm of a row of class probabilities is at most 1
    release_probabilities: bool = True  # False: each party predicts with its own classifier
    delta: Annotated[float, Bounds(0, 1, ends="()")] = 1e-5
    target_epsilon: Positive | None = None  # a release with which epsilon would exceed this value is refused
    label_epsilon: Positive | None = None  # randomised response of the training labels; None: no change
    blind_server: bool = False  # masks: hide sums from the server as well; with ckks the server never sees sums
    # whether hidden sums of two parties are allowed, although each party learns the other's values from the sum
    allow_two_parties: bool = False
    # with masks or ckks, values are rounded to a grid from -r to r; before the first aggregate, r is derived from this
    range: Positive = 8.0

    @property
    def way_to_hide(self) -> Any:
        """The object in SECURE_AGGREGATIONS (`glasu.privacy.secure_aggregation`) that the settings name."""
        return registry.load("secure aggregation", self.secure_aggregation)

    @property
    def hides_parts(self) -> bool:
        """Whether the server adds the parties' tensors without reading them. If so, it does not see scores either."""
        return bool(self.way_to_hide.hides_parts)

    @property
    def adds_noise(self) -> bool:
        """Whether released rows are clipped and noise is added to them."""
        return self.dp_noise_multiplier > 0

    def _check(self) -> None:
        # A profile may set keys on which other keys depend. So if there is a profile, `RunConfig` looks for unused keys
        # after it has applied the profile.
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
            rule = "has no effect without privacy.dp_noise_multiplier; set that key, or remove this one."
            rules.update(dict.fromkeys(NOISE_ONLY, rule))
        values = {name: getattr(self, name) for name in rules}
        return [
            f"privacy.{name}={describe(values[name])}: {rule}"
            for name, rule in rules.items()
            if values[name] != getattr(type(self), name)
        ]

    def _explain_hiding_key(self, name: str, ways: Sequence[str]) -> str:
        """Return why a key has no effect with the chosen `privacy.secure_aggregation`; it has an effect with `ways`."""
        if name == "blind_server" and self.way_to_hide.hides_sums:
            named = f'privacy.secure_aggregation = "{self.secure_aggregation}"'
            return f"has no effect with {named}: the server sees no sums; remove it."
        return f"has no effect without privacy.secure_aggregation = {quote(ways)}; remove this key, or set that one."


@dataclass(frozen=True, kw_only=True)
class ConfigSections:
    """All sections of the settings. `RunConfig` checks that they fit together."""

    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    wire: WireConfig = field(default_factory=WireConfig)
    privacy: PrivacyConfig = field(default_factory=PrivacyConfig)


def reads_whole_graph(sampler: str) -> bool:
    """Return whether a sampler uses all nodes and edges; False for "auto", which is not resolved yet."""
    return sampler != "auto" and bool(registry.load("sampler", sampler).reads_whole_graph)


def quote(names: Iterable[str]) -> str:
    """Return names as alternatives in an error: "fp32", "bf16" or "int8"."""
    *first, last = (f'"{name}"' for name in names)
    return f"{', '.join(first)} or {last}" if first else last
