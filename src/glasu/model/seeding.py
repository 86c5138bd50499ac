"""Seed torch's global generator. Layers of torch and of other libraries draw from it."""

from __future__ import annotations

import numpy as np
import torch

from glasu.randomness import Stream
from glasu.secret import Secret

# The state of torch's CPU generator (MT19937) in 64-bit words: three for bookkeeping, then 624 with 32 bits each.
_WORDS = slice(3, 3 + 624)


def seed_torch_generator(stream: Stream) -> None:
    """Seed torch's generator with a stream.

    `manual_seed` uses only 32 bits of its seed, so an attacker who reads one message could try all seeds. Therefore a
    stream with a secret seed sets all words of the state. A public stream does not need this.
    """
    generator = torch.default_generator
    generator.manual_seed(stream.torch_seed())
    if isinstance(stream.seed, Secret):
        state = generator.get_state()
        words = state.view(torch.int64)
        words[_WORDS] = torch.from_numpy(stream.numpy().integers(0, 2**32, 624, np.int64))
        generator.set_state(state)
