"""The contract of transforms, and how several of them, or plain functions, become one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice, takewhile
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict
from torch import nn

from ..errors import SchemaError, UsageError, warn_caller
from ..format.contracts import FinalMethodError, own_attributes, refuse_overrides

_NEVER_CALLED = {
    "_call": "forward(data)",
    "_inv_call": "inv(data)",
    "_apply_transform": "forward(data), or change(value, key, data) of a KeyedTransform",
    "_inv_apply_transform": "inv(data)",
}
"""Methods of TorchRL's transforms that our buffers do not call, and what to implement instead."""


class Past(Protocol):
    """The steps around each step of a batch, as far as they belong to its episode and are stored; most of all the
    `looks_back` steps before it.
    """

    age: torch.Tensor
    """How many of those before it exist for each step; int64 in the shape of the batch."""

    @property
    def keys(self) -> Sequence[tuple[str, ...]] | None:
        """The entries of the storage, if each can be read by itself."""

    def rows(self, keys: Sequence[tuple[str, ...]]) -> TensorDict:
        """Return these of the `keys`, of the steps themselves."""

    def entry(self, key: tuple[str, ...]) -> torch.Tensor | None:
        """Return an entry of these steps and, last, of the step itself: `[*batch, looks_back + 1, …]`, fresh memory.

        Missing steps are replaced by the earliest existing one. None if the entry is not stored.
        """

    def window(self, key: tuple[str, ...], offsets: NDArray[np.int64]) -> tuple[torch.Tensor | None, torch.Tensor]:
        """Return an entry of the steps that are so many steps away: `[*batch, *offsets.shape, …]`, fresh memory; and
        which of these steps are missing, bool `[*batch, *offsets.shape]`.

        Missing steps are replaced by the nearest existing one. None if the entry is not stored.
        """

    def moved_on(self, stack: torch.Tensor, newest: torch.Tensor, use: tuple[str, ...]) -> torch.Tensor:
        """Shift a stack by one step: drop the first step of what `entry` returned, and append `newest`. Fresh memory.

        Results for the same batch must differ in `use`, the key of the entry that it is for.
        """


class Transform(nn.Module):
    """Changes what leaves a buffer with `forward`, and what enters it with `inv`; the defaults change nothing.

    A subclass implements one or both:

    - `forward(data)` gets a batch, in the type that the storage returns, and returns the batch to use instead.
    - `inv(data)` gets the data of `extend` (or of `add`, with a leading dimension of size 1 if it is a tensordict) and
      returns the data to write; None if nothing is to be written.

    Neither may edit values in place, except values that it made: `buffer[3]` and `buffer[3:7]` are views of the
    storage, and the data of `extend` belongs to the caller. A random transform sets `draws` and only draws from
    `generator`. State that `inv` changes is kept in registered buffers, and the class sets `counts_writes`.

    A transform that keeps steps for a later write also implements `flush()`, which returns these steps (or None) and
    forgets them; `held_back()`, which returns what it keeps; and `hold_back(held)`, which replaces what it keeps. The
    buffer calls `hold_back` with the earlier value if a write fails, and with None in `empty()`.

    A transform that needs the steps around a batch's steps sets `looks_back` to the number of those before and
    implements `with_past(data, past)`, which is called instead of `forward` while rows are read. It needs data as it is
    stored, and so comes before all transforms that do not look back. If it `reads_rows`, the first of them gets None
    for data that was not read yet, if `past.keys` tells what there is.

    `__call__` is final. A class that overrides it, or defines `_call`, `_inv_call`, `_apply_transform` or
    `_inv_apply_transform`, which buffers never call, raises FinalMethodError (a TypeError).

    Names and behaviour follow TorchRL's transforms.

    >>> class Scale(Transform):
    ...     def forward(self, data):
    ...         return data.copy().set("reward", data["reward"] * 2)
    >>> from tensordict import TensorDict
    >>> Scale()(TensorDict({"reward": torch.ones(2)}, [2]))["reward"]
    tensor([2., 2.])
    """

    draws = False
    """Whether `forward` draws from `generator`. The buffer then sets it, and calls `forward` in the caller's thread."""

    counts_writes = False
    """Whether `inv` changes the state: processes that share a buffer then have to share that state."""

    follows_next = False
    """Whether `forward` accepts a second argument: entries under `next` that it must leave alone."""

    reads_in_keys_only = False
    """Whether `forward` reads its `in_keys`, at the root and under `next`, and nothing else. A condition on an entry of
    trajectories then runs it on these alone."""

    looks_back: int | None = None
    """How many steps before each step of a batch `with_past` needs; None if the batch itself suffices."""

    reads_rows = False
    """Whether `with_past` reads what it needs of the rows, too."""

    episode_keys: tuple[tuple[str, ...], tuple[str, ...] | None] = (("next", "done"), None)
    """For transforms that look back: the flag at which episodes end, and the entry with their id (None: default)."""

    generator: torch.Generator | None = None
    """The generator of the buffer; None for torch's global one."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        own = own_attributes(cls, Transform)
        refuse_overrides(cls, own, {"__call__": "forward(data)"})
        for name, instead in _NEVER_CALLED.items():
            if name in own:
                raise FinalMethodError(
                    f"{cls.__name__} has {name}(), which a buffer never calls", hint=f"implement {instead}"
                )

    @property
    def named_in_next(self) -> frozenset[tuple[str, ...]]:
        """The entries under `next` that were passed to it by name."""
        return frozenset()

    def forward(self, data: Any) -> Any:
        """Return what leaves the buffer instead of `data`."""
        return data

    def with_past(self, data: Any, past: Past) -> Any:
        """Return what leaves the buffer instead of `data`, rows that were just read, given the steps around them."""
        return data

    def inv(self, data: Any) -> Any:
        """Return what enters the buffer instead of `data`; None if nothing is to be written."""
        return data

    def share_memory_(self) -> Transform:
        """Move the state to shared memory; SchemaError if `inv` changes state that is not a tensor."""
        if self.counts_writes and not any(True for _ in self.buffers()):
            raise _unshared(self)
        self.share_memory()
        return self

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the generator; the copy's buffer sets its own."""
        return {name: value for name, value in self.__dict__.items() if name != "generator"}


class CallableTransform(Transform):
    """Calls a function, or a module that is not a transform, on the way out; the way in is unchanged."""

    def __init__(self, func: Callable[[Any], Any]) -> None:
        super().__init__()
        self.func = func

    def forward(self, data: Any) -> Any:
        return self.func(data)

    def extra_repr(self) -> str:
        return "" if isinstance(self.func, nn.Module) else getattr(self.func, "__qualname__", repr(self.func))


class InvertTransform(Transform):
    """Exchanges the two directions of a transform: `inv` on the way out, `forward` on the way in."""

    def __init__(self, transform: Any) -> None:
        super().__init__()
        self.transform = transform

    @property
    def draws(self) -> bool:  # type: ignore[override]
        """Whether the transform draws from the buffer's generator."""
        return bool(getattr(self.transform, "draws", False))

    @property
    def counts_writes(self) -> bool:  # type: ignore[override]
        """Whether the direction that is now the way in changes the state."""
        return bool(getattr(self.transform, "counts_writes", False))

    def share_memory_(self) -> Transform:
        Compose(self.transform).share_memory_()
        return self

    def forward(self, data: Any) -> Any:
        return self.transform.inv(data)

    def inv(self, data: Any) -> Any:
        return self.transform._call(data) if _overrides(self.transform, "_call", "forward") else self.transform(data)


class Compose(Transform):
    """Applies transforms in order on the way out, and in reverse order on the way in.

    `inv` stops at the first transform that returns None. Transforms are put into evaluation mode.

    Some transforms change an entry under `next` together with the one at the root. They leave it to another transform
    of their class that lists it: `ToTensorImage("pixels")` and `ToTensorImage(("next", "pixels"))` change each entry
    once, in any order.

    Args:
        *transforms: `Transform`s, similar modules with `inv` (such as TorchRL's), callables, or lists of them. A
            `Compose` is replaced by its parts.
    """

    def __init__(self, *transforms: Any) -> None:
        super().__init__()
        if len(transforms) == 1 and isinstance(transforms[0], list | tuple):
            transforms = tuple(transforms[0])
        self.transforms = nn.ModuleList([part for transform in transforms for part in _parts(transform)])

    def forward(self, data: Any, first: int = 0) -> Any:
        """Apply the transforms, from number `first` on."""
        for transform in islice(self.transforms, first, None) if first else self.transforms:
            elsewhere = self._named_elsewhere(transform)
            data = transform(data, elsewhere) if elsewhere else transform(data)
        return data

    @property
    def looking_back(self) -> list[Any]:
        """The transforms at the front that look back; a buffer applies them while it reads rows."""
        return list(takewhile(lambda transform: getattr(transform, "looks_back", None) is not None, self.transforms))

    def _named_elsewhere(self, transform: Any) -> frozenset[tuple[str, ...]]:
        """Return the entries under `next` that others of its class list, for a transform that follows into `next`."""
        if len(self) < 2 or not getattr(transform, "follows_next", False):
            return frozenset()
        others = (other for other in self.transforms if other is not transform and type(other) is type(transform))
        return frozenset().union(*(other.named_in_next for other in others))  # type: ignore[arg-type]

    def inv(self, data: Any) -> Any:
        for transform in reversed(self.transforms):
            if data is None:
                return None
            data = _inward(transform, data)
        return data

    def inv_in_place(self, data: Any) -> Any:
        """Return the data for replacing stored elements: `inv`, skipping transforms that hold data back.

        Replaced elements do not follow or wait for anything, so `data` counts as the result of such a transform.
        """
        for transform in reversed(self.transforms):
            if data is None:
                return None
            if isinstance(transform, Compose):
                data = transform.inv_in_place(data)
            elif not hasattr(transform, "held_back"):
                data = _inward(transform, data)
        return data

    @property
    def draws(self) -> bool:  # type: ignore[override]
        """Whether one of the transforms draws from the buffer's generator."""
        return not self.is_empty and any(getattr(transform, "draws", False) for transform in self.transforms)

    def set_rng(self, generator: torch.Generator | None) -> None:
        """Set the generator of all transforms that draw."""
        for module in self.modules():
            if module is not self and getattr(module, "draws", False):
                module.generator = generator  # type: ignore[assignment]

    def append(self, transform: Any) -> Compose:
        """Add a transform, or all parts of a `Compose`, at the end.

        Returns:
            This object.

        Raises:
            SchemaError: the transforms are shared, and this one cannot be. Nothing is added.
        """
        self.transforms.extend(self._added(transform))
        return self

    def insert(self, index: int, transform: Any) -> Compose:
        """Insert a transform, or all parts of a `Compose`, before the one at `index`.

        Args:
            index: a position as for lists: negative ones count from the end, `len` is the end.
            transform: the transform.

        Returns:
            This object.

        Raises:
            UsageError: (a ValueError) there is no such position.
        """
        if not -len(self) <= index <= len(self):
            raise UsageError(f"place is {index}, expected one of {len(self)} transforms")
        there = list(self.transforms)
        there[index:index] = self._added(transform)
        self.transforms = nn.ModuleList(there)
        return self

    shared = False
    """Whether transforms added later are shared, too."""

    def share_memory_(self) -> Compose:
        _share(self.transforms)
        self.shared = True
        return self

    def _added(self, transform: Any) -> list[Any]:
        parts = _parts(transform)
        if self.shared:
            _share(parts)
        return parts

    def flush(self) -> Any:
        """Return what transforms hold back, after the transforms that `inv` calls behind them; None if nothing is held.

        A transform holds data back if it has the methods `flush`, `held_back` and `hold_back`. Such transforms are
        emptied one at a time, into the next of them.
        """
        out: list[Any] = []
        for place in reversed(range(len(self))):
            if not hasattr(self.transforms[place], "flush"):
                continue
            data = self.transforms[place].flush()  # type: ignore[operator]
            for inner in reversed(range(place)):
                data = None if data is None else _inward(self.transforms[inner], data)
            if data is not None:
                out.append(data)
        return None if not out else out[0] if len(out) == 1 else torch.cat(out, out[0].ndim - 1)

    def held_back(self) -> list[tuple[Any, Any]]:
        """Return each transform that keeps steps for a later write, with these steps."""
        return [(part, part.held_back()) for part in self.transforms if hasattr(part, "held_back")]  # type: ignore[operator]

    def hold_back(self, held: list[tuple[Any, Any]] | None) -> None:
        """Restore what `held_back` returned, after a failed write; with None, forget all kept steps."""
        for transform, state in self.held_back() if held is None else held:
            transform.hold_back(None if held is None else state)

    @property
    def is_empty(self) -> bool:
        """Whether there are no transforms; faster than `len`, as every batch asks for it."""
        return not self._modules["transforms"]._modules  # type: ignore[union-attr]

    def __len__(self) -> int:
        return len(self.transforms)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.transforms)

    def __getitem__(self, index: int | slice) -> Any:
        """Return one transform, or a `Compose` that shares some of them with this object."""
        return Compose(*self.transforms[index]) if isinstance(index, slice) else self.transforms[index]


def _inward(transform: Any, data: Any) -> Any:
    """Return `inv(data)`. Of a transform of TorchRL its buffers call `_inv_call`, though, whatever `inv` is."""
    return transform._inv_call(data) if hasattr(type(transform), "_inv_call") else transform.inv(data)


def _overrides(transform: Any, name: str, other: str) -> bool:
    """Whether the class overrides a method of TorchRL's transforms, but not another one beside it."""
    kinds = (vars(kind) for kind in type(transform).__mro__)
    found: Mapping[str, Any] = next((names for names in kinds if name in names or other in names), {})
    return name in found and other not in found


def divided(transform: Any) -> tuple[Compose, Compose]:
    """Split off the transforms at the front that look back, which each member of an ensemble needs; return
    both groups.
    """
    chain = Compose() if transform is None else Compose(transform)
    front = len(chain.looking_back)
    return chain[:front], chain[front:]


def _share(transforms: Iterable[Any]) -> None:
    """Move states to shared memory; TorchRL's transforms declare `requires_shared_write_state`."""
    for transform in transforms:
        share = getattr(transform, "share_memory_", None)
        if share is not None:
            share()
        elif getattr(transform, "requires_shared_write_state", False):
            raise _unshared(transform)
        else:
            transform.share_memory()


def _unshared(transform: Any) -> SchemaError:
    return SchemaError(
        f"{type(transform).__name__} changes its state with every write, where no other process sees it, "
        "expected a shared write state",
        hint="keep the state in registered buffers, or define share_memory_()",
    )


def _parts(transform: Any) -> list[Any]:
    """Return the transforms to put into a `Compose`; a subclass of `Compose` is kept whole, as it may do more than its
    parts.
    """
    made = as_transform(transform)
    return list(made) if type(made) is Compose else [made]


def as_transform(transform: Any, *, invert: bool = False) -> Any:
    """Make a transform in evaluation mode from a transform, a module or a callable; `invert` exchanges its two
    directions.

    An object with both methods of a transform is used as it is. SchemaError (a RuntimeError) for anything else.
    """
    if isinstance(transform, nn.Module) and callable(getattr(transform, "inv", None)):
        made = transform
        if not invert and hasattr(type(made), "_inv_call") and _overrides(made, "inv", "_inv_call"):
            warn_caller(f"{type(made).__name__} has inv(), which no buffer of TorchRL calls: implement _inv_call()")
    elif callable(transform):
        made = CallableTransform(transform)
    else:
        raise SchemaError(f"expected a transform or a callable, found a {type(transform).__name__}")
    return (InvertTransform(made) if invert else made).eval()
