"""The exchanges that differ in runs with hidden sums: an encrypted gradient, verdicts, and a comparison of the answers.

Client and server columns. In these runs the server adds tensors that it cannot read (masks or ckks). It forwards
encrypted messages. It learns two facts from an evaluation: whether training stops, and whether the warm ensemble is the
best model so far.

At the end of a run, the clients compare the running hashes of all answers that they have received. Each client sends a
proof: an HMAC of its running hash and its client index, under the group key. The server forwards all proofs. Without
the group key, the server cannot forge a proof.
"""

from __future__ import annotations

import hmac
import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from glasu.errors import ProtocolError
from glasu.privacy.masking import join_parts, split_parts
from glasu.protocol.chunks import split_rows
from glasu.protocol.key_agreement import server_forward
from glasu.protocol.messages import Decision, Proof, Proofs, Sealed, Waiting
from glasu.protocol.receiving import receive_answer
from glasu.protocol.requests import Broadcast, Receive, Script, Send
from glasu.wire.encoding import Array
from glasu.wire.message_key import Key, Phase
from glasu.wire.tensor_kinds import GRADIENT, OWNER_GRADIENT

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from glasu.model.blocks import NodeSet
    from glasu.privacy.release import Sent
    from glasu.protocol.client import Client
    from glasu.protocol.scoring import Scoring
    from glasu.protocol.server import Server
    from glasu.protocol.state import Identity


PROOF_PROTECTION = "hmac"  # in the ledger: without the group key, a proof reveals nothing about the answers
COMPARISON_LAYER = 4  # used as `layer` in a key; a race and the agreement on keys use the layers 0 to 3


def name_verdict_protection(identity: Identity) -> str:
    """Return the protection of a verdict in the ledger. It does not cover the two flags, which the server reads."""
    return PROOF_PROTECTION if identity.owner is None else "sealed"


def client_sealed_gradient(
    client: Client, key: Key, gradient: Tensor | None, nodes: NodeSet, columns: int
) -> Script[tuple[Tensor, Sent | None]]:
    """Client column: the label owner encrypts its gradient for the other clients; return the decoded gradient.

    Args:
        client: the client.
        key: the key of the exchange.
        gradient: the owner's gradient; None at the other clients.
        nodes: the nodes of the rows.
        columns: the number of columns of the gradient.

    Returns:
        The gradient as all clients decode it, and at the owner also the gradient as it was sent.
    """
    import torch

    hiding, owner = client.release.sums.hiding, client.identity.owner
    assert hiding is not None
    assert owner is not None
    encoding = client.release.encodings[OWNER_GRADIENT]
    chunks = split_rows(len(nodes), client.config.wire.chunk_rows)
    keys = [key.at(key.layer, chunk) for chunk in range(len(chunks))]

    def seal(encoded: Array) -> list[bytes]:
        return [hiding.seal(encoded[rows].tobytes(), own) for own, rows in zip(keys, chunks, strict=True)]

    sent, unseal = None, hiding.prepare_unsealing(owner)
    if gradient is None:
        for own in keys:
            yield Send(Waiting(own))
    else:
        sent, contents = client.release.sealed_gradient(gradient, key, seal, nodes)
        for own, content in zip(keys, contents, strict=True):
            yield Send(Sealed(own, np.frombuffer(content, np.uint8)))
    parts = []
    for own, rows in zip(keys, chunks, strict=True):
        answer: Sealed = yield from receive_answer(client, Sealed, own)
        content = unseal(answer.content.tobytes(), own)
        size = (rows.stop - rows.start) * encoding.row_bytes(columns)
        if len(content) != size:
            raise ProtocolError(
                f"party {client.name!r}, {own}: expected a gradient of {size} bytes from the label owner, got "
                f"{len(content)}."
            )
        width = encoding.row_bytes(columns) // encoding.dtype.itemsize
        parts.append(np.frombuffer(bytearray(content), encoding.dtype).reshape(-1, width))
    found = np.concatenate(parts)
    if (error := encoding.find_error(found, columns)) or not encoding.is_finite(found):
        raise ProtocolError(f"party {client.name!r}, {key}: the label owner's gradient: {error or 'is not finite'}.")
    value = torch.from_numpy(encoding.decode(found))
    client.release.show_clear(GRADIENT, key, value, is_answer=True)
    return value, sent


def server_sealed_gradient(server: Server, key: Key, num_rows: int) -> Script[None]:
    """Server column of `client_sealed_gradient`."""
    owner = server.identity.owner
    assert owner is not None
    for chunk in range(len(split_rows(num_rows, server.config.wire.chunk_rows))):
        yield from server_forward(server, key.at(key.layer, chunk), owner)


def client_decision(
    client: Client, scoring: Scoring, metrics: Mapping[str, float], *, improved: bool
) -> Script[tuple[bool, bool]]:
    """Client column: send the server the decision; return whether the model is the best so far, and whether to stop.

    Clients with labels have judged the metrics themselves. If one party has the labels, the other clients learn the
    verdict from this label owner.

    Args:
        client: the client.
        scoring: the evaluation.
        metrics: the metrics of this evaluation; empty at a client without labels.
        improved: whether the model is the best so far, as this client judges; ignored at a client without labels.
    """
    key, stop = scoring.metrics_key, client.progress.stopped
    ensemble = scoring.ensemble if improved else client.progress.ensemble
    hiding, owner, proof = client.release.sums.hiding, client.identity.owner, b""
    assert hiding is not None
    unseal = None if owner is None else hiding.prepare_unsealing(owner)
    if client.has_labels:
        if owner is None:
            proof = hiding.prove(np.array(list(metrics.values()), "<f8").tobytes(), key)
        else:
            proof = hiding.seal(struct.pack("<??", improved, stop), key)
        flags = struct.pack("<??", stop, ensemble)  # the server reads them; the ledger records every byte that is sent
        protection = name_verdict_protection(client.identity)
        content = client.release.bytes_for_peers("verdict", flags + proof, key, rows=1, protection=protection)
        yield Send(Decision(key, stop, ensemble, content[len(flags) :]))
    else:
        yield Send(Waiting(key))
    answer: Decision = yield from receive_answer(client, Decision, key)
    if owner is None:
        if (answer.stop, answer.ensemble, answer.proof.tobytes()) != (stop, ensemble, proof):
            raise ProtocolError(
                f"party {client.name!r}, {key}: the parties found different metrics: their labels or splits differ, or "
                "the server sent them different aggregates."
            )
        return improved, stop
    if not client.has_labels:
        assert unseal is not None
        verdict = unseal(answer.proof.tobytes(), key)
        improved, stop = struct.unpack("<??", verdict) if len(verdict) == 2 else (False, not answer.stop)
    if answer.stop != stop:
        raise ProtocolError(f"party {client.name!r}, {key}: the server changed the label owner's verdict.")
    return improved, stop


def server_decision(server: Server, key: Key) -> Script[Decision]:
    """Server column: receive the decisions of the parties, which must be equal; broadcast and return the decision."""
    everyone = server.identity.owner is None
    messages: Sequence[Decision | Waiting] = yield Receive((Decision,) if everyone else (Decision, Waiting), key)
    found: list[Decision] = []
    for client, message in enumerate(messages):
        if isinstance(message, Decision) != server.identity.has_labels(client):
            server.refuse(message, "expected a decision only from parties with labels.")
        if isinstance(message, Decision):
            found.append(message)
    first = found[0]
    for other in found[1:]:
        if (other.stop, other.ensemble, other.proof.tobytes()) != (first.stop, first.ensemble, first.proof.tobytes()):
            names = [server.roster[each.key.client] for each in (first, other)]
            raise ProtocolError(
                f"{first.key}: parties {names[0]!r} and {names[1]!r} found different metrics, so their labels or "
                "splits differ. The server cannot see which metrics; compare them between the parties."
            )
    decision = Decision(key, first.stop, first.ensemble, first.proof)
    yield Broadcast(decision)
    return decision


def client_comparison(client: Client) -> Script[None]:
    """Client column: at the end of a run, check that all clients received the same answers in this attempt.

    Raises:
        ProtocolError: another client received other answers.
    """
    if client.release.sums.hiding is None:
        return
    key, hiding, names = _make_comparison_key(client), client.release.sums.hiding, client.identity.names
    expected = [hiding.prove(struct.pack("<H", each), key) for each in range(len(names))]
    own = expected[client.identity.index]
    yield Send(Proof(key, client.release.bytes_for_peers("proof", own, key, rows=1, protection=PROOF_PROTECTION)))
    answer: Proofs = yield Receive((Proofs,), key)
    try:
        proofs = split_parts(answer.content.tobytes(), len(names))
    except ValueError as error:
        raise ProtocolError(f"party {client.name!r}, {key}: the proofs of the parties: {error}.") from None
    for name, found, wanted in zip(names, proofs, expected, strict=True):
        if not hmac.compare_digest(found, wanted):
            raise ProtocolError(
                f"party {client.name!r}, {key}: the proof of party {name!r} does not match the answers that party "
                f"{client.name!r} has received, so the server sent the two parties different answers. The results are "
                "not used; check the server."
            )


def server_comparison(server: Server) -> Script[None]:
    """Server column: forward the proofs of all clients to all clients."""
    if not server.requested.privacy.hides_parts:
        return
    key = _make_comparison_key(server)
    proofs: Sequence[Proof] = yield Receive((Proof,), key)
    joined = join_parts(proof.content.tobytes() for proof in proofs)
    yield Broadcast(Proofs(key, np.frombuffer(joined, np.uint8)))


def _make_comparison_key(role: Client | Server) -> Key:
    return role.identity.fixed_key(Phase.CONTROL, 0, COMPARISON_LAYER)
