"""Predictions as a table for users: id, prediction, and p_<class> for each class."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from glasu.data.tables import write_table
from glasu.files import put_in_place


def write_predictions(
    path: Path, ids: NDArray[Any], probabilities: NDArray[Any], classes: Sequence[str], task: str
) -> None:
    """Write one row per id to a .parquet or .csv file, atomically and readable for its owner only."""
    if task == "multilabel":
        predicted = [
            " ".join(name for name, yes in zip(classes, row > 0.5, strict=True) if yes) for row in probabilities
        ]
    else:
        predicted = [classes[index] for index in probabilities.argmax(axis=1)]
    columns: dict[str, Any] = {"id": ids.tolist(), "prediction": predicted}
    columns |= {f"p_{name}": probabilities[:, index] for index, name in enumerate(classes)}
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".predictions-") as temporary:
        write_table(columns, Path(temporary) / path.name)
        put_in_place(Path(temporary) / path.name, path, 0o600)
