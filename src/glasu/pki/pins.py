"""pins.toml: the fingerprints of peers' keys. People have compared these fingerprints over the telephone.

A CA could issue a second certificate for the name of a party, with another key. A pin detects this, because pins do not
come from the CA.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import tomli_w

from glasu.data.party_name import check_party_name
from glasu.errors import ConfigError, DataError
from glasu.files import write_atomically
from glasu.pki.fingerprint import format_fingerprint, parse_fingerprint
from glasu.pki.identity import SERVER_NAME
from glasu.records import RecordError, parse_toml, read_record, to_plain

PINS = "pins.toml"
PINS_SCHEMA = 1


@dataclass(frozen=True, kw_only=True)
class PinnedKeys:
    """The content of pins.toml."""

    schema: int = PINS_SCHEMA
    peers: Mapping[str, str] = field(default_factory=dict)  # fingerprints (hexadecimal digits) by name


def read_pins(folder: Path) -> dict[str, str]:
    """Return the pins of a kit by name; an empty dictionary if there is no file.

    Raises:
        ConfigError: the file cannot be read, or its content is not valid.
    """
    path = folder / PINS
    try:
        found = read_record(PinnedKeys, parse_toml(path.read_bytes(), str(path)), str(path))
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); restore it.") from None
    except RecordError as error:
        raise ConfigError(f"{str(error).rstrip('.')}; restore it, or pin again.") from None
    if found.schema != PINS_SCHEMA:
        raise ConfigError(f"{path}: schema={found.schema}, but this version reads {PINS_SCHEMA}; pin again.")
    return {name: parse_fingerprint(digits, f"{path}: {name}") for name, digits in found.peers.items()}


def add_pins(folder: Path, own: str, peers: Mapping[str, str]) -> dict[str, str]:
    """Record fingerprints of peers in a kit, and return all pins of the kit.

    Args:
        folder: the kit.
        own: the name in the kit.
        peers: fingerprints by name, as a person typed them.

    Raises:
        ConfigError: a name is the name in this kit, or is already pinned to another key.
    """
    pins = read_pins(folder)
    for name, text in peers.items():
        if name != SERVER_NAME:
            try:
                check_party_name(name)
            except DataError as error:
                raise ConfigError(f"--peers {name}={text}: {error}") from None
        if name == own:
            raise ConfigError(
                f"--peers {name}={text}: {name!r} is the name in this kit; pin the keys of the other parties."
            )
        digits, before = parse_fingerprint(text, f"--peers {name}"), pins.get(name, "")
        if not (digits.startswith(before) or before.startswith(digits)):
            raise ConfigError(
                f"--peers {name}: {format_fingerprint(digits)} is not the pinned key {format_fingerprint(before)}. "
                f"Compare it with {name} over the telephone; if the key has changed, remove its line in "
                f"{folder / PINS} first."
            )
        pins[name] = max(digits, before, key=len)
    content = tomli_w.dumps(to_plain(PinnedKeys(peers=dict(sorted(pins.items())))))
    write_atomically(folder / PINS, content.encode())
    return pins
