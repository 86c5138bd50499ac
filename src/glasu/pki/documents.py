"""Read kit.toml and ca.toml strictly."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

from glasu.errors import TransportError
from glasu.records import RecordError, parse_toml, read_record

T = TypeVar("T")


def read_document(cls: type[T], path: Path, content: bytes, schema: int, advice: str) -> T:
    """Build a dataclass from TOML.

    Args:
        cls: the dataclass.
        path: the file, for messages.
        content: its bytes.
        schema: the schema number that this version reads.
        advice: what to do about a damaged file.
    """
    try:
        plain = parse_toml(content, str(path))
        found = plain.get("schema") if isinstance(plain, Mapping) else None
        if found != schema:
            raise TransportError(
                f"{path}: schema={found!r}, but this version reads {schema}; use the version of glasu that made it, or "
                f"{advice}."
            )
        return read_record(cls, plain, str(path))
    except RecordError as error:
        raise TransportError(f"{str(error).rstrip('.')}; {advice}.") from None
