"""Reports of a run: typed values in memory, JSON in report.json, and a one-line summary.

A simulation and a server write a `RunReport`. A party of a run between machines writes a `PartyReport`. After a
prediction, the server and the parties write a `PredictionReport`. Torch is not loaded.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import json
import math
import platform
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypedDict

from glasu import __version__
from glasu.config import Override, RunConfig
from glasu.records import FlatSettings

if TYPE_CHECKING:  # these imports would load numpy, which `glasu provision` does not use
    from glasu.data.preprocessing import Preparation
    from glasu.privacy.accounting import SpentEpsilon
    from glasu.privacy.ledger import Ledger


class JsonRecord(Mapping[str, Any]):
    """A frozen dataclass that also behaves like its JSON object: `traffic.messages` or `traffic["messages"]`."""

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON object; fields that are None are omitted."""
        values = {item.name: getattr(self, item.name) for item in dataclasses.fields(self)}  # type: ignore[arg-type]
        return {key: value for key, value in values.items() if value is not None}

    def to_json(self) -> str:
        """Return the content of a JSON file; a float that is not finite becomes null."""
        return json.dumps(to_json_value(self), indent=2) + "\n"

    def __getitem__(self, key: str) -> Any:
        return self.to_dict()[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.to_dict())

    def __len__(self) -> int:
        return len(self.to_dict())


@dataclass(frozen=True)
class SplitScores(JsonRecord):
    """Scores of the selected model on one split. A metric of the task is also an attribute: `scores.accuracy`."""

    metrics: Mapping[str, float]  # by their names in the task
    round: int | None = None  # number of rounds after which this model was selected
    # If parties train alone: the first metric of every client. None for a client without labels.
    per_client: tuple[float | None, ...] | None = None
    # With standalone training: the same metric of plain label propagation. None also for a client without edges.
    per_client_propagation: tuple[float | None, ...] | None = None
    # "model" or "propagation", by client: which of the two is better; only in the validation scores
    per_client_better: tuple[str | None, ...] | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return a flat dictionary of the metrics and the other fields."""
        values = super().to_dict()
        return {**values.pop("metrics"), **values}

    def __getattr__(self, name: str) -> float:
        metrics: Mapping[str, float] = self.__dict__.get("metrics", {})  # missing while a copy is being made
        if name not in metrics:
            raise AttributeError(f"there is no metric {name!r}; the task has {', '.join(metrics)}.")
        return metrics[name]


@dataclass(frozen=True)
class AloneScores:
    """The first metric of the task for one party alone, with its model or with plain label propagation."""

    party: str
    by: str  # "model" or "label propagation"
    validation: float
    test: float


def list_alone(names: Sequence[str], validation: SplitScores, test: SplitScores) -> list[AloneScores]:
    """Return the scores of each single party: first by its model, then by label propagation. Skip missing scores."""
    found = []
    for by, key in (("model", "per_client"), ("label propagation", "per_client_propagation")):
        scores = (getattr(split, key) or () for split in (validation, test))
        for name, here, there in zip(names, *scores, strict=False):
            if here is not None and there is not None:
                found.append(AloneScores(name, by, here, there))
    return found


def find_best_party(report: RunReport, baseline: Baseline | None = None) -> AloneScores | None:
    """Return the scores of the best party alone, with its model or label propagation. Validation scores decide.

    Args:
        report: the run of the parties.
        baseline: the scores of the parties alone, on the same data; None: use the scores in `report`.
    """
    scores = report if baseline is None else baseline
    if scores.validation is None or scores.test is None:
        return None
    found = list_alone([party.name for party in report.parties], scores.validation, scores.test)
    return max(found, key=lambda each: each.validation, default=None)


@dataclass(frozen=True)
class SubsetScores(JsonRecord):
    """Validation scores of the selected model when only some of the parties contribute."""

    parties: tuple[str, ...]
    metrics: Mapping[str, float]

    def to_dict(self) -> dict[str, Any]:
        """Return a flat dictionary of the parties and the metrics."""
        return {"parties": list(self.parties), **self.metrics}


def find_subset(subsets: Iterable[SubsetScores], present: Sequence[str]) -> SubsetScores | None:
    """Return the scores of exactly these parties; None if they were not scored together."""
    return next((found for found in subsets if set(found.parties) == set(present)), None)


def describe_missing(missing: Sequence[str], validation: Mapping[str, float] | None) -> str:
    """Describe a prediction without some parties, with the validation scores of the other parties if they are known."""
    listed = ", ".join(f"{name} {value:.3f}" for name, value in (validation or {}).items()) or "unknown"
    return f"predicted without {', '.join(missing)}; validation scores of the parties present: {listed}."


@dataclass(frozen=True)
class WarmStart(JsonRecord):
    """The local steps before round 0, and the ensemble after these steps.

    The ensemble is the mean of the predictions that the parties compute alone.
    """

    steps: int
    selected: str  # the selected model: "ensemble", or "joint" (the joint model of a later round)
    ensemble: Mapping[str, float]  # validation scores of the ensemble


@dataclass(frozen=True)
class Traffic(JsonRecord):
    """Encoded messages of a run and their bytes, including evaluations and repeated rounds."""

    bytes_to_server: int = 0
    bytes_to_clients: int = 0
    headers_to_server: int = 0  # the part of `bytes_to_server` that is not content; the ledger counts the content
    messages: int = 0
    exchanges: int = 0  # an exchange: messages of the clients to the server, and its answers
    by_kind: Mapping[str, int] = field(default_factory=dict)
    by_phase: Mapping[str, int] = field(default_factory=dict)
    exchanges_by_phase: Mapping[str, int] = field(default_factory=dict)

    @property
    def total_bytes(self) -> int:
        return self.bytes_to_server + self.bytes_to_clients


@dataclass(frozen=True)
class Seconds(JsonRecord):
    """Seconds of a run: in total, and by activity."""

    total: float = 0.0
    parts: Mapping[str, float] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Return a flat dictionary of the total and the activities."""
        return {"total": self.total, **self.parts}


@dataclass(frozen=True)
class HistoryEntry(JsonRecord):
    """One evaluation on the validation split, and the cost of the run up to this evaluation."""

    round: int
    loss: float | None  # None if the parties train alone and send no losses
    metrics: Mapping[str, float]
    bytes: int
    exchanges: int
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """Return the entry with the metrics as val_<name>."""
        values = super().to_dict()
        metrics = {f"val_{name}": value for name, value in values.pop("metrics").items()}
        return {"round": values.pop("round"), "loss": values.pop("loss", None), **metrics, **values}


@dataclass(frozen=True)
class CandidateSummary(JsonRecord):
    """One set of settings among which the preset chose. It fits the data of the parties."""

    settings: FlatSettings  # the settings in which this candidate differs from the others
    score: float | None  # validation score after the race; None: there was no race, or the candidate diverged
    chosen: bool
    diverged: bool | None = None  # True: the candidate lost the race because its training diverged


@dataclass(frozen=True)
class RaceSummary(JsonRecord):
    """How the preset chose between its candidates. In a race, each candidate trains for some rounds."""

    preset: str
    rounds: int  # rounds of every candidate in the race; 0: only one candidate was left, so there was no race
    candidates: tuple[CandidateSummary, ...]  # the preferred candidate first
    bytes: int  # bytes of the run before the choice, including repeated rounds
    exchanges: int
    releases: Mapping[str, int] | None = None  # number of releases before the choice, by party; None at a server


@dataclass(frozen=True)
class PreparedColumns(JsonRecord):
    """The preparation of the feature columns of a party. Only the party knows it."""

    unchanged: int
    scaled: int  # number of columns that are scaled and keep their zeros
    standardized: int
    dropped: tuple[str | int, ...]  # columns with one value: their names, or their positions if columns have no names

    @classmethod
    def of(cls, preparation: Preparation, names: Sequence[str]) -> PreparedColumns:
        """Summarise the preparation of a party. `names` are the names of its columns; empty if they have no names."""
        kinds = preparation.count_kinds()
        dropped = tuple(names[column] if names else column for column in preparation.dropped)
        return cls(kinds["unchanged"], kinds["scaled"], kinds["standardized"], dropped)


@dataclass(frozen=True)
class PartySummary(JsonRecord):
    """The data of one party; a server knows only some of it."""

    name: str
    nodes: int
    features: int | None = None
    edges: int | None = None
    labels: bool = True
    prepared: PreparedColumns | None = None


@dataclass(frozen=True)
class LedgerSummary(JsonRecord):
    """The totals of one party's releases."""

    party: str
    head: str  # the last value of the hash chain; zeros if the ledger is not stored
    length: int  # number of records when the report was written, including records of earlier runs
    releases: tuple[Mapping[str, str | int], ...]

    @classmethod
    def of(cls, party: str, ledger: Ledger) -> LedgerSummary:
        """Summarise the ledger of a party."""
        return cls(party, ledger.head.chain, ledger.length, tuple(ledger.list_totals()))


# The source of initial weights, dropout masks, neighbour draws and rounding: the public seed, or the parties' secrets.
SecretSource: TypeAlias = Literal["derived from the seed", "given"]
DERIVED: SecretSource = "derived from the seed"
GIVEN: SecretSource = "given"


@dataclass(frozen=True)
class MaskSummary(JsonRecord):
    """Secure aggregation with masks or ckks; a field that the role does not know is None."""

    blind_server: bool  # whether the server sees no sums
    signatures: str  # whether the keys of the parties are signed
    # Number of values that were clamped (`privacy/column_grids.py`), by party. A party knows only its own number. None
    # in a run with noise.
    clamped: Mapping[str, int] | None = None

    @classmethod
    def of(cls, config: RunConfig, signatures: str, clamped: Mapping[str, int] | None = None) -> MaskSummary | None:
        """Summarise the masks or the encryption of a run; None if it has neither."""
        if not config.privacy.hides_parts:
            return None
        from glasu.privacy.secure_aggregation import find_secure_aggregation  # loads numpy

        blind = config.privacy.blind_server or find_secure_aggregation(config.privacy).hides_sums
        # The number of clamped values depends on the data and has no noise. So the report of a run with noise omits it.
        return cls(blind, signatures, None if config.privacy.adds_noise else clamped)


SIGNED = "signed, by pinned keys"
SIGNED_UNPINNED = "signed, by keys that are not all pinned"  # the operator of the CA could impersonate a party
SIGNED_TRIAL = "signed, by keys of trial kits"  # the operator of the CA has these keys
UNSIGNED = "none: all parties are in one process"


@dataclass(frozen=True)
class RowPrivacy(JsonRecord):
    """The differential privacy of the released rows of one party."""

    party: str
    spent: SpentEpsilon
    holds: bool = True  # False if the noise is derived from `train.seed`, which is public

    def to_dict(self) -> dict[str, Any]:
        """Return a flat dictionary of the party's name and its figures."""
        return {"party": self.party, "holds": self.holds, **dataclasses.asdict(self.spent)}

    def __str__(self) -> str:
        found = f"differential privacy of party {self.party}: {self.spent}."
        if not self.holds:
            found += " It does not hold in this run: the noise is derived from train.seed. In a run between machines, "
            found += "the noise is derived from the party's secret."
        return found


@dataclass(frozen=True)
class PrivacySummary(JsonRecord):
    """How the released tensors were protected. At a server, `ledger` is None, because a server keeps no ledger."""

    secure_aggregation: str
    secrets: SecretSource | None = None
    ledger: tuple[LedgerSummary, ...] | None = None
    masks: MaskSummary | None = None
    # How the parties' keys were signed, if the parties agreed on keys only for the common classifier of a warm start.
    # None in other runs, and at the server, which does not know it.
    warm_start_keys: str | None = None
    differential_privacy: RowPrivacy | None = None  # privacy of the party with the largest epsilon; None without noise
    label_epsilon: float | None = None  # epsilon of randomised response for one training label, at one party

    @classmethod
    def of(
        cls,
        config: RunConfig,
        ledgers: Mapping[str, Ledger] | None = None,
        secrets: SecretSource | None = None,
        masks: MaskSummary | None = None,
        warm_start_keys: str | None = None,
    ) -> PrivacySummary:
        """Summarise the protection of a run.

        Args:
            config: the settings with which the run trained.
            ledgers: the ledgers, by party; None: a server has none.
            secrets: the source of private draws; None: a server does not know it.
            masks: the masks or the encryption of the run; None if it has neither.
            warm_start_keys: how the keys of a warm start were signed; None: there are none, or it is not known.
        """
        found = None if ledgers is None else tuple(LedgerSummary.of(*item) for item in ledgers.items())
        from glasu.privacy.accounting import find_spent

        spent = [
            RowPrivacy(name, own, secrets != DERIVED)
            for name, ledger in (ledgers or {}).items()
            if (own := find_spent(ledger.rules))
        ]
        worst = max(spent, key=lambda each: each.spent.epsilon_zeroed, default=None)
        label_epsilon = config.privacy.label_epsilon
        return cls(config.privacy.secure_aggregation, secrets, found, masks, warm_start_keys, worst, label_epsilon)


def list_versions(config: RunConfig | None = None) -> dict[str, str]:
    """Return the versions that affect the bits of a run: of Python, of packages and of the extensions in `config`.

    Packages that are not installed are omitted. A server may have neither torch nor scipy.
    """
    found = {"python": platform.python_version(), "glasu": __version__}
    for package in ("torch", "torch_geometric", "numpy", "scipy"):
        if (version := _find_version(package)) is not None:
            found[package] = version
    for extension in () if config is None else config.extensions():
        found[f"extension {extension.name}"] = f"{extension.version} sha256:{extension.digest}".strip()
    return found


@functools.cache  # reading a version parses the whole description of a package
def _find_version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


class CostFields(TypedDict):
    """The fields that all reports share."""

    traffic: Traffic
    seconds: Seconds
    versions: Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class Report:
    """The common part of all reports of a training run: settings, results and cost."""

    config: RunConfig  # the settings with which the run trained
    test: SplitScores | None
    traffic: Traffic
    seconds: Seconds
    weights_sha256: tuple[str, ...]  # digests of the selected weights, in client order
    privacy: PrivacySummary
    versions: Mapping[str, str] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain values; a float that is not finite becomes None."""
        values = {item.name: getattr(self, item.name) for item in dataclasses.fields(self)}
        result: dict[str, Any] = to_json_value({**values, "config": self.config.to_dict(), "test": self.test or {}})
        return result

    def to_json(self) -> str:
        """Return the content of report.json."""
        return json.dumps(self.to_dict(), indent=2, allow_nan=False) + "\n"


@dataclass(frozen=True, kw_only=True)
class RunReport(Report):
    """Settings, results and cost of a run, in a simulation or at the server."""

    test: SplitScores
    validation: SplitScores
    history: tuple[HistoryEntry, ...]
    losses: tuple[float, ...]
    parties: tuple[PartySummary, ...]
    overridden: Mapping[str, Override]  # settings that the method, the sampler or the data replaced
    race: RaceSummary | None = None  # set if the preset had to decide between candidates
    notes: tuple[str, ...] = ()  # lines about the data
    baselines: Mapping[str, Baseline] = field(default_factory=dict)  # by method, if baselines were trained
    subsets: tuple[SubsetScores, ...] | None = None  # set after training with party dropout
    warm_start: WarmStart | None = None

    def _describe_selection(self) -> str:
        if self.warm_start is not None and self.warm_start.selected == "ensemble":
            return "the ensemble after the warm start"
        chosen = self.validation.round
        return "every party at its own best round" if chosen is None else f"best at round {chosen}"

    def _scores(self) -> str:
        from glasu.model.task import make_task  # loads numpy, which `glasu provision` does not use

        metric = make_task(self.config.train).selected_by
        if not self.test.metrics:  # a server
            return "the parties have the scores"
        test, validation = (metric.format(scores.metrics[metric.name]) for scores in (self.test, self.validation))
        return f"test {metric.title} {test} (validation {validation}, {self._describe_selection()})"

    def summary(self) -> str:
        """Return the run in one line."""
        return (
            f"{self.config.train.method}: {self._scores()}, "
            f"{self.traffic.total_bytes / 1e6:.1f} MB in {self.traffic.exchanges} exchanges, "
            f"{self.seconds.total:.1f} s"
        )


@dataclass(frozen=True, kw_only=True)
class Baseline(JsonRecord):
    """Results and cost of a cheaper method with its best settings, or the reason why the method is not possible."""

    test: SplitScores | None = None
    validation: SplitScores | None = None
    bytes: int = 0
    exchanges: int = 0
    # The chosen values of the keys in which the tried settings differ; None: only one set of settings was tried.
    settings: FlatSettings | None = None
    refused: str | None = None

    @classmethod
    def of(cls, report: RunReport) -> Baseline:
        """Return the part of a report that a comparison needs."""
        traffic = report.traffic
        return cls(
            test=report.test, validation=report.validation, bytes=traffic.total_bytes, exchanges=traffic.exchanges
        )


@dataclass(frozen=True, kw_only=True)
class PartyReport(Report):
    """Settings, results and cost of one party's part of a run between machines."""

    party: str
    parties: tuple[str, ...]
    run: str
    prepared: PreparedColumns
    # If the server has no scores, a party with labels reports them.
    validation: SplitScores | None = None
    history: tuple[HistoryEntry, ...] | None = None
    losses: tuple[float, ...] | None = None  # losses of this party
    race: RaceSummary | None = None  # as in `RunReport`; without scores, and with the cost of this party

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain values; scores that the server reports are omitted."""
        known = {name for name in ("validation", "history", "losses", "race") if getattr(self, name) is None}
        return {key: value for key, value in super().to_dict().items() if key not in known}


@dataclass(frozen=True, kw_only=True)
class PredictionReport(JsonRecord):
    """prediction.json of a server or of a party. A value that the role does not know is None."""

    party: str | None = None
    parties: tuple[str, ...]  # the parties that trained the model
    missing: tuple[str, ...] = ()  # the parties that were absent from the prediction
    validation: Mapping[str, float] | None = None  # validation scores of the other parties, from the model
    training: str | None = None  # the run that trained the model
    requested: int | None = None  # number of nodes that this party requested
    received: int | None = None  # number of nodes whose prediction this party received
    nodes: int | None = None  # number of nodes in all requests
    traffic: Traffic
    seconds: Seconds
    privacy: Mapping[str, tuple[LedgerSummary, ...]] | None = None
    versions: Mapping[str, str]

    def summary(self) -> str:
        """Return the result at the server in one sentence."""
        mark = f" without {', '.join(self.missing)}" if self.missing else ""
        return f"predicted {self.nodes} nodes{mark}; {self.traffic.bytes_to_clients / 1e6:.1f} MB sent to the parties."


def align_columns(rows: Sequence[Sequence[str]], words: int | None = None) -> list[str]:
    """Return one line per row of a text table.

    Args:
        rows: the cells; all rows have the same number of columns.
        words: the number of columns that are aligned left, from the first one; the others are aligned right. None: all
            columns are aligned left.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    words = len(widths) if words is None else words
    return [
        "  ".join(
            cell.ljust(width) if column < words else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def to_json_value(value: Any) -> Any:
    """Convert a value to JSON types; a float that is not finite becomes None."""
    if isinstance(value, Mapping):
        return {key: to_json_value(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_json_value(item) for item in value]
    if dataclasses.is_dataclass(value):
        return to_json_value(dataclasses.asdict(value))  # type: ignore[arg-type]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
