"""What is wrong with a CSV file, in our words: pyarrow's quote the row, and with it ids, features and labels.

Rows are counted as everywhere: from 1, without the header and without empty lines.
"""

from __future__ import annotations

import codecs
import csv
import re
from collections.abc import Iterator
from pathlib import Path

from glasu.errors import DataError

BEGINNING = 4096  # bytes that are looked at to tell text from what is none
ESCAPED = re.compile("[\udc80-\udcff]")  # what a byte becomes that is not UTF-8
AS_UTF_8 = "save it as UTF-8 (in a spreadsheet: CSV UTF-8)"


def csv_header(path: Path) -> list[str]:
    """Return what the first line of a CSV file names, or raise what is wrong with it."""
    refuse_unreadable(path)
    names = next(_rows(path, ","), None)
    if names is None or any("\0" in name or ESCAPED.search(name) for name in names):
        raise csv_flaw(path)
    return names


def refuse_unreadable(path: Path) -> None:
    """Raise where a file cannot be opened."""
    try:
        with path.open("rb"):
            pass
    except OSError as error:
        raise DataError(
            f"{path}: cannot be opened ({error.strerror}); let the user who runs this command read it."
        ) from None


def csv_flaw(path: Path, separator: str = ",") -> DataError:
    """Return what keeps a CSV file from being read, with the first row that it concerns; no value stands in it."""
    with path.open("rb") as file:
        beginning = file.read(BEGINNING)
    if beginning.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return DataError(f"{path}: is UTF-16, not UTF-8; {AS_UTF_8}.")
    if b"\0" in beginning:
        return DataError(f"{path}: is no text file, or not UTF-8; {AS_UTF_8}, or name a .parquet file so.")
    rows = _rows(path, separator)
    try:
        width = 0
        for number, row in enumerate(rows):
            where = f"row {number}" if number else "the first line"
            if wrong := [column for column, cell in enumerate(row, 1) if ESCAPED.search(cell)]:
                return DataError(f"{path}: {where}, column {wrong[0]}: is not UTF-8; {AS_UTF_8}.")
            width = width or len(row)
            if len(row) != width:
                advice = "put a value that holds a comma between quotation marks"
                return DataError(f"{path}: {where} has {len(row)} values for {width} columns; {advice}.")
        if width == 0:
            return DataError(f"{path}: is empty; its first line must name the columns, one row per line follows.")
    except csv.Error:  # a value of more than 131,072 characters
        pass
    return DataError(f"{path}: cannot be read as csv; is a quotation mark left open? If not, write it as Parquet.")


def _rows(path: Path, separator: str) -> Iterator[list[str]]:
    """Yield the rows that are not empty, the header first."""
    with path.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
        yield from filter(None, csv.reader(file, delimiter=separator))


def repeated(names: list[str]) -> tuple[int, int] | None:
    """Return the numbers of two columns of one name, from 1, if there are any; a name may be a value, too."""
    first: dict[str, int] = {}
    for number, name in enumerate(names, 1):
        if first.setdefault(name, number) != number:
            return first[name], number
    return None
