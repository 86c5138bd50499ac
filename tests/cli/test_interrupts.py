"""An interrupted command ends within its time limit, whatever its main thread does."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import pytest

from glasu.cli.interrupts import EXIT_SECONDS, Terminated, handle_interrupts

PROGRAM = """
import signal, sys, time
from glasu.cli.interrupts import handle_interrupts
interrupted = []
with handle_interrupts({seconds}):
    for number in (signal.SIGINT, signal.SIGTERM):  # the main thread does not react to the signal itself
        signal.signal(number, lambda *_: interrupted.append(True))
    print("ready", flush=True)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not (interrupted and {ends}):
        time.sleep(0.01)
sys.exit(3)
"""


def interrupt(number: int, seconds: float, *, ends: bool = False, times: int = 1) -> int:
    """Run a block, send it a signal at most so many times, ten per second, and return the exit code.

    Args:
        number: the signal.
        seconds: the limit of the block.
        ends: whether the block ends after the signal.
        times: how often the signal is sent.
    """
    code = PROGRAM.format(seconds=seconds, ends=ends)
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    for _ in range(times):
        process.send_signal(number)
        time.sleep(0.1)
        if process.poll() is not None:
            break
    else:
        assert times == 1, "the process outlived all signals"
    process.communicate(timeout=50)
    return process.returncode


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_block_that_does_not_end_after_an_interrupt_is_ended(number, code):
    assert interrupt(number, 0.5) == code


def test_further_signals_do_not_extend_the_limit():
    assert interrupt(signal.SIGTERM, 1.0, times=200) == 143


def test_a_block_that_ends_in_time_keeps_its_exit_code():
    assert interrupt(signal.SIGTERM, 30.0, ends=True) == 3


def test_the_handler_of_sigterm_is_restored():
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(Terminated), handle_interrupts():
        signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is before


def test_the_limit_is_below_the_promised_ten_seconds():
    assert EXIT_SECONDS < 10
