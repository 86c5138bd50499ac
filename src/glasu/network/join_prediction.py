"""A party in a prediction between organisations: compute with the own trained weights, receive what it may receive."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from glasu.config import resolve
from glasu.data.party import PartyData
from glasu.errors import ConfigError, DataError, GlasuError, SettingsError, TransportError
from glasu.files import write_atomically
from glasu.model.blocks import NodeSet
from glasu.network.client_session import NewAttempt, Session
from glasu.network.compatibility import (
    differences,
    in_one_line,
    names_digest,
    offered,
    run_of_attempt,
    two_columns,
)
from glasu.network.fencing import STARTS, introduction, met, next_start
from glasu.network.frames import Limits
from glasu.network.join import Tell
from glasu.network.party_setup import build_client, party_facts
from glasu.network.sanitize import SENTENCES, printable
from glasu.network.state_file import Durable
from glasu.pki.kit import Kit
from glasu.protocol.client import Client
from glasu.protocol.messages import timed
from glasu.protocol.prediction import client_asking
from glasu.protocol.requests import Event
from glasu.report import versions
from glasu.runtime.checkpoint import START
from glasu.runtime.inprocess import one_thread_each
from glasu.runtime.meter import Meter
from glasu.runtime.output_dir import JOINING
from glasu.runtime.predictions import write_predictions
from glasu.runtime.trained_model import TrainedModel, load_weights
from glasu.timing import Clock
from glasu.wire.message_key import ATTEMPTS


@dataclass(frozen=True, eq=False)
class Predicted:
    """What a party received; nothing where others asked, or another party has the labels."""

    nodes: NodeSet  # positions: first those that it asked for, as it asked, then those that others did
    probabilities: NDArray[Any]
    file: Path | None  # where they were written


def join_prediction(
    party: PartyData,
    kit: Kit,
    server: str,
    out: Path,
    asked: NodeSet,
    *,
    file_format: str = "csv",
    wait: float = 600.0,
    observe: Callable[[Event], None] = lambda event: None,
    tell: Tell = lambda line: None,
    clock: Clock = time.perf_counter,
) -> Predicted:
    """Take part in one prediction; write prediction.json and, where this party receives any, predictions.<format>.

    Args:
        party: what this party owns now.
        kit: its own.
        server: host:port.
        out: the folder of the training's `join`, with the party's model.
        asked: positions of the nodes that this party asks for; empty: it helps others.
        file_format: "csv" or "parquet".
        wait: seconds to wait for the server, and for the others.
        observe: is told how far a long inference is.
        tell: is told what happens, in lines.
        clock: tells the seconds for the report.
    """
    if party.name != kit.name:
        raise ConfigError(
            f"the data is of party {party.name!r} and the kit of party {kit.name!r}; one of them is wrong."
        )
    with one_thread_each():
        predicting = _Predicting(party, kit, out, asked, file_format, observe, tell, clock)
        return predicting.run(server, wait)


class _Predicting:
    """One process of a party."""

    def __init__(
        self,
        party: PartyData,
        kit: Kit,
        out: Path,
        asked: NodeSet,
        file_format: str,
        observe: Callable[[Event], None],
        tell: Tell,
        clock: Clock,
    ) -> None:
        self.kit, self.out, self.asked, self.format = kit, out, np.asarray(asked, np.int64), file_format
        self.observe, self.tell, self.clock, self.meter = observe, tell, clock, Meter()
        self.durable = Durable(out / JOINING, {**STARTS, "run": None, "finished": None})
        if self.durable["finished"] is None:
            raise ConfigError(
                f"{out}: holds no finished training of this party; --out must be the folder of a `glasu join` that "
                "has come to its end."
            )
        self.model = TrainedModel.load(out)
        self.model.check_data([party])
        self.party = (
            self.model.labelled([party])[0]
            if self.model.classes
            else dataclasses.replace(party, labels=None, classes=(), splits=None)
        )
        self.roster = _trained_roster(out)
        next_start(self.durable)
        self.attempt = 0
        self.finished: dict[str, Any] | None = None
        self.start = clock()

    def run(self, server: str, wait: float) -> Predicted:
        """Take part until everyone has what it may have."""
        session = Session(self.kit, server, self._hello, wait, self.tell)
        try:
            welcome = session.open()
            met(self.durable)
            client = self._prepare(session, welcome)
            return self._predict(session, client)
        except Exception as error:
            session.fail(error)
            raise
        finally:
            session.close()

    def _hello(self) -> dict[str, Any]:
        return {
            "facts": self._facts(),
            **introduction(self.durable),
            "run": None,
            "attempt": self.attempt,
            "finished": self.finished,
            "rounds": {0: START},
        }

    def _facts(self) -> dict[str, Any]:
        """Return what must be equal everywhere: also that all models come from one training."""
        classes = self.model.classes
        facts = {**party_facts(self.party, "prediction"), "training": self.durable["run"]}
        return facts | ({"classes": len(classes), "class names (SHA-256)": names_digest(classes)} if classes else {})

    def _prepare(self, session: Session, welcome: Mapping[str, Any]) -> Client:
        """Check that the server serves the training of this model, and build this party's part."""
        try:
            self._check(welcome)
        except GlasuError as error:
            session.decline(error)
            raise
        config, party = self.model.config, self.party
        place = welcome["index"], welcome["roster"]
        client = build_client(config, party, *place, self.clock, self.model.scales[0])
        load_weights(client, self.model.weights[0])
        client.incarnation = self.durable["incarnation"]
        session.moved = self._check
        session.allow(Limits(config, party.num_nodes, len(party.classes), client.num_clients))
        session.report = lambda: {
            "digest": config.digest(),
            "settings": config.comparable(),
            "rounds": {0: START},
            "facts": self._facts(),
        }
        session.send("prepared", **session.report())
        others = ", ".join(name for name in self.roster if name != party.name)
        self.tell(f"prediction: the server and {others} must be online, too, until it is done; waiting for them.")
        return client

    def _check(self, welcome: Mapping[str, Any]) -> None:
        if list(welcome["roster"]) != self.roster:
            listed = printable(", ".join(map(str, welcome["roster"])), SENTENCES)
            raise ConfigError(
                f"the model was trained by the parties {', '.join(self.roster)}; the server's roster is "
                f"{listed}; bring back the server's kit.toml of then, or change the roster with "
                "`glasu provision --add` or `--remove`."
            )
        config, _ = resolve(offered(welcome["config"]), self.party.num_nodes)
        rows = differences(self.model.config.comparable(), config.comparable())
        if rows:
            raise SettingsError(
                f"the server's settings are not those of the training: {in_one_line(rows, 'trained', 'got')}.",
                two_columns(rows, f"{self.party.name} trained", "the server"),
            )

    def _predict(self, session: Session, client: Client) -> Predicted:
        begin = session.begin()
        if begin is None:
            raise ConfigError("the server ended the prediction before this party took part in it; start it again.")
        while True:
            try:
                self.attempt = int(begin["attempt"])
                client.attempt = self.attempt % ATTEMPTS
                client.run = run_of_attempt(session.welcome["run"], self.attempt)
                session.send("ready", attempt=begin["attempt"], digest=begin["digest"])
                predicted = self._written(client, *self._drive(session, client))
                self.finished = {"received": len(predicted.nodes)}
                session.send("finished", **self.finished)
                self._take_leave(session)
                return predicted
            except NewAttempt as attempt:
                begin, self.finished = attempt.begin, None
                self.tell("a process was started again: predicting once more.")

    def _take_leave(self, session: Session) -> None:
        """Wait until everyone is finished; a server that is gone for good takes nothing away from what is written."""
        try:
            session.wait_for_goodbye()
        except TransportError as error:
            self.tell(f"{error} The results of this party are complete.")

    def _drive(self, session: Session, client: Client) -> tuple[NodeSet, NDArray[Any]]:
        """Run the script to its end, and return which nodes this party receives, and their class probabilities."""
        script, answers = timed(client_asking(client, self.asked), client.watch.measure("evaluation")), None
        while True:
            try:
                item = next(script) if answers is None else script.send(answers)
            except StopIteration as finished:
                nodes, probabilities = finished.value
                return nodes, probabilities
            answers = None
            if isinstance(item, Event):
                self.observe(item)
                continue
            for message in item:
                self.meter.to_server(message)
            answers = session.exchange(item)
            for answer in answers:
                self.meter.to_client(answer)
            self.meter.exchanged(item)

    def _written(self, client: Client, nodes: NodeSet, probabilities: NDArray[Any]) -> Predicted:
        """Write what was received, in the order in which it was asked for, and what it cost."""
        file = None
        if len(nodes):
            order = np.concatenate([self.asked, np.setdiff1d(nodes, self.asked)])
            nodes, probabilities = order, probabilities[np.searchsorted(nodes, order)]
            file = self.out / f"predictions.{self.format}"
            ids, config = self.party.ids[nodes], client.config
            write_predictions(file, ids, probabilities, self.model.classes, config.train.task)
        elif len(self.asked):
            owner = client.names[client.owner]
            self.tell(f"the labels are with party {owner!r}: it alone receives class probabilities, this party none.")
        ledger = client.release.ledger
        report = {
            "party": client.party.name,
            "parties": self.roster,
            "training": self.durable["run"],
            "asked": len(self.asked),
            "received": len(nodes),
            "traffic": self.meter.to_dict(),
            "seconds": {"total": self.clock() - self.start, **client.watch.seconds},
            "privacy": {"ledger": [{"party": client.party.name, "head": ledger.head.hex(), "releases": ledger.rows()}]},
            "versions": versions(),
        }
        write_atomically(self.out / "prediction.json", (json.dumps(report, indent=2) + "\n").encode())
        return Predicted(nodes, probabilities, file)


def _trained_roster(out: Path) -> list[str]:
    """Return who trained together, in client order."""
    try:
        return [str(name) for name in json.loads((out / "report.json").read_bytes())["parties"]]
    except (OSError, ValueError, KeyError, TypeError):
        raise DataError(f"{out / 'report.json'}: cannot be read; restore the folder that `glasu join` wrote.") from None
