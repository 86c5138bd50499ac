"""Prepare a party for a run: check its place in the roster, and resolve the settings and limits for its data."""

from __future__ import annotations

import dataclasses

from glasu.config import RunConfig, resolve
from glasu.data.alignment import check_parties
from glasu.data.methods import find_method
from glasu.data.party import PartyData
from glasu.data.party_name import check_member_name
from glasu.data.sources.catalog import choose_splits
from glasu.errors import DataError
from glasu.network.handshake import Code, RefusalError, WelcomePayload
from glasu.network.log_lines import MAX_REASON, make_printable
from glasu.protocol.limits import Limits
from glasu.runtime.memory import check_memory, read_total_memory

MAX_UNKNOWN_CLASSES = 4096
TOO_LARGE = (
    "this party allows {limit}. Ask the server's operator for smaller values, or raise the limit with --max-memory."
)


def check_place(name: str, offered: WelcomePayload, config: RunConfig) -> None:
    """Refuse a roster that has invalid names, lists this party under another name, or does not fit the settings."""
    roster, index, num_clients = offered.roster, offered.index, config.data.num_clients
    listed = make_printable(", ".join(roster), MAX_REASON)
    if len(roster) != num_clients or index >= num_clients:
        raise RefusalError(
            Code.WRONG_ROSTER,
            f"the server's roster ({listed}; this party is number {index}) does not fit its settings, "
            f"data.num_clients={num_clients}; all parties must see the same roster.",
        )
    if roster[index] != name:
        raise RefusalError(
            Code.WRONG_ROSTER,
            f"the server's roster ({listed}) lists this party as {make_printable(roster[index])!r}, the "
            f"name in its certificate; use the kit of {name!r}.",
        )
    try:
        for each in roster:
            check_member_name(each)
    except DataError as error:
        raise RefusalError(Code.WRONG_ROSTER, f"the server's roster: {make_printable(error, MAX_REASON)}") from None
    if len(set(roster)) < len(roster):
        raise RefusalError(Code.WRONG_ROSTER, f"the server's roster ({listed}) lists a party twice.")
    if config.train.label_owner not in (None, *roster):
        owner = make_printable(config.train.labels)
        why = f"train.labels={owner!r}: there is no such party; the server's roster is {listed}."
        raise RefusalError(Code.WRONG_ROSTER, why)


def find_memory_limit(max_memory: int | None) -> int:
    """Return how many bytes a model may use at this party: `max_memory`, or half of the machine's memory."""
    return read_total_memory() // 2 if max_memory is None else max_memory


def resolve_for_party(config: RunConfig, party: PartyData, max_memory: int | None) -> tuple[RunConfig, PartyData]:
    """Return the settings resolved for this party's graph, and the party. Labels that are not used are removed.

    Settings that require too much memory (`find_memory_limit`) are refused before anything is allocated.
    """
    check_memory(config, [party], find_memory_limit(max_memory), TOO_LARGE)
    owner = config.train.label_owner
    party = choose_splits(party, config.data.split, config.data_seed)
    if owner in (None, party.name):
        check_parties([party], owner, config.train.task, config.data.split)
    else:
        party = dataclasses.replace(party, labels=None, classes=(), splits=None)
    return resolve(config, party.num_nodes)[0], party


def limit_messages(config: RunConfig, party: PartyData) -> Limits:
    """Return the limits for the sizes of messages that this party accepts.

    A party without labels does not know the number of classes. If predictions are averaged, the party receives class
    probabilities, and accepts up to MAX_UNKNOWN_CLASSES columns.
    """
    unknown = MAX_UNKNOWN_CLASSES if find_method(config).averages else 0
    return Limits.of_run(config, party.num_nodes, len(party.classes) or unknown, config.data.num_clients)
