"""Transforms of images."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from tensordict import TensorDictBase
from torch.nn import functional

from ..errors import SchemaError, UsageError
from .keyed import KeyedTransform, Path, require_count

__all__ = ["Resize", "ToTensorImage"]

_PIXELS = ("pixels",)
_CHANNELS = frozenset({1, 3, 4})
_MODES = ("nearest", "nearest-exact", "bilinear", "bicubic", "area")
_SMOOTHED = frozenset({"bilinear", "bicubic"})


class ToTensorImage(KeyedTransform):
    """Brings images of shape `[..., H, W, C]` to `[..., C, H, W]`, and whole numbers from 0 to 255 to fractions.

    `from_int` says whether values are divided by 255: always, never, or, if None, where they are whole numbers; images
    of floats up to 255 need `from_int=True`. `dtype` is the element type of the result, torch's default one if None.
    With `shape_tolerant`, images without 1, 3 or 4 channels at the end are taken for `[..., C, H, W]` already.
    `unsqueeze` gives a single image a leading dimension of one. SchemaError (a RuntimeError) for less than three
    dimensions.

    >>> from tensordict import TensorDict
    >>> batch = TensorDict({"pixels": torch.full((2, 4, 5, 3), 255, dtype=torch.uint8)}, [2])
    >>> image = ToTensorImage()(batch)["pixels"]
    >>> image.shape, image.max()
    (torch.Size([2, 3, 4, 5]), tensor(1.))
    """

    def __init__(
        self,
        from_int: bool | None = None,
        unsqueeze: bool = False,
        dtype: torch.dtype | None = None,
        *,
        in_keys: Any = None,
        out_keys: Any = None,
        shape_tolerant: bool = False,
    ) -> None:
        super().__init__(_PIXELS if in_keys is None else in_keys, out_keys)
        self.from_int = from_int
        self.unsqueeze = unsqueeze
        self.dtype = dtype
        self.shape_tolerant = shape_tolerant

    def change(self, value: torch.Tensor, key: Path, data: TensorDictBase) -> torch.Tensor:
        if value.dim() < 3:
            raise SchemaError(f"an image of [..., height, width, channels] is expected, found {list(value.shape)}")
        if not self.shape_tolerant or value.shape[-1] in _CHANNELS:
            value = value.movedim(-1, -3)
        whole = not (value.is_floating_point() or value.is_complex())
        dtype = self.dtype or torch.get_default_dtype()
        value = value.to(dtype, memory_format=torch.contiguous_format)
        if whole if self.from_int is None else self.from_int:
            value = value / 255
        return value.unsqueeze(0) if self.unsqueeze and value.dim() == 3 else value.contiguous()


class Resize(KeyedTransform):
    """Scales images `[..., C, A, B]` to `[..., C, w, h]`, as TorchRL's transform of this name orders its arguments.

    `w` may be a pair, and without `h` images become square. `interpolation` is `bilinear`, `bicubic` (both smoothed
    where images shrink), `nearest`, `nearest-exact` or `area`. Whole numbers are rounded, and kept within their type.
    Torch does the work; torchvision is not needed. UsageError (a ValueError) for sizes and names that are none,
    SchemaError (a RuntimeError) for values of less than three dimensions.
    """

    def __init__(
        self,
        w: int | Sequence[int],
        h: int | None = None,
        interpolation: Any = "bilinear",
        in_keys: Any = None,
        out_keys: Any = None,
    ) -> None:
        super().__init__(_PIXELS if in_keys is None else in_keys, out_keys)
        sizes = (w, w if h is None else h) if isinstance(w, int) else tuple(w)
        if not isinstance(w, int) and (h is not None or len(sizes) not in (1, 2)):
            raise UsageError(f"the size {w!r} and h={h!r} were given, one number or two are expected")
        sizes = sizes * 2 if len(sizes) == 1 else sizes
        self.w, self.h = (require_count("the size", size, "pixels") for size in sizes)
        self.interpolation = str(getattr(interpolation, "value", interpolation))
        if self.interpolation not in _MODES:
            raise UsageError(f"interpolation is {self.interpolation!r}, expected one of {', '.join(_MODES)}")

    def change(self, value: torch.Tensor, key: Path, data: TensorDictBase) -> torch.Tensor:
        if value.dim() < 3:
            raise SchemaError(f"an image of [..., channels, height, width] is expected, found {list(value.shape)}")
        if value.shape[-2:] == (self.w, self.h):
            return value
        images = value.reshape(-1, *value.shape[-3:])
        work = images if images.dtype in (torch.float32, torch.float64) else images.float()
        smooth = {"align_corners": False, "antialias": True} if self.interpolation in _SMOOTHED else {}
        scaled = functional.interpolate(work, (self.w, self.h), mode=self.interpolation, **smooth)
        if not value.is_floating_point():
            limits = torch.iinfo(value.dtype) if value.dtype != torch.bool else None
            low, high = (limits.min, limits.max) if limits is not None else (0, 1)
            scaled = scaled.round().clamp(low, high)
        return scaled.to(value.dtype).reshape(*value.shape[:-2], self.w, self.h)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, w={self.w}, h={self.h}, interpolation={self.interpolation}"
