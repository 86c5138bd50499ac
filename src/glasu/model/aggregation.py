"""Mean and Concat: what the server makes of the clients' partial representations, and how a client undoes its part.

The server's halves work on numpy buffers; this module must load without torch, for the server has none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from torch import Tensor

    from glasu.config import ModelConfig
    from glasu.wire.encodings import Encoding
    from glasu.wire.message_key import Key

Array = NDArray[Any]


def add(arrays: Sequence[Array]) -> Array:
    """Return the sum, added in the order given."""
    total = arrays[0].copy()
    for array in arrays[1:]:
        total += array
    return total


@dataclass(frozen=True)
class Mean:
    """H[l+1] = (H_1^+[l] + ... + H_M^+[l]) / M, added in client order."""

    num_clients: int  # M
    client: int = 0  # m; the server's halves do not read it

    @property
    def widening(self) -> int:
        """How many times the width of a partial the aggregate has."""
        return 1

    @property
    def adds(self) -> bool:
        """Whether aggregating computes new numbers; else it moves the partials' rows, in whatever form they are."""
        return True

    def aggregate(self, partials: Sequence[Array]) -> Array:
        """Return H[l+1] from one partial per client, all of one shape."""
        total = add(partials)
        total /= self.num_clients
        return total

    def combine_partials(self, encoding: Encoding, payloads: Sequence[Array], key: Key, first_row: int) -> Array:
        """Server: return H[l+1] as it travels, from the encoded partials."""
        return encoding.combine(payloads, self.num_clients, [key], first_row)[0]

    def combine_gradients(
        self, encoding: Encoding, payloads: Sequence[Array], keys: Sequence[Key], first_row: int
    ) -> list[Array]:
        """Server: return for every client the encoded gradient at its partial, from the gradients at H[l+1]."""
        return encoding.combine(payloads, self.num_clients, keys, first_row)

    def extract_others(self, joint: Tensor, partial: Tensor) -> Tensor:
        """Return H_{-m}[l+1] = H[l+1] - H_m^+[l] / M: what the other clients contributed.

        Args:
            joint: H[l+1], shape (|S[l+1]|, d[l+1]).
            partial: H_m^+[l] as it was sent, after `Release`; same shape.

        Returns:
            H_{-m}[l+1], same shape, without gradient: it stays fixed for the whole round.
        """
        return (joint - partial / self.num_clients).detach()

    def merge(self, others: Tensor, partial: Tensor) -> Tensor:
        """Return H[l+1] from the others' share and the own partial, to rounding."""
        import torch

        return torch.add(others, partial, alpha=1 / self.num_clients)

    def own_gradient(self, gradient: Tensor) -> Tensor:
        """Return the gradient at the own partial, given that at H[l+1]."""
        return gradient / self.num_clients

    def backpropagate(self, total: Array) -> list[Array]:
        """Return for each client the gradient at its partial, given the sum of the gradients at H[l+1]."""
        return [total / self.num_clients] * self.num_clients


@dataclass(frozen=True)
class Concat:
    """H[l+1] = [H_1^+[l], ..., H_M^+[l]], side by side in client order."""

    num_clients: int  # M
    client: int = 0  # m; the server's halves do not read it

    @property
    def widening(self) -> int:
        """How many times the width of a partial the aggregate has."""
        return self.num_clients

    @property
    def adds(self) -> bool:
        """Whether aggregating computes new numbers; else it moves the partials' rows, in whatever form they are."""
        return False

    def aggregate(self, partials: Sequence[Array]) -> Array:
        """Return H[l+1] from one partial per client, all of one shape."""
        return np.concatenate(partials, axis=1)

    def combine_partials(self, encoding: Encoding, payloads: Sequence[Array], key: Key, first_row: int) -> Array:
        """Server: return H[l+1] as it travels. The rows are moved, not computed, so nothing is rounded again."""
        return np.concatenate(payloads, axis=1)

    def combine_gradients(
        self, encoding: Encoding, payloads: Sequence[Array], keys: Sequence[Key], first_row: int
    ) -> list[Array]:
        """Server: return for every client its columns of the sum of the gradients at H[l+1]."""
        width = payloads[0].shape[1] // self.num_clients
        blocks = [slice(m * width, (m + 1) * width) for m in range(self.num_clients)]
        return [
            encoding.combine([payload[:, block] for payload in payloads], 1, [key], first_row)[0]
            for block, key in zip(blocks, keys, strict=True)
        ]

    def extract_others(self, joint: Tensor, partial: Tensor) -> Tensor:
        """Return H_{-m}[l+1]: H[l+1] without the own columns."""
        import torch

        width = partial.shape[1]
        start = self.client * width
        return torch.cat([joint[:, :start], joint[:, start + width :]], dim=1).detach()

    def merge(self, others: Tensor, partial: Tensor) -> Tensor:
        """Return H[l+1] from the others' columns and the own partial, exactly."""
        import torch

        start = self.client * partial.shape[1]
        return torch.cat([others[:, :start], partial, others[:, start:]], dim=1)

    def own_gradient(self, gradient: Tensor) -> Tensor:
        """Return the gradient at the own partial, given that at H[l+1]: its columns."""
        width = gradient.shape[1] // self.num_clients
        return gradient[:, self.client * width : (self.client + 1) * width].contiguous()

    def backpropagate(self, total: Array) -> list[Array]:
        """Return for each client its columns of the sum of the gradients at H[l+1]."""
        width = total.shape[1] // self.num_clients
        return [np.ascontiguousarray(total[:, m * width : (m + 1) * width]) for m in range(self.num_clients)]


Aggregation = Mean | Concat


def aggregation_of(model: ModelConfig, num_clients: int, client: int = 0) -> Aggregation:
    """Return the aggregation that the config names, in the role of one client (or of the server)."""
    kinds: dict[str, type[Mean] | type[Concat]] = {"mean": Mean, "concat": Concat}
    return kinds[model.aggregation](num_clients, client)
