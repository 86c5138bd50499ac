"""Rules that normalise the ids of all parties, so that equal ids have equal bytes."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from glasu.errors import DataError

UnicodeForm = Literal["none", "nfc", "nfkc"]
LetterCase = Literal["keep", "fold"]
Whitespace = Literal["keep", "strip", "collapse", "remove"]


@dataclass(frozen=True, kw_only=True)
class IdRules:
    """How ids are normalised before parties compare them. All parties must have the same rules."""

    unicode: UnicodeForm = "nfc"  # the normal form
    case: LetterCase = "keep"
    # strip: remove it at both ends; collapse: also replace inner runs by one space; remove: remove it everywhere
    whitespace: Whitespace = "strip"

    def normalize(self, text: str) -> str:
        """Return a normalised id."""
        text = self._compose(text)
        if self.case == "fold":
            text = self._compose(text.casefold())  # case folding can produce text that is not in normal form
        if self.whitespace == "strip":
            return text.strip()
        if self.whitespace == "keep":
            return text
        return (" " if self.whitespace == "collapse" else "").join(text.split())

    def _compose(self, text: str) -> str:
        if self.unicode == "none":
            return text
        return unicodedata.normalize("NFC" if self.unicode == "nfc" else "NFKC", text)

    def __str__(self) -> str:
        return f"unicode {self.unicode}, case {self.case}, whitespace {self.whitespace}"


def normalize_ids(ids: Iterable[Any], rules: IdRules, where: str) -> NDArray[np.str_]:
    """Return normalised ids in their order; refuse empty and repeated ids. The error states counts, but never an id."""
    found = [rules.normalize(str(each)) for each in ids]
    empty, repeated = found.count(""), len(found) - len(set(found))
    faults = ((empty, "empty"), (repeated - max(0, empty - 1), "the same as an earlier id"))
    listed = " and ".join(f"{count} of {len(found)} ids are {what}" for count, what in faults if count)
    if listed:
        raise DataError(
            f"{where}: after normalisation ({rules}) {listed}; correct the id column, or change id_unicode, id_case or "
            "id_whitespace in party.toml at all parties."
        )
    return np.array(found, np.str_)
