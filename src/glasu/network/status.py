"""The progress of a role: figures for a line per round and for monitoring. Nothing private, and no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Status:
    """The progress of one role."""

    round: int  # completed rounds
    num_rounds: int
    attempt: int
    loss: float | None  # of the last round; at the server the mean of all parties
    bytes_to_server: int
    bytes_to_clients: int
    seconds: float  # in which a process of this role ran

    def line(self) -> str:
        """Return the status line of a round."""
        loss = "" if self.loss is None else f"loss {self.loss:.3f}, "
        return (
            f"round {self.round}/{self.num_rounds} done, {loss}{self.bytes_to_server / 1e6:.2f} MB to the server, "
            f"{self.bytes_to_clients / 1e6:.2f} MB back, {self.seconds:.1f} s"
        )


@dataclass(frozen=True, kw_only=True)
class View:
    """The state of a server at one moment."""

    status: Status
    connected: Mapping[str, bool]  # by party
    refused: int  # processes and connections that the server refused after the TLS handshake
    messages: int
    exchanges: int
    bytes_by_phase: Mapping[str, int]
    seconds_by_part: Mapping[str, float]
    scores: Mapping[str, float] = field(default_factory=dict)  # of the last evaluation on validation
    finished: bool = False
