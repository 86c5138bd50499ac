"""ledger.jsonl: it only grows, survives crashes, and is verified when it is opened."""

from __future__ import annotations

import errno
import itertools
import os
import sys

import pytest

from glasu.errors import CheckpointError
from glasu.privacy.ledger import Ledger, LedgerError, Opening, Repair
from glasu.runtime import ledger_file
from glasu.runtime.ledger_file import Fragment, StoredRecord, close_ledger, open_ledger, read_ledger_file
from glasu.wire.message_key import Key, Phase
from support.ledgers import list_entries

KEY = Key(bytes(12), Phase.TRAINING, 0, 0, 1)


def enter(ledger: Ledger, round_index: int = 0) -> None:
    ledger.record("representation", KEY._replace(round=round_index), lambda: (b"sent",), size=4, rows=2)


def write_some(path, releases: int = 3) -> Ledger:
    ledger = open_ledger(path, "a")
    ledger.begin("training", "00")
    for round_index in range(releases):
        enter(ledger, round_index)
    close_ledger(ledger)
    return ledger


def test_a_ledger_continues_where_it_ended(tmp_path):
    path = tmp_path / "run" / "ledger.jsonl"
    before = write_some(path)
    content = path.read_bytes()
    ledger = open_ledger(path, "a")
    assert (ledger.head, ledger.totals, ledger.unfinished) == (before.head, before.totals, "00")
    ledger.begin("training", "00")
    enter(ledger)
    close_ledger(ledger)
    assert path.read_bytes().startswith(content)
    assert len(list_entries(path)) == 4
    assert [row["releases"] for row in open_ledger(path, "a").list_totals()] == [4]
    assert path.stat().st_mode & 0o777 == 0o600


def test_nothing_is_written_before_the_first_sync(tmp_path):
    path = tmp_path / "ledger.jsonl"
    ledger = open_ledger(path, "a")
    enter(ledger)
    assert not path.exists()
    ledger.sync()
    assert len(list_entries(path)) == 1


def test_the_ledger_of_another_party_is_refused(tmp_path):
    write_some(tmp_path / "ledger.jsonl")
    with pytest.raises(LedgerError, match="ledger of party 'a', not of 'b'"):
        open_ledger(tmp_path / "ledger.jsonl", "b")


@pytest.mark.parametrize("kept", [1, 40, -2])
def test_an_incomplete_last_line_becomes_a_record_and_the_chain_stays_valid(tmp_path, kept):
    path = tmp_path / "ledger.jsonl"
    write_some(path)
    *whole, last = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(whole) + last[:kept])
    ledger = open_ledger(path, "a")
    assert ledger.length == len(whole) + 1
    close_ledger(ledger)
    *_, repaired = read_ledger_file(path)
    assert isinstance(repaired.record, Repair)
    assert repaired.record.fragment == last[:kept]
    assert len(list_entries(path)) == 2


def test_a_last_line_without_its_newline_is_completed(tmp_path):
    path = tmp_path / "ledger.jsonl"
    before = write_some(path)
    content = path.read_bytes()
    path.write_bytes(content[:-1])
    assert open_ledger(path, "a").head == before.head
    assert path.read_bytes() == content


def test_a_torn_opening_begins_the_ledger_again(tmp_path):
    path = tmp_path / "ledger.jsonl"
    path.write_bytes(b'{"record":"openi')
    close_ledger(open_ledger(path, "a"))
    (first,) = read_ledger_file(path)
    assert isinstance(first.record, Opening)


@pytest.mark.parametrize("line", [0, 1, 2, 3, 4])
def test_a_changed_line_is_named(tmp_path, line):
    path = tmp_path / "ledger.jsonl"
    write_some(path)
    lines = path.read_bytes().splitlines(keepends=True)
    lines[line] = lines[line].replace(b'"time":1', b'"time":2')
    path.write_bytes(b"".join(lines))
    with pytest.raises(
        LedgerError, match=f"line {line + 1}: does not follow .* omitted. Restore the original file, or move"
    ):
        open_ledger(path, "a")
    path.rename(tmp_path / "old.jsonl")
    assert open_ledger(path, "a").length == 1  # the remedy helps


def test_a_missing_line_is_noticed(tmp_path):
    path = tmp_path / "ledger.jsonl"
    write_some(path)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:2] + lines[3:]))
    with pytest.raises(LedgerError, match="line 3: does not follow"):
        open_ledger(path, "a")


def test_a_fragment_is_reported_by_the_reader_and_not_repaired(tmp_path):
    path = tmp_path / "ledger.jsonl"
    write_some(path)
    content = path.read_bytes() + b'{"rec'
    path.write_bytes(content)
    *_, last = read_ledger_file(path)
    assert last == Fragment(len(content) - 5, b'{"rec')
    assert path.read_bytes() == content


def test_a_full_disk_leaves_the_earlier_lines_and_a_later_sync_works(tmp_path, monkeypatch):
    path = tmp_path / "ledger.jsonl"
    ledger = open_ledger(path, "a")
    ledger.sync()
    before, write = path.read_bytes(), os.write

    def write_a_part(handle: int, content: memoryview) -> int:
        if len(content) > 10:
            return write(handle, content[:10])
        raise OSError(errno.ENOSPC, "No space left on device")

    enter(ledger)
    with monkeypatch.context() as patched:
        patched.setattr(os, "write", write_a_part)
        with pytest.raises(CheckpointError, match="No space left on device"):
            ledger.sync()
    assert path.read_bytes() == before
    ledger.sync()
    assert len(list_entries(path)) == 1


def interrupt_at(step: int):
    """Return a trace function that raises KeyboardInterrupt at one step of the ledger file, as a signal does."""
    steps = itertools.count()

    def trace(frame, event, argument):
        if frame.f_code.co_filename != ledger_file.__file__:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode" and next(steps) == step:
            raise KeyboardInterrupt
        return trace

    return trace


@pytest.mark.parametrize("syncs_before", [0, 1])
def test_an_interrupt_at_any_step_of_a_sync_writes_every_line_once(tmp_path, syncs_before):
    for step in itertools.count():
        path = tmp_path / f"{step}.jsonl"
        ledger = open_ledger(path, "a")
        for _ in range(syncs_before):
            ledger.sync()
        enter(ledger)
        sys.settrace(interrupt_at(step))
        try:
            ledger.sync()
        except KeyboardInterrupt:
            interrupted = True
        else:
            interrupted = False
        finally:
            sys.settrace(None)
        close_ledger(ledger)
        assert [type(each) for each in read_ledger_file(path)] == [StoredRecord, StoredRecord]
        assert open_ledger(path, "a").head == ledger.head
        if not interrupted:
            break
    assert step > 50


def test_lines_of_another_process_stay_in_the_file(tmp_path):
    path = tmp_path / "ledger.jsonl"
    write_some(path)
    first, second = open_ledger(path, "a"), open_ledger(path, "a")
    for ledger in (first, second, first):
        enter(ledger)
        ledger.sync()
    assert path.read_bytes().count(b"\n") == 8
    with pytest.raises(LedgerError, match="does not follow from the records before it"):
        open_ledger(path, "a")


def test_rules_count_the_entries_of_the_file(tmp_path):
    class Counting:
        def __init__(self) -> None:
            self.seen: list[int] = []

        def check(self, entry) -> None:
            pass

        def add(self, entry) -> None:
            self.seen.append(entry.round)

    write_some(tmp_path / "ledger.jsonl")
    rule = Counting()
    ledger = open_ledger(tmp_path / "ledger.jsonl", "a", [rule])
    enter(ledger, 7)
    assert rule.seen == [0, 1, 2, 7]
