"""policy.toml: the policy of a party, in the folder of its data or in its kit. Torch is not loaded here."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from glasu.errors import ConfigError
from glasu.privacy.policy import Policy, PolicyRule
from glasu.records import RecordError, parse_toml, read_record

POLICY = "policy.toml"


@dataclass(frozen=True)
class PolicyFile:
    """A policy and its file."""

    path: Path
    policy: Policy
    digest: str  # SHA-256 of the file

    def rule(self) -> PolicyRule:
        """Return the rule that applies the policy to a ledger."""
        return PolicyRule(self.policy, str(self.path))


def read_policy(path: Path) -> PolicyFile:
    """Read and check a policy file; raise one ConfigError that lists all faults."""
    try:
        content = path.read_bytes()
        policy = read_record(Policy, parse_toml(content, str(path)), str(path))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); give the policy file of this party.") from None
    except RecordError as error:
        raise ConfigError(str(error)) from None
    return PolicyFile(path, policy, hashlib.sha256(content).hexdigest())


def find_policy(given: Path | None, *folders: Path) -> PolicyFile | None:
    """Return the policy of a party: the given file, or policy.toml in one of the folders; None if there is none."""
    if given is not None:
        return read_policy(given)
    found = [path for folder in folders if (path := folder / POLICY).is_file()]
    if len(found) > 1:
        raise ConfigError(
            f"{found[0]} and {found[1]}: a party has one policy; remove one of the two files, or choose one with "
            "--policy."
        )
    return read_policy(found[0]) if found else None


def find_policies(given: Path | None, folders: Sequence[str | Path], names: Sequence[str]) -> dict[str, PolicyFile]:
    """Return the policies of all parties in one process: the given policy for all, or the policy in each folder.

    Args:
        given: the file of --policy.
        folders: the folders of the parties; empty if the parties have no folders.
        names: the names of the parties, in the same order.
    """
    if given is not None:
        return dict.fromkeys(names, read_policy(given))
    found = {name: find_policy(None, Path(folder)) for folder, name in zip(folders, names, strict=False)}
    return {name: policy for name, policy in found.items() if policy is not None}
