"""A party that sends what it should not: nothing of it is used, and everyone learns who, where and what."""

from __future__ import annotations

import struct
from dataclasses import replace

import numpy as np
import pytest

from glasu.errors import ConfigError, GlasuError
from glasu.keys import Phase
from glasu.protocol import server as servers
from glasu.protocol.messages import Partial
from glasu.runtime.network import frames
from glasu.runtime.network import session as sessions
from glasu.runtime.simulation import simulate
from glasu.runtime.wire import encode
from runtime.network.cluster import Cluster
from runtime.network.test_faults import same_end
from runtime.network.test_runs import tiny


def with_value(message, place, number):
    value = message.value.copy()
    value[place] = number
    return replace(message, value=value)


ATTACKS = {  # what is sent instead, and what everyone is told
    "NaN": (lambda message: with_value(message, (0, 0), np.nan), "got NaN or infinity"),
    "infinity": (lambda message: with_value(message, (-1, -1), -np.inf), "got NaN or infinity"),
    "a row less": (lambda message: replace(message, value=message.value[1:]), "expected shape"),
    "a column more": (
        lambda message: replace(message, value=np.c_[message.value, message.value[:, :1]][1:]),
        "expected 6 columns, got 7",
    ),
    "another type": (
        lambda message: replace(message, value=message.value[::2].astype(np.float64)),
        "a matrix of f4, got",
    ),
    "more bytes than there can be": (
        lambda message: replace(message, value=message.value.astype(np.float64)),
        "training round 1 layer 1 chunk 0 from client 1: message of 1240 bytes declared: this run's settings allow 736",
    ),
    "another round": (lambda message: replace(message, key=message.key._replace(round=7)), "round 7"),
    "another layer": (lambda message: replace(message, key=message.key._replace(layer=2)), "layer 2"),
    "another run": (lambda message: replace(message, key=message.key._replace(run=bytes(12))), "expected Partial"),
    "another sender": (lambda message: replace(message, key=message.key._replace(client=0)), "start and client"),
    "another start": (lambda message: replace(message, key=message.key._replace(incarnation=9)), "start and client"),
    "a node that is not": (
        lambda message: replace(message, node_sets=(np.array([10**6], np.int32),)),
        "expected nodes 0..",
    ),
    "too many node sets": (
        lambda message: replace(message, node_sets=(np.array([1], np.int32),) * 3),
        "at most 2 rounds, got 3",
    ),
    "a loss that is none": (lambda message: replace(message, losses=np.array([np.inf])), "loss is not finite"),
}


def is_target(message):
    return (
        isinstance(message, Partial)
        and message.key.phase is Phase.TRAINING
        and (message.key.client, message.key.round, message.key.layer) == (1, 1, 1)
    )


def everyone_stops(cluster, expected, on_nonsense="stop"):
    """Run; assert that the server and all parties end with an error that names party b."""
    server = cluster.serve(on_nonsense=on_nonsense)
    roles = [cluster.join(name) for name in "abc"]
    for role in (server, *roles):
        error = role.error()
        assert isinstance(error, GlasuError)
        assert error.exit_code == 1  # the run failed; nobody's input was bad
        assert "party 'b'" in str(error)
        assert expected in str(error)


@pytest.mark.parametrize("name", ATTACKS)
def test_a_message_that_cannot_be_is_refused_and_everyone_is_told_by_whom(name, kits, tmp_path, monkeypatch):
    change, expected = ATTACKS[name]
    config, parties = tiny(num_rounds=3)
    used = []
    aggregated = servers.Server.aggregated
    monkeypatch.setattr(
        servers.Server,
        "aggregated",
        lambda self, kind, messages, *more: used.append(messages[0].key) or aggregated(self, kind, messages, *more),
    )
    monkeypatch.setattr(sessions, "encode", lambda message: encode(change(message) if is_target(message) else message))
    everyone_stops(Cluster(config, parties, kits, tmp_path), expected)
    later = [key for key in used if (key.phase, key.round, key.layer) == (Phase.TRAINING, 1, 3)]
    assert not later  # the round did not go on


FRAMES = {
    "a message of a tebibyte": (struct.pack("<BQQ", frames.PIECE, 1 << 40, 0) + b"x", "this run's settings allow"),
    "a frame of no kind": (b"\x09", "unknown kind 9"),
    "an empty frame": (b"", "unknown kind -1"),
    "control that is none": (b"\x00{", "JSON object"),
    "noise": (bytes([frames.PIECE]) + struct.pack("<QQ", 60, 0) + bytes(60), "another format"),
}


@pytest.mark.parametrize("name", FRAMES)
def test_a_frame_that_cannot_be_is_refused_and_everyone_is_told_by_whom(name, kits, tmp_path, monkeypatch):
    frame, expected = FRAMES[name]
    config, parties = tiny(num_rounds=3)
    sent = sessions.Session.exchange

    def exchange(self, messages):
        if is_target(messages[0]):
            self._line.send(frame)
        return sent(self, messages)

    monkeypatch.setattr(sessions.Session, "exchange", exchange)
    everyone_stops(Cluster(config, parties, kits, tmp_path), expected)


def comes_back(cluster, parties, expected):
    """Run with a server that waits; assert that only b ends, and that the run is what it would have been."""
    server = cluster.serve(on_nonsense="wait")
    a, b, c = (cluster.join(name) for name in "abc")
    error = b.error()
    assert isinstance(error, ConfigError)
    assert "the server does not accept this party" in str(error)
    assert expected in str(error)
    for who in ("server", "a", "c"):
        cluster.until(who, "b: not accepted: ")
    assert any(expected in line for line in cluster.lines["server"])
    for role in (a, cluster.join("b"), c):
        role.outcome()
    same_end(server.outcome(), simulate(parties, cluster.config).report)


def once(change):
    left = [1]

    def changed(message):
        if left and is_target(message):
            left.clear()
            return change(message)
        return message

    return changed


@pytest.mark.parametrize("name", ["NaN", "a row less", "another round", "another start", "a node that is not"])
def test_a_server_that_waits_refuses_the_sender_and_goes_on_as_if_nothing_had_come(name, kits, tmp_path, monkeypatch):
    change, expected = ATTACKS[name]
    config, parties = tiny(num_rounds=3)
    changed = once(change)
    monkeypatch.setattr(sessions, "encode", lambda message: encode(changed(message)))
    comes_back(Cluster(config, parties, kits, tmp_path), parties, expected)


@pytest.mark.parametrize("name", ["a message of a tebibyte", "control that is none"])
def test_a_server_that_waits_refuses_the_sender_of_a_frame_that_cannot_be(name, kits, tmp_path, monkeypatch):
    frame, expected = FRAMES[name]
    config, parties = tiny(num_rounds=3)
    sent, left = sessions.Session.exchange, [1]

    def exchange(self, messages):
        if left and is_target(messages[0]):
            left.clear()
            self._line.send(frame)
        return sent(self, messages)

    monkeypatch.setattr(sessions.Session, "exchange", exchange)
    comes_back(Cluster(config, parties, kits, tmp_path), parties, expected)


@pytest.mark.parametrize("on_nonsense", ["stop", "wait"])
def test_two_contents_under_one_key_stop_the_run(on_nonsense, kits, tmp_path, monkeypatch):
    config, parties = tiny(num_rounds=3)
    sent = sessions.Session.exchange

    def exchange(self, messages):
        if is_target(messages[0]):
            self._send_message(encode(with_value(messages[0], (0, 0), 1.5)))
        return sent(self, messages)

    monkeypatch.setattr(sessions.Session, "exchange", exchange)
    everyone_stops(Cluster(config, parties, kits, tmp_path), "came twice with different contents", on_nonsense)
