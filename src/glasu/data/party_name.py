"""What a party may be called: its name becomes a file, a folder, a line of a log and part of a certificate."""

from __future__ import annotations

from glasu.errors import DataError

MAX_CHARACTERS, MAX_BYTES = 100, 200  # file names end at 255 bytes, and ours have endings


def check_party_name(name: str) -> None:
    """Refuse a name that cannot be a file name, or that would tear a line of a log apart."""
    fits = 0 < len(name) <= MAX_CHARACTERS and name.isprintable() and len(name.encode()) <= MAX_BYTES
    if not fits or name.startswith(".") or set(name) & set("/\\"):
        raise DataError(
            f"party {name!r}: files bear a party's name; use 1 to {MAX_CHARACTERS} printable characters "
            f"({MAX_BYTES} bytes), no slash, no dot in front."
        )
