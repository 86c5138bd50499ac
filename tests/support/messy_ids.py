"""Party folders whose tables list messy, shuffled and partly overlapping ids."""

from __future__ import annotations

import unicodedata
from pathlib import Path

import numpy as np
import pyarrow as pa

from glasu.data.party import PartyData
from glasu.data.tables import write_table

RULES = 'id_unicode = "nfkc"\nid_case = "fold"\nid_whitespace = "collapse"\n'
SECRETS = [bytes([number]) * 32 for number in (1, 2, 3)]
SKIPPED = (7, 5, 4)  # a party lacks every n-th person


def name_person(number: int) -> str:
    """Return the id of a person in the normal form."""
    return f"ångström straße № {number:03d}".replace("№", "no").casefold()


def spell(number: int, party: int) -> str:
    """Return the id of a person as a party writes it."""
    text = name_person(number)
    if party == 0:
        return f"  {text.upper()}"
    if party == 1:
        return unicodedata.normalize("NFD", text).replace(" ", "\t ") + " "
    return text.replace(" ", "\u00a0").title()


def list_people(party: int, count: int) -> list[int]:
    """Return the people of a party."""
    return [number for number in range(count) if number % SKIPPED[party]]


def list_common(count: int) -> set[str]:
    """Return the normal ids that all parties have, from plain sets."""
    return set.intersection(*({name_person(number) for number in list_people(party, count)} for party in range(3)))


def write_messy_folders(root: Path, parties: list[PartyData]) -> list[Path]:
    """Write a folder per party: its people of these data, in a shuffled order and its own spelling of the ids."""
    folders = []
    for index, party in enumerate(parties):
        people = np.random.default_rng(index).permutation(list_people(index, party.num_nodes))
        own = party.restrict(people)
        spelled, folder = [spell(number, index) for number in people], root / party.name
        folder.mkdir(parents=True)
        split = np.full(own.num_nodes, None, object)
        columns = {"id": pa.array(spelled), **{f"x{at}": own.features[:, at] for at in range(own.num_features)}}
        manifest = RULES
        if own.labels is not None and own.splits is not None:
            for name in ("train", "validation", "test"):
                split[getattr(own.splits, name)] = name
            columns |= {"label": pa.array([own.classes[label] for label in own.labels]), "split": pa.array(split)}
            manifest += 'label = "label"\nsplit = "split"\n'
        source, target = own.graph.edge_index()
        edges = {"source": [spelled[at] for at in source], "target": [spelled[at] for at in target]}
        write_table(columns, folder / "nodes.parquet")
        write_table({name: pa.array(values, pa.string()) for name, values in edges.items()}, folder / "edges.parquet")
        (folder / "party.toml").write_text(manifest, encoding="utf-8")
        folders.append(folder)
    return folders
