"""Draws from several storages: chooses the members of a batch, draws rows in each, and makes one index of these.

`SamplerEnsemble` lets the members draw one by one. If their samplers are alike, a `JointDraw` draws from all members in
one call.
"""

from __future__ import annotations

import bisect
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeAlias, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict
from torch import from_numpy

from ..errors import SchemaError, UsageError, require_flags, require_number
from ..kernels.rows import scaled_parts
from ..kernels.slices import SliceTables
from ..kernels.trees import Forest
from ..state_folder import read_values, write_values
from ..storages.base import Storage
from ..storages.ensemble import (
    BUFFER_IDS,
    INDEX,
    SOURCE_ID,
    EnsembleKindError,
    MemberRows,
    Parts,
    StorageEnsemble,
    checked_members,
    chosen_members,
    load_members,
)
from ..storages.pytree import TensorDictNode, TensorNode
from ..torchrl_classes import counterpart
from .base import Sampler
from .prioritized import PrioritizedSampler
from .slices import SliceEnds, SliceMarks, SliceSampler, WholeSlices, starts_are_single
from .uniform import RandomSampler, fractions

_INDEX = TensorDictNode({BUFFER_IDS: TensorNode(), INDEX: TensorNode(), SOURCE_ID: TensorNode()})

BatchForm: TypeAlias = Literal["stack", "exact"]
"""The shape of batches. `stack`: `[k, batch // k]`, one row for each chosen member; `exact`: `[batch]`."""


Chances: TypeAlias = NDArray[np.float64]
Counts: TypeAlias = list[tuple[int, int]]
"""Members, each with the number of elements to draw from it."""
Info: TypeAlias = dict[Any, torch.Tensor]

_KEPT = 1 << 16
"""Divisions of batches into parts are cached until they have this many rows in total."""


_SIZE, _SAMPLEABLE = "size", "sampleable"
_STATE = "ensemble"


@counterpart
class SamplerEnsemble(Sampler):
    """The samplers of an ensemble, and the weights of its members.

    A batch of B elements consists of k parts of B / k elements. The member of each part is drawn by weight, with
    replacement. The index is a tensordict `[k]` with `"buffer_ids"`, int64 `[k]`, and `"index"`, int64 `[k, B / k]` (a
    nested tensor if a sampler returned fewer elements). Elements of storages of several dimensions are given by their
    coordinates; if members differ in their number of dimensions, missing coordinates are -1.

    The generator chooses members and rows. An ensemble has no epochs: a member without replacement starts its next
    epoch when one ends.

    Args:
        *samplers: one for each member.
        p: the weights of the members, which are normalised; None for equal weights. `"size"` weighs each member by its
            number of elements at the time of the draw, `"sampleable"` by what it can draw at that time, such as the
            number of possible slices, so that a member that has none yet is not chosen. It can be assigned during
            training.
        temperature: weights are raised to `1 / temperature`: 1 keeps them, a high value makes them equal. It can be
            assigned during training.
        sample_from_all: whether each member contributes once to every batch.
        num_buffer_sampled: the number of parts k, by default the number of members; it must divide B.
        batch: `"exact"` makes batches `[B]` of any size: a member with the share w contributes B * w elements, rounded
            up or down at random so that the mean is exact. Members with a `SliceSampler` contribute whole slices, and
            need `pad_output=True`, or `strict_length=True` and no `span`.

    Raises:
        UsageError: (a ValueError) the weights are negative, not finite, all zero or not one for each member; the
            temperature is not positive; or k does not divide the batch size.
        SchemaError: (a RuntimeError) `p` is combined with `sample_from_all`; a member with a weight has no elements; or
            a member of an exact batch may return fewer steps than asked for.
        EnsembleKindError: (a TypeError) the storage is not a `StorageEnsemble`.

    Names are TorchRL's.

    >>> from rbtool import RandomSampler, StorageEnsemble, TensorStorage
    >>> storage = StorageEnsemble(TensorStorage(torch.arange(3)), TensorStorage(torch.arange(5)))
    >>> sampler = SamplerEnsemble(RandomSampler(), RandomSampler(), p=[1, 3], batch="exact")
    >>> index, info = sampler.sample(storage, 8)
    >>> index["buffer_ids"].tolist()
    [0, 0, 1, 1, 1, 1, 1, 1]
    """

    def __init__(
        self,
        *samplers: Sampler,
        p: Sequence[float] | torch.Tensor | str | None = None,
        sample_from_all: bool = False,
        num_buffer_sampled: int | None = None,
        temperature: float = 1.0,
        batch: BatchForm = "stack",
    ) -> None:
        self.members = checked_members("SamplerEnsemble", samplers, Sampler)
        require_flags(sample_from_all=sample_from_all)
        if p is not None and sample_from_all:
            raise SchemaError("p cannot be used with sample_from_all=True, which draws each member once")
        if batch not in get_args(BatchForm):
            raise UsageError(f"batch is {batch!r}, expected 'stack' or 'exact'")
        _check_draws(num_buffer_sampled, batch)
        self.sample_from_all = sample_from_all
        self.draws = None if sample_from_all else num_buffer_sampled
        self.batch = batch
        self.p = p
        self.temperature = temperature
        self._joint: tuple[Any, Any, JointDraw | None] | None = None
        """The members' samplers and storages, and the joint draw that was made for them."""
        for number in range(len(self.members)):
            self.unit_of_member(number)

    @property
    def members(self) -> tuple[Sampler, ...]:
        """The samplers of the members."""
        return self._members

    @members.setter
    def members(self, samplers: tuple[Sampler, ...]) -> None:
        self._members = samplers
        for sampler in samplers:
            sampler.joined = True

    @property
    def num_buffer_sampled(self) -> int:
        """The number of parts of a batch."""
        return len(self.members) if self.draws is None else self.draws

    # Weights ---------------------------------------------------------------------------------------

    @property
    def p(self) -> Any:
        """The weights of the members: a copy, float64 `[members]` with sum 1; `"size"` or `"sampleable"`; or None for
        equal weights.
        """
        return self._p.clone() if isinstance(self._p, torch.Tensor) else self._p

    @p.setter
    def p(self, weights: Any) -> None:
        if weights is not None and self.sample_from_all:
            raise SchemaError("weights cannot be used with sample_from_all=True, which draws each member once")
        self._p = weights if weights is None or _is_word(weights) else normalised(weights, len(self.members))
        self._known: tuple[list[int], list[float]] = ([], [])

    @property
    def temperature(self) -> float:
        """The weights are raised to the power `1 / temperature`."""
        return self._temperature

    @temperature.setter
    def temperature(self, value: float) -> None:
        try:
            number = math.nan if isinstance(value, bool) else float(value)
        except (TypeError, ValueError):
            number = math.nan
        if not (number > 0 and math.isfinite(number)):
            raise UsageError(f"temperature is {value!r}, expected a number above 0")
        self._temperature = number
        self._known = ([], [])

    def shares(self, sizes: Sequence[int]) -> NDArray[np.float64]:
        """Return the probability of each member, float64 `[members]`, given their `sizes`.

        Raises:
            SchemaError: (a RuntimeError) a member without elements has a weight.
        """
        if self._p is None:
            weights = np.ones(len(self.members))
        elif _is_word(self._p):
            weights = np.array(sizes, np.float64)
        else:
            weights = self._p.numpy().copy()
        empty = [number for number, size in enumerate(sizes) if not size and weights[number] > 0]
        if empty or not weights.any():
            without = empty or range(len(sizes))
            named = ", ".join(map(str, without))
            which = f"member {named} has" if len(without) == 1 else f"members {named} have"
            what = "nothing that can be drawn yet" if self.by_sampleable else "no elements"
            raise SchemaError(
                f"Cannot sample from an empty storage: {which} {what}",
                hint="write to it first, or set its weight to 0",
            )
        if self._temperature != 1.0:
            positive = weights > 0
            logs = np.log(weights[positive]) / self._temperature
            weights[positive] = np.exp(logs - logs.max())
        return np.asarray(weights / weights.sum())

    @property
    def by_sampleable(self) -> bool:
        """Whether members are weighted by what they can draw."""
        return isinstance(self._p, str) and self._p == _SAMPLEABLE

    def sizes(self, storage: StorageEnsemble, batch_size: int) -> Sequence[int]:
        """Return how many elements each member has, or with `p="sampleable"` how many it can draw from."""
        return self._ready(storage, batch_size) if self.by_sampleable else storage.sizes

    def _ready(self, storage: StorageEnsemble, batch_size: int | None) -> list[int]:
        """Return from how many elements or slices each member draws its part of a batch; 0 if it has too few."""
        each = None
        if batch_size is not None and self.batch == "stack":
            each = batch_size // self._check_size(batch_size, self.unit)
        return [one.sampleable(leaf, each) for one, leaf in zip(self.members, storage.members, strict=True)]

    def sampleable(self, storage: Storage, batch_size: int | None = None) -> int:
        """Return the sum over the members; 0 if a member that may be chosen has too few for its part of a batch."""
        self.check_storage(storage)
        assert isinstance(storage, StorageEnsemble)
        ready = self._ready(storage, batch_size)
        if self.by_sampleable:
            return sum(ready)
        try:
            chosen = self.shares(storage.sizes) > 0
        except SchemaError:  # a member with a weight is empty
            return 0
        return sum(ready) if np.array(ready)[chosen].all() else 0

    def counts(self, sizes: Sequence[int], batch_size: int) -> Counts:
        """Draw which members contribute to a batch, and how many elements each contributes."""
        unit = self.unit
        chances = fractions(self._check_size(batch_size, unit), self.generator)
        return self._counts(sizes, batch_size, unit, chances.tolist())

    def _check_size(self, batch_size: int, unit: int) -> int:
        """Return how many random numbers choose the members of a batch; UsageError for an impossible batch size."""
        if batch_size < 1:
            raise UsageError(f"batch_size is {batch_size}, expected a number from 1")
        if self.batch == "exact":
            if batch_size % unit:
                raise UsageError(f"batch_size is {batch_size}, expected a multiple of {unit} for slices")
            return 1
        draws = self.num_buffer_sampled
        if batch_size % draws:
            raise UsageError(
                f"batch_size is {batch_size}, expected a multiple of {draws}",
                hint='batch="exact" makes batches of any size',
            )
        return draws

    def _counts(self, sizes: Sequence[int], batch_size: int, unit: int, chances: Sequence[float]) -> Counts:
        ends = self._cumulated(sizes)
        if self.batch == "exact":
            return _exact_counts(ends, batch_size, unit, chances[0])
        each = batch_size // len(chances)
        if self.sample_from_all:
            return [(member, each) for member in range(len(self.members))]
        return [(bisect.bisect_right(ends, chance), each) for chance in chances]

    def _cumulated(self, sizes: Sequence[int]) -> list[float]:
        """Return the cumulative shares. They are exactly 1.0 from the last member with a share on."""
        known, ends = self._known
        if known != sizes:
            shares = self.shares(sizes)
            ends = np.cumsum(shares).tolist()
            last = int(np.flatnonzero(shares)[-1])
            ends[last:] = [1.0] * (len(ends) - last)
            self._known = list(sizes), ends
        return ends

    def joint(self, storage: StorageEnsemble) -> JointDraw | None:
        """Return the joint draw of all members; None if each has to draw by itself."""
        known = self._joint
        if known is None or known[0] is not self.members or known[1] is not storage.members:
            joint = joint_draw(self.members, storage.members)
            known = self._joint = self.members, storage.members, joint
        return known[2] if known[2] is not None and known[2].possible else None

    def draw_jointly(
        self, joint: JointDraw, sizes: Sequence[int], batch_size: int, counts: Counts | None = None
    ) -> tuple[Counts, tuple[MemberRows, Info] | None]:
        """Choose members, and draw from all of them in one call.

        If all members use the generator of the ensemble, it is called once for all random numbers. Members with
        generators of their own draw the same elements as they would draw by themselves.

        Args:
            joint: the joint draw.
            sizes: how many elements each member has.
            batch_size: how many elements to draw.
            counts: how many elements each member contributes, if that was chosen already.

        Returns:
            How many elements each member contributes; and rows and info, or None if the samplers have to draw one by
            one.
        """
        generator, unit = self.generator, joint.unit
        first = self._check_size(batch_size, unit) if counts is None else 0
        together = joint.shares(generator)
        chances = fractions(first + (joint.chances_of(batch_size) if together else 0), generator)
        if counts is None:
            counts = self._counts(sizes, batch_size, unit, chances[:first].tolist())
        return counts, joint.draw(counts, sizes, chances[first:] if together else None)

    @property
    def unit(self) -> int:
        """The number of which each member of an exact batch contributes a multiple, so that slices are whole."""
        return math.lcm(*[self.unit_of_member(number) for number in range(len(self.members))])

    def unit_of_member(self, number: int) -> int:
        """Return the number of which a member contributes a multiple.

        Raises:
            SchemaError: (a RuntimeError) the member of an exact batch may return fewer steps than asked for, depending
                on the trajectories it draws.
        """
        member = self.members[number]
        if self.batch == "exact" and _shortens(member):
            raise SchemaError(
                f"member {number} has a {type(member).__name__} that may return fewer steps, but the parts of an exact "
                "batch have exact lengths",
                hint="set its slice_len, and either pad_output=True, or strict_length=True and no span",
            )
        return unit_of(member)

    # Draws -----------------------------------------------------------------------------------------

    def check_storage(self, storage: Storage) -> None:
        """Raise EnsembleKindError (a TypeError) unless the storage is an ensemble with as many members."""
        if not isinstance(storage, StorageEnsemble):
            raise EnsembleKindError(f"a SamplerEnsemble needs a StorageEnsemble, found a {type(storage).__name__}")
        if len(storage) != len(self.members):
            raise SchemaError(f"there are {len(self.members)} samplers, expected {len(storage)}: one for each storage")
        for sampler, member in zip(self.members, storage.members, strict=True):
            sampler.check_storage(member)

    def check_batch_size(self, batch_size: int) -> None:
        """Raise UsageError if the batch size is not divisible by the number of parts; in exact batches, by slices."""
        self._check_size(batch_size, self.unit)

    def draw(self, storage: Storage, batch_size: int) -> tuple[Any, dict[str, Any]]:
        """Choose members and draw from them; return the index (see the class) and the entries of all members' info."""
        self.check_storage(storage)
        assert isinstance(storage, StorageEnsemble)
        joint, counts = self.joint(storage), None
        if joint is not None and not joint.reads_rows:
            counts, drawn = self.draw_jointly(joint, self.sizes(storage, batch_size), batch_size)
            if drawn is not None:
                rows, info = drawn
                index = index_of(rows, storage, self.batch)
                return index, {key: value.view(index.get(INDEX).shape) for key, value in info.items()}
        parts = []
        for member, count in self.counts(self.sizes(storage, batch_size), batch_size) if counts is None else counts:
            sampler, leaf = self.members[member], storage.members[member]
            unit = self.unit_of_member(member)
            parts += draw_fully(member, count, self.batch, unit, partial(sampler.sample, leaf))
        return compose(parts, storage, self.batch)

    def _chosen(self, index: Any) -> Any:
        chosen = chosen_members(index, len(self))
        if isinstance(chosen, int):
            return self.members[chosen]
        return self if chosen == list(range(len(self))) else self.part(chosen)

    def part(self, chosen: Sequence[int]) -> SamplerEnsemble:
        """Return an ensemble of some members with their weights, and as many parts as `num_buffer_sampled` says."""
        some_weights = self._p if self._p is None or _is_word(self._p) else self._p[list(chosen)]
        found = type(self)(
            *(self.members[member] for member in chosen),
            p=some_weights,
            sample_from_all=self.sample_from_all,
            num_buffer_sampled=self.draws,
            temperature=self._temperature,
            batch=self.batch,
        )
        found.generator = self.generator
        return found

    def __getitem__(self, index: Any) -> Any:
        """Return a member, or an ensemble of some members with their weights."""
        return self._chosen(index)

    def __len__(self) -> int:
        return len(self.members)

    # State -----------------------------------------------------------------------------------------

    def reset(self) -> None:
        """Let all members forget their elements."""
        for member in self.members:
            member.empty()

    def save_state(self) -> dict[str, Any]:
        """Return the state of each member by number, and the weights."""
        states = {str(number): member.state_dict() for number, member in enumerate(self.members)}
        return {**states, **self.weights_state()}

    def weights_state(self) -> dict[str, Any]:
        """Return `p`, float64 `[members]` or None, `by_size`, `by_sampleable` and `temperature`."""
        word = self._p if _is_word(self._p) else None
        words = {"by_size": word == _SIZE, "by_sampleable": word == _SAMPLEABLE}
        return {"p": None if word else self.p, **words, "temperature": self._temperature}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Load a state. If a member refuses its part, or the number of members differs, nothing is changed."""
        load_members(self.members, state)
        self.load_weights(state)

    def load_weights(self, state: Mapping[str, Any]) -> None:
        """Load what `weights_state` returned; a state without weights, such as TorchRL's, leaves them as they are."""
        if "temperature" in state:
            self.temperature = state["temperature"]
            self.p = _SIZE if state["by_size"] else _SAMPLEABLE if state.get("by_sampleable") else state["p"]

    def write_state(self, folder: Path, state: Mapping[str, Any]) -> None:
        """Write each member's state to a folder with its number, and the weights to `ensemble`."""
        for number, member in enumerate(self.members):
            member.dumps(folder / str(number))
        write_values(folder / _STATE, {name: state[name] for name in self.weights_state()})

    def read_weights(self, folder: Path) -> dict[str, Any]:
        """Read the weights that `write_state` wrote; empty if there are none."""
        return read_values(folder / _STATE) if (folder / _STATE).is_dir() else {}

    def read_state(self, folder: Path) -> dict[str, Any]:
        """Read what `write_state` wrote."""
        states: dict[str, Any] = {
            str(number): member.read_state(folder / str(number)) for number, member in enumerate(self.members)
        }
        return states | self.read_weights(folder)

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_joint": None}

    def __repr__(self) -> str:
        names = ", ".join(map(repr, self.members))
        return f"{type(self).__name__}(samplers=({names}))"


def _exact_counts(ends: Sequence[float], batch_size: int, unit: int, offset: float) -> Counts:
    """Round the members' shares up or down at random, so that the sum and all means are exact (systematic sampling).

    The shares are intervals on a line from 0 to `batch_size`. Grid points at distance 1, with a common random offset,
    fall into the intervals, and each member contributes as many elements as there are points in its interval:

        shares      |--- 2.4 ---|--- 2.4 ---|- 1.2 -|
        points       ^    ^    ^    ^    ^    ^               offset 0.7: counts 3, 2, 1
    """
    start, units, found = 0, batch_size // unit, []
    for member, end in enumerate(ends):
        stop = units if end == 1.0 else min(int(end * units + offset), units)
        if stop > start:
            found.append((member, (stop - start) * unit))
        start = stop
    return found


def unit_of(sampler: Sampler) -> int:
    """Return the number that divides all batch sizes of this sampler."""
    if type(sampler) is RandomSampler:
        return 1
    if isinstance(sampler, SamplerEnsemble):
        whole = sampler.unit
        if sampler.batch == "exact":
            return whole
        return whole * sampler.num_buffer_sampled
    return int(getattr(sampler, "slice_len", None) or getattr(sampler, "num_slices", None) or 1)


def _shortens(sampler: Sampler) -> bool:
    """Return whether a sampler may return fewer steps than requested, so that the rest is not a number of slices."""
    if isinstance(sampler, SamplerEnsemble):
        return any(map(_shortens, sampler.members))
    if getattr(sampler, "num_slices", None) and sampler.has_epochs and not getattr(sampler, "drop_last", False):
        return True  # the last batch of an epoch has fewer slices, and the rest may not be divisible by `num_slices`
    if getattr(sampler, "pad_output", False) or getattr(sampler, "batched", False):
        return False
    return not getattr(sampler, "strict_length", True) or any(getattr(sampler, "span", ()))


def _is_word(weights: Any) -> bool:
    return isinstance(weights, str) and weights in (_SIZE, _SAMPLEABLE)


def _check_draws(draws: Any, form: BatchForm) -> None:
    if draws is None:
        return
    require_number("num_buffer_sampled", draws, 1)
    if form == "exact":
        raise UsageError(
            f'num_buffer_sampled cannot be used with batch="exact", which draws from all members; it is {draws}'
        )


def normalised(weights: Any, count: int) -> torch.Tensor:
    """Return weights as float64 `[count]` with sum 1.

    Raises:
        UsageError: (a ValueError) there are not `count` weights, or they are negative, not finite or all zero.
    """
    try:
        found = torch.as_tensor(weights, dtype=torch.float64).detach().cpu().clone()
    except (TypeError, ValueError, RuntimeError) as error:
        raise UsageError(f"p is {weights!r}, expected one weight for each member") from error
    if found.shape != (count,):
        raise UsageError(f"p has the shape {list(found.shape)}, expected [{count}]: one weight for each member")
    if not bool(found.isfinite().all()) or bool((found < 0).any()):
        raise UsageError(f"p is {found.tolist()}, expected numbers from 0")
    total = float(found.sum())
    if not total > 0:
        raise UsageError(f"p is {found.tolist()}, expected at least one weight above 0")
    return found / total


class JointDraw(ABC):
    """Draws from all members of an ensemble in one call, with the same probabilities as their samplers.

    It is made for given samplers and storages; the samplers' arguments may be assigned between draws.
    """

    reads_rows: ClassVar[bool] = False
    """Whether rows must be read as they are at the draw, so that the caller has to exclude writers until then."""

    uses_state: ClassVar[bool] = False
    """Whether the caller has to exclude other draws and updates, because the samplers' state is not thread-safe."""

    def __init__(self, samplers: Sequence[Sampler], storages: Sequence[Storage]) -> None:
        self._samplers: Sequence[Any] = samplers
        self._storages = storages
        self._known: dict[tuple[tuple[int, int], ...], Parts] = {}
        self._kept = 0

    @property
    def possible(self) -> bool:
        """Whether the present arguments of the samplers allow a joint draw."""
        return True

    @property
    def unit(self) -> int:
        """The number of which each member contributes a multiple."""
        return 1

    def chances_of(self, count: int) -> int:
        """Return how many random numbers are needed to draw `count` elements."""
        return count

    def shares(self, generator: torch.Generator | None) -> bool:
        """Return whether all samplers draw from this generator."""
        found = [sampler.generator for sampler in self._samplers]
        return found.count(generator) == len(found)

    @abstractmethod
    def draw(self, counts: Counts, sizes: Sequence[int], chances: Chances | None) -> tuple[MemberRows, Info] | None:
        """Draw elements from several members.

        Args:
            counts: how many elements each member contributes.
            sizes: how many elements each member has.
            chances: random numbers in [0, 1), as many as `chances_of` returns for the sum of all counts. If None, each
                sampler draws from its own generator.

        Returns:
            The rows, and their info, `[n, …]`. None if the samplers have to draw one by one, or if one of them has to
            refuse.
        """

    def info_of(self, rows: Any) -> Info:
        """Return the info that is computed from the rows of a draw, a tensordict, in the shape of the rows."""
        return {}

    def _parts_of(self, counts: Counts) -> Parts:
        """Return the parts of a batch; they are cached, as there are only a few ways to round the shares."""
        key = tuple(counts)
        found = self._known.get(key)
        if found is None:
            found = Parts(counts)
            self._kept += found.size
            if self._kept > _KEPT:
                self._known, self._kept = {}, found.size
            self._known[key] = found
        return found

    def _own_chances(self, counts: Counts) -> Chances:
        return np.concatenate(
            [fractions(self.chances_of(count), self._samplers[member].generator) for member, count in counts]
        )


def joint_draw(samplers: Sequence[Sampler], storages: Sequence[Storage]) -> JointDraw | None:
    """Make the joint draw for these samplers; None unless all have the same supported class, on 1-d storages."""
    kinds = {type(sampler) for sampler in samplers}
    kind = _KINDS.get(kinds.pop()) if len(kinds) == 1 else None
    return None if kind is None or any(storage.ndim != 1 for storage in storages) else kind(samplers, storages)


class UniformDraw(JointDraw):
    """Draws as `RandomSampler` does."""

    def __init__(self, samplers: Sequence[Sampler], storages: Sequence[Storage]) -> None:
        super().__init__(samplers, storages)
        self._lengths: tuple[list[int], NDArray[np.int64]] = ([], np.zeros(0, np.int64))
        self._on_cpu: list[torch.Generator | None] = []

    def draw(self, counts: Counts, sizes: Sequence[int], chances: Chances | None) -> tuple[MemberRows, Info] | None:
        """Draw elements; None if a member is empty, or has a generator of its own that is not on the CPU."""
        found = [sizes[member] for member, _ in counts]
        if 0 in found:
            return None
        parts = self._parts_of(counts)
        if chances is None:
            rows = self._own_rows(parts, found)
            return None if rows is None else (MemberRows(parts, rows), {})
        known, lengths = self._lengths
        if known != found:
            lengths = np.array(found, np.int64)
            self._lengths = found, lengths
        return MemberRows(parts, scaled_parts(chances, parts.stops, lengths)), {}

    def _own_rows(self, parts: Parts, lengths: Sequence[int]) -> NDArray[np.int64] | None:
        """Draw rows of each member with its own generator, as its sampler would; None if one is not on the CPU."""
        generators = [self._samplers[member].generator for member in parts.listed]
        if generators != self._on_cpu:
            if any(generator is not None and generator.device.type != "cpu" for generator in generators):
                return None
            self._on_cpu = generators
        for piece, generator, length in zip(parts.pieces, generators, lengths, strict=True):
            piece.random_(length, generator=generator)  # reusing memory takes half the time of allocating it
        return parts.memory.copy()


class SlicesDraw(JointDraw):
    """Draws as `SliceSampler` does, if all members draw whole slices by the same rule with the same marks."""

    reads_rows = True
    uses_state = True

    def __init__(self, samplers: Sequence[Sampler], storages: Sequence[Storage]) -> None:
        super().__init__(samplers, storages)
        self._form: WholeSlices | None = None
        self._trajectories = SliceTables(len(samplers))
        self._marks = SliceMarks(None)
        self._ends: tuple[Any, SliceEnds] | None = None

    @property
    def possible(self) -> bool:
        """Whether slices are whole, with the same rule and the same marks in all members."""
        form = self._form = self._samplers[0].whole_slices
        return form is not None and all(sampler.whole_slices == form for sampler in self._samplers[1:])

    @property
    def unit(self) -> int:
        """The steps of a slice."""
        assert self._form is not None  # callers check `possible` first
        return self._form.rule.length

    def chances_of(self, count: int) -> int:
        """Return two for each slice: one for the trajectory, one for the place in it."""
        return 2 * (count // self.unit)

    def draw(self, counts: Counts, sizes: Sequence[int], chances: Chances | None) -> tuple[MemberRows, Info] | None:
        """Draw slices; None if a count does not divide into slices, or all trajectories of a member are too short."""
        form, length = self._form, self.unit
        assert form is not None
        for member, count in counts:
            if not sizes[member] or count % length or not self._lists(member, form):
                return None
        single = False
        if chances is None:
            own = self._chances_of_members(counts, form)
            if own is None:
                return None
            chances, single = own
        parts = self._parts_of(counts)
        drawn = self._trajectories.draw(chances, parts.members, parts.stops // length, form.rule, single=single)
        return MemberRows(parts, drawn), {}

    def _chances_of_members(self, counts: Counts, form: WholeSlices) -> tuple[Chances, bool] | None:
        """Draw the random numbers that the members would draw by themselves.

        Returns:
            The numbers, and whether the ones for starts are float32. None, before anything is drawn, if members differ
            in that.
        """
        tables = [self._samplers[member].trajectories(self._storages[member]) for member, _ in counts]
        if len({starts_are_single(table.capacity) for table in tables}) > 1:
            return None
        found: list[Any] = []
        for (member, count), table in zip(counts, tables, strict=True):
            runs = table.eligible(form.rule)
            found += self._samplers[member].chances(runs, count // self.unit, table.capacity)
        return np.concatenate(found, dtype=np.float64), found[1].dtype == np.float32

    def _lists(self, member: int, form: WholeSlices) -> bool:
        """Update the table of a member's trajectories that are long enough; return whether there are any."""
        table = self._samplers[member].trajectories(self._storages[member])
        runs = table.eligible(form.rule)
        if not runs.count:
            return False
        self._trajectories.put(member, runs.table(table.capacity, by_start=form.weight == "step"))
        return True

    def info_of(self, rows: Any) -> Info:
        """Return the flags of slices: see `truncated_key` of `SliceSampler`."""
        form, size = self._form, rows.batch_size
        assert form is not None
        if self._marks.given != form.marks:
            self._marks = SliceMarks(*form.marks)
        if self._ends is None or self._ends[0] != (size, self.unit):
            self._ends = (size, self.unit), SliceEnds.whole(size, self.unit)
        return self._marks.of_rows(rows, self._ends[1])


class PrioritiesDraw(JointDraw):
    """Draws as `PrioritizedSampler` does, if all members have the same `beta` and `normalize`."""

    uses_state = True

    def __init__(self, samplers: Sequence[Sampler], storages: Sequence[Storage]) -> None:
        super().__init__(samplers, storages)
        self._forest = Forest(len(samplers))
        self._attached = [False] * len(samplers)

    @property
    def possible(self) -> bool:
        """Whether all members compute importance weights in the same way."""
        first, *others = self._samplers
        return all(sampler.beta == first.beta and sampler.normalize == first.normalize for sampler in others)

    def draw(self, counts: Counts, sizes: Sequence[int], chances: Chances | None) -> tuple[MemberRows, Info] | None:
        """Draw elements, with `"priority_weight"`; None if a member's priorities are all 0, or not on the CPU."""
        for member, _ in counts:
            size = sizes[member]
            if not size:
                return None
            tree = self._samplers[member].tree_of(self._storages[member], size if self._attached[member] else -1)
            self._attached[member] = True
            if not self._forest.plant(member, tree):
                return None
        first, parts = self._samplers[0], self._parts_of(counts)
        chances = self._own_chances(counts) if chances is None else chances
        by_batch = first.normalize == "batch"
        drawn = self._forest.draw(chances, parts.members, parts.stops, by_batch=by_batch)
        if drawn is None:
            return None
        weights = torch.from_numpy(drawn[1]).pow_(-first.beta).float()
        return MemberRows(parts, drawn[0]), {"priority_weight": weights}


_KINDS: dict[type[Sampler], type[JointDraw]] = {
    RandomSampler: UniformDraw,
    SliceSampler: SlicesDraw,
    PrioritizedSampler: PrioritiesDraw,
}


def draw_fully(member: int, count: int, form: BatchForm, unit: int, draw: Callable[[int], Sequence[Any]]) -> list[Any]:
    """Draw `count` elements of a member; for exact batches, with as many draws as necessary.

    Several draws are necessary if a sampler without replacement returns fewer elements at the end of an epoch.

    Raises:
        SchemaError: (a RuntimeError) the sampler returns nothing, or more than requested; or its slices are shorter and
            the rest is not a multiple of `unit`, so that the last slice would be cut without a mark at its end.
    """
    found, missing = [], count
    while missing:
        drawn = draw(missing)
        got = count_of(drawn[0])
        found.append((member, *drawn))
        if form == "stack":
            break
        missing -= got
        if missing % unit and got and missing > 0:
            raise SchemaError(
                f"member {member} drew {got} of {missing + got} elements, and the other {missing} are not a whole "
                "slice: it has trajectories shorter than its slices",
                hint="use a sampler with strict_length=True, or shorter slices",
            )
        if missing < 0 or not got:
            raise SchemaError(f"the sampler of member {member} returned {got} elements, expected {missing + got}")
    return found


def count_of(index: Any) -> int:
    """Return how many elements an index has."""
    first = index[0] if isinstance(index, tuple) else index
    return flattened(first).get(SOURCE_ID).numel() if isinstance(first, TensorDict) else int(first.numel())


def rows_of(parts: Sequence[Any]) -> MemberRows | None:
    """Return the rows of drawn parts, each `(member, index, …)`; None if an index is not a vector of row numbers."""
    numbers = []
    for part in parts:
        index = part[1]
        if isinstance(index, tuple) and len(index) == 1:
            index = index[0]
        if type(index) is not torch.Tensor or index.dim() != 1 or not index.is_cpu:
            return None
        numbers.append(index.numpy())
    counts = [(part[0], len(one)) for part, one in zip(parts, numbers, strict=True)]
    return MemberRows(Parts(counts), np.concatenate(numbers))


def labels_of(
    rows: MemberRows, storage: StorageEnsemble, form: BatchForm
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the entries `"buffer_ids"`, `"index"` and `"source_id"` of a batch, in the shape that `form` says.

    For `"stack"`, all parts must have the same length.
    """
    ids, sources = rows.parts.labels(storage.sources)
    numbers = rows.numbers
    if form == "stack":  # reshaping arrays is five times as fast as reshaping tensors
        shape = len(rows.parts), -1
        ids, numbers, sources = ids.reshape(shape), numbers.reshape(shape), sources.reshape(shape)
    return from_numpy(ids), from_numpy(numbers), from_numpy(sources)


def index_of(rows: MemberRows, storage: StorageEnsemble, form: BatchForm) -> TensorDict:
    """Make an ensemble's index from rows."""
    return index_with(rows, labels_of(rows, storage, form))


def index_with(rows: MemberRows, labels: Sequence[torch.Tensor]) -> TensorDict:
    """Make an ensemble's index from rows and the labels that `labels_of` returned for them."""
    ids, numbers, sources = labels
    if ids.dim() > 1:
        ids = torch.from_numpy(rows.parts.members.copy())
    index: TensorDict = _INDEX.unflatten(iter((ids, numbers, sources)), ids.shape)
    return index


def compose(parts: Sequence[Any], storage: StorageEnsemble, form: BatchForm) -> tuple[TensorDict, dict[str, Any]]:
    """Make an ensemble's index from drawn parts, each `(member, index, info, …)`; also return their common info."""
    rows, infos = rows_of(parts), [part[2] for part in parts]
    if rows is not None and (form == "exact" or rows.parts.equal):
        return index_of(rows, storage, form), _common(infos, torch.cat if form == "exact" else torch.stack)
    numbers = [_numbers(part[1]) for part in parts]
    width = max(one.shape[-1] if one.dim() > 1 else 1 for one in numbers)
    if width > 1:
        numbers = [_widened(one, width) for one in numbers]
    ids = torch.tensor([part[0] for part in parts])
    sources = [_sources(part[1], part[0], storage, one) for part, one in zip(parts, numbers, strict=True)]
    if form == "exact":
        lengths = torch.tensor([len(one) for one in numbers])
        index = {BUFFER_IDS: ids.repeat_interleave(lengths), INDEX: torch.cat(numbers), SOURCE_ID: torch.cat(sources)}
        return TensorDict(index, [int(lengths.sum())]), _common(infos, torch.cat)
    together = torch.stack if len({one.shape for one in numbers}) == 1 else _nested
    index = {BUFFER_IDS: ids, INDEX: together(numbers), SOURCE_ID: together(sources)}
    return TensorDict(index, [len(parts)]), _common(infos, torch.stack)


def _nested(parts: list[torch.Tensor]) -> torch.Tensor:
    return torch.nested.nested_tensor(parts, layout=torch.jagged)


def _numbers(index: Any) -> torch.Tensor:
    """Return an index as row numbers, int64 `[n]`, or coordinates, int64 `[n, ndim]`."""
    if isinstance(index, TensorDict):  # a nested ensemble's
        numbers: torch.Tensor = flattened(index).get(INDEX)
        return numbers
    if isinstance(index, tuple):
        flat = [part.reshape(-1).cpu() for part in index]
        return flat[0] if len(flat) == 1 else torch.stack(flat, -1)
    return index.reshape(-1).cpu()  # type: ignore[no-any-return]


def _widened(numbers: torch.Tensor, width: int) -> torch.Tensor:
    wide = numbers.unsqueeze(-1) if numbers.dim() == 1 else numbers
    return torch.nn.functional.pad(wide, (0, width - wide.shape[-1]), value=-1)


def _sources(index: Any, member: int, storage: StorageEnsemble, numbers: torch.Tensor) -> torch.Tensor:
    first = int(storage.sources[member])
    if isinstance(index, TensorDict):
        inner: torch.Tensor = flattened(index).get(SOURCE_ID)
        return inner + first
    return torch.full((len(numbers),), first)


def flattened(index: TensorDict) -> TensorDict:
    """Return the index of a nested ensemble with one entry for each row: `[n]` instead of `[k, n / k]`."""
    if index.get(SOURCE_ID).dim() == 1 and not index.get(INDEX).is_nested:
        return index
    ids, numbers, sources = index.get(BUFFER_IDS), index.get(INDEX), index.get(SOURCE_ID)
    parts = list(zip(numbers.unbind(), sources.unbind(), strict=True))
    flat = {
        BUFFER_IDS: ids.repeat_interleave(torch.tensor([len(part) for part, _ in parts])),
        INDEX: torch.cat([part for part, _ in parts]),
        SOURCE_ID: torch.cat([source for _, source in parts]),
    }
    return TensorDict(flat, [len(flat[INDEX])])


def _common(
    infos: Sequence[Mapping[Any, Any]], together: Callable[[list[torch.Tensor]], torch.Tensor]
) -> dict[Any, Any]:
    """Join the entries of info that all parts have, as tensors of the same element type and row shape."""
    found: dict[Any, Any] = {}
    for key, value in (infos[0] if infos else {}).items():
        values = [info.get(key) for info in infos]
        if key == INDEX or not all(isinstance(one, torch.Tensor) and one.dtype == value.dtype for one in values):
            continue
        part = slice(1, None) if together is torch.cat else slice(0, None)
        if len({one.shape[part] for one in values}) == 1:  # type: ignore[union-attr]
            found[key] = together(values)  # type: ignore[arg-type]
    return found
