"""TrainedModel: the selected weights of all clients as a folder, and exact joint prediction with them.

model/model.toml            schema version, settings, classes, and one table per client
model/<party>.safetensors   the weights of one client
"""

from __future__ import annotations

import dataclasses
import hashlib
import time
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from glasu.config import RunConfig
from glasu.data.digest import data_digest
from glasu.data.party import PartyData
from glasu.errors import AlignmentError, ConfigError, DataError
from glasu.files import write_atomically
from glasu.model.blocks import NodeSet
from glasu.model.layers import Convolution
from glasu.model.split import weights_digest
from glasu.protocol.client import Client
from glasu.protocol.evaluation import client_prediction, server_prediction
from glasu.protocol.requests import Event, Save
from glasu.runtime.inprocess import Running, one_thread_each, run_alone, run_together
from glasu.runtime.meter import Meter
from glasu.runtime.simulation import Simulation, as_parties, make_clients, make_server, name_run, prepare
from glasu.timing import Stopwatch
from glasu.wire.message_key import Phase

SCHEMA = 1


@dataclass(frozen=True, eq=False)
class TrainedModel:
    """Everything that prediction needs besides the parties' data."""

    config: RunConfig  # resolved
    classes: tuple[str, ...]
    names: tuple[str, ...]
    scales: tuple[float, ...]  # each client's input scale
    num_features: tuple[int, ...]
    columns: tuple[str, ...]  # digests of the feature names; empty where they have none
    weights: tuple[dict[str, Tensor], ...]
    convolution: Convolution | None = None

    @classmethod
    def of(cls, simulation: Simulation, convolution: Convolution | None = None) -> TrainedModel:
        """Return the selected model of a finished run."""
        clients = simulation.clients
        return cls(
            config=clients[0].config,
            classes=next(client.party.classes for client in clients if client.has_labels),
            names=clients[0].identity.names,
            scales=tuple(client.data.scale for client in clients),
            num_features=tuple(client.party.num_features for client in clients),
            columns=tuple(client.party.columns_digest() for client in clients),
            weights=tuple(client.progress.best_weights for client in clients),
            convolution=convolution,
        )

    def predict_proba(
        self,
        parties: Sequence[PartyData],
        nodes: NodeSet | NDArray[np.bool_] | None = None,
        *,
        party: str | None = None,
        meter: Meter | None = None,
    ) -> NDArray[Any]:
        """Return class probabilities by exact joint inference, shape (n, classes).

        Args:
            parties: their data, in the order of training; labels and splits are not read.
            nodes: positions of the asked nodes, or a mask over all nodes; all by default.
            party: after standalone training, whose model predicts.
            meter: counts what is sent.
        """
        parties = prepare(self.config, as_parties(parties))
        self.check_data(parties)
        nodes = _positions(nodes, parties[0].num_nodes)
        alone = self._alone(party)
        with one_thread_each():
            labelled = self.labelled(parties)
            clients = make_clients(self.config, labelled, convolution=self.convolution, scales=self.scales)
            for client, weights in zip(clients, self.weights, strict=True):
                load_weights(client, weights)
            asked, models = hashlib.sha256(nodes.tobytes()).hexdigest(), map(weights_digest, self.weights)
            name_run(clients, self.config.digest(), asked, *models, *map(data_digest, labelled))
            running = [
                Running(
                    client_prediction(client, client.identity.key(Phase.PREDICTION, 0), nodes), _ignore, client.watch
                )
                for client in clients
            ]
            if self.config.model.aggregation_layers:
                server = make_server(self.config, clients)
                script = server_prediction(server, server.key(Phase.PREDICTION, 0), len(nodes))
                counted = meter or Meter()
                run_together(script, running, server.roster, counted, Stopwatch(time.perf_counter), _ignore)
            else:
                run_alone(running)
        found = running[alone if alone is not None else max(0, clients[0].identity.owner)]  # without an owner, any
        probabilities: NDArray[Any] = found.result
        return probabilities

    def _alone(self, party: str | None) -> int | None:
        """Return who predicts where every party has a model of its own, else None."""
        if self.config.model.aggregation_layers or len(self.names) == 1:
            if party is not None:
                raise ConfigError(f"party={party!r}: the parties trained one model together; leave the party out.")
            return None
        if party not in self.names:
            raise ConfigError(
                f"party={party!r}: each party trained a model of its own, and nothing joins them; "
                f"name whose model predicts: {', '.join(self.names)}."
            )
        return self.names.index(party)

    def predict(
        self,
        parties: Sequence[PartyData],
        nodes: NodeSet | NDArray[np.bool_] | None = None,
        *,
        party: str | None = None,
    ) -> NDArray[Any]:
        """Return class names, shape (n,); for a multi-label task 0 or 1 for each class, shape (n, classes)."""
        probabilities = self.predict_proba(parties, nodes, party=party)
        if self.config.train.task == "multilabel":
            return (probabilities > 0.5).astype(np.int64)
        names: NDArray[Any] = np.asarray(self.classes)[probabilities.argmax(axis=1)]
        return names

    def labelled(self, parties: Sequence[PartyData]) -> list[PartyData]:
        """Give every party the classes; prediction reads no label, and none has to be there."""
        shape = (
            (parties[0].num_nodes, len(self.classes))
            if self.config.train.task == "multilabel"
            else parties[0].num_nodes
        )
        unknown = np.full(shape, -1, np.int64)
        return [dataclasses.replace(party, labels=unknown, classes=self.classes, splits=None) for party in parties]

    def check_data(self, parties: Sequence[PartyData]) -> None:
        """Refuse parties, features or orders of nodes that are not those of the training."""
        if tuple(party.name for party in parties) != self.names:
            got = ", ".join(party.name for party in parties)
            raise AlignmentError(f"the model was trained by the parties {', '.join(self.names)}; got {got}.")
        for party, width, columns in zip(parties, self.num_features, self.columns, strict=True):
            if party.num_features != width:
                raise DataError(
                    f"party {party.name!r}: {party.num_features} features, but the model was trained with {width}."
                )
            if columns and party.columns_digest() != columns:
                raise DataError(
                    f"party {party.name!r}: its feature columns have other names, or another order, than in training."
                )
        if len({party.ids_digest() for party in parties}) > 1:
            raise AlignmentError("the parties list different nodes, or the same in another order; align them first.")

    def save(self, folder: str | Path) -> None:
        """Write the model as a folder, for its owner's eyes only; a model that lies there already is replaced.

        The manifest comes last and holds the digest of every file, so that a mixture of two models is noticed.
        """
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        sections = {
            section: {key: value for key, value in keys.items() if value is not None}
            for section, keys in self.config.to_dict().items()
        }
        clients = [
            {
                "name": name,
                "file": f"{name}.safetensors",
                "input_scale": self.scales[index],
                "num_features": self.num_features[index],
                "columns_sha256": self.columns[index],
                "weights_sha256": weights_digest(self.weights[index]),
            }
            for index, name in enumerate(self.names)
        ]
        for client, weights in zip(clients, self.weights, strict=True):
            write_atomically(folder / str(client["file"]), save(weights), mode=0o600)
        manifest = {"schema": SCHEMA, "classes": list(self.classes), "config": sections, "client": clients}
        former = _files_of(folder / "model.toml")
        write_atomically(folder / "model.toml", tomli_w.dumps(manifest).encode(), mode=0o600)
        for name in former - {str(client["file"]) for client in clients}:  # of a former model with other parties
            (folder / name).unlink(missing_ok=True)

    @classmethod
    def load(cls, folder: str | Path, convolution: Convolution | None = None) -> TrainedModel:
        """Read a model that `save` wrote; the folder of a run will do, for its model is in model/."""
        folder = Path(folder)
        if (folder / "model" / "model.toml").is_file():
            folder = folder / "model"
        manifest_file = folder / "model.toml"
        if not manifest_file.is_file():
            raise DataError(
                f"{folder}: holds no model, neither model/model.toml nor model.toml; give the --out folder of a `glasu "
                "train` or `glasu join` that has come to its end, or restore it."
            )
        try:
            manifest = tomllib.loads(manifest_file.read_text(encoding="utf-8"))
            schema, clients = manifest["schema"], manifest["client"]
            if schema != SCHEMA:
                raise ConfigError(f"{manifest_file}: schema {schema} is not known here; this version reads {SCHEMA}.")
            return cls(
                config=RunConfig.from_dict(manifest["config"], str(manifest_file)),
                classes=tuple(manifest["classes"]),
                names=tuple(client["name"] for client in clients),
                scales=tuple(client["input_scale"] for client in clients),
                num_features=tuple(client["num_features"] for client in clients),
                columns=tuple(client["columns_sha256"] for client in clients),
                weights=tuple(_load_weights(folder, client) for client in clients),
                convolution=convolution,
            )
        except OSError as error:
            raise DataError(
                f"{error.filename}: cannot be read ({error.strerror}); restore it, or train again."
            ) from None
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(f"{manifest_file}: is not the manifest of a model: {error}.") from None


def load_weights(client: Client, weights: dict[str, Tensor]) -> None:
    """Give a client the weights of a trained model."""
    try:
        client.learner.model.load_state_dict(weights)
    except RuntimeError:  # other names, or other shapes
        raise DataError(
            f"party {client.party.name!r}: its weights do not fit the model; are they another party's?"
        ) from None


def _files_of(manifest_file: Path) -> set[str]:
    """Return the files that a manifest names; none where there is no manifest."""
    try:
        clients = tomllib.loads(manifest_file.read_text(encoding="utf-8"))["client"]
        return {Path(client["file"]).name for client in clients}
    except (OSError, ValueError, KeyError, TypeError):
        return set()


def _load_weights(folder: Path, client: dict[str, Any]) -> dict[str, Tensor]:
    """Read one client's weights and compare them with the manifest."""
    file = folder / Path(client["file"]).name
    try:
        weights: dict[str, Tensor] = load(file.read_bytes())
    except SafetensorError as error:
        raise DataError(f"{file}: is damaged: {error}; train again, or restore it.") from None
    if weights_digest(weights) != client["weights_sha256"]:
        raise DataError(f"{file}: these are not the weights that model.toml names; train again, or restore it.")
    return weights


def _positions(nodes: NDArray[Any] | None, num_nodes: int) -> NodeSet:
    """Return the asked nodes as positions."""
    if nodes is None:
        return np.arange(num_nodes)
    nodes = np.asarray(nodes)
    if nodes.size == 0:
        return np.empty(0, np.int64)
    if nodes.dtype == bool:
        if nodes.shape != (num_nodes,):
            raise DataError(f"a mask of shape {nodes.shape} for {num_nodes} nodes; it needs one value per node.")
        return np.flatnonzero(nodes)
    if nodes.ndim != 1 or nodes.dtype.kind not in "iu":
        raise DataError("nodes must be a list of positions (integers), or a mask (true and false).")
    if nodes.min() < 0 or nodes.max() >= num_nodes:
        bad = nodes.min() if nodes.min() < 0 else nodes.max()
        raise DataError(f"nodes name position {bad}, but positions are 0..{num_nodes - 1}.")
    return nodes.astype(np.int64)


def _ignore(action: Save | Event) -> None:
    """A prediction saves nothing, and no one watches its progress here."""
