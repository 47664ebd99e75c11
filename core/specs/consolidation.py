"""Questions about lazy stacks of specs, and stacks whose members are given the keys that they lack."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..errors import UsageError, suggests_keywords
from .base import TensorSpec
from .choice import Choice
from .composite import Composite
from .non_tensor import NonTensor
from .stacked import LazyStack
from .stacked_composite import StackedComposite
from .unbounded import Unbounded
from .values import SpecTypeError


def contains_lazy_spec(spec: TensorSpec) -> bool:
    """Return whether a spec is a lazy stack, Stacked or StackedComposite, or holds one.

    SpecTypeError (a TypeError) for what is no spec.
    """
    _require_spec(spec)
    if isinstance(spec, LazyStack):
        return True
    inner: Sequence[Any] = spec.choices if isinstance(spec, Choice) else ()
    if isinstance(spec, Composite):
        inner = [entry for entry in spec.values() if entry is not None]
    return any(contains_lazy_spec(entry) for entry in inner)


@suggests_keywords()
def check_no_exclusive_keys(spec: TensorSpec, recurse: bool = True) -> bool:
    """Return whether the members of each lazy stack have the same keys; with `recurse`, in nested specs, too.

    SpecTypeError (a TypeError) for what is no spec.
    """
    _require_spec(spec)
    if not isinstance(spec, Composite):
        return True
    inner = [entry for entry in spec.values() if entry is not None]
    if isinstance(spec, StackedComposite):
        if any(spec.exclusive_keys if recurse else _exclusive(spec)):
            return False
        inner = list(spec.specs)
    return not recurse or all(check_no_exclusive_keys(entry) for entry in inner)


def _require_spec(spec: Any) -> None:
    if not isinstance(spec, TensorSpec):
        raise SpecTypeError(f"the spec is a {type(spec).__name__}, expected a TensorSpec")


def _exclusive(spec: StackedComposite) -> list[set[Any]]:
    shared = {*spec.keys()}
    return [{*member.keys()} - shared for member in spec.specs if isinstance(member, Composite)]


@suggests_keywords()
def consolidate_spec(
    spec: Composite, recurse_through_entries: bool = True, recurse_through_stack: bool = True
) -> Composite:
    """Copy a spec so that the members of each lazy stack have the same keys.

    An entry that a member lacks is made of those of the others, with size 0 where they differ in size; where they do
    not, in all dimensions after those of the Composite. Rows of one-hot specs, which cannot be empty, become an
    Unbounded of size 0. `recurse_through_entries` and `recurse_through_stack` decide whether nested Composites and the
    members of stacks are treated, too. UsageError (a ValueError) for entries of one key that differ in class or in
    number of dimensions, SpecTypeError (a TypeError) for what is no Composite.
    """
    if not isinstance(spec, Composite):
        raise SpecTypeError(f"the spec is a {type(spec).__name__}, expected a Composite")
    if isinstance(spec, StackedComposite):
        members = [_as_composite(member.clone()) for member in spec.specs]
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


def _as_composite(spec: Any) -> Composite:
    """Return a member of a StackedComposite by its type."""
    return spec  # type: ignore[no-any-return]


def _consolidate_entries(members: Sequence[Composite], dim: int, recurse_through_stack: bool) -> None:
    """Complete the nested Composites that all members have under one key, in place."""
    for name in list(members[0].keys()):
        nested = [member.get(name) for member in members]
        if all(isinstance(entry, Composite) for entry in nested):
            whole = consolidate_spec(StackedComposite(*nested, dim=dim), True, recurse_through_stack)
            for member, entry in zip(members, whole.unbind(dim), strict=True):
                member.set(name, entry)


def _complete(members: Sequence[Composite]) -> None:
    """Give each member the entries that only others have, in place."""
    for name in dict.fromkeys(key for member in members for key in member):
        owners = [member.get(name) for member in members if name in member]
        if len(owners) < len(members):
            known = [owner for owner in owners if owner is not None]
            blank = _blank(str(name), known, members[0].ndim) if known else None
            for member in members:
                if name not in member:
                    member.set(name, blank)


def _blank(name: str, owners: Sequence[TensorSpec], lead: int) -> TensorSpec:
    """Make an entry like those of others, without elements where that is possible."""
    first = owners[0]
    for owner in owners:
        if type(owner) is not type(first) or owner.ndim != first.ndim:
            kinds = " and ".join(f"{type(spec).__name__} of {spec.ndim} dimensions" for spec in (first, owner))
            raise UsageError(f"the entry {name!r} is a {kinds}: there is no one form of it for the other members")
    differing = [len({*sizes}) > 1 for sizes in zip(*(owner.shape for owner in owners), strict=True)]
    if isinstance(first, Composite):
        return _blank_nest(name, [_as_composite(owner) for owner in owners], differing)
    if isinstance(first, NonTensor):
        return first.clone()
    empty = differing if any(differing) else [place >= lead for place in range(first.ndim)]
    try:
        blank: TensorSpec = first[tuple(slice(0, 0) if is_empty else slice(None) for is_empty in empty)]
    except UsageError:  # the last dimension of one-hot specs stays
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
