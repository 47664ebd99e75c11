"""The entries of a Composite: a mapping of names to specs that share leading dimensions and a device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeAlias, TypeVar

import torch

from ..errors import MissingKeyError, SchemaError, UsageError
from .base import TensorSpec
from .non_tensor import NonTensor
from .values import DeviceLike, LockedSpecError, ShapeLike, SpecTypeError, as_device, as_shape

Key: TypeAlias = str | tuple[str, ...]
Entry: TypeAlias = TensorSpec | None

_Item = TypeVar("_Item", covariant=True)


def as_path(key: Any) -> tuple[str, ...] | None:
    """Return the names a key goes through, or None for what is no key; tuples may be nested."""
    if isinstance(key, str):
        return (key,)
    if not isinstance(key, tuple) or not key:
        return None
    parts = [as_path(part) for part in key]
    return None if None in parts else tuple(name for part in parts if part for name in part)


@dataclass(frozen=True, slots=True)
class Selection:
    """Which entries of a Composite are looked at."""

    include_nested: bool = False
    leaves_only: bool = False
    is_leaf: Callable[[type], bool] | None = None
    step_mdp_static_only: bool = False


class View(Generic[_Item]):
    """A live look at the keys, the specs or both of a Composite, as a dict gives."""

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
        """Compare as sets of keys are compared."""
        if not hasattr(other, "__iter__") or not hasattr(other, "__len__"):
            return NotImplemented
        found = list(self)
        return len(found) == len(other) and all(item in found for item in other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({list(self)!r})"


_Spec = TypeVar("_Spec", bound="SpecEntries")
_NO_DEFAULT: Any = object()
_MISSING: Any = object()
_RESERVED = frozenset({"batch_size", "device", "dtype", "shape", "space"})


class SpecEntries(TensorSpec):
    """What a Composite is as a mapping; Composite adds what it is as a spec."""

    domain = "composite"

    def __init__(
        self,
        *args: Mapping[Any, Any] | SpecEntries | None,
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
        if shape is not None and batch_size is not None:
            raise UsageError("shape and batch_size are both set, expected one: they are two names of one thing")
        size = batch_size if shape is None else shape
        if isinstance(size, TensorSpec):
            raise UsageError("an entry cannot be named 'shape': that is a property of the spec")
        self._shape = as_shape(() if size is None else size)
        self._device = None if device is None else as_device(device)
        self._specs: dict[str, Entry] = {}
        self._locked = False
        self._names: list[str | None] | None = None
        self.data_cls = data_cls
        self.step_mdp_static = step_mdp_static
        if names is not None:
            self.names = names
        for entries in (*args, kwargs):
            if entries is not None and not isinstance(entries, Mapping | SpecEntries):
                raise SchemaError(f"the argument of Composite is a {type(entries).__name__}, expected a dict of specs")
            for key, spec in entries.items() if entries else ():
                self.set(key, spec)

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
        """The shape, by tensordict's name for it."""
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
        """A Composite has no one element type."""
        return

    @property
    def names(self) -> list[str | None]:
        """Names of the dimensions, None for those without."""
        return list(self._names) if self._names is not None else [None] * self.ndim

    @names.setter
    def names(self, names: Sequence[str | None] | None) -> None:
        if names is not None and len(names) != self.ndim:
            raise UsageError(f"names has {len(names)}, expected one for each of {self.ndim} dimensions")
        self._names = None if names is None or not any(names) else list(names)

    # Entries ---------------------------------------------------------------------------------------

    def set(self: _Spec, key: Key, spec: Any) -> _Spec:
        """Set an entry, in place; nested Composites are made on the way. Nothing changes if it does not fit."""
        path = as_path(key)
        if path is None:
            raise SpecTypeError(f"{key!r} is no key, expected a name or a tuple of names")
        self._expect_unlocked()
        name, rest = path[0], path[1:]
        if name in _RESERVED:
            raise UsageError(f"an entry cannot be named {name!r}: that is a property of the spec")
        if not rest:
            self._specs[name] = self._fitting(name, self._as_spec(name, spec), self._shape)
            return self
        inner = self._specs.get(name)
        if inner is not None and not isinstance(inner, SpecEntries):
            raise UsageError(f"{name!r} is a {type(inner).__name__}, which has no entry {rest[0]!r}")
        if inner is None:
            inner = type(self)(shape=self._shape, device=self._device)
        inner.set(rest, spec)
        self._specs[name] = inner
        return self

    def _as_spec(self, name: str, spec: Any) -> Entry:
        if spec is None or isinstance(spec, TensorSpec):
            return spec
        if isinstance(spec, Mapping):
            return type(self)(spec, shape=self._shape, device=self._device)
        kind = type(spec).__name__
        raise SpecTypeError(f"the entry {name!r} is a {kind}, expected a spec, a dict of specs or None")

    def _fitting(self, name: str, entry: Entry, shape: torch.Size) -> Entry:
        """Return an entry on this device whose shape begins with another; it is copied if it has to change."""
        if entry is None:
            return None
        if entry.shape[: len(shape)] != shape:
            entry = reshaped_entry(name, entry, shape)
        if self._device is None or entry.device == self._device:
            return entry
        if entry.device is not None:
            raise SchemaError(f"the entry {name!r} is on {entry.device}, the Composite on {self._device}")
        return entry.to(self._device)

    def get(self, key: Key, default: Any = _NO_DEFAULT) -> Any:
        """Return an entry, or `default` if there is none; without a default MissingKeyError (a KeyError) is raised."""
        path: tuple[Any, ...] = as_path(key) or (key,)
        name, rest = path[0], path[1:]
        found: Any = self._specs.get(name, _MISSING)
        if rest:
            found = found.get(rest, _MISSING) if isinstance(found, SpecEntries) else _MISSING
        if found is not _MISSING:
            return found
        if default is not _NO_DEFAULT:
            return default
        known = ", ".join(map(repr, self._specs)) or "none"
        raise MissingKeyError(f"there is no entry {key!r}; there are {known}")

    def pop(self, key: Key, default: Any = _NO_DEFAULT) -> Any:
        """Take an entry out and return it, or `default` if there is none; MissingKeyError without a default."""
        self._expect_unlocked()
        path = as_path(key) or (key,)
        if not path[1:] and path[0] in self._specs:
            return self._specs.pop(path[0])
        parent = self.get(path[:-1], None) if path[1:] else None
        if isinstance(parent, SpecEntries) and parent.get(path[-1], _MISSING) is not _MISSING:
            return parent.pop(path[-1])
        return self.get(key) if default is _NO_DEFAULT else default  # the first raises

    def update(self: _Spec, entries: Mapping[Any, Any] | SpecEntries) -> _Spec:
        """Set many entries, in place; nested ones are updated in turn. Nothing changes if one does not fit."""
        self._expect_unlocked()
        for target in (self._branches(), self):  # on a copy first: either all entries change or none
            _merge(target, entries)
        return self

    def separates(self: _Spec, *keys: Key, default: Any = None) -> _Spec:
        """Take entries out and return them as a Composite.

        `default` replaces missing ones; without it they are left out.
        """
        self._expect_unlocked()
        apart = self.empty()
        for key in keys:
            spec = self.pop(key, default)
            if spec is not None:
                apart.set(key, spec)
        return apart

    def empty(self: _Spec) -> _Spec:
        """Return a Composite like this one, without entries."""
        return self._twin({}, self._shape)

    def is_empty(self, recurse: bool = False) -> bool:
        """Return whether there are no entries; with `recurse`, none but empty Composites."""
        inner = self._specs.values()
        return all(recurse and isinstance(entry, SpecEntries) and entry.is_empty(recurse) for entry in inner)

    def keys(
        self,
        include_nested: bool = False,
        leaves_only: bool = False,
        *,
        is_leaf: Callable[[type], bool] | None = None,
        step_mdp_static_only: bool = False,
    ) -> View[Key]:
        """A view of the keys; nested ones are tuples. `is_leaf` is called with the class of each Composite."""
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
        """A view of the specs, in the order of `keys`."""
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
        """A view of keys and specs, in the order of `keys`."""
        selection = Selection(include_nested, leaves_only, is_leaf, step_mdp_static_only)
        return View(lambda: self._selected(selection), lambda key, entry: (key, entry))

    def _selected(
        self, selection: Selection, prefix: tuple[str, ...] = (), static: bool = False
    ) -> Iterator[tuple[Key, Entry]]:
        """Yield keys and specs, a Composite before its entries."""
        for name, entry in self._specs.items():
            nested = isinstance(entry, SpecEntries) and not (selection.is_leaf and selection.is_leaf(type(entry)))
            fixed = static or bool(getattr(entry, "step_mdp_static", False))
            path = (*prefix, name)
            if not (nested and selection.leaves_only) and (fixed or not selection.step_mdp_static_only):
                yield (path if len(path) > 1 else name), entry
            if isinstance(entry, SpecEntries) and nested and selection.include_nested:
                yield from entry._selected(selection, path, fixed)

    def __setitem__(self, key: Key, spec: Any) -> None:
        self.set(key, spec)

    def __delitem__(self, key: Key) -> None:
        self.pop(key)

    def __iter__(self) -> Any:
        return iter(self.keys())

    def __len__(self) -> int:
        return len(self._specs)

    def __bool__(self) -> bool:
        return True  # without entries, too, it is a spec

    # Locks -----------------------------------------------------------------------------------------

    @property
    def is_locked(self) -> bool:
        """Whether entries can not be changed."""
        return self._locked

    @is_locked.setter
    def is_locked(self, locked: bool) -> None:
        self._with_lock(locked)

    @property
    def locked(self) -> bool:
        return self._locked

    def lock_(self: _Spec, recurse: bool | None = None) -> _Spec:
        """Refuse changes of entries from now on: LockedSpecError, a RuntimeError.

        The entries of nested Composites are locked, too, unless `recurse` is False.
        """
        return self._with_lock(True, recurse is not False)

    def unlock_(self: _Spec, recurse: bool | None = None) -> _Spec:
        """Allow changes again, also in nested Composites, unless `recurse` is False."""
        return self._with_lock(False, recurse is not False)

    def _with_lock(self: _Spec, locked: bool, recurse: bool = True) -> _Spec:
        self._locked = locked
        for entry in self._specs.values() if recurse else ():
            if isinstance(entry, SpecEntries):
                entry.is_locked = locked
        return self

    def _expect_unlocked(self) -> None:
        if self._locked:
            raise LockedSpecError("a locked Composite cannot be changed", hint="unlock_() first")

    # Copies ----------------------------------------------------------------------------------------

    def _twin(self: _Spec, entries: dict[str, Entry], shape: torch.Size, **changes: Any) -> _Spec:
        """Return an unlocked Composite like this one with other entries, which are known to fit."""
        twin = object.__new__(type(self))
        twin.__dict__.update(self.__dict__ | {"_locked": False} | changes, _specs=entries, _shape=shape)
        if len(twin.names) != len(shape):
            twin.names = None
        return twin

    def _branches(self: _Spec) -> _Spec:
        """Copy this and nested Composites, locks included; other entries are shared."""
        copied = {
            name: entry._branches() if isinstance(entry, SpecEntries) else entry for name, entry in self._specs.items()
        }
        return self._twin(copied, self._shape, _locked=self._locked)


def _merge(target: SpecEntries, entries: Mapping[Any, Any] | SpecEntries) -> None:
    if target.is_locked:
        raise LockedSpecError("a locked Composite cannot be changed", hint="unlock_() first")
    for key, spec in entries.items():
        inner = target.get(key, None)
        if isinstance(inner, SpecEntries) and isinstance(spec, Mapping | SpecEntries):
            _merge(inner, spec)
        else:
            target.set(key, spec)


def reshaped_entry(name: str, entry: TensorSpec, shape: torch.Size) -> TensorSpec:
    """Give nested Composites and NonTensors the shape of what they are put into; others have to have it."""
    if isinstance(entry, NonTensor):
        return entry.expand(*shape, *entry.shape)
    if isinstance(entry, SpecEntries):
        copy = entry.clone()
        copy.shape = shape
        return copy
    raise UsageError(f"the entry {name!r} has the shape {list(entry.shape)}, which should begin with {list(shape)}")
