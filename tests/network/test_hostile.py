"""A party that sends what it should not: nothing of it is used, everyone learns who, where and what, nothing is lost.

Every attack comes after the first checkpoint. When all have stopped, each role's checkpoints must be those of a run
without it; started again, with the attacker mended, the run must end as that one did.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from glasu.errors import ConfigError, GlasuError
from glasu.network import client_session as sessions
from glasu.network import frames
from glasu.protocol import server as servers
from glasu.protocol.message_bytes import HEADER, encode
from glasu.protocol.messages import Gradient, Message, Metrics, Partial, Proposal, Scores, TensorMessage, Waiting
from glasu.protocol.state import ClientState, ServerState
from glasu.runtime.checkpointing import Store, to_arrays
from glasu.runtime.simulation import simulate
from glasu.wire.message_key import Phase
from network.test_faults import same_end
from network.test_runs import tiny
from support.cluster import Cluster

JOINT = {"backward": "joint", "num_local_steps": 1}
OWNER, OTHER = {"labels": "b"}, {"labels": "a"}  # the attacker is b, unless it is a
AHEAD = {"sampler": "neighbor", "prefetch": 1}  # those of round 2 ride on the messages of round 1
ONE_BY_ONE = {"sampler": "neighbor", "prefetch": 0}  # node sets are agreed in messages of their own, in every round


@dataclass(frozen=True)
class Target:
    """One message of a party: of which kind, in which phase, round and layer (None: the first), in which run."""

    kind: type[Message]
    phase: Phase
    round: int
    layer: int | None = None
    keys: dict = field(default_factory=dict)
    client: int = 1

    def of_the_first(self) -> Target:
        """Return the same message of the party that others are easily compared with; what b had, a has."""
        keys = (
            {**self.keys, "labels": {"b": "a", "a": "b"}[self.keys["labels"]]} if "labels" in self.keys else self.keys
        )
        return replace(self, client=0, keys=keys)

    def hit(self, message: Message) -> bool:
        key = message.key
        return (
            isinstance(message, self.kind)
            and (key.client, key.phase, key.round) == (self.client, self.phase, self.round)
            and self.layer in (None, key.layer)
        )


TARGETS = {
    "partial": Target(Partial, Phase.TRAINING, 1, 1),
    "last partial": Target(Partial, Phase.TRAINING, 1, 3),
    "partial with a set": Target(Partial, Phase.TRAINING, 1, 1, AHEAD),
    "partial in evaluation": Target(Partial, Phase.EVALUATION, 2, 1),
    "gradient": Target(Gradient, Phase.BACKWARD, 1, 3, JOINT),
    "owner's gradient": Target(Gradient, Phase.BACKWARD, 1, keys=OWNER),
    "scores": Target(Scores, Phase.EVALUATION, 2),
    "metrics": Target(Metrics, Phase.EVALUATION, 2),
    "owner's metrics": Target(Metrics, Phase.EVALUATION, 2, keys=OWNER),
    "proposal": Target(Proposal, Phase.SAMPLING, 1, keys=ONE_BY_ONE),
    "owner's proposal": Target(Proposal, Phase.SAMPLING, 1, keys={**ONE_BY_ONE, **OWNER}),
    "proposal in evaluation": Target(Proposal, Phase.EVALUATION, 2, keys=OWNER),
    "waiting": Target(Waiting, Phase.BACKWARD, 1, keys=OTHER),
}
TARGETS |= {f"a's {name}": target.of_the_first() for name, target in TARGETS.items()}


def with_value(message, place, number):
    value = message.value.copy()
    value[place] = number
    return replace(message, value=value)


def with_key(**keys):
    return lambda message: replace(message, key=message.key._replace(**keys))


def with_declared(place, number, layout="<Q"):
    """Return an attack that puts a number into the encoded message; negative places count from the header's end."""

    def change(message):
        content = bytearray(encode(message))
        struct.pack_into(layout, content, HEADER.size + place, number)
        return bytes(content)

    return change


def with_sets(*node_sets):
    return lambda message: replace(message, node_sets=tuple(np.array(nodes, np.int32) for nodes in node_sets))


ANY = {  # what can be done to every message, and what everyone is told
    "another round": (with_key(round=7), "round 7"),
    "an earlier round": (with_key(round=0), "round 0"),
    "another layer": (with_key(layer=0), "layer 0"),
    "another phase": (with_key(phase=Phase.PREDICTION), "got"),
    "another run": (with_key(run=bytes(12)), "expected"),
    "another sender": (with_key(client=0), "start and client"),
    "another start": (with_key(incarnation=9), "start and client"),
    "a loss that is none": (lambda message: replace(message, losses=np.array([np.inf])), "loss is not finite"),
    "a node that is not": (with_sets([10**6]), "expected nodes 0.."),
    "too many node sets": (with_sets(*[[1]] * 3), "rounds, got 3|sections, got"),
    "more bytes declared": (with_declared(-8, 1 << 40), "declares 1099511627776 bytes"),
    "cut short": (lambda message: encode(message)[:-1], "bytes"),
    "a kind that is none": (with_declared(5 - HEADER.size, 99, "<B"), "unknown kind 99"),
}
TENSORS = {
    "NaN": (lambda message: with_value(message, (0, 0), np.nan), "got NaN or infinity"),
    "infinity": (lambda message: with_value(message, (-1, -1), -np.inf), "got NaN or infinity"),
    "a row less": (lambda message: replace(message, value=message.value[1:]), "got "),
    "no row": (lambda message: replace(message, value=message.value[:0]), "got "),
    "a column more": (lambda message: replace(message, value=np.c_[message.value, message.value[:, :1]]), "got|allow"),
    "another type": (
        lambda message: replace(message, value=message.value.astype(np.float64)),
        "a matrix of f4, got|allow",
    ),
    "rows without end declared": (with_declared(4, 2**32 - 1, "<I"), "section declares"),
    "columns without end declared": (with_declared(8, 2**32 - 1, "<I"), "section declares"),
    "nothing to say": (lambda message: Waiting(key=message.key), "got"),
}
SCORES = {
    "a huge probability": (lambda message: with_value(message, (0, 0), 1e30), r"in 0\.\.1, got 1e\+30"),
    "a negative probability": (lambda message: with_value(message, (0, 0), -5), r"in 0\.\.1, got -5"),
    "a row that does not sum to 1": (
        lambda message: with_value(message, 0, 0.5),
        r"rows that sum to 1, got a row that sums to 1\.5",
    ),
}
NUMBERS = {
    "NaN": (lambda message: replace(message, values=message.values + np.array([0, np.nan, 0])), "NaN"),
    "infinity": (lambda message: replace(message, values=message.values + np.array([0, 0, np.inf])), "infinity"),
    "one less": (lambda message: replace(message, values=message.values[1:]), "accuracy, macro_f1, loss"),
    "none": (lambda message: replace(message, values=message.values[:0]), "accuracy, macro_f1, loss"),
    "another type": (lambda message: replace(message, values=message.values.astype(np.float32)), "unexpected type"),
    "numbers without end declared": (with_declared(4, 2**32 - 1, "<I"), "section declares"),
}
OTHERS = {
    "other ones": (
        lambda message: replace(message, values=message.values / 2),
        "parties found different metrics; .* party 'b'",
    )
}
SETS = {
    "no set": (with_sets(), "node sets"),
    "a set more": (with_sets([1], [2]), "node sets|sections, got"),
    "ids without end declared": (with_declared(4, 2**32 - 1, "<I"), "section declares"),
}
WAITING = {
    "a gradient": (lambda message: Gradient(key=message.key, value=np.ones((4, 8), np.float32)), "gradient"),
    "metrics": (lambda message: Metrics(key=message.key, values=np.ones(3)), "got Metrics"),
}

QUICK = (
    "NaN",
    "a huge probability",
    "none",
    "nothing to say",
    "other ones",
    "no set",
    "a gradient",
)  # the rest of the others is slow


QUICK_OF_A = ("a row less", "no set")
COMPARED = (*QUICK_OF_A, "no row", "a column more", "nothing to say", "other ones", "a set more", "a gradient")


def attacks_on(target):
    found = {**ANY}
    if issubclass(target.kind, TensorMessage):
        found |= TENSORS
    if target.kind is Scores:
        found |= SCORES
    if target.kind is Metrics:
        found |= NUMBERS if target.keys else {**NUMBERS, **OTHERS}
    if target.kind is Proposal or target.keys == AHEAD:
        found |= SETS
    if target.kind is Waiting:
        found |= WAITING
        del found["an earlier round"]  # it has nothing to say, so that is no lie, but a repeat of what was said then
    return found if target.client else {name: found[name] for name in COMPARED if name in found}


def all_of_them():
    for name, target in TARGETS.items():
        for attack in attacks_on(target):
            is_quick = name == "partial" or attack in QUICK if target.client else attack in QUICK_OF_A
            marks = () if is_quick else pytest.mark.slow
            yield pytest.param(name, attack, id=f"{name}: {attack}", marks=marks)


def role_of(owner):
    """Return whose checkpoint it is: the run has a number of its own every time."""
    return owner.partition(" in run ")[0].partition(" of run ")[0]


def plain(state):
    """Return what a checkpoint holds, without what differs between two runs of the same settings."""
    arrays, facts = to_arrays(state)
    kept = {key: value for key, value in facts.items() if key not in ("traffic", "incarnation", "run", "ledger_head")}
    return {name: value.tobytes() for name, value in arrays.items()}, kept


@pytest.fixture(scope="module")
def honest(kits, tmp_path_factory):
    """Return a function that runs some settings without an attack: its report, and the states of all roles by round."""
    known = {}

    def run(keys):
        if repr(keys) not in known:
            config, parties = tiny(**keys)
            states, save = {}, Store.save

            def spy(self, round_index, state):
                states[role_of(self.owner), round_index] = plain(state)
                return save(self, round_index, state)

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(Store, "save", spy)
                report, _ = Cluster(config, parties, kits, tmp_path_factory.mktemp("honest")).run()
            known[repr(keys)] = report, states
        return known[repr(keys)]

    return run


def everyone_stops(cluster, expected, on_nonsense="stop", name="b"):
    """Run; assert that the server and all parties end with an error that names the party."""
    server = cluster.serve(on_nonsense=on_nonsense)
    roles = [cluster.join(name) for name in "abc"]
    for role in (server, *roles):
        error = role.error()
        assert isinstance(error, GlasuError)
        assert error.exit_code == 1  # the run failed; nobody's input was bad
        assert f"party '{name}'" in str(error)
        assert re.search(expected, str(error))


def nothing_has_happened(cluster, states):
    """Assert that every role holds the checkpoint of round 1, as it is without an attack, and none of a later round."""
    for name in ("server", "a", "b", "c"):
        found = {}
        for path in sorted((cluster.folder / name / "checkpoints").glob("*.checkpoint")):
            number = int(path.stem.removeprefix("round-"))
            owner = "the server" if name == "server" else f"party {name}"
            run = cluster.run_id()
            store = Store(path.parent, f"the server of run {run}" if name == "server" else f"{owner} in run {run}")
            state = store.load(number, ServerState if name == "server" else ClientState)
            found[number] = plain(state) == states[owner, number]
        assert found == {1: True}, name


def ends_as(report, cluster):
    """Start all again, with nobody hostile any more."""
    again, _ = cluster.run()
    assert again.weights_sha256 == report.weights_sha256
    assert again.losses == report.losses
    assert (again.test, again.validation) == (report.test, report.validation)


@pytest.mark.parametrize(("name", "attack"), list(all_of_them()))
def test_a_message_that_cannot_be_is_refused_and_changes_nothing(name, attack, kits, tmp_path, monkeypatch, honest):
    target = TARGETS[name]
    change, expected = attacks_on(target)[attack]
    report, states = honest(target.keys)
    config, parties = tiny(**target.keys)
    used, sent, aggregated = [], [], servers.Server.aggregated

    def spy(self, kind, messages, *more):
        made = aggregated(self, kind, messages, *more)
        used.append(messages[target.client].key)
        return made

    def send(message):
        if not target.hit(message) or sent:
            return encode(message)
        sent.append(message)
        changed = change(message)
        return changed if isinstance(changed, bytes) else encode(changed)

    cluster = Cluster(config, parties, kits, tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(servers.Server, "aggregated", spy)
        patch.setattr(sessions, "encode", send)
        everyone_stops(cluster, expected, name="ab"[target.client])
    assert len(sent) == 1
    later = [key for key in used if (key.round, key.phase) >= (target.round, target.phase)]
    assert sent[0].key.about() not in {key.about() for key in later}  # nothing was made of it
    nothing_has_happened(cluster, states)
    ends_as(report, cluster)


FRAMES = {
    "a message of a tebibyte": (struct.pack("<BQQ", frames.PIECE, 1 << 40, 0) + b"x", "this run's settings allow"),
    "a piece from the middle": (
        struct.pack("<BQQ", frames.PIECE, 100, 50) + b"x",
        "expected a piece at 0, where a message begins",
    ),
    "a piece without content": (struct.pack("<BQQ", frames.PIECE, 100, 0), "message of 0 bytes"),
    "half a head": (struct.pack("<BQ", frames.PIECE, 100), "expected at least 17, for its head"),
    "a frame of no kind": (b"\x09", "unknown kind 9"),
    "an empty frame": (b"", "unknown kind -1"),
    "control that is none": (b"\x00{", "JSON object"),
    "control without a kind": (b'\x00{"king": 1}', "JSON object"),
    "noise": (bytes([frames.PIECE]) + struct.pack("<QQ", 60, 0) + bytes(60), "another format"),
}


@pytest.mark.parametrize("name", FRAMES)
@pytest.mark.parametrize("phase", [Phase.TRAINING, pytest.param(Phase.EVALUATION, marks=pytest.mark.slow)], ids=str)
def test_a_frame_that_cannot_be_is_refused_and_changes_nothing(name, phase, kits, tmp_path, monkeypatch, honest):
    frame, expected = FRAMES[name]
    target = Target(Partial, phase, 1 if phase is Phase.TRAINING else 2, 1)
    report, states = honest({})
    config, parties = tiny()
    sent = sessions.Session.exchange

    def exchange(self, messages, *more):
        if target.hit(messages[0]):
            self._line.send(frame)
        return sent(self, messages, *more)

    cluster = Cluster(config, parties, kits, tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(sessions.Session, "exchange", exchange)
        everyone_stops(cluster, expected)
    nothing_has_happened(cluster, states)
    ends_as(report, cluster)


def comes_back(cluster, parties, expected, name="b"):
    """Run with a server that waits; assert that only one party ends, and that the run is what it would have been."""
    server = cluster.serve(on_nonsense="wait")
    roles = {each: cluster.join(each) for each in "abc"}
    error = roles[name].error()
    assert isinstance(error, ConfigError)
    assert "the server does not accept this party" in str(error)
    assert expected in str(error)
    for who in {"server", *"abc"} - {name}:
        cluster.until(who, f"{name}: not accepted: ")
    assert any(expected in line for line in cluster.lines["server"])
    roles[name] = cluster.join(name)
    for role in roles.values():
        role.outcome()
    same_end(server.outcome(), simulate(parties, cluster.config).report)


def once(change, target=TARGETS["partial"]):
    left = [1]

    def changed(message):
        if left and target.hit(message):
            left.clear()
            return change(message)
        return message

    return changed


@pytest.mark.parametrize("name", ["NaN", "a row less", "another round", "another start", "a node that is not"])
def test_a_server_that_waits_refuses_the_sender_and_goes_on_as_if_nothing_had_come(name, kits, tmp_path, monkeypatch):
    change, expected = {**ANY, **TENSORS}[name]
    config, parties = tiny(num_rounds=3)
    changed = once(change)
    monkeypatch.setattr(sessions, "encode", lambda message: encode(changed(message)))
    comes_back(Cluster(config, parties, kits, tmp_path), parties, expected)


@pytest.mark.parametrize(
    ("name", "attack"),
    [
        ("a's partial", "a row less"),
        ("a's last partial", "a row less"),
        ("a's partial with a set", "no set"),
        ("a's proposal", "no set"),
        ("waiting", "a gradient"),
        ("a's waiting", "a gradient"),
        ("owner's gradient", "nothing to say"),
    ],
)
def test_a_server_that_waits_refuses_who_lied_and_not_whom_it_is_compared_with(
    name, attack, kits, tmp_path, monkeypatch
):
    target = TARGETS[name]
    change, expected = attacks_on(target)[attack]
    config, parties = tiny(**target.keys)
    changed = once(change, target)
    monkeypatch.setattr(sessions, "encode", lambda message: encode(changed(message)))
    comes_back(Cluster(config, parties, kits, tmp_path), parties, expected, "ab"[target.client])


@pytest.mark.parametrize("name", ["a message of a tebibyte", "control that is none"])
def test_a_server_that_waits_refuses_the_sender_of_a_frame_that_cannot_be(name, kits, tmp_path, monkeypatch):
    frame, expected = FRAMES[name]
    config, parties = tiny(num_rounds=3)
    sent, left = sessions.Session.exchange, [1]

    def exchange(self, messages, *more):
        if left and TARGETS["partial"].hit(messages[0]):
            left.clear()
            self._line.send(frame)
        return sent(self, messages, *more)

    monkeypatch.setattr(sessions.Session, "exchange", exchange)
    comes_back(Cluster(config, parties, kits, tmp_path), parties, expected)


@pytest.mark.parametrize("on_nonsense", ["stop", "wait"])
def test_two_contents_under_one_key_stop_the_run(on_nonsense, kits, tmp_path, monkeypatch, honest):
    report, states = honest({})
    config, parties = tiny()
    sent = sessions.Session.exchange

    def exchange(self, messages, *more):
        if TARGETS["partial"].hit(messages[0]):
            self._send_message(encode(with_value(messages[0], (0, 0), 1.5)))
        return sent(self, messages, *more)

    cluster = Cluster(config, parties, kits, tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(sessions.Session, "exchange", exchange)
        everyone_stops(cluster, "came twice with different contents", on_nonsense)
    nothing_has_happened(cluster, states)
    ends_as(report, cluster)
