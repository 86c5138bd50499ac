"""TrainedModel: the selected weights of all clients as a folder, and exact joint prediction with them.

model/model.toml            schema version, settings, classes, and one table per client: the preparation of its features
model/<party>.safetensors   the weights of one client
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import tomli_w
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from glasu.config import RunConfig, TrainConfig
from glasu.data.methods import find_method, has_server
from glasu.data.party import PartyData
from glasu.data.party_name import check_party_name
from glasu.data.preprocessing import Preparation
from glasu.data.tables import write_table
from glasu.errors import AlignmentError, ConfigError, DataError, GlasuError
from glasu.files import put_in_place, write_atomically
from glasu.model.backbones import BACKBONES, find_backbone
from glasu.model.blocks import NodeSet
from glasu.model.split import digest_weights
from glasu.model.task import Targets, make_task
from glasu.protocol.client import Client
from glasu.protocol.key_agreement import client_key_agreement, server_key_agreement
from glasu.protocol.prediction import check_predicts_nodes, client_prediction, server_prediction
from glasu.protocol.presence import check_present
from glasu.protocol.requests import Script
from glasu.protocol.scoring import Scoring
from glasu.protocol.server import Server
from glasu.records import Sections, parse_toml, read_record, to_plain
from glasu.registry import Extension, require_extensions
from glasu.report import SubsetScores, find_subset
from glasu.runtime.client_ledger import keep_ledgers, sync_ledgers
from glasu.runtime.inprocess import ScriptRun, open_client_map, run_alone, run_together
from glasu.runtime.memory import check_prediction_memory, read_total_memory
from glasu.runtime.policy_file import PolicyFile
from glasu.runtime.simulation import check_party_list, derive_run, make_clients, make_server
from glasu.runtime.telemetry import TrafficCounter
from glasu.timing import Stopwatch
from glasu.wire.tensor_kinds import REPRESENTATION

MODEL_SCHEMA: Literal[2] = 2
MODEL_FILE = "model.toml"


@dataclass(frozen=True)
class ClientEntry:
    """One client in the manifest."""

    name: str
    file: str
    preparation: Preparation  # preparation of the features
    columns_sha256: str  # digest of the feature names; empty if the features have no names
    weights_sha256: str
    alpha: float | None = None  # set by `smooth`, see `model/propagation.py`; None at a party without edges

    def __post_init__(self) -> None:
        check_party_name(self.name)


@dataclass(frozen=True)
class ModelManifest:
    """The content of model.toml."""

    schema: Literal[2]
    classes: tuple[str, ...]
    config: Sections
    client: tuple[ClientEntry, ...]
    extension: tuple[Extension, ...] = ()  # the extensions that the settings use
    subset: tuple[SubsetScores, ...] = ()
    ensemble: bool = False
    ranges: Mapping[str, tuple[float, ...]] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.client:
            raise DataError("client: a model needs at least one client.")


@dataclass(frozen=True, eq=False)
class TrainedModel:
    """The selected weights of all clients, and everything else that a prediction needs, except the parties' data."""

    config: RunConfig  # resolved
    classes: tuple[str, ...]
    clients: tuple[ClientEntry, ...]
    weights: tuple[dict[str, Tensor], ...]
    subsets: tuple[SubsetScores, ...] = ()  # validation scores of subsets of the parties; only with party dropout
    ensemble: bool = False  # the parties compute alone, and their scores are averaged; see `protocol/warm_start.py`
    # With masks: the ranges of the columns of representations, by layer. All parties know them.
    ranges: Mapping[str, tuple[float, ...]] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(cls, clients: Sequence[Client]) -> TrainedModel:
        """Return the model that these clients have selected. They are the clients of all parties, or of one party."""
        return cls(
            config=clients[0].config,
            classes=next((client.party.classes for client in clients if client.has_labels), ()),
            clients=tuple(
                ClientEntry(
                    name=client.name,
                    file=f"{client.name}.safetensors",
                    preparation=client.data.preparation,
                    columns_sha256=client.party.columns_digest(),
                    weights_sha256=digest_weights(client.progress.best_weights),
                    alpha=client.progress.alpha,
                )
                for client in clients
            ),
            weights=tuple(client.progress.best_weights for client in clients),
            subsets=_list_subsets(next((client for client in clients if client.has_labels), clients[0])),
            ensemble=clients[0].progress.ensemble,
            ranges=_list_ranges(clients[0]),
        )

    @property
    def names(self) -> tuple[str, ...]:
        """The parties, in client order."""
        return tuple(client.name for client in self.clients)

    def predict_proba(
        self,
        parties: Sequence[PartyData],
        nodes: NodeSet | NDArray[np.bool_] | None = None,
        *,
        party: str | None = None,
        traffic: TrafficCounter | None = None,
    ) -> NDArray[Any]:
        """Return class probabilities by exact joint inference, shape (n, classes); see `scores`."""
        if not self.classes:
            raise ConfigError("the model predicts numbers and has no class probabilities; call predict.")
        return self.scores(parties, nodes, party=party, traffic=traffic)

    def scores(
        self,
        parties: Sequence[PartyData],
        nodes: NodeSet | NDArray[np.bool_] | None = None,
        *,
        party: str | None = None,
        traffic: TrafficCounter | None = None,
        ledgers: Path | None = None,
        policies: Mapping[str, PolicyFile] | None = None,
    ) -> NDArray[Any]:
        """Return class probabilities, shape (n, classes), or predicted numbers, shape (n, 1), by exact joint inference.

        After training with party dropout, some of the parties can predict without the others; see `restrict_parties`.

        Args:
            parties: the data of the parties, in the order of training; labels and splits are not read.
            nodes: positions of the requested nodes, or a mask over all nodes; all by default.
            party: after standalone training, the party whose model predicts.
            traffic: counts the messages.
            ledgers: folder of the parties' ledgers; None: nothing is recorded in a file.
            policies: the policies, by party.
        """
        parties = find_method(self.config).prepare(check_party_list(parties))
        names = tuple(party.name for party in parties)
        if names != self.names and set(names) < set(self.names):
            chosen = self.restrict_parties(names)
            return chosen.scores(parties, nodes, party=party, traffic=traffic, ledgers=ledgers, policies=policies)
        self.check_data(parties)
        advice = f"this machine has {{limit}}. Use a larger machine; if settings were changed, restore {MODEL_FILE}."
        check_prediction_memory(self.config, parties, read_total_memory(), advice)
        nodes = _find_positions(nodes, parties[0].num_nodes)
        alone = self._find_alone(party)
        with open_client_map():
            prepared = self.add_unknown_labels(parties)
            preparations = [client.preparation for client in self.clients]
            query, models = hashlib.sha256(nodes.tobytes()).hexdigest(), map(digest_weights, self.weights)
            digests = [*models, *(party.data_digest() for party in prepared), *["ensemble"][: self.ensemble]]
            run = derive_run(self.config.digest(), query, *digests)
            clients = make_clients(self.config, prepared, preparations=preparations, run=run)
            for client, entry, weights in zip(clients, self.clients, self.weights, strict=True):
                load_weights(client, entry, weights, self)
            running = [ScriptRun(client.name, _predict(client, nodes), client.watch) for client in clients]
            if has_server(self.config):
                server = make_server(self.config, clients)
                server.progress.ensemble = self.ensemble
                script = _serve_prediction(server, len(nodes))
                counter = TrafficCounter() if traffic is None else traffic
                serving = ScriptRun("server", script, Stopwatch(time.perf_counter))
                with keep_ledgers(clients, ledgers, policies or {}, "prediction"):
                    run_together(serving, running, counter, before_sending=lambda: sync_ledgers(clients))
            else:
                run_alone(running)
        # Without a label owner, all clients have the same scores.
        found = running[alone if alone is not None else (clients[0].identity.owner or 0)]
        scores: NDArray[Any] = found.result
        return scores

    def restrict_parties(self, names: Sequence[str]) -> TrainedModel:
        """Return the model for a prediction by some of the parties. Means are taken over these parties only.

        Raises:
            AlignmentError: the model was trained without party dropout.
            ConfigError: the label owner is missing.
        """
        check_present(self.config, self.names, names)
        kept = [index for index, name in enumerate(self.names) if name in names]
        return dataclasses.replace(
            self,
            clients=tuple(self.clients[index] for index in kept),
            weights=tuple(self.weights[index] for index in kept),
        )

    def find_subset(self, names: Sequence[str]) -> SubsetScores | None:
        """Return the validation scores of a subset of the parties; None if this subset was not scored."""
        return find_subset(self.subsets, names)

    def _find_alone(self, party: str | None) -> int | None:
        """Return the index of the party whose own model predicts, or None if all parties predict together."""
        if has_server(self.config) or len(self.names) == 1:
            if party is not None:
                raise ConfigError(f"party={party!r}: the parties predict together; remove this argument.")
            return None
        trained = self.names if self.config.train.label_owner is None else (self.config.train.label_owner,)
        if party not in trained:
            given = "--party NAME (in Python: party=NAME) is missing" if party is None else f"party={party!r}"
            raise ConfigError(
                f"{given}: each party with labels trained its own model; choose the one that predicts: "
                f"{', '.join(trained)}."
            )
        return self.names.index(party)

    def predict(
        self,
        parties: Sequence[PartyData],
        nodes: NodeSet | NDArray[np.bool_] | None = None,
        *,
        party: str | None = None,
    ) -> NDArray[Any]:
        """Return class names or numbers, shape (n,); for a multi-label task 0 or 1 per class, shape (n, classes)."""
        return make_task(self.config.train).predict(self.scores(parties, nodes, party=party), self.classes)

    def add_unknown_labels(self, parties: Sequence[PartyData]) -> list[PartyData]:
        """Return the parties with the model's classes and unknown labels, because a prediction reads no labels."""
        unknown = make_task(self.config.train).unknown_labels(parties[0].num_nodes, self.classes)
        return [dataclasses.replace(party, labels=unknown, classes=self.classes, splits=None) for party in parties]

    def check_data(self, parties: Sequence[PartyData]) -> None:
        """Refuse data if the parties, feature columns or node order have changed since the training run."""
        if tuple(party.name for party in parties) != self.names:
            got = [party.name for party in parties]
            raise AlignmentError(
                f"the model was trained by the parties {', '.join(self.names)}; got {', '.join(got)}. "
                f"{_advise_on_names(self.names, got)}."
            )
        for party, client in zip(parties, self.clients, strict=True):
            if party.num_features != client.preparation.num_columns:
                raise DataError(
                    f"party {party.name!r}: {party.num_features} features, but the model was trained with "
                    f"{client.preparation.num_columns}."
                )
            if client.columns_sha256 and party.columns_digest() != client.columns_sha256:
                raise DataError(
                    f"party {party.name!r}: the names or the order of its feature columns have changed since training."
                )
        if len({party.ids_digest() for party in parties}) > 1:
            raise AlignmentError("the parties list different nodes or different orders; align the parties first.")

    def save(self, folder: str | Path) -> None:
        """Write the model to a folder, readable by its owner only. An earlier model in the folder is replaced.

        The manifest is written last and holds the digest of every file, so a mixture of two models is detected.
        """
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        sections = {
            section: {key: value for key, value in keys.items() if value is not None}
            for section, keys in self.config.to_dict().items()
        }
        for client, weights in zip(self.clients, self.weights, strict=True):
            write_atomically(folder / client.file, save(weights), mode=0o600)
        manifest = ModelManifest(
            schema=MODEL_SCHEMA,
            classes=self.classes,
            config=sections,
            client=self.clients,
            extension=self.config.extensions(),
            subset=self.subsets,
            ensemble=self.ensemble,
            ranges=self.ranges,
        )
        former = _list_files(folder)
        write_atomically(folder / MODEL_FILE, tomli_w.dumps(to_plain(manifest)).encode(), mode=0o600)
        for name in former - {client.file for client in self.clients}:  # files of an earlier model with other parties
            (folder / name).unlink(missing_ok=True)

    @classmethod
    def load(cls, folder: str | Path) -> TrainedModel:
        """Read a model that `save` wrote, from its folder or from the folder of the run."""
        folder = Path(folder)
        if (folder / "model" / MODEL_FILE).is_file():
            folder = folder / "model"
        if not (folder / MODEL_FILE).is_file():
            raise DataError(
                f"{folder}: holds no model, neither model/{MODEL_FILE} nor {MODEL_FILE}; give the --out folder of a "
                "finished `glasu train` or `glasu join`."
            )
        try:
            manifest = _read_manifest(folder / MODEL_FILE)
            require_extensions(manifest.extension, str(folder / MODEL_FILE))
            config = RunConfig.from_dict(manifest.config, str(folder / MODEL_FILE))
            return cls(
                config=config,
                classes=manifest.classes,
                clients=manifest.client,
                weights=tuple(_read_weights(folder, client, config) for client in manifest.client),
                subsets=manifest.subset,
                ensemble=manifest.ensemble,
                ranges=manifest.ranges,
            )
        except OSError as error:
            raise DataError(
                f"{error.filename}: cannot be read ({error.strerror}); restore it, or train again."
            ) from None


def _advise_on_names(names: Sequence[str], got: Sequence[str]) -> str:
    """Return the remedy if the parties `got` are not the parties `names`, or are in another order."""
    missing = [name for name in names if name not in got]
    other = [name for name in got if name not in names]
    if missing and len(missing) == len(other):
        pairs = zip(missing, other, strict=True)
        renamed = ", and ".join(f'set name = "{name}" in the party.toml of {now}' for name, now in pairs)
        return f"If these are the same organisations under other names, {renamed}"
    parts = [f"{verb} {', '.join(found)}" for verb, found in (("Add", missing), ("Remove", other)) if found]
    return ". ".join(parts) or "List them in the order of the training"


def _list_subsets(client: Client) -> tuple[SubsetScores, ...]:
    """Return the subsets that a client with labels has scored. Metrics that are not finite are omitted."""
    return tuple(
        SubsetScores(names, {name: value for name, value in found.items() if math.isfinite(value)})
        for names, found in client.progress.subsets.items()
    )


def remove_model(folder: Path) -> None:
    """Remove a saved model. Other files in the folder stay."""
    files = _list_files(folder)
    (folder / MODEL_FILE).unlink(missing_ok=True)
    for name in files:
        (folder / name).unlink(missing_ok=True)


def _predict(client: Client, nodes: NodeSet) -> Script[NDArray[Any]]:
    check_predicts_nodes(client)
    if client.requested.privacy.hides_parts and has_server(client.requested):
        yield from client_key_agreement(client)
    return (yield from client_prediction(client, Scoring.of_request(client), Targets.of_nodes(nodes)))


def _serve_prediction(server: Server, num_nodes: int) -> Script[None]:
    if server.requested.privacy.hides_parts:
        yield from server_key_agreement(server)
    yield from server_prediction(server, Scoring.of_request(server), num_nodes)


def _list_ranges(client: Client) -> dict[str, tuple[float, ...]]:
    """Return the ranges of representations, by layer."""
    found = client.release.sums.grids.list_ranges(REPRESENTATION)
    return {str(layer): tuple(range_.tolist()) for layer, range_ in found.items()}


def write_predictions(
    path: Path, ids: NDArray[Any], scores: NDArray[Any], classes: Sequence[str], train: TrainConfig
) -> None:
    """Write one row per id to a .parquet or .csv file, atomically and readable by its owner only."""
    columns = {"id": ids.tolist(), **make_task(train).columns(scores, classes)}
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".predictions-") as temporary:
        write_table(columns, Path(temporary) / path.name)
        put_in_place(Path(temporary) / path.name, path, 0o600)


def load_weights(client: Client, entry: ClientEntry, weights: dict[str, Tensor], model: TrainedModel) -> None:
    """Load a client's part of a trained model."""
    client.progress.alpha, client.progress.ensemble = entry.alpha, model.ensemble
    for layer, values in model.ranges.items():
        client.release.sums.grids.ranges[REPRESENTATION.name, int(layer)] = torch.tensor(values, dtype=torch.float64)
    try:
        client.load_weights(weights)
    except RuntimeError:  # names or shapes differ
        raise DataError(
            f"party {client.party.name!r}: its weights do not fit the model; they may be another party's."
        ) from None


def _read_manifest(path: Path) -> ModelManifest:
    value = parse_toml(path.read_bytes(), str(path))
    schema = value.get("schema") if isinstance(value, dict) else None
    if type(schema) is int and schema != MODEL_SCHEMA:
        raise ConfigError(f"{path}: has schema {schema}, and this version of glasu reads {MODEL_SCHEMA}; train again.")
    return read_record(ModelManifest, value, str(path))


def _list_files(folder: Path) -> set[str]:
    """Return the weight files that a manifest names; an empty set if the manifest is missing or damaged."""
    try:
        return {Path(client.file).name for client in _read_manifest(folder / MODEL_FILE).client}
    except (OSError, GlasuError):
        return set()


def _read_weights(folder: Path, client: ClientEntry, config: RunConfig) -> dict[str, Tensor]:
    """Read one client's weights and compare them with the manifest."""
    file = folder / Path(client.file).name  # use only the name of the file, so that no file outside `folder` is read
    try:
        weights: dict[str, Tensor] = load(file.read_bytes())
    except SafetensorError as error:
        raise DataError(f"{file}: is damaged: {error}; train again, or restore it.") from None
    if digest_weights(weights) != client.weights_sha256:
        raise DataError(f"{file}: its weights do not match the digest in {MODEL_FILE}; train again, or restore it.")
    _refuse_larger_model(config, client, weights, folder / MODEL_FILE)
    return weights


def _refuse_larger_model(config: RunConfig, client: ClientEntry, weights: dict[str, Tensor], manifest: Path) -> None:
    """Refuse settings that need more weights than were saved, before memory for the model is allocated."""
    model = config.model
    if find_backbone(model) not in BACKBONES.values():  # the number of weights of an extension's backbone is unknown
        return
    least = model.hidden * (client.preparation.width + (model.num_layers - 1) * model.hidden)
    found = sum(tensor.numel() for tensor in weights.values())
    if least > found:
        raise DataError(
            f"{manifest}: config.model.hidden={model.hidden}, config.model.num_layers={model.num_layers}: such a model "
            f"has at least {least} weights, and {client.file} has {found}; restore {MODEL_FILE}, or train again."
        )


def _find_positions(nodes: NDArray[Any] | None, num_nodes: int) -> NodeSet:
    """Return the requested nodes as positions."""
    if nodes is None:
        return np.arange(num_nodes)
    nodes = np.asarray(nodes)
    if nodes.size == 0:
        return np.empty(0, np.int64)
    if nodes.dtype == bool:
        if nodes.shape != (num_nodes,):
            raise DataError(f"the mask has shape {nodes.shape}, but needs one value for each of the {num_nodes} nodes.")
        return np.flatnonzero(nodes)
    if nodes.ndim != 1 or nodes.dtype.kind not in "iu":
        raise DataError("nodes must be a list of positions (integers), or a mask (true and false).")
    if nodes.min() < 0 or nodes.max() >= num_nodes:
        bad = nodes.min() if nodes.min() < 0 else nodes.max()
        raise DataError(f"nodes contains position {bad}, but positions are 0..{num_nodes - 1}.")
    return nodes.astype(np.int64)
