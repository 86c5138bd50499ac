"""List the nodes of all parties in the same order, and check that the parties can train together."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from glasu import registry
from glasu.data.party import SPLITS, Labels, PartyData, are_numbers, have_labels
from glasu.data.party_name import check_member_name
from glasu.errors import AlignmentError, ConfigError, DataError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from glasu.config_sections import Split
    from glasu.data.party import Splits

OWN_CLASS = 0.8  # if there are more classes per labelled node than this, the labels are probably numbers


def align_in_clear(parties: Sequence[PartyData]) -> list[PartyData]:
    """Restrict the parties to their common ids, sorted. If all parties list the same ids, they are not changed."""
    if len({party.ids_digest() for party in parties}) <= 1:
        return list(parties)
    kinds = {party.name: "numbers" if party.ids.dtype.kind == "i" else "strings" for party in parties}
    if len(set(kinds.values())) > 1:
        listed = ", ".join(f"{name}: {kind}" for name, kind in kinds.items())
        raise AlignmentError(
            f"ids cannot be compared ({listed}); use one notation for ids, or set id_type in the party.toml files."
        )
    common: NDArray[Any] = np.unique(parties[0].ids)
    for party in parties[1:]:
        common = np.intersect1d(common, party.ids)
    if len(common) == 0:
        raise AlignmentError(
            f"the parties {', '.join(kinds)} have no id in common; check that their id columns use the same ids. If "
            "ids differ in Unicode form, case or blanks, run glasu align, which applies the id rules of party.toml."
        )
    return [party.restrict(_find_rows(party.ids, common)) for party in parties]


def check_parties(
    parties: Sequence[PartyData], label_owner: str | None = None, task: str = "multiclass", split: Split = "paper"
) -> None:
    """Raise an error if the parties cannot train together.

    Args:
        parties: the data of the parties.
        label_owner: the only party with labels; None: all parties need labels.
        task: the name of the task.
        split: `data.split`. If the fraction of validation or test is 0, this split needs no node with a known label.
    """
    if not parties:
        raise ConfigError("there are no parties; name at least one folder in data.parties, or a data set in data.name.")
    names = [party.name for party in parties]
    if len(set(names)) != len(names):
        raise DataError(f"party names {', '.join(names)} are not distinct; change `name` in a party.toml.")
    if len(parties) > 1:  # a single party may be a whole graph, which has the reserved name "all"
        for name in names:
            check_member_name(name)
    first = parties[0]
    for party in parties[1:]:
        if party.num_nodes != first.num_nodes:
            raise AlignmentError(
                f"party {first.name!r} has {first.num_nodes} nodes, {party.name!r} has {party.num_nodes}; align them."
            )
        if party.ids_digest() != first.ids_digest():
            raise AlignmentError(
                f"parties {first.name!r} and {party.name!r} list different ids or different orders; align them."
            )
    owners = list(parties) if label_owner is None else [_find_party(label_owner, parties)]
    for owner in owners:
        if owner.labels is None:
            having = [party.name for party in parties if party.labels is not None]
            listed = f"; with labels: {', '.join(having)}" if having else ""
            raise DataError(
                f"party {owner.name!r} has no labels{listed}; train.labels must name a party with labels, or be "
                '"all" if every party has labels.'
            )
        _check_labels(owner, owners[0], task, split)


def keep_labels(parties: Sequence[PartyData], label_owner: str | None) -> list[PartyData]:
    """Remove labels and splits from all parties except the label owner, if there is one."""
    if label_owner is None:
        return list(parties)
    owner = _find_party(label_owner, parties)
    return [party if party is owner else replace(party, labels=None, classes=(), splits=None) for party in parties]


def _find_party(name: str, parties: Sequence[PartyData]) -> PartyData:
    for party in parties:
        if party.name == name:
            return party
    known = ", ".join(f'"{party.name}"' for party in parties)
    raise ConfigError(f'train.labels={name!r}: there is no such party; use "all" or one of {known}.')


def _check_labels(party: PartyData, first: PartyData, task: str, split: Split) -> None:
    where = f"party {party.name!r}"
    assert party.labels is not None
    _check_label_form(party.labels, party.classes, task, where)
    if party.splits is None:
        raise DataError(f"{where} has no splits; add a split column (PyG: train_mask, val_mask, test_mask).")
    train_labels = party.labels[party.splits.train]
    if len(train_labels) == 0:
        raise DataError(f"{where}: no node is in the training split; enlarge the training fraction.")
    if not have_labels(train_labels).any():
        raise DataError(f"{where}: no training node has a known label.")
    _check_split_labels(party.labels, party.splits, split, where)
    assert first.labels is not None
    assert first.splits is not None
    for what, same in (
        ("classes", party.classes == first.classes),
        ("labels", np.array_equal(party.labels, first.labels, equal_nan=True)),
        ("splits", party.splits.digest() == first.splits.digest()),
    ):
        if not same:
            raise DataError(
                f"{what} of {first.name!r} and {party.name!r} differ; make them equal, or set train.labels to a party."
            )


def _check_split_labels(labels: Labels, splits: Splits, split: Split, where: str) -> None:
    """Refuse a validation or test split without a known label, unless its fraction in `data.split` is 0."""
    known = [int(have_labels(labels[getattr(splits, part)]).sum()) for part in SPLITS]
    wanted = split if isinstance(split, tuple) else (1.0, 1.0, 1.0)
    empty = [part for part, count, share in zip(SPLITS, known, wanted, strict=True) if share and not count]
    if not empty:
        return
    counts = ", ".join(f"{count} {part}" for part, count in zip(SPLITS, known, strict=True))
    labelled = labels[have_labels(labels)]
    distinct = len(np.unique(labelled)) if labels.ndim == 1 and not are_numbers(labels) else 0
    if distinct > OWN_CLASS * len(labelled):
        remedy = (
            f"the {len(labelled)} labelled nodes have {distinct} classes; if the labels are numbers, set "
            'label_type = "number" in party.toml and train.task = "regression"'
        )
    else:
        without = " and ".join(empty)
        remedy = f"choose other splits, or set the fraction to 0 in data.split to train without {without} nodes"
    raise DataError(
        f"{where}: no {' and no '.join(empty)} node has a known label (nodes with a label: {counts}); {remedy}."
    )


def _check_label_form(labels: Labels, classes: Sequence[str], task: str, where: str) -> None:
    """Refuse labels in a form that the task does not accept, and name a task that accepts them."""
    own = registry.load("task", task)()
    if own.accepts(labels, classes):
        return
    problem = f'train.task="{task}": {where} must have {own.label_form}, but'
    for name in registry.choices("task"):
        other = registry.load("task", name)()
        if other.accepts(labels, classes):
            count = f", of {len(classes)} classes" if classes else ""
            remedy = f'set train.task = "{name}"{f", {own.label_remedy}" if own.label_remedy else ""}'
            raise ConfigError(f"{problem} has {other.label_form}{count}; {remedy}.")
    raise ConfigError(f"{problem} its labels have the shape {labels.shape}.")


def _find_rows(
    ids: NDArray[np.int64] | NDArray[np.str_], wanted: NDArray[np.int64] | NDArray[np.str_]
) -> NDArray[np.int64]:
    """Return the row of each wanted id."""
    order = np.argsort(ids, kind="stable")
    return order[np.searchsorted(ids[order], wanted)]
