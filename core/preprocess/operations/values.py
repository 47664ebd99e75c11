"""Operations that change values: element types, bounds of rewards, sizes of images."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from ...errors import UsageError, did_you_mean
from ...format.contracts import Array
from ...ted.schema import DTYPES, EPISODE, NEXT, Field, Key, is_floating, key_name
from .base import BoundOperation, Discount, FieldChanges, Operation, RowOperation, number_of, pairs_of
from .fields import KEPT, Fields
from .lazy import LazyColumn


@dataclass(frozen=True)
class Cast(RowOperation):
    """Changes the element type of a field, or of a group of them, and of what `next` holds of it.

    Fractions are rounded to the nearest that the type has; a value that would become something else, such as 300 in
    uint8 or 0.5 in int64, is refused.
    """

    name: ClassVar[str] = "cast"
    key: str
    dtype: str

    @classmethod
    def from_option(cls, value: Any, discount: Discount) -> Iterable[Operation]:
        return [cls(key, dtype) for key, dtype in pairs_of(value, cls.name, "field=type, like observation=float32")]

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise UsageError(
                f"{self.key!r} was to be cast to {self.dtype!r}, which is no element type"
                f"{did_you_mean(self.dtype, DTYPES)}",
                hint=f"there are {', '.join(DTYPES)}",
            )

    def plan(self, fields: Fields) -> BoundOperation:
        keys = [key for key in fields.twinned(self.key) if fields[key].dtype != self.dtype]
        for key in keys:
            if key in (EPISODE, *KEPT) or fields[key].role == "text":
                what = "is text" if fields[key].role == "text" else f"is {fields[key].dtype} in every dataset"
                raise UsageError(f"{key_name(key)!r} was to be cast to {self.dtype}, but {what}")
        return FieldChanges.of(
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

    @classmethod
    def from_option(cls, value: Any, discount: Discount) -> Iterable[Operation]:
        if isinstance(value, str):
            low, sign, high = value.partition(":")
            if not sign:
                raise UsageError(f"--clip-reward {value!r} is not understood, it is written LOW:HIGH, like -1:1")
            bounds = [text.strip() or None for text in (low, high)]
        elif isinstance(value, list | tuple) and len(value) == 2:
            bounds = list(value)
        else:
            raise UsageError(f"clip-reward is {value!r}, LOW:HIGH or two numbers are expected")
        return [cls(*(None if bound is None else number_of(bound, cls.name) for bound in bounds))]

    def __post_init__(self) -> None:
        low, high = (-math.inf if self.low is None else self.low), (math.inf if self.high is None else self.high)
        if (self.low is None and self.high is None) or not low <= high:
            raise UsageError(
                f"rewards were to be clipped to {self.low}:{self.high}, a lower bound, a higher one or both are needed"
            )

    def plan(self, fields: Fields) -> BoundOperation:
        keys = reward_keys(fields, self.name)
        for field in (fields[key] for key in keys):
            whole = all(bound is None or float(bound).is_integer() for bound in (self.low, self.high))
            if "complex" in field.dtype or not (whole or "float" in field.dtype):
                raise UsageError(f"{field.name!r} is {field.dtype}, which cannot be clipped to {self.low}:{self.high}")
        return FieldChanges.of(fields, keys, lambda field: field, self._clipped)

    def _clipped(self, field: Field, lazy: LazyColumn) -> Any:
        numbers = lazy.numbers
        low, high = self.low, self.high
        if numbers.dtype.kind in "iu":
            limits = np.iinfo(numbers.dtype)
            low, high = (None if b is None else min(max(int(b), limits.min), limits.max) for b in (low, high))
        elif numbers.dtype.kind == "b":
            numbers = numbers.astype(np.int8)
        with np.errstate(over="ignore"):  # a bound beyond float16 bounds nothing
            return numbers.clip(low, high)  # type: ignore[arg-type]


def reward_keys(fields: Fields, operation: str) -> list[Key]:
    """List the rewards: what is called `reward` under `next`, in a group too. UsageError where there is none."""
    found = [key for key in fields.by_key if key[0] == NEXT and key[-1] == "reward"]
    if not found:
        raise UsageError(f"{operation} needs next.reward, which is not there")
    return found


def original_of(key: Key) -> Key:
    """Return the key of the reward of the single step, which n-step keeps."""
    return (*key[:-1], f"original_{key[-1]}")


def reward_type(field: Field, operation: str) -> str:
    """Name the type of sums of rewards: that of the rewards if they are floats, else float32."""
    if field.role == "text":
        raise UsageError(f"{operation} needs numbers in {key_name(field.key)!r}, which is text")
    return field.dtype if is_floating(field.dtype) else "float32"


def require_discount(gamma: float, operation: str) -> None:
    """Raise UsageError unless a discount is above 0 and up to 1."""
    if not (math.isfinite(gamma) and 0 < gamma <= 1):
        raise UsageError(f"the discount of {operation} is {gamma}, a number above 0 and up to 1 is expected")


_SIZE = re.compile(r"([1-9]\d*)x([1-9]\d*)")
_LAYOUTS = ("hwc", "chw")
_CHANNELS = (1, 3, 4)


@dataclass(frozen=True)
class ResizeImages(RowOperation):
    """Scales images to `size`, height x width, and what `next` holds of them: bilinear, smoothed where they shrink.

    Rows are `[H, W]`, `[H, W, C]` or `[C, H, W]`, of floats or whole numbers, which are rounded. Channels
    are a dimension of 1, 3 or 4 at one end; `layout` is `hwc` or `chw` where that is not clear. The
    buffer transform of this name does the work, image by image, so that what is around an image never matters.
    """

    name: ClassVar[str] = "resize"
    key: str
    size: str
    layout: str | None = None

    @classmethod
    def from_option(cls, value: Any, discount: Discount) -> Iterable[Operation]:
        for key, text in pairs_of(value, cls.name, "field=HEIGHTxWIDTH, like image=84x84"):
            size, _, layout = str(text).partition(":")
            yield cls(key, size, layout or None)

    @property
    def rescales(self) -> str:
        return self.key

    def __post_init__(self) -> None:
        if not _SIZE.fullmatch(self.size):
            raise UsageError(f"{self.key!r} was to be resized to {self.size!r}, height x width like 84x84 is expected")
        if self.layout is not None and self.layout not in _LAYOUTS:
            raise UsageError(
                f"the layout of {self.key!r} is {self.layout!r}, hwc or chw is expected"
                f"{did_you_mean(self.layout, _LAYOUTS)}"
            )

    def plan(self, fields: Fields) -> BoundOperation:
        return FieldChanges.of(fields, fields.twinned(self.key), self._resized, self._scaled)

    @property
    def _height_width(self) -> tuple[int, int]:
        height, width = self.size.split("x")
        return int(height), int(width)

    def _resized(self, field: Field) -> Field:
        height, width = self._height_width
        place = self._channels(field)
        shape = field.shape
        if field.role in ("text", "id", "done") or "complex" in field.dtype or 0 in shape:
            raise UsageError(f"{field.name!r} was to be resized, but it holds no images: {field.dtype} {list(shape)}")
        return replace(
            field, shape={None: (height, width), 0: (shape[0], height, width), 2: (height, width, shape[-1])}[place]
        )

    def _channels(self, field: Field) -> int | None:
        """Which dimension of a row the channels are."""
        shape = field.shape
        if len(shape) == 2:
            return None
        if len(shape) != 3:
            raise UsageError(
                f"{field.name!r} was to be resized, but its rows are {list(shape)}: [H, W], [H, W, C] or [C, H, W] is "
                "expected"
            )
        if self.layout is not None:
            return 2 if self.layout == "hwc" else 0
        last, first = shape[2] in _CHANNELS, shape[0] in _CHANNELS
        if last == first:
            raise UsageError(
                f"{field.name!r} was to be resized, but which dimension of {list(shape)} are the channels is not clear",
                hint=f"say {self.key}={self.size}:hwc or {self.key}={self.size}:chw",
            )
        return 2 if last else 0

    def _scaled(self, field: Field, lazy: LazyColumn) -> Any:
        place = self._channels(field)
        numbers = lazy.numbers
        images = numbers[:, None] if place is None else np.moveaxis(numbers, 3, 1) if place == 2 else numbers
        if images.shape[2:] == self._height_width:
            return lazy
        scaled = _resize(np.ascontiguousarray(images), self._height_width)
        if place is None:
            scaled = scaled[:, 0]
        elif place == 2:
            scaled = np.ascontiguousarray(np.moveaxis(scaled, 1, 3))
        return scaled


def _resize(images: Array, size: tuple[int, int]) -> Any:
    import torch  # only who resizes waits for it

    from ...transforms.values import Resize as Transform

    transform = Transform(size)
    out = np.empty((*images.shape[:2], *size), images.dtype)
    empty: Any = {}
    for row in range(len(images)):  # one by one: kernels may be chosen by the number of images
        out[row] = transform.change(torch.from_numpy(images[row : row + 1]), ("image",), empty).numpy()[0]
    return out
