"""Compare what all roles state: versions, ids and their order, labels; no torch here, and no id."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from glasu.network.compatibility import KIND, ORDER, SET, public_version
from glasu.network.doctor.findings import Finding

Stated = Mapping[str, Mapping[str, Any]]  # facts by party, as `read_facts` gives them
SAME_AS_SERVER = ("message format", "glasu", "numpy")
SAME_AT_PARTIES = ("torch",)
LABELS = ("classes", "class names (SHA-256)", "splits (SHA-256)")


def compare(server: Mapping[str, Any], parties: Stated) -> list[Finding]:
    """Return what only a look at everybody can tell; parties that state nothing are left out."""
    stated = {name: facts for name, facts in parties.items() if facts}
    return [_versions(server, stated), *_ids(stated), *_labels(stated)]


def _versions(server: Mapping[str, Any], parties: Stated) -> Finding:
    apart = [
        f"{package}: server {server.get(package)}, {name} {facts.get(package)}"
        for package in SAME_AS_SERVER
        for name, facts in parties.items()
        if _public(facts.get(package)) != _public(server.get(package))
    ]
    apart += [text for package in SAME_AT_PARTIES for text in _apart(package, parties)]
    if apart:
        return Finding("versions", "bad", f"{', '.join(apart)}; install the same everywhere")
    built = [text for package in ("numpy", *SAME_AT_PARTIES) for text in _apart(package, parties, build=True)]
    if built:
        return Finding("versions", "warning", f"equal, but of different builds: {', '.join(built)}")
    shared = {**{name: server.get(name) for name in ("glasu", "numpy")}, **_shared(parties)}
    return Finding("versions", "good", f"equal: {', '.join(f'{name} {version}' for name, version in shared.items())}")


def _shared(parties: Stated) -> dict[str, Any]:
    """Return the versions that the parties share among themselves; the server has no use for them."""
    first: Mapping[str, Any] = next(iter(parties.values()), {})
    return {name: first[name] for name in SAME_AT_PARTIES if name in first}


def _public(version: Any) -> str:
    return public_version(str(version))


def _apart(package: str, parties: Stated, *, build: bool = False) -> list[str]:
    found = {name: str(facts.get(package)) for name, facts in parties.items()}
    kinds = set(found.values()) if build else set(map(_public, found.values()))
    if len(kinds) <= 1:
        return []
    return [f"{package}: " + " and ".join(f"{name} {version}" for name, version in found.items())]


def _ids(parties: Stated) -> Iterator[Finding]:
    """Compare ids by digests of all of them, never one by one: a hash of a single id can be guessed."""
    known = {name: facts for name, facts in parties.items() if ORDER in facts}
    if missing := [name for name in parties if name not in known]:
        yield Finding("ids", "warning", f"not checked at {', '.join(missing)}, whose data cannot be read")
    if len(known) < 2:
        return
    fewest = min(_nodes(facts) for facts in known.values())
    if _same(ORDER, known):
        yield Finding("ids", "good", f"{fewest} common ids, in the same order at {', '.join(known)}")
    elif not _same(KIND, known):
        kinds = ", ".join(f"{name} {facts.get(KIND)}" for name, facts in known.items())
        advice = "write them alike, or set id_type in party.toml"
        yield Finding("ids", "bad", f"they cannot be compared ({kinds}); {advice}")
    elif _same(SET, known):
        advice = "all must list them in one order, for example sorted"
        yield Finding(
            "ids", "bad", f"{fewest} common ids, but not in the same order ({_groups(ORDER, known)}); {advice}"
        )
    else:
        counts = ", ".join(f"{name} {_nodes(facts)}" for name, facts in known.items())
        advice = "all must list the common ones only, in one order"
        yield Finding("ids", "bad", f"at most {fewest} common ids ({counts}; {_groups(SET, known)}); {advice}")


def _nodes(facts: Mapping[str, Any]) -> int:
    count = facts.get("nodes")
    return count if isinstance(count, int) else 0


def _same(name: str, parties: Stated) -> bool:
    return len({str(facts.get(name)) for facts in parties.values()}) == 1


def _groups(name: str, parties: Stated) -> str:
    """Say who agrees with whom."""
    groups: dict[str, list[str]] = {}
    for party, facts in parties.items():
        groups.setdefault(str(facts.get(name)), []).append(party)
    return ", ".join(" = ".join(group) for group in groups.values()).replace(", ", " differs from ", 1)


def _labels(parties: Stated) -> Iterator[Finding]:
    known = {name: facts for name, facts in parties.items() if "classes" in facts}
    if not known:
        return
    apart = [f"{name.partition(' (')[0]}: {_groups(name, known)}" for name in LABELS if not _same(name, known)]
    if apart:
        yield Finding("labels", "bad", f"{'; '.join(apart)}; make them equal, or name one party in train.labels")
    else:
        classes = next(iter(known.values()))["classes"]
        yield Finding("labels", "good", f"{classes} classes, the same splits at {', '.join(known)}")
