from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

import pytest
import torch

from glasu.errors import ConfigError
from glasu.privacy.release import Protection
from glasu.protocol.messages import Partial
from glasu.protocol.requests import Evaluated, RoundDone
from glasu.protocol.training import client_script
from glasu.runtime.drive import drive
from glasu.runtime.inprocess import open_client_map
from glasu.runtime.simulation import make_clients, make_server
from glasu.timing import Stopwatch
from glasu.wire.encodings import use_for_all_kinds
from glasu.wire.message_key import Phase
from support.messages import with_valid_scores
from support.monolith import identical, run_roles, settings, tiny_parties
from support.perturbations import row_noise

ROUNDS = 5
SETTINGS = {
    "adam": {"optimizer": "adam", "learning_rate": 0.01},
    "sgd with momentum": {"optimizer": "sgd", "learning_rate": 0.05, "momentum": 0.9},
    "labels at one party": {"optimizer": "adam", "labels": "b", "sampler": "full"},
    "shared sampler, labels at one party": {"optimizer": "adam", "labels": "b", "sampler": "shared", "fanout": 1},
    "joint": {"backward": "joint", "num_local_steps": 1, "momentum": 0.9},
    "joint, several steps": {"backward": "joint", "num_local_steps": 3, "optimizer": "adam"},
    "int8, exact gradients": {"backward": "joint", "num_local_steps": 1, "precision": "int8"},
    "int8, labels at one party": {"labels": "b", "precision": "int8"},
    "gcnii with layer norms": {"backbone": "gcnii", "normalization": "layer", "optimizer": "adam"},
    "patience": {"optimizer": "adam", "patience": 1, "evaluate_every": 1, "learning_rate": 1.0},
}


def build(config, parties, states=None):
    """Return fresh clients and a fresh server, as a new process would make them, with these states."""
    clients = make_clients(config, parties, lambda: 0.0)
    server = make_server(config, clients)
    if states is not None:
        for client, state in zip(clients, states[0], strict=True):
            client.restore(state)
        server.restore(states[1])
    return clients, server


def run_unbroken(config, parties, states=None, *, stop_after_round=False):
    """Run to the end, or to the end of one round; return clients, server, events and, per round, all states."""
    clients, server = build(config, parties, states)
    kept, servers, events = [[] for _ in clients], [], []

    def keep(states, role):
        states.append(role.state())
        if stop_after_round and all([*kept, servers]):  # the server may be ahead of the clients, or behind them
            raise Killed

    def see(client, action):
        if isinstance(action, RoundDone):
            keep(kept[client.identity.index], client)

    def see_server(action):
        if isinstance(action, RoundDone):
            keep(servers, server)
        elif isinstance(action, Evaluated):
            events.append(action)

    with open_client_map(), suppress(Killed):
        run_roles(clients, server, see, see_server)
    return clients, server, events, [(list(own), one) for *own, one in zip(*kept, servers, strict=True)]


class Killed(Exception):  # noqa: N818
    """The process ended after a round."""


def summary(clients, server, events):
    """Return the results that must not depend on interruptions."""
    tests = [event.metrics for event in events if isinstance(event, Evaluated) and event.split == "test"]
    return {
        "best": [client.progress.best_weights for client in clients],
        "losses": server.progress.losses,
        "selection": server.progress.selection,
        "test": tests[-1],
        "rounds": [client.progress.round for client in clients],
    }


def assert_same_outcome(got, expected):
    assert identical(got.pop("best"), expected["best"])
    assert got == {key: value for key, value in expected.items() if key != "best"}


def case(name):
    keys = {
        "aggregation_layers": (1, 3),
        "num_local_steps": 2,
        "dropout": 0.5,
        "sampler": "neighbor",
        "fanout": 2,
        "batch_size": 5,
        "schedule": "cosine",
        "num_rounds": ROUNDS,
        "evaluate_every": 2,
        "prefetch": 4,
        "precision": "fp32",
        **SETTINGS[name],
    }
    owner = keys.get("labels")
    return settings(**keys), tiny_parties(owner=owner)


@pytest.mark.parametrize("name", ["adam", "sgd with momentum", "labels at one party"])
def test_a_run_rebuilt_from_its_states_at_any_round_ends_with_the_same_bits(name):
    config, parties = case(name)
    clients, server, events, states = run_unbroken(config, parties)
    expected = summary(clients, server, events)
    assert len(states) == len(server.progress.losses)
    for state in states:
        again, other, later, _ = run_unbroken(config, parties, state)
        assert_same_outcome(summary(again, other, later), expected)


@pytest.mark.parametrize("name", SETTINGS)
def test_a_run_rebuilt_after_every_round_ends_with_the_same_bits(name):
    config, parties = case(name)
    clients, server, events, states = run_unbroken(config, parties)
    expected = summary(clients, server, events)
    state, seen = None, []
    for _ in states:
        *_, found, (state,) = run_unbroken(config, parties, state, stop_after_round=True)
        seen += found
    clients, server, found, rest = run_unbroken(config, parties, state)  # only the test remains
    assert not rest
    assert_same_outcome(summary(clients, server, found), expected)
    assert [(event.round, event.metrics, event.loss) for event in seen] == [
        (event.round, event.metrics, event.loss) for event in events if event.split == "validation"
    ]


def test_early_stopping_is_among_the_cases_above():
    config, parties = case("patience")
    *_, states = run_unbroken(config, parties)
    assert len(states) < ROUNDS


def test_a_state_does_not_change_while_the_run_continues():
    config, parties = case("adam")
    _, _, _, states = run_unbroken(config, parties)
    first, last = states[0][0][0], states[-1][0][0]
    assert first.progress.round == 1
    assert last.progress.round == ROUNDS
    assert any(not torch.equal(first.weights[key], last.weights[key]) for key in first.weights)
    assert any(not torch.equal(first.optimizer[key], last.optimizer[key]) for key in first.optimizer)
    assert not first.progress.best_weights  # no evaluation yet
    assert last.progress.best_weights


def test_a_client_that_forgot_its_optimiser_would_be_noticed():
    config, parties = case("sgd with momentum")
    _, _, _, states = run_unbroken(config, parties)
    own, one = states[2]
    forgetful = [type(state)(**{**vars(state), "optimizer": {}}) for state in own]
    _, _, _, again = run_unbroken(config, parties, (forgetful, one))
    last, other = ([state.weights for state in every[-1][0]] for every in (states, again))
    assert not identical(last, other)


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_a_client_that_trains_alone_resumes_from_its_state(optimizer):
    keys = {"aggregation_layers": (), "optimizer": optimizer, "momentum": 0.9 if optimizer == "sgd" else 0.0}
    config = settings(dropout=0.5, num_rounds=ROUNDS, evaluate_every=2, precision="fp32", **keys)
    parties = tiny_parties()

    def alone(state=None):
        client = make_clients(config, parties, lambda: 0.0)[1]
        if state is not None:
            client.restore(state)
        states, tests = [], []

        def see(event):
            if isinstance(event, RoundDone):
                states.append(client.state())
            elif isinstance(event, Evaluated) and event.split == "test":
                tests.append((event.round, event.metrics))

        with open_client_map():
            drive(client_script(client), see, Stopwatch(lambda: 0.0))
        return client, states, tests

    whole, states, tests = alone()
    assert len(states) == ROUNDS
    for state in states:
        again, _, found = alone(state)
        assert identical([again.progress.best_weights], [whole.progress.best_weights])
        assert found == tests


@pytest.mark.parametrize("change", [{"num_rounds": ROUNDS + 1}, {"seed": 1}, {"learning_rate": 0.02}, {"hidden": 7}])
def test_a_state_of_other_settings_is_refused(change):
    config, parties = case("adam")
    *_, states = run_unbroken(config, parties)
    section = "model" if "hidden" in change else "train"
    clients, server = build(config.replace(**{section: change}), parties)
    own, one = states[1]
    before = clients[0].learner.weights()
    with pytest.raises(ConfigError, match="other settings"):
        clients[0].restore(own[0])
    assert identical([clients[0].learner.weights()], [before])
    with pytest.raises(ConfigError, match="other settings or parties"):
        server.restore(one)


def test_a_servers_state_of_other_parties_is_refused():
    config, parties = case("adam")
    *_, states = run_unbroken(config, parties)
    _, server = build(config, [replace(parties[0], name="x"), *parties[1:]])
    with pytest.raises(ConfigError, match="other settings or parties"):
        server.restore(states[1][1])
    _, server = build(config, [parties[1], parties[0], parties[2]])
    with pytest.raises(ConfigError, match="other settings or parties"):
        server.restore(states[1][1])


def test_a_restarted_client_makes_the_same_noise_again():
    """The same rounds in another incarnation send the same bytes, so the noise cannot be averaged away."""
    config, parties = case("adam")

    def record_partials(incarnation):
        clients, server = build(config, parties)
        sent = {}
        for client in clients:
            client.identity.incarnation = incarnation
            noise = row_noise(0.1, secret=b"secret %d" % client.identity.index)
            client.release.protections = use_for_all_kinds(Protection(noise=noise))

        def see(message):
            if isinstance(message, Partial) and message.key.phase is Phase.TRAINING:
                sent[message.key.pack_without_attempt()] = message.value.tobytes()
            return message

        with open_client_map():
            run_roles(clients, server, carry=with_valid_scores(see))
        return sent

    first, again = record_partials(0), record_partials(3)
    assert len(first) == 3 * 2 * ROUNDS
    assert first == again
