"""Predict the releases of a client from its settings, so that a policy or a target epsilon can refuse the run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from glasu.config import RunConfig, list_candidates
from glasu.config_sections import reads_whole_graph
from glasu.data.methods import evaluates_once, has_server, keeps_scores
from glasu.privacy.noise import read_mechanism
from glasu.privacy.secure_aggregation import find_secure_aggregation
from glasu.protocol.key_agreement import needs_keys
from glasu.protocol.masked import PROOF_PROTECTION, name_verdict_protection
from glasu.protocol.presence import list_subsets
from glasu.protocol.sampling import list_agreed_layers, owner_leads
from glasu.wire.message_key import Phase
from glasu.wire.tensor_kinds import (
    CHANGE,
    GRADIENT,
    OWNER_GRADIENT,
    PROBABILITIES,
    REPRESENTATION,
    TENSOR_KINDS,
    TensorKind,
)

if TYPE_CHECKING:
    from glasu.config import TrainConfig
    from glasu.protocol.client import Client


def list_protections(client: Client) -> dict[str, str]:
    """Return the kinds that a client will certainly release in a training run, and the protection of each kind.

    If a preset leaves several candidates, the result contains the kinds that all candidates release.
    """
    candidates = list_candidates(client.requested)
    every = [list_kinds(config, has_labels=client.has_labels) for config in candidates]
    kinds = [kind for kind in every[0] if all(kind in other for other in every[1:])]
    if len(candidates) > 1:
        kinds.append("situation")
    if needs_keys(client.requested) and has_server(client.requested):
        kinds += ["key", "proof"] if client.requested.privacy.hides_parts else ["key"]
    return {kind: _name_protection(client, kind) for kind in kinds}


def _name_protection(client: Client, kind: str) -> str:
    """Return the protection of a kind, as the ledger will record it. This works before the clients agree on keys."""
    gate, tensor = client.release, TENSOR_KINDS.get(kind)
    if tensor is None:
        verdict = name_verdict_protection(client.identity)
        signed = "none" if client.keys.signer is None else "signed"
        return {"key": signed, "proof": PROOF_PROTECTION, "verdict": verdict}.get(kind, "none")
    hidden_by = ""
    if gate.encodings[tensor].is_hidden:
        is_owner = client.identity.owner == client.identity.index
        # The owner's gradient is encrypted at the last layer; at lower layers the server adds gradients.
        sealed = is_owner and tensor is OWNER_GRADIENT.protecting_kind
        privacy = client.requested.privacy
        hidden_by = "sealed" if sealed else find_secure_aggregation(privacy).name_protection(privacy)
    return gate.find_protection(tensor).describe(hidden_by)


def list_kinds(config: RunConfig, *, has_labels: bool) -> list[str]:
    """Return the kinds that a client releases when it trains with these settings. Keys and proofs are not listed."""
    layers, kinds = config.model.aggregation_layers, []
    if layers:
        kinds = [REPRESENTATION.name, CHANGE.name] if config.wire.feedback else [REPRESENTATION.name]
        if (config.train.has_exact_gradients and len(layers) > 1) or (owner_leads(config) and has_labels):
            kinds.append(GRADIENT.name)
        agreed = 0 if config.train.releases_once else len(list_agreed_layers(config, Phase.SAMPLING))
        if agreed > owner_leads(config) or (owner_leads(config) and has_labels):
            kinds.append("node sets")
        if has_labels:
            if not keeps_scores(config):
                kinds += ["losses", "metrics"]
            elif not evaluates_once(config):
                kinds.append("verdict")
            if config.train.has_exact_gradients and GRADIENT.name not in kinds:
                kinds.append(GRADIENT.name)
    if has_labels and config.train.label_owner is None and config.privacy.release_probabilities:
        kinds.append(PROBABILITIES.name)
    return kinds


def count_evaluations(client: Client) -> int:
    """Return the minimum number of evaluations in a training run, including the test and the scoring of subsets.

    Without early stopping and without a race, the minimum is the exact number.
    """
    if not client.config.model.aggregation_layers or evaluates_once(client.requested):
        return 1
    subsets = sum(client.identity.index in subset for subset in list_subsets(client.requested, client.identity))
    return min(_count_selections(each.train) for each in list_candidates(client.requested)) + 1 + subsets


def list_row_releases(client: Client) -> list[dict[float, int]]:
    """Return the minimum number of times that a training run releases the row of one node with noise.

    The numbers are by noise multiplier. The first entry is for a test node. The second entry is for a training node; it
    exists only if every round uses all training nodes. Without noise the list is empty.
    """
    requested = client.requested
    if not (requested.privacy.adds_noise and has_server(requested)):
        return []
    test = {REPRESENTATION: 1}
    if requested.privacy.release_probabilities:
        test[PROBABILITIES] = 1
    rows, trains = [test], [each.train for each in list_candidates(requested)]
    if not requested.train.releases_once and all(_uses_all_nodes(train) for train in trains):
        rows.append({REPRESENTATION: min(train.num_rounds for train in trains)})
    return [_count_by_multiplier(client, row) for row in rows]


def _uses_all_nodes(train: TrainConfig) -> bool:
    return train.batch_size == 0 and reads_whole_graph(train.sampler)


def _count_by_multiplier(client: Client, releases: Mapping[TensorKind, int]) -> dict[float, int]:
    """Replace each kind of release by its noise multiplier. Add the counts of kinds with the same multiplier."""
    found: dict[float, int] = {}
    for kind, count in releases.items():
        if (mechanism := read_mechanism(_name_protection(client, kind.name))) is not None:
            found[mechanism.multiplier] = found.get(mechanism.multiplier, 0) + count
    return found


def _count_selections(train: TrainConfig) -> int:
    """Return the minimum number of evaluations before the test."""
    if train.stop_at:
        return 1
    warm = 2 if train.warm_start else 0  # the ensemble, and the joint model before round 0; patience ignores both
    after_rounds = -(-train.num_rounds // train.evaluate_every)
    if train.patience:
        # Without a warm start the first evaluation sets the best score, and patience counts from the second one.
        after_rounds = min(after_rounds, train.patience + (warm == 0))
    return warm + after_rounds
