"""A glasu command that ends with whoever started it: python -m glasu.integrations.flower.child_process join ...

Its standard input says nothing and is closed when its parent is gone, however that went. Nothing of Flower is loaded
here: Flower loads gRPC, and a kit's streams need a gRPC that was told beforehand to speak TLS 1.3 only.
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
    """Wait until nobody holds the other end of standard input, then end as by SIGINT."""
    while os.read(sys.stdin.fileno(), 1):
        pass
    os.kill(os.getpid(), signal.SIGINT)


def end_the_run(number: int, frame: FrameType | None) -> NoReturn:
    """End with an error that a server tells its parties: Flower starts none of them again, so none is to wait."""
    raise TransportError(
        "Flower ended this run, or the process that ran it; everything up to the last checkpoint is kept. `flwr run` "
        "with the same session goes on."
    )


def main() -> int:
    """Run the command as it is installed."""
    signal.signal(signal.SIGINT, end_the_run)
    threading.Thread(target=end_with_parent, name="glasu-parent", daemon=True).start()
    (command,) = entry_points(group="console_scripts", name="glasu")
    code: int = command.load()()
    return code


if __name__ == "__main__":
    sys.exit(main())
