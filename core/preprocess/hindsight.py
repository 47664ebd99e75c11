"""Hindsight relabelling of a dataset: steps get goals that their episode achieved, and new rewards for these goals."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import UsageError, require_choice, require_share
from ..ted.schema import NEXT, NEXT_REWARD, Field, Key, key_called, key_name, unknown_field
from .functions import FunctionProcessor, find_function
from .processor import Context, LoadedProcessor, Unit

if TYPE_CHECKING:
    from tensordict import TensorDictBase

_GOAL, _ACHIEVED = "desired_goal", "achieved_goal"
_STRATEGIES = ("future", "final", "episode")


@dataclass(frozen=True, slots=True)
class Hindsight:
    """How steps of a dataset are relabelled. The arguments have the same names as in `HERReplayBuffer`.

    UsageError for an unknown strategy and for a ratio outside of [0, 1]. The strategy `random`, which takes goals from
    other episodes, is not available here.
    """

    strategy: str
    her_ratio: float = 0.8
    goal_key: str | None = None
    achieved_goal_key: str | None = None

    def __post_init__(self) -> None:
        require_choice("hindsight", self.strategy, _STRATEGIES)
        require_share("the share of relabelled steps", self.her_ratio)

    @classmethod
    def of(cls, given: str | Mapping[str, Any]) -> Hindsight:
        """Read `STRATEGY`, `STRATEGY:RATIO` or a mapping of the arguments; UsageError for anything else."""
        if isinstance(given, str):
            strategy, colon, ratio = given.partition(":")
            try:
                return cls(strategy, float(ratio)) if colon else cls(strategy)
            except ValueError as error:
                if isinstance(error, UsageError):
                    raise
                raise UsageError(f"--hindsight {given!r} is written STRATEGY:RATIO, like future:0.8") from error
        if not set(given) <= set(cls.__dataclass_fields__):
            raise UsageError(
                f"hindsight is {given!r}, a strategy or a mapping of {', '.join(cls.__dataclass_fields__)}"
            )
        return cls(**given)

    def keys(self, fields: Sequence[Field]) -> tuple[Key, Key]:
        """Return the keys of the goal and of the goal that a step achieved; UsageError if they cannot be determined."""
        if self.goal_key is not None:
            goal = _named(self.goal_key, fields)
        else:
            found = [one.key for one in fields if one.key[-1] == _GOAL and one.key[0] != NEXT]
            if len(found) != 1:
                raise UsageError(
                    f"{len(found)} fields are called {_GOAL}, expected one",
                    hint="add --goal-key FIELD and --achieved-goal-key FIELD",
                )
            goal = found[0]
        if self.achieved_goal_key is not None:
            return goal, _named(self.achieved_goal_key, fields)
        beside = (*goal[:-1], _ACHIEVED) if goal[0] != NEXT else (*goal[1:-1], _ACHIEVED)
        known = {one.key for one in fields}
        if (NEXT, *beside) not in known and beside in known:
            raise UsageError(
                f"the dataset has no {key_name((NEXT, *beside))!r}, the goal that a step achieved",
                hint=f"--achieved-goal-key {key_name(beside)} uses the goal that was achieved before the step",
            )
        return goal, _named(key_name((NEXT, *beside)), fields)


def _named(name: str, fields: Sequence[Field]) -> Key:
    """Return the key of a field by its name; UsageError for an unknown one."""
    key = key_called(name, [one.key for one in fields])
    if key is None:
        raise unknown_field(name, [one.name for one in fields])
    return key


@dataclass(frozen=True)
class HindsightProcessor(FunctionProcessor):
    """Relabels steps, episode by episode; the function computes the rewards and terminations of relabelled steps."""

    unit: Unit = field(init=False, default="episode")
    vmap: bool | None = field(init=False, default=None)
    strategy: str = "future"
    her_ratio: float = 0.8
    goal_key: Key = ()
    achieved_goal_key: Key = ()

    @classmethod
    def of(
        cls, function: Callable[[Any], Any] | str | None, hindsight: str | Mapping[str, Any], fields: Sequence[Field]
    ) -> HindsightProcessor:
        """Make a processor for these fields; UsageError if there is no function or the arguments do not fit them."""
        asked = Hindsight.of(hindsight)
        if function is None:
            raise UsageError(
                "hindsight needs a function: rewards and terminations depend on the goal",
                hint="add --fn FILE.py:NAME, which returns (reward, terminated) of the steps that it gets",
            )
        if NEXT_REWARD not in {one.key for one in fields}:
            raise UsageError("hindsight needs next.reward, which the dataset does not have")
        goal, achieved = asked.keys(fields)
        return cls(
            find_function(function), strategy=asked.strategy, her_ratio=float(asked.her_ratio), goal_key=goal,
            achieved_goal_key=achieved,
        )  # fmt: skip

    def load(self, context: Context) -> LoadedProcessor:
        """Load the function; UsageError if that fails."""
        from .units import EpisodeUnit, UserFunction  # imports torch, which is not needed to describe the processor

        relabel = _Relabeller(
            self.function.load(), self.strategy, self.her_ratio, self.goal_key, self.achieved_goal_key
        )
        return EpisodeUnit(UserFunction(self.label, relabel), context.seed, new_flags_end=True)

    def arguments(self) -> dict[str, Any]:
        """The function's name, and how steps are relabelled."""
        hindsight = {
            "strategy": self.strategy, "her_ratio": self.her_ratio, "goal_key": key_name(self.goal_key),
            "achieved_goal_key": key_name(self.achieved_goal_key),
        }  # fmt: skip
        return {**super().arguments(), "hindsight": hindsight}

    def keeps_rows(self) -> bool:
        """True: every step stays."""
        return True


class _Relabeller:
    """Relabels a random share of the steps of an episode with goals that were achieved in it.

    It is created in the process that runs it, because only that process needs torch.
    """

    def __init__(
        self, function: Callable[[Any], Any], strategy: str, ratio: float, goal_key: Key, achieved_goal_key: Key
    ) -> None:
        from ..buffers.hindsight import Relabelling
        from ..samplers.hindsight import HindsightStrategy

        self._relabelling = Relabelling(function, goal_key=goal_key, achieved_goal_key=achieved_goal_key)
        self._strategy = HindsightStrategy.of(strategy)
        self._ratio = ratio

    def __call__(self, episode: TensorDictBase) -> TensorDictBase:
        """Relabel an episode `[T]` in place: goals, rewards and end flags of the chosen steps. Return it."""
        import torch

        chances = torch.rand(2, len(episode), dtype=torch.float64).numpy()  # seeded by the episode
        chosen = np.flatnonzero(chances[0] < self._ratio)
        if not len(chosen):
            return episode
        reach = len(episode) - chosen
        places = torch.from_numpy(chosen + self._strategy.steps(chances[1][chosen], chosen, reach))
        rows = torch.from_numpy(chosen)
        part = episode[rows]
        self._relabelling.apply(part, episode.get(self._relabelling.achieved_goal_key)[places])
        for key in self._relabelling.changed:
            if (value := part.get(key, None)) is not None:
                episode.get(key)[rows] = value
        return episode
