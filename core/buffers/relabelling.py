"""Which goals steps get in hindsight, and what follows from them: rewards and end flags."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ..errors import MissingKeyError, RbtoolError, SchemaError, UsageError
from ..samplers.boundaries import Key, boundary_key
from ..storages.pytree import entry_of
from .parts import WrongKindError

_NEXT = "next"


def checked_ratio(ratio: Any) -> float:
    """Return the share of relabelled steps; UsageError for anything but a number from 0 to 1."""
    if isinstance(ratio, bool) or not isinstance(ratio, int | float) or not 0 <= ratio <= 1:
        raise UsageError(f"her_ratio is {ratio!r}, expected a number from 0 to 1")
    return float(ratio)


class RelabelledEnds(NamedTuple):
    """Which steps are terminated under their new goals, and which no longer are; bool `[n, ...]`, None for no step."""

    terminated: torch.Tensor | None
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

    @functools.cached_property
    def _terminated_key(self) -> Key:
        return (*self.end_key[:-1], "terminated")

    @functools.cached_property
    def _truncated_key(self) -> Key:
        return (*self.end_key[:-1], "truncated")

    @functools.cached_property
    def goal_keys(self) -> tuple[Key, ...]:
        """Where goals are: `goal_key`, then the entry under `next`, which need not be stored."""
        return (self.goal_key,) if self.goal_key[0] == _NEXT else (self.goal_key, (_NEXT, *self.goal_key))

    @functools.cached_property
    def changed(self) -> tuple[Key, ...]:
        """The entries that change, as far as they are stored."""
        return (*self.goal_keys, self.reward_key, *self.flags)

    @functools.cached_property
    def flags(self) -> tuple[Key, ...]:
        """The end flags, in the order in which they are changed."""
        done = (*self.end_key[:-1], "done")
        return tuple(dict.fromkeys((self._truncated_key, self._terminated_key, done, self.end_key)))

    def apply(self, rows: Any, goals: torch.Tensor | None = None) -> RelabelledEnds | None:
        """Give steps, a tensordict `[n]`, other goals, `[n, *goal]`; their entries `changed` are edited in place.

        Without `goals` they have them already. Returns what becomes of their ends; None for steps without `terminated`,
        for which none is computed.
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
        stored = flags[self._terminated_key]
        like = flags[self.end_key] if stored is None else stored
        if like is None:
            return None
        if given is None and self.terminated_fn is False:
            return RelabelledEnds(None, None if stored is None else _marked(stored))
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
        terminated, withdrawn = ends
        for key in self.flags:
            value = flags.get(key)
            if value is None:
                continue
            if key == self._terminated_key:
                value.zero_() if terminated is None else value.copy_(terminated.view(value.shape))
            elif (more := withdrawn if key == self._truncated_key else terminated) is not None:
                value.logical_or_(more if more.shape == value.shape else more.view(value.shape))


def _marked(flags: torch.Tensor) -> torch.Tensor:
    """Return where flags are set, in memory of its own."""
    return flags.clone() if flags.dtype is torch.bool else flags != 0  # a third of the time of a comparison


def missing(key: Key, role: str) -> MissingKeyError:
    """Return the error for a missing entry, which names its role."""
    return MissingKeyError(f"the {role} {_name(key)} is not in the data")


def _name(key: Key) -> str:
    return repr(".".join(key))


def _require_alike(
    given: Any, old: torch.Tensor, error: type[RbtoolError], name: str, what: str, *, any_type: bool = False
) -> None:
    """Raise an error for what has another shape than an entry, or a type whose values it cannot have."""
    if type(given) is torch.Tensor and given.shape == old.shape and (any_type or given.dtype is old.dtype):
        return
    if not isinstance(given, torch.Tensor) or given.shape != old.shape:
        found = list(given.shape) if isinstance(given, torch.Tensor) else f"a {type(given).__name__}"
        raise error(f"{name} is {found}, expected {what} of shape {list(old.shape)}")
    if not any_type and given.dtype is not old.dtype and not torch.can_cast(given.dtype, old.dtype):
        raise error(f"{name} is {given.dtype}, expected {what} of {old.dtype}")
