"""Tell in our words whom TLS turned away and why: gRPC calls no code of ours then, it writes to standard error only."""

from __future__ import annotations

import os
import re
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

Tell = Callable[[str], None]
NOTED = re.compile(r"[IWE]\d{4} [\d:.]+ +\d+ \S+\.(cc|h|c):\d+\] |WARNING: All log messages before absl::InitializeLog")
FAILED = "Handshake failed with error "
REFUSES = (
    "it does not accept this server's certificate; is its kit of the same `glasu provision`, and its --server right?"
)
REASONS = {
    "PEER_DID_NOT_RETURN_A_CERTIFICATE": "it presented no certificate",
    "unable to get local issuer certificate": "its certificate was not signed by the CA of this kit",
    "self signed certificate": "its certificate was not signed by the CA of this kit",
    "self-signed certificate": "its certificate was not signed by the CA of this kit",
    "certificate has expired": "its certificate has expired",
    "certificate is not yet valid": "its certificate is not valid yet; are the clocks right?",
    "certificate purpose": "its certificate is not a party's",
    "certificate signature failure": "the CA's signature on its certificate is not genuine",  # before the next one
    "BAD_SIGNATURE": "its key does not belong to its certificate",
    "NO_SHARED_CIPHER": "it does not speak TLS 1.3",
    "UNSUPPORTED_PROTOCOL": "it does not speak TLS 1.3",
    "WRONG_VERSION_NUMBER": "what it sent is not TLS",
    "HTTP_REQUEST": "what it sent is not TLS",
    "ALERT": REFUSES,
    "BAD_PACKET_LENGTH": REFUSES,  # it said so in plain text, where what is encrypted was expected
}


def reason(line: str) -> str | None:
    """Return why a handshake failed if a line of gRPC's log says that one did, in our words where we have some."""
    _, failed, why = line.partition(FAILED)
    if not failed:
        return None
    return next((ours for theirs, ours in REASONS.items() if theirs in why), why.strip())


def own_lines_asked() -> bool:
    """Take GRPC_VERBOSITY away before gRPC is loaded, and tell whether it asked for gRPC's own lines.

    By default gRPC notes why a handshake failed; with a stricter setting it would not.
    """
    asked = os.environ.pop("GRPC_VERBOSITY", None)
    return asked is not None and asked.upper() != "NONE"


@contextmanager
def handshakes_told(tell: Tell, *, everything: bool = False) -> Iterator[None]:
    """Tell of every failed handshake while the block lasts; what else gRPC notes there is left out, for we say it.

    What does not come from gRPC, and its last words when it ends the process, pass on; so does the rest where
    `everything` is asked for. For a command, not for a library: the whole process has only one standard error.
    """
    sys.stderr.flush()
    before, real = sys.stderr, os.dup(2)
    source, sink = os.pipe()
    os.dup2(sink, 2)
    os.close(sink)
    reader = threading.Thread(
        target=_pass_on, args=(source, real, tell, everything), name="glasu-handshakes", daemon=True
    )
    with os.fdopen(os.dup(real), "w", 1, before.encoding, "backslashreplace") as sys.stderr:  # no letter ends a run
        reader.start()
        try:
            yield
        finally:
            os.dup2(real, 2)  # nobody holds the sink now, so the reader comes to its end
            reader.join()
            sys.stderr = before
            os.close(real)


def _pass_on(source: int, real: int, tell: Tell, everything: bool) -> None:
    with os.fdopen(source, "rb") as lines:
        for content in lines:
            line = content.decode(errors="replace")
            why = reason(line)
            with suppress(Exception):  # nobody reads our log any more, or can: gRPC must not wait for that
                if why is not None:
                    tell(f"a connection was refused in the TLS handshake: {why}.")
                elif everything or not NOTED.match(line):
                    os.write(real, content)
