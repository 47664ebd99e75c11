"""Finds and checks the tensors of a checkpoint in TorchRL's layout, and maps them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ..errors import CorruptDataError, FormatError, SchemaError
from ..format import Hasher, load_json
from ..storages import TensorStorage
from ..storages.codec import tensor_bytes
from ..storages.describe import structure_from
from ..storages.structure import Leaf, Node, Structure
from ..torchrl import torchrl_form
from .manifest import SavedLeaf, StorageManifest
from .tensor_writer import METADATA
from .torchrl_tree import listed_leaves, walk_tree

__all__ = ["Saved", "read_contents", "read_length", "verify_tensors"]


@dataclass(frozen=True)
class Saved:
    """What a checkpoint holds: how it is made, what is filled of its tensors, their leading shape, the length."""

    structure: Structure
    tensors: Sequence[torch.Tensor]
    lead: torch.Size
    length: int
    last_row: int | None
    capacity: int | None = None
    """How many rows the storage had room for; None where that is not known."""


def read_contents(folder: Path, target: TensorStorage, *, raw: bool) -> Saved | None:
    """Map what is filled of every leaf, after all files were checked; None for the checkpoint of an empty storage.

    `raw` says that load hooks will make rows of it: then nothing is compared with the target.
    """
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


def _structure(manifest: StorageManifest, target: TensorStorage, raw: bool) -> Structure:
    """Say how saved data is made; a class that is not loaded here is that of the target."""
    if manifest.structure is None:
        raise CorruptDataError("a manifest of leaves does not say how they belong together")
    return structure_from(manifest.structure, target.structure if target.initialized and not raw else None)


def _theirs(folder: Path, metadata: dict[str, Any], target: TensorStorage) -> Saved:
    structure: Structure
    if metadata.get("is_pytree"):
        leaves = listed_leaves(folder, metadata["metadata"])
        if [leaf.name for leaf in leaves] == [()]:
            structure = Leaf()
        elif target.initialized:
            structure = Node({leaf.name[0]: Leaf() for leaf in leaves})
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
    """Say which rows are filled of a leaf that TorchRL saved."""
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
    return [_mapped(folder / leaf.file, leaf) for leaf in leaves]


def _check_size(folder: Path, leaf: SavedLeaf) -> None:
    if not leaf.size:
        return
    path = folder / leaf.file
    found = path.stat().st_size if path.is_file() else None
    if found is None:
        raise CorruptDataError(f"{path} is missing; {leaf.size:,} bytes are expected there")
    # Over an older, larger checkpoint TorchRL leaves files longer than their shape; ours are checked strictly.
    if found < leaf.size or (found > leaf.size and leaf.digest is not None):
        raise CorruptDataError(f"{path} has {found:,} bytes, {leaf.size:,} are expected: it was cut or overwritten")


def _mapped(path: Path, leaf: SavedLeaf) -> torch.Tensor:
    """Map what is filled; the map is private and the file is opened for reading only."""
    if not leaf.filled_size:
        return torch.empty(leaf.filled, dtype=leaf.dtype)
    whole = torch.from_file(str(path), shared=False, size=leaf.filled_size, dtype=torch.uint8)
    return whole.view(leaf.dtype).view(leaf.filled)


def _digest(tensor: torch.Tensor) -> str:
    hasher = Hasher()
    hasher.update(tensor_bytes(tensor))
    return hasher.digest
