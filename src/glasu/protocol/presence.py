"""Party dropout: the clients that contribute to a round, and the subsets of clients that are scored after training.

An absent client contributes no tensor and takes no step. It still agrees on node sets and receives all broadcasts,
because it may be present in the next round. With absent clients, the layers are also trained on means over fewer
parties. Therefore any subset of the parties can predict later.
"""

from __future__ import annotations

from collections.abc import Sequence

from glasu.config import RunConfig
from glasu.config_checks import FEWEST_SUMMED
from glasu.errors import AlignmentError, ConfigError
from glasu.protocol.state import Identity
from glasu.randomness import Stream
from glasu.wire.message_key import Key, Phase


def draw_present(config: RunConfig, num_clients: int, round_index: int) -> tuple[int, ...]:
    """Return the clients that contribute to a round, in client order: at least one, or with hidden sums at least three.

    Each client is absent with probability `train.party_dropout`. All roles draw the same clients from the seed.
    """
    rate = config.train.party_dropout
    if rate == 0:
        return tuple(range(num_clients))
    draws = Stream(config.train.seed, "presence", round=round_index).numpy().random(num_clients + 1)
    present = tuple(client for client in range(num_clients) if draws[client] >= rate)
    if config.privacy.hides_parts and len(present) < FEWEST_SUMMED:
        by_draw = sorted(range(num_clients), key=lambda client: draws[client])
        return tuple(sorted(by_draw[-FEWEST_SUMMED:]))
    return present or (int(draws[-1] * num_clients),)


def list_contributors(config: RunConfig, identity: Identity, key: Key) -> tuple[int, ...]:
    """Return the clients whose tensors the server adds in an exchange. All roles compute the same result."""
    if key.phase in (Phase.TRAINING, Phase.BACKWARD):
        return draw_present(config, identity.num_clients, identity.find_round(key))
    return tuple(range(identity.num_clients))


def check_present(config: RunConfig, names: Sequence[str], present: Sequence[str]) -> None:
    """Refuse a prediction without some parties, unless the model was trained with party dropout.

    Args:
        config: the settings of the training.
        names: the parties of the training, in client order.
        present: the parties that predict, fewer than all.

    Raises:
        AlignmentError: the model was trained without party dropout, or no party is present.
        ConfigError: the label owner is missing, or the model was trained with masks or ckks.
    """
    missing = ", ".join(name for name in names if name not in present)
    if config.privacy.hides_parts:
        way = config.privacy.secure_aggregation
        raise ConfigError(
            f"party {missing} is missing: after training with {way} all parties predict together, because the "
            "difference of two sums would reveal one party's contribution. Add it."
        )
    if not present or not config.train.party_dropout:
        got = ", ".join(present) or "none"
        why = f"the model was trained by the parties {', '.join(names)}; got {got}. Add {missing}."
        if not config.train.party_dropout:
            why += " Some parties can predict without the others after training with train.party_dropout."
        raise AlignmentError(why, why)  # names of parties are public
    if (owner := config.train.label_owner) not in (None, *present):
        raise ConfigError(f"party {owner} is missing; it has the labels, and only its classifier can predict. Add it.")


def list_subsets(config: RunConfig, identity: Identity) -> list[tuple[int, ...]]:
    """Return the subsets of clients that are scored after training: all clients but one, and every single client.

    Without party dropout the list is empty. With hidden sums it is empty too, because the difference between the sums
    of two subsets would reveal one client's contribution. If there is a label owner, every subset contains it, because
    no prediction is possible without it.
    """
    if config.train.party_dropout == 0 or identity.num_clients == 1 or config.privacy.hides_parts:
        return []
    everyone = range(identity.num_clients)
    without_one = [tuple(client for client in everyone if client != absent) for absent in everyone]
    alone = [(client,) for client in everyone]
    subsets = dict.fromkeys([*without_one, *alone])
    return [subset for subset in subsets if identity.owner is None or identity.owner in subset]
