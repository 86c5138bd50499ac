"""Checks of a party's data: features, edges, labels, and whether the data fits the server's settings."""

from __future__ import annotations

import logging

import numpy as np

from glasu.config import RunConfig
from glasu.data.graph import Graph
from glasu.data.party import PartyData, have_labels
from glasu.data.preprocessing import are_finite
from glasu.errors import GlasuError
from glasu.network.doctor.machine import check_disk, explain_error, log_detail
from glasu.network.facts import LabelFacts, collect_label_facts
from glasu.network.findings import Finding
from glasu.network.handshake import WelcomePayload
from glasu.network.options import JoinOptions
from glasu.network.party_setup import check_place, resolve_for_party
from glasu.privacy.policy import PolicyError
from glasu.protocol.client import Client
from glasu.runtime.client_ledger import check_training
from glasu.timing import Stopwatch

FILES = 3  # number of checkpoint files that exist at the same time: two are kept while a third is written
TENSORS = 4  # parts of a checkpoint that are as large as the weights: weights, two moments, the selected weights
SPARE = 16 << 20  # bytes for the report, and for file sizes that the file system rounds up


def check_data(party: PartyData, log: logging.Logger) -> list[Finding]:
    """Check features and edges. Their counts are logged here and not sent to other roles.

    The sizes of features and edges fit the number of nodes, because `PartyData` refuses other data.
    """
    graph, features = party.graph, party.features
    isolated = int(np.count_nonzero(np.diff(graph.indptr) == 0))
    log_detail(
        log, "dimensions", f"{party.num_features} features, {graph.num_edges} edges, {isolated} nodes without in-edges"
    )
    found = [Finding("dimensions", "good", f"{party.num_nodes} nodes; features and edges fit them")]
    if not are_finite(features):
        found.append(Finding("features", "bad", "some values are not finite numbers; clean them or set --missing"))
    found.append(_check_edges(graph))
    return found


def _check_edges(graph: Graph) -> Finding:
    if graph.num_edges == 0:
        return Finding("edges", "warning", "there are no edges, so this party contributes only features")
    pieces = (graph.indices[indptr[0] : indptr[-1]] for _, indptr in graph.node_pieces())
    wrong = sum(int(np.count_nonzero((sources < 0) | (sources >= graph.num_nodes))) for sources in pieces)
    if wrong:
        return Finding("edges", "bad", f"{wrong} edges name nodes that do not exist; read the files again")
    return Finding("edges", "good", "every edge connects two nodes of this party")


def check_settings(
    config: RunConfig, party: PartyData, offered: WelcomePayload, options: JoinOptions
) -> tuple[list[Finding], LabelFacts]:
    """Try the server's settings on the data: labels, splits and the size of the model.

    Returns:
        The findings, and the facts about labels.
    """
    try:
        check_place(party.name, offered, config)
        config, party = resolve_for_party(config, party, options.max_memory)
        watch = Stopwatch(options.clock)
        client = Client(config, party, index=offered.index, names=offered.roster, watch=watch)
    except GlasuError as error:
        text = "its data does not fit the server's settings; see that party's log"
        return [explain_error("settings", error, options.log, text)], {}
    weights = sum(value.numel() * value.element_size() for value in client.learner.model.state_dict().values())
    fits = Finding("settings", "good", "its data fits the server's settings")
    found = [fits, *_check_policy(client, options), *_check_labels(party)]
    return [*found, check_disk(options.out, (FILES * TENSORS + 1) * weights + SPARE)], collect_label_facts(party)


def _check_policy(client: Client, options: JoinOptions) -> list[Finding]:
    """Check that the policy of the party, if it has one, allows the settings."""
    if options.policy is None:
        return []
    try:
        check_training(client, options.policy)
    except PolicyError as error:
        return [Finding("policy", "bad", error.public_message.rstrip("."))]
    return [Finding("policy", "good", "it allows the settings")]


def _check_labels(party: PartyData) -> list[Finding]:
    """Check that every split and every class has labelled nodes, if the labels are used."""
    if party.labels is None or party.splits is None:
        return []
    parts = {"training": party.splits.train, "validation": party.splits.validation, "test": party.splits.test}
    known = {name: party.labels[nodes][have_labels(party.labels[nodes])] for name, nodes in parts.items()}
    counts = ", ".join(f"{len(labels)} of {len(parts[name])} {name} nodes" for name, labels in known.items())
    text = f"labels for {counts}"
    if empty := [name for name, labels in known.items() if len(labels) == 0]:
        return [Finding("labels", "warning", f"{text}; no label for {' or '.join(empty)}, so enlarge the split")]
    if party.has_numeric_labels:
        return [Finding("labels", "good", f"{text}; they are numbers")]
    labels = known["training"]
    seen = len(np.unique(labels)) if labels.ndim == 1 else int(np.count_nonzero(labels.any(axis=0)))
    if seen < len(party.classes):
        missing = len(party.classes) - seen
        return [Finding("labels", "warning", f"{missing} of {len(party.classes)} classes have no training node")]
    return [Finding("labels", "good", f"{text}; every class has a training node")]
