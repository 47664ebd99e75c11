"""Conditions on trajectories, written as comparisons: `traj.total_reward > 10`."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from typing import Any, NoReturn, TypeAlias

import numpy as np
import torch

from .parts import WrongKindError

Evaluate: TypeAlias = Callable[[Any], Any]
"""Returns a value of a trajectory."""

_SIGNS = {
    operator.lt: "<", operator.le: "<=", operator.gt: ">", operator.ge: ">=", operator.eq: "==", operator.ne: "!=",
}  # fmt: skip


class TrajectoryPredicate:
    """A condition on trajectories: `fn(trajectory)` returns whether it holds.

    `description` is shown, and `keys` are the entries that it reads, None if they are not known. Conditions are joined
    by `&` and `|`, and negated by `~`; `and`, `or` and `not` raise TypeError, because Python would drop one side. The
    other side may be any function of a trajectory. A result that is no single value raises TypeError.
    """

    def __init__(self, fn: Evaluate, description: str = "predicate", keys: Iterable[Any] | None = None) -> None:
        if not callable(fn):
            raise WrongKindError(f"a predicate is a function of a trajectory, found a {type(fn).__name__}")
        self._fn = fn
        self.description = description
        self._keys = None if keys is None else frozenset(keys)

    @classmethod
    def of(cls, condition: Any) -> TrajectoryPredicate:
        """Return a condition, which may be a function; WrongKindError (a TypeError) for anything else."""
        if isinstance(condition, TrajectoryPredicate):
            return condition
        return TrajectoryPredicate(condition, getattr(condition, "__name__", "predicate"))

    def __call__(self, trajectory: Any) -> bool:
        return _truth(self._fn(trajectory), self.description)

    def required_keys(self) -> frozenset[Any] | None:
        """Return the keys of the entries that it reads; None if they are not known."""
        return self._keys

    def _joined(self, other: Any, sign: str, fn: Callable[[TrajectoryPredicate], Evaluate]) -> TrajectoryPredicate:
        if not callable(other):
            raise WrongKindError(f"conditions are joined with conditions and functions, found a {type(other).__name__}")
        right = TrajectoryPredicate.of(other)
        mine, others = self.required_keys(), right.required_keys()
        keys = None if mine is None or others is None else mine | others
        return TrajectoryPredicate(fn(right), f"({self.description} {sign} {right.description})", keys)

    def __and__(self, other: Any) -> TrajectoryPredicate:
        return self._joined(other, "&", lambda right: lambda one: self(one) and right(one))

    def __or__(self, other: Any) -> TrajectoryPredicate:
        return self._joined(other, "|", lambda right: lambda one: self(one) or right(one))

    def __invert__(self) -> TrajectoryPredicate:
        return TrajectoryPredicate(lambda one: not self(one), f"~{self.description}", self._keys)

    def __bool__(self) -> NoReturn:
        raise TypeError(f"{self.description} holds for some trajectories: join conditions with & and |, negate with ~")

    def __repr__(self) -> str:
        return f"TrajectoryPredicate({self.description})"


class TrajectoryExpression:
    """A value of trajectories: an entry, or one number of it; comparisons of it are conditions.

    An entry is reduced by `sum`, `mean`, `max` and `min` over all of its elements, or to the value of its `first` or
    `last` step. A comparison of entries that are not reduced compares every element: `(traj.reward > 1).any()`.
    """

    def __init__(self, evaluate: Evaluate, description: str, keys: Iterable[Any], *, reduced: bool) -> None:
        self._evaluate = evaluate
        self.description = description
        self.keys = frozenset(keys)
        self.reduced = reduced

    def value(self, trajectory: Any) -> Any:
        """Return the value in a trajectory: a tensor, a number, or a list of other values, one a step."""
        return self._evaluate(trajectory)

    def _reduced(self, name: str, fn: Callable[[Any], Any]) -> TrajectoryExpression:
        description = f"{self.description}.{name}()"
        return TrajectoryExpression(lambda one: fn(self.value(one)), description, self.keys, reduced=True)

    def _number(self, name: str) -> TrajectoryExpression:
        def reduce(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                raise TypeError(f"{self.description} is no tensor of numbers, and has no {name}")
            value = value.double() if name in ("sum", "mean") and not value.is_complex() else value
            return getattr(value, name)()

        return self._reduced(name, reduce)

    def sum(self) -> TrajectoryExpression:
        """The sum of all elements, in float64."""
        return self._number("sum")

    def mean(self) -> TrajectoryExpression:
        """The mean of all elements, in float64."""
        return self._number("mean")

    def max(self) -> TrajectoryExpression:
        """The largest element."""
        return self._number("max")

    def min(self) -> TrajectoryExpression:
        """The smallest element."""
        return self._number("min")

    def first(self) -> TrajectoryExpression:
        """The value of the first step."""
        return self._reduced("first", lambda value: value[0])

    def last(self) -> TrajectoryExpression:
        """The value of the last step."""
        return self._reduced("last", lambda value: value[-1])

    def _compared(self, other: Any, compare: Callable[[Any, Any], Any]) -> TrajectoryComparison:
        right = other if isinstance(other, TrajectoryExpression) else None
        shown = repr(other) if right is None else right.description

        def evaluate(one: Any) -> Any:
            return _elementwise(compare, self.value(one), other if right is None else right.value(one))

        return TrajectoryComparison(
            evaluate,
            f"({self.description} {_SIGNS[compare]} {shown})",
            self.keys | (frozenset() if right is None else right.keys),
            reduced=self.reduced and (right is None or right.reduced),
        )

    def __lt__(self, other: Any) -> TrajectoryComparison:
        return self._compared(other, operator.lt)

    def __le__(self, other: Any) -> TrajectoryComparison:
        return self._compared(other, operator.le)

    def __gt__(self, other: Any) -> TrajectoryComparison:
        return self._compared(other, operator.gt)

    def __ge__(self, other: Any) -> TrajectoryComparison:
        return self._compared(other, operator.ge)

    def __eq__(self, other: object) -> TrajectoryComparison:  # type: ignore[override]
        return self._compared(other, operator.eq)

    def __ne__(self, other: object) -> TrajectoryComparison:  # type: ignore[override]
        return self._compared(other, operator.ne)

    __hash__ = object.__hash__

    def __bool__(self) -> bool:
        raise TypeError(f"{self.description} is a value of trajectories: compare it, and join conditions with & and |")

    def __repr__(self) -> str:
        return self.description


class TrajectoryComparison(TrajectoryExpression, TrajectoryPredicate):
    """A comparison: a condition if both sides are reduced, else to be reduced by `any` or `all`."""

    def __init__(self, evaluate: Evaluate, description: str, keys: Iterable[Any], *, reduced: bool) -> None:
        TrajectoryExpression.__init__(self, evaluate, description, keys, reduced=reduced)
        TrajectoryPredicate.__init__(self, evaluate, description, self.keys)

    def __call__(self, trajectory: Any) -> bool:
        if not self.reduced:
            raise TypeError(f"{self.description} compares every element, a condition is {self.description}.any()")
        return super().__call__(trajectory)

    def any(self) -> TrajectoryPredicate:
        """Whether it holds for an element."""
        return self._over("any", any)

    def all(self) -> TrajectoryPredicate:
        """Whether it holds for all elements."""
        return self._over("all", all)

    def _over(self, name: str, of_list: Callable[[Iterable[Any]], bool]) -> TrajectoryPredicate:
        def evaluate(one: Any) -> bool:
            found = self.value(one)
            return bool(getattr(found, name)()) if isinstance(found, torch.Tensor) else of_list(_listed(found))

        return TrajectoryPredicate(evaluate, f"{self.description}.{name}()", self.keys)

    __bool__ = TrajectoryPredicate.__bool__
    __hash__ = object.__hash__
    __repr__ = TrajectoryPredicate.__repr__


class TrajectoryEntries:
    """The entries of trajectories, for conditions: `traj.reward`, `traj["next", "reward"]`; see `filter_trajectories`.

    An entry is found at the root, else under `next`. `traj.length` is the number of steps, and `traj.total_reward` the
    sum of rewards.
    """

    @property
    def length(self) -> TrajectoryExpression:
        """The number of steps."""
        return TrajectoryExpression(lambda one: one.length, "traj.length", (), reduced=True)

    @property
    def total_reward(self) -> TrajectoryExpression:
        """The sum of the rewards of all steps."""
        return TrajectoryExpression(lambda one: one.total_reward, "traj.total_reward", ("reward",), reduced=True)

    def __getattr__(self, name: str) -> TrajectoryExpression:
        if name.startswith("__"):
            raise AttributeError(name)
        return TrajectoryExpression(lambda one: one.value(name), f"traj.{name}", (name,), reduced=False)

    def __getitem__(self, key: Any) -> TrajectoryExpression:
        key = key[0] if isinstance(key, tuple) and len(key) == 1 else key
        shown = ", ".join(map(repr, key)) if isinstance(key, tuple) else repr(key)
        return TrajectoryExpression(lambda one: one.value(key), f"traj[{shown}]", (key,), reduced=False)

    def __repr__(self) -> str:
        return "traj"


traj = TrajectoryEntries()
"""The entries of any trajectory: `filter_trajectories(data, traj.length > 10)`; see `TrajectoryEntries`."""


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _elementwise(compare: Callable[[Any, Any], Any], left: Any, right: Any) -> Any:
    """Compare values; a list of other values, one a step, with each other or with a single one."""
    if isinstance(left, list) or isinstance(right, list):
        count = len(left if isinstance(left, list) else right)
        pairs = zip(*(side if isinstance(side, list) else [side] * count for side in (left, right)), strict=True)
        return [bool(compare(one, other)) for one, other in pairs]
    return compare(left, right)


def _truth(value: Any, description: str) -> bool:
    if isinstance(value, bool | np.bool_):
        return bool(value)
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return bool(value)
    size = f"{list(value.shape)} values" if isinstance(value, torch.Tensor) else f"a {type(value).__name__}"
    raise TypeError(f"{description} is {size}, expected one truth value: see any() and all() of a comparison")
