"""A party's own part of a run: its facts, the settings resolved for its data, and its client with first weights."""

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
from glasu.network.facts import Facts, Purpose, digest_names, public_version, server_facts
from glasu.protocol.client import Client
from glasu.protocol.limits import Limits
from glasu.report import versions
from glasu.timing import Clock, Stopwatch
from glasu.wire.encodings import compute_dtype

LAYER_BYTES = 16 << 10  # memory of the objects of one layer, however narrow it is
BUILDING = threading.Lock()  # first weights use torch's global generator, so parties in one process build in turn


def party_facts(party: PartyData | None, purpose: Purpose, **more: Any) -> Facts:
    """Return the facts of a party.

    Args:
        party: its data; None if the data could not be read.
        purpose: of the session.
        more: facts that depend on the settings, such as those of `label_facts`.
    """
    found = versions()
    facts = server_facts(found, purpose, **more)
    about_ids = {} if party is None else id_facts(party)
    return dataclasses.replace(facts, torch=public_version(found["torch"]), torch_build=found["torch"], **about_ids)


def id_facts(party: PartyData) -> dict[str, Any]:
    """Return the facts about ids: their number and kind, and digests of all of them together."""
    return {
        "nodes": party.num_nodes,
        "id_kind": "numbers" if party.ids.dtype.kind == "i" else "strings",
        "id_set": party.set_digest,
        "id_order": party.ids_digest(),
    }


def label_facts(party: PartyData) -> dict[str, Any]:
    """Return the facts about labels and splits, which must be equal at all parties whose labels are used."""
    facts: dict[str, Any] = {}
    if party.labels is not None:
        facts |= {"classes": len(party.classes), "class_names": digest_names(party.classes)}
    if party.splits is not None:
        facts |= {
            "splits": party.splits.digest(),
            "validation_nodes": len(party.splits.validation),
            "test_nodes": len(party.splits.test),
        }
    return facts


def resolve_for_party(config: RunConfig, party: PartyData) -> tuple[RunConfig, PartyData]:
    """Return the settings resolved for this party's graph, and the party without labels that they do not use."""
    labels = config.train.labels
    party = choose_splits(party, config.data.split, config.data_seed)
    if labels in ("all", party.name):
        check_parties([party], labels, config.train.task)
    else:
        party = dataclasses.replace(party, labels=None, classes=(), splits=None)
    return resolve(config, party.num_nodes)[0], party


def check_memory(config: RunConfig, party: PartyData, max_memory: int | None = None) -> None:
    """Refuse settings whose model or messages do not fit into this party's memory, before anything is allocated.

    The estimate is a lower bound: weights with their gradient, optimizer state and selected copy, and two matrices of
    hidden rows for all nodes.

    Args:
        config: the server's settings.
        party: this party's data.
        max_memory: the allowed number of bytes; None: half of this machine's memory.
    """
    model, limit = config.model, total_memory() // 2 if max_memory is None else max_memory
    size = compute_dtype(config).itemsize
    weights = model.hidden * (party.num_features + (model.num_layers - 1) * model.hidden)
    copies = 5 if config.train.optimizer == "adam" else 3
    needed = size * (copies * weights + 2 * party.num_nodes * model.hidden) + model.num_layers * LAYER_BYTES
    settings = f"model.hidden={model.hidden}, model.num_layers={model.num_layers}: the model needs"
    if needed <= limit:
        limits = Limits.of_run(config, party.num_nodes, len(party.classes), config.data.num_clients)
        needed = limits.largest
        settings = f"train.num_local_steps={config.train.num_local_steps}, model.hidden={model.hidden}: a message needs"
    if needed > limit:
        raise ConfigError(
            f"{settings} at least {needed / 2**30:.1f} GiB, and this party allows {limit / 2**30:.1f} GiB. Ask the "
            "server's operator for smaller values, or raise the limit with --max-memory."
        )


def total_memory() -> int:
    """Return the bytes of memory of this machine, or of its container if that has a limit."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 1 << 34
    try:
        return min(total, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    except (OSError, ValueError):  # no control group of version 2, or "max"
        return total


def build_client(
    config: RunConfig, party: PartyData, index: int, roster: Sequence[str], clock: Clock, scale: float | None = None
) -> Client:
    """Build a party's client with its first weights.

    Args:
        config: resolved.
        party: its data, as `resolve_for_party` returned it.
        index: its place in the roster.
        roster: the parties in client order.
        clock: measures its computing time.
        scale: the input scale of a trained model; None: computed from the data.
    """
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
