"""Requests that scripts yield. A runtime performs each request and resumes the script with the result.

A script is a generator without I/O. An algorithm has two scripts: the client column, which every client runs, and the
server column. Everything that a client sends between two `Receive` requests is one bundle. A
bundle and its answers are one exchange, which takes one round trip over a network. Messages between the server and one
client arrive in the order in which they were sent.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any, TypeVar

from glasu.errors import ProtocolError
from glasu.model.task import Metric
from glasu.protocol.messages import Message
from glasu.records import FlatSettings
from glasu.wire.message_key import Key

Result = TypeVar("Result")


@dataclass(frozen=True)
class Send:
    """Client: send one message to the server. The result is None."""

    message: Message


@dataclass(frozen=True)
class Answer:
    """Base of the requests that complete an exchange: the server answers, or a client receives the answer."""

    # Whether the answer is part of an exchange of another script. `Interleave` sets it, and only the counter of
    # exchanges reads it.
    rides: bool = field(default=False, kw_only=True)


@dataclass(frozen=True)
class Receive(Answer):
    """Wait for messages. A client gets the next message from the server; the server gets one message from every client.

    The messages must be of the given kinds and about the same phase, round, layer and chunk as `key`.
    """

    kinds: tuple[type[Message], ...]
    key: Key

    def __str__(self) -> str:
        key, names = self.key, " or ".join(kind.__name__ for kind in self.kinds)
        return f"{names} for {key.phase.name.lower()} round {key.round} layer {key.layer} chunk {key.chunk}"

    def check(self, kind: type[Message], key: Key) -> None:
        """Refuse a message of another kind, or about another run, phase, round, layer or chunk."""
        if kind not in self.kinds or key.topic != self.key.topic:
            other = "" if key.run == self.key.run else f" of run {key.run.hex()}, not {self.key.run.hex()}"
            raise ProtocolError(f"expected {self}, got {kind.__name__} for {key}{other}.")


@dataclass(frozen=True)
class Broadcast(Answer):
    """Server: send one message to every client. The result is None."""

    message: Message

    @property
    def key(self) -> Key:
        return self.message.key


@dataclass(frozen=True)
class Scatter(Answer):
    """Server: send a different message to every client, in client order. The result is None."""

    messages: tuple[Message, ...]

    @property
    def key(self) -> Key:
        """The key of the first client's message. Only the clients differ."""
        return self.messages[0].key


@dataclass(frozen=True)
class Save:
    """Save a state. It must be durable before the next message leaves this role. The result is None.

    A runtime that saves calls `take_state` before it resumes the script. Other runtimes never call it, because copying
    the weights takes longer than some rounds.
    """

    take_state: Callable[[], Any]  # -> ClientState or ServerState


@dataclass(frozen=True)
class Interleave:
    """Run two scripts: each exchange of `main` also carries one exchange of `rider`. The result is a pair."""

    main: Script[Any]
    rider: Script[Any]


@dataclass(frozen=True)
class Timed:
    """Run a script and count its computing time under `name`. The result is the result of the script."""

    script: Script[Any]
    name: str


class Event:
    """Base of the events: reports for people and programs. A runtime passes every event to its observer."""


@dataclass(frozen=True)
class RoundDone(Event):
    """Event: a round is complete."""

    round: int
    loss: float | None = None  # None at a client without labels
    party: str | None = None  # the party, if parties train alone
    bytes: int = 0  # bytes that all roles have sent so far; only in a simulation


@dataclass(frozen=True)
class WarmStepDone(Event):
    """Event: a party has taken a local step before round 0."""

    step: int  # number of steps that are done
    num_steps: int
    loss: float
    party: str


@dataclass(frozen=True)
class Evaluated(Event):
    """Event: the model was evaluated on a split."""

    round: int
    split: str
    metrics: dict[str, float]
    selected_by: Metric  # the metric that selects the model
    loss: float | None = None
    improved: bool = False
    party: str | None = None  # the party, if parties train alone
    last: bool = False  # whether training is over
    bytes: int = 0  # bytes sent so far by all roles; only in a simulation
    per_client: tuple[float | None, ...] | None = None  # first metric of each party's own prediction
    ensemble: bool = False  # whether the model is the warm ensemble: the mean of the parties' own scores

    @property
    def is_of_selected_model(self) -> bool:
        """Whether the evaluated model is the best so far. This is always true in the test."""
        return self.improved or self.split == "test"


@dataclass(frozen=True)
class CandidateStarted(Event):
    """Event: a candidate of the preset starts its rounds in a race, or was chosen."""

    settings: FlatSettings  # the settings that differ between the candidates
    num_rounds: int  # number of rounds that it runs now
    chosen: bool = False
    restarts: bool = True  # whether it starts from round 0; the preferred candidate continues if it wins the race
    score: float | None = None  # its best validation score in the race; set at the server, after the race
    other_scores: tuple[float, ...] = ()  # best validation scores of the other candidates
    # If the candidate was chosen without a race: the reason why no race is possible, or an empty string if only this
    # candidate fits the data. None: there is a race.
    obstacle: str | None = None
    # If the candidate was chosen: the number of releases before the choice, by this client or, in a simulation, by all
    # clients. None at a server.
    releases: int | None = None

    def __str__(self) -> str:
        listed = ", ".join(f"{key} = {value!r}" for key, value in self.settings.items())
        if not self.chosen:
            return f"race: {self.num_rounds} rounds with {listed}"
        if self.obstacle is not None:
            return f"the preset chose {listed} by rules, without a race" + (self.obstacle and f": {self.obstacle}")
        if self.score is None:
            return f"the preset chose {listed}"
        others = ", ".join("diverged" if math.isinf(each) else f"{each:.4f}" for each in self.other_scores)
        start = "it starts again from round 0" if self.restarts else "it continues"
        return f"the preset chose {listed}: validation score {self.score:.4f} in the race, the others {others}; {start}"


@dataclass(frozen=True)
class CandidateDiverged(Event):
    """Event: a candidate of the preset diverged in the race, so it loses."""

    round: int  # number of rounds that the candidate ran

    def __str__(self) -> str:
        return f"race: training diverged within {self.round} rounds; this candidate loses"


@dataclass(frozen=True)
class Collapsed(Event):
    """Event: on the validation nodes, the selected model is no better than one constant prediction for all nodes."""

    party: str | None = None  # the party that trained the model alone; None: the parties trained it together

    def __str__(self) -> str:
        owner = "" if self.party is None else f" of party {self.party!r}"
        exact = "" if self.party else 'exact gradients (train.backward = "joint", train.num_local_steps = 1), '
        return (
            f"on the validation nodes the selected model{owner} is no better than one prediction for all nodes: it has "
            f'learned nothing. Use {exact}model.normalization = "layer", fewer layers, or another train.learning_rate'
        )


@dataclass(frozen=True)
class Propagated(Event):
    """Event: a party that trained alone compared its model with plain label propagation over its edges."""

    party: str
    metrics: dict[str, dict[str, float]]  # the metrics of label propagation, by split
    is_better: bool  # whether label propagation is better than the party's model on validation nodes


@dataclass(frozen=True)
class SubsetScored(Event):
    """Event: the selected model was scored on validation nodes with some of the parties."""

    parties: tuple[str, ...]
    metrics: dict[str, float]


@dataclass(frozen=True)
class Evaluating(Event):
    """Event: progress of a long evaluation at one party."""

    round: int
    share: float  # between 0 and 1
    party: str


@dataclass(frozen=True)
class Aligning(Event):
    """Event: progress of an alignment at one party."""

    share: float  # between 0 and 1
    party: str

    def __str__(self) -> str:
        return f"{self.party}: aligning, {100 * self.share:.0f} % done"


Request = Send | Receive | Broadcast | Scatter | Save | Interleave | Timed | Event
Script = Generator[Request, Any, Result]
