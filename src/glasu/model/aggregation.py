"""Aggregation: how the server combines the clients' partials, and how a client separates its own share.

The server has no torch. So the methods that it calls work on encoded arrays, and this module does not import torch at
the top.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Self

from glasu import registry
from glasu.wire.encoding import Array, Encoding
from glasu.wire.message_key import Key

if TYPE_CHECKING:
    from torch import Tensor

    from glasu.config import ModelConfig


@dataclass(frozen=True)
class Aggregation(ABC):
    """Combines the partials H_m^+[l] into H[l+1]. To add an aggregation, register a subclass."""

    allows_absence: ClassVar[bool] = False  # whether H[l+1] has the same width if some clients are absent
    is_mean: ClassVar[bool] = False  # whether H[l+1] is the mean of the partials

    num_clients: int  # M
    client: int = 0  # m; methods that the server calls do not read it

    def with_clients(self, num_present: int) -> Self:
        """Return the aggregation for a round in which only `num_present` clients contribute."""
        return self if num_present == self.num_clients else replace(self, num_clients=num_present)

    @property
    @abstractmethod
    def widening(self) -> int:
        """The width of H[l+1], in multiples of the width of a partial."""

    @abstractmethod
    def extract_others(self, joint: Tensor, partial: Tensor) -> Tensor:
        """Return H_{-m}[l+1], the part of H[l+1] that the other clients contributed.

        Args:
            joint: H[l+1], shape (|S[l+1]|, d[l+1]).
            partial: H_m^+[l] as it was sent, after `Release`.

        Returns:
            H_{-m}[l+1] without gradient: it stays fixed for the whole round.
        """

    @abstractmethod
    def merge(self, others: Tensor, partial: Tensor) -> Tensor:
        """Return H[l+1], given the other clients' part and this client's partial."""

    @abstractmethod
    def own_gradient(self, gradient: Tensor) -> Tensor:
        """Return the gradient at this client's partial H_m^+[l], given the gradient at H[l+1]."""

    @abstractmethod
    def combine_partials(self, encoding: Encoding, payloads: Sequence[Array], key: Key, first_row: int) -> Array:
        """Server: return the encoded H[l+1].

        Args:
            encoding: the encoding of the payloads and of the result.
            payloads: the encoded partials, in client order, all of one shape.
            key: the key of the answer.
            first_row: the position of the first row in the whole tensor; a tensor may be sent in several parts.
        """

    @abstractmethod
    def combine_gradients(
        self, encoding: Encoding, payloads: Sequence[Array], keys: Sequence[Key], first_row: int
    ) -> list[Array]:
        """Server: return for each client the encoded gradient at the client's partial.

        Args:
            encoding: the encoding of the payloads and of the results.
            payloads: the encoded gradients at H[l+1], in client order, from the clients that sent one.
            keys: the keys of the answers, one per client.
            first_row: the position of the first row in the whole tensor; a tensor may be sent in several parts.
        """


class Mean(Aggregation):
    """H[l+1] = (H_1^+[l] + ... + H_M^+[l]) / M, added in client order."""

    allows_absence = True
    is_mean = True

    @property
    def widening(self) -> int:
        return 1

    def extract_others(self, joint: Tensor, partial: Tensor) -> Tensor:
        """Return H_{-m}[l+1] = H[l+1] - H_m^+[l] / M."""
        return (joint - partial / self.num_clients).detach()

    def merge(self, others: Tensor, partial: Tensor) -> Tensor:
        """Return H_{-m}[l+1] + H_m^+[l] / M; it equals H[l+1] up to rounding."""
        import torch

        return torch.add(others, partial, alpha=1 / self.num_clients)

    def own_gradient(self, gradient: Tensor) -> Tensor:
        return gradient / self.num_clients

    def combine_partials(self, encoding: Encoding, payloads: Sequence[Array], key: Key, first_row: int) -> Array:
        return encoding.combine(payloads, self.num_clients, [key], first_row)[0]

    def combine_gradients(
        self, encoding: Encoding, payloads: Sequence[Array], keys: Sequence[Key], first_row: int
    ) -> list[Array]:
        return encoding.combine(payloads, self.num_clients, keys, first_row)


class Concat(Aggregation):
    """H[l+1] = [H_1^+[l], ..., H_M^+[l]], side by side in client order."""

    @property
    def widening(self) -> int:
        return self.num_clients

    def extract_others(self, joint: Tensor, partial: Tensor) -> Tensor:
        """Return H[l+1] without this client's columns."""
        import torch

        width = partial.shape[1]
        start = self.client * width
        return torch.cat([joint[:, :start], joint[:, start + width :]], dim=1).detach()

    def merge(self, others: Tensor, partial: Tensor) -> Tensor:
        """Insert this client's columns; the result equals H[l+1] exactly."""
        import torch

        start = self.client * partial.shape[1]
        return torch.cat([others[:, :start], partial, others[:, start:]], dim=1)

    def own_gradient(self, gradient: Tensor) -> Tensor:
        width = gradient.shape[1] // self.num_clients
        return gradient[:, self.client * width : (self.client + 1) * width].contiguous()

    def combine_partials(self, encoding: Encoding, payloads: Sequence[Array], key: Key, first_row: int) -> Array:
        return encoding.concatenate(payloads, key, first_row)

    def combine_gradients(
        self, encoding: Encoding, payloads: Sequence[Array], keys: Sequence[Key], first_row: int
    ) -> list[Array]:
        return encoding.split_sum(payloads, keys, first_row)


AGGREGATIONS: dict[str, type[Aggregation]] = {"mean": Mean, "concat": Concat}


def make_aggregation(model: ModelConfig, num_clients: int, client: int = 0) -> Aggregation:
    """Return the aggregation that the config names. The server needs no client index."""
    found: Aggregation = registry.load("aggregation", model.aggregation)(num_clients, client)
    return found
