"""Reads the tensors of a checkpoint, checked and mapped: in segments, or in TorchRL's layout, ours with a manifest."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..errors import CorruptDataError, FormatError, SchemaError
from ..format import fs
from ..format.digest import Hasher
from ..format.documents import Count, decode, dump_json, load_json
from ..format.manifest import HIDDEN, is_inside
from ..format.syncing import write_file
from ..storages.codec import dtype_named, tensor_bytes
from ..storages.item_documents import read_shape
from ..storages.memory_maps import mapped_tensor
from ..storages.pytree import ConstantNode, MappingNode, TensorDictNode, TensorNode, TreeSpec, place
from ..storages.tensor import TensorStorage
from ..storages.tree_files import SUFFIX, single_name, spec_from_json
from ..ted.schema import file_stem
from ..torchrl.reader import torchrl_form
from .flat_layout import ROWS, SHAPES
from .folders import is_segmented
from .segment_reader import SegmentFolder

METADATA = "storage_metadata.json"
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
        write_file(folder / _FILE, dump_json(document).encode())

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
        return cls(found.structure, found.ndim, found.length, found.last_row, tuple(map(_saved_leaf, found.leaves)))


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


def _saved_leaf(entry: _LeafEntry) -> SavedLeaf:
    if entry.file and not is_inside(entry.file):
        raise CorruptDataError(f"the manifest places a leaf at {entry.file!r}, outside its folder")
    shape, filled = read_shape(entry.shape), read_shape(entry.filled)
    return SavedLeaf(entry.name, entry.file, dtype_named(entry.dtype), shape, filled, entry.digest)


@dataclass(frozen=True)
class Saved:
    """What a checkpoint holds: how it is made, what is filled of its tensors, their leading shape, the length."""

    structure: TreeSpec
    tensors: Sequence[torch.Tensor]
    lead: torch.Size
    length: int
    last_row: int | None
    capacity: int | None = None
    """How many rows the storage had room for; None where that is not known."""


def read_contents(folder: Path, target: TensorStorage, *, raw: bool) -> Saved | None:
    """Map what is filled of every leaf, after all files were checked; None for the checkpoint of an empty storage.

    `raw`: load hooks will make rows of it, so nothing is compared with the target.
    """
    if is_segmented(folder):
        return _segments(folder, target, raw)
    metadata = _metadata(folder)
    manifest = StorageManifest.load(folder)
    if manifest is not None:
        if manifest.length != metadata["len"]:
            raise CorruptDataError(
                f"{folder / METADATA} counts {metadata['len']} elements, {manifest.length} were saved",
                hint="if TorchRL wrote over this checkpoint, remove its folder .rbtool",
            )
        return _ours(folder, manifest, target, raw)
    if raw and torchrl_form(folder) is not None:
        return _laid_out(folder, metadata["len"])
    return _theirs(folder, metadata, target)


def _segments(folder: Path, target: TensorStorage, raw: bool) -> Saved | None:
    """Map the rows of a checkpoint in segments, whose bytes are compared with their digests."""
    with SegmentFolder.opened(folder) as opened:
        manifest, structure = opened.manifest, opened.structure_for(target, raw=raw)
        if structure is None:
            return None
        tensors = opened.tensors(manifest.rows, verify=True)
    lead = tensors[0].shape[: manifest.ndim] if tensors else torch.Size([])
    return Saved(structure, tensors, lead, manifest.length, manifest.last_row, manifest.capacity)


def _laid_out(folder: Path, length: int) -> Saved:
    """Map whole episodes that TorchRL laid out: no dimension of theirs counts the elements of the storage."""
    structure, leaves = walk_tree(folder, 0, ragged=True)
    return Saved(structure, _map_all(folder, leaves), torch.Size([]), length, None)


def read_length(folder: Path) -> int:
    """Return the number of elements of a checkpoint."""
    return int(_metadata(folder)["len"])


def _metadata(folder: Path) -> dict[str, Any]:
    path = folder / METADATA
    found = load_json(path)
    document: dict[str, Any] = found if isinstance(found, dict) else {}
    length = document.get("len")
    if type(length) is not int or length < 0 or not isinstance(document.get("metadata"), dict):
        raise FormatError(f"{path} does not say how many elements were saved")
    return document


def _ours(folder: Path, manifest: StorageManifest, target: TensorStorage, raw: bool) -> Saved | None:
    if manifest.structure is None:
        return None
    if manifest.ndim != target.ndim and not raw:
        raise SchemaError(f"{folder} was saved with ndim={manifest.ndim}, this storage has ndim={target.ndim}")
    tensors = _verified(folder, manifest)
    structure = _structure(manifest, target, raw)
    lead = tensors[0].shape[: manifest.ndim] if tensors else torch.Size([])
    capacity = manifest.leaves[0].shape[0] if manifest.ndim and manifest.leaves else None
    return Saved(structure, tensors, lead, manifest.length, manifest.last_row, capacity)


def verify_tensors(folder: Path) -> None:
    """Raise CorruptDataError unless the leaves hold the bytes that were saved, where their digests were noted."""
    if is_segmented(folder):
        with SegmentFolder.opened(folder) as opened:
            opened.verify()
        return
    manifest = StorageManifest.load(folder)
    if manifest is not None:
        _verified(folder, manifest)


def _verified(folder: Path, manifest: StorageManifest) -> list[torch.Tensor]:
    """Map the leaves and compare them with their digests."""
    tensors = _map_all(folder, manifest.leaves)
    for leaf, tensor in zip(manifest.leaves, tensors, strict=True):
        if _digest(tensor) != leaf.digest:
            raise CorruptDataError(
                f"{folder / leaf.file} does not hold the bytes that were saved: it was changed or overwritten",
                hint="if TorchRL wrote over this checkpoint, remove its folder .rbtool",
            )
    return tensors


def _structure(manifest: StorageManifest, target: TensorStorage, raw: bool) -> TreeSpec:
    """Return the structure of saved data; a class that is not loaded here is that of the target."""
    if manifest.structure is None:
        raise CorruptDataError("a manifest of leaves does not say how they belong together")
    return spec_from_json(manifest.structure, target.structure if target.initialized and not raw else None)


def _theirs(folder: Path, metadata: dict[str, Any], target: TensorStorage) -> Saved:
    structure: TreeSpec
    if metadata.get("is_pytree"):
        leaves = listed_leaves(folder, metadata["metadata"])
        if [leaf.name for leaf in leaves] == [()]:
            structure = TensorNode()
        elif target.initialized:
            structure = MappingNode({leaf.name[0]: TensorNode() for leaf in leaves})
        else:
            raise SchemaError(
                f"{folder} does not say whether its numbered entries are lists, tuples or dicts",
                hint="write a first row to the storage, which shows it, and load again",
            )
    else:
        structure, leaves = walk_tree(folder, target.ndim)
    length = metadata["len"]
    filled = [_filled(folder, leaf, length, target.ndim) for leaf in leaves]
    tensors = _map_all(folder, filled)
    lead = tensors[0].shape[: target.ndim] if tensors else torch.Size([])
    return Saved(structure, tensors, lead, length, None, leaves[0].shape[0] if leaves else None)


def _filled(folder: Path, leaf: SavedLeaf, length: int, ndim: int) -> SavedLeaf:
    """Return the filled rows of a leaf that TorchRL saved."""
    lanes = math.prod(leaf.shape[1:ndim])
    rows = -(-length // max(lanes, 1))
    if len(leaf.shape) < ndim or rows > leaf.shape[0]:
        raise FormatError(
            f"{folder / leaf.file} has the shape {list(leaf.shape)}, which does not hold {length} elements of "
            f"{ndim} dimension{'s' * (ndim > 1)}"
        )
    return replace(leaf, filled=(rows, *leaf.shape[1:]))


def _map_all(folder: Path, leaves: Sequence[SavedLeaf]) -> list[torch.Tensor]:
    for leaf in leaves:
        _check_size(folder, leaf)
    return [mapped_tensor(folder / leaf.file, leaf.dtype, leaf.filled, shared=False) for leaf in leaves]


def _check_size(folder: Path, leaf: SavedLeaf) -> None:
    if not leaf.size:
        return
    path = folder / leaf.file
    found = path.stat().st_size if path.is_file() else None
    if found is None:
        raise CorruptDataError(f"{path} is missing, expected {leaf.size:,} bytes")
    # Over an older, larger checkpoint TorchRL leaves files longer than their shape; ours are checked strictly.
    if found < leaf.size or (found > leaf.size and leaf.digest is not None):
        raise CorruptDataError(f"{path} has {found:,} bytes, expected {leaf.size:,}: it was cut or overwritten")


def _digest(tensor: torch.Tensor) -> str:
    hasher = Hasher()
    hasher.update(tensor_bytes(tensor))
    return hasher.digest


_FIELDS = "_tensordict"


def walk_tree(folder: Path, lead: int, *, ragged: bool = False) -> tuple[TreeSpec, list[SavedLeaf]]:
    """Read the `meta.json` files of a memory-mapped tensordict, of whose dimensions `lead` count elements.

    Returns how the data is made and its leaves; those of differing shapes, where `ragged` allows for them, as
    `with_ragged` wants them. FormatError for what is no such folder, and for values that only a
    pickle holds.
    """
    leaves: list[SavedLeaf] = []
    return _node(folder, "", (), lead, leaves, ragged), leaves


def _node(
    root: Path, inside: str, prefix: tuple[str, ...], lead: int, leaves: list[SavedLeaf], ragged: bool
) -> TreeSpec:
    path = root / f"{inside}meta.json"
    if not path.is_file():
        raise CorruptDataError(f"{path} is missing")
    document = load_json(path)
    if not isinstance(document, dict) or "_type" not in document:
        raise FormatError(f"{path} does not describe a tensordict: it has no _type")
    if "_is_non_tensor" in document or "NonTensor" in str(document["_type"]):
        return _constant(path, document, prefix)
    if (root / inside / _FIELDS / "meta.json").is_file() and "shape" not in document:
        return _node(root, f"{inside}{_FIELDS}/", prefix, lead, leaves, ragged)  # a tensorclass
    children: dict[str, TreeSpec] = {}
    any_ragged = False
    for name, entry in document.items():
        if not isinstance(entry, dict):
            continue
        if ragged and entry.get("is_nested"):
            leaves += _ragged_leaves(root, inside, (*prefix, name), entry)
            children[name] = TensorDictNode({ROWS: TensorNode(), SHAPES: TensorNode()}, torch.Size([]), None)
            any_ragged = True
        elif "dtype" in entry and "shape" in entry:
            leaves.append(_leaf(root, inside, (*prefix, name), entry))
            children[name] = TensorNode()
        elif "type" in entry:
            folder = f"{inside}{_folder(root, inside, name)}/"
            children[name] = _node(root, folder, (*prefix, name), lead, leaves, ragged)
    batch = torch.Size([] if any_ragged else read_shape(document.get("shape", [])))
    return TensorDictNode(children, batch[lead:], None)


def _constant(path: Path, document: Mapping[str, Any], prefix: tuple[str, ...]) -> TreeSpec:
    pickles = [name for name in ("other.pickle", "pickle.pkl") if (path.parent / name).exists()]
    if pickles or "data" not in document or "stack_dim" in document:
        what = f"a pickle, {pickles[0]}," if pickles else "a stack of values that are no tensors"
        raise FormatError(
            f"{place(prefix)} of {path.parent} is {what} which is not opened: a pickle can run anything"
            if pickles
            else f"{place(prefix)} of {path.parent} is {what}; a storage of tensors cannot hold it"
        )
    return ConstantNode(document["data"], torch.Size([]), None)


def _folder(root: Path, inside: str, name: str) -> str:
    """The folder of a key: escaped, or as it is in what older versions wrote."""
    stem = file_stem(name)
    return stem if (root / inside / stem).is_dir() or not _is_safe(name) else name


def _leaf(root: Path, inside: str, name: tuple[str, ...], entry: Mapping[str, Any]) -> SavedLeaf:
    if entry.get("is_nested"):
        raise FormatError(f"{root} holds rows of differing shapes: it was written by another checkpointer")
    file = f"{inside}{file_stem(name[-1])}{SUFFIX}"
    if not (root / file).exists() and _is_safe(name[-1]) and (root / f"{inside}{name[-1]}{SUFFIX}").exists():
        file = f"{inside}{name[-1]}{SUFFIX}"
    shape = read_shape(entry["shape"])
    return SavedLeaf(name, file, dtype_named(entry["dtype"]), shape, shape)


def _ragged_leaves(root: Path, inside: str, name: tuple[str, ...], entry: Mapping[str, Any]) -> list[SavedLeaf]:
    """The rows of a leaf of differing shapes, and the table of those shapes next to them."""
    rows = _leaf(root, inside, name, {**entry, "is_nested": False})
    size, file = rows.shape, f"{rows.file.removesuffix(SUFFIX)}.shape{SUFFIX}"
    path, needed = root / file, torch.Size(size).numel() * 8
    if len(size) != 2 or not needed or not path.is_file() or path.stat().st_size < needed:
        raise CorruptDataError(f"{path}, the table of the shapes of {name[-1]!r}, is missing or was cut")
    table = np.fromfile(path, np.int64, needed // 8).reshape(size)
    if (table < 0).any() or (table[:, 1:] != table[0, 1:]).any():
        raise CorruptDataError(f"{path} does not give all episodes rows of one shape")
    whole = (int(table[:, 0].sum()), *table[0, 1:].tolist())
    shapes = SavedLeaf((*name, SHAPES), file, torch.int64, size, size)
    return [SavedLeaf((*name, ROWS), rows.file, rows.dtype, whole, whole), shapes]


def _is_safe(name: str) -> bool:
    """Whether a raw key, as older versions used it, stays inside its folder."""
    return "/" not in name and "\0" not in name and name not in {"", ".", ".."}


def listed_leaves(folder: Path, metadata: Mapping[str, Any]) -> list[SavedLeaf]:
    """Return the leaves that `storage_metadata.json` lists for a nest of dicts, lists and tuples.

    It separates keys by dots, and the files by folders, so that a key with a dot is found by its file alone.
    """
    found: dict[str, str] = {}
    for path in sorted(folder.rglob(f"*{SUFFIX}")):
        file = path.relative_to(folder).as_posix()
        name = file.removesuffix(SUFFIX).replace("/", ".")
        if name in found and name in metadata:
            raise FormatError(f"{folder} has {found[name]} and {file}, which are both called {name!r}")
        found[name] = file
    leaves = []
    for name, entry in metadata.items():
        if not isinstance(entry, dict) or not entry.keys() >= {"dtype", "shape"}:
            raise FormatError(f"{folder} lists {name!r} without its type and shape")
        shape = read_shape(entry["shape"])
        if name not in found and torch.Size(shape).numel():
            raise CorruptDataError(f"{folder} lists {name!r}, but there is no file of it")
        keys = () if name == single_name() else (name,)
        leaves.append(SavedLeaf(keys, found.get(name, ""), dtype_named(entry["dtype"]), shape, shape))
    return leaves
