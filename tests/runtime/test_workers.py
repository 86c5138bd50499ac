"""Background threads: results, exceptions, and interrupts of the main thread."""

from __future__ import annotations

import sys
import threading
import time
from types import FrameType
from typing import Any

import pytest

from glasu.runtime.workers import Workers

DEADLINE = 20.0  # seconds; a thread that waits for a lock that nobody releases would wait forever


def test_results_have_the_order_of_the_calls():
    with Workers(2, "test") as workers:
        assert workers.map(pow, [2, 3, 4], [5, 2, 1]) == [32, 9, 4]


def test_calls_run_at_the_same_time():
    meeting = threading.Barrier(2, timeout=DEADLINE)
    with Workers(2, "test") as workers:
        assert sorted(workers.map(lambda _: meeting.wait(), range(2))) == [0, 1]


def test_an_exception_of_a_call_is_raised_where_its_result_is_awaited():
    with Workers(1, "test") as workers:
        pending = workers.submit(int, "three")
        assert workers.map(int, ["3"]) == [3]
        with pytest.raises(ValueError, match="three"):
            pending.wait()


def test_every_thread_is_prepared_once():
    prepared: list[str] = []
    with Workers(2, "test", lambda: prepared.append(threading.current_thread().name)) as workers:
        workers.map(time.sleep, [0.01] * 6)
    assert sorted(prepared) == ["test_0", "test_1"]


def test_closing_waits_for_what_was_submitted():
    done: list[int] = []
    workers = Workers(1, "test")
    for number in range(3):
        workers.submit(done.append, number)
    workers.close()
    assert done == [0, 1, 2]


class Interruption:
    """Raises KeyboardInterrupt in this thread before its n-th instruction, as a signal can."""

    def __init__(self, number: int) -> None:
        self.left = number

    def __call__(self, frame: FrameType, event: str, argument: Any) -> Interruption:
        frame.f_trace_opcodes = True
        if event == "opcode":
            self.left -= 1
            if self.left == 0:
                raise KeyboardInterrupt
        return self


def test_an_interrupt_before_any_instruction_of_a_turn_lets_the_threads_end():
    number, interrupted = 1, True
    while interrupted:
        workers = Workers(2, "test")
        assert workers.map(abs, [-1, -2]) == [1, 2]  # the threads have started
        interrupted = False
        sys.settrace(Interruption(number))
        try:
            workers.map(abs, [-1, -2, -3])
        except KeyboardInterrupt:
            interrupted = True
        finally:
            sys.settrace(None)
        closing = threading.Thread(target=workers.close, daemon=True)
        closing.start()
        closing.join(DEADLINE)
        assert not closing.is_alive(), f"an interrupt before instruction {number} leaves a thread waiting"
        number += 1
    assert number > 100  # every instruction of the turn was interrupted once


def test_an_error_of_one_call_is_raised_after_the_other_calls_have_ended():
    ended = []

    def work(seconds):
        if not seconds:
            raise ValueError("failed")
        time.sleep(seconds)
        ended.append(seconds)

    with Workers(2, "test") as workers:
        with pytest.raises(ValueError, match="failed"):
            workers.map(work, [0, 0.2])
        assert ended == [0.2]
