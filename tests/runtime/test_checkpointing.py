"""A state is saved completely or not saved, is read back unchanged, and a damaged or foreign file is refused."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import struct
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields, make_dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from glasu.errors import CheckpointError, ConfigError
from glasu.privacy.feedback import Reference
from glasu.protocol.state import ClientProgress, ClientState, Progress, Selection, ServerState
from glasu.runtime.checkpointing import (
    CHECKPOINT_MAGIC,
    HEAD,
    START,
    Store,
    find_common_round,
    find_schema,
    from_arrays,
    to_arrays,
)

LOG = logging.getLogger("glasu.test")


@dataclass(frozen=True)
class Count:
    number: int = 0


@dataclass(frozen=True, eq=False)
class Extended:
    round: int
    inner: tuple[Count, ...]
    buffers: Mapping[str, Tensor]
    maybe: bytes | None = None


REFERENCE = Reference(torch.ones(2, 3), torch.zeros(2, 3), torch.full((3,), 0.1, dtype=torch.float64), clamped=4)
CLIENT = ClientState(
    config_digest="ab",
    incarnation=1,
    weights={"layers.0/weight": torch.arange(6.0).reshape(2, 3).T, "scalar": torch.tensor(0.5)},
    optimizer={"steps": torch.tensor(4)},
    progress=ClientProgress(round=3, selection=Selection(math.nan, 2, 1)),
    ranges={("representation", 1): torch.tensor([8.0, 0.1], dtype=torch.float64)},
    clamped=3,
    references={("TRAINING", 1): REFERENCE},
)
SERVER = ServerState(
    config_digest="cd",
    run=b"\1" * 12,
    roster=("a", "b"),
    progress=Progress(round=7, stopped=True, losses=(0.1, math.nan)),
)


def same(one, other) -> bool:
    if isinstance(one, Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, Reference):
        return all(same(getattr(one, item.name), getattr(other, item.name)) for item in fields(one))
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return repr(one) == repr(other)


@pytest.mark.parametrize("state", [CLIENT, SERVER], ids=["client", "server"])
def test_a_saved_state_is_read_back_bit_by_bit(state, tmp_path):
    store = Store(type(state), tmp_path, "somebody")
    store.save(7, state)
    again = store.load(7)
    for item in fields(state):
        assert same(getattr(again, item.name), getattr(state, item.name)), item.name


def test_a_long_list_of_floats_is_an_array_and_keeps_every_bit():
    losses = (0.1, -0.0, math.inf, math.nan, 5e-324) * 100
    state = replace(SERVER, progress=replace(SERVER.progress, losses=losses))
    arrays, facts = to_arrays(state)
    assert arrays["progress/losses"].nbytes == 8 * len(losses)
    assert len(json.dumps(facts)) < 1000  # the losses are not part of the JSON
    again = from_arrays(ServerState, arrays, facts, "here")
    assert same(again.progress.losses, losses)


def test_a_new_field_of_any_type_needs_no_code():
    state = Extended(1, (Count(1), Count(2)), {"x": torch.ones(2, dtype=torch.int16)})
    again = from_arrays(Extended, *to_arrays(state), "here")
    assert again.inner == state.inner
    assert same(again.buffers, state.buffers)
    assert again.maybe is None


WITHOUT_TORCH = """
import sys
from pathlib import Path
sys.modules["torch"] = None
from glasu.protocol.state import Progress, ServerState
from glasu.runtime.checkpointing import Store
store = Store(ServerState, Path(sys.argv[1]), "the server")
for losses in ((0.5,), (0.5,) * 1000):
    store.save(1, ServerState("", b"r", ("a",), Progress(losses=losses)))
    assert store.load(1).progress.losses == losses
"""


def test_the_server_saves_and_loads_where_torch_cannot_be_imported(tmp_path):
    subprocess.run([sys.executable, "-c", WITHOUT_TORCH, str(tmp_path)], check=True)


def test_a_checkpoint_of_an_earlier_version_is_refused_in_one_line(tmp_path):
    store = Store(Count, tmp_path, "somebody")
    store.save(1, Count())
    (path,) = tmp_path.iterdir()
    body = path.read_bytes()[HEAD.size :]
    path.write_bytes(HEAD.pack(CHECKPOINT_MAGIC, 1, hashlib.sha256(struct.pack("<I", 1) + body).digest()) + body)
    for read in (lambda: store.open(1, LOG), store.digests, lambda: store.load(1)):
        with pytest.raises(
            ConfigError, match=rf"schema 00000001, and .* glasu reads {find_schema(Count):08x}; finish .*--fresh"
        ):
            read()
    assert store.clear() == [path]


def test_the_schema_number_changes_with_a_field_of_the_state_or_of_a_record_in_it():
    def make(name, **fields):
        return make_dataclass(name, list(fields.items()), frozen=True)

    plain = make("State", count="int", inner=make("Inner", value="int"))
    changed = [
        make("State", count="int", inner=make("Inner", value="int"), more="str"),
        make("State", count="float", inner=make("Inner", value="int")),
        make("State", number="int", inner=make("Inner", value="int")),
        make("State", count="int", inner=tuple[make("Inner", value="int", more="int"), ...]),
    ]
    assert find_schema(plain) == find_schema(make("State", count="int", inner=make("Inner", value="int")))
    assert len({find_schema(plain), *map(find_schema, changed)}) == 5


@pytest.mark.parametrize("syscall", ["fsync", "write", "replace"])
def test_a_write_that_breaks_leaves_the_file_of_before_and_no_other(syscall, tmp_path, monkeypatch):
    store = Store(Count, tmp_path, "somebody")
    store.save(1, Count(3))
    before = (tmp_path / "round-00000001.checkpoint").read_bytes()

    def fail(*arguments):
        raise OSError(5, "Input/output error")

    target = {"fsync": "os.fsync", "write": "os.write", "replace": "pathlib.Path.replace"}[syscall]
    monkeypatch.setattr(target, fail)
    with pytest.raises(CheckpointError, match=r"Input/output error"):
        store.save(1, Count(4))
    assert [path.name for path in tmp_path.iterdir()] == ["round-00000001.checkpoint"]
    assert (tmp_path / "round-00000001.checkpoint").read_bytes() == before
    assert (tmp_path / "round-00000001.checkpoint").stat().st_mode & 0o777 == 0o600


def test_a_checkpoint_of_another_owner_is_refused_with_a_warning(tmp_path, caplog):
    Store(Count, tmp_path / "a", "a").save(1, Count())
    (tmp_path / "a").rename(tmp_path / "b")
    assert Store(Count, tmp_path / "b", "b").digests(LOG) == {0: START}
    assert "not used: " in caplog.text
    assert "of a, not of b" in caplog.text


def test_a_new_checkpoint_and_those_of_other_owners_are_kept(tmp_path):
    for round_index in (0, 59, 60):
        Store(Count, tmp_path, f"another run, {round_index}").save(round_index, Count())
    store = Store(Count, tmp_path, "this run")
    for round_index in (1, 2, 3):
        store.save(round_index, Count(round_index))
        assert store.load(round_index) == Count(round_index)
    assert [int(path.stem[-8:]) for path in sorted(tmp_path.iterdir())] == [0, 2, 3, 59, 60]


KILLED_WHILE_IT_WRITES = """
import os, signal, sys
from pathlib import Path
from glasu.report import Seconds
from glasu.runtime.checkpointing import Store
os.fsync = lambda handle: os.kill(os.getpid(), signal.SIGKILL)
Store(Seconds, Path(sys.argv[1]), "somebody").save(2, Seconds())
"""


@pytest.mark.parametrize("look", ["open", "clear"])
def test_what_a_killed_process_had_begun_to_write_does_not_stay(look, tmp_path):
    store = Store(Count, tmp_path, "somebody")
    store.save(1, Count())
    subprocess.run([sys.executable, "-c", KILLED_WHILE_IT_WRITES, str(tmp_path)])
    assert len(list(tmp_path.iterdir())) == 2
    found = store.open(1, LOG) if look == "open" else store.clear()
    assert len(found) == (2 if look == "open" else 1)
    assert len(list(tmp_path.iterdir())) == (1 if look == "open" else 0)


@pytest.mark.parametrize(
    ("rounds", "common"),
    [
        ([{3: "", 4: ""}, {3: "", 4: ""}], 4),
        ([{3: "", 4: ""}, {4: "", 5: ""}], 4),
        ([{3: "", 4: ""}, {5: "", 6: ""}], None),
        ([{0: ""}, {0: "", 1: ""}], 0),
        ([{0: ""}, {1: "", 2: ""}], None),
    ],
)
def test_the_greatest_common_round(rounds, common):
    assert find_common_round(rounds) == common


def test_a_checkpoint_that_this_store_wrote_is_not_read_when_the_next_one_is_saved(tmp_path, monkeypatch):
    store, opened, before = Store(Count, tmp_path, "somebody"), [], Path.open

    def note(path, mode="r", *arguments, **options):
        if mode == "rb":
            opened.append(path)
        return before(path, mode, *arguments, **options)

    monkeypatch.setattr(Path, "open", note)
    for round_index in range(1, 6):
        store.save(round_index, Count())
    assert opened == []
    assert list(store.digests()) == [4, 5]


def test_the_beginning_counts_as_a_checkpoint_until_two_are_there(tmp_path):
    store = Store(Count, tmp_path, "somebody")
    expected = [{0}, {0, 1}, {1, 2}, {2, 3}]
    for number, rounds in enumerate(expected):
        if number:
            store.save(number, Count())
        assert set(store.digests()) == rounds
