"""A glasu command that ends with whoever started it: python -m glasu.runtime.flower.tied join ...

Its standard input says nothing and is closed when its parent is gone, however that went. Nothing of Flower is loaded
here: Flower loads gRPC, and a kit's streams need a gRPC that was told beforehand to speak TLS 1.3 only.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from importlib.metadata import entry_points


def end_with_parent() -> None:
    """Wait until nobody holds the other end of standard input, then end as by SIGTERM: resumable."""
    while os.read(sys.stdin.fileno(), 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


def main() -> int:
    """Run the command as it is installed."""
    threading.Thread(target=end_with_parent, name="glasu-parent", daemon=True).start()
    (command,) = entry_points(group="console_scripts", name="glasu")
    code: int = command.load()()
    return code


if __name__ == "__main__":
    sys.exit(main())
