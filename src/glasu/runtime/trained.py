"""TrainedModel: the selected weights of all clients as a folder, and exact joint prediction with them.

model/model.toml            schema version, settings, classes, and one table per client
model/<party>.safetensors   the weights of one client
"""

from __future__ import annotations

import dataclasses
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
from glasu.data.files import write_atomically
from glasu.data.party import PartyData
from glasu.errors import AlignmentError, ConfigError, DataError
from glasu.keys import Phase
from glasu.model.blocks import NodeSet
from glasu.model.layers import Convolution
from glasu.protocol.actor import Client
from glasu.protocol.evaluation import client_prediction, server_prediction
from glasu.protocol.messages import ClientScript, ServerScript
from glasu.protocol.server import Server
from glasu.runtime.meter import Meter
from glasu.runtime.simulation import Simulation, make_clients, make_server, one_thread, prepare, run_in_process
from glasu.timing import Stopwatch

SCHEMA = 1


@dataclass(frozen=True, eq=False)
class TrainedModel:
    """Everything that prediction needs besides the parties' data."""

    config: RunConfig  # resolved
    classes: tuple[str, ...]
    names: tuple[str, ...]
    scales: tuple[float, ...]  # each client's input scale
    num_features: tuple[int, ...]
    weights: tuple[dict[str, Tensor], ...]
    convolution: Convolution | None = None

    @classmethod
    def of(cls, simulation: Simulation, convolution: Convolution | None = None) -> TrainedModel:
        """Return the selected model of a finished run."""
        clients = simulation.clients
        return cls(
            config=clients[0].config,
            classes=next(client.party.classes for client in clients if client.has_labels),
            names=clients[0].names,
            scales=tuple(client.scale for client in clients),
            num_features=tuple(client.party.num_features for client in clients),
            weights=tuple(client.best_weights for client in clients),
            convolution=convolution,
        )

    def predict_proba(
        self, parties: Sequence[PartyData], nodes: NodeSet | None = None, meter: Meter | None = None
    ) -> NDArray[Any]:
        """Return the class probabilities of the nodes (all by default), shape (n, classes), by joint inference."""
        parties = prepare(self.config, parties)
        self._check(parties)
        nodes = np.arange(parties[0].num_nodes) if nodes is None else np.asarray(nodes, np.int64)
        with one_thread():
            watch = Stopwatch(time.perf_counter)
            clients = make_clients(self.config, self._labelled(parties), watch, self.convolution, self.scales)
            for client, weights in zip(clients, self.weights, strict=True):
                try:
                    client.model.load_state_dict(weights)
                except RuntimeError:  # other names, or other shapes
                    raise DataError(
                        f"party {client.party.name!r}: its weights do not fit the model; are they another party's?"
                    ) from None
            found: dict[int, NDArray[Any]] = {}
            scripts = [_predict(client, nodes, found) for client in clients]
            if self.config.model.aggregation_layers:
                server = _serve(make_server(self.config, clients), len(nodes))
                run_in_process(server, scripts, meter or Meter(), watch)
            else:
                for script in scripts:
                    assert not list(script)  # alone, nobody sends anything
        if clients[0].owner >= 0:
            return found[clients[0].owner]
        return np.asarray(np.mean([found[client.index] for client in clients], axis=0))

    def predict(self, parties: Sequence[PartyData], nodes: NodeSet | None = None) -> NDArray[Any]:
        """Return class names, shape (n,); for a multi-label task 0 or 1 for each class, shape (n, classes)."""
        probabilities = self.predict_proba(parties, nodes)
        if self.config.train.task == "multilabel":
            return (probabilities > 0.5).astype(np.int64)
        names: NDArray[Any] = np.asarray(self.classes)[probabilities.argmax(axis=1)]
        return names

    def _labelled(self, parties: Sequence[PartyData]) -> list[PartyData]:
        """Give every party the classes; prediction reads no label, and none has to be there."""
        shape = (
            (parties[0].num_nodes, len(self.classes))
            if self.config.train.task == "multilabel"
            else parties[0].num_nodes
        )
        unknown = np.full(shape, -1, np.int64)
        return [dataclasses.replace(party, labels=unknown, classes=self.classes, splits=None) for party in parties]

    def _check(self, parties: Sequence[PartyData]) -> None:
        if tuple(party.name for party in parties) != self.names:
            got = ", ".join(party.name for party in parties)
            raise AlignmentError(f"the model was trained by the parties {', '.join(self.names)}; got {got}.")
        for party, width in zip(parties, self.num_features, strict=True):
            if party.num_features != width:
                raise DataError(
                    f"party {party.name!r}: {party.num_features} features, but the model was trained with {width}."
                )
        if len({party.ids_digest() for party in parties}) > 1:
            raise AlignmentError("the parties list different nodes, or the same in another order; align them first.")

    def save(self, folder: str | Path) -> None:
        """Write the model as a folder; a model that lies there already is replaced."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        sections = {
            section: {key: value for key, value in keys.items() if value is not None}
            for section, keys in self.config.to_dict().items()
        }
        clients = [
            {"name": name, "file": f"{name}.safetensors", "input_scale": scale, "num_features": width}
            for name, scale, width in zip(self.names, self.scales, self.num_features, strict=True)
        ]
        for client, weights in zip(clients, self.weights, strict=True):
            write_atomically(folder / str(client["file"]), save(weights))
        manifest = {"schema": SCHEMA, "classes": list(self.classes), "config": sections, "client": clients}
        write_atomically(folder / "model.toml", tomli_w.dumps(manifest).encode())

    @classmethod
    def load(cls, folder: str | Path, convolution: Convolution | None = None) -> TrainedModel:
        """Read a model that `save` wrote."""
        manifest_file = Path(folder) / "model.toml"
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
                weights=tuple(load((Path(folder) / Path(client["file"]).name).read_bytes()) for client in clients),
                convolution=convolution,
            )
        except OSError as error:
            raise DataError(
                f"{error.filename}: cannot be read ({error.strerror}); give the folder that `glasu train --out` wrote."
            ) from None
        except (ValueError, SafetensorError, KeyError, TypeError) as error:
            raise DataError(f"{folder}: is not a model folder of GLASU: {error!r}.") from None


def _predict(client: Client, nodes: NodeSet, found: dict[int, NDArray[Any]]) -> ClientScript:
    found[client.index] = yield from client_prediction(client, 0, nodes, Phase.PREDICTION)


def _serve(server: Server, num_nodes: int) -> ServerScript:
    yield from server_prediction(server, 0, num_nodes, Phase.PREDICTION)
    yield server.answers
