"""Sample units: they expand each element that a sampler draws to rows of the batch, such as a window of steps."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeAlias, get_args

import numpy as np
import torch
from tensordict import is_tensor_collection

from ..errors import MissingKeyError, SchemaError, UsageError, require_choice, require_number
from ..storages.base import Storage
from ..storages.pytree import TensorDictNode
from ..storages.tensor import TensorStorage
from ..ted.schema import NEXT_DONE, Numbers, as_key
from .base import Index
from .trajectories import (
    BoundarySource,
    Ends,
    EpisodeBoundaries,
    FlagBoundaries,
    JointBoundaries,
    StrictBoundaries,
    TableFinder,
    clamped,
    has_entry,
)

EpisodeBoundary: TypeAlias = Literal["pad", "stop", "include_reset"]

ANCHOR, VALID = "anchor_index", "validity_mask"
"""Entries of the info: the anchor of each row, and whether the row is a real step rather than a repeat."""


class SampleUnitTypeError(UsageError, TypeError):
    """A sample unit, its result, or the elements that it is used with have the wrong type."""


class SampleUnit(ABC):
    """Expands each element that a sampler draws, an anchor, to several rows of the batch.

    A buffer takes one as its argument `sample_unit`. It calls `expand` and reads the rows under one lock, which
    excludes writers.
    """

    needs_order: ClassVar[bool] = False
    """Whether it relies on adjacent rows being consecutive steps."""

    @abstractmethod
    def expand(self, index: Index, info: Mapping[Any, Any], storage: Storage) -> tuple[Index, dict[Any, Any]]:
        """Expand anchors.

        Args:
            index: the anchors, int64 `[anchors]`, or a tuple with one such tensor for each dimension of the storage.
            info: the sampler's info; entries are `[anchors, ...]`.
            storage: the storage.

        Returns:
            Index and info of the rows, one anchor after another, in the same form: `[rows]` and `[rows, ...]`.
        """


class Transition(SampleUnit):
    """Keeps the elements that a sampler draws unchanged: each anchor is one row."""

    def expand(self, index: Index, info: Mapping[Any, Any], storage: Storage) -> tuple[Index, dict[Any, Any]]:
        """Return index and info unchanged."""
        return index, dict(info)

    def __repr__(self) -> str:
        return "Transition()"


@dataclass(frozen=True)
class _Unbroken(BoundarySource):
    """Boundaries for which no step ends a trajectory, except the newest row of a ring."""

    def ends(self, storage: Storage, rows: Numbers | slice) -> Ends:
        count = len(rows) if isinstance(rows, np.ndarray) else len(range(*rows.indices(storage.shape[0])))
        return np.zeros((count, int(np.prod(storage.shape[1:], dtype=np.int64))), bool)


class Sequence(SampleUnit):
    """Expands each anchor to a window of steps of its episode: `burn_in + length + bootstrap` rows.

        steps         … s-2  s-1 │  s   s+1  s+2 │ s+3 …        anchor s, burn_in=2, length=3, bootstrap=1
                        burn-in  │    length     │ bootstrap

    The anchor is the first of the `length` steps. A batch of B anchors is flat, `[B * width]`, one window after
    another. If the burn-in begins before the episode, the first step is repeated. No window crosses the newest row of a
    ring, and each stays in its lane; dimension 0 of a storage of several dimensions is time. The sampler's info is
    repeated for each row of a window; of a slice sampler's info, only the weights are kept. These entries are added:

    - `anchor_index`: the anchor, int64 `[B * width]`, or `[B * width, ndim]` for a storage of several dimensions;
    - `sequence_id`, `step_in_sequence`: the number of the window in the batch, and of the row in its window, int64;
    - `learning_mask`: whether a row is one of the `length` steps, neither burn-in nor bootstrap, bool;
    - `validity_mask`: whether a row is a real step, not a repeat, bool.

    Args:
        length: how many steps are learned from.
        episode_boundary: what happens if the episode ends within the window:

            - `"pad"`: the last step is repeated.
            - `"stop"`: the window starts earlier, so that it ends with the episode. If the episode is too short for
              that, its last step is repeated.
            - `"include_reset"`: the window continues in the next episode of the lane.
        done_key: the flag that ends an episode. Episodes also end at `terminated` and `truncated` next to it, where
            trajectory ids change, and where the episodes of a dataset do. None treats all steps as one episode.
        burn_in: how many steps come before the anchor.
        bootstrap: how many steps follow.
        dilation: by how many rows the steps of a window are apart.

    Raises:
        UsageError: (a ValueError) an argument is invalid.
        SampleUnitTypeError: (a TypeError) when used: the storage does not hold tensordicts, and `done_key` is not None.
        MissingKeyError: (a KeyError) when used: an entry is not stored.
        SchemaError: (a RuntimeError) when used: the storage is empty.
        IndexError: when used: an anchor does not exist.

    Kapturowski et al., "Recurrent experience replay in distributed reinforcement learning", 2019; names are TorchRL's.

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
        done_key: Any = NEXT_DONE,
        burn_in: int = 0,
        bootstrap: int = 0,
        dilation: int = 1,
    ) -> None:
        for name, number, least in (
            ("length", length, 1), ("burn_in", burn_in, 0), ("bootstrap", bootstrap, 0), ("dilation", dilation, 1),
        ):  # fmt: skip
            require_number(name, number, least)
        require_choice("episode_boundary", episode_boundary, get_args(EpisodeBoundary))
        self.length = length
        self.episode_boundary: EpisodeBoundary = episode_boundary
        self.done_key = None if done_key is None else as_key(done_key)
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
        if self.done_key is not None and not storage.has_rows:
            self._require_tensordicts(storage)
        _require_elements(numbers, storage)
        window, repeated = self._window(storage, *numbers)
        rows = torch.from_numpy(window.reshape(-1)).to(device)
        found = (rows, *(part.repeat_interleave(width) for part in anchors[1:]))
        count, place = len(numbers[0]), torch.arange(width)
        learning = (place >= self.burn_in) & (place < self.burn_in + self.length)
        labels: dict[Any, Any] = {key: _repeated(value, lead, width) for key, value in info.items()}
        labels["sequence_id"] = torch.arange(count).repeat_interleave(width)
        labels["step_in_sequence"] = place.repeat(count)
        labels["learning_mask"] = learning.repeat(count)
        anchor = torch.stack(anchors, -1) if len(anchors) > 1 else anchors[0]
        labels[ANCHOR] = anchor.repeat_interleave(width, dim=0)
        labels[VALID] = torch.from_numpy(~repeated.reshape(-1))
        return (found if isinstance(index, tuple) else rows), labels

    def _window(self, storage: Storage, row: Numbers, *lanes: Numbers) -> tuple[Numbers, Ends]:
        """Return the rows of windows, int64 `[anchors, rows]`, and which of them are repeated steps."""
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
        steps, repeated = clamped(wanted, first, last)
        return steps % table.capacity, repeated

    def _require_tensordicts(self, storage: Storage) -> None:
        """Raise SampleUnitTypeError for a storage whose elements are not, or may not be, tensordicts."""
        if storage.has_rows:
            found = storage.read_at(0)
            what = None if is_tensor_collection(found) else f"the storage holds a {type(found).__name__}"
        elif isinstance(storage, TensorStorage):
            known = not storage.initialized or isinstance(storage.structure, TensorDictNode)
            what = None if known else f"the storage holds a {storage.structure}"
        else:
            what = f"a {type(storage).__name__} without elements has none"
        if what is not None and self.done_key is not None:
            raise SampleUnitTypeError(
                f"a Sequence needs tensordicts with {'.'.join(self.done_key)!r}, {what}",
                hint="done_key=None treats all elements as one episode",
            )

    def _boundaries(self, storage: Storage) -> BoundarySource:
        """Return the source of the ends that windows in a storage must not cross."""
        key = self.done_key
        if key is not None and storage.episode_lengths() is None:
            self._require_tensordicts(storage)
        if key is None or self.episode_boundary == "include_reset":
            return _Unbroken()
        named = key != NEXT_DONE
        if named and not has_entry(storage, key):
            raise MissingKeyError(f"{'.'.join(key)!r} is not in the storage, so the ends of episodes are unknown")
        source = StrictBoundaries(key, any_flag=True).source(storage)
        if named and isinstance(source, EpisodeBoundaries):
            return JointBoundaries((source, FlagBoundaries((key,))))
        return source

    def by_anchor(self, info: Any, priority: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Reduce the priorities of a batch's rows to the highest for each anchor; repeated steps are left out.

        Args:
            info: the info of the batch, or the batch itself.
            priority: one priority for each row, `[rows]`.

        Returns:
            The distinct anchors, int64 `[n]` or `[n, ndim]`, and their priorities, as `update_priority` takes them.

        Raises:
            MissingKeyError: (a KeyError) the batch does not come from a sequence.
            SchemaError: (a RuntimeError) the number of priorities does not match.
        """
        anchor, valid = info.get(ANCHOR, None), info.get(VALID, None)
        if anchor is None or valid is None:
            raise MissingKeyError(
                f'the batch has no "{ANCHOR if anchor is None else VALID}": it was not sampled with a Sequence'
            )
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


def _require_elements(anchors: list[Numbers], storage: Storage) -> None:
    """Raise IndexError if an anchor does not exist, SchemaError if the storage is empty."""
    if not storage.has_rows:
        raise SchemaError("Cannot sample from an empty storage: it has no elements yet")
    shape = tuple(storage.shape)
    if len(anchors) != len(shape):
        raise IndexError(f"anchors have {len(anchors)} coordinates, the storage has {len(shape)} dimensions")
    for part, size in zip(anchors, shape, strict=True):
        wrong = part[(part < 0) | (part >= size)]
        if len(wrong):
            raise IndexError(
                f"element {wrong[0]} was drawn, but the storage has {size:,} elements along this dimension"
            )


def _repeated(value: Any, lead: torch.Size, times: int) -> Any:
    """Repeat the values of anchors for each of their rows; other values stay as they are."""
    if isinstance(value, tuple):
        return tuple(_repeated(part, lead, times) for part in value)
    if not isinstance(value, torch.Tensor) or value.shape[: len(lead)] != lead:
        return value
    return value.flatten(0, len(lead) - 1).repeat_interleave(times, dim=0)
