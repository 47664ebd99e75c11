"""The suite of transforms on ours and on an own one, and a saboteur for each rule of the suite."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import each
from tensordict import TensorDict, TensorDictBase

from rbtool.core.errors import UsageError
from rbtool.core.testing.transforms import TransformTests as Suite
from rbtool.core.transforms.base import Transform
from rbtool.core.transforms.keyed import KeyedTransform, Normalize
from rbtool.core.transforms.returns import MultiStepTransform
from rbtool.core.transforms.windows import FrameStack, RandomCropTensorDict


def steps() -> TensorDictBase:
    value = torch.arange(12.0).reshape(2, 6, 1)
    after = {"observation": value + 1, "reward": value * 2, "done": torch.zeros(2, 6, 1, dtype=torch.bool)}
    return TensorDict({"observation": value, "next": TensorDict(after, [2, 6])}, [2, 6])


# The example of a transform of one's own.


class Clip(Transform):
    """Keeps rewards within `limit` on the way in, and counts those that were outside."""

    counts_writes = True

    def __init__(self, limit: float) -> None:
        super().__init__()
        self.limit = limit
        self.register_buffer("outside", torch.zeros((), dtype=torch.int64))

    def inv(self, data: TensorDictBase) -> TensorDictBase:
        reward = data["next", "reward"]
        self.outside += (reward.abs() > self.limit).sum()
        data = data.copy()
        data["next"] = data["next"].copy().set("reward", reward.clamp(-self.limit, self.limit))
        return data


class Halved(KeyedTransform):
    """Halves entries, at the root and under `next`."""

    def change(self, value: torch.Tensor, key: Any, data: Any) -> torch.Tensor:
        return value / 2


class TestClip(Suite):
    def transform(self) -> Transform:
        return Clip(3.0)

    def batch(self) -> TensorDictBase:
        return steps()


OURS: list[Callable[[], Transform]] = [
    lambda: Halved("observation"),
    lambda: Normalize("observation", loc=1.0, scale=2.0),
    lambda: FrameStack(2, "observation", dim=-1),
    lambda: RandomCropTensorDict(3),
    lambda: MultiStepTransform(2, 0.5, check_continuity=False),
]
RULES = sorted(name for name in dir(Suite) if name.startswith("test_"))


def suite(make: Callable[[], Transform]) -> Suite:
    class Case(Suite):
        def transform(self) -> Transform:
            return make()

        def batch(self) -> TensorDictBase:
            return steps()

    return Case()


@each("rule", RULES)
@each("make", OURS)
def test_ours_pass(make: Callable[[], Transform], rule: str) -> None:
    getattr(suite(make), rule)()


class Counts(Transform):
    """Numbers what is written, and says nothing of it."""

    seen = 0

    def inv(self, data: Any) -> Any:
        self.seen += 1
        return data.copy().set("seen", torch.full(data.shape, self.seen))


class Keeps(Transform):
    """Keeps the last data, and returns those before."""

    counts_writes = True

    def __init__(self) -> None:
        super().__init__()
        self.kept: Any = None

    def inv(self, data: Any) -> Any:
        before, self.kept = self.kept, data
        return before

    def flush(self) -> Any:
        return self.kept

    def held_back(self) -> Any:
        return self.kept

    def hold_back(self, held: Any) -> None:
        self.kept = held


def doubled(self: Any, data: Any) -> Any:
    data["observation"].mul_(2)
    return data


def drawing_globally(self: Any, data: Any) -> Any:
    return data.copy().set("noise", torch.rand(data.shape))


def drawing_and_forgetting(self: Any, data: Any) -> Any:
    torch.rand(1)
    return data


def of(parent: type[Transform] = Transform, *args: Any, **members: Any) -> Callable[[], Transform]:
    """Make transforms of a class with these members."""
    return lambda: type("Saboteur", (parent,), members)(*args)


SABOTEURS: dict[str, Callable[[], Transform]] = {
    "test_forward_does_not_change_the_batch": of(forward=doubled),
    "test_inv_does_not_change_the_data": of(inv=doubled),
    "test_forward_draws_from_its_generator_only": of(forward=drawing_globally),
    "test_forward_does_not_advance_the_global_generator": of(forward=drawing_and_forgetting, draws=True),
    "test_forward_keeps_no_state": of(Counts, forward=Counts.inv),
    "test_inv_keeps_no_state_unless_it_counts_writes": Counts,
    "test_the_state_is_complete": of(Counts, counts_writes=True),
    "test_a_copy_has_the_state_and_no_generator": of(
        Counts, counts_writes=True, __deepcopy__=lambda self, memo: type(self)()
    ),
    "test_entries_named_elsewhere_are_left_alone": of(
        Halved, ["observation", ("next", "observation")], named_in_next=property(lambda self: frozenset())
    ),
    "test_steps_kept_for_later_can_be_restored": Keeps,
}


def test_every_rule_has_a_saboteur() -> None:
    assert sorted(SABOTEURS) == RULES


@pytest.mark.parametrize("rule", RULES)
def test_a_saboteur_fails(rule: str) -> None:
    with pytest.raises(AssertionError):
        getattr(suite(SABOTEURS[rule]), rule)()


@pytest.mark.parametrize("name", ["__call__", "_call", "_inv_call", "_apply_transform", "_inv_apply_transform"])
def test_a_method_that_no_buffer_calls_is_refused(name: str) -> None:
    with pytest.raises(TypeError, match=rf"Own .*{name}\(\).*\n?.*implement (forward|inv)") as raised:
        type("Own", (Transform,), {name: lambda self, data: data})
    assert isinstance(raised.value, UsageError)


@pytest.mark.parametrize("name", ["forward", "pairs"])
def test_a_keyed_transform_implements_change(name: str) -> None:
    with pytest.raises(TypeError, match=rf"Own overrides {name}\(\).*final\n?.*implement change"):
        type("Own", (KeyedTransform,), {name: lambda self, data: data})
