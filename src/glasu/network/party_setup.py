"""A party's own part of a run: the settings resolved for its data, the memory they need, and its client."""

from __future__ import annotations

import dataclasses
import os
import threading
from collections.abc import Sequence
from pathlib import Path

from glasu.config import RunConfig, resolve
from glasu.data.alignment import check_parties
from glasu.data.party import PartyData
from glasu.data.party_name import check_party_name
from glasu.data.preprocessing import Preparation
from glasu.data.sources.catalog import choose_splits
from glasu.errors import ConfigError, DataError
from glasu.network.handshake import Code, RefusalError, Welcome
from glasu.network.log_lines import SENTENCES, printable
from glasu.protocol.client import Client
from glasu.protocol.limits import Limits
from glasu.timing import Clock, Stopwatch
from glasu.wire.encodings import compute_dtype

UNITS = (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10))
BUILDING = threading.Lock()  # first weights use torch's global generator, so parties in one process build in turn


def check_place(name: str, offered: Welcome, config: RunConfig) -> None:
    """Refuse a roster with invalid names, or with another name for this party, or that does not fit the settings."""
    roster, index, num_clients = offered.roster, offered.index, config.data.num_clients
    listed = printable(", ".join(roster), SENTENCES)
    if len(roster) != num_clients or index >= num_clients:
        raise RefusalError(
            Code.WRONG_ROSTER,
            f"the server's roster ({listed}; this party is number {index}) does not fit its settings, "
            f"data.num_clients={num_clients}; all parties must see the same roster.",
        )
    if roster[index] != name:
        raise RefusalError(
            Code.WRONG_ROSTER,
            f"the server's roster ({listed}) lists this party as {printable(roster[index])!r}, the name in its "
            f"certificate; use the kit of {name!r}.",
        )
    try:
        for each in roster:
            check_party_name(each)
    except DataError as error:
        raise RefusalError(Code.WRONG_ROSTER, f"the server's roster: {printable(error, SENTENCES)}") from None
    if len(set(roster)) < len(roster):
        raise RefusalError(Code.WRONG_ROSTER, f"the server's roster ({listed}) lists a party twice.")
    if config.train.labels not in ("all", *roster):
        owner = printable(config.train.labels)
        why = f"train.labels={owner!r}: there is no such party; the server's roster is {listed}."
        raise RefusalError(Code.WRONG_ROSTER, why)


def resolve_for_party(config: RunConfig, party: PartyData, max_memory: int | None) -> tuple[RunConfig, PartyData]:
    """Return the settings resolved for this party's graph, and the party without labels that they do not use.

    Settings that need more than `max_memory` are refused; see `check_memory`.
    """
    check_memory(config, party, max_memory)
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
    hidden rows for all nodes. Constant columns count, although the preparation of features drops them.

    Args:
        config: the server's settings.
        party: this party's data.
        max_memory: the allowed number of bytes; None: half of this machine's memory.
    """
    model, limit = config.model, total_memory() // 2 if max_memory is None else max_memory
    size = compute_dtype(config).itemsize
    weights = model.hidden * (party.num_features + (model.num_layers - 1) * model.hidden)
    copies = 5 if config.train.optimizer == "adam" else 3
    needed = size * (copies * weights + 2 * party.num_nodes * model.hidden)
    settings = f"model.hidden={model.hidden}, model.num_layers={model.num_layers}: the model needs"
    if needed <= limit:
        limits = Limits.of_run(config, party.num_nodes, len(party.classes), config.data.num_clients)
        needed = limits.largest
        settings = f"train.num_local_steps={config.train.num_local_steps}, model.hidden={model.hidden}: a message needs"
    if needed > limit:
        raise ConfigError(
            f"{settings} at least {_describe_size(needed)}, and this party allows {_describe_size(limit)}. Ask the "
            "server's operator for smaller values, or raise the limit with --max-memory."
        )


def _describe_size(count: int) -> str:
    """Return a number of bytes in the largest unit of which there is at least one."""
    return next((f"{count / size:.1f} {unit}" for unit, size in UNITS if count >= size), f"{count} bytes")


def total_memory() -> int:
    """Return the bytes of memory of this machine, or of its container if that has a limit."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 1 << 34
    try:
        return min(total, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    except (OSError, ValueError):  # no control group of version 2, or "max"
        return total


def build_client(
    config: RunConfig,
    party: PartyData,
    index: int,
    roster: Sequence[str],
    clock: Clock,
    preparation: Preparation | None = None,
) -> Client:
    """Build a party's client with its first weights.

    Args:
        config: resolved.
        party: its data, as `resolve_for_party` returned it.
        index: its place in the roster.
        roster: the parties in client order.
        clock: measures its computing time.
        preparation: of the features, from a trained model; None: fitted to the data.
    """
    with BUILDING:
        return Client(
            config,
            party,
            index=index,
            names=roster,
            watch=Stopwatch(clock),
            preparation=preparation,
        )
