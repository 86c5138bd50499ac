"""The ledger: a chain of records, totals, and rules that look at every release first."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace

import numpy as np
import pytest

from glasu.errors import ConfigError
from glasu.privacy.ledger import (
    ROW_DIGEST_BYTES,
    START_OF_CHAIN,
    End,
    Ledger,
    LedgerError,
    LedgerHead,
    Opening,
    PeerHeads,
    Repair,
    Start,
    format_line,
    read_line,
)
from glasu.wire.message_key import Key, Phase
from support.ledgers import Lines

HEAD = LedgerHead(ledger="1" * 64, length=3, chain="2" * 64)
KEY = Key(bytes(range(12)), Phase.TRAINING, 1, 3, 1, 0, 2, 4)


def enter(ledger: Ledger, key: Key = KEY, content: bytes = b"sent", **more) -> None:
    ledger.record("representation", key, lambda: (content,), size=len(content), **{"rows": 2, "columns": 1, **more})


def write_some(lines: Lines) -> Ledger:
    ledger = Ledger(lines)
    ledger.write(Opening(format=1, party="a", salt=b"salt"))
    for round_index in range(3):
        enter(ledger, KEY._replace(round=round_index))
    return ledger


def test_a_line_is_json_and_ends_with_the_chain_value():
    lines = Lines()
    ledger = write_some(lines)
    chain = START_OF_CHAIN
    for line in lines.lines:
        found = json.loads(line)
        stated = found.pop("chain")
        body = json.dumps(found, separators=(",", ":")).encode()
        chain = hashlib.sha256(chain + body).digest()
        assert stated == chain.hex()
    first = json.loads(lines.lines[0])["chain"]
    assert ledger.head == LedgerHead(ledger=first, length=4, chain=chain.hex())


@pytest.mark.parametrize(
    "record",
    [
        Opening(format=1, party="ä", salt=b"\x00\xff", time=1.5),
        Start(purpose="training", run="00ff", resumes=True, settings="d", policy="p"),
        PeerHeads(scope="", attempt=2, heads={"b": HEAD}),
        End(time=2.0),
        Repair(fragment=b'{"rec'),
    ],
)
def test_every_kind_of_record_survives_writing_and_reading(record):
    line, after = format_line(record, START_OF_CHAIN)
    assert read_line(line, START_OF_CHAIN, "here") == (record, after)


def test_an_entry_survives_writing_and_reading():
    lines, nodes = Lines(), np.array([3, 4, 200])
    digests = bytes(range(2 * ROW_DIGEST_BYTES))
    enter(Ledger(lines, clock=lambda: 12.3456), nodes=nodes, row_digests=digests, protection="clip+noise")
    (entry,) = lines.read()
    assert entry.unpack_nodes().tolist() == nodes.tolist()
    assert entry.list_row_digests() == [digests[:ROW_DIGEST_BYTES], digests[ROW_DIGEST_BYTES:]]
    assert (entry.kind, entry.phase, entry.round, entry.layer) == ("representation", "training", 3, 1)
    assert (entry.run, entry.incarnation, entry.attempt) == (KEY.run.hex(), 2, 4)
    assert (entry.protection, entry.time) == ("clip+noise", 12.346)
    assert entry.sha256 == hashlib.sha256(b"sent").hexdigest()


def change(lines: list[bytes]) -> list[bytes]:
    return [lines[0], lines[1].replace(b'"rows":2', b'"rows":1'), *lines[2:]]


def leave_out(lines: list[bytes]) -> list[bytes]:
    return [lines[0], *lines[2:]]


def swap(lines: list[bytes]) -> list[bytes]:
    return [lines[0], lines[2], lines[1], lines[3]]


def change_the_last_chain_value(lines: list[bytes]) -> list[bytes]:
    last = lines[-1]
    return [*lines[:-1], last[:-4] + (b"0" if last[-4:-3] != b"0" else b"1") + last[-3:]]


def cut_the_last_line(lines: list[bytes]) -> list[bytes]:
    return [*lines[:-1], lines[-1][:-9] + b"\n"]


@pytest.mark.parametrize("damage", [change, leave_out, swap, change_the_last_chain_value, cut_the_last_line])
def test_a_record_that_was_changed_moved_or_left_out_is_noticed(damage):
    lines = Lines()
    write_some(lines)
    assert len(lines.read()) == 4
    lines.lines = damage(lines.lines)
    with pytest.raises(LedgerError, match=r"line [234]"):
        lines.read()


def test_a_line_that_follows_the_chain_and_is_no_record_is_refused():
    body = b'{"record":"release","kind":"x"}'
    chain = hashlib.sha256(START_OF_CHAIN + body).hexdigest().encode()
    with pytest.raises(LedgerError, match="is missing"):
        read_line(body[:-1] + b',"chain":"' + chain + b'"}\n', START_OF_CHAIN, "line 1")


def test_the_head_changes_with_every_part_of_an_entry():
    def head(*changes) -> str:
        ledger = Ledger(Lines())
        for each in changes:
            enter(ledger, **each)
        return ledger.head.chain

    later = {"key": KEY._replace(round=4)}
    each = [{}, later, {"content": b"other"}, {"rows": 3}, {"columns": 2}, {"protection": "clip"}]
    keys = [
        {"key": KEY._replace(**one)} for one in ({"incarnation": 9}, {"attempt": 9}, {"layer": 3}, {"run": bytes(12)})
    ]
    heads = {head(one) for one in (*each, *keys)} | {head(), head({}, {}), head({}, later), head(later, {})}
    assert len(heads) == len(each) + len(keys) + 4


def test_equal_releases_have_different_heads_under_different_openings():
    def head(salt: bytes) -> str:
        ledger = Ledger(Lines())
        ledger.write(Opening(format=1, party="a", salt=salt))
        enter(ledger)
        return ledger.head.chain

    assert head(b"1") != head(b"2")


class AtMost:
    """A rule that allows some releases."""

    def __init__(self, most: int) -> None:
        self.most, self.seen = most, 0

    def check(self, entry) -> None:
        if self.seen == self.most:
            raise ConfigError(f"no more than {self.most} releases.")

    def add(self, entry) -> None:
        self.seen += 1


def test_a_refused_release_is_not_entered():
    lines, rule = Lines(), AtMost(2)
    ledger = Ledger(lines, rules=[rule])
    enter(ledger)
    enter(ledger)
    before = ledger.head
    with pytest.raises(ConfigError, match="no more than 2"):
        enter(ledger)
    assert (ledger.head, len(lines.lines), rule.seen) == (before, 2, 2)
    assert [row["releases"] for row in ledger.list_totals()] == [2]


def test_totals_begin_again_with_a_run_and_go_on_when_it_resumes():
    def count(ledger: Ledger) -> list[int]:
        enter(ledger)
        return [row["releases"] for row in ledger.list_totals()]

    ledger = Ledger()
    ledger.begin("training", "00")
    assert count(ledger) == [1]
    ledger.begin("training", "00")  # after a crash
    assert count(ledger) == [2]
    ledger.begin("training", "00", fresh=True)
    assert count(ledger) == [1]
    ledger.begin("training", "01")
    assert count(ledger) == [1]
    ledger.write(End())
    ledger.begin("training", "01")  # a finished run runs again
    assert count(ledger) == [1]
    assert ledger.length == 11


# What peers remember


@pytest.mark.parametrize(
    ("later", "why"),
    [
        ({"length": 2}, "had 3 records before, and has 2 now"),
        ({"chain": "3" * 64}, "its first 3 records have changed"),
    ],
)
def test_a_peer_whose_ledger_became_shorter_or_other_is_refused(later, why):
    ledger = Ledger()
    ledger.record_heads({"b": HEAD})
    with pytest.raises(LedgerError, match=f"party 'b': .*{why}"):
        ledger.record_heads({"b": replace(HEAD, **later)})
    ledger.record_heads({"b": replace(HEAD, length=4, chain="3" * 64), "c": replace(HEAD, length=1)})


def test_a_peer_keeps_its_ledger_during_a_training_and_may_have_another_one_in_the_next():
    ledger, other = Ledger(), LedgerHead(ledger="4" * 64, length=1, chain="4" * 64)
    ledger.record_heads({"b": HEAD}, scope="first training")
    with pytest.raises(LedgerError, match="it is a different ledger"):
        ledger.record_heads({"b": other}, scope="first training")
    ledger.record_heads({"b": other}, scope="second training")
    with pytest.raises(LedgerError, match="had 3 records before, and has 1 now"):  # the first ledger again, cut
        ledger.record_heads({"b": replace(HEAD, length=1)}, scope="third training")


def test_a_ledger_without_a_sink_reads_no_content():
    def refuse():
        raise AssertionError

    ledger = Ledger()
    ledger.record("losses", KEY, refuse, size=8, rows=1)
    assert ledger.list_totals()[0]["bytes"] == 8
