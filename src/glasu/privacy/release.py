"""`Release`, the gate of a client. Tensors, node sets, numbers and blinded points leave the client only through it.

A tensor is first perturbed (clip, noise) and then encoded (`glasu.wire`). Both steps can change the values that the
client contributes, so `extract_others` gets the decoded result. If sums are hidden, the encoded numbers are then masked
or encrypted. This does not change the sum that the clients read. The ledger records every release.

`read` decodes the answers. It belongs here because decoding can depend on this client's earlier releases and answers:
with `wire.feedback`, an answer is the change from a reference (`glasu.privacy.feedback`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeAlias, TypedDict

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from glasu.errors import ProtocolError
from glasu.privacy.blinding import BLINDED, Points
from glasu.privacy.column_grids import ColumnGrids
from glasu.privacy.feedback import Reference, apply_change, find_change, start_reference
from glasu.privacy.ledger import ROW_DIGEST_BYTES, Ledger, Rule
from glasu.privacy.masking import Hiding, Reveal, SumHistory
from glasu.privacy.noise import RowNoise
from glasu.wire import ids
from glasu.wire.encoding import Encoding
from glasu.wire.integers import Integers
from glasu.wire.message_key import Key
from glasu.wire.ring import Ring
from glasu.wire.tensor_kinds import CHANGE, GRADIENT, OWNER_GRADIENT, REPRESENTATION, TensorKind


class Perturbation(Protocol):
    """Changes the values that a client contributes. The result is a function of the arguments."""

    @property
    def name(self) -> str: ...

    def __call__(self, value: Tensor, key: Key) -> Tensor: ...


class RowFacts(TypedDict, total=False):
    """Nodes and digests of released rows, as arguments of `Ledger.record`."""

    nodes: NDArray[np.int64]
    row_digests: bytes | None


@dataclass(frozen=True)
class Clip:
    """Scales each row down to an L2 norm of at most `norm`. LocalUpdate differentiates through this scaling."""

    norm: float
    name: str = "clip"

    def __call__(self, value: Tensor) -> Tensor:
        lengths = torch.linalg.vector_norm(value, dim=1, keepdim=True)
        clipped: Tensor = value * (self.norm / lengths.clamp(min=self.norm))
        return clipped


class Sent(NamedTuple):
    """A released tensor in its wire encoding."""

    payload: NDArray[Any]  # the encoded array, masked or encrypted if sums are hidden
    unmasked: NDArray[Any]  # the encoded array before masking or encryption
    encoding: Encoding
    contribution: Tensor | None = None  # the result of `value`; None: decode `unmasked`

    @property
    def value(self) -> Tensor:
        """The values that this client contributes, as a receiver would decode them without masks."""
        if self.contribution is not None:
            return self.contribution
        return torch.from_numpy(self.encoding.decode(self.unmasked))


@dataclass(frozen=True)
class Protection:
    """The protection of one kind of tensor, applied in the order of the fields."""

    clip: Clip | None = None
    noise: RowNoise | None = None
    perturbations: Sequence[Perturbation] = ()  # applied to the noisy values

    def describe(self, hidden_by: str = "") -> str:
        """Return the names of the parts, in their order, as the ledger records them.

        Args:
            hidden_by: the name of the masks or the encryption that hide the encoded values from the server; empty if
                the values are not hidden.
        """
        names = [part.name for part in (self.clip, self.noise, *self.perturbations) if part is not None]
        return "+".join([*names, hidden_by] if hidden_by else names) or "none"


UNPROTECTED = Protection()
ClearObserver: TypeAlias = Callable[
    [TensorKind, Key, NDArray[Any], bool], None
]  # the last argument: True for an answer
References: TypeAlias = dict[tuple[str, int], Reference]  # by phase and layer


def _find_place(key: Key) -> tuple[str, int]:
    """Return the phase and the layer of a reference.

    Training and evaluation have separate references, because their rows and their dropout differ.
    """
    return key.phase.name, key.layer


def _require_integers(encoding: Encoding) -> Integers:
    assert isinstance(encoding, Integers)
    return encoding


@dataclass
class HiddenSums:
    """The state of a client for hidden sums: the server adds the clients' tensors without reading them."""

    grids: ColumnGrids = field(default_factory=ColumnGrids)
    hiding: Hiding | None = None  # masks or encryption of the current attempt; None: the parties have no keys yet
    history: SumHistory = field(default_factory=SumHistory)  # the sums that this client has read

    def read(self, kind: TensorKind, key: Key, total: NDArray[Any], ring: Ring, num_summed: int) -> Tensor:
        """Return the mean, given the sum of the integers of `num_summed` clients; add the sum to the history."""
        self.history = self.history.add(f"{kind} {key.phase.name} {key.round} {key.layer}", total)
        return self.grids.to_mean(kind, total, key, ring, num_summed)


@dataclass
class Release:
    """Perturbs and encodes everything that a client sends, and records every release in the ledger."""

    encodings: Mapping[TensorKind, Encoding]
    protections: Mapping[TensorKind, Protection] = field(
        default_factory=dict
    )  # a kind that is not listed has no protection
    ledger: Ledger = field(default_factory=Ledger)
    rules: Sequence[Rule] = ()  # ledger rules from the settings; a runtime passes them to a ledger that it stores
    enters_nodes: bool = False  # whether the ledger records the nodes of each release
    feedback: bool = False  # whether later releases of the same rows are sent as changes
    references: References = field(default_factory=dict)
    sums: HiddenSums = field(default_factory=HiddenSums)  # used for kinds of tensors whose encoding is a `Ring`
    observe_clear: ClearObserver | None = None  # is called with the values of hidden tensors, to record a transcript

    def find_protection(self, kind: TensorKind) -> Protection:
        """Return the protection of a kind of tensor. Changes have the protection of representations."""
        return self.protections.get(kind.protecting_kind, UNPROTECTED)

    @property
    def transparent(self) -> bool:
        """Whether receivers decode exactly the result of `clip`, without noise or rounding."""
        exact = self.encodings[REPRESENTATION].is_exact and not self.feedback
        protection = self.find_protection(REPRESENTATION)
        return exact and protection.noise is None and not protection.perturbations

    def clip(self, partial: Tensor) -> Tensor:
        """Clip H_m^+[l]. Clipping is differentiable, and LocalUpdate clips too."""
        clip = self.find_protection(REPRESENTATION).clip
        return partial if clip is None else clip(partial)

    def clip_gradient(self, partial: Tensor, gradient: Tensor) -> Tensor:
        """Return the gradient at H_m^+[l], given the gradient at the clipped H_m^+[l]."""
        clip = self.find_protection(REPRESENTATION).clip
        if clip is None:
            return gradient
        with torch.enable_grad():
            leaf = partial.detach().requires_grad_()
            return torch.autograd.grad(clip(leaf), leaf, gradient)[0]

    def tensor(self, kind: TensorKind, value: Tensor, key: Key, nodes: NDArray[np.int64] | None = None) -> Sent:
        """Release representations, their changes, gradients or scores.

        Args:
            kind: the kind of tensor.
            value: the values; for a change, the new representations.
            key: the key of the exchange.
            nodes: the nodes of the rows; None if they are not known.
        """
        encoding, protection = self.encodings[kind], self.find_protection(kind)
        value, digests = self._perturb(protection, value.detach(), key, nodes)
        contribution = hiding = None
        array: NDArray[Any] = value.numpy()
        if kind.is_change:
            array, changed = find_change(self.references[_find_place(key)], value, _require_integers(encoding))
            self.references[_find_place(key)], contribution = changed, changed.own
        elif isinstance(encoding, Ring):
            hiding = self.sums.hiding
            if hiding is None:
                raise ProtocolError(f"{key}: the parties have not agreed on keys; nothing was sent.")
            array, contribution = self.sums.grids.to_integers(kind, value, key, encoding)
        unmasked = encoding.encode(array, key)
        payload = unmasked if hiding is None else hiding(unmasked, key)
        self.ledger.record(
            kind.name,
            key,
            lambda: (np.ascontiguousarray(payload),),
            size=payload.nbytes,
            rows=value.shape[0],
            columns=value.shape[1],
            protection=protection.describe("" if hiding is None else hiding.name),
            **self._describe_rows(nodes, digests),
        )
        sent = Sent(payload, unmasked, encoding, contribution)
        if encoding.is_hidden:
            self.show_clear(kind, key, sent.value, is_answer=False)
        return sent

    def sealed_gradient(
        self,
        value: Tensor,
        key: Key,
        seal: Callable[[NDArray[Any]], Sequence[bytes]],
        nodes: NDArray[np.int64] | None = None,
    ) -> tuple[Sent, Sequence[bytes]]:
        """Release the label owner's gradient, encrypted for the other clients. It is not part of a sum.

        Args:
            value: the gradient.
            key: the key of the exchange.
            seal: encrypts the encoded tensor, chunk by chunk.
            nodes: the nodes of the rows; None if they are not known.

        Returns:
            The gradient as its readers decode it, and the encrypted chunks.
        """
        encoding, protection = self.encodings[OWNER_GRADIENT], self.find_protection(OWNER_GRADIENT)
        value, digests = self._perturb(protection, value.detach(), key, nodes)
        encoded = encoding.encode(value.numpy(), key)
        chunks = seal(encoded)
        self.ledger.record(
            OWNER_GRADIENT.protecting_kind.name,
            key,
            lambda: chunks,
            size=sum(map(len, chunks)),
            rows=len(encoded),
            columns=value.shape[1],
            protection=protection.describe("sealed"),
            **self._describe_rows(nodes, digests),
        )
        return Sent(encoded, encoded, encoding), chunks

    @staticmethod
    def _perturb(
        protection: Protection, value: Tensor, key: Key, nodes: NDArray[np.int64] | None
    ) -> tuple[Tensor, bytes | None]:
        """Clip, add noise, and apply the other perturbations; with noise, also return the digests of the clean rows."""
        digests = None
        if protection.clip is not None:
            value = protection.clip(value)
        if protection.noise is not None:
            value, digests = protection.noise.perturb(value, key, nodes)
        for perturbation in protection.perturbations:
            value = perturbation(value, key)
        return value, digests

    def _describe_rows(self, nodes: NDArray[np.int64] | None, digests: bytes | None) -> RowFacts:
        """Return the nodes and digests that the ledger records, in node order. With noise, it always records both."""
        if nodes is None or not (self.enters_nodes or digests is not None):
            return {}
        order = np.argsort(nodes, kind="stable")
        if digests is not None:
            digests = np.frombuffer(digests, f"V{ROW_DIGEST_BYTES}")[order].tobytes()
        return {"nodes": nodes[order], "row_digests": digests}

    def prepare_reading(self, kind: TensorKind, key: Key, shape: tuple[int, int | None]) -> Reveal:
        """Return the function that unmasks or decrypts an answer. Call this before the answer arrives."""
        encoding, hiding = self.encodings[kind], self.sums.hiding
        if hiding is None or not isinstance(encoding, Ring):
            return lambda payload, requested: payload
        return hiding.prepare_reading(key, shape, encoding)

    def update_ranges(self, key: Key, gradient: Tensor) -> None:
        """Derive gradient ranges from the label owner's gradient, which all clients have. Lower layers use them."""
        encoding = self.encodings[GRADIENT]
        if isinstance(encoding, Ring):
            self.sums.grids.update_range(GRADIENT, key, gradient.numpy(), encoding, 1)

    def read(
        self, kind: TensorKind, key: Key, payload: NDArray[Any], num_summed: int = 1, sent: Sent | None = None
    ) -> Tensor:
        """Return the values of an answer, which the caller has checked.

        Args:
            kind: the kind of tensor.
            key: the key of the exchange.
            payload: all rows, unmasked or decrypted.
            num_summed: the number of clients that contributed to a sum in a ring.
            sent: the tensor that this client sent; None if it contributed nothing.
        """
        encoding = self.encodings[kind]
        if isinstance(encoding, Ring):
            mean = self.sums.read(kind, key, payload, encoding, num_summed)
            self.show_clear(kind, key, mean, is_answer=True)
            return mean
        decoded = encoding.answer.decode(payload)
        if kind.is_change:
            changed = apply_change(self.references[_find_place(key)], decoded, _require_integers(encoding))
            self.references[_find_place(key)] = changed
            return changed.joint.detach()  # a separate tensor, because a step makes it a leaf of autograd
        value = torch.from_numpy(decoded)
        if kind.starts_reference and self.feedback and sent is not None:
            integers = _require_integers(self.encodings[CHANGE])
            self.references[_find_place(key)] = start_reference(sent.value, value.detach(), integers)
        return value

    def show_clear(self, kind: TensorKind, key: Key, value: Tensor, *, is_answer: bool) -> None:
        """Pass the values of a hidden tensor, which this client sent or read, to the observer if there is one."""
        if self.observe_clear is not None:
            self.observe_clear(kind, key, value.numpy(), is_answer)

    def bytes_for_peers(self, kind: str, content: bytes, key: Key, *, rows: int, protection: str) -> NDArray[np.uint8]:
        """Release bytes for the other clients: public keys, proofs, or encrypted data."""
        payload = np.frombuffer(content, np.uint8)
        self.ledger.record(kind, key, lambda: (payload,), rows=rows, size=payload.nbytes, protection=protection)
        return payload

    def points(self, kind: str, points: Points, key: Key) -> Points:
        """Release points of a curve: blinded ids, or a share of a key."""
        self.ledger.record(
            kind,
            key,
            lambda: (points,),
            size=points.nbytes,
            rows=len(points),
            columns=points.shape[1],
            protection=BLINDED,
        )
        return points

    def node_sets(self, node_sets: Sequence[NDArray[np.int64]], key: Key) -> tuple[NDArray[np.int32], ...]:
        """Sort and release node sets, one per round."""
        payloads = tuple((nodes if ids.is_increasing(nodes) else np.unique(nodes)).astype("<i4") for nodes in node_sets)
        rows = sum(len(nodes) for nodes in payloads)
        encoded = [] if self.ledger.sink is None else [ids.encode(nodes) for nodes in payloads]
        # Without a sink nothing is encoded, so the size is computed.
        size = sum(map(len, encoded)) if encoded else sum(map(ids.measure_encoded, payloads))
        self.ledger.record("node sets", key, lambda: encoded, rows=rows, size=size)
        return payloads

    def numbers(self, kind: str, values: Sequence[float], key: Key) -> NDArray[np.float64]:
        """Release single numbers, such as losses and metrics."""
        payload = np.asarray(values, "<f8")
        self.ledger.record(kind, key, lambda: (payload,), rows=len(payload), size=payload.nbytes)
        return payload
