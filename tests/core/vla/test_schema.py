"""Steps of vision-language-action datasets: the containers, and what is wrong with a step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict

from rbtool import VLAAction, VLAImages, VLAObservation, validate_vla_tensordict

KEYS = ("language_instruction", "action", ("observation", "image"), ("observation", "state"))


def steps(**changes: Any) -> TensorDict:
    """Sound steps with other entries; None takes one out. Nested names are joined by two underscores."""
    found = TensorDict(
        {
            "language_instruction": NonTensorData("pick it up", batch_size=[2]),
            "action": torch.zeros(2, 7),
            "observation": {"image": torch.zeros(2, 3, 4, 4, dtype=torch.uint8), "state": torch.zeros(2, 5)},
        },
        [2],
    )
    for name, value in changes.items():
        key = tuple(name.split("__"))
        del found[key]
        if value is not None:
            found.set(key, value)
    return found


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"observation__image": None},
        {"observation__state": None},
        {"language_instruction": torch.tensor([[1, 2], [3, 4]])},
        {"language_instruction": NonTensorStack("one", "two")},
        {"action": torch.zeros(2, 7, dtype=torch.int64)},
    ],
)
def test_sound_steps(changes: dict[str, Any]) -> None:
    assert validate_vla_tensordict(steps(**changes)) == []


@pytest.mark.parametrize(
    ("changes", "issue"),
    [
        ({"language_instruction": None}, "'language_instruction' is missing"),
        ({"language_instruction": NonTensorData("  ", batch_size=[2])}, "is blank"),
        ({"language_instruction": NonTensorStack("one", "")}, "of step 1 is blank"),
        ({"language_instruction": NonTensorData(3, batch_size=[2])}, "is a int, expected text"),
        ({"language_instruction": torch.zeros(2)}, "expected text or tokens"),
        ({"action": None}, "'action' is missing"),
        ({"action": torch.full((2, 7), torch.nan)}, "not finite"),
        ({"action": torch.zeros(2, 0)}, "no values"),
        ({"action": NonTensorData("up", batch_size=[2])}, "expected numbers"),
        ({"observation__image": None, "observation__state": None}, "'observation.image' and 'observation.state'"),
    ],
)
def test_what_is_wrong(changes: dict[str, Any], issue: str) -> None:
    (found,) = validate_vla_tensordict(steps(**changes), raise_on_error=False)
    assert issue in found
    for error in (ValueError, RuntimeError):
        with pytest.raises(error):
            validate_vla_tensordict(steps(**changes))


def test_what_is_not_required_may_be_missing() -> None:
    nothing = TensorDict({}, [2])
    assert len(validate_vla_tensordict(nothing, raise_on_error=False)) == 3
    optional = {"require_instruction": False, "require_action": False, "require_perception": False}
    assert validate_vla_tensordict(nothing, **optional) == []  # type: ignore[arg-type]
    broken = steps(action=torch.full((2, 7), torch.nan))
    assert len(validate_vla_tensordict(broken, raise_on_error=False, **optional)) == 1  # type: ignore[arg-type]
    assert validate_vla_tensordict(broken, check_finite=False) == []
    with pytest.raises(ValueError, match="the steps are a dict"):
        validate_vla_tensordict({})  # type: ignore[arg-type]


def test_containers() -> None:
    images = VLAImages(image=torch.zeros(2, 3, 4, 4), batch_size=[2])
    observation = VLAObservation(images=images, state=torch.arange(2), instruction="pick", batch_size=[2])
    assert observation[1].state == 1
    assert observation[1].instruction == "pick"
    assert observation[0].images.image.shape == (3, 4, 4)
    assert torch.stack([observation, observation]).batch_size == (2, 2)
    action = VLAAction(chunk=torch.zeros(2, 8, 7), padded=True, batch_size=[2])
    assert action.tokens is None
    assert action.padded is True
    assert action[0].chunk.shape == (8, 7)
