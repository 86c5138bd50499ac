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
signal.signal(signal.SIGINT, signal.default_int_handler)  # a background shell ignores it
with handle_interrupts({seconds}):
    print("ready", flush=True)
    try:
        time.sleep(60)
    except KeyboardInterrupt:
        {reaction}
sys.exit(3)
"""


def interrupt(reaction: str, seconds: float, number: int, times: int = 1) -> int:
    """Run a block, send a signal at most so many times, ten per second, and return the exit code."""
    code = PROGRAM.format(seconds=seconds, reaction=reaction)
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
    assert interrupt("signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT}); time.sleep(60)", 0.5, number) == code


def test_further_signals_do_not_extend_the_limit():
    reaction = "signal.signal(signal.SIGTERM, lambda *_: None); time.sleep(60)"
    assert interrupt(reaction, 1.0, signal.SIGTERM, times=200) == 143


def test_a_block_that_ends_in_time_keeps_its_exit_code():
    assert interrupt("time.sleep(0.1)", 30.0, signal.SIGTERM) == 3


def test_the_handler_of_sigterm_is_restored():
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(Terminated), handle_interrupts():
        signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is before


def test_the_limit_is_below_the_promised_ten_seconds():
    assert EXIT_SECONDS < 10
