"""Sessions over real loopback streams with mutual TLS: whatever breaks, every party ends with the same bytes."""

from __future__ import annotations

import pytest

from support.toy_run import Federation, Killed, Toy, breaking_lines


@pytest.fixture
def federation(kits):
    return Federation(Toy(), kits)


def test_an_unbroken_run_computes_the_means(federation):
    server = federation.serve()
    federation.finish(server, [federation.join(name) for name in "abc"])
    assert [party.attempts for parties in federation.parties.values() for party in parties] == [1, 1, 1]
