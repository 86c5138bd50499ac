"""Errors and logs about a party's files never contain an id, a feature, an edge or a label."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from glasu.data.folders import find_query_nodes, read_party
from glasu.errors import DataError

ID, OTHER, NUMBER, LABEL = "P-canary-17", "P-canary-18", "97531.8642", "canarydiagnosis"
HEADER = "id,age,score,label,split\n"
FIRST, SECOND = f"{ID},{NUMBER},1,{LABEL},train\n", f"{OTHER},2,{NUMBER},other{LABEL},test\n"
NODES, EDGES = HEADER + FIRST + SECOND, f"source,target,w\n{ID},{OTHER},{NUMBER}\n"
MANIFEST = 'name = "a"\nlabel = "label"\nsplit = "split"\nweight = "w"\n'
Files = dict[str, bytes]


def files(nodes: str | bytes = NODES, edges: str | bytes = EDGES, manifest: str = MANIFEST) -> Files:
    contents = {"nodes.csv": nodes, "edges.csv": edges, "party.toml": manifest}
    return {name: text.encode() if isinstance(text, str) else text for name, text in contents.items()}


BROKEN: dict[str, Files] = {
    "a comma too many": files(NODES.replace(SECOND, SECOND.replace("test", "test,x"))),
    "a comma too few": files(NODES.replace(",2,", ",")),
    "Latin-1 and a comma too many": files(NODES.replace(LABEL, f"{LABEL}é,x").encode("latin-1")),
    "Latin-1": files(NODES.replace(LABEL, f"{LABEL}é").encode("latin-1")),
    "Latin-1 in the header": files(NODES.replace("age", "âge").encode("latin-1")),
    "Latin-1 edges": files(edges=EDGES.replace(OTHER, f"{OTHER}é").encode("latin-1")),
    "edges with a comma too many": files(edges=EDGES.replace(OTHER, f"{OTHER},x")),
    "UTF-16": files(NODES.encode("utf-16")),
    "UTF-16 without a mark": files(NODES.encode("utf-16-le")),
    "UTF-32": files(NODES.encode("utf-32")),
    "binary": files(bytes(range(256)) + NODES.encode()),
    "Parquet by the name of CSV": files(b"PAR1\0\0" + NODES.encode()),
    "no header": files(FIRST + SECOND),
    "no header, values alike": files(FIRST.replace(",1,", f",{NUMBER},") + SECOND),
    "no header in the edges": files(edges=f"{ID},{OTHER},{NUMBER}\n"),
    "a quotation mark left open": files(NODES.replace(ID, f'"{ID}')),
    "a quotation mark left open and a long value": files(NODES.replace(ID, f'"{ID}' + 200_000 * "x")),
    "semicolons": files(NODES.replace(",", ";")),
    "an id twice": files(NODES.replace(OTHER, ID)),
    "no id": files(NODES.replace(OTHER, "")),
    "text in a feature": files(NODES.replace(NUMBER, LABEL)),
    "a number with a unit": files(NODES.replace(NUMBER, f"{NUMBER} kg")),
    "a decimal comma": files(NODES.replace(f",{NUMBER}", f',"{NUMBER.replace(".", ",")}"')),
    "infinity": files(NODES.replace(",2,", ",-inf,")),
    "too large": files(NODES.replace(NUMBER, f"{NUMBER}e99")),
    "missing": files(NODES.replace(",2,", ",,")),
    "another class": files(manifest=MANIFEST + f'classes = ["x{LABEL}", "y{LABEL}"]\n'),
    "one class": files(NODES.replace(f"other{LABEL}", LABEL)),
    "an unknown split": files(NODES.replace("test", LABEL)),
    "ids that are no integers": files(manifest=MANIFEST + 'id_type = "integer"\n'),
    "integers too large": files(
        NODES.replace("P-canary-", "97531864299753186429"), manifest=MANIFEST + 'id_type = "integer"\n'
    ),
    "several labels that are not 0 or 1": files(manifest='label = ["age", "score"]\nsplit = "split"\n'),
    "an edge to nowhere": files(edges=EDGES.replace(OTHER, f"{OTHER}0")),
    "an edge from nowhere": files(edges=EDGES.replace(ID, f"{ID}0")),
    "edges of other ids": files(NODES.replace(ID, "17").replace(OTHER, "18")),
    "a weight that is text": files(edges=EDGES.replace(NUMBER, LABEL)),
    "no weight": files(edges=EDGES.replace(NUMBER, "")),
    "a negative weight": files(edges=EDGES.replace(NUMBER, f"-{NUMBER}")),
    "party.toml in Latin-1": {**files(), "party.toml": MANIFEST.replace('"a"', '"é"').encode("latin-1")},
    "a label column that is not there": files(manifest=MANIFEST.replace('"label"', '"diagnosis"')),
}


def write_files(folder: Path, contents: Files) -> Path:
    folder.mkdir()
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    return folder


def assert_silent(call: Callable[[], object], where: Path, capfd: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(DataError) as caught:
        call()
    said, log = str(caught.value), "".join(capfd.readouterr())
    assert log == ""
    for value in ("canary", "97531", *(LABEL[: len(LABEL) // 2],)):
        assert value not in said
    assert str(where.name) in said or "party 'a'" in said
    return said


def test_the_unbroken_files_are_read(tmp_path):
    assert read_party(write_files(tmp_path / "a", files())).num_nodes == 2


@pytest.mark.parametrize("contents", BROKEN.values(), ids=BROKEN)
def test_an_error_about_a_folder_quotes_no_value_of_its_tables(tmp_path, contents, capfd):
    folder = write_files(tmp_path / "a", contents)
    assert_silent(lambda: read_party(folder), folder, capfd)


ASKED = {
    "a comma too many": f"id\n{ID},x\n".encode(),
    "Latin-1 and a comma too many": f"id\n{ID}é,x\n".encode("latin-1"),
    "UTF-16": f"id\n{ID}\n".encode("utf-16"),
    "unknown": f"id\n{ID}0\n".encode(),
    "empty": b"",
    "no header": f"{ID}\n{OTHER}\n".encode(),
    "another column": f"{ID[:3]}\n{ID}\n".encode(),
}


@pytest.mark.parametrize("content", ASKED.values(), ids=ASKED)
def test_an_error_about_asked_ids_quotes_none_and_does_not_blame_party_toml(tmp_path, content, capfd):
    folder = write_files(tmp_path / "a", files())
    (tmp_path / "ids.csv").write_bytes(content)
    party = read_party(folder)
    said = assert_silent(lambda: find_query_nodes(tmp_path / "ids.csv", folder, party), tmp_path / "ids.csv", capfd)
    assert "party.toml" not in said


def test_asked_ids_in_no_file_do_not_blame_party_toml(tmp_path, capfd):
    folder = write_files(tmp_path / "a", files())
    party = read_party(folder)
    said = assert_silent(lambda: find_query_nodes(tmp_path / "ids.csv", folder, party), tmp_path / "ids.csv", capfd)
    assert "--predict" in said
    assert "party.toml" not in said


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("Latin-1 and a comma too many", r"nodes\.csv: row 1, column 4: is not UTF-8; save it as UTF-8"),
        ("Latin-1", r"row 1, column 4: is not UTF-8; save it as UTF-8"),
        ("Latin-1 in the header", r"the first line, column 2: is not UTF-8"),
        ("UTF-16", r"nodes\.csv: is UTF-16, not UTF-8; save it as UTF-8"),
        ("binary", "is not a UTF-8 text file"),
        ("a comma too many", r"row 2 has 6 values for 5 columns; put a value with a comma between quotation"),
        ("party.toml in Latin-1", r"party\.toml: is not valid TOML: line 1 is not UTF-8; save it as UTF-8"),
    ],
)
def test_an_error_about_a_folder_says_where_and_what_to_do(tmp_path, case, said):
    with pytest.raises(DataError, match=said):
        read_party(write_files(tmp_path / "a", BROKEN[case]))


def test_text_in_parquet_that_is_not_utf_8_is_refused(tmp_path):
    folder = write_files(tmp_path / "a", {"party.toml": b'name = "a"\n', "edges.csv": b"source,target\n"})
    broken = pa.array([b"canary\xe9", b"b"]).view(pa.string())
    parquet.write_table(pa.table({"id": broken, "x": np.ones(2)}), folder / "nodes.parquet")
    with pytest.raises(DataError, match=r"nodes\.parquet: is not a Parquet file, or is damaged") as caught:
        read_party(folder)
    assert "canary" not in str(caught.value)
