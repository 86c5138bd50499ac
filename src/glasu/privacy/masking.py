"""Pairwise masks: streams of AES-CTR that hide integers of a ring from the server and cancel in the sum.

Clients i < j share a secret that the server does not have. For one place (phase, round, layer, chunk, shape), client i
adds a stream under their key and client j subtracts it. Two clients do so only if both contribute to the sum.

    pair key    = HKDF(X25519 secret, run, attempt, roster, settings, names of the pair)       once per attempt
    stream key  = HKDF-Expand(pair key, running hash of all answers so far, place)             one use

Through the running hash, the masks of a client depend on the answers that it has received. If the server sends
different aggregates to two clients, their later masks do not cancel, and from then on the server sees random numbers.
Every stream is used for one tensor: a second use of a place is refused, and an attempt that repeats a round has new
keys.

With `privacy.blind_server`, the first contributing client adds one more stream, under the group key, which all clients
share. The readers subtract this stream. Keys derived from the group key and the running hash also encrypt the messages
that one client sends to all other clients (AES-GCM): the label owner's gradient and verdicts. The base class `Hiding`
encrypts these messages, because runs with encrypted tensors (`glasu.privacy.encryption`) send them too.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from numpy.typing import NDArray

from glasu.errors import ProtocolError
from glasu.wire.encoding import Array
from glasu.wire.message_key import Key
from glasu.wire.ring import Ring

KEY_SIZE = 32  # bytes of a symmetric key, and of an X25519 public key
TAG_BYTES = 16  # bytes of the authentication tag of AES-GCM, and of a proof
ONE_USE = bytes(12)  # the nonce of AES-GCM; a constant is safe because every key encrypts only once
_PLACE = struct.Struct("<BIhIIIB")
Contributors = Callable[[Key], Sequence[int]]  # the clients that contribute to a sum, in client order
Requested = NDArray[np.bool_]  # for each row of an exchange: whether a certain client receives the row
Reveal = Callable[[Array, Requested | None], Array]  # returns sums, given a payload and the requested rows
Unseal = Callable[[bytes, Key], bytes]  # returns the content of an encrypted message, given its message key


class Signer(Protocol):
    """Signs one party's statements, such as its keys, and checks statements of its peers. See `KitSigner`."""

    @property
    def certificate(self) -> bytes:
        """The certificate of the party, which the peers check."""
        ...

    def sign(self, content: bytes) -> bytes:
        """Return the signature of the party."""
        ...

    def find_error(self, name: str, certificate: bytes, signature: bytes, content: bytes) -> str:
        """Return why the signature of this peer is not valid, or an empty string."""
        ...


def name_masks(*, blind: bool) -> str:
    """Return the name that the ledger records for masks."""
    return "masks+blind" if blind else "masks"


def derive_pair_key(own: X25519PrivateKey, peer: bytes, context: bytes) -> bytes:
    """Return the key that two clients share.

    Args:
        own: the private key of this client.
        peer: the public key of the other client.
        context: public facts about the run and the pair, in the same order at both clients.

    Raises:
        ValueError: the public key is invalid.
    """
    secret = own.exchange(X25519PublicKey.from_public_bytes(peer))
    return HKDF(SHA256(), KEY_SIZE, salt=None, info=b"glasu pair\0" + context).derive(secret)


def expand_key(key: bytes, purpose: bytes, *parts: bytes) -> bytes:
    """Derive a key: one block of HKDF-Expand with SHA-256. Only the last part may have a variable length."""
    return hmac.digest(key, b"glasu " + purpose + b"\0" + b"".join(parts) + b"\x01", "sha256")


def draw_stream(key: bytes, size: int) -> bytes:
    """Return the first `size` bytes of the AES-CTR stream of a key. Use every key only once."""
    return Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor().update(bytes(size))


def join_parts(parts: Iterable[bytes]) -> bytes:
    """Join parts with their lengths, so that different parts never give the same result."""
    return b"".join(struct.pack("<I", len(part)) + part for part in parts)


def split_parts(content: bytes, count: int) -> list[bytes]:
    """Return the parts that `join_parts` joined; raise ValueError if there are not `count` parts."""
    parts: list[bytes] = []
    position = 0
    while position < len(content) and len(parts) < count:
        if position + 4 > len(content):
            break
        (length,) = struct.unpack_from("<I", content, position)
        parts.append(content[position + 4 : position + 4 + length])
        position += 4 + length
    if position != len(content) or len(parts) != count:
        raise ValueError(f"expected {count} parts with their lengths")
    return parts


@dataclass
class RunningHash:
    """The running hash of the answers that are identical for all clients, in one attempt."""

    value: bytes = bytes(32)

    def add(self, about: bytes, arrays: Iterable[Array]) -> None:
        """Add one message: its kind and place, and its arrays."""
        self.value = _extend_hash(self.value, about, arrays)


@dataclass(frozen=True)
class SumHistory:
    """The running hash of the sums that a client has read, over all attempts of a run. Checkpoints contain it.

    Every attempt has new keys, and its `RunningHash` starts from this hash. If two parties have read different sums,
    their masks in the new attempt do not cancel. Otherwise a server could send different answers to the parties, end
    the attempt, and read the sums of the next attempt, which depend on the different answers.

    The sums are hashed after unmasking. After a crash, two parties may resume from checkpoints of different attempts.
    The masked sums of these attempts differ, but the unmasked sums are equal.
    """

    value: bytes = bytes(32)
    last: str = ""  # place of the last sum; with `train.release = "once"`, a resumed run reads this sum again

    def add(self, place: str, payload: Array) -> SumHistory:
        """Return the history with one more sum; a repeated sum changes nothing."""
        if place == self.last:
            return self
        return SumHistory(_extend_hash(self.value, place.encode(), [payload]), place)


def _extend_hash(value: bytes, about: bytes, arrays: Iterable[Array]) -> bytes:
    digest = hashlib.sha256(value + join_parts([about]))
    for array in arrays:
        digest.update(f"{array.dtype.str}{array.shape}".encode())
        digest.update(np.ascontiguousarray(array).data)
    return digest.digest()


@dataclass(eq=False, kw_only=True)
class Hiding(ABC):
    """Hides from the server the tensors that one client sends in one attempt."""

    own: int  # m
    group_key: bytes = field(repr=False)
    contributors: Contributors = field(repr=False)
    chunk_rows: int
    running_hash: RunningHash
    _used: set[bytes] = field(default_factory=set, repr=False)

    @property
    @abstractmethod
    def name(self) -> str:
        """The name that the ledger records."""

    @abstractmethod
    def __call__(self, payload: Array, key: Key) -> Array:
        """Mask or encrypt every chunk of a payload separately, and return the payload to send."""

    @abstractmethod
    def prepare_reading(self, key: Key, shape: tuple[int, int | None], ring: Ring) -> Reveal:
        """Return the function that unmasks or decrypts an exchange's answers. Call this before the first answer.

        Args:
            key: the key of the exchange.
            shape: the shape of the whole answer; columns are None if this client does not know their number.
            ring: the encoding.
        """

    def seal(self, content: bytes, key: Key) -> bytes:
        """Encrypt a message from this client to all other clients. Place and sender are associated data of AES-GCM.

        The key depends on the running hash, so only clients that have received the same answers can decrypt it.
        """
        self._mark_used(b"seal" + pack_place(key, 0, 0, 0))
        return AESGCM(self._find_seal_key(key, self.running_hash.value)).encrypt(
            ONE_USE, content, _describe_sender(key)
        )

    def prepare_unsealing(self, sender: int) -> Unseal:
        """Return the function that decrypts messages from another client. Call this before the first answer.

        The function raises ProtocolError if a message was modified, or belongs to another place or another client.
        """
        running = self.running_hash.value

        def unseal(content: bytes, key: Key) -> bytes:
            sent = key._replace(client=sender)
            try:
                return AESGCM(self._find_seal_key(sent, running)).decrypt(ONE_USE, content, _describe_sender(sent))
            except (InvalidTag, ValueError):
                raise ProtocolError(
                    f"{key}: the encrypted message of client {sender} was modified in transit, or the server has sent "
                    "this client and that client different answers. The message was not used; check the server."
                ) from None

        return unseal

    def prove(self, content: bytes, key: Key) -> bytes:
        """Return an HMAC of the content and of all answers so far. The server cannot compute it."""
        place = pack_place(key, 0, 0, 0)
        return expand_key(self.group_key, b"proof", self.running_hash.value, place, content)[:TAG_BYTES]

    def _find_seal_key(self, key: Key, running: bytes) -> bytes:
        return expand_key(self.group_key, b"seal", running, _describe_sender(key))

    def _list_contributors(self, key: Key) -> Sequence[int]:
        """Return the clients that contribute to a sum; refuse a sum without this client."""
        clients = self.contributors(key)
        if self.own not in clients:
            raise ProtocolError(f"{key}: client {self.own} does not contribute to this sum; nothing was sent.")
        return clients

    def _mark_used(self, place: bytes) -> None:
        """Mark a place as used. Refuse a second tensor there: the server could compute the difference of the two."""
        if place in self._used:
            raise ProtocolError("a key stream would cover two contents; nothing was sent.")
        self._used.add(place)


@dataclass(eq=False, kw_only=True)
class PairwiseMasks(Hiding):
    """Masks the tensors of one client in one attempt."""

    pair_keys: Mapping[int, bytes] = field(repr=False)  # by client
    blind: bool = False

    @property
    def name(self) -> str:
        return name_masks(blind=self.blind)

    def __call__(self, payload: Array, key: Key) -> Array:
        """Add this client's masks to the payload. Each chunk has its own masks."""
        clients = self._list_contributors(key)
        masked: Array = payload.copy()
        for chunk, (place, rows) in enumerate(self._list_places(key, payload)):
            self._mark_used(pack_place(key.at(key.layer, chunk), 0, 0, 0))
            for peer in clients:
                if peer > self.own:
                    masked[rows] += self._draw(self.pair_keys[peer], b"mask", place, masked[rows])
                elif peer < self.own:
                    masked[rows] -= self._draw(self.pair_keys[peer], b"mask", place, masked[rows])
            if self.blind and self.own == clients[0]:
                masked[rows] += self._draw(self.group_key, b"blind", place, masked[rows])
        return masked

    def prepare_reading(self, key: Key, shape: tuple[int, int | None], ring: Ring) -> Reveal:
        rows, columns = shape
        if not self.blind or columns is None:
            return lambda payload, requested: payload
        # The stream that hides the sum from the server. It is drawn now, because the running hash changes with the
        # first answer.
        stream: Array = np.empty((rows, columns), ring.dtype)
        for place, part in self._list_places(key, stream):
            stream[part] = self._draw(self.group_key, b"blind", place, stream[part])
        return lambda payload, requested: payload - (stream if requested is None else stream[requested])

    def _list_places(self, key: Key, payload: Array) -> list[tuple[bytes, slice]]:
        """Return the place and the rows of each chunk of a tensor."""
        found, size = [], payload.dtype.itemsize
        for chunk, start in enumerate(range(0, len(payload) + 1, self.chunk_rows)):
            rows = slice(start, min(start + self.chunk_rows, len(payload)))
            place = key.at(key.layer, chunk)
            found.append((pack_place(place, rows.stop - start, payload.shape[1], size), rows))
        return found

    def _draw(self, key: bytes, purpose: bytes, place: bytes, like: Array) -> Array:
        """Return the stream of a place, in the shape and type of an array."""
        content = draw_stream(expand_key(key, purpose, self.running_hash.value, place), like.nbytes)
        return np.frombuffer(content, like.dtype).reshape(like.shape)


def pack_place(key: Key, rows: int, columns: int, size: int) -> bytes:
    """Return phase, round, layer, chunk and shape as bytes."""
    return _PLACE.pack(key.phase, key.round, key.layer, key.chunk, rows, columns, size)


def _describe_sender(key: Key) -> bytes:
    return pack_place(key, 0, 0, 0) + struct.pack("<H", key.client) + key.run
