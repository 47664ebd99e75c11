"""Saves storages of tensors in TorchRL's layout, and reads what TorchRL saved."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..errors import FormatError, SchemaError, UsageError
from ..format.documents import load_json
from ..storages.base import Storage, register_checkpointer
from ..storages.cursors import last_row
from ..storages.lazy_tensor import LazyMemmapStorage, LazyTensorStorage
from ..storages.pytree import tree_spec_of
from ..storages.tensor import TensorStorage
from ..storages.tree_files import is_tree
from ..torchrl.reader import stat_fingerprint
from .base import StorageCheckpointerBase
from .flat_layout import with_ragged, without_ragged
from .folders import CheckpointStaging, open_folder
from .storage_rows import StorageRows
from .tensor_reader import read_contents, read_length
from .tensor_writer import Contents, StorageManifest, describe_in_place


class TensorStorageCheckpointer(StorageCheckpointerBase):
    """Saves any `TensorStorage` as TorchRL does: a memory-mapped tensordict, or one file for each leaf of a nest.

    Files have the size of the whole capacity, as TorchRL expects, but only filled rows take room on the disk. A hidden
    file records how the data is made, the row written last and a digest of every leaf, so that damage is found when
    the checkpoint is read; of what TorchRL wrote, files that are missing or too short are found. A storage of any
    capacity that holds the rows can take them, also one that is still empty. Nothing is unpickled.

    Save hooks get the valid rows, of a tensordict, a tensor or a nest of them, and what they return is saved in its
    own shape.
    """

    def dumps(self, storage: Storage, path: str | os.PathLike[str]) -> None:
        """Write the storage to the folder `path`; parents are created, an older checkpoint is replaced at one instant.

        Raises UsageError if something that is no checkpoint is there, SchemaError for data that only a pickle could
        hold, OutOfSpaceError for want of room. A storage whose own files lie at `path` is synced and described there.
        """
        source = _tensor_storage(storage)
        if _lives_at(source, path) and source.initialized:
            describe_in_place(source, Path(path))
            return
        contents = self._contents(source, path)
        with CheckpointStaging(path) as staging:
            covered = contents.write(staging.path)
            staging.publish_noted(covered=covered)

    def _contents(self, source: TensorStorage, path: str | os.PathLike[str]) -> Contents:
        length, last = len(source), last_row(source.last_cursor)
        if not source.initialized:
            if self._save_hooks:
                raise SchemaError("save hooks need data; nothing was ever written to the storage")
            return Contents(None, source.ndim, [], [], 0, None)
        if not self._save_hooks:
            whole = source.columns.leaves
            return Contents(source.structure, source.ndim, whole, [leaf[: source.rows] for leaf in whole], length, last)
        data: Any = without_ragged(self._through_save_hooks(source, source[:], path))
        structure = tree_spec_of(data)
        tensors = structure.flatten(data)
        return Contents(structure, 0, tensors, tensors, length, last)

    def loads(self, storage: Storage, path: str | os.PathLike[str]) -> None:
        """Put the rows, the length and, where it was noted, the last cursor of the checkpoint into the storage.

        Raises DatasetNotFoundError (a FileNotFoundError) where there is no checkpoint, FormatError for another
        checkpointer's, CorruptDataError for files that are missing, cut or changed, SchemaError (a RuntimeError) for
        data of other keys, types or shapes, and for more rows than there is room for. Then nothing has changed. Of a
        checkpoint in which the storage itself lives only the length is read.
        """
        target = _tensor_storage(storage)
        folder = open_folder(path, "TensorStorageCheckpointer", hooked=bool(self._load_hooks))
        if _lives_at(target, folder):
            _refresh(target, folder)
            return
        saved = read_contents(folder, target, raw=bool(self._load_hooks))
        if saved is None:
            target.empty()
            return
        structure, tensors = saved.structure, saved.tensors
        if self._load_hooks:
            data = with_ragged(structure.unflatten(iter(tensors), saved.lead))
            data = self._through_load_hooks(data, target.contents)
            structure = tree_spec_of(data, target.ndim)
            tensors = structure.flatten(data)
        target.fill(structure, tensors, saved.length, capacity=saved.capacity, last_row=saved.last_row)


def _tensor_storage(storage: Storage) -> TensorStorage:
    if not isinstance(storage, TensorStorage):
        raise UsageError(f"a TensorStorageCheckpointer serves storages of tensors, found a {type(storage).__name__}")
    return storage


def _lives_at(storage: TensorStorage, path: str | os.PathLike[str]) -> bool:
    folder = storage.scratch_dir if isinstance(storage, LazyMemmapStorage) else None
    return folder is not None and os.path.realpath(folder) == os.path.realpath(path)


def _refresh(storage: TensorStorage, folder: Path) -> None:
    if not storage.initialized:
        raise SchemaError(
            f"the storage would put its own files in the place of those in {folder} that it is to load",
            hint="choose another scratch_dir",
        )
    storage.set_length(read_length(folder))


register_checkpointer(TensorStorage, TensorStorageCheckpointer)


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
        storage = TensorStorage(saved.structure.unflatten(iter(saved.tensors), saved.lead), device="auto", ndim=ndim)
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
