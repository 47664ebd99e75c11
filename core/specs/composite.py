"""A nest of specs by name."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from tensordict import TensorDict, TensorDictBase, is_non_tensor, is_tensor_collection

from ..errors import MissingKeyError, SchemaError, UsageError
from .base import TensorSpec, batch_of, batched, checks_encoding, concrete, stack_densely
from .composite_entries import Entry, SpecEntries, as_path
from .shaping import ShapeChange, changed_shape, normal_dim
from .values import DeviceLike, SpecTypeError, as_device, combinations, to_array

_Spec = TypeVar("_Spec", bound="Composite")


class Composite(SpecEntries):
    """Specs by name, nested to any depth: the spec of a tensordict.

    Entries come as one dict, as keyword arguments or both; a dict among them becomes a Composite, a tuple of names is
    a way through nested ones, and None holds a place whose spec is not known. `shape` (also `batch_size`) is that of
    the tensordict: the shape of every entry begins with it (UsageError, a ValueError), and nested Composites and
    NonTensors are given it if they lack it. A `device` holds for all entries (SchemaError, a RuntimeError, if one is on
    another); None lets each have its own. Values are tensordicts, or of the tensorclass `data_cls`, with the dimension
    `names`; `step_mdp_static` marks what does not change from step to step.

    A Composite can be changed, and therefore has no hash.

    >>> from rbtool import Bounded, Composite, Unbounded
    >>> spec = Composite({"action": Bounded(-1, 1, (2,)), ("info", "score"): Unbounded((1,))})
    >>> list(spec.keys(include_nested=True, leaves_only=True))
    ['action', ('info', 'score')]
    """

    # Values ----------------------------------------------------------------------------------------

    def _draw(self, shape: torch.Size, generator: torch.Generator | None) -> Any:
        return self._made(shape, lambda entry: entry._draw(shape, generator))

    def _fill(self, shape: torch.Size, value: int) -> Any:
        return self._made(shape, lambda entry: entry.one(shape) if value else entry.zero(shape))

    def _made(self, shape: torch.Size, make: Callable[[TensorSpec], Any]) -> Any:
        """Make a value of the shape `[*shape, *spec.shape]`; entries that are None are left out."""
        entries = {name: make(entry) for name, entry in self._specs.items() if entry is not None}
        return self._wrapped(entries, batched(shape, self._shape), self._device)

    def _wrapped(self, entries: dict[str, Any], size: torch.Size, device: torch.device | None) -> Any:
        if self.data_cls is not None and not issubclass(self.data_cls, TensorDictBase):
            from_dict: Callable[..., Any] = self.data_cls.from_dict  # type: ignore[attr-defined]
            return from_dict(entries, batch_size=size, device=device)
        names: Any = [*[None] * (len(size) - self.ndim), *self.names] if self._names else None
        if names is None and all(_goes_into(key, value, size, device) for key, value in entries.items()):
            return TensorDict._new_unsafe(entries, batch_size=size, device=device, nested=False)  # type: ignore[arg-type]
        return TensorDict(entries, batch_size=size, device=device, names=names)

    def is_in(self, value: Any) -> bool:
        """Return whether a tensordict or dict has all entries, each a member of its spec, and is a `data_cls`.

        Further entries are ignored, and an entry whose spec is None may hold anything or be missing.
        """
        if self.data_cls is not None and type(value) is not self.data_cls:
            return False
        if not is_nest(value):
            return False
        found = entries_of(value)
        return all(entry is None or (name in found and entry.is_in(found[name])) for name, entry in self._specs.items())

    def __contains__(self, value: Any) -> bool:
        """Return whether a key is there, or a value is a member."""
        return value in self.keys(include_nested=True) if as_path(value) else self.is_in(value)

    def project(self, value: Any) -> Any:
        """Put each entry that is no member at its nearest one, in place, and return the value.

        MissingKeyError if an entry is missing; nothing has changed then.
        """
        if not is_nest(value):
            raise SpecTypeError(f"cannot project a {type(value).__name__}, expected a tensordict")
        for projected, parent, name in self._projections(value, ()):
            if is_tensor_collection(parent):
                parent.set(name, projected)
            else:
                parent[name] = projected
        return value

    def _projections(self, value: Any, prefix: tuple[str, ...]) -> list[tuple[Any, Any, Any]]:
        """Return each projected entry with the nest it belongs to and its key there; nothing changes."""
        found, changes = entries_of(value), []
        for name, entry in self._specs.items():
            if entry is None:
                continue
            inner = _expected(found, name, prefix)
            if isinstance(entry, Composite) and is_nest(inner):
                changes += entry._projections(inner, (*prefix, name))
            elif (projected := entry.project(inner)) is not inner:
                changes.append((projected, value, name))
        return changes

    def _within(self) -> Iterable[TensorSpec]:
        return (entry for entry in self._specs.values() if entry is not None)

    def _encode(self, value: Any, ignore_device: bool) -> Any:
        """Make a tensordict of a dict of numbers, lists and arrays; entries may be missing.

        MissingKeyError (a KeyError) for a key without an entry here, SchemaError (a RuntimeError) for a value of None.
        An entry that is None takes values as they are.
        """
        if type(value) is not dict and not is_nest(value):
            raise SpecTypeError(f"cannot encode a {type(value).__name__}, expected a dict or a tensordict")
        entries: dict[str, Any] = {}
        for name, item in (value if type(value) is dict else entries_of(value)).items():
            entry = self._specs[name] if name in self._specs else self.get(name)
            if item is None:
                raise SchemaError(f"the value of {name!r} is None; leave the key out where there is no value")
            entries[name] = item if entry is None else entry._encode(item, ignore_device)
        device = None if ignore_device else self._device
        return self._wrapped(entries, concrete(self._shape), device)

    def _check_encoded(self, value: Any) -> None:
        for name, item in entries_of(value).items():
            entry = self.get(name)
            if entry is not None:
                entry._check_encoded(item)

    def to_numpy(self, value: Any, safe: bool | None = None) -> Any:
        """Return a dict of numpy arrays of the entries the value has; MissingKeyError for one without a spec."""
        if checks_encoding() if safe is None else safe:
            self.assert_is_in(value)
        arrays: dict[str, Any] = {}
        for name, item in entries_of(value).items():
            entry = self.get(name)
            if entry is not None:
                arrays[name] = entry.to_numpy(item, safe=False)
            else:
                arrays[name] = to_array(item) if isinstance(item, torch.Tensor) else item
        return arrays

    def type_check(self, value: Any, key: Any = None) -> None:
        """Raise SpecTypeError (a TypeError) unless all entries, or the one at `key`, have their element types.

        MissingKeyError for an entry that is missing.
        """
        if key is not None:
            entry = self.get(key)
            if entry is not None:
                entry.type_check(value, None if isinstance(entry, Composite) else key)
            return
        if not is_nest(value):
            raise SpecTypeError(f"the value is a {type(value).__name__}, expected a tensordict")
        found = entries_of(value)
        for name, entry in self._specs.items():
            if entry is not None:
                item = _expected(found, name)
                entry.type_check(item, None if isinstance(entry, Composite) else name)

    def rand_update(self, value: TensorDictBase, *, generator: torch.Generator | None = None) -> TensorDictBase:
        """Replace the entries of a tensordict with random members, in place; others stay."""
        return value.update(self.rand(self._batch(value), generator=generator))

    def zeros_update(self, value: TensorDictBase) -> TensorDictBase:
        """Replace the entries of a tensordict with zeros, in place; others stay."""
        return value.update(self.zero(self._batch(value)))

    def ones_update(self, value: TensorDictBase) -> TensorDictBase:
        """Replace the entries of a tensordict with ones, in place; others stay."""
        return value.update(self.one(self._batch(value)))

    def _batch(self, value: TensorDictBase) -> torch.Size:
        batch = batch_of(value.batch_size, self.shape)
        if batch is None:
            found, expected = list(value.batch_size), list(self.shape)
            raise SchemaError(f"the batch size {found} does not end with the spec's {expected}")
        return batch

    def cardinality(self) -> float:
        """Count the members of one event: the product over the entries."""
        return math.prod(entry.cardinality() for entry in self._specs.values() if entry is not None)

    def enumerate(self, use_mask: bool = False) -> Any:
        """List all members of one event along dimension 0: every combination of the entries' members."""
        listed = {name: entry.enumerate(use_mask) for name, entry in self._specs.items() if entry is not None}
        rows = combinations([len(values) for values in listed.values()])
        entries = {name: values[rows[:, column]] for column, (name, values) in enumerate(listed.items())}
        return self._wrapped(entries, torch.Size([len(rows), *concrete(self._shape)]), self._device)

    def refine_names(self: _Spec, *names: Any) -> _Spec:
        """Name dimensions that have no name, in place; Ellipsis leaves the others as they are.

        UsageError if a dimension would get another name than it has.
        """
        given = list(names)
        fits = len(given) - 1 <= self.ndim if given.count(...) == 1 else len(given) == self.ndim
        if not fits:
            raise UsageError(f"the names {names} do not fit {self.ndim} dimensions")
        if ... in given:
            place = given.index(...)
            rest = self.ndim - len(given) + 1
            given[place : place + 1] = self.names[place : place + rest]
        for old, new in zip(self.names, given, strict=True):
            if old is not None and old != new:
                raise UsageError(f"the dimension {old!r} cannot be renamed {new!r}: refine_names only names new ones")
        self.names = given
        return self

    # Shape -----------------------------------------------------------------------------------------

    def _changed(self: _Spec, change: ShapeChange) -> _Spec:
        shape = changed_shape(self._shape, change)
        entries = {name: None if entry is None else entry._changed(change) for name, entry in self._specs.items()}
        names = change.names(self.names) if self._names else None
        return self._twin(entries, shape, _names=names if names and any(names) else None)

    def _stack(self, specs: Sequence[Any], dim: int) -> Composite:
        for spec in specs:
            if spec.keys() != self.keys() or spec.data_cls is not self.data_cls:
                found, expected = (", ".join(map(str, one.keys())) or "none" for one in (spec, self))
                raise SchemaError(f"specs with the entries {expected} and {found} cannot be stacked")
        entries: dict[str, Entry] = {}
        for name in self._specs:
            parts = [spec[name] for spec in specs]
            if None in parts and any(part is not None for part in parts):
                raise SchemaError(f"the entry {name!r} is None in some of the specs only")
            entries[name] = None if parts[0] is None else stack_densely(parts, dim)
        shape = torch.Size([*self._shape[:dim], len(specs), *self._shape[dim:]])
        names = [*self.names[:dim], None, *self.names[dim:]] if self._names else None
        return self._twin(entries, shape, _names=names)

    def _stack_lazily(self, specs: Sequence[Any], dim: int) -> Composite:
        from .stacked_composite import StackedComposite

        return StackedComposite(*specs, dim=dim)

    def _kind(self) -> type[TensorSpec]:
        return Composite

    def __getitem__(self, index: Any) -> Any:
        """Return the entry under a key, or the spec of what an index picks from a value."""
        return self.get(index) if as_path(index) else super().__getitem__(index)

    def make_neg_dim(self, dim: int) -> None:
        """Let one dimension have any size, in place and in all entries."""
        self._expect_unlocked()
        place = normal_dim(dim, self.ndim)
        for attempt in (True, False):  # on copies first: either all entries change or none
            for entry in self._specs.values():
                if entry is not None:
                    (entry.clone() if attempt else entry).make_neg_dim(place)
        self._shape = torch.Size([-1 if number == place else size for number, size in enumerate(self._shape)])

    # Device, copies --------------------------------------------------------------------------------

    def to(self: _Spec, dest: DeviceLike | torch.dtype) -> _Spec:
        """Return this spec with all entries on another device, or of another element type."""
        moved = {name: None if entry is None else entry.to(dest) for name, entry in self._specs.items()}
        device = self._device if isinstance(dest, torch.dtype) else as_device(dest)
        return self._twin(moved, self._shape, _device=device)

    def clear_device_(self: _Spec) -> _Spec:
        """Let entries be on any device, in place; those that are tensors keep theirs."""
        self._expect_unlocked()
        self._device = None
        for entry in self._specs.values():
            if entry is not None:
                entry.clear_device_()
        return self

    def clone(self: _Spec) -> _Spec:
        """Copy the spec, its entries and their tensors; the copy is not locked."""
        copied = {name: None if entry is None else entry.clone() for name, entry in self._specs.items()}
        return self._twin(copied, self._shape)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Composite) or type(self) is not type(other):
            return False
        facts = ("_shape", "_device", "data_cls")
        if any(getattr(self, fact) != getattr(other, fact) for fact in facts):
            return False
        return self._specs.keys() == other._specs.keys() and all(
            entry == other._specs[name] for name, entry in self._specs.items()
        )

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        lines = [f"{name}: {entry!r}".replace("\n", "\n    ") for name, entry in self._specs.items()]
        lines += [f"device={self._device}", f"shape={self._shape}", f"data_cls={self.data_cls}"]
        return "Composite(\n    " + ",\n    ".join(lines) + ")"


def _goes_into(key: Any, value: Any, size: torch.Size, device: torch.device | None) -> bool:
    """Return whether a tensordict takes an entry as it is, so that its constructor need not look at each again."""
    kind = type(value)
    if type(key) is not str:
        return False
    if kind is torch.Tensor:
        return (not size or (not value.is_nested and value.shape[: len(size)] == size)) and (
            device is None or value.device == device
        )
    return kind is TensorDict and not size and (device is None or value.device == device)


def is_nest(value: Any) -> bool:
    """Return whether a value is a dict, a tensordict or a tensorclass."""
    return isinstance(value, Mapping) or (is_tensor_collection(value) and not is_non_tensor(value))


def entries_of(value: Any) -> dict[str, Any]:
    """Return the entries of a dict, a tensordict or a tensorclass; data that are no tensors stay wrapped."""
    if isinstance(value, Mapping):
        return dict(value)
    if type(value) is TensorDict:  # its entries as they are; other classes make them when asked for one
        return dict(value.items())
    return {name: value.get(name) for name in list(value.keys())}


def _expected(found: Mapping[str, Any], name: str, prefix: tuple[str, ...] = ()) -> Any:
    if name not in found:
        key = (*prefix, name)
        raise MissingKeyError(
            f"the value has no entry {key if prefix else name!r}; it has {', '.join(map(repr, found)) or 'none'}"
        )
    return found[name]
