"""The kinds of content that a client will release with its settings, so that a policy can refuse them at the start."""

from __future__ import annotations

from typing import TYPE_CHECKING

from glasu.data.methods import measures_at_parties
from glasu.protocol.sampling import agreed_layers, owner_leads
from glasu.wire.message_key import Phase

if TYPE_CHECKING:
    from typing import Any

    from glasu.config import RunConfig
    from glasu.protocol.client import Client


def list_protections(client: Client) -> dict[str, str]:
    """Return the kinds that a client releases in a training in any case, and their protection.

    Where a preset leaves several candidates, these are the kinds that all of them release.
    """
    every = [list_kinds(config, has_labels=client.has_labels) for config in client.candidates]
    kinds = [kind for kind in every[0] if all(kind in other for other in every[1:])]
    if len(client.candidates) > 1:
        kinds.append("situation")
    gate: Any = client.release
    return {kind: gate.protection(kind).name if kind in gate.encodings else "none" for kind in kinds}


def list_kinds(config: RunConfig, *, has_labels: bool) -> list[str]:
    """Return the kinds that a client releases in a training with these settings."""
    layers, kinds = config.model.aggregation_layers, []
    if layers:
        kinds = ["representation", "change"] if config.wire.feedback else ["representation"]
        if (config.train.backward == "joint" and len(layers) > 1) or (owner_leads(config) and has_labels):
            kinds.append("gradient")
        if len(agreed_layers(config, Phase.SAMPLING)) > owner_leads(config) or (owner_leads(config) and has_labels):
            kinds.append("node sets")
        if has_labels:
            kinds += [] if measures_at_parties(config) else ["losses", "metrics"]
            if config.train.backward == "joint" and "gradient" not in kinds:
                kinds.append("gradient")
    if has_labels and config.train.labels == "all" and config.privacy.release_probabilities:
        kinds.append("probabilities")
    return kinds


def count_evaluations(client: Client) -> int:
    """Return how many exact inferences a training has in any case: evaluations and the test."""
    train = client.config.train
    if not client.config.model.aggregation_layers or measures_at_parties(client.requested):
        return 1
    if train.patience or train.stop_at or len(client.candidates) > 1:
        return 2
    return -(-train.num_rounds // train.evaluate_every) + 1
