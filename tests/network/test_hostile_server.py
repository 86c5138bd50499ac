"""A server that sends too much, asks for too much, or falls silent: a party stays within its memory and says so."""

from __future__ import annotations

import re
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import grpc
import pytest

from glasu.config import RunConfig
from glasu.errors import ConfigError
from glasu.network import client_session as sessions
from glasu.network.client_session import Session
from glasu.network.frames import ALIVE, control
from glasu.network.party_setup import check_memory
from glasu.network.transport import NAME, SERVICE
from glasu.pki.kit import open_kit
from network.test_runs import tiny
from support.cluster import Cluster

GIB = 2**30
FLOOD = 300  # frames of almost a MiB


@contextmanager
def serving(kits, answer):
    """Run a server whose stream sends the frames of `answer()`; yield its port."""
    server, kit = grpc.server(ThreadPoolExecutor(2)), open_kit(kits / "server", "server")
    handler = grpc.stream_stream_rpc_method_handler(lambda frames, context: answer())
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {NAME: handler}),))
    pair = [(kit.key_pem, kit.certificate_pem)]
    port = server.add_secure_port(
        "127.0.0.1:0", grpc.ssl_server_credentials(pair, kit.ca_pem, require_client_auth=True)
    )
    server.start()
    try:
        yield port
    finally:
        server.stop(1.0).wait()


def flood(sent):
    """Return a function that welcomes a party and sends notices as fast as it can; each is noted in `sent`."""

    def answer():
        yield control("welcome", run="00")
        for number in range(FLOOD):
            sent.append(number)
            yield control("notice", line=f"{number} " + "x" * 1_000_000)
        yield control("goodbye")

    return answer


def settle(sent):
    """Wait until no frame has been sent for a second, and return how many were."""
    before = -1
    while len(sent) != before:
        before = len(sent)
        time.sleep(1.0)
    return before


def test_a_party_that_does_not_read_makes_the_server_wait_and_loses_nothing(kits):
    lines, sent = [], []
    with serving(kits, flood(sent)) as port:
        session = Session(open_kit(kits / "a", "party"), f"localhost:{port}", dict, 60.0, lines.append)
        session.open()
        assert settle(sent) < 100
        session.wait_for_goodbye()
        session.close()
    assert [line.split()[0] for line in lines] == [str(number) for number in range(FLOOD)]


def test_a_session_that_is_closed_in_a_flood_reads_no_more(kits):
    sent = []
    with serving(kits, flood(sent)) as port:
        session = Session(open_kit(kits / "a", "party"), f"localhost:{port}", dict, 60.0, lambda line: None)
        session.open()
        session.close()
        assert settle(sent) < 100


def test_a_party_says_that_the_server_is_silent_and_that_it_answers_again(kits, monkeypatch):
    monkeypatch.setattr(sessions, "SILENT_AFTER", 2.0)
    lines = []

    def answer():
        yield control("welcome", run="00")
        for pause in (1.0, 1.0, 1.0, 4.5):
            time.sleep(pause)
            yield ALIVE
        yield control("goodbye")

    with serving(kits, answer) as port:
        session = Session(open_kit(kits / "a", "party"), f"localhost:{port}", dict, 60.0, lines.append)
        session.open()
        session.wait_for_goodbye()
        session.close()
    silent, again = lines  # signs of life are not told, and are not answers: they end a silence
    assert re.fullmatch(rf"the server at localhost:{port} has been silent for [2-4] s\.", silent)
    assert again == f"the server at localhost:{port} answers again."


DEEP = 10**9
ABSURD = {
    "hidden": ({"model": {"hidden": 20_000}}, "model.hidden=20000, "),
    "narrow but deep": (
        {"model": {"hidden": 1, "num_layers": DEEP, "aggregation_layers": (DEEP - 1,)}},
        f"model.num_layers={DEEP}",
    ),
    "heads": ({"model": {"backbone": "gat", "hidden": 2**30, "heads": 2**30}}, f"model.hidden={2**30}"),
    "local steps": ({"train": {"num_local_steps": 2**31 - 1}}, f"train.num_local_steps={2**31 - 1}"),
}


@pytest.mark.parametrize("name", ABSURD)
def test_settings_that_do_not_fit_into_memory_are_refused_before_anything_is_built(name):
    changes, expected = ABSURD[name]
    _, parties = tiny()
    with pytest.raises(ConfigError, match=f"{expected}.* this party allows 8.0 GiB.*--max-memory"):
        check_memory(RunConfig().replace(**changes), parties[0], 8 * GIB)


@pytest.mark.parametrize("hidden", [64, 512])
def test_an_ordinary_model_fits(hidden):
    config, parties = tiny(hidden=hidden)
    check_memory(config, parties[0], GIB)
    check_memory(config, parties[0])


def test_a_party_declines_a_model_above_its_own_limit_and_takes_part_once_that_is_raised(kits, tmp_path):
    config, parties = tiny(num_rounds=1)
    cluster = Cluster(config, parties, kits, tmp_path)
    server = cluster.serve()
    error = cluster.join("a", max_memory=1000).error()
    assert isinstance(error, ConfigError)
    assert "model.hidden=" in str(error)
    cluster.until("server", "a: declines to take part: model.hidden=")
    for role in [cluster.join(name, max_memory=GIB) for name in "abc"]:
        role.outcome()
    server.outcome()
