"""Sampling slices: consecutive steps of trajectories, and the info that comes with them."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, ClassVar, Literal, NamedTuple, NoReturn, TypeAlias, get_args

import numpy as np
import torch
from numpy.typing import NDArray

from ..errors import SchemaError, UsageError
from ..storages.base import Storage
from ..storages.tensor import TensorStorage
from .base import Index, Sampler
from .boundaries import (
    BoundaryChoice,
    BoundarySource,
    ConflictingArgumentsError,
    EpisodeBoundaries,
    Key,
    boundary_key,
    stored_entry,
)
from .lane_runs import Window
from .trajectories import TrajectoryTable, trajectory_table

Numbers: TypeAlias = NDArray[np.int64]
Anchor: TypeAlias = Literal["any", "start", "end"]
Weight: TypeAlias = Literal["episode", "step"]


class SliceSampler(Sampler):
    """Draws slices: consecutive steps of one trajectory, each with the same number of steps, one after the other.

    - `num_slices`, `slice_len`: one of them; the other follows from the batch size, which has to be a multiple.
    - `traj_key`: the entry with the ids of trajectories. `end_key`, `end_keys`: flags that end them; missing ones are
      skipped. If all given entries are missing, the other kind is used, which is logged. By default it is
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
    without_replacement: ClassVar[type[Sampler]]

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
        if (num_slices is None) == (slice_len is None):
            raise ConflictingArgumentsError(
                f"num_slices is {num_slices} and slice_len is {slice_len}, exactly one of them is expected"
            )
        _check_count("num_slices", num_slices)
        _check_count("slice_len", slice_len)
        if pad_output and strict_length:
            raise UsageError("pad_output=True was given with strict_length=True, which leaves nothing to pad")
        if weight not in get_args(Weight) or anchor not in get_args(Anchor):
            raise UsageError(
                f"weight is {weight!r} and anchor {anchor!r}, expected are episode or step, any, start or end"
            )
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
        self._marks = _SliceMarks(None if truncated_key is None else boundary_key(truncated_key))
        self._found: tuple[weakref.ref[Storage], TrajectoryTable] | None = None
        self._last_window: Window | None = None
        self._last_ends: _SliceEnds | None = None

    # Sampling ----------------------------------------------------------------------------------------

    def draw(self, storage: Storage, batch_size: int) -> tuple[Index, dict[str, Any]]:
        """Draw slices with `batch_size` steps in total."""
        count, slice_len = self._measure(batch_size)
        table = self._table(storage)
        eligible = table.eligible(self._window(slice_len))
        if not eligible.count:
            self._refuse_short(table, slice_len)
        chances = self._fractions(2 * count)
        if self.weight == "step":
            lane, first, length, place = eligible.by_start(scaled(chances[:count], eligible.start_count))
        else:
            lane, first, length = eligible.by_number(scaled(chances[:count], eligible.count))
            place = None
        start, taken = self._placed(first, length, slice_len, chances[count:], place)
        return self._assemble(storage, table, lane, start, taken, slice_len)

    def draw_rows(self, storage: Storage, batch_size: int) -> tuple[Index, dict[str, Any], Any]:
        """Draw slices and read their rows, which also gives the flags of the info."""
        marks = self._marks
        marks.keeps_rows = True
        try:
            index, info = self.draw(storage, batch_size)
            return index, info, marks.rows
        finally:
            marks.keeps_rows, marks.rows = False, None

    def _measure(self, batch_size: int) -> tuple[int, int]:
        """Return the number of slices and their length; SchemaError for a batch size that is no multiple."""
        name, known = ("num_slices", self.num_slices) if self.num_slices else ("slice_len", self.slice_len)
        assert known is not None  # one of them is
        other, rest = divmod(batch_size, known)
        if rest:
            raise SchemaError(f"the batch size {batch_size} is not divisible by {name}={known}")
        return (known, other) if self.num_slices else (other, known)

    def _table(self, storage: Storage) -> TrajectoryTable:
        """Return the trajectory table of a storage, up to date."""
        found = self._found
        if found is None or found[0]() is not storage or _is_outdated(found[1].source, storage):
            found = self._found = weakref.ref(storage), trajectory_table(storage, self._boundaries.source(storage))
        table = found[1]
        table.refresh()
        return table

    def _refuse_short(self, table: TrajectoryTable, slice_len: int) -> NoReturn:
        lengths = table.runs()[2]
        raise SchemaError(
            f"no trajectory is long enough for slices of {slice_len:,} steps: the {len(lengths):,} that there are have "
            f"{lengths.min():,} to {lengths.max():,}",
            hint="ask for shorter slices, or take strict_length=False",
        )

    # Places ------------------------------------------------------------------------------------------

    def _overhangs(self, slice_len: int) -> tuple[int, int]:
        """Return by how many steps slices may extend beyond start and end; UsageError for a whole slice or more."""
        found = []
        for span in self.span:
            if span is not True and span >= slice_len:
                raise UsageError(f"a span of {int(span)} was asked for, slices have {slice_len} steps")
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
            chances = self._fractions(len(first)) if chances is None else chances
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

    def _fractions(self, count: int) -> NDArray[np.float64]:
        rng = self.generator
        if rng is None or rng.device.type == "cpu":
            return torch.rand(count, dtype=torch.float64, generator=rng).numpy()
        return torch.rand(count, dtype=torch.float64, generator=rng, device=rng.device).numpy(force=True)

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
            ends = _SliceEnds.of(taken, slice_len, flat=not self.batched)
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
        index = tuple(map(torch.from_numpy, parts))
        info = self._marks.of(storage, index, ends)
        if self.batched or self.pad_output:
            info["collector", "mask"] = ends.real.clone()
        return index, info

    def _whole(self, count: int, slice_len: int) -> _SliceEnds:
        """Return the marks of whole slices, kept for batches of the same size."""
        known = self._last_ends
        if known is None or known.place.shape[0] != slice_len or known.real.numel() != count * slice_len:
            known = _SliceEnds.of(np.full(count, slice_len), slice_len, flat=not self.batched)
            self._last_ends = known
        return known

    def reset(self) -> None:
        """Forget the trajectory table."""
        self._found = None

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the generator and all caches."""
        return super().__getstate__() | {"_found": None, "_last_ends": None}

    def __repr__(self) -> str:
        size = f"num_slices={self.num_slices}" if self.num_slices else f"slice_len={self.slice_len}"
        return f"{type(self).__name__}({size}, strict_length={self.strict_length}, weight={self.weight!r})"


def _is_outdated(source: BoundarySource, storage: Storage) -> bool:
    """Whether rows of a dataset were overwritten, so that its episode table no longer describes them."""
    return isinstance(source, EpisodeBoundaries) and storage.log.now.rows > 0


def scaled(chances: NDArray[np.float64], sizes: Numbers | int) -> Numbers:
    """Scale fractions in [0, 1) to integers from 0 to `sizes - 1`."""
    # The largest fraction below 1 is 1 - 2^-53: the product with a size of up to 2^53 is never rounded up to that.
    return (chances * sizes).astype(np.int64)


def _check_count(name: str, number: Any) -> None:
    if number is not None and (isinstance(number, bool) or not isinstance(number, int) or number < 1):
        raise UsageError(f"{name} is {number!r}, a number from 1 is expected")


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


# The info of slices -------------------------------------------------------------------------------


class _SliceEnds(NamedTuple):
    """Which steps of slices are first, last and real (not padding): bool `[slices, steps]`, or flattened.

    `last` has a trailing dimension of size one, like the flags of TED. `place` numbers the steps of one slice.
    """

    first: torch.Tensor
    last: torch.Tensor
    real: torch.Tensor
    place: Numbers

    @classmethod
    def of(cls, taken: Numbers, slice_len: int, *, flat: bool) -> _SliceEnds:
        """Mark slices of `slice_len` steps, of which `taken` are real; `flat` flattens the result."""
        place = np.arange(slice_len)
        shape = (len(taken) * slice_len,) if flat else (len(taken), slice_len)
        first = np.broadcast_to(place == 0, (len(taken), slice_len)).reshape(shape)
        last = (place == taken[:, None] - 1).reshape(*shape, 1)
        real = (place < taken[:, None]).reshape(shape)
        return cls(torch.tensor(first), torch.from_numpy(last), torch.from_numpy(real), place)

    def kept(self) -> _SliceEnds:
        """Return the marks of the real steps, flattened."""
        return _SliceEnds(self.first[self.real], self.last[self.real], self.real[self.real], self.place)


class _SliceMarks:
    """Makes the flags of a sampler's info: `is_init`, `truncated`, and `done` and `terminated` next to it."""

    def __init__(self, truncated: Key | None) -> None:
        siblings = () if truncated is None else ((*truncated[:-1], "done"), (*truncated[:-1], "terminated"))
        self._keys: tuple[Key, ...] = (("is_init",), *siblings)
        flags = () if truncated is None else (truncated, *siblings)
        self._names = [key[0] if len(key) == 1 else key for key in flags]
        self._known: tuple[weakref.ref[Any], list[torch.Tensor | None]] | None = None
        self.keeps_rows = False
        """Whether whole rows are read, and kept as `rows`, instead of single entries."""
        self.rows: Any = None

    def of(self, storage: Storage, index: tuple[torch.Tensor, ...], ends: _SliceEnds) -> dict[Any, torch.Tensor]:
        """Return the flags of the steps at an index, with `ends` the marks of their slices."""
        found = self._stored(storage, index)
        info: dict[Any, torch.Tensor] = {}
        if found[0] is not None:
            info["is_init"] = found[0] | _like(ends.first, found[0])
        if self._names:
            last = ends.last
            done, terminated = (  # with a trailing dimension of size one, also if they are stored without it
                flags.unsqueeze(-1) if flags is not None and flags.dim() < last.dim() else flags for flags in found[1:]
            )
            info[self._names[0]] = last.clone()
            info[self._names[1]] = last.clone() if done is None else done | _like(last, done)
            info[self._names[2]] = torch.zeros_like(last) if terminated is None else terminated
        return info

    def _stored(self, storage: Storage, index: tuple[torch.Tensor, ...]) -> list[torch.Tensor | None]:
        """Read the flags of the steps at an index; None for those that are not stored."""
        if not isinstance(storage, TensorStorage):
            return self._shown(storage.get(index if len(index) > 1 else index[0]), self._keys)
        columns = storage.columns
        if self._known is None or self._known[0]() is not columns:
            self._known = weakref.ref(columns), [stored_entry(storage, key) for key in self._keys]
        leaves = self._known[1]
        if self.keeps_rows:
            there = [None if leaf is None else key for key, leaf in zip(self._keys, leaves, strict=True)]
            return self._shown(storage.get(index if len(index) > 1 else index[0]), there)
        return [None if leaf is None else _gathered(leaf, index) for leaf in leaves]

    def _shown(self, rows: Any, keys: Sequence[Key | None]) -> list[torch.Tensor | None]:
        """Return the flags of rows, and keep the rows if `keeps_rows`."""
        if self.keeps_rows:
            self.rows = rows
        if isinstance(rows, list):
            rows = torch.stack(rows)
        found = [None if key is None else rows.get(key, None) for key in keys]
        return [flags if flags is None or flags.dtype == torch.bool else flags.bool() for flags in found]

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_known": None, "rows": None, "keeps_rows": False}


def _gathered(leaf: torch.Tensor, index: tuple[torch.Tensor, ...]) -> torch.Tensor:
    if len(index) == 1 and index[0].dim() == 1:
        found = leaf.index_select(0, index[0].to(leaf.device))
    else:
        found = leaf[tuple(part.to(leaf.device) for part in index)]
    return found if found.dtype == torch.bool else found.bool()


def _like(flags: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Return flags of steps with as many dimensions as values of steps, on their device."""
    if flags.dim() < values.dim():
        flags = flags.view(*flags.shape, *(1,) * (values.dim() - flags.dim()))
    return flags if values.is_cpu else flags.to(values.device)
