"""Only the right certificate gets in; everyone else is turned away before a frame of theirs is read."""

from __future__ import annotations

import os
import shutil
import socket
import ssl
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from queue import SimpleQueue

import pytest

from glasu.errors import AbsenceError, TransportError
from glasu.network.client_session import Session
from glasu.network.connect_errors import plain_reason, refusal_told
from glasu.network.frames import control
from glasu.network.transport import Line, unreachable
from glasu.pki.kit import open_kit
from glasu.pki.provision import provision, revoke
from network.test_runs import tiny
from support.cluster import Cluster, SeenHub


@pytest.fixture
def other(tmp_path):
    """Return kits of the same names, signed by another CA."""
    provision(tmp_path / "other", ["a", "b", "c"], ["localhost"])
    return tmp_path / "other"


@pytest.fixture
def cluster(kits, tmp_path):
    """Return a cluster whose server waits; no party has come."""
    config, parties = tiny()
    found = Cluster(config, parties, kits, tmp_path / "run")
    server = found.serve(wait=600.0)  # longer than any test here
    yield found
    found.end(server)


def answer(kit, address):
    """Connect with a kit, say something, and return what comes back: a frame, or why the stream ended."""
    arrived: SimpleQueue = SimpleQueue()
    line = Line(kit, address, lambda line, event: arrived.put(event))
    line.send(control("hello"))
    try:
        return arrived.get(timeout=60)
    finally:
        line.close()


def nobody_came():
    return all(link.stream is None and not link.refused for link in SeenHub.last.links.values())


def test_certificates_of_others_are_refused_in_the_handshake(cluster, kits, other):
    address = f"localhost:{cluster.port}"
    own, foreign, server = open_kit(kits / "a"), open_kit(other / "a"), open_kit(kits / "server")
    expected = {
        "refused: the server's certificate was not signed by the CA of this kit (CA fingerprint ": foreign,
        "it closed the connection; if that goes on, its log says why": replace(foreign, ca_pem=own.ca_pem),
        "it closed the connection": server,
    }
    for said, kit in expected.items():
        why = answer(kit, address)
        assert isinstance(why, str)
        assert why.startswith(said)
    assert nobody_came()
    assert isinstance(answer(own, address), bytes)  # the right one is read, and told what is wrong with its hello


def test_a_server_at_another_address_than_its_certificate_says_is_refused(cluster, kits, tmp_path):
    own = open_kit(kits / "a")
    provision(tmp_path / "elsewhere", ["a", "b", "c"], ["glasu.example.org"])
    assert "not signed by the CA of this kit" in answer(
        replace(own, ca_pem=(tmp_path / "elsewhere" / "a" / "ca.pem").read_bytes()), f"localhost:{cluster.port}"
    )
    assert nobody_came()


def test_a_party_at_an_address_that_the_certificate_does_not_name_is_told_which_hosts_to_ask_for(tmp_path):
    provision(tmp_path / "elsewhere", ["a", "b", "c"], ["glasu.example.org"])
    config, parties = tiny()
    cluster = Cluster(config, parties, tmp_path / "elsewhere", tmp_path / "run")
    server = cluster.serve()
    error = cluster.join("a").error()
    assert isinstance(error, TransportError)
    assert "does not name localhost" in str(error)
    assert "--renew server --host glasu.example.org,localhost` (all names, for --host replaces them)" in str(error)
    cluster.end(server)


def test_a_party_with_a_kit_of_another_provision_is_told_what_to_ask_for_and_does_not_try_again(cluster, other):
    error = replace(cluster, kits=other).join("a").error()
    assert isinstance(error, TransportError)
    for words in ("not signed by the CA of this kit", open_kit(other / "a").ca_fingerprint, "same `glasu provision`"):
        assert words in str(error)
    for jargon in ("TSI_", "SSL", "OK"):
        assert jargon not in str(error)


@pytest.mark.parametrize(
    ("said", "why"),
    [
        (
            "errors resolving x.invalid:1: [field:hostname lookup error:...: Domain name not found]",
            "the name x.invalid is",
        ),
        ("DNS resolution failed for x.invalid:1: C-ares status is not ARES_SUCCESS", "the name x.invalid is not known"),
        ("failed to connect to all addresses; last error: ...: Connection refused", "nothing listens there"),
        ("...OPENSSL_internal:WRONG_VERSION_NUMBER: Invalid certificate", "does not speak TLS; check the port"),
        ("...CERTIFICATE_VERIFY_FAILED: certificate has expired", "refused: the server's certificate has expired"),
        (
            "...CERTIFICATE_VERIFY_FAILED: certificate is not yet valid",
            "refused: the server's certificate is not valid",
        ),
        ("refused: the certificate of 'b' is revoked.", "refused: the certificate of 'b' is revoked"),
        ("something new", "something new (unavailable)"),
    ],
)
def test_what_grpc_says_is_told_in_our_words(said, why, kits):
    assert why in plain_reason(said, "unavailable", open_kit(kits / "a"), "x.invalid:1")


def test_who_cannot_resolve_a_name_is_not_told_to_start_the_server(kits):
    error = str(unreachable("x.invalid:1", 5, "the name x.invalid is not known here; check how it is spelt"))
    assert "Give the right name in --server" in error
    assert "Start the server" not in error
    assert "Start the server" in str(unreachable("localhost:1", 5, "nothing listens there"))
    error = str(unreachable("localhost:1", 5, "what answers at localhost:1 does not speak TLS; check the port"))
    assert "Start the server" not in error


def test_a_new_name_of_the_server_is_asked_for_beside_the_names_it_has(kits):
    why = plain_reason("Hostname Verification Check failed.", "unavailable", open_kit(kits / "a"), "127.0.0.1:1")
    assert "--host OTHERS,127.0.0.1` (all names, for --host replaces them)" in why  # nobody answers there
    assert refusal_told("127.0.0.1:1", why).startswith("this party does not accept the server at 127.0.0.1:1: ")


def tls(kits, flaw):
    """Return the TLS of a party that has this flaw, or none."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(kits / "a" / "ca.pem")
    context.set_alpn_protocols(["h2"])
    if flaw != "no certificate":
        context.load_cert_chain(kits / "a" / "certificate.pem", kits / "a" / "key.pem")
    if flaw == "TLS 1.2":
        context.maximum_version = ssl.TLSVersion.TLSv1_2
    return context


def first_words(context, port):
    """Return what the server says to who begins so; nothing where it hangs up, which must not take it long."""
    with socket.create_connection(("localhost", port), timeout=20) as plain:
        try:
            with context.wrap_socket(plain, server_hostname="localhost") as secure:
                secure.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0]))
                return secure.recv(1000)
        except (ssl.SSLError, ConnectionError):  # a TimeoutError is neither
            return b""


@pytest.mark.parametrize("flaw", ["no certificate", "TLS 1.2"])
def test_without_a_certificate_or_with_an_older_tls_nobody_is_served(cluster, kits, flaw):
    assert first_words(tls(kits, flaw), cluster.port) == b""
    assert first_words(tls(kits, "none"), cluster.port) != b""
    assert nobody_came()


def test_noise_is_answered_by_an_alert_at_most(cluster):
    with socket.create_connection(("localhost", cluster.port), timeout=20) as plain:
        plain.sendall(b"\x16\x03\x01" + bytes(range(256)))
        with suppress(ConnectionError):
            assert plain.recv(1000)[:1] in (b"", b"\x15")
    assert nobody_came()


GRPC_FIRST = """
import sys
from pathlib import Path
import grpc
from glasu.errors import TransportError
from glasu.pki.kit import open_kit
from glasu.network.transport import Line, listening
kit = open_kit(Path(sys.argv[1]))
try:
    if kit.role == "server":
        with listening([], kit, "127.0.0.1:0"):
            pass
    else:
        Line(kit, "localhost:1", print)
except TransportError as error:
    print(error)
"""


@pytest.mark.parametrize("name", ["server", "a"])
def test_nobody_serves_or_joins_where_grpc_was_loaded_too_early_to_be_held_to_tls_1_3(name, kits):
    bare = {name: value for name, value in os.environ.items() if name != "GRPC_SSL_CIPHER_SUITES"}
    words = [sys.executable, "-c", GRPC_FIRST, str(kits / name)]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=60, env=bare, check=True)
    (line,) = ended.stdout.splitlines()
    assert "TLS 1.2" in line
    assert "require_tls_1_3() before" in line


def test_a_revoked_party_is_refused_by_name_and_does_not_try_again(kits, tmp_path):
    copied = tmp_path / "kits"
    shutil.copytree(kits, copied)
    revoke(copied, ["b"])
    config, parties = tiny()
    cluster = Cluster(config, parties, copied, tmp_path / "run")
    server = cluster.serve()
    error = cluster.join("b").error()
    assert isinstance(error, TransportError)
    assert "does not accept this party: the certificate of 'b' is revoked" in str(error)
    assert "ask for a new kit (`glasu provision --renew b`)" in str(error)
    cluster.until("server", "'b' is revoked")
    assert nobody_came()
    cluster.end(server)


def test_a_party_that_comes_while_the_revocation_list_is_copied_tries_again(kits, tmp_path):
    copied = tmp_path / "kits"
    shutil.copytree(kits, copied)
    config, parties = tiny()
    cluster = Cluster(config, parties, copied, tmp_path / "run")
    server, path = cluster.serve(), copied / "server" / "revoked.pem"
    whole = path.read_bytes()
    path.write_bytes(whole[:100])
    roles = [cluster.join(name) for name in "abc"]
    cluster.until("server", f"{path}: does not hold a revocation list")
    cluster.until("a", "is awaited: its revocation list cannot be read at the moment")
    assert nobody_came()
    path.write_bytes(whole)
    for role in (server, *roles):
        role.outcome()


def test_a_party_that_waits_for_its_server_says_so_again_and_again(kits, monkeypatch):
    monkeypatch.setattr("glasu.network.client_session.TOLD_EVERY", 0.5)
    said: list[str] = []
    session = Session(open_kit(kits / "a"), "localhost:1", dict, 2.0, said.append)
    with pytest.raises(AbsenceError):
        session.open()
    assert said[0] == "the server at localhost:1 is awaited: nothing listens there."
    assert any(line.startswith("the server at localhost:1 is awaited since ") for line in said[1:])
