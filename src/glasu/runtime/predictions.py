"""Class probabilities as a table that a user reads: id, prediction, and p_<class> for each class."""

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
    """Write a .parquet or .csv file, whole or not at all, for its owner's eyes only; one row per id."""
    if task == "multilabel":
        said = [" ".join(name for name, yes in zip(classes, row > 0.5, strict=True) if yes) for row in probabilities]
    else:
        said = [classes[index] for index in probabilities.argmax(axis=1)]
    columns: dict[str, Any] = {"id": ids.tolist(), "prediction": said}
    columns |= {f"p_{name}": probabilities[:, index] for index, name in enumerate(classes)}
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".predictions-") as temporary:
        write_table(columns, Path(temporary) / path.name)
        put_in_place(Path(temporary) / path.name, path, 0o600)
