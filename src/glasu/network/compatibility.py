"""Compatibility: compare the facts and settings of roles before a run begins. Torch is not loaded here.

There is one comparison and two policies. Training and prediction refuse the first role that differs. The dry run
collects all differences.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from glasu.config import RunConfig, refuse_other_count
from glasu.data.methods import method_of
from glasu.errors import ConfigError
from glasu.network.facts import EVERY_PARTY_STATES, LABELS, Facts
from glasu.network.findings import Finding
from glasu.network.handshake import SAME_VERSION, Code, RefusalError
from glasu.network.log_lines import SENTENCES, printable
from glasu.registry import Extension
from glasu.wire.message_key import RUN_BYTES

SERVER = "the server"
MISSING = "(nothing)"
DIGEST = re.compile("[0-9a-f]{64}")


@dataclass(frozen=True)
class Rule:
    """Facts that must be equal for every role that states them."""

    check: str  # the rules of one check are ordered: a role that breaks one usually breaks the later ones, too
    facts: tuple[str, ...]
    remedy: str = ""
    fatal: bool = True  # False: a difference is a warning


RULES = (
    Rule("purpose", ("purpose",), "train or predict everywhere: give --predict to all roles or to none"),
    Rule("versions", ("message_format", "glasu", "numpy", "torch"), "install the same version everywhere"),
    Rule("versions", ("extensions",), "load the same extensions, of the same version and source, everywhere"),
    Rule(
        "training",
        ("training",),
        "the --out folder belongs to another training; give the folder of the one that the server predicts with",
    ),
    Rule("parties", ("parties",)),
    Rule("ids", ("id_kind",), "write the ids alike everywhere, or set id_type in party.toml"),
    Rule(
        "ids",
        ("nodes", "id_set"),
        "the sets of ids differ: list only the common ids, in one order, at all parties",
    ),
    Rule(
        "ids",
        ("id_order",),
        "the ids are the same, but in another order: list them in one order at all parties, for example sorted",
    ),
    Rule(
        "labels",
        ("classes", "class_names", "splits", "validation_nodes", "test_nodes"),
        "make labels and splits equal, or name one party in train.labels",
    ),
    Rule("builds", ("numpy_build", "torch_build"), fatal=False),
)


class Difference(NamedTuple):
    """One fact or setting that differs between roles."""

    name: str
    values: Mapping[str, Any]  # by role
    rule: Rule | None = None  # None for a setting


# --- facts ----------------------------------------------------------------------------------------------------------


def compare_facts(roles: Mapping[str, Facts]) -> list[Difference]:
    """Return every fact that at least two roles state differently, in the order of the rules."""
    found = []
    for rule in RULES:
        for name in rule.facts:
            stated = {role: getattr(facts, name) for role, facts in roles.items() if getattr(facts, name) is not None}
            if len(set(stated.values())) > 1:
                if name == "extensions":
                    stated = _omit_common(stated)
                found.append(Difference(LABELS[name], stated, rule))
    return found


def _omit_common(stated: Mapping[str, tuple[Extension, ...]]) -> dict[str, tuple[Extension, ...]]:
    """Return the extensions of each role without those that all roles have."""
    common = set.intersection(*map(set, stated.values()))
    return {role: tuple(each for each in loaded if each not in common) for role, loaded in stated.items()}


def refuse_differences(party: str, facts: Facts, others: Mapping[str, Facts]) -> None:
    """Policy `refuse`: raise RefusalError if a party differs from the server or from another party.

    Args:
        party: the party that joins.
        facts: its facts.
        others: the facts of the server and of the other parties, by name; compared in this order.
    """
    for other, stated in others.items():
        differences = [item for item in compare_facts({other: stated, party: facts}) if _is_fatal(item)]
        if differences:
            purpose = differences[0].name == "purpose"
            advice = next((item.rule.remedy for item in differences if item.rule and item.rule.remedy), "")
            raise RefusalError(
                Code.OTHER_PURPOSE if purpose else Code.DIFFERENT_FACTS,
                f"it differs from {other}: {in_one_line(differences)}{f'; {advice}' if advice else ''}.",
                two_columns(differences, other, party),
            )


def refuse_missing_facts(party: str, facts: Facts, server: Facts) -> None:
    """Raise RefusalError if a prepared party leaves out a fact that must be compared."""
    required = [*(name for name in LABELS if getattr(server, name) is not None), *EVERY_PARTY_STATES]
    missing = [name for name in dict.fromkeys(required) if getattr(facts, name) is None]
    if missing:
        differences = [Difference(LABELS[name], {SERVER: getattr(server, name), party: None}) for name in missing]
        raise RefusalError(
            Code.DIFFERENT_FACTS,
            f"it does not state {', '.join(item.name for item in differences)}; {SAME_VERSION}",
            two_columns(differences, SERVER, party),
        )


def describe_builds(party: str, facts: Facts, others: Mapping[str, Facts]) -> list[str]:
    """Return a warning for each role that has another build of the same versions."""
    lines = []
    for other, stated in others.items():
        builds = [item for item in compare_facts({other: stated, party: facts}) if not _is_fatal(item)]
        if builds:
            lines.append(f"{party}: another build than at {other}, so last bits may differ: {in_one_line(builds)}.")
    return lines


def collect_findings(server: Facts, parties: Mapping[str, Facts]) -> list[Finding]:
    """Policy `collect`: return a finding for each check that needs the facts of all roles."""
    differences = compare_facts({"server": server, **parties})
    return [_find_versions(server, parties, differences), *_find_ids(parties, differences), *_find_labels(parties)]


def _find_versions(server: Facts, parties: Mapping[str, Facts], differences: Sequence[Difference]) -> Finding:
    broken = [item for item in differences if _check(item) == "versions"]
    if broken:
        remedies = dict.fromkeys(item.rule.remedy for item in broken if item.rule is not None)
        return Finding("versions", "bad", f"{in_one_line(broken)}; {'; '.join(remedies)}")
    builds = [item for item in differences if _check(item) == "builds"]
    if builds:
        return Finding("versions", "warning", f"equal, but of different builds: {in_one_line(builds)}")
    torch = next((facts.torch for facts in parties.values() if facts.torch), None)
    equal = {"glasu": server.glasu, "numpy": server.numpy} | ({"torch": torch} if torch else {})
    loaded = {f"extension {extension.name}": extension.version for extension in server.extensions}
    listed = ", ".join(f"{name} {version}" for name, version in {**equal, **loaded}.items())
    return Finding("versions", "good", f"equal: {listed}")


def _find_ids(parties: Mapping[str, Facts], differences: Sequence[Difference]) -> list[Finding]:
    known = {name: facts for name, facts in parties.items() if facts.id_order is not None}
    missing = [name for name in parties if name not in known]
    found = []
    if missing:
        found.append(Finding("ids", "warning", f"not checked at {', '.join(missing)}: the data cannot be read"))
    if len(known) < 2:
        return found
    broken = next((item for item in differences if _check(item) == "ids"), None)
    fewest = min(facts.nodes or 0 for facts in known.values())
    if broken is None:
        return [*found, Finding("ids", "good", f"{fewest} common ids, in the same order at {', '.join(known)}")]
    remedy = broken.rule.remedy if broken.rule is not None else ""
    if broken.name == LABELS["id_kind"]:
        return [*found, Finding("ids", "bad", f"they cannot be compared ({_list_values(broken)}); {remedy}")]
    if broken.name == LABELS["id_order"]:
        listed = f"{fewest} common ids, but not in the same order ({_group(broken)})"
    else:
        counts = ", ".join(f"{name} {facts.nodes}" for name, facts in known.items())
        groups = _group(Difference("", {name: facts.id_set for name, facts in known.items()}))
        listed = f"at most {fewest} common ids ({counts}; {groups})"
    return [*found, Finding("ids", "bad", f"{listed}; {remedy}")]


def _find_labels(parties: Mapping[str, Facts]) -> list[Finding]:
    known = {name: facts for name, facts in parties.items() if facts.classes is not None}
    if not known:
        return []
    broken = [item for item in compare_facts(known) if _check(item) == "labels"]
    if broken:
        apart = "; ".join(f"{item.name.partition(' (')[0]}: {_group(item)}" for item in broken)
        remedy = broken[0].rule.remedy if broken[0].rule is not None else ""
        return [Finding("labels", "bad", f"{apart}; {remedy}")]
    classes = next(iter(known.values())).classes
    return [Finding("labels", "good", f"{classes} classes, the same splits at {', '.join(known)}")]


def _check(difference: Difference) -> str:
    return "" if difference.rule is None else difference.rule.check


def _is_fatal(difference: Difference) -> bool:
    return difference.rule is None or difference.rule.fatal


def _list_values(difference: Difference) -> str:
    return ", ".join(f"{role} {_show(value)}" for role, value in difference.values.items())


def _group(difference: Difference) -> str:
    """Return which roles agree: "a = b differs from c"."""
    groups: dict[Any, list[str]] = {}
    for role, value in difference.values.items():
        groups.setdefault(value, []).append(role)
    return " differs from ".join(" = ".join(group) for group in groups.values())


# --- settings -------------------------------------------------------------------------------------------------------


def compare_settings(roles: Mapping[str, Mapping[str, Any]]) -> list[Difference]:
    """Return the settings that two roles state differently.

    Args:
        roles: two roles and their `RunConfig.flatten()`, one of them perhaps read from JSON.
    """
    (one, here), (other, there) = ((role, json.loads(json.dumps(settings))) for role, settings in roles.items())
    names = [name for name in here if here[name] != there.get(name)]
    return [Difference(name, {one: here[name], other: there.get(name)}) for name in names]


def compare_with_agreed(server: RunConfig, agreed: RunConfig) -> list[Difference]:
    """Compare the server's settings with those of --expect, whose number of clients is not binding."""
    agreed = agreed.replace(data={"num_clients": server.data.num_clients})
    return compare_settings({"expected": agreed.flatten(), "got": server.flatten()})


def refuse_settings(differences: Sequence[Difference], reason: str, columns: tuple[str, str]) -> None:
    """Policy `refuse` for settings: raise RefusalError if there are differences.

    Args:
        differences: what `compare_settings` returned.
        reason: a sentence with one `{}` for the differences.
        columns: the headings of the table.
    """
    if differences:
        raise RefusalError(
            Code.DIFFERENT_SETTINGS, reason.format(in_one_line(differences)), two_columns(differences, *columns)
        )


def read_offered_config(settings: Mapping[str, Any]) -> RunConfig:
    """Read the settings that a server sends; the error is one printable line."""
    try:
        return RunConfig.from_dict(settings, "the server's settings")
    except ConfigError as error:
        raise RefusalError(Code.INVALID_SETTINGS, printable(error, SENTENCES)) from None


def refuse_unfit_for_network(config: RunConfig) -> None:
    """Refuse settings that a run between organisations cannot have."""
    if not method_of(config).between_machines:
        raise ConfigError(
            f"train.method={config.train.method!r} needs the data of all parties in one place, or of one party only. "
            "It cannot run over the network. Use glasu train."
        )
    if not config.model.aggregation_layers:
        raise ConfigError("model.aggregation_layers=[]: the parties would exchange nothing. Use glasu train.")


def config_for_network(config: RunConfig, roster: Sequence[str]) -> RunConfig:
    """Return the settings that the server sends to the parties of the roster; refuse impossible ones."""
    refuse_unfit_for_network(config)
    if config.train.labels not in ("all", *roster):
        raise ConfigError(
            f"train.labels={config.train.labels!r}: there is no such party; the roster is {', '.join(roster)}."
        )
    if config.data.num_clients != type(config.data).num_clients:  # it was set
        refuse_other_count(config.data.num_clients, len(roster), "the parties of the server's kit number")
    return config.replace(data={"num_clients": len(roster), "parties": (), "root": None})


# --- presentation ---------------------------------------------------------------------------------------------------


def two_columns(differences: Sequence[Difference], left: str, right: str) -> list[str]:
    """Return a table with a heading and one line per difference."""
    rows = [(item.name, *map(_show, item.values.values())) for item in differences]
    cells = [("", left, right), *rows]
    widths = [max(len(row[column]) for row in cells) for column in range(3)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]


def in_one_line(differences: Sequence[Difference]) -> str:
    """Return the differences as the end of a sentence."""
    return "; ".join(f"{item.name}: {_list_values(item)}" for item in differences)


def _show(value: Any) -> str:
    if isinstance(value, tuple):  # extensions
        return ", ".join(printable(str(each), 64) for each in value) or MISSING
    text = MISSING if value is None else printable(value, 64)
    return f"{text[:16]}.." if DIGEST.fullmatch(text) else text


def derive_attempt_run(run: str, attempt: int) -> bytes:
    """Return the run id of one attempt at a prediction: a new attempt never reuses the keys of an earlier one."""
    return hashlib.sha256(f"{run} attempt {attempt}".encode()).digest()[:RUN_BYTES]
