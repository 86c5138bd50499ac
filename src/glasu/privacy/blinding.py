"""Blinded ids: points of ristretto255 that are multiplied by the secret scalars of all parties.

id -> H(id)         a point, computed with SHA-512
blind by a, b, c    the point a b c H(id); the order of the parties does not matter, and equal ids give equal points

A role would need the scalars of all parties to compute the blinded point of an id, so no role can test a guess about
an id (decisional Diffie-Hellman). The package rbcl is a binding to libsodium. It rejects bytes that encode no point,
and it rejects the identity as a product.
"""

from __future__ import annotations

import hashlib
import hmac
import sys
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from glasu.errors import ConfigError, ProtocolError
from glasu.files import remove_loaded_library

BLINDED = "blinded"  # the protection of points in the ledger
POINT_BYTES = 32
Points = NDArray[np.uint8]  # shape (n, POINT_BYTES)
_DOMAIN = b"glasu alignment 1"  # part of every hash, so that other programs map the same id to other points


@cache
def load_group() -> Any:
    """Return the module rbcl, or raise ConfigError with the command that installs it."""
    try:
        import rbcl
    except ImportError:
        raise ConfigError(
            "an alignment needs the package rbcl, which is not installed; pip install 'glasu[psi]'."
        ) from None
    # rbcl copies libsodium to a new temporary file in every process, and never removes it.
    remove_loaded_library(sys.modules["rbcl._sodium"].lib_path)
    return rbcl


def hash_ids(ids: Iterable[str]) -> Points:
    """Return H(id) of normalised ids, in their order."""
    from_hash = load_group().crypto_core_ristretto255_from_hash
    return join_points([from_hash(hashlib.sha512(_DOMAIN + b"\0" + each.encode()).digest()) for each in ids])


def join_points(points: Sequence[bytes]) -> Points:
    """Return encoded points as the rows of an array."""
    return np.frombuffer(b"".join(points), np.uint8).reshape(len(points), POINT_BYTES)


def order_points(points: Points) -> NDArray[np.int64]:
    """Return the row numbers, sorted by the bytes of the rows."""
    return np.argsort(view_points(points), kind="stable")


def view_points(points: Points) -> NDArray[np.bytes_]:
    """Return one comparable value per point.

    Numpy ignores trailing zeros of such values. This is safe because all points have the same length.
    """
    return np.ascontiguousarray(points).view(f"S{POINT_BYTES}").ravel()


def refuse_repeated_points(points: Points) -> None:
    """Raise ProtocolError if a set contains a point twice. A party's ids are distinct, so its points must be, too."""
    repeated = len(points) - len(np.unique(view_points(points)))
    if repeated:
        raise ProtocolError(f"{repeated} of {len(points)} points are repeated; the ids of a party are distinct.")


def refuse_invalid_points(points: Points) -> None:
    """Raise ProtocolError if a row encodes the identity or no point at all."""
    is_valid, content = load_group().crypto_core_ristretto255_is_valid_point, points.tobytes()
    for row in range(len(points)):
        point = content[row * POINT_BYTES : (row + 1) * POINT_BYTES]
        if not (is_valid(point) and any(point)):
            raise _explain(row, len(points))


class Blinding:
    """The two secret scalars of one party: one blinds ids, the other is for the common key of the parties."""

    def __init__(self, secret: bytes) -> None:
        """Derive both scalars from 32 or more secret random bytes."""
        self._group = load_group()
        self._for_ids, self._for_key = (self._derive(secret, purpose) for purpose in (b"ids", b"key"))

    def _derive(self, secret: bytes, purpose: bytes) -> bytes:
        digest = hmac.new(secret, _DOMAIN + b" scalar for " + purpose, hashlib.sha512).digest()
        scalar: bytes = self._group.crypto_core_ristretto255_scalar_reduce(digest)
        return scalar

    def blind(self, points: Points) -> Points:
        """Multiply the points of ids by the secret scalar; raise ProtocolError if a point is invalid."""
        return self._multiply(self._for_ids, points)

    def start_key(self) -> Points:
        """Return the base point times this party's scalar: the first share of the common key."""
        return join_points([self._group.crypto_scalarmult_ristretto255_base(self._for_key)])

    def continue_key(self, share: Points) -> Points:
        """Multiply a share by this party's scalar. The product of all scalars is the common secret (Diffie-Hellman)."""
        return self._multiply(self._for_key, share)

    def _multiply(self, scalar: bytes, points: Points) -> Points:
        multiply, content, found = self._group.crypto_scalarmult_ristretto255, points.tobytes(), []
        for row in range(len(points)):
            try:
                found.append(multiply(scalar, content[row * POINT_BYTES : (row + 1) * POINT_BYTES]))
            except RuntimeError:  # the bytes encode no point, or the product is the identity
                raise _explain(row, len(points)) from None
        return join_points(found)


def derive_key(secret: Points, parties: Sequence[str]) -> bytes:
    """Return the common key of the parties from their common secret point."""
    about = b"\0".join([_DOMAIN, b"common key", *(name.encode() for name in parties)])
    return hmac.new(secret.tobytes(), about, hashlib.sha256).digest()


def _explain(row: int, count: int) -> ProtocolError:
    return ProtocolError(f"point {row} of {count} is not a valid ristretto255 point, or is the identity.")
