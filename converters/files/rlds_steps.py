"""Maps steps of RLDS to TED: their keys, and whether the last step of an episode is only an observation.

In RLDS (Ramos et al. 2021) the last step of an episode, with `is_last`, holds the final observation; its action and
reward are fillers. Many robot datasets set `is_last` on the last action instead, and have no final observation. Files
do not state which, so `LastSteps` decides by the values.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

import numpy as np

from ...core.errors import UsageError
from ...core.format.contracts import Array
from ...core.ted.schema import ACTION, REWARD, Key, Role, Timing, safe_part

RldsLast: TypeAlias = Literal["auto", "observation", "flagged", "step"]
"""What the last step of an episode is.

`observation`: only the observation after the step before it. `flagged`: only an observation if `is_last` is set.
`step`: a step like the others, with no observation after it. `auto`: `LastSteps.decide` chooses for the whole dataset.
"""
IS_FIRST, IS_LAST, IS_TERMINAL = "is_first", "is_last", "is_terminal"
STEP_FLAGS = (IS_FIRST, IS_LAST, IS_TERMINAL)
IS_INIT: Key = ("is_init",)
"""Set in the first step of an episode."""
_LEAST_CHANCE = 1e-3
_TAKEN = frozenset({"done", "episode", "index", "next", "terminated", "truncated"})


def require_rlds_last(name: object) -> RldsLast:
    """Return the option `rlds_last`, `auto` for None; UsageError for an unknown one."""
    for known in get_args(RldsLast):
        if name in (known, None):
            return known  # type: ignore[no-any-return]
    raise UsageError(f"--rlds-last is {str(name)!r}, expected one of {', '.join(get_args(RldsLast))}")


def fillers(actions: Iterable[Array], rewards: Array | None, steps: int) -> Array:
    """Return bool `[steps]`: whether all values of the actions `[steps, ...]` and of the reward are 0 or NaN."""
    found = np.ones(steps, bool)
    for column in (*actions, *(() if rewards is None else (rewards,))):
        flat = column.reshape(steps, -1)
        zeros = flat == 0
        if flat.dtype.kind == "f":
            zeros |= np.isnan(flat)
        found &= zeros.all(axis=1)
    return found


@dataclass(frozen=True, slots=True)
class LastStep:
    """The decision about the last steps of all episodes, with a note that explains it.

    With `ended`, `is_observation` holds only for last steps with `is_last`.
    """

    is_observation: bool
    ended: bool
    note: str

    @property
    def choice(self) -> RldsLast:
        """The option that leads to the same decision."""
        return ("flagged" if self.ended else "observation") if self.is_observation else "step"

    def observed(self, *, is_last: bool) -> bool:
        """Return whether the last step of an episode is only an observation; `is_last` is its flag."""
        return self.is_observation and (is_last or not self.ended)


@dataclass(slots=True)
class LastSteps:
    """Counts, over all episodes of a dataset, the steps that look like fillers: actions and reward are 0 or NaN.

    Attributes:
        ends: last steps with `is_last`, of episodes of two or more steps.
        end_fillers: how many of `ends` look like fillers.
        before_fillers: how many of the steps before `ends` look like fillers.
        others: all steps except last ones.
        other_fillers: how many of `others` look like fillers.
    """

    ends: int = 0
    end_fillers: int = 0
    before_fillers: int = 0
    others: int = 0
    other_fillers: int = 0

    def add(self, filler: Array, *, is_last: bool) -> None:
        """Count an episode: `filler` is the bool `[T]` of `fillers`, `is_last` the flag of its last step."""
        steps = len(filler)
        self.others += max(0, steps - 1)
        self.other_fillers += int(filler[:-1].sum())
        if is_last and steps > 1:
            self.ends += 1
            self.end_fillers += bool(filler[-1])
            self.before_fillers += bool(filler[-2])

    @property
    def chance(self) -> float:
        """Probability that all last steps look like fillers by chance, although they are ordinary steps.

        It is `share ** ends`, where `share` is the fraction of fillers among other steps, or among the steps right
        before the last ones if that is larger: robots often stand still at the end. The fraction is estimated by the
        rule of succession, so that few steps prove little.
        """
        share = (self.other_fillers + 1) / (self.others + 2)
        if self.ends:
            share = max(share, self.before_fillers / self.ends)
        return float(share**self.ends)

    def decide(self, choice: RldsLast) -> LastStep:
        """Decide for all episodes.

        `auto` takes last steps with `is_last` for observations only if no action or reward is lost: in every such
        step they are 0 or NaN, and `chance` is below 0.001. An episode that does not end with `is_last` is incomplete,
        and its last step is an ordinary one.
        """
        if choice == "observation":
            return LastStep(True, False, "the last step of every episode is only an observation, as --rlds-last states")
        if choice == "flagged":
            why = "the last step of every episode that ends with is_last is only an observation, as --rlds-last states"
            return LastStep(True, True, why)
        if choice == "step":
            return LastStep(False, False, "the last step of every episode is a step, as --rlds-last states")
        is_observation = self.ends > 0 and self.end_fillers == self.ends and self.chance < _LEAST_CHANCE
        return LastStep(is_observation, True, self._why(is_observation))

    def _why(self, is_observation: bool) -> str:
        if not self.ends:
            return "no episode of two or more steps ends with is_last: every last step is taken for a step"
        counted = f"the last step has an action and a reward of zeros in {self.end_fillers:,} of {self.ends:,} episodes"
        compared = f"as {self.other_fillers:,} of {self.others:,} other steps have"
        if is_observation:
            return (
                f"{counted}, {compared}: it is taken for the observation after the episode, not for a step "
                "(--rlds-last step states otherwise)"
            )
        if self.end_fillers == self.ends:
            counted += f", {compared}, which may be chance"
        taken = "it is taken for a step, and no observation follows it"
        return f"{counted}: {taken} (--rlds-last observation states otherwise)"


def step_meaning(path: Sequence[str]) -> tuple[Key, Role, Timing] | None:
    """Return key, role and timing of a feature of steps by its path; None for the flags, which are not columns.

    `action` and names that begin with it belong to a step; `reward` and `discount` come after it. `observation` and
    any other feature are known before and after a step, since the last step of RLDS has them, too.
    """
    top = path[0]
    if len(path) == 1 and top in STEP_FLAGS:
        return None
    key = (top + "_" if top.rstrip("_") in _TAKEN else safe_part(top), *map(safe_part, path[1:]))
    if key == REWARD:
        return key, "reward", "result"
    if top == "discount":
        return key, "info", "result"
    if top.startswith("action"):
        return key, "action" if top == ACTION[0] else "info", "step"
    return key, "observation" if top == "observation" else "info", "state"
