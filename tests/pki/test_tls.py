"""Kits used by independent programs: the openssl command, Python's TLS 1.3, gRPC's mutual TLS."""

from __future__ import annotations

import os
import shutil
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest

from glasu.pki.kit import Kit, open_kit
from glasu.pki.provision import provision, renew, revoke
from glasu.pki.refusal import find_refusal, read_peer_name
from glasu.pki.tls import require_tls_1_3

OPENSSL = shutil.which("openssl")
needs_openssl = pytest.mark.skipif(OPENSSL is None, reason="there is no openssl command to compare with")
DAY = timedelta(days=1)


def openssl(*words: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(OPENSSL), *map(str, words)], capture_output=True, text=True, timeout=60, check=False)


@pytest.fixture(scope="module")
def expired_kits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A federation whose kits expired six days ago and whose CA is still valid."""
    out = tmp_path_factory.mktemp("expired")
    provision(out, ["a"], ["localhost"], days=1, now=datetime.now(UTC) - 7 * DAY)
    return out


@needs_openssl
@pytest.mark.parametrize(
    ("name", "purpose", "good"),
    [
        ("a", "sslclient", True),
        ("a", "sslserver", False),
        ("server", "sslserver", True),
        ("server", "sslclient", False),
    ],
)
def test_openssl_verifies_each_kit_for_its_own_role_only(kits, name, purpose, good):
    ca, own = kits / "ca" / "ca.pem", kits / name / "certificate.pem"
    result = openssl("verify", "-x509_strict", "-purpose", purpose, "-CAfile", ca, own)
    assert (result.returncode == 0) == good, result.stderr
    assert good or "unsuitable certificate purpose" in result.stderr.replace("unsupported", "unsuitable")


@needs_openssl
@pytest.mark.parametrize(("host", "good"), [("localhost", True), ("other.example", False)])
def test_openssl_finds_the_hosts_in_the_servers_certificate_and_none_in_a_partys(kits, host, good):
    ca = kits / "ca" / "ca.pem"
    for name in ("server", "a"):
        result = openssl("verify", "-verify_hostname", host, "-CAfile", ca, kits / name / "certificate.pem")
        assert (result.returncode == 0) == (good and name == "server")
    address = openssl("verify", "-verify_ip", "127.0.0.1", "-CAfile", ca, kits / "server" / "certificate.pem")
    assert address.returncode == 0, address.stderr


@needs_openssl
def test_openssl_reads_what_the_kit_says_of_itself(kits):
    kit = open_kit(kits / "a")
    path = kits / "a" / "certificate.pem"
    shown = openssl("x509", "-in", path, "-noout", "-text", "-serial", "-fingerprint", "-sha256").stdout
    assert "URI:glasu:party:a\n" in shown
    assert "DNS:" not in shown
    assert "CA:FALSE" in shown
    assert "TLS Web Client Authentication" in shown
    assert f"serial={kit.serial}" in shown.lower().replace("serial=0", "serial=")
    assert kit.fingerprint in shown
    end = openssl("x509", "-in", path, "-noout", "-enddate").stdout
    assert end.strip() == f"notAfter={kit.expires:%b} {kit.expires.day:2} {kit.expires:%H:%M:%S %Y} GMT"


@needs_openssl
def test_openssl_takes_our_revocation_list(tmp_path):
    provision(tmp_path, ["a", "b"], ["localhost"])
    revoke(tmp_path, ["a"])
    words = ["verify", "-crl_check", "-CAfile", tmp_path / "ca" / "ca.pem"]
    words += ["-CRLfile", tmp_path / "server" / "revoked.pem"]
    result = openssl(*words, tmp_path / "a" / "certificate.pem")
    assert result.returncode != 0
    assert "certificate revoked" in result.stderr
    for name in ("b", "server"):
        result = openssl(*words, tmp_path / name / "certificate.pem")
        assert result.returncode == 0, result.stderr


def context(folder: Path, side: int, *, with_certificate: bool = True) -> ssl.SSLContext:
    result = ssl.SSLContext(side)
    result.minimum_version = ssl.TLSVersion.TLSv1_3
    result.verify_mode = ssl.CERT_REQUIRED
    result.load_verify_locations(folder / "ca.pem")
    if with_certificate:
        result.load_cert_chain(folder / "certificate.pem", folder / "key.pem")
    return result


def handshake(server: ssl.SSLContext, client: ssl.SSLContext, host: str = "localhost") -> str:
    """Connect both sides in memory and send a byte each way; return the TLS version, or raise the error."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    sides = [
        client.wrap_bio(to_client, to_server, server_side=False, server_hostname=host),
        server.wrap_bio(to_server, to_client, server_side=True),
    ]
    done: set[ssl.SSLObject] = set()
    while len(done) < 2:
        for side in sides:
            try:
                side.do_handshake()
                done.add(side)
            except ssl.SSLWantReadError:
                pass
    for sender, receiver in (sides, sides[::-1]):
        sender.write(b"x")
        assert receiver.read(1) == b"x"
    return str(sides[0].version())


SERVER_SIDE, CLIENT_SIDE = ssl.PROTOCOL_TLS_SERVER, ssl.PROTOCOL_TLS_CLIENT


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1"])
def test_a_party_and_the_server_meet_over_tls_1_3(kits, host):
    version = handshake(context(kits / "server", SERVER_SIDE), context(kits / "a", CLIENT_SIDE), host)
    assert version == "TLSv1.3"


def test_a_renewed_kit_and_the_one_it_replaces_both_meet_the_server(tmp_path):
    provision(tmp_path, ["a"], ["localhost"])
    renew(tmp_path, ["a"])
    (old,) = (tmp_path / "retired").iterdir()
    for folder in (tmp_path / "a", old):
        assert handshake(context(tmp_path / "server", SERVER_SIDE), context(folder, CLIENT_SIDE)) == "TLSv1.3"


def test_no_certificate_is_refused(kits):
    client = context(kits / "a", CLIENT_SIDE, with_certificate=False)
    with pytest.raises(ssl.SSLError, match="PEER_DID_NOT_RETURN_A_CERTIFICATE"):
        handshake(context(kits / "server", SERVER_SIDE), client)


def test_a_server_or_a_party_of_another_ca_is_refused(kits, foreign):
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(context(kits / "server", SERVER_SIDE), context(foreign / "a", CLIENT_SIDE))
    client = context(foreign / "a", CLIENT_SIDE)
    client.load_verify_locations(kits / "a" / "ca.pem")  # it trusts our CA, but our CA did not sign it
    with pytest.raises(ssl.SSLCertVerificationError, match="self-signed certificate in certificate chain"):
        handshake(context(kits / "server", SERVER_SIDE), client)


def test_an_expired_kit_is_refused_on_either_side(expired_kits, tmp_path):
    renew(Path(shutil.copytree(expired_kits, tmp_path / "half")), ["server"])
    renew(Path(shutil.copytree(expired_kits, tmp_path / "other half")), ["a"])
    for out in (tmp_path / "half", tmp_path / "other half"):
        with pytest.raises(ssl.SSLCertVerificationError, match="certificate has expired"):
            handshake(context(out / "server", SERVER_SIDE), context(out / "a", CLIENT_SIDE))


def test_a_server_kit_cannot_join_and_a_party_kit_cannot_serve(kits):
    with pytest.raises(ssl.SSLCertVerificationError, match="unsuitable certificate purpose"):
        handshake(context(kits / "server", SERVER_SIDE), context(kits / "server", CLIENT_SIDE))
    careless = context(kits / "b", CLIENT_SIDE)
    careless.check_hostname = False  # even a client that checks no names checks the purpose
    with pytest.raises(ssl.SSLCertVerificationError, match="unsuitable certificate purpose"):
        handshake(context(kits / "a", SERVER_SIDE), careless)


def test_a_server_under_a_name_that_it_was_not_provisioned_for_is_refused(kits):
    with pytest.raises(ssl.SSLCertVerificationError, match="Hostname mismatch"):
        handshake(context(kits / "server", SERVER_SIDE), context(kits / "a", CLIENT_SIDE), "other.example")


@contextmanager
def serve_method(kit: Kit) -> Iterator[int]:
    """Serve one gRPC method with mutual TLS that returns the caller's name or the reason for its refusal."""

    def answer(request: bytes, call: Any) -> bytes:
        presented = call.auth_context()["x509_pem_cert"][0]
        if reason := find_refusal(presented, kit):
            call.abort(grpc.StatusCode.PERMISSION_DENIED, reason)
        return str(read_peer_name(presented)).encode()

    handler = grpc.unary_unary_rpc_method_handler(answer)
    server = grpc.server(ThreadPoolExecutor(2))
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("glasu", {"Who": handler})])
    pair = [(kit.key_pem, kit.certificate_pem)]
    port = server.add_secure_port(
        "127.0.0.1:0", grpc.ssl_server_credentials(pair, kit.ca_pem, require_client_auth=True)
    )
    server.start()
    try:
        yield port
    finally:
        server.stop(None).wait()


def who_am_i(port: int, credentials: grpc.ChannelCredentials, host: str = "localhost") -> tuple[str, str]:
    """Call the server once; return the status and the answer."""
    options = [("grpc.ssl_target_name_override", host)] if host not in ("localhost", "127.0.0.1") else []
    target = f"{'localhost' if options else host}:{port}"
    with grpc.secure_channel(target, credentials, options) as channel:
        try:
            return "OK", channel.unary_unary("/glasu/Who")(b"", timeout=30).decode()
        except grpc.RpcError as error:
            return error.code().name, error.details()  # type: ignore[attr-defined]


def credentials(kit: Kit, ca_pem: bytes | None = None) -> grpc.ChannelCredentials:
    return grpc.ssl_channel_credentials(ca_pem or kit.ca_pem, kit.key_pem, kit.certificate_pem)


def test_over_grpc_the_right_kit_is_served_and_others_never_reach_the_method(kits, foreign):
    server, party, stranger = open_kit(kits / "server"), open_kit(kits / "c"), open_kit(foreign / "c")
    with serve_method(server) as port:
        assert who_am_i(port, credentials(party)) == ("OK", "c")
        assert who_am_i(port, credentials(party), "127.0.0.1") == ("OK", "c")
        refused = {
            "no certificate": grpc.ssl_channel_credentials(party.ca_pem),
            "another CA": credentials(stranger, party.ca_pem),
            "a server that our CA did not sign": credentials(stranger),
            "server kit as party": credentials(server),
        }
        for kind, wrong in refused.items():
            assert who_am_i(port, wrong)[0] == "UNAVAILABLE", kind
        assert who_am_i(port, credentials(party), "other.example")[0] == "UNAVAILABLE"
        assert who_am_i(port, credentials(party)) == ("OK", "c")


def test_over_grpc_a_party_kit_cannot_serve(kits):
    with serve_method(open_kit(kits / "a")) as port:
        assert who_am_i(port, credentials(open_kit(kits / "c")))[0] == "UNAVAILABLE"


def test_over_grpc_an_expired_party_is_refused_in_the_handshake(expired_kits, tmp_path):
    out = Path(shutil.copytree(expired_kits, tmp_path / "kits"))
    renew(out, ["server"])
    party = open_kit(out / "a", now=datetime.now(UTC) - 7 * DAY)
    with serve_method(open_kit(out / "server")) as port:
        assert who_am_i(port, credentials(party))[0] == "UNAVAILABLE"


def test_over_grpc_a_revoked_party_is_refused_with_the_reason_and_its_next_kit_is_served(tmp_path):
    provision(tmp_path, ["a", "b"], ["localhost"])
    stolen = open_kit(tmp_path / "a")
    revoke(tmp_path, ["a"])
    renew(tmp_path, ["a"])
    with serve_method(open_kit(tmp_path / "server")) as port:
        status, reason = who_am_i(port, credentials(stolen))
        assert status == "PERMISSION_DENIED"
        assert "'a' is revoked" in reason
        assert who_am_i(port, credentials(open_kit(tmp_path / "a"))) == ("OK", "a")
        assert who_am_i(port, credentials(open_kit(tmp_path / "b"))) == ("OK", "b")


SERVE_UNTIL_INPUT_ENDS = """
import sys
from pathlib import Path
from glasu.pki.tls import require_tls_1_3
if sys.argv[2] == "strict":
    assert require_tls_1_3()
import grpc
from concurrent.futures import ThreadPoolExecutor
from glasu.pki.kit import open_kit
kit = open_kit(Path(sys.argv[1]))
server = grpc.server(ThreadPoolExecutor(1))
pair = [(kit.key_pem, kit.certificate_pem)]
print(server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials(pair, kit.ca_pem, require_client_auth=True)))
server.start()
sys.stdout.flush()
sys.stdin.read()
server.stop(None)
"""


@pytest.mark.parametrize(("mode", "versions"), [("strict", ["TLSv1.3"]), ("lax", ["TLSv1.2", "TLSv1.3"])])
def test_grpc_accepts_tls_1_2_by_default(kits, mode, versions):
    words = [sys.executable, "-c", SERVE_UNTIL_INPUT_ENDS, str(kits / "server"), mode]
    bare = {name: value for name, value in os.environ.items() if name != "GRPC_SSL_CIPHER_SUITES"}
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=bare) as process:
        assert process.stdout is not None
        port, spoken = int(process.stdout.readline()), []
        for version in (ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3):
            client = context(kits / "a", CLIENT_SIDE)
            client.minimum_version = client.maximum_version = version
            client.set_alpn_protocols(["h2"])
            line = socket.create_connection(("127.0.0.1", port), timeout=30)
            with line, suppress(ssl.SSLError), client.wrap_socket(line, server_hostname="localhost") as secured:
                spoken.append(secured.version())
        process.communicate(timeout=60)
    assert spoken == versions


def test_requiring_tls_1_3_too_late_is_reported(monkeypatch):
    monkeypatch.delenv("GRPC_SSL_CIPHER_SUITES", raising=False)
    for _ in range(2):  # a second call returns the same time
        assert not require_tls_1_3()  # this file has imported grpc
