"""Reddit from small files of the format that PyG downloads."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.sparse as sp
import torch

from glasu.config import DataConfig, RunConfig
from glasu.data.sources.catalog import load_parties
from glasu.errors import DataError
from support.whole import load_whole

NODES = 100


@pytest.fixture
def raw(tmp_path):
    """Write the two files below a data root and return their folder."""
    folder = tmp_path / "reddit" / "raw"
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    ends = rng.integers(0, NODES, (2, 400))  # with self loops and repetitions
    rows, columns = np.concatenate([ends, ends[::-1]], axis=1)
    np.savez(
        folder / "reddit_data.npz",
        feature=rng.standard_normal((NODES, 12)),
        label=rng.integers(0, 4, NODES),
        node_types=rng.integers(1, 4, NODES),
        node_ids=np.arange(NODES),
    )
    sp.save_npz(folder / "reddit_graph.npz", sp.coo_matrix((np.ones(800), (rows, columns)), shape=(NODES, NODES)))
    return folder


def config(raw, **data):
    return RunConfig(data=DataConfig(name="reddit", root=str(raw.parents[1]), **data))


def test_it_is_the_graph_that_pyg_reads(raw, tmp_path):
    from torch_geometric.datasets import Reddit
    from torch_geometric.utils import remove_self_loops

    (tmp_path / "pyg").mkdir()
    (tmp_path / "pyg" / "raw").symlink_to(raw)
    theirs = Reddit(str(tmp_path / "pyg"))[0]
    ours = load_whole(config(raw, split="public"))
    torch.testing.assert_close(torch.from_numpy(ours.features), theirs.x)
    expected = remove_self_loops(theirs.edge_index)[0]
    assert set(map(tuple, ours.graph.edge_index().T.tolist())) == set(map(tuple, expected.T.tolist()))
    assert ours.graph.num_edges == expected.shape[1]
    assert ours.labels.tolist() == theirs.y.tolist()
    parts = (ours.splits.train, ours.splits.validation, ours.splits.test)
    for part, mask in zip(parts, (theirs.train_mask, theirs.val_mask, theirs.test_mask), strict=True):
        assert part.tolist() == torch.nonzero(mask).ravel().tolist()


def test_two_thirds_train_in_the_papers_split(raw):
    splits = load_whole(config(raw)).splits
    assert abs(len(splits.train) - 66) <= 2
    assert len(splits.train) + len(splits.validation) + len(splits.test) == NODES


def test_it_is_divided_and_nothing_is_written_beside_the_files(raw):
    parties = load_parties(config(raw))
    assert [party.num_features for party in parties] == [4, 4, 4]
    assert sorted(path.name for path in raw.parents[1].rglob("*")) == [
        "raw",
        "reddit",
        "reddit_data.npz",
        "reddit_graph.npz",
    ]


def test_missing_files_are_named_with_where_to_get_and_put_them(raw):
    (raw / "reddit_graph.npz").unlink()
    with pytest.raises(DataError) as caught:
        load_parties(config(raw))
    for said in ("reddit_graph.npz", str(raw), "https://data.dgl.ai/dataset/reddit.zip", '"synthetic"', "232965"):
        assert said in str(caught.value)


def test_damaged_files_are_reported(raw):
    stored = dict(np.load(raw / "reddit_data.npz"))
    sp.save_npz(raw / "reddit_graph.npz", sp.coo_matrix((3, 3)))
    with pytest.raises(DataError, match=r"shape \(3, 3\) for 100 nodes"):
        load_parties(config(raw))
    (raw / "reddit_graph.npz").write_text("no archive")
    with pytest.raises(DataError, match="cannot be read as a scipy matrix"):
        load_parties(config(raw))
    del stored["label"]
    np.savez(raw / "reddit_data.npz", **stored)
    with pytest.raises(DataError, match="no array 'label'"):
        load_parties(config(raw))
