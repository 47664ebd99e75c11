"""Composite, the spec of a tensordict: specs by name; and StackedComposite, a lazy stack of Composites that differ."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Self, TypeAlias, TypeVar

import torch
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase, is_non_tensor, is_tensor_collection

from ..errors import MissingKeyError, SchemaError, UsageError, require_flags, suggests_keywords
from .base import (
    DeviceLike,
    LazyStack,
    ShapeChange,
    ShapeLike,
    SpecTypeError,
    SpecValueError,
    Stacked,
    TensorSpec,
    as_device,
    as_shape,
    batch_of,
    batched,
    changed_shape,
    combinations,
    concrete,
    indexing,
    make_neg_dim_of_all,
    normal_dim,
    stack_densely,
    to_array,
)
from .bounded import Unbounded
from .bridge import as_own
from .non_tensor import NonTensor


class LockedSpecError(UsageError, RuntimeError):
    """A locked Composite cannot be changed. It cannot be unlocked while an outer Composite that locked it is locked."""


class ReservedNameError(UsageError, MissingKeyError, AttributeError):
    """A name belongs to a property of a Composite, and cannot be the name of an entry."""


Key: TypeAlias = str | tuple[str, ...]
Entry: TypeAlias = TensorSpec | None
_Item = TypeVar("_Item", covariant=True)


def as_path(key: Any) -> tuple[str, ...] | None:
    """Return a key as a tuple of names, or None if it is not a key; tuples may be nested."""
    if isinstance(key, str):
        return (key,)
    if not isinstance(key, tuple) or not key:
        return None
    parts = [as_path(part) for part in key]
    return None if None in parts else tuple(name for part in parts if part for name in part)


class View(Generic[_Item]):
    """A live view of the keys, specs or items of a Composite, like the views of a dict."""

    def __init__(self, entries: Callable[[], Iterator[tuple[Key, Entry]]], pick: Callable[[Key, Entry], _Item]) -> None:
        self._entries = entries
        self._pick = pick

    def __iter__(self) -> Iterator[_Item]:
        return (self._pick(key, entry) for key, entry in self._entries())

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __contains__(self, item: object) -> bool:
        path = as_path(item)
        if path is not None:
            item = path if len(path) > 1 else path[0]
        return any(item is found or item == found for found in self)

    def __eq__(self, other: object) -> bool:
        """Compare like a set of keys."""
        if not hasattr(other, "__iter__") or not hasattr(other, "__len__"):
            return NotImplemented
        found = list(self)
        return len(found) == len(other) and all(item in found for item in other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({list(self)!r})"


@dataclass(frozen=True, slots=True)
class Selection:
    """The arguments of `Composite.keys`, `values` and `items`: which entries a view shows."""

    include_nested: bool = False
    leaves_only: bool = False
    is_leaf: Callable[[type], bool] | None = None
    step_mdp_static_only: bool = False

    def __post_init__(self) -> None:
        require_flags(
            include_nested=self.include_nested,
            leaves_only=self.leaves_only,
            step_mdp_static_only=self.step_mdp_static_only,
        )

    def takes_as_leaf(self, entry: Composite) -> bool:
        """Return whether a nested Composite is shown as a single entry, without the entries inside it."""
        fixed = self.step_mdp_static_only and entry.step_mdp_static
        return fixed or (self.is_leaf is not None and self.is_leaf(type(entry)))


_NO_DEFAULT: Any = object()
_MISSING: Any = object()
_RESERVED = frozenset({"batch_size", "device", "dtype", "shape", "space"})


class Composite(TensorSpec):
    """The spec of a tensordict: specs by name, nested to any depth.

    Entries are given as a dict, as keyword arguments, or both. A dict among the entries becomes a Composite. A tuple of
    names is a path through nested Composites. None stands for an entry whose spec is not known. A Composite is mutable
    and therefore not hashable.

    Args:
        shape, batch_size: two names for the batch size of the tensordict. The shape of every entry must begin with it;
            nested Composites and NonTensors are expanded to it.
        device: the device of all entries. None: each entry has its own device.
        data_cls: the tensorclass of values; by default they are tensordicts.
        step_mdp_static: marks entries that do not change from step to step.
        names: the names of the dimensions of values.

    Raises:
        UsageError (a ValueError): the shape of an entry does not begin with the batch size.
        SchemaError (a RuntimeError): an entry is on another device.

    >>> from rbtool import Bounded, Composite, Unbounded
    >>> spec = Composite({"action": Bounded(-1, 1, (2,)), ("info", "score"): Unbounded((1,))})
    >>> list(spec.keys(include_nested=True, leaves_only=True))
    ['action', ('info', 'score')]
    """

    domain = "composite"
    _locked = False
    _locks_nested = False
    _holders: tuple[weakref.ref[Composite], ...] = ()
    """Outer Composites that locked this one together with themselves. Weak references: they may be gone."""

    def __init__(
        self,
        *args: Mapping[Any, Any] | Composite | None,
        shape: ShapeLike | None = None,
        batch_size: ShapeLike | None = None,
        device: DeviceLike | None = None,
        data_cls: type | None = None,
        step_mdp_static: bool = False,
        names: Sequence[str | None] | None = None,
        **kwargs: Any,
    ) -> None:
        if len(args) > 1:
            raise SchemaError(f"Composite has {len(args)} positional arguments, expected one dict")
        require_flags(step_mdp_static=step_mdp_static)
        if shape is not None and batch_size is not None:
            raise UsageError("shape and batch_size are both set, expected one: they mean the same")
        size = batch_size if shape is None else shape
        if isinstance(size, TensorSpec):
            raise ReservedNameError("an entry cannot be named 'shape': that is a property of the spec")
        self._shape = as_shape(() if size is None else size)
        self._device = None if device is None else as_device(device)
        self._specs: dict[str, Entry] = {}
        self._names: list[str | None] | None = None
        self.data_cls = data_cls
        self.step_mdp_static = step_mdp_static
        for entries in (*args, kwargs):
            if entries is not None and not isinstance(entries, Mapping | Composite):
                raise SchemaError(f"the argument of Composite is a {type(entries).__name__}, expected a dict of specs")
            for key, spec in entries.items() if entries else ():
                self.set(key, spec)
        if names is not None:
            self.names = names

    # Shape, device, names --------------------------------------------------------------------------

    @property
    def shape(self) -> torch.Size:
        return self._shape

    @shape.setter
    def shape(self, shape: ShapeLike) -> None:
        self._expect_unlocked()
        size = as_shape(shape)
        entries = {name: self._fitting(name, entry, size) for name, entry in self._specs.items()}
        self._shape, self._specs = size, entries
        if self._names is not None and len(self._names) != len(size):
            self._names = None

    @property
    def batch_size(self) -> torch.Size:
        """The same as `shape`."""
        return self.shape

    @batch_size.setter
    def batch_size(self, shape: ShapeLike) -> None:
        self.shape = shape

    @property
    def device(self) -> torch.device | None:
        return self._device

    @device.setter
    def device(self, device: DeviceLike | None) -> None:
        if device is None:
            self.clear_device_()
            return
        self._expect_unlocked()
        moved = self.to(device)
        self._device, self._specs = moved.device, {str(name): entry for name, entry in moved.items()}

    @property
    def dtype(self) -> None:
        """None: a Composite has no single element type."""
        return

    @property
    def names(self) -> list[str | None]:
        """The names of the dimensions; None for a dimension without a name.

        Names from the constructor and assigned names are also set in nested Composites. Assigning None removes the
        names of this Composite only.
        """
        return list(self._names) if self._names is not None else [None] * self.ndim

    @names.setter
    def names(self, names: Sequence[str | None] | None) -> None:
        if names is not None and len(names) != self.ndim:
            raise UsageError(f"names has {len(names)}, expected one for each of {self.ndim} dimensions")
        self._names = None if names is None or not any(names) else list(names)
        for inner in self._nested() if self._names else ():
            inner.names = [*self.names, *[None] * (inner.ndim - self.ndim)]

    # Entries ---------------------------------------------------------------------------------------

    def set(self, name: Key, spec: Any) -> Self:
        """Set an entry, in place, and create nested Composites as needed. If it does not fit, nothing changes.

        ReservedNameError (an AttributeError) for the names of properties: shape, device, dtype and space.
        """
        path = as_path(name)
        if path is None:
            raise SpecTypeError(f"{name!r} is not a key, expected a name or a tuple of names")
        first, rest = path[0], path[1:]
        if first in _RESERVED:
            raise ReservedNameError(f"an entry cannot be named {first!r}: that is a property of the spec")
        inner = self._specs.get(first) if rest else None
        if inner is None:
            self._expect_unlocked()
        elif not isinstance(inner, Composite):
            raise UsageError(f"{first!r} is a {type(inner).__name__}, which has no entry {rest[0]!r}")
        if not rest:
            self._specs[first] = self._fitting(first, self._as_spec(first, spec), self._shape)
        elif inner is None:
            self._specs[first] = type(self)(shape=self._shape, device=self._device).set(rest, spec)
        else:
            inner.set(rest, spec)
        return self

    def _as_spec(self, name: str, spec: Any) -> Entry:
        if spec is None or isinstance(spec, TensorSpec):
            return as_own(spec)  # type: ignore[no-any-return]
        if isinstance(spec, Mapping):
            return type(self)(spec, shape=self._shape, device=self._device)
        kind = type(spec).__name__
        raise SpecTypeError(f"the entry {name!r} is a {kind}, expected a spec, a dict of specs or None")

    def _fitting(self, name: str, entry: Entry, shape: torch.Size) -> Entry:
        """Return an entry on this device whose shape begins with `shape`: a copy, if the entry has to change."""
        if entry is None:
            return None
        if entry.shape[: len(shape)] != shape:
            entry = reshaped_entry(name, entry, shape)
        if self._device is None or entry.device == self._device:
            return entry
        if entry.device is not None:
            raise SchemaError(f"the entry {name!r} is on {entry.device}, the Composite on {self._device}")
        return entry.to(self._device)

    def get(self, item: Key, default: Any = _NO_DEFAULT) -> Any:
        """Return an entry, or `default` if there is none; without a default MissingKeyError (a KeyError) is raised."""
        path: tuple[Any, ...] = as_path(item) or (item,)
        name, rest = path[0], path[1:]
        found: Any = self._specs.get(name, _MISSING)
        if rest:
            found = found.get(rest, _MISSING) if isinstance(found, Composite) else _MISSING
        if found is not _MISSING:
            return found
        if default is not _NO_DEFAULT:
            return default
        known = ", ".join(map(repr, self._specs)) or "none"
        kind = ReservedNameError if path[-1] in _RESERVED else MissingKeyError
        raise kind(f"no entry {item!r}; the entries are {known}")

    def pop(self, key: Key, default: Any = _NO_DEFAULT) -> Any:
        """Remove an entry and return it, or `default` if it does not exist; MissingKeyError without a default."""
        path = as_path(key) or (key,)
        if not path[1:]:
            self._expect_unlocked()
        if not path[1:] and path[0] in self._specs:
            return self._specs.pop(path[0])
        parent = self.get(path[:-1], None) if path[1:] else None
        if isinstance(parent, Composite) and parent.get(path[-1], _MISSING) is not _MISSING:
            return parent.pop(path[-1])
        return self.get(key) if default is _NO_DEFAULT else default  # get raises the error

    def update(self, dict_or_spec: Mapping[Any, Any] | Composite) -> Self:
        """Set several entries, in place, nested Composites recursively. If one does not fit, nothing changes."""
        for target in (self._branches(), self):  # first on a copy: either all entries change or none
            _merge(target, dict_or_spec)
        return self

    def separates(self, *keys: Key, default: Any = None) -> Self:
        """Remove entries and return them as a Composite.

        Missing entries are replaced by `default`, or left out without a default.
        """
        self._expect_unlocked()
        apart = self.empty()
        for key in keys:
            spec = self.pop(key, default)
            if spec is not None:
                apart.set(key, spec)
        return apart

    def empty(self) -> Self:
        """Return a copy of this Composite without entries."""
        return self._twin({}, self._shape)

    @suggests_keywords()
    def is_empty(self, recurse: bool = False) -> bool:
        """Return whether there are no entries; with `recurse`, empty nested Composites do not count."""
        inner = self._specs.values()
        return all(recurse and isinstance(entry, Composite) and entry.is_empty(recurse) for entry in inner)

    def keys(
        self,
        include_nested: bool = False,
        leaves_only: bool = False,
        *,
        is_leaf: Callable[[type], bool] | None = None,
        step_mdp_static_only: bool = False,
    ) -> View[Key]:
        """Return a view of the keys; nested keys are tuples.

        Args:
            include_nested: also yield the keys inside nested Composites.
            leaves_only: leave out the keys of Composites.
            is_leaf: called with the class of each Composite; True treats it as a leaf.
            step_mdp_static_only: leave out the entries inside of Composites that are marked `step_mdp_static`. What
                remains are the entries that `step_mdp` takes from the next step. The name, which suggests the opposite,
                is TorchRL's.
        """
        selection = Selection(include_nested, leaves_only, is_leaf, step_mdp_static_only)
        return View(lambda: self._selected(selection), lambda key, _: key)

    def values(
        self,
        include_nested: bool = False,
        leaves_only: bool = False,
        *,
        is_leaf: Callable[[type], bool] | None = None,
        step_mdp_static_only: bool = False,
    ) -> View[Entry]:
        """Return a view of the specs, in the order of `keys`."""
        selection = Selection(include_nested, leaves_only, is_leaf, step_mdp_static_only)
        return View(lambda: self._selected(selection), lambda _, entry: entry)

    def items(
        self,
        include_nested: bool = False,
        leaves_only: bool = False,
        *,
        is_leaf: Callable[[type], bool] | None = None,
        step_mdp_static_only: bool = False,
    ) -> View[tuple[Key, Entry]]:
        """Return a view of keys and specs, in the order of `keys`."""
        selection = Selection(include_nested, leaves_only, is_leaf, step_mdp_static_only)
        return View(lambda: self._selected(selection), lambda key, entry: (key, entry))

    def _selected(self, selection: Selection, prefix: tuple[str, ...] = ()) -> Iterator[tuple[Key, Entry]]:
        """Yield keys and specs; a Composite comes before its entries."""
        if selection.step_mdp_static_only and self.step_mdp_static:
            return
        for name, entry in self._specs.items():
            nested = isinstance(entry, Composite) and not selection.takes_as_leaf(entry)
            path = (*prefix, name)
            if not (nested and selection.leaves_only):
                yield (path if len(path) > 1 else name), entry
            if isinstance(entry, Composite) and nested and selection.include_nested:
                yield from entry._selected(selection, path)

    def __setitem__(self, key: Key, spec: Any) -> None:
        self.set(key, spec)

    def __delitem__(self, key: Key) -> None:
        self.pop(key)

    def __iter__(self) -> Any:
        return iter(self.keys())

    def __len__(self) -> int:
        return len(self._specs)

    def __bool__(self) -> bool:
        return True  # even without entries

    # Locks -----------------------------------------------------------------------------------------

    @property
    def is_locked(self) -> bool:
        """Whether the entries are locked against changes."""
        return self._locked

    @is_locked.setter
    def is_locked(self, locked: bool) -> None:
        self.lock_() if locked else self.unlock_()

    @property
    def locked(self) -> bool:
        return self._locked

    @suggests_keywords()
    def lock_(self, recurse: bool | None = None) -> Self:
        """Lock the entries: changing them raises LockedSpecError (a RuntimeError) from now on.

        Nested Composites are locked as well, unless `recurse` is False; then only this Composite can unlock them.
        """
        self._locked = True
        if recurse is not False:
            self._locks_nested = True
            self._hold_nested()
            for inner in self._nested():
                inner.lock_()
        return self

    @suggests_keywords()
    def unlock_(self, recurse: bool | None = None) -> Self:
        """Allow changes again, also in nested Composites unless `recurse` is False.

        LockedSpecError (a RuntimeError) if a Composite that stays locked has locked one of them together with itself.
        """
        group = [self] if recurse is False else self._group()
        known = {id(one) for one in group}
        if any(id(holder) not in known for one in group for holder in one._lockers()):
            raise LockedSpecError(
                "a Composite cannot be unlocked while the outer one that locked it is locked",
                hint="unlock_() the outer one",
            )
        for one in group:
            one._locked = one._locks_nested = False
        return self

    def _nested(self) -> list[Composite]:
        return [inner for inner in self._within() if isinstance(inner, Composite)]

    def _group(self) -> list[Composite]:
        """Return this Composite and all that are nested in it."""
        return [self, *(one for inner in self._nested() for one in inner._group())]

    def _hold_nested(self) -> None:
        for inner in self._nested():
            others = [holder for holder in inner._holders if holder() is not None and holder() is not self]
            inner._holders = (*others, weakref.ref(self))

    def _lockers(self) -> list[Composite]:
        """Return the Composites that contain this one and have locked it together with themselves."""
        alive = [found for holder in self._holders if (found := holder()) is not None and found._locks_nested]
        return [holder for holder in alive if any(inner is self for inner in holder._nested())]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_holders": ()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if self._locks_nested:
            self._hold_nested()

    def _expect_unlocked(self) -> None:
        if self._locked:
            raise LockedSpecError("a locked Composite cannot be changed", hint="unlock_() first")

    # Methods that TorchRL's Composite calls on its entries ------------------------------------------

    @property
    def _is_locked(self) -> bool:
        return self._locked

    def _propagate_lock(self, *_: Any, **__: Any) -> None:
        self.lock_()

    def _propagate_unlock(self, *_: Any, **__: Any) -> list[Any]:
        self.unlock_()
        return []

    def _check_unlock(self, *_: Any, **__: Any) -> None:
        """Do nothing: entries of TorchRL's Composite may always be unlocked."""

    def _has_names(self) -> bool:
        return any(self.names)

    def _erase_names(self) -> None:
        self.names = None

    # Values ----------------------------------------------------------------------------------------

    def _draw(self, shape: torch.Size, generator: torch.Generator | None) -> Any:
        return self._made(shape, lambda entry: entry._draw(shape, generator))

    def _fill(self, shape: torch.Size, value: int) -> Any:
        return self._made(shape, lambda entry: entry.one(shape) if value else entry.zero(shape))

    def _made(self, shape: torch.Size, make: Callable[[TensorSpec], Any]) -> Any:
        """Create a value of shape `[*shape, *spec.shape]`; entries that are None are left out."""
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

    def is_in(self, val: Any) -> bool:
        """Return whether each entry of a tensordict or dict is a member of its spec.

        If `data_cls` is set, the value must be an instance of this class. Additional entries are ignored, and an entry
        whose spec is None may have any value or be missing. MissingKeyError (a KeyError) for any other missing entry.
        """
        if self.data_cls is not None and type(val) is not self.data_cls:
            return False
        if not is_nest(val):
            return False
        found = entries_of(val)
        optional = self.data_cls is not None  # fields that are None are not among the entries of a tensorclass
        for name, entry in self._specs.items():
            if entry is None:
                continue
            if not entry.is_in(found[name] if name in found else None if optional else _expected(found, name)):
                return False
        return True

    def __contains__(self, value: Any) -> bool:
        """Return whether a key exists, or a value is a member."""
        if as_path(value):
            return value in self.keys(include_nested=True)
        try:
            return self.is_in(value)
        except MissingKeyError:
            return False

    def project(self, val: Any) -> Any:
        """Replace each entry that is not a member by the nearest one, in place, and return the value.

        MissingKeyError if an entry is missing; nothing is changed then.
        """
        if not is_nest(val):
            raise SpecTypeError(f"cannot project a {type(val).__name__}, expected a tensordict")
        _put(self._projections(val, ()))
        return val

    def _projections(self, value: Any, prefix: tuple[str, ...]) -> list[tuple[Any, Any, Any]]:
        """Return the projected entries, each with its nest and its key, without changing the value."""
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

    def _within(self) -> Sequence[TensorSpec]:
        return [entry for entry in self._specs.values() if entry is not None]

    def _encode(self, value: Any, ignore_device: bool) -> Any:
        """Convert a dict of numbers, lists and arrays to a tensordict; entries may be missing.

        MissingKeyError (a KeyError) for a key that the spec lacks, SchemaError (a RuntimeError) for the value None.
        Values of an entry whose spec is None are kept unchanged.
        """
        if type(value) is not dict and not is_nest(value):
            raise SpecTypeError(f"cannot encode a {type(value).__name__}, expected a dict or a tensordict")
        entries: dict[str, Any] = {}
        for name, item in (value if type(value) is dict else entries_of(value)).items():
            entry = self._specs[name] if name in self._specs else self.get(name)
            if item is None:
                raise SchemaError(f"the value of {name!r} is None; leave out a key without a value")
            entries[name] = item if entry is None else entry._encode(item, ignore_device)
        device = None if ignore_device else self._device
        return self._wrapped(entries, concrete(self._shape), device)

    def _check_encoded(self, value: Any) -> None:
        for name, item in entries_of(value).items():
            entry = self.get(name)
            if entry is not None:
                entry._check_encoded(item)

    def _to_numpy(self, value: Any) -> Any:
        """Return the entries of the value as a dict of NumPy arrays; MissingKeyError for an entry without a spec."""
        arrays: dict[str, Any] = {}
        for name, item in entries_of(value).items():
            entry = self.get(name)
            if entry is not None:
                arrays[name] = entry._to_numpy(item)
            else:
                arrays[name] = to_array(item) if isinstance(item, torch.Tensor) else item
        return arrays

    def type_check(self, value: Any, selected_keys: Key | Iterable[Key] | None = None) -> None:
        """Raise SpecTypeError (a TypeError) unless the entries have the right element types.

        Args:
            value: a tensordict or a dict.
            selected_keys: the entries to check; by default all. With the key of an entry, `value` is that entry.

        Raises:
            MissingKeyError (a KeyError): an entry is missing.
        """
        key = as_path(selected_keys)
        # As in TorchRL, a key names the spec of `value` itself, unless it is unknown and `value` is a nest.
        if key and not (is_nest(value) and key not in self.keys(True)):
            entry = self.get(key)
            if entry is not None:
                entry.type_check(value, None if isinstance(entry, Composite) else selected_keys)
            return
        if not is_nest(value):
            raise SpecTypeError(f"the value is a {type(value).__name__}, expected a tensordict")
        found = entries_of(value)
        for name in self._specs if key or selected_keys is None else selected_keys:
            if self.get(name) is not None:
                first, *rest = as_path(name) or ()
                entry, inner = self.get(first), [tuple(rest)] if rest else None
                entry.type_check(_expected(found, first), inner if isinstance(entry, Composite) else first)

    def rand_update(self, val: TensorDictBase, *, generator: torch.Generator | None = None) -> TensorDictBase:
        """Replace the entries that this spec has by random members, in place, in a tensordict."""
        return val.update(self.rand(self._batch(val), generator=generator))

    def zeros_update(self, val: TensorDictBase) -> TensorDictBase:
        """Replace the entries that this spec has by zeros, in place, in a tensordict."""
        return val.update(self.zero(self._batch(val)))

    def ones_update(self, val: TensorDictBase) -> TensorDictBase:
        """Replace the entries that this spec has by ones, in place, in a tensordict."""
        return val.update(self.one(self._batch(val)))

    def _batch(self, value: TensorDictBase) -> torch.Size:
        batch = batch_of(value.batch_size, self.shape)
        if batch is None:
            found, expected = list(value.batch_size), list(self.shape)
            raise SchemaError(f"the batch size {found} does not end with the spec's {expected}")
        return batch

    def cardinality(self) -> float:
        """Return the number of members of one event: the product over the entries."""
        return math.prod(entry.cardinality() for entry in self._specs.values() if entry is not None)

    @suggests_keywords()
    def enumerate(self, use_mask: bool = False) -> Any:
        """Return all members of one event along dimension 0: every combination of the entries' members."""
        listed = {name: entry.enumerate(use_mask) for name, entry in self._specs.items() if entry is not None}
        rows = combinations([len(values) for values in listed.values()])
        entries = {name: values[rows[:, column]] for column, (name, values) in enumerate(listed.items())}
        return self._wrapped(entries, torch.Size([len(rows), *concrete(self._shape)]), self._device)

    def refine_names(self, *names: Any) -> Self:
        """Name dimensions without a name, in place; Ellipsis stands for dimensions that keep their names.

        SpecValueError (a RuntimeError) if a dimension already has another name.
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
                raise SpecValueError(
                    f"the dimension {old!r} cannot be renamed {new!r}: refine_names only names new ones"
                )
        self.names = given
        return self

    # Shape -----------------------------------------------------------------------------------------

    def _changed(self, change: ShapeChange) -> Self:
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
        return StackedComposite(*specs, dim=dim)

    def _kind(self) -> type[TensorSpec]:
        return Composite

    def __getitem__(self, index: Any) -> Any:
        """Return the entry under a key, or the spec of the part that an index selects from a value."""
        return self.get(index) if as_path(index) else super().__getitem__(index)

    def make_neg_dim(self, dim: int) -> None:
        """Allow any size for one dimension, in place and in all entries."""
        self._expect_unlocked()
        place = normal_dim(dim, self.ndim)
        make_neg_dim_of_all(self._within(), place)
        self._shape = torch.Size([-1 if number == place else size for number, size in enumerate(self._shape)])

    # Device, copies --------------------------------------------------------------------------------

    def to(self, dest: DeviceLike | torch.dtype) -> Self:
        """Return this spec with another device or element type for all entries."""
        moved = {name: None if entry is None else entry.to(dest) for name, entry in self._specs.items()}
        device = self._device if isinstance(dest, torch.dtype) else as_device(dest)
        return self._twin(moved, self._shape, _device=device)

    def clear_device_(self) -> Self:
        """Remove the device requirement, in place; specs of tensors keep their own device."""
        self._expect_unlocked()
        self._device = None
        return super().clear_device_()

    def clone(self) -> Self:
        """Return a copy of the spec, its entries and their tensors; the copy is not locked."""
        copied = {name: None if entry is None else entry.clone() for name, entry in self._specs.items()}
        return self._twin(copied, self._shape)

    def _twin(self, entries: dict[str, Entry], shape: torch.Size, **changes: Any) -> Self:
        """Return an unlocked copy of this Composite with other entries, which must fit."""
        twin = object.__new__(type(self))
        unlocked = {"_locked": False, "_locks_nested": False, "_holders": ()}
        twin.__dict__.update(self.__dict__ | unlocked | changes, _specs=entries, _shape=shape)
        if len(twin.names) != len(shape):
            twin.names = None
        return twin

    def _branches(self) -> Self:
        """Copy this and nested Composites, locks included; other entries are shared."""
        copied = {
            name: entry._branches() if isinstance(entry, Composite) else entry for name, entry in self._specs.items()
        }
        return self._twin(copied, self._shape, _locked=self._locked)

    def _equals(self, other: object) -> bool:
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


def _merge(target: Composite, entries: Mapping[Any, Any] | Composite) -> None:
    for key, spec in entries.items():
        inner = target.get(key, None)
        if isinstance(inner, Composite) and isinstance(spec, Mapping | Composite):
            _merge(inner, spec)
        else:
            target.set(key, spec)


def reshaped_entry(name: str, entry: TensorSpec, shape: torch.Size) -> TensorSpec:
    """Expand nested Composites and NonTensors to the shape of their parent; UsageError if another entry lacks it."""
    if isinstance(entry, NonTensor):
        return entry.expand(*shape, *entry.shape)
    if isinstance(entry, Composite):
        copy = entry.clone()
        copy.shape = shape
        return copy
    raise UsageError(f"the entry {name!r} has the shape {list(entry.shape)}, which should begin with {list(shape)}")


def _put(projections: Sequence[tuple[Any, Any, Any]]) -> None:
    """Write projected entries into their nests."""
    for projected, parent, name in projections:
        if is_tensor_collection(parent):
            parent.set(name, projected)
        else:
            parent[name] = projected


def _goes_into(key: Any, value: Any, size: torch.Size, device: torch.device | None) -> bool:
    """Return whether an entry fits a tensordict as it is, so that the tensordict can be created without checks."""
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
    """Return the entries of a dict, a tensordict or a tensorclass; non-tensor data stay wrapped."""
    if isinstance(value, Mapping):
        return dict(value)
    if type(value) is TensorDict:  # faster; other classes create the entries on access
        return dict(value.items())
    return {name: value.get(name) for name in list(value.keys())}


def _expected(found: Mapping[str, Any], name: str, prefix: tuple[str, ...] = ()) -> Any:
    if name not in found:
        key = (*prefix, name)
        raise MissingKeyError(
            f"the value has no entry {key if prefix else name!r}; it has {', '.join(map(repr, found)) or 'none'}"
        )
    return found[name]


class StackedComposite(LazyStack, Composite):  # type: ignore[misc]  # attributes of LazyStack win
    """A lazy stack of Composites that differ: `torch.stack` returns one if its arguments cannot become one Composite.

    The members must have the same shape. The keys of the stack are those that all members have; an entry is the stack
    of the members' entries, lazy if they differ. Indexing, `unbind` and `specs` give access to the members, which may
    have more entries. Setting, popping and updating entries changes all members; a stacked entry is distributed over
    them. Values are lazily stacked tensordicts, or sequences of the members' values.

    Args:
        specs: the members.
        dim: the dimension along which they are stacked.

    >>> import torch
    >>> from rbtool import Composite, Unbounded
    >>> stack = torch.stack([Composite(a=Unbounded((3,)), b=Unbounded((1,))), Composite(a=Unbounded((4,)))])
    >>> list(stack.keys()), stack["a"].shape, stack[0]["a"].shape
    (['a'], torch.Size([2, -1]), torch.Size([3]))
    """

    _specs: list[Any]  # type: ignore[assignment]  # the members

    def __init__(self, *specs: Composite, dim: int) -> None:
        LazyStack.__init__(self, *specs, dim=dim)
        first = self._specs[0]
        for spec in self._specs:
            if not isinstance(spec, Composite):
                raise SchemaError(f"expected Composites to stack, found a {type(spec).__name__}")
            if spec.shape != first.shape:
                found, expected = list(spec.shape), list(first.shape)
                raise SchemaError(f"expected Composites of the same shape, found {expected} and {found}")
        self._dim_name: str | None = None
        self._locked = all(spec.is_locked for spec in self._specs)

    # Properties ------------------------------------------------------------------------------------

    @property
    def shape(self) -> torch.Size:
        """The batch size of the tensordict: the members' shape with their number inserted at the stacked dimension."""
        sizes = self._specs[0].shape
        return torch.Size([*sizes[: self._dim], len(self._specs), *sizes[self._dim :]])

    @shape.setter
    def shape(self, shape: ShapeLike) -> None:
        raise UsageError("the shape of a stack follows from its members", hint="expand returns a new stack")

    @property
    def device(self) -> torch.device | None:
        """The device of all members; None if they differ."""
        found: torch.device | None = self._common([spec.device for spec in self._specs])
        return found

    @device.setter
    def device(self, device: DeviceLike | None) -> None:
        if device is None:
            self.clear_device_()
            return
        self._expect_unlocked()
        self._specs = [*self.to(device).specs]

    @property
    def dtype(self) -> None:
        """None: a Composite has no single element type."""
        return

    @property
    def names(self) -> list[str | None]:
        """The names of the dimensions; None for a dimension without a name."""
        inner = self._specs[0].names
        return [*inner[: self._dim], self._dim_name, *inner[self._dim :]]

    @names.setter
    def names(self, names: Sequence[str | None] | None) -> None:
        given = [None] * self.ndim if names is None else list(names)
        if len(given) != self.ndim:
            raise UsageError(f"names has {len(given)}, expected one for each of {self.ndim} dimensions")
        self._dim_name = given.pop(self._dim)
        for spec in self._specs:
            spec.names = given

    @property
    def data_cls(self) -> type | None:  # type: ignore[override]  # the members decide
        found: type | None = self._common([spec.data_cls for spec in self._specs])
        return found

    @property
    def step_mdp_static(self) -> bool:  # type: ignore[override]  # the members decide
        return all(spec.step_mdp_static for spec in self._specs)

    # Entries ---------------------------------------------------------------------------------------

    def keys(
        self,
        include_nested: bool = False,
        leaves_only: bool = False,
        *,
        is_leaf: Callable[[type], bool] | None = None,
        step_mdp_static_only: bool = False,
    ) -> View[Key]:
        """Return a view of the keys that all members have, in alphabetical order."""
        views = [
            spec.keys(include_nested, leaves_only, is_leaf=is_leaf, step_mdp_static_only=step_mdp_static_only)
            for spec in self._specs
        ]

        def shared() -> Iterator[tuple[Key, Entry]]:
            others = [{*view} for view in views[1:]]
            found = [key for key in views[0] if all(key in keys for keys in others)]
            return ((key, None) for key in sorted(found, key=lambda key: as_path(key) or ()))

        return View(shared, lambda key, _: key)

    def _selected(self, selection: Selection, prefix: tuple[str, ...] = ()) -> Iterator[tuple[Key, Entry]]:
        for key in self.keys(
            selection.include_nested,
            selection.leaves_only,
            is_leaf=selection.is_leaf,
            step_mdp_static_only=selection.step_mdp_static_only,
        ):
            path = (*prefix, *(key if isinstance(key, tuple) else (key,)))
            yield (path if len(path) > 1 else path[0]), self.get(key)

    def get(self, item: Key, default: Any = _NO_DEFAULT) -> Any:
        """Return the stack of the members' entries under a key, or `default` if a member lacks it.

        MissingKeyError (a KeyError) without a default; SchemaError (a RuntimeError) if the entries differ in their
        number of dimensions, or some are None.
        """
        found = [spec.get(item, _MISSING) for spec in self._specs]
        if any(entry is _MISSING for entry in found):
            if default is not _NO_DEFAULT:
                return default
            known = ", ".join(map(repr, self.keys())) or "none"
            raise MissingKeyError(f"not all members have an entry {item!r}; they have {known} in common")
        if all(entry is None for entry in found):
            return None
        if any(entry is None for entry in found):
            raise SchemaError(f"the entry {item!r} is None in some of the members only")
        if all(isinstance(entry, Composite) for entry in found):
            return StackedComposite(*found, dim=self._dim)
        try:
            return stack_densely(found, self._dim)
        except SchemaError:
            return Stacked.mixed(found, self._dim)

    def set(self, name: Key, spec: Any) -> Self:
        """Set an entry of all members, in place: each gets its part along the stacked dimension. All change or none."""
        self._expect_unlocked()
        spec, last = as_own(spec), (as_path(name) or (repr(name),))[-1]
        if isinstance(spec, Mapping):
            spec = Composite(spec, shape=self.shape)
        if isinstance(spec, TensorSpec) and spec.shape[: self.ndim] != self.shape:
            spec = reshaped_entry(last, spec, self.shape)
        if spec is not None and not isinstance(spec, TensorSpec):
            raise SpecTypeError(f"the entry {last!r} is a {type(spec).__name__}, expected a spec, a dict or None")
        parts = [None] * len(self._specs) if spec is None else spec.unbind(self._dim)
        for members in (self._branches().specs, self._specs):  # first on copies: either all members change or none
            for member, part in zip(members, parts, strict=True):
                member.set(name, part)
        return self

    def __delitem__(self, key: Key) -> None:
        """Remove an entry from all members that have it; MissingKeyError (a KeyError) if none does."""
        self._expect_unlocked()
        if all(spec.get(key, _MISSING) is _MISSING for spec in self._specs):
            self.get(key)  # raises the error
        for spec in self._specs:
            spec.pop(key, None)

    def pop(self, key: Key, default: Any = _NO_DEFAULT) -> Any:
        """Remove an entry from all members, and return the stack of the removed entries."""
        self._expect_unlocked()
        found = self.get(key, default)
        if all(spec.get(key, _MISSING) is not _MISSING for spec in self._specs):
            for spec in self._specs:
                spec.pop(key)
        return found

    def update(self, dict_or_spec: Mapping[Any, Any] | Composite) -> Self:
        """Set several entries of all members, in place, nested Composites recursively. All change or none."""
        self._expect_unlocked()
        for members in (self._branches().specs, self._specs):  # first on copies: either all members change or none
            for number, member in enumerate(members):
                member.update(_part_of(dict_or_spec, self._dim, number))
        return self

    def empty(self) -> Self:
        """Return a copy of the stack whose members have no entries."""
        return type(self)(*(spec.empty() for spec in self._specs), dim=self._dim)

    @suggests_keywords()
    def is_empty(self, recurse: bool = False) -> bool:
        """Return whether no member has entries; with `recurse`, empty nested Composites do not count."""
        return all(spec.is_empty(recurse) for spec in self._specs)

    def __len__(self) -> int:
        """Return the first size, which is also the length of a value; `len(stack.keys())` counts the entries."""
        return self.shape[0]

    def __getitem__(self, index: Any) -> Any:
        return self.get(index) if as_path(index) else LazyStack.__getitem__(self, index)

    @property
    def exclusive_keys(self) -> tuple[tuple[Key, ...], ...]:
        """The keys of each member that not all members have."""
        shared = list(self.keys(True))
        return tuple(tuple(key for key in spec.keys(True) if key not in shared) for spec in self._specs)

    def repr_exclusive_keys(self) -> str:
        """Describe the entries that not all members have, one per line."""
        lines = [
            f"{number}: {key!r}: " + f"{spec.get(key)!r}".replace("\n", "\n    ")
            for number, (spec, keys) in enumerate(zip(self._specs, self.exclusive_keys, strict=True))
            for key in keys
        ]
        return "exclusive_keys={\n    " + ",\n    ".join(lines) + "}" if lines else "exclusive_keys={}"

    def _expect_unlocked(self) -> None:
        if self._locked or any(spec.is_locked for spec in self._specs):
            raise LockedSpecError("a locked Composite cannot be changed", hint="unlock_() first")

    def _branches(self) -> Self:
        return type(self)(*(spec._branches() for spec in self._specs), dim=self._dim)

    # Values ----------------------------------------------------------------------------------------

    def _joined(self, values: Sequence[Any], dim: int) -> Any:
        return LazyStackedTensorDict.lazy_stack(list(values), dim)

    def _projections(self, value: Any, prefix: tuple[str, ...]) -> list[tuple[Any, Any, Any]]:
        parts = self._expected_parts(value)
        lazy = isinstance(value, LazyStackedTensorDict) and value.stack_dim == self._place_in(value)
        if lazy or isinstance(value, list | tuple):
            found = [spec._projections(part, prefix) for spec, part in zip(self._specs, parts, strict=True)]
            return [change for changes in found for change in changes]
        place = self._place_in(value)  # parts are new nests: entries set in them do not appear in the value
        copies = [part.clone(recurse=False) for part in parts]
        found = [spec.project(copy) for spec, copy in zip(self._specs, copies, strict=True)]
        projected: Any = torch.stack(found, place)
        return [(item, value, key) for key, item in projected.items(True, True) if not _same(item, value.get(key))]

    def project(self, val: Any) -> Any:
        """Replace each entry that is not a member by the nearest one, in place, and return the value."""
        if not isinstance(val, list | tuple) and (not is_tensor_collection(val) or is_non_tensor(val)):
            raise SpecTypeError(f"cannot project a {type(val).__name__}, expected a tensordict")
        _put(self._projections(val, ()))
        return val

    def _encode(self, value: Any, ignore_device: bool) -> Any:
        """Convert one dict per member, or one dict of stacked data, to a tensordict; entries may be missing."""
        if is_nest(value) and not isinstance(value, Mapping):
            pieces: Sequence[Any] = self._expected_parts(value)
        elif isinstance(value, Mapping):
            pieces = [self._piece_of(value, number) for number in range(len(self._specs))]
        else:
            pieces = self._expected_parts(value)
        encoded = [spec._encode(piece, ignore_device) for spec, piece in zip(self._specs, pieces, strict=True)]
        return self._joined(encoded, self._dim)

    def _piece_of(self, value: Mapping[str, Any], number: int) -> dict[str, Any]:
        return {
            name: self._piece_of(item, number)
            if isinstance(item, Mapping)
            else item.select(self._dim, number)
            if isinstance(item, torch.Tensor)
            else self._piece(item, number)
            for name, item in value.items()
        }

    def _check_encoded(self, value: Any) -> None:
        for spec, part in zip(self._specs, self._expected_parts(value), strict=True):
            spec._check_encoded(part)

    def type_check(self, value: Any, selected_keys: Key | Iterable[Key] | None = None) -> None:
        if as_path(selected_keys):
            Composite.type_check(self, value, selected_keys)
            return
        for spec, part in zip(self._specs, self._expected_parts(value), strict=True):
            spec.type_check(part, selected_keys)

    # Shape, device, copies -------------------------------------------------------------------------

    def _changed(self, change: ShapeChange) -> Any:
        found = super()._changed(change)
        names = change.names(self.names)
        if names and any(names):
            found.names = names
        return found

    def _stack(self, specs: Sequence[Any], dim: int) -> Any:
        return TensorSpec._stack(self, specs, dim)

    def clear_device_(self) -> Self:
        self._expect_unlocked()
        return TensorSpec.clear_device_(self)

    def make_neg_dim(self, dim: int) -> None:
        self._expect_unlocked()
        super().make_neg_dim(dim)

    def _kind(self) -> type[TensorSpec]:
        return Composite


def _part_of(entries: Mapping[Any, Any] | Composite, dim: int, number: int) -> dict[Any, Any]:
    """Return the part of stacked entries that belongs to one member."""
    found: dict[Any, Any] = {}
    for key, entry in entries.items():
        spec = as_own(entry)
        if isinstance(spec, Mapping):
            found[key] = _part_of(spec, dim, number)
        elif spec is None:
            found[key] = None
        elif isinstance(spec, TensorSpec):
            found[key] = spec.unbind(normal_dim(dim, max(spec.ndim, 1)))[number]
        else:
            raise SpecTypeError(f"the entry {key!r} is a {type(spec).__name__}, expected a spec, a dict or None")
    return found


def _same(one: Any, other: Any) -> bool:
    return one is other or (isinstance(one, torch.Tensor) and torch.equal(one, other))


def contains_lazy_spec(spec: TensorSpec) -> bool:
    """Return whether a spec is or contains a lazy stack (Stacked or StackedComposite).

    SpecTypeError (a TypeError) if it is not a spec.
    """
    spec = _own_spec(spec)
    return isinstance(spec, LazyStack) or any(contains_lazy_spec(inner) for inner in spec._within())


@suggests_keywords()
def check_no_exclusive_keys(spec: TensorSpec, recurse: bool = True) -> bool:
    """Return whether the members of each lazy stack have the same keys; with `recurse`, also in nested specs.

    SpecTypeError (a TypeError) if it is not a spec.
    """
    spec = _own_spec(spec)
    if not isinstance(spec, Composite):
        return True
    inner = [entry for entry in spec.values() if entry is not None]
    if isinstance(spec, StackedComposite):
        if any(spec.exclusive_keys if recurse else _exclusive(spec)):
            return False
        inner = list(spec.specs)
    return not recurse or all(check_no_exclusive_keys(entry) for entry in inner)


def _own_spec(spec: Any) -> TensorSpec:
    if not isinstance(spec, TensorSpec):
        raise SpecTypeError(f"the spec is a {type(spec).__name__}, expected a TensorSpec")
    return as_own(spec)  # type: ignore[no-any-return]


def _exclusive(spec: StackedComposite) -> list[set[Any]]:
    shared = {*spec.keys()}
    return [{*member.keys()} - shared for member in spec.specs if isinstance(member, Composite)]


@suggests_keywords()
def consolidate_spec(
    spec: Composite, recurse_through_entries: bool = True, recurse_through_stack: bool = True
) -> Composite:
    """Return a copy of a spec in which the members of each lazy stack have the same keys.

    An entry that a member lacks is created like the other members' entries, but with size 0 in each dimension in which
    these differ or, if they agree, in all dimensions after the batch. One-hot specs, which cannot be empty, become an
    Unbounded of size 0.

    Args:
        spec: a Composite.
        recurse_through_entries: also treat nested Composites.
        recurse_through_stack: also treat the members of stacks.

    Raises:
        UsageError (a ValueError): entries under one key differ in class or in the number of dimensions.
        SpecTypeError (a TypeError): the spec is not a Composite.
    """
    if not isinstance(spec, Composite):
        raise SpecTypeError(f"the spec is a {type(spec).__name__}, expected a Composite")
    spec = as_own(spec)
    if isinstance(spec, StackedComposite):
        members: list[Composite] = [member.clone() for member in spec._specs]
        if recurse_through_stack:
            members = [consolidate_spec(member, False, True) for member in members]
        _complete(members)
        if recurse_through_entries:
            _consolidate_entries(members, spec.stack_dim, recurse_through_stack)
        return StackedComposite(*members, dim=spec.stack_dim)
    copy = spec.clone()
    for name, entry in copy.items() if recurse_through_entries else ():
        if isinstance(entry, Composite):
            copy.set(name, consolidate_spec(entry, True, recurse_through_stack))
    return copy


def _consolidate_entries(members: Sequence[Composite], dim: int, recurse_through_stack: bool) -> None:
    """Complete nested Composites that all members have under the same key, in place."""
    for name in list(members[0].keys()):
        nested = [member.get(name) for member in members]
        if all(isinstance(entry, Composite) for entry in nested):
            whole = consolidate_spec(StackedComposite(*nested, dim=dim), True, recurse_through_stack)
            for member, entry in zip(members, whole.unbind(dim), strict=True):
                member.set(name, entry)


def _complete(members: Sequence[Composite]) -> None:
    """Add to each member the entries that only others have, in place."""
    for name in dict.fromkeys(key for member in members for key in member):
        owners = [member.get(name) for member in members if name in member]
        if len(owners) < len(members):
            known = [owner for owner in owners if owner is not None]
            blank = _blank(str(name), known, members[0].ndim) if known else None
            for member in members:
                if name not in member:
                    member.set(name, None if blank is None else blank.clone())


def _blank(name: str, owners: Sequence[TensorSpec], lead: int) -> TensorSpec:
    """Return an entry like the other members' entries, without elements if possible."""
    first = owners[0]
    for owner in owners:
        if type(owner) is not type(first) or owner.ndim != first.ndim:
            kinds = " and ".join(f"{type(spec).__name__} of {spec.ndim} dimensions" for spec in (first, owner))
            raise UsageError(f"the entry {name!r} is a {kinds}: other members cannot be given an entry like it")
    differing = [len({*sizes}) > 1 for sizes in zip(*(owner.shape for owner in owners), strict=True)]
    if isinstance(first, Composite):
        return _blank_nest(name, [owner for owner in owners if isinstance(owner, Composite)], differing)
    if isinstance(first, NonTensor):
        return first.clone()
    empty = differing if any(differing) else [place >= lead for place in range(first.ndim)]
    try:
        blank = first._changed(indexing(tuple(slice(0, 0) if is_empty else slice(None) for is_empty in empty)))
    except UsageError:  # one-hot specs cannot be empty in their last dimension
        sizes = [0 if is_empty else size for size, is_empty in zip(first.shape, empty, strict=True)]
        blank = Unbounded(sizes, first.device, first.dtype)
    return blank


def _blank_nest(name: str, owners: Sequence[Composite], differing: Sequence[bool]) -> Composite:
    shape = torch.Size([0 if other else size for size, other in zip(owners[0].shape, differing, strict=True)])
    blank = Composite(shape=shape, device=owners[0].device, data_cls=owners[0].data_cls)
    for key in dict.fromkeys(key for owner in owners for key in owner):
        inner = [entry for owner in owners if (entry := owner.get(key, None)) is not None]
        blank.set(key, _blank(f"{name}.{key}", inner, blank.ndim) if inner else None)
    return blank
