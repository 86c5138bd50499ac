"""Facts about draws of neighbours that only tests need."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from glasu.model.blocks import Draw


def list_target_positions(draw: Draw) -> NDArray[np.int64]:
    """Return the position in S[l+1] of the target of each drawn edge."""
    return np.repeat(np.arange(len(draw.starts) - 1), np.diff(draw.starts))
