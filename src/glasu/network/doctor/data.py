"""What a party's data has to be: as large as it says, edges between its nodes, labels where they are needed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from glasu.config import RunConfig
from glasu.data.cache.arrays import row_pieces
from glasu.data.graph import Graph
from glasu.data.party import PartyData, have_labels
from glasu.errors import GlasuError
from glasu.network.compatibility import refuse_unfit_for_network
from glasu.network.doctor.findings import Finding
from glasu.network.doctor.machine import disk_finding
from glasu.network.party_setup import build_client, check_memory, fitted, label_facts

FILES = 3  # two checkpoints are kept while a third is written
TENSORS = 4  # weights, two moments of the optimiser, the best weights so far
SPARE = 16 << 20  # bytes for the report, and for what file systems round up


def data_findings(party: PartyData) -> list[Finding]:
    """Look at dimensions, features and edges, also of data that was stored long ago; its sizes stay here."""
    graph, features = party.graph, party.features
    sizes = {"ids": party.num_nodes, "rows of features": features.shape[0], "nodes of the graph": graph.num_nodes}
    if len(set(sizes.values())) > 1:
        listed = ", ".join(f"{count} {what}" for what, count in sizes.items())
        return [Finding("dimensions", "bad", f"its files do not fit each other: {listed}")]
    alone = int(np.count_nonzero(np.diff(graph.indptr) == 0))
    about = f"{party.num_features} features, {graph.num_edges} edges, {alone} nodes without an edge into them"
    found = [Finding("dimensions", "good", f"{party.num_nodes} nodes, features and edges fit them", about)]
    values = features if isinstance(features, np.ndarray) else features.data
    if not all(np.isfinite(values[rows]).all() for rows in row_pieces(values)):
        found.append(Finding("features", "bad", "some are not finite numbers; clean them, or set --missing"))
    found.append(_edges(graph))
    return found


def _edges(graph: Graph) -> Finding:
    if graph.num_edges == 0:
        return Finding("edges", "warning", "there is none: this party adds features only")
    pieces = [slice(graph.indptr[piece.start], graph.indptr[piece.stop]) for piece in graph.node_pieces()]
    wrong = sum(int(np.count_nonzero(_outside(graph, piece))) for piece in pieces)
    if wrong:
        return Finding("edges", "bad", f"{wrong} of them name nodes that are not there; read the files anew")
    return Finding("edges", "good", "every one is between two of its nodes")


def _outside(graph: Graph, edges: slice) -> Any:
    sources = graph.indices[edges]
    return (sources < 0) | (sources >= graph.num_nodes)


def settings_findings(
    config: RunConfig, party: PartyData, roster: Sequence[str], out: Path, max_memory: int | None = None
) -> tuple[list[Finding], dict[str, Any]]:
    """Try the server's settings on the data: labels, splits, the model's size; and state what must be equal."""
    try:
        refuse_unfit_for_network(config)
        check_memory(config, party, max_memory)
        config, party = fitted(config, party)
        client = build_client(config, party, list(roster).index(party.name), roster, lambda: 0.0)
    except GlasuError as error:
        return [Finding("settings", "bad", "its data does not fit the settings; it says there why", str(error))], {}
    weights = sum(value.numel() * value.element_size() for value in client.model.state_dict().values())
    found = [Finding("settings", "good", "its data fits them"), *_labels(party)]
    return [*found, disk_finding(out, (FILES * TENSORS + 1) * weights + SPARE)], label_facts(party)


def _labels(party: PartyData) -> list[Finding]:
    """Tell how far the labels reach, where they are used."""
    if party.labels is None or party.splits is None:
        return []
    parts = {"train": party.splits.train, "validate": party.splits.validation, "test": party.splits.test}
    known = {name: party.labels[nodes][have_labels(party.labels[nodes])] for name, nodes in parts.items()}
    said = ", ".join(f"{len(labels)} of {len(parts[name])} nodes to {name} with" for name, labels in known.items())
    if empty := [name for name, labels in known.items() if len(labels) == 0]:
        return [Finding("labels", "warning", f"{said}: none to {' and none to '.join(empty)} with; enlarge the split")]
    taught = known["train"]
    seen = len(np.unique(taught)) if taught.ndim == 1 else int(np.count_nonzero(taught.any(axis=0)))
    if seen < len(party.classes):
        missing = len(party.classes) - seen
        return [Finding("labels", "warning", f"{missing} of {len(party.classes)} classes have no training node")]
    return [Finding("labels", "good", f"{said}; every class has a training node")]
