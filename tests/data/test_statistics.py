"""The statistics of data sets, compared with the paper's table."""

from __future__ import annotations

import re

import numpy as np
import pytest

from glasu.config import DataConfig, RunConfig, TrainConfig
from glasu.data.graph import Graph
from glasu.data.party import PartyData
from glasu.data.sources import SOURCES, Statistics, find_source
from glasu.data.sources.catalog import load_data
from glasu.data.statistics import compare_with_paper, count_statistics, describe_size

CORA = Statistics(2_708, 10_556, 1_433, 7)


def config(name, root=None, *, method="glasu", **data):
    return RunConfig(data=DataConfig(name=name, root=root and str(root), **data), train=TrainConfig(method=method))


def test_one_graph_is_counted_by_directed_edges():
    graph = Graph.from_edges(np.array([0, 1, 1]), np.array([1, 0, 2]), 4)
    whole = PartyData("all", np.arange(4), np.ones((4, 3), np.float32), graph, np.arange(4) % 2, ("x", "y"))
    assert count_statistics([whole], divided=True) == Statistics(4, 3, 3, 2, "directed")


def test_several_graphs_are_counted_by_the_pairs_that_any_of_them_links():
    first = Graph.from_edges(np.array([0, 1, 1]), np.array([1, 0, 2]), 4)
    second = Graph.from_edges(np.array([2, 3]), np.array([1, 0]), 4)
    parties = [PartyData(name, np.arange(4), np.ones((4, 3), np.float32), graph) for name, graph in
               (("a", first), ("b", second))]  # fmt: skip
    assert count_statistics(parties) == Statistics(4, 3, 6, 0, "undirected")  # 0-1, 1-2, 0-3


def test_the_statistics_are_of_the_whole_whatever_the_method_shows():
    sizes = {"num_nodes": 200, "num_features": 9}
    methods = ("glasu", "centralized", "standalone", "simulated")
    assert len({load_data(config("synthetic", method=method, **sizes)).statistics for method in methods}) == 1
    assert len({load_data(config("demo", method=method)).statistics for method in methods}) == 1


def test_the_papers_table_has_seven_sets():
    named = [name for name in SOURCES if find_source(name).paper is not None and not name.startswith("heri_")]
    assert named == ["cora", "citeseer", "pubmed", "venice", "suzhou", "amsterdam", "reddit"]
    assert find_source("reddit").paper.edges == 114_615_892


def test_differences_name_what_differs_and_by_how_much():
    assert compare_with_paper(CORA, "cora") == {}
    assert compare_with_paper(CORA, "demo") is None
    fewer = Statistics(2708, 10000, 1433, 7)
    assert compare_with_paper(fewer, "cora") == {"edges": (10000, 10556)}
    assert describe_size(fewer, "cora") == (
        "cora: 2708 nodes, 10000 directed edges, 1433 features, 7 classes; "
        "different from the paper's table: edges 10000 (paper: 10556)"
    )
    assert describe_size(CORA, "cora").endswith("; equal to the paper's table")
    assert describe_size(fewer, "").startswith("the parties: 2708 nodes")


@pytest.mark.parametrize("name", ["cora", "citeseer", "pubmed"])
def test_planetoid_equals_the_papers_table(data_root, name):
    assert compare_with_paper(load_data(config(name, data_root)).statistics, name) == {}


@pytest.mark.parametrize("name", ["venice", "suzhou"])
def test_herigraph_has_the_papers_nodes_edges_and_classes(data_root, name):
    found = load_data(config(f"heri_{name}", data_root)).statistics
    assert set(compare_with_paper(found, f"heri_{name}")) == {"features"}


def test_train_and_split_print_one_line_of_statistics(tmp_path, capfd):
    from glasu.cli.main import main

    (tmp_path / "run.toml").write_text(
        '[data]\nname = "synthetic"\nnum_nodes = 60\nnum_features = 9\n[model]\nbackbone = "gcn"\nhidden = 8\n'
        "[train]\nnum_rounds = 1\n"
    )
    run = str(tmp_path / "run.toml")
    line = r"synthetic: 60 nodes, \d+ directed edges, 9 features, 5 classes\n"
    assert main(["split", run, "--out", str(tmp_path / "parties")]) == 0
    assert re.fullmatch(line, capfd.readouterr().err)
    assert main(["train", run, "--out", str(tmp_path / "run")]) == 0
    assert "synthetic: 60 nodes" in capfd.readouterr().err
    assert main(["train", run, "--out", str(tmp_path / "again"), "--quiet"]) == 0
    assert capfd.readouterr().err == ""
