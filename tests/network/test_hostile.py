"""A party that sends invalid messages: they are refused, they change nothing, and the run can continue without them."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

from glasu.errors import ConfigError, GlasuError
from glasu.network.join import PartyPerformer
from glasu.network.party_checkpoints import PartyCheckpoint
from glasu.network.training_server import ServerCheckpoint
from glasu.protocol.messages import (
    Gradient,
    Losses,
    Message,
    Metrics,
    Partial,
    Proposal,
    Scores,
    TensorMessage,
    Waiting,
)
from glasu.protocol.requests import RoundDone, Send
from glasu.runtime.checkpointing import Store, to_arrays
from glasu.wire.message_key import Phase
from support.cluster import Cluster
from support.kits import simulate_with_secrets
from support.tiny import assert_same_end, tiny

JOINT = {"backward": "joint", "num_local_steps": 1}
OWNER, OTHER = {"labels": "b"}, {"labels": "c"}
NEIGHBOR = {"sampler": "neighbor", "prefetch": 1}


@dataclass(frozen=True)
class Target:
    """The message that a hostile party changes."""

    kind: type[Message]
    phase: Phase
    round: int
    layer: int | None = None
    keys: dict[str, Any] = field(default_factory=dict)

    def matches(self, message):
        key = message.key
        return (
            isinstance(message, self.kind)
            and (key.phase, key.round) == (self.phase, self.round)
            and self.layer in (None, key.layer)
        )


TARGETS = {
    "partial": Target(Partial, Phase.TRAINING, 1, 1),
    "last partial": Target(Partial, Phase.TRAINING, 1, 3),
    "partial in evaluation": Target(Partial, Phase.EVALUATION, 2, 1),
    "gradient": Target(Gradient, Phase.BACKWARD, 1, None, JOINT),
    "owner's gradient": Target(Gradient, Phase.BACKWARD, 1, None, OWNER),
    "waiting": Target(Waiting, Phase.BACKWARD, 1, None, OTHER),
    "losses": Target(Losses, Phase.TRAINING, 1),
    "scores": Target(Scores, Phase.EVALUATION, 2),
    "metrics": Target(Metrics, Phase.EVALUATION, 2),
    "owner's metrics": Target(Metrics, Phase.EVALUATION, 2, None, OWNER),
    "proposal": Target(Proposal, Phase.SAMPLING, 1, None, NEIGHBOR),
}


def with_key(**changes):
    return lambda message: replace(message, key=message.key._replace(**changes))


def with_value(place, number):
    def change(message):
        value = message.value.copy()
        value[place] = number
        return replace(message, value=value)

    return change


def with_values(*numbers):
    return lambda message: replace(message, values=np.array(numbers, np.float64))


def with_sets(*node_sets):
    return lambda message: replace(message, node_sets=tuple(np.array(nodes, np.int32) for nodes in node_sets))


ANY = {  # changes of any message, and a pattern of the error that every role shows
    "another round": (with_key(round=7), "round 7"),
    "an earlier round": (with_key(round=0), "round 0|different contents"),
    "another layer": (with_key(layer=17), "layer 17"),
    "another phase": (with_key(phase=Phase.PREDICTION), "prediction"),
    "another sender": (with_key(client=0), "client"),
    "another attempt": (with_key(attempt=9), "attempt"),
    "another kind": (lambda message: Waiting(message.key), "Waiting"),
}
TENSORS = {
    "NaN": (with_value((0, 0), np.nan), "NaN or infinity|got nan"),
    "infinity": (with_value((-1, -1), -np.inf), "NaN or infinity|got -inf"),
    "a row less": (lambda message: replace(message, value=message.value[1:]), "rows, got|shape|got"),
    "no row": (lambda message: replace(message, value=message.value[:0]), "rows, got|shape|got"),
    "a column more": (lambda message: replace(message, value=np.c_[message.value, message.value[:, :1]]), "got"),
    "another type": (lambda message: replace(message, value=message.value.astype(np.float64)), "got"),
}
OWN = {
    "owner's gradient": {"nothing to send": (lambda message: Waiting(message.key), "Waiting")},
    "waiting": {"a gradient": (lambda message: Gradient(message.key, np.zeros((4, 6), np.float32)), "Gradient")},
    "scores": {
        "a huge probability": (with_value((0, 0), 1e30), r"in 0\.\.1, got 1e\+30"),
        "a negative probability": (with_value((0, 0), -5), r"in 0\.\.1, got -5"),
        "a row that does not sum to 1": (with_value(0, 0.5), r"rows that sum to 1, got a row that sums to 1\.5"),
    },
    "losses": {"infinity": (with_values(np.inf, 1.0), "loss"), "too many": (with_values(*range(9)), "got")},
    "metrics": {"NaN": (with_values(0.5, np.nan, 0.5), "NaN|finite"), "one less": (with_values(0.5, 0.5), "accuracy")},
    "proposal": {
        "a missing node": (with_sets([10**6]), "nodes 0.."),
        "no set": (with_sets(), "node set"),
        "a set more": (with_sets([1], [2], [3]), "node set|sections|at most"),
    },
}


def attacks_on(name):
    tensor = TENSORS if issubclass(TARGETS[name].kind, TensorMessage) else {}
    found = {**ANY, **tensor, **OWN.get(name, {})}
    if name == "waiting":  # this attack would send the message itself
        del found["another kind"]
    return found


def all_attacks():
    for name in TARGETS:
        for attack in attacks_on(name):
            quick = name == "partial" or attack in OWN.get(name, {})
            quick |= name == "scores" and attack in ("NaN", "a row less", "another round")
            marks = () if quick else pytest.mark.slow
            yield pytest.param(name, attack, id=f"{name}: {attack}", marks=marks)


def first_attacks():
    """Return the first attack of each target that is in `all_attacks` without the mark `slow`."""
    quick = [param.values for param in all_attacks() if not param.marks]
    return [(name, next(attack for target, attack in quick if target == name)) for name in dict(quick)]


def change_first_message(target, change, sent):
    """Return a performer that changes the first message that matches, and notes it in `sent`."""

    class Changing(PartyPerformer):
        def __call__(self, request):
            if isinstance(request, Send) and target.matches(request.message) and not sent:
                sent.append(request.message)
                request = Send(change(request.message))
            return super().__call__(request)

    return Changing


def plain(checkpoint):
    """Return the parts of a checkpoint that are equal in two runs of the same settings."""
    state = checkpoint.server if isinstance(checkpoint, ServerCheckpoint) else checkpoint.client
    arrays, facts = to_arrays(state)
    kept = {key: value for key, value in facts.items() if key not in ("traffic", "incarnation", "run", "ledger_head")}
    return {name: value.tobytes() for name, value in arrays.items()}, kept


def load_checkpoints(cluster):
    """Return {(role, round): state} of all checkpoints below a cluster's folder."""
    run, found = cluster.run_id(), {}
    for name in ("server", "a", "b", "c"):
        owner = f"the server of run {run}" if name == "server" else f"party {name} in run {run}"
        kind = ServerCheckpoint if name == "server" else PartyCheckpoint
        store = Store(kind, cluster.folder / name / "checkpoints", owner)
        for index in (index for index in store.digests() if index):
            found[name, index] = plain(store.load(index))
    return found


def attack_run(name, attack, kits, folder):
    """Let party b send an invalid message in a run, and return the cluster after its end."""
    target = TARGETS[name]
    change, expected = attacks_on(name)[attack]
    config, parties = tiny(**target.keys)
    cluster, sent = Cluster(config, parties, kits, folder), []
    server = cluster.serve()
    performers = {"b": change_first_message(target, change, sent)}
    roles = [cluster.join(party, performer=performers.get(party, PartyPerformer)) for party in "abc"]
    for role in (server, *roles):
        error = role.error()
        assert isinstance(error, GlasuError)
        assert error.exit_code == 1  # the input of every role was good
        assert "party 'b'" in str(error)
        assert re.search(expected, str(error)), str(error)
    assert len(sent) == 1
    return cluster


def run_first_round(kits, folder, **keys):
    """Return the cluster of an honest run that the server ended after its first round."""
    config, parties = tiny(**keys)
    cluster = Cluster(config, parties, kits, folder)

    def stop(event):
        if isinstance(event, RoundDone):
            cluster.serving[-1].stop("enough")

    for role in (cluster.serve(observer=stop), *(cluster.join(name) for name in "abc")):
        assert "enough" in str(role.error())
    return cluster


@pytest.fixture(scope="module")
def honest_checkpoints():
    """Return the checkpoints of honest runs after their first round, by their settings."""
    return {}


@pytest.mark.parametrize(("name", "attack"), list(all_attacks()))
def test_an_invalid_message_ends_the_run_for_all_and_changes_nothing(name, attack, honest_checkpoints, kits, tmp_path):
    saved = load_checkpoints(attack_run(name, attack, kits, tmp_path / "attacked"))
    keys = TARGETS[name].keys
    if str(keys) not in honest_checkpoints:
        honest_checkpoints[str(keys)] = load_checkpoints(run_first_round(kits, tmp_path / "honest", **keys))
    expected = honest_checkpoints[str(keys)]
    assert expected.keys() >= {(role, 1) for role in ("server", "a", "b", "c")}
    assert {index for _, index in saved} <= {1}  # no role has completed the round of the attack
    assert saved == {place: expected[place] for place in saved}


@pytest.mark.parametrize(("name", "attack"), first_attacks())
def test_after_an_invalid_message_the_same_commands_without_it_end_as_if_it_had_not_come(name, attack, kits, tmp_path):
    cluster = attack_run(name, attack, kits, tmp_path)
    report, _ = cluster.run()  # now every party is honest
    assert_same_end(report, simulate_with_secrets(cluster.parties, cluster.config).report)


@pytest.mark.parametrize("attack", ["NaN", "a row less", "another round", "another sender"])
def test_a_server_that_waits_drops_the_sender_and_continues_as_if_nothing_had_come(attack, kits, tmp_path):
    change, expected = attacks_on("partial")[attack]
    config, parties = tiny(num_rounds=3)
    cluster, sent = Cluster(config, parties, kits, tmp_path), []
    server = cluster.serve(on_invalid_message="wait")
    a, c = cluster.join("a"), cluster.join("c")
    error = cluster.join("b", performer=change_first_message(TARGETS["partial"], change, sent)).error()
    assert isinstance(error, ConfigError)
    assert "the server does not accept this party" in str(error)
    assert re.search(expected, str(error)), str(error)
    for who in ("server", "a", "c"):
        cluster.until(who, "b: not accepted: ")
    for role in (a, cluster.join("b"), c):
        role.outcome()
    assert_same_end(server.outcome(), simulate_with_secrets(parties, config).report)


@pytest.mark.parametrize(
    ("name", "attack"),
    [
        ("partial", "a row less"),
        ("last partial", "a row less"),
        ("gradient", "a row less"),
        ("scores", "a row less"),
        ("metrics", "one less"),
        ("proposal", "no set"),
        ("waiting", "a gradient"),
    ],
)
def test_a_server_that_waits_drops_the_sender_and_not_the_party_that_it_is_compared_with(name, attack, kits, tmp_path):
    """Party a comes first in the roster, so the messages of b and c are compared with its messages."""
    target = TARGETS[name]
    change, expected = attacks_on(name)[attack]
    config, parties = tiny(**target.keys)
    cluster, sent = Cluster(config, parties, kits, tmp_path), []
    server = cluster.serve(on_invalid_message="wait")
    others = [cluster.join(party) for party in "bc"]
    error = cluster.join("a", performer=change_first_message(target, change, sent)).error()
    assert isinstance(error, ConfigError), error
    assert re.search(expected, str(error)), str(error)
    for role in (cluster.join("a"), *others):
        role.outcome()
    assert_same_end(server.outcome(), simulate_with_secrets(parties, config).report)
    assert not any(line.startswith(("b: not accepted", "c: not accepted")) for line in cluster.lines["server"])


@pytest.mark.parametrize("policy", ["abort", "wait"])
def test_two_contents_under_one_key_end_the_run_whatever_the_policy_is(policy, kits, tmp_path):
    config, parties = tiny()

    class Equivocating(PartyPerformer):
        def __call__(self, request):
            reply = super().__call__(request)
            if isinstance(request, Send) and TARGETS["partial"].matches(request.message):
                super().__call__(Send(with_value((0, 0), 1.5)(request.message)))
            return reply

    cluster = Cluster(config, parties, kits, tmp_path)
    server = cluster.serve(on_invalid_message=policy)
    roles = [cluster.join(name, performer=Equivocating if name == "b" else PartyPerformer) for name in "abc"]
    for role in (server, *roles):
        assert "received with two contents" in str(role.error())
        assert "party 'b'" in str(role.error())
    report, _ = cluster.run()
    assert_same_end(report, simulate_with_secrets(parties, config).report)
