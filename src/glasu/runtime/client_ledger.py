"""Give a client its ledger file and its policy. Settings that the policy forbids are refused at once."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from glasu.protocol.released_kinds import count_evaluations, list_protections
from glasu.runtime.ledger_file import open_ledger

if TYPE_CHECKING:
    from glasu.protocol.client import Client
    from glasu.runtime.policy_file import PolicyFile


def check_training(client: Client, policy: PolicyFile | None) -> None:
    """Refuse a training in which the policy would forbid a release later."""
    if policy is not None:
        policy.policy.check_settings(list_protections(client), count_evaluations(client), str(policy.path))


def attach_ledger(client: Client, path: Path | None, policy: PolicyFile | None = None, *, durable: bool = True) -> None:
    """Enter the releases of a client in a file, and apply the policy to them.

    Args:
        client: the client.
        path: of the ledger; None: only in memory.
        policy: of the party.
        durable: whether every sync waits for the disk.
    """
    gate, rules = client.release, [*client.release.rules]
    if policy is not None:
        rules.append(policy.rule())
        gate.enters_nodes |= policy.policy.max_releases_per_row is not None
    digest = "" if policy is None else policy.digest
    if path is None:
        gate.ledger.rules, gate.ledger.policy = rules, digest
    else:
        gate.ledger = open_ledger(path, client.name, rules, policy=digest, durable=durable)
