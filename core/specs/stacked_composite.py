"""Nests of specs that are stacked as they are: their entries may differ."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from tensordict import LazyStackedTensorDict, is_tensor_collection

from ..errors import MissingKeyError, SchemaError, UsageError
from .base import TensorSpec, stack_densely
from .composite import Composite, is_nest
from .composite_entries import Entry, Key, Selection, SpecEntries, View, as_path, reshaped_entry
from .shaping import ShapeChange, normal_dim
from .stacked import LazyStack, Stacked
from .values import DeviceLike, LockedSpecError, ShapeLike, SpecTypeError

_Spec = TypeVar("_Spec", bound="StackedComposite")
_REQUIRED: Any = object()
_MISSING: Any = object()


class StackedComposite(LazyStack, Composite):  # type: ignore[misc]  # what it has of both is a stack's
    """Composites of one shape, stacked along `dim` as they are: torch.stack makes it of unequal ones.

    Its keys are those that all members have; the entry under one is the stack of the members' entries, lazy where they
    differ. An index, `unbind` and `specs` lead to the members, which may have more entries. Values are
    tensordicts that are lazily stacked, or sequences of the members' values. Setting, popping and updating entries
    changes all members; a stacked entry is distributed over them.

    >>> import torch
    >>> from rbtool import Composite, Unbounded
    >>> stack = torch.stack([Composite(a=Unbounded((3,)), b=Unbounded((1,))), Composite(a=Unbounded((4,)))])
    >>> list(stack.keys()), stack["a"].shape, stack[0]["a"].shape
    (['a'], torch.Size([2, -1]), torch.Size([3]))
    """

    _members: tuple[Any, ...]

    def __init__(self, *specs: Composite, dim: int) -> None:
        LazyStack.__init__(self, *specs, dim=dim)
        for spec in specs:
            if not isinstance(spec, Composite):
                raise SchemaError(f"Composites can be stacked, found a {type(spec).__name__}")
            if spec.shape != specs[0].shape:
                found, expected = list(spec.shape), list(specs[0].shape)
                raise SchemaError(f"Composites of one shape can be stacked, found {expected} and {found}")
        self._dim_name: str | None = None
        self._locked = all(spec.is_locked for spec in specs)

    # Properties ------------------------------------------------------------------------------------

    @property
    def shape(self) -> torch.Size:
        """Sizes of the tensordict: those of the members, and their number."""
        sizes = self._members[0].shape
        return torch.Size([*sizes[: self._dim], len(self._members), *sizes[self._dim :]])

    @shape.setter
    def shape(self, shape: ShapeLike) -> None:
        raise UsageError("the shape of a stack is that of its members, and their number", hint="expand makes a new one")

    @property
    def device(self) -> torch.device | None:
        """The device of all members; None if they differ."""
        found: torch.device | None = self._common([spec.device for spec in self._members])
        return found

    @device.setter
    def device(self, device: DeviceLike | None) -> None:
        if device is None:
            self.clear_device_()
            return
        self._expect_unlocked()
        self._members = self.to(device).specs

    @property
    def dtype(self) -> None:
        """A Composite has no one element type."""
        return

    @property
    def names(self) -> list[str | None]:
        """Names of the dimensions, None for those without."""
        inner = self._members[0].names
        return [*inner[: self._dim], self._dim_name, *inner[self._dim :]]

    @names.setter
    def names(self, names: Sequence[str | None] | None) -> None:
        given = [None] * self.ndim if names is None else list(names)
        if len(given) != self.ndim:
            raise UsageError(f"names has {len(given)}, expected one for each of {self.ndim} dimensions")
        self._dim_name = given.pop(self._dim)
        for spec in self._members:
            spec.names = given

    @property
    def data_cls(self) -> type | None:  # type: ignore[override]  # which is that of the members
        found: type | None = self._common([spec.data_cls for spec in self._members])
        return found

    @property
    def step_mdp_static(self) -> bool:  # type: ignore[override]  # which is that of the members
        return all(spec.step_mdp_static for spec in self._members)

    # Entries ---------------------------------------------------------------------------------------

    def keys(
        self,
        include_nested: bool = False,
        leaves_only: bool = False,
        *,
        is_leaf: Callable[[type], bool] | None = None,
        step_mdp_static_only: bool = False,
    ) -> View[Key]:
        """A view of the keys that all members have."""
        views = [
            spec.keys(include_nested, leaves_only, is_leaf=is_leaf, step_mdp_static_only=step_mdp_static_only)
            for spec in self._members
        ]
        return View(
            lambda: ((key, None) for key in views[0] if all(key in view for view in views[1:])), lambda key, _: key
        )

    def _selected(
        self, selection: Selection, prefix: tuple[str, ...] = (), static: bool = False
    ) -> Iterator[tuple[Key, Entry]]:
        static_only = selection.step_mdp_static_only and not static
        for key in self.keys(
            selection.include_nested,
            selection.leaves_only,
            is_leaf=selection.is_leaf,
            step_mdp_static_only=static_only,
        ):
            path = (*prefix, *(key if isinstance(key, tuple) else (key,)))
            yield (path if len(path) > 1 else path[0]), self.get(key)

    @property
    def _specs(self) -> dict[str, Entry]:  # type: ignore[override]  # which are made of the members'
        return {str(name): self.get(name) for name in self.keys()}

    def get(self, key: Key, default: Any = _REQUIRED) -> Any:
        """Return the stack of the entries under a key that all members have, or `default` if one lacks it.

        MissingKeyError (a KeyError) without a default, SchemaError (a RuntimeError) for entries that differ in their
        number of dimensions, or of which some are None.
        """
        found = [spec.get(key, _MISSING) for spec in self._members]
        if any(entry is _MISSING for entry in found):
            if default is not _REQUIRED:
                return default
            known = ", ".join(map(repr, self.keys())) or "none"
            raise MissingKeyError(f"not all members have an entry {key!r}; they have {known} in common")
        if all(entry is None for entry in found):
            return None
        if any(entry is None for entry in found):
            raise SchemaError(f"the entry {key!r} is None in some of the members only")
        if all(isinstance(entry, Composite) for entry in found):
            return StackedComposite(*found, dim=self._dim)
        try:
            return stack_densely(found, self._dim)
        except SchemaError:
            return Stacked.mixed(found, self._dim)

    def set(self: _Spec, key: Key, spec: Any) -> _Spec:
        """Set an entry of all members, in place: its part along the dimension of the stack. All change or none."""
        self._expect_unlocked()
        name = (as_path(key) or (repr(key),))[-1]
        if isinstance(spec, Mapping):
            spec = Composite(spec, shape=self.shape)
        if isinstance(spec, TensorSpec) and spec.shape[: self.ndim] != self.shape:
            spec = reshaped_entry(name, spec, self.shape)
        if spec is not None and not isinstance(spec, TensorSpec):
            raise SpecTypeError(f"the entry {name!r} is a {type(spec).__name__}, expected a spec, a dict or None")
        parts = [None] * len(self._members) if spec is None else spec.unbind(self._dim)
        for members in (self._branches().specs, self._members):  # on copies first
            for member, part in zip(members, parts, strict=True):
                member.set(key, part)
        return self

    def pop(self, key: Key, default: Any = _REQUIRED) -> Any:
        """Take the entry under a key that all members have out of them, and return the stack of it."""
        self._expect_unlocked()
        found = self.get(key, default)
        if all(spec.get(key, _MISSING) is not _MISSING for spec in self._members):
            for spec in self._members:
                spec.pop(key)
        return found

    def update(self: _Spec, entries: Mapping[Any, Any] | SpecEntries) -> _Spec:
        """Set many entries of all members, in place; nested ones are updated in turn. All change or none."""
        self._expect_unlocked()
        for members in (self._branches().specs, self._members):  # on copies first
            for number, member in enumerate(members):
                member.update(_part_of(entries, self._dim, number))
        return self

    def empty(self: _Spec) -> _Spec:
        """Return a stack of members like these, without entries."""
        return type(self)(*(spec.empty() for spec in self._members), dim=self._dim)

    def is_empty(self, recurse: bool = False) -> bool:
        """Return whether no member has entries; with `recurse`, none but empty Composites."""
        return all(spec.is_empty(recurse) for spec in self._members)

    def __len__(self) -> int:
        return len(self.keys())

    @property
    def exclusive_keys(self) -> tuple[tuple[Key, ...], ...]:
        """The keys of each member that not all members have."""
        shared = list(self.keys(True))
        return tuple(tuple(key for key in spec.keys(True) if key not in shared) for spec in self._members)

    def repr_exclusive_keys(self) -> str:
        """Describe the entries that not all members have, a line each."""
        lines = [
            f"{number}: {key!r}: " + f"{spec.get(key)!r}".replace("\n", "\n    ")
            for number, (spec, keys) in enumerate(zip(self._members, self.exclusive_keys, strict=True))
            for key in keys
        ]
        return "exclusive_keys={\n    " + ",\n    ".join(lines) + "}" if lines else "exclusive_keys={}"

    def _with_lock(self: _Spec, locked: bool, recurse: bool = True) -> _Spec:
        self._locked = locked
        for spec in self._members:
            spec._with_lock(locked, recurse)
        return self

    def _expect_unlocked(self) -> None:
        if self._locked or any(spec.is_locked for spec in self._members):
            raise LockedSpecError("a locked Composite cannot be changed", hint="unlock_() first")

    def _branches(self: _Spec) -> _Spec:
        return type(self)(*(spec._branches() for spec in self._members), dim=self._dim)

    # Values ----------------------------------------------------------------------------------------

    def _joined(self, values: Sequence[Any], dim: int) -> Any:
        return LazyStackedTensorDict.lazy_stack(list(values), dim)

    def _projections(self, value: Any, prefix: tuple[str, ...]) -> list[tuple[Any, Any, Any]]:
        parts = self._expected_parts(value)
        lazy = isinstance(value, LazyStackedTensorDict) and value.stack_dim == self._place_in(value)
        if lazy or isinstance(value, list | tuple):
            found = [spec._projections(part, prefix) for spec, part in zip(self._members, parts, strict=True)]
            return [change for changes in found for change in changes]
        place = self._place_in(value)  # parts are views: what is set in them is not in the value
        copies = [part.clone(recurse=False) for part in parts]
        found = [spec.project(copy) for spec, copy in zip(self._members, copies, strict=True)]
        projected: Any = torch.stack(found, place)
        return [(item, value, key) for key, item in projected.items(True, True) if not _same(item, value.get(key))]

    def project(self, value: Any) -> Any:
        """Put each entry that is no member at its nearest one, in place, and return the value."""
        if not isinstance(value, list | tuple) and not is_tensor_collection(value):
            raise SpecTypeError(f"cannot project a {type(value).__name__}, expected a tensordict")
        return Composite.project(self, value) if not isinstance(value, list | tuple) else self._project_each(value)

    def _project_each(self, value: Sequence[Any]) -> Sequence[Any]:
        for projected, parent, name in self._projections(value, ()):
            if is_tensor_collection(parent):
                parent.set(name, projected)
            else:
                parent[name] = projected
        return value

    def _encode(self, value: Any, ignore_device: bool) -> Any:
        """Make a tensordict of one dict for each member, or of one dict of stacked numbers; entries may be missing."""
        if is_nest(value) and not isinstance(value, Mapping):
            pieces: Sequence[Any] = self._expected_parts(value)
        elif isinstance(value, Mapping):
            pieces = [self._piece_of(value, number) for number in range(len(self._members))]
        else:
            pieces = self._expected_parts(value)
        encoded = [spec._encode(piece, ignore_device) for spec, piece in zip(self._members, pieces, strict=True)]
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
        for spec, part in zip(self._members, self._expected_parts(value), strict=True):
            spec._check_encoded(part)

    def type_check(self, value: Any, key: Any = None) -> None:
        if key is not None:
            entry = self.get(key)
            if entry is not None:
                entry.type_check(value, None if isinstance(entry, Composite) else key)
            return
        for spec, part in zip(self._members, self._expected_parts(value), strict=True):
            spec.type_check(part)

    # Shape, device, copies -------------------------------------------------------------------------

    def _changed(self, change: ShapeChange) -> Any:
        found = super()._changed(change)
        names = change.names(self.names)
        if names and any(names):
            found.names = names
        return found

    def _stack(self, specs: Sequence[Any], dim: int) -> Any:
        return LazyStack._stack(self, specs, dim)

    def clear_device_(self: _Spec) -> _Spec:
        self._expect_unlocked()
        return super().clear_device_()

    def make_neg_dim(self, dim: int) -> None:
        self._expect_unlocked()
        super().make_neg_dim(dim)

    def _kind(self) -> type[TensorSpec]:
        return Composite


def _part_of(entries: Mapping[Any, Any] | SpecEntries, dim: int, number: int) -> dict[Any, Any]:
    """Return what is for one member in entries that are stacked."""
    found: dict[Any, Any] = {}
    for key, spec in entries.items():
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
