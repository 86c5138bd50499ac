"""`glasu serve` as a process: whoever has no right kit is turned away, and the server's log says why."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import time
from base64 import b64encode
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
from network.test_certificates import answer

from glasu.pki.authority import Signed, issue, make_authority
from glasu.pki.kit import open_kit, pem
from glasu.pki.provision import AUTHORITY, AUTHORITY_KEY, provision, revoke
from network.test_processes import SMALL_RUN

NOW = datetime.now(UTC).replace(microsecond=0)
DAY = timedelta(days=1)


@pytest.mark.parametrize(("verbosity", "num_lines"), [(None, 1), ("ERROR", 2)])
@pytest.mark.parametrize("command", ["serve", "doctor"])
def test_a_port_that_is_taken_is_one_line_unless_grpcs_own_are_asked_for(
    command, verbosity, num_lines, kits, tmp_path, monkeypatch
):
    monkeypatch.delenv("GRPC_VERBOSITY", raising=False)
    if verbosity is not None:
        monkeypatch.setenv("GRPC_VERBOSITY", verbosity)
    (tmp_path / "run.toml").write_text(SMALL_RUN.format(rounds=3))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        words = [sys.executable, "-m", "glasu.cli.main", command, tmp_path / "run.toml", "--kit", kits / "server"]
        words += ["--listen", f"127.0.0.1:{taken.getsockname()[1]}", "--out", tmp_path / "out", "--log-format", "json"]
        ended = subprocess.run([str(word) for word in words], capture_output=True, text=True, timeout=60)
    lines = ended.stderr.splitlines()
    assert ended.returncode == 2
    assert len(lines) == num_lines, ended.stderr
    assert "cannot be listened on (Address already in use)" in json.loads(lines[-1])["message"]


class Serving:
    """The server's process, and what it says."""

    def __init__(self, folder, kits) -> None:
        self.kits, self._log = kits, folder / "server.log"
        (folder / "run.toml").write_text(SMALL_RUN.format(rounds=3))
        words = [sys.executable, "-m", "glasu.cli.main", "serve", folder / "run.toml", "--listen", "127.0.0.1:0"]
        words += ["--kit", kits / "server", "--out", folder / "server"]
        with self._log.open("w") as log:
            strict = {**os.environ, "GRPC_VERBOSITY": "NONE"}  # of somebody else's making: it must not hide why
            self.process = subprocess.Popen([str(word) for word in words], stdout=log, stderr=log, env=strict)
        said = self.until("listening on 127.0.0.1:")
        self.port = int(said.split("listening on 127.0.0.1:")[1].split(",")[0])

    def until(self, words: str, after: int = 0) -> str:
        """Wait until the log says something, beyond its first characters."""
        deadline = time.monotonic() + 60
        while words not in (said := self._log.read_text()[after:]):
            assert time.monotonic() < deadline, said
            assert self.process.poll() is None, said
            time.sleep(0.02)
        return said

    def length(self) -> int:
        return len(self._log.read_text())

    def answer(self, kit):
        return answer(kit, f"localhost:{self.port}")

    def authority(self) -> Signed:
        folder = self.kits / AUTHORITY
        key = load_pem_private_key((folder / AUTHORITY_KEY).read_bytes(), None)
        return Signed(x509.load_pem_x509_certificate((folder / "ca.pem").read_bytes()), key)  # type: ignore[arg-type]

    def kit_with(self, signed: Signed):
        """Return party a's kit with another certificate and its key."""
        key = signed.key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        return replace(open_kit(self.kits / "a"), certificate_pem=pem(signed.certificate), key_pem=key)


@pytest.fixture(scope="module")
def serving(tmp_path_factory):
    folder = tmp_path_factory.mktemp("serving")
    provision(folder / "kits", ["a", "b", "c"], ["localhost", "127.0.0.1"])
    found = Serving(folder, folder / "kits")
    yield found
    found.process.kill()
    found.process.wait()


def self_signed() -> Signed:
    key, name = ec.generate_private_key(ec.SECP256R1()), x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "a")])
    builder = x509.CertificateBuilder(name, name, key.public_key(), 7, NOW - DAY, NOW + DAY)
    return Signed(builder.sign(key, SHA256()), key)


def with_san(it, *names: x509.GeneralName) -> Signed:
    """Return a party's certificate, signed by the right CA, whose SAN says something else; none: it has no SAN."""
    key, authority = ec.generate_private_key(ec.SECP256R1()), it.authority()
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "a")])
    builder = x509.CertificateBuilder(authority.certificate.subject, subject, key.public_key(), 7, NOW - DAY, NOW + DAY)
    builder = builder.add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CLIENT_AUTH]), critical=True)
    if names:
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    return Signed(builder.sign(authority.key, SHA256()), key)


def with_forged_signature(it):
    """Return party a's kit with its certificate, in which one bit of the CA's signature is another."""
    kit = open_kit(it.kits / "a")
    content = bytearray(x509.load_pem_x509_certificate(kit.certificate_pem).public_bytes(Encoding.DER))
    content[-1] ^= 1
    return replace(kit, certificate_pem=ssl.DER_cert_to_PEM_cert(bytes(content)).encode())


def with_kit_of(it, name):
    """Return what calls itself party a's kit, with the certificate and key of another."""
    other = open_kit(it.kits / name)
    return replace(open_kit(it.kits / "a"), certificate_pem=other.certificate_pem, key_pem=other.key_pem)


URI = x509.UniformResourceIdentifier
KITS = {  # what is presented, and what the server's log says of it
    "self-signed": (lambda it: it.kit_with(self_signed()), "not signed by the CA"),
    "of another CA": (lambda it: it.kit_with(issue(make_authority(NOW), "a", (), NOW, 30)), "not signed by the CA"),
    "expired": (lambda it: it.kit_with(issue(it.authority(), "a", (), NOW - 9 * DAY, 2)), "has expired"),
    "not yet valid": (lambda it: it.kit_with(issue(it.authority(), "a", (), NOW + 9 * DAY, 30)), "not valid yet"),
    "of somebody else": (lambda it: it.kit_with(issue(it.authority(), "x", (), NOW, 30)), "'x' is not on the roster"),
    "a party's of its own": (lambda it: it.kit_with(with_san(it, URI("glasu:party:x"))), "'x' is not on the roster"),
    "without a name": (lambda it: it.kit_with(with_san(it)), "names neither a party nor the server"),
    "of a web site": (lambda it: it.kit_with(with_san(it, URI("https://a"))), "names neither a party nor the server"),
    "of a host called a": (lambda it: it.kit_with(with_san(it, x509.DNSName("a"))), "names neither a party nor"),
    "of two parties": (
        lambda it: it.kit_with(with_san(it, URI("glasu:party:a"), URI("glasu:party:b"))),
        "names neither a party nor the server",
    ),
    "the server's, made anew": (
        lambda it: it.kit_with(issue(it.authority(), "server", ["h"], NOW, 30)),
        "not a party's",
    ),
    "the server's own": (lambda it: with_kit_of(it, "server"), "is not a party's"),
    "with a forged signature": (with_forged_signature, "the CA's signature on its certificate is not genuine"),
}


@pytest.mark.parametrize("name", KITS)
def test_a_wrong_certificate_is_refused_and_the_log_says_why(name, serving):
    make, words = KITS[name]
    before = serving.length()
    why = serving.answer(make(serving))
    assert isinstance(why, str)  # not a frame
    said = serving.until(words, before)
    lines = [line for line in said.splitlines() if "waiting for" not in line]
    assert all(line.startswith("glasu serve: ") and "refused" in line for line in lines)  # our words, nothing else


def test_party_bs_kit_in_the_place_of_as_is_party_b(serving):
    said = serving.answer(with_kit_of(serving, "b"))
    assert isinstance(said, bytes)  # it is heard, and its hello, which says nothing, refused: as b's
    serving.until("b: not accepted: ")
    assert "a: not accepted" not in serving.until("b: not accepted: ")


def raw(serving, *, certificate: bool, highest=ssl.TLSVersion.TLSv1_3, key: Path | None = None) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(serving.kits / "a" / "ca.pem")
    context.set_alpn_protocols(["h2"])
    context.maximum_version = highest
    if certificate:
        context.load_cert_chain(serving.kits / "a" / "certificate.pem", key or serving.kits / "a" / "key.pem")
    with (
        socket.create_connection(("localhost", serving.port), timeout=60) as plain,
        suppress(ssl.SSLError, ConnectionError),
        context.wrap_socket(plain, server_hostname="localhost") as secure,
    ):
        secure.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
        assert not secure.recv(1000)


def noise(serving, content: bytes) -> None:
    with socket.create_connection(("localhost", serving.port), timeout=60) as plain:
        plain.sendall(content)
        while plain.recv(1000):
            pass


CONNECTIONS = {
    "no certificate": (lambda it: raw(it, certificate=False), "it presented no certificate"),
    "TLS 1.2": (lambda it: raw(it, certificate=True, highest=ssl.TLSVersion.TLSv1_2), "does not speak TLS 1.3"),
    "garbage": (lambda it: noise(it, b"\x16\x03\x01" + bytes(range(256))), "what it sent is not TLS"),
    "plain HTTP": (lambda it: noise(it, b"GET / HTTP/1.1\r\n\r\n"), "what it sent is not TLS"),
}


@pytest.mark.parametrize("name", CONNECTIONS)
def test_a_wrong_connection_is_refused_and_the_log_says_why(name, serving):
    connect, words = CONNECTIONS[name]
    before = serving.length()
    connect(serving)
    assert "refused in the TLS handshake" in serving.until(words, before)


def test_a_client_that_does_not_accept_the_server_is_told_of_in_our_words(serving, tmp_path):
    provision(tmp_path, ["a", "b", "c"], ["localhost"])
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(tmp_path / "a" / "ca.pem")
    before = serving.length()
    with (
        socket.create_connection(("localhost", serving.port), timeout=60) as plain,
        pytest.raises(ssl.SSLCertVerificationError),
    ):
        context.wrap_socket(plain, server_hostname="localhost")
    said = serving.until("it does not accept this server's certificate", before)
    assert "is its kit of the same `glasu provision`" in said
    assert "BAD_PACKET_LENGTH" not in said


def test_a_key_of_another_certificate_opens_no_connection(serving):
    own, other = open_kit(serving.kits / "a"), open_kit(serving.kits / "b")
    before = serving.length()
    assert isinstance(serving.answer(replace(own, key_pem=other.key_pem)), str)
    assert serving.length() == before  # gRPC does not even begin with it; not everyone is so scrupulous:


def test_whoever_signs_with_another_key_than_its_certificates_is_refused_and_the_log_says_why(serving, tmp_path):
    keys = [load_pem_private_key((serving.kits / name / "key.pem").read_bytes(), None) for name in "ab"]
    public, wrong = (key.public_key().public_bytes(Encoding.X962, PublicFormat.UncompressedPoint) for key in keys)
    content = keys[1].private_bytes(Encoding.DER, PrivateFormat.TraditionalOpenSSL, NoEncryption())
    assert content.count(wrong) == 1
    mixed = b64encode(content.replace(wrong, public)).decode()  # b's secret that says it is a's: OpenSSL believes it
    (tmp_path / "key.pem").write_text(f"-----BEGIN EC PRIVATE KEY-----\n{mixed}\n-----END EC PRIVATE KEY-----\n")
    before = serving.length()
    raw(serving, certificate=True, key=tmp_path / "key.pem")
    said = serving.until("its key does not belong to its certificate", before)
    assert "refused in the TLS handshake" in said


def test_a_certificate_that_is_revoked_while_the_server_runs_is_not_served_any_more(serving):
    kit = open_kit(serving.kits / "c")
    assert isinstance(serving.answer(kit), bytes)  # it is heard
    before = serving.length()
    revoke(serving.kits, ["c"])
    assert "'c' is revoked" in serving.answer(kit)
    said = serving.until("refused: the certificate of 'c' is revoked", before)
    assert re.search(r"^glasu serve: (127.0.0.1|\[::1\]):\d+: refused: ", said, re.MULTILINE)
    assert isinstance(serving.answer(open_kit(serving.kits / "b")), bytes)
    shutil.copy(serving.kits / "a" / "ca.pem", serving.kits / "server" / "revoked.pem")
    assert "revocation list cannot be read" in serving.answer(open_kit(serving.kits / "b"))  # rather than everyone


@pytest.mark.parametrize(("sent", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
@pytest.mark.parametrize("role", ["server", "party"])
def test_a_signal_ends_whoever_waits_in_one_line(role, sent, code, kits, tmp_path):
    if role == "server":
        process, log = (found := Serving(tmp_path, kits)).process, found._log
    else:
        from protocol.monolith import tiny_parties

        from glasu.data.folders import write_party

        write_party(tiny_parties()[0], tmp_path / "a")
        words = ["join", tmp_path / "a", "--server", "localhost:1", "--kit", kits / "a", "--out", tmp_path / "out"]
        log = tmp_path / "log"
        with log.open("w") as file:
            process = subprocess.Popen([sys.executable, "-m", "glasu.cli.main", *map(str, words)], stderr=file)
        deadline = time.monotonic() + 60
        while "is awaited" not in log.read_text():
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)
    process.send_signal(sent)
    assert process.wait(10) == code
    assert log.read_text().splitlines()[-1].endswith("start the same command again to resume.")
    assert "Traceback" not in log.read_text()
