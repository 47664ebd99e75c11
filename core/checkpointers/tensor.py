"""The checkpointer of tensor storages: it writes segments or TorchRL's layout, and reads both."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import MemoryMappedTensor, TensorDict, TensorDictBase, is_tensor_collection

from ..encodings.foreign import foreign_form
from ..encodings.output_files import LeafFile
from ..encodings.saved_digests import DIGESTS
from ..errors import CorruptDataError, FormatError, SchemaError, UsageError, require_flags
from ..format import fs
from ..format.documents import Count, decode, dump_json, load_json
from ..format.files import Hasher, digest_of_stats
from ..format.manifest import HIDDEN, is_inside
from ..format.syncing import Durable, write_file
from ..options import PathLike
from ..storages.base import Storage, register_checkpointer
from ..storages.codec import dtype_named, tensor_bytes
from ..storages.cursors import newest_row
from ..storages.lazy_tensor import LazyMemmapStorage, LazyTensorStorage, mapped_tensor
from ..storages.list_storage import read_shape
from ..storages.pytree import (
    SUFFIX,
    ConstantNode,
    MappingNode,
    StackNode,
    TensorDictNode,
    TensorNode,
    TextNode,
    TreeSpec,
    is_tree,
    leaf_files,
    place,
    single_name,
    spec_from_json,
    spec_to_json,
    text_column,
    tree_documents,
    tree_spec_of,
)
from ..storages.tensor import TensorStorage
from ..ted.schema import file_stem
from .base import Captured, CheckpointStaging, StorageCheckpointerBase, is_segmented, open_folder
from .segments import CapturedRows, CapturedSegments, SegmentFolder, load_segments, write_segments
from .storage_rows import StorageRows

METADATA = "storage_metadata.json"
_FILE = f"{HIDDEN}/storage.json"
_VERSION = 1


ROWS = "ragged_rows"
SHAPES = "ragged_shapes"


def ragged_tensor(shapes: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Make a ragged tensor whose parts have these shapes, int64 `[n, dimensions]`, and a view `[rows, ...]` of it.

    The parts differ only in their numbers of rows: `shapes` differ in the first column only.
    """
    rows, tail = int(shapes[:, 0].sum()), shapes[0, 1:].tolist()
    ragged: torch.Tensor = MemoryMappedTensor.empty(shapes, dtype=dtype)
    strides = torch.empty((rows, *tail), device="meta").stride()
    flat = torch.empty(0, dtype=dtype).set_(ragged.untyped_storage(), 0, (rows, *tail), strides)
    return ragged, flat


def dense_rows(ragged: torch.Tensor) -> torch.Tensor:
    """Return the rows of all parts of a ragged tensor, one part after another, `[rows, ...]`."""
    return torch.cat([part.as_subclass(torch.Tensor) for part in ragged.unbind(0)])


def without_ragged(data: Any) -> Any:
    """Replace each ragged tensor of a tensordict by a tensordict with its rows and the shapes of its parts."""
    if not isinstance(data, TensorDictBase):
        return data
    found = TensorDict({}, [])
    ragged = False
    for key, value in data.items():
        if isinstance(value, torch.Tensor) and value.is_nested:
            shapes = torch.tensor([list(part.shape) for part in value.unbind(0)])
            found.set(key, TensorDict({ROWS: dense_rows(value), SHAPES: shapes}, []))
            ragged = True
        elif is_tensor_collection(value) and isinstance(value, TensorDictBase):
            inner = without_ragged(value)
            ragged |= inner is not value
            found.set(key, inner)
        else:
            found.set(key, value)
    return found if ragged else data


def with_ragged(data: Any) -> Any:
    """Undo `without_ragged`; CorruptDataError for shapes that do not fit the rows."""
    if not isinstance(data, TensorDictBase):
        return data
    found, count = {}, None
    for key, value in data.items():
        if isinstance(value, TensorDictBase):
            if set(value.keys()) == {ROWS, SHAPES}:
                value = _ragged(value[ROWS], value[SHAPES])
                count = value.size(0)
            else:
                value = with_ragged(value)
        found[key] = value
    if count is None and all(found[key] is data.get(key) for key in found):
        return data
    return TensorDict(found, data.batch_size if count is None else [count])


def _ragged(rows: torch.Tensor, shapes: torch.Tensor) -> torch.Tensor:
    whole = shapes.dim() == 2 and len(shapes) and shapes.shape[1] == rows.dim() and int(shapes.min()) >= 0
    if not whole or int(shapes[:, 0].sum()) != len(rows) or bool((shapes[:, 1:] != shapes[0, 1:]).any()):
        raise CorruptDataError(f"a table of shapes {list(shapes.shape)} does not fit rows {list(rows.shape)}")
    ragged, flat = ragged_tensor(shapes, rows.dtype)
    flat.copy_(rows)
    return ragged


@dataclass(frozen=True, slots=True)
class SavedLeaf:
    """A tensor of a checkpoint, and its file.

    Attributes:
        name: its path of keys.
        file: the path of its file in the folder.
        dtype: its element type.
        shape: its shape, with all rows of the storage's capacity.
        filled: the shape of the valid rows, which are at the beginning of the file.
        digest: the digest of their bytes; None if there is none.
        text: the rows of text that TorchRL saved, in a JSON document in place of a file; None for other tensors.
    """

    name: tuple[str, ...]
    file: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    filled: tuple[int, ...]
    digest: str | None = None
    text: torch.Tensor | None = field(default=None, compare=False)

    @property
    def size(self) -> int:
        """The size of the whole file in bytes."""
        return self.dtype.itemsize * torch.Size(self.shape).numel()

    @property
    def filled_size(self) -> int:
        """The size of the filled part in bytes."""
        return self.dtype.itemsize * torch.Size(self.filled).numel()


@dataclass(frozen=True, slots=True)
class StorageManifest:
    """The hidden document of a checkpoint that rbtool has written in TorchRL's layout.

    Attributes:
        structure: how the data is nested; None if nothing was ever written.
        ndim: how many dimensions count elements; 0 for the results of save hooks.
        length: the number of elements.
        last_row: the row written last; None if unknown.
        leaves: the tensors.
    """

    structure: Mapping[str, Any] | None
    ndim: int
    length: int
    last_row: int | None
    leaves: tuple[SavedLeaf, ...]

    def save(self, folder: Path) -> None:
        """Write the manifest to a folder."""
        leaves = [asdict(leaf) | {"dtype": str(leaf.dtype)} for leaf in self.leaves]
        for leaf in leaves:
            del leaf["text"]
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
        """Remove the manifest of a folder whose files will change."""
        fs.remove(folder / _FILE)

    @classmethod
    def load(cls, folder: Path) -> StorageManifest | None:
        """Read the manifest; None if there is none, as in TorchRL's checkpoints; CorruptDataError if it is damaged."""
        path = folder / _FILE
        if not path.is_file():
            return None
        document = load_json(path)
        version = document.get("format_version") if isinstance(document, dict) else None
        if type(version) is int and version != _VERSION:
            raise FormatError(
                f"{path} has format version {version}, this version of rbtool reads {_VERSION}", hint="update rbtool"
            )
        found = decode(_ManifestDocument, document, str(path), CorruptDataError)
        return cls(found.structure, found.ndim, found.length, found.last_row, tuple(map(_saved_leaf, found.leaves)))


@dataclass(frozen=True, slots=True)
class _LeafEntry:
    """The JSON form of a `SavedLeaf`."""

    name: tuple[str, ...]
    file: str
    dtype: str
    shape: tuple[Count, ...]
    filled: tuple[Count, ...]
    digest: str | None


@dataclass(frozen=True, slots=True)
class _ManifestDocument:
    """The JSON form of a `StorageManifest`."""

    format_version: int
    structure: Mapping[str, Any] | None
    ndim: Count
    length: Count
    last_row: Count | None
    leaves: tuple[_LeafEntry, ...]


def _saved_leaf(entry: _LeafEntry) -> SavedLeaf:
    if entry.file and not is_inside(entry.file):
        raise CorruptDataError(f"the manifest refers to a leaf at {entry.file!r}, outside of its folder")
    shape, filled = read_shape(entry.shape), read_shape(entry.filled)
    return SavedLeaf(entry.name, entry.file, dtype_named(entry.dtype), shape, filled, entry.digest)


@dataclass(frozen=True)
class Saved:
    """The contents of a checkpoint.

    Attributes:
        structure: how the data is nested.
        tensors: the valid rows of its tensors.
        lead: the dimensions of the tensors that count elements.
        length: the number of elements.
        last_row: the row written last; None if unknown.
        capacity: the capacity of the storage in rows; None if unknown.
    """

    structure: TreeSpec
    tensors: Sequence[torch.Tensor]
    lead: torch.Size
    length: int
    last_row: int | None
    capacity: int | None = None


def read_contents(folder: Path, target: TensorStorage, *, raw: bool) -> Saved | None:
    """Map the valid rows of every tensor, after checking all files; None for the checkpoint of an empty storage.

    With `raw`, the data is not compared with the target, because load hooks will change it.
    """
    if is_segmented(folder):
        return _segments(folder, target, raw)
    metadata = _metadata(folder)
    manifest = StorageManifest.load(folder)
    if manifest is not None:
        if manifest.length != metadata["len"]:
            raise CorruptDataError(
                f"{folder / METADATA} says {metadata['len']} elements, but {manifest.length} were saved",
                hint="if TorchRL overwrote this checkpoint, remove its folder .rbtool",
            )
        return _own_contents(folder, manifest, target, raw)
    if raw and foreign_form().form_at(folder) is not None:
        return _whole_episodes(folder, metadata["len"])
    return _torchrl_contents(folder, metadata, target)


def _segments(folder: Path, target: TensorStorage, raw: bool) -> Saved | None:
    """Map the rows of a checkpoint in segments, and compare their bytes with the digests."""
    with SegmentFolder.opened(folder) as opened:
        manifest, structure = opened.manifest, opened.structure_for(target, raw=raw)
        if structure is None:
            return None
        tensors = opened.tensors(manifest.rows, verify=True)
    lead = tensors[0].shape[: manifest.ndim] if tensors else torch.Size([])
    return Saved(structure, tensors, lead, manifest.length, manifest.last_row, manifest.capacity)


def _whole_episodes(folder: Path, length: int) -> Saved:
    """Map whole episodes in TorchRL's layout, in which no dimension counts elements of the storage."""
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
        raise FormatError(f"{path} does not contain the number of saved elements")
    return document


def _own_contents(folder: Path, manifest: StorageManifest, target: TensorStorage, raw: bool) -> Saved | None:
    """Map a checkpoint that rbtool has written, and compare it with its digests."""
    if manifest.structure is None:
        return None
    if manifest.ndim != target.ndim and not raw:
        raise SchemaError(f"{folder} was saved with ndim={manifest.ndim}, but this storage has ndim={target.ndim}")
    tensors = _verified(folder, manifest)
    structure = _structure(manifest, target, raw)
    lead = tensors[0].shape[: manifest.ndim] if tensors else torch.Size([])
    capacity = manifest.leaves[0].shape[0] if manifest.ndim and manifest.leaves else None
    return Saved(structure, tensors, lead, manifest.length, manifest.last_row, capacity)


def verify_tensors(folder: Path) -> None:
    """Raise CorruptDataError unless the files hold the bytes that were saved; files without digests are not checked."""
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
                hint="if TorchRL overwrote this checkpoint, remove its folder .rbtool",
            )
    return tensors


def _structure(manifest: StorageManifest, target: TensorStorage, raw: bool) -> TreeSpec:
    """Return the structure of saved data; a class that is not imported is taken from the target."""
    if manifest.structure is None:
        raise CorruptDataError("a manifest does not describe how its leaves are nested")
    return spec_from_json(manifest.structure, target.structure if target.initialized and not raw else None)


def _torchrl_contents(folder: Path, metadata: dict[str, Any], target: TensorStorage) -> Saved:
    """Map a checkpoint that TorchRL has written."""
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
                hint="write a first row to the storage, which determines it, and load again",
            )
    else:
        structure, leaves = walk_tree(folder, target.ndim)
    length = metadata["len"]
    filled = [_filled(folder, leaf, length, target.ndim) for leaf in leaves]
    tensors = _map_all(folder, filled)
    lead = tensors[0].shape[: target.ndim] if tensors else torch.Size([])
    return Saved(structure, tensors, lead, length, None, leaves[0].shape[0] if leaves else None)


def _filled(folder: Path, leaf: SavedLeaf, length: int, ndim: int) -> SavedLeaf:
    """Return a leaf that TorchRL has saved with the shape of its valid rows."""
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
        if leaf.text is None:
            _check_size(folder, leaf)
    return [
        mapped_tensor(folder / leaf.file, leaf.dtype, leaf.filled, shared=False)
        if leaf.text is None
        else leaf.text[: leaf.filled[0]]
        for leaf in leaves
    ]


def _check_size(folder: Path, leaf: SavedLeaf) -> None:
    if not leaf.size:
        return
    path = folder / leaf.file
    found = path.stat().st_size if path.is_file() else None
    if found is None:
        raise CorruptDataError(f"{path} is missing, expected {leaf.size:,} bytes")
    # When TorchRL overwrites a larger checkpoint, files stay longer than their shape; ours must match exactly.
    if found < leaf.size or (found > leaf.size and leaf.digest is not None):
        raise CorruptDataError(f"{path} has {found:,} bytes, expected {leaf.size:,}: it was cut or overwritten")


def _digest(tensor: torch.Tensor) -> str:
    hasher = Hasher()
    hasher.update(tensor_bytes(tensor))
    return hasher.digest


_FIELDS = "_tensordict"


def walk_tree(folder: Path, lead: int, *, ragged: bool = False) -> tuple[TreeSpec, list[SavedLeaf]]:
    """Read the `meta.json` files of a memory-mapped tensordict, of which `lead` dimensions count elements.

    Returns:
        The structure of the data, and its leaves. With `ragged`, leaves may be ragged tensors, in the form that
        `with_ragged` expects.

    Raises:
        FormatError: it is not such a folder, or some values are only in a pickle.
    """
    leaves: list[SavedLeaf] = []
    return _node(folder, "", (), lead, leaves, ragged), leaves


def _node(
    root: Path, inside: str, prefix: tuple[str, ...], lead: int, leaves: list[SavedLeaf], ragged: bool,
    around: tuple[int, ...] = (),
) -> TreeSpec:  # fmt: skip
    path = root / f"{inside}meta.json"
    if not path.is_file():
        raise CorruptDataError(f"{path} is missing")
    document = load_json(path)
    if not isinstance(document, dict) or "_type" not in document:
        raise FormatError(f"{path} does not describe a tensordict: it has no _type")
    if "_is_non_tensor" in document or "NonTensor" in str(document["_type"]):
        return _text(document, prefix, lead, leaves, around) or _constant(path, document, prefix)
    if (root / inside / _FIELDS / "meta.json").is_file() and "shape" not in document:
        return _node(root, f"{inside}{_FIELDS}/", prefix, lead, leaves, ragged)  # it is a tensorclass
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
            leaves.append(leaf := _leaf(root, inside, (*prefix, name), entry))
            is_text = entry.get("text") is True and leaf.dtype is torch.uint8 and len(leaf.shape) > lead
            children[name] = TextNode(torch.Size(leaf.shape[lead:-1]), leaf.shape[-1]) if is_text else TensorNode()
        elif "type" in entry:
            folder = f"{inside}{_folder(root, inside, name)}/"
            size = read_shape(document.get("shape", []))
            children[name] = _node(root, folder, (*prefix, name), lead, leaves, ragged, size)
    batch = torch.Size([] if any_ragged else read_shape(document.get("shape", [])))
    return TensorDictNode(children, batch[lead:], None)


def _text(
    document: Mapping[str, Any], prefix: tuple[str, ...], lead: int, leaves: list[SavedLeaf],
    size: tuple[int, ...],
) -> TreeSpec | None:  # fmt: skip
    """Read text that TorchRL has saved for each element of this size; None if the document holds other data."""
    values: Any = document.get("data")
    for _ in size[1:] if isinstance(values, list) else ():
        values = [value for part in values for value in (part if isinstance(part, list) else ())]
    if document.get("stack_dim") != 0 or not lead or not isinstance(values, list) or len(values) != math.prod(size):
        return None
    node, text = text_column(values, size, lead, prefix)
    leaves.append(SavedLeaf(prefix, "", text.dtype, tuple(text.shape), tuple(text.shape), text=text))
    return node


def _constant(path: Path, document: Mapping[str, Any], prefix: tuple[str, ...]) -> TreeSpec:
    pickles = [name for name in ("other.pickle", "pickle.pkl") if (path.parent / name).exists()]
    if pickles or "data" not in document or "stack_dim" in document:
        what = f"a pickle, {pickles[0]}," if pickles else "a stack of non-tensor values"
        raise FormatError(
            f"{place(prefix)} of {path.parent} is {what} which is not opened: a pickle can run anything"
            if pickles
            else f"{place(prefix)} of {path.parent} is {what} in a form that is not known"
        )
    return ConstantNode(document["data"], torch.Size([]), None)


def _folder(root: Path, inside: str, name: str) -> str:
    """Return the folder of a key: escaped, or in the unescaped form that older versions wrote."""
    stem = file_stem(name)
    return stem if (root / inside / stem).is_dir() or not _is_safe(name) else name


def _leaf(root: Path, inside: str, name: tuple[str, ...], entry: Mapping[str, Any]) -> SavedLeaf:
    if entry.get("is_nested"):
        raise FormatError(f"{root} holds rows of different shapes: it was written by another checkpointer")
    file = f"{inside}{file_stem(name[-1])}{SUFFIX}"
    if not (root / file).exists() and _is_safe(name[-1]) and (root / f"{inside}{name[-1]}{SUFFIX}").exists():
        file = f"{inside}{name[-1]}{SUFFIX}"
    shape = read_shape(entry["shape"])
    return SavedLeaf(name, file, dtype_named(entry["dtype"]), shape, shape)


def _ragged_leaves(root: Path, inside: str, name: tuple[str, ...], entry: Mapping[str, Any]) -> list[SavedLeaf]:
    """Return the two leaves of a ragged tensor: the rows of all its parts, and the table of their shapes."""
    rows = _leaf(root, inside, name, {**entry, "is_nested": False})
    size, file = rows.shape, f"{rows.file.removesuffix(SUFFIX)}.shape{SUFFIX}"
    path, needed = root / file, torch.Size(size).numel() * 8
    if len(size) != 2 or not needed or not path.is_file() or path.stat().st_size < needed:
        raise CorruptDataError(f"{path}, the table of the shapes of {name[-1]!r}, is missing or was cut")
    table = np.fromfile(path, np.int64, needed // 8).reshape(size)
    if (table < 0).any() or (table[:, 1:] != table[0, 1:]).any():
        raise CorruptDataError(f"{path} does not have the same row shape for all episodes")
    whole = (int(table[:, 0].sum()), *table[0, 1:].tolist())
    shapes = SavedLeaf((*name, SHAPES), file, torch.int64, size, size)
    return [SavedLeaf((*name, ROWS), rows.file, rows.dtype, whole, whole), shapes]


def _is_safe(name: str) -> bool:
    """Whether an unescaped key, as older versions wrote it, stays inside its folder."""
    return "/" not in name and "\0" not in name and name not in {"", ".", ".."}


def listed_leaves(folder: Path, metadata: Mapping[str, Any]) -> list[SavedLeaf]:
    """Return the leaves listed in `storage_metadata.json` for a nest of dicts, lists and tuples.

    It separates keys by dots, and files by folders, so a key that contains a dot can only be found by its file.
    """
    found: dict[str, str] = {}
    for path in sorted(folder.rglob(f"*{SUFFIX}")):
        file = path.relative_to(folder).as_posix()
        name = file.removesuffix(SUFFIX).replace("/", ".")
        if name in found and name in metadata:
            raise FormatError(f"{folder} has {found[name]} and {file}, which both have the name {name!r}")
        found[name] = file
    leaves = []
    for name, entry in metadata.items():
        if not isinstance(entry, dict) or not entry.keys() >= {"dtype", "shape"}:
            raise FormatError(f"{folder} lists {name!r} without its type and shape")
        shape = read_shape(entry["shape"])
        if name not in found and torch.Size(shape).numel():
            raise CorruptDataError(f"{folder} lists {name!r}, but its file is missing")
        keys = () if name == single_name() else (name,)
        leaves.append(SavedLeaf(keys, found.get(name, ""), dtype_named(entry["dtype"]), shape, shape))
    return leaves


class TensorStorageCheckpointer(StorageCheckpointerBase):
    """Saves any `TensorStorage` in segments, and writes only rows that have changed.

    The first checkpoint at a place is complete. If the storage has saved or loaded the previous checkpoint there, a
    later one adds a segment with the rows that have changed, and shares the other segments by hard links, or copies
    them on file systems without links. It is complete on its own; the previous one is removed. Small segments are
    merged from time to time. The write log tells which rows have changed. Where rows may change without it, digests are
    compared: for memory that the storage wraps, for files in a `scratch_dir`, and after references to rows were handed
    out, for example by slicing.

    Loading into a `LazyTensorStorage` maps the segments copy-on-write, and rows are read when they are used. Rows are
    copied if there are references to the present ones, and for other storages, devices and network file systems. The
    list of segments and their sizes are always verified. Digests are compared as well, but for more than 64 MiB of
    mapped rows only on request (`verify`).

    Segments, TorchRL's layout as rbtool writes it, and checkpoints of TorchRL itself can be loaded, into a storage of
    any capacity that holds the rows. Checkpoints of TorchRL are checked for missing and truncated files. Nothing is
    unpickled.

    Args:
        compatible: whether to write TorchRL's layout instead, completely each time: a memory-mapped tensordict, or one
            file for each leaf of a nest. Files are as large as the whole capacity, but only valid rows take space on
            the disk. A hidden file records the structure, the row written last, and digests. If there are save hooks,
            they get the valid rows, and their result is written in this layout in any case.
    """

    verifies_on_request = True

    def __init__(self, *, compatible: bool = False) -> None:
        require_flags(compatible=compatible)
        super().__init__()
        self.compatible = compatible

    def dumps(self, storage: Storage, path: PathLike, *, durable: Durable = "full") -> None:
        """Write the storage to the folder `path`, atomically replacing an older checkpoint; parent folders are created.

        If the files of the storage itself are in `path`, they are synced, and documents that describe them are added.

        Raises:
            UsageError: something that is not a checkpoint is at `path`.
            SchemaError: only a pickle could hold the data.
            OutOfSpaceError: the disk is full.
        """
        source = _tensor_storage(storage)
        if _lives_at(source, path) and source.initialized:
            describe_in_place(source, Path(path))
            return
        if not self.compatible and not self._save_hooks:
            write_segments(source, path, durable)
            return
        self._refuse_text(source)
        contents = self._contents(source, path)
        with CheckpointStaging(path, durable) as staging:
            covered = contents.write(staging.path)
            staging.publish_noted(covered=covered)

    def capture(self, storage: Storage, path: Path) -> Captured | None:
        """Capture the rows as they are now.

        None with hooks, for a class with its own `dumps`, and if rows may change without being copied first
        (`TensorStorage.snapshot`).
        """
        source = _tensor_storage(storage)
        own = type(self).dumps is TensorStorageCheckpointer.dumps
        if not own or self._save_hooks or not source.initialized or _lives_at(source, path):
            return None
        if self.compatible:
            self._refuse_text(source)
            return CapturedRows.of(source, path, partial(self.dumps, path=path))
        captured = CapturedSegments(source, path)
        if captured.possible:
            return captured
        with captured:
            return None

    def _refuse_text(self, source: TensorStorage) -> None:
        text = next(source.structure.texts(), None) if self.compatible and source.initialized else None
        if text is not None:
            raise SchemaError(
                f"{place(text[0])} is text that differs between rows, which TorchRL's layout cannot hold",
                hint="leave compatible=True out",
            )

    def _contents(self, source: TensorStorage, path: PathLike) -> Contents:
        length, last = len(source), newest_row(source)
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

    def loads(self, storage: Storage, path: PathLike, *, verify: bool = False) -> None:
        """Load rows, length and, if it was recorded, the last cursor. If this fails, nothing is changed.

        If the checkpoint consists of the files of the storage itself, only the length is loaded.

        Args:
            storage: the storage.
            path: the folder.
            verify: whether to compare the bytes of all segments with their digests, even if they are mapped.

        Raises:
            DatasetNotFoundError: (a FileNotFoundError) the path does not exist.
            FormatError: another checkpointer wrote it.
            CorruptDataError: files are missing, truncated or changed.
            SchemaError: (a RuntimeError) keys, types or shapes differ, or there is not enough room.
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
        raise UsageError(f"a TensorStorageCheckpointer saves storages of tensors, found a {type(storage).__name__}")
    return storage


def _lives_at(storage: TensorStorage, path: PathLike) -> bool:
    folder = storage.scratch_dir if isinstance(storage, LazyMemmapStorage) else None
    return folder is not None and os.path.realpath(folder) == os.path.realpath(path)


def _refresh(storage: TensorStorage, folder: Path) -> None:
    if not storage.initialized:
        raise SchemaError(
            f"the storage would replace the files in {folder}, which it has to load, by its own",
            hint="choose another scratch_dir",
        )
    storage.set_length(read_length(folder))


register_checkpointer(TensorStorage, TensorStorageCheckpointer)


_CHUNK = 1 << 20


@dataclass(frozen=True)
class Contents:
    """The contents of a checkpoint to be written in TorchRL's layout.

    Attributes:
        structure: how the data is nested; None if nothing was ever written.
        ndim: how many dimensions count elements.
        whole: the tensors with all rows.
        filled: their valid rows.
        length: the number of elements.
        last_row: the row written last; None if unknown.
    """

    structure: TreeSpec | None
    ndim: int
    whole: Sequence[torch.Tensor]
    filled: Sequence[torch.Tensor]
    length: int
    last_row: int | None

    def write(self, folder: Path) -> set[str]:
        """Write all files to an empty folder and sync them.

        Returns:
            The files of the leaves, whose digests are in the manifest.
        """
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
    """Return the bytes of `storage_metadata.json`, from which TorchRL reads the kind of data and its length."""
    entries = {}
    nest = structure is not None and not isinstance(structure, TensorDictNode | StackNode)
    if structure is not None and nest:
        names = [".".join(path) or single_name() for path in structure.paths()]
        entries = {
            name: {"dtype": str(leaf.dtype), "shape": list(leaf.shape)} for name, leaf in zip(names, whole, strict=True)
        }
    return json.dumps({"metadata": entries, "is_pytree": nest, "len": length}, ensure_ascii=False).encode()


def _write_leaf(folder: Path, leaf: SavedLeaf, tensor: torch.Tensor) -> SavedLeaf:
    """Write the valid rows to a file that is as large as all rows; return the leaf with its digest."""
    if not leaf.size:  # tensordict writes no file for a tensor without elements
        return replace(leaf, digest=Hasher().digest)
    file, data = LeafFile(folder / leaf.file), tensor_bytes(tensor)
    try:
        for start in range(0, len(data), _CHUNK):  # so that the bytes of a digest are still cached when written
            file.write([data[start : start + _CHUNK]])
        file.skip(leaf.size - len(data))
        file.finish()
    finally:
        file.close()
    return replace(leaf, digest=file.digest)


def describe_in_place(storage: TensorStorage, folder: Path) -> None:
    """Sync the files of a memory-mapped storage, and write the documents that make them a checkpoint.

    No digests are recorded: they would be wrong after the next write.
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
    """The valid rows, oldest first, of a checkpoint written by a `TensorStorageCheckpointer` of rbtool or TorchRL.

    Files are mapped, not loaded. Files of rbtool are compared with their digests first.

    Args:
        path: the folder.
        cursor: the row that the buffer's writer would have written next; TorchRL records it outside of this folder.

    Raises:
        FormatError: it is another checkpoint.
        CorruptDataError: it is damaged.
        SchemaError: the rows have no episodes.
    """

    def __init__(self, path: Path, cursor: int | None) -> None:
        folder = open_folder(path, "TensorStorageCheckpointer")
        ndim = _dimensions(folder)
        saved = read_contents(folder, LazyTensorStorage(1, ndim=ndim), raw=False)
        if saved is None or not saved.length:
            raise SchemaError(f"{folder} is the checkpoint of an empty storage")
        if not is_tree(saved.structure):
            raise SchemaError(f"{folder} holds a {saved.structure}, but steps of episodes need tensordicts")
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
        """Whether the files have digests, with which they were compared when they were opened."""
        return is_segmented(self.path) or (self.path / DIGESTS).is_file()


def _dimensions(folder: Path) -> int:
    """Return how many dimensions count elements."""
    if is_segmented(folder):
        with SegmentFolder.opened(folder) as opened:
            return max(opened.manifest.ndim, 1)
    manifest = StorageManifest.load(folder)
    if manifest is not None:
        return max(manifest.ndim, 1)
    file = folder / "meta.json"
    if not file.is_file():
        raise FormatError(f"{folder} does not hold a tensordict, but steps of episodes need one")
    document: Any = load_json(file)
    shape = document.get("shape") if isinstance(document, dict) else None
    return max(len(shape), 1) if isinstance(shape, list) else 1
