"""Recorded runs: bytes, messages and exchanges of every setting are the same on every machine."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import runs
from compare import CHANGES, find_amounts, find_differences, find_reason, read_amounts, read_changes
from records import read_record, recorded_names
from runs import differing_fields, fold_clients, run
from settings import BASE, SETTINGS

from support.warm_process import WarmProcess


@pytest.mark.parametrize("name", SETTINGS)
def test_a_setting_sends_the_recorded_messages(name: str, tmp_path: Path, tmp_path_factory: Any) -> None:
    def start(_: Path, arguments: Sequence[str]) -> tuple[int, str]:
        log = tmp_path_factory.mktemp("log") / "errors"
        process = WarmProcess(arguments, log, script=Path(runs.__file__))
        return process.wait(240), log.read_text()

    recorded = json.loads(json.dumps(run(name, tmp_path, start=start)["recorded"]))
    differences = differing_fields(read_record(name), recorded)
    listed = "\n".join(f"  {field}: {change}" for field, change in differences.items())
    remedy = f"If this is intended: python tests/golden/record.py {name}, and list it in tests/golden/CHANGES.md."
    assert not differences, f"setting {name!r} differs from its record:\n{listed}\n{remedy}"


def test_every_record_belongs_to_a_setting() -> None:
    assert recorded_names() == SETTINGS.keys()


@pytest.mark.parametrize("name", SETTINGS)
def test_the_traced_messages_add_up_to_the_counted_traffic(name: str) -> None:
    record = read_record(name)
    counted = {"bytes_to_server": 0, "bytes_to_clients": 0, "messages": 0, "exchanges": 0}
    for line in record["trace"]["train"]:
        message = re.fullmatch(r"to=(server|client) kind=\w+ .* client=(\S+) bytes=(\S+)", line)
        if message is None:
            assert re.fullmatch(r"exchange phase=\w+", line)
            counted["exchanges"] += 1
            continue
        sizes = [int(size) for size in message[3].split(",")]
        assert len(sizes) == len(message[2].split(","))
        counted["messages"] += len(sizes)
        counted["bytes_to_server" if message[1] == "server" else "bytes_to_clients"] += sum(sizes)
    assert counted == {key: record["traffic"][key] for key in counted}


def test_no_setting_ends_at_a_round_that_depends_on_the_cpu() -> None:
    keys = {key for setting in SETTINGS.values() for key in setting.keys}
    assert keys.isdisjoint({"train.patience", "train.stop_at"})
    assert BASE["train.patience"] == 0


def test_killed_runs_are_recorded_as_equal_to_unbroken_runs() -> None:
    killed = [name for name, setting in SETTINGS.items() if setting.killed]
    expected = {"differs_from_unbroken_run": [], "repeats_all_rounds": False}
    assert killed
    assert all(read_record(name)["resumed"] == expected for name in killed)


def test_preparing_features_sends_nothing() -> None:
    assert read_record("prepared") == read_record("default")


def test_folding_joins_only_neighbours_that_differ_in_client_and_bytes() -> None:
    lines = ["to=server kind=A client=0 bytes=3", "to=server kind=A client=1 bytes=4", "exchange phase=x"]
    lines += ["to=server kind=A client=0 bytes=5"]
    expected = [
        "to=server kind=A client=0,1 bytes=3,4",
        "exchange phase=x",
        "to=server kind=A client=0 bytes=5",
    ]
    assert fold_clients(lines) == expected


@pytest.mark.parametrize(
    ("old", "new", "fields"),
    [
        ({"a": {"b": 1}}, {"a": {"b": 1}}, {}),
        ({"a": {"b": 1, "c": 2}}, {"a": {"b": 3, "c": 2}}, {"a.b": "1 -> 3"}),
        ({"a": {"b": 1}}, {"a": {}}, {"a.b": "1 -> 'absent'", "a": "'absent' -> {}"}),
        ({"a": [1, 2]}, {"a": [1, 2, 4]}, {"a": "entry 2 of 2 -> 3: the end -> 4"}),
    ],
)
def test_differences_are_named_by_field(old: dict[str, Any], new: dict[str, Any], fields: dict[str, str]) -> None:
    assert differing_fields(old, new) == fields


def test_a_listed_change_needs_setting_field_and_reason() -> None:
    text = "Prose: with colons: stays prose.\n\n- gat*: traffic.by_kind.header: shorter header\n- gcn: losses:\n"
    changes = read_changes(text)
    assert changes == [("gat*", "traffic.by_kind.header", "shorter header")]
    assert find_reason(changes, "gat_neighbor", "traffic.by_kind.header") == "shorter header"
    assert find_reason(changes, "gcn", "traffic.by_kind.header") is None


TABLE = """
| settings | remark | messages | by_kind.header |
|---|---|---|---|
| `gat*`, `gcn` | no header | +2 | |
| `*` | | -1 | +12 |
"""


def test_the_first_row_that_fits_a_setting_lists_its_amounts() -> None:
    table = read_amounts(f"Prose.\n{TABLE}\n- gcn: losses: reason\n")
    assert find_amounts(table, "gat_neighbor") == find_amounts(table, "gcn") == {"traffic.messages": 2}
    assert find_amounts(table, "sage") == {"traffic.messages": -1, "traffic.by_kind.header": 12}
    assert find_amounts(read_amounts("no table"), "sage") == {}


def _outcome(**traffic: int) -> dict[str, Any]:
    releases = {"a": ["phase=sampling kind=node sets layer=2 protection=none releases=1 rows=3 bytes=3"]}
    recorded = {"traffic": traffic, "traffic_by_round": [[2, 9, 7]], "releases": releases, "trace": {"train": ["line"]}}
    return {"recorded": recorded, "local": {"losses": [0.5]}}


def test_traffic_may_change_by_the_listed_amount_only() -> None:
    old, amounts = _outcome(messages=120), {"traffic.messages": 12}
    assert find_differences(old, _outcome(messages=132), amounts) == {}
    assert find_differences(old, _outcome(messages=133), amounts) == {"traffic.messages": "132 -> 133"}
    assert find_differences(old, old, amounts) == {}


def test_releases_are_compared_by_phase_and_kind_and_rounds_by_column() -> None:
    old, new = _outcome(messages=1), _outcome(messages=1)
    new["recorded"]["releases"]["a"] = [row.replace("bytes=3", "bytes=4") for row in new["recorded"]["releases"]["a"]]
    new["recorded"]["traffic_by_round"] = [[2, 9, 8]]
    assert find_differences(old, new, {}).keys() == {"releases.a.sampling.node_sets", "traffic_by_round.exchanges"}


def test_no_wide_pattern_hides_changed_weights_tensors_or_exchanges() -> None:
    text = CHANGES.read_text(encoding="utf-8")
    changes, table = read_changes(text), read_amounts(text)
    fields = ("weights_sha256", "traffic.by_kind.tensor", "traffic.messages", "traffic.exchanges", "trace.train")
    for name in SETTINGS.keys() - {"demo", "prepared", "prepared_killed"}:
        assert not [field for field in fields if find_reason(changes, name, field)]
        assert "traffic.by_kind.tensor" not in find_amounts(table, name)
