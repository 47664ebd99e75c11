"""Samplers of slices, consecutive steps of one trajectory: with replacement, or in epochs of one slice per trajectory.

`SliceSampler` draws slices, `SliceMarks` makes their info. `SliceSamplerWithoutReplacement` keeps the rest of an epoch
in a `TrajectoryEpoch`, which follows the trajectories while a ring overwrites old ones and adds new ones. `SliceRule`
in `core/kernels/slices.py` defines which starts of a slice are legal.
"""

from __future__ import annotations

import contextlib
import copy
import sys
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, NamedTuple, NoReturn, TypeAlias, get_args

import numpy as np
import torch
from tensordict.utils import NestedKey

from ..errors import SchemaError, UsageError, require_flags, require_number
from ..kernels.slices import Anchor, Chances, Singles, SliceRule, scaled
from ..storages.base import Storage
from ..storages.pytree import entry_of
from ..storages.write_log import Written
from ..ted.schema import NEXT_DONE, Key, Numbers, as_key
from ..torchrl_classes import counterpart
from .base import Index, Sampler
from .trajectories import (
    BoundaryChoice,
    ConflictingArgumentsError,
    IdBoundaries,
    LaneRuns,
    Runs,
    TableFinder,
    TrajectoryTable,
    has_columns,
    stored_entry,
)
from .uniform import EpochSampler, SamplerWithoutReplacement, fractions, inserted_at_random, permutation, singles

Weight: TypeAlias = Literal["episode", "step"]


class WholeSlices(NamedTuple):
    """What determines the slices of a sampler that are never cut or padded: their rule, and the other arguments."""

    rule: SliceRule
    weight: Weight
    marks: tuple[Key | None, Key | None]
    """The arguments of `SliceMarks`."""


@dataclass(frozen=True, slots=True)
class SliceMeasure:
    """How many slices a batch has, how long they are, and what happens to trajectories that are shorter.

    Raises:
        ConflictingArgumentsError: (a TypeError) not exactly one of `num_slices` and `slice_len` is given.
        UsageError: (a ValueError) a number is below 1, or `pad_output` is combined with `strict_length`.
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
        for name, number in (("num_slices", self.num_slices), ("slice_len", self.slice_len)):
            if number is not None:
                require_number(name, number, 1)
        if self.pad_output and self.strict_length:
            raise UsageError("pad_output=True has no use with strict_length=True, which leaves nothing to pad")

    def of(self, batch_size: int) -> tuple[int, int]:
        """Return the number of slices and their length; SchemaError if the batch size is not divisible."""
        name, known = ("num_slices", self.num_slices) if self.num_slices else ("slice_len", self.slice_len)
        assert known is not None  # checked in __post_init__
        other, rest = divmod(batch_size, known)
        if rest:
            raise SchemaError(f"the batch size {batch_size} is not divisible by {name}={known}")
        return (known, other) if self.num_slices else (other, known)


@counterpart
class SliceSampler(Sampler):
    """Draws slices: consecutive steps of one trajectory. A batch consists of equally long slices, one after another.

    No slice crosses the end of a trajectory or the newest row of a ring. The index is a tuple with one tensor for each
    dimension of the storage, even if there is only one dimension.

    Args:
        num_slices: how many slices a batch has. Their length follows from the batch size, which must be a multiple of
            this number.
        slice_len: how many steps a slice has, instead of `num_slices`.
        end_key, end_keys: the flag, or flags, that end trajectories, instead of `done`: the row with the flag is the
            last one of its trajectory. Flags that are not stored are skipped.
        traj_key: the entry with the ids of trajectories. If none of the given entries is stored, the other kind (ids or
            flags) is used, with a UserWarning. By default a dataset uses its episode table; other storages use the ids
            `("collector", "traj_ids")` or `"episode"` if they are stored, and otherwise the flag `("next", "done")`.
        ends, trajectories: flags or ids as a tensor of a full storage's shape, with `cache_values=True`. Writes do not
            change them.
        truncated_key: under this key the info marks the last step of each slice as truncated. Next to it, it marks the
            steps that are done (as stored, or truncated here) and terminated (as stored). All are bool `[batch, 1]`.
            The stored entry of this key is not read. With None, the info has none of these flags.
        init_key: the entry that marks first steps. If it is stored, the info has it as well, and also marks the first
            step of each slice. None leaves it out.
        strict_length: whether trajectories shorter than a slice are left out. If not, they are taken whole, and the
            batch has fewer steps.
        pad_output: whether to pad short slices by repeating their last step. `("collector", "mask")`, bool `[batch]`,
            then marks the real steps. As in TorchRL, the mask is missing as long as all stored trajectories are long
            enough for a whole slice, except in an ensemble.
        span: by how many steps slices may extend beyond the start and the end of their trajectories, where they are
            cut: a number, True for all but one step, or a pair of these for start and end.
        weight: `"episode"`, as in TorchRL: all trajectories are equally likely; `"step"`: all possible starts are.
        anchor: whether slices come from `"any"` place in their trajectories, from the `"start"` or from the `"end"`.
        batched: whether index and batch have the shape `[num_slices, slice_len]`. The mask is then always present.
        cache_values, compile, use_gpu: accepted for compatibility with TorchRL, without effect: trajectory bounds are
            always up to date.

    Raises:
        ConflictingArgumentsError: (a TypeError) not exactly one of `num_slices` and `slice_len` is given.
        UsageError: (a ValueError) another argument is invalid.
        SchemaError: (a RuntimeError) from `sample`: the storage is empty, the batch size is not divisible, all
            trajectories are too short, or a boundary entry does not have the storage's shape.
        MissingKeyError: (a KeyError) from `sample`: no boundary entry is stored.

    Names are TorchRL's, and the same seed draws the same slices as there; `span` and `weight="step"` differ.

    >>> import torch
    >>> from tensordict import TensorDict
    >>> from rbtool import TensorStorage
    >>> storage = TensorStorage(TensorDict({"episode": torch.tensor([0, 0, 0, 1, 1, 1])}, [6]))
    >>> (index,), info = SliceSampler(slice_len=3).sample(storage, 6)
    >>> storage[index]["episode"].view(2, 3).float().std(1)
    tensor([0., 0.])
    """

    needs_order: ClassVar[bool] = True

    _batch_size_multiplier: int | None = 1
    """By how much the batch size is multiplied. TorchRL assigns it for a transform that reduces batches again."""

    def __init__(
        self,
        *,
        num_slices: int | None = None,
        slice_len: int | None = None,
        end_key: Any = None,
        end_keys: Sequence[Any] | None = None,
        traj_key: NestedKey | None = None,
        ends: torch.Tensor | None = None,
        trajectories: torch.Tensor | None = None,
        cache_values: bool = False,
        truncated_key: Any = ("next", "truncated"),
        strict_length: bool = True,
        pad_output: bool = False,
        compile: bool | dict[str, Any] = False,
        span: bool | int | tuple[bool | int, bool | int] = False,
        use_gpu: bool | torch.device | str = False,
        init_key: NestedKey | None = "is_init",
        weight: Weight = "episode",
        anchor: Anchor = "any",
        batched: bool = False,
    ) -> None:
        require_flags(strict_length=strict_length, pad_output=pad_output, cache_values=cache_values, batched=batched)
        self.measure = SliceMeasure(num_slices, slice_len, strict_length, pad_output)
        if weight not in get_args(Weight) or anchor not in get_args(Anchor):
            raise UsageError(
                f"weight is {weight!r} and anchor is {anchor!r}, expected episode or step, and any, start or end"
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
        self.end_key = NEXT_DONE if all(given is None for given in (end_key, end_keys, ends, trajectories)) else end_key
        self.end_keys = end_keys
        self._traj_key = traj_key
        self._boundaries = BoundaryChoice(end_key, end_keys, traj_key, ends, trajectories, cache_values)
        self.init_key = init_key
        self._tables = TableFinder(self._boundaries.source)
        self._last_rule: tuple[Any, Any, SliceRule] | None = None
        self._last_ends: SliceEnds | None = None

    @staticmethod
    def without_replacement(*arguments: Any, **options: Any) -> Sampler:
        """Make a `SliceSamplerWithoutReplacement`; `SliceSampler(replacement=False, ...)` calls it."""
        return SliceSamplerWithoutReplacement(*arguments, **options)

    @property
    def traj_key(self) -> NestedKey | None:
        """The entry with the ids of trajectories: the given one, or the one found at the last draw; None if flags or a
        table separate them.
        """
        source = self._tables.source
        if self._traj_key is not None or not isinstance(source, IdBoundaries):
            return self._traj_key
        return source.key[0] if len(source.key) == 1 else source.key

    @property
    def init_key(self) -> NestedKey | None:
        """The entry that marks first steps."""
        return self._init_key

    @init_key.setter
    def init_key(self, key: NestedKey | None) -> None:
        given = self.truncated_key, key
        self._marks = SliceMarks(*(None if one is None else as_key(one) for one in given))
        self._init_key = key

    # Sampling ----------------------------------------------------------------------------------------

    def draw(self, storage: Storage, batch_size: int) -> tuple[Index, dict[str, Any]]:
        """Draw slices with `batch_size` steps in total."""
        count, slice_len = self._measure(batch_size)
        table = self.trajectories(storage)
        eligible = table.eligible(self._rule(slice_len))
        if not eligible.count:
            self._refuse_short(table, slice_len)
        chances, places = self.chances(eligible, count, table.capacity)
        if eligible.rule.is_plain and storage.ndim == 1:
            runs = eligible.table(table.capacity, by_start=self.weight == "step")
            single = places.dtype == np.float32
            rows = runs.draw(np.concatenate([chances, places]), eligible.rule, single=single)
            parts = [rows.reshape(count, slice_len) if self.batched else rows]
            return self._indexed(storage, parts, self._whole(count, slice_len), masked=self.batched)
        return self._assemble(storage, table, *self._slices_at(eligible, chances, places), slice_len)

    def chances(self, eligible: LaneRuns, count: int, rows: int) -> tuple[Chances, Chances | Singles]:
        """Draw two random numbers for each slice, which `_slices_at` takes; `rows` is the capacity of the ring."""
        if self.weight == "step":
            chances, places = np.split(fractions(2 * count, self.generator), 2)
            return chances, places
        return self._chosen(eligible, count, rows), self._places(count, rows)

    def _slices_at(
        self, eligible: LaneRuns, chances: Chances, places: Chances | Singles
    ) -> tuple[Numbers, Numbers, Numbers | None]:
        """Choose slices by random numbers in [0, 1); return their lanes, first steps and lengths (None: all are whole).

        With `weight="step"`, `chances` choose among all starts. Otherwise they choose trajectories, and `places` choose
        starts in these.
        """
        if self.weight == "step":
            lane, first, length, place = eligible.by_start(scaled(chances, eligible.start_count))
        else:
            lane, first, length = eligible.by_number(scaled(chances, eligible.count))
            place = scaled(places, eligible.rule.starts(length))
        return lane, *eligible.rule.slices(first, length, place)

    def _chosen(self, eligible: LaneRuns, count: int, rows: int) -> Chances:
        """Draw trajectories by the integers that TorchRL draws, so that the same seed gives the same slices.

        Each integer is returned as the middle of its interval in [0, 1), from which `scaled` recovers it.
        """
        generator = self.generator
        device = None if generator is None else generator.device
        number = torch.randint(eligible.count, (count,), generator=generator, device=device).numpy(force=True)
        chances: Chances = (eligible.by_row(number, rows) + 0.5) / eligible.count
        return chances

    def _places(self, count: int, rows: int) -> Chances | Singles:
        """Draw random numbers for starts: in float32, as TorchRL does, or float64 if the ring is too long for that."""
        return (singles if starts_are_single(rows) else fractions)(count, self.generator)

    def check_batch_size(self, batch_size: int) -> None:
        """Raise SchemaError if the batch size is not divisible, UsageError if `span` is a whole slice or more."""
        self._overhangs(self._measure(batch_size)[1])

    def sampleable(self, storage: Storage, batch_size: int | None = None) -> int:
        """Return the number of possible slices."""
        if not storage.has_rows:
            return 0
        return self.trajectories(storage).eligible(self._rule(self._measure_of(batch_size)[1])).start_count

    def draw_rows(self, storage: Storage, batch_size: int) -> tuple[Index, dict[str, Any], Any]:
        """Draw slices and read their rows, which also provide the flags of the info."""
        with self._marks.reading() as marks:
            return *self.draw(storage, batch_size), marks.rows

    def _measure(self, batch_size: int) -> tuple[int, int]:
        """Return the number of slices and their length; SchemaError if the batch size is not divisible."""
        return self.measure.of(batch_size * (self._batch_size_multiplier or 1))

    def _measure_of(self, batch_size: int | None) -> tuple[int, int]:
        """Do the same as `_measure`; None stands for the smallest possible batch size."""
        return self._measure(self.slice_len or self.num_slices or 1 if batch_size is None else batch_size)

    def trajectories(self, storage: Storage) -> TrajectoryTable:
        """Return the trajectory table of a storage, up to date; SchemaError if the storage is empty."""
        return self._tables.table(storage)

    def _refuse_short(self, table: TrajectoryTable, slice_len: int) -> NoReturn:
        lengths = table.runs()[2]
        raise SchemaError(
            f"no trajectory is long enough for slices of {slice_len:,} steps: the {len(lengths):,} stored have "
            f"{lengths.min():,} to {lengths.max():,} steps",
            hint="ask for shorter slices, or use strict_length=False",
        )

    @property
    def whole_slices(self) -> WholeSlices | None:
        """The arguments by which ensembles may draw from several samplers at once; None if slices may be cut
        or padded.
        """
        length = self.measure.slice_len
        if length is None or self.batched or self._batch_size_multiplier not in (None, 1):
            return None
        if not (rule := self._rule(length)).is_plain:
            return None
        return WholeSlices(rule, self.weight, self._marks.given)

    # Places ------------------------------------------------------------------------------------------

    def _overhangs(self, slice_len: int) -> tuple[int, int]:
        """Return by how many steps slices may extend beyond start and end; UsageError if by a whole slice or more."""
        found = []
        for span in self.span:
            if span is not True and span >= slice_len:
                raise UsageError(f"span is {int(span)}, expected less than {slice_len}, the length of a slice")
            found.append(slice_len - 1 if span is True else int(span))
        return found[0], found[1]

    def _rule(self, slice_len: int) -> SliceRule:
        # Users may assign the arguments between draws. Spans are compared by identity, as True equals 1.
        asked, known = (slice_len, self.strict_length, self.anchor), self._last_rule
        if known is None or known[0] is not self.span or known[1] != asked:
            known = self._last_rule = self.span, asked, self._made_rule(slice_len)
        return known[2]

    def _made_rule(self, slice_len: int) -> SliceRule:
        left, right = self._overhangs(slice_len)
        return SliceRule(slice_len, slice_len if self.strict_length else 1, left, right, self.anchor)

    def _placed(
        self, table: TrajectoryTable, first: Numbers, length: Numbers, slice_len: int
    ) -> tuple[Numbers, Numbers | None]:
        """Draw a slice in each of the trajectories with these first steps and lengths; see `SliceRule.slices`."""
        rule, place = self._rule(slice_len), np.zeros_like(first)
        if self.anchor == "any":
            place = scaled(self._places(len(first), table.capacity), rule.starts(length))
        return rule.slices(first, length, place)

    def _assemble(
        self,
        storage: Storage,
        table: TrajectoryTable,
        lane: Numbers,
        start: Numbers,
        taken: Numbers | None,
        slice_len: int,
    ) -> tuple[tuple[torch.Tensor, ...], dict[str, Any]]:
        """Return index and info of slices that begin at steps `start` and have `taken` steps (None: all are whole)."""
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
        masked = self.batched or (self.pad_output and (self.joined or self._may_pad(table, slice_len)))
        return self._indexed(storage, parts, ends, masked=masked)

    def _may_pad(self, table: TrajectoryTable, slice_len: int) -> bool:
        """Return whether a slice of the present trajectories can be short."""
        rule = self._rule(slice_len)
        return bool(rule.left or rule.right) or table.eligible(SliceRule(slice_len, slice_len)).count < table.count

    def _indexed(
        self, storage: Storage, parts: Sequence[Numbers], ends: SliceEnds, *, masked: bool
    ) -> tuple[tuple[torch.Tensor, ...], dict[str, Any]]:
        """Return the index made of these coordinates, one array for each dimension, and the info of the slices."""
        index = tuple(map(torch.from_numpy, parts))
        info = self._marks.of(storage, index, ends)
        if masked:
            info["collector", "mask"] = ends.real.clone()
        return index, info

    def _whole(self, count: int, slice_len: int) -> SliceEnds:
        """Return the marks of whole slices; they are cached by batch size."""
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
        raise UsageError(f"span is {span!r}, expected a bool, a number of steps, or a pair of these")
    return pair


def starts_are_single(rows: int) -> bool:
    """Return whether starts in a ring of this many rows are drawn in float32, which has 2^24 different fractions."""
    return rows < 2**24


class SliceEnds(NamedTuple):
    """Which steps of slices are first, last and real (not padding): bool `[slices, steps]`, or flattened.

    `last` has a trailing dimension of size 1, like the flags of TED. `place` numbers the steps of one slice.
    """

    first: torch.Tensor
    last: torch.Tensor
    real: torch.Tensor
    place: Numbers

    @classmethod
    def of(cls, taken: Numbers, slice_len: int, *, flat: bool) -> SliceEnds:
        """Mark slices of `slice_len` steps, the first `taken`, `[slices]`, of which are real; `flat` flattens them."""
        place = np.arange(slice_len)
        shape = (len(taken) * slice_len,) if flat else (len(taken), slice_len)
        first = np.broadcast_to(place == 0, (len(taken), slice_len)).reshape(shape)
        last = (place == taken[:, None] - 1).reshape(*shape, 1)
        real = (place < taken[:, None]).reshape(shape)
        return cls(torch.tensor(first), torch.from_numpy(last), torch.from_numpy(real), place)

    @classmethod
    def whole(cls, size: torch.Size, slice_len: int) -> SliceEnds:
        """Mark whole slices, one after another, in a batch of this size."""
        ends = cls.of(np.full(size.numel() // slice_len, slice_len), slice_len, flat=True)
        return cls(ends.first.view(size), ends.last.view(*size, 1), ends.real.view(size), ends.place)

    def kept(self) -> SliceEnds:
        """Return the marks of the real steps, flattened."""
        return SliceEnds(self.first[self.real], self.last[self.real], self.real[self.real], self.place)


class SliceMarks:
    """Makes the flags in the info of slices: `is_init`, `truncated`, and `done` and `terminated` next to it."""

    def __init__(self, truncated: Key | None, init: Key | None = ("is_init",)) -> None:
        self.given = truncated, init
        siblings = () if truncated is None else ((*truncated[:-1], "done"), (*truncated[:-1], "terminated"))
        self._keys: tuple[Key | None, ...] = (init, *siblings)
        flags = () if truncated is None else (truncated, *siblings)
        self._init, *self._names = [key[0] if key and len(key) == 1 else key for key in (init, *flags)]
        self._known: tuple[weakref.ref[Any], list[torch.Tensor | None]] | None = None
        self.keeps_rows = False
        """Whether whole rows are read, and kept as `rows`, instead of single entries."""
        self.rows: Any = None

    @contextlib.contextmanager
    def reading(self) -> Iterator[SliceMarks]:
        """Keep the rows that are read inside the context."""
        self.keeps_rows = True
        try:
            yield self
        finally:
            self.keeps_rows, self.rows = False, None

    def of(self, storage: Storage, index: tuple[torch.Tensor, ...], ends: SliceEnds) -> dict[Any, torch.Tensor]:
        """Return the flags of the steps at an index; `ends` marks their slices."""
        return self._marked(self._stored(storage, index), ends)

    def of_rows(self, rows: Any, ends: SliceEnds) -> dict[Any, torch.Tensor]:
        """Return the flags of steps that were read already: a tensordict in the shape of the marks."""
        return self._marked(self._shown(rows, self._keys), ends)

    def _marked(self, found: Sequence[torch.Tensor | None], ends: SliceEnds) -> dict[Any, torch.Tensor]:
        info: dict[Any, torch.Tensor] = {}
        if found[0] is not None:
            info[self._init] = found[0] | _like(ends.first, found[0])
        if self._names:
            last = ends.last
            done, terminated = (  # the info has a trailing dimension of size 1, even if they are stored without it
                flags.unsqueeze(-1) if flags is not None and flags.dim() < last.dim() else flags for flags in found[1:]
            )
            info[self._names[0]] = last.clone()
            info[self._names[1]] = last.clone() if done is None else done | _like(last, done)
            info[self._names[2]] = torch.zeros_like(last) if terminated is None else terminated
        return info

    def _stored(self, storage: Storage, index: tuple[torch.Tensor, ...]) -> list[torch.Tensor | None]:
        """Read the flags of the steps at an index; None for flags that are not stored."""
        if not has_columns(storage):
            return self._shown(storage.get(index if len(index) > 1 else index[0]), self._keys)
        columns = storage.columns
        if self._known is None or self._known[0]() is not columns:
            self._known = (
                weakref.ref(columns),
                [None if key is None else stored_entry(storage, key) for key in self._keys],
            )
        leaves = self._known[1]
        if self.keeps_rows:
            there = [None if leaf is None else key for key, leaf in zip(self._keys, leaves, strict=True)]
            return self._shown(storage.get(index if len(index) > 1 else index[0]), there)
        return [None if leaf is None else _gathered(leaf, index) for leaf in leaves]

    def _shown(self, rows: Any, keys: Sequence[Key | None]) -> list[torch.Tensor | None]:
        """Return the flags in these rows; keep the rows if `keeps_rows`."""
        if self.keeps_rows:
            self.rows = rows
        if isinstance(rows, list):
            rows = torch.stack(rows)
        found = [None if key is None else entry_of(rows, key) for key in keys]
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
    """Give flags, one per step, as many dimensions as `values`, and move them to the same device."""
    if flags.dim() < values.dim():
        flags = flags.view(*flags.shape, *(1,) * (values.dim() - flags.dim()))
    return flags if values.is_cpu else flags.to(values.device)


_NOTHING = np.empty(0, np.int64)


@dataclass(frozen=True, slots=True)
class SavedEpoch:
    """An epoch as a checkpoint holds it, with trajectories numbered as by `Runs.by_place`.

    `left` has the trajectories left, in order; `waiting` those that are still too short; `count` is the number of all.
    `rotation` is the rotation of the ring since then, see `Runs.by_place`.
    """

    left: Numbers
    waiting: Numbers
    count: int
    rotation: tuple[int, int] = (0, 0)


class _Seen(NamedTuple):
    """The trajectory table, its state and the write log when an epoch was last updated."""

    table: TrajectoryTable
    version: int
    newest: int
    capacity: int
    written: Written
    minimum: int

    def moved_by(self, now: _Seen) -> int | None:
        """Return by how much absolute step numbers have shifted, as a rebuilt table numbers steps anew.

        None if the ring was replaced by another one.
        """
        added = now.written.rows - self.written.rows
        continues = (self.written.next_row + added) % self.capacity == now.written.next_row % self.capacity
        return now.newest - self.newest - added if now.capacity == self.capacity and continues else None


class TrajectoryEpoch:
    """The order of the trajectories that are left in an epoch.

    Each trajectory is in one of three states. It is *left* until it is drawn. It is *drawn*, however much it grows
    afterwards. Or it is *waiting*, because it is still too short; once it is long enough, it is inserted at a random
    position among those left. New trajectories are waiting at first, so that they are drawn in the running epoch. A
    trajectory whose rows have all been overwritten is removed.
    """

    def __init__(self, shuffle: bool) -> None:
        self.shuffle = shuffle
        self.forget()

    def forget(self) -> None:
        """Return to the state before the first epoch."""
        self.started = False
        self._runs = Runs(_NOTHING, _NOTHING, _NOTHING)
        self._left: Numbers = _NOTHING  # never edited in place: saved states refer to it
        self._waiting = np.empty(0, np.bool_)
        self._eligible = np.empty(0, np.bool_)
        self._seen: _Seen | None = None
        self._loaded: SavedEpoch | None = None

    def __len__(self) -> int:
        """Return the number of trajectories left."""
        return len(self._left) if self._loaded is None else len(self._loaded.left)

    def begin(self, generator: torch.Generator | None) -> None:
        """Start an epoch of all trajectories that are long enough."""
        order = self._runs.by_place(self._seen.capacity) if self.shuffle and self._seen else np.arange(len(self._runs))
        eligible = order[self._eligible[order]]
        self._left = eligible[permutation(len(eligible), generator)] if self.shuffle else eligible
        self._waiting = ~self._eligible
        self.started = True

    def catch_up(
        self, table: TrajectoryTable, written: Written, minimum: int, generator: torch.Generator | None
    ) -> None:
        """Follow the changes of a trajectory table; trajectories shorter than `minimum` wait."""
        now = _Seen(table, table.version, table.newest, table.capacity, written, minimum)
        if now == self._seen:
            return
        if self._loaded is not None:
            self._resume(table, self._loaded)
        elif self._only_ends_moved(table, now):
            self._seen = now
            return
        else:
            self._follow(table, now)
        self._seen = now
        self._eligible = self._runs.length >= minimum
        if not self.started:
            return
        short = ~self._eligible[self._left]
        if short.any():  # trajectories that became too short, because they were partly overwritten
            self._waiting[self._left[short]] = True
            self._left = self._left[~short]
        late = np.flatnonzero(self._waiting & self._eligible)
        if len(late):
            self._waiting[late] = False
            if self.shuffle:
                self._left = inserted_at_random(self._left, late, generator)
            else:
                self._left = np.concatenate([self._left, late])

    def _only_ends_moved(self, table: TrajectoryTable, now: _Seen) -> bool:
        """Try the cheap update: move the first start and the last end of each lane.

        It is possible if no trajectory was added or removed, and none became or ceased to be eligible. With it, the
        cost of most writes does not depend on the number of trajectories.

        Returns:
            Whether it was possible.
        """
        seen, runs, lanes = self._seen, self._runs, np.arange(table.lanes)
        if seen is None or seen.table is not table or seen.minimum != now.minimum or not len(runs):
            return False
        if table.changes(seen.version) is None:
            return False
        first = np.searchsorted(runs.lane, lanes)
        last = np.append(first[1:], len(runs)) - 1
        if seen.newest < table.oldest or (runs.last[first] < table.oldest).any():
            return False
        if (table.reach(np.full_like(lanes, seen.newest), lanes) <= now.newest - seen.newest).any():
            return False
        runs.last[last] = now.newest
        runs.first[first] = np.maximum(runs.first[first], table.oldest)
        ends = np.concatenate([first, last])
        long = runs.last[ends] - runs.first[ends] + 1 >= now.minimum
        return bool((self._eligible[ends] == long).all())

    def _follow(self, table: TrajectoryTable, now: _Seen) -> None:
        """Find the trajectories left and drawn among the present ones."""
        runs, steps = Runs.of(table), self._seen.moved_by(now) if self._seen is not None else 0
        if steps is None:  # the ring was replaced since the last update
            self.started, self._runs = False, runs
            self._left, self._waiting = _NOTHING, np.ones(len(runs), np.bool_)
            return
        found = self._runs.moved(steps).found_in(runs)
        drawn = np.ones(len(self._runs), np.bool_)
        drawn[self._left] = False
        drawn &= ~self._waiting
        waiting = np.ones(len(runs), np.bool_)
        waiting[found[drawn & (found >= 0)]] = False
        left = found[self._left]
        left = left[left >= 0]
        left = left[waiting[left]]  # if trajectories were merged and one of them was drawn, the result counts as drawn
        left = left[np.sort(np.unique(left, return_index=True)[1])]
        waiting[left] = False
        self._runs, self._left, self._waiting = runs, left, waiting

    def _resume(self, table: TrajectoryTable, saved: SavedEpoch) -> None:
        """Continue a saved epoch, if the number of trajectories is unchanged."""
        self._loaded, self._runs = None, Runs.of(table)
        self._left, self._waiting = _NOTHING, np.ones(len(self._runs), np.bool_)
        self.started = len(self._runs) == saved.count
        if self.started:
            order = self._runs.by_place(table.capacity, saved.rotation)
            self._left, waiting = order[saved.left], order[saved.waiting]
            self._waiting[:] = False
            self._waiting[waiting] = True

    def take(self, count: int) -> tuple[Numbers, Numbers, Numbers]:
        """Remove the next trajectories from the epoch; return their lanes, first steps and lengths."""
        chosen, self._left = self._left[:count], self._left[count:]
        runs = self._runs
        return runs.lane[chosen], runs.first[chosen], runs.last[chosen] - runs.first[chosen] + 1

    @contextlib.contextmanager
    def whole_or_again(self) -> Iterator[None]:
        """If the block fails, restore the present state, so that the trajectories it took are drawn again."""
        before = self._left, self._waiting  # `begin` and `take` replace these arrays, never edit them
        try:
            yield
        except BaseException:
            self._left, self._waiting = before
            raise

    @property
    def eligible(self) -> int:
        """The number of trajectories in a whole epoch."""
        return int(self._eligible.sum())

    # State -----------------------------------------------------------------------------------------

    def saved(self, table: TrajectoryTable | None, written: Written | None) -> SavedEpoch | None:
        """Return the epoch for a checkpoint, numbered by the present rows; None before the first epoch."""
        if self._loaded is not None or not self.started or table is None or written is None:
            return self._loaded
        return copy.copy(self).followed(table, written)  # on a copy: saving must not change the next draw

    def followed(self, table: TrajectoryTable, written: Written) -> SavedEpoch | None:
        """Follow the changes of a table, and return the epoch in its trajectory numbers; see `saved`."""
        self._follow(table, _Seen(table, table.version, table.newest, table.capacity, written, 1))
        if not self.started:
            return None
        place = np.empty(len(self._runs), np.int64)
        place[self._runs.by_place(table.capacity)] = np.arange(len(place))
        return SavedEpoch(place[self._left], np.sort(place[self._waiting]), len(place))

    def rotate(self, row: int, rows: int) -> None:
        """Rotate a loaded epoch together with its ring of `rows` rows, of which `row` became row 0."""
        if self._loaded is not None:
            self._loaded = replace(self._loaded, rotation=(row, rows))

    def load(self, saved: SavedEpoch | None) -> None:
        """Continue a saved epoch with the next draw."""
        self.forget()
        self._loaded = saved


@counterpart
class SliceSamplerWithoutReplacement(EpochSampler, SliceSampler):
    """Draws one slice of each trajectory in every epoch.

    Only the last batch of an epoch has fewer slices (in TorchRL also batches with short trajectories). A trajectory
    that starts during an epoch is drawn in it, one that keeps growing is drawn once, and one that was overwritten is
    not drawn. `ran_out` is True from the last batch of an epoch until the next batch.

    Checkpoints hold the order of the trajectories that are left, numbered as in TorchRL: lane by lane, in the order of
    the rows of their last steps.

    Args:
        strict_length: whether only trajectories of at least the slice length take part; otherwise short ones are taken
            whole.
        drop_last: whether to drop an incomplete batch at the end of an epoch.
        shuffle: whether trajectories come in random order; otherwise in the order of time.
        **options: the other arguments of `SliceSampler`, whose output is the same.

    Raises:
        SchemaError: (a RuntimeError) from `sample`: no trajectory is long enough.
        UsageError: (a ValueError) from `sample`: with `drop_last`, there are fewer trajectories than slices in a batch.

    >>> import torch
    >>> from tensordict import TensorDict
    >>> from rbtool import TensorStorage
    >>> storage = TensorStorage(TensorDict({"episode": torch.tensor([0, 0, 0, 0, 1, 2, 2, 2])}, [8]))
    >>> sampler = SliceSamplerWithoutReplacement(slice_len=2, strict_length=False, shuffle=False, anchor="start")
    >>> [sampler.sample(storage, 4)[0][0].tolist() for _ in range(3)]
    [[0, 1, 4], [5, 6], [0, 1, 4]]
    """

    def __init__(
        self,
        *,
        num_slices: int | None = None,
        slice_len: int | None = None,
        drop_last: bool = False,
        end_key: NestedKey | None = None,
        end_keys: Sequence[NestedKey] | None = None,
        traj_key: NestedKey | None = None,
        ends: torch.Tensor | None = None,
        trajectories: torch.Tensor | None = None,
        truncated_key: NestedKey | None = ("next", "truncated"),
        init_key: NestedKey | None = "is_init",
        strict_length: bool = True,
        shuffle: bool = True,
        compile: bool | dict[str, Any] = False,
        use_gpu: bool | torch.device | str = False,
        pad_output: bool = False,
        anchor: Anchor = "any",
        batched: bool = False,
    ) -> None:
        super().__init__(
            num_slices=num_slices,
            slice_len=slice_len,
            end_key=end_key,
            end_keys=end_keys,
            traj_key=traj_key,
            ends=ends,
            trajectories=trajectories,
            cache_values=True,
            truncated_key=truncated_key,
            strict_length=strict_length,
            pad_output=pad_output,
            compile=compile,
            use_gpu=use_gpu,
            anchor=anchor,
            batched=batched,
        )
        require_flags(drop_last=drop_last, shuffle=shuffle)
        self.init_key = init_key
        self.drop_last = drop_last
        self._epoch = TrajectoryEpoch(shuffle)
        self.reset()

    draw_rows = SliceSampler.draw_rows

    def reset(self) -> None:
        """Forget the epoch and the trajectory table."""
        super().reset()
        self._epoch.forget()
        self._followed: weakref.ref[Storage] | None = None
        self._slices = 0
        self._ran_out = False

    @property
    def shuffle(self) -> bool:
        """Whether the order is random."""
        return self._epoch.shuffle

    def draw(self, storage: Storage, batch_size: int) -> tuple[Index, dict[str, Any]]:
        """Draw slices of the next trajectories of the epoch, or of those that are left."""
        count, slice_len = self._measure(batch_size)
        table, epoch = self.trajectories(storage), self._epoch
        if self._followed is not None and self._followed() is not storage:
            epoch.forget()  # it is an epoch of another storage
        epoch.catch_up(table, storage.log.now, self._rule(slice_len).minimum, self.generator)
        self._followed = weakref.ref(storage)
        fewest = count if self.drop_last else 1
        if epoch.eligible < fewest:
            self._refuse(table, slice_len, count)
        if not epoch.started or len(epoch) < fewest:
            epoch.begin(self.generator)
        with epoch.whole_or_again():
            lane, first, length = epoch.take(count)
            self._slices = count
            self._ran_out = len(epoch) < fewest
            if self._ran_out:
                epoch.begin(self.generator)
            start, taken = self._placed(table, first, length, slice_len)
            return self._assemble(storage, table, lane, start, taken, slice_len)

    def _refuse(self, table: TrajectoryTable, slice_len: int, count: int) -> None:
        found = self._epoch.eligible
        if not found:
            self._refuse_short(table, slice_len)
        raise UsageError(
            f"a batch has {count} slices, expected at most {found}, the number of trajectories, with drop_last=True",
            hint="ask for fewer slices, or use drop_last=False",
        )

    @property
    def remaining_batches(self) -> int:
        """How many batches, with as many slices as the last one, are left in the epoch."""
        if not self._slices:
            return sys.maxsize
        left = len(self._epoch)
        return left // self._slices if self.drop_last else -(-left // self._slices)

    def sampleable(self, storage: Storage, batch_size: int | None = None) -> int:
        """Return how many trajectories are long enough; 0 if they are too few for a batch, with `drop_last`."""
        found, count = self.epoch_size(storage, batch_size)
        return 0 if self.drop_last and found < count else found

    def epoch_size(self, storage: Storage, batch_size: int | None) -> tuple[int, int]:
        """Return how many trajectories an epoch has, and how many slices a batch has."""
        count, slice_len = self._measure_of(batch_size)
        return self.trajectories(storage).eligible(self._rule(slice_len)).count if storage.has_rows else 0, count

    def draw_numbered(self, storage: Storage, numbers: Numbers, batch_size: int) -> tuple[Index, dict[str, Any], Any]:
        """Draw a slice of each of these trajectories, numbered in the order of time, lane by lane."""
        _, slice_len = self._measure(batch_size)
        table = self.trajectories(storage)
        lane, first, length = table.eligible(self._rule(slice_len)).by_number(numbers)
        with self._marks.reading() as marks:
            start, taken = self._placed(table, first, length, slice_len)
            return *self._assemble(storage, table, lane, start, taken, slice_len), marks.rows

    def on_rotate(self, row: int, storage: Storage) -> None:
        """Rotate a loaded epoch with the rows."""
        self._epoch.rotate(row, storage.shape[0])

    # State -----------------------------------------------------------------------------------------

    def _saved(self) -> SavedEpoch | None:
        """Return the epoch for the present rows."""
        storage = None if self._followed is None else self._followed()
        if storage is None or not len(storage):
            return self._epoch.saved(None, None)
        return self._epoch.saved(self.trajectories(storage), storage.log.now)

    def save_state(self) -> dict[str, Any]:
        """Return the rest of the epoch and the arguments, under TorchRL's names and two of our own.

        `_sample_list` holds the trajectories left, int64, or None before the first draw; `_waiting` those that are
        still too short; `len_storage` is the number of all trajectories.
        """
        saved = self._saved()
        waiting = None if saved is None or not len(saved.waiting) else torch.from_numpy(saved.waiting)
        return {
            "len_storage": 0 if saved is None else saved.count,
            "_sample_list": None if saved is None else torch.from_numpy(saved.left),
            "drop_last": self.drop_last,
            "_ran_out": self._ran_out,
            "shuffle": self.shuffle,
            "_slices": self._slices,
            "_waiting": waiting,
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Load a state of this class or TorchRL's; SchemaError for another sampler's state.

        If the next draw finds other trajectories, a new epoch starts.
        """
        self.require_state(state)
        count, left = int(state["len_storage"]), state["_sample_list"]
        saved = None
        if left is not None:
            waiting = state.get("_waiting")
            late = np.empty(0, np.int64) if waiting is None else _checked(waiting, count)
            saved = SavedEpoch(_checked(left, count), late, count)
            if len(np.unique([*saved.left, *late])) < len(saved.left) + len(late):
                raise SchemaError("a trajectory occurs twice in _sample_list and _waiting")
        self.reset()
        self._epoch.load(saved)
        self._epoch.shuffle = bool(state.get("shuffle", self.shuffle))
        self.drop_last, self._ran_out = bool(state["drop_last"]), bool(state["_ran_out"])
        self._slices = int(state.get("_slices", 0))

    def __getstate__(self) -> dict[str, Any]:
        epoch = TrajectoryEpoch(self.shuffle)
        epoch.load(self._saved())
        return super().__getstate__() | {"_epoch": epoch, "_followed": None}


SamplerWithoutReplacement.register(SliceSamplerWithoutReplacement)  # as in TorchRL, where it is a subclass


def _checked(numbers: Any, count: int) -> Numbers:
    if not isinstance(numbers, torch.Tensor) or numbers.dtype != torch.int64 or numbers.dim() != 1:
        raise SchemaError("the trajectories left are not an int64 vector in the state")
    if len(numbers) and not 0 <= int(numbers.min()) <= int(numbers.max()) < count:
        raise SchemaError(f"the state has trajectories beyond the {count} that it counts")
    return numbers.numpy(force=True).copy()
