"""States of the roles <-> arrays and plain values, as checkpoints hold them; torch is loaded for a client's only."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from glasu.protocol.state import ClientState, Selection, ServerState

if TYPE_CHECKING:
    from torch import Tensor

Arrays = dict[str, NDArray[Any]]
Facts = dict[str, Any]
TENSORS = ("weights", "optimizer", "best_weights")


def to_plain(state: ClientState | ServerState) -> tuple[Arrays, Facts]:
    """Return the arrays of a state by name, and the rest."""
    return client_to_plain(state) if isinstance(state, ClientState) else server_to_plain(state)


def client_to_plain(state: ClientState) -> tuple[Arrays, Facts]:
    """Return a client's tensors by name, and the rest."""
    arrays = {
        f"{kind}/{name}": tensor.contiguous().numpy()
        for kind in TENSORS
        for name, tensor in getattr(state, kind).items()
    }
    facts = {
        "config_digest": state.config_digest,
        "round": state.round,
        "selection": None if state.selection is None else dataclasses.asdict(state.selection),
        "stopped": state.stopped,
        "incarnation": state.incarnation,
        "key_epoch": state.key_epoch,
        "noise_secret": state.noise_secret.hex(),
        "traffic": dict(state.traffic),
        "ledger_head": state.ledger_head.hex(),
        "ledger_totals": [[list(key), list(total)] for key, total in state.ledger_totals.items()],
    }
    return arrays, facts


def client_from_plain(arrays: Mapping[str, NDArray[Any]], facts: Mapping[str, Any]) -> ClientState:
    """Undo `client_to_plain`."""
    import torch

    def tensors(kind: str) -> dict[str, Tensor]:
        prefix = f"{kind}/"
        chosen = {name: value for name, value in arrays.items() if name.startswith(prefix)}
        return {name.removeprefix(prefix): torch.from_numpy(value.copy()) for name, value in chosen.items()}

    selection = facts["selection"]
    return ClientState(
        config_digest=facts["config_digest"],
        round=facts["round"],
        weights=tensors("weights"),
        optimizer=tensors("optimizer"),
        best_weights=tensors("best_weights"),
        selection=None if selection is None else Selection(**selection),
        stopped=facts["stopped"],
        incarnation=facts["incarnation"],
        key_epoch=facts["key_epoch"],
        noise_secret=bytes.fromhex(facts["noise_secret"]),
        traffic=facts["traffic"],
        ledger_head=bytes.fromhex(facts["ledger_head"]),
        ledger_totals={_ledger_key(key): tuple(total) for key, total in facts["ledger_totals"]},
    )


def _ledger_key(key: list[Any]) -> tuple[str, str, int, str]:
    phase, kind, layer, protection = key
    return phase, kind, layer, protection


def server_to_plain(state: ServerState) -> tuple[Arrays, Facts]:
    """Return the server's losses as an array, and the rest."""
    facts = {
        "run": state.run.hex(),
        "config_digest": state.config_digest,
        "roster": list(state.roster),
        "round": state.round,
        "selection": dataclasses.asdict(state.selection),
        "stopped": state.stopped,
        "traffic": dict(state.traffic),
    }
    return {"losses": np.asarray(state.losses, np.float64)}, facts


def server_from_plain(arrays: Mapping[str, NDArray[Any]], facts: Mapping[str, Any]) -> ServerState:
    """Undo `server_to_plain`."""
    return ServerState(
        run=bytes.fromhex(facts["run"]),
        config_digest=facts["config_digest"],
        roster=tuple(facts["roster"]),
        round=facts["round"],
        selection=Selection(**facts["selection"]),
        stopped=facts["stopped"],
        losses=tuple(arrays["losses"].tolist()),
        traffic=facts["traffic"],
    )
