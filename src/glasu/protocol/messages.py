"""Every message on the wire. The encoding of a message and its maximum size follow from its fields.

To add a message, write its class, add it to MESSAGES, and send it from a script.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import cache
from operator import attrgetter
from typing import Annotated, Any, ClassVar, get_type_hints

import numpy as np
from numpy.typing import NDArray

from glasu.privacy.blinding import POINT_BYTES
from glasu.protocol.fields import (
    HEADER,
    SECTION,
    BytesField,
    Content,
    FlagField,
    NodeSetsField,
    NumbersField,
    RowsField,
    Shapes,
    TensorField,
)
from glasu.wire.encoding import Array
from glasu.wire.message_key import Key
from glasu.wire.tensor_kinds import CHANGE, GRADIENT, OWNER_GRADIENT, PROBABILITIES, REPRESENTATION

OFFER_BYTES = 1 << 14  # limit for a public key, its signature and a certificate
PROOF_BYTES = 64  # limit for a proof, and for the bytes that encryption adds


# These are functions, because a lambda in the annotations of a message cannot read the constants of this module.
def limit_offer(shapes: Shapes) -> int:
    """Return the maximum size of one client's offer."""
    return OFFER_BYTES


def limit_offers(shapes: Shapes) -> int:
    """Return the maximum size of the offers of all clients, including a length field of 4 bytes for each."""
    return (4 + OFFER_BYTES) * shapes.num_clients


def limit_proof(shapes: Shapes) -> int:
    """Return the maximum size of a proof."""
    return PROOF_BYTES


def limit_proofs(shapes: Shapes) -> int:
    """Return the maximum size of the proofs of all clients, including a length field of 4 bytes for each."""
    return (4 + PROOF_BYTES) * shapes.num_clients


def limit_sealed(shapes: Shapes) -> int:
    """Return the maximum size of an encrypted message: a chunk of the label owner's gradient, or keys for clients."""
    rows = min(shapes.num_nodes, shapes.chunk_rows)
    tensor = rows * shapes.encodings[OWNER_GRADIENT].row_bytes(shapes.joint_width)
    keys = 256 * shapes.num_clients + shapes.encodings[REPRESENTATION].key_bytes
    return max(tensor, keys) + PROOF_BYTES


@dataclass(frozen=True, eq=False)
class Message:
    """Base of all messages."""

    is_urgent: ClassVar[bool] = True  # False: the message may be sent together with its sender's next message

    key: Key

    @classmethod
    @cache
    def contents(cls) -> dict[str, Content]:
        """Return the fields of this kind of message by name, without the key."""
        hints = get_type_hints(cls, include_extras=True)
        return {item.name: hints[item.name].__metadata__[0] for item in dataclasses.fields(cls)[1:]}

    def measure(self) -> list[tuple[str, int]]:
        """Return the size in bytes of each part of the encoded message, by kind of content. The header is first."""
        count, sizes = 0, []
        for name, content in self.contents().items():
            sections, size = content.measure(getattr(self, name))
            count += sections
            sizes.append((content.tag, size))
        return [("header", HEADER.size + SECTION.size * count), *sizes]


@dataclass(frozen=True, eq=False)
class TensorMessage(Message):
    """Base of the messages that contain some rows of one tensor."""

    value: Any  # the encoded rows; a subclass states the kind of tensor

    @classmethod
    def content(cls) -> TensorField:
        """Return the field with the tensor."""
        content = cls.contents()["value"]
        assert isinstance(content, TensorField)
        return content


@dataclass(frozen=True, eq=False)
class Partial(TensorMessage):
    """Client: H_m^+[l], as released."""

    value: Annotated[Array, TensorField(REPRESENTATION, attrgetter("hidden"))]


@dataclass(frozen=True, eq=False)
class Joint(TensorMessage):
    """Server: H[l+1]."""

    value: Annotated[Array, TensorField(REPRESENTATION, attrgetter("joint_width"), is_answer=True)]


@dataclass(frozen=True, eq=False)
class Gradient(TensorMessage):
    """Client: the gradient of its loss at H[l+1]."""

    value: Annotated[Array, TensorField(GRADIENT, attrgetter("joint_width"))]


@dataclass(frozen=True, eq=False)
class JointGradient(TensorMessage):
    """Server: the gradient at H_m^+[l] (joint backward), or the label owner's gradient at H[L]."""

    value: Annotated[Array, TensorField(GRADIENT, attrgetter("joint_width"), is_answer=True)]


@dataclass(frozen=True, eq=False)
class Scores(TensorMessage):
    """Client: class probabilities or predictions at the requested nodes, or at all nodes."""

    value: Annotated[Array, TensorField(PROBABILITIES, attrgetter("num_scores"))]


@dataclass(frozen=True, eq=False)
class JointScores(TensorMessage):
    """Server: the mean of the scores that clients sent."""

    value: Annotated[Array, TensorField(PROBABILITIES, attrgetter("num_scores"), is_answer=True)]


@dataclass(frozen=True, eq=False)
class Change(TensorMessage):
    """Client: the change of H_m^+[l] since its last release (`glasu.privacy.feedback`)."""

    value: Annotated[Array, TensorField(CHANGE, attrgetter("hidden"))]


@dataclass(frozen=True, eq=False)
class JointChange(TensorMessage):
    """Server: the sum of the changes."""

    value: Annotated[Array, TensorField(CHANGE, attrgetter("hidden"), is_answer=True)]


@dataclass(frozen=True, eq=False)
class Proposal(Message):
    """Client: one node set S_m[l] per round."""

    is_urgent = False

    node_sets: Annotated[tuple[NDArray[np.int32], ...], NodeSetsField()]


@dataclass(frozen=True, eq=False)
class Agreed(Message):
    """Server: the unions of the proposed node sets."""

    node_sets: Annotated[tuple[NDArray[np.int32], ...], NodeSetsField()]


@dataclass(frozen=True, eq=False)
class Losses(Message):
    """Client: the losses of a round's local steps; empty from a client without labels. It has no answer."""

    is_urgent = False

    values: Annotated[NDArray[np.float64], NumbersField("loss", attrgetter("num_local_steps"))]


@dataclass(frozen=True, eq=False)
class Metrics(Message):
    """Client: the metrics of the model on a split; empty from a client without labels.

    In a race, a client whose training diverged sends the single value DIVERGED instead. At the test, a flag follows the
    metrics (`glasu.protocol.evaluation`).
    """

    values: Annotated[NDArray[np.float64], NumbersField("metrics", lambda shapes: 16)]


@dataclass(frozen=True, eq=False)
class Verdict(Message):
    """Server: whether this model is the best so far, and whether training stops."""

    improved: Annotated[bool, FlagField("verdict")]
    stop: Annotated[bool, FlagField("verdict")]


@dataclass(frozen=True, eq=False)
class Chosen(Message):
    """Label owner: the alpha that it chose. Other clients: no values. Server: the chosen alpha, to all clients."""

    values: Annotated[NDArray[np.float64], NumbersField("choice", lambda shapes: 1)]


@dataclass(frozen=True, eq=False)
class PartySituation(Message):
    """Client: the description of its data, if the preset has several candidates (`glasu.data.presets.Situation`)."""

    values: Annotated[NDArray[np.float64], NumbersField("situation", lambda shapes: 3)]


@dataclass(frozen=True, eq=False)
class Candidates(Message):
    """Server: positions in the list of candidates.

    Before a race, these are the candidates that run, the preferred one first. After it, this is the winner.
    """

    values: Annotated[NDArray[np.float64], NumbersField("candidates", lambda shapes: 16)]


@dataclass(frozen=True, eq=False)
class Waiting(Message):
    """Client: no contribution to this exchange; the client only waits for the answer."""


@dataclass(frozen=True, eq=False)
class SetSize(Message):
    """Client: the number of its ids. Server: the largest of these numbers."""

    values: Annotated[NDArray[np.float64], NumbersField("set size", lambda shapes: 1)]


@dataclass(frozen=True, eq=False)
class KeyShare(Message):
    """Client: the base point times the scalars of some parties. Server: the same point, to the next party."""

    point: Annotated[NDArray[np.uint8], RowsField("key share", ("|u1",), POINT_BYTES, single=True)]


@dataclass(frozen=True, eq=False)
class BlindedSet(Message):
    """Client: a party's ids, blinded by one or more parties. Server: the same points, to the next party."""

    points: Annotated[NDArray[np.uint8], RowsField("blinded ids", ("|u1",), POINT_BYTES)]


@dataclass(frozen=True, eq=False)
class CommonRows(Message):
    """Server: the rows of the common ids in the receiver's set, in the common order."""

    rows: Annotated[NDArray[np.uint32], RowsField("common rows", ("<u4",))]


@dataclass(frozen=True, eq=False)
class KeyOffer(Message):
    """Client: its public key for one attempt, the signature of this key, and its certificate."""

    content: Annotated[NDArray[np.uint8], BytesField("keys", limit_offer)]


@dataclass(frozen=True, eq=False)
class KeyOffers(Message):
    """Server: the offers of all clients, in client order."""

    content: Annotated[NDArray[np.uint8], BytesField("keys", limit_offers)]


@dataclass(frozen=True, eq=False)
class Sealed(Message):
    """Client: bytes that it encrypted for the other clients. Server: the same bytes, to all clients."""

    content: Annotated[NDArray[np.uint8], BytesField("sealed", limit_sealed)]


@dataclass(frozen=True, eq=False)
class Decision(Message):
    """Client with labels, if sums are hidden: its decision after an evaluation. Server: the decision, to all clients.

    The proof is equal at all clients that found the same metrics. If one party has the labels, `proof` is its verdict,
    encrypted for the other clients.
    """

    stop: Annotated[bool, FlagField("decision")]  # training stops
    ensemble: Annotated[bool, FlagField("decision")]  # the best model so far is the warm ensemble
    proof: Annotated[NDArray[np.uint8], BytesField("decision", limit_proof)]


@dataclass(frozen=True, eq=False)
class Proof(Message):
    """Client, at the end of a run with hidden sums: an HMAC of all answers that it has received in this attempt."""

    content: Annotated[NDArray[np.uint8], BytesField("proof", limit_proof)]


@dataclass(frozen=True, eq=False)
class Proofs(Message):
    """Server: the proofs of all clients, in client order."""

    content: Annotated[NDArray[np.uint8], BytesField("proof", limit_proofs)]


MESSAGES: tuple[type[Message], ...] = (
    Partial,
    Joint,
    Gradient,
    JointGradient,
    Scores,
    JointScores,
    Proposal,
    Agreed,
    Losses,
    Metrics,
    Verdict,
    Waiting,
    Chosen,
    Change,
    JointChange,
    PartySituation,
    Candidates,
    SetSize,
    KeyShare,
    BlindedSet,
    CommonRows,
    KeyOffer,
    KeyOffers,
    Sealed,
    Decision,
    Proof,
    Proofs,
)
