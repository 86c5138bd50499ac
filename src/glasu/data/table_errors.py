"""Errors of tables. Messages of pyarrow are not shown, because they quote rows with ids, features and labels.

Rows are counted from 1, without the header and empty lines.
"""

from __future__ import annotations

import codecs
import csv
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from glasu.errors import DataError
from glasu.records import SHOWN_FAULTS

BEGINNING = 4096  # number of bytes that are examined to decide whether a file is text
ESCAPED = re.compile("[\udc80-\udcff]")  # Python decodes bytes that are not UTF-8 to these code points
OTHER_SEPARATORS = {";": "semicolons", "\t": "tabs"}
AS_UTF_8 = "save it as UTF-8 (in a spreadsheet: CSV UTF-8)"


class Faults:
    """Collects the errors of independent checks to report them together."""

    def __init__(self) -> None:
        self._messages: list[str] = []

    @contextmanager
    def collect(self) -> Iterator[None]:
        """Keep the message of a DataError and continue after the block."""
        try:
            yield
        except DataError as error:
            self._messages.append(str(error))

    def raise_if_any(self) -> None:
        """Raise one DataError with all messages."""
        if self._messages:
            more = len(self._messages) - SHOWN_FAULTS
            shown = " ".join(self._messages[:SHOWN_FAULTS])
            raise DataError(f"{shown} There are {more} more faults." if more > 0 else shown)


def read_csv_header(path: Path, separator: str = ",") -> list[str]:
    """Return the column names in the first line of a CSV file."""
    refuse_unreadable(path)
    names = next(_read_rows(path, separator), None)
    if names is None or any("\0" in name or ESCAPED.search(name) for name in names):
        raise explain_csv(path, separator)
    other = next((name for sign, name in OTHER_SEPARATORS.items() if sign in names[0]), None)
    if separator == "," and len(names) == 1 and other is not None:
        raise DataError(f"{path}: its values seem to be separated by {other}; save it with commas.")
    return names


def refuse_unreadable(path: Path) -> None:
    """Raise DataError if a file cannot be opened."""
    try:
        with path.open("rb"):
            pass
    except OSError as error:
        raise DataError(f"{path}: cannot be opened ({error.strerror}); give this user read permission.") from None


def explain_csv(path: Path, separator: str = ",") -> DataError:
    """Return an error for a CSV file that pyarrow cannot read. It names the first bad row, but quotes no value."""
    with path.open("rb") as file:
        beginning = file.read(BEGINNING)
    if beginning.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return DataError(f"{path}: is UTF-16, not UTF-8; {AS_UTF_8}.")
    if b"\0" in beginning:
        return DataError(f"{path}: is not a UTF-8 text file; {AS_UTF_8}, or rename it if it is a .parquet file.")
    rows = _read_rows(path, separator)
    try:
        width = 0
        for number, row in enumerate(rows):
            where = f"row {number}" if number else "the first line"
            if wrong := [column for column, cell in enumerate(row, 1) if ESCAPED.search(cell)]:
                return DataError(f"{path}: {where}, column {wrong[0]}: is not UTF-8; {AS_UTF_8}.")
            width = width or len(row)
            if len(row) != width:
                advice = "put a value with a comma between quotation marks"
                return DataError(f"{path}: {where} has {len(row)} values for {width} columns; {advice}.")
        if width == 0:
            return DataError(f"{path}: is empty; its first line must name the columns.")
    except csv.Error:  # a value of more than 131,072 characters
        pass
    return DataError(f"{path}: cannot be read as CSV; close open quotation marks, or write it as Parquet.")


def _read_rows(path: Path, separator: str) -> Iterator[list[str]]:
    """Yield the rows that are not empty, beginning with the header."""
    with path.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
        yield from filter(None, csv.reader(file, delimiter=separator))


def find_repeated(names: list[str]) -> tuple[int, int] | None:
    """Return the numbers of two columns with the same name, counted from 1.

    The name is not returned, because in a file without a header it would be a value.
    """
    first: dict[str, int] = {}
    for number, name in enumerate(names, 1):
        if first.setdefault(name, number) != number:
            return first[name], number
    return None
