"""ServerApp: run `glasu serve`, open the session with one message per node, wait for all to be done.

Flower carries these few messages, the logs and the end; every tensor travels on the streams that `glasu serve` offers.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterable, Sequence
from typing import Any

from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.serverapp import Grid, ServerApp

from glasu.errors import ProtocolError, TrainingError, TransportError
from glasu.integrations.flower.command import Command, running
from glasu.integrations.flower.settings import ServerSettings
from glasu.pki.kit import open_kit

TTL = 30 * 86400.0  # seconds; by default Flower gives up a message, and the training with it, after 12 hours
PAUSE = 1.0


def tell(line: str) -> None:
    """Write to the run's log, which `flwr log` shows."""
    print(line, flush=True)


def check_alive(serving: Command) -> None:
    """Stop when the server failed: no party could end its part without it."""
    if serving.code():
        raise TrainingError(f"glasu serve ended with exit code {serving.wait()}; the lines above say why.")


def nodes_online(grid: Grid, roster: Sequence[str], wait: float, serving: Command) -> list[int]:
    """Wait until there is a node for every party of the roster, and not one more."""
    deadline = time.monotonic() + wait
    while True:
        nodes = sorted(grid.get_node_ids())
        if len(nodes) > len(roster):
            raise TransportError(
                f"{len(nodes)} SuperNodes are online and the roster has {len(roster)} parties ({', '.join(roster)}); "
                "run in a federation of these parties only."
            )
        if len(nodes) == len(roster):
            return nodes
        if time.monotonic() > deadline:
            raise TransportError(
                f"waited {wait:.0f} s for the SuperNodes of {', '.join(roster)}; {len(nodes)} of them are online."
            )
        check_alive(serving)
        time.sleep(PAUSE)


def run_served(settings: ServerSettings, serving: Command, listening: threading.Event) -> str:
    """Wait until parties may come, and return the id of the run: a message sent earlier could open nothing."""
    while not listening.wait(PAUSE):
        check_alive(serving)
    run: str = json.loads((settings.out / "serving.json").read_bytes())["run"]
    return run


def open_session(grid: Grid, nodes: Iterable[int], session: dict[str, str]) -> set[str]:
    """Send the one message that each node gets; return their ids."""
    messages = [Message(RecordDict({"session": ConfigRecord(session)}), node, "train", ttl=TTL) for node in nodes]
    sent = [str(found) for found in grid.push_messages(messages) if found]
    if len(sent) < len(messages):
        raise TransportError(f"Flower took {len(sent)} of {len(messages)} messages; is a SuperNode gone?")
    return set(sent)


def replies_of(grid: Grid, waiting: set[str], serving: Command) -> list[Message]:
    """Wait for the end of every party's part; the first that fails ends the session."""
    replies: list[Message] = []
    while waiting:
        for reply in grid.pull_messages(waiting):
            if reply.has_error():
                raise TrainingError(f"node {reply.metadata.src_node_id}: {reply.error.reason}")
            waiting = waiting - {reply.metadata.reply_to_message_id}
            replies.append(reply)
        check_alive(serving)
        time.sleep(PAUSE)
    return replies


def check_weights(report: dict[str, Any], replies: Iterable[Message]) -> None:
    """Compare what the parties told Flower with what the server was told on the streams."""
    names = [party["name"] for party in report["parties"]]
    expected = dict(zip(names, report["weights_sha256"], strict=True))
    told = {reply.content["facts"]["party"]: reply.content["facts"]["weights_sha256"] for reply in replies}
    if told != expected:
        raise ProtocolError(f"the parties told Flower of the weights {told}, and the server of {expected}.")


def summary(report: dict[str, Any], replies: Iterable[Message]) -> list[str]:
    """Return the lines that end the run's log."""
    scores = ", ".join(f"{name} {value:.4f}" for name, value in report["test"].items() if isinstance(value, float))
    lines = [f"glasu: test: {scores}"]
    for reply in replies:
        facts, metrics = reply.content["facts"], reply.content["metrics"]
        sent = metrics["bytes_to_server"] / 1e6
        lines.append(
            f"glasu: {facts['party']} (node {reply.metadata.src_node_id}): {sent:.1f} MB sent in "
            f"{metrics['exchanges']} exchanges, {metrics['seconds']:.1f} s, weights {facts['weights_sha256']}"
        )
    return lines


def main(grid: Grid, context: Context) -> None:
    """Serve one session to its end."""
    settings = ServerSettings.read(context.run_config)
    roster = open_kit(settings.kit, "server").roster
    listening = threading.Event()

    def heard(line: str) -> None:
        tell(line)
        if "listening on" in line:
            listening.set()

    with running(settings.words(), heard) as serving:
        session = {"name": settings.session, "run": run_served(settings, serving, listening)}
        nodes = nodes_online(grid, roster, settings.wait, serving)
        tell(f"glasu: session {settings.session!r}: one message to each of {len(nodes)} nodes")
        replies = replies_of(grid, open_session(grid, nodes, session), serving)
        serving.wait()
        check_alive(serving)
    report = json.loads((settings.out / "report.json").read_bytes())
    check_weights(report, replies)
    for line in summary(report, replies):
        tell(line)


app = ServerApp()
app.main()(main)
