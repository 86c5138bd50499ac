"""Facts: what a role states about itself in the handshake, so that the server can compare all roles.

Facts are versions, counts and digests of whole lists. They never hold an id, a label or a feature: the digest of a
single id could be guessed. Torch is not loaded here.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, Literal

from glasu.protocol.message_bytes import VERSION
from glasu.records import Bounds, Length
from glasu.registry import Extension, extensions, load_entry_points

Purpose = Literal["training", "prediction", "dry run"]
Count = Annotated[int, Bounds(0, 2**31 - 1)]
Short = Annotated[str, Length(200)]
MAX_EXTENSIONS = 64


@dataclass(frozen=True, kw_only=True)
class Facts:
    """The facts of one role. None means that the role does not state this fact."""

    purpose: Purpose
    message_format: Count = field(metadata={"label": "message format"})
    glasu: Short
    numpy: Short
    numpy_build: Short = field(metadata={"label": "numpy build"})
    extensions: Annotated[tuple[Extension, ...], Length(MAX_EXTENSIONS)] = ()
    torch: Short | None = None
    torch_build: Short | None = field(default=None, metadata={"label": "torch build"})
    parties: Count | None = None
    training: Short | None = None  # prediction: the run that trained the model
    nodes: Count | None = None
    id_kind: Literal["numbers", "strings"] | None = field(default=None, metadata={"label": "kind of ids"})
    id_set: Short | None = field(default=None, metadata={"label": "set of ids (SHA-256)"})
    id_order: Short | None = field(default=None, metadata={"label": "ids (SHA-256)"})
    classes: Count | None = None
    class_names: Short | None = field(default=None, metadata={"label": "class names (SHA-256)"})
    splits: Short | None = field(default=None, metadata={"label": "splits (SHA-256)"})
    validation_nodes: Count | None = field(default=None, metadata={"label": "validation nodes"})
    test_nodes: Count | None = field(default=None, metadata={"label": "test nodes"})


LABELS: Mapping[str, str] = {item.name: item.metadata.get("label", item.name) for item in fields(Facts)}
EVERY_PARTY_STATES = ("torch", "nodes", "id_kind", "id_set", "id_order")  # besides the facts that the server states


def server_facts(versions: Mapping[str, str], purpose: Purpose, **more: Any) -> Facts:
    """Return the facts of the server; `more` are facts of one purpose, such as the number of parties."""
    load_entry_points()  # now, not when a setting names a choice of theirs: a party says hello before it has settings
    return Facts(
        purpose=purpose,
        message_format=VERSION,
        glasu=versions["glasu"],
        numpy=public_version(versions["numpy"]),
        numpy_build=versions["numpy"],
        extensions=extensions(),
        **more,
    )


def public_version(version: str) -> str:
    """Return a version without the name of its build."""
    return version.partition("+")[0]


def digest_names(names: Sequence[str]) -> str:
    """Return the SHA-256 of names in their order."""
    return hashlib.sha256("\0".join(names).encode()).hexdigest()
