"""Small facts that a role must not forget when its process dies: JSON in one file, replaced as a whole."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from glasu.errors import DataError
from glasu.files import write_atomically


class Durable:
    """A few values that outlive the process; every change is on disk before it counts."""

    def __init__(self, path: Path, defaults: Mapping[str, Any]) -> None:
        self._path, self._defaults, self._written = path, dict(defaults), True
        try:
            self._values = {**defaults, **json.loads(path.read_bytes())}
        except FileNotFoundError:
            self._values = dict(defaults)
        except (OSError, ValueError) as error:
            raise DataError(
                f"{path}: cannot be read ({error}); restore it, or train anew: another --out here, --fresh elsewhere."
            ) from None

    def __getitem__(self, name: str) -> Any:
        return self._values[name]

    def update(self, **values: Any) -> None:
        """Change some values, durably."""
        changed = {**self._values, **values}
        if self._written:
            write_atomically(self._path, json.dumps(changed, indent=1).encode(), mode=0o600)
        self._values = changed

    def start_over(self) -> None:
        """Begin anew, in memory only: the file stays what it is until `settle`."""
        self._values, self._written = dict(self._defaults), False

    def settle(self) -> bool:
        """Make what was begun anew durable; return False where nothing was."""
        if self._written:
            return False
        self._written = True
        self.update()
        return True
