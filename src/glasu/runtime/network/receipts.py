"""Take every message once, however often it comes: known by its key and digest, answered again from memory."""

from __future__ import annotations

from glasu.errors import EquivocationError
from glasu.keys import Key

Group = tuple[int, int]  # phase and round


class Receipts:
    """What one party has sent in the present attempt, and the answers to it; the last two phases are remembered."""

    def __init__(self) -> None:
        self._groups: dict[Group, dict[bytes, bytes]] = {}  # the digests of messages by their keys
        self._answers: dict[bytes, bytes] = {}  # encoded answers by the keys of their messages

    def take(self, key: Key, digest: bytes) -> bool:
        """Tell whether a message is new; stop the run where its key has come with another content."""
        group, name = (int(key.phase), key.round), key.pack()
        known = self._groups.get(group, {}).get(name)
        if known == digest:
            return False
        if known is not None:
            raise EquivocationError(
                f"{key}: came twice with different contents, SHA-256 {known.hex()} and {digest.hex()}; "
                "the run stops, for one of them is not what was computed."
            )
        if group not in self._groups:
            self._forget_all_but(list(self._groups)[-1:])
            self._groups[group] = {}
        self._groups[group][name] = digest
        return True

    def answered(self, key: Key, answer: bytes) -> None:
        """Remember the answer to a message."""
        self._answers[key.pack()] = answer

    def answer(self, key: Key) -> bytes | None:
        """Return the answer to a message that has come again; None: there is none yet, or it has been received."""
        return self._answers.get(key.pack())

    def received(self, key: bytes) -> None:
        """Forget an answer that has arrived."""
        self._answers.pop(key, None)

    def _forget_all_but(self, groups: list[Group]) -> None:
        for group in [group for group in self._groups if group not in groups]:
            for name in self._groups.pop(group):
                self._answers.pop(name, None)
