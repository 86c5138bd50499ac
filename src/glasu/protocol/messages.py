"""Every message on the wire, as frozen dataclasses.

Every message of a client is answered by exactly one message of the server. Losses and the node sets of coming rounds
ride on whatever is sent next.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from glasu.errors import ProtocolError
from glasu.timing import Measurement
from glasu.wire.message_key import Key, Phase

Array = NDArray[Any]
NO_NUMBERS: NDArray[np.float64] = np.empty(0)


@dataclass(frozen=True, eq=False, kw_only=True)
class Message:
    """What all messages carry: their key, losses that ride along, and one node set per round that is being agreed."""

    key: Key
    losses: NDArray[np.float64] = field(default_factory=lambda: NO_NUMBERS)
    node_sets: tuple[NDArray[np.int32], ...] = ()


@dataclass(frozen=True, eq=False, kw_only=True)
class TensorMessage(Message):
    """A message about the rows of one tensor, in the form in which they travel (`glasu.wire.encodings`)."""

    value: Array


class Partial(TensorMessage):
    """Client: H_m^+[l], as released."""


class Joint(TensorMessage):
    """Server: H[l+1]."""


class Gradient(TensorMessage):
    """Client: the gradient of its loss at H[l+1]."""


class JointGradient(TensorMessage):
    """Server: the gradient at H_m^+[l] (joint backward), or at H[L] (labels at one party)."""


class Scores(TensorMessage):
    """Client: class probabilities of the asked nodes."""


class JointScores(TensorMessage):
    """Server: the mean of the clients' class probabilities."""


class Proposal(Message):
    """Client: node sets S_m[l+1], and nothing else to say."""


class Agreed(Message):
    """Server: the unions of the proposed node sets, and nothing else to say."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Metrics(Message):
    """Client: how well the model does on a split; empty from a client without labels."""

    values: NDArray[np.float64]


@dataclass(frozen=True, eq=False, kw_only=True)
class Verdict(Message):
    """Server: whether this model is the best so far, and whether to stop."""

    improved: bool
    stop: bool


class Waiting(Message):
    """Client: nothing to contribute to this exchange; it waits for the answer."""


@dataclass(frozen=True)
class RoundDone:
    """Not a message: tells the runtime that a round is over and that the state may be saved."""

    round: int
    loss: float | None = None  # where it is known already: the server learns it with the next message
    party: str | None = None  # whose round it was, where parties train alone


@dataclass(frozen=True)
class Evaluated:
    """Not a message: tells the runtime how the model does."""

    round: int
    split: str
    metrics: dict[str, float]
    loss: float | None = None
    improved: bool = False
    party: str | None = None  # who was evaluated, where parties train alone


@dataclass(frozen=True)
class Evaluating:
    """Not a message: tells the runtime how far a party is with an evaluation that takes long."""

    round: int
    share: float  # done, between 0 and 1
    party: str


class Awaited(NamedTuple):
    """What the server expects of every client now."""

    kinds: tuple[type[Message], ...]
    run: bytes
    phase: Phase
    round: int
    layer: int
    chunk: int

    def admits(self, kind: type[Message], key: Key) -> bool:
        """Tell whether a message can be this, or a later chunk of the same tensor: those are sent together."""
        if kind not in self.kinds or (key.run, key.phase, key.round, key.layer) != self[1:5]:
            return False
        return key.chunk == self.chunk or (key.chunk > self.chunk and self.phase is not Phase.SAMPLING)

    def __str__(self) -> str:
        names = " or ".join(kind.__name__ for kind in self.kinds)
        return f"{names} for {self.phase.name.lower()} round {self.round} layer {self.layer} chunk {self.chunk}"


Event = RoundDone | Evaluated | Evaluating
Result = TypeVar("Result")
Exchange = Generator[Sequence[Message] | Event, Sequence[Message], Result]  # yields what to send, is sent the answers
Script = Exchange[None]
Reply = TypeVar("Reply", bound=Message)


def timed(script: Exchange[Result], measurement: Measurement) -> Exchange[Result]:
    """Drive a script and measure its own time, from message to message; what it measures itself is taken off."""
    answers: Sequence[Message] | None = None
    while True:
        with measurement:
            try:
                item = next(script) if answers is None else script.send(answers)
            except StopIteration as stop:
                result: Result = stop.value
                return result
        answers = yield item


def exchange(message: Message, kind: type[Reply]) -> Exchange[Reply]:
    """Send one message and return its answer, which must be of the given kind and about the same thing."""
    answers = yield (message,)
    return checked(answers[0], message.key, kind)


def checked(answer: Message, asked: Key, kind: type[Reply]) -> Reply:
    """Return the answer, or refuse one that does not belong to the question."""
    got = answer.key
    if not isinstance(answer, kind):
        raise ProtocolError(f"{asked}: expected a {kind.__name__}, got a {type(answer).__name__}.")
    if (got.phase, got.round, got.layer, got.chunk) != (asked.phase, asked.round, asked.layer, asked.chunk):
        raise ProtocolError(f"{asked}: got an answer to another message: {got}.")
    return answer
