"""The entries of a Composite: a mapping of names to specs that share leading dimensions and a device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch

from ..errors import MissingKeyError, SchemaError, UsageError
from .base import TensorSpec
from .composite_views import Entry, Key, Selection, View, as_path
from .failures import LockedSpecError, SpecTypeError
from .non_tensor import NonTensor
from .values import DeviceLike, ShapeLike, as_device, as_shape

__all__ = ["SpecEntries"]

_Spec = TypeVar("_Spec", bound="SpecEntries")
_NO_DEFAULT: Any = object()
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
            raise SchemaError(f"{len(args)} positional arguments were given to Composite, one dict is expected")
        if shape is not None and batch_size is not None:
            raise UsageError("shape and batch_size were both given; they are two names of one thing")
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
                raise SchemaError(f"a {type(entries).__name__} was given to Composite, a dict of specs is expected")
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
        return self._shape

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
        self._device, self._specs = moved._device, moved._specs

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
            raise UsageError(f"{len(names)} names were given for {self.ndim} dimensions")
        self._names = None if names is None or not any(names) else list(names)

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
                raise UsageError(f"the dimension {old!r} was to be renamed {new!r}; refine_names only names new ones")
        self.names = given
        return self

    # Entries ---------------------------------------------------------------------------------------

    def set(self: _Spec, key: Key, spec: Any) -> _Spec:
        """Set an entry, in place; nested Composites are made on the way. Nothing changes if it does not fit."""
        path = as_path(key)
        if path is None:
            raise SpecTypeError(f"{key!r} is no key; a name or a tuple of names is expected")
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
        raise SpecTypeError(f"the entry {name!r} is a {kind}; a spec, a dict of specs or None is expected")

    def _fitting(self, name: str, entry: Entry, shape: torch.Size) -> Entry:
        """Return an entry on this device whose shape begins with another; it is copied if it has to change."""
        if entry is None:
            return None
        if entry.shape[: len(shape)] != shape:
            entry = _reshaped(name, entry, shape)
        if self._device is None or entry.device == self._device:
            return entry
        if entry.device is not None:
            raise SchemaError(f"the entry {name!r} is on {entry.device}, the Composite on {self._device}")
        return entry.to(self._device)

    def get(self, key: Key, default: Any = _NO_DEFAULT) -> Any:
        """Return an entry, or `default` if there is none; without a default MissingKeyError (a KeyError) is raised."""
        found: Any = self
        for name in as_path(key) or (key,):
            if not isinstance(found, SpecEntries) or name not in found._specs:
                if default is not _NO_DEFAULT:
                    return default
                known = ", ".join(map(repr, self._specs)) or "none"
                raise MissingKeyError(f"there is no entry {key!r}; there are {known}")
            found = found._specs[name]
        return found

    def pop(self, key: Key, default: Any = _NO_DEFAULT) -> Any:
        """Take an entry out and return it, or `default` if there is none; MissingKeyError without a default."""
        self._expect_unlocked()
        path = as_path(key) or (key,)
        parent = self.get(path[:-1], None) if path[1:] else self
        if not isinstance(parent, SpecEntries) or path[-1] not in parent._specs:
            return self.get(key) if default is _NO_DEFAULT else default  # the first raises
        parent._expect_unlocked()
        return parent._specs.pop(path[-1])

    def update(self: _Spec, entries: Mapping[Any, Any] | SpecEntries) -> _Spec:
        """Set many entries, in place; nested ones are updated in turn. Nothing changes if one does not fit."""
        self._expect_unlocked()
        self._twin(self._branches(), self._shape)._merge(entries)  # fails before the first change if it has to
        self._merge(entries)
        return self

    def _merge(self, entries: Mapping[Any, Any] | SpecEntries) -> None:
        for key, spec in entries.items():
            inner = self.get(key, None)
            if isinstance(inner, SpecEntries) and isinstance(spec, Mapping | SpecEntries):
                inner._expect_unlocked()
                inner._merge(spec)
            else:
                self.set(key, spec)

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
        return View(self, selection, lambda key, _: key)

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
        return View(self, selection, lambda _, entry: entry)

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
        return View(self, selection, lambda key, entry: (key, entry))

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

    def lock_(self: _Spec) -> _Spec:
        """Refuse changes of entries from now on, here and in nested Composites: LockedSpecError, a RuntimeError."""
        return self._with_lock(True)

    def unlock_(self: _Spec) -> _Spec:
        """Allow changes again, here and in nested Composites."""
        return self._with_lock(False)

    def _with_lock(self: _Spec, locked: bool) -> _Spec:
        self._locked = locked
        for entry in self._specs.values():
            if isinstance(entry, SpecEntries):
                entry._with_lock(locked)
        return self

    def _expect_unlocked(self) -> None:
        if self._locked:
            raise LockedSpecError("a locked Composite was to be changed", hint="unlock_() first")

    # Copies ----------------------------------------------------------------------------------------

    def _twin(self: _Spec, entries: dict[str, Entry], shape: torch.Size, **changes: Any) -> _Spec:
        """Return an unlocked Composite like this one with other entries, which are known to fit."""
        twin = object.__new__(type(self))
        twin.__dict__.update(self.__dict__, _specs=entries, _shape=shape, _locked=False, **changes)
        if len(twin.names) != len(shape):
            twin._names = None
        return twin

    def _branches(self) -> dict[str, Entry]:
        """Copy nested Composites, locks included, down to their leaves, which are shared."""
        copied: dict[str, Entry] = {}
        for name, entry in self._specs.items():
            if isinstance(entry, SpecEntries):
                copied[name] = entry._twin(entry._branches(), entry._shape)
                copied[name]._locked = entry._locked  # type: ignore[union-attr]
            else:
                copied[name] = entry
        return copied


def _reshaped(name: str, entry: TensorSpec, shape: torch.Size) -> TensorSpec:
    """Give nested Composites and NonTensors the shape of what they are put into; others have to have it."""
    if isinstance(entry, NonTensor):
        return entry.expand(*shape, *entry.shape)
    if isinstance(entry, SpecEntries):
        copy = entry.clone()
        copy.shape = shape
        return copy
    raise UsageError(f"the entry {name!r} has the shape {list(entry.shape)}, which should begin with {list(shape)}")
