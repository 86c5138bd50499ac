"""Where a role stands: counts and figures for a line per round and for whoever watches; nothing private, no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Status:
    """One role after some rounds."""

    round: int  # done so far
    num_rounds: int
    attempt: int
    loss: float | None  # at a party its own; at the server the mean of the round before, which it hears of later
    bytes_to_server: int
    bytes_to_clients: int
    seconds: float  # since the run began, without those in which no process of this role was there

    def line(self) -> str:
        """Return the status line of a round."""
        loss = "" if self.loss is None else f"loss {self.loss:.3f}, "
        return (
            f"round {self.round}/{self.num_rounds} done, {loss}{self.bytes_to_server / 1e6:.2f} MB to the server, "
            f"{self.bytes_to_clients / 1e6:.2f} MB back, {self.seconds:.1f} s"
        )


@dataclass(frozen=True, kw_only=True)
class View:
    """The server at this moment."""

    status: Status
    connected: Mapping[str, bool]  # by party
    refused: int  # processes and connections that TLS let in and the server did not
    messages: int
    exchanges: int
    bytes_by_phase: Mapping[str, int]
    seconds_by_part: Mapping[str, float]
    scores: Mapping[str, float] = field(default_factory=dict)  # of the last evaluation on validation
    finished: bool = False
