"""Signatures of statements that the server forwards between parties: ledger heads, and key shares (`id_keys.py`).

A party signs with the key of its kit. A receiver checks the signature, the sender's certificate (issuer and name) and,
if the receiver has pinned the sender's key, the pin. So a server without the CA's key can neither forge nor change a
statement. A server with the CA's key cannot do so for a pinned party. With trial kits, the operator of the CA has all
private keys, so the signatures do not protect against this operator.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated

from glasu.errors import ProtocolError
from glasu.pki.key_signing import KitSigner
from glasu.pki.kit import Kit
from glasu.privacy.ledger import LedgerHead
from glasu.privacy.masking import Signer, join_parts
from glasu.records import Length


@dataclass(frozen=True)
class Signature:
    """The signature of a party, and its certificate."""

    value: Annotated[str, Length(400)]  # hexadecimal
    certificate: Annotated[str, Length(8000)]  # PEM


@dataclass(frozen=True)
class SignedHead:
    """The head of a party's ledger, signed by the party."""

    head: LedgerHead
    signature: Signature


def make_signer(kit: Kit) -> Signer:
    """Return the signer of statements for a kit. It checks pinned keys, but also accepts keys that are not pinned."""
    return KitSigner(kit, requires_pins=False, content_name="this statement")


def sign_statement(signer: Signer, parts: Iterable[str]) -> Signature:
    """Return the party's signature of a statement."""
    return Signature(signer.sign(_join(parts)).hex(), signer.certificate.decode())


def refuse_unsigned(signer: Signer, party: str, what: str, signature: Signature, parts: Iterable[str]) -> None:
    """Raise ProtocolError if the signature of a party's statement is not valid.

    Args:
        signer: the signer of the receiving party.
        party: the name of the party that made the statement.
        what: names the statement in errors.
        signature: the signature that the server forwarded.
        parts: the content of the statement.
    """
    try:
        value = bytes.fromhex(signature.value)
    except ValueError:
        value = b""
    if fault := signer.find_error(party, signature.certificate.encode(), value, _join(parts)):
        raise ProtocolError(f"{what} of party {party!r} {fault}, so it is not used. Check the server and that party.")


def _join(parts: Iterable[str]) -> bytes:
    return join_parts(part.encode() for part in ("glasu statement", *parts))
