"""Who may take part, and what may come: a process by its hello and its facts, a message by its header."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from glasu.config import RunConfig
from glasu.errors import ConfigError, ProtocolError
from glasu.network.compatibility import (
    Facts,
    differences,
    in_one_line,
    other_builds,
    other_settings,
    remedy,
    two_columns,
    unstated,
)
from glasu.network.fencing import Fence
from glasu.network.frames import Limits
from glasu.network.peer import Hello, Link
from glasu.network.sanitize import printable
from glasu.protocol.message_bytes import Head
from glasu.protocol.messages import Awaited
from glasu.wire.message_key import ATTEMPTS, Phase

SAME_VERSION = "do both have the same version of GLASU?"


class Admission:
    """Compares what a party's process states with the run, with the server and with the parties that are there."""

    def __init__(
        self,
        own_facts: Facts,
        welcome: Mapping[str, Any],
        rounds: Callable[[], Mapping[int, str]],
        fence: Fence,
        settings: Callable[[int], RunConfig] | None,
    ) -> None:
        """Hold parties to these.

        Args:
            own_facts: what a party must have in common with the server.
            welcome: what an accepted party is told about the run.
            rounds: returns the server's own checkpoints.
            fence: knows the process of each party.
            settings: returns those that run on so many nodes; None: any.
        """
        self._own_facts, self._welcome, self._rounds, self._fence = own_facts, welcome, rounds, fence
        self._settings = settings

    def objection(self, link: Link, hello: Hello, links: Iterable[Link], *, closing: bool) -> tuple[str, list[str]]:
        """Return why a process cannot take part, in a sentence and perhaps in two columns; else nothing."""
        if why := self._fence.objection(link.name, hello):
            return why, []
        if hello.only not in (None, self._welcome["run"]):
            return (
                f"it was started for run {printable(hello.only, 64)} (--run), and this is run {self._welcome['run']}; "
                "is it the right server, and the right id?"
            ), []
        if hello.run not in (None, self._welcome["run"]):
            return (
                f"its --out folder holds a party's part of run {printable(hello.run, 64)}, and this server serves run "
                f"{self._welcome['run']}. Is the server's --out the right one? To take part in the new run, choose "
                "another --out at this party, or start over there with --fresh."
            ), []
        if closing:  # a party of this run may come once more to hear that all is done
            return "" if hello.finished else "this run is finished; the server begins another one with --fresh.", []
        if hello.fresh and (saved := max(self._rounds(), default=0)):
            return (
                f"it wants to start over (--fresh), and this run is under way, after round {saved}; nothing was "
                "removed. To go on, leave out --fresh at this party; to start over, start the server with --fresh, too."
            ), []
        why, table = self.difference(link, hello.facts, links)
        if not why and not set(hello.rounds) & set(self._rounds()):
            here, there = (", ".join(map(str, own)) or "none" for own in (self._rounds(), hello.rounds))
            why = (
                f"its intact checkpoints are of rounds: {there}; the server's: {here}; none in common. Restore the "
                "--out folder of whoever lost it, or start over with --fresh at the server and at every party."
            )
        return why, table

    def unfitness(
        self, link: Link, fields: Mapping[str, Any], facts: Facts, links: Iterable[Link]
    ) -> tuple[str, list[str]]:
        """Return why a party that is prepared cannot take part: now it states everything that must be equal."""
        why, table = self.difference(link, facts, links)
        if why:
            return why, table
        if rows := unstated(self._own_facts, facts):
            why = f"it differs from the server: {in_one_line(rows, 'the server', link.name)}; {SAME_VERSION}"
            return why, two_columns(rows, "the server", link.name)
        return self._other_settings(link, fields, facts["nodes"])

    def _other_settings(self, link: Link, fields: Mapping[str, Any], num_nodes: int) -> tuple[str, list[str]]:
        if self._settings is None:
            return "", []
        try:
            config = self._settings(num_nodes)
        except ConfigError as error:  # with so many nodes there are none
            return error.public, []
        if fields.get("digest") == config.digest():
            return "", []
        rows = other_settings(config, fields.get("settings"))
        apart = in_one_line(rows, "the server", link.name) or "it does not say which"
        return (
            f"it would run other settings: {apart}; {SAME_VERSION}",
            two_columns(rows, "the server", link.name) if rows else [],
        )

    def difference(self, link: Link, facts: Facts, links: Iterable[Link]) -> tuple[str, list[str]]:
        """Return in what a party differs from the server or from another party, in a sentence and in two columns."""
        others = {other.name: other.facts for other in links if other is not link and other.hello}
        for whose, stated in {"the server": self._own_facts, **others}.items():
            rows = differences(stated, facts)
            if rows:
                sentence = f"it differs from {whose}: {in_one_line(rows, whose, link.name)}{remedy(rows)}."
                return sentence, two_columns(rows, whose, link.name)
        return "", []

    def other_builds(self, link: Link, facts: Facts, links: Iterable[Link]) -> Iterator[str]:
        """Say where a party has another build of the same version than somebody who is there."""
        others = {other.name: other.facts for other in links if other is not link and other.prepared}
        for whose, stated in {"the server": self._own_facts, **others}.items():
            rows = other_builds(stated, facts)
            if rows:
                different = in_one_line(rows, whose, link.name)
                yield f"{link.name}: another build than at {whose}, so last bits may differ: {different}."


def check_head(link: Link, head: Head, size: int, attempt: int, awaited: Awaited | None, limits: Limits | None) -> None:
    """Refuse a message that cannot be, by its header and its size."""
    key, hello = head.key, link.hello
    assert hello is not None
    expected = (attempt % ATTEMPTS, hello.process[0], link.index)
    if (key.attempt, key.incarnation, key.client) != expected:
        raise ProtocolError(
            f"{head}: expected attempt, start and client {expected}, got {(key.attempt, key.incarnation, key.client)}."
        )
    if awaited is not None and not awaited.admits(head.kind, key) and not link.receipts.knows(key):
        other = "" if key.run == awaited.run else f" of run {key.run.hex()}, not {awaited.run.hex()}"
        raise ProtocolError(f"expected {awaited}, got {head}{other}.")
    if limits is not None and key.phase is not Phase.SAMPLING and key.chunk > limits.last_chunk:
        raise ProtocolError(f"{head}: expected a chunk of 0..{limits.last_chunk}, got {key.chunk}.")
    if limits is not None:
        limits.check(head, size)
