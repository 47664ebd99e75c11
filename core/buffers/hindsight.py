"""Hindsight experience replay: gives steps a goal that was achieved later on, and the reward that follows from it."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import is_tensor_collection

from ..errors import (
    MissingKeyError,
    RbtoolError,
    SchemaError,
    UsageError,
    WrongKindError,
    require_share,
    warn_caller,
)
from ..samplers.hindsight import AchievedRows, HindsightReader, HindsightStrategy
from ..samplers.steps_around import gathered
from ..samplers.trajectories import StrictBoundaries, TableFinder
from ..samplers.uniform import singles
from ..storages.pytree import TreeSpec, entry_of
from ..storages.tensor import TensorStorage
from ..storages.write_log import Written
from ..ted.schema import NEXT, Key, as_key
from ..torchrl_classes import counterpart
from .draws import Draw
from .tensordict import TensorDictReplayBuffer


class RelabelledEnds(NamedTuple):
    """Which steps are terminated under their new goals, and which ones no longer are; bool `[n, ...]`.

    None stands for no such steps.
    """

    terminated: torch.Tensor | None
    withdrawn: torch.Tensor | None


@dataclass(frozen=True)
class Relabelling:
    """The functions and keys with which steps are relabelled; `HERReplayBuffer` documents them.

    Raises:
        WrongKindError: (a TypeError) `reward_fn` is not a function.
        UsageError: a key is invalid.
    """

    reward_fn: Callable[[Any], Any]
    terminated_fn: Callable[[Any], Any] | bool | None = None
    goal_key: Key = ("desired_goal",)
    achieved_goal_key: Key = ("achieved_goal",)
    reward_key: Key = (NEXT, "reward")
    end_key: Key = (NEXT, "done")
    keeps_ends: bool = False
    """Whether stored flags are kept if no function computes terminations; otherwise that is an error."""

    def __post_init__(self) -> None:
        if not callable(self.reward_fn):
            raise WrongKindError(
                f"reward_fn is {self.reward_fn!r}, expected a function: rewards and terminations depend on the goal"
            )
        if not (self.terminated_fn in (None, False) or callable(self.terminated_fn)):
            raise WrongKindError(f"terminated_fn is {self.terminated_fn!r}, expected a function or False")
        for name in ("goal_key", "achieved_goal_key", "reward_key", "end_key"):
            object.__setattr__(self, name, as_key(getattr(self, name)))

    @functools.cached_property
    def terminated_key(self) -> Key:
        """The flag that depends on the goal."""
        return (*self.end_key[:-1], "terminated")

    @functools.cached_property
    def _truncated_key(self) -> Key:
        return (*self.end_key[:-1], "truncated")

    @functools.cached_property
    def goal_keys(self) -> tuple[Key, ...]:
        """The entries with goals: `goal_key`, and the same entry under `next`, which need not exist."""
        return (self.goal_key,) if self.goal_key[0] == NEXT else (self.goal_key, (NEXT, *self.goal_key))

    @functools.cached_property
    def changed(self) -> tuple[Key, ...]:
        """The entries that change, if they are stored."""
        return (*self.goal_keys, self.reward_key, *self.flags)

    @functools.cached_property
    def flags(self) -> tuple[Key, ...]:
        """The end flags, in the order in which they are changed."""
        done = (*self.end_key[:-1], "done")
        return tuple(dict.fromkeys((self._truncated_key, self.terminated_key, done, self.end_key)))

    def apply(self, rows: Any, goals: torch.Tensor | None = None) -> RelabelledEnds | None:
        """Relabel steps in place: set new goals, rewards and end flags, which are the entries `changed`.

        Args:
            rows: the steps, a tensordict `[n]`.
            goals: the new goals, `[n, *goal]`; None if the steps have them already.

        Returns:
            Which ends change; None if no terminations are computed, so that the stored flags are kept.
        """
        for key in () if goals is None else self.goal_keys:
            old = entry_of(rows, key)
            if old is not None:
                _require_alike(goals, old, SchemaError, "the achieved goal", "goals")
                old.copy_(goals)
            elif key == self.goal_key:
                raise missing(key, "goal")
        reward = entry_of(rows, self.reward_key)
        if reward is None:
            raise missing(self.reward_key, "reward")
        given = self.reward_fn(rows)
        given, terminated = given if isinstance(given, tuple) and len(given) == 2 else (given, None)
        _require_alike(given, reward, UsageError, "what reward_fn returned", "rewards")
        reward.copy_(given.detach() if given.requires_grad else given)
        flags = {key: entry_of(rows, key) for key in self.flags}
        ends = self._ends(rows, flags, terminated)
        if ends is not None:
            self.mark(flags, ends)
        return ends

    def _ends(self, rows: Any, flags: Mapping[Key, torch.Tensor | None], given: Any) -> RelabelledEnds | None:
        stored = flags[self.terminated_key]
        like = flags[self.end_key] if stored is None else stored
        if like is None:
            return None
        if given is None and self.terminated_fn is False:
            return RelabelledEnds(None, None if stored is None else _marked(stored))
        if given is None and callable(self.terminated_fn):
            given = self.terminated_fn(rows)
        if given is None:
            if stored is None or self.keeps_ends:
                return None
            raise UsageError(
                f"{_name(self.terminated_key)} depends on the goal, and no function computes it for new goals",
                hint="return (reward, terminated) from reward_fn, or pass terminated_fn; terminated_fn=False means "
                "that no goal ends an episode",
            )
        _require_alike(given, like, UsageError, "the terminations", "flags", any_type=True)
        new = given.detach().to(like.device) != 0
        return RelabelledEnds(new, None if stored is None else (stored != 0) & ~new)

    def mark(self, flags: Mapping[Key, torch.Tensor | None], ends: RelabelledEnds) -> None:
        """Change the end flags of steps in place.

        A step that was terminated and no longer is becomes truncated, and its `done` stays set, because the stored
        episode still ends there.
        """
        terminated, withdrawn = ends
        for key in self.flags:
            value = flags.get(key)
            if value is None:
                continue
            if key == self.terminated_key:
                value.zero_() if terminated is None else value.copy_(terminated.view(value.shape))
            elif (more := withdrawn if key == self._truncated_key else terminated) is not None:
                value.logical_or_(more if more.shape == value.shape else more.view(value.shape))


def _marked(flags: torch.Tensor) -> torch.Tensor:
    """Return where flags are set, as a copy."""
    return flags.clone() if flags.dtype is torch.bool else flags != 0  # cloning takes a third of the time


def missing(key: Key, role: str) -> MissingKeyError:
    """Make the error for a missing entry; `role` says what the entry is."""
    return MissingKeyError(f"the {role} {_name(key)} is not in the data")


def _name(key: Key) -> str:
    return repr(".".join(key))


def _require_alike(
    given: Any, old: torch.Tensor, error: type[RbtoolError], name: str, what: str, *, any_type: bool = False
) -> None:
    """Raise an error if a value differs in shape from an entry, or has an element type that the entry cannot hold."""
    if type(given) is torch.Tensor and given.shape == old.shape and (any_type or given.dtype is old.dtype):
        return
    if not isinstance(given, torch.Tensor) or given.shape != old.shape:
        found = list(given.shape) if isinstance(given, torch.Tensor) else f"a {type(given).__name__}"
        raise error(f"{name} is {found}, expected {what} of shape {list(old.shape)}")
    if not any_type and given.dtype is not old.dtype and not torch.can_cast(given.dtype, old.dtype):
        raise error(f"{name} is {given.dtype}, expected {what} of {old.dtype}")


class _RowsAndGoals(NamedTuple):
    """The rows of a draw, and the new goals of those at the beginning, as of the same instant.

    `goals` is None if no rows are relabelled, or if the rows have their new goals already. In that case `first` has
    these rows, as views.
    """

    rows: Any
    goals: torch.Tensor | None
    first: Any = None


@counterpart
class HERReplayBuffer(TensorDictReplayBuffer):
    """A `TensorDictReplayBuffer` that relabels part of each batch with goals that were achieved later on.

    The first `int(her_ratio * batch_size)` elements of a batch get another goal: the entry `achieved_goal_key` of a
    step of their trajectory, which `strategy` chooses. The goal under `next`, if stored, is replaced as well. Rewards
    and end flags are computed for the new goals: `done` is set where a step is now terminated, and a step that ended
    its episode but is no longer terminated becomes truncated. Rows are relabelled as they are stored, before any
    transforms; the storage does not change.

    A trajectory ends at `end_key` or a flag `terminated` or `truncated` next to it, where trajectory ids change, at the
    newest row of a ring, and where an episode of a dataset ends. Goals are drawn with the buffer's generator. Any
    sampler works, and any storage of tensordicts, of any number of dimensions.

    Args:
        reward_fn: a function that takes a tensordict `[n]` of steps with their new goals. It returns their rewards in
            the shape of `reward_key`, or a pair of rewards and terminations, the latter in the shape of `terminated`
            next to `end_key`.
        terminated_fn: a function that computes the terminations instead; False means that no goal ends an episode. If
            nothing computes them, stored flags are kept, as in TorchRL: `terminated` then belongs to the old goal, even
            where the new one is reached, and stops bootstrapping at the wrong steps. A UserWarning says so, once.
        her_ratio: the share of each batch that is relabelled.
        strategy: which step of the trajectory the new goal comes from, see `HindsightStrategy`.
        achieved_goal_key: the entry with achieved goals. `("next", "achieved_goal")` is what a step led to, as in the
            paper: `"future"` then includes the step's own result, and `"final"` is the end of the trajectory. The
            default, as in TorchRL, is what was achieved before a step, which never includes the last position; a
            UserWarning says so, once, if the entry under `next` is stored as well.
        **arguments: the arguments of `TensorDictReplayBuffer`.

    Raises:
        WrongKindError: (a TypeError) `reward_fn` is not a function.
        UsageError: (a ValueError) the strategy is unknown, the ratio is outside [0, 1], or a function returned another
            shape.
        MissingKeyError: (a KeyError) goals, rewards or ends are not stored.
        SchemaError: (a RuntimeError) the elements are not steps.

    Andrychowicz et al., "Hindsight experience replay", 2017; names are TorchRL's.

    >>> import torch
    >>> from tensordict import TensorDict
    >>> from rbtool import LazyTensorStorage
    >>> def reward(rows):
    ...     reached = rows["next", "achieved_goal"] == rows["desired_goal"]
    ...     return reached.float(), reached
    >>> buffer = HERReplayBuffer(
    ...     reward, her_ratio=1.0, strategy="final", achieved_goal_key=("next", "achieved_goal"),
    ...     storage=LazyTensorStorage(10), batch_size=4,
    ... )
    >>> end, position = torch.tensor([[False], [False], [True]]), torch.arange(4).view(4, 1)
    >>> steps = TensorDict({"achieved_goal": position[:3], "desired_goal": torch.full((3, 1), 9)}, [3])
    >>> after = {"achieved_goal": position[1:], "reward": torch.zeros(3, 1), "done": end, "terminated": end}
    >>> index = buffer.extend(steps.set("next", TensorDict(after, [3])))
    >>> buffer.sample()["desired_goal"].squeeze(-1)
    tensor([3, 3, 3, 3])
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
        reward_key: Any = (NEXT, "reward"),
        end_key: Any = (NEXT, "done"),
        terminated_fn: Callable[[Any], Any] | bool | None = None,
        sampler: Any = None,
        **arguments: Any,
    ) -> None:
        keys: dict[str, Any] = {
            "goal_key": goal_key, "achieved_goal_key": achieved_goal_key, "reward_key": reward_key, "end_key": end_key,
        }  # fmt: skip
        self._relabelling = Relabelling(reward_fn, terminated_fn, **keys, keeps_ends=True)  # type: ignore[arg-type]
        self._warnings: dict[str, str | None] = {}
        """Warnings to give once, by subject; None after the warning, or if there is no reason for it."""
        self._achieved = AchievedRows(HindsightStrategy.of(strategy))
        self._reader = HindsightReader(
            self._achieved.strategy, self._relabelling.goal_keys, self._relabelling.achieved_goal_key
        )
        self._ratio = require_share("her_ratio", her_ratio)
        self._tables = TableFinder(StrictBoundaries(self._relabelling.end_key, any_flag=True).source)
        super().__init__(sampler=sampler, **arguments)

    @property
    def her_ratio(self) -> float:
        """The share of each batch that is relabelled."""
        return self._ratio

    @property
    def strategy(self) -> HindsightStrategy:
        """Which steps goals come from."""
        return self._achieved.strategy

    @property
    def rows_are_batches(self) -> bool:
        """False: rows are relabelled."""
        return False

    def _shown(self) -> dict[str, Any]:
        keys = ("goal_key", "achieved_goal_key", "reward_key")
        named = {name: key[0] if len(key) == 1 else key for name in keys for key in [getattr(self._relabelling, name)]}
        shown = {"strategy": self.strategy.value, "her_ratio": self.her_ratio, **named}
        return {name: repr(value) for name, value in shown.items()} | super()._shown()

    # Drawing ----------------------------------------------------------------------------------------

    def _draw(self, size: int, with_rows: bool = True) -> Draw:
        if not (with_rows and self._drawing.reads_rows):
            with self._sampling:
                return super()._draw(size, with_rows)
        with self._guard.hold(), self._sampling:
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
        """Read the rows and goals of an interrupted draw again; False if the rows were overwritten meanwhile."""
        with self._guard.hold():
            if not super().restored(draw):
                return False
            if draw.rows is not None:
                draw.rows = _RowsAndGoals(draw.rows, self._goals(draw))
            return True

    def _chances(self, index: Any) -> torch.Tensor:
        """Return a random number in [0, 1) for each relabelled element, float64 `[n]`; TorchRL draws the same ones."""
        size, *further = (index[0] if isinstance(index, tuple) else index).shape
        count = int(size * self._ratio) * math.prod(further)
        if self.strategy is HindsightStrategy.FINAL:
            return torch.zeros(count, dtype=torch.float64)
        if self.strategy is not HindsightStrategy.RANDOM:
            return torch.from_numpy(singles(count, self._rng)).double()
        device, length = None if self._rng is None else self._rng.device, len(self._storage)
        return (torch.randint(length, (count,), generator=self._rng, device=device).cpu() + 0.5).double() / length

    # Goals -------------------------------------------------------------------------------------------

    def _goals(self, draw: Draw) -> torch.Tensor | None:
        """Read the goals for the first elements of a draw, `[n, *goal]`; None if none are relabelled."""
        assert draw.chances is not None
        count = draw.chances.shape[0]
        if not count:
            return None
        index = draw.index if isinstance(draw.index, tuple) else (draw.index,)
        rows, *lanes = (part.numpy(force=True).reshape(-1)[:count] for part in index)
        chances, storage, key = draw.chances.numpy(), self._storage, self._relabelling.achieved_goal_key
        if self.strategy is HindsightStrategy.RANDOM:
            rows, *lanes = self._achieved.anywhere(storage, chances)
        else:
            lane = np.ravel_multi_index(lanes, tuple(storage.shape[1:])).astype(np.int64) if lanes else None
            rows = self._achieved.along(self._tables.table(storage), rows, lane, chances)
        found = gathered(storage, key, torch.from_numpy(rows), [torch.from_numpy(part) for part in lanes])
        if found is None:
            raise missing(key, "achieved goal")
        return found

    # Batches ----------------------------------------------------------------------------------------

    def _rows_of(self, draw: Draw, collate: Callable[[Any], Any] | None = None) -> Any:
        if any(transform.reads_rows for transform in self._looking_back):
            raise UsageError("windows have steps as they are stored, and a HERReplayBuffer would not relabel them")
        if draw.chances is None:  # the draw is from the saved queue of a buffer without relabelling
            with self._sampling:
                draw.chances = self._chances(draw.index)
        read = draw.rows
        if not isinstance(read, _RowsAndGoals):
            together = collate is None and self._reads_fresh_rows
            read = self._guard.read(lambda _: self._with_goals(draw, together), None)
        if read.first is not None:
            batch = read.rows
            self._mark_info(draw, batch, self._relabelling.apply(read.first), len(draw.chances))
        else:
            collate = collate or self._collate_fn
            batch = read.rows if collate is None else collate(read.rows)
            if read.goals is None:
                return batch
            batch = self._relabelled(batch, read.goals, draw)
        if "goals" not in self._warnings:
            key = self._relabelling.achieved_goal_key
            after = None if key[0] == NEXT else entry_of(batch, (NEXT, *key))
            self._warnings["goals"] = None if after is None else (
                f"goals are {'.'.join(key)!r}, achieved before each step; achieved_goal_key={(NEXT, *key)!r} takes "
                "what the step achieved, as in the paper"
            )  # fmt: skip
        if self._prefetcher is None:  # in a thread that prefetches, a warning could not point to the user's code
            self._warn()
        return batch

    def _deliver(self, size: int, out: Any = None) -> tuple[Draw, Any]:
        delivered = super()._deliver(size, out)
        self._warn()
        return delivered

    def _warn(self) -> None:
        """Give the warnings for which batches so far gave a reason, once each."""
        for subject, message in list(self._warnings.items()):
            if message is not None:
                self._warnings[subject] = None
                warn_caller(message)

    def _with_goals(self, draw: Draw, together: bool) -> _RowsAndGoals:
        """Read the rows of a draw and their goals; with `together`, in one call if that is possible."""
        assert draw.chances is not None
        if together:
            found = self._reader.read(self._storage, draw.index, draw.chances.numpy(), self._tables)
            if found is not None:
                return _RowsAndGoals(found.batch, None, found.first)
        return _RowsAndGoals(self._read(draw.index), self._goals(draw))

    def _relabelled(self, batch: Any, goals: torch.Tensor, draw: Draw) -> Any:
        """Relabel the first elements of a batch, and correct the flags in a slice sampler's info."""
        first = draw.index[0] if isinstance(draw.index, tuple) else draw.index
        if not is_tensor_collection(batch) or batch.batch_size != first.shape:
            found = list(batch.batch_size) if is_tensor_collection(batch) else f"a {type(batch).__name__}"
            raise SchemaError(
                f"only tensordicts of steps can be relabelled, found {found} for {list(first.shape)} elements"
            )
        relabelling, fresh = self._relabelling, self._reads_fresh_rows
        if not fresh:
            batch = batch.copy()
            for key in relabelling.changed:
                if (value := batch.get(key, None)) is not None:
                    batch.set(key, value.clone())
        rows, size = batch, first.shape[0]
        if first.dim() > 1:
            goals = goals.view(-1, *first.shape[1:], *goals.shape[1:])
        if (count := goals.shape[0]) < size:
            structure = self._storage.structure if fresh and isinstance(self._storage, TensorStorage) else None
            rows = batch[:count] if structure is None else _first_rows(batch, count, structure)
        self._mark_info(draw, batch, relabelling.apply(rows, goals), count)
        return batch

    def _mark_info(self, draw: Draw, batch: Any, ends: RelabelledEnds | None, count: int) -> None:
        """Correct the flags of the first elements in a draw's info."""
        relabelling = self._relabelling
        if ends is None and "ends" not in self._warnings:
            stale = entry_of(batch, relabelling.terminated_key) is not None
            self._warnings["ends"] = None if not stale else (
                f"{_name(relabelling.terminated_key)} of relabelled steps still belongs to their old goals, as no "
                "function computes it: bootstrapping ends at the wrong steps. Return (reward, terminated) from "
                "reward_fn, or pass terminated_fn; terminated_fn=False means that no goal ends an episode"
            )  # fmt: skip
        if ends is None or len(draw.info) == 1:
            return
        names = {key: key[0] if len(key) == 1 else key for key in relabelling.flags}
        marked = {key: draw.info[name].clone() for key, name in names.items() if name in draw.info}
        relabelling.mark({key: value[:count] for key, value in marked.items()}, ends)
        draw.info |= {names[key]: value for key, value in marked.items()}

    @property
    def _reads_fresh_rows(self) -> bool:
        """Whether rows that were just read are in fresh memory, so that they may be edited."""
        if self._collate_fn is not None or not isinstance(self._storage, TensorStorage):
            return False
        return self._transform.is_empty or not self._looking_back


def _first_rows(batch: Any, count: int, structure: TreeSpec) -> Any:
    """Return the first rows of a batch, as views."""
    first = map(operator.itemgetter(slice(count)), structure.flatten(batch))
    # This takes a third of the time of batch[:count].
    return structure.unflatten(first, torch.Size([count, *batch.batch_size[1:]]))
