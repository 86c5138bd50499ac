"""secret.hex: the secret of a party, in the folder of its key. The secret is made at the party and never leaves it.

Private random draws are derived from the secret, see `glasu.protocol.client`. The secret is never part of a checkpoint,
report, log or error.
"""

from __future__ import annotations

import os
import re
import secrets
from pathlib import Path

from glasu.errors import TransportError
from glasu.files import name_file, sync_file, sync_folder
from glasu.secret import SECRET_BYTES, Secret

SECRET = "secret.hex"


def read_secret(folder: Path) -> Secret | None:
    """Return the secret of a kit; None if the kit has none yet.

    Raises:
        TransportError: other users can read the file, or it does not hold a secret.
    """
    path = folder / SECRET
    try:
        content, mode = path.read_bytes(), path.stat().st_mode & 0o777
    except FileNotFoundError:
        return None
    except OSError as error:
        raise TransportError(f"{path}: cannot be read ({error.strerror}); restore it.") from None
    if mode & 0o077:
        raise TransportError(f"{path}: other users may read it (mode {mode:o}); if none did, run: chmod 600 {path}")
    if not re.fullmatch(rb"[0-9a-f]{%d}\n?" % (2 * SECRET_BYTES), content):
        raise TransportError(f"{path}: does not hold {2 * SECRET_BYTES} hexadecimal digits; restore it.")
    return Secret(bytes.fromhex(content.decode()))


def make_secret(folder: Path) -> Secret:
    """Make the secret of a kit and return it. If the kit already has a secret, return it unchanged."""
    path, temporary = folder / SECRET, folder / f".{SECRET}.{secrets.token_hex(8)}"
    try:
        with name_file(path):
            handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(handle, "wb") as file:
                file.write(secrets.token_hex(SECRET_BYTES).encode() + b"\n")
            try:
                sync_file(temporary)
                os.link(temporary, path)  # fails if another process was faster; its secret is then used
            except FileExistsError:
                pass
            finally:
                temporary.unlink()
            sync_folder(folder)
    except OSError as error:
        raise TransportError(
            f"{path}: cannot be written ({error.strerror}); run `glasu provision secret KIT` once where the kit can be "
            "written."
        ) from None
    found = read_secret(folder)
    assert found is not None
    return found
