"""Compare lists of ids between parties without giving the server a value against which it can test guesses.

Aligned parties have a common key that the server does not have (`glasu.data.alignment_file`). Other parties agree on
one key for each pair. Every process makes an X25519 key and states its public part, the share. The server forwards the
shares, and every party states HMACs of its ids under the keys that it shares with the others. Two parties with the same
ids state the same HMACs.

This is secure against a server that follows the protocol and reads everything. A server that replaces the shares with
its own could test guesses of a whole list.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from glasu.data.party import sign_ids
from glasu.errors import ProtocolError
from glasu.records import Length

if TYPE_CHECKING:
    from glasu.data.party import PartyData

Hex = Annotated[str, Length(200)]
PAIR_KEY_INFO = b"glasu: key of two parties for their ids"


@dataclass(frozen=True)
class IdTag:
    """HMACs of a party's ids for one other party."""

    party: Hex  # the other party
    share: Hex  # the share of the other party's process
    id_set: Hex  # an HMAC of the sorted ids
    id_order: Hex  # an HMAC of the ids in their order


class IdKeys:
    """The keys that one process of a party shares with the others."""

    def __init__(self) -> None:
        self._private = X25519PrivateKey.generate()
        self.share = self._private.public_key().public_bytes_raw().hex()
        self._shares: dict[str, str] = {}  # shares of the other parties, by name

    def store_shares(self, own: str, shares: Mapping[str, str]) -> None:
        """Store the shares of all parties, which the server forwards; `own` is the name of this party."""
        self._shares = {name: share for name, share in shares.items() if name != own}

    def make_tags(self, party: PartyData) -> tuple[IdTag, ...]:
        """Return a tag of the party's ids for each party whose share is known."""
        tags = []
        for name, share in self._shares.items():
            key = self._derive_key(name, share)
            id_set = sign_ids(key, "set of ids", party.set_digest)
            tags.append(IdTag(name, share, id_set, sign_ids(key, "order of ids", party.ids_digest())))
        return tuple(tags)

    def _derive_key(self, name: str, share: str) -> bytes:
        try:
            common = self._private.exchange(X25519PublicKey.from_public_bytes(bytes.fromhex(share)))
        except ValueError:
            raise ProtocolError(f"the share of party {name!r} is not a valid X25519 key; check the server.") from None
        both = "|".join(sorted((self.share, share))).encode()
        return HKDF(SHA256(), 32, salt=None, info=PAIR_KEY_INFO + both).derive(common)
