"""A sample: the node sets of one round at one client."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from glasu.model.blocks import Draw, NodeSet


@dataclass(frozen=True, eq=False)
class Sample:
    """The agreed node sets S_m[0..L] of one round, and the edges drawn for each layer."""

    round: int
    nodes: tuple[NodeSet, ...]
    draws: tuple[Draw, ...]
