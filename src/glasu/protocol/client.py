"""A client: the data, model, gate and progress of one party in a run. The scripts of this package drive it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from glasu.config import RunConfig, list_candidates
from glasu.data.methods import method_of
from glasu.data.party import PartyData
from glasu.data.preprocessing import Preparation
from glasu.errors import ConfigError
from glasu.model.layers import Convolution
from glasu.privacy.release import Release
from glasu.protocol.learner import Learner, NodeData
from glasu.protocol.state import ClientProgress, ClientState, Identity
from glasu.secret import Secret
from glasu.timing import Stopwatch
from glasu.wire.encodings import encodings_of
from glasu.wire.message_key import RUN_BYTES


class Client:
    """One party of a run: its data, model, gate and progress."""

    def __init__(
        self,
        config: RunConfig,
        party: PartyData,
        *,
        index: int,
        names: Sequence[str],
        watch: Stopwatch,
        convolution: Convolution | None = None,
        preparation: Preparation | None = None,
        secret: Secret | None = None,
    ) -> None:
        """Build the client's model and optimiser.

        Args:
            config: the run's settings, resolved. The preset may leave several candidates.
            party: the data that this client owns.
            index: m.
            names: all parties in client order.
            watch: adds up the client's seconds.
            convolution: builds the layers of backbone "custom".
            preparation: the preparation of the features, from a model trained earlier; None: fit it as the config says.
            secret: the party's secret. Its first weights, dropout masks, neighbours and rounding derive from it. None:
                they derive from `train.seed`, which is public.
        """
        seed = config.train.seed
        self.private_seed: int | Secret = seed if secret is None else secret.derive("training", seed)
        self.party, self.name, self.watch = party, party.name, watch
        self.requested, self.candidates = config, list_candidates(config)
        self.config = self.candidates[0]  # the settings of the current candidate
        self.method = method_of(config)
        run = bytes.fromhex(config.digest())[:RUN_BYTES]  # over the network, the server's run id replaces it
        self.identity = Identity(tuple(names), config.train.labels, index, run)
        self.has_labels = self.identity.has_labels(index)
        self.data = NodeData(self.config, party, has_labels=self.has_labels, preparation=preparation)
        self._convolution = convolution
        self.learner = self._make_learner()
        self.release = Release(encodings_of(config, self.private_seed), feedback=config.wire.feedback)
        self.progress = ClientProgress()

    def _make_learner(self) -> Learner:
        """Build the layers of the current candidate with their first weights."""
        return Learner(
            self.config,
            self.data,
            index=self.identity.index,
            num_clients=self.identity.num_clients,
            num_outputs=self.data.task.head_width(self.party.classes) if self.has_labels else None,
            convolution=self._convolution,
            private_seed=self.private_seed,
        )

    def adopt_candidate(self) -> None:
        """Use the settings of the candidate that the progress names, with their first weights."""
        race = self.progress.race
        self.identity.base = self.progress.base
        if len(self.candidates) > 1:  # even if no race has begun: a new attempt may start before it
            self.config = self.candidates[0 if race is None else race.candidate]
            self.learner = self._make_learner()

    @property
    def is_alone(self) -> bool:
        """Whether no layer aggregates. This client then selects its model and records its losses itself."""
        return not self.config.model.aggregation_layers

    def place_among(self, present: Sequence[str]) -> None:
        """Predict with these parties only. From now on they are the clients, in this order."""
        self.identity = dataclasses.replace(self.identity, names=tuple(present), index=present.index(self.name))
        self.learner.aggregation = self.learner.aggregation.among(len(present))

    def state(self) -> ClientState:
        """Return the state for a checkpoint, a copy that later steps do not change."""
        return ClientState(
            config_digest=self.requested.digest(),
            incarnation=self.identity.incarnation,
            weights=self.learner.weights(),
            optimizer=self.learner.optimizer.state(),
            ledger=self.release.ledger.copy(),
            progress=dataclasses.replace(self.progress),
            references=dict(self.release.references),
        )

    def restore(self, state: ClientState) -> None:
        """Continue from a saved state."""
        if state.config_digest != self.requested.digest():
            raise ConfigError("the saved state belongs to a run with other settings; start over.")
        self.progress = dataclasses.replace(state.progress)
        self.adopt_candidate()
        self.learner.restore(state.weights, state.optimizer)
        self.identity.incarnation = state.incarnation
        self.release.ledger = state.ledger.copy()
        self.release.references = dict(state.references)
