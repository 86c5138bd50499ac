"""The secret of a party, and the streams that derive from it."""

from __future__ import annotations

import hashlib
import struct

import pytest
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.hmac import HMAC

from glasu.randomness import Stream
from glasu.secret import Secret

SECRET = Secret(bytes(range(32)))


def test_a_derived_secret_is_the_hmac_of_purpose_and_number():
    mac = HMAC(bytes(range(32)), SHA256())
    mac.update(b"glasu\0training\0" + struct.pack("<q", 7))
    assert SECRET.derive("training", 7).value == mac.finalize()


def test_derived_secrets_differ_in_purpose_number_and_source():
    other = Secret(bytes(32))
    values = {SECRET.value, SECRET.derive("a").value, SECRET.derive("b").value, SECRET.derive("a", 1).value}
    assert len({*values, other.derive("a").value}) == 5


def test_neither_repr_nor_str_shows_a_secret():
    stream = Stream(SECRET, "weights")
    for text in (repr(SECRET), str(SECRET), f"{SECRET}", repr(stream), repr(ValueError(SECRET))):
        assert SECRET.value.hex() not in text
        assert repr(SECRET.value)[2:-1] not in text


@pytest.mark.parametrize("length", [0, 16, 31, 33, 64])
def test_a_secret_has_32_bytes(length):
    with pytest.raises(ValueError, match=f"32 bytes, not {length}"):
        Secret(bytes(length))


def test_the_key_of_a_secret_stream_is_a_keyed_hash_of_its_counters():
    stream = Stream(SECRET, "weights", round=-2, step=1, layer=3, client=4)
    content = struct.pack("<5q", 0, -2, 1, 3, 4) + b"weights"
    digest = hashlib.blake2b(content, digest_size=16, key=SECRET.value).digest()
    assert stream.key() == int.from_bytes(digest, "little")
    assert stream.key() != Stream(0, *stream[1:]).key()


def test_equal_secrets_have_equal_commitments_and_others_do_not():
    assert Secret(SECRET.value).commitment() == SECRET.commitment()
    assert Secret(bytes(32)).commitment() != SECRET.commitment()
    assert SECRET.value.hex() not in SECRET.commitment()
