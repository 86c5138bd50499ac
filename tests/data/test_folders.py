from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import scipy.sparse as sp
from pyarrow import parquet

from glasu.data import tables
from glasu.data.folders import read_party, write_party
from glasu.data.graph import Graph
from glasu.data.party import PartyData, Splits
from glasu.data.tables import read_table, write_table
from glasu.errors import DataError

NODES = "id,age,score,label,split\n7,30,1.5,x,train\n3,40,-2,y,validation\n9,50,.5,,test\n"
EDGES = "source,target\n7,3\n3,9\n"
MANIFEST = 'label = "label"\nsplit = "split"\n'


def party(**changes):
    rng = np.random.default_rng(0)
    features = rng.integers(0, 2**32, (6, 5), np.uint32).view(np.float32)
    features = np.where(np.isfinite(features), features, np.float32(-0.0))
    fields = {
        "name": "clinic",
        "ids": np.array([5, -2, 7, 0, 2**60, 1]),
        "features": features,
        "graph": Graph.from_edges(np.array([0, 1, 5, 5]), np.array([1, 0, 2, 3]), 6),
        "labels": np.array([2, -1, 0, 1, 1, 2]),
        "classes": ("zebra", "10", "apple"),
        "splits": Splits(np.array([0, 2]), np.array([3]), np.array([4, 5])),
    }
    return PartyData(**{**fields, **changes})


def bits(array):
    return None if array is None else (array.dtype.str, array.shape, array.tobytes())


def assert_same(first, second):
    assert (first.name, first.classes) == (second.name, second.classes)
    if first.feature_names:
        assert first.feature_names == second.feature_names
    assert first.ids.dtype.kind == second.ids.dtype.kind
    assert first.ids.tolist() == second.ids.tolist()
    assert sp.issparse(first.features) == sp.issparse(second.features)
    for before, after in (
        (first.features, second.features),
        (first.graph.indptr, second.graph.indptr),
        (first.graph.indices, second.graph.indices),
        (first.graph.weights, second.graph.weights),
        (first.labels, second.labels),
    ):
        if sp.issparse(before):
            before, after = before.toarray(), after.toarray()
        assert bits(before) == bits(after)
    assert (first.splits is None) == (second.splits is None)
    assert first.splits is None or first.splits.digest() == second.splits.digest()


def folder_with(path, nodes=NODES, edges=EDGES, manifest=MANIFEST):
    path.mkdir(exist_ok=True)
    for name, content in (("nodes.csv", nodes), ("edges.csv", edges), ("party.toml", manifest)):
        if content is not None:
            (path / name).write_text(content)
    return path


NUMERIC = 'label = "label"\nlabel_type = "number"\n'


def test_a_numeric_label_column_is_read_in_double_precision_and_empty_means_unknown(tmp_path):
    nodes = "id,age,label\n7,30,1.5\n3,40,\n9,50,1234567.0000001\n"
    read = read_party(folder_with(tmp_path, nodes, manifest=NUMERIC))
    np.testing.assert_array_equal(read.labels, [1.5, np.nan, 1234567.0000001])
    assert (read.classes, read.feature_names) == ((), ("age",))


@pytest.mark.parametrize(
    ("manifest", "label", "said"),
    [
        (NUMERIC, "tall", r"nodes.csv: column 'label', row 1: is not a number"),
        (NUMERIC, "inf", r"column 'label', row 1: is infinite"),
        (NUMERIC + 'classes = ["x", "y"]\n', "1", 'label_type="number": needs one column in label, and no classes'),
        ('label_type = "number"\n', "1", 'label_type="number": needs one column in label'),
        ('label = "label"\nlabel_type = "words"\n', "1", "label_type='words'"),
    ],
)
def test_a_numeric_label_that_cannot_be_read_is_refused(tmp_path, manifest, label, said):
    nodes = f"id,age,label\n7,30,{label}\n3,40,2\n9,50,3\n"
    with pytest.raises(DataError, match=said):
        read_party(folder_with(tmp_path, nodes, manifest=manifest))


@pytest.mark.parametrize("file_format", ["parquet", "csv"])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"ids": np.array(["007", "7", "a b", 'q"uo,te', "NA", "é"])},
        {"ids": np.array(["1", "2", "3", "4", "5", "6"])},
        {"features": np.float32([[-0.0], [1e-45], [3.4e38], [0.1], [1 / 3], [-1]])},
        {"features": sp.csr_array(np.eye(6, 9))},
        {"graph": Graph.from_edges(np.empty(0, int), np.empty(0, int), 6)},
        {"graph": Graph.from_edges(np.array([0, 3]), np.array([1, 2]), 6, np.array([0.1, 1e-30]))},
        {"labels": None, "classes": (), "splits": None},
        {"labels": np.array([[1, 0, 1]] * 5 + [[-1, -1, -1]])},
        {"labels": np.array([0.1, np.nan, -1e99, 5e-324, 3.0, 1 / 3]), "classes": ()},
        {"classes": ("None", "nan", "x y")},
        {"splits": Splits(np.array([0]), np.empty(0, np.int64), np.empty(0, np.int64))},
        {"feature_names": ("age", "income", "x9", "a b", "é")},
        {"feature_names": ("id", "label", "split", "label_zebra", "source")},
    ],
    ids=[
        "plain",
        "words",
        "digits",
        "one-feature",
        "sparse",
        "no-edges",
        "weights",
        "no-labels",
        "multi",
        "numbers",
        "odd",
        "few",
        "names",
        "names like ours",
    ],
)
def test_a_party_comes_back_from_its_folder_bit_for_bit(tmp_path, changes, file_format):
    before = party(**changes)
    write_party(before, tmp_path / "deep" / "clinic", file_format)
    assert_same(before, read_party(tmp_path / "deep" / "clinic"))
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["clinic"]


def test_a_folder_with_other_files_may_become_a_party(tmp_path):
    (tmp_path / "README").write_text("ours")
    write_party(party(), tmp_path)
    assert_same(party(), read_party(tmp_path))


def test_an_existing_party_is_never_overwritten(tmp_path):
    write_party(party(), tmp_path / "a")
    with pytest.raises(DataError, match=r"party\.toml: exists .* another folder"):
        write_party(replace(party(), name="other"), tmp_path / "a", "csv")
    assert read_party(tmp_path / "a").name == "clinic"


def test_a_users_own_nodes_are_never_overwritten(tmp_path):
    folder_with(tmp_path / "a", manifest=None)
    with pytest.raises(DataError, match=r"nodes\.csv: exists"):
        write_party(party(), tmp_path / "a", "csv")
    assert (tmp_path / "a" / "nodes.csv").read_text() == NODES


def test_class_names_that_are_equal_as_text_are_not_written(tmp_path):
    with pytest.raises(DataError, match="distinct and not empty"):
        write_party(party(classes=("x", "x", "y")), tmp_path / "a")
    assert not (tmp_path / "a").exists()


def test_a_users_csv_files_are_read_as_they_are_meant(tmp_path):
    read = read_party(folder_with(tmp_path / "bank"))
    assert read.name == "bank"
    assert read.ids.tolist() == [7, 3, 9]
    assert read.features.tolist() == [[30, 1.5], [40, -2], [50, 0.5]]
    assert read.graph.edge_index().tolist() == [[0, 1], [1, 2]]
    assert read.labels.tolist() == [0, 1, -1]
    assert read.classes == ("x", "y")
    assert [part.tolist() for part in (read.splits.train, read.splits.validation, read.splits.test)] == [[0], [1], [2]]


def test_feature_columns_keep_their_names_and_their_order(tmp_path):
    read = read_party(folder_with(tmp_path / "bank"))
    assert read.feature_names == ("age", "score")
    write_party(read, tmp_path / "again", "csv")
    assert (tmp_path / "again" / "nodes.csv").read_text().splitlines()[0].replace('"', "") == "id,age,score,label,split"


def test_a_negative_weight_is_refused(tmp_path):
    edges, manifest = "source,target,w\n7,3,1\n3,9,-2\n", MANIFEST + 'weight = "w"\n'
    with pytest.raises(DataError, match=r"edges\.csv: column 'w', row 2: the weight is negative"):
        read_party(folder_with(tmp_path / "a", edges=edges, manifest=manifest))


def test_columns_may_have_any_names_and_edges_weights(tmp_path):
    manifest = 'schema = 1\nname = "shop"\nid = "user"\nsource = "from"\ntarget = "to"\nweight = "how often"\n'
    nodes, edges = "x,user\n1,ann\n2,bob\n", "to,how often,from\nann,2,bob\nann,0.5,bob\n"
    read = read_party(folder_with(tmp_path / "a", nodes, edges, manifest))
    assert (read.name, read.ids.tolist(), read.labels) == ("shop", ["ann", "bob"], None)
    assert (read.graph.edge_index().tolist(), read.graph.weights.tolist()) == ([[1], [0]], [2.5])


def test_class_names_are_sorted_as_numbers_when_all_are_numbers(tmp_path):
    nodes = NODES.replace(",x,", ",10,").replace(",y,", ",9,")
    assert read_party(folder_with(tmp_path / "a", nodes)).classes == ("9", "10")
    assert read_party(folder_with(tmp_path / "b", nodes.replace(",10,", ",ten,"))).classes == ("9", "ten")


def test_parquet_of_other_types_is_understood(tmp_path):
    folder = folder_with(tmp_path, None, None, MANIFEST.replace('split = "split"', 'nodes = "mine.parquet"'))
    nodes = {
        "id": pa.array(["u", "v"]).dictionary_encode(),
        "flag": pa.array([True, False]),
        "count": pa.array([1, 2**40]),
        "label": pa.array([3, None], pa.int8()),
    }
    parquet.write_table(pa.table(nodes), folder / "mine.parquet")
    parquet.write_table(pa.table({"source": ["u"], "target": ["v"]}), folder / "edges.parquet")
    with pytest.raises(DataError, match="the labels have only one class"):
        read_party(folder)
    nodes["label"] = pa.array([3, 4], pa.int8())
    parquet.write_table(pa.table(nodes), folder / "mine.parquet")
    read = read_party(folder)
    assert read.features.tolist() == [[1, 1], [0, 2**40]]
    assert (read.ids.tolist(), read.classes) == (["u", "v"], ("3", "4"))


@pytest.mark.parametrize(("missing", "filled"), [("zero", 0.0), ("mean", 1.0)])
@pytest.mark.parametrize("token", ["", "NA", "nan", " "])
def test_missing_features_are_refused_or_filled_as_asked(tmp_path, missing, filled, token):
    folder = folder_with(tmp_path / "a", NODES.replace(",-2,", f",{token},"))
    with pytest.raises(DataError, match=r"nodes\.csv: column 'score', row 2: the value is missing"):
        read_party(folder)
    assert read_party(folder, missing).features[:, 1].tolist() == [1.5, filled, 0.5]


def test_a_column_without_any_value_is_filled_with_zeros(tmp_path):
    folder = folder_with(tmp_path, "id,a,b\n1,,3\n2,,4\n", "source,target\n", "")
    assert read_party(folder, "mean").features.tolist() == [[0, 3], [0, 4]]


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"manifest": None}, r"party\.toml: cannot be read .*the folder of a party has party\.toml"),
        ({"manifest": "name = "}, r"party\.toml: is not valid TOML"),
        ({"manifest": 'lable = "x"'}, "has the unknown key 'lable'; known keys are name, id, .*label"),
        ({"manifest": "id = 3"}, r"party\.toml: id=3: must be a string"),
        ({"manifest": 'name = "all"'}, r"party\.toml: party 'all': train\.labels = .all. means all parties"),
        ({"manifest": "schema = 2"}, "this version reads schema 1"),
        ({"manifest": 'id_type = "float"'}, 'must be "integer" or "string"'),
        ({"manifest": 'nodes = "nodes.txt"'}, "must end in .parquet or .csv"),
        ({"manifest": 'nodes = "other.csv"'}, r"other\.csv: does not exist"),
        ({"nodes": None}, r"has neither of nodes\.parquet and nodes\.csv"),
        ({"edges": None}, r"has neither of edges\.parquet and edges\.csv"),
        ({"nodes": ""}, r"nodes\.csv: is empty; its first line must name the columns"),
        ({"nodes": "id,age,label,split\n"}, "has no rows"),
        ({"nodes": "id,label,split\n7,x,\n3,y,\n9,x,\n"}, "no feature column"),
        ({"nodes": NODES.replace("id,", "key,")}, "has no column 'id'; its first line names 5 other columns"),
        ({"nodes": NODES.replace(",", ";")}, r"nodes\.csv: .* separated by semicolons; save it with commas\.$"),
        ({"edges": "source\ttarget\n7\t3,5\n"}, r"edges\.csv: .* separated by tabs; save it with commas\.$"),
        ({"nodes": NODES.replace("age", "score")}, "columns 2 and 3 have the same name"),
        ({"nodes": NODES.replace("\n9,", "\n7,")}, "column 'id', row 3: the id is also in an earlier row"),
        ({"nodes": NODES.replace("\n9,", "\n,")}, "column 'id', row 3: is empty"),
        ({"nodes": NODES.replace(",40,", ",old,")}, "column 'age', row 2: is not a number"),
        ({"nodes": NODES.replace(",40,", ",1e99,")}, "column 'age', row 2: is infinite"),
        ({"nodes": NODES.replace(",40,", ",")}, "row 2 has 4 values for 5 columns"),
        ({"nodes": NODES.replace("train", "learn")}, "column 'split', row 1: must be one of train, validation, test"),
        (
            {"manifest": MANIFEST + 'classes = ["x", "z"]'},
            "column 'label', row 2: is not among the 2 classes that party.toml lists",
        ),
        (
            {"manifest": 'label = ["age", "score"]\nsplit = "label"'},
            r"column 'age', row 1 \(and 2 more\): must be 0, 1, or empty",
        ),
        (
            {"manifest": 'id_type = "integer"', "nodes": NODES.replace("\n9,", "\nu9,")},
            'row 3: is not an integer, but party.toml sets id_type = "integer"',
        ),
        ({"nodes": NODES.replace(",40,", ",-Inf,")}, "column 'age', row 2: is infinite"),
        ({"nodes": "\n" + NODES.replace("\n3,", "\n\n\n3,").replace(",40,", ",old,")}, "column 'age', row 2: is not"),
        ({"nodes": "\n" + NODES.replace("\n3,", "\n\n\n3,").replace(",40,", ",")}, "row 2 has 4 values for 5 columns"),
        ({"edges": "source,target\n7,3\n3,8\n1,7\n"}, "column 'source', row 3: the id is not among this party's nodes"),
        ({"edges": "source,target\n7,3\n3,8\n4,5\n"}, r"column 'source', row 3"),
        ({"edges": "source,target\n7,3\n3,8\n9,5\n"}, r"column 'target', row 2 \(and 1 more\)"),
        ({"edges": "source,target\n7,u3\n"}, "column 'target', row 1: is not an integer, but the ids of the nodes are"),
        ({"edges": "from,to\n7,3\n"}, "has no column 'source'"),
        (
            {"edges": "source,target,w\n7,3,\n", "manifest": 'weight = "w"\nlabel = "label"\nsplit = "split"'},
            "weight is",
        ),
    ],
)
def test_an_error_in_a_folder_names_file_column_and_row(tmp_path, files, said):
    with pytest.raises(DataError, match=said):
        read_party(folder_with(tmp_path / "a", **files))


def test_all_faults_of_party_toml_are_listed_together(tmp_path):
    with pytest.raises(DataError) as caught:
        read_party(folder_with(tmp_path / "a", manifest='id = 3\nlable = "x"\nid_type = "float"\n'))
    for part in ("id=3: must be a string", "unknown key 'lable'", 'must be "integer" or "string"'):
        assert part in str(caught.value)


def test_all_faults_of_the_tables_are_listed_together(tmp_path):
    nodes = NODES.replace(",40,", ",old,").replace(",-2,", ",inf,").replace("train", "learn").replace("\n9,", "\n7,")
    with pytest.raises(DataError) as caught:
        read_party(folder_with(tmp_path / "a", nodes))
    for part in (
        "nodes.csv: column 'id', row 3: the id is also in an earlier row",
        "nodes.csv: column 'age', row 2: is not a number",
        "nodes.csv: column 'score', row 2: is infinite",
        "nodes.csv: column 'split', row 1: must be one of train, validation, test",
    ):
        assert part in str(caught.value)
    assert "\n" not in str(caught.value)


def test_faults_of_both_tables_and_of_one_column_are_listed_together(tmp_path):
    nodes = NODES.replace(",40,", ",old,").replace("7,30,", "7,,").replace("9,50,", "7,inf,")
    edges = "source,target,w\n7,8\n4,3\n".replace("8\n", "8,-1\n").replace("4,3\n", "4,3,\n")
    with pytest.raises(DataError) as caught:
        read_party(folder_with(tmp_path / "a", nodes, edges, MANIFEST + 'weight = "w"\n'))
    for part in (
        "nodes.csv: column 'id', row 3: the id is also in an earlier row",
        "edges.csv: column 'source', row 2: the id is not among",
        "edges.csv: column 'target', row 1: the id is not among",
        "edges.csv: column 'w', row 2: the weight is missing",
        "nodes.csv: column 'age', row 3: is infinite",
        "nodes.csv: column 'age', row 2: is not a number",
        "nodes.csv: column 'age', row 1: the value is missing",
    ):
        assert part in str(caught.value)


@pytest.mark.parametrize(("labels", "found"), [((",", ",", ","), "no class"), ((",x,", ",x,", ",,"), "only one class")])
def test_labels_of_fewer_than_two_classes_are_refused_with_file_and_column(tmp_path, labels, found):
    nodes = "id,age,label,split\n" + "".join(
        f"{number},30,{label.strip(',')},train\n" for number, label in zip((7, 3, 9), labels, strict=True)
    )
    with pytest.raises(DataError, match=rf"nodes\.csv: column 'label': the labels have {found}; .* remove label from"):
        read_party(folder_with(tmp_path / "a", nodes))


def test_a_missing_column_is_explained_with_its_key_and_a_similar_name(tmp_path):
    manifest = 'label = "lable"\nsplit = "part"\n'
    with pytest.raises(DataError) as caught:
        read_party(folder_with(tmp_path / "a", manifest=manifest))
    for part in (
        "has no column 'lable' (did you mean 'label'?); its first line names 5 other columns. Set label to the name of",
        "has no column 'part'; its first line names 5 other columns. Set split to the name of a column in party.toml.",
    ):
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("nodes", "edges"),
    [
        (NODES, "source,target\n7, 3\n3,9\n"),  # integers
        (NODES.replace("\n9,", "\nu9,"), "source,target\n7,3 \n3,u9\n"),
        (NODES.replace("\n3,", "\n3 ,"), "source,target\n7,3\n7,9\n"),
    ],
)
def test_an_id_that_differs_from_a_node_only_by_white_space_is_explained(tmp_path, nodes, edges):
    with pytest.raises(DataError, match=r"1 of these ids are wrong only because of white space.*id_whitespace"):
        read_party(folder_with(tmp_path / "a", nodes, edges))


def test_all_missing_columns_are_listed_together(tmp_path):
    manifest = 'id = "key"\nlabel = "label"\nsplit = "part"\nsource = "from"\n'
    with pytest.raises(DataError, match=r"column 'key'.*column 'part'.*edges\.csv: has no column 'from'"):
        read_party(folder_with(tmp_path / "a", manifest=manifest))


def test_of_many_faults_the_first_eight_are_shown(tmp_path):
    names = [f"c{number}" for number in range(12)]
    nodes = f"id,{','.join(names)}\n1{',x' * 12}\n"
    with pytest.raises(DataError, match=r"column 'c7'.* There are 4 more faults\.") as caught:
        read_party(folder_with(tmp_path / "a", nodes, "source,target\n", ""))
    assert "'c8'" not in str(caught.value)


@pytest.mark.parametrize("text", ["x = " + "[" * 5000, "x = " + "{a=" * 5000])
def test_deeply_nested_toml_is_refused_in_one_line(tmp_path, text):
    with pytest.raises(DataError, match=r"party\.toml: is nested too deeply\.$"):
        read_party(folder_with(tmp_path / "a", manifest=text))


def test_what_is_missing_may_be_filled_by_settings_or_by_an_option(tmp_path):
    with pytest.raises(DataError, match=r"--missing zero or mean at `glasu join` .* data\.missing = \"zero\""):
        read_party(folder_with(tmp_path / "a", NODES.replace(",-2,", ",,")))


def test_a_file_without_read_permission_is_reported(tmp_path, monkeypatch):
    folder = folder_with(tmp_path / "a")
    monkeypatch.setattr(Path, "open", lambda path, *mode, **more: os.open(tmp_path / "none" / "x", os.O_RDONLY))
    with pytest.raises(DataError, match=r"nodes\.csv: cannot be opened \(No such .*\); give this user read permission"):
        read_table(folder / "nodes.csv")


def test_no_function_of_ours_is_left_to_threads_of_pyarrow():
    """A lock released at interpreter shutdown can abort the process after the correct line was printed."""
    sources = Path(tables.__file__).parents[1].rglob("*.py")
    assert not [path for path in sources if "invalid_row_handler" in path.read_text()]


@pytest.mark.parametrize("name", ["nodes.csv", "nodes.parquet"])
def test_a_full_disk_names_the_table(tmp_path, name):
    (tmp_path / name).symlink_to("/dev/full")
    with pytest.raises(OSError, match=f"No space left on device.*{name}|{name}.*No space left on device"):
        write_table({"x": np.arange(100_000)}, tmp_path / name)


def test_a_file_that_is_not_parquet_is_refused(tmp_path):
    folder = folder_with(tmp_path, manifest=MANIFEST + 'nodes = "nodes.parquet"')
    (folder / "nodes.parquet").write_text("not parquet")
    with pytest.raises(DataError, match=r"nodes\.parquet: is not a Parquet file"):
        read_party(folder)


def test_text_in_parquet_is_no_feature(tmp_path):
    parquet.write_table(pa.table({"id": [1, 2], "city": ["Bern", "Rome"]}), tmp_path / "nodes.parquet")
    with pytest.raises(DataError, match="column 'city' of type string is not numeric"):
        read_party(folder_with(tmp_path, None, "source,target\n1,2\n", ""))


def test_ids_that_are_neither_integers_nor_strings_are_refused(tmp_path):
    parquet.write_table(pa.table({"id": [1.0, 2.0], "x": [1, 2]}), tmp_path / "nodes.parquet")
    with pytest.raises(DataError, match="ids are integers or strings"):
        read_party(folder_with(tmp_path, None, "source,target\n1,2\n", ""))
