"""The ledger and the policy of a party in an alignment. Torch is not loaded here."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from glasu.privacy.ledger import Ledger
from glasu.protocol.alignment import SetLimits
from glasu.runtime.ledger_file import LEDGER, open_ledger
from glasu.runtime.policy_file import PolicyFile


def open_alignment_ledger(folder: Path, party: str, num_ids: int, policy: PolicyFile | None) -> Ledger:
    """Open the ledger next to a party's tables. Refuse a set of ids that the policy forbids.

    Args:
        folder: the folder of the tables.
        party: the owner of the ledger.
        num_ids: the number of ids of the party.
        policy: the policy of the party, if there is one.
    """
    if policy is None:
        return open_ledger(folder / LEDGER, party)
    policy.policy.check_set_size(num_ids, str(policy.path))
    return open_ledger(folder / LEDGER, party, [policy.rule()], policy=policy.digest)


def limit_sets(limits: SetLimits, policy: PolicyFile | None) -> SetLimits:
    """Return the limits of the command. If the policy allows fewer ids, its limit replaces `max_ids`."""
    most = None if policy is None else policy.policy.max_ids
    return limits if most is None else replace(limits, max_ids=max(1, min(limits.max_ids, most)))
