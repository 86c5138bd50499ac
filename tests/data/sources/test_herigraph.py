"""HeriGraph from CSV files of the published columns, and from the graphs and labels below the data root."""

from __future__ import annotations

import numpy as np
import pytest

from glasu.config import DataConfig, RunConfig, TrainConfig
from glasu.data.sources.catalog import load_data, load_parties
from glasu.data.sources.herigraph import read_herigraph
from glasu.errors import DataError

NODES = 60
IDS = [51_859_675_789 + 7 * node for node in range(NODES)]
CLASSES = ["Building Elements", "Urban Form Elements", "Gastronomy", "Interior Scenery", "Natural Features",
           "Monuments and Buildings", "People's Activity", "Artifact Products", "Urban Scenery"]  # fmt: skip
VISUAL = [
    "ID",
    "IO_Type",
    *(f"Vis_Feat_{i}" for i in range(512)),
    "Face_num_faces",
    "Face_prob",
    "Face_ratio",
    *(f"SCE_{i}" for i in range(365)),
    *(f"ATT_{i}" for i in range(102)),
]
LABELS = ["ID", *CLASSES, "category", "category_id", "category_vote", "cat_id_vote", "category_stack", "cat_id_stack",
          "conf", "category_same", "labelled"]  # fmt: skip
EDGES = ["0", "1", "Week_0", "Week_1", "dist", "Temporal_Similarity", "User_0", "User_1", "relationship",
         "Social_Similarity", "GEO_0", "GEO_1", "geo_distance", "Spatial_Similarity", "One_Edge",
         "Same_Node"]  # fmt: skip


def table(path, columns, rows, separator="\t"):
    """Write a table as pandas does, with a column of row numbers that has no name."""
    lines = [separator.join(["", *columns])]
    lines += [separator.join([str(number), *map(str, row)]) for number, row in enumerate(rows)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def value(node, column):
    """Return an image feature that encodes node and column."""
    return node + column / 1000


def links():
    """List (node, node, temporal, social, spatial)."""
    for node in range(NODES - 2):
        yield node, node + 1, 1.0 if node % 2 else 0.5, 0.0, 0.25
        yield node, node + 2, 0.0, 1 / 3, 0.0


@pytest.fixture
def root(tmp_path):
    """Write a city whose three files list the posts in three orders; every third post is not labelled."""
    folder = tmp_path / "heri" / "Suzhou"
    folder.mkdir(parents=True)
    write_city(folder)
    return tmp_path


def write_city(folder, separator="\t", *, visual=VISUAL, labels=LABELS, edges=EDGES):
    rng = np.random.default_rng(3)
    rows = [[IDS[node], "outdoor", *(value(node, i) for i in range(982))] for node in rng.permutation(NODES)]
    table(folder / "Visual_Features.csv", visual, rows, separator)
    rows = []
    for node in rng.permutation(NODES):
        soft = [0.9 if node % 9 == label else 0.0125 for label in range(9)]
        rows.append([IDS[node], *soft, "c", node % 9, "c", 0, "c", 0, 0.9, True, bool(node % 3)])
    table(folder / "Attribute_Labels.csv", labels, rows, separator)
    pairs = [*links(), *((b, a, *weights) for a, b, *weights in links()), (4, 4, 1.0, 1.0, 1.0)]
    rows = [
        [IDS[a], IDS[b], 202205, 202205, 0, temporal, "u@N04", "v@N04", 1, social, 1, 2, 0.0, spatial, True, a == b]
        for a, b, temporal, social, spatial in (pairs[i] for i in rng.permutation(len(pairs)))
    ]
    table(folder / "Edge_List.csv", edges, rows, separator)


def config(root, name="suzhou", *, method="glasu", **data):
    return RunConfig(data=DataConfig(name=name, root=str(root), **data), train=TrainConfig(method=method))


def test_files_in_three_orders_are_joined_by_id(root):
    parties = load_parties(config(root))
    assert [party.name for party in parties] == ["a", "b", "c"]
    for party, start in zip(parties, (0, 515, 880), strict=True):
        assert party.ids.tolist() == IDS
        expected = [[value(node, start + i) for i in range(party.num_features)] for node in range(NODES)]
        np.testing.assert_allclose(party.features, np.array(expected, np.float32))
        assert party.labels.tolist() == [node % 9 if node % 3 else -1 for node in range(NODES)]
        assert party.classes == tuple(CLASSES)


def test_the_image_blocks_leave_the_faces_out(root):
    assert [party.num_features for party in load_parties(config(root))] == [512, 365, 102]
    (everything,) = load_parties(config(root, method="centralized"))
    assert everything.num_features == 979


def test_each_relation_is_a_graph_weighted_by_its_similarity(root):
    found = [
        dict(zip(map(tuple, party.graph.edge_index().T.tolist()), party.graph.weights.tolist(), strict=True))
        for party in load_parties(config(root))
    ]
    for graph, place in zip(found, range(3), strict=True):
        expected = {(a, b): weights[place] for a, b, *weights in links() if weights[place] > 0}
        expected |= {(b, a): weight for (a, b), weight in expected.items()}
        assert graph == pytest.approx(expected)


def test_all_relations_together_are_what_centralized_and_simulated_see(root):
    pairs = {(a, b) for a, b, *_ in links()} | {(b, a) for a, b, *_ in links()}
    for method in ("centralized", "simulated"):
        for party in load_parties(config(root, method=method)):
            assert set(map(tuple, party.graph.edge_index().T.tolist())) == pairs
    loaded = load_data(config(root))
    assert (loaded.statistics.nodes, loaded.statistics.edges) == (NODES, len(pairs) // 2)
    assert loaded.notes == ()


def test_the_papers_split_takes_a_fifth_and_a_half_of_the_labelled_nodes_of_each_class(root):
    party = load_parties(config(root))[0]
    sizes = [len(part) for part in (party.splits.train, party.splits.validation, party.splits.test)]
    assert sum(sizes) == (party.labels >= 0).sum() == 40
    counts = [np.bincount(party.labels[part], minlength=9) for part in (party.splits.train, party.splits.test)]
    present = np.unique(party.labels[party.labels >= 0])
    assert (counts[0][present] >= 1).all()
    assert abs(counts[1].sum() - 20) <= 3


def test_commas_separate_columns_as_well(root):
    write_city(root / "heri" / "Suzhou", ",")
    assert [party.num_features for party in load_parties(config(root))] == [512, 365, 102]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"visual": ["Index", *VISUAL[1:]]}, "must have ID, IO_Type and 982"),
        ({"visual": [*VISUAL[:-1], "IO_Type"]}, "must have ID, IO_Type and 982"),
        ({"labels": [*LABELS[:-1], "labeled"]}, "9 soft labels, then category, and labelled"),
        ({"labels": ["ID", *LABELS[2:], "more"]}, "9 soft labels, then category, and labelled"),
        ({"edges": [*EDGES[:9], "Social", *EDGES[10:]]}, "must have 0, 1, Temporal_Similarity, Social_Similarity"),
    ],
)
def test_other_columns_are_refused_with_the_expected_ones(root, changes, said):
    write_city(root / "heri" / "Suzhou", **changes)
    with pytest.raises(DataError, match=said):
        load_parties(config(root))


@pytest.mark.parametrize(
    ("file", "old", "new", "said"),
    [
        ("Attribute_Labels.csv", str(IDS[5]), "17", "is a post that Visual_Features.csv does not have"),
        ("Attribute_Labels.csv", str(IDS[5]), str(IDS[6]), "the id is also in an earlier row"),
        ("Edge_List.csv", str(IDS[5]), "17", "is a post that Visual_Features.csv does not have"),
        ("Visual_Features.csv", "5.981", "", "is empty"),
        ("Visual_Features.csv", "5.981", "five", "is not a number"),
    ],
)
def test_ids_that_do_not_match_and_missing_values_are_refused(root, file, old, new, said):
    path = root / "heri" / "Suzhou" / file
    path.write_text(path.read_text().replace(f"\t{old}\t", f"\t{new}\t").replace(f"\t{old}\n", f"\t{new}\n"))
    with pytest.raises(DataError, match=said):
        load_parties(config(root))


def test_a_pointer_of_git_lfs_is_recognised(root):
    (root / "heri" / "Suzhou" / "Edge_List.csv").write_text(
        "version https://git-lfs.github.com/spec/v1\noid sha256:0\n"
    )
    with pytest.raises(DataError, match="git lfs pull"):
        read_herigraph(root / "heri" / "Suzhou")


def test_missing_files_are_named_with_where_to_get_and_put_them(root):
    (root / "heri" / "Suzhou" / "Edge_List.csv").unlink()
    with pytest.raises(DataError, match=r"^suzhou: Edge_List.csv not found"):
        load_parties(config(root))
    with pytest.raises(DataError) as caught:
        load_parties(config(root, "amsterdam"))
    for said in ("Visual_Features.csv", "dataset/Amsterdam", "zzbn12345/Heri_Graphs", str(root / "heri" / "Amsterdam")):
        assert said in str(caught.value)


@pytest.mark.parametrize(
    ("name", "relations", "widths"),
    [
        ("venice", [249120, 242576, 221414], [504, 504, 504]),
        ("suzhou", [293328, 602821, 415049], [308, 12, 5]),
    ],
)
def test_without_the_csv_files_the_graphs_below_the_root_are_used_with_a_note(data_root, name, relations, widths):
    if (data_root / "heri").exists():
        pytest.skip("the CSV files are there")
    loaded = load_data(config(data_root, name))
    assert [party.graph.num_edges // 2 for party in loaded.parties] == relations
    assert [party.num_features for party in loaded.parties] == widths
    assert "cannot reproduce the paper's accuracy" in loaded.notes[0]
    assert load_data(config(data_root, f"heri_{name}")).notes != ()
