"""Encryption with CKKS: sums are exact with a margin, only the key decrypts, and changed ciphertexts are refused."""

from __future__ import annotations

import hypothesis.extra.numpy as hnp
import numpy as np
import pytest
import tenseal
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import kstest

from glasu.ckks_parameters import ALLOWED_ERROR, CKKS, LARGEST_NOISE, CkksParameters
from glasu.errors import ProtocolError
from glasu.privacy.encryption import CkksCipher
from glasu.wire.encodings import SHAPE_WORDS, Ciphertexts
from support.masks import key_of, make_encryptions

MAKER = CkksCipher()
READER = CkksCipher(MAKER.secret)


def add(payloads):
    """Return the sum of arrays of coefficients, as the server computes it."""
    padded = [np.concatenate([np.zeros((len(each), SHAPE_WORDS), each.dtype), each], axis=1) for each in payloads]
    return Ciphertexts(32, len(payloads)).combine(padded, 1, [key_of(0)])[0][:, SHAPE_WORDS:]


@st.composite
def contributions(draw):
    """Return an encoding, the clients that contribute, and one matrix of integers for each of them."""
    bits, num_clients = draw(st.sampled_from([8, 16, 32])), draw(st.integers(2, 6))
    encoding = Ciphertexts(bits, num_clients)
    present = tuple(sorted(draw(st.sets(st.integers(0, num_clients - 1), min_size=1))))
    shape = draw(st.integers(0, 9)), draw(st.integers(1, 5))
    numbers = hnp.arrays(np.int64, shape, elements=st.integers(0, encoding.levels - 1))
    return encoding, present, [draw(numbers) for _ in present]


@settings(deadline=None, max_examples=40)
@given(contributions(), st.integers(1, 5))
def test_sums_of_encrypted_integers_are_exact_for_any_parties_and_chunks(case, chunk_rows):
    encoding, present, numbers = case
    clients = make_encryptions([MAKER, *[READER] * (encoding.num_clients - 1)], present, chunk_rows)
    reveal = clients[-1].prepare_reading(key_of(0), numbers[0].shape, encoding)
    payloads = [
        clients[client](encoding.encode(own, key_of(client)), key_of(client))
        for client, own in zip(present, numbers, strict=True)
    ]
    rows, columns = numbers[0].shape
    sums = []
    for start in range(0, rows + 1, chunk_rows):  # a message has `chunk_rows` rows, the last one fewer
        own = slice(start, min(start + chunk_rows, rows))
        messages = [encoding.select_rows(payload, own) for payload in payloads]
        assert [encoding.find_error(each, columns) for each in messages] == [""] * len(present)
        assert messages[0].nbytes == encoding.count_bytes(own.stop - own.start, columns)
        assert encoding.find_shape(messages[0])[0] == own.stop - own.start
        sums.append(encoding.combine(messages, 1, [key_of(0)])[0])
    total = reveal(np.concatenate(sums), None)
    assert total.dtype == encoding.number_dtype
    expected = [[sum(int(own[row, column]) for own in numbers) for column in range(columns)] for row in range(rows)]
    assert total.tolist() == expected


def test_a_sum_of_coefficients_is_the_sum_that_tenseal_computes():
    context = tenseal.context(
        tenseal.SCHEME_TYPE.CKKS,
        CKKS.degree,
        coeff_mod_bit_sizes=list(CKKS.prime_bits),
        encryption_type=tenseal.ENCRYPTION_TYPE.SYMMETRIC,
    )
    context.global_scale = 2.0**CKKS.scale_bits
    words = [np.random.default_rng(seed).integers(0, 2**32 // 3, CKKS.slots, dtype=np.uint32) for seed in range(3)]
    first, second, third = (tenseal.ckks_vector(context, each.tolist()) for each in words)
    theirs = np.rint((first + second + third).decrypt()).astype(np.uint32)
    np.testing.assert_array_equal(READER.decrypt(add([MAKER.encrypt(each) for each in words])), theirs)


def test_the_error_of_the_largest_sum_of_the_most_parties_stays_below_its_bound():
    share = np.full(CKKS.slots, (2**32 - 1) // CKKS.most_clients, np.uint32)
    share[::2] = 0  # numbers that are all equal have one coefficient
    total = add([MAKER.encrypt(share) for _ in range(CKKS.most_clients)])
    found = READER.decrypt_inexactly(total)[0]
    error = np.abs(found - CKKS.most_clients * share.astype(np.float64)).max()
    assert error < ALLOWED_ERROR / 100  # the bound holds for the worst noise of every coefficient at once
    bound = CKKS.most_clients * CKKS.degree * (LARGEST_NOISE + 0.5) / 2**CKKS.scale_bits
    assert 0.9 * ALLOWED_ERROR < bound <= ALLOWED_ERROR


@pytest.mark.parametrize(
    ("changes", "num_clients", "said"),
    [
        ({}, CKKS.most_clients + 1, f"at most {CKKS.most_clients} parties"),
        ({"scale_bits": 20}, 3, "at most 1 parties"),
        ({"scale_bits": 28}, 3, "do not fit into the modulus"),
        ({"special_bits": 50}, 3, "primes of 110 bits are not secure with degree 4096, at most 109"),
        ({"degree": 2048}, 3, "not secure with degree 2048"),
        ({"degree": 4000}, 3, "not secure with degree 4000"),
    ],
    ids=str,
)
def test_parameters_that_are_too_small_are_refused(changes, num_clients, said):
    assert CKKS.find_error(CKKS.most_clients) == ""
    assert said in CkksParameters(**changes).find_error(num_clients)


def test_only_the_key_of_the_attempt_decrypts():
    words = np.arange(10, dtype=np.uint32)
    encrypted = MAKER.encrypt(words)
    np.testing.assert_array_equal(READER.decrypt(encrypted)[:10], words)
    assert CkksCipher().decrypt(encrypted) is None


def test_ciphertexts_are_uniform_and_new_for_equal_numbers():
    first, second = (MAKER.encrypt(np.zeros(CKKS.slots, np.uint32)) for _ in range(2))
    assert kstest(np.concatenate([first, second]).ravel() / CKKS.modulus, "uniform").pvalue > 1e-4
    assert (first == second).mean() < 0.01


@pytest.mark.parametrize(
    "change",
    [
        lambda payload: payload * np.uint64(0),
        lambda payload: (payload + np.uint64(2**40)) % np.uint64(CKKS.modulus),
        lambda payload: np.roll(payload, 1),
        lambda payload: payload[:, ::-1].copy(),
    ],
    ids=["zeros", "shifted", "rolled", "reversed"],
)
def test_a_changed_ciphertext_is_refused_or_decrypts_to_integers_without_a_crash(change):
    encoding, client = Ciphertexts(32, 3), make_encryptions([MAKER])[0]
    payload = client(np.full((5, 3), 7, np.uint32), key_of(0))
    payload[:, SHAPE_WORDS:] = change(payload[:, SHAPE_WORDS:])
    reveal = client.prepare_reading(key_of(0), (5, 3), encoding)
    if not payload[:, SHAPE_WORDS:].any():  # SEAL decrypts it to zeros
        assert not reveal(payload, None).any()
        return
    with pytest.raises(ProtocolError, match="the decrypted sum has no integers"):
        reveal(payload, None)


def test_a_client_without_a_part_in_a_sum_sends_nothing():
    with pytest.raises(ProtocolError, match="client 0 does not contribute to this sum; nothing was sent"):
        make_encryptions([MAKER, READER], (1,))[0](np.zeros((1, 1), np.uint32), key_of(0))


@pytest.mark.parametrize("secret", [b"short", b"1" * CKKS.key_bytes])
def test_bytes_that_are_no_key_are_refused(secret):
    with pytest.raises(ValueError, match="a key of CKKS"):
        CkksCipher(secret)
