"""The operation that scales images."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from ...errors import UsageError, did_you_mean
from ...format import Array
from ...ted import Field, as_numbers
from .base import FieldStep, RowOperation, Step
from .fields import Fields
from .lazy import Lazy
from .values import numbers_of

__all__ = ["Resize"]

_SIZE = re.compile(r"([1-9]\d*)x([1-9]\d*)")
_LAYOUTS = ("hwc", "chw")
_CHANNELS = (1, 3, 4)


@dataclass(frozen=True)
class Resize(RowOperation):
    """Scales images to `size`, height x width, and what `next` holds of them: bilinear, smoothed where they shrink.

    Rows are `[H, W]`, `[H, W, C]` or `[C, H, W]`, of floats or whole numbers, which are rounded. Where the channels
    are is seen from a dimension of 1, 3 or 4 at one end; `layout` says `hwc` or `chw` where that is not clear. The
    buffer transform of this name does the work, image by image, so that what is around an image never matters.
    """

    name: ClassVar[str] = "resize"
    key: str
    size: str
    layout: str | None = None

    def __post_init__(self) -> None:
        if not _SIZE.fullmatch(self.size):
            raise UsageError(f"{self.key!r} was to be resized to {self.size!r}, height x width like 84x84 is expected")
        if self.layout is not None and self.layout not in _LAYOUTS:
            raise UsageError(
                f"the layout of {self.key!r} is {self.layout!r}, hwc or chw is expected"
                f"{did_you_mean(self.layout, _LAYOUTS)}"
            )

    def bind(self, fields: Fields) -> Step:
        return FieldStep.changing(fields, fields.twinned(self.key), self._resized, self._scaled)

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

    def _scaled(self, field: Field, lazy: Lazy) -> Lazy:
        place = self._channels(field)
        numbers = as_numbers(lazy.values, lazy.dtype)
        images = numbers[:, None] if place is None else np.moveaxis(numbers, 3, 1) if place == 2 else numbers
        if images.shape[2:] == self._height_width:
            return lazy
        scaled = _resize(np.ascontiguousarray(images), self._height_width)
        if place is None:
            scaled = scaled[:, 0]
        elif place == 2:
            scaled = np.ascontiguousarray(np.moveaxis(scaled, 1, 3))
        return numbers_of(field, lazy.dtype, scaled)


def _resize(images: Array, size: tuple[int, int]) -> Any:
    import torch  # only who resizes waits for it

    from ...transforms import Resize as Transform

    transform = Transform(size)
    out = np.empty((*images.shape[:2], *size), images.dtype)
    empty: Any = {}
    for row in range(len(images)):  # one by one: kernels may be chosen by the number of images
        out[row] = transform.change(torch.from_numpy(images[row : row + 1]), ("image",), empty).numpy()[0]
    return out
