"""Fixtures that several folders of tests share."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from glasu.pki.tls import require_tls_1_3

# No test fails because the machine is busy. CI tries the same examples every time; other runs try new ones.
settings.register_profile(
    "glasu", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize="CI" in os.environ
)
settings.load_profile("glasu")

require_tls_1_3()  # before a test file imports grpc


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Let no test read or write the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GLASU_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session", autouse=True)
def _children_can_be_interrupted() -> Iterator[None]:
    """Start commands with the default action for SIGINT.

    A shell ignores SIGINT in background jobs (`nohup make test &`), and children inherit that. A signal with a handler
    gets its default action back in a new program, so a handler in this process is enough.
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="session")
def data_root() -> Path:
    """Return the folder of real data sets, or skip the test."""
    root = os.environ.get("GLASU_DATA_ROOT")
    if not root:
        pytest.skip("GLASU_DATA_ROOT is not set: no real data")
    return Path(root)
