"""An attack by a server that splits the view: it sends zeros instead of an aggregate to all parties but its target.

Then the other parties add only a constant to the next aggregate, and the rest of the aggregate is the target's part.
With masks, a server sees only sums, but from such a sum it could read the target's representation. To prevent this, the
masks depend on the broadcasts that each party received. Without masks, a server reads every message anyway. Attacking
such a run only tests the attack.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from glasu.config import PrivacyConfig, RunConfig
from glasu.data.party import PartyData
from glasu.errors import ConfigError, ProtocolError, TrainingError
from glasu.privacy.attacks.result import AttackResult, Values
from glasu.protocol.messages import Joint, Message, Partial
from glasu.protocol.requests import Event, RoundDone
from glasu.runtime.delivery import UNCHANGED, Delivery
from glasu.runtime.simulation import SimulationOptions, simulate
from glasu.runtime.transcript import RecordedRun
from glasu.wire.ciphertexts import SHAPE_WORDS, Ciphertexts
from glasu.wire.encodings import make_encodings
from glasu.wire.message_key import Phase
from glasu.wire.tensor_kinds import REPRESENTATION

MEASURE = "squared correlation"


class _EnoughError(TrainingError):
    """Raised after the first round to end the run."""


class _SplitView(Delivery):
    """Replaces the aggregates below a layer by zeros. Only the target gets the true aggregates."""

    def __init__(self, target: int, layer: int, *, encrypted: bool) -> None:
        self.target, self.layer, self.encrypted = target, layer, encrypted

    def to_clients(self, messages: Sequence[Message]) -> Sequence[Message]:
        """Return the messages that each client gets."""
        return [self._deliver(message, client) for client, message in enumerate(messages)]

    def _deliver(self, message: Message, client: int) -> Message:
        if client == self.target or not isinstance(message, Joint) or message.key.phase is not Phase.TRAINING:
            return message
        if message.key.layer >= self.layer:
            return message
        zeros = np.zeros_like(message.value)
        if self.encrypted:  # zero coefficients decrypt to zeros, but the shape must stay
            zeros[:, :SHAPE_WORDS] = message.value[:, :SHAPE_WORDS]
        return replace(message, value=zeros)


def attack_by_splitting(
    parties: Sequence[PartyData], config: RunConfig, target: str, secrets: Mapping[str, bytes] | None = None
) -> list[AttackResult]:
    """Run the first round with an honest server and with a server that splits the view. Compare the results.

    Args:
        parties: the data of all parties.
        config: the settings; at least two layers must aggregate.
        target: the party whose representation the server wants.
        secrets: the secrets of the parties, by name; None: derived from the seed.

    Returns:
        Three results, which measure how much of the target's part the server learns from the target's message, from
        the sums of an honest round, and from the sums of a round with a split view. The true part is what the target
        sends if nothing is protected.
    """
    names = [party.name for party in parties]
    layers = config.model.aggregation_layers
    if target not in names or len(layers) < 2:
        raise ConfigError(
            f"target {target!r}, model.aggregation_layers={list(layers)}: a split view needs one of the parties "
            f"{', '.join(names)} and at least two layers that aggregate."
        )
    index, last = names.index(target), layers[-1]
    plain = replace(config, privacy=PrivacyConfig())
    truth, _ = _run_round(parties, plain, index, last, secrets, split=True)
    sent, split = _run_round(parties, config, index, last, secrets, split=True)
    _, honest = _run_round(parties, config, index, last, secrets, split=False)
    found = []
    for name, rows in (("its message", sent), ("sums, honest", honest), ("sums, view split", split)):
        score = 0.0 if rows is None or truth is None else measure_squared_correlation(rows, truth)
        found.append(AttackResult(f"view of {target}: {name}", "server", target, MEASURE, score, 0.0, 0.0))
    return found


def _run_round(
    parties: Sequence[PartyData],
    config: RunConfig,
    target: int,
    layer: int,
    secrets: Mapping[str, bytes] | None,
    *,
    split: bool,
) -> tuple[Values | None, Values | None]:
    """Run one round. Return the target's message and the aggregate at a layer; each is None if it was not sent."""
    encrypted = isinstance(make_encodings(config)[REPRESENTATION], Ciphertexts)
    delivery = _SplitView(target, layer, encrypted=encrypted) if split else UNCHANGED

    def stop(event: Event) -> None:
        if isinstance(event, RoundDone):
            raise _EnoughError("one round is enough.")

    with tempfile.TemporaryDirectory() as folder:
        files = Path(folder)
        options = SimulationOptions(delivery=delivery, observer=stop, transcript=files, secrets=secrets, workers=1)
        try:
            simulate(parties, config, options)
        except _EnoughError:
            pass
        except (ProtocolError, TrainingError):  # with a split view, masks do not cancel, and ckks refuses the sums
            if not split:
                raise
        transcript = RecordedRun(files)
        view = transcript.view("server")
        parts = [each for each in view.matrices(Partial, Phase.TRAINING) if each.key.layer == layer]
        joints = [each for each in view.matrices(Joint, Phase.TRAINING) if each.key.layer == layer]
        own = [each.rows for each in parts if each.sender == target and each.key.round == 0]
        sums = [each.rows for each in joints if each.key.round == 0]
    return (own[0] if own else None), (sums[0] if sums else None)


def measure_squared_correlation(rows: Values, truth: Values) -> float:
    """Return the squared correlation of matching columns, averaged over the columns that vary in `truth`."""
    first, second = (np.asarray(each, np.float64) - each.mean(axis=0, dtype=np.float64) for each in (rows, truth))
    product, lengths = (first * second).sum(axis=0), np.square(first).sum(axis=0) * np.square(second).sum(axis=0)
    varies = np.square(second).sum(axis=0) > 1e-12
    shares = np.divide(np.square(product), lengths, out=np.zeros_like(product), where=lengths > 0)
    return float(shares[varies].mean()) if varies.any() else 0.0
