"""Kits whose secrets the tests know, and simulations with these secrets.

A served run has the bits of such a simulation.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from glasu.config import RunConfig
from glasu.data.party import PartyData
from glasu.pki.provision import provision
from glasu.pki.secret_file import SECRET
from glasu.runtime.simulation import Simulation
from support.tiny import simulate


def secrets_of(names: Iterable[str]) -> dict[str, bytes]:
    """Return the secret of each party in kits of `make_kits`."""
    return {name: hashlib.sha256(f"the secret of {name}".encode()).digest() for name in names}


def make_kits(out: Path, names: Sequence[str], hosts: Sequence[str] = ("localhost",)) -> None:
    """Make kits of a server and of parties with known secrets."""
    provision(out, names, hosts)
    for name, secret in secrets_of(names).items():
        write_secret(out / name, secret)


def write_secret(kit: Path, secret: bytes) -> None:
    """Write the secret of a party, as it writes it itself at its first use."""
    path = kit / SECRET
    path.write_text(secret.hex() + "\n")
    path.chmod(0o600)


def simulate_with_secrets(parties: Sequence[PartyData], config: RunConfig, **options: Any) -> Simulation:
    """Simulate a run with the secrets of the parties in kits of `make_kits`."""
    return simulate(parties, config, secrets=secrets_of(party.name for party in parties), **options)
