"""The server's part: let every party come, compare, and give all of them one verdict; no torch here."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from glasu.config import RunConfig
from glasu.errors import ProtocolError, public_reason
from glasu.network.compatibility import for_network, protocol_facts
from glasu.network.doctor.findings import EVERYBODY, Finding, Verdict, from_plain, read_facts, to_plain
from glasu.network.doctor.machine import disk_finding
from glasu.network.doctor.together import compare
from glasu.network.frames import CONTROL, control, read_control
from glasu.network.peer import Stream
from glasu.network.sanitize import SENTENCES, printable
from glasu.network.server_session import NAMED_AFTER, NAMED_EVERY, Tell
from glasu.network.transport import listening
from glasu.pki.kit import Kit
from glasu.report import versions

SERVER_NEEDS = 64 << 20  # bytes: checkpoints of the server hold histories, the report a little more
Reported = tuple[dict[str, Any], list[Finding]]  # a party's facts and findings


def examine(
    config: RunConfig,
    kit: Kit,
    listen: str,
    out: Path,
    *,
    own: list[Finding],
    wait: float = 600.0,
    tell: Tell = lambda line: None,
    listened: Callable[[int], None] = lambda port: None,
    now: Callable[[], float] = time.time,
) -> Verdict:
    """Wait for all parties, or as long as `wait`, and return the verdict that all of them are told.

    Args:
        config: the settings of the run to be.
        kit: the server's.
        listen: host:port, where the run is to be served.
        out: the folder for the run's checkpoints.
        own: what was found at the server so far.
        wait: the seconds to wait for parties.
        tell: is told what happens, in lines.
        listened: is told the port once parties may come.
        now: tells the seconds of the server's clock.
    """
    welcome = {"config": for_network(config, kit.roster).to_dict(), "roster": list(kit.roster)}
    examination = Examination(kit.roster, welcome, tell, now)
    with listening(examination, kit, listen) as port:
        listened(port)
        reports = examination.reports(wait)
        verdict = _judged(kit, [*own, disk_finding(out, SERVER_NEEDS)], reports)
        examination.announce(verdict)
    return verdict


def _judged(kit: Kit, own: list[Finding], reports: Mapping[str, Reported]) -> Verdict:
    findings: dict[str, list[Finding]] = {"server": own}
    for name in kit.roster:
        missing = [Finding("presence", "bad", "did not come; is glasu doctor started there, and what does it say?")]
        findings[name] = reports[name][1] if name in reports else missing
    facts = protocol_facts(versions(), "training")
    findings[EVERYBODY] = compare(facts, {name: reports[name][0] for name in kit.roster if name in reports})
    return Verdict(findings)


class Examination:
    """The server's end of all streams while the doctor is in; threads of gRPC put in what the parties say."""

    def __init__(
        self, roster: tuple[str, ...], welcome: Mapping[str, Any], tell: Tell, now: Callable[[], float]
    ) -> None:
        self.links = list(roster)
        self.welcome, self.tell, self.now = welcome, tell, now
        self.changed = threading.Condition()
        self._streams: dict[str, Stream] = {}
        self._reports: dict[str, Reported] = {}

    def attach(self, name: str, stream: Stream, frames: Iterator[bytes]) -> None:
        """Read what a party says until its stream ends."""
        try:
            for frame in frames:
                with self.changed:
                    self._take(name, stream, frame)
                    self.changed.notify_all()
        except Exception as error:  # whatever it is: this thread must not end without anybody hearing why
            why = printable(public_reason(error), SENTENCES)
            self.tell(f"{name}: not accepted: {why}")
            stream.send(control("refused", why=why, table=[]))
        finally:
            stream.close()

    def turned_away(self, line: str) -> None:
        """Tell of a connection that was refused because of its certificate."""
        self.tell(line)

    def _take(self, name: str, stream: Stream, frame: bytes) -> None:
        fields = read_control(frame) if frame[:1] == bytes([CONTROL]) else {"kind": "a frame of a training"}
        kind = fields["kind"]
        if kind == "examine":
            self._welcome(name, stream)
        elif self._streams.get(name) is not stream:
            raise ProtocolError("this server runs glasu doctor; trainings and predictions come with glasu serve.")
        elif kind == "time":
            stream.send(control("time", now=self.now()))
        elif kind == "findings":
            self._reports[name] = read_facts(fields.get("facts")), from_plain(fields.get("findings"))
            self.tell(f"{name}: has come.")
        else:
            raise ProtocolError(f"expected its findings, got {kind[:60]!r}.")

    def _welcome(self, name: str, stream: Stream) -> None:
        before = self._streams.get(name)
        if before is not None and before is not stream and before.open:
            before.send(control("refused", why=f"another glasu doctor of party {name!r} has come.", table=[]))
            before.close()
        self._streams[name], stream.accepted = stream, True
        stream.send(control("welcome", **self.welcome, index=self.links.index(name), purpose="doctor"))

    def reports(self, wait: float) -> dict[str, Reported]:
        """Return what the parties report, when all have, or after so many seconds."""
        start, named = time.monotonic(), NAMED_AFTER
        with self.changed:
            while (missing := [name for name in self.links if name not in self._reports]) and (
                waited := time.monotonic() - start
            ) < wait:
                if waited >= named:
                    self._say(f"waiting for {', '.join(missing)} since {waited:.0f} s.")
                    named = min(2 * named, named + NAMED_EVERY)
                self.changed.wait(min(0.5, wait - waited))
            return dict(self._reports)

    def _say(self, line: str) -> None:
        self.tell(line)
        for stream in self._streams.values():
            stream.send(control("notice", line=line))

    def announce(self, verdict: Verdict) -> None:
        """Tell everybody who is there."""
        with self.changed:
            for stream in self._streams.values():
                stream.send(control("verdict", findings=to_plain(verdict.findings)))
                stream.close()
