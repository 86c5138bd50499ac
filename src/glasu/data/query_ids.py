"""The nodes of a prediction: a table of ids -> positions among the nodes of a party."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from glasu.data.folders import read_manifest
from glasu.data.party import PartyData
from glasu.data.tables import FORMATS, read_table
from glasu.errors import DataError


def find_query_nodes(path: Path, folder: Path, party: PartyData) -> NDArray[np.int64]:
    """Return the position of each id of a table. Its id column has the name of the party's id column, or `id`.

    Args:
        path: a .parquet or .csv file.
        folder: of the party; its party.toml names the id column.
        party: the data of the party.
    """
    if path.suffix.removeprefix(".") not in FORMATS:
        raise DataError(f"{path}: the file of ids must end in .{' or .'.join(FORMATS)}.")
    if not path.is_file():
        raise DataError(f"{path}: does not exist; --predict takes a table with the ids to predict.")
    table, own = read_table(path), read_manifest(folder).id
    name = own if own in table.columns else "id"
    if name not in table.columns:
        expected = " or ".join(repr(known) for known in dict.fromkeys((own, "id")))
        raise DataError(f"{path}: has no column {expected}; {table.names()}. Rename the id column.")
    if table.num_rows == 0:
        raise DataError(f"{path}: has no rows; list at least one id, or use --predict without a file.")
    kind = "integer" if party.ids.dtype.kind == "i" else "string"
    wanted = np.asarray(table.ids(name, kind, "the ids of this party are").to_pylist())
    order = np.argsort(party.ids, kind="stable")
    places = np.minimum(np.searchsorted(party.ids[order], wanted), party.num_nodes - 1)
    positions: NDArray[np.int64] = order[places]
    unknown = party.ids[positions] != wanted
    if unknown.any():
        raise table.explain(name, unknown, "is not the id of a node of this party.")
    return positions
