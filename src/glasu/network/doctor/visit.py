"""A party's part: look at its own machine and data, tell the server counts and digests, and hear the verdict."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from queue import Empty, Queue
from typing import Any

from glasu.config import RunConfig
from glasu.data.party import PartyData
from glasu.errors import GlasuError, ProtocolError, TransportError
from glasu.network.client_session import SILENCE, TOLD_EVERY
from glasu.network.compatibility import in_one_line, offered, protocol_facts
from glasu.network.doctor.data import data_findings, settings_findings
from glasu.network.doctor.findings import Finding, Verdict, from_plain, told
from glasu.network.doctor.machine import clock_finding, road_finding
from glasu.network.frames import ALIVE, control, read_control
from glasu.network.party_setup import id_facts, unexpected
from glasu.network.sanitize import SENTENCES, printable
from glasu.network.transport import INBOUND_FRAMES, Line, drain
from glasu.pki.kit import Kit
from glasu.report import versions

Tell = Callable[[str], None]
FIRST_DELAY, LONGEST_DELAY = 0.2, 5.0


def visit(
    party: PartyData | None,
    kit: Kit,
    server: str,
    out: Path,
    *,
    own: list[Finding],
    expect: RunConfig | None = None,
    wait: float = 600.0,
    max_memory: int | None = None,
    tell: Tell = lambda line: None,
    now: Callable[[], float] = time.time,
) -> Verdict:
    """See the doctor and return the verdict; where the server cannot be reached, what this party knows.

    Args:
        party: what it owns; None where it could not be read, which is among the findings then.
        kit: its own.
        server: host:port.
        out: the folder for the run's checkpoints.
        own: what was found so far.
        expect: the settings that were agreed on.
        wait: seconds to wait for the server, and for the others.
        max_memory: the bytes that the server's settings may make the model need; None: half of this machine's memory.
        tell: is told what happens, in lines.
        now: tells the seconds of this machine's clock.
    """
    seen = [] if party is None else told(data_findings(party), tell)
    own = [*own, *seen, _road(kit, server, wait, tell, now)]
    if own[-1].level == "bad":
        return Verdict({kit.name: own})
    call = _Call(kit, server, wait, tell)
    try:
        welcome = call.ask("welcome", "examine")
        own.append(_clock(call, now))
        facts = protocol_facts(versions(), "training") | {name: versions()[name] for name in ("numpy", "torch")}
        config = offered(welcome["config"])
        if expect is not None:
            own.append(_agreed(config, expect))
        if party is not None:
            found, labels = settings_findings(config, party, welcome["roster"], out, max_memory)
            own, facts = [*own, *told(found, tell)], {**facts, **id_facts(party), **labels}
        verdict = call.ask("verdict", "findings", facts=facts, findings=[finding.to_dict() for finding in own])
        return Verdict({printable(role): from_plain(found) for role, found in dict(verdict["findings"]).items()})
    except GlasuError as error:
        return Verdict({kit.name: [*own, Finding("server", "bad", str(error).rstrip("."))]})
    finally:
        call.close()


def _road(kit: Kit, address: str, wait: float, tell: Tell, now: Callable[[], float]) -> Finding:
    """Try to reach the server, as long as it may not have been started yet."""
    start, delay, said = time.monotonic(), FIRST_DELAY, -math.inf
    while True:
        finding, may_come = road_finding(kit, address, datetime.fromtimestamp(now(), UTC))
        if not may_come or time.monotonic() - start + delay > wait:
            return finding
        if time.monotonic() - said >= TOLD_EVERY:
            tell(f"the server is awaited: {finding.said}")
            said = time.monotonic()
        time.sleep(delay)
        delay = min(2 * delay, LONGEST_DELAY)


def _agreed(config: RunConfig, expect: RunConfig) -> Finding:
    """Compare the server's settings with those of --expect."""
    rows = unexpected(config, expect)
    if not rows:
        return Finding("agreed settings", "good", "the server's are those of --expect")
    different = in_one_line(rows, "expected", "the server has")
    return Finding(
        "agreed settings", "bad", f"the server's are not those of --expect: {different}; agree on one run file"
    )


def _clock(call: _Call, now: Callable[[], float]) -> Finding:
    """Ask for the server's time, which was read somewhere between asking and hearing."""
    asked = now()
    there, heard = float(call.ask("time", "time")["now"]), now()
    return clock_finding((asked + heard) / 2 - there, (heard - asked) / 2)


class _Call:
    """One stream to the server: ask, and wait for the answer."""

    def __init__(self, kit: Kit, address: str, wait: float, tell: Tell) -> None:
        self.wait, self.tell = wait, tell
        self._events: Queue[bytes | str] = Queue(INBOUND_FRAMES)
        self._line = Line(kit, address, lambda line, event: self._events.put(event))

    def ask(self, answer: str, question: str, **fields: Any) -> dict[str, Any]:
        """Send a control frame and return the answer of this kind; notices in between are shown."""
        self._line.send(control(question, **fields))
        while True:
            try:
                event = self._events.get(timeout=max(self.wait + 30, SILENCE))  # a server that waits says so before
            except Empty:
                raise TransportError("it does not answer any more.") from None
            if isinstance(event, str):
                raise TransportError(f"the connection ended: {printable(event, SENTENCES)}.")
            if event == ALIVE:
                continue
            told = read_control(event)
            if told["kind"] == answer:
                return told
            if told["kind"] == "notice":
                self.tell(printable(told.get("line")))
            else:
                raise ProtocolError(printable(told.get("why"), SENTENCES))

    def close(self) -> None:
        self._line.close()
        drain(self._events)
