"""Schedulers: change a parameter of a sampler at every training step, such as beta of prioritized replay."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, TypeAlias

import torch

from ..errors import SchemaError, UsageError, WrongKindError, require_number
from ..samplers.base import Sampler
from ..torchrl_classes import described
from .replay_buffer import ReplayBuffer

Number: TypeAlias = int | float

_MODES = ("multiplicative", "additive")


class ParameterScheduler(ABC):
    """Changes a numeric attribute of a sampler at every `step()`. Subclasses define `value`.

    An attribute that is a tensor stays a tensor of its element type. Values of integers are rounded.

    Args:
        obj: a sampler, or a buffer, of which the sampler at the time of each step is used.
        param_name: the attribute, a number or a tensor with one number.
        min_value, max_value: bounds to which values are clipped; None or an infinity for no bound.

    Raises:
        WrongKindError: (a TypeError) `obj` is neither a sampler nor a buffer.
        UsageError: (a ValueError) the attribute is missing or not a number, the bounds contradict each other, or the
            sampler refuses a value.
    """

    _kept: ClassVar[tuple[str, ...]] = ("_min_val", "_max_val")
    """The attributes that are saved, besides those common to all schedulers."""

    def __init__(
        self,
        obj: Any,
        param_name: str,
        min_value: Number | None = None,
        max_value: Number | None = None,
    ) -> None:
        if not isinstance(obj, Sampler | ReplayBuffer):
            raise WrongKindError(f"obj is {described(obj, 'a sampler or a buffer')}")
        self._obj = obj
        self.param_name = param_name
        self._min_val = None if min_value in (None, -math.inf) else _number("min_value", min_value)
        self._max_val = None if max_value in (None, math.inf) else _number("max_value", max_value)
        if self._min_val is not None and self._max_val is not None and self._min_val > self._max_val:
            raise UsageError(f"min_value is {min_value} and max_value {max_value}, expected a range")
        if not hasattr(self.sampler, param_name):
            raise UsageError(f"a {type(self.sampler).__name__} has no parameter {param_name!r} to schedule")
        self.initial_val = self._current()
        self._exact = self.initial_val
        self._step_cnt = 0

    @property
    def sampler(self) -> Sampler:
        """The sampler whose attribute is set."""
        return self._obj.sampler if isinstance(self._obj, ReplayBuffer) else self._obj

    @abstractmethod
    def value(self, step: int) -> Number:
        """Return the value after `step` steps (counted from 1), before clipping and rounding."""

    def step(self) -> None:
        """Set the next value."""
        before = getattr(self.sampler, self.param_name)
        value = _number(f"the next {self.param_name}", self.value(self._step_cnt + 1))
        value = value if self._min_val is None else max(value, self._min_val)
        value = value if self._max_val is None else min(value, self._max_val)
        setattr(self.sampler, self.param_name, _like(before, value))
        self._exact = value
        self._step_cnt += 1

    def _current(self) -> Number:
        """Return the present value, before rounding if this scheduler set it."""
        found = getattr(self.sampler, self.param_name)
        if isinstance(found, torch.Tensor) and found.numel() == 1:
            found = found.item()
        current = _number(self.param_name, found)
        exact = getattr(self, "_exact", current)
        return exact if isinstance(current, int) and round(exact) == current else current

    def state_dict(self) -> dict[str, Any]:
        """Return the arguments and the number of steps, as JSON values under TorchRL's names."""
        names = ("param_name", "initial_val", "_step_cnt", "_exact", *self._kept)
        return {name: getattr(self, name) for name in names}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state of rbtool or TorchRL, including the arguments. The attribute changes at the next step.

        Raises:
            SchemaError: (a RuntimeError) the state belongs to another parameter or scheduler. Nothing is changed.
        """
        names = ("initial_val", "_step_cnt", *self._kept)
        missing = [name for name in ("param_name", *names) if name not in state_dict]
        if missing or state_dict["param_name"] != self.param_name:
            found = f"no {missing[0]}" if missing else repr(state_dict["param_name"])
            raise SchemaError(f"expected the state of a {type(self).__name__} of {self.param_name!r}, found {found}")
        taken = {name: _plain(state_dict[name]) for name in names}
        taken["_exact"] = _plain(state_dict.get("_exact", taken["initial_val"]))
        self.__dict__.update(taken)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.param_name!r}, step={self._step_cnt})"


class LinearScheduler(ParameterScheduler):
    """Moves the value to `final_value` in `num_steps` equal steps, and then keeps it.

    >>> from rbtool import PrioritizedSampler
    >>> sampler = PrioritizedSampler(10, alpha=0.7, beta=0.5)
    >>> scheduler = LinearScheduler(sampler, "beta", final_value=1.0, num_steps=2)
    >>> for _ in range(3):
    ...     scheduler.step()
    ...     print(sampler.beta)
    0.75
    1.0
    1.0
    """

    _kept = ("_min_val", "_max_val", "final_val", "num_steps")

    def __init__(self, obj: Any, param_name: str, final_value: Number, num_steps: int) -> None:
        super().__init__(obj, param_name)
        self.final_val = _number("final_value", final_value)
        self.num_steps = require_number("num_steps", num_steps, 1, "steps")

    def value(self, step: int) -> Number:
        if step >= self.num_steps:
            return self.final_val
        return self.initial_val + (self.final_val - self.initial_val) * step / self.num_steps


class StepScheduler(ParameterScheduler):
    """Multiplies the value by `gamma` at every `n_steps`-th step, or adds `gamma` with `mode="additive"`.

    Raises:
        UsageError: (a ValueError) the mode is unknown.
    """

    _kept = ("_min_val", "_max_val", "gamma", "n_steps", "mode")

    def __init__(
        self,
        obj: Any,
        param_name: str,
        gamma: Number = 0.9,
        n_steps: int = 1,
        mode: str = "multiplicative",
        min_value: Number | None = None,
        max_value: Number | None = None,
    ) -> None:
        super().__init__(obj, param_name, min_value, max_value)
        if mode not in _MODES:
            raise UsageError(f"mode is {mode!r}, expected {' or '.join(_MODES)}")
        self.gamma = _number("gamma", gamma)
        self.n_steps = require_number("n_steps", n_steps, 1, "steps")
        self.mode = mode

    def value(self, step: int) -> Number:
        current = self._current()
        if step % self.n_steps:
            return current
        return current * self.gamma if self.mode == _MODES[0] else current + self.gamma


class LambdaScheduler(ParameterScheduler):
    """Sets the value to the initial value times `lambda_fn(step)`, with steps counted from 1.

    The function is not saved in the state.
    """

    def __init__(
        self,
        obj: Any,
        param_name: str,
        lambda_fn: Callable[[int], Number],
        min_value: Number | None = None,
        max_value: Number | None = None,
    ) -> None:
        super().__init__(obj, param_name, min_value, max_value)
        if not callable(lambda_fn):
            raise WrongKindError(f"lambda_fn is a {type(lambda_fn).__name__}, expected a function of the step")
        self.lambda_fn = lambda_fn

    def value(self, step: int) -> Number:
        return self.initial_val * _number("the value of lambda_fn", self.lambda_fn(step))


class SchedulerList:
    """Several schedulers that step together.

    Args:
        schedulers: a scheduler, or a list or tuple of them.

    Raises:
        WrongKindError: (a TypeError) one of them is not a scheduler.
    """

    def __init__(self, schedulers: ParameterScheduler | Sequence[ParameterScheduler]) -> None:
        self.schedulers: list[ParameterScheduler] = []
        several: Sequence[Any] = schedulers if isinstance(schedulers, list | tuple) else [schedulers]
        for scheduler in several:
            self.append(scheduler)

    def append(self, scheduler: ParameterScheduler) -> None:
        """Add a scheduler at the end."""
        if not isinstance(scheduler, ParameterScheduler):
            raise WrongKindError(f"expected a scheduler, found a {type(scheduler).__name__}")
        self.schedulers.append(scheduler)

    def step(self) -> None:
        """Let each scheduler set its next value, in order."""
        for scheduler in self.schedulers:
            scheduler.step()

    def state_dict(self) -> dict[str, Any]:
        """Return the states of all schedulers, in order."""
        return {"schedulers": [scheduler.state_dict() for scheduler in self.schedulers]}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load the states of all schedulers.

        Raises:
            SchemaError: (a RuntimeError) the state belongs to other schedulers. Nothing is changed.
        """
        states, before = state_dict.get("schedulers"), self.state_dict()["schedulers"]
        if not isinstance(states, list) or len(states) != len(self.schedulers):
            found = len(states) if isinstance(states, list) else "none"
            raise SchemaError(f"expected the states of {len(self.schedulers)} schedulers, found {found}")
        try:
            for scheduler, state in zip(self.schedulers, states, strict=True):
                scheduler.load_state_dict(state)
        except SchemaError:
            for scheduler, state in zip(self.schedulers, before, strict=True):
                scheduler.load_state_dict(state)
            raise

    def __repr__(self) -> str:
        return f"SchedulerList({self.schedulers})"


def _plain(value: Any) -> Any:
    """Convert values of TorchRL's states: numbers of NumPy or torch to Python's, and infinite bounds to None."""
    value = value.item() if hasattr(value, "item") else value
    return None if isinstance(value, float) and math.isinf(value) else value


def _number(name: str, value: Any) -> Number:
    found = value.item() if hasattr(value, "item") else value
    if isinstance(found, bool) or not isinstance(found, int | float) or not math.isfinite(found):
        raise UsageError(f"{name} is {value!r}, expected a finite number")
    return found


def _like(before: Any, value: Number) -> Any:
    """Return a value in the type of the previous one."""
    if isinstance(before, torch.Tensor):
        whole = not before.is_floating_point()
        return torch.full_like(before, round(value) if whole else value)
    return round(value) if isinstance(before, int) else float(value)
