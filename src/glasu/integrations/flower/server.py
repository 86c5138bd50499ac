"""ServerApp: run `glasu serve`, send one message to every node, and wait until all have finished.

Flower transmits only these messages and the logs. All tensors are sent on the gRPC streams of `glasu serve`.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.serverapp import Grid, ServerApp

from glasu.errors import ProtocolError, TrainingError, TransportError
from glasu.integrations.flower.command import ChildCommand, print_line, run_command
from glasu.integrations.flower.settings import ServerSettings
from glasu.network.address import split_address
from glasu.network.run_folder import FinishedTraining, open_serving, read_report
from glasu.pki.kit import open_kit

TTL = 30 * 86400.0  # seconds; with Flower's default, a training run would end after 12 hours
PAUSE = 1.0


def check_alive(serving: ChildCommand) -> None:
    """Raise an error if the server failed, because no party can finish without it."""
    if serving.poll():
        raise TrainingError(f"glasu serve ended with exit code {serving.wait()}; see the lines above.")


def wait_for_nodes(grid: Grid, roster: Sequence[str], wait: float, serving: ChildCommand) -> list[int]:
    """Wait until the number of nodes equals the number of parties; refuse more nodes."""
    deadline = time.monotonic() + wait
    while True:
        nodes = sorted(grid.get_node_ids())
        if len(nodes) > len(roster):
            raise TransportError(
                f"{len(nodes)} SuperNodes are online, but the roster has {len(roster)} parties ({', '.join(roster)}); "
                "use a federation of these parties only."
            )
        if len(nodes) == len(roster):
            return nodes
        if time.monotonic() > deadline:
            raise TransportError(
                f"after {wait:.0f} s, only {len(nodes)} of {len(roster)} SuperNodes ({', '.join(roster)}) are online."
            )
        check_alive(serving)
        time.sleep(PAUSE)


def wait_for_run(settings: ServerSettings, serving: ChildCommand) -> str:
    """Wait until the server listens; return the id of the run. Nodes cannot join before that."""
    while True:
        # The server writes serving.json after it has bound its address.
        if accepts_connections(settings.listen) and (run := open_serving(settings.folder).value.run):
            return run
        check_alive(serving)
        time.sleep(PAUSE)


def accepts_connections(address: str) -> bool:
    """Return whether a process on this machine listens at the address."""
    host, port = split_address(address)
    try:
        with socket.create_connection(("localhost" if host in ("0.0.0.0", "::") else host, port), PAUSE):
            return True
    except OSError:
        return False


def open_session(grid: Grid, nodes: Iterable[int], session: dict[str, str]) -> set[str]:
    """Send one message to each node; return the ids of the messages."""
    messages = [Message(RecordDict({"session": ConfigRecord(session)}), node, "train", ttl=TTL) for node in nodes]
    sent = [str(found) for found in grid.push_messages(messages) if found]
    if len(sent) < len(messages):
        raise TransportError(
            f"Flower accepted {len(sent)} of {len(messages)} messages; check that all SuperNodes are online."
        )
    return set(sent)


def collect_replies(grid: Grid, waiting: set[str], serving: ChildCommand) -> list[Message]:
    """Wait for the replies of all parties; the first failure ends the session."""
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


def check_weights(report: FinishedTraining, replies: Iterable[Message]) -> None:
    """Compare the weight digests that the parties sent over Flower and over the gRPC streams."""
    expected = dict(zip((party.name for party in report.parties), report.weights_sha256, strict=True))
    received = {reply.content["facts"]["party"]: reply.content["facts"]["weights_sha256"] for reply in replies}
    if received != expected:
        raise ProtocolError(
            f"the weight digests sent over Flower ({received}) and over the streams ({expected}) differ."
        )


def summarize(report: FinishedTraining, replies: Iterable[Message]) -> list[str]:
    """Return the last lines of the log: test scores, and the cost of each party."""
    scores = ", ".join(f"{name} {value:.4f}" for name, value in report.test.items() if isinstance(value, float))
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
    roster = open_kit(Path(settings.kit), "server").roster
    with run_command(settings.build_command(), print_line) as serving:
        session = {"name": settings.session, "run": wait_for_run(settings, serving)}
        nodes = wait_for_nodes(grid, roster, settings.wait, serving)
        print_line(f"glasu: session {settings.session!r}: one message to each of {len(nodes)} nodes")
        replies = collect_replies(grid, open_session(grid, nodes, session), serving)
        serving.wait()
        check_alive(serving)
    report = read_report(FinishedTraining, settings.folder)
    check_weights(report, replies)
    for line in summarize(report, replies):
        print_line(line)


app = ServerApp()
app.main()(main)
