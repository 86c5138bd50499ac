"""The server's memory does not grow with the graph: the script of a round in a server process, and its peak."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from glasu.protocol.chunks import split_rows
from glasu.protocol.messages import Joint, Partial
from glasu.protocol.requests import Receive
from support.roles import Role
from support.toy_run import Toy, ToyParty, key

HIDDEN, CHUNK_ROWS = 64, 4096  # a chunk has 1 MiB
ANSWERS = {"mean": np.ones(HIDDEN), "concat": np.repeat([0, 1, 2], HIDDEN)}  # a row of it; party m sends rows of m
SERVER = """
import sys, time
from pathlib import Path
from glasu.config import ModelConfig, RunConfig, TrainConfig, WireConfig, resolve
from glasu.protocol.inference import server_inference
from glasu.protocol.limits import Limits
from glasu.protocol.requests import Receive
from glasu.protocol.server import Server, Sizes
from glasu.runtime.drive import drive
from glasu.timing import Stopwatch
from support.toy_run import RUN, Toy, ToyServer, key

nodes, aggregation, hidden, chunk_rows, kits = *sys.argv[1:5], Path(sys.argv[5])
nodes, run = int(nodes), bytes.fromhex(RUN)
model = ModelConfig(hidden=int(hidden), aggregation=aggregation, num_layers=1, aggregation_layers=(0,))
config = RunConfig(model=model, train=TrainConfig(sampler="full"), wire=WireConfig(chunk_rows=int(chunk_rows)))
config, _ = resolve(config, nodes)


def read_peak():
    '''Return the peak memory in KiB, of this program alone: getrusage counts what its parent had.'''
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1])


class LimitedToy(Toy):
    check_limits = staticmethod(Limits.of_run(config, nodes, 3, 3).check)


class ScriptServer(ToyServer):
    def run_round(self, index):
        server = Server(config, "abc", Sizes(nodes, 0, 0), run)
        script = server_inference(server, key(index, 0), {0: nodes})
        assert drive(script, self.perform, Stopwatch(time.monotonic)) == {0: nodes}

    def perform(self, request):
        if isinstance(request, Receive):
            return self.session.receive(request)
        return self.session.broadcast(request.message)


server = ScriptServer(LimitedToy(num_rounds=1), kits, {}, wait=120.0)
before = read_peak()
print(server.port, flush=True)
server.serve()
print(before, read_peak(), flush=True)
"""


class Sender(ToyParty):
    """A party that sends one partial of all nodes in chunks, and then reads the answer."""

    def __init__(self, nodes, answer, kits, name, port):
        super().__init__(Toy(num_rounds=1, rows=CHUNK_ROWS, columns=len(answer)), kits, name, port, {}, wait=120.0)
        self.nodes, self.answer = nodes, answer

    def run_round(self, index, own, attempt):
        chunks = split_rows(self.nodes, CHUNK_ROWS)
        for chunk, part in enumerate(chunks):
            value = np.full((part.stop - part.start, HIDDEN), self.client, np.float32)
            self.session.send([Partial(key(index, chunk, self.client, attempt), value)])
        for chunk, part in enumerate(chunks):
            joint = self.session.receive(Receive((Joint,), key(index, chunk))).value
            assert np.array_equal(joint, np.tile(self.answer, (part.stop - part.start, 1)))
        return own


def measure_peak(nodes, aggregation, kits):
    """Return the peak memory in MiB of a server of three parties, before and after a round over these nodes."""
    words = [sys.executable, "-c", SERVER, *map(str, (nodes, aggregation, HIDDEN, CHUNK_ROWS, kits))]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env={"PYTHONPATH": ":".join(sys.path)}) as server:
        port = int(server.stdout.readline())
        parties = [Sender(nodes, ANSWERS[aggregation], kits, name, port) for name in "abc"]
        for role in [Role(party.name, party.join) for party in parties]:
            role.outcome(300)
        peaks = server.stdout.readline()
    assert server.returncode == 0
    return [int(size) / 1024 for size in peaks.split()]


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="this system does not tell a process's peak memory")
def test_a_round_over_many_nodes_grows_the_server_by_less_than_their_partials(kits):
    before, after = measure_peak(300_000, "mean", kits)
    assert after - before < 180  # MiB; the partials of the three parties have 220


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="this system does not tell a process's peak memory")
@pytest.mark.parametrize("aggregation", ["mean", "concat"])
def test_a_round_over_all_of_many_nodes_fits_into_what_one_over_few_needs(aggregation, kits):
    _, few = measure_peak(400_000, aggregation, kits)
    _, many = measure_peak(800_000, aggregation, kits)
    assert many < 256  # MiB
    assert many - few < 64  # one whole partial of 800,000 nodes has 195
