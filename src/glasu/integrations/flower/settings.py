"""Settings of the Flower apps: the run config configures the server, the node config configures a party.

A message to a party contains the name of the session, which becomes a subfolder of its output folder, and the id of the
run. The party joins no other run.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from glasu.errors import ConfigError

Value = bool | float | int | str
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclass(frozen=True)
class ServerSettings:
    """Arguments of `glasu serve`. Paths belong to the machine of the ServerApp."""

    session: str
    run_file: str
    listen: str
    kit: Path
    out: Path
    wait: float
    overrides: tuple[str, ...]

    @classmethod
    def read(cls, config: Mapping[str, Value]) -> ServerSettings:
        """Read the run config, which comes from pyproject.toml and `flwr run`."""
        known = ("session", "run", "listen", "kit", "out", "wait", "set")
        _refuse_unknown(config, known, "the run's config")
        text = _read_texts(config, ("session", "run", "listen", "kit", "out"), "the run's config")
        return cls(
            session=check_session(text["session"]),
            run_file=text["run"],
            listen=text["listen"],
            kit=Path(text["kit"]),
            out=Path(text["out"]) / text["session"],
            wait=_read_seconds(config.get("wait", 600.0)),
            overrides=tuple(shlex.split(str(config.get("set", "")))),
        )

    def build_command(self) -> list[str]:
        """Return the arguments of the command."""
        words = ["serve", self.run_file, "--listen", self.listen, "--kit", str(self.kit), "--out", str(self.out)]
        changes = [word for override in self.overrides for word in ("--set", override)]
        return [*words, "--wait", str(self.wait), *changes]


@dataclass(frozen=True)
class PartySettings:
    """Arguments of `glasu join`. Paths belong to the machine of the SuperNode."""

    party: str
    server: str
    kit: Path
    out: Path
    run: str  # a node may receive a message late, when another run uses the same address
    more: tuple[str, ...]

    @classmethod
    def read(cls, config: Mapping[str, Value], session: Mapping[str, object]) -> PartySettings:
        """Read the node config of the SuperNode and the session of the message."""
        required, optional = ("party", "server", "kit", "out"), ("expect", "missing", "wait")
        _refuse_unknown(config, (*required, *optional), "--node-config")
        text = _read_texts(config, required, "--node-config")
        return cls(
            party=text["party"],
            server=text["server"],
            kit=Path(text["kit"]),
            out=Path(text["out"]) / check_session(session.get("name")),
            run=_check_run_id(session.get("run")),
            more=tuple(word for key in optional if key in config for word in (f"--{key}", str(config[key]))),
        )

    def build_command(self) -> list[str]:
        """Return the arguments of the command."""
        words = ["join", self.party, "--server", self.server, "--kit", str(self.kit), "--out", str(self.out)]
        return [*words, "--run", self.run, *self.more]


def check_session(name: object) -> str:
    """Return a valid session name; refuse others, because the name becomes a folder at every party."""
    if not (isinstance(name, str) and NAME.fullmatch(name)):
        raise ConfigError(
            f"session={name!r}: must have 1 to 64 letters, digits, dots, dashes and underscores, and start with a "
            "letter or digit. A new name starts a new training; the same name resumes it."
        )
    return name


def _check_run_id(text: object) -> str:
    if not (isinstance(text, str) and re.fullmatch(r"[0-9a-f]+", text)):
        raise ConfigError(f"run={text!r}: is not the id of a run; use the same version of GLASU everywhere.")
    return text


def _read_texts(config: Mapping[str, Value], keys: Sequence[str], where: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for key in keys:
        value = config.get(key)
        if not (isinstance(value, str) and value.strip()):
            raise ConfigError(f"{key}={value!r}: must be set in {where}; it needs {', '.join(keys)}.")
        found[key] = value
    return found


def _read_seconds(value: Value) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        raise ConfigError(f"wait={value!r}: must be a number of seconds above 0.")
    return float(value)


def _refuse_unknown(config: Mapping[str, Value], known: Sequence[str], where: str) -> None:
    for key in config:
        if key not in known:
            raise ConfigError(f"{key}: is unknown in {where}; known are {', '.join(known)}.")
