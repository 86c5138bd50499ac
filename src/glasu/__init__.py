"""Train one graph neural network across organisations that share nodes but neither features nor edges.

The public names and the modules that define them are listed in __init__.pyi. They are loaded on first use, so
that `import glasu` and `glasu --help` do not wait for torch.
"""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

__version__ = "0.2.0"

_MODULES = {  # public name -> the module that defines it
    name: module
    for module, name in re.findall(
        r"^from (\S+) import (\w+)", Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8"), re.MULTILINE
    )
}
__all__ = sorted(_MODULES)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'glasu' has no attribute {name!r}")
    value = getattr(importlib.import_module(_MODULES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
