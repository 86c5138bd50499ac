"""Compare what must be equal before a run begins, and show a difference in two columns; torch is not loaded here."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from glasu.config import RunConfig, refuse_other_count
from glasu.errors import ConfigError
from glasu.network.sanitize import SENTENCES, printable
from glasu.protocol.message_bytes import VERSION
from glasu.wire.message_key import RUN_BYTES

Facts = Mapping[str, Any]
Purpose = Literal["training", "prediction"]
MISSING = "(nothing)"
BUILDS = {"torch build": "torch", "numpy build": "numpy"}  # what may differ, and is told; and of what it is the build
ORDER, SET, KIND = "ids (SHA-256)", "set of ids (SHA-256)", "kind of ids"
STATED = ("torch", KIND, ORDER, SET)  # what every party must state, besides what the server itself does
DIGEST = re.compile("[0-9a-f]{64}")
REMEDIES = {  # by the facts that differ; the first that fits is told
    ("purpose",): "train or predict everywhere, with --predict at all of them or at none",
    ("message format", "glasu", "numpy", "torch"): "install the same version everywhere",
    ("training",): "its --out belongs to another training; give the folder of the one with which the server predicts",
    (KIND,): "write the ids alike everywhere, or set id_type in party.toml",
    ("nodes", SET): "the sets of ids differ: list the common ones only, in one order, at all parties",
    (ORDER,): "the ids are the same, but in another order: list them in one order at all parties, for example sorted",
    ("classes", "class names (SHA-256)", "splits (SHA-256)"): "make labels and splits equal, or name one party in "
    "train.labels",
}


def differences(here: Facts, there: Facts) -> list[tuple[str, Any, Any]]:
    """Return (name, here, there) of what both state and state differently, though it must be equal."""
    both = [name for name in here if name in there and name not in BUILDS]
    return [(name, here[name], there[name]) for name in both if here[name] != there[name]]


def other_builds(here: Facts, there: Facts) -> list[tuple[str, Any, Any]]:
    """Return (package, here, there) of packages of one version that were built differently."""
    both = [name for name in BUILDS if name in here and name in there]
    return [(BUILDS[name], here[name], there[name]) for name in both if here[name] != there[name]]


def unstated(here: Facts, there: Facts) -> list[tuple[str, Any, Any]]:
    """Return (name, here, nothing) of what a party leaves out, though it must be compared."""
    return [(name, here.get(name, "asks for it"), None) for name in (*here, *STATED) if name not in there]


def other_settings(config: RunConfig, stated: Any) -> list[tuple[str, Any, Any]]:
    """Return (name, here, there) of the settings that a party states and that are others here."""
    here = json.loads(json.dumps(config.comparable()))
    return differences(here, stated if isinstance(stated, dict) else {})


def offered(settings: Any) -> RunConfig:
    """Read the settings that a server sends, or say in printable words what is wrong with them."""
    try:
        return RunConfig.from_dict(settings, "the server's settings")
    except ConfigError as error:
        raise ConfigError(printable(error, SENTENCES)) from None


def two_columns(rows: list[tuple[str, Any, Any]], left: str, right: str) -> list[str]:
    """Return a table with a heading, one line per difference."""
    cells = [("", left, right), *(tuple(map(_shown, row)) for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(3)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]


def in_one_line(rows: list[tuple[str, Any, Any]], left: str, right: str) -> str:
    """Return the differences as the end of a sentence."""
    shown = [map(_shown, row) for row in rows]
    return "; ".join(f"{name}: {left} {one}, {right} {other}" for name, one, other in shown)


def remedy(rows: list[tuple[str, Any, Any]]) -> str:
    """Return what to do about differences, as the end of a sentence; nothing where we do not know."""
    differing = {name for name, _, _ in rows}
    return next((f"; {advice}" for names, advice in REMEDIES.items() if differing & set(names)), "")


def _shown(value: Any) -> str:
    text = MISSING if value is None else printable(value, 64)
    return f"{text[:16]}.." if DIGEST.fullmatch(text) else text


def public_version(version: str) -> str:
    """Return a version without the name of its build, which may differ."""
    return version.partition("+")[0]


def names_digest(names: Sequence[str]) -> str:
    """Return the SHA-256 of names in their order."""
    return hashlib.sha256("\0".join(names).encode()).hexdigest()


def protocol_facts(versions: Mapping[str, str], purpose: Purpose) -> dict[str, Any]:
    """Return what the server and every party must have in common."""
    return {
        "purpose": purpose,
        "message format": VERSION,
        "glasu": versions["glasu"],
        "numpy": public_version(versions["numpy"]),
        "numpy build": versions["numpy"],
    }


def refuse_unfit_for_network(config: RunConfig) -> None:
    """Refuse settings that a run between organisations cannot have."""
    if config.train.method != "glasu":
        raise ConfigError(
            f"train.method={config.train.method!r}: needs the data of all parties in one place, or none of the others; "
            'over the network only "glasu" runs. Use glasu train.'
        )
    if not config.model.aggregation_layers:
        raise ConfigError(
            "model.aggregation_layers=[]: the parties would have nothing to say to each other; use glasu train."
        )
    if config.model.backbone == "custom":
        raise ConfigError('model.backbone="custom": a convolution of your own cannot be sent to the parties.')


def for_network(config: RunConfig, roster: Sequence[str]) -> RunConfig:
    """Return the settings that the server sends to the parties of the roster; refuse those that cannot be."""
    refuse_unfit_for_network(config)
    if config.train.labels not in ("all", *roster):
        raise ConfigError(
            f"train.labels={config.train.labels!r}: there is no such party; the roster is {', '.join(roster)}."
        )
    if config.data.num_clients != type(config.data).num_clients:  # it was asked for
        refuse_other_count(config.data.num_clients, len(roster), "the parties of the server's kit number")
    return config.replace(data={"num_clients": len(roster), "parties": (), "root": None})


def run_of_attempt(run: str, attempt: int) -> bytes:
    """Return the identity of one attempt at a prediction: nodes asked for anew are never sent under former keys."""
    return hashlib.sha256(f"{run} attempt {attempt}".encode()).digest()[:RUN_BYTES]
