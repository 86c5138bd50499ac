"""A party over the network: check the settings, train from the common round on, write its own results."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from glasu.config import RunConfig, resolve
from glasu.data.digest import data_digest
from glasu.data.party import PartyData
from glasu.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    GlasuError,
    ProtocolError,
    SettingsError,
    TransportError,
)
from glasu.files import write_atomically
from glasu.model.split import weights_digest
from glasu.network.client_session import NewAttempt, Session
from glasu.network.compatibility import in_one_line, offered, refuse_unfit_for_network, two_columns
from glasu.network.fencing import STARTS, introduction, met, next_start
from glasu.network.frames import Limits
from glasu.network.party_setup import build_client, check_memory, fitted, label_facts, party_facts, unexpected
from glasu.network.sanitize import SENTENCES, printable
from glasu.network.state_file import Durable
from glasu.network.status import Status
from glasu.pki.kit import Kit
from glasu.protocol.client import Client
from glasu.protocol.messages import Message
from glasu.protocol.requests import Event, RoundDone
from glasu.protocol.rounds import client_script
from glasu.protocol.state import ClientState
from glasu.records import read_record, to_plain
from glasu.report import LedgerSummary, Seconds, SplitScores, build_party_report
from glasu.runtime.checkpointing import START, Saver, Store, is_due, refuse_unknown_checkpoints
from glasu.runtime.inprocess import one_thread_each
from glasu.runtime.output_dir import JOINING, OTHER_DATA
from glasu.runtime.telemetry import Cost, TrafficCounter
from glasu.runtime.trained_model import TrainedModel
from glasu.timing import Clock
from glasu.wire.message_key import ATTEMPTS

Tell = Callable[[str], None]
DEFAULTS = RunConfig().comparable()


def join(
    party: PartyData,
    kit: Kit,
    server: str,
    out: Path,
    *,
    expect: RunConfig | None = None,
    run: str | None = None,
    fresh: bool = False,
    wait: float = 600.0,
    max_memory: int | None = None,
    observe: Callable[[Event], None] = lambda event: None,
    tell: Tell = lambda line: None,
    status: Callable[[Status], None] = lambda status: None,
    clock: Clock = time.perf_counter,
) -> dict[str, Any]:
    """Take part in one run to its end, write report.json and model/, and return the report.

    Args:
        party: what this party owns.
        kit: its own; the name in its certificate is the party's.
        server: host:port.
        out: the folder for results and checkpoints; a run that it holds goes on.
        expect: refuse settings that differ from these.
        run: take part in the run of this id only.
        fresh: start over, and remove what is there once the run begins.
        wait: seconds to wait for the server, and for the others.
        max_memory: the bytes that the server's settings may make the model need; None: half of this machine's memory.
        observe: is told of every round.
        tell: is told what happens, in lines.
        status: is told after every round where this party stands.
        clock: tells the seconds for the report.
    """
    if party.name != kit.name:
        raise ConfigError(
            f"the data is of party {party.name!r} and the kit of party {kit.name!r}; one of them is wrong."
        )
    with one_thread_each():
        joining = _Joining(party, kit, out, expect, run, fresh, max_memory, observe, tell, status, clock)
        return joining.run(server, wait)


class _Joining:
    """One process of a party."""

    def __init__(
        self,
        party: PartyData,
        kit: Kit,
        out: Path,
        expect: RunConfig | None,
        run: str | None,
        fresh: bool,
        max_memory: int | None,
        observe: Callable[[Event], None],
        tell: Tell,
        status: Callable[[Status], None],
        clock: Clock,
    ) -> None:
        self.status, self.max_memory = status, max_memory
        self.party, self.kit, self.out, self.expect, self.only = party, kit, out, expect, run
        self.observe, self.tell, self.clock, self.meter = observe, tell, clock, TrafficCounter()
        defaults = {**STARTS, "run": None, "digest": None, "data": None, "finished": None, "closed": False}
        defaults["party"] = party.name
        self.durable = Durable(out / JOINING, defaults)
        self.checkpoints = out / "checkpoints"
        self.fresh = fresh  # until the run begins: what the folder holds is given up then, not before
        held = self._held("run")
        if held is None and not fresh:
            refuse_unknown_checkpoints(self.checkpoints, JOINING)
        if None not in (run, held) and run != held:
            raise ConfigError(f"{out}: holds a party's part of run {held}, not of {run}; give the --out of that one.")
        next_start(self.durable)
        self.data = data_digest(party)
        if held is not None and self.durable["data"] != self.data:
            raise ConfigError(f"{out}: {OTHER_DATA}.")
        self.start, self.before = clock(), 0.0
        self.client: Client | None = None
        self.attempt = 0
        self.saver: Saver | None = None

    def _held(self, name: str) -> Any:
        """Return what the folder says of the run that this party goes on with; None where it starts over."""
        return None if self.fresh else self.durable[name]

    def run(self, server: str, wait: float) -> dict[str, Any]:
        """Take part until all is done and written."""
        if self._held("closed"):
            report = self._written()
            self._refuse_finished_with_others(RunConfig.from_dict(report["config"], "the settings of the finished run"))
            self.tell(f"{self.out}: this run is finished; --fresh takes part in another one.")
            return report
        session = Session(self.kit, server, self._hello, wait, self.tell)
        try:
            welcome = session.open()
            met(self.durable)
            client = self._prepare(session, welcome)
            report = self._train(session, client)
            self.durable.update(closed=True)
            self._store().clear()
            return report
        except TransportError as error:
            if self._held("finished") is None:
                raise
            self.tell(f"{error} The results of this party are complete.")
            return self._written()
        except Exception as error:
            session.fail(error)
            raise
        finally:
            if self.saver is not None:
                self.saver.close()
            session.close()

    def _written(self) -> dict[str, Any]:
        report: dict[str, Any] = json.loads((self.out / "report.json").read_bytes())
        return report

    def _hello(self) -> dict[str, Any]:
        """Say who this is and what it has; nothing of what the nodes are like."""
        return {
            "facts": self._facts(self.party if self.client is None else self.client.party),
            **introduction(self.durable),
            "run": self._held("run"),
            "only": self.only,
            "fresh": self.fresh,
            "attempt": self.attempt,
            "finished": self._held("finished"),
            "rounds": self._rounds(),
        }

    def _facts(self, party: PartyData, *, labels: bool = False) -> dict[str, Any]:
        """Return what must be equal everywhere; what concerns labels is said only where the settings ask for them."""
        facts = party_facts(party, "training")
        return facts | label_facts(party) if labels else facts

    def _store(self) -> Store:
        return Store(self.checkpoints, f"party {self.party.name} in run {self.durable['run']}")

    def _rounds(self) -> dict[int, str]:
        if self.saver is not None:
            self.saver.settle()
        damaged: list[str] = []
        rounds = {0: START} if self._held("run") is None else self._store().digests(damaged)
        for line in damaged:
            self.tell(f"not used: {line}")
        return rounds

    def _prepare(self, session: Session, welcome: Mapping[str, Any]) -> Client:
        """Check the run that the server offers, and build this party's part of the model."""
        try:
            config, party = self._accepted(welcome)
        except GlasuError as error:
            session.decline(error)
            raise
        client = build_client(config, party, welcome["index"], welcome["roster"], self.clock)
        client.run, client.incarnation = bytes.fromhex(welcome["run"]), self.durable["incarnation"]
        self.client = client
        session.moved = lambda other: self._move(client, welcome, other)
        session.allow(Limits(config, party.num_nodes, len(party.classes), client.num_clients))
        session.report = lambda: {
            "digest": config.digest(),
            "settings": config.comparable(),
            "rounds": self._rounds(),
            "facts": {**self._facts(party, labels=True), "parties": client.num_clients},
        }
        session.send("prepared", **session.report())
        return client

    def _move(self, client: Client, welcome: Mapping[str, Any], other: Mapping[str, Any]) -> None:
        """Take part in another run than the one that this party was welcomed to, where that had not begun."""
        if any(other.get(name) != welcome[name] for name in ("config", "roster", "index")):
            raise TransportError(
                "the server has begun another run, with other settings, since this party came; start the same command "
                "again."
            )
        client.run = bytes.fromhex(other["run"])

    def _accepted(self, welcome: Mapping[str, Any]) -> tuple[RunConfig, PartyData]:
        config = offered(welcome["config"])
        refuse_unfit_for_network(config)
        self._find_place(welcome["roster"], welcome["index"], config.data.num_clients)
        shown = {name: value for name, value in config.comparable().items() if value != DEFAULTS.get(name)}
        self.tell(f"the run: {', '.join(f'{name} = {value!r}' for name, value in shown.items()) or 'all defaults'}.")
        if self.expect is not None and (rows := unexpected(config, self.expect)):
            raise SettingsError(
                f"the server's settings are not those of --expect: {in_one_line(rows, 'expected', 'got')}; agree with "
                "the server's operator on one run file.",
                two_columns(rows, f"{self.party.name} expects", "the server"),
            )
        check_memory(config, self.party, self.max_memory)
        config, party = fitted(config, self.party)
        if self._held("digest") not in (None, config.digest()):
            raise ConfigError(
                "the server's settings are not those with which this run began; serve those again, or start over with "
                "--fresh at the server and at every party."
            )
        return config, party

    def _refuse_finished_with_others(self, config: RunConfig) -> None:
        """Refuse to call a run finished that had other settings than those that are expected."""
        if self.expect is None:
            return
        expect, _ = resolve(self.expect.replace(data={"num_clients": config.data.num_clients}), self.party.num_nodes)
        if rows := unexpected(config, expect):
            raise ConfigError(
                f"{self.out}: holds a finished run with other settings than those of --expect: "
                f"{in_one_line(rows, 'expected', 'there')}; for another training give another --out."
            )

    def _find_place(self, roster: Sequence[str], index: int, num_clients: int) -> None:
        """Refuse a run in which this party would be somebody else, or whose M is not the number of its parties."""
        listed = printable(", ".join(map(str, roster)), SENTENCES)
        if len(roster) != num_clients or not 0 <= index < num_clients:
            raise ConfigError(
                f"the server's roster ({listed}; this party is number {index}) does not fit its settings, "
                f"data.num_clients={num_clients}; all must be told of the same parties."
            )
        if roster[index] != self.party.name:
            raise ConfigError(
                f"the server's roster ({listed}) takes this party for {printable(roster[index])!r}, for that is the "
                f"name in its certificate; use the kit of {self.party.name!r}."
            )

    def _train(self, session: Session, client: Client) -> dict[str, Any]:
        """Train until the server says that everyone is finished; every attempt begins where the server says."""
        first, begin = client.state(), session.begin()
        if begin is None:  # this party's last process had heard no more of it
            return self._written()
        self._settle_in(client)
        where = printable(f"attempt {begin['attempt']}: all parties are there; going on after round {begin['round']}.")
        self.tell(where)
        while True:
            try:
                self.durable.update(finished=None)  # what was finished before is done once more
                self._go_to(client, first, begin)
                session.send("ready", attempt=begin["attempt"], digest=begin["digest"])
                self._drive(session, client)
                report = self._write_results(client)
                self.durable.update(finished={"weights_sha256": report["weights_sha256"][0]})
                session.send("finished", **self.durable["finished"])
                session.wait_for_goodbye()
                return report
            except NewAttempt as attempt:
                begin = attempt.begin
                self.tell(printable(f"a process was started again: going on after round {begin['round']}."))

    def _settle_in(self, client: Client) -> None:
        """Hold the folder to this run, now that it begins with this party, and remove what --fresh gives up."""
        if self.fresh:
            removed = self._store().clear()
            if removed:
                self.tell(f"starting over: removed {', '.join(str(path) for path in removed)}.")
        given_up = {"finished": None, "closed": False} if self.fresh else {}
        self.durable.update(run=client.run.hex(), digest=client.config.digest(), data=self.data, **given_up)
        met(self.durable, begun=True)
        self.fresh = False
        self._store().remove_partial_files()
        self.saver = Saver(self._store())

    def _go_to(self, client: Client, first: ClientState, begin: Mapping[str, Any]) -> None:
        """Become what this party was after the proposed round, if the checkpoint is the one that was meant."""
        assert self.saver is not None
        self.saver.settle()
        state, round_index = first, int(begin["round"])
        if round_index:
            state = self._checkpoint(round_index, begin["digest"])
            if self.meter.messages == 0 and state.traffic:
                cost = read_record(Cost, state.traffic, "the cost in a checkpoint", finite=False)
                self.meter.restore(cost.traffic)
                self.before = cost.seconds.total
        client.restore(dataclasses.replace(state, incarnation=client.incarnation))
        self.attempt = int(begin["attempt"])
        client.attempt = self.attempt % ATTEMPTS

    def _checkpoint(self, round_index: int, digest: str) -> ClientState:
        """Return the checkpoint of a round, if it is still the one that was proposed."""
        assert self.saver is not None
        store = self.saver.store
        found = store.digests().get(round_index)
        if found == digest:
            with suppress(DataError):  # it was intact a moment ago
                return store.load(round_index, ClientState)
        here, there = found or "none", printable(digest or "none", 64)
        raise CheckpointError(
            f"party {self.party.name!r}: the checkpoint of round {round_index} is gone, or another one: expected "
            f"SHA-256 {there}, found {here}. Restore its --out folder, or start over with --fresh everywhere."
        )

    def _drive(self, session: Session, client: Client) -> None:
        """Run the script to its end."""
        assert self.saver is not None
        script, answers = client_script(client), None
        while True:
            try:
                item = next(script) if answers is None else script.send(answers)
            except StopIteration:
                return
            answers = None
            if isinstance(item, Event):
                self.observe(item)
                if isinstance(item, RoundDone):
                    self._after_round(client, item)
                continue
            self.saver.settle()
            for message in item:
                self.meter.sent_to_server(message)
            with client.watch.measure("communication"):
                answers = session.exchange(item, client.look_ahead)
            self._check(client, answers)
            for answer in answers:
                self.meter.sent_to_clients(answer)
            self.meter.exchange(item[0].key)

    def _after_round(self, client: Client, done: RoundDone) -> None:
        """Save what is due, and tell where this party stands."""
        assert self.saver is not None
        cost = self._cost()
        if is_due(client, client.config.train):
            self.saver.save(client.round, client.state(to_plain(cost)))
        self.status(
            Status(
                round=client.round,
                num_rounds=client.config.train.num_rounds,
                attempt=client.attempt,
                loss=done.loss,
                bytes_to_server=self.meter.bytes_to_server,
                bytes_to_clients=self.meter.bytes_to_clients,
                seconds=cost.seconds.total,
            )
        )

    def _check(self, client: Client, answers: list[Message]) -> None:
        for answer in answers:
            if answer.key.run != client.run:
                raise ProtocolError(
                    f"{answer.key}: expected an answer in run {client.run.hex()}, got one in run "
                    f"{answer.key.run.hex()} from the server."
                )

    def _cost(self) -> Cost:
        return Cost(self.meter.snapshot(), Seconds(self.before + self.clock() - self.start))

    def _write_results(self, client: Client) -> dict[str, Any]:
        """Write the selected weights and the report of this party."""
        names, party = client.names, client.party
        TrainedModel(
            config=client.config,
            classes=party.classes,
            names=(party.name,),
            scales=(client.scale,),
            num_features=(party.num_features,),
            columns=(party.columns_digest(),),
            weights=(client.best_weights,),
        ).save(self.out / "model")
        cost = self._cost()
        report = build_party_report(
            client.config,
            party=party.name,
            parties=names,
            run=client.run.hex(),
            test=SplitScores.of(client.tested) if client.tested else None,
            traffic=cost.traffic,
            seconds=Seconds(cost.seconds.total, dict(client.watch.seconds)),
            weights_sha256=weights_digest(client.best_weights),
            ledger=LedgerSummary.of(party.name, client.release.ledger),
        )
        write_atomically(self.out / "report.json", report.to_json().encode())
        return report.to_dict()
