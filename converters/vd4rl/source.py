"""Downloads the folders that V-D4RL publishes on a Hugging Face hub."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...core.remote.hub import HubFolderSource


class Vd4rlSource(HubFolderSource):
    """The repository `conglu/vd4rl`: ids are paths below `vd4rl`, like `main/walker_walk/random/64px`.

    An id names that very folder, and never another one whose path contains it.
    """

    name = "vd4rl"
    repository = "conglu/vd4rl"
    folder = "vd4rl"
    suffixes = (".npz", ".hdf5")

    def reader_options(self, dataset_id: str) -> Mapping[str, Any]:
        """The id, which the folder of the files does not state."""
        return {"id": dataset_id}
