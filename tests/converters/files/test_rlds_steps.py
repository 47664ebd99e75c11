"""What RLDS steps mean: whether the last one is an observation only, and which key each feature gets."""

from __future__ import annotations

import numpy as np
import pytest
from cases import each

from rbtool.converters.files.rlds_steps import LastSteps, fillers, require_rlds_last, step_meaning
from rbtool.core.errors import UsageError


def counted(*episodes: tuple[str, bool]) -> LastSteps:
    """Count episodes, each written as a text: `.` is a step with an action, `0` one that looks like a filler."""
    found = LastSteps()
    for steps, is_last in episodes:
        found.add(np.array([one == "0" for one in steps]), is_last=is_last)
    return found


def test_zeros_in_every_last_step_and_nowhere_else_make_an_observation() -> None:
    decision = counted(*[("." * 9 + "0", True)] * 5).decide("auto")
    assert decision.is_observation
    assert "zeros in 5 of 5 episodes, as 0 of 45 other steps have" in decision.note


@each(
    ("episodes", "why"),
    [
        ([("." * 10, True)] * 5, "zeros in 0 of 5 episodes: it is taken for a step"),
        ([("." * 9 + "0", True)] * 9 + [("." * 10, True)], "zeros in 9 of 10 episodes: it is taken for a step"),
        ([("....0", True)], "in 1 of 1 episodes, as 0 of 4 other steps have, which may be chance"),
        ([("0..0.0.0", True)] * 4, "as 12 of 28 other steps have, which may be chance"),
        ([("." * 98 + "00", True)] * 4, "which may be chance"),
        ([("." * 9 + "0", False)] * 5, "no episode of two or more steps ends with is_last"),
        ([("0", True)] * 9, "no episode of two or more steps"),
        ([], "no episode"),
    ],
)
def test_anything_less_makes_a_step(episodes: list[tuple[str, bool]], why: str) -> None:
    decision = counted(*episodes).decide("auto")
    assert not decision.is_observation
    assert why in decision.note


def test_an_episode_without_is_last_is_incomplete_and_ends_with_a_step() -> None:
    decision = counted(*[("." * 9 + "0", True)] * 5, ("....0", False)).decide("auto")
    assert [decision.observed(is_last=flag) for flag in (True, False)] == [True, False]


@pytest.mark.parametrize(("choice", "expected"), [("observation", True), ("step", False)])
def test_a_choice_holds_for_every_episode(choice: str, expected: bool) -> None:
    decision = counted(("....", True)).decide(require_rlds_last(choice))
    assert [decision.observed(is_last=flag) for flag in (True, False)] == [expected, expected]
    assert "as --rlds-last states" in decision.note


def test_a_filler_has_zeros_or_nan_in_all_actions_and_in_the_reward() -> None:
    world = np.array([[0, 0], [0, 1], [0, 0], [np.nan, 0]], np.float32)
    gripper, reward = np.array([False, False, False, False]), np.array([0, 0, 1, np.nan], np.float32)
    assert fillers([world, gripper], reward, 4).tolist() == [True, False, False, True]
    assert fillers([world], None, 4).tolist() == [True, False, True, True]


def test_the_choice_is_auto_unless_one_is_named() -> None:
    assert require_rlds_last(None) == require_rlds_last("auto") == "auto"
    with pytest.raises(UsageError, match="--rlds-last is 'last', expected one of auto, observation, flagged, step"):
        require_rlds_last("last")


@each(
    ("path", "expected"),
    [
        ("reward", (("reward",), "reward", "result")),
        ("discount", (("discount",), "info", "result")),
        ("action", (("action",), "action", "step")),
        ("action/world_vector", (("action", "world_vector"), "action", "step")),
        ("action_mode", (("action_mode",), "info", "step")),
        ("observation", (("observation",), "observation", "state")),
        ("observation/shape", (("observation", "shape_"), "observation", "state")),
        ("language_embedding", (("language_embedding",), "info", "state")),
        ("next/x", (("next_", "x"), "info", "state")),
        ("is_last", None),
    ],
)
def test_each_feature_has_a_key_and_a_time(path: str, expected: object) -> None:
    assert step_meaning(path.split("/")) == expected
