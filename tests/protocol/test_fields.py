"""Fields of messages: they are written to sections and read back, and a wrong section is refused."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from glasu.errors import ProtocolError
from glasu.protocol.fields import Content, FlagField, NodeSetsField, NumbersField, TensorField
from glasu.protocol.messages import MESSAGES
from glasu.wire.tensor_kinds import GRADIENT
from support.messages import values_of

quick = hypothesis_settings(deadline=None, max_examples=60)
FIELDS: dict[str, Content] = {
    f"{kind.__name__}.{name}": content for kind in MESSAGES for name, content in kind.contents().items()
}
sections = st.lists(
    st.tuples(st.sampled_from(["|u1", "<f8", "<f4"]), st.integers(0, 3), st.integers(0, 3)).map(
        lambda form: np.ones((form[1], form[2]) if form[2] else form[1], form[0])
    ),
    min_size=1,
    max_size=1,
)


@pytest.mark.parametrize("name", FIELDS)
def test_a_field_comes_back_from_its_sections(name):
    content = FIELDS[name]

    @quick
    @given(values_of(content))
    def law(value):
        arrays = content.to_sections(value)
        again = content.from_sections(arrays)
        if isinstance(content, NodeSetsField):
            assert [nodes.tolist() for nodes in again] == [nodes.tolist() for nodes in value]
        elif isinstance(content, FlagField):
            assert again is value
        else:
            assert again.tobytes() == value.tobytes()
            assert again.shape == value.shape

    law()


@pytest.mark.parametrize("name", FIELDS)
def test_a_field_measures_the_sections_that_it_becomes(name):
    content = FIELDS[name]

    @quick
    @given(values_of(content))
    def law(value):
        arrays = content.to_sections(value)
        assert content.measure(value) == (len(arrays), sum(array.nbytes for array in arrays))
        assert all(array.dtype.newbyteorder("<").str in content.dtypes for array in arrays)

    law()


@pytest.mark.parametrize("name", FIELDS)
def test_sections_of_any_form_raise_no_other_exception_than_a_protocol_error(name):
    content = FIELDS[name]

    @quick
    @given(sections)
    def law(arrays):
        if isinstance(content, NodeSetsField) and arrays[0].dtype != np.uint8:
            return  # `decode` compares the dtype first
        with contextlib.suppress(ProtocolError):
            content.from_sections(arrays)

    law()


def test_a_tensor_is_a_matrix_and_everything_else_a_vector():
    vector, matrix = np.zeros(2), np.zeros((2, 1))
    tensor, numbers = TensorField(GRADIENT, lambda shapes: 1), NumbersField("loss", lambda shapes: 1)
    assert tensor.from_sections([matrix]) is matrix
    assert numbers.from_sections([vector]) is vector
    with pytest.raises(ProtocolError, match="0 columns: expected one or more"):
        tensor.from_sections([vector])
    for content, value in ((numbers, matrix), (FlagField("verdict"), matrix), (NodeSetsField(), matrix)):
        with pytest.raises(ProtocolError, match=f"{content.tag} section of 1 columns"):
            content.from_sections([value])


@pytest.mark.parametrize("flags", [[], [0, 1], [2], [255]])
def test_a_flag_is_one_zero_or_one(flags):
    with pytest.raises(ProtocolError, match="expected one verdict flag, 0 or 1"):
        FlagField("verdict").from_sections([np.array(flags, np.uint8)])


def test_a_field_with_several_sections_is_the_last_of_its_message():
    for kind in MESSAGES:
        several = [isinstance(content, NodeSetsField) for content in kind.contents().values()]
        assert not any(several[:-1])
