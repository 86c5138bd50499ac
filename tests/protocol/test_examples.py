"""Tasks whose examples are not nodes: an example reads one or more rows of H[L]."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from glasu import registry
from glasu.config import RunConfig
from glasu.data.party import PartyData, Splits
from glasu.data.presets import Homophily
from glasu.errors import ConfigError, ProtocolError
from glasu.model.task import Multiclass, Targets
from glasu.privacy.policy import Policy
from glasu.protocol.messages import PartySituation, Proposal
from glasu.protocol.prediction import client_request
from glasu.runtime.policy_file import PolicyFile
from glasu.runtime.trained_model import TrainedModel
from glasu.wire.message_key import Phase
from support.ledgers import list_entries
from support.masks import Watching
from support.monolith import assert_same, run, settings, tiny_parties
from support.tiny import simulate

ORDER = np.random.default_rng(0).permutation(tiny_parties()[0].num_nodes)


class Shuffled(Multiclass):
    """Classification whose labels have another order than the nodes: label i belongs to node ORDER[i]."""

    examples_are_nodes = False

    def find_targets(self, party, examples):
        nodes, rows = np.unique(ORDER[examples], return_inverse=True)
        return Targets(nodes, examples, rows)


class Separate(Multiclass):
    """Classification that declares that its labels do not belong to nodes."""

    examples_are_nodes = False


registry.register("task", "shuffled", Shuffled)
registry.register("task", "separate", Separate)


def shuffle(party: PartyData) -> PartyData:
    """Return the party with its labels and splits in the order of `Shuffled`."""
    if party.labels is None:
        return party
    place = np.argsort(ORDER)
    parts = (np.sort(place[part]) for part in (party.splits.train, party.splits.validation, party.splits.test))
    return replace(party, labels=party.labels[ORDER], splits=Splits(*parts))


@pytest.mark.parametrize("keys", [{"backward": "joint"}, {"num_local_steps": 2, "sampled_evaluation": True}], ids=str)
@pytest.mark.parametrize("labels", ["all", "b"])
@pytest.mark.parametrize("sampler", ["full", "neighbor", "shared"])
def test_the_order_of_the_labels_changes_neither_weights_nor_metrics(sampler, labels, keys):
    keys = {"num_rounds": 3, "evaluate_every": 1, "sampler": sampler, "labels": labels, "fanout": 2, **keys}
    keys["sampled_evaluation"] = "sampled_evaluation" in keys and sampler != "full"  # the full graph has no samples
    parties = tiny_parties(owner=None if labels == "all" else labels)
    usual = run(settings(**keys), parties)
    other = run(settings(**keys, task="shuffled"), [shuffle(party) for party in parties])
    assert_same(other.final, usual.final)
    assert other.server.progress.losses == pytest.approx(usual.server.progress.losses, rel=1e-9)
    metrics = [[event.metrics for event in done.events if hasattr(event, "metrics")] for done in (other, usual)]
    assert len(metrics[0]) == 4
    for found, expected in zip(*metrics, strict=True):
        assert found == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("method", ["standalone", "ensemble", "centralized"])
def test_methods_that_train_alone_read_the_rows_of_their_examples(method):
    parties = tiny_parties()
    keys = {"num_rounds": 3, "method": method}
    usual = simulate(parties, settings(**keys)).report
    other = simulate([shuffle(party) for party in parties], settings(**keys, task="shuffled")).report
    assert other.test.accuracy == pytest.approx(usual.test.accuracy)


@pytest.mark.parametrize("keys", [{"method": "smooth"}, {"dp_noise_multiplier": 1.0, "sampler": "full"}], ids=str)
def test_settings_that_need_a_node_per_prediction_refuse_other_examples(keys):
    with pytest.raises(ConfigError, match=r'train.task="shuffled": its examples are not nodes'):
        settings(**keys, task="shuffled")


def test_the_gradient_of_a_row_is_the_sum_over_the_examples_that_read_it():
    logits = torch.randn(4, 2, dtype=torch.float64, requires_grad=True)
    targets = Targets(np.arange(4), np.arange(3), np.array([[0, 1], [1, 3], [1, 0]]))
    read = targets.read_rows(logits)
    assert read.shape == (3, 2, 2)
    at_examples = torch.randn_like(read)
    (expected,) = torch.autograd.grad(read, logits, at_examples)
    torch.testing.assert_close(targets.add_rows(at_examples), expected)


def test_a_saved_model_refuses_to_predict_nodes_if_examples_are_not_nodes():
    parties = [shuffle(party) for party in tiny_parties()]
    model = TrainedModel.of(simulate(parties, settings(num_rounds=1, task="shuffled")).clients)
    with pytest.raises(ConfigError, match=r'train.task="shuffled": its examples are not nodes, and a saved model'):
        model.predict(parties)


def test_a_request_of_nodes_is_refused_before_a_message_if_examples_are_not_nodes():
    parties = [shuffle(party) for party in tiny_parties()]
    client = simulate(parties, settings(num_rounds=1, task="shuffled")).clients[0]
    with pytest.raises(ConfigError, match="its examples are not nodes"):
        next(client_request(client, np.arange(3)))


def test_the_situation_states_no_homophily_if_labels_do_not_belong_to_nodes():
    parties = tiny_parties(num_nodes=200, degree=6)
    situations = []
    for task in ("multiclass", "separate"):
        # The run is too short for a race, so the rules may need the homophily.
        config = RunConfig().replace(train={"num_rounds": 4, "evaluate_every": 4, "task": task}, model={"hidden": 8})
        seen = Watching()
        simulate(parties, config, carry=seen)
        situations.append(seen.of(PartySituation)[0].values.tolist())
    assert [numbers[-1] == Homophily.UNKNOWN for numbers in situations] == [False, True]
    assert situations[0][:2] == situations[1][:2]


def test_the_ledger_records_no_nodes_of_probabilities_if_examples_are_not_nodes(tmp_path):
    parties = tiny_parties()
    recorded = []
    for task in ("multiclass", "shuffled"):
        config, own = settings(num_rounds=1, method="ensemble", task=task), parties
        if task == "shuffled":
            own = [shuffle(party) for party in parties]
        policies = {party.name: PolicyFile(tmp_path, Policy(max_releases_per_row=9), "") for party in own}
        simulate(own, config, ledgers=tmp_path / task, policies=policies)
        entries = list_entries(tmp_path / task / "a.jsonl")
        recorded.append({entry.nodes is None for entry in entries if entry.kind == "probabilities"})
    assert recorded == [{False}, {True}]


def test_the_label_owner_refuses_nodes_of_other_parties_in_an_evaluation():
    config, parties = settings(labels="b", num_rounds=1, evaluate_every=1), tiny_parties(owner="b")
    added = parties[1].splits.test[:1].astype(np.int32)

    def carry(message):
        is_proposal = isinstance(message, Proposal) and message.key.phase is Phase.EVALUATION
        return replace(message, node_sets=(added,)) if is_proposal and message.key.client == 0 else message

    with pytest.raises(ProtocolError, match=r"party 'b'.*nodes that this party did not propose"):
        run(config, parties, carry=carry)


@pytest.mark.parametrize("sampler", ["neighbor", "shared"])  # the owner sends batches, or all training nodes once
def test_the_label_owner_refuses_training_nodes_of_other_parties(sampler):
    config, parties = settings(labels="b", sampler=sampler, batch_size=4), tiny_parties(owner="b")
    added = parties[1].splits.test[:1].astype(np.int32)

    def carry(message):
        place = message.key.phase, message.key.layer, message.key.client
        if isinstance(message, Proposal) and place == (Phase.SAMPLING, config.model.num_layers, 0):
            return replace(message, node_sets=tuple(added for _ in message.node_sets))
        return message

    with pytest.raises(ProtocolError, match=r"party 'b'.*nodes that this party did not propose"):
        run(config, parties, carry=carry)
