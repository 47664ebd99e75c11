"""Writes the tensors of a storage in TorchRL's layout, and describes them in a hidden manifest that TorchRL ignores."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ..encodings.digests import DIGESTS
from ..encodings.streams import LeafFile
from ..errors import CorruptDataError, FormatError
from ..format import fs
from ..format.digest import Hasher
from ..format.documents import Count, decode, dump_json, load_json
from ..format.manifest import HIDDEN, is_inside
from ..storages.codec import dtype_named, tensor_bytes
from ..storages.item_documents import read_shape
from ..storages.pytree import TreeSpec
from ..storages.tensor import TensorStorage
from ..storages.tree_files import is_tree, leaf_files, single_name, spec_to_json, tree_documents

_FILE = f"{HIDDEN}/storage.json"
_VERSION = 1


@dataclass(frozen=True, slots=True)
class SavedLeaf:
    """A tensor file: the path of its keys, the file, its type and whole shape, and the shape of what is filled.

    The filled rows are at the start of the file; `digest` is that of their bytes, None where there is none.
    """

    name: tuple[str, ...]
    file: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    filled: tuple[int, ...]
    digest: str | None = None

    @property
    def size(self) -> int:
        """Bytes of the whole file."""
        return self.dtype.itemsize * torch.Size(self.shape).numel()

    @property
    def filled_size(self) -> int:
        """Bytes of what is filled."""
        return self.dtype.itemsize * torch.Size(self.filled).numel()


@dataclass(frozen=True, slots=True)
class StorageManifest:
    """How the data is made (None: nothing was ever written), its length, the row written last, its leaves.

    `ndim` dimensions count elements; 0 for what save hooks made.
    """

    structure: Mapping[str, Any] | None
    ndim: int
    length: int
    last_row: int | None
    leaves: tuple[SavedLeaf, ...]

    def save(self, folder: Path) -> None:
        """Write the manifest into a folder."""
        leaves = [asdict(leaf) | {"dtype": str(leaf.dtype)} for leaf in self.leaves]
        document = {
            "format_version": _VERSION,
            "structure": self.structure,
            "ndim": self.ndim,
            "length": self.length,
            "last_row": self.last_row,
            "leaves": leaves,
        }
        fs.make_folder(folder / HIDDEN)
        fs.write_file(folder / _FILE, dump_json(document).encode())

    @staticmethod
    def remove(folder: Path) -> None:
        """Remove the manifest, because it will not hold any longer."""
        fs.remove(folder / _FILE)

    @classmethod
    def load(cls, folder: Path) -> StorageManifest | None:
        """Read the manifest; None if there is none, as in what TorchRL writes; CorruptDataError if it is damaged."""
        path = folder / _FILE
        if not path.is_file():
            return None
        document = load_json(path)
        version = document.get("format_version") if isinstance(document, dict) else None
        if type(version) is int and version != _VERSION:
            raise FormatError(
                f"{path} has format version {version}, this rbtool reads {_VERSION}", hint="update rbtool"
            )
        found = decode(_ManifestDocument, document, str(path), CorruptDataError)
        return cls(found.structure, found.ndim, found.length, found.last_row, tuple(map(_leaf, found.leaves)))


@dataclass(frozen=True, slots=True)
class _LeafEntry:
    name: tuple[str, ...]
    file: str
    dtype: str
    shape: tuple[Count, ...]
    filled: tuple[Count, ...]
    digest: str | None


@dataclass(frozen=True, slots=True)
class _ManifestDocument:
    """The document of a `StorageManifest`."""

    format_version: int
    structure: Mapping[str, Any] | None
    ndim: Count
    length: Count
    last_row: Count | None
    leaves: tuple[_LeafEntry, ...]


def _leaf(entry: _LeafEntry) -> SavedLeaf:
    if entry.file and not is_inside(entry.file):
        raise CorruptDataError(f"the manifest places a leaf at {entry.file!r}, outside its folder")
    shape, filled = read_shape(entry.shape), read_shape(entry.filled)
    return SavedLeaf(entry.name, entry.file, dtype_named(entry.dtype), shape, filled, entry.digest)


METADATA = "storage_metadata.json"
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
            fs.write_file(folder / name, document)
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
