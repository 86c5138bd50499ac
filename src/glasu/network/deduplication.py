"""Take every message once, however often it comes: known by its key and digest, answered again from memory."""

from __future__ import annotations

from collections.abc import Sequence

from glasu.errors import EquivocationError
from glasu.network.frames import ROOM
from glasu.wire.message_key import Key, Phase

Group = tuple[int, int]  # phase and round


def begins_exchange(key: Key) -> bool:
    """Tell whether a message begins an exchange: chunks of one tensor are sent together and count once."""
    return key.chunk == 0 or key.phase is Phase.SAMPLING


class Receipts:
    """What one party has sent in the present attempt, and the answers to it, as frames.

    Messages of the last two phases are remembered. So are their answers, unless they take too much room: then those go
    first that have arrived, as a receipt says, or the party's next exchange.
    """

    def __init__(self) -> None:
        self._groups: dict[Group, dict[bytes, bytes]] = {}  # the digests of messages by their keys
        self._answers: dict[bytes, Sequence[bytes]] = {}  # by the keys of their messages, the oldest first
        self._under_way: dict[bytes, int] = {}  # bytes of those that have not arrived, or not certainly
        self._size = 0  # bytes of all answers
        self._sent: set[bytes] = set()  # those that were sent on the present stream

    @property
    def under_way(self) -> int:
        """How many bytes of answers have not reached the party, as far as is known."""
        return sum(self._under_way.values())

    def knows(self, key: Key) -> bool:
        """Tell whether a message with this key has come."""
        return key.pack() in self._groups.get((int(key.phase), key.round), {})

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
        if begins_exchange(key):  # a party begins one when it has all answers of the last
            self._under_way.clear()
        return True

    def answered(self, key: Key, answer: Sequence[bytes]) -> None:
        """Remember the answer to a message."""
        name, size = key.pack(), sum(map(len, answer))
        self._answers[name], self._under_way[name] = answer, size
        self._size += size
        self._sent.add(name)
        while self._size > ROOM and (oldest := next(iter(self._answers))) not in self._under_way:
            self._forget(oldest)

    def answer(self, key: Key) -> Sequence[bytes] | None:
        """Return the answer to a message; None: there is none yet, or it has been received."""
        return self._answers.get(key.pack())

    def begin_stream(self) -> None:
        """Note that the party has another stream: what was sent on the one before may be lost."""
        self._sent.clear()

    def repeated(self, key: Key) -> Sequence[bytes]:
        """Return the answer to a message that has come again, once on each stream; nothing where none is due."""
        name = key.pack()
        if name not in self._answers or name in self._sent:
            return ()
        self._sent.add(name)
        return self._answers[name]

    def received(self, key: bytes) -> None:
        """Forget an answer that has arrived."""
        self._forget(key)

    def _forget(self, name: bytes) -> None:
        self._under_way.pop(name, None)
        self._sent.discard(name)
        self._size -= sum(map(len, self._answers.pop(name, ())))

    def _forget_all_but(self, groups: list[Group]) -> None:
        for group in [group for group in self._groups if group not in groups]:
            for name in self._groups.pop(group):
                self._forget(name)
