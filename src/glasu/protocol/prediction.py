"""Prediction for those who ask: one exact joint inference over all asked nodes; who did not ask receives nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from glasu.errors import ProtocolError
from glasu.protocol.evaluation import announce, client_prediction, server_announcement, server_prediction
from glasu.protocol.messages import Exchange
from glasu.wire.message_key import Phase

if TYPE_CHECKING:
    from glasu.model.blocks import NodeSet
    from glasu.protocol.client import Client
    from glasu.protocol.server import Server


def client_asking(client: Client, asked: NodeSet) -> Exchange[tuple[NodeSet, NDArray[Any]]]:
    """Client column: ask for nodes, or for none and help the others.

    Returns:
        The nodes, in rising order, whose class probabilities this client receives, and these. With labels everywhere:
        what it asked for. With labels at one party, which alone has a classifier: at that party what anybody asked
        for, at the others nothing.
    """
    nodes = yield from announce(client, 0, asked, Phase.PREDICTION)
    own = np.isin(nodes, asked)
    probabilities = yield from client_prediction(client, 0, nodes, Phase.PREDICTION, own)
    if client.owner >= 0:
        return (nodes if client.has_labels else nodes[:0]), probabilities
    return nodes[own], probabilities


def server_asked(server: Server) -> Exchange[int]:
    """Server column; returns for how many nodes. The last answers are left in `server.answers`."""
    messages, nodes = yield from server_announcement(server, 0, Phase.PREDICTION)
    if len(nodes) == 0:
        raise ProtocolError("no party asked for a node; one of them must name some: glasu join ... --predict ids.csv.")
    asked = [np.isin(nodes, message.node_sets[0]) for message in messages]
    yield from server_prediction(server, 0, len(nodes), Phase.PREDICTION, asked)
    return len(nodes)
