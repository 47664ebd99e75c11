"""Saves storages of tensors, in segments or in TorchRL's layout, and reads both."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ..encodings.digests import DIGESTS
from ..encodings.streams import LeafFile
from ..errors import FormatError, SchemaError, UsageError
from ..format import fs
from ..format.digest import Hasher, digest_of_stats
from ..format.documents import load_json
from ..format.syncing import Durable, write_file
from ..storages.base import Storage, register_checkpointer
from ..storages.codec import tensor_bytes
from ..storages.cursors import last_row
from ..storages.lazy_tensor import LazyMemmapStorage, LazyTensorStorage
from ..storages.pytree import TreeSpec, tree_spec_of
from ..storages.tensor import TensorStorage
from ..storages.tree_files import is_tree, leaf_files, single_name, spec_to_json, tree_documents
from .base import Captured, StorageCheckpointerBase
from .captured_rows import CapturedRows
from .flat_layout import with_ragged, without_ragged
from .folders import CheckpointStaging, is_segmented, open_folder
from .segment_reader import SegmentFolder, load_segments
from .segments import CapturedSegments, write_segments
from .storage_rows import StorageRows
from .tensor_reader import METADATA, SavedLeaf, StorageManifest, read_contents, read_length


class TensorStorageCheckpointer(StorageCheckpointerBase):
    """Saves any `TensorStorage` in segments, files of some rows, and writes only rows that changed.

    The first checkpoint at a place is written whole. One onto the checkpoint that the storage saved or loaded there
    last adds a segment of the rows that changed and shares the others (hard links; written where there are none), and
    is complete on its own: the older one goes. Small segments are merged now and then. Which rows changed is known from
    the writes. Where rows may have changed without them, the digests of their bytes decide: in memory that the storage
    was given, in files in a `scratch_dir`, and once references to rows were handed out, as by a slice of the storage.

    Loading into a `LazyTensorStorage` maps the segments copy-on-write, and reads rows when they are used; references to
    rows that somebody has, other storages, other devices and file systems of other machines have them copied. The list
    of segments, with their sizes, is always verified. Rows of more than 64 MiB that are mapped are compared with their
    digests on request (`verify`), all others always.

    `compatible=True` writes TorchRL's layout instead, each time as a whole: a memory-mapped tensordict, or one file for
    each leaf of a nest, of the size of the whole capacity, where only filled rows take room on the disk. A hidden file
    records how the data is made, the row written last and a digest of every leaf. So do save hooks: they get the valid
    rows, of a tensordict, a tensor or a nest of them, and what they return is saved in its own shape.

    Both are read, and what TorchRL saved, of which files that are missing or too short are found. A storage of any
    capacity that holds the rows can take them, also one that is still empty. Nothing is unpickled.
    """

    verifies_on_request = True

    def __init__(self, *, compatible: bool = False) -> None:
        super().__init__()
        self.compatible = compatible

    def dumps(self, storage: Storage, path: str | os.PathLike[str], *, durable: Durable = "full") -> None:
        """Write the storage to the folder `path`; parents are created, an older checkpoint is replaced at one instant.

        Raises UsageError if something that is no checkpoint is there, SchemaError for data that only a pickle could
        hold, OutOfSpaceError for want of room. A storage whose own files lie at `path` is synced and described there.
        """
        source = _tensor_storage(storage)
        if _lives_at(source, path) and source.initialized:
            describe_in_place(source, Path(path))
            return
        if not self.compatible and not self._save_hooks:
            write_segments(source, path, durable)
            return
        contents = self._contents(source, path)
        with CheckpointStaging(path, durable) as staging:
            covered = contents.write(staging.path)
            staging.publish_noted(covered=covered)

    def capture(self, storage: Storage, path: Path) -> Captured | None:
        """Return the rows as they are now; None with hooks, and for a class with its own `dumps`.

        None, too, where rows could be replaced unnoticed: see `TensorStorage.snapshot`.
        """
        source = _tensor_storage(storage)
        own = type(self).dumps is TensorStorageCheckpointer.dumps
        if not own or self._save_hooks or not source.initialized or _lives_at(source, path):
            return None
        if self.compatible:
            return CapturedRows.of(source, path, partial(self.dumps, path=path))
        captured = CapturedSegments(source, path)
        if captured.possible:
            return captured
        with captured:
            return None

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

    def loads(self, storage: Storage, path: str | os.PathLike[str], *, verify: bool = False) -> None:
        """Put the rows, the length and, where it was noted, the last cursor of the checkpoint into the storage.

        `verify` compares the bytes of all segments with their digests, also where they are mapped.

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
        if is_segmented(folder) and not self._load_hooks:
            load_segments(target, folder, verify=verify)
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


_CHUNK = 1 << 20


@dataclass(frozen=True)
class Contents:
    """What is to be saved: how it is made (None: nothing was ever written), its tensors, and of each what is filled.

    `ndim` dimensions count elements, of which there are `length`; `last_row` was written last.
    """

    structure: TreeSpec | None
    ndim: int
    whole: Sequence[torch.Tensor]
    filled: Sequence[torch.Tensor]
    length: int
    last_row: int | None

    def write(self, folder: Path) -> set[str]:
        """Write all files into an empty folder and sync them; return those of the leaves, whose digests are noted."""
        described = None if self.structure is None else spec_to_json(self.structure)
        documents, leaves = self._documents(), self._leaves()
        fs.require_space(folder, sum(leaf.filled_size for leaf in leaves))
        noted = [_write_leaf(folder, leaf, tensor) for leaf, tensor in zip(leaves, self.filled, strict=True)]
        for name, document in documents.items():
            fs.make_folder((folder / name).parent)
            write_file(folder / name, document)
        StorageManifest(described, self.ndim, self.length, self.last_row, tuple(noted)).save(folder)
        return {leaf.file for leaf in noted}

    def _leaves(self) -> list[SavedLeaf]:
        if self.structure is None:
            return []
        listed = zip(self.structure.paths(), leaf_files(self.structure), self.whole, self.filled, strict=True)
        return [
            SavedLeaf(name, file, whole.dtype, tuple(whole.shape), tuple(filled.shape))
            for name, file, whole, filled in listed
        ]

    def _documents(self) -> dict[str, bytes]:
        metadata = {METADATA: metadata_bytes(self.structure, self.whole, self.length)}
        if self.structure is None:
            return metadata
        lead = self.whole[0].shape[: self.ndim]
        return tree_documents(self.structure, [(leaf.dtype, leaf.shape) for leaf in self.whole], lead) | metadata


def metadata_bytes(structure: TreeSpec | None, whole: Sequence[torch.Tensor], length: int) -> bytes:
    """Return `storage_metadata.json`, from which TorchRL reads the kind of data and its length."""
    entries = {}
    nest = structure is not None and not is_tree(structure)
    if structure is not None and nest:
        names = [".".join(path) or single_name() for path in structure.paths()]
        entries = {
            name: {"dtype": str(leaf.dtype), "shape": list(leaf.shape)} for name, leaf in zip(names, whole, strict=True)
        }
    return json.dumps({"metadata": entries, "is_pytree": nest, "len": length}, ensure_ascii=False).encode()


def _write_leaf(folder: Path, leaf: SavedLeaf, tensor: torch.Tensor) -> SavedLeaf:
    """Write the filled rows into a file of the whole size; return the leaf with its digest."""
    if not leaf.size:  # tensordict keeps no file of what has no elements
        return replace(leaf, digest=Hasher().digest)
    file, data = LeafFile(folder / leaf.file), tensor_bytes(tensor)
    try:
        for start in range(0, len(data), _CHUNK):  # what was just hashed is still in the processor's cache
            file.write([data[start : start + _CHUNK]])
        file.skip(leaf.size - len(data))
        file.finish()
    finally:
        file.close()
    return replace(leaf, digest=file.digest)


def describe_in_place(storage: TensorStorage, folder: Path) -> None:
    """Sync the files a storage lives in, and write what makes a checkpoint of them.

    No digests are noted: they would not hold beyond the next write.
    """
    for file in leaf_files(storage.structure):
        path = folder / file
        if path.is_file():
            descriptor = fs.open_to_fill(path)
            try:
                fs.fsync(descriptor, path)
            finally:
                os.close(descriptor)
    fs.remove(folder / DIGESTS)
    StorageManifest.remove(folder)
    fs.replace_file(folder / METADATA, metadata_bytes(storage.structure, storage.columns.leaves, len(storage)))


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
        self.manifest = replace(self.manifest, content_digest=digest_of_stats(folder))

    @property
    def has_digests(self) -> bool:
        """Whether the files have digests, with which they were compared when this was opened."""
        return is_segmented(self.path) or (self.path / DIGESTS).is_file()


def _dimensions(folder: Path) -> int:
    """How many dimensions count elements."""
    if is_segmented(folder):
        with SegmentFolder.opened(folder) as opened:
            return max(opened.manifest.ndim, 1)
    manifest = StorageManifest.load(folder)
    if manifest is not None:
        return max(manifest.ndim, 1)
    file = folder / "meta.json"
    if not file.is_file():
        raise FormatError(f"{folder} holds no tensordict; the steps of episodes are tensordicts")
    document: Any = load_json(file)
    shape = document.get("shape") if isinstance(document, dict) else None
    return max(len(shape), 1) if isinstance(shape, list) else 1
