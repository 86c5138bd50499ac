"""Agreement on keys, at the beginning of every attempt; client and server columns.

An attempt begins when all roles start or resume a run together. With masks or ckks, the clients use the keys to hide
their tensors from the server. In a run with a warm start, they derive the common classifier from one of the keys, the
run key.

First exchange: every client sends a fresh X25519 public key. It signs the key together with the run, the attempt, the
roster, the digest of the settings and its name. The server forwards all keys, and every client checks the signatures of
the other clients.

Second exchange: the first client draws the group key. It encrypts the group key and the run key for each other client.
The group key is new in every attempt. The run key is derived from the first client's secret, so it is the same after a
resume. From the run key, all clients derive values that stay the same during the whole run and that the server must not
know. With ckks, the first client also makes the secret key of the attempt and encrypts it under the group key.

In one process there are no certificates, and keys are not signed.
"""

from __future__ import annotations

import dataclasses
import secrets
from typing import TYPE_CHECKING

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from glasu.config import list_candidates
from glasu.errors import ProtocolError
from glasu.privacy.masking import (
    KEY_SIZE,
    ONE_USE,
    RunningHash,
    derive_pair_key,
    expand_key,
    join_parts,
    split_parts,
)
from glasu.privacy.secure_aggregation import find_secure_aggregation
from glasu.protocol.messages import KeyOffer, KeyOffers, Message, Sealed, Waiting
from glasu.protocol.presence import list_contributors
from glasu.protocol.requests import Broadcast, Receive, Script, Send
from glasu.secret import Secret
from glasu.wire.message_key import Key, Phase

if TYPE_CHECKING:
    from collections.abc import Sequence

    from glasu.config import RunConfig
    from glasu.protocol.client import Client
    from glasu.protocol.server import Server

OFFER_LAYER, GROUP_LAYER = 2, 3  # used as `layer` in keys; a race uses 0 and 1
KEY_LEADER = 0  # the client that draws the group key


def needs_keys(config: RunConfig) -> bool:
    """Return whether the clients of a training run agree on keys."""
    return config.privacy.hides_parts or any(agrees_on_classifier(each) for each in list_candidates(config))


def agrees_on_classifier(config: RunConfig) -> bool:
    """Return whether the clients agree on keys only to derive the common classifier of a warm start."""
    return config.train.warm_start > 0 and not config.privacy.hides_parts


def client_key_agreement(client: Client) -> Script[None]:
    """Client column: agree on keys; if sums are hidden, hide all later releases of tensors from the server."""
    if not needs_keys(client.requested):
        return
    # The message key has round 0, even after a resume in the upper stage of `once.py`, where rounds have other numbers.
    key, running_hash = client.identity.fixed_key(Phase.CONTROL, 0), RunningHash()
    running_hash.add(b"history", [np.frombuffer(client.release.sums.history.value, np.uint8)])
    private = X25519PrivateKey.generate()
    own = private.public_key().public_bytes_raw()
    offer = join_parts(_sign_offer(client, own))
    signed = "none" if client.keys.signer is None else "signed"  # in one process there are no certificates
    content = client.release.bytes_for_peers("key", offer, key.at(OFFER_LAYER), rows=1, protection=signed)
    yield Send(KeyOffer(key.at(OFFER_LAYER), content))
    answer: KeyOffers = yield Receive((KeyOffers,), key.at(OFFER_LAYER))
    running_hash.add(b"offers", [answer.content])
    pair_keys = _derive_pair_keys(client, private, _check_offers(client, answer, own))
    privacy = client.requested.privacy  # the config of a stage has no privacy settings
    way = find_secure_aggregation(privacy)
    secret = way.make_secret() if client.identity.index == KEY_LEADER else None
    group_key, secret = yield from _agree_on_group_key(client, key.at(GROUP_LAYER), pair_keys, running_hash, secret)
    if not way.hides_parts:
        return
    try:
        hiding = way.make_hiding(
            privacy,
            pair_keys,
            secret,
            own=client.identity.index,
            group_key=group_key,
            contributors=lambda each: list_contributors(client.config, client.identity, each),
            chunk_rows=client.config.wire.chunk_rows,
            running_hash=running_hash,
        )
    except ValueError as error:
        leader = client.identity.names[KEY_LEADER]
        raise ProtocolError(f"party {client.name!r}, {key}: the key of party {leader!r}: {error}.") from None
    client.release.sums.hiding = hiding


def _describe_offer(client: Client, name: str, public: bytes) -> bytes:
    """Return the bytes that a client signs: its public key, its name and facts about the run."""
    identity = client.identity
    facts = [b"glasu key offer", identity.run, identity.attempt.to_bytes(4, "little")]
    facts += [join_parts(each.encode() for each in identity.names), bytes.fromhex(client.requested.digest())]
    return join_parts([*facts, name.encode(), public])


def _sign_offer(client: Client, public: bytes) -> list[bytes]:
    signer = client.keys.signer
    if signer is None:
        return [public, b"", b""]
    return [public, signer.sign(_describe_offer(client, client.name, public)), signer.certificate]


def _check_offers(client: Client, answer: KeyOffers, own: bytes) -> list[bytes]:
    """Return the public keys of all clients; refuse a key that its party has not signed."""
    names, found = client.identity.names, []
    try:
        offers = [split_parts(offer, 3) for offer in split_parts(answer.content.tobytes(), len(names))]
    except ValueError as error:
        raise ProtocolError(f"party {client.name!r}, {answer.key}: the key offers of the parties: {error}.") from None
    for name, (public, signature, certificate) in zip(names, offers, strict=True):
        where = f"party {client.name!r}, {answer.key}: the key of party {name!r}"
        if len(public) != KEY_SIZE:
            raise ProtocolError(f"{where} has {len(public)} bytes, expected {KEY_SIZE}. The key was not used.")
        if name == client.name:
            if public != own:
                raise ProtocolError(f"{where} differs from the key that it sent; the server changed it.")
        elif client.keys.signer is not None:
            content = _describe_offer(client, name, public)
            if fault := client.keys.signer.find_error(name, certificate, signature, content):
                raise ProtocolError(f"{where} {fault}. The key was not used; check the server and that party.")
        found.append(public)
    if len({*found}) < len(found):
        raise ProtocolError(f"party {client.name!r}, {answer.key}: two parties have the same key; check the server.")
    return found


def _derive_pair_keys(client: Client, private: X25519PrivateKey, publics: Sequence[bytes]) -> dict[int, bytes]:
    """Return the key that this client shares with each other client."""
    own, names, found = client.identity.index, client.identity.names, {}
    for peer, public in enumerate(publics):
        if peer == own:
            continue
        pair = sorted((own, peer))
        facts = [_describe_offer(client, names[each], publics[each]) for each in pair]
        try:
            found[peer] = derive_pair_key(private, public, join_parts(facts))
        except ValueError:
            raise ProtocolError(
                f"party {client.name!r}: the key of party {names[peer]!r} is not a valid X25519 key; check the server."
            ) from None
    return found


def _agree_on_group_key(
    client: Client, key: Key, pair_keys: dict[int, bytes], running_hash: RunningHash, secret: bytes | None
) -> Script[tuple[bytes, bytes | None]]:
    """Return the group key, which the first client draws, and the secret key of ckks; store the run key.

    Args:
        client: the client.
        key: the key of the exchange.
        pair_keys: the keys that the client shares with each other client.
        running_hash: the running hash of this attempt; the answer is added to it.
        secret: the secret key of ckks at the first client; None at other clients, or if tensors are not encrypted.
    """
    order = [peer for peer in range(client.identity.num_clients) if peer != KEY_LEADER]
    group_key = secrets.token_bytes(KEY_SIZE)
    if client.identity.index == KEY_LEADER:
        run_key = client.keys.derive_run_key()
        keys = [expand_key(pair_keys[peer], b"group") for peer in order]
        sealed = [AESGCM(each).encrypt(ONE_USE, group_key + run_key.value, key.run) for each in keys]
        if secret is not None:
            sealed.append(AESGCM(expand_key(group_key, b"ckks")).encrypt(ONE_USE, secret, key.run))
        content = client.release.bytes_for_peers("key", join_parts(sealed), key, rows=len(order), protection="sealed")
        yield Send(Sealed(key, content))
    else:
        yield Send(Waiting(key))
    answer: Sealed = yield Receive((Sealed,), key)
    running_hash.add(b"group", [answer.content])
    if client.identity.index != KEY_LEADER:
        try:
            encrypts = find_secure_aggregation(client.requested.privacy).has_secret_key
            parts = split_parts(answer.content.tobytes(), len(order) + encrypts)
            own = parts[order.index(client.identity.index)]
            found = AESGCM(expand_key(pair_keys[KEY_LEADER], b"group")).decrypt(ONE_USE, own, key.run)
            group_key, run_key = found[:KEY_SIZE], Secret(found[KEY_SIZE:])
            if encrypts:
                secret = AESGCM(expand_key(group_key, b"ckks")).decrypt(ONE_USE, parts[-1], key.run)
        except (InvalidTag, ValueError):
            raise ProtocolError(
                f"party {client.name!r}, {answer.key}: the group key was modified in transit; check the server."
            ) from None
    client.keys.adopt_run_key(run_key)
    return group_key, secret


def server_key_agreement(server: Server) -> Script[None]:
    """Server column: forward the offers to all clients, then the group key."""
    if not needs_keys(server.requested):
        return
    key = server.identity.fixed_key(Phase.CONTROL, 0)
    offers: Sequence[KeyOffer] = yield Receive((KeyOffer,), key.at(OFFER_LAYER))
    joined = join_parts(offer.content.tobytes() for offer in offers)
    yield Broadcast(KeyOffers(key.at(OFFER_LAYER), np.frombuffer(joined, np.uint8)))
    yield from server_forward(server, key.at(GROUP_LAYER), KEY_LEADER)


def server_forward(server: Server, key: Key, sender: int) -> Script[None]:
    """Server column: forward the encrypted message from one client to all clients. The other clients wait for it."""
    messages: Sequence[Message] = yield Receive((Sealed, Waiting), key)
    for client, message in enumerate(messages):
        if isinstance(message, Sealed) != (client == sender):
            server.refuse(message, f"expected an encrypted message from party {server.roster[sender]!r} alone.")
    found = messages[sender]
    yield Broadcast(dataclasses.replace(found, key=key))
