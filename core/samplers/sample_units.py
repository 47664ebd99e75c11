"""Sample units: what a buffer reads for each element that its sampler draws."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple, TypeAlias, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import is_tensor_collection

from ..errors import MissingKeyError, SchemaError, UsageError
from ..storages.base import Storage
from .base import Index
from .boundaries import (
    BoundarySource,
    Ends,
    EpisodeBoundaries,
    FlagBoundaries,
    JointBoundaries,
    Key,
    StrictBoundaries,
    boundary_key,
    has_entry,
)
from .trajectories import TableFinder

Numbers: TypeAlias = NDArray[np.int64]
EpisodeBoundary: TypeAlias = Literal["pad", "stop", "include_reset"]

_DONE: Key = ("next", "done")
ANCHOR, VALID = "anchor_index", "validity_mask"
"""The entries of an info with the anchor of each row, and whether the row is a step of its own."""


class SampleUnitTypeError(UsageError, TypeError):
    """A sample unit, or what it returns or is used with, is of the wrong type."""


class SampleUnit(ABC):
    """Expands each element that a sampler draws, an anchor, to the rows that a batch has of it.

    `sample_unit` of a buffer takes one. Buffers call `expand` under the lock that excludes writers, and read the rows
    under the same one.
    """

    needs_order: ClassVar[bool] = False
    """Whether adjacent rows of the storage have to be consecutive steps."""

    @abstractmethod
    def expand(self, index: Index, info: Mapping[Any, Any], storage: Storage) -> tuple[Index, dict[Any, Any]]:
        """Return the index of the rows of all anchors, one anchor after the other, and their info.

        `index` is int64 `[anchors]`, or a tuple of one such tensor a dimension of the storage; so is the result, with
        `[rows]`. Entries of `info` are `[anchors, ...]`, those of the result `[rows, ...]`.
        """


class Transition(SampleUnit):
    """Keeps what a sampler draws: each anchor is one row."""

    def expand(self, index: Index, info: Mapping[Any, Any], storage: Storage) -> tuple[Index, dict[Any, Any]]:
        """Return index and info as they are."""
        return index, dict(info)

    def __repr__(self) -> str:
        return "Transition()"


@dataclass(frozen=True)
class _Unbroken(BoundarySource):
    """No step ends a trajectory: only the newest row of a ring does."""

    def ends(self, storage: Storage, rows: NDArray[np.int64] | slice) -> Ends:
        count = len(rows) if isinstance(rows, np.ndarray) else len(range(*rows.indices(storage.shape[0])))
        return np.zeros((count, int(np.prod(storage.shape[1:], dtype=np.int64))), bool)


class _Window(NamedTuple):
    """The storage rows of windows, int64 `[anchors, rows]`, and which of them are steps of their own, not repeats."""

    rows: Numbers
    valid: NDArray[np.bool_]


class Sequence(SampleUnit):
    """Expands each anchor to a window of steps of its episode: `burn_in + length + bootstrap` rows.

    The first of the `length` steps is the anchor; `burn_in` steps come before it, `bootstrap` steps behind. Steps are
    `dilation` rows apart. A batch of `B` anchors is flat, `[B * width]`, one window behind the other. Where the episode
    does not have the steps of a window, `episode_boundary` chooses:

    - `"pad"`: the last step is repeated.
    - `"stop"`: the window starts earlier, so that it ends with the episode. Where that is too short, it is padded.
    - `"include_reset"`: the window continues in the next episode of the lane.

    Burn-in that starts before the episode repeats its first step. An episode ends at `done_key`, or a flag `terminated`
    or `truncated` next to it, where trajectory ids change, and where an episode of a dataset does; with
    `done_key=None` all steps are one episode. No window crosses the newest row of a ring, or changes lanes: of a
    storage of several dimensions, dimension 0 is time.

    The info of the sampler is repeated for each row of a window; of a sampler of slices, only its weights. Added are:

    - `anchor_index`: the anchor, int64 `[B * width]`, or `[B * width, ndim]` for a storage of several dimensions.
    - `sequence_id`: the number of the window in the batch; `step_in_sequence`: that of the row in its window. int64.
    - `learning_mask`: whether a row is one of the `length` steps, neither burn-in nor bootstrap. bool.
    - `validity_mask`: whether a row is a step of the window, not a repeat of another one. bool.

    UsageError (a ValueError) for invalid arguments. When it is used: SampleUnitTypeError (a TypeError) for a storage
    that holds no tensordicts, unless `done_key` is None; MissingKeyError (a KeyError) for an entry that is not stored;
    SchemaError (a RuntimeError) for an empty storage; IndexError for anchors that do not exist. Names are those of
    TorchRL; burn-in is that of Kapturowski et al., "Recurrent experience replay in distributed reinforcement learning",
    2019.

    >>> import torch
    >>> from tensordict import TensorDict
    >>> from rbtool import TensorStorage
    >>> done = torch.tensor([0, 0, 0, 0, 1, 0, 0, 0, 0, 1]).bool().unsqueeze(-1)
    >>> storage = TensorStorage(TensorDict({"next": {"done": done}}, [10]))
    >>> index, info = Sequence(3).expand(torch.tensor([3, 9]), {}, storage)
    >>> index.tolist(), info["validity_mask"].tolist()
    ([3, 4, 4, 9, 9, 9], [True, True, False, True, False, False])
    >>> Sequence(3, episode_boundary="stop").expand(torch.tensor([3, 9]), {}, storage)[0].tolist()
    [2, 3, 4, 7, 8, 9]
    """

    needs_order: ClassVar[bool] = True

    def __init__(
        self,
        length: int,
        episode_boundary: EpisodeBoundary = "pad",
        done_key: Any = _DONE,
        burn_in: int = 0,
        bootstrap: int = 0,
        dilation: int = 1,
    ) -> None:
        for name, number, least in (
            ("length", length, 1), ("burn_in", burn_in, 0), ("bootstrap", bootstrap, 0), ("dilation", dilation, 1),
        ):  # fmt: skip
            _require_number(name, number, least)
        if episode_boundary not in get_args(EpisodeBoundary):
            choices = ", ".join(get_args(EpisodeBoundary))
            raise UsageError(f"episode_boundary is {episode_boundary!r}, expected one of {choices}")
        self.length = length
        self.episode_boundary: EpisodeBoundary = episode_boundary
        self.done_key = None if done_key is None else boundary_key(done_key)
        self.burn_in = burn_in
        self.bootstrap = bootstrap
        self.dilation = dilation
        self._tables = TableFinder(self._boundaries)

    @property
    def width(self) -> int:
        """The number of rows of a window."""
        return self.burn_in + self.length + self.bootstrap

    def expand(self, index: Index, info: Mapping[Any, Any], storage: Storage) -> tuple[Index, dict[Any, Any]]:
        """Return the rows of the windows of all anchors; see the class."""
        parts = index if isinstance(index, tuple) else (index,)
        lead, width, device = parts[0].shape, self.width, parts[0].device
        anchors = [part.reshape(-1) for part in parts]
        numbers = [part.numpy(force=True) for part in anchors]
        _require_elements(numbers, storage)
        window = self._window(storage, *numbers)
        rows = torch.from_numpy(window.rows.reshape(-1)).to(device)
        found = (rows, *(part.repeat_interleave(width) for part in anchors[1:]))
        count, place = len(numbers[0]), torch.arange(width)
        learning = (place >= self.burn_in) & (place < self.burn_in + self.length)
        labels: dict[Any, Any] = {key: _repeated(value, lead, width) for key, value in info.items()}
        labels["sequence_id"] = torch.arange(count).repeat_interleave(width)
        labels["step_in_sequence"] = place.repeat(count)
        labels["learning_mask"] = learning.repeat(count)
        anchor = torch.stack(anchors, -1) if len(anchors) > 1 else anchors[0]
        labels[ANCHOR] = anchor.repeat_interleave(width, dim=0)
        labels[VALID] = torch.from_numpy(window.valid.reshape(-1))
        return (found if isinstance(index, tuple) else rows), labels

    def _window(self, storage: Storage, row: Numbers, *lanes: Numbers) -> _Window:
        table = self._tables.table(storage)
        step = table.steps_at(row)
        lane = np.zeros_like(step)
        if lanes:
            lane = np.ravel_multi_index(lanes, tuple(storage.shape[1:])).astype(np.int64)
        first, last = step - table.age(step, lane), step + table.reach(step, lane) - 1
        start = step
        if self.episode_boundary == "stop":
            start = np.maximum(np.minimum(step, last - (self.length + self.bootstrap - 1) * self.dilation), first)
        wanted = start[:, None] + (np.arange(self.width) - self.burn_in) * self.dilation
        first, last = first[:, None], last[:, None]
        return _Window(np.clip(wanted, first, last) % table.capacity, (wanted >= first) & (wanted <= last))

    def _boundaries(self, storage: Storage) -> BoundarySource:
        """Return where the windows in a storage end."""
        key = self.done_key
        if (
            key is not None
            and storage.episode_lengths() is None
            and not is_tensor_collection(found := storage.read_at(0))
        ):
            raise SampleUnitTypeError(
                f"a Sequence needs tensordicts with {'.'.join(key)!r}, the storage holds a {type(found).__name__}",
                hint="done_key=None takes all elements for one episode",
            )
        if key is None or self.episode_boundary == "include_reset":
            return _Unbroken()
        named = key != _DONE
        if named and not has_entry(storage, key):
            raise MissingKeyError(f"{'.'.join(key)!r} is not in the storage: the ends of episodes are unknown")
        source = StrictBoundaries(key, any_flag=True).source(storage)
        if named and isinstance(source, EpisodeBoundaries):
            return JointBoundaries((source, FlagBoundaries((key,))))
        return source

    def by_anchor(self, info: Any, priority: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Reduce the priorities of the rows of a batch, `[rows]`, to the highest of each anchor, `[n]`.

        `info` is the info of the batch, or the batch itself. Returns the anchors, each once, int64 `[n]` or
        `[n, ndim]`, and their priorities, as `update_priority` takes them. Repeats of steps are left out.
        MissingKeyError (a KeyError) for a batch without these marks, SchemaError (a RuntimeError) for another number of
        priorities.
        """
        anchor, valid = info.get(ANCHOR, None), info.get(VALID, None)
        if anchor is None or valid is None:
            raise MissingKeyError(f'the batch has no "{ANCHOR if anchor is None else VALID}", which sequences have')
        valid, priority = valid.reshape(-1), priority.detach().reshape(-1)
        if len(priority) != len(valid):
            raise SchemaError(f"there are {len(priority)} priorities, expected {len(valid)}: one for each row")
        anchor = anchor.reshape(len(valid), -1).squeeze(-1)
        anchors, number = torch.unique(anchor[valid.to(anchor.device)], dim=0, return_inverse=True)
        priority = priority if priority.is_floating_point() else priority.float()
        highest = torch.full((len(anchors),), -torch.inf, dtype=priority.dtype, device=priority.device)
        return anchors, highest.scatter_reduce_(
            0, number.to(priority.device), priority[valid.to(priority.device)], "amax"
        )

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_tables"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._tables = TableFinder(self._boundaries)

    def __repr__(self) -> str:
        return (
            f"Sequence({self.length}, episode_boundary={self.episode_boundary!r}, done_key={self.done_key!r}, "
            f"burn_in={self.burn_in}, bootstrap={self.bootstrap}, dilation={self.dilation})"
        )


def _require_number(name: str, number: Any, least: int) -> None:
    if isinstance(number, bool) or not isinstance(number, int) or number < least:
        raise UsageError(f"{name} is {number!r}, expected a number from {least}")


def _require_elements(anchors: list[Numbers], storage: Storage) -> None:
    """Raise IndexError for anchors that are no elements of a storage, SchemaError for an empty one."""
    if not storage.has_rows:
        raise SchemaError("Cannot sample from an empty storage: it has no elements yet")
    shape = tuple(storage.shape)
    if len(anchors) != len(shape):
        raise IndexError(f"anchors have {len(anchors)} coordinates, the storage has {len(shape)} dimensions")
    for part, size in zip(anchors, shape, strict=True):
        wrong = part[(part < 0) | (part >= size)]
        if len(wrong):
            raise IndexError(f"{wrong[0]} was drawn, the storage has {size:,} elements along this dimension")


def _repeated(value: Any, lead: torch.Size, times: int) -> Any:
    """Repeat the values of anchors for each of their rows; other values stay as they are."""
    if isinstance(value, tuple):
        return tuple(_repeated(part, lead, times) for part in value)
    if not isinstance(value, torch.Tensor) or value.shape[: len(lead)] != lead:
        return value
    return value.flatten(0, len(lead) - 1).repeat_interleave(times, dim=0)
