"""A dry run of an alignment: check the optional package, and the number and normalisation of each party's ids.

No id is sent. The findings of a party contain the number of its ids. An alignment reveals this number as well.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from glasu.data.folders import read_normalized_ids
from glasu.errors import GlasuError
from glasu.network.doctor.machine import check_group, explain_error
from glasu.network.doctor.party import DryRunParty
from glasu.network.facts import Facts, collect_server_facts
from glasu.network.findings import Finding
from glasu.network.options import JoinOptions
from glasu.network.purposes import ALIGNMENT_DRY_RUN


def check_ids(folder: Path, max_ids: int, log: logging.Logger) -> tuple[Finding, str | None]:
    """Check that the ids of a party can be aligned. Return the finding, and the rules that normalise the ids.

    Args:
        folder: the folder of the party.
        max_ids: the maximum number of ids.
        log: the log of this party; receives the complete error.
    """
    try:
        manifest, ids = read_normalized_ids(folder)
    except GlasuError as error:
        return explain_error("ids", error, log, "its ids cannot be aligned; see that party's log"), None
    rules = str(manifest.id_rules)
    if len(ids) > max_ids:
        return Finding("ids", "bad", f"{len(ids)} ids, but --max-ids here is {max_ids}; raise it everywhere"), rules
    return Finding("ids", "good", f"{len(ids)} different ids, none of them empty; rules: {rules}"), rules


class AlignmentDryRunParty(DryRunParty):
    """A party in a dry run of an alignment."""

    purpose = ALIGNMENT_DRY_RUN

    def __init__(self, options: JoinOptions, max_ids: int, own: Sequence[Finding] = ()) -> None:
        """Check the ids in the party's folder, `options.out`."""
        finding, self._rules = check_ids(options.out, max_ids, options.log)
        super().__init__(options, None, (*own, check_group(options.log), finding))

    def facts(self) -> Facts:
        """Return the facts of this party. The only fact about its ids is how they are normalised."""
        return collect_server_facts(self.purpose, id_rules=self._rules)
