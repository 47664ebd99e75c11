"""The rows of a saved storage of tensors as steps of episodes, without a storage to load them into."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from ..errors import FormatError, SchemaError
from ..format import load_json
from ..storages import LazyTensorStorage, TensorStorage
from ..storages.layout import is_tree
from ..torchrl import stat_fingerprint
from .folders import open_folder
from .manifest import StorageManifest
from .storage_rows import StorageRows
from .tensor_reader import read_contents

__all__ = ["SavedTensorRows"]

_METADATA = "storage_metadata.json"


class SavedTensorRows(StorageRows):
    """Gives the valid rows of what a `TensorStorageCheckpointer`, ours or TorchRL's, saved: the oldest first.

    `cursor` is the row that the writer of the buffer would have written next, which TorchRL notes elsewhere. The files
    are mapped and not loaded; ours were compared with their digests. FormatError for other checkpoints,
    CorruptDataError for damaged ones, SchemaError for rows that have no episodes.
    """

    def __init__(self, path: Path, cursor: int | None) -> None:
        folder = open_folder(path, "TensorStorageCheckpointer")
        ndim = _dimensions(folder)
        saved = read_contents(folder, LazyTensorStorage(1, ndim=ndim), raw=False)
        if saved is None or not saved.length:
            raise SchemaError(f"{folder} is the checkpoint of a storage that nothing was ever written to")
        if not is_tree(saved.structure):
            raise SchemaError(f"{folder} holds a {saved.structure}; the steps of episodes are tensordicts")
        storage = TensorStorage(saved.structure.build(iter(saved.tensors), saved.lead), device="auto", ndim=ndim)
        last = saved.last_row
        if last is None and cursor is not None:
            last = (cursor - 1) % saved.lead[0]
        storage.last_cursor = last
        super().__init__(storage)
        self.path = folder
        self.manifest = replace(self.manifest, content_digest=stat_fingerprint(folder))


def _dimensions(folder: Path) -> int:
    """How many dimensions count elements."""
    manifest = StorageManifest.load(folder)
    if manifest is not None:
        return max(manifest.ndim, 1)
    file = folder / "meta.json"
    if not file.is_file():
        raise FormatError(f"{folder} holds no tensordict; the steps of episodes are tensordicts")
    document: Any = load_json(file)
    shape = document.get("shape") if isinstance(document, dict) else None
    return max(len(shape), 1) if isinstance(shape, list) else 1
