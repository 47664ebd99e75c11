"""What we note beside a checkpoint of tensors in TorchRL's layout, in a hidden file that TorchRL does not look for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from ..dataset import HIDDEN, dump_json, fs, is_inside, load_json
from ..errors import CorruptDataError, FormatError
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
        try:
            document = load_json(path)
            if document["format_version"] != _VERSION:
                raise FormatError(
                    f"{path} has format version {document['format_version']}, this rbtool reads {_VERSION}",
                    hint="update rbtool",
                )
            last = document["last_row"]
            return cls(
                structure=document["structure"],
                ndim=int(document["ndim"]),
                length=int(document["length"]),
                last_row=None if last is None else int(last),
                leaves=tuple(map(_leaf, document["leaves"])),
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise CorruptDataError(f"{path} is damaged: {error!r}") from error


def _leaf(entry: Mapping[str, Any]) -> SavedLeaf:
    file = str(entry["file"])
    if file and not is_inside(file):
        raise CorruptDataError(f"a leaf is said to lie at {file!r}, outside its folder")
    return SavedLeaf(
        name=tuple(map(str, entry["name"])),
        file=file,
        dtype=dtype_named(entry["dtype"]),
        shape=read_shape(entry["shape"]),
        filled=read_shape(entry["filled"]),
        digest=entry["digest"],
    )
