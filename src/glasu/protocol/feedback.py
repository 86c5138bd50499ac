"""Choose which representations are sent as changes (`wire.feedback`): rows that were released before in the same phase.

All roles derive the choice from the settings and the key of an exchange.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from glasu.protocol.messages import Change, Joint, JointChange, Partial, TensorMessage
from glasu.wire.message_key import Key, Phase

if TYPE_CHECKING:
    from glasu.config import RunConfig


def find_message_kinds(config: RunConfig, key: Key) -> tuple[type[TensorMessage], type[TensorMessage]]:
    """Return the kinds of the clients' messages and of the answers in one exchange of a joint inference.

    All training rounds have the same rows, and so have all evaluations on validation nodes. The rows of the test and of
    a prediction are different.
    """
    train = config.train
    first = {Phase.TRAINING: 0, Phase.EVALUATION: min(train.evaluate_every, train.num_rounds)}.get(key.phase)
    if config.wire.feedback and first is not None and first < key.round <= train.num_rounds:
        return Change, JointChange
    return Partial, Joint
