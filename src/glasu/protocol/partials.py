"""One exchange of a joint inference: its messages, and what a client releases, sends and receives."""

from __future__ import annotations

from typing import TYPE_CHECKING

from glasu.protocol.chunks import exchange_rows
from glasu.protocol.messages import Change, Joint, JointChange, Partial, TensorMessage
from glasu.protocol.requests import Script
from glasu.wire.message_key import Key, Phase

if TYPE_CHECKING:
    from torch import Tensor

    from glasu.config import RunConfig
    from glasu.model.blocks import NodeSet
    from glasu.privacy.release import Sent
    from glasu.protocol.client import Client


def exchange_partial(client: Client, key: Key, partial: Tensor, nodes: NodeSet) -> Script[tuple[Tensor, Sent]]:
    """Release H_m^+[l] at the nodes; return H[l+1], and H_m^+[l] as it was sent."""
    kinds = find_message_kinds(client.config, key)
    sent = client.release_tensor(kinds[0].content().kind, partial, key, nodes)
    shape = len(partial), partial.shape[1] * client.learner.aggregation.widening
    joint = yield from exchange_rows(client, key, kinds, sent, shape)
    return joint, sent


def find_message_kinds(config: RunConfig, key: Key) -> tuple[type[TensorMessage], type[TensorMessage]]:
    """Return the kinds of the clients' messages and of the answers in one exchange of a joint inference.

    With `wire.feedback`, rows that were released before in the same phase are sent as changes. All training rounds
    release the same rows. All evaluations on validation nodes also release the same rows. The test and predictions
    release other rows, so they do not send changes. All roles derive the kinds from the settings and the key.
    """
    train = config.train
    first = {Phase.TRAINING: 0, Phase.EVALUATION: min(train.evaluate_every, train.num_rounds)}.get(key.phase)
    if config.wire.feedback and first is not None and first < key.round <= train.num_rounds:
        return Change, JointChange
    return Partial, Joint
