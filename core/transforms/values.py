"""Transforms of values: images, normalisation, text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from tensordict import NonTensorData, NonTensorStack, TensorDictBase
from torch.nn import functional

from ..errors import CorruptDataError, MissingKeyError, SchemaError, UsageError, require_flags
from .base import Transform
from .keyed import KeyedTransform, Path, as_keys, in_double, in_next, require_count, require_tensordict, under_next

_PIXELS = ("pixels",)
_CHANNELS = frozenset({1, 3, 4})
_IMAGE_DIMENSIONS = 3
_MODES = ("nearest", "nearest-exact", "bilinear", "bicubic", "area")
_SMOOTHED = frozenset({"bilinear", "bicubic"})


class ToTensorImage(KeyedTransform):
    """Converts images `[..., H, W, C]` to `[..., C, H, W]`, and whole numbers from 0 to 255 to fractions.

    Args:
        in_keys, out_keys: the entries, see `KeyedTransform`.
        from_int: whether to divide by 255; None does so for whole numbers. Float images up to 255 need True.
        unsqueeze: whether to give a single image a leading dimension of size 1.
        dtype: the element type of the result; default torch's default type.
        shape_tolerant: whether images without 1, 3 or 4 channels at the end are assumed to be `[..., C, H, W]` already.

    Raises:
        SchemaError: (a RuntimeError) there are fewer than three dimensions.

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
        require_flags(from_int=from_int or False, unsqueeze=unsqueeze, shape_tolerant=shape_tolerant)
        super().__init__(_PIXELS if in_keys is None else in_keys, out_keys)
        self.from_int = from_int
        self.unsqueeze = unsqueeze
        self.dtype = dtype
        self.shape_tolerant = shape_tolerant

    def change(self, value: torch.Tensor, key: Path, data: TensorDictBase) -> torch.Tensor:
        if value.dim() < 3:
            raise SchemaError(f"expected an image of [..., height, width, channels], found {list(value.shape)}")
        if not self.shape_tolerant or value.shape[-1] in _CHANNELS:
            value = value.movedim(-1, -3)
        whole = not (value.is_floating_point() or value.is_complex())
        dtype = self.dtype or torch.get_default_dtype()
        value = value.to(dtype, memory_format=torch.contiguous_format)
        if whole if self.from_int is None else self.from_int:
            value = value / 255
        return value.unsqueeze(0) if self.unsqueeze and value.dim() == 3 else value.contiguous()


class Resize(KeyedTransform):
    """Scales images `[..., C, A, B]` to `[..., C, w, h]`; the order of arguments is TorchRL's. torchvision is not
    needed.

    Args:
        w: the first size, or a pair of both.
        h: the second size; default the same as `w`.
        interpolation: `"bilinear"`, `"bicubic"` (both smooth when shrinking), `"nearest"`, `"nearest-exact"` or
            `"area"`. Whole numbers are rounded, and stay within their type.
        in_keys, out_keys: the entries, see `KeyedTransform`.

    Raises:
        UsageError: (a ValueError) a size or the interpolation is invalid.
        SchemaError: (a RuntimeError) there are fewer than three dimensions.
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
            raise UsageError(f"the size is {w!r} with h={h!r}, expected one number or two")
        sizes = sizes * 2 if len(sizes) == 1 else sizes
        self.w, self.h = (require_count("the size", size, "pixels") for size in sizes)
        self.interpolation = str(getattr(interpolation, "value", interpolation))
        if self.interpolation not in _MODES:
            raise UsageError(f"interpolation is {self.interpolation!r}, expected one of {', '.join(_MODES)}")

    def change(self, value: torch.Tensor, key: Path, data: TensorDictBase) -> torch.Tensor:
        if value.dim() < 3:
            raise SchemaError(f"expected an image of [..., channels, height, width], found {list(value.shape)}")
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


class Normalize(KeyedTransform):
    """Subtracts `loc` from entries and divides them by `scale`, at the root and under `next`.

    Computed in float64 and rounded once, as by `rbtool preprocess --normalize`. The type stays; whole numbers become
    torch's default float type. `inverse` undoes it for a value, such as an action from a policy.

    Args:
        in_keys, out_keys: the entries, see `KeyedTransform`.
        loc, scale: numbers, or tensors that expand to one row of the entry. Dimensions with scale 0, which never
            varied, are shifted but not divided.
        clip: then limits values to at most this distance from 0.

    Raises:
        UsageError: (a ValueError) a scale is negative, or a loc or scale is not finite.
        SchemaError: (a RuntimeError) they do not fit a row of the entry.

    >>> from tensordict import TensorDict
    >>> transform = Normalize("observation", loc=torch.tensor([1.0, 5.0]), scale=torch.tensor([2.0, 0.0]))
    >>> transform(TensorDict({"observation": torch.tensor([[3.0, 5.0]])}, [1]))["observation"]
    tensor([[1., 0.]])
    """

    loc: torch.Tensor
    scale: torch.Tensor

    def __init__(
        self, in_keys: Any, out_keys: Any = None, *, loc: Any = 0.0, scale: Any = 1.0, clip: float | None = None
    ) -> None:
        super().__init__(in_keys, out_keys)
        loc, scale = (torch.as_tensor(value, dtype=torch.float64) for value in (loc, scale))
        for name, value in (("loc", loc), ("scale", scale)):
            if not bool(value.isfinite().all()):
                raise UsageError(
                    f"{name} is not finite in {int((~value.isfinite()).sum())} of {value.numel()} dimensions"
                )
        if bool((scale < 0).any()):
            raise UsageError(f"scale is {float(scale.min())} in one dimension, expected 0 or more")
        if clip is not None and not clip > 0:
            raise UsageError(f"clip is {clip}, expected a number above 0")
        self.register_buffer("loc", loc)
        self.register_buffer("scale", scale)
        self.clip = clip

    @property
    def _divisor(self) -> torch.Tensor:
        return torch.where(self.scale > 0, self.scale, torch.ones_like(self.scale))

    def change(self, value: torch.Tensor, key: Path, data: TensorDictBase) -> torch.Tensor:
        dtype = value.dtype if value.is_floating_point() else torch.get_default_dtype()
        row = value.shape[data.ndim :]
        try:
            fits = torch.broadcast_shapes(self.loc.shape, self.scale.shape, row) == row
        except RuntimeError:
            fits = False
        if not fits:
            raise SchemaError(
                f"{'.'.join(key)} has rows of {list(row)}, which loc {list(self.loc.shape)} and scale "
                f"{list(self.scale.shape)} do not fit"
            )
        wide = in_double(value)
        loc, divisor = (part.to(wide.device, wide.dtype) for part in (self.loc, self._divisor))
        value = ((wide - loc) / divisor).to(dtype)
        return value if self.clip is None else value.clamp(-self.clip, self.clip)

    def inverse(self, value: torch.Tensor) -> torch.Tensor:
        """Restore the original scale of normalised values; clipped values stay clipped."""
        wide = in_double(value)
        loc, divisor = (part.to(wide.device, wide.dtype) for part in (self.loc, self._divisor))
        return (wide * divisor + loc).to(value.dtype if value.is_floating_point() else torch.get_default_dtype())


def channels_first(batch: TensorDictBase) -> TensorDictBase:
    """Return a batch in which images, uint8 or uint16 `[..., height, width, channels]`, have their channels first."""
    dimensions = len(batch.batch_size) + _IMAGE_DIMENSIONS
    for key, value in list(batch.items(True, True)):
        if not isinstance(value, torch.Tensor) or value.dtype not in (torch.uint8, torch.uint16):
            continue
        if value.dim() == dimensions and value.shape[-1] in _CHANNELS:
            batch.set(key, value.movedim(-1, -_IMAGE_DIMENSIONS))
    return batch


_LENGTH = "_length"


class DecodeText(Transform):
    """Replaces texts, stored as UTF-8 bytes (uint8 `[..., L]`) with their lengths in bytes (int32 `[...]`), by strings.

    An entry becomes non-tensor data in the batch's shape, and `<key>_length` is removed; likewise under `next`.

    Args:
        in_keys: the entries; default all entries stored in this way.

    Raises:
        MissingKeyError: (a KeyError) an entry does not exist.
        SchemaError: (a RuntimeError) an entry is not stored in this way.
        CorruptDataError: the bytes are not UTF-8.
    """

    follows_next = True

    def __init__(self, in_keys: Any = None) -> None:
        super().__init__()
        self.in_keys = None if in_keys is None else as_keys(in_keys)

    @property
    def named_in_next(self) -> frozenset[Path]:
        return under_next(self.in_keys or ())

    def forward(self, data: Any, elsewhere: frozenset[Path] = frozenset()) -> Any:
        batch = require_tensordict(data, self)
        decoded = {key: self._decoded(batch, key) for key in self._keys(batch) if key not in elsewhere}
        batch = batch.exclude(*(_length_of(key) for key in decoded))
        for key, value in decoded.items():
            batch.set(key, value)
        return batch

    def _keys(self, batch: TensorDictBase) -> list[Path]:
        if self.in_keys is None:
            leaves = [key if isinstance(key, tuple) else (key,) for key in batch.keys(True, True)]
            return [key for key in leaves if _length_of(key) in leaves and batch.get(key).dtype == torch.uint8]
        following = [key for key in map(in_next, self.in_keys) if key is not None and batch.get(key, None) is not None]
        return [*self.in_keys, *(key for key in following if key not in self.in_keys)]

    @staticmethod
    def _decoded(batch: TensorDictBase, key: Path) -> Any:
        name, text, length = ".".join(key), batch.get(key, None), batch.get(_length_of(key), None)
        if text is None or length is None:
            raise MissingKeyError(f"{name if text is None else name + _LENGTH} is not in the batch")
        shape = batch.batch_size
        if text.dtype != torch.uint8 or text.shape[:-1] != shape or length.numel() != shape.numel():
            raise SchemaError(
                f"{name} is {text.dtype} {list(text.shape)} with lengths {list(length.shape)}, "
                f"expected text of the batch {list(shape)}"
            )
        rows, counts = text.reshape(-1, text.shape[-1]).numpy(force=True), length.reshape(-1).tolist()
        try:
            strings = [rows[number, :count].tobytes().decode() for number, count in enumerate(counts)]
        except UnicodeDecodeError as error:
            raise CorruptDataError(f"{name} is not UTF-8: {error}") from error
        return _stacked(strings, shape)


def _length_of(key: Path) -> Path:
    return (*key[:-1], key[-1] + _LENGTH)


def _stacked(strings: list[str], shape: torch.Size) -> Any:
    """Give strings the shape of a batch."""
    if not shape:
        return NonTensorData(strings[0])
    width = len(strings) // shape[0] if shape[0] else 0
    parts = [_stacked(strings[start * width : (start + 1) * width], shape[1:]) for start in range(shape[0])]
    return NonTensorStack(*parts)
