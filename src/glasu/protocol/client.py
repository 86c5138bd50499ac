"""A client: the data, model, release gate and progress of one party in a run. The scripts of this package use it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from glasu.config import RunConfig, list_candidates
from glasu.data.methods import has_server
from glasu.data.party import PartyData
from glasu.data.preprocessing import Preparation
from glasu.errors import ConfigError
from glasu.model.blocks import NodeSet
from glasu.privacy.column_grids import ColumnGrids
from glasu.privacy.labels import randomize_training_labels
from glasu.privacy.ledger import Ledger
from glasu.privacy.masking import Signer
from glasu.privacy.release import HiddenSums, Release, Sent
from glasu.privacy.secure_aggregation import find_secure_aggregation
from glasu.protocol.learner import Learner, LookAhead, NodeData
from glasu.protocol.party_keys import PartyKeys
from glasu.protocol.protection import list_rules, make_protections
from glasu.protocol.stages import Stages, divide_settings
from glasu.protocol.state import ClientProgress, ClientState, Identity
from glasu.secret import Secret
from glasu.timing import Stopwatch
from glasu.wire.encodings import make_encodings
from glasu.wire.message_key import RUN_BYTES, Key
from glasu.wire.tensor_kinds import TensorKind

LARGEST_SENT = 1e30  # limit on values sent in a race of candidates, so that sums are finite in every encoding


class Client:
    """One party of a run: its data, model, release gate and progress."""

    def __init__(
        self,
        config: RunConfig,
        party: PartyData,
        *,
        index: int,
        names: Sequence[str],
        watch: Stopwatch,
        preparation: Preparation | None = None,
        secret: Secret | None = None,
        signer: Signer | None = None,
    ) -> None:
        """Build the client's model and optimiser.

        Args:
            config: the run's settings, resolved. If `train.preset` lists several candidates, the run chooses one.
            party: the data that this client owns.
            index: m.
            names: all parties in client order.
            watch: measures the client's computing time.
            preparation: the feature preparation of a model that was trained earlier; None: prepare the features as the
                config says.
            secret: the secret of the party. Initial weights, dropout masks, neighbours and rounding are derived from
                it. None: they are derived from `train.seed`, which is public.
            signer: signs the keys of this party; None in one process.
        """
        if has_server(config):  # fail now, not at the first message, if the package is missing
            find_secure_aggregation(config.privacy).load_package()
        self.party, self.watch, self.requested = party, watch, config
        self.keys = PartyKeys(party.name, config.train.seed, secret, signer)
        run = bytes.fromhex(config.digest())[:RUN_BYTES]  # over the network, the server's run id replaces it
        self.identity = Identity(tuple(names), config.train.label_owner, index, run)
        self.progress = ClientProgress()
        whole = list_candidates(config)[0]
        both = divide_settings(whole)  # None unless `train.release = "once"`
        first = whole if both is None else both[0]
        # Training uses the randomised labels in `data`. Evaluations use the original labels in `self.party`.
        if config.privacy.label_epsilon is not None and self.has_labels:
            party = randomize_training_labels(party, config.privacy.label_epsilon, self.keys.derive_label_key())
        data = NodeData(first, party, has_labels=self.has_labels, preparation=preparation)
        self.stages = None if both is None else Stages(whole, *both, data)
        self.begin(first, data)
        rules = list_rules(config.privacy)
        self.release = Release(
            make_encodings(config, self.keys.private_seed),
            make_protections(config.privacy, data.task, self.keys.derive_noise_key()),
            Ledger(rules=rules),
            rules,
            feedback=config.wire.feedback,
            sums=HiddenSums(ColumnGrids(config.privacy.range, self.keys.private_seed)),
        )

    @property
    def name(self) -> str:
        return self.party.name

    @property
    def data(self) -> NodeData:
        """The data of the current stage, or of a run without stages."""
        return self.learner.data

    @property
    def has_labels(self) -> bool:
        """Whether this client has labels and a classifier."""
        return self.identity.has_labels(self.identity.index)

    @property
    def is_alone(self) -> bool:
        """Whether rounds send no message. If so, this client selects its model and records its losses itself."""
        return not self.config.model.aggregation_layers

    def begin(self, config: RunConfig, data: NodeData) -> None:
        """Switch to the settings and data of a candidate or a stage, and start with initial weights."""
        self.config = config
        self.learner = Learner(
            config,
            data,
            index=self.identity.index,
            num_clients=self.identity.num_clients,
            num_outputs=data.task.head_width(self.party.classes) if self.has_labels else None,
            private_seed=self.keys.private_seed,
            classifier_seed=self.keys.classifier_seed if config.train.warm_start else None,
        )
        self.look_ahead = LookAhead(self.learner, self.watch)

    def adopt_candidate(self) -> None:
        """Switch to the settings of the current candidate in `progress.race`, and start with initial weights."""
        race, candidates = self.progress.race, list_candidates(self.requested)
        self.identity.earlier_rounds = self.progress.earlier_rounds
        if len(candidates) > 1:  # `race` is None before the race; a resumed run can return to that point
            self.begin(candidates[0 if race is None else race.candidate], self.data)

    def release_tensor(self, kind: TensorKind, value: Tensor, key: Key, nodes: NodeSet | None) -> Sent:
        """Release a tensor. In a race, replace values that are too large or not finite, and mark the divergence."""
        if self.progress.is_racing and not bool((value.detach().abs() < LARGEST_SENT).all()):  # NaN is not less
            self.progress.mark_divergence()
            value = torch.full_like(value, 1 / value.shape[1] if kind.is_score else 0.0)
        return self.release.tensor(kind, value, key, nodes)

    def restrict_clients(self, present: Sequence[str]) -> None:
        """Restrict the clients of a prediction to these parties, in this order."""
        self.identity = dataclasses.replace(self.identity, names=tuple(present), index=present.index(self.name))
        self.learner.aggregation = self.learner.aggregation.with_clients(len(present))

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Use the weights of a trained model; raise RuntimeError if names or shapes differ."""
        if self.stages is not None:
            weights = self.progress.lower = self.stages.separate_weights(weights)
        self.learner.model.load_state_dict(dict(weights))

    def state(self) -> ClientState:
        """Return a copy of the state for a checkpoint. Later steps do not change the copy."""
        return ClientState(
            config_digest=self.requested.digest(),
            incarnation=self.identity.incarnation,
            weights=self.learner.weights(),
            optimizer=self.learner.optimizer.state(),
            progress=dataclasses.replace(self.progress),
            references=dict(self.release.references),
            ranges=dict(self.release.sums.grids.ranges),
            clamped=self.release.sums.grids.clamped,
            history=self.release.sums.history,
        )

    def restore(self, state: ClientState) -> None:
        """Continue from a saved state."""
        if state.config_digest != self.requested.digest():
            raise ConfigError("the saved state belongs to a run with other settings; start over.")
        self.progress = dataclasses.replace(state.progress)
        self.look_ahead.clear()  # the next round of an interrupted attempt
        self.adopt_candidate()
        if self.stages is not None:
            self.begin(self.stages.lower, self.stages.data)
            self.stages.restart(state if self.progress.lower else None)
        if not self.progress.lower:  # the weights of an upper stage are restored after the aggregate is exchanged again
            self.learner.restore(state.weights, state.optimizer)
        self.identity.incarnation = state.incarnation
        self.release.references, self.release.sums.history = dict(state.references), state.history
        self.release.sums.grids.ranges, self.release.sums.grids.clamped = dict(state.ranges), state.clamped
