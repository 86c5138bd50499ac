"""The greatest size of a message follows from its fields, and anything larger is refused."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from glasu.errors import ProtocolError
from glasu.protocol.fields import HEADER, FlagField
from glasu.protocol.limits import Limits
from glasu.protocol.message_bytes import decode, encode, read_header
from glasu.protocol.messages import MESSAGES, Joint, Message, Partial, Proposal, Waiting
from glasu.wire.encodings import make_encodings
from glasu.wire.message_key import Phase
from glasu.wire.tensor_kinds import REPRESENTATION
from support.messages import KEY, largest, make_valid_values
from support.monolith import run, settings, tiny_parties

HIDDEN, CHUNK_ROWS = 6, 64
PRECISIONS = ["fp32", "fp64", "bf16", "int8"]


def shapes_of(num_nodes: int = 100, prefetch: int = 3, steps: int = 4, widening: int = 1, precision: str = "fp32"):
    return Limits(
        num_nodes=num_nodes,
        num_scores=3,
        hidden=HIDDEN,
        joint_width=HIDDEN * widening,
        num_local_steps=steps,
        prefetch=prefetch,
        chunk_rows=CHUNK_ROWS,
        encodings=make_encodings(settings(precision=precision, hidden=HIDDEN)),
    )


def check(limits: Limits, message: Message) -> int:
    """Check an encoded message as a receiver does; return its size."""
    data = encode(message)
    limits.check(read_header(data, len(data)), len(data))
    decode(data)
    return len(data)


shapes = st.builds(
    shapes_of,
    num_nodes=st.one_of(st.integers(1, 300), st.just(CHUNK_ROWS + 1)),
    prefetch=st.integers(0, 4),
    steps=st.integers(1, 5),
    widening=st.integers(1, 3),
    precision=st.sampled_from(PRECISIONS),
)


@pytest.mark.parametrize("kind", MESSAGES)
def test_what_a_run_can_send_is_within_the_limit_of_its_kind(kind):
    @hypothesis_settings(deadline=None, max_examples=40)
    @given(st.data(), shapes, st.sampled_from(Phase))
    def law(data, shapes, phase):
        contents = kind.contents().values()
        values = [data.draw(make_valid_values(content, shapes, phase)) for content in contents]
        check(shapes, kind(KEY._replace(phase=phase), *values))

    law()


@pytest.mark.parametrize("phase", [Phase.SAMPLING, Phase.TRAINING, Phase.EVALUATION_SAMPLING])
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("kind", MESSAGES)
def test_the_limit_is_the_size_of_the_largest_message(kind, precision, phase):
    for num_nodes in (5, CHUNK_ROWS, CHUNK_ROWS + 1):
        shapes = shapes_of(num_nodes, widening=3, precision=precision)
        values = [largest(content, shapes, phase) for content in kind.contents().values()]
        assert check(shapes, kind(KEY._replace(phase=phase), *values)) == shapes.of(kind, phase)[1]


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("kind", MESSAGES)
def test_one_more_row_set_or_value_is_refused(kind, precision):
    shapes = shapes_of(50, precision=precision)
    for name, content in kind.contents().items():
        if isinstance(content, FlagField):
            continue  # one value, always
        values = {other: largest(each, shapes, KEY.phase) for other, each in kind.contents().items()}
        values[name] = largest(content, shapes, KEY.phase, extra=1)
        with pytest.raises(ProtocolError, match="expected at most"):
            check(shapes, kind(KEY, **values))


@pytest.mark.parametrize("kind", MESSAGES)
def test_one_more_byte_or_section_is_refused_from_the_header_alone(kind):
    limits = shapes_of()
    values = [largest(content, limits, KEY.phase) for content in kind.contents().values()]
    data = encode(kind(KEY, *values))
    head = read_header(data, len(data))
    sections, size = limits.of(kind, KEY.phase)
    limits.check(head._replace(sections=sections), size)
    with pytest.raises(ProtocolError, match=f"{kind.__name__} for .*: expected at most {size} bytes, got {size + 1}"):
        limits.check(head, size + 1)
    with pytest.raises(ProtocolError, match=f"expected at most {sections} sections, got {sections + 1}"):
        limits.check(head._replace(sections=sections + 1), size)


@pytest.mark.parametrize(("num_nodes", "last"), [(5, 0), (CHUNK_ROWS - 1, 0), (CHUNK_ROWS, 1), (3 * CHUNK_ROWS, 3)])
def test_a_chunk_behind_the_last_one_is_refused(num_nodes, last):
    limits = shapes_of(num_nodes)
    check(limits, Waiting(KEY._replace(chunk=last)))
    with pytest.raises(ProtocolError, match=rf"expected a chunk of 0\.\.{last}, got {last + 1}"):
        check(limits, Waiting(KEY._replace(chunk=last + 1)))


def test_only_an_agreement_of_training_sets_has_several_sets():
    limits = shapes_of(prefetch=3)
    sets = {phase: limits.of(Proposal, phase)[0] for phase in Phase}
    assert sets == {phase: 3 if phase is Phase.SAMPLING else 1 for phase in Phase}
    assert shapes_of(prefetch=0).of(Proposal, Phase.SAMPLING)[0] == 1


def test_no_message_is_longer_than_the_largest():
    limits = shapes_of(300, precision="fp64", widening=3)
    assert limits.largest == max(limits.of(kind, phase)[1] for kind in MESSAGES for phase in Phase)
    assert limits.of(Joint, Phase.TRAINING)[1] == HEADER.size + 12 + CHUNK_ROWS * 3 * HIDDEN * 8


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"aggregation": "concat", "backward": "joint", "precision": "int8"},
        {"labels": "b", "num_local_steps": 3, "precision": "bf16"},
        {"sampler": "neighbor", "fanout": 2, "batch_size": 5, "prefetch": 2, "sampled_evaluation": True},
        {"sampler": "shared", "fanout": 2, "batch_size": 5, "labels": "b"},
    ],
    ids=str,
)
def test_every_message_of_a_run_is_within_the_limits_that_the_handshake_fixes(keys):
    config = settings(num_rounds=3, evaluate_every=2, **keys)
    limits, seen = Limits.of_run(config, num_nodes=24, num_classes=3, num_clients=3), set()

    def carry(message):
        check(limits, message)
        seen.add(type(message))
        return message

    run(config, tiny_parties(owner=keys.get("labels")), carry=carry)
    assert Partial in seen


def test_the_limits_of_a_run_follow_its_settings():
    config = settings(aggregation="concat", hidden=7, num_local_steps=5, prefetch=2, chunk_rows=9)
    found = Limits.of_run(config, num_nodes=24, num_classes=3, num_clients=4)
    counts = {item.name: getattr(found, item.name) for item in dataclasses.fields(found) if item.name != "encodings"}
    assert counts == {
        "num_nodes": 24,
        "num_scores": 3,
        "hidden": 7,
        "joint_width": 28,
        "num_local_steps": 5,
        "prefetch": 2,
        "chunk_rows": 9,
        "num_clients": 4,
    }
    assert found.encodings[REPRESENTATION].row_bytes(7) == np.dtype("<f8").itemsize * 7
