"""The contract of samplers, which choose the elements of a batch."""

from __future__ import annotations

import functools
import inspect
import sys
from abc import ABCMeta, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar, TypeAlias, final

import torch

from ..errors import (
    CorruptDataError,
    SchemaError,
    UsageError,
    keywords_of,
    require_flags,
    require_keywords,
    warn_caller,
)
from ..format.contracts import delegate, own_attributes, refuse_overrides
from ..options import PathLike
from ..state_folder import read_values, write_values
from ..storages.base import Storage
from ..torchrl_classes import counterpart

Index: TypeAlias = torch.Tensor | tuple[torch.Tensor, ...]
"""The index of drawn elements: int64 `[B]`, or a tuple with one such tensor for each dimension of the storage."""

_FINAL = {"sample_rows": "draw_rows(storage, batch_size)", "empty": "reset()"}


class _Samplers(ABCMeta):
    """Metaclass of samplers: a call with `replacement=False` calls the `without_replacement` of the class instead."""

    replacement: bool
    without_replacement: Callable[..., Sampler]

    def __call__(cls, *arguments: Any, replacement: bool | None = None, **options: Any) -> Any:
        if replacement is not None:
            require_flags(replacement=replacement)
        if replacement is None or bool(replacement) is cls.replacement:
            maker: Any = cls.__init__  # type: ignore[misc]  # mypy fears that a subclass may differ
            code = getattr(maker, "__code__", None)
            if code is not None and not code.co_flags & inspect.CO_VARKEYWORDS:
                require_keywords(cls.__name__, options, [*keywords_of(maker), "replacement"])
            return super().__call__(*arguments, **options)
        # `without_replacement` is not inherited, because a subclass may draw in another way than its base class.
        if replacement or "without_replacement" not in cls.__dict__:
            raise TypeError(f"a {cls.__name__} cannot be made with replacement={replacement}")
        return cls.without_replacement(*arguments, **options)


@counterpart
class Sampler(metaclass=_Samplers):
    """Draws elements of a storage, with the generator of its buffer.

    A subclass implements `draw(storage, batch_size)`. If it has state, it also implements `save_state`, `load_state`
    and `reset`. If it draws in epochs, it declares `has_epochs = True` and sets `self.ran_out = True` with the last
    batch of an epoch. All other methods have defaults:

    - `on_attach(storage)`, `on_write(index)`, `on_update(index, storage)`: called when the sampler gets a storage,
      when elements were written, and when elements were changed;
    - `set_priorities(index, priority, storage)`: sets priorities, in samplers that draw by priority;
    - `on_rotate(row, storage)`: called when rows were rotated, so that `row` is now row 0;
    - `begin_epoch()`: starts a new epoch, because another process draws the rest of the present one;
    - `check_storage(storage)`: refuses storages that cannot be sampled;
    - `check_batch_size(batch_size)`: refuses batch sizes that fit no storage;
    - `sampleable(storage, batch_size)`: counts the elements or slices from which a batch can be drawn now;
    - `draw_rows(storage, batch_size)`: also returns the rows, in samplers that read them to draw;
    - `write_state(folder, state)`, `read_state(folder)`: implement another file format for the state.

    Buffers call `sample`, `add`, `extend`, `update_priority`, `mark_update`, `state_dict`, `load_state_dict`, `dumps`,
    `loads` and `empty`. These check the batch size and the storage, reset `ran_out`, read and write files, and then
    call the methods above.

    Samplers written for TorchRL override `sample`, `add` and so on. This works: buffers call the override (`sample`
    after the same checks), and the declarations `reads_rows`, `writes_are_updates` and `draw_rows` return to safe
    defaults. Final methods that TorchRL does not have must not be overridden: FinalMethodError (a TypeError) says which
    method to implement instead.

    Args:
        replacement: a call with `replacement=False` makes the corresponding sampler without replacement; TypeError if
            there is none.

    Attributes:
        generator: the source of random numbers, set by the buffer; None for torch's own.

    Names and behaviour follow TorchRL's samplers.

    >>> import torch
    >>> from rbtool import TensorStorage
    >>> class Newest(Sampler):
    ...     def draw(self, storage, batch_size):
    ...         return torch.arange(len(storage))[-batch_size:], {}
    >>> Newest().sample(TensorStorage(torch.arange(10)), 3)
    (tensor([7, 8, 9]), {})
    """

    reads_rows: ClassVar[bool] = True
    """Whether drawing reads rows. If not, rows may be written during a draw. An override of `draw` resets it to
    True.
    """

    writes_are_updates: ClassVar[bool] = False
    """Whether the sampler learns of writes by `mark_update` alone, without `add` and `extend`. An override of
    `on_write` resets it to False.
    """

    rows_come_once: ClassVar[bool] = False
    """Whether rows must be read with the draw, because they cannot be looked up in the storage later."""

    needs_order: ClassVar[bool] = False
    """Whether it relies on rows being in the order in which they were written, around a ring. If so, buffers refuse a
    writer with `keeps_order = False`, which may put elements in any row.
    """

    has_epochs: ClassVar[bool] = False
    """Whether it draws in epochs, and sets `ran_out` at the end of one."""

    draws_once: ClassVar[bool] = False
    """Whether elements are lost if a draw is discarded and repeated, as happens when a write interferes. Samplers with
    epochs are treated the same way.
    """

    replacement: ClassVar[bool] = True
    """Whether an element may be drawn again before all others have been."""

    without_replacement: ClassVar[Callable[..., Sampler]]
    """The class or function that makes the sampler for `replacement=False`; optional."""

    follows_writes: ClassVar[bool] = False
    """Whether it uses `add` and `extend`; derived from the methods that the class implements."""

    follows_updates: ClassVar[bool] = False
    """Whether it uses `mark_update`; derived from the methods that the class implements."""

    takes_priorities: ClassVar[bool] = False
    """Whether it draws by priority; derived from the methods that the class implements."""

    generator: torch.Generator | None = None
    """Source of random numbers, set by the buffer; None for torch's own generator. It is not pickled."""

    joined = False
    """Whether it is a member of an ensemble, which needs the same entries in every batch of all members."""

    _ran_out = False

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        own = own_attributes(cls, Sampler)
        refuse_overrides(cls, own, _FINAL)
        if "sample" in own:
            setattr(cls, "sample", _with_checks(own["sample"]))  # noqa: B010 - mypy: sample is final
            if "draw" not in own:
                delegate(cls, "draw")
        # The declarations of a base class describe its own methods, not the ones that override them.
        if "sample" in own or "draw" in own:
            cls.reads_rows = own.get("reads_rows", True)
            setattr(cls, "draw_rows", own.get("draw_rows", Sampler.draw_rows))  # noqa: B010
        if not {"add", "extend", "on_write"}.isdisjoint(own):
            cls.writes_are_updates = own.get("writes_are_updates", False)
        if "ran_out" in own:
            cls.has_epochs = own.get("has_epochs", True)
        cls.follows_writes = _implements(cls, "add", "extend", "on_write")
        cls.follows_updates = _implements(cls, "mark_update", "on_update")
        cls.takes_priorities = _implements(cls, "update_priority", "set_priorities")

    # What a sampler implements ----------------------------------------------------------------------

    @abstractmethod
    def draw(self, storage: Storage, batch_size: int) -> tuple[Index, dict[str, Any]]:
        """Draw `batch_size` elements of a storage that is not empty, with random numbers from `self.generator` only.

        Returns:
            The index and the info. The index is int64 `[batch_size]`, shorter at the end of an epoch, or a tuple with
            one such tensor for each dimension of the storage; all elements exist. Entries of the info are `[batch_size,
            ...]`.
        """

    def draw_rows(self, storage: Storage, batch_size: int) -> tuple[Index, dict[str, Any], Any]:
        """Draw like `draw`, and also return the rows if the sampler read them; None if the caller has to read them."""
        return *self.sample(storage, batch_size), None

    def on_attach(self, storage: Storage) -> Any:
        """Called with the storage before the first draw from it."""

    def on_share(self, storage: Storage | None) -> None:
        """Called with the storage of a buffer that other processes write to as well; with None if they do not."""

    def on_write(self, index: Any) -> None:
        """Called after a write.

        Args:
            index: an int, int64 `[n]` or `[n, ndim]`; negative numbers stand for elements that were not kept.
        """

    def on_update(self, index: Any, storage: Storage | None) -> None:
        """Called after elements were changed.

        Args:
            index: any index that `storage[index] = …` accepts.
            storage: the storage, if it is known.
        """

    def set_priorities(self, index: Any, priority: Any, storage: Storage | None) -> None:
        """Set priorities of elements. The default warns that this sampler does not use priorities."""
        warn_caller(f"{type(self).__name__} does not use priorities: the update has no effect")

    def on_rotate(self, row: int, storage: Storage) -> None:
        """Called after the rows of a storage were rotated, so that `row` is now row 0."""

    def begin_epoch(self) -> None:
        """Start a new epoch, if the sampler has epochs, because another process draws the rest of this one."""
        if self.has_epochs:
            self.reset()

    def reset(self) -> None:
        """Forget all elements, because the storage was emptied or replaced."""

    def check_storage(self, storage: Storage) -> None:
        """Raise SchemaError (a RuntimeError), with nothing changed, for a storage that the sampler cannot draw from."""

    def check_batch_size(self, batch_size: int) -> None:
        """Raise SchemaError or UsageError for a batch size that the sampler cannot draw from any storage."""

    def write_error(self, storage: Storage) -> Exception | None:
        """Return the error that every write to this storage raises if the sampler cannot follow it; None if it can."""
        return None

    def save_state(self) -> dict[str, Any]:
        """Return the state: tensors, numbers, bools and None, by name.

        `torch_dataset` refuses a sampler that has a state, unless it is an `EpochSampler`: workers do not share it.
        """
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Load what `save_state` returned; SchemaError, with nothing changed, for the state of another sampler."""
        if state:
            raise SchemaError(f"{type(self).__name__} has no state, found {', '.join(map(str, state))}")

    def write_state(self, folder: Path, state: Mapping[str, Any]) -> None:
        """Write a state to a folder, which is created if necessary; nothing is written for an empty state."""
        if state:
            write_values(folder, state)

    def read_state(self, folder: Path) -> dict[str, Any]:
        """Read what `write_state` wrote; DatasetNotFoundError or FormatError if the folder has no valid state."""
        return read_values(folder) if self.state_dict() else {}

    def elements(self, storage: Storage) -> int:
        """Return how many elements of a storage can be drawn."""
        return len(storage)

    def sampleable(self, storage: Storage, batch_size: int | None = None) -> int:
        """Return from how many elements or slices a batch of this size is drawn; 0 while there are too few for a batch.

        Nothing is drawn. The caller excludes writers.

        Args:
            storage: the storage to draw from.
            batch_size: how many elements a batch has; by default the smallest possible number.
        """
        return self.elements(storage) if storage.has_rows else 0

    def can_sample(self, storage: Storage, batch_size: int | None = None) -> bool:
        """Return whether there are enough elements for a batch; see `sampleable`."""
        return self.sampleable(storage, batch_size) > 0

    @property
    def exhausted(self) -> bool:
        """Whether nothing can be drawn until elements are written; True only in samplers that consume elements."""
        return False

    @property
    def default_priority(self) -> float:
        """The priority of elements whose priority was never set."""
        return 1.0

    @property
    def ran_out(self) -> bool:
        """Whether the last batch was the last of its epoch; always False without epochs."""
        return self._ran_out

    @ran_out.setter
    def ran_out(self, value: bool) -> None:
        if self.has_epochs:
            self._ran_out = bool(value)

    @property
    def remaining_batches(self) -> int:
        """How many batches of the last batch size are left in the epoch."""
        return sys.maxsize

    def epoch_batches(self, storage: Storage, batch_size: int) -> int | None:
        """Return how many batches an epoch of the present elements has; None without epochs, or if unknown."""
        return None

    # What buffers call ------------------------------------------------------------------------------

    @final
    def sample(self, storage: Storage, batch_size: int) -> tuple[Index, dict[str, Any]]:
        """Draw elements.

        Args:
            storage: the storage to draw from.
            batch_size: how many elements to draw.

        Returns:
            Index and info of the elements, see `draw`.

        Raises:
            UsageError: (a ValueError) the batch size is below 1.
            SchemaError: (a RuntimeError) the storage is empty.
        """
        if batch_size < 1 or not storage.has_rows:
            _refuse(storage, batch_size)
        if self.has_epochs:
            self._ran_out = False
        return self.draw(storage, batch_size)

    @final
    def sample_rows(self, storage: Storage, batch_size: int) -> tuple[Index, dict[str, Any], Any]:
        """Draw like `sample`, and also return the rows; None if the caller has to read them."""
        if batch_size < 1 or not storage.has_rows:
            _refuse(storage, batch_size)
        if self.has_epochs:
            self._ran_out = False
        return self.draw_rows(storage, batch_size)

    @final
    def add(self, index: Any) -> None:
        """Report that an element was written."""
        self.on_write(index)

    @final
    def extend(self, index: Any) -> None:
        """Report that elements were written."""
        self.on_write(index)

    @final
    def update_priority(self, index: Any, priority: Any, *, storage: Storage | None = None) -> None:
        """Set priorities of elements; a sampler that does not use them warns."""
        self.set_priorities(index, priority, storage)

    @final
    def mark_update(self, index: Any, *, storage: Storage | None = None) -> None:
        """Report that elements were changed in place."""
        self.on_update(index, storage)

    @final
    def empty(self) -> None:
        """Forget all elements."""
        self._empty()

    @final
    def state_dict(self) -> dict[str, Any]:
        """Return the state; `save_state` of each class documents its entries."""
        return self.save_state()

    @final
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state; SchemaError (a RuntimeError), with nothing changed, for the state of another sampler."""
        self.load_state(state_dict)

    @final
    def dumps(self, path: PathLike) -> None:
        """Write the state to the folder `path`; nothing is written if there is no state."""
        self.write_state(Path(path), self.state_dict())

    @final
    def loads(self, path: PathLike) -> None:
        """Load what `dumps` wrote, here or in TorchRL.

        Raises:
            DatasetNotFoundError: there is no state.
            CorruptDataError: the state is invalid.

        Neither error changes anything.
        """
        state = self.read_state(Path(path))
        try:
            self.load_state_dict(state)
        except SchemaError as error:
            raise CorruptDataError(f"{path} cannot be read: {error}") from error

    # Names of TorchRL's samplers --------------------------------------------------------------------

    def _empty(self) -> None:
        self._ran_out = False
        self.reset()

    @property
    def _rng(self) -> torch.Generator | None:
        return self.generator

    @_rng.setter
    def _rng(self, generator: torch.Generator | None) -> None:
        self.generator = generator

    @property
    def _remaining_batches(self) -> int:
        return self.remaining_batches

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the generator, which cannot be pickled."""
        return {name: value for name, value in self.__dict__.items() if name != "generator"}

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


def _refuse(storage: Storage, batch_size: int) -> None:
    if batch_size < 1:
        raise UsageError(f"batch_size is {batch_size}, expected a number from 1")
    raise SchemaError("Cannot sample from an empty storage: it has no elements yet")


def _with_checks(method: Callable[..., Any]) -> Callable[..., Any]:
    """Add the checks of `Sampler.sample` to an override."""

    @functools.wraps(method)
    def sample(self: Sampler, storage: Storage, batch_size: int, *more: Any, **options: Any) -> Any:
        if batch_size < 1 or not storage.has_rows:
            _refuse(storage, batch_size)
        if self.has_epochs:
            self.ran_out = False
        return method(self, storage, batch_size, *more, **options)

    return sample


def _implements(cls: type[Sampler], *names: str) -> bool:
    """Whether a class overrides one of these methods of the contract."""
    return any(getattr(cls, name) is not getattr(Sampler, name) for name in names)
