"""What gRPC writes to standard error becomes lines of ours, and standard error stays what it was for everybody else."""

from __future__ import annotations

import subprocess
import sys

import pytest

SAY = r"""
import os, sys
from glasu.network.tls_log import handshakes_told
def fail(error):
    raise error
with handshakes_told(lambda line: {tell}):
    print("b\xfcro", file=sys.stderr)
    for word in ("PEER_DID_NOT_RETURN_A_CERTIFICATE", "WRONG_VERSION_NUMBER"):
        os.write(2, b"Handshake failed with error " + word.encode() + b"\n")
    os.write(2, b"a word of another library: \xc3\xbc\n")
print("over", file=sys.stderr)
"""


def said(tell):
    """Return what a process writes to a standard error that knows ASCII only."""
    bare = {"PYTHONPATH": ":".join(sys.path), "LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    words = [sys.executable, "-c", SAY.format(tell=tell)]
    ended = subprocess.run(words, capture_output=True, timeout=60, env=bare)
    assert ended.returncode == 0, ended.stderr.decode()
    return sorted(ended.stderr.decode().splitlines())


def test_letters_that_standard_error_does_not_know_are_written_otherwise_and_end_nothing():
    assert said(r"print(line, '\xfc', file=sys.stderr)") == [
        r"a connection was refused in the TLS handshake: it presented no certificate. \xfc",
        r"a connection was refused in the TLS handshake: what it sent is not TLS. \xfc",
        "a word of another library: ü",
        r"b\xfcro",
        "over",
    ]


@pytest.mark.parametrize("error", ["ValueError", "UnicodeEncodeError('ascii', '?', 0, 1, '')", "OSError"])
def test_whoever_cannot_be_told_ends_nothing(error):
    assert said(f"fail({error})") == ["a word of another library: ü", r"b\xfcro", "over"]
