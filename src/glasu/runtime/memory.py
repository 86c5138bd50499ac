"""Refuse settings that need more memory than is available, before memory is allocated. Torch is not loaded here."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from glasu.config import RunConfig, list_candidates, resolve
from glasu.data.party import PartyData, have_labels
from glasu.errors import ConfigError
from glasu.model.draw_estimates import EdgeCounts
from glasu.model.optimizer import find_optimizer
from glasu.model.sampler import find_sampler
from glasu.protocol.limits import Limits
from glasu.protocol.sampling import list_agreed_layers
from glasu.wire.encodings import find_compute_dtype
from glasu.wire.message_key import Phase

BYTE_UNITS = (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10))
NUMBER_BYTES = 8  # node numbers and edge positions are int64, edge factors are float64
DRAW_OVERHEAD = 600  # bytes of a draw besides its numbers: five array objects and a tuple


def check_memory(config: RunConfig, parties: Sequence[PartyData], limit: int, advice: str) -> None:
    """Refuse settings if the models, a message or the samples need more than `limit` bytes.

    The estimates for the models and for a message are lower bounds. The models need memory for the weights, their
    gradients, the optimizer state, a copy of the selected weights, and two matrices of hidden representations of all
    nodes. Constant feature columns are counted, although the preparation of features drops them. For the samples see
    `estimate_samples`.

    Args:
        config: the settings.
        parties: the parties that train in this process.
        limit: the allowed number of bytes.
        advice: the end of the error message, after "needs at least 3 GiB, and "; {limit} is replaced by the limit.
    """
    resolved, _ = resolve(config, parties[0].num_nodes)
    for candidate in list_candidates(resolved):
        _refuse_needs(_list_training_needs(candidate, parties), limit, advice)


def check_prediction_memory(config: RunConfig, parties: Sequence[PartyData], limit: int, advice: str) -> None:
    """Refuse a trained model whose weights and two matrices of hidden representations need more than `limit` bytes.

    The arguments are the same as for `check_memory`, except that `config` must be resolved.
    """
    _refuse_needs([_estimate_model(config, parties, copies=1)], limit, advice)


def _refuse_needs(needs: Iterable[tuple[int, str]], limit: int, advice: str) -> None:
    """Raise ConfigError for the first entry that needs more than `limit` bytes."""
    for needed, settings in needs:
        if needed > limit:
            allowed = advice.format(limit=_describe_size(limit))
            raise ConfigError(f"{settings} {_describe_size(needed)}, and {allowed}")


def _estimate_model(config: RunConfig, parties: Sequence[PartyData], copies: int) -> tuple[int, str]:
    """Return a lower bound of the models' bytes, and the start of an error message that names the deciding settings.

    The models store `copies` copies of the weights.
    """
    model, size = config.model, find_compute_dtype(config).itemsize
    weights = sum(model.hidden * (party.num_features + (model.num_layers - 1) * model.hidden) for party in parties)
    weights += model.owner_layers * model.hidden**2 * any(party.labels is not None for party in parties)
    nodes = sum(party.num_nodes for party in parties)
    keys = f"model.hidden={model.hidden}, model.num_layers={model.num_layers}"
    return size * (copies * weights + 2 * nodes * model.hidden), f"{keys}: the model needs at least"


def _list_training_needs(config: RunConfig, parties: Sequence[PartyData]) -> Iterator[tuple[int, str]]:
    """Yield the bytes of the models, of a message and of the samples, each with the start of an error message."""
    train = config.train
    # Weights, gradients, the selected copy, and the optimizer's state.
    yield _estimate_model(config, parties, copies=3 + find_optimizer(config).num_moments)
    classes = max(len(party.classes) for party in parties)
    largest = Limits.of_run(config, parties[0].num_nodes, classes, config.data.num_clients).largest
    keys = f"train.num_local_steps={train.num_local_steps}, model.hidden={config.model.hidden}"
    yield largest, f"{keys}: a message needs at least"
    keys = f"train.prefetch={train.prefetch}, train.batch_size={train.batch_size or '0 (all training nodes)'}"
    keys += "" if find_sampler(train).reads_whole_graph else f", train.fanout={train.fanout}"
    samples = sum(estimate_samples(config, party) for party in parties)
    yield samples, f"{keys}: the samples of {_count_kept_rounds(config)} rounds need about"


def estimate_samples(config: RunConfig, party: PartyData) -> int:
    """Return the bytes of the samples that a party stores at the same time: the samples of two consecutive windows.

    A window is a group of `train.prefetch` rounds that are sampled together. In each round there is one draw per layer
    l, and the sampler estimates its size. If the parties agree on S[l], storing S[l] takes 8 |S[l]| additional bytes.
    The estimate assumes that all parties draw equally many nodes.

    Args:
        config: the settings, resolved.
        party: the data of the party.
    """
    train, sampler, counts = config.train, find_sampler(config.train), EdgeCounts(party.graph, config.train.fanout)
    size, agreed = _count_batch_nodes(config, party), list_agreed_layers(config, Phase.SAMPLING)
    constant_batch = size == _count_training_nodes(config, party)
    batch, needed = size, 0
    for layer in reversed(range(config.model.num_layers)):
        found, numbers = sampler.estimate_draw(train, counts, size, constant_batch=constant_batch)
        if numbers:
            needed += NUMBER_BYTES * numbers + DRAW_OVERHEAD
        if layer in agreed:
            found = min(party.num_nodes, size + config.data.num_clients * (found - size))
            needed += NUMBER_BYTES * found
        size = found
    if needed:  # if 0, all rounds share one sample
        needed += NUMBER_BYTES * batch
    return _count_kept_rounds(config) * needed


def _count_kept_rounds(config: RunConfig) -> int:
    """Return the number of rounds whose samples exist at the same time."""
    train = config.train
    return min(train.num_rounds, 2 * train.prefetch or 1)


def _count_training_nodes(config: RunConfig, party: PartyData) -> int:
    """Return an upper bound of the number of training nodes. It is N if another party has the labels."""
    if config.train.label_owner not in (None, party.name) or party.labels is None:
        return party.num_nodes
    return int(have_labels(party.labels).sum()) if party.splits is None else len(party.splits.train)


def _count_batch_nodes(config: RunConfig, party: PartyData) -> int:
    """Return an upper bound of |S[L]|."""
    size = config.train.batch_size
    assert isinstance(size, int)
    training = _count_training_nodes(config, party)
    return min(size, training) if size else training


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
