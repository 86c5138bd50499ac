"""Facts: what a role states about itself in the handshake. The server compares the facts of all roles.

Facts are versions, counts and digests of whole lists. They never contain an id, a label or a feature. They contain no
digest of a single id either, because an attacker could test guesses of the id. Lists of ids are stated as HMACs under
keys that the server does not have: the key of the alignment, or keys of pairs of parties (`glasu.network.id_keys`).
Torch is not loaded here.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypedDict

import numpy as np

from glasu.data.party import have_labels, measure_labels, sign_ids
from glasu.network.id_keys import IdKeys, IdShare, IdTag
from glasu.network.purposes import Purpose
from glasu.pki.identity import MAX_PARTIES
from glasu.protocol.message_bytes import compute_format_number
from glasu.records import Bounds, Length
from glasu.registry import Extension, extensions, load_entry_points
from glasu.report import list_versions

if TYPE_CHECKING:
    from glasu.data.party import PartyData

NonNegative = Annotated[int, Bounds(0, 2**31 - 1)]
Short = Annotated[str, Length(200)]
MAX_EXTENSIONS = 64


@dataclass(frozen=True, kw_only=True)
class Facts:
    """The facts of one role. None means that the role does not state this fact."""

    purpose: Short  # the name of a `Purpose`
    message_format: NonNegative = field(metadata={"label": "message format"})
    glasu: Short
    numpy: Short
    numpy_build: Short = field(metadata={"label": "numpy build"})
    extensions: Annotated[tuple[Extension, ...], Length(MAX_EXTENSIONS)] = ()
    torch: Short | None = None
    torch_build: Short | None = field(default=None, metadata={"label": "torch build"})
    parties: NonNegative | None = None
    training: Short | None = None  # prediction: the run that trained the model
    selected: Literal["ensemble", "joint"] | None = field(default=None, metadata={"label": "selected model"})
    nodes: NonNegative | None = None
    id_rules: Short | None = field(default=None, metadata={"label": "rules for ids"})  # alignment
    alignment: Short | None = None  # an HMAC that identifies the alignment, or NOT_ALIGNED
    id_kind: Literal["numbers", "strings"] | None = field(default=None, metadata={"label": "kind of ids"})
    id_set: Short | None = field(default=None, metadata={"label": "set of ids"})  # an HMAC; only for aligned parties
    id_order: Short | None = field(default=None, metadata={"label": "ids in their order"})
    # Only for parties that are not aligned: the public key of this process, and HMACs of the ids for other parties.
    share: IdShare | None = None
    id_tags: Annotated[tuple[IdTag, ...], Length(MAX_PARTIES)] = ()
    classes: NonNegative | None = None
    class_names: Short | None = field(default=None, metadata={"label": "class names (SHA-256)"})
    label_scale: Short | None = field(default=None, metadata={"label": "mean and deviation of labels (SHA-256)"})
    splits: Short | None = field(default=None, metadata={"label": "splits (SHA-256)"})
    validation_nodes: NonNegative | None = field(default=None, metadata={"label": "validation nodes"})
    test_nodes: NonNegative | None = field(default=None, metadata={"label": "test nodes"})


NOT_ALIGNED = "none"
LABELS: Mapping[str, str] = {item.name: item.metadata.get("label", item.name) for item in fields(Facts)}
EVERY_PARTY_STATES = ("torch", "nodes", "alignment", "id_kind")  # in addition to all facts that the server states
ALIGNED_PARTY_STATES, OTHER_PARTY_STATES = ("id_set", "id_order"), ("share",)
ALIGNING_PARTY_STATES = ("id_rules",)


def collect_server_facts(purpose: Purpose, **more: Any) -> Facts:
    """Return the facts of the server. `more` are facts that only one purpose states, such as the number of parties."""
    load_entry_points()  # the hello of a party lists the extensions, before the party has settings that name them
    found = list_versions()
    return Facts(
        purpose=purpose.name,
        message_format=compute_format_number(),
        glasu=found["glasu"],
        numpy=_omit_build(found["numpy"]),
        numpy_build=found["numpy"],
        extensions=extensions(),
        **more,
    )


def collect_party_facts(party: PartyData | None, purpose: Purpose, id_keys: IdKeys | None = None, **more: Any) -> Facts:
    """Return the facts of a party.

    Args:
        party: the party's data; None if the data could not be read.
        purpose: the purpose of the session.
        id_keys: the keys with which a party that is not aligned makes HMACs of its ids.
        more: facts that depend on the settings, such as the result of `collect_label_facts`.
    """
    torch = list_versions()["torch"]
    if party is not None:
        more |= {
            "nodes": party.num_nodes,
            "id_kind": "numbers" if party.ids.dtype.kind == "i" else "strings",
            "alignment": NOT_ALIGNED,
        }
        if (key := party.alignment_key) is not None:  # HMACs: with plain digests, the server could test guesses of ids
            more |= {
                "alignment": sign_ids(key, "alignment", ""),
                "id_set": sign_ids(key, "set of ids", party.set_digest),
                "id_order": sign_ids(key, "order of ids", party.ids_digest()),
            }
        elif id_keys is not None:
            more |= {"share": id_keys.share, "id_tags": id_keys.make_tags(party)}
    return collect_server_facts(purpose, torch=_omit_build(torch), torch_build=torch, **more)


def resolve_tags(parties: Mapping[str, Facts]) -> dict[str, Facts]:
    """Return the facts. For parties that are not aligned, derive `id_set` and `id_order` from their HMACs (`id_tags`).

    Parties with equal ids get the same value, which names the first of them. Ids that were not compared yet count as
    equal.
    """
    if len([facts for facts in parties.values() if facts.share is not None]) < 2:
        return dict(parties)
    sets, orders = (_name_equal_ids(parties, name) for name in ("id_set", "id_order"))
    return {
        party: replace(facts, id_set=sets[party], id_order=orders[party]) if party in sets else facts
        for party, facts in parties.items()
    }


def _name_equal_ids(parties: Mapping[str, Facts], name: str) -> dict[str, str]:
    """Return a value of `id_set` or `id_order` for every party that is not aligned. Equal ids get equal values."""
    values: dict[str, str] = {}
    for party, facts in parties.items():
        if facts.share is None:
            continue
        compared = {other: _have_equal_ids(parties, party, other, name) for other in values}
        alike = [other for other, is_equal in compared.items() if is_equal]
        if not alike and False not in compared.values():
            alike = list(compared)  # ids that were not compared yet count as equal
        values[party] = values[alike[0]] if alike else f"as at {party}"
    return values


def list_pairs_without_tags(parties: Mapping[str, Facts]) -> list[tuple[str, str]]:
    """Return the pairs (party, other) of unaligned parties where `party` has no tag for `other`'s current process."""
    shares = {name: facts.share for name, facts in parties.items() if facts.share is not None}
    return [
        (party, other)
        for party in shares
        for other in shares
        if party != other and _find_tag(parties, party, other) is None
    ]


def _find_tag(parties: Mapping[str, Facts], party: str, other: str) -> IdTag | None:
    """Return the tag that a party has made for the current process of another party."""
    share = parties[other].share
    tags = (tag for tag in parties[party].id_tags if share is not None and (tag.party, tag.share) == (other, share.key))
    return next(tags, None)


def _have_equal_ids(parties: Mapping[str, Facts], one: str, other: str, name: str) -> bool | None:
    """Return whether two parties have equal ids; None if they have not compared them yet."""
    here, there = _find_tag(parties, one, other), _find_tag(parties, other, one)
    return None if here is None or there is None else bool(getattr(here, name) == getattr(there, name))


class LabelFacts(TypedDict, total=False):
    """The fields of `Facts` about labels, splits and the selected model."""

    classes: int
    class_names: str
    label_scale: str
    splits: str
    validation_nodes: int
    test_nodes: int
    selected: Literal["ensemble", "joint"]


def collect_label_facts(party: PartyData) -> LabelFacts:
    """Return the facts about labels and splits. They must be equal at all parties whose labels are used."""
    facts: LabelFacts = {}
    if party.labels is not None:
        facts |= collect_class_facts(party.classes)
    if party.splits is not None and party.labels is not None and party.has_numeric_labels:
        training_labels = party.labels[party.splits.train]
        scale = measure_labels(training_labels[have_labels(training_labels)])
        facts["label_scale"] = hashlib.sha256(np.array(scale, "<f8").tobytes()).hexdigest()
    if party.splits is not None:
        facts |= {
            "splits": party.splits.digest(),
            "validation_nodes": len(party.splits.validation),
            "test_nodes": len(party.splits.test),
        }
    return facts


def collect_class_facts(classes: Sequence[str]) -> LabelFacts:
    """Return the facts about the names of classes."""
    return {"classes": len(classes), "class_names": hashlib.sha256("\0".join(classes).encode()).hexdigest()}


def _omit_build(version: str) -> str:
    return version.partition("+")[0]
