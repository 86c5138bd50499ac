"""What a forked command needs in memory: modules, and the registries of numba, which it fills at the first call.

Not grpc: it starts threads, and a fork does not copy them.
"""

from __future__ import annotations

import importlib

import numpy as np

from glasu.model.kernels.loops import draw_numbers

MODULES = (
    "glasu.cli.progress",
    "glasu.data.folders",
    "glasu.data.sources.catalog",
    "glasu.pki.kit",
    "glasu.runtime.simulation",
    "glasu.runtime.trained_model",
    "pyarrow.dataset",
    "scipy.linalg",
    "torch.fx.experimental.symbolic_shapes",
)

for _name in MODULES:
    importlib.import_module(_name)
draw_numbers(np.uint64(1), np.uint64(2), 10, np.zeros(2, np.int64))
