"""The tensordict memory-map directory: headerless `*.memmap` files with a `meta.json` a folder.

tensordict opens such a folder unaided. This module reads and writes the layout with numpy and the standard
library alone; `facts` in comments are about tensordict 0.14 and 0.15.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from ...errors import CorruptDataError, FormatError, SchemaError
from ...ted import Key, file_stem, key_name, numpy_dtype, torch_name
from .. import fs
from ..documents import Count, decode, is_sound_array, parse_json

__all__ = [
    "MappedLeaf",
    "TreeFiles",
    "batch_of",
    "leaf_path",
    "parse_node",
    "read_tree",
    "require_own_files",
    "tree_documents",
    "write_tree_meta",
]

_DEPTH = 50
_NODE = "<class 'tensordict._td.TensorDict'>"


@dataclass(frozen=True, slots=True)
class MappedLeaf:
    """A tensor file: its element type by name and its whole shape, rows first.

    `nested` marks a ragged leaf, whose `shape` is that of the table of row shapes next to it.
    """

    dtype: str
    shape: tuple[int, ...]
    nested: bool = False


def leaf_path(key: Key, suffix: str = ".memmap") -> str:
    """Return the path of a leaf's file inside its folder, with `/` between the parts."""
    *folders, name = (file_stem(part) for part in key)
    return "/".join((*folders, name + suffix))


def require_own_files(keys: Iterable[Key]) -> None:
    """Raise SchemaError for two keys that need the same file, or one's file where the other's folder must be."""
    leaves: set[Key] = set()
    taken: dict[str, Key] = {}
    for key in keys:
        paths = {"/".join(map(file_stem, key[:depth])): key[:depth] for depth in range(1, len(key))}
        paths[leaf_path(key)] = key
        for path, part in paths.items():
            if taken.setdefault(path, part) != part or (part in leaves):
                raise _shared(taken[path], key)
        leaves.add(key)
    for path, part in taken.items():
        if part in leaves and path != leaf_path(part):
            raise _shared(part, part)


def _shared(one: Key, other: Key) -> SchemaError:
    return SchemaError(f"the keys {key_name(one)!r} and {key_name(other)!r} need the same file")


def tree_documents(leaves: Mapping[Key, MappedLeaf], batch: tuple[int, ...]) -> dict[str, bytes]:
    """Return the `meta.json` files of a tree by their paths."""
    nodes: dict[Key, dict[str, Any]] = {(): {}}
    for key, leaf in leaves.items():
        for depth in range(len(key)):
            if key[:depth] not in nodes:
                nodes[key[:depth]] = {}
                nodes[key[: depth - 1]][key[depth - 1]] = {"type": "TensorDict"}
        nodes[key[:-1]][key[-1]] = {
            "device": "cpu", "shape": list(leaf.shape), "dtype": torch_name(leaf.dtype), "is_nested": leaf.nested
        }  # fmt: skip
    found = {}
    for key, entries in nodes.items():
        entries |= {"shape": list(batch), "device": "cpu", "_type": _NODE}
        path = "/".join((*(file_stem(part) for part in key), "meta.json"))
        found[path] = json.dumps(entries, ensure_ascii=False).encode()
    return found


def write_tree_meta(folder: Path, leaves: Mapping[Key, MappedLeaf], batch: tuple[int, ...]) -> list[str]:
    """Write the `meta.json` files of a tree whose leaf files are there already; return their paths."""
    documents = tree_documents(leaves, batch)
    for path, data in documents.items():
        fs.make_folder((folder / path).parent)
        fs.write_file(folder / path, data)
    return list(documents)


class TreeFiles(Protocol):
    """The files of a memory-map directory, open."""

    root: Path

    def size(self, name: str) -> int | None:
        """Bytes of a file; None if there is none."""

    def read(self, name: str) -> bytes:
        """All bytes of a file."""


def read_tree(files: TreeFiles, *, exact: bool = True, besides: Collection[str] = ()) -> dict[Key, MappedLeaf]:
    """List the leaves of a memory-map directory in the order of the tensordict that wrote it.

    Every leaf's file must be there with just the bytes its shape asks for: a cut or a missing one raises
    CorruptDataError. Without `exact` no file is looked at, nor are the files `besides`.
    """
    leaves = dict(_walk(files, ()))
    for key, leaf in leaves.items():
        if exact and not leaf.nested and leaf_path(key) not in besides:
            _check_size(files, leaf_path(key), leaf)
    return leaves


def parse_node(data: bytes, origin: str) -> dict[str, MappedLeaf]:
    """List the leaves that one `meta.json` describes, without those of its sub-folders."""
    return {name: _leaf(entry, origin) for name, entry in _entries(parse_json(data, origin), origin) if _is_leaf(entry)}


@dataclass(frozen=True, slots=True)
class _BatchDocument:
    """What the `meta.json` of a tensordict states about all of it."""

    shape: tuple[Count, ...] | None = None


def batch_of(document: Any, origin: str) -> tuple[int, ...]:
    """Read the batch size of a tensordict, whose `meta.json` is the document; none at all for one without."""
    return decode(_BatchDocument, document, origin).shape or ()


def _walk(files: TreeFiles, prefix: Key) -> Iterable[tuple[Key, MappedLeaf]]:
    if len(prefix) > _DEPTH:
        raise FormatError(f"{files.root} is nested deeper than {_DEPTH} folders, which no tensordict is")
    node = "/".join((*map(file_stem, prefix), "meta.json"))
    origin = str(files.root / node)
    if files.size(node) is None:
        raise FormatError(f"{(files.root / node).parent} is no tensordict folder: it has no meta.json")
    for name, entry in _entries(parse_json(files.read(node), origin), origin):
        if _is_leaf(entry):
            yield (*prefix, name), _leaf(entry, origin)
        elif entry.get("type") == "TensorDict":
            yield from _walk(files, (*prefix, name))


def _entries(document: Any, origin: str) -> list[tuple[str, dict[str, Any]]]:
    if not isinstance(document, dict) or "_type" not in document:
        raise FormatError(f"{origin} does not describe a tensordict: it has no _type")
    return [(name, entry) for name, entry in document.items() if isinstance(entry, dict)]


def _is_leaf(entry: Mapping[str, Any]) -> bool:
    return "dtype" in entry and "shape" in entry


def _leaf(entry: Mapping[str, Any], origin: str) -> MappedLeaf:
    leaf = decode(MappedLeaf, {**entry, "nested": entry.get("is_nested", False)}, origin)
    leaf = replace(leaf, dtype=leaf.dtype.removeprefix("torch."))
    try:
        numpy_dtype(leaf.dtype)
    except SchemaError as error:
        raise FormatError(f"{origin}: {error}") from error
    if not is_sound_array(leaf.dtype, leaf.shape):
        raise FormatError(f"{origin} holds {list(leaf.shape)!r:.60} where a shape should be")
    return leaf


def _check_size(files: TreeFiles, name: str, leaf: MappedLeaf) -> None:
    path, expected = files.root / name, numpy_dtype(leaf.dtype).itemsize
    for size in leaf.shape:
        expected *= size
    found = files.size(name)
    if found is None and expected:
        raise CorruptDataError(f"{path} is missing; {expected:,} bytes are expected there")
    if found is not None and found != expected:
        raise CorruptDataError(f"{path} has {found:,} bytes, {expected:,} are expected: it was cut or overwritten")
