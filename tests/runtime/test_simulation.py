from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import time
from collections import Counter
from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from torch_geometric.data import Data
from torch_geometric.nn import GATv2Conv, GraphConv, SAGEConv

import glasu
from glasu import registry
from glasu.compiling import compile_seconds
from glasu.config import RunConfig
from glasu.data.party import Graph, PartyData, Splits
from glasu.errors import ConfigError, DataError, ProtocolError, TrainingError
from glasu.model.dropout import make_no_dropout
from glasu.model.optimizer import SGD
from glasu.model.sampler import Neighbor
from glasu.model.task import Multiclass
from glasu.protocol.message_bytes import decode, encode
from glasu.protocol.messages import Gradient, Joint, Message, Partial, Proposal, TensorMessage
from glasu.protocol.requests import Broadcast, Evaluated, Receive
from glasu.protocol.server import Server, Sizes
from glasu.protocol.training import server_script
from glasu.runtime.drive import check_contribution, drive
from glasu.runtime.simulation import make_clients, make_server
from glasu.timing import Stopwatch
from glasu.wire.message_key import Key, Phase
from support.convolutions import register_convolution
from support.monolith import ALL_LAYERS, identical, run, run_roles, settings, tiny_parties
from support.tiny import simulate

EVERYTHING_AT_ONCE = {  # what users have: single precision, dropout, sampling, stale steps, both kinds of riding along
    "backbone": "gcnii",
    "aggregation_layers": (1, 3),
    "dropout": 0.5,
    "sampler": "neighbor",
    "fanout": 2,
    "batch_size": 6,
    "num_local_steps": 2,
    "optimizer": "adam",
    "num_rounds": 6,
    "evaluate_every": 3,
    "prefetch": 4,
    "precision": "fp32",
}

CHILD = """
import sys
sys.path[:0] = [{tests!r}]
from support.monolith import settings, tiny_parties
from glasu.runtime.simulation import make_clients, make_server, simulate
from glasu.timing import Stopwatch
import torch
torch.set_num_threads(2)
report = simulate(tiny_parties(num_nodes=40), settings(**{keys!r})).report
assert torch.get_num_threads() == 2
print(*report.weights_sha256)
"""


def test_the_same_settings_data_and_seed_give_the_same_weights_in_other_processes(request):
    code = CHILD.format(tests=str(request.config.rootpath / "tests"), keys=EVERYTHING_AT_ONCE)
    seed = "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"  # not the one of this process
    environment = {**os.environ, "PYTHONHASHSEED": seed}
    there = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    here = simulate(tiny_parties(num_nodes=40), settings(**EVERYTHING_AT_ONCE)).report
    assert there.stdout.split() == list(here.weights_sha256)
    other = simulate(tiny_parties(num_nodes=40), settings(**EVERYTHING_AT_ONCE, seed=1)).report
    assert not set(other.weights_sha256) & set(here.weights_sha256)


def test_the_number_of_threads_changes_no_bit_and_is_given_back():
    before = torch.get_num_threads()
    try:
        digests = []
        for threads in (1, 2):
            torch.set_num_threads(threads)
            digests.append(simulate(tiny_parties(), settings(**EVERYTHING_AT_ONCE)).report.weights_sha256)
            assert torch.get_num_threads() == threads
        assert digests[0] == digests[1]
        with pytest.raises(ConfigError):
            simulate(tiny_parties(), settings(labels="nobody"))
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_the_callers_random_state_is_neither_read_nor_changed():
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = simulate(tiny_parties(), settings(**EVERYTHING_AT_ONCE)).report.weights_sha256
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    assert simulate(tiny_parties(), settings(**EVERYTHING_AT_ONCE)).report.weights_sha256 == first


@pytest.mark.parametrize("precision", ["fp32", "fp64", "bf16", "int8"])
@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"labels": "b"},
        {"labels": "b", "sampler": "shared"},
        {"backward": "joint", "num_local_steps": 1, "aggregation": "concat"},
    ],
)
def test_messages_that_travel_as_bytes_give_the_same_weights(keys, precision):
    config = settings(**{**EVERYTHING_AT_ONCE, **keys, "precision": precision})
    parties = tiny_parties(owner=keys.get("labels"))
    direct = run(config, parties)
    travelled = run(config, parties, carry=lambda message: decode(encode(message)))
    assert identical(direct.final, travelled.final)
    assert direct.server.progress.losses == travelled.server.progress.losses
    assert direct.meter.snapshot() == travelled.meter.snapshot()


# --- awkward parties ---------------------------------------------------------------------------------------------


def awkward_parties(owner=None):
    """Return awkward parties: high degree, isolated nodes, self loops, duplicates, no edges, one feature.

    No training node has the last class.
    """
    nodes, rng = 30, np.random.default_rng(3)
    labels = rng.integers(0, 3, nodes)
    train = np.flatnonzero(labels < 2)[:12]
    rest = np.setdiff1d(np.arange(nodes), train)
    splits, classes, ids = (
        Splits(train, rest[::2], rest[1::2]),
        ("x", "y", "z"),
        np.array([f"n{i}" for i in range(nodes)]),
    )
    told = {"labels": labels, "classes": classes, "splits": splits}
    hub = np.concatenate([np.arange(20), np.zeros(20, int), [5, 5, 5, 7, 7]])  # 20..29 are isolated
    spoke = np.concatenate([np.zeros(20, int), np.arange(20), [6, 6, 6, 7, 7]])
    none = np.empty(0, int)
    parties = [
        PartyData("hub", ids, rng.standard_normal((nodes, 5)), Graph.from_edges(hub, spoke, nodes), **told),
        PartyData("edgeless", ids, rng.standard_normal((nodes, 3)), Graph.from_edges(none, none, nodes), **told),
        PartyData(
            "narrow", ids, labels[:, None] + 0.1, Graph.from_edges(*rng.integers(0, nodes, (2, 40)), nodes), **told
        ),
    ]
    if owner is None:
        return parties
    return [one if one.name == owner else replace(one, labels=None, classes=(), splits=None) for one in parties]


@pytest.mark.parametrize("backbone", ["gcn", "gcnii", "sage", "gat"])
@pytest.mark.parametrize(
    "keys",
    [
        {"sampler": "full"},
        {"sampler": "neighbor", "sampling": "layer"},
        {"sampler": "shared", "sampling": "layer", "labels": "narrow"},
    ],
)
def test_awkward_parties_train_and_learn(backbone, keys):
    config = settings(
        backbone=backbone,
        aggregation_layers=(1, 3),
        num_local_steps=2,
        optimizer="adam",
        learning_rate=0.02,
        num_rounds=12,
        fanout=2,
        batch_size=8,
        precision="fp32",
        **keys,
    )
    report = simulate(awkward_parties(keys.get("labels")), config).report
    assert np.isfinite(report.losses).all()
    assert np.mean(report.losses[-3:]) < np.mean(report.losses[:3])
    assert len(report.losses) == 12


def test_loops_and_duplicate_edges_change_nothing():
    parties = awkward_parties()
    source, target = parties[0].graph.edge_index()
    loops = np.arange(30)
    again = Graph.from_edges(np.r_[source, source, loops], np.r_[target, target, loops], 30)
    config = settings(aggregation_layers=(1, 3), num_rounds=3)
    clean = simulate(parties, config).report
    messy = simulate([replace(parties[0], graph=again), *parties[1:]], config).report
    assert messy.weights_sha256 == clean.weights_sha256


def test_sparse_and_dense_forms_of_the_same_features_give_the_same_weights():
    parties, rng = tiny_parties(), np.random.default_rng(4)
    thin = rng.standard_normal((24, 40)) * (rng.random((24, 40)) < 0.1)
    dense = [replace(parties[0], features=thin), *parties[1:]]
    sparse = [replace(parties[0], features=sp.coo_array(thin)), *parties[1:]]
    assert sp.issparse(dense[0].features)
    for backbone in ("gcn", "gcnii", "sage", "gat"):
        config = settings(backbone=backbone, aggregation_layers=(1, 3), num_rounds=2, dropout=0.5)
        assert simulate(dense, config).report.weights_sha256 == simulate(sparse, config).report.weights_sha256


def test_a_run_without_validation_and_test_nodes_keeps_the_last_model():
    empty = np.empty(0, np.int64)
    parties = [replace(one, splits=Splits(one.splits.train, empty, empty)) for one in tiny_parties()]
    config = settings(aggregation_layers=(1, 3), num_rounds=4, evaluate_every=2)
    with pytest.raises(DataError, match="no validation and no test node has a known label"):
        simulate(parties, config)
    report = simulate(parties, config.replace(data={"split": (1.0, 0.0, 0.0)})).report
    assert report.validation.round == 4
    assert np.isnan(report.test.accuracy)
    assert '"accuracy": null' in report.to_json()


# --- layers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("aggregation", ["mean", "concat"])
@pytest.mark.parametrize("backbone", ["gcn", "gcnii", "sage", "gat"])
def test_every_backbone_learns_with_every_aggregation(backbone, aggregation):
    config = settings(
        backbone=backbone,
        aggregation=aggregation,
        aggregation_layers=(1, 3),
        optimizer="adam",
        learning_rate=0.02,
        num_rounds=20,
        hidden=16,
    )
    losses = simulate(tiny_parties(), config).report.losses
    assert losses[-1] < 0.6 * losses[0]


@pytest.mark.parametrize(
    "convolution",
    [
        SAGEConv,
        lambda width, out: GATv2Conv(width, out // 2, heads=2, add_self_loops=False, dropout=0.3),
        lambda width, out: GraphConv(width, out, aggr="mean"),
    ],
    ids=["SAGEConv", "GATv2Conv", "GraphConv"],
)
@pytest.mark.parametrize("sampler", ["full", "neighbor"])
def test_a_users_pyg_convolution_trains_and_repeats_itself(convolution, sampler):
    config = settings(
        backbone=register_convolution(convolution),
        aggregation_layers=(1, 3),
        sampler=sampler,
        optimizer="adam",
        learning_rate=0.02,
        num_rounds=8,
        hidden=16,
    )
    reports = [simulate(tiny_parties(), config).report for _ in range(2)]
    assert np.mean(reports[0].losses[-2:]) < np.mean(reports[0].losses[:2])
    assert reports[0].weights_sha256 == reports[1].weights_sha256


def test_a_first_convolution_without_weights_to_learn_trains_the_others():
    made = []

    def convolution(width, out):
        made.append(SAGEConv(width, out).requires_grad_(bool(made)))
        return made[-1]

    config = settings(
        backbone=register_convolution(convolution), aggregation_layers=(3,), num_rounds=2, optimizer="sgd"
    )
    client = simulate(tiny_parties(1), config).clients[0]
    first, second = (client.learner.model.layers[layer].convolution.lin_l.weight for layer in (0, 1))
    made.clear()
    still = config.replace(train={"learning_rate": 1e-30})
    start = simulate(tiny_parties(1), still).clients[0]
    untouched, moved = (start.learner.model.layers[layer].convolution.lin_l.weight for layer in (0, 1))
    assert torch.equal(first, untouched)
    assert not torch.equal(second, moved)


def test_a_client_without_labels_has_no_norm_before_a_classifier():
    config = settings(normalization="layer", labels="b", aggregation_layers=(1, 3), num_rounds=1)
    clients = simulate(tiny_parties(owner="b"), config).clients
    assert [len(client.learner.model.norms) for client in clients] == [3, 4, 3]


def test_a_users_sageconv_is_the_built_in_sage_where_every_node_sees_itself():
    """SAGEConv averages over neighbours and, as blocks hold self loops, over the node itself."""
    parties = tiny_parties(1)
    looped = settings(backbone=register_convolution(SAGEConv), aggregation_layers=ALL_LAYERS, num_rounds=1)
    client = simulate(parties, looped).clients[0]
    weights = {
        key.removeprefix("convolution."): value for key, value in client.learner.model.layers[0].state_dict().items()
    }
    graph = parties[0].graph
    A = torch.zeros(24, 24, dtype=torch.float64)
    A[graph.edge_index()[1], graph.edge_index()[0]] = 1
    A += torch.eye(24)
    X = torch.from_numpy(parties[0].features).double()
    mixed = (A / A.sum(1, keepdim=True)) @ X
    expected = mixed @ weights["lin_l.weight"].T + weights["lin_l.bias"] + X @ weights["lin_r.weight"].T
    got = client.learner.model.sublayer(
        0, X, None, client.learner.sampler.exact_block(np.arange(24)), make_no_dropout()
    )
    torch.testing.assert_close(got, torch.relu(expected))


# --- the server's checks -----------------------------------------------------------------------------------------

RUN = bytes(12)


class NoMore(Exception):  # noqa: N818
    """The server waits for messages that will not come."""


def serve(*turns, names="abc", **keys):
    """Give a server one message per party and turn; return its answers. It first expects round 0, layer 1."""
    server = Server(settings(aggregation_layers=(1, 3), **keys), list(names), Sizes(24, 6, 6), RUN)
    answers, left = [], list(turns)

    def perform(request):
        if isinstance(request, Broadcast):
            answers.append(request.message)
        elif isinstance(request, Receive):
            if not left:
                raise NoMore
            pairs = enumerate(left.pop(0))
            return [check_contribution(request, message, client, names[client]) for client, message in pairs]

    with suppress(NoMore):
        drive(server_script(server), perform, Stopwatch(lambda: 0.0))
    return answers


def partial(client, rows=24, width=6, *, dtype="<f8", kind=Partial, **about):
    fields = {"run": RUN, "phase": Phase.TRAINING, "client": client, "round": 0, "layer": 1, **about}
    return kind(key=Key(**fields), value=np.ones((rows, width), dtype))


def test_the_server_answers_partials_that_fit():
    (answer,) = serve([partial(m) for m in range(3)])
    assert isinstance(answer, Joint)
    np.testing.assert_array_equal(answer.value, np.ones((24, 6)))


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"rows": 23}, r"party 'b'.*expected 24 rows, got 23"),
        ({"width": 1}, r"party 'b'.*expected 6 columns, got 1"),  # would broadcast
        ({"rows": 1}, r"party 'b'.*expected 24 rows, got 1"),
        ({"dtype": "<f4"}, r"party 'b'.*expected a matrix of f8, got a matrix of f4"),
        ({"round": 1}, r"party 'b': expected Partial for training round 0 layer 1.*got Partial for training round 1"),
        ({"layer": 3}, r"party 'b': expected Partial for .* layer 1 .*got Partial for .* layer 3"),
        ({"client": 2}, r"party 'b': expected Partial for .* from client 1, got Partial for .* from client 2"),
        ({"chunk": 1}, r"party 'b': expected Partial for .* chunk 0, got Partial for .* chunk 1"),
        ({"phase": Phase.EVALUATION}, r"party 'b': expected Partial for training .*got Partial for evaluation"),
        ({"kind": Joint}, r"party 'b': expected Partial for .*got Joint for"),
    ],
)
def test_the_server_refuses_a_partial_that_does_not_fit_naming_party_expected_and_got(wrong, said):
    odd = partial(**{"client": 1, **wrong})
    with pytest.raises(ProtocolError, match=said):
        serve([partial(0), odd, partial(2)])


@pytest.mark.parametrize("odd", [0, 1, 2])
def test_where_the_server_cannot_know_how_many_rows_there_are_the_majority_says(odd):
    with pytest.raises(ProtocolError, match=r"expected shape \(9, 6\) as from most parties, got \(8, 6\)") as refused:
        serve([partial(client, rows=8 if client == odd else 9) for client in range(3)], sampler="shared")
    assert refused.value.party == "abc"[odd]


def test_two_parties_against_each_other_are_both_named_and_neither_is_blamed():
    expected = (
        r"expected the same shape from all parties, got party 'a' \(8, 6\); party 'b' \(9, 6\)\. .* cannot decide"
    )
    with pytest.raises(ProtocolError, match=expected) as refused:
        serve([partial(0, rows=8), partial(1, rows=9)], names="ab", sampler="shared")
    assert refused.value.party == ""


@pytest.mark.parametrize("sampler", ["neighbor", "full"])
def test_rows_of_a_set_that_the_server_knows_are_counted_however_many_agree_on_others(sampler):
    expected = {"neighbor": 9, "full": 24}[sampler]
    agreements = [[proposal(client, 1, round_index) for client in range(3)] for round_index in (0, 1)]
    partials = [partial(client, rows) for client, rows in enumerate([7, expected, 7])]
    with pytest.raises(ProtocolError, match=f"party 'a', .*: expected {expected} rows, got 7"):
        serve(*(agreements if sampler == "neighbor" else ()), partials, sampler=sampler, prefetch=1, num_rounds=2)


def proposal(client, rounds, first=0, nodes=9):
    """Return a proposal of node sets S[2] for several rounds."""
    key = Key(run=RUN, phase=Phase.SAMPLING, client=client, round=first, layer=2)
    return Proposal(key, tuple(np.arange(nodes, dtype=np.int32) for _ in range(rounds)))


def test_the_server_refuses_a_partial_of_another_run():
    odd = partial(1, run=b"another run!")
    with pytest.raises(ProtocolError, match="party 'b'"):
        serve([partial(0), odd, partial(2)])


def test_the_server_refuses_node_sets_for_different_numbers_of_rounds():
    with pytest.raises(ProtocolError, match=r"party 'b', .*: expected node sets of 2 rounds, got 1"):
        serve([proposal(0, 2), proposal(1, 1), proposal(2, 2)], sampler="neighbor", prefetch=2, num_rounds=4)


def test_a_client_refuses_an_answer_to_another_question():
    def confuse(message: Message) -> Message:
        if isinstance(message, Joint) and message.key.layer == 3:
            return replace(message, key=message.key._replace(layer=1))
        return message

    with pytest.raises(ProtocolError, match=r"expected Joint for .* layer 3 .*got Joint for .* layer 1"):
        run(settings(aggregation_layers=(1, 3)), tiny_parties(), carry=confuse)


# --- the public function -----------------------------------------------------------------------------------------


def test_train_returns_a_report_that_is_plain_json():
    report = glasu.train(tiny_parties(), RunConfig().replace(train={"num_rounds": 3}, model={"hidden": 8}))
    assert 0 <= report.test.accuracy <= 1
    assert report.config.train.sampler == "full"  # "auto" resolved
    assert report.config.data.num_clients == 3
    assert len(report.weights_sha256) == 3
    assert [entry["round"] for entry in report.history] == [3]
    assert report.traffic["bytes_to_server"] > 0
    assert f"{report.traffic['exchanges']} exchanges" in report.summary()
    assert report.to_json().endswith("}\n")


@pytest.mark.parametrize(
    "things",
    [
        Data(x=torch.ones(3, 2), edge_index=torch.tensor([[0], [1]])),
        [],
        (),
        None,
        np.ones((3, 2)),
        "parties",
        ["a", "b"],
        tiny_parties()[0],
        [tiny_parties()[0], None],
    ],
    ids=["pyg", "list", "tuple", "none", "numpy", "text", "names", "one party", "a party and none"],
)
def test_what_are_no_parties_is_refused_with_how_to_make_them(things):
    with pytest.raises(DataError, match=r"list of PartyData; glasu\.split_vertically.*glasu\.read_party"):
        glasu.train(things)


@pytest.mark.parametrize("things", [[], ()])
def test_an_empty_list_of_parties_is_called_empty(things):
    with pytest.raises(DataError, match=r"^parties is an empty list of PartyData; glasu\.split_vertically"):
        glasu.train(things)


@pytest.mark.parametrize("config", [{"train": {}}, {}, "run.toml"], ids=str)
def test_what_is_no_config_is_refused_with_how_to_build_one(config):
    for train in (glasu.train, lambda parties, config: glasu.GLASUClassifier(config=config).fit(parties)):
        with pytest.raises(ConfigError, match=r"must be a glasu\.RunConfig; glasu\.RunConfig\.from_dict builds one"):
            train(tiny_parties(), config)


def test_a_task_that_does_not_fit_is_refused_before_anything_is_sent():
    with pytest.raises(
        ConfigError, match=r'train\.task="multilabel": party .a. must have .*, but has one class per node'
    ):
        simulate(tiny_parties(), settings(task="multilabel"))
    with pytest.raises(ConfigError, match=r'set train\.task = "multiclass"'):
        simulate(tiny_parties(owner="b"), settings(task="multilabel", labels="b"))


ALONE = r"party '\w+', round \d: the loss is -?(nan|inf); training diverged"
TOGETHER = r"party '\w+', training round \d layer \d .*: expected finite values, .* Training diverged at this party"


@pytest.mark.parametrize(
    ("keys", "found"),
    [
        ({}, TOGETHER),
        ({"labels": "b"}, TOGETHER),
        ({"backward": "joint"}, TOGETHER),
        ({"method": "standalone"}, ALONE),
        ({"method": "centralized"}, ALONE),
        ({"method": "simulated"}, TOGETHER),
        ({"backbone": "gat"}, TOGETHER),
        ({"optimizer": "adam"}, TOGETHER),
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:.*(overflow|invalid value).*:RuntimeWarning")
def test_a_value_that_is_not_finite_stops_the_run_where_it_is_first_seen(keys, found):
    config = settings(num_rounds=6, precision="fp32", learning_rate=1e30, evaluate_every=100, **keys)
    with pytest.raises(TrainingError, match=found) as caught:
        simulate(tiny_parties(owner=keys.get("labels")), config)
    assert "learning_rate" in str(caught.value)
    assert caught.value.exit_code == 1


@pytest.mark.parametrize(("kind", "keys"), [(Partial, {}), (Gradient, {"backward": "joint", "num_local_steps": 1})])
@pytest.mark.parametrize(
    ("values", "found"),
    [
        ({"a": 3e38, "b": 3e38}, r"from server: \w+: all parties sent finite values, but their sum is not"),
        ({"a": -3e38, "b": -3e38, "c": -3e38}, "all parties sent finite values, but their sum is not"),
        ({"b": np.inf, "c": -np.inf}, r"party 'b', .*: expected finite values, got NaN or infinity"),
        ({"c": np.nan}, r"party 'c', .*: expected finite values, got NaN or infinity"),
    ],
    ids=str,
)
def test_a_sum_that_is_not_finite_is_not_sent_on(kind, keys, values, found):
    seen = []

    def carry(message):
        seen.append(message)
        name = "abc"[message.key.client] if message.key.client in range(3) else ""
        if type(message) is kind and message.key.round == 1 and name in values:
            return replace(message, value=np.full_like(message.value, values[name]))
        return message

    config = settings(num_rounds=3, precision="fp32", evaluate_every=100, **keys)
    with pytest.raises(TrainingError, match=found) as caught:
        simulate(tiny_parties(), config, carry=carry)
    assert "learning_rate" in str(caught.value)
    assert all(np.isfinite(message.value).all() for message in seen if isinstance(message, TensorMessage))


def test_a_clients_time_is_that_between_messages_by_what_it_does():
    now, calls = [0.0], Counter()

    def take(name, seconds):
        calls[name] += 1
        now[0] += seconds

    class Slow(SGD):
        def _update(self, parts):
            take("update", 1)
            super()._update(parts)

    class SlowNeighbor(Neighbor):
        def blocks(self, nodes, draws):
            take("blocks", 100)
            return super().blocks(nodes, draws)

    class SlowMulticlass(Multiclass):
        def scores(self, logits):
            take("scores", 10_000)
            return super().scores(logits)

    chosen = {"optimizer": Slow, "sampler": SlowNeighbor, "task": SlowMulticlass}
    for seam, choice in chosen.items():
        registry.register(seam, "slow", choice)
    config = settings(num_rounds=4, evaluate_every=2, batch_size=4, fanout=1, **dict.fromkeys(chosen, "slow"))
    clients = make_clients(config, tiny_parties(), lambda: now[0])
    watch = Stopwatch(lambda: now[0])
    run_roles(clients, make_server(config, clients), watch=watch)
    seconds = Counter()
    for client in clients:
        seconds.update(client.watch.seconds)
    assert min(calls[name] for name in ("update", "blocks", "scores")) > 0
    assert seconds["compute"] == calls["update"]
    assert seconds["sampling"] == 100 * calls["blocks"]
    assert seconds["evaluation"] == 10_000 * calls["scores"]
    assert watch.seconds["communication"] == 0


def test_seconds_that_a_run_compiles_are_reported_apart_from_the_seconds_of_the_method(tmp_path):
    # A new file: numba has no compiled copy of its loop. The module's name makes the loop one of GLASU's.
    source = "from glasu.compiling import compile_loop\n\n@compile_loop\ndef add(values):\n    return values.sum()\n"
    (tmp_path / "loop.py").write_text(source)
    spec = importlib.util.spec_from_file_location("glasu.loop", tmp_path / "loop.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    def run_once():
        return simulate(tiny_parties(), settings(num_rounds=2), observer=lambda event: module.add(np.ones(3))).report

    started, earlier = time.perf_counter(), compile_seconds()
    first = run_once()
    elapsed, compiled = time.perf_counter() - started, compile_seconds() - earlier
    assert first.seconds["compiling"] == compiled > 0.01
    assert 0 < first.seconds["total"] <= elapsed - compiled
    assert first.history[-1].seconds <= first.seconds["total"]
    assert run_once().seconds["compiling"] == 0


# --- every party alone -------------------------------------------------------------------------------------------


def alone(**keys):
    heard = []
    config = settings(method="standalone", evaluate_every=1, optimizer="adam", **keys)
    return simulate(tiny_parties(num_nodes=40, seed=5), config, observer=heard.append).report, heard


def by_party(heard, split="validation"):
    found = {}
    for event in heard:
        if isinstance(event, Evaluated) and event.split == split:
            found.setdefault(event.party, []).append(event)
    return {party: found[party] for party in sorted(found, key=str)}  # parties may report in any order


def test_every_evaluation_of_a_party_alone_names_it():
    _, heard = alone(num_rounds=3)
    assert list(by_party(heard)) == list(by_party(heard, "test")) == ["a", "b", "c"]
    together = []
    simulate(tiny_parties(), settings(num_rounds=2), observer=together.append)
    assert list(by_party(together)) == [None]


def test_parties_that_selected_different_rounds_have_no_common_one():
    report, heard = alone(num_rounds=10, learning_rate=0.03)
    chosen = {name: [event.round for event in events if event.improved][-1] for name, events in by_party(heard).items()}
    assert len(set(chosen.values())) > 1
    assert report.validation.round is None
    assert report.test.round is None
    assert "every party at its own best round" in report.summary()
    assert "round" not in report.to_dict()["validation"]
    best = [max(event.metrics["accuracy"] for event in events) for events in by_party(heard).values()]
    assert report.validation.per_client == pytest.approx(tuple(best))


def test_parties_that_selected_the_same_round_have_that_one():
    report, _ = alone(num_rounds=1)
    assert report.validation.round == 1
    assert "best at round 1" in report.summary()


def test_losses_of_parties_alone_are_their_mean_in_every_round():
    report, heard = alone(num_rounds=5, num_local_steps=2)
    events = by_party(heard)
    assert len(report.losses) == 5
    for index, loss in enumerate(report.losses):
        assert loss == pytest.approx(np.mean([own[index].loss for own in events.values()]))
    assert [entry["loss"] for entry in report.history] == pytest.approx(list(report.losses))


def test_a_party_that_has_stopped_keeps_its_figures_in_the_history():
    report, heard = alone(num_rounds=20, patience=3, learning_rate=0.2)
    events = by_party(heard)
    lengths = {name: len(own) for name, own in events.items()}
    assert len(set(lengths.values())) > 1  # they stop at different rounds
    assert [entry["round"] for entry in report.history] == list(range(1, max(lengths.values()) + 1))
    for index, entry in enumerate(report.history):
        found = [own[min(index, len(own) - 1)].metrics["accuracy"] for own in events.values()]
        assert entry["val_accuracy"] == pytest.approx(np.mean(found))
    assert len(report.losses) == max(lengths.values())
    last = max(events.values(), key=len)
    assert report.losses[-1] == pytest.approx(last[-1].loss)  # the other parties have stopped


def test_the_observer_receives_every_round_and_every_evaluation():
    heard = []
    glasu.train(
        tiny_parties(), settings(aggregation_layers=(3,), num_rounds=4, evaluate_every=3), observer=heard.append
    )
    assert [type(event).__name__ for event in heard] == [
        *["RoundDone"] * 2,
        *["Evaluated", "RoundDone"],
        *["Evaluated", "RoundDone"],
        "Evaluated",
    ]
