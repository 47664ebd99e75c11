"""Draws from several storages: which members a batch is of, and the rows that their samplers draw."""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
from numpy.typing import NDArray

from ..errors import SchemaError, UsageError, require_flags
from ..state_folder import read_values, write_values
from ..storages.base import Storage
from ..storages.ensemble import (
    INDEX,
    EnsembleKindError,
    StorageEnsemble,
    checked_members,
    chosen_members,
    load_members,
)
from ..storages.gathering import MemberRows
from .base import Sampler
from .ensemble_index import BatchForm, compose, draw_fully, index_of
from .joint import Counts, Info, JointDraw, joint_draw
from .uniform import RandomSampler, fractions

_SIZE = "size"
_STATE = "ensemble"


class SamplerEnsemble(Sampler):
    """The samplers of an ensemble, and the weights of its members.

    A batch of B elements is made of k draws of a member, with replacement, and B / k elements of each; k is
    `num_buffer_sampled`, by default the number of members, and divides B. With `sample_from_all` each member is drawn
    once. The index is a tensordict `[k]` with `"buffer_ids"`, int64 `[k]`, and `"index"`, int64 `[k, B / k]`, a nested
    tensor if a sampler returned fewer elements. Rows of storages of several dimensions are coordinates; in an ensemble
    with others, -1 is the coordinate of a dimension that a storage does not have.

    - `p`: the weight of each member, which is normalised; `"size"` for the number of its elements at the time of the
      draw; None for equal weights.
    - `temperature`: weights are raised to `1 / temperature`: 1 leaves them, a high one makes them equal.
    - `batch`: `"exact"` makes batches `[B]` of any size: of a member with the share w there are B * w elements,
      rounded up or down at random so that the mean is exact. Members with a `SliceSampler` get whole slices, which
      takes `strict_length=True` and no `span`, or `pad_output=True`.

    `p` and `temperature` can be assigned during training. The generator decides on the members as well as on the rows.
    An ensemble has no epochs: samplers without replacement continue with their next one.

    UsageError (a ValueError) for weights that are negative, not finite, all zero or not as many as the members, for a
    temperature that is not positive, and for a batch size that k does not divide; SchemaError (a RuntimeError) for
    `p` with `sample_from_all`, for a member that has a weight and no elements, and for one in exact batches that may
    return fewer steps than asked for; EnsembleKindError (a TypeError) for
    a storage that is no `StorageEnsemble`. Names are those of TorchRL.

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
        self.members: tuple[Sampler, ...] = checked_members("SamplerEnsemble", samplers, Sampler)
        require_flags(sample_from_all=sample_from_all)
        if p is not None and sample_from_all:
            raise SchemaError("p is set, expected None with sample_from_all=True: each member is drawn once")
        if batch not in get_args(BatchForm):
            raise UsageError(f"batch is {batch!r}, expected 'stack' or 'exact'")
        _check_draws(num_buffer_sampled, batch)
        self.sample_from_all = sample_from_all
        self.num_buffer_sampled = None if sample_from_all else num_buffer_sampled
        self.batch = batch
        self.p = p
        self.temperature = temperature
        self._joint: tuple[Any, Any, JointDraw | None] | None = None
        """Samplers and storages, and what draws of them."""
        for number in range(len(self.members)):
            self.unit_of_member(number)

    # Weights ---------------------------------------------------------------------------------------

    @property
    def p(self) -> Any:
        """The weights: float64 `[members]` with the sum 1, a copy; `"size"`, or None for equal ones."""
        return self._p.clone() if isinstance(self._p, torch.Tensor) else self._p

    @p.setter
    def p(self, weights: Any) -> None:
        if weights is not None and self.sample_from_all:
            raise SchemaError("weights were assigned, and sample_from_all=True draws each member once")
        self._p = weights if weights is None or _is_size(weights) else normalised(weights, len(self.members))
        self._known: tuple[list[int], list[float]] = ([], [])

    @property
    def temperature(self) -> float:
        """Weights are raised to `1 / temperature`."""
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
        """Return the probability of each member, float64 `[members]`, for members of so many elements.

        SchemaError (a RuntimeError) if a member without elements has a weight.
        """
        if self._p is None:
            weights = np.ones(len(self.members))
        elif _is_size(self._p):
            weights = np.array(sizes, np.float64)
        else:
            weights = self._p.numpy().copy()
        empty = [number for number, size in enumerate(sizes) if not size and weights[number] > 0]
        if empty or not weights.any():
            without = empty or range(len(sizes))
            named = ", ".join(map(str, without))
            which = f"member {named} has" if len(without) == 1 else f"members {named} have"
            raise SchemaError(
                f"Cannot sample from an empty storage: {which} no elements",
                hint="write to it first, or give it the weight 0",
            )
        if self._temperature != 1.0:
            positive = weights > 0
            logs = np.log(weights[positive]) / self._temperature
            weights[positive] = np.exp(logs - logs.max())
        return np.asarray(weights / weights.sum())

    def counts(self, sizes: Sequence[int], batch_size: int) -> Counts:
        """Draw which members a batch is of, and how many elements of each."""
        unit = self.unit
        chances = fractions(self._check_size(batch_size, unit), self.generator)
        return self._counts(sizes, batch_size, unit, chances.tolist())

    def _check_size(self, batch_size: int, unit: int) -> int:
        """Return how many random numbers the choice of members takes; UsageError for a size that does not fit."""
        if batch_size < 1:
            raise UsageError(f"batch_size is {batch_size}, expected a number from 1")
        if self.batch == "exact":
            if batch_size % unit:
                raise UsageError(f"batch_size is {batch_size}, expected a multiple of {unit} for slices")
            return 1
        draws = len(self.members) if self.num_buffer_sampled is None else self.num_buffer_sampled
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
        """Return the sums of the shares up to each member, which are 1.0 from the last one with a share on."""
        known, ends = self._known
        if known != sizes:
            shares = self.shares(sizes)
            ends = np.cumsum(shares).tolist()
            last = int(np.flatnonzero(shares)[-1])
            ends[last:] = [1.0] * (len(ends) - last)
            self._known = list(sizes), ends
        return ends

    def joint(self, storage: StorageEnsemble) -> JointDraw | None:
        """Return what draws of all members in one go; None where each has to draw by itself."""
        known = self._joint
        if known is None or known[0] is not self.members or known[1] is not storage.members:
            joint = joint_draw(self.members, storage.members)
            known = self._joint = self.members, storage.members, joint
        return known[2] if known[2] is not None and known[2].possible else None

    def draw_jointly(
        self, joint: JointDraw, sizes: Sequence[int], batch_size: int, counts: Counts | None = None
    ) -> tuple[Counts, tuple[MemberRows, Info] | None]:
        """Draw members, and rows of them in one go; return how many of each, and rows and info.

        None for the rows where the samplers have to draw these counts one by one. Members with one generator take one
        call; those with their own draw as by themselves. `counts` are those of members that were chosen already.
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
        """The number that the count of each member is a multiple of in exact batches: whole slices."""
        return math.lcm(*[self.unit_of_member(number) for number in range(len(self.members))])

    def unit_of_member(self, number: int) -> int:
        """Return the number that the count of a member is a multiple of.

        SchemaError (a RuntimeError) for a member of an exact batch that may return fewer steps than asked for: whether
        it does depends on the trajectories that are drawn.
        """
        member = self.members[number]
        if self.batch == "exact" and _shortens(member):
            raise SchemaError(
                f"member {number} has a {type(member).__name__} that may return fewer steps, and the parts of an exact "
                "batch have exact lengths",
                hint="give it a slice_len, and either strict_length=True and no span or pad_output=True",
            )
        return unit_of(member)

    # Draws -----------------------------------------------------------------------------------------

    def check_storage(self, storage: Storage) -> None:
        """Raise EnsembleKindError (a TypeError) unless the storage is an ensemble of as many members."""
        if not isinstance(storage, StorageEnsemble):
            raise EnsembleKindError(f"a SamplerEnsemble needs a StorageEnsemble, found a {type(storage).__name__}")
        if len(storage) != len(self.members):
            raise SchemaError(f"there are {len(self.members)} samplers, expected {len(storage)}: one for each storage")
        for sampler, member in zip(self.members, storage.members, strict=True):
            sampler.check_storage(member)

    def check_batch_size(self, batch_size: int) -> None:
        """Raise UsageError for a batch size that is no multiple of draws, or of slices in exact batches."""
        self._check_size(batch_size, self.unit)

    def draw(self, storage: Storage, batch_size: int) -> tuple[Any, dict[str, Any]]:
        """Draw members, and elements of them; return the index, see the class, and the info they have in common."""
        self.check_storage(storage)
        assert isinstance(storage, StorageEnsemble)
        joint, counts = self.joint(storage), None
        if joint is not None and not joint.reads_rows:
            counts, drawn = self.draw_jointly(joint, storage.sizes, batch_size)
            if drawn is not None:
                rows, info = drawn
                index = index_of(rows, storage, self.batch)
                return index, {key: value.view(index.get(INDEX).shape) for key, value in info.items()}
        parts = []
        for member, count in self.counts(storage.sizes, batch_size) if counts is None else counts:
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
        """Return the ensemble of some members, with their weights and as many draws as `num_buffer_sampled` names."""
        some_weights = self._p if self._p is None or _is_size(self._p) else self._p[list(chosen)]
        found = type(self)(
            *(self.members[member] for member in chosen),
            p=some_weights,
            sample_from_all=self.sample_from_all,
            num_buffer_sampled=self.num_buffer_sampled,
            temperature=self._temperature,
            batch=self.batch,
        )
        found.generator = self.generator
        return found

    def __getitem__(self, index: Any) -> Any:
        """Return a member, or an ensemble of some with their weights."""
        return self._chosen(index)

    def __len__(self) -> int:
        return len(self.members)

    # State -----------------------------------------------------------------------------------------

    def reset(self) -> None:
        """Have all members forget their elements."""
        for member in self.members:
            member.empty()

    def save_state(self) -> dict[str, Any]:
        """Return the state of each member by its number, and the weights."""
        states = {str(number): member.state_dict() for number, member in enumerate(self.members)}
        return {**states, **self.weights_state()}

    def weights_state(self) -> dict[str, Any]:
        """Return `p`, float64 `[members]` or None, `by_size` and `temperature`."""
        by_size = _is_size(self._p)
        return {"p": None if by_size else self.p, "by_size": by_size, "temperature": self._temperature}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Load a state; nothing is changed if a member refuses its own, or for that of another number of members."""
        load_members(self.members, state)
        self.load_weights(state)

    def load_weights(self, state: Mapping[str, Any]) -> None:
        """Load what `weights_state` returned; a state without it, such as one of TorchRL, leaves the weights."""
        if "temperature" in state:
            self.temperature = state["temperature"]
            self.p = _SIZE if state["by_size"] else state["p"]

    def write_state(self, folder: Path, state: Mapping[str, Any]) -> None:
        """Write each member's state into a folder of its number, and the weights into `ensemble`."""
        for number, member in enumerate(self.members):
            member.dumps(folder / str(number))
        write_values(folder / _STATE, {name: state[name] for name in ("p", "by_size", "temperature")})

    def read_weights(self, folder: Path) -> dict[str, Any]:
        """Read the weights that `write_state` wrote; nothing where there are none."""
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
    """Round shares up or down at random (systematic sampling): the sum is exact, and so are the means."""
    start, units, found = 0, batch_size // unit, []
    for member, end in enumerate(ends):
        stop = units if end == 1.0 else min(int(end * units + offset), units)
        if stop > start:
            found.append((member, (stop - start) * unit))
        start = stop
    return found


def unit_of(sampler: Sampler) -> int:
    """Return the number that a batch size of this sampler is a multiple of."""
    if type(sampler) is RandomSampler:
        return 1
    if isinstance(sampler, SamplerEnsemble):
        whole = sampler.unit
        if sampler.batch == "exact":
            return whole
        draws = len(sampler.members) if sampler.num_buffer_sampled is None else sampler.num_buffer_sampled
        return whole * draws
    return int(getattr(sampler, "slice_len", None) or getattr(sampler, "num_slices", None) or 1)


def _shortens(sampler: Sampler) -> bool:
    """Whether a sampler may return fewer or shorter slices than were asked for, so that the rest is no whole slice."""
    if isinstance(sampler, SamplerEnsemble):
        return any(map(_shortens, sampler.members))
    if getattr(sampler, "num_slices", None) and sampler.has_epochs and not getattr(sampler, "drop_last", False):
        return True  # the last batch of an epoch has fewer slices; the rest of them, one perhaps, is no multiple
    if getattr(sampler, "pad_output", False) or getattr(sampler, "batched", False):
        return False
    return not getattr(sampler, "strict_length", True) or any(getattr(sampler, "span", ()))


def _is_size(weights: Any) -> bool:
    return isinstance(weights, str) and weights == _SIZE


def _check_draws(draws: Any, form: BatchForm) -> None:
    if draws is None:
        return
    if isinstance(draws, bool) or not isinstance(draws, int) or draws < 1:
        raise UsageError(f"num_buffer_sampled is {draws!r}, expected a number from 1")
    if form == "exact":
        raise UsageError(f'num_buffer_sampled is {draws}, expected None with batch="exact", which draws of all members')


def normalised(weights: Any, count: int) -> torch.Tensor:
    """Return weights as float64 `[count]` with the sum 1.

    UsageError (a ValueError) for another number of them, and for weights that are negative, not finite or all zero.
    """
    try:
        found = torch.as_tensor(weights, dtype=torch.float64).detach().cpu().clone()
    except (TypeError, ValueError, RuntimeError) as error:
        raise UsageError(f"p is {weights!r}, expected a weight for each member") from error
    if found.shape != (count,):
        raise UsageError(f"p has the shape {list(found.shape)}, expected [{count}]: a weight for each member")
    if not bool(found.isfinite().all()) or bool((found < 0).any()):
        raise UsageError(f"p is {found.tolist()}, expected numbers from 0")
    total = float(found.sum())
    if not total > 0:
        raise UsageError(f"p is {found.tolist()}, expected at least one weight above 0")
    return found / total
