"""ClientApp: one message opens the session; from then on the party's tensors travel on its own gRPC stream.

Who the party is, where its data lies and whom it talks to is said by the node's own config and kit.
"""

from __future__ import annotations

import json
from typing import Any

from flwr.app import ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from glasu.errors import GlasuError, TrainingError
from glasu.integrations.flower.command import running
from glasu.integrations.flower.settings import PartySettings


def tell(line: str) -> None:
    """Write to the SuperNode's log."""
    print(line, flush=True)


def take_part(settings: PartySettings) -> dict[str, Any]:
    """Run `glasu join` to its end, and return the party's report."""
    with running(settings.words(), tell) as joining:
        code = joining.wait()
    if code:
        raise TrainingError(f"glasu join ended with exit code {code}; the lines above say why.")
    report: dict[str, Any] = json.loads((settings.out / "report.json").read_bytes())
    return report


def told_to_flower(report: dict[str, Any]) -> RecordDict:
    """Return what leaves the party by Flower: what it cost, the digest of its weights, nothing of what it knows."""
    traffic = report["traffic"]
    counts = ("bytes_to_server", "bytes_to_clients", "messages", "exchanges")
    metrics = {**{name: int(traffic[name]) for name in counts}, "seconds": float(report["seconds"]["total"])}
    facts = {"party": report["party"], "run": report["run"], "weights_sha256": report["weights_sha256"][0]}
    return RecordDict({"metrics": MetricRecord(metrics), "facts": ConfigRecord(facts)})


def train(message: Message, context: Context) -> Message:
    """Take part in the session that the message names, to its end.

    Flower shows the server the text of what is raised here, so it says nothing of this machine; the log here does.
    """
    try:
        report = take_part(PartySettings.read(context.node_config, message.content["session"]))
    except Exception as error:
        if isinstance(error, GlasuError):
            tell(f"glasu join: {error}")
        raise RuntimeError("this party could not take part; the log of its SuperNode says why") from error
    return Message(told_to_flower(report), reply_to=message)


app = ClientApp()
app.train()(train)
