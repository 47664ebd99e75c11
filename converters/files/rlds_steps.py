"""What the steps of RLDS episodes mean in TED: their keys, and whether the last one is more than an observation.

RLDS (Ramos et al. 2021) numbers steps so that the last one, with `is_last`, holds the observation after the episode;
its action and reward are fillers. Many robot datasets set `is_last` on the last action instead, and have no such
observation. Files do not state which.
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
"""`observation`: the last step holds the observation after the one before it, and nothing else. `flagged`: it does in
episodes that end with `is_last`. `step`: it is a step like the others, and no observation follows. `auto`:
`LastSteps.decide` chooses for the whole dataset."""
IS_FIRST, IS_LAST, IS_TERMINAL = "is_first", "is_last", "is_terminal"
STEP_FLAGS = (IS_FIRST, IS_LAST, IS_TERMINAL)
IS_INIT: Key = ("is_init",)
"""Set in the first step of an episode."""
_LEAST_CHANCE = 1e-3
_TAKEN = frozenset({"done", "episode", "index", "next", "terminated", "truncated"})


def require_rlds_last(name: object) -> RldsLast:
    """Return the choice of that name, `auto` for None; UsageError for any other."""
    for known in get_args(RldsLast):
        if name in (known, None):
            return known  # type: ignore[no-any-return]
    raise UsageError(f"--rlds-last is {str(name)!r}, expected one of {', '.join(get_args(RldsLast))}")


def fillers(actions: Iterable[Array], rewards: Array | None, steps: int) -> Array:
    """Return bool `[steps]`: whether every value of the actions `[steps, ...]` and of the reward is 0 or NaN."""
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
    """What was decided about last steps, and a sentence on why. `ended`: it is only about those with `is_last`."""

    is_observation: bool
    ended: bool
    note: str

    @property
    def choice(self) -> RldsLast:
        """What asks for the same."""
        return ("flagged" if self.ended else "observation") if self.is_observation else "step"

    def observed(self, *, is_last: bool) -> bool:
        """Whether the last step of an episode is an observation only; `is_last` is its flag."""
        return self.is_observation and (is_last or not self.ended)


@dataclass(slots=True)
class LastSteps:
    """Counts, over all episodes of a dataset, the steps that look like fillers.

    `ends` are the last steps with `is_last` in episodes of two or more steps, `before` the steps next to them, and
    `others` all steps but the last; `*_fillers` count the steps whose actions and reward are 0 or NaN.
    """

    ends: int = 0
    end_fillers: int = 0
    before_fillers: int = 0
    others: int = 0
    other_fillers: int = 0

    def add(self, filler: Array, *, is_last: bool) -> None:
        """Count an episode: `filler` is bool `[T]` as `fillers` gives it, `is_last` the flag of its last step."""
        steps = len(filler)
        self.others += max(0, steps - 1)
        self.other_fillers += int(filler[:-1].sum())
        if is_last and steps > 1:
            self.ends += 1
            self.end_fillers += bool(filler[-1])
            self.before_fillers += bool(filler[-2])

    @property
    def chance(self) -> float:
        """How likely it is that all last steps look like fillers though they are steps like the others.

        Each would with the share that the other steps have, or that the steps next to the last ones have where it is
        larger. The share is estimated by the rule of succession, so that few steps prove little.
        """
        share = (self.other_fillers + 1) / (self.others + 2)
        if self.ends:
            share = max(share, self.before_fillers / self.ends)
        return float(share**self.ends)

    def decide(self, choice: RldsLast) -> LastStep:
        """Decide for all episodes; `auto` takes last steps for observations only where nothing would be lost.

        That is where the actions and the reward of every last step with `is_last` are 0 or NaN, and where that is not
        by chance: `chance` is below 0.001. Episodes that do not end with `is_last` are incomplete; what they have are
        steps.
        """
        if choice == "observation":
            return LastStep(True, False, "the last step of every episode is an observation only, as --rlds-last states")
        if choice == "flagged":
            why = "the last step of every episode that ends with is_last is an observation only, as --rlds-last states"
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
                f"{counted}, {compared}: it is taken for the observation after the episode, and no step "
                "(--rlds-last step states otherwise)"
            )
        if self.end_fillers == self.ends:
            counted += f", {compared}, which may be chance"
        taken = "it is taken for a step, and no observation follows it"
        return f"{counted}: {taken} (--rlds-last observation states otherwise)"


def step_meaning(path: Sequence[str]) -> tuple[Key, Role, Timing] | None:
    """Return key, role and timing of a feature of steps by its path; None for the flags, which are not columns.

    `observation` and features of another name are there before and after a step: RLDS has them in its last step, too.
    `action`, and names that begin so, belong to a step; `reward` and `discount` come after it.
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
