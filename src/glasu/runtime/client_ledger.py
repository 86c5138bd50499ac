"""Attach ledger files and policies to clients. Refuse settings that a policy or `privacy.target_epsilon` forbids."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from glasu.files import OTHER_COMMAND, hold_folder
from glasu.privacy.accounting import Accountant
from glasu.protocol.released_kinds import count_evaluations, list_protections, list_row_releases
from glasu.runtime.ledger_file import keep_run, open_ledger

if TYPE_CHECKING:
    from glasu.protocol.client import Client
    from glasu.runtime.policy_file import PolicyFile


def check_training(client: Client, policy: PolicyFile | None) -> None:
    """Refuse a training run in which the policy or `privacy.target_epsilon` would forbid a later release."""
    for rule in client.release.rules:
        if isinstance(rule, Accountant):
            for multipliers in list_row_releases(client):
                rule.check_plan(multipliers)
    if policy is not None:
        policy.policy.check_settings(list_protections(client), count_evaluations(client), str(policy.path))


def attach_ledger(client: Client, path: Path | None, policy: PolicyFile | None = None, *, durable: bool = True) -> None:
    """Record the releases of a client in a file, and apply the policy to them.

    Args:
        client: the client.
        path: the path of the ledger; None: keep it in memory.
        policy: the policy of the party, if there is one.
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


@contextmanager
def keep_ledgers(
    clients: Sequence[Client],
    folder: Path | None,
    policies: Mapping[str, PolicyFile],
    purpose: str,
    *,
    fresh: bool = False,
) -> Iterator[None]:
    """Attach a ledger and a policy to every client of one process while the block runs.

    The folder is locked, because two commands at the same time would break the chains of the ledgers.

    Args:
        clients: all clients.
        folder: the folder of the ledgers; None: keep them in memory.
        policies: the policies, by party.
        purpose: training or prediction.
        fresh: whether an unfinished run with the same id starts over.
    """
    with nullcontext() if folder is None else hold_folder(folder, OTHER_COMMAND):
        for client in clients:
            path = None if folder is None else folder / f"{client.name}.jsonl"
            # No message leaves this process, so no round waits for the disk.
            attach_ledger(client, path, policies.get(client.name), durable=False)
        with keep_run({client.name: client.release.ledger for client in clients}):
            for client in clients:
                client.release.ledger.begin(purpose, client.identity.run.hex(), client.requested.digest(), fresh=fresh)
            yield


def sync_ledgers(clients: Sequence[Client]) -> None:
    """Write the ledger entries of all clients. This function is called before the clients' messages are delivered."""
    for client in clients:
        client.release.ledger.sync()
