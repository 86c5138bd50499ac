"""Any PyG data set by name: "pyg:Coauthor/CS" is `torch_geometric.datasets.Coauthor(root, name="CS")`, in the cache."""

from __future__ import annotations

import difflib
import inspect
import warnings
from contextlib import redirect_stderr
from io import StringIO
from typing import Any

from glasu.data.partition import WholeGraph
from glasu.data.paths import cache_folder
from glasu.errors import ConfigError, DataError

PREFIX = "pyg:"
MASKS = ("train_mask", "val_mask", "test_mask")


def read_pyg(name: str) -> WholeGraph:
    """Return the one graph of a PyG data set; it is downloaded to and converted in the cache folder.

    Of several splits that PyG ships as columns of a mask, the first counts.

    Args:
        name: "pyg:Class" or "pyg:Class/name", as "pyg:Coauthor/CS" or "pyg:Actor".
    """
    from torch_geometric import datasets

    kind, _, argument = name.removeprefix(PREFIX).partition("/")
    known = [item for item in datasets.__all__ if isinstance(getattr(datasets, item, None), type)]
    if kind not in known:
        match = difflib.get_close_matches(kind, known, n=1)
        hint = f"; did you mean {PREFIX}{match[0]}?" if match else "."
        raise ConfigError(f"data.name={name!r}: torch_geometric.datasets has no {kind!r}{hint}")
    maker = getattr(datasets, kind)
    parameters = _required(maker)
    if parameters - {"root", "name"}:
        more = ", ".join(sorted(parameters - {"root", "name"}))
        raise ConfigError(f"data.name={name!r}: {kind} wants {more} too; load it yourself, and use split_vertically.")
    if ("name" in parameters) != bool(argument):
        wanted = f"takes a name: {PREFIX}{kind}/NAME" if "name" in parameters else f"takes no name: {PREFIX}{kind}"
        raise ConfigError(f"data.name={name!r}: {kind} {wanted}.")
    arguments = {"root": str(cache_folder() / "pyg" / kind)} if "root" in parameters else {}
    if argument:
        arguments["name"] = argument
    found = _constructed(maker, arguments, name)
    if len(found) != 1:
        raise DataError(f"data.name={name!r}: holds {len(found)} graphs; GLASU trains on the nodes of one.")
    data = found[0]
    for mask in MASKS if hasattr(data, "edge_index") else ():
        if data.get(mask) is not None and data[mask].ndim == 2:
            data[mask] = data[mask][:, 0]
    return WholeGraph.from_pyg(data)


def _required(maker: type) -> set[str]:
    parameters = inspect.signature(maker).parameters.values()
    return {item.name for item in parameters if item.default is item.empty and item.kind is item.POSITIONAL_OR_KEYWORD}


def _constructed(maker: Any, arguments: dict[str, str], name: str) -> Any:
    """Let PyG download and convert; where that fails, say which files to put where."""
    from torch_geometric.data import Dataset

    wanted: dict[str, Any] = {}

    def download(self: Any) -> None:
        names = self.raw_file_names
        wanted.update(folder=self.raw_dir, files=[names] if isinstance(names, str) else list(names))
        wanted["url"] = getattr(self, "url", "") if isinstance(getattr(self, "url", ""), str) else ""
        maker.download(self)

    downloads = maker.download is not Dataset.download
    noting = type(maker.__name__, (maker,), {"download": download}) if downloads else maker
    try:
        with warnings.catch_warnings(), redirect_stderr(StringIO()):  # PyG's "Downloading ..." is not our one line
            warnings.simplefilter("ignore")
            return noting(**arguments)
    except Exception as error:  # whatever the network, the disk, or a file that is not what PyG expects had against it
        why = f"{type(error).__name__}: {error}"
        if not wanted:
            folder = arguments.get("root", "the cache")
            raise DataError(
                f"data.name={name!r}: PyG cannot read its files in {folder} ({why}); remove them and try again."
            ) from error
        source = f" from {wanted['url']}" if wanted["url"] else ""
        files = ", ".join(map(str, wanted["files"]))
        raise DataError(
            f"data.name={name!r}: cannot be downloaded ({why}). Fetch {files}{source} and put it into "
            f"{wanted['folder']}; or set GLASU_CACHE to a folder that has it."
        ) from error
