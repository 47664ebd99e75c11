"""The contract of a transform, and how several, or plain functions, become one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice, takewhile
from typing import Any, Protocol

import torch
from torch import nn

from ..errors import SchemaError, UsageError
from ..format.contracts import FinalMethodError, own_attributes, refuse_overrides

_NEVER_CALLED = {
    "_call": "forward(data)",
    "_inv_call": "inv(data)",
    "_apply_transform": "forward(data), or change(value, key, data) of a KeyedTransform",
    "_inv_apply_transform": "inv(data)",
}
"""Methods of TorchRL's transforms that a buffer here does not call, and what a transform implements instead."""


class Past(Protocol):
    """The `looks_back` steps before each step of a batch, those that are of its episode and in the storage."""

    age: torch.Tensor
    """How many of them there are for each step; int64 of the shape of the batch."""

    def entry(self, key: tuple[str, ...]) -> torch.Tensor | None:
        """Return an entry of these steps and, last, of the step itself: `[*batch, looks_back + 1, …]`, fresh memory.

        Missing steps are replaced by the earliest one. None for an entry that is not stored.
        """

    def moved_on(self, stack: torch.Tensor, newest: torch.Tensor, use: tuple[str, ...]) -> torch.Tensor:
        """Return what `entry` gave, without the first of the steps and with `newest` behind the last; fresh memory.

        Results of one batch differ in `use`: the key of the entry that it is for.
        """


class Transform(nn.Module):
    """Changes what leaves a buffer with `forward`, and what enters it with `inv`; here neither changes anything.

    A transform of your own implements one or both:

    - `forward(data)` gets a batch, of the type that the storage gives, and returns the batch to use instead.
    - `inv(data)` gets the data of `extend`, or of `add` with a leading dimension of one if it is a tensordict, and
      returns the data to write. If it returns None, nothing is written.

    Neither edits values in place, except values that it made: `buffer[3]` and `buffer[3:7]` give views of the storage,
    and the data of `extend` belong to the caller. A random transform sets `draws` and draws from `generator` only.
    State that `inv` changes is in registered buffers, and the class sets `counts_writes`.

    A transform that keeps steps for a later write also implements `flush()`, which returns them, or None, and forgets
    them; `held_back()`, which returns what it keeps; and `hold_back(held)`, which replaces what it keeps by that value.
    The buffer calls `hold_back` with the earlier value if a write fails, and with None in `empty()`.

    A transform that needs the steps before those of a batch sets `looks_back` to their number, and implements
    `with_past(data, past)`: a buffer calls it in place of `forward`, as it reads the rows. It changes what is stored,
    so it comes before all transforms that do not look back.

    `__call__` is final. A class that overrides it, or has `_call`, `_inv_call`, `_apply_transform` or
    `_inv_apply_transform`, raises FinalMethodError (a TypeError): a buffer never calls these.

    Ideas and names are those of TorchRL's transforms.

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
    """Whether `forward` also takes the entries under `next` that it leaves alone where it is called with them."""

    looks_back: int | None = None
    """How many steps before each step of a batch `with_past` needs; None for a transform of the batch alone."""

    episode_keys: tuple[tuple[str, ...], tuple[str, ...] | None] = (("next", "done"), None)
    """Of one that looks back: the flag at which episodes end, and their id, or None to look for it."""

    generator: torch.Generator | None = None
    """The generator of the buffer; None is torch's global one."""

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
        """The entries under `next` that were named to it."""
        return frozenset()

    def forward(self, data: Any) -> Any:
        """Return what leaves the buffer in place of `data`."""
        return data

    def with_past(self, data: Any, past: Past) -> Any:
        """Return what leaves the buffer in place of `data`, rows that were just read, given the steps before them."""
        return data

    def inv(self, data: Any) -> Any:
        """Return what enters the buffer in place of `data`, or None if nothing shall."""
        return data

    def share_memory_(self) -> Transform:
        """Move the state to where other processes see it; SchemaError if `inv` changes a state that is no tensor."""
        if self.counts_writes and not any(True for _ in self.buffers()):
            raise _unshared(self)
        self.share_memory()
        return self

    def __getstate__(self) -> dict[str, Any]:
        """Leave the generator out: the buffer of the copy sets its own."""
        return {name: value for name, value in self.__dict__.items() if name != "generator"}


class CallableTransform(Transform):
    """Calls a function, or a module that is no transform, on the way out; the way in is left alone."""

    def __init__(self, func: Callable[[Any], Any]) -> None:
        super().__init__()
        self.func = func

    def forward(self, data: Any) -> Any:
        return self.func(data)

    def extra_repr(self) -> str:
        return "" if isinstance(self.func, nn.Module) else getattr(self.func, "__qualname__", repr(self.func))


class InvertTransform(Transform):
    """Swaps the two ways: `inv` of a transform on the way out, `forward` on the way in."""

    def __init__(self, transform: Any) -> None:
        super().__init__()
        self.transform = transform

    @property
    def draws(self) -> bool:  # type: ignore[override]
        """Whether the transform draws from the buffer's generator."""
        return bool(getattr(self.transform, "draws", False))

    @property
    def counts_writes(self) -> bool:  # type: ignore[override]
        """Whether what is now the way in changes the state."""
        return bool(getattr(self.transform, "counts_writes", False))

    def share_memory_(self) -> Transform:
        Compose(self.transform).share_memory_()
        return self

    def forward(self, data: Any) -> Any:
        return self.transform.inv(data)

    def inv(self, data: Any) -> Any:
        return self.transform(data)


class Compose(Transform):
    """Applies transforms in order on the way out, and in the reverse order on the way in.

    Each is a `Transform`, anything like one (a module with `inv`, as TorchRL's are), or a callable; a list of them is
    taken as well. A `Compose` among them is replaced by what it is made of. `inv` stops at the first that returns
    None. Transforms are put into evaluation mode.

    Transforms that change an entry under `next` along with that of the root leave it to another one of their class
    that names it: `ToTensorImage("pixels")` and `ToTensorImage(("next", "pixels"))` change each once, in any order.
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
        """The transforms at the front that look back; a buffer applies them as it reads rows, and then the others."""
        return list(takewhile(lambda transform: getattr(transform, "looks_back", None) is not None, self.transforms))

    def _named_elsewhere(self, transform: Any) -> frozenset[tuple[str, ...]]:
        """Return the entries under `next` that others of its class name, for a transform that follows into `next`."""
        if len(self) < 2 or not getattr(transform, "follows_next", False):
            return frozenset()
        others = (other for other in self.transforms if other is not transform and type(other) is type(transform))
        return frozenset().union(*(other.named_in_next for other in others))  # type: ignore[arg-type]

    def inv(self, data: Any) -> Any:
        for transform in reversed(self.transforms):
            if data is None:
                return None
            data = transform.inv(data)  # type: ignore[operator]
        return data

    def inv_in_place(self, data: Any) -> Any:
        """Return what takes the place of elements that are there: `inv`, but past what holds data back.

        Elements that are replaced follow nothing and wait for nothing, so `data` is what such a transform returned.
        """
        for transform in reversed(self.transforms):
            if data is None:
                return None
            if isinstance(transform, Compose):
                data = transform.inv_in_place(data)
            elif not hasattr(transform, "held_back"):
                data = transform.inv(data)  # type: ignore[operator]
        return data

    @property
    def draws(self) -> bool:  # type: ignore[override]
        """Whether one of the transforms draws from the buffer's generator."""
        return not self.is_empty and any(getattr(transform, "draws", False) for transform in self.transforms)

    def set_rng(self, generator: torch.Generator | None) -> None:
        """Have the transforms that draw use this generator."""
        for module in self.modules():
            if module is not self and getattr(module, "draws", False):
                module.generator = generator  # type: ignore[assignment]

    def append(self, transform: Any) -> Compose:
        """Add a transform at the end, or all those of a `Compose`; returns this object.

        SchemaError, with nothing added, for one that cannot be shared where all are.
        """
        self.transforms.extend(self._added(transform))
        return self

    def insert(self, index: int, transform: Any) -> Compose:
        """Add a transform, or all those of a `Compose`, in front of the one at `index`; returns this object.

        As with lists, places are counted from the end where `index` is negative, and `len` is the end. UsageError (a
        ValueError) if there is no such place.
        """
        if not -len(self) <= index <= len(self):
            raise UsageError(f"place is {index}, expected one of {len(self)} transforms")
        there = list(self.transforms)
        there[index:index] = self._added(transform)
        self.transforms = nn.ModuleList(there)
        return self

    shared = False
    """Whether transforms that are added later are shared, too."""

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
        """Return what transforms held back, having passed those that `inv` calls after them; None if nothing was.

        A transform holds data back if it has the methods `flush`, `held_back` and `hold_back`. One at a time is
        emptied into what the next of them holds.
        """
        out: list[Any] = []
        for place in reversed(range(len(self))):
            if not hasattr(self.transforms[place], "flush"):
                continue
            data = self.transforms[place].flush()  # type: ignore[operator]
            for inner in reversed(range(place)):
                data = None if data is None else self.transforms[inner].inv(data)  # type: ignore[operator]
            if data is not None:
                out.append(data)
        return None if not out else out[0] if len(out) == 1 else torch.cat(out, out[0].ndim - 1)

    def held_back(self) -> list[tuple[Any, Any]]:
        """Return each transform that keeps steps for a later write, with what it keeps."""
        return [(part, part.held_back()) for part in self.transforms if hasattr(part, "held_back")]  # type: ignore[operator]

    def hold_back(self, held: list[tuple[Any, Any]] | None) -> None:
        """Restore what `held_back` returned, after a write that failed; with None, forget all kept steps."""
        for transform, state in self.held_back() if held is None else held:
            transform.hold_back(None if held is None else state)

    @property
    def is_empty(self) -> bool:
        """Whether there is no transform; quicker than `len`, for it is asked with every batch."""
        return not self._modules["transforms"]._modules  # type: ignore[union-attr]

    def __len__(self) -> int:
        return len(self.transforms)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.transforms)

    def __getitem__(self, index: int | slice) -> Any:
        """Return one transform, or a `Compose` of some, which it shares with this object."""
        return Compose(*self.transforms[index]) if isinstance(index, slice) else self.transforms[index]


def divided(transform: Any) -> tuple[Compose, Compose]:
    """Return the transforms at the front that look back, which belong to each member of an ensemble, and the others."""
    chain = Compose() if transform is None else Compose(transform)
    front = len(chain.looking_back)
    return chain[:front], chain[front:]


def _share(transforms: Iterable[Any]) -> None:
    """Move states to where other processes see them; `requires_shared_write_state` is TorchRL's word for it."""
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
    """What to put into a `Compose` for something to be applied; subclasses may do more than what they hold."""
    made = as_transform(transform)
    return list(made) if type(made) is Compose else [made]


def as_transform(transform: Any, *, invert: bool = False) -> Any:
    """Make a transform in evaluation mode of a transform, a module or a callable; `invert` swaps its two ways.

    What has the two methods of a transform is taken as it is. SchemaError (a RuntimeError) for anything else.
    """
    if isinstance(transform, nn.Module) and callable(getattr(transform, "inv", None)):
        made = transform
    elif callable(transform):
        made = CallableTransform(transform)
    else:
        raise SchemaError(f"expected a transform or a callable, found a {type(transform).__name__}")
    return (InvertTransform(made) if invert else made).eval()
