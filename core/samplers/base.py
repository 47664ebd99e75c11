"""The contract of a sampler: which rows are chosen."""

from __future__ import annotations

import os
import sys
import warnings
from abc import ABCMeta, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, TypeAlias

import torch

from ..errors import SchemaError
from ..storages import Storage

__all__ = ["Index", "Sampler"]

Index: TypeAlias = torch.Tensor | tuple[torch.Tensor, ...]
"""Chosen elements: int64 `[B]`, or one such tensor a dimension where the storage has several."""


class _Samplers(ABCMeta):
    """Lets every class of samplers be called with `replacement=False`, which makes its sibling that has none."""

    _replacement: bool
    _without_replacement: type[Sampler]

    def __call__(cls, *arguments: Any, replacement: bool | None = None, **options: Any) -> Any:
        if replacement is None or bool(replacement) is cls._replacement:
            return super().__call__(*arguments, **options)
        if replacement or "_without_replacement" not in cls.__dict__:  # a subclass need not be what its base is
            raise TypeError(f"there is no {cls.__name__} with replacement={replacement}")
        return cls._without_replacement(*arguments, **options)


class Sampler(metaclass=_Samplers):
    """Chooses elements of a storage, with a generator of its own where a buffer gave it one.

    What is written here is the behaviour of a sampler without state: it never runs out, saves nothing, and takes
    no priorities. Every sampler takes `replacement=False`, which makes a sampler of the kind that draws no element
    twice; TypeError where there is none. Ideas and names are those of TorchRL's samplers.
    """

    by_number: ClassVar[bool] = False
    """Whether the number of elements is all it looks at, so that it may choose while rows are being written."""

    by_marks: ClassVar[bool] = False
    """Whether `mark_update`, which a buffer calls at every write and every change, is all it needs to hear of elements.

    Then a buffer calls neither `add` nor `extend`: a class that overrides those says False here.
    """

    by_time: ClassVar[bool] = False
    """Whether it takes rows that lie next to each other for steps that came one after the other."""

    has_epochs: ClassVar[bool] = False
    """Whether it comes to an end when all elements were drawn."""

    _replacement: ClassVar[bool] = True
    """Whether an element may be drawn again before all others were; a class for which not says so."""

    _without_replacement: ClassVar[type[Sampler]]
    """The sibling that `replacement=False` makes; a class without one leaves it out."""

    _rng: torch.Generator | None = None

    @abstractmethod
    def sample(self, storage: Storage, batch_size: int) -> tuple[Index, dict[str, Any]]:
        """Choose `batch_size` elements; return their index and what else is known of them, each `[batch_size]`."""

    def sample_rows(self, storage: Storage, batch_size: int) -> tuple[Index, dict[str, Any], Any]:
        """Choose elements as `sample` does, and return them as well: for samplers that look at what they chose."""
        index, info = self.sample(storage, batch_size)
        return index, info, storage.get(index)

    def add(self, index: int) -> None:
        """Hear that an element was written."""

    def extend(self, index: torch.Tensor) -> None:
        """Hear that elements were written."""

    def update_priority(self, index: Any, priority: Any, *, storage: Storage | None = None) -> None:
        """Warn: this sampler does not look at priorities."""
        warnings.warn(f"{type(self).__name__} does not look at priorities: the update has no effect", stacklevel=2)

    def mark_update(self, index: Any, *, storage: Storage | None = None) -> None:
        """Hear that elements were changed in place."""

    @property
    def default_priority(self) -> float:
        """Priority of an element that none was given for."""
        return 1.0

    @property
    def ran_out(self) -> bool:
        """Whether an epoch is over; never for a sampler without epochs."""
        return False

    @ran_out.setter
    def ran_out(self, value: bool) -> None:
        """Accept what iteration over a buffer resets; a sampler without epochs keeps nothing."""

    @property
    def _remaining_batches(self) -> int:
        """How many batches may still be drawn ahead."""
        return sys.maxsize

    def _epoch_batches(self, storage: Storage, batch_size: int) -> int | None:
        """Return how many batches a whole epoch has; None for a sampler without epochs."""
        return None

    def state_dict(self) -> dict[str, Any]:
        """Return the state."""
        return {}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over a state; SchemaError for one that is not this sampler's."""
        if state_dict:
            raise SchemaError(f"{type(self).__name__} has no state, found {', '.join(map(str, state_dict))}")

    def dumps(self, path: str | os.PathLike[str]) -> None:
        """Write the state into a folder: nothing, for a sampler without state."""

    def loads(self, path: str | os.PathLike[str]) -> None:
        """Read the state from a folder: nothing, for a sampler without state."""

    def _check_storage(self, storage: Storage) -> None:
        """Refuse a storage that this cannot choose from, with nothing changed; SchemaError (a RuntimeError)."""

    def _room_in(self, storage: Storage) -> int | None:
        """Say how many elements of this storage it can choose from; None where that is any number."""
        return None

    def _meet(self, storage: Storage) -> Any:
        """Get to know the storage that elements are chosen from."""

    def _empty(self) -> None:
        """Forget what is known of the elements."""

    def _turn(self, row: int, storage: Storage) -> None:
        """Follow the rows of a storage, of which `row` became row 0, those before it coming last."""

    def _begin_anew(self) -> None:
        """Forget what is drawn already and comes later: another process has drawn it."""

    def __getstate__(self) -> dict[str, Any]:
        """Leave the generator behind: torch cannot pickle it."""
        return {name: value for name, value in self.__dict__.items() if name != "_rng"}

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"
