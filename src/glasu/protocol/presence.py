"""Party dropout: the clients that contribute to a round, and the subsets of clients that are scored after training.

An absent client contributes no tensor and takes no step. It still agrees on node sets and receives what all clients
receive, because parties that are absent in one round take part in the next. So any subset of the parties can predict
later: training has seen smaller means.
"""

from __future__ import annotations

from glasu.config import RunConfig
from glasu.protocol.state import Identity
from glasu.randomness import Stream


def draw_present(config: RunConfig, num_clients: int, round_index: int) -> tuple[int, ...]:
    """Return the clients that contribute to a round, in client order. At least one is present.

    Each client is absent with probability `train.party_dropout`. All roles draw the same clients from the seed.
    """
    rate = config.train.party_dropout
    if rate == 0:
        return tuple(range(num_clients))
    draws = Stream(config.train.seed, "presence", round=round_index).numpy().random(num_clients + 1)
    present = tuple(client for client in range(num_clients) if draws[client] >= rate)
    return present or (int(draws[-1] * num_clients),)


def list_subsets(config: RunConfig, identity: Identity) -> list[tuple[int, ...]]:
    """Return the subsets of clients that are scored after training: all but one, and each one alone.

    Without party dropout there are none. Without the label owner there is no prediction, so a subset contains it.
    """
    if config.train.party_dropout == 0 or identity.num_clients == 1:
        return []
    everyone = range(identity.num_clients)
    without_one = [tuple(client for client in everyone if client != absent) for absent in everyone]
    alone = [(client,) for client in everyone]
    subsets = dict.fromkeys([*without_one, *alone])
    return [subset for subset in subsets if identity.owner < 0 or identity.owner in subset]
