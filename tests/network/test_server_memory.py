"""The server's memory does not grow with the tensors: a server process over real streams, and its peak."""

from __future__ import annotations

import subprocess
import sys

import pytest

from support.toy_run import Federation, Toy

pytestmark = pytest.mark.slow

SERVER = """
import sys
from pathlib import Path
from support.toy_run import Toy, ToyServer

def peak():
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1])

chunks, kits = int(sys.argv[1]), Path(sys.argv[2])
server = ToyServer(Toy(num_rounds=1, chunks=chunks, rows=4096, columns=64), kits, {}, wait=120.0)
before = peak()
print(server.port, flush=True)
server.serve()
print(peak() - before, flush=True)
"""
MIB = 1024  # KiB


def peak_of(chunks, kits):
    """Return the growth in KiB of a server that passes this number of 1 MiB chunks to three parties."""
    words = [sys.executable, "-c", SERVER, str(chunks), str(kits)]
    server = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env={"PYTHONPATH": ":".join(sys.path)})
    toy = Toy(num_rounds=1, chunks=chunks, rows=4096, columns=64)
    federation = Federation(toy, kits)
    federation.connect_to(int(server.stdout.readline()))
    parties = [federation.join(name, wait=120.0) for name in "abc"]
    assert [role.outcome(300) for role in parties] == toy.expected()
    grown = int(server.stdout.readline())
    print(f"{chunks} MiB per party: the server grew by {grown / MIB:.0f} MiB")
    server.stdout.close()
    assert server.wait(60) == 0
    return grown


def test_a_tensor_of_any_length_passes_through_a_server_of_bounded_memory(kits):
    little, much = peak_of(32, kits), peak_of(256, kits)  # MiB per party
    assert much < 200 * MIB
    assert much < little + 64 * MIB
