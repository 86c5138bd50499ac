"""Ciphertexts on the wire: their form, their size, and what a receiver refuses. No key and no TenSEAL is needed."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from glasu.ckks_parameters import CKKS
from glasu.wire.ciphertexts import SHAPE_WORDS, Ciphertexts
from glasu.wire.encodings import make_encodings
from glasu.wire.tensor_kinds import GRADIENT, PROBABILITIES, REPRESENTATION
from support.masks import key_of, use_encryption
from support.tiny import tiny

WIDTH = SHAPE_WORDS + 2 * CKKS.degree


def make_payload(rows, columns, bits=32, seed=0):
    """Return an array with the form of ciphertexts."""
    encoding = Ciphertexts(bits, 3)
    count = encoding.count_ciphertexts(rows, columns)
    payload = np.random.default_rng(seed).integers(0, CKKS.modulus, (count, WIDTH), dtype=np.uint64)
    payload[:, :SHAPE_WORDS] = rows, columns
    return encoding, payload


@given(st.integers(0, 4096), st.integers(1, 300), st.sampled_from([8, 16, 32]))
def test_a_message_has_as_many_ciphertexts_as_its_integers_fill(rows, columns, bits):
    encoding = Ciphertexts(bits, 3)
    words = -(-rows * columns * (bits // 8) // 4)
    assert encoding.count_ciphertexts(rows, columns) == -(-words // CKKS.words)
    assert encoding.count_bytes(rows, columns) == encoding.count_ciphertexts(rows, columns) * WIDTH * 8


def test_the_server_adds_modulo_the_modulus_without_overflow():
    encoding = Ciphertexts(32, 40)
    payloads = [make_payload(3, 2, seed=seed)[1] for seed in range(40)]
    (total,) = encoding.combine(payloads, 1, [key_of(0)])
    expected = sum(each[:, SHAPE_WORDS:].astype(object) for each in payloads) % CKKS.modulus
    assert (total[:, SHAPE_WORDS:] == expected).all()
    assert total[0, :SHAPE_WORDS].tolist() == [3, 2]


def put(row, column, value):
    def change(payload):
        payload[row, column] = value
        return payload

    return change


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda payload: payload.astype(np.uint32), "expected a matrix of u8"),
        (lambda payload: payload[0], "expected a matrix of u8"),
        (lambda payload: payload[:, :-1], f"expected ciphertexts of {WIDTH} words"),
        (lambda payload: payload[:1], "expected 2 ciphertexts for 50 rows and 64 columns, got 1"),
        (lambda payload: np.concatenate([payload, payload]), "got 4"),
        (put(0, 0, 0), "expected the same positive numbers of rows and columns"),
        (put(1, 0, 49), "expected the same positive numbers of rows and columns"),
        (put(slice(None), 0, 2**63), "expected the same positive numbers of rows and columns"),
        (put(slice(None), 1, 63), "expected 64 columns, got 63"),
        (put(1, 100, CKKS.modulus), "a coefficient of a ciphertext is not below the modulus"),
    ],
)
def test_a_malformed_array_of_ciphertexts_is_refused(change, said):
    encoding, payload = make_payload(50, 64)
    assert encoding.find_error(payload, 64) == encoding.find_error(payload[:0], 64) == ""
    assert said in encoding.find_error(change(payload), 64)


def test_ciphertexts_cannot_be_divided_by_rows():
    encoding, payload = make_payload(50, 64)
    assert len(encoding.select_rows(payload, np.zeros(50, bool))) == 0
    np.testing.assert_array_equal(encoding.select_rows(payload, np.ones(50, bool)), payload)


@pytest.mark.parametrize(("precision", "bits"), [("fp32", 32), ("bf16", 16), ("int8", 8)])
def test_ciphertexts_carry_the_integers_of_the_ring_of_the_precision(precision, bits):
    encodings = make_encodings(use_encryption(tiny(precision=precision)[0]))
    found = {kind: encodings[kind] for kind in (REPRESENTATION, GRADIENT, PROBABILITIES)}
    assert found == {
        REPRESENTATION: Ciphertexts(bits, 3),
        GRADIENT: Ciphertexts(bits, 3),
        PROBABILITIES: Ciphertexts(32, 3),
    }
