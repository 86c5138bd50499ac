"""A peer without the right certificate, key or connection is refused. The log names the reasons that gRPC reports."""

from __future__ import annotations

import json
import signal
import socket
import ssl
import subprocess
import time
from base64 import b64encode
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta

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

from glasu.data.folders import write_party
from glasu.network.connection_codes import ConnectionCode, Disconnection
from glasu.network.transport import Listener
from glasu.pki.authority import Signed, issue, make_authority
from glasu.pki.kit import encode_pem, open_kit
from glasu.pki.provision import AUTHORITY, AUTHORITY_KEY
from support.commands import GLASU
from support.processes import SMALL_RUN
from support.raw_party import ServerHarness, answer
from support.tiny import tiny_parties
from support.warm_process import WarmProcess

NOW = datetime.now(UTC).replace(microsecond=0)
DAY = timedelta(days=1)


@pytest.mark.parametrize("verbosity", [None, "ERROR"])
@pytest.mark.parametrize("command", ["serve", "doctor"])
def test_a_port_that_is_taken_is_one_line(command, verbosity, kits, tmp_path, monkeypatch):
    monkeypatch.delenv("GRPC_VERBOSITY", raising=False)
    if verbosity is not None:
        monkeypatch.setenv("GRPC_VERBOSITY", verbosity)
    (tmp_path / "run.toml").write_text(SMALL_RUN.format(rounds=3))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        words = [*GLASU, command, tmp_path / "run.toml", "--kit", kits / "server"]
        words += ["--listen", f"127.0.0.1:{taken.getsockname()[1]}", "--out", tmp_path / "out", "--log-format", "json"]
        ended = subprocess.run([str(word) for word in words], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 2
    (line,) = ended.stderr.splitlines()
    assert "the address cannot be used (Address already in use)" in json.loads(line)["message"]


class Serving:
    """A server session at a port, and its log."""

    def __init__(self, kits, port, harness, folder) -> None:
        self.kits, self.port, self._harness, self._folder = kits, port, harness, folder

    @property
    def log(self) -> list[str]:
        return list(self._harness.log)

    def serves_nobody(self) -> bool:
        return not any(self._harness.session.list_connected().values())

    def answer(self, kit):
        return answer(kit, self.port)

    def authority(self) -> Signed:
        folder = self.kits / AUTHORITY
        key = load_pem_private_key((folder / AUTHORITY_KEY).read_bytes(), None)
        return Signed(x509.load_pem_x509_certificate((folder / "ca.pem").read_bytes()), key)  # type: ignore[arg-type]

    def kit_with(self, signed: Signed):
        """Return party a's kit with another certificate and its key."""
        return self.kit_of(
            encode_pem(signed.certificate), signed.key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        )

    def kit_of(self, certificate: bytes, key: bytes):
        """Return party a's kit with this certificate and key, in memory and in its folder."""
        (self._folder / "certificate.pem").write_bytes(certificate)
        (self._folder / "key.pem").write_bytes(key)
        return replace(open_kit(self.kits / "a"), certificate_pem=certificate, key_pem=key, folder=self._folder)


@pytest.fixture
def serving_desk(kits, tmp_path):
    harness = ServerHarness("abc")
    with Listener(harness.session.host, open_kit(kits / "server"), "localhost:0") as listener:
        listener.start()
        yield Serving(kits, listener.port, harness, tmp_path)


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
    """Return party a's kit with one bit of the CA's signature flipped."""
    kit = open_kit(it.kits / "a")
    content = bytearray(x509.load_pem_x509_certificate(kit.certificate_pem).public_bytes(Encoding.DER))
    content[-1] ^= 1
    return it.kit_of(ssl.DER_cert_to_PEM_cert(bytes(content)).encode(), kit.key_pem)


def with_kit_of(it, name):
    """Return a kit that claims to be party a's, with the certificate and key of another party."""
    other = open_kit(it.kits / name)
    return it.kit_of(other.certificate_pem, other.key_pem)


URI = x509.UniformResourceIdentifier
REJECTED = {  # gRPC refuses it in the TLS handshake without calling our code: the party finds the reason itself
    "self-signed": lambda it: it.kit_with(self_signed()),
    "of another CA": lambda it: it.kit_with(issue(make_authority(NOW), "a", (), NOW, 30)),
    "expired": lambda it: it.kit_with(issue(it.authority(), "a", (), NOW - 9 * DAY, 2)),
    "not yet valid": lambda it: it.kit_with(issue(it.authority(), "a", (), NOW + 9 * DAY, 30)),
    "the server's, made anew": lambda it: it.kit_with(issue(it.authority(), "server", ["h"], NOW, 30)),
    "the server's own": lambda it: with_kit_of(it, "server"),
    "with a forged signature": with_forged_signature,
}
NOT_SERVED = {  # the server refuses it and logs the reason
    "of somebody else": (lambda it: issue(it.authority(), "x", (), NOW, 30), "'x' is not on the roster"),
    "a party's of its own": (lambda it: with_san(it, URI("glasu:party:x")), "'x' is not on the roster"),
    "without a name": (with_san, "names neither a party nor the server"),
    "of a web site": (lambda it: with_san(it, URI("https://a")), "names neither a party nor the server"),
    "of a host called a": (lambda it: with_san(it, x509.DNSName("a")), "names neither a party nor the server"),
    "of two parties": (
        lambda it: with_san(it, URI("glasu:party:a"), URI("glasu:party:b")),
        "names neither a party nor the server",
    ),
}


@pytest.mark.parametrize("name", REJECTED)
def test_a_wrong_certificate_is_rejected_in_the_handshake_and_the_party_learns_it(name, serving_desk):
    ended = serving_desk.answer(REJECTED[name](serving_desk))
    assert isinstance(ended, Disconnection)  # not a frame
    assert ended.code is ConnectionCode.OWN_CERTIFICATE_REJECTED
    assert serving_desk.serves_nobody()
    assert serving_desk.log == []


@pytest.mark.parametrize("name", NOT_SERVED)
def test_a_wrong_certificate_is_refused_and_the_log_says_why(name, serving_desk):
    make, words = NOT_SERVED[name]
    ended = serving_desk.answer(serving_desk.kit_with(make(serving_desk)))
    assert isinstance(ended, Disconnection)
    assert ended.code is ConnectionCode.REFUSED
    assert serving_desk.serves_nobody()
    (line,) = serving_desk.log
    assert ": not served: " in line
    assert words in line


def test_party_bs_kit_in_the_place_of_as_is_party_b(serving_desk):
    assert isinstance(serving_desk.answer(with_kit_of(serving_desk, "b")), bytes)
    assert "b: connected." in serving_desk.log
    assert not any(line.startswith("a: ") for line in serving_desk.log)


def connect_raw(serving, key=None):
    """Open a TLS connection with party a's certificate, optionally with another key; expect it to be closed."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(serving.kits / "a" / "ca.pem")
    context.set_alpn_protocols(["h2"])
    context.load_cert_chain(serving.kits / "a" / "certificate.pem", key or serving.kits / "a" / "key.pem")
    with (
        socket.create_connection(("localhost", serving.port), timeout=60) as plain,
        suppress(ssl.SSLError, ConnectionError),
        context.wrap_socket(plain, server_hostname="localhost") as secure,
    ):
        secure.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
        return secure.recv(1000)
    return b""


def test_a_key_of_another_certificate_opens_no_connection(serving_desk):
    own, other = open_kit(serving_desk.kits / "a"), open_kit(serving_desk.kits / "b")
    assert isinstance(serving_desk.answer(replace(own, key_pem=other.key_pem)), Disconnection)
    assert serving_desk.serves_nobody()
    assert serving_desk.log == []  # gRPC refuses to start; other clients do not check, see the next test


def test_a_peer_that_signs_with_another_key_than_its_certificates_is_refused(serving_desk, tmp_path):
    keys = [load_pem_private_key((serving_desk.kits / name / "key.pem").read_bytes(), None) for name in "ab"]
    public, wrong = (key.public_key().public_bytes(Encoding.X962, PublicFormat.UncompressedPoint) for key in keys)
    content = keys[1].private_bytes(Encoding.DER, PrivateFormat.TraditionalOpenSSL, NoEncryption())
    assert content.count(wrong) == 1
    mixed = b64encode(content.replace(wrong, public)).decode()  # b's secret with a's public key: OpenSSL accepts it
    (tmp_path / "key.pem").write_text(f"-----BEGIN EC PRIVATE KEY-----\n{mixed}\n-----END EC PRIVATE KEY-----\n")
    assert connect_raw(serving_desk, tmp_path / "key.pem") == b""
    assert connect_raw(serving_desk) != b""
    assert serving_desk.serves_nobody()


@pytest.mark.parametrize(("sent", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
@pytest.mark.parametrize("role", ["server", "party"])
def test_a_signal_ends_a_waiting_role_in_one_line(role, sent, code, kits, tmp_path):
    log = tmp_path / "log"
    if role == "server":
        (tmp_path / "run.toml").write_text(SMALL_RUN.format(rounds=3))
        words = ["serve", tmp_path / "run.toml", "--listen", "127.0.0.1:0", "--kit", kits / "server"]
    else:
        write_party(tiny_parties()[0], tmp_path / "a")
        words = ["join", tmp_path / "a", "--server", "localhost:1", "--kit", kits / "a"]
    log.touch()
    process = WarmProcess([*map(str, words), "--out", str(tmp_path / "out")], log)
    waiting = "listening on" if role == "server" else "waiting for the server"
    deadline = time.monotonic() + 120
    while waiting not in log.read_text():
        assert time.monotonic() < deadline, log.read_text()
        assert process.poll() is None, log.read_text()
        time.sleep(0.05)
    process.send_signal(sent)
    assert process.wait(10) == code
    assert "the same command" in log.read_text().splitlines()[-1]
    assert "Traceback" not in log.read_text()
