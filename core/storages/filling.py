"""Batches that are filled again: rows are copied to memory that is there, instead of new tensors being made."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, is_tensor_collection
from torch.autograd.graph import increment_version

from ..errors import SchemaError
from ..kernels.rows import Numbers
from .columns import Columns, renames
from .pytree import TensorDictNode, TreeSpec, place, tree_spec_of

_ADDRESS = torch.Tensor.data_ptr
_REQUIRES_GRAD = attrgetter("requires_grad")
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
        # Several threads use this: it is replaced as a whole.
        self._apart: tuple[list[int], list[int], int] = ([], [], -1)

    @classmethod
    def of(cls, structure: TreeSpec, columns: Columns, out: Any, added: Mapping[Any, Any]) -> Filler | None:
        """Return what fills such a batch; None where rows are not copied as they are."""
        if not columns.gathers_into or columns.ndim != 1 or any(map(renames, columns.dtypes)):
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
        targets = [leaves[number] for number in self._order]
        found = self.columns.sources(targets, (count,), rows)  # other memory of the same kind, as of rows to write
        addresses = None if found is None or found.steps is not None else found.addresses
        if addresses is None:
            self._require_rows(targets, count)
        values = [added[name] for name in self.added]
        for number, value in zip(self._places, values, strict=True):
            _require_like(place(self._paths[number]), leaves[number], value.dtype, value.shape, value.device)
        self._require_apart(leaves, count, addresses)
        self.columns.gather_into(index, rows, targets, addresses=addresses)
        try:
            increment_version(targets)
        except RuntimeError:  # tensors of inference have no version
            increment_version([target for target in targets if not target.is_inference()])
        for number, value in zip(self._places, values, strict=True):
            leaves[number].copy_(value)
        return out

    def _require_rows(self, targets: Sequence[torch.Tensor], count: int) -> None:
        for number, target, leaf in zip(self._order, targets, self.columns.leaves, strict=True):
            _require_like(place(self._paths[number]), target, leaf.dtype, torch.Size([count, *leaf.shape[1:]]), _CPU)

    def _require_apart(
        self, leaves: Sequence[torch.Tensor], count: int, addresses: Sequence[int] | Numbers | None
    ) -> None:
        """Refuse tensors as `fill` does; those that were there with the batch before are looked at only once."""
        if addresses is None:
            places = list(map(_ADDRESS, leaves))
        else:
            places = addresses.tolist() if isinstance(addresses, np.ndarray) else list(addresses)
            places.extend(leaves[number].data_ptr() for number in self._places)
        stored = self.columns.known_addresses  # `sources` has asked for them
        if self._apart != (places, stored, count):
            _require_apart(self._whole, leaves, self.columns.may_hold)
            self._apart = places, stored, count
        elif any(map(_REQUIRES_GRAD, leaves)):
            raise _refused("one of its tensors requires gradients")


def _require_like(name: str, target: torch.Tensor, dtype: torch.dtype, shape: torch.Size, device: torch.device) -> None:
    if target.dtype is not dtype or target.shape != shape or target.device != device:
        found = f"{target.dtype} {list(target.shape)} on {target.device}"
        raise _refused(f"{name} is {found}, expected {dtype} {list(shape)} on {device}")
    if not target.is_contiguous():
        raise _refused(f"{name} is not contiguous")
    if target.is_neg() or target.is_conj():
        raise _refused(f"{name} is a negated or conjugate view")


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
