"""The generator of torch at the start of a stream."""

from __future__ import annotations

import numpy as np
import torch

from glasu.model.seeding import seed_torch_generator
from glasu.randomness import Stream
from glasu.secret import Secret

PRIVATE = Stream(Secret(bytes(range(32))), "weights", layer=1, client=2)
PUBLIC = PRIVATE._replace(seed=5)


def start(stream):
    """Return 700 numbers and the words of the state before them."""
    with torch.random.fork_rng(devices=[]):
        seed_torch_generator(stream)
        words = torch.default_generator.get_state().view(torch.int64)[3:627].clone().numpy()
        return torch.rand(700).numpy(), words


def is_initialized_from_32_bits(words):
    """Return whether all words of MT19937 follow from the first one, as after `manual_seed`."""
    expected = int(words[0])
    for index, word in enumerate(words.tolist()):
        if index:
            expected = (1812433253 * (expected ^ (expected >> 30)) + index) % 2**32
        if word != expected:
            return False
    return True


def test_a_public_stream_is_the_manual_seed():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(PUBLIC.torch_seed())
        expected = torch.rand(700).numpy()
    drawn, words = start(PUBLIC)
    np.testing.assert_array_equal(drawn, expected)
    assert is_initialized_from_32_bits(words)


def test_no_seed_of_32_bits_gives_the_state_of_a_secret():
    _, words = start(PRIVATE)
    assert not is_initialized_from_32_bits(words)
    assert len(set(words.tolist())) == 624
    assert 0 <= words.min() < 2**25 < 2**32 - 2**25 < words.max() < 2**32


def test_a_secret_decides_every_word_of_the_state():
    words, numpy_generator = PRIVATE.numpy().integers(0, 2**32, 624, np.int64), np.random.MT19937()
    state = {"key": words.astype(np.uint32), "pos": 624}
    numpy_generator.state = {"bit_generator": "MT19937", "state": state}
    raw = numpy_generator.random_raw(700).astype(np.uint32)
    drawn, _ = start(PRIVATE)
    np.testing.assert_array_equal(drawn, (raw & (2**24 - 1)).astype(np.float32) * np.float32(2.0**-24))


def test_streams_of_other_layers_and_secrets_draw_other_numbers():
    others = [PRIVATE._replace(layer=2), PRIVATE._replace(seed=Secret(bytes(32)))]
    for other in others:
        assert not np.isin(start(other)[0], start(PRIVATE)[0]).all()
    np.testing.assert_array_equal(start(PRIVATE)[0], start(PRIVATE)[0])
