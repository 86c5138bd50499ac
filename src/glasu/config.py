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
from glasu.records import Bounds, Checked, Choice, RecordError, describe, parse_toml

Split = Literal["paper", "public"] | tuple[float, float, float]
Missing = Literal["refuse", "zero", "mean"]
MAX_COUNT = 2**31 - 1  # counts and index arrays are sent as 32-bit integers
Count = Annotated[int, Bounds(1, MAX_COUNT)]
Natural = Annotated[int, Bounds(0, MAX_COUNT)]
Seed = Annotated[int, Bounds(0, 2**63 - 1)]
Positive = Annotated[float, Bounds(0, ends="(]")]
WHERE = ("root", "parties")  # keys of [data] that locate the data on this machine; they do not identify it
LEFT_OPEN = "keys that train.preset decides"
MAX_LAYERS = 1000
SMALL_GRAPH = 30_000  # greatest number of nodes for which "auto" means the full graph
# Keys of [train] that have an effect only with a sampler that samples, and their defaults.
SAMPLING_ONLY = {"sampling": "node", "blocks": "drawn", "sampled_evaluation": False}


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
    residual: bool = False  # whether every layer adds its input at the same rows, times a separate weight matrix

    def _check(self) -> None:
        layers, last = self.aggregation_layers, self.num_layers - 1
        rising = list(layers) == sorted(set(layers))
        if layers and not (rising and layers[0] >= 0 and layers[-1] == last):
            raise ConfigError(
                f"model.aggregation_layers={list(layers)}: must be increasing, lie in 0..{last} and end with "
                f"{last}, because all clients classify the same H[L]. To train without communication, use []."
            )
        registry.load("backbone", self.backbone).check(self)


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
    max_nodes: Annotated[int, Bounds(0, MAX_COUNT, "0 means no limit")] = 0  # greatest size of S_m[l]
    backward: Literal["local", "joint"] = "local"
    warm_start: Natural = 0  # number of steps that every party takes alone before round 0, without messages
    party_dropout: Annotated[float, Bounds(0, 1, "0 means that all parties contribute to every round", ends="[)")] = 0.0
    labels: str = "all"  # or the name of the one party that has them
    task: Annotated[str, Choice("task")] = "multiclass"
    class_weights: Literal["none", "balanced"] | tuple[float, ...] = "none"  # class weights of the loss
    optimizer: Literal["adam", "sgd"] = "adam"
    learning_rate: Positive = 0.005
    weight_decay: Annotated[float, Bounds(0)] = 0.001
    momentum: Annotated[float, Bounds(0, 1, ends="[)")] = 0.0  # sgd only
    schedule: Literal["constant", "step", "cosine"] = "constant"
    patience: Natural = 4  # evaluations without improvement before the run stops; 0: never
    stop_at: Annotated[float, Bounds(0, 1, "it is a share, and 0 means never")] = 0.0  # stop at this validation score
    seed: Seed = 0
    evaluate_every: Count = 10
    evaluate_nodes: Natural = 0  # 0: all validation nodes, else a fixed random subset
    sampled_evaluation: bool = False
    checkpoint_every: Annotated[int, Bounds(0, MAX_COUNT, "0 means never")] = 1
    prefetch: Annotated[int, Bounds(0, 1024, "at most 1024 rounds fit into one message")] = 16

    def _check(self) -> None:
        method = registry.load("method", self.method)
        whole_graph = f'train.sampler="{self.sampler}" reads all nodes'
        if self.max_nodes:
            fits = self.batch_size == "auto" or 0 < self.batch_size <= self.max_nodes
            rule = f"every node set contains the batch, and train.batch_size is {self.batch_size!r}; "
            self._need("max_nodes", fits, rule + "use a smaller batch (0 means all training nodes) or a higher limit.")
            others = " or ".join(f'"{name}"' for name in registry.choices("sampler") if not reads_whole_graph(name))
            self._need("max_nodes", not reads_whole_graph(self.sampler), f"{whole_graph}; use {others}.")
        if reads_whole_graph(self.sampler):
            rule = f"has no effect, because {whole_graph}; remove it, or use another sampler."
            for key, default in SAMPLING_ONLY.items():
                self._need(key, getattr(self, key) == default, rule)
        self._need("labels", self.labels != "", 'must be "all" or the name of the party that has the labels.')
        everywhere = f'train.method="{self.method}" needs labels at every party.'
        self._need("labels", self.labels == "all" or not method.needs_all_labels, everywhere)
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
    secure_aggregation: Literal["none"] = "none"
    dp_noise_multiplier: float = 0.0
    dp_clip: float = 1.0
    delta: float = 1e-5
    target_epsilon: float | None = None
    blind_server: bool = False
    allow_two_parties: bool = False
    range: float = 8.0

    def _check(self) -> None:
        for item in dataclasses.fields(self):
            rule = f"has no effect in this version, so only its default {item.default!r} is accepted; remove it."
            self._need(item.name, getattr(self, item.name) == item.default, rule)


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """All settings of a run. Settings and data together determine the result."""

    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    wire: WireConfig = field(default_factory=WireConfig)
    privacy: PrivacyConfig = field(default_factory=PrivacyConfig)

    def __post_init__(self) -> None:
        silent = not self.model.aggregation_layers
        method = registry.load("method", self.train.method)
        if silent and self.train.labels != "all" and not method.averages:
            raise ConfigError(
                f"train.labels={self.train.labels!r}: without aggregation layers the other parties get no gradient; "
                'add an aggregation layer, or use labels = "all".'
            )
        if silent and self.train.backward == "joint" and not method.prescribes("train", "backward"):
            raise ConfigError(
                'train.backward="joint": without aggregation layers there is no server to send gradients to; '
                'use backward = "local".'
            )
        if self.train.party_dropout:
            named = f"train.party_dropout={self.train.party_dropout}"
            if silent:
                raise ConfigError(f"{named}: parties that train alone have no common rounds; remove it.")
            if not registry.load("aggregation", self.model.aggregation).allows_absence:
                raise ConfigError(
                    f'{named}: with model.aggregation="{self.model.aggregation}" the columns of an absent party would '
                    'be missing; use aggregation = "mean".'
                )
        if self.train.warm_start and not method.prescribes("train", "warm_start"):
            self._check_warm_start()
        refuse_rounded_masks(self.wire.precision, self.privacy.secure_aggregation)
        if self.wire.feedback and not silent:
            self._check_feedback()

    def _check_feedback(self) -> None:
        """Refuse error feedback if rows differ from round to round, or if changes cannot be added."""
        train, named = self.train, "wire.feedback=true"
        whole = train.sampler == "auto" or reads_whole_graph(train.sampler)
        if not whole or train.batch_size not in ("auto", 0):
            raise ConfigError(
                f"{named}: changes need the same rows in every round, and train.sampler={train.sampler!r} with "
                f'train.batch_size={train.batch_size!r} draws other rows; use sampler = "full" and batch_size = 0, or '
                "remove it."
            )
        if not registry.load("aggregation", self.model.aggregation).is_mean:
            raise ConfigError(
                f'{named}: the server adds changes, and model.aggregation="{self.model.aggregation}" is not a mean; '
                'use aggregation = "mean".'
            )
        if train.party_dropout:
            raise ConfigError(
                f"{named}: the mean over the parties that are present does not follow from changes; remove "
                f"train.party_dropout={train.party_dropout}."
            )

    def _check_warm_start(self) -> None:
        named = f"train.warm_start={self.train.warm_start}"
        if not self.model.aggregation_layers:
            raise ConfigError(f"{named}: parties that train alone have no common rounds to prepare; remove it.")
        if self.train.labels != "all":
            raise ConfigError(
                f"{named}: with train.labels={self.train.labels!r} the other parties have no labels to train alone; "
                'remove it, or use labels = "all".'
            )
        if not registry.load("aggregation", self.model.aggregation).allows_absence:
            raise ConfigError(
                f'{named}: with model.aggregation="{self.model.aggregation}" a classifier reads the representations of '
                'all parties, so no party can train alone; remove it, or use aggregation = "mean".'
            )

    @property
    def data_seed(self) -> int:
        """The seed of splits and edges."""
        return self.train.seed if self.data.seed is None else self.data.seed

    def replace(self, **changes: Mapping[str, Any]) -> Self:
        """Return a copy with changed keys: `config.replace(train={"seed": 1})`. These keys count as set by the user."""
        parts = {}
        for name, keys in changes.items():
            part = getattr(self, name)
            parts[name] = type(part)(**{**{key: getattr(part, key) for key in part.given}, **keys})
        return dataclasses.replace(self, **parts)

    def to_dict(self, *, given: bool = False) -> dict[str, dict[str, Any]]:
        """Return the sections as plain values that JSON and TOML can hold.

        Args:
            given: leave out the keys that were not set. A copy of the config needs this, because a preset may choose
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
        """Build a config from nested dictionaries, refusing unknown sections and keys."""
        classes = {item.name: item.default_factory for item in dataclasses.fields(cls)}
        parts: dict[str, Any] = {}
        for name, keys in sections.items():
            if name not in classes:
                raise ConfigError(f"{source}: unknown section [{name}]{suggest(name, classes)}")
            if not isinstance(keys, Mapping):
                raise ConfigError(f"{source}: {name}={describe(keys)}: must be a section, written [{name}].")
            kind: Any = classes[name]
            known = [item.name for item in dataclasses.fields(kind)]
            for key in keys:
                if key not in known:
                    raise ConfigError(f"{source}: unknown key {name}.{key}{suggest(key, known)}")
            parts[name] = kind(**{key: value for key, value in keys.items() if value is not None})
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


def refuse_rounded_masks(precision: str, secure_aggregation: str) -> None:
    """Refuse to round masked tensors: masks cancel only if the masked values are added unchanged."""
    if secure_aggregation != "none" and precision != "fp32":
        raise ConfigError(
            f"wire.precision={precision!r}: privacy.secure_aggregation={secure_aggregation!r} sends integers, "
            'which cannot be rounded again; use precision = "fp32".'
        )


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
    """Replace "auto" by its value for a graph of this size. `glasu.data.methods` applies `train.method`.

    If the preset has only one candidate, it is applied, too. Otherwise a race decides (`glasu.protocol.race`).

    Returns:
        The resolved settings, and the settings that were replaced because the sampler reads the whole graph:
        {"train.sampled_evaluation": {"requested": True, "used": False}}.
    """
    candidates = list_candidates(config)
    config = candidates[0] if len(candidates) == 1 else config
    train = config.train
    small = num_nodes <= SMALL_GRAPH and not train.max_nodes  # a limit needs a sampler that samples
    large_batch = min(512, train.max_nodes or 512)
    sampler = ("full" if small else "neighbor") if train.sampler == "auto" else train.sampler
    batch_size = (0 if small else large_batch) if train.batch_size == "auto" else train.batch_size
    unused = {key: value for key, value in SAMPLING_ONLY.items() if getattr(train, key) != value}
    unused = unused if reads_whole_graph(sampler) else {}
    overridden: dict[str, Override] = {
        f"train.{key}": {"requested": getattr(train, key), "used": value} for key, value in unused.items()
    }
    return config.replace(train={"sampler": sampler, "batch_size": batch_size, **unused}), overridden
