"""Run a glasu command that ends when its parent ends: python -m glasu.integrations.flower.child_process join ...

Standard input of this process is a pipe from the parent, which writes nothing to it. The operating system closes the
pipe when the parent ends, even after kill -9. This module does not import Flower, because Flower imports gRPC, and
`glasu.pki.tls` must require TLS 1.3 before gRPC is imported.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from importlib.metadata import entry_points
from types import FrameType
from typing import NoReturn

from glasu.errors import TransportError


def end_with_parent() -> None:
    """Wait until the other end of standard input is closed, then send SIGINT to this process."""
    while os.read(sys.stdin.fileno(), 1):
        pass
    os.kill(os.getpid(), signal.SIGINT)


def end_run(number: int, frame: FrameType | None) -> NoReturn:
    """Raise an error.

    A server sends the error to the parties. Without it they would wait for the server, which Flower does not restart.
    """
    raise TransportError(
        "Flower ended this run, or the process that ran it. The last checkpoint is kept; `flwr run` with the same "
        "session resumes from it."
    )


def main() -> int:
    """Run the installed `glasu` command with the arguments of this process."""
    signal.signal(signal.SIGINT, end_run)
    threading.Thread(target=end_with_parent, name="glasu-parent", daemon=True).start()
    (command,) = entry_points(group="console_scripts", name="glasu")
    code: int = command.load()()
    return code


if __name__ == "__main__":
    sys.exit(main())
