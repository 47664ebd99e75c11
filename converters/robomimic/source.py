"""Downloads the datasets that robomimic publishes on a Hugging Face hub."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ...core.remote.hub import HubFile, HubFolderSource

_RELEASE = re.compile(r"v\d+(\.\d+)*/")
_VERSION = re.compile(r"_v\d+$")


class RobomimicSource(HubFolderSource):
    """The repository `robomimic/robomimic_datasets`, of which every HDF5 file is a dataset.

    The id of `v1.5/lift/ph/low_dim_v15.hdf5` is `lift/ph/low_dim`. Files that would have the same id keep their
    version, `lift/ph/low_dim_v15`, and their whole path where that is the same, too.
    """

    name = "robomimic"
    repository = "robomimic/robomimic_datasets"
    suffixes = (".hdf5", ".h5")

    def datasets_among(self, files: Sequence[HubFile]) -> Mapping[str, Sequence[HubFile]]:
        """Every file by its id."""
        data = {file.path: file for file in self.data_files(files)}
        return {name: [data[path]] for name, path in ids_of(data).items()}

    def place_of(self, dataset_id: str) -> str | None:
        """None: which file an id names depends on the others."""
        return None

    def reader_options(self, dataset_id: str) -> Mapping[str, Any]:
        """The id, which the name of the file does not state."""
        return {"id": dataset_id}


def ids_of(paths: Iterable[str]) -> dict[str, str]:
    """Return ids of files, each the shortest that no other file could have, with the path of its file."""
    left, found = sorted(paths), dict[str, str]()
    for shorten in (_without_version, _without_release, _without_suffix):
        alike = defaultdict(list)
        for path in left:
            alike[shorten(path)].append(path)
        single = {name: same[0] for name, same in alike.items() if len(same) == 1 and name not in found}
        found |= single
        left = [path for path in left if path not in single.values()]
    return found | {path: path for path in left}


def _without_suffix(path: str) -> str:
    return path.rpartition(".")[0]


def _without_release(path: str) -> str:
    return _RELEASE.sub("", _without_suffix(path), count=1)


def _without_version(path: str) -> str:
    return _VERSION.sub("", _without_release(path))
