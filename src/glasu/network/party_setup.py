"""A party's own part of a run: the settings resolved for its data, the memory they need, and its client."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from glasu.config import RunConfig, resolve
from glasu.data.alignment import check_parties
from glasu.data.methods import find_method
from glasu.data.party import PartyData
from glasu.data.party_name import check_party_name
from glasu.data.preprocessing import Preparation
from glasu.data.sources.catalog import choose_splits
from glasu.errors import DataError
from glasu.network.handshake import Code, RefusalError, WelcomePayload
from glasu.network.log_lines import MAX_REASON, make_printable
from glasu.privacy.masking import Signer
from glasu.protocol.client import Client
from glasu.protocol.limits import Limits
from glasu.runtime.memory import check_memory, read_total_memory
from glasu.secret import Secret
from glasu.timing import Clock, Stopwatch

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
            check_party_name(each)
    except DataError as error:
        raise RefusalError(Code.WRONG_ROSTER, f"the server's roster: {make_printable(error, MAX_REASON)}") from None
    if len(set(roster)) < len(roster):
        raise RefusalError(Code.WRONG_ROSTER, f"the server's roster ({listed}) lists a party twice.")
    if config.train.labels not in ("all", *roster):
        owner = make_printable(config.train.labels)
        why = f"train.labels={owner!r}: there is no such party; the server's roster is {listed}."
        raise RefusalError(Code.WRONG_ROSTER, why)


def resolve_for_party(config: RunConfig, party: PartyData, max_memory: int | None) -> tuple[RunConfig, PartyData]:
    """Return the settings resolved for this party's graph, and the party without labels that they do not use.

    Settings that need more than `max_memory` bytes (None: half of this machine's memory) are refused, before anything
    is allocated.
    """
    check_memory(config, [party], read_total_memory() // 2 if max_memory is None else max_memory, TOO_LARGE)
    labels = config.train.labels
    party = choose_splits(party, config.data.split, config.data_seed)
    if labels in ("all", party.name):
        check_parties([party], labels, config.train.task)
    else:
        party = dataclasses.replace(party, labels=None, classes=(), splits=None)
    return resolve(config, party.num_nodes)[0], party


def limit_messages(config: RunConfig, party: PartyData) -> Limits:
    """Return the maximum sizes of the messages that this party accepts.

    A party without labels does not know the number of classes. If predictions are averaged, it receives class
    probabilities and accepts up to MAX_UNKNOWN_CLASSES columns.
    """
    unknown = MAX_UNKNOWN_CLASSES if find_method(config).averages else 0
    return Limits.of_run(config, party.num_nodes, len(party.classes) or unknown, config.data.num_clients)


def build_client(
    config: RunConfig,
    party: PartyData,
    index: int,
    roster: Sequence[str],
    clock: Clock,
    preparation: Preparation | None = None,
    secret: Secret | None = None,
    signer: Signer | None = None,
) -> Client:
    """Build a party's client with its initial weights.

    Args:
        config: resolved.
        party: the party's data, as `resolve_for_party` returned it.
        index: the party's position in the roster.
        roster: the parties in client order.
        clock: measures its computing time.
        preparation: the preparation of the features of a trained model; None: fit it to the data.
        secret: the secret of the party; None if the client neither trains nor sends.
        signer: signs the keys on which the parties agree.
    """
    return Client(
        config,
        party,
        index=index,
        names=roster,
        watch=Stopwatch(clock),
        preparation=preparation,
        secret=secret,
        signer=signer,
    )
