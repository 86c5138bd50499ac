"""Refuse settings that need more memory than is available, before it is allocated. Torch is not loaded here."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from glasu.config import RunConfig, list_candidates
from glasu.data.party import PartyData
from glasu.errors import ConfigError
from glasu.protocol.limits import Limits
from glasu.wire.encodings import find_compute_dtype

BYTE_UNITS = (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10))


def check_memory(config: RunConfig, parties: Sequence[PartyData], limit: int, advice: str) -> None:
    """Refuse settings whose models, or one message, need more than `limit` bytes.

    The estimate is a lower bound: the weights with their gradients, optimizer state and selected copy, and two matrices
    of hidden representations of all nodes. It includes constant columns, although the preparation of features drops
    them.

    Args:
        config: the settings.
        parties: the parties that train in this process.
        limit: the allowed number of bytes.
        advice: the end of the error message, after "needs at least 3 GiB, and "; {limit} in it is replaced.
    """
    for candidate in list_candidates(config):
        _check_candidate(candidate, parties, limit, advice)


def _check_candidate(config: RunConfig, parties: Sequence[PartyData], limit: int, advice: str) -> None:
    model, size = config.model, find_compute_dtype(config).itemsize
    copies = 5 if config.train.optimizer == "adam" else 3
    weights = sum(model.hidden * (party.num_features + (model.num_layers - 1) * model.hidden) for party in parties)
    weights += model.owner_layers * model.hidden**2 * any(party.labels is not None for party in parties)
    nodes = sum(party.num_nodes for party in parties)
    needed = size * (copies * weights + 2 * nodes * model.hidden)
    settings = f"model.hidden={model.hidden}, model.num_layers={model.num_layers}: the model needs"
    if needed <= limit:
        classes = max(len(party.classes) for party in parties)
        needed = Limits.of_run(config, parties[0].num_nodes, classes, config.data.num_clients).largest
        settings = f"train.num_local_steps={config.train.num_local_steps}, model.hidden={model.hidden}: a message needs"
    if needed > limit:
        raise ConfigError(
            f"{settings} at least {_describe_size(needed)}, and {advice.format(limit=_describe_size(limit))}"
        )


def read_total_memory() -> int:
    """Return the memory of this machine in bytes, or the limit of its container if there is one."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 1 << 34
    try:
        return min(total, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    except (OSError, ValueError):  # there is no cgroup v2, or it has no limit ("max")
        return total


def _describe_size(count: int) -> str:
    """Format a number of bytes in the largest unit that gives at least 1."""
    return next((f"{count / size:.1f} {unit}" for unit, size in BYTE_UNITS if count >= size), f"{count} bytes")
