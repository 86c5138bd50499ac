"""Settings of the Flower apps: the run config configures the server, the node config configures a party.

A message to a party contains the name of the session and the id of the run. The name becomes a subfolder of the party's
output folder. The party joins only the run with this id.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from glasu.errors import ConfigError
from glasu.records import Bounds, Length, read_record

Value = bool | float | int | str
Text = Annotated[str, Length(4096, least=1)]
PositiveSeconds = Annotated[float, Bounds(0, ends="(]")]
NAME_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclass(frozen=True)
class Session:
    """The contents of the message to a party."""

    name: str
    run: str  # sent because a node may receive a message late, when another run uses the same address

    def __post_init__(self) -> None:
        _check_name(self.name)
        if not re.fullmatch(r"[0-9a-f]+", self.run):
            raise ConfigError(f"run={self.run!r}: is not the id of a run; use the same version of GLASU everywhere.")


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """Arguments of `glasu serve`. Paths refer to the machine of the ServerApp."""

    session: str
    run: Text  # the run file
    listen: Text
    kit: Text
    out: Text
    wait: PositiveSeconds = 600.0
    set: str = ""  # overrides, separated by spaces

    def __post_init__(self) -> None:
        _check_name(self.session)

    @classmethod
    def read(cls, config: Mapping[str, Value]) -> ServerSettings:
        """Read the run config, which comes from pyproject.toml and `flwr run`."""
        return read_record(cls, config, "the run's config")

    @property
    def folder(self) -> Path:
        """The output folder of the session."""
        return Path(self.out) / self.session

    def build_command(self) -> list[str]:
        """Return the arguments of the command."""
        words = ["serve", self.run, "--listen", self.listen, "--kit", self.kit, "--out", str(self.folder)]
        changes = [word for override in shlex.split(self.set) for word in ("--set", override)]
        return [*words, "--wait", str(self.wait), *changes]


@dataclass(frozen=True, kw_only=True)
class PartySettings:
    """Arguments of `glasu join`. Paths refer to the machine of the SuperNode."""

    party: Text
    server: Text
    kit: Text
    out: Text
    session: Session
    expect: str | None = None
    missing: str | None = None
    wait: PositiveSeconds | None = None

    @classmethod
    def read(cls, config: Mapping[str, Value], message: Mapping[str, object]) -> PartySettings:
        """Read the settings from the node config of the SuperNode. Only the session is read from the message."""
        session = {key: message[key] for key in ("name", "run") if key in message}
        return read_record(cls, {**config, "session": session}, "--node-config")

    @property
    def folder(self) -> Path:
        """The output folder of the session."""
        return Path(self.out) / self.session.name

    def build_command(self) -> list[str]:
        """Return the arguments of the command."""
        words = ["join", self.party, "--server", self.server, "--kit", self.kit, "--out", str(self.folder)]
        words += ["--run", self.session.run]
        for key, value in (("expect", self.expect), ("missing", self.missing), ("wait", self.wait)):
            words += [] if value is None else [f"--{key}", str(value)]
        return words


def _check_name(name: str) -> None:
    """Refuse an invalid name of a session, because the name becomes a folder at every party."""
    if not NAME_PATTERN.fullmatch(name):
        raise ConfigError(
            f"session={name!r}: must have 1 to 64 letters, digits, dots, dashes and underscores, and start with a "
            "letter or digit. A new name starts a new training; the name of an earlier training resumes it."
        )
