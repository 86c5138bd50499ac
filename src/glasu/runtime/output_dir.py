"""What a folder holds, by the files in it: no command writes among what belongs to another; no torch here."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any, Literal

from glasu.errors import ConfigError

Writer = Literal["train", "server", "party", "provision"]
SERVING, JOINING, PREDICTING = "serving.json", "joining.json", "predicting.json"
REPORT = "report.json"
PARTY, KIT = "party.toml", "kit.toml"
KITS = "the CA and the kits of `glasu provision`"
OTHER_DATA = (
    "holds a run that began with other data: this party's features, edges, labels or ids are not those of then; bring "
    "those back, or start over with --fresh at the server and at every party"
)


def refuse_contents_of_others(out: Path, writer: Writer, party: str | None = None) -> None:
    """Refuse an --out folder in which something else lies than this writer's own earlier results.

    Args:
        out: the folder, which need not exist.
        writer: who would write to it.
        party: of a party its name, where that is known.
    """
    for owner, words in _contents(out):
        if owner != writer:
            raise ConfigError(f"--out {out}: holds {words}; choose another --out.")
    there = _party_of(out)
    if writer == "party" and None not in (party, there) and party != there:
        raise ConfigError(f"--out {out}: holds {_results(there)}, and this is party {party!r}; choose another --out.")


def _contents(out: Path) -> list[tuple[Writer | None, str]]:
    """Return what lies in a folder, and who may go on there."""
    found: list[tuple[Writer | None, str]] = []
    if (out / PARTY).is_file():
        found.append((None, f"a party's data ({PARTY})"))
    if (out / KIT).is_file():
        found.append((None, f"a kit ({KIT})"))
    if (out / "ca" / "ca.toml").is_file():
        found.append(("provision", KITS))
    if (out / "ca.toml").is_file():
        found.append((None, KITS))
    if (out / SERVING).is_file() or (out / PREDICTING).is_file():
        found.append(("server", "results of a server (glasu serve)"))
    if (out / JOINING).is_file():
        found.append(("party", _results(_party_of(out))))
    traces = (REPORT, "model/model.toml", "checkpoints/run.json")
    if not found and any((out / trace).is_file() for trace in traces):
        found.append(("train", "results of glasu train"))
    return found


def _results(party: str | None) -> str:
    whose = "a party" if party is None else f"party {party!r}"
    return f"results of {whose} (glasu join)"


def _party_of(out: Path) -> str | None:
    """Return whose part of a run lies in a folder, if that can be read."""
    for name in (JOINING, REPORT):
        party = _read(out / name).get("party")
        if isinstance(party, str):
            return party
    return None


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def refuse_file_of_a_party(path: Path) -> None:
    """Refuse to write over the nodes or edges of a party's folder."""
    try:
        manifest = tomllib.loads((path.parent / PARTY).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return
    named = {str(manifest[table]) for table in ("nodes", "edges") if table in manifest}
    if path.name in named or path.stem in ("nodes", "edges"):
        raise ConfigError(f"--out {path}: is a party's data ({path.parent / PARTY} is beside it); choose another file.")
