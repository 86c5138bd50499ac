"""Kits whose secrets the tests know, and simulations with these secrets.

A served run has the bits of such a simulation.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from glasu.config import RunConfig
from glasu.data.party import PartyData
from glasu.pki.kit import CA, CERTIFICATE, MANIFEST
from glasu.pki.pins import add_pins
from glasu.pki.provision import provision
from glasu.pki.request import make_request
from glasu.pki.secret_file import SECRET
from glasu.pki.signing import sign_requests
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


def make_pinned_kits(out: Path, names: Sequence[str], hosts: Sequence[str] = ("localhost",)) -> None:
    """Make kits whose keys the parties made themselves, with known secrets, and pin all keys everywhere."""
    requests = [make_request(out / name, name) for name in names]
    signed = sign_requests(out / "ca", [Path(request.source) for request in requests], hosts)
    for party in signed:
        for file in (CA, CERTIFICATE, MANIFEST):
            shutil.copy(party.folder / file, out / party.name / file)
        others = {other.name: other.key_fingerprint for other in signed if other.name != party.name}
        add_pins(out / party.name, party.name, others)
    shutil.copytree(out / "ca" / "server", out / "server")
    for name, secret in secrets_of(names).items():
        write_secret(out / name, secret)
