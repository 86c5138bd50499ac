"""The result of one attack by one role, and the types that attacks share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Values: TypeAlias = NDArray[Any]
Classes: TypeAlias = NDArray[np.int64]


@dataclass(frozen=True)
class AttackResult:
    """How well a role recovers a party's data, with and without the messages of a run."""

    attack: str  # the kind of data, and the method
    role: str  # the attacker: "server", or the name of a party
    target: str  # the party whose data is attacked
    measure: str  # the meaning of the three numbers
    score: float  # the result with the messages that the role sees
    chance: float  # the result of a random guess
    baseline: float  # the result with the role's own data and public facts, without messages
    detail: str = ""  # the size of the attacker's input
