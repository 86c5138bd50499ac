"""Backbones of PyG convolutions, registered for tests."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any

from glasu import registry
from glasu.model.backbones import ConvolutionBackbone

_numbers = count()


def register_convolution(make: Callable[[int, int], Any]) -> str:
    """Register a backbone whose layers are `make(width in, width out)`; return its name, which is new."""
    name = f"convolution-{next(_numbers)}"
    own = {"convolution": lambda self, width_in, width_out: make(width_in, width_out)}
    registry.register("backbone", name, type("Own", (ConvolutionBackbone,), own))
    return name
