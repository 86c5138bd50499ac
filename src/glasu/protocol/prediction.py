"""Prediction on request: one exact joint inference over all requested nodes. Other parties receive no result."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from glasu.errors import ProtocolError
from glasu.protocol.evaluation import client_prediction, server_prediction
from glasu.protocol.requests import Script
from glasu.protocol.sampling import agree, unite
from glasu.wire.message_key import Phase

if TYPE_CHECKING:
    from glasu.model.blocks import NodeSet
    from glasu.protocol.client import Client
    from glasu.protocol.server import Server


def client_request(client: Client, requested: NodeSet) -> Script[tuple[NodeSet, NDArray[Any]]]:
    """Client column: request nodes, or none to help the other parties.

    Returns:
        The nodes, sorted, whose class probabilities this client receives, and these probabilities. With labels at all
        clients: the requested nodes. With labels at one party, which alone has a classifier: at that party all
        nodes that any party requested, at the others none.
    """
    key = client.identity.key(Phase.PREDICTION, 0)
    (nodes,) = yield from agree(client, key, [requested])
    own = np.isin(nodes, requested)
    probabilities = yield from client_prediction(client, key, nodes, own)
    if client.identity.owner >= 0:
        return (nodes if client.has_labels else nodes[:0]), probabilities
    return nodes[own], probabilities


def server_request(server: Server) -> Script[int]:
    """Server column: return the number of requested nodes."""
    key = server.identity.key(Phase.PREDICTION, 0)
    proposals, (nodes,) = yield from unite(server, key, 1)
    if len(nodes) == 0:
        raise ProtocolError("no party requested a node; one of them must: glasu join ... --predict ids.csv.")
    requested = [np.isin(nodes, proposal.node_sets[0]) for proposal in proposals]
    yield from server_prediction(server, key, len(nodes), requested)
    return len(nodes)
