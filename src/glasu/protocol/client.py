"""A client: the data, model, gate and progress of one party in a run. The scripts of this package drive it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from glasu.config import RunConfig, list_candidates
from glasu.data.methods import method_of
from glasu.data.party import PartyData
from glasu.data.preprocessing import Preparation
from glasu.errors import ConfigError, ProtocolError
from glasu.model.layers import Convolution
from glasu.privacy.column_grids import ColumnGrids
from glasu.privacy.masking import PairwiseMasks, Signer
from glasu.privacy.release import Release, Sent
from glasu.protocol.learner import Learner, NodeData
from glasu.protocol.state import ClientProgress, ClientState, Identity
from glasu.secret import Secret
from glasu.timing import Stopwatch
from glasu.wire.encodings import Array, Kind, Ring, encodings_of, use_for_all_kinds
from glasu.wire.message_key import RUN_BYTES, Key

LARGEST_SENT = 1e30  # in a race; a sum of such values over all clients is finite in every encoding


class Client:
    """One party in a training."""

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
        signer: Signer | None = None,
    ) -> None:
        """Build the client's model and optimiser.

        Args:
            config: the run's settings, resolved. The preset may leave several candidates.
            party: the data that this client owns.
            index: m.
            names: all parties in client order.
            watch: adds up the client's seconds.
            convolution: builds the layers of backbone "custom".
            preparation: of the features, from a model trained earlier; None: as the config says.
            secret: of the party; its first weights, dropout masks, neighbours and rounding derive from it. None: from
                `train.seed`, which is public.
            signer: signs the keys of masks; None in one process.
        """
        seed = config.train.seed
        self.private_seed: int | Secret = seed if secret is None else secret.derive("training", seed)
        self.party, self.name, self.watch = party, party.name, watch
        self.requested, self.candidates = config, list_candidates(config)
        self.config = self.candidates[0]  # of the present candidate
        self.method = method_of(config)
        run = bytes.fromhex(config.digest())[:RUN_BYTES]  # a runtime with a server replaces it
        self.identity = Identity(tuple(names), config.train.labels, index, run)
        self.has_labels = self.identity.has_labels(index)
        self.data = NodeData(self.config, party, has_labels=self.has_labels, preparation=preparation)
        self._convolution = convolution
        self.signer = signer
        self.masks: PairwiseMasks | None = None  # of the present attempt
        self.run_key: Secret | None = None  # equal at all clients and unknown to the server; None without masks
        self.learner = self._make_learner()
        grids = ColumnGrids(config.privacy.range, self.private_seed)
        self.release = Release(encodings_of(config, self.private_seed), feedback=config.wire.feedback, grids=grids)
        self.progress = ClientProgress()

    def _make_learner(self) -> Learner:
        """Build the layers of the present candidate with their first weights."""
        return Learner(
            self.config,
            self.data,
            index=self.identity.index,
            num_clients=self.identity.num_clients,
            num_outputs=self.data.task.head_width(self.party.classes) if self.has_labels else None,
            convolution=self._convolution,
            private_seed=self.private_seed,
            classifier_seed=self.run_key if self.config.train.warm_start else None,
        )

    def adopt_run_key(self, key: Secret) -> None:
        """Take the run key; refuse another one than before."""
        if self.run_key not in (None, key):
            raise ProtocolError(f"party {self.name!r}: the run key has changed; did the first party lose its secret?")
        self.run_key = key

    def draw_common_classifier(self) -> None:
        """Derive the classifier of a warm start from the run key, if no step was taken yet."""
        progress = self.progress
        if self.config.train.warm_start and not (progress.position or progress.warm_steps):
            self.learner = self._make_learner()

    def mask_with(self, masks: PairwiseMasks) -> None:
        """Mask the tensors of all later releases."""
        self.masks = masks
        for kind in use_for_all_kinds(None):
            protection = dataclasses.replace(self.release.protection(kind), masking=masks)
            self.release.protections = {**self.release.protections, kind: protection}

    def find_blind(self, kind: Kind, key: Key, shape: tuple[int, int | None]) -> Array | None:
        """Return the stream that hides a sum from the server, before its answer arrives; None if there is none."""
        encoding, (rows, columns) = self.release.encodings[kind], shape
        if self.masks is None or not encoding.is_hidden or columns is None:
            return None
        return self.masks.find_blind(key, (rows, columns), encoding.dtype)

    def follow_gradient(self, key: Key, gradient: Tensor) -> None:
        """Let the grids of lower layers follow the label owner's gradient, which all clients hold."""
        ring = self.release.encodings["gradient"]
        if isinstance(ring, Ring):
            self.release.grids.follow("gradient", key, gradient.numpy(), ring, 1)

    def require_masks(self) -> PairwiseMasks:
        """Return the masks of this attempt."""
        assert self.masks is not None
        return self.masks

    def adopt_candidate(self) -> None:
        """Use the settings of the candidate that the progress names, with their first weights."""
        race = self.progress.race
        self.identity.earlier_rounds = self.progress.earlier_rounds
        if len(self.candidates) > 1:  # also without a race: a new attempt may start before it
            self.config = self.candidates[0 if race is None else race.candidate]
            self.learner = self._make_learner()

    @property
    def is_alone(self) -> bool:
        """Whether no layer aggregates: then this client selects its model and records its losses."""
        return not self.config.model.aggregation_layers

    def note_divergence(self) -> bool:
        """Note that the training diverged; return whether the run continues, because a race decides.

        A candidate that diverges loses the race. Until the next evaluation says so to all roles, this client sends
        harmless values, so that the others need not wait for it.
        """
        self.progress.diverged = self.progress.is_racing
        return self.progress.diverged

    def release_tensor(self, kind: Kind, value: Tensor, key: Key) -> Sent:
        """Release a tensor. In a race, one that no other role can use is replaced, and the candidate has diverged."""
        if self.progress.is_racing and not bool((value.detach().abs() < LARGEST_SENT).all()):  # NaN is not less
            self.note_divergence()
            value = torch.full_like(value, 1 / value.shape[1] if kind == "probabilities" else 0.0)
        return self.release.tensor(kind, value, key)

    def place_among(self, present: Sequence[str]) -> None:
        """Predict with these parties only: they are the clients from now on, in this order."""
        self.identity = dataclasses.replace(self.identity, names=tuple(present), index=present.index(self.name))
        self.learner.aggregation = self.learner.aggregation.among(len(present))

    def state(self) -> ClientState:
        """Return the state for a checkpoint. It does not change any more."""
        return ClientState(
            config_digest=self.requested.digest(),
            incarnation=self.identity.incarnation,
            weights=self.learner.weights(),
            optimizer=self.learner.optimizer.state(),
            progress=dataclasses.replace(self.progress),
            references=dict(self.release.references),
            ranges=self.release.grids.copy_ranges(),
            clamped=self.release.grids.clamped,
        )

    def restore(self, state: ClientState) -> None:
        """Continue from a saved state."""
        if state.config_digest != self.requested.digest():
            raise ConfigError("the saved state belongs to a run with other settings; start over.")
        self.progress = dataclasses.replace(state.progress)
        self.adopt_candidate()
        self.learner.restore(state.weights, state.optimizer)
        self.identity.incarnation = state.incarnation
        self.release.references = dict(state.references)
        self.release.grids.ranges, self.release.grids.clamped = dict(state.ranges), state.clamped
