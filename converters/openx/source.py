"""Downloads the shards of Open X-Embodiment from a Hugging Face hub."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...core.format.sources import LocalCache, RemoteDataset, RemoteShard
from ...core.remote.hub_source import HubFolderSource

REPOSITORY = "jxu124/OpenX-Embodiment"
"""The repository on the hub."""


class OpenXSource(HubFolderSource):
    """The repository `jxu124/OpenX-Embodiment`: ids are its folders with tar archives, like `bridge`.

    The loader script of the repository is neither fetched nor run.
    """

    name = "openx"
    repository = REPOSITORY
    suffixes = (".tar",)
    pickled = True
    local_cache = LocalCache("openx", "OPENX_DATASET_DIR", "~/openx")

    def shards(self, dataset: RemoteDataset, folder: Path) -> list[RemoteShard]:
        """Return the archives."""
        return [RemoteShard((file,)) for file in dataset.files]

    def reader_options(self, dataset_id: str) -> Mapping[str, Any]:
        """The id, which the shards need not bear."""
        return {"id": dataset_id}
