"""alignment.parquet, next to the tables of a party: the common ids in the common order, and the parties' common key.

`glasu align` writes this file, and `read_party` applies it: the party then has only the common nodes, in the common
order and with normalised ids. The key is never sent. Other roles only see HMACs that were made with the key.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyarrow import parquet

from glasu.data.id_rules import IdRules, normalize_ids
from glasu.data.party import PartyData, digest_ids, sign_ids
from glasu.errors import DataError
from glasu.files import write_atomically

ALIGNMENT_FILE = "alignment.parquet"
ALIGNMENT_SCHEMA = "1"
ALIGN_AGAIN = "align again with `glasu align` at all parties, or remove this file at all parties"
_COLUMN = "id"


@dataclass(frozen=True, eq=False)
class CommonIds:
    """The content of alignment.parquet."""

    ids: NDArray[np.str_]  # normalised, in the common order
    key: bytes  # the same at all parties; the server does not know it
    parties: tuple[str, ...]
    rules: str  # the rules that normalised the ids
    all_ids: str  # HMAC of the sorted normalised ids of the table

    @classmethod
    def of(
        cls, ids: NDArray[np.str_], rows: NDArray[np.int64], key: bytes, parties: Sequence[str], rules: IdRules
    ) -> CommonIds:
        """Return the content for a table with these normalised ids. `rows`: the common rows in the common order."""
        return cls(ids[rows], key, tuple(parties), str(rules), sign_ids(key, "table", digest_ids(np.sort(ids))))

    def write(self, folder: Path) -> Path:
        """Write the file next to the tables of a party, atomically and readable by its owner only."""
        about = {
            "glasu.schema": ALIGNMENT_SCHEMA,
            "glasu.key": self.key.hex(),
            "glasu.parties": "\n".join(self.parties),
            "glasu.rules": self.rules,
            "glasu.all_ids": self.all_ids,
        }
        table = pa.table({_COLUMN: pa.array(self.ids.tolist(), pa.string())}).replace_schema_metadata(about)
        content = io.BytesIO()
        parquet.write_table(table, content)
        write_atomically(folder / ALIGNMENT_FILE, content.getvalue(), 0o600)
        return folder / ALIGNMENT_FILE

    def apply(self, party: PartyData, rules: IdRules, path: Path) -> PartyData:
        """Return the party with the common nodes in the common order, under their normalised ids.

        Args:
            party: the party with all rows of its table.
            rules: the rules in its party.toml.
            path: the path of the file, for errors.

        Raises:
            DataError: the table or the rules have changed since the alignment.
        """
        if str(rules) != self.rules:
            raise DataError(
                f"{path}: was made with different rules for ids ({self.rules}; now {rules}); {ALIGN_AGAIN}."
            )
        ids = normalize_ids(party.ids.tolist(), rules, str(path.parent))
        order = np.argsort(ids)
        if sign_ids(self.key, "table", digest_ids(ids[order])) != self.all_ids:
            raise DataError(f"{path}: the ids of the nodes have changed since it was made; {ALIGN_AGAIN}.")
        rows = order[np.searchsorted(ids[order], self.ids)]
        return replace(party.restrict(rows), ids=self.ids, alignment_key=self.key)


def read_alignment(folder: Path) -> CommonIds | None:
    """Read alignment.parquet in a party's folder; return None if there is no such file."""
    path = folder / ALIGNMENT_FILE
    if not path.is_file():
        return None
    try:
        table = parquet.read_table(path, partitioning=None)
        about = {name.decode(): value.decode() for name, value in (table.schema.metadata or {}).items()}
        ids = np.array(table.column(_COLUMN).to_pylist(), np.str_)
        key = bytes.fromhex(about["glasu.key"])
        if about["glasu.schema"] != ALIGNMENT_SCHEMA or len(ids) == 0:
            raise ValueError
        parties = tuple(about["glasu.parties"].split("\n"))
        return CommonIds(ids, key, parties, about["glasu.rules"], about["glasu.all_ids"])
    except (pa.ArrowException, OSError, KeyError, ValueError):
        raise DataError(
            f"{path}: cannot be read, is damaged, or was written by another version of GLASU; {ALIGN_AGAIN}."
        ) from None
