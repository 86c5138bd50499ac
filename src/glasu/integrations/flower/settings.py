"""What a Flower app is told: the server by the run's config, a party by its own node's config and nothing else.

A message brings the session's name, which becomes the name of a folder below the party's own, and the id of the run
that it opens, so that the party takes part in no other.
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
    """How the ServerApp runs `glasu serve`; paths are those of the machine that the ServerApp runs on."""

    session: str
    run_file: str
    listen: str
    kit: Path
    out: Path
    wait: float
    overrides: tuple[str, ...]

    @classmethod
    def read(cls, config: Mapping[str, Value]) -> ServerSettings:
        """Check what `flwr run` was given, and the app's pyproject.toml."""
        known = ("session", "run", "listen", "kit", "out", "wait", "set")
        _refuse_unknown(config, known, "the run's config")
        text = _texts(config, ("session", "run", "listen", "kit", "out"), "the run's config")
        return cls(
            session=check_session(text["session"]),
            run_file=text["run"],
            listen=text["listen"],
            kit=Path(text["kit"]),
            out=Path(text["out"]) / text["session"],
            wait=_seconds(config.get("wait", 600.0)),
            overrides=tuple(shlex.split(str(config.get("set", "")))),
        )

    def words(self) -> list[str]:
        """Return the command."""
        words = ["serve", self.run_file, "--listen", self.listen, "--kit", str(self.kit), "--out", str(self.out)]
        changes = [word for override in self.overrides for word in ("--set", override)]
        return [*words, "--wait", str(self.wait), *changes]


@dataclass(frozen=True)
class PartySettings:
    """How a ClientApp runs `glasu join`; paths are those of the machine that the SuperNode runs on."""

    party: str
    server: str
    kit: Path
    out: Path
    run: str  # a node may come to a message late, when another session is under way at the same address
    more: tuple[str, ...]

    @classmethod
    def read(cls, config: Mapping[str, Value], session: Mapping[str, object]) -> PartySettings:
        """Check what the SuperNode was started with, and which session the message opens."""
        required, optional = ("party", "server", "kit", "out"), ("expect", "missing", "wait")
        _refuse_unknown(config, (*required, *optional), "--node-config")
        text = _texts(config, required, "--node-config")
        return cls(
            party=text["party"],
            server=text["server"],
            kit=Path(text["kit"]),
            out=Path(text["out"]) / check_session(session.get("name")),
            run=_run_id(session.get("run")),
            more=tuple(word for key in optional if key in config for word in (f"--{key}", str(config[key]))),
        )

    def words(self) -> list[str]:
        """Return the command."""
        words = ["join", self.party, "--server", self.server, "--kit", str(self.kit), "--out", str(self.out)]
        return [*words, "--run", self.run, *self.more]


def check_session(name: object) -> str:
    """Return the name of a session, or refuse it: it becomes a folder at every party."""
    if not (isinstance(name, str) and NAME.fullmatch(name)):
        raise ConfigError(
            f"session={name!r}: name the session with up to 64 letters, digits, dots, dashes, underscores, the first "
            "a letter or digit; a new name begins a new training, the same name goes on with it."
        )
    return name


def _run_id(text: object) -> str:
    if not (isinstance(text, str) and re.fullmatch(r"[0-9a-f]+", text)):
        raise ConfigError(f"run={text!r}: is not the id of a run; have server and party the same version of GLASU?")
    return text


def _texts(config: Mapping[str, Value], keys: Sequence[str], where: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for key in keys:
        value = config.get(key)
        if not (isinstance(value, str) and value.strip()):
            raise ConfigError(f"{key}={value!r}: must be set in {where}; it needs {', '.join(keys)}.")
        found[key] = value
    return found


def _seconds(value: Value) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        raise ConfigError(f"wait={value!r}: must be a number of seconds above 0.")
    return float(value)


def _refuse_unknown(config: Mapping[str, Value], known: Sequence[str], where: str) -> None:
    for key in config:
        if key not in known:
            raise ConfigError(f"{key}: is not known in {where}; known are: {', '.join(known)}.")
