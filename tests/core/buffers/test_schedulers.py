from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from cases import each

import rbtool
from rbtool import (
    LambdaScheduler,
    LazyTensorStorage,
    LinearScheduler,
    ParameterScheduler,
    PrioritizedSampler,
    SchedulerList,
    SliceSampler,
    StepScheduler,
)


def prioritized(beta: float = 0.4) -> PrioritizedSampler:
    return PrioritizedSampler(10, alpha=0.7, beta=beta)


def steps(scheduler: Any, count: int) -> list[float]:
    found = []
    for _ in range(count):
        scheduler.step()
        found.append(getattr(scheduler.sampler, scheduler.param_name))
    return found


@each(
    ("make", "expected"),
    [
        (lambda obj: LinearScheduler(obj, "beta", 1.0, 4), [0.55, 0.7, 0.85, 1.0, 1.0]),
        (lambda obj: LinearScheduler(obj, "beta", final_value=0, num_steps=1), [0, 0, 0, 0, 0]),
        (lambda obj: StepScheduler(obj, "beta"), [0.36, 0.324, 0.2916, 0.26244, 0.236196]),
        (lambda obj: StepScheduler(obj, "beta", gamma=2, n_steps=2), [0.4, 0.8, 0.8, 1.6, 1.6]),
        (lambda obj: StepScheduler(obj, "beta", 0.1, mode="additive", max_value=0.6), [0.5, 0.6, 0.6, 0.6, 0.6]),
        (lambda obj: StepScheduler(obj, "beta", -0.3, mode="additive", min_value=0), [0.1, 0, 0, 0, 0]),
        (lambda obj: StepScheduler(obj, "beta", -0.3, 1, "additive", 0, None), [0.1, 0, 0, 0, 0]),
        (lambda obj: StepScheduler(obj, "beta", n_steps=9, max_value=0), [0, 0, 0, 0, 0]),
        (lambda obj: StepScheduler(obj, "beta", 2, max_value=math.inf), [0.8, 1.6, 3.2, 6.4, 12.8]),
        (lambda obj: StepScheduler(obj, "beta", 1, min_value=-math.inf), [0.4, 0.4, 0.4, 0.4, 0.4]),
        (lambda obj: LambdaScheduler(obj, "beta", lambda step: 1 + step, max_value=1), [0.8, 1, 1, 1, 1]),
        (lambda obj: LambdaScheduler(obj, "beta", lambda step: -step, min_value=0), [0, 0, 0, 0, 0]),
        (lambda obj: LambdaScheduler(obj, "alpha", lambda k: torch.tensor(1 / k)), [0.7 / k for k in range(1, 6)]),
    ],
)  # fmt: skip
@each("in_buffer", [True, False])
def test_values_follow_the_schedule(make: Any, expected: list[float], in_buffer: bool) -> None:
    sampler = prioritized()
    obj: Any = rbtool.ReplayBuffer(storage=LazyTensorStorage(10), sampler=sampler) if in_buffer else sampler
    assert steps(make(obj), 5) == pytest.approx(expected)


def test_values_keep_their_type() -> None:
    sampler = SliceSampler(slice_len=4)
    found = steps(LinearScheduler(sampler, "slice_len", 10, 4), 5)
    assert found == [6, 7, 8, 10, 10]  # rounded
    found += steps(StepScheduler(sampler, "slice_len", gamma=0.9), 4)
    assert found[5:] == [round(10 * 0.9**step) for step in range(1, 5)]
    assert {type(value) for value in found} == {int}
    other: Any = prioritized()
    other.temperature = torch.tensor([0.5], dtype=torch.float16)
    tensors: Any = steps(LinearScheduler(other, "temperature", 1.0, 2), 2)
    assert [(value.dtype, value.tolist()) for value in tensors] == [(torch.float16, [0.75]), (torch.float16, [1.0])]


def test_the_sampler_of_a_buffer_may_be_replaced() -> None:
    buffer = rbtool.ReplayBuffer(storage=LazyTensorStorage(10), sampler=prioritized())
    scheduler = LinearScheduler(buffer, "beta", 1.0, 2)
    buffer.set_sampler(prioritized(0.1))
    assert steps(scheduler, 1) == [0.7]


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: LinearScheduler(3, "beta", 1.0, 4), TypeError, "obj is a int, expected a sampler"),
        (lambda: LinearScheduler(prioritized(), "bogus", 1.0, 4), ValueError, "has no parameter 'bogus'"),
        (lambda: LinearScheduler(rbtool.ReplayBuffer(), "beta", 1.0, 4), ValueError, "RandomSampler has no"),
        (lambda: LinearScheduler(SliceSampler(slice_len=2), "num_slices", 1, 4), ValueError, "num_slices is None"),
        (lambda: LinearScheduler(SliceSampler(slice_len=2), "strict_length", 1, 4), ValueError, "is True"),
        (lambda: LinearScheduler(prioritized(), "beta", math.nan, 4), ValueError, "final_value is nan"),
        (lambda: LinearScheduler(prioritized(), "beta", 1.0, 0), ValueError, "num_steps is 0"),
        (lambda: StepScheduler(prioritized(), "beta", n_steps=1.5), ValueError, "n_steps is 1.5"),  # type: ignore[arg-type]
        (lambda: StepScheduler(prioritized(), "beta", mode="x"), ValueError, "multiplicative or additive"),
        (lambda: StepScheduler(prioritized(), "beta", min_value=1, max_value=0), ValueError, "expected a range"),
        (lambda: StepScheduler(prioritized(), "beta", min_value=math.inf), ValueError, "min_value is inf"),
        (lambda: LambdaScheduler(prioritized(), "beta", 3), TypeError, "a function of the step"),  # type: ignore[arg-type]
        (lambda: SchedulerList([3]), TypeError, "expected a scheduler"),  # type: ignore[list-item]
        (lambda: ParameterScheduler(prioritized(), "beta"), TypeError, "abstract"),  # type: ignore[abstract]
    ],
)  # fmt: skip
def test_unusable_arguments_are_refused(make: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        make()


def test_a_step_that_fails_does_not_count() -> None:
    sampler = prioritized()
    scheduler = LambdaScheduler(sampler, "beta", lambda step: -1 if step == 2 else step)
    scheduler.step()
    for _ in range(2):
        with pytest.raises(ValueError, match=r"beta is -0\.4"):
            scheduler.step()
    assert (sampler.beta, scheduler.state_dict()["_step_cnt"]) == (0.4, 1)


MAKERS = [
    lambda obj: LinearScheduler(obj, "beta", 1.0, 5),
    lambda obj: StepScheduler(obj, "beta", gamma=2, n_steps=2, max_value=3),
    lambda obj: LambdaScheduler(obj, "beta", lambda step: step**2, max_value=7),
    lambda obj: SchedulerList([LinearScheduler(obj, "beta", 1.0, 5), StepScheduler(obj, "alpha", n_steps=2)]),
]


@pytest.mark.parametrize("make", MAKERS)
def test_a_state_survives_json_and_continues(make: Any) -> None:
    first, second = prioritized(), prioritized()
    scheduler, other = make(first), make(second)
    for _ in range(3):
        scheduler.step()
    second.load_state_dict(first.state_dict())
    other.load_state_dict(json.loads(json.dumps(scheduler.state_dict(), allow_nan=False)))
    assert second.beta == first.beta
    for _ in range(4):
        scheduler.step()
        other.step()
        assert (second.beta, second.alpha) == (first.beta, first.alpha)


def test_a_state_takes_effect_with_the_next_step_and_brings_its_arguments() -> None:
    sampler = prioritized()
    scheduler = LinearScheduler(sampler, "beta", 9.0, 100)
    state = LinearScheduler(prioritized(), "beta", 1.0, 4).state_dict()
    scheduler.load_state_dict(state | {"_step_cnt": 2})
    assert sampler.beta == 0.4
    assert steps(scheduler, 2) == pytest.approx([0.85, 1.0])


def test_a_state_of_torchrls_is_taken() -> None:
    scheduler = StepScheduler(prioritized(0.8), "beta", gamma=3, n_steps=5)
    infinite = {"_min_val": -math.inf, "_max_val": math.inf, "initial_val": torch.tensor(0.4)}
    state = {"param_name": "beta", "_step_cnt": 3, "gamma": 2, "n_steps": 2, "mode": "multiplicative", "operator": max}
    scheduler.load_state_dict(infinite | state)
    assert steps(scheduler, 3) == pytest.approx([1.6, 1.6, 3.2])


@pytest.mark.parametrize("change", [{"param_name": "alpha"}, {"num_steps": None}])
def test_the_state_of_another_scheduler_changes_nothing(change: dict[str, Any]) -> None:
    schedulers = SchedulerList((LinearScheduler(prioritized(), "beta", 1.0, 4), MAKERS[0](prioritized())))
    before = schedulers.state_dict()
    state = schedulers.schedulers[1].state_dict() | {"_step_cnt": 3}
    wrong = {name: value for name, value in (state | change).items() if value is not None or name[0] == "_"}
    for states in ([state, wrong], [state]):
        with pytest.raises(RuntimeError, match=r"expected .*, found"):
            schedulers.load_state_dict({"schedulers": states})
    assert schedulers.state_dict() == before
