"""A client: the data, model, gate and progress of one party in a run. The scripts of this package drive it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from glasu.config import RunConfig, list_candidates
from glasu.data.methods import find_method, has_server
from glasu.data.party import PartyData
from glasu.data.preprocessing import Preparation
from glasu.errors import ConfigError, ProtocolError
from glasu.model.blocks import NodeSet
from glasu.model.layers import Convolution
from glasu.model.split import find_input_scale
from glasu.privacy.column_grids import ColumnGrids
from glasu.privacy.encryption import load_tenseal
from glasu.privacy.labels import randomize_training_labels
from glasu.privacy.ledger import Ledger
from glasu.privacy.masking import Hiding, Reveal, Signer
from glasu.privacy.noise import derive_noise_key
from glasu.privacy.release import Release, Sent
from glasu.protocol.learner import Learner, NodeData
from glasu.protocol.protection import list_rules, make_protections
from glasu.protocol.stages import LOWER, SCALES, UPPER, list_stages
from glasu.protocol.state import ClientProgress, ClientState, Identity
from glasu.secret import Secret
from glasu.timing import Stopwatch
from glasu.wire.encodings import Kind, Ring, make_encodings, use_for_all_kinds
from glasu.wire.message_key import RUN_BYTES, Key

LARGEST_SENT = 1e30  # limit on values in a race; their sum over all clients is finite in every encoding


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
            preparation: the preparation of the features of a model trained earlier; None: as the config says.
            secret: the secret of the party. Initial weights, dropout masks, neighbours and rounding are derived from
                it; None: from `train.seed`, which is public.
            signer: signs the keys of this party; None in one process.
        """
        if config.privacy.secure_aggregation == "ckks" and has_server(config):
            load_tenseal()  # otherwise a run without the package would stop at its first message
        seed = config.train.seed
        self.private_seed: int | Secret = seed if secret is None else secret.derive("training", seed)
        self.party, self.name, self.watch = party, party.name, watch
        self.requested, self.candidates = config, list_candidates(config)
        self.config = self.candidates[0]  # the settings of the current candidate or stage
        self.stages = list_stages(self.config)  # None unless `train.release = "once"`
        self.method = find_method(config)
        run = bytes.fromhex(config.digest())[:RUN_BYTES]  # over the network, the server's run id replaces it
        self.identity = Identity(tuple(names), config.train.labels, index, run)
        self.has_labels = self.identity.has_labels(index)
        if config.privacy.label_epsilon is not None and self.has_labels:
            key = derive_noise_key(None if secret is None else secret.derive("labels"), seed)
            party = randomize_training_labels(party, config.privacy.label_epsilon, key)
        lower = self.config if self.stages is None else self.stages.lower
        # The data that the layers and the loss read. `self.party` has the labels before randomised response.
        self._lower_data = NodeData(lower, party, has_labels=self.has_labels, preparation=preparation)
        self._convolution = convolution
        self.signer = signer
        self.hiding: Hiding | None = None  # masks or encryption of the current attempt
        self.run_key: Secret | None = None  # equal at all clients and unknown to the server; None in plain runs
        self._enter_lower()
        rules = list_rules(config.privacy)
        self.release = Release(
            make_encodings(config, self.private_seed),
            make_protections(config.privacy, self.data.task, derive_noise_key(secret, seed)),
            Ledger(rules=rules),
            rules,
            feedback=config.wire.feedback,
            grids=ColumnGrids(config.privacy.range, self.private_seed),
        )
        self.progress = ClientProgress()
        self._interrupted: ClientState | None = None  # the state of an upper stage that was interrupted
        self._upper_weights: dict[str, Tensor] = {}  # the upper weights of a trained model
        self._scales: Tensor | None = None  # factors of the columns that the upper stage reads

    def _make_learner(self) -> Learner:
        """Build the layers of the current candidate with their initial weights."""
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

    def _enter_lower(self) -> None:
        """Switch to the first stage, or to the only one."""
        self.data = self._lower_data
        if self.stages is not None:
            self.config = self.stages.lower
        self.learner = self._make_learner()
        if self.stages is not None and self.learner.aggregation.is_mean:
            self.learner.fixed = self.learner.classifier_weights()

    def return_to_lower(self) -> None:
        """Use the selected weights of the lower stage."""
        self._enter_lower()
        self.learner.model.load_state_dict(self.progress.lower)

    def enter_upper(self, own: Tensor, others: Tensor) -> None:
        """Switch to the layers above the release, or continue their interrupted training.

        Args:
            own: H_m^+[l] at all nodes, without noise.
            others: H_{-m}[l+1] at all nodes. Own and others' columns together replace the features.
        """
        assert self.stages is not None
        self.config, known = self.stages.upper, {**self._upper_weights}
        self._scales = known.pop(SCALES, None)
        if self._scales is None:  # one factor each, so that strong noise in `others` does not dominate `own`
            lengths = [float(torch.linalg.vector_norm(part.double(), dim=1).mean()) for part in (own, others)]
            self._scales = torch.tensor([find_input_scale(self.config.model, each) for each in lengths]).double()
        rows = torch.cat([part * float(scale) for part, scale in zip((own, others), self._scales, strict=True)], dim=1)
        party = dataclasses.replace(self._lower_data.party, features=rows.numpy(), feature_names=(), checked=None)
        preparation = Preparation(rows.shape[1], 1.0)
        self.data = NodeData(self.config, party, has_labels=self.has_labels, preparation=preparation)
        self.learner = self._make_learner()
        if known:
            self.learner.model.load_state_dict(known)
        if self._interrupted is not None:
            self.learner.restore(self._interrupted.weights, self._interrupted.optimizer)
            self._interrupted = None

    def leave_stages(self) -> None:
        """Combine the weights of both stages into the selected model at the end of the run."""
        assert self.stages is not None
        assert self._scales is not None
        parts = {LOWER: self.progress.lower, UPPER: self.progress.best_weights}
        joined = {prefix + name: value for prefix, own in parts.items() for name, value in own.items()}
        self.progress.best_weights = {**joined, SCALES: self._scales}
        self.config, self.data = self.stages.whole, self._lower_data

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Use the weights of a trained model; raise RuntimeError if names or shapes differ."""
        if self.stages is None:
            self.learner.model.load_state_dict(dict(weights))
            return
        lower, upper = (
            {name.removeprefix(prefix): value for name, value in weights.items() if name.startswith(prefix)}
            for prefix in (LOWER, UPPER)
        )
        if not upper or SCALES not in weights:
            raise RuntimeError("the weights belong to another kind of model")
        self.learner.model.load_state_dict(lower)
        self.progress.lower, self._upper_weights = lower, {**upper, SCALES: weights[SCALES]}

    def adopt_run_key(self, key: Secret) -> None:
        """Store the run key; refuse a different one."""
        if self.run_key not in (None, key):
            raise ProtocolError(f"party {self.name!r}: the run key has changed; did the first party lose its secret?")
        self.run_key = key

    def draw_common_classifier(self) -> None:
        """Derive the classifier of a warm start from the run key, unless a step has been taken."""
        progress = self.progress
        if self.config.train.warm_start and not (progress.position or progress.warm_steps):
            self.learner = self._make_learner()

    def hide_with(self, hiding: Hiding) -> None:
        """Mask or encrypt the tensors of all later releases."""
        self.hiding = hiding
        for kind in use_for_all_kinds(None):
            protection = dataclasses.replace(self.release.find_protection(kind), masking=hiding)
            self.release.protections = {**self.release.protections, kind: protection}

    def prepare_reading(self, kind: Kind, key: Key, shape: tuple[int, int | None]) -> Reveal:
        """Return the function that reads the payload of an answer, before the answer arrives."""
        encoding = self.release.encodings[kind]
        if self.hiding is None or not isinstance(encoding, Ring):
            return lambda payload, requested: payload
        return self.hiding.prepare_reading(key, shape, encoding)

    def update_ranges(self, key: Key, gradient: Tensor) -> None:
        """Derive the ranges of lower layers from the label owner's gradient, which all clients hold."""
        ring = self.release.encodings["gradient"]
        if isinstance(ring, Ring):
            self.release.grids.update_range("gradient", key, gradient.numpy(), ring, 1)

    def require_hiding(self) -> Hiding:
        """Return what hides tensors in this attempt."""
        assert self.hiding is not None
        return self.hiding

    def adopt_candidate(self) -> None:
        """Use the settings of the candidate that the progress names, with their initial weights."""
        race = self.progress.race
        self.identity.earlier_rounds = self.progress.earlier_rounds
        if len(self.candidates) > 1:  # even before the race: a new attempt may start there
            self.config = self.candidates[0 if race is None else race.candidate]
            self.learner = self._make_learner()

    @property
    def is_alone(self) -> bool:
        """Whether rounds send no message. Then this client selects its model and records its losses itself."""
        return not self.config.model.aggregation_layers

    def mark_divergence(self) -> bool:
        """Mark the training as diverged; return whether the run continues, which is the case in a race.

        A candidate that diverges loses the race. All roles learn this in the next evaluation. Until then this client
        sends finite placeholder values, so that the others need not wait for it.
        """
        self.progress.diverged = self.progress.is_racing
        return self.progress.diverged

    def release_tensor(self, kind: Kind, value: Tensor, key: Key, nodes: NodeSet) -> Sent:
        """Release a tensor. In a race, replace values that are too large or not finite, and mark the divergence."""
        if self.progress.is_racing and not bool((value.detach().abs() < LARGEST_SENT).all()):  # NaN is not less
            self.mark_divergence()
            value = torch.full_like(value, 1 / value.shape[1] if kind == "probabilities" else 0.0)
        return self.release.tensor(kind, value, key, nodes)

    def restrict_clients(self, present: Sequence[str]) -> None:
        """Restrict the clients of a prediction to these parties, in this order."""
        self.identity = dataclasses.replace(self.identity, names=tuple(present), index=present.index(self.name))
        self.learner.aggregation = self.learner.aggregation.among(len(present))

    def state(self) -> ClientState:
        """Return the state for a checkpoint, a copy that later steps do not change."""
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
        if self.stages is not None:
            self._enter_lower()
        self._interrupted = state if self.progress.lower else None
        if self._interrupted is None:  # otherwise the aggregate, which the upper layers read, must be exchanged first
            self.learner.restore(state.weights, state.optimizer)
        self.identity.incarnation = state.incarnation
        self.release.references = dict(state.references)
        self.release.grids.ranges, self.release.grids.clamped = dict(state.ranges), state.clamped
