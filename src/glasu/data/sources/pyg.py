"""PyG data: convert a `torch_geometric.data.Data`, and read any PyG data set by name.

"pyg:Coauthor/CS" is `torch_geometric.datasets.Coauthor(root, name="CS")` with its root in the cache folder.
"""

from __future__ import annotations

import difflib
import inspect
import warnings
from contextlib import redirect_stderr
from io import StringIO
from typing import TYPE_CHECKING, Any

import numpy as np
import scipy.sparse as sp

from glasu.config import DataConfig
from glasu.data.graph import Graph
from glasu.data.partition import partition as divide
from glasu.data.party import Labels, PartyData, Splits
from glasu.data.preprocessing import Features, compact_features
from glasu.data.sources import PYG_PREFIX, DataSource, RawData
from glasu.errors import ConfigError, DataError

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray
    from torch_geometric.data import Data

    from glasu.config import RunConfig
    from glasu.data.cache.store import Cache

MASKS = ("train_mask", "val_mask", "test_mask")


def split_vertically(
    data: Data,
    num_clients: int = 3,
    edge_fraction: float = 0.8,
    seed: int = 0,
    *,
    partition: str = "features",
    concentration: float = 1.0,
    correlation: float = 0.5,
) -> list[PartyData]:
    """Divide a PyG graph among clients named a, b, c, ...; for the arguments, see the keys of [data]."""
    settings = DataConfig(
        num_clients=num_clients,
        edge_fraction=edge_fraction,
        partition=partition,
        concentration=concentration,
        correlation=correlation,
    )
    return divide(convert_graph(data), settings, seed)


def convert_graph(data: Data) -> PartyData:
    """Convert a PyG graph to one party called "all"; an `edge_attr` with several columns is ignored."""
    if not hasattr(data, "edge_index"):
        raise DataError(f"a {type(data).__name__} is not a graph; pass a torch_geometric.data.Data.")
    for key in ("x", "edge_index"):
        if data.get(key) is None:
            raise DataError(f"the PyG graph has no {key}; a party needs features and edges, even an empty edge_index.")
    features = _convert_features(data.x)
    source, target = _to_numpy(data.edge_index)
    graph = Graph.from_edges(source, target, features.shape[0], _convert_weights(data))
    labels, classes = _convert_labels(data.get("y"))
    splits = _convert_splits(data, features.shape[0])
    return PartyData("all", np.arange(features.shape[0]), features, graph, labels, classes, splits)


def read_pyg(name: str, cache_root: Path) -> PartyData:
    """Return the graph of a PyG data set, which PyG downloads to the cache folder.

    If PyG provides several splits as columns of a mask, the first one is used.

    Args:
        name: "pyg:Class" or "pyg:Class/name", for example "pyg:Actor" or "pyg:Coauthor/CS".
        cache_root: the cache folder.
    """
    from torch_geometric import datasets

    kind, _, argument = name.removeprefix(PYG_PREFIX).partition("/")
    known = [item for item in datasets.__all__ if isinstance(getattr(datasets, item, None), type)]
    if kind not in known:
        match = difflib.get_close_matches(kind, known, n=1)
        hint = f"; did you mean {PYG_PREFIX}{match[0]}?" if match else "."
        raise ConfigError(f"data.name={name!r}: torch_geometric.datasets has no {kind!r}{hint}")
    maker = getattr(datasets, kind)
    parameters = _required_parameters(maker)
    if parameters - {"root", "name"}:
        more = ", ".join(sorted(parameters - {"root", "name"}))
        raise ConfigError(f"data.name={name!r}: {kind} also needs {more}; load it in Python and use split_vertically.")
    if ("name" in parameters) != bool(argument):
        usage = (
            f"takes a name: {PYG_PREFIX}{kind}/NAME" if "name" in parameters else f"takes no name: {PYG_PREFIX}{kind}"
        )
        raise ConfigError(f"data.name={name!r}: {kind} {usage}.")
    arguments = {"root": str(cache_root / "pyg" / kind)} if "root" in parameters else {}
    if argument:
        arguments["name"] = argument
    found = _construct(maker, arguments, name)
    if len(found) != 1:
        raise DataError(f"data.name={name!r}: has {len(found)} graphs; GLASU trains on the nodes of one graph.")
    data = found[0]
    for mask in MASKS if hasattr(data, "edge_index") else ():
        if data.get(mask) is not None and data[mask].ndim == 2:
            data[mask] = data[mask][:, 0]
    return convert_graph(data)


def _read(config: RunConfig, cache: Cache) -> RawData:
    return RawData([read_pyg(config.data.name, cache.root)])


PYG = DataSource(_read)


def _required_parameters(maker: type) -> set[str]:
    parameters = inspect.signature(maker).parameters.values()
    return {item.name for item in parameters if item.default is item.empty and item.kind is item.POSITIONAL_OR_KEYWORD}


def _construct(maker: Any, arguments: dict[str, str], name: str) -> Any:
    """Let PyG download and convert a data set. If this fails, the error names the missing files and their folder."""
    from torch_geometric.data import Dataset

    wanted: dict[str, Any] = {}

    def download(self: Any) -> None:
        names = self.raw_file_names
        wanted.update(folder=self.raw_dir, files=[names] if isinstance(names, str) else list(names))
        wanted["url"] = getattr(self, "url", "") if isinstance(getattr(self, "url", ""), str) else ""
        maker.download(self)

    downloads = maker.download is not Dataset.download
    observed = type(maker.__name__, (maker,), {"download": download}) if downloads else maker
    try:
        with warnings.catch_warnings(), redirect_stderr(StringIO()):  # PyG prints "Downloading ..."
            warnings.simplefilter("ignore")
            return observed(**arguments)
    except Exception as error:  # an error of the network, the disk, or a file that PyG cannot read
        why = f"{type(error).__name__}: {error}"
        if not wanted:
            folder = arguments.get("root", "the cache")
            raise DataError(
                f"data.name={name!r}: PyG cannot read its files in {folder} ({why}); remove them and try again."
            ) from None
        source = f" from {wanted['url']}" if wanted["url"] else ""
        files = ", ".join(map(str, wanted["files"]))
        raise DataError(
            f"data.name={name!r}: the download failed ({why}). Fetch {files}{source} and put it into "
            f"{wanted['folder']}, or set GLASU_CACHE to a folder that has it."
        ) from None


def _to_numpy(value: Any) -> NDArray[Any]:
    """Return a tensor on any device, or an array, as a numpy array."""
    return value.detach().cpu().numpy() if hasattr(value, "detach") else np.asarray(value)


def _convert_features(x: Any) -> Features:
    if not sp.issparse(x) and str(getattr(x, "layout", "")) not in ("", "torch.strided"):
        x = x.to_sparse_coo().coalesce()
        x = sp.coo_array((_to_numpy(x.values()), _to_numpy(x.indices())), shape=tuple(x.shape))
    if len(x.shape) != 2:
        raise DataError(f"x of shape {tuple(x.shape)}: features need one row per node and one column per feature.")
    return compact_features(x if sp.issparse(x) else _to_numpy(x))


def _convert_weights(data: Data) -> NDArray[np.floating] | None:
    for key in ("edge_weight", "edge_attr"):
        weights = data.get(key)
        if weights is not None and (weights.ndim == 1 or (weights.ndim == 2 and weights.shape[1] == 1)):
            if len(weights) != data.edge_index.shape[1]:
                raise DataError(f"{len(weights)} values in {key} for {data.edge_index.shape[1]} edges.")
            return _to_numpy(weights).reshape(-1)
    return None


def _convert_labels(y: Any) -> tuple[Labels | None, tuple[str, ...]]:
    """Return labels and the class names 0, 1, ...; several columns mean several labels per node.

    If `y` is a single column of floats, and some of them are not class numbers, it contains numbers to predict.
    """
    if y is None:
        return None, ()
    values = _to_numpy(y)
    if values.ndim == 2 and values.shape[1] == 1:
        values = values[:, 0]
    labels = np.where(np.isfinite(values), values, -1).astype(np.int64)
    are_classes = np.array_equal(labels, values)
    if values.ndim == 1 and values.dtype.kind == "f" and not (are_classes and (labels >= -1).all()):
        return values.astype(np.float64), ()
    if not are_classes:
        raise DataError("y has values that are not class numbers; use integers 0, 1, ..., and -1 if unknown.")
    count = labels.shape[1] if labels.ndim == 2 else int(labels.max(initial=-1)) + 1
    return labels, tuple(str(label) for label in range(count))


def _convert_splits(data: Data, num_nodes: int) -> Splits | None:
    parts = []
    for key in MASKS:
        if (found := data.get(key)) is None:
            parts.append(np.empty(0, np.int64))
            continue
        mask = _to_numpy(found)
        if mask.ndim != 1:
            raise DataError(f"{key} of shape {tuple(mask.shape)} has several splits; choose one, such as {key}[:, 0].")
        if len(mask) != num_nodes or not np.isin(mask, (0, 1)).all():
            raise DataError(
                f"{key} must be True or False for each of {num_nodes} nodes; for a list of positions, "
                "use torch_geometric.utils.index_to_mask."
            )
        parts.append(np.flatnonzero(mask))
    return Splits(*parts) if any(data.get(key) is not None for key in MASKS) else None
