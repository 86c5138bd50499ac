"""Encryption with CKKS: sums are exact with a margin, only the key decrypts, and changed ciphertexts are refused."""

from __future__ import annotations

import hypothesis.extra.numpy as hnp
import numpy as np
import pytest
import tenseal
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import kstest

from glasu.ckks_parameters import ALLOWED_ERROR, CHECK_DIGIT_BITS, CHECK_PRIME, CKKS, LARGEST_NOISE, CkksParameters
from glasu.errors import ProtocolError
from glasu.privacy.encryption import CkksCipher, SumCheck
from glasu.wire.ciphertexts import SHAPE_WORDS, Ciphertexts
from support.masks import SHARE_PRIMES, key_of, make_encryptions

MAKER = CkksCipher()
READER = CkksCipher(MAKER.secret)
LEVELS = 0, Ciphertexts(32, 3).levels


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
        ({"special_bits": 50}, 3, "primes of 110 bits exceed the 109 bits that are secure at degree 4096"),
        ({"degree": 2048}, 3, "exceed the 54 bits that are secure at degree 2048"),
        ({"degree": 4000}, 3, "exceed the 0 bits that are secure at degree 4000"),
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
    assert kstest(np.concatenate([first, second]).ravel() / CKKS.modulus, "uniform").pvalue > 1e-8
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
def test_a_changed_ciphertext_is_refused_with_one_error(change):
    encoding, client = Ciphertexts(32, 3), make_encryptions([MAKER])[0]
    payload = client(np.full((5, 3), 7, np.uint32), key_of(0))
    payload[:, SHAPE_WORDS:] = change(payload[:, SHAPE_WORDS:])
    reveal = client.prepare_reading(key_of(0), (5, 3), encoding)
    with pytest.raises(ProtocolError, match="this is not the sum of the parties' tensors"):
        reveal(payload, None)


def exchange(change=lambda payloads: payloads, told=(), values=LEVELS):
    """Encrypt integers of three clients, and read the sum that the server makes of the changed ciphertexts."""
    encoding, clients = Ciphertexts(32, 3), make_encryptions([MAKER, READER, READER], chunk_rows=2000)
    for client in told:
        clients[client].running_hash.add(b"Joint", [np.ones(1)])
    reveal = clients[2].prepare_reading(key_of(0), (3000, 2), encoding)
    numbers = np.random.default_rng(0).integers(*values, (3, 3000, 2), dtype=np.uint32)
    payloads = [own(each, key_of(client)) for client, (own, each) in enumerate(zip(clients, numbers, strict=True))]
    (total,) = encoding.combine(change(payloads), 1, [key_of(0)])
    assert np.array_equal(reveal(total, None), numbers.sum(axis=0, dtype=np.uint32))


def test_a_sum_passes_its_check_if_the_clients_have_received_the_same_answers():
    exchange()
    exchange(told=(0, 1, 2))


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda payloads: payloads[:2], ()),
        (lambda payloads: [*payloads[:2], payloads[1]], ()),
        (lambda payloads: [each[[1, 0, *range(2, len(each))]] for each in payloads], ()),
        (lambda payloads: payloads, (2,)),
        (lambda payloads: payloads, (0,)),
    ],
    ids=["left out", "repeated", "exchanged", "other answers at the reader", "other answers at a sender"],
)
def test_a_sum_of_other_ciphertexts_fails_its_check(change, told):
    with pytest.raises(ProtocolError, match="this is not the sum of the parties' tensors"):
        exchange(change, told)


def change_slots(slots, number):
    """Return an attack that adds a number to some of the numbers in every ciphertext."""

    def attack(payloads):
        added, change = payloads[0].copy(), np.zeros((len(payloads[0]), CKKS.slots), np.int64)
        change[:, slots] = number
        added[:, SHAPE_WORDS:] = MAKER.encrypt(change.reshape(-1))
        return [*payloads, added]

    return attack


@pytest.mark.parametrize("slots", [slice(None), slice(CKKS.words), 0], ids=["all", "all words", "one word"])
@pytest.mark.parametrize(
    "number",
    [
        1,
        -1,
        2**24,
        2**31,
        *SHARE_PRIMES,
        -SHARE_PRIMES[0],
        2 * SHARE_PRIMES[0],
        3 * SHARE_PRIMES[0],
        CHECK_PRIME % 2**32,
        2**32,
    ],
)
def test_a_number_added_to_a_sum_is_refused_also_if_it_is_a_prime(slots, number):
    start = 2**32 // 3 + 2**28 if number < 0 else 0  # all numbers of the changed sum have 32 bits, if that is possible
    with pytest.raises(ProtocolError, match="this is not the sum of the parties' tensors"):
        exchange(change_slots(slots, number), values=(start // 3, start // 3 + 2**20))


def test_a_change_of_the_digits_of_a_check_alone_does_not_change_the_sum():
    digits = np.array([-1, 1]) * [2**CHECK_DIGIT_BITS, 1]  # the same check, written with other digits
    exchange(change_slots(slice(CKKS.words, None), digits))
    with pytest.raises(ProtocolError, match="this is not the sum of the parties' tensors"):
        exchange(change_slots(slice(CKKS.words, None), digits + 1))


@pytest.mark.parametrize("num_clients", [1, 2, 3, 95, 256])
def test_checks_add_up_modulo_a_prime_above_all_words(num_clients):
    assert 2**32 < CHECK_PRIME < 2 ** (2 * CHECK_DIGIT_BITS)
    assert all(pow(base, CHECK_PRIME - 1, CHECK_PRIME) == 1 for base in (2, 3, 5, 7))
    check = SumCheck.draw(bytes(32), (2, 5), num_clients)
    words = np.random.default_rng(1).integers(0, 2**32 // num_clients, (num_clients, 2, 5), dtype=np.uint32)
    digits = [check.compute_digits(own, client) for client, own in enumerate(words)]
    assert max(each.max() for each in digits) < 2**CHECK_DIGIT_BITS
    total, check_sum = words.sum(axis=0, dtype=np.uint32), np.sum(digits, axis=0, dtype=np.uint64)
    assert check_sum.max() < 2**32
    assert check.is_sum(total, check_sum.astype(np.uint32))
    assert not check.is_sum(total + np.uint32(1), check_sum.astype(np.uint32))


def test_a_check_is_the_product_of_the_factors_and_the_words_plus_a_tag():
    check = SumCheck.draw(bytes(32), (3, CKKS.words), 3)
    words = np.random.default_rng(2).integers(0, 2**32, (3, CKKS.words), dtype=np.uint32)
    words[0] = 2**32 - 1
    found = check.compute(words, check.tags[:, 1])
    for row in range(3):
        products = (int(r) * int(x) for r, x in zip(check.factors[row], words[row], strict=True))
        assert int(found[row]) == (sum(products) + int(check.tags[row, 1])) % CHECK_PRIME


def test_a_place_is_encrypted_once():
    client = make_encryptions([MAKER])[0]
    client(np.ones((2, 2), np.uint32), key_of(0))
    with pytest.raises(ProtocolError, match="a key stream would cover two contents"):
        client(np.zeros((2, 2), np.uint32), key_of(0))


def test_a_client_without_a_part_in_a_sum_sends_nothing():
    with pytest.raises(ProtocolError, match="client 0 does not contribute to this sum; nothing was sent"):
        make_encryptions([MAKER, READER], (1,))[0](np.zeros((1, 1), np.uint32), key_of(0))


@pytest.mark.parametrize("secret", [b"short", b"1" * CKKS.key_bytes])
def test_bytes_that_are_no_key_are_refused(secret):
    with pytest.raises(ValueError, match="a key of CKKS"):
        CkksCipher(secret)
