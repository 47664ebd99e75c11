"""Batches that are filled again: rows are copied to memory that is there, instead of new tensors being made."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from tensordict import TensorDict, is_tensor_collection
from torch.autograd.graph import increment_version

from ..errors import SchemaError
from .columns import Columns
from .pytree import TensorDictNode, TreeSpec, place, tree_spec_of

_ADDRESS = torch.Tensor.data_ptr
_IS_CONTIGUOUS, _IS_INFERENCE = torch.Tensor.is_contiguous, torch.Tensor.is_inference
_CPU = torch.device("cpu")
_HINT = "give a batch of that size which an earlier call returned, without entries that were added to it"


def fill(out: Any, batch: Any, stored: Callable[[torch.Tensor], bool]) -> Any:
    """Copy a batch into another one that is made as it is, and return that one.

    `stored` returns whether a tensor may share memory with stored rows. SchemaError (a RuntimeError), with nothing
    changed, for other entries, element types, shapes or devices, and for tensors that are not contiguous, that require
    gradients, or that share memory with each other or with stored rows.
    """
    try:
        structure = tree_spec_of(batch)
        values, targets = structure.flatten(batch), structure.flatten(out)
    except SchemaError as error:
        raise _refused(str(error)) from error
    if is_tensor_collection(batch) and out.batch_size != batch.batch_size:
        raise _refused(f"its batch size is {list(out.batch_size)}, expected {list(batch.batch_size)}")
    for path, value, target in zip(structure.paths(), values, targets, strict=True):
        _require_like(place(path), target, value.dtype, value.shape, value.device)
    _require_apart(structure, targets, stored)
    with torch.no_grad():
        for value, target in zip(values, targets, strict=True):
            target.copy_(value)
    return out


class Filler:
    """Fills batches of rows of a storage of tensors, in one call for all columns.

    Batches may have more entries at their root than the rows, which are copied.
    """

    def __init__(self, structure: TreeSpec, columns: Columns, added: Sequence[str]) -> None:
        self.structure, self.columns, self.added = structure, columns, added
        whole = structure
        if added:
            whole = structure.joined(TensorDictNode.nested([(name,) for name in added]))
        paths = list(whole.paths())
        self._whole = whole
        self._paths = paths
        self._order = [paths.index(path) for path in structure.paths()]
        self._places = [paths.index((name,)) for name in added]
        self._rows = [tuple(leaf.shape[1:]) for leaf in columns.leaves]
        # Several threads use these: each is replaced as a whole.
        self._shapes: tuple[int, list[tuple[int, ...]]] = (-1, [])
        self._apart: tuple[list[int], list[int], int] = ([], [], -1)

    @classmethod
    def of(cls, structure: TreeSpec, columns: Columns, out: Any, added: Mapping[Any, Any]) -> Filler | None:
        """Return what fills such a batch; None where rows are not copied as they are."""
        if not columns.gathers_into or columns.ndim != 1 or any(map(columns.renames, columns.dtypes)):
            return None
        if added and not (type(structure) is TensorDictNode and structure.kind is None and type(out) is TensorDict):
            return None
        return cls(structure, columns, tuple(added)) if all(type(key) is str for key in added) else None

    def fill(self, index: torch.Tensor, rows: int, out: Any, added: Mapping[str, torch.Tensor]) -> Any:
        """Copy the rows `index`, int64 `[n]`, among the first `rows`, and the entries `added`; see `fill`."""
        try:
            leaves = self._whole.flatten(out)
        except SchemaError as error:
            raise _refused(str(error)) from error
        count = index.shape[0]
        if type(out) is TensorDict and out.batch_size[:1] != index.shape:
            raise _refused(f"its batch size is {list(out.batch_size)}, expected {count} elements")
        known, shapes = self._shapes
        if known != count:
            shapes = [(count, *row) for row in self._rows]
            self._shapes = count, shapes
        targets = [leaves[number] for number in self._order]
        dtypes = self.columns.dtypes
        # All at once: one by one they would take as long as new tensors.
        alike = [target.dtype for target in targets] == dtypes and [target.shape for target in targets] == shapes
        if not (alike and all(target.is_cpu for target in targets) and all(map(_IS_CONTIGUOUS, targets))):
            for number, target, dtype, shape in zip(self._order, targets, dtypes, shapes, strict=True):
                _require_like(place(self._paths[number]), target, dtype, torch.Size(shape), _CPU)
        values = [added[name] for name in self.added]
        for number, value in zip(self._places, values, strict=True):
            _require_like(place(self._paths[number]), leaves[number], value.dtype, value.shape, value.device)
        self._require_apart(leaves, count)
        self.columns.gather_all_into(index, rows, targets)
        if any(map(_IS_INFERENCE, targets)):  # these have no version
            targets = [target for target in targets if not target.is_inference()]
        increment_version(targets)
        for number, value in zip(self._places, values, strict=True):
            leaves[number].copy_(value)
        return out

    def _require_apart(self, leaves: Sequence[torch.Tensor], count: int) -> None:
        """Refuse tensors as `fill` does; those that were there with the batch before are looked at only once."""
        places, stored = list(map(_ADDRESS, leaves)), self.columns.addresses()
        if self._apart != (places, stored, count):
            _require_apart(self._whole, leaves, self.columns.may_hold)
            self._apart = places, stored, count
        elif any(leaf.requires_grad for leaf in leaves):
            raise _refused("one of its tensors requires gradients")


def _require_like(name: str, target: torch.Tensor, dtype: torch.dtype, shape: torch.Size, device: torch.device) -> None:
    if target.dtype is not dtype or target.shape != shape or target.device != device:
        found = f"{target.dtype} {list(target.shape)} on {target.device}"
        raise _refused(f"{name} is {found}, expected {dtype} {list(shape)} on {device}")
    if not target.is_contiguous():
        raise _refused(f"{name} is not contiguous")


def _require_apart(structure: TreeSpec, leaves: Sequence[torch.Tensor], stored: Callable[[torch.Tensor], bool]) -> None:
    """Refuse tensors of which a write changes another one, or stored rows, and tensors of a graph."""
    end, before = 0, ""
    named = zip(map(place, structure.paths()), leaves, strict=True)
    for name, leaf in sorted(named, key=lambda pair: pair[1].data_ptr()):
        if leaf.requires_grad:
            raise _refused(f"{name} requires gradients")
        if not (size := leaf.numel() * leaf.element_size()):
            continue
        if stored(leaf):
            raise _refused(f"{name} may be a view of stored rows")
        if leaf.data_ptr() < end:
            raise _refused(f"{name} shares memory with {before}")
        end, before = leaf.data_ptr() + size, name


def _refused(why: str) -> SchemaError:
    return SchemaError(f"out cannot be filled: {why}", hint=_HINT)
