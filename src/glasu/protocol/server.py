"""The server: its settings, its progress, and the counts that it knows. It holds no parameters and no data.

Neither this module nor the modules that it imports need torch or PyG.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

from glasu.config import RunConfig, list_candidates
from glasu.errors import ConfigError, GlasuError, ProtocolError
from glasu.model.aggregation import Aggregation, make_aggregation
from glasu.model.sampler import find_sampler
from glasu.model.task import make_task
from glasu.protocol.fields import Shapes
from glasu.protocol.messages import Message
from glasu.protocol.state import Identity, Progress, ServerState
from glasu.wire.message_key import SERVER, Key


@dataclass(frozen=True)
class Sizes:
    """Counts of nodes and examples that the server needs."""

    num_nodes: int
    num_validation: int  # examples of one evaluation
    num_test: int


class Server:
    """The server in training, in a prediction or in a dry run."""

    def __init__(self, config: RunConfig, roster: Sequence[str], sizes: Sizes, run: bytes) -> None:
        """Start at round 0.

        Args:
            config: the run's settings, resolved. If `train.preset` lists several candidates, the run chooses one.
            roster: the names of the parties in client order.
            sizes: the counts of nodes and examples.
            run: the id of the run.
        """
        self.roster, self.sizes = tuple(roster), sizes
        self.requested = config
        self.config = list_candidates(config)[0]  # the settings of the current candidate
        self.identity = Identity(self.roster, config.train.label_owner, SERVER, run)
        self.aggregation = make_aggregation(config.model, len(roster))
        self.sampler = find_sampler(config.train)
        self.task = make_task(config.train)
        # The number of classes is not used here (0: unknown). The server checks that the shapes of all parties' scores
        # are equal, and their values if they are not hidden.
        self.shapes = Shapes.of_run(config, sizes.num_nodes, 0, len(roster))
        self.progress = Progress()

    @property
    def aggregation_layers(self) -> tuple[int, ...]:
        """The aggregation layers I of the current candidate."""
        return self.config.model.aggregation_layers

    def adopt_candidate(self) -> None:
        """Use the settings of the current candidate in `progress.race`."""
        race = self.progress.race
        self.identity.earlier_rounds = self.progress.earlier_rounds
        self.config = list_candidates(self.requested)[0 if race is None else race.candidate]

    def make_aggregation(self, present: Sequence[int] | None) -> Aggregation:
        """Return the aggregation over some clients; None: over all."""
        return self.aggregation if present is None else self.aggregation.with_clients(len(present))

    def make_client_keys(self, key: Key) -> list[Key]:
        """Return one key per client, in client order, for messages that differ between clients."""
        return [key.to_client(client) for client in range(len(self.roster))]

    def refuse(self, message: Message, why: str, error: type[GlasuError] = ProtocolError) -> NoReturn:
        """Raise an error that names the sender of a message."""
        party = self.roster[message.key.client]
        raise error(f"party {party!r}, {message.key}: {why}", party=party)

    def state(self) -> ServerState:
        """Return the state for a checkpoint."""
        return ServerState(self.requested.digest(), self.identity.run, self.roster, dataclasses.replace(self.progress))

    def restore(self, state: ServerState) -> None:
        """Continue from a saved state."""
        own = self.requested.digest(), self.identity.run, self.roster
        if (state.config_digest, state.run, state.roster) != own:
            raise ConfigError("the saved state belongs to a run with other settings or parties; start over.")
        self.progress = dataclasses.replace(state.progress)
        self.adopt_candidate()
