"""Compare lists of ids between parties, without a value that would let the server test guesses of the ids.

Aligned parties have a common key that the server does not have (`glasu.data.alignment_file`). If parties are not
aligned, each pair agrees on a key. For this, every process makes an X25519 key pair and states the public key (the
share), signed by the party. The server forwards the shares. For each other party, a party derives the key of the pair
and states HMACs of its ids under this key. Two parties with the same ids state the same HMACs.

A server that replaced the shares with its own could test guesses of a whole list. `signatures.py` describes when the
signatures prevent this. The signature need not cover the run: a share of an earlier run does not help the server,
because the server does not know the private key of that share.
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
from glasu.network.signatures import Signature, refuse_unsigned, sign_statement
from glasu.privacy.masking import Signer
from glasu.records import Length

if TYPE_CHECKING:
    from glasu.data.party import PartyData

Hex = Annotated[str, Length(200)]
PAIR_KEY_INFO = b"glasu: key of two parties for their ids"


@dataclass(frozen=True)
class IdShare:
    """The public key of one process of a party, signed by the party."""

    key: Hex
    signature: Signature


@dataclass(frozen=True)
class IdTag:
    """HMACs of one party's ids, which only one other party can compare with its own ids."""

    party: Hex  # the other party
    share: Hex  # the public key of the other party's process
    id_set: Hex  # an HMAC of the sorted ids
    id_order: Hex  # an HMAC of the ids in their order


class IdKeys:
    """The key pair of one process of a party, and the keys that it derives for pairs with other parties."""

    def __init__(self, name: str, signer: Signer) -> None:
        """Make the key of this process, and sign its share for the party with this name."""
        self._name, self._signer = name, signer
        self._private = X25519PrivateKey.generate()
        key = self._private.public_key().public_bytes_raw().hex()
        self.share = IdShare(key, sign_statement(signer, _describe_share(name, key)))
        self._shares: dict[str, str] = {}  # keys of the other parties, by name

    def store_shares(self, shares: Mapping[str, IdShare]) -> None:
        """Store the parties' key shares that the server forwards. Refuse a share without a valid signature."""
        others = {name: share for name, share in shares.items() if name != self._name}
        for name, share in others.items():
            what = f"party {self._name!r}: the share for the comparison of ids"
            refuse_unsigned(self._signer, name, what, share.signature, _describe_share(name, share.key))
        self._shares = {name: share.key for name, share in others.items()}

    def make_tags(self, party: PartyData) -> tuple[IdTag, ...]:
        """Return HMACs of this party's ids for each other party whose share is known."""
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
        both = "|".join(sorted((self.share.key, share))).encode()
        return HKDF(SHA256(), 32, salt=None, info=PAIR_KEY_INFO + both).derive(common)


def _describe_share(name: str, key: str) -> tuple[str, ...]:
    return "share for ids", name, key
