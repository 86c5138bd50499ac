"""Compare the facts and settings of all roles before a run begins. Torch is not loaded here.

There is one list of rules and two policies (`admission_policy.py`). Training, prediction and alignment refuse the first
role that differs. The dry run collects all differences as findings; it refuses only a role with another purpose.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from glasu.config import RunConfig, refuse_other_count
from glasu.data.methods import find_method, has_server, override_settings
from glasu.errors import ConfigError
from glasu.network.facts import (
    ALIGNED_PARTY_STATES,
    ALIGNING_PARTY_STATES,
    EVERY_PARTY_STATES,
    LABELS,
    NOT_ALIGNED,
    OTHER_PARTY_STATES,
    Facts,
    list_pairs_without_tags,
    resolve_tags,
)
from glasu.network.findings import Finding, Level
from glasu.network.handshake import SAME_VERSION, Code, Payload, RefusalError
from glasu.network.log_lines import MAX_REASON, make_printable
from glasu.network.purposes import Purpose
from glasu.pki.key_signing import find_kit_error
from glasu.pki.kit import Kit
from glasu.records import FlatSettings
from glasu.report import align_columns

THE_SERVER = "the server"
NOT_STATED = "(nothing)"
DIGEST = re.compile("[0-9a-f]{64}")


@dataclass(frozen=True)
class FactRule:
    """Facts that must be equal at all roles. A role that does not state a fact is not compared."""

    check: str  # name of the check; if several of its rules are broken, the first one is often the cause of the rest
    facts: tuple[str, ...]
    remedy: str = ""
    level: Level = "bad"  # the level of a difference
    code: Code = Code.DIFFERENT_FACTS  # the code of the refusal


RULES = (
    FactRule(
        "purpose",
        ("purpose",),
        "start commands with the same purpose everywhere: glasu doctor; or glasu serve and glasu join, all with or all "
        "without --predict; or glasu serve --align and glasu align",
        code=Code.OTHER_PURPOSE,
    ),
    FactRule("versions", ("message_format", "glasu", "numpy", "torch"), "install the same version everywhere"),
    FactRule("extensions", ("extensions",), "load the same extensions, of the same version and source, everywhere"),
    FactRule(
        "training",
        ("training", "selected"),
        "the --out folder belongs to another training; give the folder of the training that the server uses",
    ),
    FactRule("parties", ("parties",)),
    FactRule("ids", ("id_rules",), "use the same id_unicode, id_case and id_whitespace in party.toml at all parties"),
    FactRule(
        "ids",
        ("alignment",),
        "the parties are not aligned with each other: run glasu align at every party, or remove alignment.parquet at "
        "every party",
    ),
    FactRule("ids", ("id_kind",), "write the ids in the same form everywhere, or set id_type in party.toml"),
    FactRule(
        "ids",
        ("nodes", "id_set"),
        "the sets of ids differ: run glasu align at every party, or list only the common ids, in the same order, "
        "everywhere",
    ),
    FactRule(
        "ids",
        ("id_order",),
        "the ids are the same, but in another order: run glasu align at every party, or list them in the same "
        "order everywhere, for example sorted",
    ),
    FactRule(
        "labels",
        ("classes", "class_names", "label_scale", "splits", "validation_nodes", "test_nodes"),
        "make labels and splits equal, or name one party in train.labels",
    ),
    FactRule("builds", ("numpy_build", "torch_build"), level="warning"),
)
CHECKS = tuple(dict.fromkeys(rule.check for rule in RULES))


class Difference(NamedTuple):
    """One fact or setting that differs between roles."""

    name: str
    values: Mapping[str, object]  # by role
    rule: FactRule = FactRule("settings", ())


# --- facts ----------------------------------------------------------------------------------------------------------


def compare_facts(roles: Mapping[str, Facts], checks: Collection[str] = CHECKS) -> list[Difference]:
    """Return every fact that at least two roles state differently, in the order of the rules."""
    found = []
    for rule in RULES:
        for name in rule.facts if rule.check in checks else ():
            stated = {role: getattr(facts, name) for role, facts in roles.items() if getattr(facts, name) is not None}
            if len(set(stated.values())) > 1:
                if name == "extensions":  # list only the extensions that are missing at some role
                    common = set.intersection(*map(set, stated.values()))
                    stated = {role: tuple(each for each in own if each not in common) for role, own in stated.items()}
                found.append(Difference(LABELS[name], stated, rule))
    return found


def refuse_differences(party: str, facts: Facts, others: Mapping[str, Facts], checks: Collection[str] = CHECKS) -> None:
    """Policy `refuse`: raise RefusalError if a party differs from the server or from another party.

    Args:
        party: the party that joins.
        facts: the facts of this party.
        others: the facts of the server and of the other parties, by name; compared in this order.
        checks: the names of the checks to make.
    """
    for other, stated in others.items():
        found = compare_facts({other: stated, party: facts}, checks)
        differences = [item for item in found if item.rule.level == "bad"]
        if differences:
            advice = next((item.rule.remedy for item in differences if item.rule.remedy), "")
            raise RefusalError(
                differences[0].rule.code,
                f"it differs from {other}: {format_differences(differences)}{f'; {advice}' if advice else ''}.",
                format_columns(differences),
            )


def refuse_missing_facts(purpose: Purpose, party: str, facts: Facts, server: Facts) -> None:
    """Raise RefusalError if a prepared party omits a fact that must be compared."""
    ids = OTHER_PARTY_STATES if facts.alignment == NOT_ALIGNED else ALIGNED_PARTY_STATES
    own = (*EVERY_PARTY_STATES, *ids) if purpose.states_data else ALIGNING_PARTY_STATES
    required = [*(name for name in LABELS if getattr(server, name) is not None), *own]
    missing = [name for name in dict.fromkeys(required) if getattr(facts, name) is None]
    if missing:
        differences = [Difference(LABELS[name], {THE_SERVER: getattr(server, name), party: None}) for name in missing]
        raise RefusalError(
            Code.DIFFERENT_FACTS,
            f"it does not state {', '.join(item.name for item in differences)}; {SAME_VERSION}",
            format_columns(differences),
        )


def describe_builds(party: str, facts: Facts, others: Mapping[str, Facts]) -> list[str]:
    """Return a warning for each other role whose builds of numpy or torch differ from the builds of a party."""
    found = {other: compare_facts({other: stated, party: facts}, ("builds",)) for other, stated in others.items()}
    return [
        f"{party}: its library builds differ from the builds of {other} ({format_differences(differences)}), so "
        "results may differ in the last bits."
        for other, differences in found.items()
        if differences
    ]


def collect_findings(purpose: Purpose, server: Facts, parties: Mapping[str, Facts]) -> list[Finding]:
    """Policy `collect`: compare the facts of all roles, and return the findings."""
    broken: dict[str, list[Difference]] = {}
    parties = resolve_tags(parties)
    for item in compare_facts({"server": server, **parties}):
        group = broken.setdefault(item.rule.check, [])
        if not group or group[0].rule is item.rule:
            group.append(item)
    good, found = _describe_agreement(server, parties), []
    for check in CHECKS:
        if check in broken:
            rule = broken[check][0].rule
            remedy = f"; {rule.remedy}" if rule.remedy else ""
            found.append(Finding(check, rule.level, f"{format_differences(broken[check])}{remedy}"))
        elif check in good:
            found.append(Finding(check, "good", good[check]))
    unread = [name for name, facts in parties.items() if purpose.states_data and facts.nodes is None]
    if unread:
        found.append(Finding("ids", "warning", f"not checked at {', '.join(unread)}: the data cannot be read"))
    if apart := sorted({name for pair in list_pairs_without_tags(parties) for name in pair}):
        found.append(Finding("ids", "warning", f"not compared at {', '.join(apart)}: not all parties are connected"))
    return found


def _describe_agreement(server: Facts, parties: Mapping[str, Facts]) -> dict[str, str]:
    """Return, for each check, the text of the finding if no fact differs."""
    torch = {f"torch {facts.torch}": None for facts in parties.values() if facts.torch}
    loaded = (f"extension {extension.name} {extension.version}" for extension in server.extensions)
    equal = ", ".join((f"glasu {server.glasu}", f"numpy {server.numpy}", *torch, *loaded))
    texts = {"versions": f"equal: {equal}"}
    with_ids = {name: facts.nodes or 0 for name, facts in parties.items() if facts.id_order is not None}
    with_ids = {} if list_pairs_without_tags(parties) else with_ids
    if len(with_ids) > 1:
        texts["ids"] = f"{min(with_ids.values())} common ids, in the same order at {', '.join(with_ids)}"
    with_labels = {name: facts.classes for name, facts in parties.items() if facts.classes is not None}
    if with_labels:
        texts["labels"] = f"{min(with_labels.values()) or 'no'} classes, the same splits at {', '.join(with_labels)}"
    return texts


# --- settings -------------------------------------------------------------------------------------------------------


def compare_settings(roles: Mapping[str, FlatSettings]) -> list[Difference]:
    """Return the settings that two roles state differently.

    Args:
        roles: the settings of two roles (`RunConfig.flatten()`, perhaps read from JSON). The keys are labels, for
            example "a expects".
    """
    (one, here), (other, there) = ((role, json.loads(json.dumps(settings))) for role, settings in roles.items())
    names = [name for name in here if here[name] != there.get(name)]
    return [Difference(name, {one: here[name], other: there.get(name)}) for name in names]


def compare_with_agreed(party: str, agreed: RunConfig, server: RunConfig) -> list[Difference]:
    """Return the differences between a party's --expect and the server's settings. Ignore the number of clients."""
    agreed, _ = override_settings(agreed.replace(data={"num_clients": server.data.num_clients}))
    return compare_settings({f"{party} expects": agreed.flatten(), THE_SERVER: server.flatten()})


def refuse_settings(differences: Sequence[Difference], reason: str) -> None:
    """Policy `refuse` for settings: raise RefusalError if there are differences.

    Args:
        differences: the result of `compare_settings`.
        reason: a sentence with one placeholder `{}`, which the list of differences replaces.
    """
    if differences:
        reason = reason.format(format_differences(differences))
        raise RefusalError(Code.DIFFERENT_SETTINGS, reason, format_columns(differences))


def read_offered_config(settings: Payload) -> RunConfig:
    """Read and check the settings that a server sends. The text of an error is one printable line."""
    try:
        config = RunConfig.from_dict(settings, "the server's settings")
        refuse_unfit_for_network(config)
    except ConfigError as error:
        raise RefusalError(Code.INVALID_SETTINGS, make_printable(error, MAX_REASON)) from None
    return config


def refuse_unfit_for_network(config: RunConfig) -> None:
    """Refuse settings that are impossible in a run between organisations."""
    if not find_method(config).between_machines:
        raise ConfigError(
            f"train.method={config.train.method!r} needs the data of all parties in one place, or uses only one party. "
            "It cannot run over the network. Use glasu train."
        )
    if not has_server(config):
        raise ConfigError("model.aggregation_layers=[]: the parties would exchange nothing. Use glasu train.")


def prepare_config_for_network(config: RunConfig, roster: Sequence[str]) -> RunConfig:
    """Return the settings that the server sends to the parties. Refuse settings that cannot run over the network."""
    refuse_unfit_for_network(config)
    if config.train.label_owner not in (None, *roster):
        raise ConfigError(
            f"train.labels={config.train.labels!r}: there is no such party; the roster is {', '.join(roster)}."
        )
    if config.data.num_clients != type(config.data).num_clients:  # not the default
        refuse_other_count(config.data.num_clients, len(roster), "the number of parties in the server's kit is")
    config, _ = override_settings(config)
    return config.replace(data={"num_clients": len(roster), "parties": (), "root": None})


def refuse_kit(kit: Kit, config: RunConfig, roster: Sequence[str] = ()) -> None:
    """If the run uses secure aggregation, refuse a trial kit, and a party's kit that does not pin all other parties."""
    if config.privacy.hides_parts and (error := find_kit_error(kit, roster)):
        why = f'privacy.secure_aggregation="{config.privacy.secure_aggregation}", {kit.name}: {error}.'
        raise RefusalError(Code.INVALID_SETTINGS, why)


# --- presentation ---------------------------------------------------------------------------------------------------


def format_columns(differences: Sequence[Difference]) -> list[str]:
    """Return a table of the differences between two roles: a heading, then one line per difference."""
    rows = [(item.name, *map(_show, item.values.values())) for item in differences]
    return align_columns([("", *differences[0].values), *rows])


def format_differences(differences: Sequence[Difference]) -> str:
    """Return the differences as text that ends a sentence. For digests, show only which roles agree."""
    return "; ".join(f"{item.name}: {_describe(item.values)}" for item in differences)


def _describe(values: Mapping[str, object]) -> str:
    if not all(DIGEST.fullmatch(str(value)) for value in values.values()):
        return ", ".join(f"{role} {_show(value)}" for role, value in values.items())
    groups: dict[object, list[str]] = {}
    for role, value in values.items():
        groups.setdefault(value, []).append(role)
    return " differs from ".join(" = ".join(group) for group in groups.values())


def _show(value: object) -> str:
    if isinstance(value, tuple):  # extensions
        return ", ".join(make_printable(str(each), 64) for each in value) or NOT_STATED
    text = NOT_STATED if value is None else make_printable(value, 64)
    return f"{text[:16]}.." if DIGEST.fullmatch(text) else text
