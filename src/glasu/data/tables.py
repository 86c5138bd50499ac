"""Columns of a Parquet or CSV file as numpy arrays. Errors name file, column and row, but quote no value.

Rows are counted from 1, without the header and empty lines of a CSV file.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import csv, parquet

from glasu.data.table_errors import Faults, explain_csv, find_repeated, read_csv_header, refuse_unreadable
from glasu.errors import DataError
from glasu.files import name_file

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from numpy.typing import DTypeLike, NDArray

MISSING_VALUES = ("", "NA", "N/A", "nan", "NaN", "NAN", "null", "NULL", "None")  # texts for a missing number in CSV
INFINITY = r"(?i)^[+-]?inf(inity)?$"
NUMBER = r"^-?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?$"
INFINITE = "is infinite, or too large for a 32-bit number; write a finite number, or leave it empty if unknown."
SIMILAR = 0.75  # similarity of a column name above which it is suggested
FORMATS = ("parquet", "csv")
NONE = np.zeros(0, np.bool_)  # for `refuse`: no row is wrong
Columns: TypeAlias = dict[str, Any]  # name -> array of pyarrow or numpy


@dataclass(frozen=True)
class Table:
    """The columns of a file. The columns of a CSV file are strings until a method converts them."""

    path: Path
    columns: Columns
    num_rows: int

    def column(self, name: str, key: str = "") -> Any:
        """Return a column, or raise DataError if it does not exist.

        The error describes the existing columns, and names the key of party.toml that contains the wrong name. It
        quotes a similar column name, even from a CSV file, because a similar text can hardly be a value.
        """
        if name not in self.columns:
            match = difflib.get_close_matches(name, list(self.columns), n=1, cutoff=SIMILAR)
            hint = f" (did you mean {match[0]!r}?)" if match else ""
            remedy = f"Set {key} to the name of a column" if key else "Correct the name"
            raise DataError(f"{self.path}: has no column {name!r}{hint}; {self.names()}. {remedy} in party.toml.")
        return self.columns[name]

    def names(self) -> str:
        """Describe the columns. The first line of a CSV file may be data, so it is not quoted."""
        if self.path.suffix == ".csv":
            return f"its first line names {len(self.columns)} other column{'s' * (len(self.columns) != 1)}"
        return f"its columns are {', '.join(list(self.columns)[:8])}{', ...' if len(self.columns) > 8 else ''}"

    def explain(self, name: str, wrong: NDArray[np.bool_], rule: str) -> DataError:
        """Return an error that names the first row in which `wrong` is true."""
        rows = np.flatnonzero(wrong)
        others = f" (and {len(rows) - 1} more)" if len(rows) > 1 else ""
        return DataError(f"{self.path}: column {name!r}, row {rows[0] + 1}{others}: {rule}")

    def refuse(self, name: str, wrong: NDArray[np.bool_], rule: str) -> None:
        """Raise the error of `explain` if `wrong` is true in a row."""
        if wrong.any():
            raise self.explain(name, wrong, rule)

    def strings(self, name: str) -> list[str | None]:
        """Return a column as strings, None for empty cells."""
        column = self.column(name)
        try:
            values = pc.cast(column, pa.string()).to_pylist()
        except pa.ArrowException:
            raise DataError(f"{self.path}: column {name!r} of type {column.type} cannot be read as text.") from None
        return [value or None for value in values]

    def numbers(self, name: str, dtype: DTypeLike = np.float32, required: str = "") -> NDArray[Any]:
        """Return a column as numbers, NaN for missing values. One DataError lists all kinds of faults.

        Args:
            name: the name of the column.
            dtype: the type of the numbers.
            required: the error text for a missing value; empty: values may be missing.
        """
        faults = Faults()
        kind = pa.from_numpy_dtype(np.dtype(dtype))
        column = self.column(name)
        if pa.types.is_string(column.type) and self.path.suffix == ".csv":
            column = pc.utf8_trim_whitespace(column)
            column = pc.if_else(pc.is_in(column, pa.array(MISSING_VALUES)), pa.scalar(None, pa.string()), column)
            infinite = np.asarray(pc.fill_null(pc.match_substring_regex(column, INFINITY), False), bool)
            with faults.collect():
                self.refuse(name, infinite, INFINITE)
            other = ~infinite & np.asarray(
                pc.fill_null(pc.invert(pc.match_substring_regex(column, NUMBER)), False), bool
            )
            with faults.collect():
                self.refuse(
                    name,
                    other,
                    "is not a number; features, weights and numeric labels are numbers, so encode text first.",
                )
            with faults.collect():
                self.refuse(name, np.asarray(pc.is_null(column)) if required else NONE, required)
            faults.raise_if_any()
            column = pc.cast(column, kind)
        numeric = pa.types.is_integer(column.type) or pa.types.is_floating(column.type)
        if not (numeric or pa.types.is_boolean(column.type) or pa.types.is_decimal(column.type)):
            raise DataError(
                f"{self.path}: column {name!r} of type {column.type} is not numeric; encode it, or remove it."
            )
        if pa.types.is_boolean(column.type):
            column = pc.cast(column, pa.uint8())
        values = np.asarray(pc.fill_null(pc.cast(column, kind, safe=False), float("nan")))
        with faults.collect():
            self.refuse(name, np.isinf(values), INFINITE)
        with faults.collect():
            self.refuse(name, np.isnan(values) if required else NONE, required)
        faults.raise_if_any()
        return values

    def ids(self, name: str, kind: str | None = None, why: str = "") -> Any:
        """Return a column of node ids as int64 or string.

        Args:
            name: the name of the column.
            kind: "integer", "string", or None: integers if all ids look like integers.
            why: the reason why `kind` is "integer"; the error quotes it.
        """
        column = self.column(name)
        if pa.types.is_dictionary(column.type):
            column = pc.cast(column, column.type.value_type)
        empty = np.asarray(pc.is_null(column))
        if empty.any():
            raise self.explain(name, empty, "is empty; every row needs an id.")
        text = pa.types.is_string(column.type) or pa.types.is_large_string(column.type)
        if not (text or pa.types.is_integer(column.type)):
            raise DataError(f"{self.path}: column {name!r} of type {column.type}: ids are integers or strings.")
        if kind == "string" or (kind is None and text and self.path.suffix != ".csv"):
            return pc.cast(column, pa.string())
        if text:
            # leading zeros and signs are part of an id: "007" and "+7" are strings
            integer = np.asarray(pc.match_substring_regex(column, r"^(0|-?[1-9][0-9]{0,18})$"), bool)
            if kind is None and not integer.all():
                return column
            if not integer.all():
                trimmed = pc.utf8_trim_whitespace(column)
                spaces = np.asarray(pc.not_equal(trimmed, column)) & ~integer
                raise self.explain(name, ~integer, f"is not an integer, but {why}.{_note_spaces(spaces)}")
        try:
            return pc.cast(column, pa.int64())
        except pa.ArrowException:
            if text and kind is None:
                return column
            raise DataError(f"{self.path}: column {name!r}: an id exceeds 64 bits; write ids as strings.") from None

    def refuse_duplicates(self, name: str, ids: Any) -> None:
        """Raise DataError if two rows have the same id; `ids` is the column as `Table.ids` returns it."""
        first = np.asarray(pc.index_in(ids, pc.unique(ids)))  # equal ids have equal numbers, in order of appearance
        repeated = first != np.maximum.accumulate(np.concatenate([[-1], first[:-1]])) + 1
        if repeated.any():
            raise self.explain(name, repeated, "the id is also in an earlier row; every node has one row.")

    def positions(self, name: str, ids: Any, why: str, rule: str) -> NDArray[np.int64]:
        """Return the position of each id of a column in the list `ids`.

        Args:
            name: the name of the column.
            ids: all known ids, as a pyarrow array.
            why: the reason why ids must be integers; the error quotes it.
            rule: the error text for an id that is not in the list.
        """
        kind = "integer" if pa.types.is_integer(ids.type) else "string"
        known = ids.combine_chunks() if isinstance(ids, pa.ChunkedArray) else ids
        found = pc.index_in(self.ids(name, kind, why), known)
        unknown = np.asarray(pc.is_null(found))
        if unknown.any():
            column, own = (
                pc.utf8_trim_whitespace(pc.cast(each, pa.string())) for each in (self.ids(name, kind, why), known)
            )
            raise self.explain(name, unknown, rule + _note_spaces(np.asarray(pc.is_in(column, own)) & unknown))
        return np.asarray(found, np.int64)


def _note_spaces(spaces: NDArray[np.bool_]) -> str:
    """Return a sentence about the ids that are wrong only because of white space; empty if there are none."""
    if not spaces.any():
        return ""
    return (
        f" {spaces.sum()} of these ids are wrong only because of white space at their ends; remove it (id_whitespace "
        "in party.toml has an effect in glasu align only)."
    )


def read_table(path: Path, separator: str = ",", columns: Sequence[str] | None = None) -> Table:
    """Read a .parquet or .csv file.

    Args:
        path: the path of the file.
        separator: the separator of values in a CSV file.
        columns: the names of the columns of a CSV file to read; None reads all.
    """
    if not path.is_file():
        raise DataError(f"{path}: does not exist; create it, or name another file in party.toml.")
    table = _read_csv(path, separator, columns) if path.suffix == ".csv" else _read_parquet(path)
    names = table.column_names
    if twice := find_repeated(names):
        raise DataError(f"{path}: columns {twice[0]} and {twice[1]} have the same name; names must be distinct.")
    return Table(path, dict(zip(names, table.columns, strict=True)), table.num_rows)


def write_table(columns: Columns, path: Path) -> None:
    """Write columns to a .parquet or .csv file."""
    table = pa.table(columns)
    with name_file(path):
        if path.suffix == ".csv":
            csv.write_csv(table, path)
        else:
            parquet.write_table(table, path)


def _read_csv(path: Path, separator: str, columns: Sequence[str] | None) -> Any:
    """Read columns as strings.

    This function passes no handler of invalid rows to pyarrow, because the threads of pyarrow outlive the call. If such
    a thread releases a Python function while the interpreter shuts down, the process aborts.
    """
    names = read_csv_header(path, separator)
    places = {str(number): name for number, name in enumerate(names)}
    wanted = [place for place, name in places.items() if columns is None or name in columns]
    try:
        table = csv.read_csv(
            path,
            read_options=csv.ReadOptions(use_threads=False, column_names=list(places)),
            parse_options=csv.ParseOptions(delimiter=separator, newlines_in_values=True),
            convert_options=csv.ConvertOptions(
                column_types=dict.fromkeys(places, pa.string()),
                include_columns=wanted,
                null_values=[""],
                strings_can_be_null=True,
            ),
        )
    except (pa.ArrowException, OSError):
        raise explain_csv(path, separator) from None
    return table.slice(1).rename_columns([places[place] for place in wanted])


def _read_parquet(path: Path) -> Any:
    refuse_unreadable(path)
    try:
        table = parquet.read_table(path, partitioning=None)
        for column in table.columns:
            if not pa.types.is_primitive(column.type):
                column.validate(full=True)  # read_table does not check text
    except (pa.ArrowException, OSError):
        raise DataError(f"{path}: is not a Parquet file, or is damaged; write it again.") from None
    return table
