"""The server of a prediction between organisations: gather everyone, aggregate, answer who asked; no torch here."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from glasu.config import RunConfig, resolve
from glasu.errors import ConfigError, GlasuError
from glasu.files import write_atomically
from glasu.network.compatibility import for_network, protocol_facts, run_of_attempt
from glasu.network.deduplication import begins_exchange
from glasu.network.frames import Limits
from glasu.network.serve import FAREWELL, opened, roster_change, settings_apart
from glasu.network.server_session import Hub, NewProcess, OnNonsense, Tell
from glasu.network.state_file import Durable
from glasu.network.transport import listening
from glasu.pki.kit import Kit
from glasu.protocol.messages import Exchange, Message
from glasu.protocol.prediction import server_asked
from glasu.protocol.requests import Event
from glasu.protocol.server import Server, Sizes
from glasu.report import versions
from glasu.runtime.checkpoint import START
from glasu.runtime.meter import Meter
from glasu.runtime.output_dir import PREDICTING
from glasu.timing import Clock
from glasu.wire.message_key import RUN_BYTES


def serve_prediction(
    config: RunConfig,
    kit: Kit,
    listen: str,
    out: Path,
    *,
    wait: float = 600.0,
    on_nonsense: OnNonsense = "stop",
    tell: Tell = lambda line: None,
    listened: Callable[[int], None] = lambda port: None,
    clock: Clock = time.perf_counter,
) -> dict[str, Any]:
    """Serve one prediction with the parties' trained models, write prediction.json, and return what it says.

    Args:
        config: the settings of the training.
        kit: the server's; every party of its roster must be there.
        listen: host:port.
        out: the folder of the training's `serve`; prediction.json is written there, too.
        wait: the seconds that a party may be without a connection.
        on_nonsense: whether a party's message that cannot be ends the prediction, or it waits for that party to return.
        tell: is told what happens, in lines.
        listened: is told the port once parties may come.
        clock: tells the seconds for the report.
    """
    config = for_network(config, kit.roster)
    training = _training_of(out, config, kit)
    durable = Durable(out / PREDICTING, {"attempt": 0, "incarnations": {}})
    durable.update(incarnations={})  # every process serves a prediction of its own, for which any folder may come
    welcome = {"config": config.to_dict(), "roster": list(kit.roster), "run": secrets.token_hex(RUN_BYTES)}
    facts = {**protocol_facts(versions(), "prediction"), "training": training}
    hub = Hub(
        kit.roster,
        facts,
        welcome,
        durable,
        lambda: {0: START},
        tell,
        on_nonsense,
        settings=lambda nodes: resolve(config, nodes)[0],
    )
    meter, start = Meter(), clock()
    with listening(hub, kit, listen) as port:
        listened(port)
        tell(f"prediction: this server and all of {', '.join(kit.roster)} must be online until it is done.")
        try:
            nodes = _until_predicted(config, hub, meter, wait)
            report = {
                "parties": list(kit.roster),
                "nodes": nodes,
                "traffic": meter.to_dict(),
                "seconds": {"total": clock() - start},
                "versions": versions(),
            }
            write_atomically(out / "prediction.json", (json.dumps(report, indent=2) + "\n").encode())
            hub.say_goodbye(FAREWELL)
        except Exception as error:  # also a full disk or a fault of the program: nobody is to wait for more
            hub.announce_failure(error, FAREWELL)
            raise
        except KeyboardInterrupt:
            hub.leave()
            raise
        return report


def _training_of(out: Path, config: RunConfig, kit: Kit) -> str:
    """Return the run that was trained in a folder; refuse one that is not finished, or not of these settings."""
    trained = opened(out)
    if not trained["closed"]:
        raise ConfigError(
            f"{out}: holds no finished training of this server; --out must be the folder of a `glasu serve` that has "
            "come to its end."
        )
    if trained["roster"] != list(kit.roster):
        raise ConfigError(
            f"{out}: holds a training of other parties: {roster_change(trained['roster'], list(kit.roster))}. Restore "
            "that roster (`glasu provision --remove NAME` takes a name off)."
        )
    if trained["digest"] != config.digest():
        apart = settings_apart(trained["settings"], config)
        raise ConfigError(f"{out}: holds a training with other settings: {apart}. Predict with those.")
    return str(trained["run"])


def _until_predicted(config: RunConfig, hub: Hub, meter: Meter, wait: float) -> int:
    while True:
        try:
            server, script = _begin(config, hub, wait)
            nodes = _drive(hub, server, script, meter, wait)
            hub.results(wait)
            return nodes
        except NewProcess:
            hub.tell("a process was started again: all predict once more.")
        except GlasuError as error:
            if not hub.sets_aside(error):
                raise


def _begin(asked: RunConfig, hub: Hub, wait: float) -> tuple[Server, Exchange[int]]:
    """Gather the parties; every attempt is a run of its own, so that no key ever has two contents."""
    stated = hub.gather(wait)
    facts: dict[str, Any] = {}
    for own in stated.values():
        facts.update(own.facts)
    config, _ = resolve(asked, facts["nodes"])
    attempt = 1 + hub.durable["attempt"]
    hub.durable.update(attempt=attempt)
    run = run_of_attempt(hub.welcome["run"], attempt)
    server = Server(config, tuple(hub.links), Sizes(facts["nodes"], 0, 0), run)
    script = server_asked(server)
    next(script)  # up to what it awaits first
    limits = Limits(config, facts["nodes"], facts.get("classes", 0), len(hub.links))
    hub.propose(attempt, 0, server.awaited, limits)
    hub.confirmed(wait)
    hub.tell(f"attempt {attempt}: all parties are there; predicting.")
    return server, script


def _drive(hub: Hub, server: Server, script: Exchange[int], meter: Meter, wait: float) -> int:
    """Serve the exchanges to their end, and return for how many nodes."""
    while True:
        messages = hub.collect(wait, "in the prediction")
        for message in messages:
            meter.to_server(message)
        nodes = None
        try:
            item = script.send(messages)
        except StopIteration as finished:
            item, nodes = server.answers, finished.value
        assert not isinstance(item, Event)  # a server that evaluates nothing has none
        _count(meter, messages, item)
        hub.answer(messages, item, server.awaited)
        if nodes is not None:
            return int(nodes)


def _count(meter: Meter, messages: list[Message], answers: Any) -> None:
    for answer in answers:
        meter.to_client(answer)
    if begins_exchange(messages[0].key):
        meter.exchanged(messages[:1])
