"""One key names one message: two messages with the same key have the same bytes."""

from __future__ import annotations

import itertools
from collections import defaultdict
from dataclasses import replace

import numpy as np
import pytest

from glasu.errors import ProtocolError
from glasu.protocol.message_bytes import encode
from glasu.protocol.messages import Agreed, Joint, JointGradient, JointScores, Losses, Metrics, Proposal, Verdict
from glasu.runtime.telemetry import TrafficCounter
from glasu.runtime.trained_model import TrainedModel
from glasu.wire.message_key import SERVER, TO_ONE, Key, Phase
from support.monolith import run, settings, tiny_parties
from support.tiny import simulate

FROM_SERVER = (Joint, JointGradient, JointScores, Agreed, Verdict)
MODES = [
    {
        "aggregation": aggregation,
        "backward": backward,
        "labels": labels,
        "sampler": sampler,
        "sampled_evaluation": drawn,
    }
    for aggregation, backward, labels, sampler, drawn in itertools.product(
        ("mean", "concat"), ("local", "joint"), ("all", "b"), ("neighbor", "shared", "full"), (False, True)
    )
    if not (drawn and sampler == "full")
]


def collect_keys(**keys):
    """Run and return {key as bytes: (key, kinds, encodings)} of all messages in both directions, and their number."""
    keys = {
        "aggregation_layers": (1, 3),
        "num_local_steps": 1 if keys.get("backward") == "joint" else 2,
        "fanout": 1,
        "batch_size": 4,
        "num_rounds": 5,
        "evaluate_every": 2,
        "prefetch": 2,
        "dropout": 0.5,
        **keys,
    }
    found, count = defaultdict(lambda: (set(), set(), set())), 0

    def see(message):
        nonlocal count
        count += 1
        for kept, item in zip(found[message.key.pack()], (message.key, type(message), encode(message)), strict=True):
            kept.add(item)
        return message

    labels = keys.get("labels", "all")
    run(settings(**keys), tiny_parties(owner=None if labels == "all" else labels), carry=see)
    return found, count


@pytest.mark.parametrize("keys", MODES, ids=lambda keys: "-".join(map(str, keys.values())))
def test_no_key_has_two_contents(keys):
    found, count = collect_keys(**keys)
    for about, kinds, contents in found.values():
        (key,) = about
        assert len(contents) == 1, f"{key}: {len(contents)} contents of {[kind.__name__ for kind in kinds]}"
        (kind,) = kinds
        assert (key.client >= TO_ONE) == issubclass(kind, FROM_SERVER)
    from_clients = [kind for about, (kind,), _ in found.values() if next(iter(about)).client < TO_ONE]
    answered = sum(kind is not Losses for kind in from_clients)
    assert len(from_clients) + answered == count  # every message has its own key, and all but losses have an answer


@pytest.mark.parametrize("prefetch", [0, 1, 16])
@pytest.mark.parametrize("labels", ["all", "b"])
def test_no_key_has_two_contents_however_far_ahead_node_sets_are_agreed(labels, prefetch):
    found, _ = collect_keys(
        labels=labels, prefetch=prefetch, sampler="neighbor", sampled_evaluation=True, evaluate_every=1
    )
    assert all(len(contents) == 1 for _, _, contents in found.values())


def test_what_the_server_sends_to_one_client_bears_that_clients_number():
    found, _ = collect_keys(backward="joint", aggregation="concat")
    senders = defaultdict(set)
    for about, kinds, _ in found.values():
        (key,), (kind,) = about, kinds
        senders[kind].add(key.client)
    assert senders[JointGradient] == {TO_ONE, TO_ONE + 1, TO_ONE + 2}  # each client's columns
    for kind in (Joint, JointScores, Verdict):
        assert senders[kind] == {SERVER}


def test_a_key_says_who_sends():
    key = Key(run=bytes(12), phase=Phase.TRAINING, client=2)
    assert str(key).endswith("from client 2")
    for client in (SERVER, TO_ONE, TO_ONE + 2):
        assert str(key._replace(client=client)).endswith("from server")


# --- the server's checks of one exchange ---------------------------------------------------------------------------


def test_metrics_that_disagree_between_parties_are_refused():
    def lie(message):
        if isinstance(message, Metrics) and message.key.client == 1:
            return replace(message, values=message.values + 1e-9)
        return message

    expected = (
        r"parties computed different metrics, so their labels or splits differ: accuracy: party 'a' \S+, party 'b' \S+;"
    )
    with pytest.raises(ProtocolError, match=expected):
        run(settings(aggregation_layers=(1, 3)), tiny_parties(), carry=lie)


@pytest.mark.parametrize("left", [0, 2])
def test_metrics_that_are_missing_or_too_few_are_refused(left):
    def shorten(message):
        named = isinstance(message, Metrics) and message.key.client == 1
        return replace(message, values=message.values[:left]) if named else message

    expected = f"party 'b', .*: expected the metrics accuracy, macro_f1, loss, got {left} values"
    with pytest.raises(ProtocolError, match=expected):
        run(settings(aggregation_layers=(1, 3)), tiny_parties(), carry=shorten)


def test_metrics_of_a_party_without_labels_are_refused():
    def add(message):
        named = isinstance(message, Metrics) and message.key.client == 0
        return replace(message, values=np.ones(3)) if named else message

    with pytest.raises(ProtocolError, match=r"party 'a', .*: expected the metrics none, got 3 values"):
        run(settings(aggregation_layers=(1, 3), labels="b"), tiny_parties(owner="b"), carry=add)


def test_node_sets_of_different_numbers_of_rounds_are_refused():
    def shorten(message):
        named = isinstance(message, Proposal) and message.key.client == 1
        return replace(message, node_sets=message.node_sets[:0]) if named else message

    with pytest.raises(ProtocolError, match=r"party 'b', .*: expected node sets of 1 rounds, got 0"):
        run(settings(aggregation_layers=(1, 3), sampler="neighbor"), tiny_parties(), carry=shorten)


class Witness(TrafficCounter):
    """Remembers the bytes of every key."""

    def __init__(self, contents):
        super().__init__()
        self.contents = contents

    def count_to_server(self, message):
        super().count_to_server(message)
        self.contents[message.key.pack_without_attempt()].add(encode(message))


def test_one_key_has_one_content_also_in_runs_on_other_data_and_in_predictions_of_other_nodes():
    contents = defaultdict(set)
    config = settings(num_rounds=2, precision="fp32", aggregation_layers=(1, 3), seed=4)
    for seed in (0, 1):  # the same settings, other data
        parties = tiny_parties(seed=seed)
        model = TrainedModel.of(simulate(parties, config, traffic=Witness(contents)).clients)
        for nodes in ([3, 5, 8], [3, 5, 9], [5, 3, 8], [3, 5, 8]):
            model.predict_proba(parties, nodes, traffic=Witness(contents))
    assert len(contents) > 50
    assert all(len(found) == 1 for found in contents.values())
