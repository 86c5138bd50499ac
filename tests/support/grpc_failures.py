"""Record how gRPC reports each way in which a connection can fail: status code and details, for one version of grpcio.

    PYTHONPATH=src:tests python -m support.grpc_failures >> tests/network/grpc_failures.jsonl

With another version: pip install --target OTHER grpcio==VERSION, and OTHER first in PYTHONPATH.
"""

from __future__ import annotations

import json
import socket
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from glasu.pki.kit import Kit, open_kit
from glasu.pki.provision import provision
from glasu.pki.tls import require_tls_1_3

require_tls_1_3()

import grpc  # noqa: E402

METHOD = "/glasu.Test/Call"
PINGS = [
    ("grpc.keepalive_time_ms", 1000),
    ("grpc.keepalive_timeout_ms", 1000),
    ("grpc.http2.ping_timeout_ms", 1000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
]


@contextmanager
def serve(kit: Kit, handle: Callable[[Iterator[bytes], Any], Iterator[bytes]]) -> Iterator[int]:
    """Serve one method with mutual TLS; yields the port."""
    server = grpc.server(ThreadPoolExecutor(4))
    handler = grpc.stream_stream_rpc_method_handler(handle)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("glasu.Test", {"Call": handler}),))
    credentials = grpc.ssl_server_credentials(
        [(kit.key_pem, kit.certificate_pem)], kit.ca_pem, require_client_auth=True
    )
    port = server.add_secure_port("localhost:0", credentials)
    server.start()
    try:
        yield port
    finally:
        server.stop(0).wait(5)


@contextmanager
def answer_plainly(answer: bytes) -> Iterator[int]:
    """Listen without TLS, send the answer to every client and close; yields the port."""
    with socket.create_server(("localhost", 0)) as listener:

        def run() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                with connection:
                    connection.recv(1)
                    connection.sendall(answer)

        threading.Thread(target=run, daemon=True).start()
        yield listener.getsockname()[1]


@contextmanager
def forward(port: int) -> Iterator[tuple[int, threading.Event, threading.Event]]:
    """Forward one connection to a port; yields its port, an event that freezes it, and one that closes it."""
    freeze, cut = threading.Event(), threading.Event()
    with socket.create_server(("localhost", 0)) as listener:

        def copy(source: socket.socket, target: socket.socket) -> None:
            source.settimeout(0.1)
            while not cut.is_set():
                if freeze.is_set():
                    cut.wait(0.1)
                    continue
                try:
                    content = source.recv(1 << 16)
                except TimeoutError:
                    continue
                except OSError:
                    break
                if not content:
                    break
                try:
                    target.sendall(content)
                except OSError:  # the other side has hung up
                    break
            for end in (source, target):
                end.close()

        def run() -> None:
            while True:
                try:
                    near, _ = listener.accept()
                except OSError:
                    return
                far = socket.create_connection(("localhost", port))
                for ends in ((near, far), (far, near)):
                    threading.Thread(target=copy, args=ends, daemon=True).start()

        threading.Thread(target=run, daemon=True).start()
        try:
            yield listener.getsockname()[1], freeze, cut
        finally:
            cut.set()


def call(kit: Kit, address: str, spoil: Callable[[], None] | None = None, seconds: float = 20.0) -> dict[str, str]:
    """Call the method, and return how gRPC reports the failure; `spoil` is called after the first answer."""
    credentials = grpc.ssl_channel_credentials(kit.ca_pem, kit.key_pem, kit.certificate_pem)
    over = threading.Event()

    def frames() -> Iterator[bytes]:
        yield b"hello"
        over.wait(60)

    with grpc.secure_channel(address, credentials, [*PINGS, ("grpc.use_local_subchannel_pool", 1)]) as channel:
        answers = channel.stream_stream(METHOD)(frames(), timeout=seconds)
        try:
            for _ in answers:
                if spoil is not None:
                    spoil()
            return {"code": "OK", "details": ""}
        except grpc.RpcError as error:
            return {"code": error.code().name, "details": error.details() or ""}
        finally:
            over.set()


def echo(frames: Iterator[bytes], context: Any) -> Iterator[bytes]:
    yield from frames


def scenarios(folder: Path) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield every scenario with what gRPC reports."""
    now = datetime.now(UTC)
    provision(folder / "good", ["a"], ["localhost", "127.0.0.1"])
    provision(folder / "other", ["a"], ["localhost"])
    provision(folder / "elsewhere", ["a"], ["glasu.example.org"])
    provision(folder / "expired", ["a"], ["localhost"], days=1, now=now - timedelta(days=9))
    provision(folder / "early", ["a"], ["localhost"], now=now + timedelta(days=9))
    good, server, other = (open_kit(folder / name) for name in ("good/a", "good/server", "other/a"))

    def old(name: str, moment: datetime) -> Kit:
        return open_kit(folder / name, now=moment)

    expired, early = now - timedelta(days=8.5), now + timedelta(days=10)
    with socket.create_server(("localhost", 0)) as free:
        unused = free.getsockname()[1]
    yield "nothing_listens", call(good, f"localhost:{unused}")
    yield "nothing_listens_at_ip", call(good, f"127.0.0.1:{unused}")
    yield "unknown_name", call(good, f"no-such-host.invalid:{unused}")
    with serve(server, echo) as port:
        yield "server_of_other_ca", call(other, f"localhost:{port}")
        yield "own_certificate_of_other_ca", call(replace(other, ca_pem=good.ca_pem), f"localhost:{port}")
        expired_party = replace(old("expired/a", expired), ca_pem=good.ca_pem)
        yield "own_certificate_expired", call(expired_party, f"localhost:{port}")
        yield "own_certificate_is_a_servers", call(server, f"localhost:{port}")
    with serve(open_kit(folder / "elsewhere/server"), echo) as port:
        yield "server_of_other_name", call(open_kit(folder / "elsewhere/a"), f"localhost:{port}")
    with serve(old("expired/server", expired), echo) as port:
        yield "server_expired", call(old("expired/a", expired), f"localhost:{port}")
    with serve(old("early/server", early), echo) as port:
        yield "server_not_yet_valid", call(old("early/a", early), f"localhost:{port}")
    for name, text in {"plain_http": b"HTTP/1.1 400 Bad Request\r\n\r\n", "plain_silent": b""}.items():
        with answer_plainly(text) as port:
            yield name, call(good, f"localhost:{port}")

    def refuse(frames: Iterator[bytes], context: Any) -> Iterator[bytes]:
        context.abort(grpc.StatusCode.UNAUTHENTICATED, "refused: revoked")
        yield b""

    with serve(server, refuse) as port:
        yield "refused_by_the_server", call(good, f"localhost:{port}")
    with serve(server, echo) as port, forward(port) as (near, freeze, _):
        yield "frozen", call(good, f"localhost:{near}", freeze.set)
    with serve(server, echo) as port, forward(port) as (near, _, cut):
        yield "cut", call(good, f"localhost:{near}", cut.set)
    with answer_plainly(b"") as port, forward(port) as (near, freeze, _):
        freeze.set()
        yield "silent_in_the_handshake", call(good, f"localhost:{near}", seconds=4.0)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        recorded = dict(scenarios(Path(folder)))
    json.dump({"version": grpc.__version__, "reported": recorded}, sys.stdout)
    print()
