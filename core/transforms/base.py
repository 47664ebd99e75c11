"""The base class of transforms, and classes that combine transforms, modules and functions to one transform."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice, takewhile
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict, TensorDictBase
from torch import nn

from ..errors import SchemaError, UsageError, warn_caller
from ..format.contracts import FinalMethodError, own_attributes, refuse_overrides

_NEVER_CALLED = {
    "_call": "forward(data)",
    "_inv_call": "inv(data)",
    "_apply_transform": "forward(data), or change(value, key, data) of a KeyedTransform",
    "_inv_apply_transform": "inv(data)",
}
"""Methods of TorchRL's transforms that rbtool's buffers do not call, and what to implement instead."""


class Past(Protocol):
    """The steps around each step of a batch, as far as they belong to its episode and are stored.

    `age` and `entry` are about the `looks_back` steps before each step; `window` reads steps at any offsets.
    """

    age: torch.Tensor
    """How many of the `looks_back` steps before each step exist; int64 in the shape of the batch."""

    @property
    def keys(self) -> Sequence[tuple[str, ...]] | None:
        """The entries of the storage, if each can be read by itself."""

    def rows(self, keys: Sequence[tuple[str, ...]]) -> TensorDict:
        """Return these entries of the steps themselves; they are some of `self.keys`."""

    def entry(self, key: tuple[str, ...]) -> torch.Tensor | None:
        """Return an entry of the earlier steps and, last, of the step itself: `[*batch, looks_back + 1, …]`, fresh
        memory.

        Missing steps are replaced by the earliest existing one. None if the entry is not stored.
        """

    def window(self, key: tuple[str, ...], offsets: NDArray[np.int64]) -> tuple[torch.Tensor | None, torch.Tensor]:
        """Return an entry of the steps at these offsets from each step, and which of these steps are missing.

        Returns:
            The entry, `[*batch, *offsets.shape, …]`, in fresh memory, or None if it is not stored. Missing steps are
            replaced by the nearest existing one. And which steps are missing, bool `[*batch, *offsets.shape]`.
        """

    def moved_on(self, stack: torch.Tensor, newest: torch.Tensor, use: tuple[str, ...]) -> torch.Tensor:
        """Shift a stack that `entry` returned by one step: drop its first step, and append `newest`. Fresh memory.

        `use` is the key of the entry that the result is for. Results for one batch must differ in it.
        """


class Transform(nn.Module):
    """Changes batches that leave a buffer, in `forward`, and data that enters it, in `inv`.

    A subclass implements one of these methods, or both; the defaults change nothing:

    - `forward(data)` takes a batch, in the type that the storage returns, and returns the batch to use instead.
    - `inv(data)` takes the data of `extend` (or of `add`, with a leading dimension of size 1 if it is a tensordict) and
      returns the data to write; None if nothing is to be written.

    Neither method may edit values in place, unless it made them itself: `buffer[3]` and `buffer[3:7]` are views of the
    storage, and the data of `extend` belongs to the caller. A random transform sets `draws`, and draws only from
    `generator`. If `inv` changes state, the class sets `counts_writes` and keeps the state in registered buffers.

    A transform that keeps steps for a later write also implements `flush()`, which returns these steps (or None) and
    forgets them; `held_back()`, which returns the steps that are kept; and `hold_back(held)`, which replaces them. The
    buffer calls `hold_back` with the earlier value if a write fails, and with None in `empty()`.

    A transform that needs the steps around the steps of a batch sets `looks_back` to the number of steps before, and
    implements `with_past(data, past)`, which is called instead of `forward` while rows are read. It needs data as it is
    stored, so it must come before all transforms that do not look back. If the first transform sets `reads_rows`, and
    the storage can read single entries (`past.keys` is not None), its `data` is None, and it reads the rows itself.

    `__call__` is final. Defining a class that overrides it, or that has `_call`, `_inv_call`, `_apply_transform` or
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
    """Whether `forward` draws from `generator`. The buffer then sets it, and calls `forward` in its caller's thread."""

    counts_writes = False
    """Whether `inv` changes the state. If so, processes that share a buffer have to share the state as well."""

    follows_next = False
    """Whether `forward` takes a second argument: entries under `next` that it must not change."""

    reads_in_keys_only = False
    """Whether `forward` reads only its `in_keys`, at the root and under `next`. If so, a condition on an entry of
    trajectories runs it on these entries alone.
    """

    crosses_steps = False
    """Whether `forward` combines a step of a batch with later ones. A buffer then adds the flags and the mask of slices
    to the batch before it is transformed, so that slices are not joined and padding is not counted.
    """

    looks_back: int | None = None
    """How many steps before each step of a batch `with_past` needs; None if the batch itself suffices."""

    reads_rows = False
    """Whether `with_past` can read the rows themselves as well, so that it may be called without them."""

    episode_keys: tuple[tuple[str, ...], tuple[str, ...] | None] = (("next", "done"), None)
    """For transforms that look back: the flag that ends episodes, and the entry with their ids (None: the default)."""

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
        """The entries under `next` that the user listed in the arguments of this transform."""
        return frozenset()

    def forward(self, data: Any) -> Any:
        """Return the batch that leaves the buffer instead of `data`."""
        return data

    def with_past(self, data: Any, past: Past) -> Any:
        """Return the batch that leaves the buffer instead of the rows `data`, using the steps around them."""
        return data

    def inv(self, data: Any) -> Any:
        """Return the data that enters the buffer instead of `data`; None if nothing is to be written."""
        return data

    def share_memory_(self) -> Transform:
        """Move the state to shared memory; SchemaError if `inv` changes state that is not a tensor."""
        if self.counts_writes and not any(True for _ in self.buffers()):
            raise _unshared(self)
        self.share_memory()
        return self

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the generator, which the buffer of the copy sets."""
        return {name: value for name, value in self.__dict__.items() if name != "generator"}


class CallableTransform(Transform):
    """Calls a function, or a module that is not a transform, on the way out; the way in is unchanged."""

    def __init__(self, func: Callable[[Any], Any]) -> None:
        super().__init__()
        self.func = func
        self.crosses_steps = getattr(func, "crosses_steps", False)

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

    Some transforms change an entry under `next` together with the one at the root. If another transform of the same
    class lists the entry under `next`, they leave it to that one: `ToTensorImage("pixels")` and
    `ToTensorImage(("next", "pixels"))` change each entry once, in any order.

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
    def crosses_steps(self) -> bool:  # type: ignore[override]
        """Whether one of the transforms combines a step with later ones."""
        return any(getattr(transform, "crosses_steps", False) for transform in self.transforms)

    @property
    def looking_back(self) -> list[Any]:
        """The transforms at the front that look back; a buffer applies them while it reads rows."""
        return list(takewhile(lambda transform: getattr(transform, "looks_back", None) is not None, self.transforms))

    def _named_elsewhere(self, transform: Any) -> frozenset[tuple[str, ...]]:
        """Return the entries under `next` that other transforms of its class list, if it follows into `next`."""
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
        """Return the data for replacing stored elements: `inv` without the transforms that hold data back.

        Replaced elements do not wait for later ones, so `data` is taken as the result of such a transform.
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
    """Whether transforms that are added later are shared as well."""

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
        """Return the data that transforms hold back; None if there is none.

        A transform holds data back if it has the methods `flush`, `held_back` and `hold_back`. They are flushed one
        after the other, in the order of `inv`, and their data passes through the transforms that come after them in
        that order.
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
        """Return pairs of each transform that keeps steps for a later write, and these steps."""
        return [(part, part.held_back()) for part in self.transforms if hasattr(part, "held_back")]  # type: ignore[operator]

    def hold_back(self, held: list[tuple[Any, Any]] | None) -> None:
        """Let transforms keep the steps that `held_back` returned, after a failed write; with None, no steps."""
        for transform, state in self.held_back() if held is None else held:
            transform.hold_back(None if held is None else state)

    @property
    def is_empty(self) -> bool:
        """Whether there are no transforms. Every batch needs this, so it is faster than `len`."""
        return not self._modules["transforms"]._modules  # type: ignore[union-attr]

    def __len__(self) -> int:
        return len(self.transforms)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.transforms)

    def __getitem__(self, index: int | slice) -> Any:
        """Return one transform, or a `Compose` that shares some of them with this object."""
        return Compose(*self.transforms[index]) if isinstance(index, slice) else self.transforms[index]


def with_flags(rows: Any, info: Mapping[Any, Any], *, windows: bool) -> Any:
    """Return rows with the flags and the mask of slices, the bool entries of the info; other data as it is.

    Without them, sums over steps would cross the ends of slices that follow each other in a batch, and count padding.
    A flag in place of a stored one with as many values gets its shape. With `windows`, the windows of a `Sequence` have
    such flags as well: its info has none, because most transforms do not need them.
    """
    flags = {key: value for key, value in info.items() if getattr(value, "dtype", None) == torch.bool}
    if windows and "sequence_id" in info and isinstance(rows, TensorDictBase):
        flags |= _flags_of_windows(rows, info)
    if (
        not flags
        or not isinstance(rows, TensorDictBase)
        or any(value.shape[: rows.batch_dims] != rows.batch_size for value in flags.values())
    ):
        return rows
    given = rows.copy()
    for key, value in flags.items():
        if isinstance(key, tuple) and not isinstance(rows.get(key[0], given), TensorDictBase):
            continue  # the entry that would hold the flag is a tensor
        stored = rows.get(key, None)
        alike = isinstance(stored, torch.Tensor) and stored.numel() == value.numel()
        given.set(key, value.reshape(stored.shape) if alike else value)
    return given


def _flags_of_windows(rows: TensorDictBase, info: Mapping[Any, Any]) -> dict[Any, torch.Tensor]:
    """Return flags that are set at the last row of each window as well, and a mask of the rows that are no repeats."""
    number = info["sequence_id"]
    ends = torch.ones_like(number, dtype=torch.bool)
    ends[:-1] = number[1:] != number[:-1]
    flags: dict[Any, torch.Tensor] = {("collector", "mask"): info["validity_mask"]}
    for key in (("next", "truncated"), ("next", "done")):
        stored = rows.get(key, None) if isinstance(rows.get("next", None), TensorDictBase) else None
        flag = ends.unsqueeze(-1) if stored is None else ends.view(-1, *[1] * (stored.dim() - 1))
        flags[key] = flag if stored is None else stored.bool() | flag
    return flags


def _inward(transform: Any, data: Any) -> Any:
    """Return `inv(data)`; for a transform of TorchRL, `_inv_call(data)`, which TorchRL's buffers call instead."""
    return transform._inv_call(data) if hasattr(type(transform), "_inv_call") else transform.inv(data)


def _overrides(transform: Any, name: str, other: str) -> bool:
    """Return whether the class of a transform overrides the method `name`, and the same class does not have `other`."""
    kinds = (vars(kind) for kind in type(transform).__mro__)
    found: Mapping[str, Any] = next((names for names in kinds if name in names or other in names), {})
    return name in found and other not in found


def divided(transform: Any) -> tuple[Compose, Compose]:
    """Split transforms into those at the front that look back, which each member of an ensemble needs, and the rest."""
    chain = Compose() if transform is None else Compose(transform)
    front = len(chain.looking_back)
    return chain[:front], chain[front:]


def _share(transforms: Iterable[Any]) -> None:
    """Move the states of transforms to shared memory; SchemaError for a state that cannot be shared.

    TorchRL's transforms declare by `requires_shared_write_state` whether theirs has to be.
    """
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
        f"{type(transform).__name__} changes its state with every write, and other processes do not see that state",
        hint="keep the state in registered buffers, or define share_memory_()",
    )


def _parts(transform: Any) -> list[Any]:
    """Return the transforms to put into a `Compose`: the parts of a `Compose`, or else the transform itself.

    A subclass of `Compose` is kept whole, as it may do more than its parts.
    """
    made = as_transform(transform)
    return list(made) if type(made) is Compose else [made]


def as_transform(transform: Any, *, invert: bool = False) -> Any:
    """Make a transform in evaluation mode from a transform, a module or a callable.

    A module with a method `inv` is used as it is. `invert` exchanges the two directions. SchemaError (a RuntimeError)
    for anything else.
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
