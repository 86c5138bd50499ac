"""Encryption with CKKS: integers of a ring become ciphertexts, which the server adds without a key.

All clients of an attempt share one secret key. The server has no key, so it can decrypt neither a tensor nor a sum.
CKKS computes with approximate numbers. Here it encrypts the same integers that masks hide, with a scale for which the
error of a sum is always below 1/2 (`glasu.ckks_parameters`). The readers round, so they decode the same sums as with
masks.

The server could add ciphertexts from another exchange, or change ciphertexts. So the last two numbers of a ciphertext
are a check of its other numbers. For one ciphertext of client m with words x_m, and a prime P > 2^32:

    check_m = r . x_m + t_m mod P          so the checks of all contributors add up to r . (sum of x_m) + sum of t_m

The numbers r and t_m come from streams under the group key, which the server does not have. Like masks, they depend on
the running hash of all answers so far and on the place of the message. So the check fails if the server leaves out a
client, repeats an older sum, changes a number, or has sent different answers to the clients. A changed sum of words
passes the check with probability 1/P (`SumCheck`).

TenSEAL makes the key, encrypts and decrypts. The noise comes from the operating system's random generator, so
encrypting the same words again gives another ciphertext. Clients send the coefficients of ciphertexts, not the
serialised objects of TenSEAL. So the server needs no TenSEAL, a message has a fixed size, and no role parses an object
from another role.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from glasu.ckks_parameters import CHECK_DIGIT_BITS, CHECK_PRIME, CKKS
from glasu.errors import ConfigError, ProtocolError
from glasu.privacy.masking import Hiding, Requested, Reveal, draw_stream, expand_key, pack_place
from glasu.wire.ciphertexts import COEFFICIENT, SHAPE_WORDS, Ciphertexts
from glasu.wire.encoding import Array
from glasu.wire.message_key import Key
from glasu.wire.ring import Ring

CKKS_NAME = "ckks"  # the name of this protection in the ledger
# The largest accepted error of a decrypted number. If the error is larger, the ciphertext was changed or encrypted with
# another key.
LARGEST_ERROR = 1 / 4
Words = NDArray[np.uint32]
Numbers = NDArray[np.uint64]
_PRIME = np.uint64(CHECK_PRIME)
# The header of an object of SEAL: magic, size of the header, version (two bytes), compression, reserved, length.
_HEADER = struct.Struct("<HBBBBHQ")
_MAGIC, _NOT_COMPRESSED, _ZSTD = 0xA15E, 0, 2
_VECTOR_SIZES, _VECTOR_CIPHERTEXT, _VECTOR_SCALE = 1, 2, 3  # fields of CKKSVectorProto of TenSEAL
_PARAMETERS, _PUBLIC, _PRIVATE, _ENCRYPTION_TYPE = 1, 2, 3, 4  # fields of TenSEALContextProto
_SECRET_KEY = 1  # field of TenSEALPrivateProto


@cache
def load_tenseal() -> Any:
    """Return the module tenseal, or raise ConfigError with the command that installs it."""
    try:
        import tenseal
    except ImportError:
        raise ConfigError(
            'privacy.secure_aggregation="ckks" needs the package tenseal, which is not installed; '
            "pip install 'glasu[ckks]'."
        ) from None
    return tenseal


class CkksCipher:
    """Encrypts and decrypts words of 32 bits with one secret key."""

    def __init__(self, secret: bytes | None = None) -> None:
        """Make a new key, or use the key `secret` of another cipher.

        Raises:
            ConfigError: TenSEAL is not installed, or this module does not know the format of its objects.
            ValueError: the secret is not a valid key.
        """
        self.parameters = parameters = CKKS
        self._library = load_tenseal()
        made = self._make_context()
        fields = _read_fields(made.serialize(False, True, False, False))
        self._key_start, own = _read_object(_read_fields(fields[_PRIVATE])[_SECRET_KEY], parameters.key_bytes)
        self.secret: bytes = own if secret is None else secret
        if len(self.secret) != parameters.key_bytes:
            raise ValueError(f"a key of CKKS has {parameters.key_bytes} bytes, not {len(self.secret)}")
        # Even a new key is loaded into another context: the context in which TenSEAL made the key also contains keys
        # for multiplication, which are not needed.
        self._context = self._load_context(fields)
        self._vector_start, _ = self._encrypt_once([0.0] * parameters.slots)
        self._check()

    def _make_context(self) -> Any:
        library, parameters = self._library, self.parameters
        context = library.context(
            library.SCHEME_TYPE.CKKS,
            parameters.degree,
            coeff_mod_bit_sizes=list(parameters.prime_bits),
            encryption_type=library.ENCRYPTION_TYPE.SYMMETRIC,
            n_threads=1,
        )
        context.global_scale = 2.0**parameters.scale_bits
        return context

    def _load_context(self, fields: dict[int, Any]) -> Any:
        content = [
            _write_field(_PARAMETERS, fields[_PARAMETERS]),
            _write_field(_PUBLIC, fields[_PUBLIC]),
            _write_field(_PRIVATE, _write_field(_SECRET_KEY, self._key_start + self.secret)),
            _write_field(_ENCRYPTION_TYPE, fields[_ENCRYPTION_TYPE]),
        ]
        try:
            return self._library.context_from(b"".join(content), n_threads=1)
        except (RuntimeError, ValueError) as error:
            raise ValueError(f"a key of CKKS: {error}") from None

    def _check(self) -> None:
        """Add two ciphertexts as a server does, and compare the decrypted sum."""
        words = np.arange(self.parameters.slots, dtype=np.uint32) * np.uint32(2**20)
        first, second = self.encrypt(np.concatenate([words, words]))
        found = self.decrypt(((first + second) % np.uint64(self.parameters.modulus))[None])
        if found is None or not np.array_equal(found, 2 * words):
            raise ConfigError(
                f"tenseal {self._library.__version__} stores ciphertexts in a format that this version of glasu does "
                "not know; install the version that constraints.txt names."
            )

    def encrypt(self, words: Words) -> NDArray[np.uint64]:
        """Encrypt words. Each row of the result is one ciphertext: the coefficients of its two polynomials."""
        slots, size = self.parameters.slots, 2 * self.parameters.degree
        count = -(-len(words) // slots)
        padded = np.zeros((count, slots))
        padded.reshape(-1)[: len(words)] = words
        encrypted = np.empty((count, size), COEFFICIENT)
        for row, numbers in zip(encrypted, padded.tolist(), strict=True):
            row[:] = np.frombuffer(self._encrypt_once(numbers)[1], COEFFICIENT)
        return encrypted

    def _encrypt_once(self, numbers: list[float]) -> tuple[bytes, bytes]:
        """Return a ciphertext as two parts: the beginning of its object, and its coefficients."""
        vector = _read_fields(self._library.ckks_vector(self._context, numbers).serialize())
        return _read_object(vector[_VECTOR_CIPHERTEXT], 2 * self.parameters.degree * COEFFICIENT.itemsize)

    def decrypt(self, encrypted: NDArray[np.uint64]) -> Words | None:
        """Decrypt ciphertexts whose coefficients lie below the modulus; return None if the results are not words."""
        try:
            found = self.decrypt_inexactly(encrypted)
        except (RuntimeError, ValueError):
            return None
        rounded = np.rint(found)
        with np.errstate(invalid="ignore"):
            good = (np.abs(found - rounded) <= LARGEST_ERROR) & (rounded >= 0) & (rounded < 2.0**32)
        return rounded.astype(np.uint32).reshape(-1) if good.all() else None

    def decrypt_inexactly(self, encrypted: NDArray[np.uint64]) -> NDArray[np.float64]:
        """Return the numbers before rounding, one row per ciphertext. SEAL may raise RuntimeError or ValueError."""
        found = np.empty((len(encrypted), self.parameters.slots))
        sizes = _write_field(_VECTOR_SIZES, _write_number(self.parameters.slots))
        scale = _write_field(_VECTOR_SCALE, struct.pack("<d", 2.0**self.parameters.scale_bits), kind=_EIGHT_BYTES)
        for numbers, row in zip(found, encrypted, strict=True):
            ciphertext = _write_field(_VECTOR_CIPHERTEXT, self._vector_start + row.tobytes())
            numbers[:] = self._library.ckks_vector_from(self._context, sizes + ciphertext + scale).decrypt()
        return found


@dataclass(frozen=True)
class SumCheck:
    """The check of the ciphertexts of one message: r and t_m modulo P.

    A check is sent as two digits of CHECK_DIGIT_BITS bits, because the sum of all contributors' checks can have more
    than 32 bits.

    Words of a sum lie in [0, 2^32), and the reader refuses other values. Suppose that a server changes the sums of the
    words by numbers d that are not all 0. Every |d| is smaller than 2^32 and so smaller than P, so a nonzero d is not 0
    modulo P. The change passes only if the server also changes the check by r . d modulo P. The server does not know r,
    so it succeeds with probability 1/P. A prime below 2^32 would not suffice, because a server could add the prime to a
    word. A server can also change only the digits and leave the words correct. Whether this change passes does not
    depend on the words, because t_m is uniform.
    """

    factors: Numbers = field(repr=False)  # r, a row per ciphertext
    tags: Numbers = field(repr=False)  # t_m, a row per ciphertext, a column per contributor

    @classmethod
    def draw(cls, key: bytes, shape: tuple[int, int], num_clients: int) -> SumCheck:
        """Draw the numbers from a stream under a key; `shape` is the shape of the words."""
        count, words = shape
        stream = np.frombuffer(draw_stream(key, 8 * count * (words + num_clients)), "<u8").reshape(count, -1)
        # The numbers of the stream have 64 bits, so no remainder is more than 1.00002 times as likely as another.
        found = stream % _PRIME
        return cls(found[:, :words], found[:, words:])

    def compute(self, words: Words, tags: Numbers) -> Numbers:
        """Return r . x + t mod P for each row of words."""
        numbers = words.astype(np.uint64)
        high, low = self._multiply(numbers >> np.uint64(16)), self._multiply(numbers & np.uint64(0xFFFF))
        found: Numbers = ((high << np.uint64(16)) % _PRIME + low + tags) % _PRIME
        return found

    def _multiply(self, halves: Numbers) -> Numbers:
        """Return r . x mod P for 16-bit numbers x. Products of larger numbers could exceed 64 bits."""
        found: Numbers = ((self.factors * halves) % _PRIME).sum(axis=1, dtype=np.uint64) % _PRIME
        return found

    def compute_digits(self, words: Words, contributor: int) -> Words:
        """Return the check of each row of one contributor's words, as two columns: lower digit, higher digit."""
        found = self.compute(words, self.tags[:, contributor])
        bits = np.uint64(CHECK_DIGIT_BITS)
        return np.column_stack([found & np.uint64(2**CHECK_DIGIT_BITS - 1), found >> bits]).astype(np.uint32)

    def is_sum(self, words: Words, digits: Words) -> bool:
        """Return whether `words` and `digits` are the sums over all contributors."""
        low, high = digits.astype(np.uint64).T
        total = self.tags.sum(axis=1, dtype=np.uint64) % _PRIME
        return bool(((low + (high << np.uint64(CHECK_DIGIT_BITS))) % _PRIME == self.compute(words, total)).all())


@dataclass(eq=False, kw_only=True)
class CkksEncryption(Hiding):
    """Encrypts the tensors of one client in one attempt."""

    cipher: CkksCipher = field(repr=False)

    @property
    def name(self) -> str:
        return CKKS_NAME

    def __call__(self, payload: Array, key: Key) -> Array:
        """Encrypt the integers of each message separately; return the ciphertexts, in the form of `Ciphertexts`."""
        clients, parameters, running = self._list_contributors(key), self.cipher.parameters, self.running_hash.value
        messages = [np.empty((0, SHAPE_WORDS + 2 * parameters.degree), COEFFICIENT)]
        for chunk, start in enumerate(range(0, len(payload), self.chunk_rows)):
            rows = payload[start : start + self.chunk_rows]
            self._mark_used(pack_place(key.at(key.layer, chunk), 0, 0, 0))
            content = rows.tobytes()
            content += bytes(-len(content) % (4 * parameters.words))
            words = np.frombuffer(content, "<u4").reshape(-1, parameters.words)
            check_key = self._find_check_key(key.at(key.layer, chunk), rows.shape, rows.itemsize, running)
            check = SumCheck.draw(check_key, words.shape, len(clients))
            digits = check.compute_digits(words, clients.index(self.own))
            encrypted = self.cipher.encrypt(np.column_stack([words, digits]).reshape(-1))
            message = np.empty((len(encrypted), messages[0].shape[1]), COEFFICIENT)
            message[:, :SHAPE_WORDS], message[:, SHAPE_WORDS:] = rows.shape, encrypted
            messages.append(message)
        return np.concatenate(messages)

    def prepare_reading(self, key: Key, shape: tuple[int, int | None], ring: Ring) -> Reveal:
        assert isinstance(ring, Ciphertexts)
        running, clients = self.running_hash.value, self.contributors(key)

        def reveal(payload: Array, requested: Requested | None) -> Array:
            found = [np.empty((0, shape[1] or 0), ring.number_dtype)]
            for chunk, message in enumerate(ring.split_messages(payload)):
                place, itemsize = key.at(key.layer, chunk), ring.number_dtype.itemsize
                check_key = self._find_check_key(place, ring.find_shape(message), itemsize, running)
                numbers = self._read(message, ring, check_key, len(clients))
                if numbers is None:
                    # Every fault raises the same error, because the server sees the error. If errors differed, a server
                    # that adds a number to a sum could infer the size of the sum.
                    raise ProtocolError(
                        f"{key}: this is not the sum of the parties' tensors: the server left out, repeated or changed "
                        "one, or it has sent the parties different answers. The sum was not used; check the server."
                    )
                found.append(numbers)
            return np.concatenate(found[1:] or found)

        return reveal

    def _find_check_key(self, place: Key, shape: tuple[int, ...], itemsize: int, running: bytes) -> bytes:
        rows, columns = shape
        return expand_key(self.group_key, b"check", running, pack_place(place, rows, columns, itemsize))

    def _read(self, message: Array, ring: Ciphertexts, check_key: bytes, num_clients: int) -> Array | None:
        """Return the integers of one message, or None if they are not the sum of the contributors' integers."""
        decrypted = self.cipher.decrypt(message[:, SHAPE_WORDS:])
        if decrypted is None:
            return None
        words, digits = np.split(decrypted.reshape(len(message), -1), [self.cipher.parameters.words], axis=1)
        if not SumCheck.draw(check_key, words.shape, num_clients).is_sum(words, digits):
            return None
        rows, columns = ring.find_shape(message)
        numbers = np.frombuffer(words.astype("<u4").tobytes(), ring.number_dtype)
        return numbers[: rows * columns].reshape(rows, columns)


# --- objects of SEAL, and messages of protobuf that contain them ------------------------------------------------------

_NUMBER, _EIGHT_BYTES, _BYTES = 0, 1, 2  # kinds of fields


def _read_object(content: bytes, size: int) -> tuple[bytes, bytes]:
    """Return the beginning of an object of SEAL, and its last `size` bytes, which are coefficients.

    The returned beginning has the header of an uncompressed object, so the two parts joined are a valid object.
    """
    magic, start, _, _, compression, _, _ = _HEADER.unpack_from(content)
    body = content[start:]
    if compression == _ZSTD:
        import pyarrow

        body = pyarrow.CompressedInputStream(pyarrow.BufferReader(body), "zstd").read()
    if magic != _MAGIC or compression not in (_NOT_COMPRESSED, _ZSTD) or len(body) <= size:
        raise ConfigError("tenseal stores keys in a format that this version of glasu does not know; install 0.3.18.")
    header = _HEADER.pack(magic, start, content[3], content[4], _NOT_COMPRESSED, 0, start + len(body))
    return header + body[:-size], body[-size:]


def _read_fields(content: bytes) -> dict[int, Any]:
    """Return the fields of a protobuf message that TenSEAL made in this process."""
    found: dict[int, Any] = {}
    position = 0
    while position < len(content):
        tag, position = _read_number(content, position)
        if tag & 7 == _NUMBER:
            found[tag >> 3], position = _read_number(content, position)
            continue
        size = 8
        if tag & 7 == _BYTES:
            size, position = _read_number(content, position)
        found[tag >> 3] = content[position : position + size]
        position += size
    return found


def _write_field(number: int, value: bytes | int, kind: int = _BYTES) -> bytes:
    if isinstance(value, int):
        return _write_number(number << 3 | _NUMBER) + _write_number(value)
    size = _write_number(len(value)) if kind == _BYTES else b""
    return _write_number(number << 3 | kind) + size + value


def _read_number(content: bytes, position: int) -> tuple[int, int]:
    """Return a number of variable length, and the position after it."""
    number = shift = 0
    while True:
        byte, position = content[position], position + 1
        number |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            return number, position


def _write_number(number: int) -> bytes:
    found = bytearray()
    while number > 127:
        found.append(number & 127 | 128)
        number >>= 7
    return bytes([*found, number])
