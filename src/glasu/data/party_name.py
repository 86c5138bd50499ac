"""Rules for the name of a party, which becomes part of file names, log lines and certificates.

Importing this module does not load numpy, because `glasu provision` uses this module without numpy.
"""

from __future__ import annotations

from glasu.config_sections import EVERY_PARTY
from glasu.errors import DataError

MAX_CHARACTERS, MAX_NAME_BYTES = 100, 200  # a file name has at most 255 bytes, including its suffixes


def check_party_name(name: str) -> None:
    """Refuse a name that is not suitable for a file name or a log line."""
    fits = 0 < len(name) <= MAX_CHARACTERS and name.isprintable() and len(name.encode()) <= MAX_NAME_BYTES
    if not fits or name.startswith(".") or set(name) & set("/\\"):
        raise DataError(
            f"party {name!r}: the name is used in file names; use 1 to {MAX_CHARACTERS} printable characters "
            f"({MAX_NAME_BYTES} bytes), no slash, and no dot at the start."
        )


def check_member_name(name: str) -> None:
    """Refuse a name that no party of a run may have, because `train.labels` could not refer to it."""
    check_party_name(name)
    if name == EVERY_PARTY:
        raise DataError(f'party {name!r}: train.labels = "{EVERY_PARTY}" means all parties; use another name.')
