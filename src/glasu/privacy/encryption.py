"""Encryption with CKKS: integers of a ring become ciphertexts, which the server adds without a key.

All clients of an attempt hold one secret key. The server has none, so it can neither decrypt a tensor nor a sum. CKKS
computes with approximate numbers. Here it carries the integers of masks, with a scale for which the error of a sum is
always below 1/2 (`glasu.ckks_parameters`). The readers round, so they have the integers of masks, and the same bits.

TenSEAL makes the key, encrypts and decrypts. The noise comes from the operating system, so every ciphertext is new.
Clients send the coefficients of ciphertexts, not the serialised objects of TenSEAL. So the server needs no TenSEAL, a
message has a fixed size, and no role parses an object that another role has built.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from glasu.ckks_parameters import CKKS, CkksParameters
from glasu.errors import ConfigError, ProtocolError
from glasu.privacy.masking import Hiding, Requested, Reveal
from glasu.wire.encodings import COEFFICIENT, SHAPE_WORDS, Array, Ciphertexts, Ring
from glasu.wire.message_key import Key

CKKS_NAME = "ckks"  # in the ledger
LARGEST_ERROR = 1 / 4  # of a decrypted number; more means that the ciphertext was changed, or has another key
Words = NDArray[np.uint32]
_HEADER = struct.Struct("<HBBBBHQ")  # of an object of SEAL: magic, its size, version, compression, reserved, length
_MAGIC, _NOT_COMPRESSED, _ZSTD = 0xA15E, 0, 2
_VECTOR_SIZES, _VECTOR_CIPHERTEXT, _VECTOR_SCALE = 1, 2, 3  # fields of TenSEAL's CKKSVectorProto
_PARAMETERS, _PUBLIC, _PRIVATE, _ENCRYPTION_TYPE = 1, 2, 3, 4  # of TenSEALContextProto
_SECRET_KEY = 1  # of TenSEALPrivateProto


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

    def __init__(self, secret: bytes | None = None, parameters: CkksParameters = CKKS) -> None:
        """Make a new key, or use the `secret` of another cipher.

        Raises:
            ConfigError: TenSEAL is missing, or its objects have another form than this module expects.
            ValueError: the secret is no key.
        """
        self.parameters = parameters
        self._library = load_tenseal()
        made = self._make_context()
        fields = _read_fields(made.serialize(False, True, False, False))
        self._key_start, own = _read_object(_read_fields(fields[_PRIVATE])[_SECRET_KEY], parameters.key_bytes)
        self.secret: bytes = own if secret is None else secret
        if len(self.secret) != parameters.key_bytes:
            raise ValueError(f"a key of CKKS has {parameters.key_bytes} bytes, not {len(self.secret)}")
        # Also for the own key: a context that TenSEAL makes holds keys for multiplication, which are not needed.
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
                f"tenseal {self._library.__version__} stores ciphertexts in another form than this version of glasu "
                "expects; install the version that constraints.txt names."
            )

    def encrypt(self, words: Words) -> NDArray[np.uint64]:
        """Return ciphertexts of words, one per row: the coefficients of both polynomials."""
        slots, size = self.parameters.slots, 2 * self.parameters.degree
        count = -(-len(words) // slots)
        padded = np.zeros((count, slots))
        padded.reshape(-1)[: len(words)] = words
        encrypted = np.empty((count, size), COEFFICIENT)
        for row, numbers in zip(encrypted, padded.tolist(), strict=True):
            row[:] = np.frombuffer(self._encrypt_once(numbers)[1], COEFFICIENT)
        return encrypted

    def _encrypt_once(self, numbers: list[float]) -> tuple[bytes, bytes]:
        """Return a ciphertext: the beginning of its object, and its coefficients."""
        vector = _read_fields(self._library.ckks_vector(self._context, numbers).serialize())
        return _read_object(vector[_VECTOR_CIPHERTEXT], 2 * self.parameters.degree * COEFFICIENT.itemsize)

    def decrypt(self, encrypted: NDArray[np.uint64]) -> Words | None:
        """Return the words of ciphertexts, whose coefficients lie below the modulus; None if they are no words."""
        try:
            found = self.decrypt_inexactly(encrypted)
        except (RuntimeError, ValueError):
            return None
        rounded = np.rint(found)
        with np.errstate(invalid="ignore"):
            good = (np.abs(found - rounded) <= LARGEST_ERROR) & (rounded >= 0) & (rounded < 2.0**32)
        return rounded.astype(np.uint32).reshape(-1) if good.all() else None

    def decrypt_inexactly(self, encrypted: NDArray[np.uint64]) -> NDArray[np.float64]:
        """Return the numbers before rounding, a row per ciphertext; SEAL raises RuntimeError or ValueError."""
        found = np.empty((len(encrypted), self.parameters.slots))
        sizes = _write_field(_VECTOR_SIZES, _write_number(self.parameters.slots))
        scale = _write_field(_VECTOR_SCALE, struct.pack("<d", 2.0**self.parameters.scale_bits), kind=_EIGHT_BYTES)
        for numbers, row in zip(found, encrypted, strict=True):
            ciphertext = _write_field(_VECTOR_CIPHERTEXT, self._vector_start + row.tobytes())
            numbers[:] = self._library.ckks_vector_from(self._context, sizes + ciphertext + scale).decrypt()
        return found


@dataclass(eq=False, kw_only=True)
class CkksEncryption(Hiding):
    """The encryption of one client in one attempt."""

    cipher: CkksCipher = field(repr=False)

    @property
    def name(self) -> str:
        return CKKS_NAME

    def __call__(self, payload: Array, key: Key) -> Array:
        """Return the ciphertexts of integers, message by message. `Ciphertexts` shows their form."""
        self._list_contributors(key)
        messages = [np.empty((0, SHAPE_WORDS + 2 * self.cipher.parameters.degree), COEFFICIENT)]
        for start in range(0, len(payload), self.chunk_rows):
            rows = payload[start : start + self.chunk_rows]
            content = rows.tobytes()
            encrypted = self.cipher.encrypt(np.frombuffer(content + bytes(-len(content) % 4), "<u4"))
            message = np.empty((len(encrypted), messages[0].shape[1]), COEFFICIENT)
            message[:, :SHAPE_WORDS], message[:, SHAPE_WORDS:] = rows.shape, encrypted
            messages.append(message)
        return np.concatenate(messages)

    def prepare_reading(self, key: Key, shape: tuple[int, int | None], ring: Ring) -> Reveal:
        assert isinstance(ring, Ciphertexts)

        def reveal(payload: Array, requested: Requested | None) -> Array:
            found = [np.empty((0, shape[1] or 0), ring.number_dtype)]
            for message in ring.split_messages(payload):
                rows, columns = ring.find_shape(message)
                words = self.cipher.decrypt(message[:, SHAPE_WORDS:])
                if words is None:
                    raise ProtocolError(
                        f"{key}: the decrypted sum has no integers: the server changed a ciphertext or added those of "
                        "another key. It was not used; check the server."
                    )
                numbers = np.frombuffer(words.astype("<u4").tobytes(), ring.number_dtype)
                found.append(numbers[: rows * columns].reshape(rows, columns))
            return np.concatenate(found[1:] or found)

        return reveal


# --- objects of SEAL, and messages of protobuf that contain them ------------------------------------------------------

_NUMBER, _EIGHT_BYTES, _BYTES = 0, 1, 2  # kinds of fields


def _read_object(content: bytes, size: int) -> tuple[bytes, bytes]:
    """Return the beginning of an object of SEAL, and its last `size` bytes, which are coefficients.

    The beginning has a header for an object that is not compressed, so both parts together are such an object.
    """
    magic, start, _, _, compression, _, _ = _HEADER.unpack_from(content)
    body = content[start:]
    if compression == _ZSTD:
        import pyarrow

        body = pyarrow.CompressedInputStream(pyarrow.BufferReader(body), "zstd").read()
    if magic != _MAGIC or compression not in (_NOT_COMPRESSED, _ZSTD) or len(body) <= size:
        raise ConfigError("tenseal stores keys in another form than this version of glasu expects; install 0.3.18.")
    header = _HEADER.pack(magic, start, content[3], content[4], _NOT_COMPRESSED, 0, start + len(body))
    return header + body[:-size], body[-size:]


def _read_fields(content: bytes) -> dict[int, Any]:
    """Return the fields of a message of protobuf that TenSEAL made in this process."""
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
