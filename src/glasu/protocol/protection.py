"""The protection of each kind of tensor, derived from the settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from glasu.privacy.accounting import Accountant
from glasu.privacy.ledger import Rule
from glasu.privacy.noise import Mechanism, RowNoise, ScoreRepair
from glasu.privacy.release import Clip, Protection
from glasu.wire.tensor_kinds import GRADIENT, PROBABILITIES, REPRESENTATION, TensorKind

if TYPE_CHECKING:
    from glasu.config import PrivacyConfig
    from glasu.model.task import Task


def list_mechanisms(privacy: PrivacyConfig) -> Mapping[TensorKind, Mechanism]:
    """Return the noise mechanism (clip and multiplier) of each kind of tensor; an empty dict without noise."""
    if not privacy.adds_noise:
        return {}
    clip, multiplier = privacy.dp_clip, privacy.dp_noise_multiplier
    return {
        REPRESENTATION: Mechanism(clip, multiplier),
        GRADIENT: Mechanism(privacy.dp_clip_gradients or clip, privacy.dp_noise_multiplier_gradients or multiplier),
        PROBABILITIES: Mechanism(
            privacy.dp_clip_probabilities, privacy.dp_noise_multiplier_probabilities or multiplier
        ),
    }


def list_rules(privacy: PrivacyConfig) -> tuple[Rule, ...]:
    """Return the ledger rules that follow from the settings: the accounting, if there is noise."""
    return (Accountant(privacy.delta, privacy.target_epsilon),) if privacy.adds_noise else ()


def make_protections(privacy: PrivacyConfig, task: Task, key: bytes) -> Mapping[TensorKind, Protection]:
    """Build the protection of each kind of tensor that has one.

    Args:
        privacy: the settings.
        task: repairs noisy scores.
        key: the key of the party's noise.
    """
    found: dict[TensorKind, Protection] = {}
    for kind, mechanism in list_mechanisms(privacy).items():
        clip = Clip(mechanism.clip) if kind.is_differentiated else None
        repair = [ScoreRepair(task.repair_scores)] if kind.is_score else []
        found[kind] = Protection(clip, RowNoise(mechanism, kind, key), repair)
    return found
