"""The server's memory does not grow with the graph: a hub in a process of its own, and its peak."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

SERVER = """
import sys, tempfile, threading
from pathlib import Path
import numpy as np
from glasu.config import ModelConfig, RunConfig, TrainConfig, resolve
from glasu.wire.message_key import Key, Phase
from glasu.protocol import chunks
from glasu.protocol.messages import Partial
from glasu.protocol.server import Server, Sizes
from glasu.protocol.inference import server_inference
from glasu.network.state_file import Durable
from glasu.network.frames import CONTROL, PIECE, RECEIPT, WINDOW, Limits, control, pieces, read_control
from glasu.network.compatibility import STATED
from glasu.network.server_session import Hub
from glasu.network.peer import Stream
from glasu.protocol.message_bytes import HEADER, encode, read_header

nodes, aggregation, hidden, run = int(sys.argv[1]), sys.argv[2], 64, bytes(12)
config, _ = resolve(
    RunConfig(model=ModelConfig(hidden=hidden, aggregation=aggregation), train=TrainConfig(sampler="full")), nodes
)
stated = dict.fromkeys(STATED, "x")
said = {"facts": {"nodes": nodes, "glasu": "1", **stated}, "rounds": {"0": "start"}}
layers = config.model.aggregation_layers


def most():
    '''Return the peak memory in KiB, of this program alone: getrusage counts what its parent had.'''
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(line for line in lines if line.startswith("VmHWM")).split()[1]


def party(index, stream):
    '''A party that keeps the rules: it sends a window ahead of its answers, and a receipt for each.'''
    incoming = stream.outgoing()
    yield control("hello", process="p", incarnation=1, run=None, attempt=0, finished=None, **said)
    for frame in incoming:
        kind = read_control(frame)["kind"] if frame[0] == CONTROL else ""
        if kind == "report":
            yield control("prepared", digest="d", **said)
        elif kind == "begin":
            break
    yield control("ready", attempt=1, digest="start")
    for layer in layers:
        pending = {}
        for chunk, part in enumerate(chunks.message_chunks(nodes)):
            key = Key(
                run=run, phase=Phase.TRAINING, client=index, incarnation=1, attempt=1, round=0, layer=layer, chunk=chunk
            )
            content = encode(Partial(key=key, value=np.ones((part.stop - part.start, hidden), np.float32)))
            pending[chunk] = len(content)
            yield from pieces(content)
            last = part.stop == nodes and part.stop - part.start < chunks.CHUNK_ROWS
            while sum(pending.values()) >= WINDOW or (last and pending):
                frame = next(incoming)
                if frame[0] == PIECE and frame[9:17] == bytes(8):  # the first piece of an answer
                    answered = read_header(frame[17:], int.from_bytes(frame[1:9], "little")).key.chunk
                    del pending[answered]
                    yield bytes([RECEIPT]) + key._replace(chunk=answered).pack()


with tempfile.TemporaryDirectory() as folder:
    durable = Durable(Path(folder) / "serving.json", {"incarnations": {}})
    hub = Hub("abc", {"glasu": "1"}, {"run": run.hex()}, durable, lambda: {0: "start"}, lambda line: None)
    for index, name in enumerate("abc"):
        stream = Stream()
        threading.Thread(target=hub.attach, args=(name, stream, party(index, stream)), daemon=True).start()
    hub.gather(60)
    server = Server(config, "abc", Sizes(nodes, 0, 0), run)
    script = server_inference(server, 0)
    next(script)
    before = most()
    hub.propose(1, 0, server.awaited, Limits(config, nodes, 3, 3))
    hub.confirmed(60)
    rows = 0
    while script is not None:
        messages = hub.collect(60, "in round 0")
        rows += len(messages[0].value)
        try:
            answers = script.send(messages)
        except StopIteration:
            answers, script = server.answers, None
        hub.answer(messages, answers, server.awaited)
    assert rows == nodes * len(layers), rows
    print(before, most())
"""


def peak(nodes, aggregation):
    """Return the peak memory in MiB of a server with three parties in its own process, before the round and after."""
    done = subprocess.run(
        [sys.executable, "-c", SERVER, str(nodes), aggregation], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return [int(size) / 1024 for size in done.stdout.split()]


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="this system does not tell a process's peak memory")
@pytest.mark.parametrize("aggregation", ["mean", "concat"])
def test_a_round_over_all_of_many_nodes_fits_into_what_one_over_few_needs(aggregation):
    _, few = peak(50_000, aggregation)
    before, many = peak(400_000, aggregation)
    assert many < 256
    assert many - few < 32  # MiB; one whole partial of 400,000 nodes has 98
    assert many - before < 160
