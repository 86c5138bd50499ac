"""Release: the one gate through which anything leaves a client.

It has two halves. *Perturb* (clip, noise, grid) changes what the client contributes. *Encode* decides how that travels
(`glasu.wire`). `extract_others` sees the result of both: what every reader makes of the bytes. Every release is
entered in the ledger.
"""

from __future__ import annotations

import hmac
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from numpy.typing import NDArray
from torch import Tensor

from glasu.privacy.ledger import Ledger
from glasu.wire import ids
from glasu.wire.encodings import Encoding, Kind, Plain
from glasu.wire.message_key import Key


class Perturbation(Protocol):
    """Changes the values that a client contributes, as a function of the message's key."""

    @property
    def name(self) -> str: ...

    def __call__(self, value: Tensor, key: Key) -> Tensor: ...


@dataclass(frozen=True)
class Clip:
    """Scale each row down to an L2 norm of at most `norm`; differentiable, so that LocalUpdate passes it too."""

    norm: float
    name: str = "clip"

    def __call__(self, value: Tensor, key: Key | None = None) -> Tensor:
        lengths = torch.linalg.vector_norm(value, dim=1, keepdim=True)
        clipped: Tensor = value * (self.norm / lengths.clamp(min=self.norm))
        return clipped


@dataclass(frozen=True)
class GaussianNoise:
    """Add normal noise from AES-CTR under a secret of the client: a redone release is the same bytes."""

    deviation: float
    secret: bytes = field(repr=False)
    name: str = "noise"

    def __call__(self, value: Tensor, key: Key) -> Tensor:
        return value + self.deviation * torch.from_numpy(self._normal(value.numel(), key)).view(value.shape).to(
            value.dtype
        )

    def _normal(self, count: int, key: Key) -> NDArray[np.float64]:
        """Return standard normal numbers (Box and Muller) that only the secret and the message's key decide."""
        stream_key = hmac.digest(self.secret, b"glasu noise" + key.about(), "sha256")
        pairs = -(-count // 2)
        stream = Cipher(algorithms.AES(stream_key), modes.CTR(bytes(16))).encryptor().update(bytes(16 * pairs))
        uniform = ((np.frombuffer(stream, "<u8") >> 11) + 0.5) * 2.0**-53  # inside (0, 1)
        radius, angle = np.sqrt(-2 * np.log(uniform[:pairs])), 2 * math.pi * uniform[pairs:]
        return np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])[:count]


@dataclass(frozen=True)
class Grid:
    """Round to multiples of 2^-bits, half to even."""

    bits: int
    name: str = "grid"

    def __call__(self, value: Tensor, key: Key) -> Tensor:
        return torch.round(value * 2.0**self.bits) * 2.0**-self.bits


class Sent(NamedTuple):
    """A tensor that has left the client, as the array that travels."""

    payload: NDArray[Any]
    encoding: Encoding

    @property
    def value(self) -> Tensor:
        """The values that everyone now reads in it."""
        return torch.from_numpy(self.encoding.decode(self.payload))


@dataclass
class Release:
    """The gate: perturb, encode, enter in the ledger."""

    encodings: Mapping[Kind, Encoding]
    clipping: Clip | None = None
    perturbations: Sequence[Perturbation] = ()  # after clipping: noise, then grid
    ledger: Ledger = field(default_factory=Ledger)

    @property
    def protection(self) -> str:
        """Name what protects a released tensor."""
        if self.clipping is None and not self.perturbations:
            return "none"
        parts = [self.clipping.name] if self.clipping else []
        return "+".join([*parts, *(item.name for item in self.perturbations)])

    @property
    def transparent(self) -> bool:
        """Tell whether everyone reads in a released tensor what `clip` made of it, bit for bit."""
        return not self.perturbations and isinstance(self.encodings["representation"], Plain)

    def clip(self, partial: Tensor) -> Tensor:
        """Apply the differentiable part of the gate, as LocalUpdate must."""
        return partial if self.clipping is None else self.clipping(partial)

    def clip_gradient(self, partial: Tensor, gradient: Tensor) -> Tensor:
        """Return the gradient at a partial, given that at what `clip` makes of it."""
        if self.clipping is None:
            return gradient
        with torch.enable_grad():
            leaf = partial.detach().requires_grad_()
            return torch.autograd.grad(self.clipping(leaf), leaf, gradient)[0]

    def tensor(self, kind: Kind, value: Tensor, key: Key) -> Sent:
        """Let a tensor out: representations, gradients, class probabilities."""
        value = self.clip(value.detach())
        for perturbation in self.perturbations:
            value = perturbation(value, key)
        encoding = self.encodings[kind]
        payload = encoding.encode(value.numpy(), key)
        self.ledger.enter(kind, key, rows=len(payload), size=payload.nbytes, protection=self.protection)
        return Sent(payload, encoding)

    def node_sets(self, node_sets: Sequence[NDArray[np.int64]], key: Key) -> tuple[NDArray[np.int32], ...]:
        """Let node numbers out, one set per round; sets travel in rising order."""
        payloads = tuple((nodes if ids.rises(nodes) else np.unique(nodes)).astype("<i4") for nodes in node_sets)
        rows, size = sum(len(nodes) for nodes in payloads), sum(ids.encoded_size(nodes) for nodes in payloads)
        self.ledger.enter("node sets", key, rows=rows, size=size, protection="none")
        return payloads

    def numbers(self, kind: str, values: Sequence[float], key: Key) -> NDArray[np.float64]:
        """Let single numbers out: losses and metrics."""
        payload = np.asarray(values, "<f8")
        self.ledger.enter(kind, key, rows=len(payload), size=payload.nbytes, protection="none")
        return payload
