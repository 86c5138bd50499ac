"""Both paths of the kernels: what is promised of one holds for the other."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from glasu.compiling import COMPILES
from glasu.model import kernels
from glasu.model.kernels import arrays


@pytest.fixture(scope="module", params=["loops", "arrays"])
def kernel_path(request: pytest.FixtureRequest) -> Iterator[str]:
    """Have the model compute with one of the two paths."""
    if request.param == "loops" and not COMPILES:
        pytest.skip("numba is absent")
    if request.param == "loops":
        yield "loops"
        return
    with pytest.MonkeyPatch.context() as patch:
        for name in kernels.__all__:
            patch.setattr(kernels, name, getattr(arrays, name))
        yield "arrays"
