"""Private alignment: find the ids that all parties have, and one common order, without revealing an id.

Elliptic-curve Diffie-Hellman set intersection in a ring of M parties. The server forwards messages and compares the
sets.

    party m     turns its ids into blinded points of the curve, sorts the points by their bytes and sends them; only
                party m can match points and ids
    M - 1 times every party blinds the set that it receives from the party before it, keeps its order and sends it on
    server      receives M sets that all parties have blinded; equal ids are equal points. The common points, sorted by
                their bytes, are the common order. Every party receives the row numbers of these points in its own set.

No party sees two sets under the same blinding, so no party can compare sets. The server sees only blinded points. It
learns the sizes of all overlaps. Along the same ring, the parties agree on a key by Diffie-Hellman: in each of M - 1
steps, a party multiplies the share that it receives by its own scalar. The product after the last step is the common
secret, which is never sent.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from glasu.config import RunConfig
from glasu.errors import AlignmentError, ConfigError, ProtocolError
from glasu.privacy.blinding import (
    Blinding,
    Points,
    derive_key,
    hash_ids,
    order_points,
    refuse_invalid_points,
    refuse_repeated_points,
    view_points,
)
from glasu.protocol.chunks import split_rows
from glasu.protocol.limits import Limits
from glasu.protocol.messages import BlindedSet, CommonRows, KeyShare, Message, SetSize
from glasu.protocol.requests import Aligning, Broadcast, Receive, Scatter, Script, Send
from glasu.protocol.state import Identity
from glasu.wire.encodings import make_encodings
from glasu.wire.message_key import Key, Phase

if TYPE_CHECKING:  # a server runs the other column without torch
    from glasu.privacy.release import Release

DEFAULT_MAX_IDS = 1_000_000
SHARES, SETS = 0, 1  # used as `layer` in the keys of KeyShare and BlindedSet messages


@dataclass(frozen=True)
class SetLimits:
    """Limits on the size of a set of ids and of a message."""

    chunk_rows: int
    max_ids: int = DEFAULT_MAX_IDS  # ids in the largest set that a role accepts

    def __post_init__(self) -> None:
        if self.max_ids < 1:
            raise ConfigError(f"max_ids={self.max_ids}: must be 1 or more.")

    def limit_messages(self) -> Limits:
        """Return the maximum sizes of the messages."""
        return Limits(
            num_nodes=self.max_ids,
            chunk_rows=self.chunk_rows,
            encodings=make_encodings(RunConfig()),  # needed to compute `Limits.largest`; no tensor is sent
        )

    def count_chunks(self, largest: int) -> int:
        """Return the number of chunks of every set, given the largest size. Smaller sets may end with empty chunks."""
        return -(-largest // self.chunk_rows)

    def count_rows(self, size: int, chunk: int) -> int:
        """Return the number of rows of a set of `size` points in a chunk."""
        return min(max(size - chunk * self.chunk_rows, 0), self.chunk_rows)

    def check_largest(self, size: float, whose: str) -> int:
        """Check the number of ids that a message states, and return it as an integer."""
        if not (size >= 1 and size == int(min(size, 2**53))):
            raise ProtocolError(f"{whose}: expected a number of ids of 1 or more, got {size}.")
        if size > self.max_ids:
            why = (
                f"{whose} has {size:.0f} ids, and the limit here is {self.max_ids} (--max-ids, or max_ids of the "
                "policy); a party that lists very many ids can test guesses about the ids of the others. If this "
                "number is expected, raise the limit at the server and every party; otherwise check that party's ids."
            )
            raise AlignmentError(why, why)
        return int(size)


@dataclass(frozen=True, eq=False)
class Alignment:
    """The result of an alignment at a party."""

    rows: NDArray[np.int64]  # the party's rows with common ids, in the common order
    key: bytes  # a key that all parties have and the server does not have


@dataclass(frozen=True, eq=False)
class Comparison:
    """The result of an alignment at the server: counts only."""

    sizes: tuple[int, ...]  # number of ids in each set, in client order
    common: int
    overlaps: Mapping[tuple[int, ...], int]  # clients -> number of ids that exactly these clients have


# --- client ---------------------------------------------------------------------------------------------------------


def client_alignment(
    identity: Identity, ids: Sequence[str], blinding: Blinding, limits: SetLimits, release: Release
) -> Script[Alignment]:
    """Client column. `ids` must be normalised and distinct. Numbers and points leave through `release`."""
    name, key = identity.names[identity.index], identity.key(Phase.ALIGNMENT, 0)
    yield Send(SetSize(key, release.numbers("set size", [len(ids)], key)))
    answer = yield Receive((SetSize,), key)
    chunks = limits.count_chunks(limits.check_largest(_read_number(answer), "the largest set of a party"))
    own_chunks, done = limits.count_chunks(len(ids)), 0
    num_steps = own_chunks + (identity.num_clients - 1) * chunks

    parts = []
    for chunk in range(own_chunks):
        rows = slice(chunk * limits.chunk_rows, (chunk + 1) * limits.chunk_rows)
        parts.append(blinding.blind(hash_ids(ids[rows])))
        done += 1
        yield Aligning(done / num_steps, name)
    points = np.concatenate(parts)
    # The order of the blinded bytes reveals nothing about the ids. Only this party can map points back to its rows.
    order = order_points(points)
    points, share = points[order], blinding.start_key()

    for step in range(1, identity.num_clients):
        key = identity.key(Phase.ALIGNMENT, step)
        sender = identity.names[identity.index - 1]
        yield Send(KeyShare(key.at(SHARES), release.points("key share", share, key.at(SHARES))))
        message = yield Receive((KeyShare,), key.at(SHARES))
        with _name_sender(sender, message):
            share = blinding.continue_key(message.point)
        parts, points = [], release.points("blinded ids", points, key.at(SETS))
        for chunk in range(chunks):
            yield Send(BlindedSet(key.at(SETS, chunk), _take_chunk(points, chunk, limits)))
            message = yield Receive((BlindedSet,), key.at(SETS, chunk))
            with _name_sender(sender, message):
                _refuse_gap(parts, message.points, limits)
                parts.append(blinding.blind(message.points))
            done += 1
            yield Aligning(done / num_steps, name)
        points = np.concatenate(parts)
        with _name_sender(sender, message):
            refuse_repeated_points(points)

    key = identity.key(Phase.ALIGNMENT, identity.num_clients)
    points = release.points("blinded ids", points, key.at(SETS))
    for chunk in range(chunks):
        yield Send(BlindedSet(key.at(SETS, chunk), _take_chunk(points, chunk, limits)))
    found = yield from _receive_common(key, len(ids), limits)
    return Alignment(order[found], derive_key(share, identity.names))


def _receive_common(key: Key, size: int, limits: SetLimits) -> Script[NDArray[np.int64]]:
    """Receive the rows of the common ids. The first chunk that is not full is the last one."""
    parts: list[NDArray[np.int64]] = []
    while not parts or len(parts[-1]) == limits.chunk_rows:
        message = yield Receive((CommonRows,), key.at(SETS, len(parts)))
        parts.append(message.rows.astype(np.int64))
        if sum(map(len, parts)) > size:
            raise ProtocolError(f"{message.key}: expected at most {size} common rows.")
    rows = np.concatenate(parts)
    if len(rows) == 0 or rows.max() >= size or len(np.unique(rows)) != len(rows):
        raise ProtocolError(f"{key}: expected distinct rows of 0..{size - 1}, at least one, from the server.")
    return rows


def _take_chunk(points: Points, chunk: int, limits: SetLimits) -> Points:
    return points[chunk * limits.chunk_rows : (chunk + 1) * limits.chunk_rows]


def _refuse_gap(earlier: Sequence[Points], points: Points, limits: SetLimits) -> None:
    """Refuse a chunk that is too large or follows the last chunk. The server has checked the total number of rows."""
    if len(points) > limits.chunk_rows or (earlier and len(points) and len(earlier[-1]) < limits.chunk_rows):
        raise ProtocolError(f"{len(points)} points are too many for a chunk, or follow the last chunk of a set.")


@contextmanager
def _name_sender(sender: str, message: Message) -> Iterator[None]:
    """Add the sender and the key of a message to the protocol errors of a block."""
    try:
        yield
    except ProtocolError as error:
        raise _make_error(sender, message, str(error)) from None


# --- server ---------------------------------------------------------------------------------------------------------


def server_alignment(identity: Identity, limits: SetLimits) -> Script[Comparison]:
    """Server column: forward the sets in the ring, compare them, and send every party its common rows."""
    num_clients, key = identity.num_clients, identity.key(Phase.ALIGNMENT, 0)
    if num_clients < 2:
        raise ConfigError("an alignment needs at least two parties.")
    messages = yield Receive((SetSize,), key)
    stated = zip(identity.names, messages, strict=True)
    sizes = [limits.check_largest(_read_number(message), f"party {name!r}") for name, message in stated]
    yield Broadcast(SetSize(key, np.array([max(sizes)], np.float64)))
    chunks = limits.count_chunks(max(sizes))

    for step in range(1, num_clients):
        key = identity.key(Phase.ALIGNMENT, step)
        shares = yield Receive((KeyShare,), key.at(SHARES))
        yield _forward_to_next(key.at(SHARES), shares)
        for chunk in range(chunks):
            sets = yield Receive((BlindedSet,), key.at(SETS, chunk))
            _check_rows(identity, sets, sizes, step - 1, chunk, limits)
            yield _forward_to_next(key.at(SETS, chunk), sets)

    key = identity.key(Phase.ALIGNMENT, num_clients)
    received = []
    for chunk in range(chunks):
        sets = yield Receive((BlindedSet,), key.at(SETS, chunk))
        _check_rows(identity, sets, sizes, num_clients - 1, chunk, limits)
        received.append(sets)
    rows, overlaps = compare_sets(_read_sets(identity, received))
    if len(rows[0]) == 0:
        why = (
            "the parties have no id in common; check that their id columns contain the same kind of ids, and check the "
            "rules for ids (id_unicode, id_case and id_whitespace)."
        )
        raise AlignmentError(why, why)
    for chunk, part in enumerate(split_rows(len(rows[0]), limits.chunk_rows)):
        keys = [key.at(SETS, chunk).to_client(client) for client in range(num_clients)]
        yield Scatter(tuple(CommonRows(each, own[part]) for each, own in zip(keys, rows, strict=True)))
    return Comparison(tuple(sizes), len(rows[0]), overlaps)


def find_set_owner(client: int, step: int, num_clients: int) -> int:
    """Return the owner of the set that a client sends after it received `step` sets: the party `step` places back."""
    return (client - step) % num_clients


def compare_sets(sets: Sequence[Points]) -> tuple[list[NDArray[np.uint32]], dict[tuple[int, ...], int]]:
    """Compare sets that all parties have blinded.

    Args:
        sets: one set of distinct points per owner.

    Returns:
        For every set, the rows of the common points, sorted by the bytes of the points. For every group of owners, the
        number of points that exactly these owners have.
    """
    distinct, inverse = np.unique(np.concatenate([view_points(points) for points in sets]), return_inverse=True)
    owners = np.repeat(np.arange(len(sets)), [len(points) for points in sets])
    holds = np.zeros((len(distinct), len(sets)), bool)
    holds[inverse, owners] = True
    common = np.asarray(holds.all(axis=1))
    place = np.cumsum(common) - 1  # position of each common point in the common order
    rows, first = [], 0
    for points in sets:
        own = inverse[first : first + len(points)]
        first += len(points)
        found = np.flatnonzero(common[own])
        ordered = np.empty(len(found), np.uint32)
        ordered[place[own[found]]] = found
        rows.append(ordered)
    groups, counts = np.unique(holds, axis=0, return_counts=True)
    return rows, {
        tuple(np.flatnonzero(group).tolist()): int(count) for group, count in zip(groups, counts, strict=True)
    }


def _forward_to_next(key: Key, messages: Sequence[KeyShare] | Sequence[BlindedSet]) -> Scatter:
    """Send the message of every client to the next client."""
    before = (messages[client - 1] for client in range(len(messages)))
    return Scatter(tuple(replace(message, key=key.to_client(client)) for client, message in enumerate(before)))


def _check_rows(
    identity: Identity, messages: Sequence[BlindedSet], sizes: Sequence[int], step: int, chunk: int, limits: SetLimits
) -> None:
    """Refuse a chunk whose number of points contradicts the size that the owner of the set has stated."""
    for client, message in enumerate(messages):
        expected = limits.count_rows(sizes[find_set_owner(client, step, len(messages))], chunk)
        if len(message.points) != expected:
            raise _make_error(
                identity.names[client], message, f"expected {expected} points, got {len(message.points)}."
            )


def _read_sets(identity: Identity, received: Sequence[Sequence[BlindedSet]]) -> list[Points]:
    """Return the sets by owner; refuse invalid and repeated points."""
    sets: dict[int, Points] = {}
    for client, messages in enumerate(zip(*received, strict=True)):
        points = np.concatenate([message.points for message in messages])
        try:
            refuse_invalid_points(points)
            refuse_repeated_points(points)
        except ProtocolError as error:
            raise _make_error(identity.names[client], messages[0], str(error)) from None
        sets[find_set_owner(client, len(received[0]) - 1, len(received[0]))] = points
    return [sets[owner] for owner in sorted(sets)]


def _read_number(message: SetSize) -> float:
    if len(message.values) != 1:
        raise ProtocolError(f"{message.key}: expected one number of ids, got {len(message.values)}.")
    return float(message.values[0])


def _make_error(party: str, message: Message, why: str) -> ProtocolError:
    return ProtocolError(f"party {party!r}, {type(message).__name__} for {message.key}: {why}", party=party)
