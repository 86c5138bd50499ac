"""Encodings: decoded tensors are near the encoded ones, the same at every reader, and NaN stays visible."""

from __future__ import annotations

import itertools

import hypothesis.extra.numpy as hnp
import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from glasu import registry
from glasu.config import RunConfig
from glasu.errors import ConfigError, TrainingError
from glasu.wire.encoding import DTYPES, Encoding
from glasu.wire.encodings import Precision, find_compute_dtype, make_encodings, use_for_all_kinds
from glasu.wire.floats import BFloat16, Plain
from glasu.wire.int8 import Int8
from glasu.wire.message_key import SERVER, TO_ONE, Key, Phase
from glasu.wire.tensor_kinds import CHANGE, GRADIENT, OWNER_GRADIENT, PROBABILITIES, REPRESENTATION

KEY = Key(run=bytes(12), phase=Phase.BACKWARD, client=1, round=3, layer=1)
WIDTH = 4
ENCODINGS: list[Encoding] = [
    Plain(),
    Plain("fp64"),
    BFloat16(),
    Int8(WIDTH),
    Int8(WIDTH, stochastic=True, seed=5),
]
LOSSY = [encoding for encoding in ENCODINGS if not isinstance(encoding, Plain)]
EIGHT_BITS = [encoding for encoding in ENCODINGS if isinstance(encoding, Int8)]
quick = settings(deadline=None, max_examples=150)
shapes = st.tuples(st.integers(0, 5), st.integers(1, 3).map(lambda blocks: blocks * WIDTH))
finite = st.floats(-(2.0**126), 2.0**126, width=32)
matrices = hnp.arrays("<f4", shapes, elements=finite)


def normal(rows: int, columns: int, scale: float = 1.0) -> np.ndarray:
    return (scale * np.random.default_rng(0).standard_normal((rows, columns))).astype(np.float32)


def blocks_of(value: np.ndarray) -> np.ndarray:
    return value.reshape(len(value), value.shape[1] // WIDTH, WIDTH)


# The conformance suite: every encoding passes it.


@pytest.mark.parametrize("encoding", ENCODINGS, ids=str)
def test_what_is_sent_is_a_matrix_of_as_many_rows_that_decodes_to_the_shape_it_had(encoding):
    @quick
    @given(matrices)
    def law(value):
        payload = encoding.encode(value, KEY)
        assert payload.ndim == 2
        assert len(payload) == len(value)
        assert payload.flags.c_contiguous
        assert encoding.find_error(payload) == ""
        decoded = encoding.decode(payload)
        assert decoded.shape == value.shape
        assert decoded.dtype == encoding.compute_dtype
        assert np.array_equal(decoded, value) or not encoding.is_exact
        assert np.isfinite(decoded).all()

    law()


@pytest.mark.parametrize("encoding", ENCODINGS, ids=str)
@pytest.mark.parametrize("cut", [1, 3, 6])
def test_a_rows_bytes_depend_on_no_other_row_and_on_where_it_stands_in_its_message(encoding, cut):
    value = normal(7, 3 * WIDTH)
    parts = [encoding.encode(value[:cut], KEY), encoding.encode(value[cut:], KEY, cut)]
    assert encoding.encode(value, KEY).tobytes() == np.concatenate(parts).tobytes()


@pytest.mark.parametrize("encoding", ENCODINGS, ids=str)
@pytest.mark.parametrize("again", [{}, {"incarnation": 1}, {"attempt": 1}, {"run": bytes(11) + b"1"}], ids=str)
def test_a_repeated_message_has_the_same_bytes_in_every_runtime(encoding, again):
    """Neither a restart nor the identity that a server gives to a run changes a bit."""
    value = normal(7, WIDTH)
    first, second = (encoding.encode(value, key) for key in (KEY, KEY._replace(**again)))
    assert first.tobytes() == second.tobytes()


@pytest.mark.parametrize("encoding", ENCODINGS, ids=str)
def test_encoding_leaves_the_values_as_they_were_and_takes_any_memory_layout(encoding):
    value = normal(6, 2 * WIDTH)
    before = value.copy()
    expected = encoding.encode(value, KEY).tobytes()
    np.testing.assert_array_equal(value, before)
    for stored in (np.asfortranarray(value), np.repeat(value, 2, axis=1)[:, ::2], value.astype(">f4")):
        assert encoding.encode(stored, KEY).tobytes() == expected


@pytest.mark.parametrize("encoding", ENCODINGS, ids=str)
def test_decoding_leaves_the_received_bytes_as_they_were(encoding):
    payload = encoding.encode(normal(6, 2 * WIDTH), KEY)
    before = payload.tobytes()
    encoding.decode(payload)
    assert payload.tobytes() == before


@pytest.mark.parametrize("encoding", ENCODINGS, ids=str)
def test_blocks_of_columns_keep_their_bytes_side_by_side_and_taken_apart(encoding):
    """`concat` of encoded partials is their exact concatenation: nothing is rounded twice."""
    parts = [normal(5, WIDTH, scale) for scale in (1.0, 1e-3, 1e6)]
    payloads = [encoding.encode(part, KEY) for part in parts]
    joint = np.concatenate(payloads, axis=1)
    decoded = [encoding.decode(payload) for payload in payloads]
    np.testing.assert_array_equal(encoding.decode(joint), np.concatenate(decoded, axis=1))


@pytest.mark.parametrize(
    ("encoding", "other"), [pair for pair in itertools.product(ENCODINGS, ENCODINGS) if pair[0].name != pair[1].name]
)
def test_what_travelled_in_another_encoding_is_refused(encoding, other):
    payload = other.encode(normal(3, WIDTH), KEY)
    assert "expected a matrix of" in encoding.find_error(payload)


@pytest.mark.parametrize("encoding", ENCODINGS, ids=str)
def test_a_vector_is_refused(encoding):
    assert "got a vector of" in encoding.find_error(encoding.encode(normal(3, WIDTH), KEY).ravel())


@pytest.mark.parametrize("encoding", ENCODINGS, ids=str)
@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf])
def test_what_is_no_number_is_refused_or_arrives_as_what_it_is(encoding, bad):
    value = normal(5, 2 * WIDTH)
    value[3, 5] = bad
    if isinstance(encoding, Int8):
        with pytest.raises(TrainingError, match=r"backward round 3 layer 1 .* diverged\. Lower train\.learning_rate"):
            encoding.encode(value, KEY)
        return
    decoded = encoding.decode(encoding.encode(value, KEY))
    np.testing.assert_array_equal(decoded[3, 5], bad)
    assert np.isfinite(decoded).sum() == value.size - 1


# bf16


@quick
@given(hnp.arrays("<f4", shapes, elements=st.floats(width=32)))
@example(np.array([[np.nan, np.inf, -np.inf, 3.4e38]], "<f4"))
@example(np.array([[0.0, -0.0, 1e-45, -1e-45]], "<f4"))
@example(np.array([[1 + 2.0**-8, 1 + 3 * 2.0**-8, -1 - 2.0**-8, 1 + 2.0**-7]], "<f4"))  # half to even
def test_bf16_is_what_torch_calls_bfloat16(value):
    expected = torch.from_numpy(value).bfloat16()
    payload = BFloat16().encode(value, KEY)
    known = ~np.isnan(value)
    np.testing.assert_array_equal(payload[known], expected.view(torch.uint16).numpy()[known])
    np.testing.assert_array_equal(BFloat16().decode(payload), expected.float().numpy())


def test_every_nan_stays_one_in_bf16():
    bits = np.array([[0x7F800001, 0x7FFFFFFF, 0xFF800001, 0xFFFFFFFF, 0xFFFF8000]], "<u4")  # some would wrap to 0
    assert np.isnan(BFloat16().decode(BFloat16().encode(bits.view("<f4"), KEY))).all()


# int8


@pytest.mark.parametrize("encoding", EIGHT_BITS, ids=["nearest", "stochastic"])
def test_each_value_is_within_a_step_of_what_was_sent(encoding):
    @quick
    @given(matrices)
    @example(np.zeros((2, WIDTH), "<f4"))
    @example(np.full((2, WIDTH), 2.0**126, "<f4"))
    @example(np.array([[1e-45, 2.0**-120, -(2.0**-121), 0.0]], "<f4"))
    def law(value):
        payload = encoding.encode(value, KEY)
        error = np.abs(blocks_of(encoding.decode(payload).astype(np.float64) - value))
        step = np.abs(blocks_of(value.astype(np.float64))).max(axis=2, keepdims=True) / 127
        share = 1.0 if encoding.stochastic else 0.5
        assert (error <= np.maximum(share * step * (1 + 1e-4), 2.0**-119)).all()
        assert (blocks_of_bytes(payload)[:, :, 4:] >= -127).all()

    law()


def blocks_of_bytes(payload: np.ndarray) -> np.ndarray:
    return payload.reshape(len(payload), payload.shape[1] // (4 + WIDTH), 4 + WIDTH)


def test_int8_rounds_half_to_even_and_keeps_zero_and_the_largest():
    value = np.array([[127.0, 0.5, 1.5, -2.5], [0, 0, 0, 0], [-12.7, 0, 0.06, -0.04]], np.float32)
    payload = Int8(WIDTH).encode(value, KEY)
    assert payload[:, 4:].tolist() == [[127, 0, 2, -2], [0, 0, 0, 0], [-127, 0, 1, 0]]
    assert np.ascontiguousarray(payload[:, :4]).view("<f4").ravel().tolist() == [1.0, 0.0, np.float32(12.7) / 127]


@pytest.mark.parametrize("encoding", EIGHT_BITS, ids=["nearest", "stochastic"])
def test_every_block_has_a_step_of_its_own(encoding):
    value = np.concatenate([normal(5, WIDTH), normal(5, WIDTH, 1e-6)], axis=1)
    decoded = encoding.decode(encoding.encode(value, KEY))
    np.testing.assert_allclose(decoded[:, WIDTH:], value[:, WIDTH:], atol=1e-6 * 4 / 127)
    assert (decoded[:, WIDTH:] != 0).any()


def test_int8_takes_a_byte_per_value_and_four_per_row():
    for width, share in ((64, 0.266), (128, 0.258), (192, 0.256)):
        payload = Int8(width).encode(normal(10, width), KEY)
        assert payload.nbytes == 10 * (width + 4)
        assert payload.nbytes / (10 * width * 4) == pytest.approx(share, abs=1e-3)


@pytest.mark.parametrize("step", [np.nan, -np.nan, np.inf, -np.inf, -1e-30, -1.0, 2.0**121, 3e38])
def test_a_step_that_is_no_possible_number_is_refused(step):
    payload = Int8(WIDTH).encode(normal(5, 2 * WIDTH), KEY)
    blocks_of_bytes(payload)[2, 1, :4] = np.array([step], "<f4").view(np.int8)
    assert "the step of a row is" in Int8(WIDTH).find_error(payload)


@pytest.mark.parametrize("columns", [0, 1, 4, 7, 9, 15])
def test_rows_of_another_length_are_refused(columns):
    assert f"multiple of 8 bytes, got {columns}" in Int8(WIDTH).find_error(np.zeros((3, columns), np.int8))


@settings(deadline=None, max_examples=300)
@given(hnp.arrays(np.int8, st.tuples(st.integers(0, 3), st.integers(0, 17))))
def test_any_bytes_are_refused_or_are_finite_numbers(payload):
    assert Int8(WIDTH).find_error(payload) or np.isfinite(Int8(WIDTH).decode(payload)).all()


# Stochastic rounding


def test_stochastic_rounding_is_right_in_the_mean_where_nearest_loses_what_is_small():
    value = np.tile(np.array([[127.0, 0.3, -0.3, 40.7]], np.float32), (4000, 1))
    nearest, stochastic = (
        encoding.decode(encoding.encode(value, KEY)).mean(axis=0)
        for encoding in (Int8(WIDTH), Int8(WIDTH, stochastic=True))
    )
    np.testing.assert_array_equal(nearest, [127, 0, 0, 41])
    np.testing.assert_allclose(stochastic, [127, 0.3, -0.3, 40.7], atol=5 * 0.5 / 4000**0.5)
    assert stochastic[0] == 127


@pytest.mark.parametrize(
    "change",
    [
        {"phase": Phase.TRAINING},
        {"client": 0},
        {"client": SERVER},
        {"client": TO_ONE},
        {"round": 4},
        {"layer": 2},
    ],
    ids=str,
)
def test_another_message_is_rounded_by_other_numbers(change):
    encoding, value = Int8(WIDTH, stochastic=True), normal(50, WIDTH)
    first, other = (encoding.encode(value, key) for key in (KEY, KEY._replace(**change)))
    assert np.mean(first != other) > 0.05  # of all bytes: 3 in 8 are rounded, a third of them to another neighbour


def test_another_seed_rounds_by_other_numbers():
    value = normal(50, WIDTH)
    first, other = (Int8(WIDTH, stochastic=True, seed=seed).encode(value, KEY) for seed in (0, 1))
    assert np.mean(first != other) > 0.05  # of all bytes: 3 in 8 are rounded, a third of them to another neighbour


@pytest.mark.parametrize("columns", [4, 16, 20, 36])
@pytest.mark.parametrize("largest", [0, WIDTH - 1], ids="largest in column {}".format)
def test_values_round_up_as_often_as_their_remainder_says_and_independently(columns, largest):
    encoding = Int8(WIDTH, stochastic=True)
    for remainder in (0.1, 0.5, 0.9):
        value = np.full((2000, columns), remainder, np.float32)
        value[:, largest::WIDTH] = 127  # the step of every block is 1
        rounded = encoding.decode(encoding.encode(value, KEY))[:, np.arange(columns) % WIDTH != largest]
        assert set(np.unique(rounded)) == {0, 1}
        assert rounded.mean() == pytest.approx(remainder, abs=5 * 0.5 / rounded.size**0.5)
        correlation = np.corrcoef(rounded.T) - np.eye(rounded.shape[1])
        assert np.abs(correlation).max() < 0.12
        assert abs(np.corrcoef(rounded[:-1].ravel(), rounded[1:].ravel())[0, 1]) < 0.06


# Encodings of a config


@pytest.mark.parametrize(
    ("precision", "names"),
    [
        ("fp32", ["fp32", "fp32", "fp32"]),
        ("fp64", ["fp64", "fp64", "fp64"]),
        ("bf16", ["bf16", "bf16", "fp32"]),
        ("int8", ["int8", "int8", "fp32"]),
    ],
)
def test_the_config_names_the_encodings_and_probabilities_are_never_rounded(precision, names):
    config = RunConfig().replace(wire={"precision": precision}, model={"hidden": 48}, train={"seed": 9})
    found = make_encodings(config)
    assert [found[kind].name for kind in (REPRESENTATION, GRADIENT, PROBABILITIES)] == names
    assert set(found) == {*use_for_all_kinds(Plain()), CHANGE, OWNER_GRADIENT}
    assert find_compute_dtype(config) == (np.float64 if precision == "fp64" else np.float32)
    if precision == "int8":
        assert found[REPRESENTATION] == Int8(48)
        assert found[GRADIENT] == Int8(48, stochastic=True, seed=9)


class OtherDtype(Plain):
    """The bits of floats as another dtype."""

    def __init__(self, dtype: str) -> None:
        super().__init__("fp32")
        self.__dict__["dtype"] = np.dtype(dtype)


def use_dtype(dtype: str) -> RunConfig:
    name = f"dtype-{dtype[1:]}-{'big' if dtype[0] == '>' else 'little'}"
    precision = Precision(lambda config: use_for_all_kinds(OtherDtype(dtype)))
    registry.register("encoding", name, precision)
    return RunConfig().replace(wire={"precision": name})


@pytest.mark.parametrize("dtype", ["<i4", "<i8", "<f2", ">f4"])
def test_an_encoding_with_a_dtype_that_no_message_carries_is_refused_with_the_remedy(dtype):
    with pytest.raises(ConfigError, match=f"precision='dtype.*the dtype '{dtype}'.*use one of <f4, <f8"):
        make_encodings(use_dtype(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_encoding_with_any_dtype_of_messages_is_accepted(dtype):
    assert make_encodings(use_dtype(dtype))


# The server's computations with encoded tensors


def payloads_of(encoding: Encoding, count: int, columns: int = WIDTH, scale: float = 1.0) -> list[np.ndarray]:
    rng = np.random.default_rng(count)
    keys = [KEY._replace(client=client) for client in range(count)]
    return [encoding.encode(scale * rng.standard_normal((6, columns)), key) for key in keys]


def rounding_key(encoding: Encoding, keys: list[Key], index: int) -> Key:
    """Return the key that decides the rounding of a result: its own key where rounding is stochastic."""
    return keys[index] if isinstance(encoding, Int8) and encoding.stochastic else keys[0]


@pytest.mark.parametrize("first_row", [0, 12])
@pytest.mark.parametrize("receivers", [1, 3])
@pytest.mark.parametrize("divisor", [1, 3])
@pytest.mark.parametrize("encoding", ENCODINGS, ids=str)
def test_combining_is_decoding_adding_in_order_dividing_and_encoding_once(encoding, divisor, receivers, first_row):
    payloads = payloads_of(encoding, 3, 2 * WIDTH)
    keys = [KEY.to_client(client) for client in range(receivers)]
    first, second, third = map(encoding.decode, payloads)
    total = ((first + second) + third) / first.dtype.type(divisor)
    found = encoding.combine(payloads, divisor, keys, first_row)
    assert len(found) == receivers
    for index, payload in enumerate(found):
        expected = encoding.encode(total, rounding_key(encoding, keys, index), first_row)
        assert payload.tobytes() == expected.tobytes()
        assert encoding.find_error(payload, 2 * WIDTH) == ""


@pytest.mark.parametrize("encoding", ENCODINGS, ids=str)
def test_combining_leaves_the_payloads_as_they_were(encoding):
    payloads = payloads_of(encoding, 3)
    before = [payload.tobytes() for payload in payloads]
    encoding.combine(payloads, 3, [KEY])
    assert [payload.tobytes() for payload in payloads] == before


@pytest.mark.parametrize("encoding", ENCODINGS, ids=str)
@pytest.mark.parametrize("cut", [1, 4])
def test_combining_chunks_of_rows_gives_the_rows_of_the_whole(encoding, cut):
    payloads = payloads_of(encoding, 3)
    (whole,) = encoding.combine(payloads, 3, [KEY])
    (top,) = encoding.combine([payload[:cut] for payload in payloads], 3, [KEY])
    (rest,) = encoding.combine([payload[cut:] for payload in payloads], 3, [KEY], cut)
    assert np.concatenate([top, rest]).tobytes() == whole.tobytes()


def test_shares_rounded_stochastically_differ_by_key_and_others_do_not():
    keys = [KEY.to_client(client) for client in range(3)]
    for encoding in ENCODINGS:
        shares = {payload.tobytes() for payload in encoding.combine(payloads_of(encoding, 3), 3, keys)}
        stochastic = isinstance(encoding, Int8) and encoding.stochastic
        assert len(shares) == (3 if stochastic else 1)


@pytest.mark.parametrize("encoding", [Plain(), Plain("fp64"), BFloat16()], ids=str)
def test_a_sum_of_finite_values_may_overflow_and_then_is_not_finite(encoding):
    largest = np.finfo(encoding.decode(encoding.encode(np.ones((1, WIDTH)), KEY)).dtype).max
    payload = encoding.encode(np.full((2, WIDTH), 0.9 * largest), KEY)
    (total,) = encoding.combine([payload] * 3, 3, [KEY])
    assert encoding.is_finite(payload)
    assert not encoding.is_finite(total)


def test_an_8_bit_sum_that_no_step_can_represent_is_refused():
    encoding = Int8(WIDTH)
    payload = encoding.encode(np.full((2, WIDTH), 1.6e38), KEY)
    with pytest.raises(TrainingError, match="not a finite number"):
        encoding.combine([payload] * 3, 1, [KEY])


@pytest.mark.parametrize("encoding", ENCODINGS, ids=str)
def test_the_bytes_of_a_row_are_those_of_its_payload(encoding):
    for blocks in (1, 2, 5):
        payload = encoding.encode(normal(3, blocks * WIDTH), KEY)
        assert encoding.row_bytes(blocks * WIDTH) == payload.nbytes // 3
