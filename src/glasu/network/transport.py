"""gRPC with mutual TLS 1.3: one bidirectional stream of frames per party. A party is identified by its certificate."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, NoReturn, Protocol
from urllib.parse import unquote

from glasu.errors import ConfigError, GlasuError, TransportError
from glasu.files import read_descriptor_limit
from glasu.network.address import split_address
from glasu.network.connection_codes import ConnectionCode, Disconnection
from glasu.network.frames import ACK, MAX_FRAME, WINDOW, Channel, pack_frame
from glasu.network.log_lines import MAX_REASON, make_printable
from glasu.network.probe import probe
from glasu.pki.identity import SERVER_NAME
from glasu.pki.kit import Kit, encode_pem, reload_revocations
from glasu.pki.refusal import find_pin_error, find_refusal, read_peer_name
from glasu.pki.tls import require_tls_1_3

ONLY_TLS_1_3 = require_tls_1_3()
# gRPC writes a line per failed TLS handshake, so anyone could fill the log.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

import grpc  # noqa: E402 - grpc reads GRPC_VERBOSITY and the variable of require_tls_1_3 when it is imported

HELLO_WITHIN = 10.0  # seconds after which a stream without an accepted hello is closed
ALIVE_EVERY = 5.0  # seconds between two heartbeats that the server sends on every accepted stream
# A flood of connections takes every free place immediately, and PLACES / HANDSHAKE_WITHIN places become free per
# second. A party's attempt succeeds with this probability: places that become free per second, divided by connections
# of the flood per second. A place takes up to 75 KB of memory.
HANDSHAKE_WITHIN = 2.0  # seconds after which a connection without a complete TLS handshake is dropped
PLACES = 768  # places for TCP connections at the server, in addition to two per stream that the parties may open
MAX_WAITING, MAX_OPEN = 2, 4  # maximum number of concurrent streams of one party: before its hello, and in total
WAITING_NOTICES = 64  # maximum number of frames outside the sequence that wait on one stream; more are dropped
METHOD = "/glasu.Training/Join"
SERVICE, NAME = METHOD.strip("/").split("/")
CODE_KEY = "glasu-code"  # key in the trailing metadata; its value is the `ConnectionCode` of a rejection
OPTIONS = [
    ("grpc.keepalive_time_ms", 5_000),  # off by default; without it, a dead peer is not detected for hours
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 1_000),
    ("grpc.http2.max_ping_strikes", 0),
    # Without this option, gRPC doubles its flow-control window on a fast line, up to a gigabyte of unread frames.
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", WINDOW),
    ("grpc.max_receive_message_length", MAX_FRAME),
    ("grpc.max_send_message_length", MAX_FRAME),
]


class SessionLock(threading.Condition):
    """The lock of a session, and the condition on which the session's threads wait.

    The writer of each stream waits on a separate condition. Otherwise a frame from one party would wake the writers of
    all parties. Call `notify_all` after a change, never before it: it wakes only writers that already have a frame.
    """

    def __init__(self) -> None:
        self.mutex = threading.RLock()
        super().__init__(self.mutex)
        self.streams: list[FrameStream] = []  # the open streams

    def notify_all(self) -> None:
        """Wake the session's threads, and the writers that have a frame to send."""
        super().notify_all()
        self.wake_writers()

    def wake_writers(self) -> None:
        """Wake the writers that have a frame to send. The caller holds the lock."""
        for stream in self.streams:
            stream.wake_writer()


class FrameStream:
    """The outgoing frames of one gRPC stream, at the server or at a party, until it is closed.

    Frames outside the sequence (`send`) are sent first. Numbered frames come from the channel that the session attaches
    after hello and welcome. All methods acquire the session's lock, which is reentrant, so a session may call them with
    or without holding it.
    """

    def __init__(self, changed: SessionLock) -> None:
        """Begin without a channel."""
        self._changed = changed
        self._writable = threading.Condition(changed.mutex)  # gRPC's writer waits here
        self._unnumbered: deque[bytes] = deque()
        self.channel: Channel | None = None  # attached when the stream is accepted
        self.is_open = True
        with changed:
            changed.streams.append(self)

    def send(self, frame: bytes) -> None:
        """Send a frame outside the sequence. It is dropped if too many frames wait."""
        with self._changed:
            if self.is_open and len(self._unnumbered) < WAITING_NOTICES:
                self._unnumbered.append(frame)
                self.wake_writer()

    def attach(self, channel: Channel) -> None:
        """Send the channel's frames on this stream from now on."""
        with self._changed:
            self.channel = channel
            self._changed.notify_all()

    def close(self, *last: bytes) -> None:
        """End the stream, perhaps with a last frame. Queued numbered frames are kept for the next stream."""
        with self._changed:
            if self.is_open:
                self._unnumbered.extend(last)
                self.is_open, self.channel = False, None
                self._changed.streams.remove(self)
            self.wake_writer()
            self._changed.notify_all()

    def yield_frames(self) -> Iterator[bytes]:
        """Yield frames as gRPC asks for them, until the stream is closed."""
        while True:
            with self._changed:
                while (frame := self._take_next()) is None:
                    if not self.is_open:
                        return
                    self._writable.wait()
            yield frame

    def wake_writer(self) -> None:
        """Wake the writer if it can send a frame, or if the stream is closed. The caller holds the lock."""
        if self._unnumbered or not self.is_open or (self.channel is not None and self.channel.has_next):
            self._writable.notify()

    def _take_next(self) -> bytes | None:
        if self._unnumbered:
            return self._unnumbered.popleft()
        return None if self.channel is None else self.channel.take_next()


# --- the server's end -----------------------------------------------------------------


class Host(Protocol):
    """The session that receives the parties."""

    def open_stream(self) -> FrameStream:
        """Return an outgoing stream that uses the session's lock."""
        ...

    def attach(self, party: str, stream: FrameStream, frames: Iterator[bytes]) -> None:
        """Read the frames of a party until its stream ends."""
        ...

    def record_rejection(self, party: str, address: str, reason: str) -> None:
        """Record that a connection was rejected. `party` is empty if the certificate names no party of the roster."""
        ...


@dataclass(eq=False)
class _Call:
    """One call of the gRPC method by a party, as the server sees it."""

    name: str
    context: Any
    stream: FrameStream
    opened_at: float = field(default_factory=time.monotonic)
    closed_at: float | None = None  # when it was found to be closed
    heartbeat_at: float = field(default_factory=time.monotonic)  # when the last heartbeat was sent

    @property
    def awaits_hello(self) -> bool:
        return self.stream.is_open and self.stream.channel is None

    @property
    def address(self) -> str:
        """The peer's address as host:port. gRPC returns it in a form such as ipv6:%5B::1%5D:59706."""
        return unquote(self.context.peer()).partition(":")[2]


class Listener(AbstractContextManager["Listener"]):
    """Accepts connections of the roster's parties. The constructor binds the address; `start` begins to serve.

    When a TLS handshake fails, gRPC drops the connection without calling a handler. The rejected party finds the reason
    with `probe`. The number of streams per party is limited, so that one party cannot prevent others from connecting.
    """

    def __init__(self, host: Host, kit: Kit, address: str, max_connections: int | None = None) -> None:
        """Bind the address.

        Args:
            host: receives the streams.
            kit: the kit of the server.
            address: host:port.
            max_connections: maximum number of TCP connections; None: a limit from PLACES and the file descriptors.
        """
        _refuse_older_tls()
        self._host, self._kit = host, kit
        self._calls: set[_Call] = set()
        self._lock, self._over = threading.Lock(), threading.Event()
        streams = MAX_OPEN * len(kit.roster)
        places = min(PLACES, read_descriptor_limit() // 2) + 2 * streams
        self._server = grpc.server(
            ThreadPoolExecutor(streams + 4, "glasu-stream"),
            options=[
                *OPTIONS,
                ("grpc.so_reuseport", 0),
                ("grpc.max_concurrent_streams", MAX_OPEN),
                ("grpc.max_allowed_incoming_connections", max_connections or places),
                ("grpc.server_handshake_timeout_ms", int(1000 * HANDSHAKE_WITHIN)),
            ],
        )
        handler = grpc.stream_stream_rpc_method_handler(self._serve)
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {NAME: handler}),))
        credentials = grpc.ssl_server_credentials(
            [(kit.key_pem, kit.certificate_pem)], kit.ca_pem, require_client_auth=True
        )
        why = _find_bind_error(address)  # checked before gRPC binds the address, because gRPC may print its own error
        try:
            self.port = 0 if why else int(self._server.add_secure_port(address, credentials))
        except RuntimeError:
            self.port = 0
        if not self.port:
            raise ConfigError(
                f"--listen {address}: the address cannot be used{why}; give a free port and an address of this machine."
            )

    def start(self) -> None:
        """Begin to serve."""
        self._server.start()
        threading.Thread(target=self._monitor, name="glasu-monitor", daemon=True).start()

    def __exit__(self, *exception: object) -> None:
        """End all streams, but first wait a short time for queued frames to be sent."""
        self._over.set()
        self._server.stop(grace=1.0).wait(3.0)

    def _serve(self, frames: Iterator[bytes], context: Any) -> Iterator[bytes]:
        """Serve one stream, in a thread of gRPC."""
        call = _Call("", context, self._host.open_stream())
        try:
            call.name = self._identify(call)
            self._admit(call)
            if context.add_callback(call.stream.close):
                arguments = call.name, call.stream, _yield_until_broken(frames)
                thread = f"glasu-{call.name}"
                threading.Thread(target=self._host.attach, args=arguments, name=thread, daemon=True).start()
                yield from call.stream.yield_frames()
        finally:
            call.stream.close()
            with self._lock:
                self._calls.discard(call)

    def _admit(self, call: _Call) -> None:
        """Count a stream of a party; end the call if the party has too many streams."""
        with self._lock:
            own = [other for other in self._calls if other.name == call.name]
            is_crowded = len(own) >= MAX_OPEN or sum(other.awaits_hello for other in own) >= MAX_WAITING
            if not is_crowded:
                self._calls.add(call)
        if is_crowded:
            why = f"party {call.name!r}: too many connections; there is room again in {HELLO_WITHIN:.0f} s"
            self._abort(call, grpc.StatusCode.RESOURCE_EXHAUSTED, ConnectionCode.BUSY, call.name, why)

    def _identify(self, call: _Call) -> str:
        """Return the party in the peer's certificate. End the call if the server does not accept the certificate."""
        certificate = call.context.auth_context().get("x509_pem_cert", [None])[0]
        name = read_peer_name(certificate) if certificate else None
        known = str(name) if name in self._kit.roster else ""
        try:
            why = find_refusal(certificate, reload_revocations(self._kit))
        except GlasuError as error:  # perhaps temporary, because the list is being replaced at this moment
            code = ConnectionCode.UNREADABLE_REVOCATIONS
            self._abort(call, grpc.StatusCode.UNAVAILABLE, code, known, code.value, str(error))
        if why:  # a revocation takes effect immediately, without a restart
            public = why if known else f"party {name!r} is not on the roster"  # only parties of the roster may see why
            self._abort(call, grpc.StatusCode.UNAUTHENTICATED, ConnectionCode.REFUSED, known, public, why)
        return known

    def _abort(
        self, call: _Call, status: Any, code: ConnectionCode, party: str, public: str, reason: str = ""
    ) -> NoReturn:
        self._host.record_rejection(party, call.address, reason or public)
        call.context.set_trailing_metadata(((CODE_KEY, code.value),))
        call.context.abort(status, public)
        raise AssertionError("gRPC's abort raises")

    def _monitor(self) -> None:
        """Check all calls periodically. Runs in a separate thread."""
        while not self._over.wait(min(0.5, HELLO_WITHIN / 4)):
            with self._lock:
                calls = list(self._calls)
            for call in calls:
                self._check(call, time.monotonic())

    def _check(self, call: _Call, now: float) -> None:
        """Close a stream without a hello, send a heartbeat if one is due, and cancel a call whose peer does not leave.

        Heartbeats show the parties that the server is not frozen. gRPC's pings detect this too late, because the kernel
        of a frozen server still acknowledges data. A ping timeout of a few seconds would break slow connections, where
        a ping waits behind data.
        """
        if call.awaits_hello and now - call.opened_at >= HELLO_WITHIN:
            self._host.record_rejection(call.name, call.address, f"no hello within {HELLO_WITHIN:.0f} s")
            call.stream.close()
        if call.stream.channel is not None and now - call.heartbeat_at >= ALIVE_EVERY:
            call.stream.send(pack_frame(ACK))
            call.heartbeat_at = now
        if not call.stream.is_open:
            call.closed_at = call.closed_at or now
            if now - call.closed_at >= HELLO_WITHIN:
                call.context.cancel()


def _yield_until_broken(frames: Iterator[bytes]) -> Iterator[bytes]:
    """Yield frames until the stream ends, normally or with an error."""
    try:
        yield from frames
    except Exception:  # when a stream breaks, gRPC raises errors without a common base class
        return


# --- a party's end --------------------------------------------------------------------


class ClientStream:
    """A party's end of one stream. A separate thread passes incoming frames to the session."""

    def __init__(
        self,
        kit: Kit,
        address: str,
        outgoing: FrameStream,
        arrive: Callable[[ClientStream, bytes | Disconnection], None],
    ) -> None:
        """Connect in the background.

        Args:
            kit: the kit of the party.
            address: the address of the server, host:port.
            outgoing: the frames to send.
            arrive: called with every frame, and finally with the reason why the stream ended. While this call blocks,
                no more frames are read, and gRPC's flow control stops the server.
        """
        _refuse_older_tls()
        self._kit, self._address, self.outgoing, self._arrive = kit, address, outgoing, arrive
        self._opening = threading.Lock()  # prevents `close` while the channel is being opened
        self._channel: Any = None
        self._ended = threading.Event()
        self._is_pinned = SERVER_NAME in kit.pins
        if not self._is_pinned:
            self._open_channel(kit.ca_pem)
        threading.Thread(target=self._run, name="glasu-connection", daemon=True).start()

    def _open_channel(self, roots: bytes) -> None:
        """Connect to a server whose certificate is one of the roots, or is signed by one of them."""
        with self._opening:
            if self._ended.is_set():
                return
            credentials = grpc.ssl_channel_credentials(roots, self._kit.key_pem, self._kit.certificate_pem)
            options = [*OPTIONS, ("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", 0)]
            self._channel = grpc.secure_channel(self._address, credentials, options)
            self._call = self._channel.stream_stream(METHOD)(self.outgoing.yield_frames())

    def _run(self) -> None:
        """Read until the stream ends. If this kit pins the server's key, first check the pin."""
        ended = self._open_pinned() if self._is_pinned else None
        if ended is None:
            ended = Disconnection(ConnectionCode.CLOSED) if self._channel is None else self._read()
        self.outgoing.close()
        self._ended.set()
        self._arrive(self, ended)

    def _open_pinned(self) -> Disconnection | None:
        """Connect to the server whose key this kit pins. Return None, or the reason for a failure.

        gRPC does not reveal the certificate of a server. So a first connection without gRPC reads the certificate, and
        its key is compared with the pin. The second connection, by gRPC, accepts only this certificate. Even if two
        servers answer the two connections, gRPC completes the handshake only with the owner of the pinned key.
        """
        found = probe(self._kit, self._address)
        if isinstance(found, Disconnection):
            return found
        named = "" if found.name == SERVER_NAME else "the certificate at that address is not the server's"
        if error := named or find_pin_error(found, self._kit):
            return Disconnection(ConnectionCode.SERVER_OF_OTHER_KEY, error)
        self._open_channel(encode_pem(found.certificate))
        return None

    def _read(self) -> Disconnection:
        """Pass frames to the session until the stream ends; return the reason."""
        ended = Disconnection(ConnectionCode.CLOSED)
        served = False
        try:
            for frame in self._call:
                served = True
                self._arrive(self, frame)
        except grpc.RpcError as error:
            if error.code() is not grpc.StatusCode.CANCELLED:
                ended = read_status(error)
        if ended.code in AMBIGUOUS and not served and not self._ended.is_set():
            found = probe(self._kit, self._address)
            if isinstance(found, Disconnection) and found.code not in VAGUE:
                ended = found
        if self._is_pinned and ended.code is ConnectionCode.SERVER_OF_OTHER_CA:  # the certificate is not the pinned one
            return Disconnection(ConnectionCode.SERVER_OF_OTHER_KEY, "two connections received different certificates")
        return ended

    def close(self, seconds: float = 0.0) -> None:
        """End the stream. Wait up to `seconds` until queued frames are sent."""
        self.outgoing.close()
        if seconds:
            self._ended.wait(seconds)
        with self._opening:
            self._ended.set()
        if self._channel is not None:
            self._call.cancel()
            self._channel.close()


# Texts of gRPC errors. The first match counts, and no other code reads these texts. They were recorded with gRPC 1.70
# to 1.85 (tests/network/grpc_failures.jsonl). To record another version, run `python -m support.grpc_failures`.
GRPC_TEXTS: tuple[tuple[str, ConnectionCode], ...] = (
    ("certificate has expired", ConnectionCode.SERVER_EXPIRED),
    ("certificate is not yet valid", ConnectionCode.SERVER_NOT_YET_VALID),
    ("CERTIFICATE_VERIFY_FAILED", ConnectionCode.SERVER_OF_OTHER_CA),
    ("Hostname Verification Check failed", ConnectionCode.SERVER_OF_OTHER_NAME),
    ("is not in peer certificate", ConnectionCode.SERVER_OF_OTHER_NAME),  # before 1.78
    ("WRONG_VERSION_NUMBER", ConnectionCode.NOT_TLS),
    ("Connection refused", ConnectionCode.NOTHING_LISTENS),
    ("DNS resolution failed", ConnectionCode.UNKNOWN_NAME),  # before 1.80
    ("errors resolving", ConnectionCode.UNKNOWN_NAME),
    ("Too many open files", ConnectionCode.OUT_OF_DESCRIPTORS),
    ("ping timeout", ConnectionCode.PING_TIMEOUT),
    ("Socket closed", ConnectionCode.CLOSED),
    ("Connection reset by peer", ConnectionCode.CLOSED),
)
# Codes from gRPC whose exact cause `probe` may find.
AMBIGUOUS = {ConnectionCode.CLOSED, ConnectionCode.OTHER, ConnectionCode.SERVER_OF_OTHER_NAME}
# Codes from `probe` that are less precise than the code from gRPC.
VAGUE = {ConnectionCode.CLOSED, ConnectionCode.NO_ANSWER}


def read_status(error: Any) -> Disconnection:
    """Return the cause of a gRPC error: from the server's metadata if it is there, otherwise from gRPC's text."""
    details = error.details() or ""
    stated = dict(error.trailing_metadata() or ()).get(CODE_KEY)
    if stated in {code.value for code in ConnectionCode}:
        return Disconnection(ConnectionCode(stated), make_printable(details, MAX_REASON))
    return read_details(error.code().name, details)


def read_details(status: str, details: str) -> Disconnection:
    """Return the cause of a gRPC error with this status and text."""
    if status == "DEADLINE_EXCEEDED":
        return Disconnection(ConnectionCode.NO_ANSWER)
    for text, code in GRPC_TEXTS:
        if text in details:
            return Disconnection(code)
    return Disconnection(ConnectionCode.OTHER, f"{make_printable(details, MAX_REASON)} ({status.lower()})")


def _find_bind_error(address: str) -> str:
    """Return why the operating system cannot bind the address, or "". gRPC does not report this reason."""
    try:
        found = socket.getaddrinfo(*split_address(address), type=socket.SOCK_STREAM)
        for family, kind, protocol, _, where in found:
            with socket.socket(family, kind, protocol) as tried:
                tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                tried.bind(where)
    except OSError as error:
        return f" ({error.strerror})"
    return ""


def _refuse_older_tls() -> None:
    if not ONLY_TLS_1_3:
        raise TransportError(
            "grpc was imported before glasu could restrict it to TLS 1.3, so it would also accept TLS 1.2; call "
            "glasu.pki.tls.require_tls_1_3() before the first `import grpc` of this program."
        )
