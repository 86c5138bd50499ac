"""A party's own part of a run: what it states of itself, the settings as they fit its data, its first weights."""

from __future__ import annotations

import dataclasses
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from glasu.config import RunConfig, resolve
from glasu.data.alignment import check_parties
from glasu.data.party import PartyData
from glasu.data.sources.catalog import choose_splits
from glasu.errors import ConfigError
from glasu.network.compatibility import (
    KIND,
    ORDER,
    SET,
    Purpose,
    differences,
    names_digest,
    protocol_facts,
    public_version,
)
from glasu.network.frames import Limits
from glasu.protocol.client import Client
from glasu.report import versions
from glasu.timing import Clock, Stopwatch

LAYER_BYTES = 16 << 10  # what the objects of one layer take, however narrow it is
BUILDING = threading.Lock()  # first weights pass through torch's one generator: parties in one process take turns


def party_facts(party: PartyData, purpose: Purpose) -> dict[str, Any]:
    """Return what a party states of itself, whatever the settings are."""
    found = versions()
    return {
        **protocol_facts(found, purpose),
        "torch": public_version(found["torch"]),
        "torch build": found["torch"],
        **id_facts(party),
    }


def id_facts(party: PartyData) -> dict[str, Any]:
    """Return what lets the server compare ids: how many, of what kind, and digests of all of them together."""
    return {
        "nodes": party.num_nodes,
        KIND: "numbers" if party.ids.dtype.kind == "i" else "strings",
        ORDER: party.ids_digest(),
        SET: party.set_digest,
    }


def label_facts(party: PartyData) -> dict[str, Any]:
    """Return what must be equal at all parties whose labels are used."""
    facts: dict[str, Any] = {}
    if party.labels is not None:
        facts |= {"classes": len(party.classes), "class names (SHA-256)": names_digest(party.classes)}
    if party.splits is not None:
        facts |= {
            "splits (SHA-256)": party.splits.digest(),
            "validation nodes": len(party.splits.validation),
            "test nodes": len(party.splits.test),
        }
    return facts


def unexpected(config: RunConfig, expect: RunConfig) -> list[tuple[str, Any, Any]]:
    """Return in what the server's settings differ from those that were agreed on: (name, expected, got)."""
    expected = expect.replace(data={"num_clients": config.data.num_clients}).comparable()
    return differences(expected, config.comparable())


def fitted(config: RunConfig, party: PartyData) -> tuple[RunConfig, PartyData]:
    """Return the settings, resolved, and the party with what they use of it; refuse labels that do not fit them."""
    labels = config.train.labels
    party = choose_splits(party, config.data.split, config.data_seed)
    if labels in ("all", party.name):
        check_parties([party], labels, config.train.task)
    else:
        party = dataclasses.replace(party, labels=None, classes=(), splits=None)
    return resolve(config, party.num_nodes)[0], party


def check_memory(config: RunConfig, party: PartyData, max_memory: int | None = None) -> None:
    """Refuse settings whose model or messages do not fit into this party's memory, before anything is allocated.

    The estimate is a lower bound: weights with their gradient, optimiser state and selected copy, and two matrices of
    hidden rows for all nodes.

    Args:
        config: the server's settings.
        party: this party's data.
        max_memory: the bytes that may be needed; None: half of this machine's memory.
    """
    model, limit = config.model, total_memory() // 2 if max_memory is None else max_memory
    size = 8 if config.wire.precision == "fp64" else 4
    weights = model.hidden * (party.num_features + (model.num_layers - 1) * model.hidden)
    copies = 5 if config.train.optimizer == "adam" else 3
    needed = size * (copies * weights + 2 * party.num_nodes * model.hidden) + model.num_layers * LAYER_BYTES
    settings = f"model.hidden={model.hidden}, model.num_layers={model.num_layers}: the model needs"
    if needed <= limit:
        needed = Limits(config, party.num_nodes, len(party.classes), config.data.num_clients).largest
        settings = f"train.num_local_steps={config.train.num_local_steps}, model.hidden={model.hidden}: a message needs"
    if needed > limit:
        raise ConfigError(
            f"{settings} at least {needed / 2**30:.1f} GiB, and this party allows {limit / 2**30:.1f} GiB. Ask the "
            "server's operator for smaller values, or raise the limit with --max-memory."
        )


def total_memory() -> int:
    """Return the bytes of memory of this machine, or of its container where that has a limit."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 1 << 34
    try:
        return min(total, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    except (OSError, ValueError):  # no control group of version 2, or "max"
        return total


def build_client(
    config: RunConfig, party: PartyData, index: int, roster: Sequence[str], clock: Clock, scale: float | None = None
) -> Client:
    """Return a party's part of the model, with its first weights."""
    with BUILDING:
        return Client(
            config,
            party,
            index=index,
            names=roster,
            num_outputs=len(party.classes),
            watch=Stopwatch(clock),
            scale=scale,
        )
