"""Only the right certificate gets in; everyone else is turned away before a frame of theirs is read."""

from __future__ import annotations

import shutil
import socket
import ssl
from dataclasses import replace
from queue import SimpleQueue

import pytest

from glasu.errors import TransportError
from glasu.kits.kit import open_kit
from glasu.kits.provision import provision, revoke
from glasu.runtime.network.frames import control
from glasu.runtime.network.streams import Line
from runtime.network.cluster import Cluster, SeenHub
from runtime.network.test_runs import tiny


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
    for kit in (foreign, replace(foreign, ca_pem=own.ca_pem), server):
        why = answer(kit, address)
        assert isinstance(why, str)
        assert "unavailable" in why
    assert nobody_came()
    assert isinstance(answer(own, address), bytes)  # the right one is read, and told what is wrong with its hello


def test_a_server_at_another_address_than_its_certificate_says_is_refused(cluster, kits, tmp_path):
    own = open_kit(kits / "a")
    provision(tmp_path / "elsewhere", ["a", "b", "c"], ["glasu.example.org"])
    assert "CERTIFICATE_VERIFY_FAILED" in answer(
        replace(own, ca_pem=(tmp_path / "elsewhere" / "a" / "ca.pem").read_bytes()), f"localhost:{cluster.port}"
    )
    assert nobody_came()


@pytest.mark.parametrize("flaw", ["no certificate", "TLS 1.2", "nothing but noise"])
def test_without_a_certificate_or_with_an_older_tls_nobody_is_served(cluster, kits, flaw):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(kits / "a" / "ca.pem")
    context.set_alpn_protocols(["h2"])
    if flaw != "no certificate":
        context.load_cert_chain(kits / "a" / "certificate.pem", kits / "a" / "key.pem")
    if flaw == "TLS 1.2":
        context.maximum_version = ssl.TLSVersion.TLSv1_2
    with socket.create_connection(("localhost", cluster.port), timeout=60) as plain:
        if flaw == "nothing but noise":
            plain.sendall(b"\x16\x03\x01" + bytes(range(256)))
            assert not plain.recv(1000).startswith(b"PRI")
        else:
            with pytest.raises(OSError), context.wrap_socket(plain, server_hostname="localhost") as secure:  # noqa: PT012
                secure.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
                while secure.recv(1000):
                    pass
                raise OSError("closed")
    assert nobody_came()


def test_a_revoked_party_is_refused_by_name_and_does_not_try_again(kits, tmp_path):
    copied = tmp_path / "kits"
    shutil.copytree(kits, copied)
    revoke(copied, ["b"])
    config, parties = tiny()
    cluster = Cluster(config, parties, copied, tmp_path / "run")
    server = cluster.serve()
    error = cluster.join("b").error()
    assert isinstance(error, TransportError)
    assert "'b' is revoked" in str(error)
    cluster.until("server", "'b' is revoked")
    assert nobody_came()
    cluster.end(server)
