"""Sampling slices: consecutive steps of trajectories."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple, NoReturn, TypeAlias, get_args

import numpy as np
import torch
from numpy.typing import NDArray

from ..errors import SchemaError, UsageError, require_flags
from ..storages.base import Storage
from .base import Index, Sampler
from .boundaries import (
    BoundaryChoice,
    ConflictingArgumentsError,
    Key,
    boundary_key,
)
from .lane_runs import Window
from .slice_info import SliceEnds, SliceMarks
from .trajectories import TableFinder, TrajectoryTable
from .uniform import fractions

Numbers: TypeAlias = NDArray[np.int64]
Anchor: TypeAlias = Literal["any", "start", "end"]
Weight: TypeAlias = Literal["episode", "step"]


class WholeSlices(NamedTuple):
    """What decides on slices that are never cut nor padded: their window, and the arguments of `SliceSampler`."""

    window: Window
    weight: Weight
    anchor: Anchor
    truncated_key: Key | None


@dataclass(frozen=True, slots=True)
class SliceMeasure:
    """How many slices a batch has, or how long they are, and what becomes of trajectories that are shorter.

    ConflictingArgumentsError (a TypeError) unless one of `num_slices` and `slice_len` is given; UsageError (a
    ValueError) for numbers below 1, and for `pad_output` with `strict_length`.
    """

    num_slices: int | None
    slice_len: int | None
    strict_length: bool
    pad_output: bool

    def __post_init__(self) -> None:
        if (self.num_slices is None) == (self.slice_len is None):
            raise ConflictingArgumentsError(
                f"num_slices is {self.num_slices} and slice_len is {self.slice_len}, expected exactly one of them"
            )
        _check_count("num_slices", self.num_slices)
        _check_count("slice_len", self.slice_len)
        if self.pad_output and self.strict_length:
            raise UsageError("pad_output is True, expected False with strict_length=True, which leaves nothing to pad")

    def of(self, batch_size: int) -> tuple[int, int]:
        """Return the number of slices and their length; SchemaError for a batch size that is no multiple."""
        name, known = ("num_slices", self.num_slices) if self.num_slices else ("slice_len", self.slice_len)
        assert known is not None  # one of them is
        other, rest = divmod(batch_size, known)
        if rest:
            raise SchemaError(f"the batch size {batch_size} is not divisible by {name}={known}")
        return (known, other) if self.num_slices else (other, known)


class SliceSampler(Sampler):
    """Draws slices: consecutive steps of one trajectory, each with the same number of steps, one after the other.

    - `num_slices`, `slice_len`: one of them; the other follows from the batch size, which has to be a multiple.
    - `traj_key`: the entry with the ids of trajectories. `end_key`, `end_keys`: flags that end them; missing ones are
      skipped. If all given entries are missing, the other kind is used, with a UserWarning. By default it is
      `("collector", "traj_ids")`, else `"episode"`, else the flag `("next", "done")`. Datasets use their episode table.
    - `ends`, `trajectories`: the same as a tensor of a full storage's shape, with `cache_values=True`. Writes do not
      change them.
    - `truncated_key`: unless None, the info marks the last step of each slice as truncated, and has entries next to it
      for whether steps are done (as stored, or truncated here) and terminated (as stored); bool `[batch, 1]`.
    - `strict_length`: whether trajectories shorter than a slice are left out. If not, they are taken whole, and the
      batch has fewer steps; with `pad_output` their last step is repeated, and `("collector", "mask")`, bool
      `[batch]`, marks the real steps.
    - `span`: by how many steps slices may extend beyond the start and end of their trajectories, and are cut there. A
      number, True for all but one step, or a pair of these for the start and the end.
    - `weight`: whether all trajectories (`episode`), as in TorchRL, or all possible starts (`step`) are equally likely.
      `anchor`: whether slices are taken anywhere, at the `start` or at the `end` of their trajectories.
    - `batched`: whether the index, and so the batch, is `[num_slices, slice_len]`, always with the mask.
    - `cache_values`, `compile`, `use_gpu` are accepted for compatibility with TorchRL, and have no effect: trajectory
      bounds are always kept up to date.

    No slice crosses the end of a trajectory, nor the newest row of a ring. The index is a tuple of one tensor a
    dimension of the storage, also for one dimension. If the data has an entry `"is_init"`, the info has it too, set at
    the first step of every slice.

    SchemaError (a RuntimeError) for an empty storage, a batch size that is no multiple, trajectories that are all too
    short and a boundary entry of another shape than the storage; MissingKeyError (a KeyError) if no boundary entry is
    found; ConflictingArgumentsError (a TypeError) unless one of `num_slices` and `slice_len` is given; UsageError (a
    ValueError) for other invalid arguments. Names are those of TorchRL.

    >>> import torch
    >>> from tensordict import TensorDict
    >>> from rbtool import TensorStorage
    >>> storage = TensorStorage(TensorDict({"episode": torch.tensor([0, 0, 0, 1, 1, 1])}, [6]))
    >>> (index,), info = SliceSampler(slice_len=3).sample(storage, 6)
    >>> storage[index]["episode"].view(2, 3).float().std(1)
    tensor([0., 0.])
    """

    needs_order: ClassVar[bool] = True

    def __init__(
        self,
        *,
        num_slices: int | None = None,
        slice_len: int | None = None,
        end_key: Any = None,
        end_keys: Sequence[Any] | None = None,
        traj_key: Any = None,
        ends: torch.Tensor | None = None,
        trajectories: torch.Tensor | None = None,
        cache_values: bool = False,
        truncated_key: Any = ("next", "truncated"),
        strict_length: bool = True,
        pad_output: bool = False,
        compile: bool | dict[str, Any] = False,
        span: bool | int | tuple[bool | int, bool | int] = False,
        use_gpu: bool | torch.device | str = False,
        weight: Weight = "episode",
        anchor: Anchor = "any",
        batched: bool = False,
    ) -> None:
        require_flags(strict_length=strict_length, pad_output=pad_output, cache_values=cache_values, batched=batched)
        self.measure = SliceMeasure(num_slices, slice_len, strict_length, pad_output)
        if weight not in get_args(Weight) or anchor not in get_args(Anchor):
            raise UsageError(f"weight is {weight!r} and anchor {anchor!r}, expected episode or step, any, start or end")
        self.num_slices = num_slices
        self.slice_len = slice_len
        self.span = _checked_span(span)
        self.strict_length = strict_length
        self.pad_output = pad_output
        self.weight: Weight = weight
        self.anchor: Anchor = anchor
        self.batched = batched
        self.cache_values = cache_values
        if not isinstance(compile, bool | dict):
            raise UsageError(f"compile is {compile!r}, expected a bool or a dict of arguments")
        self.compile = bool(compile)
        self.use_gpu = _checked_gpu(use_gpu)
        self.truncated_key = truncated_key
        self.traj_key = traj_key
        self.end_key = end_key
        self.end_keys = end_keys
        self._boundaries = BoundaryChoice(end_key, end_keys, traj_key, ends, trajectories, cache_values)
        self._marks = SliceMarks(None if truncated_key is None else boundary_key(truncated_key))
        self._tables = TableFinder(self._boundaries.source)
        self._last_window: Window | None = None
        self._last_ends: SliceEnds | None = None

    @staticmethod
    def without_replacement(*arguments: Any, **options: Any) -> Sampler:
        """Make a `SliceSamplerWithoutReplacement`: what `SliceSampler(replacement=False, ...)` is."""
        from .slices_without_replacement import SliceSamplerWithoutReplacement  # derives from this class

        return SliceSamplerWithoutReplacement(*arguments, **options)

    # Sampling ----------------------------------------------------------------------------------------

    def draw(self, storage: Storage, batch_size: int) -> tuple[Index, dict[str, Any]]:
        """Draw slices with `batch_size` steps in total."""
        count, slice_len = self._measure(batch_size)
        table = self.trajectories(storage)
        eligible = table.eligible(self._window(slice_len))
        if not eligible.count:
            self._refuse_short(table, slice_len)
        chances = fractions(2 * count, self.generator)
        if eligible.window.is_plain and storage.ndim == 1:
            runs = eligible.table(table.capacity, by_start=self.weight == "step")
            rows = runs.draw(chances, slice_len, self.anchor)
            parts = [rows.reshape(count, slice_len) if self.batched else rows]
            return self._indexed(storage, parts, self._whole(count, slice_len))
        if self.weight == "step":
            lane, first, length, place = eligible.by_start(scaled(chances[:count], eligible.start_count))
        else:
            lane, first, length = eligible.by_number(scaled(chances[:count], eligible.count))
            place = None
        start, taken = self._placed(first, length, slice_len, chances[count:], place)
        return self._assemble(storage, table, lane, start, taken, slice_len)

    def check_batch_size(self, batch_size: int) -> None:
        """Raise SchemaError for a batch size that is no multiple, UsageError for a `span` of a whole slice or more."""
        self._overhangs(self._measure(batch_size)[1])

    def draw_rows(self, storage: Storage, batch_size: int) -> tuple[Index, dict[str, Any], Any]:
        """Draw slices and read their rows, which also gives the flags of the info."""
        with self._marks.reading() as marks:
            return *self.draw(storage, batch_size), marks.rows

    def _measure(self, batch_size: int) -> tuple[int, int]:
        """Return the number of slices and their length; SchemaError for a batch size that is no multiple."""
        return self.measure.of(batch_size)

    def trajectories(self, storage: Storage) -> TrajectoryTable:
        """Return the trajectory table of a storage, up to date; SchemaError for an empty one."""
        return self._tables.table(storage)

    def _refuse_short(self, table: TrajectoryTable, slice_len: int) -> NoReturn:
        lengths = table.runs()[2]
        raise SchemaError(
            f"no trajectory is long enough for slices of {slice_len:,} steps: the {len(lengths):,} that there are have "
            f"{lengths.min():,} to {lengths.max():,}",
            hint="ask for shorter slices, or take strict_length=False",
        )

    @property
    def whole_slices(self) -> WholeSlices | None:
        """What samplers that draw together have in common; None if slices may be cut, padded or of any length."""
        length = self.measure.slice_len
        if length is None or self.batched or not (window := self._window(length)).is_plain:
            return None
        return WholeSlices(window, self.weight, self.anchor, self._marks.key)

    # Places ------------------------------------------------------------------------------------------

    def _overhangs(self, slice_len: int) -> tuple[int, int]:
        """Return by how many steps slices may extend beyond start and end; UsageError for a whole slice or more."""
        found = []
        for span in self.span:
            if span is not True and span >= slice_len:
                raise UsageError(f"span is {int(span)}, expected below {slice_len}, the steps of a slice")
            found.append(slice_len - 1 if span is True else int(span))
        return found[0], found[1]

    def _window(self, slice_len: int) -> Window:
        if self._last_window is None or self._last_window.length != slice_len:
            left, right = self._overhangs(slice_len)
            self._last_window = Window(slice_len, self.strict_length, left, right, self.anchor != "any")
        return self._last_window

    def _placed(
        self,
        first: Numbers,
        length: Numbers,
        slice_len: int,
        chances: NDArray[np.float64] | None = None,
        place: Numbers | None = None,
    ) -> tuple[Numbers, Numbers | None]:
        """Choose a slice of each of these trajectories; return their first steps and lengths, None if all are whole.

        `place` numbers the starts; by default they are chosen by `chances` in [0, 1), or drawn.
        """
        window = self._window(slice_len)
        if self.anchor != "any":
            place = None  # there is only one start
        elif place is None:
            chances = fractions(len(first), self.generator) if chances is None else chances
            place = scaled(chances, window.places(length))
        if window.is_plain:
            return first + (0 if self.anchor == "start" else length - slice_len if place is None else place), None
        size = np.minimum(length, slice_len)
        early = -np.minimum(size - 1, window.left)
        late = length - size + np.minimum(size - 1, window.right)
        start = first + (early if self.anchor == "start" else late if place is None else early + place)
        stop = np.minimum(start + size, first + length)
        start = np.maximum(start, first)
        return start, stop - start

    def _assemble(
        self,
        storage: Storage,
        table: TrajectoryTable,
        lane: Numbers,
        start: Numbers,
        taken: Numbers | None,
        slice_len: int,
    ) -> tuple[tuple[torch.Tensor, ...], dict[str, Any]]:
        """Return the index and info of slices that start at `start`, of `taken` steps, or whole ones for None."""
        whole = taken is None or bool((taken == slice_len).all())
        ends = self._whole(len(start), slice_len)
        rows = start[:, None] + ends.place
        if taken is not None and not whole:
            rows = np.minimum(rows, (start + taken - 1)[:, None])
            ends = SliceEnds.of(taken, slice_len, flat=not self.batched)
        if table.newest >= table.capacity:
            rows %= table.capacity
        parts = [rows]
        if storage.ndim > 1:
            lanes = np.unravel_index(lane, storage.shape[1:])
            parts += [np.repeat(part, slice_len).reshape(rows.shape) for part in lanes]
        if not self.batched:
            parts = [part.reshape(-1) for part in parts]
        if not (whole or self.batched or self.pad_output):
            parts, ends = [part[ends.real.numpy()] for part in parts], ends.kept()
        return self._indexed(storage, parts, ends)

    def _indexed(
        self, storage: Storage, parts: Sequence[Numbers], ends: SliceEnds
    ) -> tuple[tuple[torch.Tensor, ...], dict[str, Any]]:
        """Return the index of these rows, and elements of further dimensions, and the info of their slices."""
        index = tuple(map(torch.from_numpy, parts))
        info = self._marks.of(storage, index, ends)
        if self.batched or self.pad_output:
            info["collector", "mask"] = ends.real.clone()
        return index, info

    def _whole(self, count: int, slice_len: int) -> SliceEnds:
        """Return the marks of whole slices, kept for batches of the same size."""
        known = self._last_ends
        if known is None or known.place.shape[0] != slice_len or known.real.numel() != count * slice_len:
            known = SliceEnds.of(np.full(count, slice_len), slice_len, flat=not self.batched)
            self._last_ends = known
        return known

    def reset(self) -> None:
        """Forget the trajectory table."""
        self._tables.forget()

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the generator and all caches."""
        return super().__getstate__() | {"_last_ends": None}

    def __repr__(self) -> str:
        size = f"num_slices={self.num_slices}" if self.num_slices else f"slice_len={self.slice_len}"
        return f"{type(self).__name__}({size}, strict_length={self.strict_length}, weight={self.weight!r})"


def scaled(chances: NDArray[np.float64], sizes: Numbers | int) -> Numbers:
    """Scale fractions in [0, 1) to integers from 0 to `sizes - 1`."""
    # The largest fraction below 1 is 1 - 2^-53: the product with a size of up to 2^53 is never rounded up to that.
    return (chances * sizes).astype(np.int64)


def _check_count(name: str, number: Any) -> None:
    if number is not None and (isinstance(number, bool) or not isinstance(number, int) or number < 1):
        raise UsageError(f"{name} is {number!r}, expected a number from 1")


def _checked_gpu(use_gpu: Any) -> bool | torch.device:
    if isinstance(use_gpu, bool):
        return use_gpu
    try:
        return torch.device(use_gpu)
    except (RuntimeError, TypeError) as error:
        raise UsageError(f"use_gpu is {use_gpu!r}, expected a bool or the name of a device") from error


def _checked_span(span: Any) -> tuple[bool | int, bool | int]:
    pair = tuple(span) if isinstance(span, list | tuple) else (span, span)
    if len(pair) != 2 or not all(isinstance(part, int) and part >= 0 for part in pair):
        raise UsageError(f"span is {span!r}, expected a bool, a number of steps or a pair of these")
    return pair
