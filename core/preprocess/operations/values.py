"""The operations that change element types and bounds of values."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from ...errors import UsageError, did_you_mean
from ...ted import DTYPES, EPISODE, NEXT, Field, Key, as_numbers, is_floating, key_name
from ..block import Column
from .base import FieldStep, RowOperation, Step
from .fields import KEPT, Fields
from .lazy import Lazy

__all__ = ["Cast", "ClipReward", "numbers_of", "original_of", "require_discount", "reward_keys", "reward_type"]


@dataclass(frozen=True)
class Cast(RowOperation):
    """Changes the element type of a field, or of a group of them, and of what `next` holds of it.

    Fractions are rounded to the nearest that the type has; a value that would become something else, such as 300 in
    uint8 or 0.5 in int64, is refused.
    """

    name: ClassVar[str] = "cast"
    key: str
    dtype: str

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise UsageError(
                f"{self.key!r} was to be cast to {self.dtype!r}, which is no element type"
                f"{did_you_mean(self.dtype, DTYPES)}",
                hint=f"there are {', '.join(DTYPES)}",
            )

    def bind(self, fields: Fields) -> Step:
        keys = [key for key in fields.twinned(self.key) if fields[key].dtype != self.dtype]
        for key in keys:
            if key in (EPISODE, *KEPT) or fields[key].role == "text":
                what = "is text" if fields[key].role == "text" else f"is {fields[key].dtype} in every dataset"
                raise UsageError(f"{key_name(key)!r} was to be cast to {self.dtype}, but {what}")
        return FieldStep.changing(
            fields, keys, lambda field: replace(field, dtype=self.dtype), lambda field, lazy: lazy.cast(self.dtype)
        )


@dataclass(frozen=True)
class ClipReward(RowOperation):
    """Keeps every reward under `next` between `low` and `high`; None leaves a side open. NaN stays NaN.

    What was derived of rewards before, such as returns, stays as it is.
    """

    name: ClassVar[str] = "clip-reward"
    low: float | None = None
    high: float | None = None

    def __post_init__(self) -> None:
        low, high = (-math.inf if self.low is None else self.low), (math.inf if self.high is None else self.high)
        if (self.low is None and self.high is None) or not low <= high:
            raise UsageError(
                f"rewards were to be clipped to {self.low}:{self.high}, a lower bound, a higher one or both are needed"
            )

    def bind(self, fields: Fields) -> Step:
        keys = reward_keys(fields, self.name)
        for field in (fields[key] for key in keys):
            whole = all(bound is None or float(bound).is_integer() for bound in (self.low, self.high))
            if "complex" in field.dtype or not (whole or "float" in field.dtype):
                raise UsageError(f"{field.name!r} is {field.dtype}, which cannot be clipped to {self.low}:{self.high}")
        return FieldStep.changing(fields, keys, lambda field: field, self._clipped)

    def _clipped(self, field: Field, lazy: Lazy) -> Lazy:
        numbers = as_numbers(lazy.values, lazy.dtype)
        low, high = self.low, self.high
        if numbers.dtype.kind in "iu":
            limits = np.iinfo(numbers.dtype)
            low, high = (None if b is None else min(max(int(b), limits.min), limits.max) for b in (low, high))
        elif numbers.dtype.kind == "b":
            numbers = numbers.astype(np.int8)
        with np.errstate(over="ignore"):  # a bound beyond float16 bounds nothing
            clipped = numbers.clip(low, high)  # type: ignore[arg-type]
        return numbers_of(field, lazy.dtype, clipped)


def numbers_of(field: Field, dtype: str, numbers: Any) -> Lazy:
    """Take computed numbers for a field of type `dtype`; they are refused where the type cannot hold them."""
    found = np.dtype(numbers.dtype).name
    return (
        Lazy.of(Column(found, numbers), field.name).cast(dtype)
        if found != dtype
        else Lazy.given(field.name, dtype, numbers)
    )


def reward_keys(fields: Fields, operation: str) -> list[Key]:
    """List the rewards: what is called `reward` under `next`, in a group too. UsageError where there is none."""
    found = [key for key in fields.by_key if key[0] == NEXT and key[-1] == "reward"]
    if not found:
        raise UsageError(f"{operation} needs next.reward, which is not there")
    return found


def original_of(key: Key) -> Key:
    """Where the reward of the single step is kept beside that of several."""
    return (*key[:-1], f"original_{key[-1]}")


def reward_type(field: Field, operation: str) -> str:
    """Name the type of sums of rewards: that of the rewards if they are floats, else float32."""
    if field.role == "text":
        raise UsageError(f"{operation} needs numbers in {key_name(field.key)!r}, which is text")
    return field.dtype if is_floating(field.dtype) else "float32"


def require_discount(gamma: float, operation: str) -> None:
    """Raise UsageError unless a discount lies above 0 and up to 1."""
    if not (math.isfinite(gamma) and 0 < gamma <= 1):
        raise UsageError(f"the discount of {operation} is {gamma}, a number above 0 and up to 1 is expected")
