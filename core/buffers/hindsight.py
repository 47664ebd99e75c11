"""Hindsight experience replay: steps whose goal is replaced by one that was achieved, with the reward that follows."""

from __future__ import annotations

import contextlib
import enum
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import is_tensor_collection

from ..errors import MissingKeyError, RbtoolError, SchemaError, UsageError
from ..samplers.boundaries import Key, StrictBoundaries, boundary_key
from ..samplers.earlier_steps import gathered
from ..samplers.trajectories import TableFinder, TrajectoryTable
from ..samplers.uniform import fractions
from ..storages.tensor import TensorStorage
from ..storages.write_log import Written
from .concurrency import Draw
from .parts import WrongKindError
from .tensordict import TensorDictReplayBuffer

Numbers: TypeAlias = NDArray[np.int64]

_NEXT = "next"


class HindsightStrategy(enum.StrEnum):
    """Which step of a trajectory the goal of a step is achieved at.

    `FUTURE`: the step itself or a later one; `FINAL`: the last one; `EPISODE`: any one of the same trajectory;
    `RANDOM`: any step of all.
    """

    FUTURE = "future"
    FINAL = "final"
    EPISODE = "episode"
    RANDOM = "random"

    @classmethod
    def of(cls, name: Any) -> HindsightStrategy:
        """Return a strategy by its name; UsageError for another one."""
        try:
            return cls(name)
        except ValueError:
            raise UsageError(f"the strategy is {name!r}, expected one of {', '.join(cls)}") from None

    def steps(self, chances: NDArray[np.float64], age: Numbers, reach: Numbers) -> Numbers:
        """Choose by chances in [0, 1) how many steps behind each step its goal is achieved; not for `RANDOM`.

        There are `age` steps before it in its trajectory, and `reach` from it to the end, itself included.
        """
        if self is HindsightStrategy.FINAL:
            return reach - 1
        if self is HindsightStrategy.FUTURE:
            return (chances * reach).astype(np.int64)
        return (chances * (age + reach)).astype(np.int64) - age


def checked_ratio(ratio: Any) -> float:
    """Return the share of relabelled steps; UsageError for anything but a number from 0 to 1."""
    if isinstance(ratio, bool) or not isinstance(ratio, int | float) or not 0 <= ratio <= 1:
        raise UsageError(f"her_ratio is {ratio!r}, expected a number from 0 to 1")
    return float(ratio)


class RelabelledEnds(NamedTuple):
    """Which steps are terminated under their new goals, and which no longer are; bool `[n, ...]`."""

    terminated: torch.Tensor
    withdrawn: torch.Tensor | None


@dataclass(frozen=True)
class Relabelling:
    """The functions and keys by which steps are relabelled; `HERReplayBuffer` documents them.

    WrongKindError (a TypeError) without a reward function; UsageError for keys that are none.
    """

    reward_fn: Callable[[Any], Any]
    terminated_fn: Callable[[Any], Any] | bool | None = None
    goal_key: Key = ("desired_goal",)
    achieved_goal_key: Key = ("achieved_goal",)
    reward_key: Key = (_NEXT, "reward")
    end_key: Key = (_NEXT, "done")

    def __post_init__(self) -> None:
        if not callable(self.reward_fn):
            raise WrongKindError(
                f"reward_fn is {self.reward_fn!r}, expected a function: rewards and terminations depend on the goal"
            )
        if not (self.terminated_fn in (None, False) or callable(self.terminated_fn)):
            raise WrongKindError(f"terminated_fn is {self.terminated_fn!r}, expected a function or False")
        for name in ("goal_key", "achieved_goal_key", "reward_key", "end_key"):
            object.__setattr__(self, name, boundary_key(getattr(self, name)))

    @property
    def _terminated_key(self) -> Key:
        return (*self.end_key[:-1], "terminated")

    @property
    def _truncated_key(self) -> Key:
        return (*self.end_key[:-1], "truncated")

    @functools.cached_property
    def changed(self) -> tuple[Key, ...]:
        """The entries that change, as far as they are stored."""
        ahead = () if self.goal_key[0] == _NEXT else ((_NEXT, *self.goal_key),)
        return (self.goal_key, *ahead, self.reward_key, *self.flags)

    @functools.cached_property
    def flags(self) -> tuple[Key, ...]:
        """The end flags, in the order in which they are changed."""
        done = (*self.end_key[:-1], "done")
        return tuple(dict.fromkeys((self._truncated_key, self._terminated_key, done, self.end_key)))

    def apply(self, rows: Any, goals: torch.Tensor) -> RelabelledEnds | None:
        """Give steps, a tensordict `[n]`, other goals, `[n, *goal]`; their entries `changed` are edited in place.

        Returns what becomes of their ends; None for steps without `terminated`, for which none is computed.
        """
        for key in self.changed[: -len(self.flags) - 1]:
            old = rows.get(key, None)
            if old is not None:
                _require_alike(goals, old, SchemaError, "the achieved goal", "goals")
                old.copy_(goals)
            elif key == self.goal_key:
                raise missing(key, "goal")
        reward = rows.get(self.reward_key, None)
        if reward is None:
            raise missing(self.reward_key, "reward")
        given = self.reward_fn(rows)
        given, terminated = given if isinstance(given, tuple) and len(given) == 2 else (given, None)
        _require_alike(given, reward, UsageError, "what reward_fn returned", "rewards")
        reward.copy_(given.detach())
        ends = self._ends(rows, terminated)
        if ends is not None:
            self.mark({key: rows.get(key, None) for key in self.flags}, ends)
        return ends

    def _ends(self, rows: Any, given: Any) -> RelabelledEnds | None:
        stored = rows.get(self._terminated_key, None)
        like = rows.get(self.end_key, None) if stored is None else stored
        if like is None:
            return None
        if given is None and self.terminated_fn is False:
            new = torch.zeros_like(like, dtype=torch.bool)
            return RelabelledEnds(new, None if stored is None else stored != 0)
        if given is None and callable(self.terminated_fn):
            given = self.terminated_fn(rows)
        if given is None:
            if stored is None:
                return None
            raise UsageError(
                f"{_name(self._terminated_key)} depends on the goal, and no function computes it for new goals",
                hint="return (reward, terminated) from reward_fn, or give terminated_fn; terminated_fn=False says that "
                "no goal ends an episode",
            )
        _require_alike(given, like, UsageError, "the terminations", "flags", any_type=True)
        new = given.detach().to(like.device) != 0
        return RelabelledEnds(new, None if stored is None else (stored != 0) & ~new)

    def mark(self, flags: Mapping[Key, torch.Tensor | None], ends: RelabelledEnds) -> None:
        """Change the end flags of steps, in place.

        Where an episode ends and the new goal is no reason, the step is truncated: `done` stays.
        """
        for key in self.flags:
            value = flags.get(key)
            if value is None:
                continue
            if key == self._terminated_key:
                value.copy_(ends.terminated.view(value.shape))
            elif key != self._truncated_key:
                value.logical_or_(ends.terminated.view(value.shape))
            elif ends.withdrawn is not None:
                value.logical_or_(ends.withdrawn.view(value.shape))


def missing(key: Key, role: str) -> MissingKeyError:
    """Return the error for a missing entry, which names its role."""
    return MissingKeyError(f"the {role} {_name(key)} is not in the data")


def _name(key: Key) -> str:
    return repr(".".join(key))


def _require_alike(
    given: Any, old: torch.Tensor, error: type[RbtoolError], name: str, what: str, *, any_type: bool = False
) -> None:
    """Raise an error for what has another shape than an entry, or a type whose values it cannot have."""
    if not isinstance(given, torch.Tensor) or given.shape != old.shape:
        found = list(given.shape) if isinstance(given, torch.Tensor) else f"a {type(given).__name__}"
        raise error(f"{name} is {found}, expected {what} of shape {list(old.shape)}")
    if not any_type and not torch.can_cast(given.dtype, old.dtype):
        raise error(f"{name} is {given.dtype}, expected {what} of {old.dtype}")


class _RowsAndGoals(NamedTuple):
    """Rows, and the goals of the first of them, of the same instant; None if none are relabelled."""

    rows: Any
    goals: torch.Tensor | None


class HERReplayBuffer(TensorDictReplayBuffer):
    """A `TensorDictReplayBuffer` that relabels a part of each batch with goals that were achieved.

    The first `int(her_ratio * batch_size)` elements of a batch, which the sampler draws like all others, get another
    goal: `achieved_goal_key` of a step of their trajectory, by `strategy`. Their reward and end flags follow from it:

    - `reward_fn(rows)` gets a tensordict of these elements, `[n]`, with the new goals, and returns their rewards, in
      the shape of `reward_key`, or a pair of rewards and terminations, in that of `terminated` next to `end_key`.
    - `terminated_fn(rows)` computes the terminations instead; False means that no goal ends an episode. If `terminated`
      is stored, one of the two is needed: a flag of the old goal would stop targets at the wrong steps.
    - `done` also becomes True where a step is terminated now; a step that ended its episode, and is no longer
      terminated, is truncated.
    - The goal under `next`, if it is stored, is replaced too.

    `achieved_goal_key=("next", "achieved_goal")` takes what a step achieved, in place of what was achieved before it.
    A trajectory ends at `end_key`, or a flag `terminated` or `truncated` next to it, where trajectory ids change, at
    the newest row of a ring, and where an episode of a dataset does. Rows are relabelled as they are stored,
    before transforms, and the storage stays as it is. Goals are drawn with the generator of the buffer; draws of all
    samplers and storages of tensordicts work, with any number of dimensions.

    WrongKindError (a TypeError) without `reward_fn`; UsageError (a ValueError) for an unknown strategy, a ratio outside
    of [0, 1], results of another shape, and without terminations; MissingKeyError (a KeyError) for goals, rewards or
    ends that are not stored; SchemaError (a RuntimeError) for elements that are no steps. The method is that of
    Andrychowicz et al., "Hindsight experience replay", 2017; names are those of TorchRL.

    >>> import torch
    >>> from tensordict import TensorDict
    >>> from rbtool import LazyTensorStorage
    >>> def reward(rows):
    ...     reached = rows["achieved_goal"] == rows["desired_goal"]
    ...     return reached.float(), reached
    >>> buffer = HERReplayBuffer(reward, her_ratio=1.0, strategy="final", storage=LazyTensorStorage(10), batch_size=4)
    >>> end = torch.tensor([[False], [False], [True]])
    >>> steps = TensorDict({"achieved_goal": torch.arange(3).view(3, 1), "desired_goal": torch.full((3, 1), 9)}, [3])
    >>> steps["next"] = TensorDict({"reward": torch.zeros(3, 1), "done": end, "terminated": end}, [3])
    >>> index = buffer.extend(steps)
    >>> buffer.sample()["desired_goal"].squeeze(-1)
    tensor([2, 2, 2, 2])
    """

    draws_apart = True

    def __init__(
        self,
        reward_fn: Callable[[Any], Any] | None = None,
        *,
        her_ratio: float = 0.8,
        strategy: HindsightStrategy | str = HindsightStrategy.FUTURE,
        goal_key: Any = "desired_goal",
        achieved_goal_key: Any = "achieved_goal",
        reward_key: Any = (_NEXT, "reward"),
        end_key: Any = (_NEXT, "done"),
        terminated_fn: Callable[[Any], Any] | bool | None = None,
        sampler: Any = None,
        **arguments: Any,
    ) -> None:
        keys: dict[str, Any] = {
            "goal_key": goal_key, "achieved_goal_key": achieved_goal_key, "reward_key": reward_key, "end_key": end_key,
        }  # fmt: skip
        self._relabelling = Relabelling(reward_fn, terminated_fn, **keys)  # type: ignore[arg-type]  # it checks
        self._strategy = HindsightStrategy.of(strategy)
        self._ratio = checked_ratio(her_ratio)
        self._tables = TableFinder(StrictBoundaries(self._relabelling.end_key, any_flag=True).source)
        super().__init__(sampler=sampler, **arguments)

    @property
    def her_ratio(self) -> float:
        """The share of each batch that is relabelled."""
        return self._ratio

    @property
    def strategy(self) -> HindsightStrategy:
        """Which steps goals are taken from."""
        return self._strategy

    @property
    def rows_are_batches(self) -> bool:
        """False: batches are made of the rows."""
        return False

    # Drawing ----------------------------------------------------------------------------------------

    def _draw(self, size: int, with_rows: bool = True) -> Draw:
        reads = with_rows and self._drawing.reads_rows
        with self._guard.hold() if reads else contextlib.nullcontext(), self._sampling:
            return super()._draw(size, with_rows)

    def _with_info(
        self, index: Any, found: Mapping[Any, Any], last: bool = False, rows: Any = None, written: Written | None = None
    ) -> Draw:
        draw = super()._with_info(index, found, last, rows, written)
        with self._sampling:
            draw.chances = self._chances(index)
        if rows is not None:
            draw.rows = _RowsAndGoals(rows, self._goals(draw))
        return draw

    def restored(self, draw: Draw) -> bool:
        """Read the rows and the goals of a draw again; False if the rows were written over since."""
        with self._guard.hold():
            if not super().restored(draw):
                return False
            if draw.rows is not None:
                draw.rows = _RowsAndGoals(draw.rows, self._goals(draw))
            return True

    def _chances(self, index: Any) -> torch.Tensor:
        """Draw a number in [0, 1) for each element that is relabelled, float64 `[n]`."""
        first = index[0] if isinstance(index, tuple) else index
        count = int(len(first) * self._ratio) * first[0].numel() if len(first) else 0
        return torch.from_numpy(fractions(count, self._rng))

    # Goals -------------------------------------------------------------------------------------------

    def _goals(self, draw: Draw) -> torch.Tensor | None:
        """Read the goals of the first elements of a draw, `[n, *goal]`; None if none are relabelled."""
        assert draw.chances is not None
        count = len(draw.chances)
        if not count:
            return None
        index = draw.index if isinstance(draw.index, tuple) else (draw.index,)
        rows, *lanes = (part.reshape(-1)[:count].numpy(force=True) for part in index)
        chances, storage, key = draw.chances.numpy(), self._storage, self._relabelling.achieved_goal_key
        if self._strategy is HindsightStrategy.RANDOM:
            rows, *lanes = np.unravel_index((chances * len(storage)).astype(np.int64), tuple(storage.shape))
        else:
            rows = self._moved(self._tables.table(storage), rows, lanes, chances)
        found = gathered(storage, key, torch.from_numpy(rows), [torch.from_numpy(part) for part in lanes])
        if found is None:
            raise missing(key, "achieved goal")
        return found

    def _moved(
        self, table: TrajectoryTable, rows: Numbers, lanes: list[Numbers], chances: NDArray[np.float64]
    ) -> Numbers:
        """Return the rows, in the same lanes, at which the goals of steps are achieved."""
        step = table.steps_at(rows)
        lane = np.zeros_like(step)
        if lanes:
            lane = np.ravel_multi_index(lanes, tuple(self._storage.shape[1:])).astype(np.int64)
        age = table.age(step, lane) if self._strategy is HindsightStrategy.EPISODE else lane
        return (step + self._strategy.steps(chances, age, table.reach(step, lane))) % table.capacity

    # Batches ----------------------------------------------------------------------------------------

    def _rows_of(self, draw: Draw, collate: Callable[[Any], Any] | None = None) -> Any:
        if draw.chances is None:  # a draw of a saved queue of another buffer
            with self._sampling:
                draw.chances = self._chances(draw.index)
        read = draw.rows
        if not isinstance(read, _RowsAndGoals):
            read = self._guard.read(lambda index: _RowsAndGoals(self._read(index), self._goals(draw)), draw.index)
        collate = collate or self._collate_fn
        batch = read.rows if collate is None else collate(read.rows)
        return batch if read.goals is None else self._relabelled(batch, read.goals, draw)

    def _relabelled(self, batch: Any, goals: torch.Tensor, draw: Draw) -> Any:
        """Relabel the first elements of a batch, and correct the flags in the info of a slice sampler."""
        first = draw.index[0] if isinstance(draw.index, tuple) else draw.index
        if not is_tensor_collection(batch) or batch.batch_size != first.shape:
            found = list(batch.batch_size) if is_tensor_collection(batch) else f"a {type(batch).__name__}"
            raise SchemaError(f"tensordicts of steps are relabelled, found {found} for {list(first.shape)} elements")
        relabelling = self._relabelling
        if not self._reads_fresh_rows:
            batch = batch.copy()
            for key in relabelling.changed:
                if (value := batch.get(key, None)) is not None:
                    batch.set(key, value.clone())
        count = len(goals) if first.dim() == 1 else len(goals) // first[0].numel()
        rows = batch if count == len(batch) else self._first_rows(batch, count)
        ends = relabelling.apply(rows, goals if first.dim() == 1 else goals.view(*rows.batch_size, *goals.shape[1:]))
        if ends is not None and len(draw.info) > 1:
            names = {key: key[0] if len(key) == 1 else key for key in relabelling.flags}
            marked = {key: draw.info[name].clone() for key, name in names.items() if name in draw.info}
            relabelling.mark({key: value[:count] for key, value in marked.items()}, ends)
            draw.info |= {names[key]: value for key, value in marked.items()}
        return batch

    @property
    def _reads_fresh_rows(self) -> bool:
        """Whether each entry of rows that were read is in memory of its own."""
        return isinstance(self._storage, TensorStorage) and self._collate_fn is None and not self._looking_back

    def _first_rows(self, batch: Any, count: int) -> Any:
        """Return the first rows of a batch, as views."""
        storage = self._storage
        if not self._reads_fresh_rows or not isinstance(storage, TensorStorage):
            return batch[:count]
        leaves = storage.structure.flatten(batch)  # a third of the time of tensordict's indexing
        first = iter([leaf[:count] for leaf in leaves])
        return storage.structure.unflatten(first, torch.Size([count, *batch.batch_size[1:]]))
