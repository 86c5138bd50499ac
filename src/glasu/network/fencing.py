"""One process per party: the server serves the process that it knows, or a later start from the folder of that one."""

from __future__ import annotations

import secrets
from typing import Any

from glasu.network.peer import Hello
from glasu.network.state_file import Durable

STARTS = {"incarnation": 0, "starts": [], "met": []}  # how many, their processes' names, and whom servers have met
REMEMBERED = 256  # starts, beside those that a server has met


def next_start(durable: Durable) -> None:
    """Count a start of a party's command, and give the process a name; both are durable before anybody hears of it."""
    durable.update(
        incarnation=durable["incarnation"] + 1, starts=[*durable["starts"], secrets.token_hex(8)][-REMEMBERED:]
    )


def met(durable: Durable, *, begun: bool = False) -> None:
    """Note that the server has welcomed this process: however many starts reach nobody, its name is not forgotten.

    Whom it followed may be known to the server until a run has begun with this one.
    """
    process = durable["starts"][-1]
    before = [] if begun else [name for name in durable["met"] if name != process]
    durable.update(met=[*before[:1], *before[1:][-REMEMBERED:], process])


def introduction(durable: Durable) -> dict[str, Any]:
    """Return what a party's hello says of its process, and of the processes before it in the same folder."""
    *before, process = durable["starts"]
    return {"incarnation": durable["incarnation"], "process": process, "before": [*durable["met"], *before]}


class Fence:
    """Which process of each party the server knows; durable, so that a restart of the server lets nobody else in.

    A counter alone would not do: a second folder, refused and started again, would count until it is the higher one. So
    a new process must have the known one among the starts of its own folder. Then a copied folder may take over, once;
    the folder that it was copied from has not the copy among its starts, and does not come back.
    """

    def __init__(self, durable: Durable) -> None:
        """Remember in `durable`, as "incarnations"."""
        self._durable = durable
        self._before: dict[str, Any] = {}  # whom the present process of a party has followed

    def is_known(self, name: str, hello: Hello) -> bool:
        """Tell whether a hello comes from the party's process that was admitted last."""
        return self._known(name) == hello.process

    def objection(self, name: str, hello: Hello) -> str:
        """Return why a process cannot be admitted; empty: it can."""
        known = self._known(name)
        if known is None or known == hello.process or (known[1] in hello.before and known[0] < hello.process[0]):
            return ""
        return (
            f"another process of party {name!r} takes part, or has taken part, in this run (its start {known[0]}; this "
            f"is start {hello.process[0]} of another folder). Stop one of them, and go on with the --out folder of the "
            "other; if that folder is lost, start over with --fresh at the server."
        )

    def admit(self, name: str, hello: Hello) -> None:
        """Let this process be the party's, from now on and durably."""
        if not self.is_known(name, hello):
            known = self._durable["incarnations"]
            self._durable.update(incarnations={**known, name: list(hello.process)})
            self._before[name] = known.get(name)

    def settle(self) -> None:
        """All processes take part now: their places are their folders', whatever they say later."""
        self._before.clear()

    def withdraw(self, name: str) -> None:
        """Forget a process that has not taken part after all: the one before it, or any, may come."""
        if name in self._before:
            known, before = dict(self._durable["incarnations"]), self._before.pop(name)
            known.pop(name, None)
            self._durable.update(incarnations=known if before is None else {**known, name: before})

    def _known(self, name: str) -> tuple[int, str] | None:
        known = self._durable["incarnations"].get(name)
        return None if known is None else (known[0], known[1])
