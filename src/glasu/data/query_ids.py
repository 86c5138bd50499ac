"""The nodes that a user asks for: a table of ids -> positions among a party's nodes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from glasu.data.folders import read_manifest
from glasu.data.party import PartyData
from glasu.data.tables import FORMATS, read_table
from glasu.errors import DataError


def asked_nodes(path: Path, folder: Path, party: PartyData) -> NDArray[np.int64]:
    """Return where the ids of a table stand, row by row; its column has the name of the party's ids, or `id`.

    Args:
        path: a .parquet or .csv file.
        folder: the party's, whose party.toml names the column of its ids.
        party: its data.
    """
    if path.suffix.removeprefix(".") not in FORMATS:
        raise DataError(f"{path}: the file of asked ids must end in .{' or .'.join(FORMATS)}.")
    if not path.is_file():
        raise DataError(f"{path}: there is no such file; --predict names a table of the ids that are asked for.")
    table, own = read_table(path), read_manifest(folder).id
    name = own if own in table.columns else "id"
    if name not in table.columns:
        wanted = " or ".join(repr(known) for known in dict.fromkeys((own, "id")))
        raise DataError(f"{path}: has no column {wanted}; {table.names()}. Call the column of the asked ids so.")
    if table.num_rows == 0:
        raise DataError(f"{path}: has no rows; name at least one id, or give --predict without a file to ask for none.")
    kind = "integer" if party.ids.dtype.kind == "i" else "string"
    asked = np.asarray(table.ids(name, kind, "the ids of this party are").to_pylist())
    order = np.argsort(party.ids, kind="stable")
    places = np.minimum(np.searchsorted(party.ids[order], asked), party.num_nodes - 1)
    positions: NDArray[np.int64] = order[places]
    unknown = party.ids[positions] != asked
    if unknown.any():
        raise table.wrong(name, unknown, "is not the id of one of this party's nodes.")
    return positions
