"""Predictions as a table for users: id, prediction, and p_<class> for each class."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from glasu.data.tables import write_table
from glasu.files import put_in_place
from glasu.model.task import Task


def write_predictions(
    path: Path, ids: NDArray[Any], probabilities: NDArray[Any], classes: Sequence[str], task: Task
) -> None:
    """Write one row per id to a .parquet or .csv file, atomically and readable for its owner only."""
    columns = {"id": ids.tolist(), **task.columns(probabilities, classes)}
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".predictions-") as temporary:
        write_table(columns, Path(temporary) / path.name)
        put_in_place(Path(temporary) / path.name, path, 0o600)
