"""Downloads the simulated part of RoboSet from a Hugging Face hub."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...core.remote.hub import HubFolderSource


class RobosetSource(HubFolderSource):
    """The repository `jdvakil/RoboSet_Sim`, of which every folder with HDF5 files is a dataset."""

    name = "roboset"
    repository = "jdvakil/RoboSet_Sim"
    suffixes = (".h5", ".hdf5")

    def reader_options(self, dataset_id: str) -> Mapping[str, Any]:
        """The id, which the folder of the files does not state."""
        return {"id": dataset_id}
