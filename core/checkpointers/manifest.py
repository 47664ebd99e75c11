"""What we note beside a checkpoint of tensors in TorchRL's layout, in a hidden file that TorchRL does not look for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from ..errors import CorruptDataError, FormatError
from ..format import HIDDEN, Count, decode, dump_json, fs, is_inside, load_json
from ..storages.codec import dtype_named
from ..storages.documents import read_shape

__all__ = ["SavedLeaf", "StorageManifest"]

_FILE = f"{HIDDEN}/storage.json"
_VERSION = 1


@dataclass(frozen=True, slots=True)
class SavedLeaf:
    """A tensor file: the path of its keys, the file, its type and whole shape, and the shape of what is filled.

    What is filled lies at the start of the file; `digest` is of its bytes, None where nobody took one.
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
        """Remove the manifest, because what it tells will not hold any longer."""
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
        found = decode(_Document, document, str(path), CorruptDataError)
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
class _Document:
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
