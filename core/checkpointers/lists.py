"""Checkpointers of lists: of arbitrary objects, and of compressed tensors."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from ..errors import CorruptDataError, FormatError, SchemaError, UsageError
from ..format import fs
from ..format.documents import load_json
from ..format.files import Hasher, open_regular, read_regular
from ..format.memmap.tree import require_own_files
from ..format.syncing import Durable, sync_file, write_file
from ..options import PathLike
from ..storages.base import Storage, register_checkpointer
from ..storages.codec import byte_count, bytes_behind, tensor_bytes, tensor_from_bytes, to_bytestream
from ..storages.list_storage import (
    CompressedListStorage,
    CompressedTensor,
    ListStorage,
    ObjectNode,
    Tree,
    document_of,
    read_dtype,
    read_shape,
    tree_from,
    tree_of,
)
from ..storages.pytree import ConstantNode, TensorNode, TreeSpec
from ..storages.pytree import Path as KeyPath
from ..ted.schema import file_stem, safe_part
from .base import COMPRESSED_FILES, LIST_FILE, CheckpointStaging, StorageCheckpointerBase, open_folder

_DATA_FILE = "items.memmap"
_FORMAT = "rbtool list"
_VERSION = 1


class ListStorageCheckpointer(StorageCheckpointerBase):
    """Saves a `ListStorage` of tensors, arrays, tensordicts, numbers and texts, and dicts, lists and tuples of them.

    Tensorclasses are saved with the names of their classes, which have to be imported when they are loaded. Other
    objects would need a pickle, and nothing is ever unpickled: they raise SchemaError (a RuntimeError) before any file
    is written. `items.json` holds each different description once, and for each item the number of its description;
    `items.memmap` holds the bytes of all tensors, one after another. TorchRL cannot save such a storage.

    Hooks get the list of objects, and return the list that replaces it.
    """

    def dumps(self, storage: Storage, path: PathLike, *, durable: Durable = "full") -> None:
        """Write the checkpoint to the folder `path`, atomically replacing an older one."""
        items: Any = self._through_save_hooks(storage, list(_list_storage(storage)), path)
        document = _document(map(tree_of, items))
        with CheckpointStaging(path, durable) as staging:
            fs.require_space(staging.path, document["bytes"])
            document["digest"] = _write_tensors(staging.path / _DATA_FILE, map(tree_of, items))
            write_file(staging.path / LIST_FILE, json.dumps(document, allow_nan=False).encode())
            staging.publish_noted(known={_DATA_FILE: document["digest"]})

    def loads(self, storage: Storage, path: PathLike) -> None:
        """Load what `dumps` wrote. If this fails, nothing is changed.

        Raises:
            DatasetNotFoundError: the path does not exist.
            FormatError: (a ValueError) another checkpointer wrote it.
            CorruptDataError: (a ValueError) it is damaged.
            SchemaError: there is not enough room.
        """
        target = _list_storage(storage)
        folder = open_folder(path, "ListStorageCheckpointer")
        kinds, numbers, digest = _read_document(folder / LIST_FILE)
        if len(numbers) > target.max_size:
            raise SchemaError(f"{folder} holds {len(numbers)} objects; this storage has room for {target.max_size}")
        _check_size(folder / _DATA_FILE, kinds, numbers)
        with _DataFile(folder / _DATA_FILE) as file:
            items: Any = [
                _read_item(kinds[number], file, f"row {row} of {folder}") for row, number in enumerate(numbers)
            ]
            file.require_digest(digest)
        for hook in self._load_hooks:
            items = hook(items, out=list(target) or None)
        target.replace_all(list(items))


def _list_storage(storage: Storage) -> ListStorage:
    if not isinstance(storage, ListStorage):
        raise UsageError(f"a ListStorageCheckpointer saves lists of objects, found a {type(storage).__name__}")
    return storage


def _describe(tensor: torch.Tensor) -> dict[str, Any]:
    return {"dtype": str(tensor.dtype), "shape": list(tensor.shape)}


def portable_documents(trees: Iterator[Tree], describe: Any) -> Iterator[dict[str, Any]]:
    """Describe items in plain JSON; SchemaError names the row of an item that JSON cannot describe."""
    row = 0
    try:
        for tree in trees:
            yield document_of(tree, describe, portable=True)
            row += 1  # before the next item is divided into a tree, which may raise the error
    except SchemaError as error:
        raise SchemaError(f"row {row}: {error}", hint=error.hint) from None
    except RecursionError:
        raise SchemaError(f"row {row} holds itself, or is nested too deeply for a checkpoint") from None


def _document(trees: Iterator[Tree]) -> dict[str, Any]:
    known: dict[str, int] = {}
    kinds: list[Any] = []
    sizes: list[int] = []
    numbers = []
    for document in portable_documents(trees, _describe):
        written = json.dumps(document)
        if written not in known:
            known[written] = len(kinds)
            kinds.append(document)
            sizes.append(_bytes_of(document))
        numbers.append(known[written])
    total = sum(sizes[number] for number in numbers)
    return {"format": _FORMAT, "format_version": _VERSION, "bytes": total, "kinds": kinds, "items": numbers}


def _bytes_of(document: Any) -> int:
    """Return the number of bytes of the tensors in a description; FormatError if it is invalid."""
    total = 0

    def add(about: Mapping[str, Any], _: KeyPath) -> None:
        nonlocal total
        total += byte_count(read_dtype(about.get("dtype")), read_shape(about.get("shape")))

    tree_from(document, add)
    return total


def _write_tensors(path: Path, trees: Iterator[Tree]) -> str:
    """Write the bytes of all tensors and return their digest."""
    descriptor, hasher = fs.create(path), Hasher()
    try:
        for tree in trees:
            for tensor in tree.leaves:
                data = tensor_bytes(tensor)
                fs.write(descriptor, data, path)
                hasher.update(data)
        sync_file(descriptor, path)
    finally:
        fs.close(descriptor, path)
    return hasher.digest


def _read_document(path: Path) -> tuple[list[Any], list[int], Any]:
    """Return the descriptions, for each item the number of its description, and the digest of the tensors."""
    document = load_json(path)
    if not isinstance(document, dict) or document.get("format") != _FORMAT:
        raise FormatError(f"{path} does not describe a list of objects")
    if document.get("format_version") != _VERSION:
        raise FormatError(f"{path} has format_version {document.get('format_version')!r}, expected {_VERSION}")
    kinds, numbers = document.get("kinds"), document.get("items")
    if not isinstance(kinds, list) or not isinstance(numbers, list):
        raise FormatError(f"{path} lacks the list of kinds or of items")
    strange = next((number for number in numbers if type(number) is not int or not 0 <= number < len(kinds)), None)
    if strange is not None:
        raise FormatError(f"{path} has the invalid kind {strange!r}, expected a number below {len(kinds)}")
    return kinds, numbers, document.get("digest")


def _check_size(path: Path, kinds: list[Any], numbers: list[int]) -> None:
    sizes = [_bytes_of(kind) for kind in kinds]
    expected = sum(sizes[number] for number in numbers)
    if not path.is_file():
        raise CorruptDataError(f"{path} is missing, expected {expected:,} bytes")
    found = path.stat().st_size
    if found != expected:
        raise CorruptDataError(f"{path} has {found:,} bytes, expected {expected:,}: it was cut or overwritten")


class _DataFile:
    """The file with the bytes of all tensors, which is read sequentially."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._hasher = Hasher()

    def __enter__(self) -> _DataFile:
        self._file = os.fdopen(open_regular(self._path), "rb")
        return self

    def __exit__(self, *raised: object) -> None:
        self._file.close()

    def next_tensor(self, about: Mapping[str, Any], _: KeyPath) -> torch.Tensor:
        """Read the next tensor, of the described shape and element type."""
        tensor = torch.empty(read_shape(about.get("shape")), dtype=read_dtype(about.get("dtype")))
        room = bytes_behind(tensor)
        if self._file.readinto(room) != len(room):
            raise CorruptDataError(f"{self._path} ends in the middle of a tensor: it was cut")
        self._hasher.update(room)
        return tensor

    def require_digest(self, digest: Any) -> None:
        """Raise CorruptDataError if the bytes read differ from those written."""
        if self._hasher.digest != digest:
            raise CorruptDataError(f"{self._path} does not hold the bytes that were saved: its digest differs")


def _read_item(kind: Any, file: _DataFile, what: str) -> Any:
    return put_together(tree_from(kind, file.next_tensor), lambda tensor: tensor, what)


def put_together(tree: Tree, unpack: Any, what: str) -> Any:
    """Build an item; FormatError if its parts contradict each other."""
    try:
        return tree.unflatten(unpack)
    except (RuntimeError, ValueError, TypeError, IndexError, KeyError) as error:
        raise FormatError(f"{what} contradicts itself: {str(error).splitlines()[0]}") from error


register_checkpointer(ListStorage, ListStorageCheckpointer)


_METADATA, _INDICES = COMPRESSED_FILES
_DATA = "compressed_data"
_BARE = "data"
"""The name of the tensor of an item that is a bare tensor."""

_STACK = {"_type": "<class 'tensordict._lazy.LazyStackedTensorDict'>", "stack_dim": 0}
_NODE: dict[str, Any] = {"shape": [], "device": "cpu", "_type": "<class 'tensordict._td.TensorDict'>"}


class CompressedListStorageCheckpointer(StorageCheckpointerBase):
    """Saves a `CompressedListStorage` without decompressing its tensors.

    The layout is TorchRL's: `metadata.json` describes every item, `data_indices.json` has the number of its data, and
    `compressed_data` is a memory-mapped lazy stack of tensordicts. rbtool adds the codec of each tensor and the batch
    sizes of tensordicts. TorchRL can load items compressed with `codec="zlib"` (`"zstd"` from Python 3.14 on) if they
    are tensors, tensordicts without nests, numbers and texts.

    Hooks get the list of decompressed objects, and return the list that replaces it.
    """

    def dumps(self, storage: Storage, path: PathLike, *, durable: Durable = "full") -> None:
        """Write the checkpoint to the folder `path`, atomically replacing an older one.

        Raises:
            SchemaError: (a RuntimeError) an object would need a pickle.
        """
        source = _compressed(storage)
        trees = list(source.trees())
        if self._save_hooks:
            trees = source.compressed(list(self._through_save_hooks(source, source[:], path)))
        documents = list(portable_documents(iter(trees), _describe_compressed))
        for tree in trees:
            require_own_files(map(_stem_path, tree.spec.paths()))
        with CheckpointStaging(path, durable) as staging:
            fs.require_space(staging.path, sum(leaf.nbytes for tree in trees for leaf in tree.leaves))
            _write_json(staging.path / _METADATA, documents)
            _write_json(staging.path / _INDICES, list(range(len(trees))))
            fs.make_folder(staging.path / _DATA)
            _write_json(staging.path / _DATA / "meta.json", _STACK)
            for row, tree in enumerate(trees):
                _write_item(staging.path / _DATA / str(row), tree.spec, iter(tree.leaves))
            staging.publish_noted()

    def loads(self, storage: Storage, path: PathLike) -> None:
        """Load a checkpoint of rbtool or TorchRL. If this fails, nothing is changed.

        The codec of a checkpoint of TorchRL is detected from its bytes. The sizes of files are checked when they are
        loaded, and the bytes of a tensor when it is decompressed.

        Raises:
            DatasetNotFoundError: (a FileNotFoundError) the path does not exist.
            FormatError: (a ValueError) another checkpointer wrote it.
            CorruptDataError: (a ValueError) it is damaged.
            SchemaError: there is not enough room.
        """
        target = _compressed(storage)
        folder = open_folder(path, "CompressedListStorageCheckpointer")
        documents, places = load_json(folder / _METADATA), load_json(folder / _INDICES)
        _check_lists(folder, documents, places)
        if len(documents) > target.max_size:
            raise SchemaError(f"{folder} holds {len(documents)} objects; this storage has room for {target.max_size}")
        trees = [_read_tree(target, folder, place, document) for document, place in zip(documents, places, strict=True)]
        if not self._load_hooks:
            target.replace_trees(trees)
            return
        items: Any = [put_together(tree, target.unpacked, f"row {row} of {folder}") for row, tree in enumerate(trees)]
        for hook in self._load_hooks:
            items = hook(items, out=target[:] or None)
        target.replace_all(list(items))


def _compressed(storage: Storage) -> CompressedListStorage:
    if not isinstance(storage, CompressedListStorage):
        found = type(storage).__name__
        raise UsageError(f"a CompressedListStorageCheckpointer saves a CompressedListStorage, found a {found}")
    return storage


# Writing -------------------------------------------------------------------------------------------


def _describe_compressed(packed: CompressedTensor) -> dict[str, Any]:
    """Describe a compressed tensor in TorchRL's form, with its codec."""
    return {
        "shape": {"__type__": "torch.Size", "value": list(packed.shape)},
        "dtype": {"__type__": "torch.dtype", "value": str(packed.dtype)},
        "device": {"__type__": "torch.device", "value": "cpu"},
        "codec": packed.codec,
    }


def _write_json(path: Path, document: Any) -> None:
    write_file(path, json.dumps(document, allow_nan=False).encode())


def _write_item(folder: Path, spec: TreeSpec, leaves: Iterator[CompressedTensor]) -> None:
    """Write a tensordict of compressed tensors.

    Values that are not tensors are already in `metadata.json`; they are repeated here for TorchRL.
    """
    fs.make_folder(folder)
    entries: dict[str, Any] = {}
    for key, child in {_BARE: spec}.items() if isinstance(spec, TensorNode) else spec.children.items():
        name = safe_part(str(key))
        if isinstance(child, TensorNode):
            data = next(leaves).data
            shape, dtype = ([*data.shape], data.dtype) if isinstance(data, torch.Tensor) else ([len(data)], torch.uint8)
            entries[name] = {"device": "cpu", "shape": shape, "dtype": str(dtype), "is_nested": False}
            write_file(folder / f"{file_stem(name)}.memmap", to_bytestream(data))
        elif isinstance(child, ConstantNode):
            entries[name] = {"type": "NonTensorData"}
            _write_non_tensor(folder / file_stem(name), child)
        elif not isinstance(child, ObjectNode):
            entries[name] = {"type": "TensorDict"}
            _write_item(folder / file_stem(name), child, leaves)
    _write_json(folder / "meta.json", entries | _NODE)


def _write_non_tensor(folder: Path, node: ConstantNode) -> None:
    fs.make_folder(folder)
    value = document_of(Tree(node, []), _describe_compressed, portable=True)["value"]["value"]
    kind = "<class 'tensordict.tensorclass.NonTensorData'>"
    _write_json(folder / "meta.json", {"_type": kind, "data": value, "_is_non_tensor": True, "_metadata": None})


def _stem_path(path: KeyPath) -> KeyPath:
    return tuple(safe_part(part) for part in path or (_BARE,))


# Reading -------------------------------------------------------------------------------------------


def _check_lists(folder: Path, documents: Any, places: Any) -> None:
    if not isinstance(documents, list) or not isinstance(places, list):
        raise FormatError(f"{folder / _METADATA} and {folder / _INDICES} must be lists with one entry for each item")
    if len(documents) != len(places):
        raise CorruptDataError(f"{folder} describes {len(documents)} objects, but numbers {len(places)}")
    given = [place for place in places if place is not None]
    strange = next((place for place in given if type(place) is not int or not 0 <= place < len(places)), None)
    if strange is not None:
        raise FormatError(f"{folder / _INDICES} has the invalid number {strange!r}, expected one below {len(places)}")
    if len(set(given)) < len(given):
        raise FormatError(f"{folder / _INDICES} gives the same data to two objects")


def _read_tree(storage: CompressedListStorage, folder: Path, place: int | None, document: Any) -> Tree:
    def take(about: Mapping[str, Any], path: KeyPath) -> CompressedTensor:
        if place is None:
            raise CorruptDataError(f"{folder / _INDICES} lacks the data of an object that has tensors")
        *inner, name = _stem_path(path)
        place_of_leaf = folder.joinpath(_DATA, str(place), *map(file_stem, inner))
        data = _read_leaf(place_of_leaf, name)
        try:
            return storage.compressed_tensor(about, data)
        except FormatError as error:
            raise type(error)(f"{place_of_leaf / name}: {error}", hint=error.hint) from error

    return tree_from(document, take)


def _read_leaf(folder: Path, name: str) -> torch.Tensor:
    if not (folder / "meta.json").is_file():
        raise CorruptDataError(f"{folder / 'meta.json'} is missing")
    entries = load_json(folder / "meta.json")
    entry = entries.get(name) if isinstance(entries, dict) else None
    try:
        dtype, shape = read_dtype(entry.get("dtype")), read_shape(entry.get("shape"))  # type: ignore[union-attr]
    except (AttributeError, FormatError) as error:
        raise CorruptDataError(f"{folder / 'meta.json'} does not describe a tensor {name!r}") from error
    path, expected = folder / f"{file_stem(name)}.memmap", byte_count(dtype, shape)
    if not path.is_file():
        if not expected:  # tensordict does not write empty files
            return torch.empty(shape, dtype=dtype)
        raise CorruptDataError(f"{path} is missing, expected {expected:,} bytes")
    found = path.stat().st_size
    if found != expected:
        raise CorruptDataError(f"{path} has {found:,} bytes, expected {expected:,}: it was cut or overwritten")
    return tensor_from_bytes(read_regular(path), dtype, shape)


register_checkpointer(CompressedListStorage, CompressedListStorageCheckpointer)
