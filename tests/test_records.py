"""The strict reader of JSON and TOML objects."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from typing import Annotated, Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from glasu.errors import ConfigError
from glasu.records import Bounds, FaultCode, Length, RecordError, parse_json, parse_toml, read_record, to_plain


@dataclass(frozen=True)
class Client:
    name: Annotated[str, Length(20)]
    width: Annotated[int, Bounds(1, 100)]
    digest: bytes = b""


@dataclass(frozen=True)
class Model:
    schema: Literal[2]
    client: tuple[Client, ...]
    scale: Literal["auto"] | float
    scores: Mapping[str, float]
    totals: Mapping[tuple[str, int], tuple[int, ...]] = field(default_factory=dict)
    pair: tuple[int, str] | None = None
    facts: Any = None

    def __post_init__(self) -> None:
        if not self.client:
            raise ConfigError("client=[]: a model needs at least one client.")


GOOD = {
    "schema": 2,
    "client": [{"name": "a", "width": 3, "digest": "00ff"}, {"name": "b", "width": 100}],
    "scale": "auto",
    "scores": {"accuracy": 1},
}


def faults(value: object, **options: Any) -> list[tuple[str, str]]:
    with pytest.raises(RecordError) as raised:
        read_record(Model, value, "model.json", **options)
    assert "\n" not in str(raised.value)
    assert str(raised.value).startswith("model.json: ")
    return [(fault.code.value, fault.path) for fault in raised.value.faults]


def test_a_record_is_what_its_plain_values_say():
    record = read_record(Model, GOOD, "model.json")
    assert record.client == (Client("a", 3, b"\x00\xff"), Client("b", 100))
    assert (record.scale, record.scores, record.pair) == ("auto", {"accuracy": 1.0}, None)


def test_plain_values_read_back_give_an_equal_record():
    record = Model(
        2, (Client("a", 3, b"\x01"),), 0.5, {"f1": 0.25}, {("x", 1): (1, 2)}, (3, "y"), {"deep": [None, True, 1.5]}
    )
    assert read_record(Model, json.loads(json.dumps(to_plain(record))), "model.json") == record


def test_none_is_left_out_where_it_is_the_default():
    assert "pair" not in to_plain(read_record(Model, GOOD, "model.json"))


def test_all_faults_are_reported_together_with_their_paths():
    bad = {**GOOD, "schema": 1, "client": [{"name": 3, "width": 0}, {"nane": "b"}, 7], "extra": 1}
    del bad["scores"]
    assert faults(bad) == [
        ("unknown", ""),
        ("value", "schema"),
        ("type", "client[0].name"),
        ("value", "client[0].width"),
        ("unknown", "client[1]"),
        ("missing", "client[1].name"),
        ("missing", "client[1].width"),
        ("type", "client[2]"),
        ("missing", "scores"),
    ]


@pytest.mark.parametrize(
    ("key", "value", "code", "path"),
    [
        ("schema", True, "value", "schema"),
        ("schema", 2.0, "value", "schema"),
        ("scale", "other", "type", "scale"),
        ("scale", math.inf, "type", "scale"),
        ("scores", {"accuracy": math.nan}, "value", "scores.accuracy"),
        ("scores", {"accuracy": 10**400}, "value", "scores.accuracy"),
        ("scores", [], "type", "scores"),
        ("pair", [1], "type", "pair"),
        ("pair", [1, 2], "type", "pair[1]"),
        ("totals", [[["x", 1], [2**70]]], "value", "totals[0][1][0]"),
        ("totals", {"x": [1]}, "type", "totals"),
        ("facts", {"a": {1, 2}}, "type", "facts.a"),
        ("client", [], "value", ""),
        ("client", [{"name": "n" * 21, "width": 1}], "size", "client[0].name"),
        ("client", [{"name": "n", "width": 1, "digest": "xy"}], "value", "client[0].digest"),
    ],
)
def test_each_fault_has_a_code_and_a_path(key, value, code, path):
    assert faults({**GOOD, key: value}) == [(code, path)]


def test_floats_may_be_infinite_if_the_caller_allows_it():
    record = read_record(Model, {**GOOD, "scores": {"best": math.nan}}, "model.json", finite=False)
    assert math.isnan(record.scores["best"])


@pytest.mark.parametrize("value", [None, [], "text", 3, True])
def test_what_is_no_object_is_refused(value):
    assert faults(value) == [("type", "")]


def test_deep_nesting_is_refused_and_not_followed():
    deep: object = 0
    for _ in range(5000):
        deep = [deep]
    ((code, path),) = faults({**GOOD, "facts": deep})
    assert (code, path.count("[0]")) == ("size", 32)


@pytest.mark.parametrize(
    ("parse", "content", "code"),
    [
        (parse_json, b"[" * 100_000, FaultCode.SIZE),
        (parse_json, b"{", FaultCode.NOT_PARSED),
        (parse_json, b"\xff", FaultCode.NOT_PARSED),
        (parse_json, b'{"a": 1, "a": 2}', FaultCode.NOT_PARSED),
        (parse_json, b"1" * 5000, FaultCode.NOT_PARSED),
        (parse_toml, b"a = " + b"[" * 100_000, FaultCode.SIZE),
        (parse_toml, b"a", FaultCode.NOT_PARSED),
    ],
)
def test_a_document_that_cannot_be_parsed_is_one_fault(parse, content, code):
    with pytest.raises(RecordError) as raised:
        parse(content, "file")
    assert [fault.code for fault in raised.value.faults] == [code]


def test_a_document_that_is_too_long_is_not_parsed():
    with pytest.raises(RecordError, match="has 101 bytes, and at most 100 are read"):
        parse_json(b" " * 101, "file", max_bytes=100)


def test_a_long_list_of_faults_is_cut_and_states_the_number_omitted():
    with pytest.raises(RecordError, match="and 92 more faults") as raised:
        read_record(Model, {**GOOD, "client": [0] * 100_000}, "model.json")
    assert len(raised.value.faults) == 100


TEXT = st.text("ab[\0", max_size=3)
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=20,
)


@given(st.dictionaries(st.sampled_from(["schema", "client", "scale", "scores", "totals", "pair", "facts"]), PLAIN))
def test_no_plain_value_raises_anything_but_a_record_error(value):
    with suppress(RecordError):
        record = read_record(Model, {**GOOD, **value}, "model.json")
        assert read_record(Model, to_plain(record), "model.json") == record


def test_a_time_of_toml_needs_a_time_zone():
    @dataclass(frozen=True)
    class Event:
        time: datetime

    content = parse_toml("time = 2026-01-02T03:04:05Z", "x")
    assert to_plain(read_record(Event, content, "x", names={"datetime": datetime})) == content
    for other in ("2026-01-02T03:04:05", "2026-01-02", '"2026-01-02T03:04:05Z"'):
        with pytest.raises(RecordError, match=r"time=.*: must be a time with a time zone"):
            read_record(Event, parse_toml(f"time = {other}", "x"), "x")
