"""The server's memory does not grow with the graph: a session in a process of its own, and its peak."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

SERVER = """
import logging, sys, threading
from pathlib import Path
import numpy as np
from glasu.config import ModelConfig, RunConfig, TrainConfig, resolve
from glasu.network.frames import CONTROL, Channel, pack_control, pack_frame, read_control, read_frame
from glasu.network.server_session import ServerSession
from glasu.network.session_hello import PROTOCOL
from glasu.protocol.fields import split_rows
from glasu.protocol.inference import server_inference
from glasu.protocol.limits import Limits
from glasu.protocol.message_bytes import encode
from glasu.protocol.messages import Partial
from glasu.protocol.requests import Receive
from glasu.protocol.server import Server, Sizes
from glasu.wire.message_key import SERVER, Key, Phase

nodes, aggregation, hidden, run = int(sys.argv[1]), sys.argv[2], 64, bytes(12)
config, _ = resolve(
    RunConfig(model=ModelConfig(hidden=hidden, aggregation=aggregation), train=TrainConfig(sampler="full")), nodes
)
layers, about = config.model.aggregation_layers, Key(run, Phase.TRAINING, SERVER, 0)


class AnyProcess:
    '''Admits every process.'''

    def admit(self, party, hello, *, closing):
        return {}

    def prepare(self, party, statement):
        return ()

    def withdraw(self, party):
        pass

    def settle(self):
        pass


class Party:
    '''Sends its partials as soon as its window is open, and acknowledges and drops every answer.'''

    def __init__(self, index, session):
        self.channel, self.changed, self.stream = Channel(), threading.Condition(), session.host.open_stream()
        self.partials = self.list_partials(index)
        self.begun = False
        attach = session.host.attach, ("abc"[index], self.stream, self.frames())
        for target, arguments in (attach, (self.listen, ())):
            threading.Thread(target=target, args=arguments, daemon=True).start()

    def list_partials(self, index):
        for layer in layers:
            for chunk, part in enumerate(split_rows(nodes, config.wire.chunk_rows)):
                key = about._replace(client=index, layer=layer, chunk=chunk, attempt=1)
                yield encode(Partial(key, np.ones((part.stop - part.start, hidden), np.float32)))

    def frames(self):
        hello = {"protocol": PROTOCOL, "process": "p", "server": None, "received": 0, "payload": {}}
        yield pack_frame(CONTROL, pack_control("hello", **hello))
        self.channel.outbox.put_control("prepared", payload={})
        while True:
            with self.changed:
                while (frame := self.channel.take_next()) is None:
                    ready = self.begun and not self.channel.outbox.is_full
                    message = next(self.partials, None) if ready else None
                    if message is None:
                        self.changed.wait(1.0)
                    else:
                        self.channel.outbox.put_message(message)
            yield frame

    def listen(self):
        for data in self.stream.outgoing():
            frame = read_frame(data)
            with self.changed:
                self.channel.accept(frame)
                if frame.kind == CONTROL and read_control(frame.body).kind == "begin":
                    self.channel.outbox.put_control("ready", attempt=1, digest="start")
                    self.begun = True
                self.changed.notify_all()


def read_peak():
    '''Return the peak memory in KiB, of this program alone: getrusage counts what its parent had.'''
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(line for line in lines if line.startswith("VmHWM")).split()[1]


session = ServerSession("abc", AnyProcess(), run.hex(), wait=60.0, log=logging.getLogger("server"))
parties = [Party(index, session) for index in range(3)]
session.gather()
session.begin_attempt(1, 0, ["start"] * 3, Limits.of_run(config, nodes, 3, 3).check)
server = Server(config, "abc", Sizes(nodes, 0, 0), run)
script, reply, rows, before = server_inference(server, about, dict.fromkeys(layers, nodes)), None, 0, read_peak()
while True:
    try:
        request = script.send(reply)
    except StopIteration:
        break
    if isinstance(request, Receive):
        reply = session.receive(request)
        rows += len(reply[0].value)
    else:
        reply = session.broadcast(request.message)
assert rows == nodes * len(layers), rows
print(before, read_peak())
"""


def peak(nodes, aggregation):
    """Return the peak memory in MiB of a process with a server and three parties, before the round and after it."""
    done = subprocess.run(
        [sys.executable, "-c", SERVER, str(nodes), aggregation],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return [int(size) / 1024 for size in done.stdout.split()]


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="this system does not tell a process's peak memory")
@pytest.mark.parametrize("aggregation", ["mean", "concat"])
def test_a_round_over_all_of_many_nodes_fits_into_what_one_over_few_needs(aggregation):
    _, few = peak(200_000, aggregation)
    before, many = peak(800_000, aggregation)
    assert many < 256
    assert many - few < 64  # MiB; one whole partial of 800,000 nodes has 195
    assert many - before < 160  # windows and inboxes of three parties, and the windows at the parties' end
