"""Look-ahead: a client gathers the batch of the next round while it waits for an answer."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from glasu.model.sampler import Sample
    from glasu.protocol.learner import Batch, Learner
    from glasu.timing import Stopwatch


class LookAhead:
    """Gathers every batch once: at the start of its round, or earlier, while the client waits.

    Blocks and features of the next round do not depend on the answers of this round.
    """

    def __init__(self, learner: Learner, watch: Stopwatch) -> None:
        self.learner, self.watch = learner, watch
        self._following: Sample | None = None
        self._batch: Batch | None = None  # the batch of `_following`, after it was gathered

    def take(self, sample: Sample, following: Sample | None) -> Batch:
        """Return the batch of this round.

        Args:
            sample: the sample of this round.
            following: the sample of the next round, if it is known.
        """
        batch = self._batch if self._following is sample else None
        self._following, self._batch = following, None
        return self._gather(sample) if batch is None else batch

    def gather_next(self) -> None:
        """Gather the batch of the next round, if its sample is known and the batch was not gathered before."""
        if self._following is not None and self._batch is None:
            self._batch = self._gather(self._following)

    def clear(self) -> None:
        """Forget the next round, because training stops or starts again from a saved state."""
        self._following = self._batch = None

    def _gather(self, sample: Sample) -> Batch:
        with self.watch.measure("sampling"):
            return self.learner.gather(sample)
