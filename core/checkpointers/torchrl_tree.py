"""Finds the tensors of a checkpoint that has no manifest of ours: what TorchRL wrote."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..errors import CorruptDataError, FormatError
from ..format import load_json
from ..storages.codec import dtype_named
from ..storages.documents import read_shape
from ..storages.layout import SUFFIX, single_name
from ..storages.structure import Constant, Leaf, Structure, TensorDictNode, place
from ..ted import file_stem
from .manifest import SavedLeaf
from .ragged import ROWS, SHAPES

__all__ = ["listed_leaves", "walk_tree"]

_FIELDS = "_tensordict"


def walk_tree(folder: Path, lead: int, *, ragged: bool = False) -> tuple[Structure, list[SavedLeaf]]:
    """Read the `meta.json` files of a memory-mapped tensordict, of whose dimensions `lead` count elements.

    Returns how the data is made and its leaves; those of differing shapes, where `ragged` allows for them, as
    `with_ragged` wants them. FormatError for what is no such folder, and for values that only a
    pickle holds.
    """
    leaves: list[SavedLeaf] = []
    return _node(folder, "", (), lead, leaves, ragged), leaves


def _node(
    root: Path, inside: str, prefix: tuple[str, ...], lead: int, leaves: list[SavedLeaf], ragged: bool
) -> Structure:
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
    children: dict[str, Structure] = {}
    any_ragged = False
    for name, entry in document.items():
        if not isinstance(entry, dict):
            continue
        if ragged and entry.get("is_nested"):
            leaves += _ragged_leaves(root, inside, (*prefix, name), entry)
            children[name] = TensorDictNode({ROWS: Leaf(), SHAPES: Leaf()}, torch.Size([]), None)
            any_ragged = True
        elif "dtype" in entry and "shape" in entry:
            leaves.append(_leaf(root, inside, (*prefix, name), entry))
            children[name] = Leaf()
        elif "type" in entry:
            folder = f"{inside}{_folder(root, inside, name)}/"
            children[name] = _node(root, folder, (*prefix, name), lead, leaves, ragged)
    batch = torch.Size([] if any_ragged else read_shape(document.get("shape", [])))
    return TensorDictNode(children, batch[lead:], None)


def _constant(path: Path, document: Mapping[str, Any], prefix: tuple[str, ...]) -> Structure:
    pickles = [name for name in ("other.pickle", "pickle.pkl") if (path.parent / name).exists()]
    if pickles or "data" not in document or "stack_dim" in document:
        what = f"a pickle, {pickles[0]}," if pickles else "a stack of values that are no tensors"
        raise FormatError(
            f"{place(prefix)} of {path.parent} is {what} which is not opened: a pickle can run anything"
            if pickles
            else f"{place(prefix)} of {path.parent} is {what}; a storage of tensors cannot hold it"
        )
    return Constant(document["data"], torch.Size([]), None)


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
    """The rows of a leaf of differing shapes, and the table of those shapes that lies beside them."""
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
