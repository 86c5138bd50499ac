"""Write predictions as a table: the ids, then the columns of the task."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from glasu.config import TrainConfig
from glasu.data.tables import write_table
from glasu.files import put_in_place
from glasu.model.task import task_of


def write_predictions(
    path: Path, ids: NDArray[Any], scores: NDArray[Any], classes: Sequence[str], train: TrainConfig
) -> None:
    """Write one row per id to a .parquet or .csv file, atomically and readable for its owner only."""
    columns = {"id": ids.tolist(), **task_of(train).columns(scores, classes)}
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".predictions-") as temporary:
        write_table(columns, Path(temporary) / path.name)
        put_in_place(Path(temporary) / path.name, path, 0o600)
