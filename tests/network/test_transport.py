"""The transport: only valid certificates are served, and every failure has a code in every supported gRPC version."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from queue import SimpleQueue
from threading import Event, Thread
from types import SimpleNamespace

import pytest
from cryptography import x509

from glasu.network.connection_codes import SENTENCES, ConnectionCode, Disconnection, describe_end
from glasu.network.control import Notice
from glasu.network.frames import MAX_PIECE, PIECE, WINDOW, Channel, pack_frame
from glasu.network.log_lines import MAX_REASON
from glasu.network.transport import (
    AMBIGUOUS,
    CODE_KEY,
    HELLO_WITHIN,
    ClientStream,
    FrameStream,
    Listener,
    SessionLock,
    read_details,
    read_status,
)
from glasu.pki.fingerprint import fingerprint_key
from glasu.pki.kit import Kit, open_kit
from glasu.pki.provision import provision, renew, revoke
from support.grpc_failures import scenarios
from support.raw_party import ServerHarness, answer, wait_for

RECORDED = [
    json.loads(line) for line in (Path(__file__).parent / "grpc_failures.jsonl").read_text().splitlines() if line
]
CODES = {  # of every scenario, by gRPC's words alone
    "nothing_listens": ConnectionCode.NOTHING_LISTENS,
    "nothing_listens_at_ip": ConnectionCode.NOTHING_LISTENS,
    "unknown_name": ConnectionCode.UNKNOWN_NAME,
    "server_of_other_ca": ConnectionCode.SERVER_OF_OTHER_CA,
    "own_certificate_of_other_ca": ConnectionCode.CLOSED,  # with TLS 1.3 gRPC reports no reason; `probe` finds it
    "own_certificate_expired": ConnectionCode.CLOSED,
    "own_certificate_is_a_servers": ConnectionCode.CLOSED,
    "server_of_other_name": ConnectionCode.SERVER_OF_OTHER_NAME,
    "server_expired": ConnectionCode.SERVER_EXPIRED,
    "server_not_yet_valid": ConnectionCode.SERVER_NOT_YET_VALID,
    "plain_http": ConnectionCode.NOT_TLS,
    "plain_silent": ConnectionCode.CLOSED,
    "refused_by_the_server": ConnectionCode.OTHER,  # our server adds its own code
    "frozen": ConnectionCode.PING_TIMEOUT,
    "cut": ConnectionCode.CLOSED,
    "silent_in_the_handshake": ConnectionCode.NO_ANSWER,
}


@pytest.mark.parametrize("recorded", RECORDED, ids=lambda recorded: recorded["version"])
def test_what_a_version_of_grpc_reports_has_a_code(recorded):
    found = {
        name: read_details(reported["code"], reported["details"]).code
        for name, reported in recorded["reported"].items()
    }
    assert found == CODES


def test_the_installed_version_of_grpc_reports_what_was_recorded_for_the_others(tmp_path):
    found = {name: read_details(one["code"], one["details"]).code for name, one in scenarios(tmp_path)}
    assert found == CODES


def test_every_code_has_a_sentence_and_unknown_words_are_passed_on():
    assert set(SENTENCES) == set(ConnectionCode)
    end = "[::1]:9443", "AA:BB"
    for code in ConnectionCode:
        line = describe_end(Disconnection(code, "this."), *end)
        assert line
        assert "{" not in line
        assert not line.endswith(".")
    assert describe_end(read_details("UNAVAILABLE", "something new"), *end) == "something new (unavailable)"
    named = describe_end(Disconnection(ConnectionCode.SERVER_OF_OTHER_NAME, hosts=("x.org",)), *end)
    assert "does not name ::1" in named
    assert "--host x.org,::1`" in named


# --- certificates ----------------------------------------------------------------------------------


@pytest.fixture
def harness(kits):
    """Return a session with a listener at `harness.port` and no connected party."""
    found = ServerHarness("abc")
    with Listener(found.session.host, open_kit(kits / "server"), "localhost:0") as listener:
        listener.start()
        found.port = listener.port
        yield found


def test_only_the_right_certificate_is_served_and_every_other_learns_who_rejected_whom(harness, kits, tmp_path):
    provision(tmp_path / "other", ["a", "b", "c"], ["localhost"])
    long_ago = datetime.now(UTC) - timedelta(days=9)
    provision(tmp_path / "expired", ["a"], ["localhost"], days=1, now=long_ago)
    own, foreign, server = open_kit(kits / "a"), open_kit(tmp_path / "other/a"), open_kit(kits / "server")
    expired = open_kit(tmp_path / "expired/a", now=long_ago + timedelta(hours=1))
    expected = {
        ConnectionCode.SERVER_OF_OTHER_CA: [foreign],
        ConnectionCode.OWN_CERTIFICATE_REJECTED: [
            replace(foreign, ca_pem=own.ca_pem),
            replace(expired, ca_pem=own.ca_pem),
            server,
        ],
    }
    for code, kits_of_code in expected.items():
        for kit in kits_of_code:
            ended = answer(kit, harness.port)
            assert ended.code is code
    assert not any(harness.session.list_connected().values())
    assert isinstance(answer(own, harness.port), bytes)


def test_a_server_at_another_address_than_its_certificate_names_is_refused_with_the_names_it_has(tmp_path):
    provision(tmp_path, ["a"], ["glasu.example.org"])
    harness = ServerHarness("a")
    with Listener(harness.session.host, open_kit(tmp_path / "server"), "localhost:0") as listener:
        listener.start()
        ended = answer(open_kit(tmp_path / "a"), listener.port)
    assert (ended.code, ended.hosts) == (ConnectionCode.SERVER_OF_OTHER_NAME, ("glasu.example.org",))


@contextmanager
def forward_connections(*ports: int) -> Iterator[int]:
    """Yield a port that passes its first connection on to the first of these ports, and so on; the last one stays."""

    def pump(source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while chunk := source.recv(1 << 16):
                target.sendall(chunk)
        with suppress(OSError):
            target.shutdown(socket.SHUT_RDWR)

    def relay(here: socket.socket, port: int) -> None:
        with here, socket.create_connection(("localhost", port)) as there:
            back = Thread(target=pump, args=(there, here))
            back.start()
            pump(here, there)
            back.join()

    def accept() -> None:
        with suppress(OSError):
            for index in itertools.count():
                here, _ = entrance.accept()
                relays.append(Thread(target=relay, args=(here, ports[min(index, len(ports) - 1)])))
                relays[-1].start()

    relays: list[Thread] = []
    with socket.create_server(("127.0.0.1", 0)) as entrance:
        accepting = Thread(target=accept)
        accepting.start()
        yield entrance.getsockname()[1]
        entrance.shutdown(socket.SHUT_RDWR)
        for thread in (accepting, *relays):
            thread.join(20)


def key_of(kit: Kit) -> str:
    return fingerprint_key(x509.load_pem_x509_certificate(kit.certificate_pem).public_key())


def test_a_party_that_pins_the_key_of_the_server_is_served_by_it_alone(harness, kits):
    own = open_kit(kits / "a")
    right = replace(own, pins={"server": key_of(open_kit(kits / "server"))[:24]})
    assert isinstance(answer(right, harness.port), bytes)
    wrong = replace(own, pins={"server": key_of(own)})
    before = list(harness.log)
    ended = answer(wrong, harness.port)
    assert ended.code is ConnectionCode.SERVER_OF_OTHER_KEY
    assert ended.code.is_final
    assert "but this kit pins" in describe_end(ended, f"localhost:{harness.port}", own.ca_fingerprint)
    assert not [line for line in harness.log[len(before) :] if "connected." in line]  # no hello reached the server


def test_a_second_server_of_the_same_ca_cannot_take_the_place_of_the_pinned_one(tmp_path):
    """The pinned server answers the first connection, and one with another key the second."""
    provision(tmp_path, ["a", "b", "c"], ["localhost"])
    pinned, own = open_kit(tmp_path / "server"), open_kit(tmp_path / "a")
    (other,) = renew(tmp_path, ["server"])
    own = replace(own, pins={"server": key_of(pinned)})
    harnesses = [ServerHarness("abc"), ServerHarness("abc")]
    with ExitStack() as stack:
        ports = []
        for harness, kit in zip(harnesses, (pinned, other), strict=True):
            listener = stack.enter_context(Listener(harness.session.host, kit, "localhost:0"))
            listener.start()
            ports.append(listener.port)
        with forward_connections(*ports) as port:
            ended = answer(own, port)
        assert ended.code is ConnectionCode.SERVER_OF_OTHER_KEY
        assert not any(harnesses[1].session.list_connected().values())
        with forward_connections(ports[0]) as port:  # the forwarder itself changes nothing
            assert isinstance(answer(own, port), bytes)


def test_a_certificate_outside_the_roster_is_refused_and_does_not_learn_the_roster(kits, tmp_path):
    copied = tmp_path / "kits"
    shutil.copytree(kits, copied)
    server, harness = open_kit(copied / "server"), ServerHarness("ab")
    with Listener(harness.session.host, replace(server, roster=("a", "b")), "localhost:0") as listener:
        listener.start()
        ended = answer(open_kit(copied / "c"), listener.port)
    assert (ended.code, ended.detail) == (ConnectionCode.REFUSED, "party 'c' is not on the roster")
    assert any("(a, b)" in line for line in harness.log)  # the operator sees it
    wait_for(lambda: harness.session.roster.changed.streams == [])  # a refused connection leaves nothing behind


def test_a_revoked_party_is_refused_immediately_and_an_unreadable_list_is_temporary(kits, tmp_path):
    copied = tmp_path / "kits"
    shutil.copytree(kits, copied)
    harness = ServerHarness("abc")
    with Listener(harness.session.host, open_kit(copied / "server"), "localhost:0") as listener:
        listener.start()
        assert isinstance(answer(open_kit(copied / "b"), listener.port), bytes)
        revoke(copied, ["b"])  # counts without a restart
        ended = answer(open_kit(copied / "b"), listener.port)
        assert ended.code is ConnectionCode.REFUSED
        assert "the certificate of 'b' is revoked" in ended.detail
        path = copied / "server" / "revoked.pem"
        path.write_bytes(path.read_bytes()[:100])
        ended = answer(open_kit(copied / "a"), listener.port)
        assert ended.code is ConnectionCode.UNREADABLE_REVOCATIONS
        assert not ended.code.is_final
        assert str(path) not in ended.detail
    assert any(str(path) in line for line in harness.log)


def test_silent_streams_are_closed_and_do_not_block_other_parties(harness, kits):
    ended: SimpleQueue = SimpleQueue()
    own = open_kit(kits / "a")
    silent = [
        ClientStream(
            own, f"localhost:{harness.port}", FrameStream(SessionLock()), lambda stream, event: ended.put(event)
        )
        for _ in range(12)
    ]
    assert ended.get(timeout=60).code is ConnectionCode.BUSY
    assert isinstance(answer(open_kit(kits / "b"), harness.port), bytes)  # b is served immediately
    for _ in silent[1:]:
        assert isinstance(ended.get(timeout=60), Disconnection)  # the last of them after HELLO_WITHIN
    assert any(f"no hello within {HELLO_WITHIN:.0f} s" in line for line in harness.log)
    assert isinstance(answer(own, harness.port), bytes)


def first_bytes(context, port):
    """Return the server's bytes after a TLS handshake; empty if it closes the connection, which must be quick."""
    with socket.create_connection(("localhost", port), timeout=20) as plain:
        try:
            with context.wrap_socket(plain, server_hostname="localhost") as secure:
                secure.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0]))
                return secure.recv(1000)
        except (ssl.SSLError, ConnectionError):  # a TimeoutError is neither
            return b""


def tls(kits, flaw):
    """Return the TLS context of a party with this flaw, or without one."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(kits / "a" / "ca.pem")
    context.set_alpn_protocols(["h2"])
    if flaw != "no certificate":
        context.load_cert_chain(kits / "a" / "certificate.pem", kits / "a" / "key.pem")
    if flaw == "TLS 1.2":
        context.maximum_version = ssl.TLSVersion.TLSv1_2
    return context


@pytest.mark.parametrize("flaw", ["no certificate", "TLS 1.2"])
def test_clients_without_a_certificate_or_with_older_tls_are_refused(flaw, harness, kits):
    assert first_bytes(tls(kits, flaw), harness.port) == b""
    assert first_bytes(tls(kits, "none"), harness.port) != b""


def test_noise_is_answered_by_an_alert_at_most(harness):
    with socket.create_connection(("localhost", harness.port), timeout=20) as plain:
        plain.sendall(b"\x16\x03\x01" + bytes(range(256)))
        with suppress(ConnectionError):
            assert plain.recv(1000)[:1] in (b"", b"\x15")


FAILED_HANDSHAKES = """
import socket, ssl, sys
from contextlib import suppress
from pathlib import Path
from glasu.network.transport import Listener
from glasu.pki.kit import open_kit
kits = Path(sys.argv[1])
context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
context.load_verify_locations(kits / "a" / "ca.pem")
with Listener(None, open_kit(kits / "server"), "localhost:0") as listener:
    listener.start()
    for _ in range(20):
        with suppress(OSError), socket.create_connection(("localhost", listener.port), timeout=20) as plain:
            with context.wrap_socket(plain, server_hostname="localhost") as secure:
                secure.recv(1)
"""


@pytest.mark.parametrize("verbosity", [None, "INFO"])
def test_failed_tls_handshakes_cannot_fill_the_log_unless_the_operator_wants_their_lines(verbosity, kits):
    settings = {name: value for name, value in os.environ.items() if name != "GRPC_VERBOSITY"}
    settings |= {"GRPC_VERBOSITY": verbosity} if verbosity else {}
    words = [sys.executable, "-c", FAILED_HANDSHAKES, str(kits)]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=60, env=settings, check=True)
    assert ended.stdout == ""
    assert ended.stderr.count("Handshake failed") == (20 if verbosity else 0)
    assert verbosity or ended.stderr == ""


GRPC_FIRST = """
import sys
from pathlib import Path
from types import SimpleNamespace
import grpc
from glasu.errors import TransportError
from glasu.pki.kit import open_kit
from glasu.network.transport import FrameStream, ClientStream, Listener, SessionLock
kit = open_kit(Path(sys.argv[1]))
try:
    if kit.role == "server":
        Listener(None, kit, "127.0.0.1:0")
    else:
        ClientStream(kit, "localhost:1", FrameStream(SessionLock()), print)
except TransportError as error:
    print(error)
"""


@pytest.mark.parametrize("name", ["server", "a"])
def test_serve_and_join_refuse_to_run_if_grpc_was_loaded_too_early_for_tls_1_3(name, kits):
    bare = {name: value for name, value in os.environ.items() if name != "GRPC_SSL_CIPHER_SUITES"}
    words = [sys.executable, "-c", GRPC_FIRST, str(kits / name)]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=60, env=bare, check=True)
    (line,) = ended.stdout.splitlines()
    assert "TLS 1.2" in line
    assert "require_tls_1_3() before" in line


class ServersWords:
    """An error of a call that the server aborted with these words, with or without a code of ours."""

    def __init__(self, details, *metadata):
        self._details, self._metadata = details, metadata

    def code(self):
        return SimpleNamespace(name="PERMISSION_DENIED")

    def details(self):
        return self._details

    def trailing_metadata(self):
        return self._metadata


@pytest.mark.parametrize("metadata", [(), ((CODE_KEY, "refused"),), ((CODE_KEY, "busy"),)], ids=str)
def test_the_words_of_a_server_that_aborts_a_call_reach_a_terminal_as_one_short_printable_line(metadata):
    ended = read_status(ServersWords("\x1b[2Jno\n" + "x" * 3000, *metadata))
    shown = describe_end(ended, "localhost:1", "AA")
    assert shown.startswith("?[2Jno?xxx")
    assert shown.isprintable()
    assert len(shown) <= MAX_REASON + len(" (permission_denied)")


def test_codes_that_a_probe_can_refine_are_not_the_clear_ones():
    assert ConnectionCode.NOTHING_LISTENS not in AMBIGUOUS
    assert not any(code.is_final for code in AMBIGUOUS - {ConnectionCode.SERVER_OF_OTHER_NAME})


class SlowReader:
    """A host that reads the frames of a party for a while and then no more, until the test ends."""

    def __init__(self):
        self.changed, self.reads, self.over, self.num_read = SessionLock(), Event(), Event(), 0
        self.reads.set()

    def open_stream(self):
        return FrameStream(self.changed)

    def attach(self, party, stream, frames):
        for _ in frames:
            self.num_read += 1
            if not self.reads.is_set():
                break
        self.over.wait(60)

    def record_rejection(self, party, address, reason):
        raise AssertionError(reason)


class Endless(FrameStream):
    """A stream that sends large frames as fast as gRPC takes them."""

    num_sent = 0

    def yield_frames(self):
        while self.is_open:
            yield pack_frame(PIECE, bytes(MAX_PIECE), number=1)
            self.num_sent += 1


class CountingChannel(Channel):
    """A channel that counts how often its writer looked for a frame."""

    num_looks = 0

    def take_next(self):
        self.num_looks += 1
        return super().take_next()


def test_a_writer_sleeps_while_its_stream_has_nothing_to_send():
    changed, channel, sent = SessionLock(), CountingChannel(), []
    stream = FrameStream(changed)
    stream.attach(channel)
    writer = Thread(target=lambda: sent.extend(stream.yield_frames()), daemon=True)
    writer.start()
    wait_for(lambda: channel.num_looks == 1)
    for _ in range(50):  # frames of other parties
        with changed:
            changed.notify_all()
        time.sleep(0.001)
    assert channel.num_looks == 1
    with changed:
        channel.outbox.put_control(Notice("x"))
        changed.notify_all()
    wait_for(lambda: len(sent) == 1)
    stream.send(b"last")
    wait_for(lambda: sent[-1] == b"last")
    stream.close()
    writer.join(10)
    assert not writer.is_alive()
    assert changed.streams == []


def test_unread_frames_beyond_a_window_wait_at_the_sender(kits):
    host = SlowReader()
    with Listener(host, open_kit(kits / "server", "server"), "127.0.0.1:0") as listener:
        listener.start()
        outgoing, kit = Endless(SessionLock()), open_kit(kits / "a", "party")
        stream = ClientStream(kit, f"localhost:{listener.port}", outgoing, lambda stream, event: None)
        try:
            wait_for(lambda: host.num_read > 400, 60)  # gRPC would widen its window meanwhile
            host.reads.clear()
            time.sleep(3.0)
            assert (outgoing.num_sent - host.num_read) * MAX_PIECE <= 3 * WINDOW
        finally:
            host.over.set()
            stream.close()
