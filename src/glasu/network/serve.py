"""The server over the network: gather the parties, agree where to go on, drive the script; torch is not loaded here."""

from __future__ import annotations

import dataclasses
import json
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from glasu.config import Override, RunConfig, resolve
from glasu.errors import CheckpointError, ConfigError, GlasuError
from glasu.files import write_atomically
from glasu.network.compatibility import for_network, protocol_facts
from glasu.network.deduplication import begins_exchange
from glasu.network.frames import Limits
from glasu.network.peer import Statement
from glasu.network.sanitize import printable
from glasu.network.server_session import Hub, NewProcess, OnNonsense, Tell
from glasu.network.state_file import Durable
from glasu.network.status import Status, View
from glasu.network.transport import listening
from glasu.pki.kit import Kit
from glasu.protocol.messages import Message
from glasu.protocol.requests import Evaluated, Event, RoundDone, Script
from glasu.protocol.server import Server, Sizes, server_script
from glasu.protocol.state import ServerState
from glasu.records import read_record, to_plain
from glasu.report import PartySummary, RunReport, build_report, versions
from glasu.runtime.checkpointing import (
    START,
    SUFFIX,
    Saver,
    Store,
    find_common_round,
    is_due,
    refuse_unknown_checkpoints,
)
from glasu.runtime.output_dir import SERVING
from glasu.runtime.telemetry import SERVER_PARTS, Telemetry, TelemetryState
from glasu.timing import Clock
from glasu.wire.message_key import RUN_BYTES

FAREWELL = 10.0  # seconds that parties have to hear that all is done, and to hang up


def serve(
    config: RunConfig,
    kit: Kit,
    listen: str,
    out: Path,
    *,
    fresh: bool = False,
    wait: float = 600.0,
    on_nonsense: OnNonsense = "stop",
    connections: int | None = None,
    observe: Callable[[Event], None] = lambda event: None,
    tell: Tell = lambda line: None,
    status: Callable[[Status], None] = lambda status: None,
    watched: Callable[[Callable[[], View]], None] = lambda look: None,
    listened: Callable[[int], None] = lambda port: None,
    clock: Clock = time.perf_counter,
) -> RunReport | None:
    """Serve one run to its end, write report.json, and return what it found and cost; None: it was finished before.

    Args:
        config: the settings, which the parties are sent.
        kit: the server's; its roster are the parties.
        listen: host:port.
        out: the folder for report and checkpoints; a run that it holds goes on.
        fresh: start over, and remove what is there once all parties have joined.
        wait: the seconds that a party may be without a connection.
        on_nonsense: whether a party's message that cannot be stops the run, or the run waits for that party to return.
        connections: the greatest number of TCP connections; None: enough for all parties and some more.
        observe: is told of every round and evaluation.
        tell: is told what happens, in lines.
        status: is told after every round where the run stands.
        watched: is given a function that returns the server at any moment, from any thread.
        listened: is told the port once parties may come.
        clock: tells the seconds for the report.
    """
    config = for_network(config, kit.roster)
    serving = _Serving(config, kit, out, wait, on_nonsense, observe, tell, status, clock, fresh)
    watched(serving.view)
    return serving.run(listen, listened, connections)


class _Serving:
    """One process of the server."""

    def __init__(
        self,
        config: RunConfig,
        kit: Kit,
        out: Path,
        wait: float,
        on_nonsense: OnNonsense,
        observe: Callable[[Event], None],
        tell: Tell,
        status: Callable[[Status], None],
        clock: Clock,
        fresh: bool,
    ) -> None:
        self.asked, self.kit, self.wait, self.observe, self.tell = config, kit, wait, observe, tell
        self.status = status
        self._server: Server | None = None  # of the present attempt
        self._scores: Mapping[str, float] = {}  # of the last validation
        self.out, self.fresh = out, fresh
        self.durable = opened(out)
        self.begins = fresh or not goes_on(out, self.durable, config, kit.roster)
        if fresh:
            self.durable.start_over()
        run = secrets.token_hex(RUN_BYTES) if self.begins else self.durable["run"]
        self.store = Store(out / "checkpoints", f"the server of run {run}")
        if not self.begins:
            for line in self.store.open(config.train.checkpoint_every)[1]:
                tell(line)
        self.saver = Saver(self.store)
        self.telemetry = Telemetry(clock, parts=SERVER_PARTS)
        welcome = {"config": config.to_dict(), "roster": list(kit.roster), "run": run}
        facts = {**protocol_facts(versions(), "training"), "parties": len(kit.roster)}
        self.hub = Hub(
            kit.roster,
            facts,
            welcome,
            self.durable,
            self._rounds,
            tell,
            on_nonsense,
            self._waited,
            settings=lambda nodes: resolve(config, nodes)[0],
        )
        self._due: ServerState | None = None
        self._tested = False
        self._overridden: dict[str, Override] = {}

    def _pin(self) -> None:
        """Begin a run, now that parties may come: hold the folder to it, unless it holds another one still."""
        if not self.begins:
            return
        self.durable.update(
            run=self.hub.welcome["run"],
            digest=self.asked.digest(),
            attempt=0,
            settings=self.asked.comparable(),
            roster=list(self.kit.roster),
            incarnations={},
            closed=False,
        )

    def run(self, listen: str, listened: Callable[[int], None], connections: int | None) -> RunReport | None:
        """Serve until all is done and written."""
        if self.durable["closed"] and not self.begins:
            self.tell(f"{self.out}: this run is finished, see report.json there; --fresh starts another one.")
            with listening(self.hub, self.kit, listen, connections=connections) as port:
                listened(port)
                self.hub.say_goodbye(FAREWELL)
            self.store.clear()
            return None
        saved = 0 if self.begins else max(self.store.digests())
        if saved:
            self.telemetry.restore(_telemetry_of(self.store.load(saved, ServerState)))
            self.tell(f"going on after round {saved} or the one before, as soon as all parties are there.")
        with listening(self.hub, self.kit, listen, self._pin, connections) as port:
            listened(port)
            try:
                report = self._until_finished()
                write_atomically(self.out / "report.json", report.to_json().encode())
                self.durable.update(closed=True)
                self.hub.say_goodbye(FAREWELL)
                self.store.clear()
            except Exception as error:  # also a full disk or a fault of the program: nobody is to wait for more
                self.hub.announce_failure(error, FAREWELL)
                raise
            except KeyboardInterrupt:
                self.hub.leave()
                raise
            finally:
                self.saver.close()
            return report

    def _rounds(self) -> dict[int, str]:
        """Return the checkpoints and digests of this run; what --fresh gives up is none of them."""
        return {0: START} if self.fresh else self.store.digests()

    def _give_up_what_was(self) -> None:
        """Remove what --fresh gives up, now that all parties are there, and hold the folder to the new run."""
        removed = self.store.clear() if self.fresh else []
        if removed:
            self.tell(f"starting over: removed {', '.join(str(path) for path in removed)}.")
        self.fresh = False
        self.durable.settle()

    def _until_finished(self) -> RunReport:
        while True:
            try:
                server, script = self._begin()
                self._drive(server, script)
                results = self.hub.results(self.wait)
                return self._report(server, results)
            except NewProcess:
                self.tell("a process was started again: all go back to the last common checkpoint.")
            except GlasuError as error:
                if not self.hub.sets_aside(error):
                    raise

    def _begin(self) -> tuple[Server, Script]:
        """Gather the parties, and bring everyone to the greatest common round."""
        self.saver.settle()
        stated = self.hub.gather(self.wait)
        rounds = {name: own.rounds for name, own in stated.items()}
        config, sizes, classes = self._agreed(stated)
        common = find_common_round([self._rounds(), *rounds.values()])
        if common is None:
            listed = "; ".join(f"{name}: {', '.join(map(str, own)) or 'none'}" for name, own in rounds.items())
            raise CheckpointError(
                f"no checkpoint is common to all (server: {', '.join(map(str, self._rounds())) or 'none'}; "
                f"{listed}). Restore the folder of whoever lost it, or start over with --fresh everywhere."
            )
        self._give_up_what_was()
        attempt = 1 + self.durable["attempt"]
        self.durable.update(attempt=attempt)
        server = Server(config, self.kit.roster, sizes, bytes.fromhex(self.durable["run"]))
        recorded = TelemetryState()
        if common:
            state = self.store.load(common, ServerState)
            server.restore(state)
            recorded = _telemetry_of(state)
        self.telemetry.rewind(recorded)
        self._tested, self._due = False, None
        self._server, script = server, server_script(server)
        self._advance(server, script, None)  # up to what it awaits first
        limits = Limits(config, sizes.num_nodes, classes, len(self.kit.roster))
        self.hub.propose(attempt, common, server.awaited, limits)
        self.hub.confirmed(self.wait)
        self.tell(f"attempt {attempt}: all parties are there; going on after round {common}.")
        return server, script

    def _agreed(self, stated: Mapping[str, Statement]) -> tuple[RunConfig, Sizes, int]:
        """Return the resolved settings, the sizes, and the number of classes, on which all parties agree."""
        facts: dict[str, Any] = {}
        for own in stated.values():
            facts.update(own.facts)
        config, self._overridden = resolve(self.asked, facts["nodes"])
        subset, validation = config.train.evaluate_nodes, facts.get("validation nodes", 0)
        if 0 < subset < validation:
            validation = subset
        return config, Sizes(facts["nodes"], validation, facts.get("test nodes", 0)), facts.get("classes", 0)

    def _drive(self, server: Server, script: Script) -> None:
        """Serve the rounds to their end."""
        while not self._tested:
            messages = self.hub.collect(self.wait, f"in round {server.round}")
            self.saver.settle()
            with self.telemetry.watch.measure("communication"):
                answers = self._advance(server, script, messages)
            if self._due is not None:
                state, self._due = self._due, None
                self.saver.save(state.round, dataclasses.replace(state, traffic=to_plain(self.telemetry.state())))
            with self.telemetry.watch.measure("communication"):
                self.hub.answer(messages, answers, server.awaited)

    def _waited(self, seconds: float) -> None:
        self.telemetry.watch.seconds["waiting"] += seconds

    def _advance(
        self, server: Server, script: Script, messages: list[Message] | None
    ) -> tuple[Message, ...] | list[Message]:
        """Resume the script with one message of every party, note its events, and return the answers."""
        for message in messages or ():
            self.telemetry.sent_to_server(message)
        item = next(script) if messages is None else script.send(messages)
        while isinstance(item, Event):
            self._notice(server, item)
            item = next(script)
        for answer in item:
            self.telemetry.sent_to_clients(answer)
        if messages and begins_exchange(messages[0].key):
            self.telemetry.exchange(messages[0].key)
        return tuple(item)

    def _notice(self, server: Server, event: Event) -> None:
        self.telemetry.observe(event)
        self.observe(event)
        if isinstance(event, Evaluated):
            self._tested = event.split == "test"
            self._scores = self._scores if self._tested else event.metrics
        elif isinstance(event, RoundDone):
            self.status(self.view().status)
            if is_due(server, server.config.train):
                self._due = server.state()

    def view(self) -> View:
        """Return the server as it is now; also for other threads."""
        server = self._server
        traffic, seconds = self.telemetry.traffic.snapshot(), self.telemetry.seconds()
        losses = server.losses[-1:] if server is not None else []
        status = Status(
            round=0 if server is None else server.round,
            num_rounds=self.asked.train.num_rounds,
            attempt=self.durable["attempt"],
            loss=losses[0] if losses else None,
            bytes_to_server=traffic.bytes_to_server,
            bytes_to_clients=traffic.bytes_to_clients,
            seconds=seconds.total,
        )
        return View(
            status=status,
            connected=self.hub.connected(),
            refused=self.hub.refused,
            messages=traffic.messages,
            exchanges=traffic.exchanges,
            bytes_by_phase=dict(traffic.by_phase),
            seconds_by_part=dict(seconds.parts),
            scores=self._scores,
            finished=self.durable["closed"],
        )

    def _report(self, server: Server, results: list[dict[str, Any]]) -> RunReport:
        parties = [
            PartySummary(name, server.sizes.num_nodes, labels=server.owner in (-1, index))
            for index, name in enumerate(self.kit.roster)
        ]
        weights = [printable(result.get("weights_sha256"), 64) for result in results]
        measured = self.telemetry.measurements(server.losses)
        return build_report(server.config, measured, parties, weights, overridden=self._overridden)


def _telemetry_of(state: ServerState) -> TelemetryState:
    return read_record(TelemetryState, state.traffic, "the telemetry of a checkpoint", finite=False)


def opened(out: Path) -> Durable:
    """Return what a server's folder remembers."""
    begun: dict[str, Any] = {"run": None, "digest": None, "settings": {}, "roster": []}
    return Durable(out / SERVING, {**begun, "attempt": 0, "incarnations": {}, "closed": False})


def goes_on(out: Path, durable: Durable, config: RunConfig, roster: Sequence[str]) -> bool:
    """Tell whether a folder holds this run; refuse one of other parties or settings, once a party has come.

    Args:
        out: the folder.
        durable: what it remembers.
        config: the settings, for the network.
        roster: the parties.
    """
    if durable["run"] is None:
        refuse_unknown_checkpoints(out / "checkpoints", SERVING)
        return False
    same_roster, same_settings = durable["roster"] == list(roster), durable["digest"] == config.digest()
    if same_roster and same_settings:
        return True
    came = durable["incarnations"] or durable["attempt"] or durable["closed"]
    if not came and not any((out / "checkpoints").glob(f"*{SUFFIX}")):
        return False
    if not same_roster:
        raise ConfigError(
            f"{out}: holds a run of other parties: {roster_change(durable['roster'], list(roster))}. Restore that "
            "roster (`glasu provision --remove NAME` takes a name off), choose another --out, or start over with "
            "--fresh, which removes its checkpoints."
        )
    raise ConfigError(
        f"{out}: holds a run with other settings: {settings_apart(durable['settings'], config)}. Go on with those, "
        "choose another --out, or start over with --fresh, which removes its checkpoints."
    )


def settings_apart(there: Mapping[str, Any], config: RunConfig) -> str:
    """Say in which settings a run that began differs from what is asked now."""
    here = config.comparable()
    return "; ".join(f"{name} = {there.get(name)!r} there, {here[name]!r} here" for name in _apart(there, here)[:4])


def _apart(there: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    as_read = json.loads(json.dumps(here))
    return [name for name in here if as_read[name] != there.get(name)]


def roster_change(there: list[str], here: list[str]) -> str:
    """Say how the roster has changed since the run began."""
    added, gone = ([name for name in one if name not in other] for one, other in ((here, there), (there, here)))
    told = [f"{', '.join(names)} {verb}" for names, verb in ((added, "added"), (gone, "removed")) if names]
    was = f"it began with {', '.join(there)}"
    return f"{was}; since then {' and '.join(told)}" if told else f"{was}; now their order is {', '.join(here)}"
