"""Private alignment: the right intersection in one order, nothing readable in a message, and garbage is refused."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import os
import subprocess
import sys

import numpy as np
import pytest
import rbcl

from glasu.errors import AlignmentError, ConfigError, ProtocolError
from glasu.privacy.blinding import Blinding, hash_ids, join_points
from glasu.privacy.release import Release
from glasu.protocol.alignment import SetLimits, client_alignment, compare_sets, server_alignment
from glasu.protocol.limits import Limits
from glasu.protocol.message_bytes import decode, encode, read_header
from glasu.protocol.messages import BlindedSet, CommonRows, KeyShare, Message, Partial, SetSize
from glasu.protocol.requests import Aligning
from glasu.protocol.state import Identity
from glasu.runtime.inprocess import ScriptRun, run_together
from glasu.runtime.telemetry import TrafficCounter
from glasu.timing import Stopwatch
from glasu.wire.message_key import SERVER, Phase
from support.deliveries import apply_to_messages
from support.messy_ids import SECRETS

RUN = bytes(12)


def clock() -> float:
    return 0.0


def align(sets, chunk_rows=4, max_ids=1000, carry=None, observe=None, secrets=SECRETS, releases=None):
    """Align lists of ids in this process; return the comparison and the alignments."""
    names, limits = tuple("abcdefgh"[: len(sets)]), SetLimits(chunk_rows, max_ids)
    releases = releases or [Release({}) for _ in sets]
    server = ScriptRun("server", server_alignment(Identity(names, None, SERVER, RUN), limits), Stopwatch(clock))
    scripts = (
        client_alignment(Identity(names, None, index, RUN), ids, Blinding(secrets[index]), limits, releases[index])
        for index, ids in enumerate(sets)
    )
    clients = [ScriptRun(name, each, Stopwatch(clock), observe) for name, each in zip(names, scripts, strict=True)]
    run_together(server, clients, TrafficCounter(), delivery=apply_to_messages(carry))
    return server.result, [client.result for client in clients]


def draw_sets(seed, sizes=(30, 25, 41), space=60):
    rng = np.random.default_rng(seed)
    return [[f"id-{number:06d}" for number in rng.permutation(space)[:size]] for size in sizes]


SETS = draw_sets(0)
COMMON = set.intersection(*map(set, SETS))


def change(kind, step, client, edit):
    """Return a `carry` that edits one kind of message of a client in one step, before the server sees it."""

    def carry(message: Message) -> Message:
        key = message.key
        if type(message) is kind and key.round == step and key.client == client and key.chunk == 0:
            (name,) = kind.contents()
            return dataclasses.replace(message, **{name: edit(getattr(message, name).copy())})
        return message

    return carry


@pytest.mark.parametrize("chunk_rows", [1, 4, 30, 41, 4096])
@pytest.mark.parametrize("num_parties", [2, 3])
def test_all_parties_end_with_the_intersection_of_plain_sets_in_one_order(num_parties, chunk_rows):
    sets = SETS[:num_parties]
    found, aligned = align(sets, chunk_rows)
    orders = [[ids[row] for row in own.rows] for ids, own in zip(sets, aligned, strict=True)]
    assert all(order == orders[0] for order in orders)
    assert len(orders[0]) == found.common == len(set(orders[0]))
    assert set(orders[0]) == set.intersection(*map(set, sets))


def test_more_parties_than_three_are_aligned():
    sets = draw_sets(3, (20, 22, 24, 26, 28), 32)
    _, aligned = align(sets, secrets=[bytes([number]) * 32 for number in range(5)])
    assert {sets[4][row] for row in aligned[4].rows} == set.intersection(*map(set, sets))


def test_the_order_is_that_of_the_points_under_all_scalars():
    _, aligned = align(SETS)
    points = hash_ids(sorted(COMMON))
    for secret in SECRETS:
        points = Blinding(secret).blind(points)
    expected = [each for _, each in sorted(zip((point.tobytes() for point in points), sorted(COMMON), strict=True))]
    assert [SETS[0][row] for row in aligned[0].rows] == expected


def test_the_result_depends_neither_on_the_order_of_the_tables_nor_on_the_chunks():
    _, first = align(SETS, 4)
    _, again = align([ids[::-1] for ids in SETS], 100)
    order = [[ids[row] for row in own.rows] for ids, own in zip(SETS, first, strict=True)]
    assert order == [[ids[::-1][row] for row in own.rows] for ids, own in zip(SETS, again, strict=True)]
    assert [own.key for own in first] == [own.key for own in again]


def test_the_server_learns_how_many_ids_exactly_each_group_of_parties_has():
    found, _ = align(SETS)
    assert found.sizes == tuple(map(len, SETS))
    for size in (1, 2, 3):
        for group in itertools.combinations(range(3), size):
            inside = set.intersection(*(set(SETS[index]) for index in group))
            outside = set().union(*(SETS[index] for index in range(3) if index not in group))
            assert found.overlaps.get(group, 0) == len(inside - outside)


def record(sets, **options):
    """Return every message of an alignment as bytes, with the sender's view of it."""
    sent: list[Message] = []

    def carry(message: Message) -> Message:
        sent.append(message)
        return message

    return sent, align(sets, carry=carry, **options)


class Noting(Release):
    """Notes the content of every release."""

    def __init__(self) -> None:
        super().__init__({})
        self.released: list[bytes] = []

    def numbers(self, *args):
        return self._note(super().numbers(*args))

    def points(self, *args):
        return self._note(super().points(*args))

    def _note(self, content):
        self.released.append(content.tobytes())
        return content


def test_a_party_sends_exactly_the_bytes_that_its_gate_releases():
    releases = [Noting() for _ in SETS]
    sent, _ = record(SETS, releases=releases)
    for client, release in enumerate(releases):
        own = [message for message in sent if message.key.client == client]
        contents = [getattr(message, name).tobytes() for message in own for name in message.contents()]
        assert b"".join(contents) == b"".join(release.released)
        assert release.ledger.length == len(release.released) == 1 + 2 + 3  # the size, two shares and three sets


def test_no_message_contains_an_id_or_a_plain_hash_of_one():
    sent, _ = record(SETS)
    content = b"".join(map(encode, sent))
    for each in set().union(*SETS):
        plain = each.encode()
        digests = [
            hashlib.new(name, plain).digest() for name in ("md5", "sha1", "sha256", "sha512", "blake2b", "blake2s")
        ]
        digests += [hashlib.blake2b(plain, digest_size=size).digest() for size in (16, 32)]
        for digest in (plain, *digests, *(digest.hex().encode() for digest in digests), hash_ids([each]).tobytes()):
            assert digest[:8] not in content
    assert b"id-0" not in content


def test_no_point_of_an_id_travels_without_the_scalar_of_its_owner():
    sent, _ = record(SETS)
    seen = {point.tobytes() for message in sent if isinstance(message, BlindedSet) for point in message.points}
    for index, ids in enumerate(SETS):
        others = [secret for number, secret in enumerate(SECRETS) if number != index]
        for count in range(3):
            for group in itertools.combinations(others, count):
                points = hash_ids(
                    sorted(set(ids) - set().union(*(SETS[other] for other in range(3) if other != index)))
                )
                for secret in group:
                    points = Blinding(secret).blind(points)
                assert not seen & {point.tobytes() for point in points}


def test_a_set_travels_in_an_order_that_does_not_depend_on_the_table():
    def first_points(sets):
        sent, _ = record(sets, chunk_rows=100)
        return next(each.points.tobytes() for each in sent if isinstance(each, BlindedSet) and each.key.client == 0)

    assert first_points(SETS) == first_points([ids[::-1] for ids in SETS])


def test_the_parties_share_a_key_that_never_travels_and_that_the_points_do_not_give():
    sent, (_, aligned) = record(SETS)
    assert len({own.key for own in aligned}) == 1
    assert len(aligned[0].key) == 32
    assert aligned[0].key not in b"".join(map(encode, sent))
    shares = {message.point.tobytes() for message in sent if isinstance(message, KeyShare)}
    assert len(shares) == 6  # every party's own, and the products of two; never the product of three
    _, others = align(SETS, secrets=[SECRETS[0], SECRETS[1], bytes(32)])
    assert others[0].key != aligned[0].key


def test_every_message_is_within_the_limits_and_survives_its_encoding():
    limits = SetLimits(4, 41).limit_messages()

    def carry(message: Message) -> Message:
        data = encode(message)
        limits.check(read_header(data, len(data)), len(data))
        return decode(data)

    found, _ = align(SETS, carry=carry)
    assert found.common == len(COMMON)
    for kind in (BlindedSet, CommonRows, KeyShare):
        assert limits.of(kind, Phase.ALIGNMENT)[1] < 48 + 12 + 4 * 32 + 1


def test_a_message_of_another_phase_has_no_room_in_an_alignment():
    limits = SetLimits(4).limit_messages()
    assert isinstance(limits, Limits)
    assert limits.of(Partial, Phase.TRAINING)[1] < 200


IDENTITY = np.zeros(32, np.uint8)
NO_POINT = np.full(32, 255, np.uint8)


def put(point):
    def edit(points):
        points[0] = point
        return points

    return edit


def repeat(points):
    points[1] = points[0]
    return points


def change_scalar(points):
    return join_points([rbcl.crypto_core_ristretto255_random() for _ in points])


GARBAGE = {
    "no encoding of a point": (put(NO_POINT), "is not a valid ristretto255 point"),
    "the identity": (put(IDENTITY), "or is the identity"),
    "a repeated point": (repeat, "points are repeated"),
    "a point too few": (lambda points: points[1:], "expected 4 points, got 3"),
    "a point too many": (lambda points: np.concatenate([points, points[:1]]), "expected 4 points, got 5"),
    "no points": (lambda points: points[:0], "expected 4 points, got 0"),
}


@pytest.mark.parametrize("step", [1, 2, 3])
@pytest.mark.parametrize("case", GARBAGE)
def test_garbage_of_a_party_is_refused_and_the_party_is_named(case, step):
    edit, why = GARBAGE[case]
    with pytest.raises(ProtocolError, match=f"party 'b', BlindedSet for .*{why}") as refused:
        align(SETS, carry=change(BlindedSet, step, 1, edit))
    assert refused.value.party == "b"


@pytest.mark.parametrize("point", [IDENTITY, NO_POINT], ids=["identity", "no point"])
def test_a_key_share_that_is_no_point_is_refused(point):
    with pytest.raises(ProtocolError, match=r"party 'b', KeyShare for .*not a valid ristretto255 point"):
        align(SETS, carry=change(KeyShare, 1, 1, put(point)))


@pytest.mark.parametrize("rows", [[0, 0, 1, 2], [0, 1, 2, 99], [2**32 - 1, 1, 2, 3]], ids=str)
def test_common_rows_that_are_repeated_or_out_of_range_are_refused(rows):
    edit = change(CommonRows, 3, 0x8000, lambda own: np.array(rows, np.uint32))
    with pytest.raises(ProtocolError, match=r"expected distinct rows of 0\.\.29"):
        align(SETS, carry=edit)


@pytest.mark.parametrize("size", [0.0, -1.0, 2.5, np.nan, np.inf, -np.inf])
def test_a_size_that_is_no_number_of_ids_is_refused(size):
    with pytest.raises(ProtocolError, match="expected a number of ids of 1 or more"):
        align(SETS, carry=change(SetSize, 0, 1, lambda values: np.array([size])))


def test_a_set_above_the_limit_is_refused_before_a_point_is_sent():
    sent = []
    with pytest.raises(AlignmentError, match=r"party 'c' has 41 ids, and the limit here is 40 \(--max-ids"):
        align(SETS, max_ids=40, carry=lambda message: sent.append(message) or message)
    assert not any(isinstance(message, BlindedSet) for message in sent)


def test_parties_without_a_common_id_are_refused():
    with pytest.raises(AlignmentError, match="no id in common"):
        align([["x"], ["y"], ["x", "y"]])


def test_one_party_cannot_be_aligned():
    with pytest.raises(ConfigError, match="at least two parties"):
        align([["x"]])


def test_points_of_random_scalars_have_nothing_in_common():
    with pytest.raises(AlignmentError, match="no id in common"):
        align(SETS, chunk_rows=100, carry=change(BlindedSet, 2, 1, change_scalar))


def test_the_progress_of_a_party_rises_to_one():
    seen = []
    align(SETS, observe=seen.append)
    for name in "abc":
        shares = [event.share for event in seen if isinstance(event, Aligning) and event.party == name]
        assert shares == sorted(shares)
        assert shares[-1] == 1


def test_libsodium_leaves_no_temporary_file(tmp_path):
    code = "from glasu.privacy.blinding import Blinding; print(len(Blinding(bytes(32)).start_key()))"
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "1\n"
    assert list(tmp_path.iterdir()) == []


def test_sets_are_compared_like_plain_sets():
    rng = np.random.default_rng(5)
    values = [rng.permutation(50)[:size].astype(np.uint8) for size in (20, 30, 40)]
    sets = [np.tile(own[:, None], (1, 32)) for own in values]
    rows, overlaps = compare_sets(sets)
    common = sorted(set.intersection(*(set(own.tolist()) for own in values)))
    assert [own[found].tolist() for own, found in zip(values, rows, strict=True)] == [common] * 3
    assert sum(overlaps.values()) == len(set(np.concatenate(values).tolist()))
