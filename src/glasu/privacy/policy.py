"""The policy of a party, written in policy.toml: the releases that it forbids, and limits for all other releases.

The policy is a ledger rule, so it checks every release before the release is recorded and its bytes are sent. Limits
apply to the whole ledger, including earlier runs and repeated rounds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

import numpy as np

from glasu.errors import GlasuError
from glasu.records import Bounds, Checked
from glasu.wire.tensor_kinds import TENSOR_KINDS

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from glasu.privacy.ledger import Entry

# For an auditor: what a release of each kind contains.
RELEASE_KINDS: Mapping[str, str] = {
    "representation": "numbers that a party's layers compute from its features and edges, one row per node",
    "change": "the change of representations since their last release, one row per node",
    "gradient": "derivatives of the loss, one row per node; at a party with labels they depend on the labels",
    "probabilities": "class probabilities, or predicted numbers, one row per node",
    "node sets": "which nodes take part in a round, or were requested; no features and no labels",
    "losses": "the mean loss of each training step",
    "metrics": "scores of the model, such as its accuracy",
    "alpha": "one setting of the smoothed prediction",
    "situation": "three figures about the data, from which a preset chooses settings",
    "key": "keys of masks or ckks: public keys, and keys that are encrypted for the other parties",
    "proof": "an HMAC with which the parties compare the server's answers at the end of a training run",
    "verdict": "two flags that the server reads (whether training stops, and whether the best model is the average of "
    "the parties), and either an HMAC of the scores or the label owner's encrypted verdict",
    "set size": "the number of ids of the party",
    "key share": "a part of the key that the parties agree on",
    "blinded ids": "ids as points of an elliptic curve, blinded by a secret of each party that forwarded them",
}
if TYPE_CHECKING:
    ReleaseKind: TypeAlias = str
else:  # the reader of policy.toml refuses other names
    ReleaseKind = Literal[tuple(RELEASE_KINDS)]
ProtectionName: TypeAlias = Literal[
    "clip",
    "noise",
    "repair",
    "masks",
    "blind",
    "ckks",
    "sealed",
    "signed",
    "hmac",
    "blinded",
]
NODE_KINDS = tuple(TENSOR_KINDS)  # kinds with one row per node
INFERENCES = ("evaluation", "prediction")  # the phases that `max_evaluations` counts
Limit = Annotated[int, Bounds(0, 2**53)]
UNNAMED = "the policy"
CHANGE_RUN = "change the settings of the run, or the policy"
CHANGE_POLICY = (
    "change the policy: a prediction has no settings to change, and limits also count the releases and evaluations of "
    "the training in this ledger"
)


class PolicyError(GlasuError):
    """The policy of a party forbids a release, or settings that lead to such a release."""

    code = "forbidden_by_policy"


@dataclass(frozen=True, kw_only=True)
class Policy(Checked):
    """The content of policy.toml. A limit that is None does not apply."""

    section = "policy"
    forbid: tuple[ReleaseKind, ...] = ()
    require: Mapping[ReleaseKind, tuple[ProtectionName, ...]] = field(default_factory=dict)
    min_rows: Limit | None = None  # for releases with one row per node
    max_rows: Limit | None = None  # for releases with one row per node
    max_releases_per_row: Limit | None = None  # for each kind and layer
    max_evaluations: Limit | None = None  # evaluations, the final test and predictions
    max_ids: Limit | None = None  # the largest set of ids that any party may have in an alignment

    def check_settings(self, protections: Mapping[str, str], num_evaluations: int = 0, source: str = UNNAMED) -> None:
        """Refuse settings with which the policy would stop the run later.

        Args:
            protections: for every kind that the run will release, the protection that the ledger will record.
            num_evaluations: the minimum number of evaluations of the run.
            source: names the policy in errors.
        """
        for kind, protection in protections.items():
            if why := self.find_fault(kind, protection):
                raise self.make_error(source, why, "the settings of this run")
        if self.max_evaluations is not None and num_evaluations > self.max_evaluations:
            needed = f"the run needs at least {num_evaluations} evaluations, including its test"
            why = f"max_evaluations = {self.max_evaluations}: {needed}"
            raise self.make_error(source, why, "the settings of this run")

    def check_set_size(self, size: int, source: str) -> None:
        """Refuse an alignment in which this party's set of ids is too large."""
        if self.max_ids is not None and size > self.max_ids:
            raise self.make_error(source, f"max_ids = {self.max_ids}: this party has {size} ids", "this alignment")

    def find_fault(self, kind: str, protection: str) -> str | None:
        """Return the rule of the policy that a kind of release breaks, or None."""
        if kind in self.forbid:
            return f"forbid = [{kind!r}]: this kind must not be released"
        names = self.require.get(kind, ())
        if not set(names) <= set(protection.split("+")):
            return f"require.{kind} = {list(names)}: its protection is {protection!r}"
        return None

    def make_error(self, source: str, why: str, what: str, remedy: str = CHANGE_RUN) -> PolicyError:
        """Return the error for a broken rule.

        Args:
            source: names the policy.
            why: the rule, and the value that breaks it.
            what: the release or the settings that are refused.
            remedy: what the user can do.
        """
        return PolicyError(f"{source}: {why}; refused {what}. To continue, {remedy}.", f"its policy: {why}; {remedy}.")


class PolicyRule:
    """Applies a policy to the releases of a ledger."""

    def __init__(self, policy: Policy, source: str = UNNAMED) -> None:
        """Count from zero; `source` names the policy in errors."""
        self.policy, self._source = policy, source
        self._inferences: set[tuple[Any, ...]] = set()
        self._per_node: dict[tuple[str, int], NDArray[np.int64]] = {}
        # The number of releases whose nodes are unknown. Such a release counts for all nodes.
        self._everywhere: dict[tuple[str, int], int] = {}

    def check(self, entry: Entry) -> None:
        """Raise PolicyError if the policy forbids a release. A release without content is always allowed."""
        if entry.size == 0:
            return
        found = self.policy.find_fault(entry.kind, entry.protection) or self._find_limit(entry)
        if found is not None:
            layer = f", layer {entry.layer}" if entry.layer >= 0 else ""
            what = f"a release of {entry.kind} ({entry.phase} round {entry.round}{layer}); nothing was sent"
            remedy = CHANGE_POLICY if entry.phase == "prediction" else CHANGE_RUN
            raise self.policy.make_error(self._source, found, what, remedy)

    def _find_limit(self, entry: Entry) -> str | None:
        """Return the limit that a release exceeds, or None."""
        policy, rows = self.policy, entry.rows
        if entry.kind == "blinded ids" and policy.max_ids is not None and rows > policy.max_ids:
            return f"max_ids = {policy.max_ids}: the set has {rows} ids"
        if entry.kind not in NODE_KINDS:
            return None
        if policy.min_rows is not None and rows < policy.min_rows:
            return f"min_rows = {policy.min_rows}: it has {rows} rows"
        if policy.max_rows is not None and rows > policy.max_rows:
            return f"max_rows = {policy.max_rows}: it has {rows} rows"
        inferences = len(self._inferences | self._list_inferences(entry))
        if policy.max_evaluations is not None and inferences > policy.max_evaluations:
            return f"max_evaluations = {policy.max_evaluations}: this would be evaluation {inferences}"
        most = policy.max_releases_per_row
        if most is not None and (before := self._count_releases(entry)) >= most:
            return f"max_releases_per_row = {most}: one of its rows was released {before} times before"
        return None

    def add(self, entry: Entry) -> None:
        """Count a release that was recorded."""
        if entry.kind not in NODE_KINDS or entry.size == 0:
            return
        self._inferences |= self._list_inferences(entry)
        if self.policy.max_releases_per_row is None:
            return
        place, nodes = (entry.kind, entry.layer), entry.unpack_nodes()
        if nodes is None:
            self._everywhere[place] = self._everywhere.get(place, 0) + 1
        elif len(nodes):
            counts = self._per_node.get(place, np.zeros(0, np.int64))
            if len(counts) <= nodes[-1]:
                counts = np.concatenate([counts, np.zeros(int(nodes[-1]) + 1 - len(counts), np.int64)])
            counts[nodes] += 1
            self._per_node[place] = counts

    def _count_releases(self, entry: Entry) -> int:
        """Return how often the most frequently released row of this entry was released before."""
        place, nodes = (entry.kind, entry.layer), entry.unpack_nodes()
        counts = self._per_node.get(place, np.zeros(0, np.int64))
        known = counts if nodes is None else counts[nodes[nodes < len(counts)]]
        return int(known.max(initial=0)) + self._everywhere.get(place, 0)

    @staticmethod
    def _list_inferences(entry: Entry) -> set[tuple[Any, ...]]:
        """Return a set with the evaluation or prediction that an entry belongs to; the set is empty in other phases."""
        if entry.phase not in INFERENCES:
            return set()
        return {(entry.phase, entry.run, entry.incarnation, entry.attempt, entry.round)}
