"""ClientApp: one Flower message starts `glasu join`, which sends all tensors on a separate gRPC stream.

The node config and the kit determine the party, its data and its server. The message contains only the session.
"""

from __future__ import annotations

from flwr.app import ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from glasu.errors import GlasuError, TrainingError
from glasu.integrations.flower.command import print_line, run_command
from glasu.integrations.flower.settings import PartySettings
from glasu.network.run_folder import FinishedPart, read_report


def take_part(settings: PartySettings) -> FinishedPart:
    """Run `glasu join` to its end; return the report of the party."""
    with run_command(settings.build_command(), print_line) as joining:
        code = joining.wait()
    if code:
        raise TrainingError(f"glasu join ended with exit code {code}; see the lines above.")
    return read_report(FinishedPart, settings.folder)


def make_reply(report: FinishedPart) -> RecordDict:
    """Return the reply to Flower: the cost of the run and the digest of the weights, but no data and no scores."""
    counts = ("bytes_to_server", "bytes_to_clients", "messages", "exchanges")
    metrics = {**{name: int(report.traffic[name]) for name in counts}, "seconds": report.seconds.total}
    facts = {"party": report.party, "run": report.run, "weights_sha256": report.weights_sha256[0]}
    return RecordDict({"metrics": MetricRecord(metrics), "facts": ConfigRecord(facts)})


def train(message: Message, context: Context) -> Message:
    """Run this party's part of the session in the message, and return the reply.

    Flower sends the text of an exception to the server. So the exception contains no details. This party's log has
    them.
    """
    try:
        report = take_part(PartySettings.read(context.node_config, message.content["session"]))
    except Exception as error:
        if isinstance(error, GlasuError):
            print_line(f"glasu join: {error}")
        raise RuntimeError("this party could not take part; see the log of its SuperNode") from error
    return Message(make_reply(report), reply_to=message)


app = ClientApp()
app.train()(train)
