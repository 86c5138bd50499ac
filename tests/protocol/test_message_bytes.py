from __future__ import annotations

import ast
import dataclasses
import struct
import tracemalloc
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import glasu
from glasu.errors import ProtocolError
from glasu.protocol import messages
from glasu.protocol.fields import HEADER, SECTION, NumbersField
from glasu.protocol.message_bytes import CODES, TAGS, VERSION, compute_format_number, decode, encode
from glasu.protocol.messages import (
    MESSAGES,
    Losses,
    Message,
    Metrics,
    Partial,
    Proposal,
    TensorMessage,
    Verdict,
    Waiting,
)
from glasu.protocol.requests import Receive
from glasu.runtime.telemetry import TrafficCounter
from glasu.wire.encoding import DTYPES
from glasu.wire.floats import BFloat16
from glasu.wire.int8 import Int8
from glasu.wire.message_key import Phase
from support.messages import KEY, any_message, messages_of, sample_messages

quick = settings(deadline=None, max_examples=60)
DTYPES_OF = {content.tag: content.dtypes for kind in MESSAGES for content in kind.contents().values()}
# The first kind of message with each tag.
CARRIERS = {content.tag: kind for kind in reversed(MESSAGES) for content in kind.contents().values()}


def same(first: Any, second: Any) -> bool:
    """Compare fields bit by bit; NaN equals itself."""
    if isinstance(first, np.ndarray):
        alike = (first.dtype, first.shape) == (second.dtype, second.shape)
        return alike and first.tobytes() == second.tobytes()
    if isinstance(first, tuple):
        return len(first) == len(second) and all(map(same, first, second))
    return type(first) is type(second) and first == second


# Roles with other messages refuse each other in the handshake.


@dataclasses.dataclass(frozen=True, eq=False)
class Norm(Message):
    """A kind of message that this version does not have."""

    value: Annotated[Any, NumbersField("loss", lambda shapes: 1)]


def test_every_change_of_the_messages_changes_the_format_number():
    changed = [(*MESSAGES, Norm), MESSAGES[:-1], MESSAGES[::-1]]
    assert len({compute_format_number(), *map(compute_format_number, changed)}) == 4
    assert all(0 <= compute_format_number(kinds) < 2**31 for kinds in changed)


# A decoded message is the encoded one, and every byte is counted.


@pytest.mark.parametrize("kind", MESSAGES)
def test_a_decoded_message_is_the_encoded_one(kind):
    @quick
    @given(messages_of(kind))
    def law(message):
        decoded = decode(encode(message))
        assert type(decoded) is kind
        for item in dataclasses.fields(kind):
            assert same(getattr(decoded, item.name), getattr(message, item.name)), item.name

    law()


def test_every_message_that_the_protocol_knows_has_a_code():
    known = {
        item
        for item in vars(messages).values()
        if isinstance(item, type) and issubclass(item, Message) and item not in (Message, TensorMessage)
    }
    assert set(MESSAGES) == known


@quick
@given(any_message)
def test_the_measured_parts_add_up_to_the_encoded_size(message):
    assert sum(size for _, size in message.measure()) == len(encode(message))


@quick
@given(st.lists(any_message, max_size=6))
def test_a_meter_counts_the_bytes_that_travel(sent):
    meter = TrafficCounter()
    for index, message in enumerate(sent):
        (meter.count_to_server if index % 2 else meter.count_to_clients)(message)
    sizes = [len(encode(message)) for message in sent]
    assert (meter.bytes_to_clients, meter.bytes_to_server) == (sum(sizes[::2]), sum(sizes[1::2]))
    assert meter.messages == len(sent)
    assert sum(meter.by_kind.values()) == sum(meter.by_phase.values()) == meter.total_bytes == sum(sizes)


def test_node_sets_count_as_sampling():
    message = Proposal(KEY._replace(phase=Phase.SAMPLING), (np.arange(5, dtype=np.int32),))
    meter = TrafficCounter()
    meter.count_to_server(message)
    assert meter.by_phase == {"sampling": 48 + 12 + 5}
    assert meter.by_kind == {"header": 48 + 12, "index": 5}


def test_gradients_are_reported_as_training():
    meter = TrafficCounter()
    meter.count_to_server(Waiting(key=KEY._replace(phase=Phase.BACKWARD)))
    meter.exchange(Receive((messages.JointGradient,), KEY._replace(phase=Phase.BACKWARD)))
    assert meter.by_phase == {"training": 48}
    assert meter.snapshot().exchanges_by_phase == {"training": 1}


def test_a_header_has_48_bytes_and_an_empty_message_nothing_else():
    assert HEADER.size == 48
    assert len(encode(Waiting(key=KEY))) == 48


PINNED = {
    Partial(KEY, np.array([[1.0, -2.0]], np.float32)): (
        "474c5355" "04" "00" "0100"  # magic, version, kind, sections
        "000102030405060708090a0b" "00000000" "02"  # run, incarnation, phase
        "03000000" "0000" "0100" "00000000" "0100" "00"  # round, attempt, layer, chunk, client, padding
        "1400000000000000"  # length
        "00" "00" "0000" "01000000" "02000000" "0000803f" "000000c0"  # tensor, fp32, one row of two
    ),
    Losses(KEY, np.array([0.5])): (
        "474c5355" "04" "08" "0100" "000102030405060708090a0b" "00000000" "02"
        "03000000" "0000" "0100" "00000000" "0100" "00" "1400000000000000"
        "02" "01" "0000" "01000000" "00000000" "000000000000e03f"  # losses, fp64, a vector of one
    ),
    Proposal(KEY, (np.array([3, 4, 200], np.int32),)): (
        "474c5355" "04" "06" "0100" "000102030405060708090a0b" "00000000" "02"
        "03000000" "0000" "0100" "00000000" "0100" "00" "1000000000000000"
        "01" "04" "0000" "04000000" "00000000" "0300c301"  # a node set, u1, four bytes: gaps 3, 0, 195
    ),
    Verdict(KEY, improved=True, stop=False): (
        "474c5355" "04" "0a" "0200" "000102030405060708090a0b" "00000000" "02"
        "03000000" "0000" "0100" "00000000" "0100" "00" "1a00000000000000"
        "04" "04" "0000" "01000000" "00000000" "01" "04" "04" "0000" "01000000" "00000000" "00"  # two flags
    ),
}  # fmt: skip


@pytest.mark.parametrize(("message", "data"), PINNED.items(), ids=lambda item: type(item).__name__)
def test_the_bytes_of_a_message_are_pinned(message, data):
    assert encode(message).hex() == data


@pytest.mark.parametrize(
    ("encoding", "sent"),
    [
        (BFloat16(), "0200000100000002000000803f00c0"),  # u2, one row of two
        (Int8(2), "03000001000000060000000402813c4081"),  # i1, one row: 2 / 127, then 64, -127
    ],
)
def test_the_bytes_of_a_rounded_tensor_are_pinned(encoding, sent):
    value = np.array([[1.0, -2.0]], np.float32)
    data = encode(Partial(key=KEY, value=encoding.encode(value, KEY)))
    assert data[48:].hex() == "00" + sent
    np.testing.assert_allclose(encoding.decode(decode(data).value), value, atol=2 / 254)


@pytest.mark.parametrize("layout", ["big-endian", "transposed", "strided"])
def test_values_travel_little_endian_and_row_by_row_however_they_lie_in_memory(layout):
    value = np.arange(6, dtype="<f4").reshape(2, 3)
    stored = {
        "big-endian": value.astype(">f4"),
        "transposed": np.asfortranarray(value),
        "strided": np.repeat(value, 2, axis=1)[:, ::2],
    }[layout]
    assert encode(Partial(key=KEY, value=stored)) == encode(Partial(key=KEY, value=value))


def test_decoded_arrays_can_be_written_to_and_do_not_share_the_received_bytes():
    data = encode(Partial(key=KEY, value=np.ones((2, 2), np.float32)))
    decode(data).value[:] = 7
    np.testing.assert_array_equal(decode(data).value, 1)


# Any other bytes raise ProtocolError and no other exception.


def decodes(data: bytes) -> bool:
    """Return whether the bytes are a message; any exception except ProtocolError fails the test."""
    try:
        decode(data)
    except ProtocolError:
        return False
    return True


@pytest.mark.parametrize("message", sample_messages(), ids=lambda message: type(message).__name__)
def test_a_truncated_or_extended_message_is_refused(message):
    data = encode(message)
    assert decodes(data)
    assert not any(decodes(data[:length]) for length in range(len(data)))
    assert not any(decodes(data + bytes(extra)) for extra in (1, 4, 12, 48))


@settings(deadline=None, max_examples=300)
@given(st.binary(max_size=200))
def test_garbage_is_refused(data):
    assert not decodes(data)


def key_in(phase: int) -> bytes:
    """Return a packed key of this phase, which may not exist."""
    packed = bytearray(KEY.pack())
    packed[16] = phase
    return bytes(packed)


@settings(deadline=None, max_examples=300)
@given(st.binary(max_size=60), st.integers(0, 255), st.integers(0, 8), st.integers(0, 4))
def test_garbage_behind_a_right_header_raises_no_other_exception(body, code, phase, count):
    decodes(HEADER.pack(b"GLSU", VERSION, code % 13, count, key_in(phase), len(body)) + body)


def test_a_message_with_changed_bytes_raises_no_other_exception():
    rng = np.random.default_rng(0)
    outcomes = set()
    for message in sample_messages():
        data = np.frombuffer(encode(message), np.uint8)
        for _ in range(400):
            changed = data.copy()
            where = rng.integers(0, len(data), rng.integers(1, 4))
            changed[where] = rng.choice([0, 1, 2, 255, rng.integers(256)], len(where))
            outcomes.add(decodes(changed.tobytes()))
    assert outcomes == {True, False}


def with_sections(kind: type[Message], parts: list[tuple[int, int, int, int]], filler: int = 0) -> bytes:
    """Write sections (tag, dtype, rows, columns) with as many bytes as they declare, under a right header."""
    body = b""
    for tag, dtype, rows, columns in parts:
        size = rows * max(1, columns) * (np.dtype(DTYPES[dtype]).itemsize if dtype < len(DTYPES) else 1)
        body += SECTION.pack(tag, dtype, rows, columns) + bytes([filler]) * size
    return HEADER.pack(b"GLSU", VERSION, CODES[kind], len(parts), key_in(2), len(body)) + body


@settings(deadline=None, max_examples=600)
@given(
    st.sampled_from(MESSAGES),
    st.lists(
        st.tuples(
            st.integers(0, len(TAGS)), st.integers(0, len(DTYPES)), st.sampled_from([0, 1, 2, 3]), st.integers(0, 3)
        ),
        max_size=3,
    ),
    st.integers(0, 255),
)
def test_sections_of_right_length_in_wrong_places_raise_no_other_exception(kind, parts, filler):
    decodes(with_sections(kind, parts, filler))


COLUMNS_OF = {"key share": 32, "blinded ids": 32}


def sections_with(tag: str, dtype: int, columns: int) -> bytes:
    """Write a message whose sections have this tag, dtype and number of columns, and one row each."""
    kind = CARRIERS[tag]
    return with_sections(kind, [(TAGS.index(tag), dtype, 1, columns)] * len(kind.contents()))


@pytest.mark.parametrize("tag", TAGS)
def test_a_section_of_another_type_than_its_tag_expects_is_refused(tag):
    columns = 2 if tag == "tensor" else COLUMNS_OF.get(tag, 0)
    accepted = {name for code, name in enumerate(DTYPES) if decodes(sections_with(tag, code, columns))}
    assert accepted == set(DTYPES_OF[tag])


@pytest.mark.parametrize("body", ["80", "8000", "ffffffff0f", "0580", "808080808001", "ffffffff0700"])
def test_bytes_that_are_no_node_set_are_refused(body):
    data = bytes.fromhex(body)
    section = SECTION.pack(TAGS.index("index"), DTYPES.index("|u1"), len(data), 0)
    length = SECTION.size + len(data)
    header = HEADER.pack(b"GLSU", VERSION, CODES[Proposal], 1, key_in(1), length)
    with pytest.raises(ProtocolError, match="node set"):
        decode(header + section + data)


@pytest.mark.parametrize("tag", [tag for tag in TAGS if tag != "tensor"])
def test_only_a_tensor_and_points_have_columns(tag):
    code, own = DTYPES.index(DTYPES_OF[tag][0]), COLUMNS_OF.get(tag, 0)
    assert decodes(sections_with(tag, code, own))
    for columns in (1, 3, *((0,) if own else ())):
        assert not decodes(sections_with(tag, code, columns))


def test_a_tensor_always_has_columns():
    assert not decodes(with_sections(Partial, [(0, 0, 2, 0)]))


@pytest.mark.parametrize(
    ("kind", "tags"),
    [
        (Partial, []),
        (Partial, ["tensor", "tensor"]),
        (Partial, ["tensor", "metrics"]),
        (Metrics, []),
        (Metrics, ["metrics", "metrics"]),
        (Verdict, []),
        (Verdict, ["verdict"]),
        (Verdict, ["verdict", "tensor"]),
        (Verdict, ["verdict"] * 3),
        (Waiting, ["tensor"]),
        (Proposal, ["index", "loss"]),
        (Losses, ["loss", "loss"]),
    ],
)
def test_a_message_with_missing_or_foreign_sections_is_refused(kind, tags):
    parts = [(TAGS.index(tag), DTYPES.index(DTYPES_OF[tag][0]), 1, 2 if tag == "tensor" else 0) for tag in tags]
    assert not decodes(with_sections(kind, parts))


def test_the_refusal_says_what_is_wrong():
    data = encode(Waiting(key=KEY))
    with pytest.raises(ProtocolError, match="message of 10 bytes"):
        decode(data[:10])
    with pytest.raises(ProtocolError, match="another format or version"):
        decode(b"HTTP" + data[4:])
    with pytest.raises(ProtocolError, match="another format or version"):
        decode(data[:4] + bytes([VERSION - 1]) + data[5:])
    with pytest.raises(ProtocolError, match="unknown kind 99"):
        decode(data[:5] + b"\x63" + data[6:])
    with pytest.raises(ProtocolError, match="unknown phase: 99 "):
        decode(data[:8] + key_in(99) + data[39:])
    with pytest.raises(ProtocolError, match="declares 0 bytes after it, but the message has 1"):
        decode(data + b"\0")


def test_bytes_that_no_section_claims_are_refused_even_if_the_header_counts_them():
    header = HEADER.pack(b"GLSU", VERSION, CODES[Waiting], 0, key_in(2), 5)
    with pytest.raises(ProtocolError, match="carries 5 bytes after its last section"):
        decode(header + bytes(5))


@pytest.mark.parametrize("columns", [0, 1, 2**32 - 1])
def test_nothing_is_allocated_for_what_a_message_only_declares(columns):
    section = SECTION.pack(0, 1, 2**32 - 1, columns)
    whole = HEADER.pack(b"GLSU", VERSION, 0, 1, key_in(2), len(section)) + section
    header = HEADER.pack(b"GLSU", VERSION, 0, 2**16 - 1, key_in(2), 2**63)
    tracemalloc.start()
    try:
        assert not decodes(whole)
        assert not decodes(header)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 100_000


def test_the_layout_of_header_and_sections_has_no_gaps_that_depend_on_the_machine():
    assert struct.calcsize("<4sBBH12sIBIHhIHxQ") == HEADER.size
    assert SECTION.size == 12


# Received bytes never run code.

UNSAFE_MODULES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal", "yaml"}


def unsafe(source: str) -> list[str]:
    """List calls that could run received code: pickle under any name, eval, exec, loaders that unpickle."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name.split(".")[0] in UNSAFE_MODULES]
        elif isinstance(node, ast.ImportFrom) and node.module:
            found += [node.module] if node.module.split(".")[0] in UNSAFE_MODULES else []
        elif isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            options = {item.arg: ast.unparse(item.value) for item in node.keywords}
            pickles = options.get("allow_pickle") == "True"
            pickles |= name in ("np.load", "numpy.load") and options.get("allow_pickle") != "False"
            if pickles or name in ("eval", "exec", "torch.load", "yaml.load", "pd.read_pickle"):
                found.append(name)
    return found


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "def f():\n    from joblib import load",
        "eval(x)",
        "torch.load(path)",
        "np.load(path)",
        "np.load(path, allow_pickle=True)",
        "yaml.load(text)",
    ],
)
def test_the_search_for_unsafe_code_finds_it(source):
    assert unsafe(source)


def test_the_search_for_unsafe_code_leaves_safe_code_alone():
    assert not unsafe("model.eval()\nnp.load(path, allow_pickle=False)\njson.loads(text)")


def test_no_module_unpickles_or_evaluates_anything():
    root = Path(glasu.__file__).parent
    modules = sorted(root.rglob("*.py"))
    assert len(modules) > 30
    assert {str(path.relative_to(root)): found for path in modules if (found := unsafe(path.read_text()))} == {}
