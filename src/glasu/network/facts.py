"""Facts: the statements of a role about itself in the handshake. The server compares those of all roles.

Facts are versions, counts and digests of whole lists. They never hold an id, a label or a feature: the digest of a
single id could be guessed. If the parties are aligned, digests of ids are HMACs. Torch is not loaded here.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np

from glasu.data.party import have_labels, measure_labels, sign_ids
from glasu.protocol.message_bytes import format_number
from glasu.records import Bounds, Length
from glasu.registry import Extension, extensions, load_entry_points
from glasu.report import versions

if TYPE_CHECKING:
    from glasu.data.party import PartyData

Purpose = Literal["training", "prediction", "dry run", "alignment"]
NonNegative = Annotated[int, Bounds(0, 2**31 - 1)]
Short = Annotated[str, Length(200)]
MAX_EXTENSIONS = 64


@dataclass(frozen=True, kw_only=True)
class Facts:
    """The facts of one role. None means that the role does not state this fact."""

    purpose: Purpose
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
    alignment: Short | None = None  # an HMAC that names the alignment, or NOT_ALIGNED
    id_kind: Literal["numbers", "strings"] | None = field(default=None, metadata={"label": "kind of ids"})
    id_set: Short | None = field(default=None, metadata={"label": "set of ids (SHA-256)"})
    id_order: Short | None = field(default=None, metadata={"label": "ids (SHA-256)"})
    classes: NonNegative | None = None
    class_names: Short | None = field(default=None, metadata={"label": "class names (SHA-256)"})
    label_scale: Short | None = field(default=None, metadata={"label": "mean and deviation of labels (SHA-256)"})
    splits: Short | None = field(default=None, metadata={"label": "splits (SHA-256)"})
    validation_nodes: NonNegative | None = field(default=None, metadata={"label": "validation nodes"})
    test_nodes: NonNegative | None = field(default=None, metadata={"label": "test nodes"})


NOT_ALIGNED = "none"
LABELS: Mapping[str, str] = {item.name: item.metadata.get("label", item.name) for item in fields(Facts)}
EVERY_PARTY_STATES = ("torch", "nodes", "alignment", "id_kind", "id_set", "id_order")  # beyond the server's facts
ALIGNING_PARTY_STATES = ("id_rules",)


def server_facts(purpose: Purpose, **more: Any) -> Facts:
    """Return the facts of the server; `more` are facts of one purpose, such as the number of parties."""
    load_entry_points()  # load extensions early: a party states them in its hello, before it has settings
    found = versions()
    return Facts(
        purpose=purpose,
        message_format=format_number(),
        glasu=found["glasu"],
        numpy=_omit_build(found["numpy"]),
        numpy_build=found["numpy"],
        extensions=extensions(),
        **more,
    )


def party_facts(party: PartyData | None, purpose: Purpose, **more: Any) -> Facts:
    """Return the facts of a party.

    Args:
        party: the party's data; None if the data could not be read.
        purpose: the purpose of the session.
        more: facts that depend on the settings, such as those of `label_facts`.
    """
    torch = versions()["torch"]
    if party is not None:
        more |= {
            "nodes": party.num_nodes,
            "id_kind": "numbers" if party.ids.dtype.kind == "i" else "strings",
            "alignment": NOT_ALIGNED if party.alignment_key is None else _sign(party, "alignment", ""),
            "id_set": _sign(party, "set of ids", party.set_digest),
            "id_order": _sign(party, "order of ids", party.ids_digest()),
        }
    return server_facts(purpose, torch=_omit_build(torch), torch_build=torch, **more)


def _sign(party: PartyData, purpose: str, digest: str) -> str:
    """Return an HMAC of a digest with the key of the alignment, which the server lacks; the digest if there is no key.

    The server could compute the digest of any list of ids that it guesses, but not the HMAC.
    """
    return digest if party.alignment_key is None else sign_ids(party.alignment_key, purpose, digest)


def label_facts(party: PartyData) -> dict[str, Any]:
    """Return the facts about labels and splits, which must be equal at all parties whose labels are used."""
    facts: dict[str, Any] = {}
    if party.labels is not None:
        facts |= class_facts(party.classes)
    if party.splits is not None and party.labels is not None and party.labels.dtype.kind == "f":
        taught = party.labels[party.splits.train]
        scale = measure_labels(taught[have_labels(taught)])
        facts["label_scale"] = hashlib.sha256(np.array(scale, "<f8").tobytes()).hexdigest()
    if party.splits is not None:
        facts |= {
            "splits": party.splits.digest(),
            "validation_nodes": len(party.splits.validation),
            "test_nodes": len(party.splits.test),
        }
    return facts


def class_facts(classes: Sequence[str]) -> dict[str, Any]:
    """Return the facts about the names of classes."""
    return {"classes": len(classes), "class_names": hashlib.sha256("\0".join(classes).encode()).hexdigest()}


def _omit_build(version: str) -> str:
    return version.partition("+")[0]
