"""Masks and encryption of clients whose keys the tests know, and settings of runs that hide sums."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from glasu.config import RunConfig
from glasu.data.party import PartyData
from glasu.privacy.encryption import CkksCipher, CkksEncryption
from glasu.privacy.masking import PairwiseMasks, RunningHash
from glasu.protocol.messages import Message
from glasu.wire.message_key import Key, Phase
from support.tiny import tiny


class Watching:
    """Keeps the messages of a run in one process; `change` may replace one."""

    def __init__(self, change: Callable[[Message], Message] | None = None) -> None:
        self.messages: list[Message] = []
        self.change = change

    def __call__(self, message: Message) -> Message:
        self.messages.append(message)
        return message if self.change is None else self.change(message)

    def of(self, *kinds: type[Message]) -> list[Any]:
        return [message for message in self.messages if isinstance(message, kinds)]


def key_of(client: int, layer: int = 1, round_index: int = 3) -> Key:
    return Key(bytes(12), Phase.TRAINING, client, round_index, layer)


def make_masks(
    num_clients: int, present: tuple[int, ...] | None = None, *, blind: bool = False, chunk_rows: int = 4, seed: int = 0
) -> list[PairwiseMasks]:
    """Return the masks of all clients; each pair has a key, and only `present` contribute."""
    rng = np.random.default_rng(seed)
    pairs = {(i, j): rng.bytes(32) for j in range(num_clients) for i in range(j)}
    group, clients = rng.bytes(32), present or tuple(range(num_clients))
    return [
        PairwiseMasks(
            own=own,
            pair_keys={peer: pairs[min(own, peer), max(own, peer)] for peer in range(num_clients) if peer != own},
            group_key=group,
            contributors=lambda key: clients,
            chunk_rows=chunk_rows,
            running_hash=RunningHash(),
            blind=blind,
        )
        for own in range(num_clients)
    ]


# The two greatest primes below 2^32 / 3. A check modulo one of them would accept its multiples as changes of a sum.
SHARE_PRIMES = (1431655751, 1431655747)


def make_encryptions(
    ciphers: list[CkksCipher], present: tuple[int, ...] | None = None, chunk_rows: int = 4
) -> list[CkksEncryption]:
    """Return the encryptions of all clients, one for each cipher; only `present` contribute."""
    clients = present or tuple(range(len(ciphers)))
    return [
        CkksEncryption(
            own=own,
            cipher=cipher,
            group_key=bytes(32),
            contributors=lambda key: clients,
            chunk_rows=chunk_rows,
            running_hash=RunningHash(),
        )
        for own, cipher in enumerate(ciphers)
    ]


def use_masks(config: RunConfig, **keys: Any) -> RunConfig:
    """Return the settings with masks, and with these keys of [privacy] beside the given ones."""
    return config.replace(privacy={"secure_aggregation": "masks", **keys})


def use_encryption(config: RunConfig, **keys: Any) -> RunConfig:
    """Return the settings with encryption, and with these keys of [privacy] beside the given ones."""
    return config.replace(privacy={"secure_aggregation": "ckks", **keys})


def tiny_masked(blind: bool = False, **keys: Any) -> tuple[RunConfig, list[PartyData]]:
    """Return the settings and parties of a tiny run with masks."""
    config, parties = tiny(**keys)
    return use_masks(config, blind_server=blind), parties
