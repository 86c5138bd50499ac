"""Pairwise masks: what the server sees is uniform, a stream has one use, and a split view gives noise."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import chisquare, kstest
from sklearn.linear_model import Ridge

from glasu.errors import ProtocolError
from glasu.privacy.masking import SumHistory, join_parts, split_parts
from glasu.wire.message_key import Phase
from glasu.wire.ring import Ring
from support.masks import key_of, make_masks

RINGS = [Ring(bits, 3) for bits in (8, 16, 32)]


def hide(masks, ring, rows=200, columns=16, low=0, high=2, layer=1):
    """Return the masked payloads of all clients for numbers that are far from uniform."""
    numbers = np.random.default_rng(5).integers(low, high, (len(masks), rows, columns))
    keys = [key_of(client, layer) for client in range(len(masks))]
    payloads = [own(ring.encode(each, key), key) for own, each, key in zip(masks, numbers, keys, strict=True)]
    return numbers, payloads


@pytest.mark.parametrize("ring", RINGS, ids=lambda ring: f"{ring.bits} bits")
def test_the_payload_of_one_party_is_uniform(ring):
    _, payloads = hide(make_masks(3, chunk_rows=64), ring, rows=2000)
    for payload in payloads:
        assert kstest(payload.ravel() / 2.0**ring.bits, "uniform").pvalue > 1e-8
        lowest = np.bincount((payload & 0xF).ravel(), minlength=16)
        assert chisquare(lowest).pvalue > 1e-8


def test_a_linear_probe_learns_nothing_from_the_payload_of_one_party():
    ring, half = Ring(32, 3), 1000
    numbers, payloads = hide(make_masks(3, chunk_rows=4096), ring, rows=2 * half, high=ring.levels)
    seen = payloads[1] / 2.0**32
    learned = Ridge(alpha=1.0).fit(seen[:half], numbers[1][:half] / ring.levels)
    assert learned.score(seen[half:], numbers[1][half:] / ring.levels) <= 0.01


def test_a_blinded_sum_is_uniform_and_a_plain_one_is_not():
    ring = Ring(32, 3)
    for blind in (False, True):
        _, payloads = hide(make_masks(3, blind=blind, chunk_rows=4096), ring, rows=1000)
        (total,) = ring.combine(payloads, 1, [key_of(0)])
        found = kstest(total.ravel() / 2.0**32, "uniform").pvalue
        assert found > 1e-8 if blind else found < 1e-9


def test_a_stream_never_covers_two_tensors():
    masks, ring = make_masks(3, chunk_rows=8)[0], Ring(32, 3)
    first = ring.encode(np.ones((4, 2)), key_of(0))
    masks(first, key_of(0))
    for again in (first, first + 1, np.ones((9, 3), ring.dtype)):
        with pytest.raises(ProtocolError, match="a key stream would cover two contents; nothing was sent"):
            masks(again, key_of(0))
    masks.seal(b"verdict", key_of(0))
    with pytest.raises(ProtocolError, match="two contents"):
        masks.seal(b"another", key_of(0))


def test_streams_differ_between_places_shapes_pairs_and_answers():
    zero, found = np.zeros((4, 2), "<u4"), []
    for place in (key_of(0), key_of(0, layer=2), key_of(0, round_index=4), key_of(0)._replace(phase=Phase.BACKWARD)):
        found.append(make_masks(2)[0](zero, place))
    found.append(make_masks(2)[0](np.zeros((8, 1), "<u4"), key_of(0)))
    found.append(make_masks(2, seed=1)[0](zero, key_of(0)))
    told = make_masks(2)[0]
    told.running_hash.add(b"Joint", [np.ones((1, 1))])
    found.append(told(zero, key_of(0)))
    rows = {tuple(each.ravel()) for each in found}
    assert len(rows) == len(found)
    chunked = make_masks(2, chunk_rows=2)[0](zero, key_of(0))
    assert not (chunked[:2] == chunked[2:]).any()


def test_a_server_that_shows_two_parties_different_answers_sees_noise_from_then_on():
    ring = Ring(32, 3)
    for split in (False, True):
        masks = make_masks(3, chunk_rows=4096)
        for client, own in enumerate(masks):
            own.running_hash.add(b"Joint 1", [np.full((2, 2), 5.0 + (split and client == 2))])
        numbers, payloads = hide(masks, ring, rows=1000)
        (total,) = ring.combine(payloads, 1, [key_of(0)])
        if not split:
            assert np.array_equal(total, numbers.sum(axis=0))
        else:
            assert kstest(total.ravel() / 2.0**32, "uniform").pvalue > 1e-8


def test_only_parties_that_contribute_to_a_sum_mask_it():
    masks = make_masks(4, present=(0, 1, 3))
    with pytest.raises(ProtocolError, match="client 2 does not contribute to this sum"):
        masks[2](np.zeros((2, 2), "<u4"), key_of(2))


def test_an_encrypted_message_is_readable_for_clients_and_bound_to_its_sender_and_place():
    masks, content = make_masks(3), b"the gradient of the label owner"
    sealed = masks[1].seal(content, key_of(1))
    assert content not in sealed
    assert len(sealed) == len(content) + 16
    assert masks[2].prepare_unsealing(1)(sealed, key_of(2)) == content
    changed = bytes([sealed[0] ^ 1]) + sealed[1:]
    for wrong, key, sender in ((changed, key_of(2), 1), (sealed, key_of(2, layer=2), 1), (sealed, key_of(2), 0)):
        with pytest.raises(ProtocolError, match="was modified in transit"):
            masks[2].prepare_unsealing(sender)(wrong, key)


def test_an_encrypted_message_is_readable_only_for_clients_with_the_answers_of_its_sender():
    masks = make_masks(3)
    for client, own in enumerate(masks):
        own.running_hash.add(b"Joint 1", [np.full((2, 2), 5.0 + (client == 2))])
    sealed, before, other = masks[1].seal(b"verdict", key_of(1)), masks[0].prepare_unsealing(1), masks[2]
    masks[0].running_hash.add(b"Sealed", [np.frombuffer(sealed, np.uint8)])  # the answer itself
    assert before(sealed, key_of(0)) == b"verdict"
    with pytest.raises(ProtocolError, match="or the server has sent this client and that client different answers"):
        other.prepare_unsealing(1)(sealed, key_of(2))


def test_proofs_are_equal_for_equal_metrics_and_answers_alone():
    masks = make_masks(3)
    proofs = [own.prove(b"0.8", key_of(client)) for client, own in enumerate(masks)]
    assert len({*proofs}) == 1
    masks[2].running_hash.add(b"Joint", [np.ones((1, 1))])
    other = [
        masks[0].prove(b"0.9", key_of(0)),
        masks[0].prove(b"0.8", key_of(0, layer=2)),
        masks[2].prove(b"0.8", key_of(2)),
    ]
    assert len({proofs[0], *other}) == 4


@pytest.mark.parametrize("parts", [[b""], [b"a", b""], [b"", b"abc", b"d" * 300]])
def test_joined_parts_come_apart_and_damaged_ones_are_refused(parts):
    joined = join_parts(parts)
    assert split_parts(joined, len(parts)) == parts
    for wrong, count in ((joined[:-1], len(parts)), (joined + b"x", len(parts)), (joined, len(parts) + 1)):
        with pytest.raises(ValueError, match="parts with their lengths"):
            split_parts(wrong, count)


def test_a_repeated_sum_does_not_change_the_history_and_every_other_sum_does():
    values = np.arange(6, dtype=np.uint32).reshape(2, 3)
    history = SumHistory().add("representation 0", values)
    assert history.add("representation 0", values) == history
    later = [history.add("representation 1", values), history.add("gradient 0", values)]
    later += [history.add("representation 1", values + np.uint32(1)), SumHistory().add("representation 1", values)]
    assert len({each.value for each in [history, *later]}) == 5
