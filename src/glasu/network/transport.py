"""gRPC with mutual TLS 1.3: one bidirectional stream of raw bytes per party; its certificate alone says who it is."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator, Sized
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from queue import Empty, Queue, SimpleQueue
from typing import Any, Protocol
from urllib.parse import unquote

from glasu.errors import AbsenceError, ConfigError, GlasuError, TransportError
from glasu.network.connect_errors import UNREADABLE, advice, plain_reason
from glasu.network.frames import ALIVE, MAX_FRAME
from glasu.network.peer import Stream, put_soon
from glasu.pki.kit import Kit, with_revocations_of_now
from glasu.pki.refusal import peer_name, refusal
from glasu.pki.tls import require_tls_1_3

ONLY_TLS_1_3 = require_tls_1_3()

import grpc  # noqa: E402 - it reads once, when it is loaded, which versions of TLS it may speak

HELLO_WITHIN = 10.0  # seconds: a stream that has not been accepted by then is closed
ALIVE_EVERY = 5.0  # seconds between two signs of life of the server on every accepted stream
LAST_WORD = 10.0  # seconds that why a party fails may be on its way
UNHEARD, OPEN = 2, 4  # streams of one party at once: not accepted yet, and in all
INBOUND_FRAMES = 16  # frames, of at most a MiB, that a party holds before it reads; gRPC makes the server wait then
HANDSHAKE_WITHIN = 5.0  # seconds: a connection without a complete TLS handshake is dropped then
SPARE_CONNECTIONS = 64  # TCP connections at the server, beside twice the streams that its parties may open
HIGHEST_PORT = 65535
METHOD = "/glasu.Training/Join"
SERVICE, NAME = METHOD.strip("/").split("/")
KEEPALIVE = [
    ("grpc.keepalive_time_ms", 5_000),  # off by default: a dead peer would stay unseen for hours
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 1_000),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.max_receive_message_length", MAX_FRAME),
    ("grpc.max_send_message_length", MAX_FRAME),
]


class Host(Protocol):
    """Whoever receives the parties: it knows how many there are, and reads what one of them sends."""

    @property
    def links(self) -> Sized: ...

    def attach(self, name: str, stream: Stream, frames: Iterator[bytes]) -> None: ...

    def turned_away(self, line: str) -> None: ...


def _refuse_older_tls() -> None:
    if not ONLY_TLS_1_3:
        raise TransportError(
            "grpc was imported before glasu could hold it to TLS 1.3, so it would speak TLS 1.2, too; call "
            "glasu.pki.tls.require_tls_1_3() before the first `import grpc` of this program."
        )


@contextmanager
def listening(
    hub: Host,
    kit: Kit,
    address: str,
    bound: Callable[[], None] = lambda: None,
    connections: int | None = None,
) -> Iterator[int]:
    """Serve the parties of the kit's roster at this address while the block lasts; yields the port.

    Args:
        hub: receives them.
        kit: the server's.
        address: host:port.
        bound: is called once the address is ours, before anybody is received.
        connections: the greatest number of TCP connections; the server drops further ones. None: enough for all
            parties and some more. Idle connections must not use up the file descriptors of the process.
    """
    _refuse_older_tls()

    def session(frames: Iterator[bytes], context: Any) -> Iterator[bytes]:
        certificate = context.auth_context().get("x509_pem_cert", [None])[0]
        try:
            why = refusal(certificate, with_revocations_of_now(kit))
        except GlasuError as error:  # perhaps the list is being brought just now: who tries again may be served
            hub.turned_away(f"{_caller(context)}: not served: {error}")
            context.abort(grpc.StatusCode.UNAVAILABLE, UNREADABLE)
        if why:  # who is revoked counts from now on, without a restart
            hub.turned_away(f"{_caller(context)}: refused: {why}.")
            context.abort(grpc.StatusCode.UNAUTHENTICATED, f"refused: {why}.")
        guest = _Guest(peer_name(certificate) or "", context)
        if not reception.admits(guest):
            why = f"party {guest.name!r}: too many connections at once; there is room again in {HELLO_WITHIN:.0f} s"
            hub.turned_away(f"{_caller(context)}: {why}.")
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, why)
        try:
            if context.add_callback(guest.stream.close):
                arguments = guest.name, guest.stream, _until_broken(frames)
                threading.Thread(target=hub.attach, args=arguments, name=f"glasu-{guest.name}", daemon=True).start()
                yield from guest.stream.outgoing()
        finally:
            reception.leaves(guest)

    reception = _Reception(hub)
    server = grpc.server(
        ThreadPoolExecutor(OPEN * len(hub.links) + 4, "glasu-stream"),
        options=[
            *KEEPALIVE,
            ("grpc.so_reuseport", 0),
            ("grpc.max_concurrent_streams", 4),
            ("grpc.max_allowed_incoming_connections", connections or SPARE_CONNECTIONS + 2 * OPEN * len(hub.links)),
            ("grpc.server_handshake_timeout_ms", int(1000 * HANDSHAKE_WITHIN)),
        ],
    )
    handler = grpc.stream_stream_rpc_method_handler(session)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {NAME: handler}),))
    credentials = grpc.ssl_server_credentials(
        [(kit.key_pem, kit.certificate_pem)], kit.ca_pem, require_client_auth=True
    )
    try:
        port = server.add_secure_port(address, credentials)
    except RuntimeError:
        port = 0
    if not port:
        raise ConfigError(
            f"--listen {address}: cannot be listened on{_why_not_listened(address)}; give a free port, and an address "
            "of this machine."
        )
    try:
        bound()
        server.start()
        reception.open()
        yield int(port)
    finally:
        reception.close()
        server.stop(grace=1.0).wait(3.0)


@dataclass(eq=False)
class _Guest:
    """One stream of a party, at the server."""

    name: str
    context: Any
    stream: Stream = field(default_factory=Stream)
    since: float = field(default_factory=time.monotonic)
    closed: float | None = None  # when it was seen to be closed
    signed: float | None = None  # when the last sign of life was sent

    @property
    def is_unheard(self) -> bool:
        return self.stream.open and not self.stream.accepted


class _Reception:
    """All streams at the server: no party can have so many, or so silent ones, that others find no room."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._guests: set[_Guest] = set()
        self._lock, self._over = threading.Lock(), threading.Event()

    def open(self) -> None:
        threading.Thread(target=self._look_around, name="glasu-reception", daemon=True).start()

    def close(self) -> None:
        self._over.set()

    def admits(self, guest: _Guest) -> bool:
        """Take a stream in, if its party has not too many already."""
        with self._lock:
            own = [other for other in self._guests if other.name == guest.name]
            if len(own) >= OPEN or sum(other.is_unheard for other in own) >= UNHEARD:
                return False
            self._guests.add(guest)
            return True

    def leaves(self, guest: _Guest) -> None:
        with self._lock:
            self._guests.discard(guest)

    def _look_around(self) -> None:
        while not self._over.wait(min(0.5, HELLO_WITHIN / 4)):
            with self._lock:
                guests = list(self._guests)
            for guest in guests:
                self._look_at(guest, time.monotonic())

    def _look_at(self, guest: _Guest, now: float) -> None:
        """Close a stream without a hello, cancel one whose peer does not hang up, and sign life on the others.

        gRPC's pings cannot tell a frozen server soon enough: its kernel still acknowledges data, and a ping timeout of
        a few seconds breaks slow lines, on which a ping waits behind data.
        """
        if guest.is_unheard and now - guest.since >= HELLO_WITHIN:
            self._host.turned_away(
                f"{_caller(guest.context)}: party {guest.name!r}: no hello within {HELLO_WITHIN:.0f} s; closed."
            )
            guest.stream.close()
        if guest.stream.open and guest.stream.accepted:
            guest.signed = guest.signed or now
            if now - guest.signed >= ALIVE_EVERY:
                guest.stream.send(ALIVE)
                guest.signed = now
        if not guest.stream.open:
            guest.closed = guest.closed or now
            if now - guest.closed >= HELLO_WITHIN:
                guest.context.cancel()


def _until_broken(frames: Iterator[bytes]) -> Iterator[bytes]:
    """Yield frames until the stream ends, however it does."""
    try:
        yield from frames
    except Exception:  # gRPC raises errors of several kinds without a base class when a stream breaks
        return


class Line:
    """A party's end of one stream: what arrives is put into a queue, at the end the reason why it ended."""

    def __init__(self, kit: Kit, address: str, arrived: Callable[[Line, bytes | str], None]) -> None:
        """Connect in the background.

        Args:
            kit: the party's.
            address: of the server, host:port.
            arrived: called in a separate thread with every frame, and at last with the reason why the stream ended.
                While it blocks, no further frame is read, and gRPC's flow control stops the server.
        """
        _refuse_older_tls()
        self._kit, self._address = kit, address
        credentials = grpc.ssl_channel_credentials(kit.ca_pem, kit.key_pem, kit.certificate_pem)
        options = [*KEEPALIVE, ("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", 0)]
        self._channel = grpc.secure_channel(address, credentials, options)
        self._frames: SimpleQueue[bytes | None] = SimpleQueue()
        self._call = self._channel.stream_stream(METHOD)(iter(self._frames.get, None))
        self._arrived = arrived
        threading.Thread(target=self._read, name="glasu-line", daemon=True).start()

    def _read(self) -> None:
        why = "the server ended the connection"
        try:
            for frame in self._call:
                self._arrived(self, frame)
        except grpc.RpcError as error:
            if (code := error.code()) is not grpc.StatusCode.CANCELLED:
                why = plain_reason(error.details() or "", code.name.lower(), self._kit, self._address)
        self._arrived(self, why)

    def send(self, frame: bytes) -> None:
        self._frames.put(frame)

    def close(self) -> None:
        """Let go of the stream."""
        self._frames.put(None)
        self._call.cancel()
        self._channel.close()

    def end_with(self, frame: bytes) -> None:
        """Send a last frame, which does not wait for many others, then let go of the stream."""
        put_soon(self._frames, frame)
        self.finish(LAST_WORD)

    def finish(self, seconds: float = 2.0) -> None:
        """Let what has been sent go out, then let go of the stream."""
        self._frames.put(None)
        done = threading.Event()
        self._call.add_done_callback(lambda call: done.set())
        done.wait(seconds)
        self.close()


def drain(events: Queue[bytes | str]) -> None:
    """Empty the queue of a closed line, because its thread may be blocked in `put`."""
    with suppress(Empty):
        while True:
            events.get_nowait()


def check_address(address: str, option: str) -> str:
    """Return host:port, or refuse it by the name of the option that gave it."""
    scheme, slashes, _ = address.rpartition("://")
    if slashes:
        raise ConfigError(f"{option} {address}: give host:port without {scheme}://, for example localhost:9443.")
    host, _, port = address.rpartition(":")
    if not (host and port.isdecimal()):
        raise ConfigError(f"{option} {address}: must be host:port, for example localhost:9443.")
    if int(port) > HIGHEST_PORT:
        raise ConfigError(f"{option} {address}: the port {port} is above {HIGHEST_PORT}, the highest there is.")
    return address


def _why_not_listened(address: str) -> str:
    """Return the operating system's reason why nobody can listen there; gRPC does not tell it."""
    host, _, port = address.rpartition(":")
    try:
        found = socket.getaddrinfo(host.removeprefix("[").removesuffix("]"), int(port), type=socket.SOCK_STREAM)
        for family, kind, protocol, _, where in found:
            with socket.socket(family, kind, protocol) as tried:
                tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                tried.bind(where)
    except OSError as error:
        return f" ({error.strerror})"
    return ""


def _caller(context: Any) -> str:
    """Return a peer's address as people write it; gRPC says ipv6:%5B::1%5D:59706."""
    return unquote(context.peer()).partition(":")[2]


def unreachable(address: str, seconds: float, why: str) -> AbsenceError:
    """Return the error of a party that has waited long enough."""
    return AbsenceError(
        f"waited {seconds:.0f} s for the server at {address}: {why}; nothing that was saved is lost. {advice(why)}"
    )
