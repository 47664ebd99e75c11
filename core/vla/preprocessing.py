"""Preprocessing of images as in OpenVLA: JPEG compression, resizing to a square, centre crop and normalisation."""

from __future__ import annotations

import functools
import io
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from PIL import Image

from ..errors import SchemaError, UsageError

_AREA = 0.9
"""The fraction of the area that the centre crop keeps, as in the training of OpenVLA."""
_LOBES = 3
_CHANNELS = 3


class OpenVLAImagePreprocessor:
    """Prepares camera images as OpenVLA does, from `[*batch, C, H, W]` with C = 3 or 1 to `[*batch, 3, size, size]`.

    The steps follow OpenVLA-OFT (Kim et al., 2025), the arguments TorchRL. Each image is

    1. compressed as JPEG with chroma subsampling and decoded again, like the data that OpenVLA was trained on;
    2. resized to `size`;
    3. with `center_crop`, replaced by its centre (0.9 of the area), enlarged to `size`;
    4. with `mean` and `std`, normalized to `(pixels / 255 - mean) / std` in float32.

    Steps 1 to 3 round to uint8. Without step 4, the result is uint8. It is on the device of the input. A single channel
    is repeated three times. The input is uint8, other integers from 0 to 255, or floats. Floats are taken to range from
    0 to 1 if none in the call is above 1, and from 0 to 255 otherwise. Almost black images are therefore ambiguous as
    floats: prefer uint8.

    Args:
        size: height and width of the result.
        center_crop: apply step 3.
        jpeg_quality: quality of the JPEG compression.
        mean, std: numbers `[3]`; with `[N, 3]` the result has N normalized copies, `[*batch, 3 * N, size, size]`.
        backend: how images are resized. `"torch_reference"`: Lanczos with three lobes, antialiased, in torch;
            `"torchvision"`: antialiased bicubic, in torch; `"pil"`: Lanczos of Pillow. JPEG is always Pillow's.
            TorchRL's `"tensorflow"` is not available: `"torch_reference"` uses its formulas in float32, but TensorFlow
            decodes JPEG with a faster, less exact transform.

    Raises:
        UsageError (a ValueError): an argument is invalid.
        ImageShapeError (a RuntimeError and a ValueError): the input does not consist of images.

    >>> OpenVLAImagePreprocessor(size=64)(torch.zeros(2, 3, 32, 48, dtype=torch.uint8)).shape
    torch.Size([2, 3, 64, 64])
    """

    def __init__(
        self,
        *,
        size: int = 224,
        jpeg_quality: int = 95,
        center_crop: bool = False,
        backend: str = "torch_reference",
        mean: Any = None,
        std: Any = None,
    ) -> None:
        self.size = _number("size", size, 1, 1 << 14)
        self.jpeg_quality = _number("jpeg_quality", jpeg_quality, 1, 100)
        self.center_crop = bool(center_crop)
        if backend not in _RESIZERS:
            names = ", ".join(map(repr, _RESIZERS))
            raise UsageError(f"backend is {backend!r}, expected one of {names}")
        self.backend = backend
        if (mean is None) != (std is None):
            raise UsageError("one of mean and std is set, expected both or none")
        self.mean = _statistics("mean", mean)
        self.std = _statistics("std", std)
        if self.mean is not None and self.std is not None:
            if self.mean.shape != self.std.shape:
                raise UsageError(f"mean is {list(self.mean.shape)}, std {list(self.std.shape)}; expected one shape")
            if not bool((self.std > 0).all()):
                raise UsageError(f"std is {self.std.tolist()}, expected numbers above 0")

    def __call__(self, images: torch.Tensor) -> torch.Tensor:
        pixels = _pixels(images)
        batch, device = pixels.shape[:-3], pixels.device
        flat = pixels.reshape(-1, *pixels.shape[-3:]).cpu()
        flat = flat.expand(-1, _CHANNELS, -1, -1) if flat.shape[1] == 1 else flat
        made = torch.empty(len(flat), _CHANNELS, self.size, self.size, dtype=torch.uint8)
        for number, image in enumerate(flat):
            small = _RESIZERS[self.backend](self._through_jpeg(image), self.size)
            made[number] = _cropped(small) if self.center_crop else small
        return self._normalized(made.reshape(*batch, *made.shape[1:]).to(device))

    def _through_jpeg(self, image: torch.Tensor) -> torch.Tensor:
        """Compress an image `[3, H, W]` as JPEG with chroma at half the resolution, and decode it again."""
        stored = io.BytesIO()
        _picture(image).save(stored, "JPEG", quality=self.jpeg_quality, subsampling="4:2:0")
        with Image.open(stored) as found:
            return _as_tensor(found.convert("RGB"))

    def _normalized(self, images: torch.Tensor) -> torch.Tensor:
        if self.mean is None or self.std is None:
            return images
        shares = (images.to(torch.float32) / 255).unsqueeze(-4)
        mean, std = (one.to(images.device).reshape(-1, _CHANNELS, 1, 1) for one in (self.mean, self.std))
        return ((shares - mean) / std).flatten(-4, -3)


class ImageShapeError(SchemaError, ValueError):
    """The input is not images, or has values outside of 0 to 255."""


def _number(name: str, value: Any, least: int, most: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise UsageError(f"{name} is {value!r}, expected a whole number from {least} to {most}")
    return value


def _statistics(name: str, values: Any) -> torch.Tensor | None:
    if values is None:
        return None
    try:
        found = torch.as_tensor(values, dtype=torch.float32)
    except (TypeError, ValueError, RuntimeError) as error:
        raise UsageError(f"{name} is {values!r}, expected numbers [3] or [N, 3]") from error
    if found.dim() not in (1, 2) or found.shape[-1] != _CHANNELS or not len(found):
        raise UsageError(f"{name} is {list(found.shape)}, expected [3] or [N, 3]")
    if not bool(found.isfinite().all()):
        raise UsageError(f"{name} is {found.tolist()}, expected finite numbers")
    return found


def _pixels(images: Any) -> torch.Tensor:
    """Check images and return them as uint8."""
    if not isinstance(images, torch.Tensor):
        raise ImageShapeError(f"the images are a {type(images).__name__}, expected a tensor")
    if images.dim() < 3 or images.shape[-3] not in (1, _CHANNELS) or 0 in images.shape[-2:]:
        raise ImageShapeError(f"the images are {list(images.shape)}, expected [*batch, 3 or 1, height, width]")
    if images.dtype is torch.uint8:
        return images
    if images.dtype is torch.bool or images.is_complex():
        raise ImageShapeError(f"the images are {images.dtype}, expected uint8, other integers or floats")
    if images.numel() and not bool(((images >= 0) & (images <= 255)).all()):  # also refuses NaN
        raise ImageShapeError("the images have values that are not from 0 to 255")
    if not images.is_floating_point():
        return images.to(torch.uint8)
    wide = images.to(torch.float32)
    whole = wide * 255 if not wide.numel() or bool(wide.amax() <= 1) else wide
    return whole.round().to(torch.uint8)


def _picture(image: torch.Tensor) -> Image.Image:
    return Image.fromarray(image.movedim(0, -1).contiguous().numpy())


def _as_tensor(picture: Image.Image) -> torch.Tensor:
    return torch.from_numpy(np.array(picture)).movedim(-1, 0)


def _rounded(image: torch.Tensor) -> torch.Tensor:
    return image.round().clamp_(0, 255).to(torch.uint8)


def _by_lanczos(image: torch.Tensor, size: int) -> torch.Tensor:
    height, width = image.shape[-2:]
    return _rounded(_kernel(height, size) @ image.to(torch.float32) @ _kernel(width, size).T)


@functools.lru_cache(maxsize=16)
def _kernel(old: int, new: int) -> torch.Tensor:
    """Return the Lanczos weights of `old` pixels for each of `new` pixels, float32 `[new, old]`; rows sum to 1.

    Pixel centres are at half-integers. If the image shrinks, the kernel is stretched by the same factor (antialiasing);
    the part of it outside of the image is cut off, and the rest normalized.
    """
    scale = old / new
    centres = (torch.arange(new, dtype=torch.float64) + 0.5) * scale
    places = torch.arange(old, dtype=torch.float64) + 0.5
    distance = (places - centres.unsqueeze(-1)) / max(scale, 1.0)
    weights = torch.sinc(distance) * torch.sinc(distance / _LOBES) * (distance.abs() < _LOBES)
    return (weights / weights.sum(-1, keepdim=True)).to(torch.float32)


def _by_bicubic(image: torch.Tensor, size: int) -> torch.Tensor:
    wide = image.to(torch.float32).unsqueeze(0)
    resized = torch.nn.functional.interpolate(wide, (size, size), mode="bicubic", antialias=True)
    return _rounded(resized.squeeze(0))


def _by_pillow(image: torch.Tensor, size: int) -> torch.Tensor:
    return _as_tensor(_picture(image).resize((size, size), Image.Resampling.LANCZOS))


_RESIZERS: dict[str, Callable[[torch.Tensor, int], torch.Tensor]] = {
    "torch_reference": _by_lanczos, "torchvision": _by_bicubic, "pil": _by_pillow,
}  # fmt: skip


def _cropped(image: torch.Tensor) -> torch.Tensor:
    """Enlarge the centre of a square image, 0.9 of its area, to the full size by bilinear interpolation.

    As in TensorFlow's `crop_and_resize`, positions count from the middle of the first pixel to the middle of the last,
    and the outermost samples lie on the edges of the crop. Values are truncated to whole numbers, as TensorFlow does
    when it converts floats to uint8.
    """
    weights = _crop_weights(image.shape[-1])
    shares = weights @ (image.to(torch.float32) / 255) @ weights.T
    return (shares.clamp_(0, 1) * 255.5).to(torch.uint8)


@functools.lru_cache(maxsize=16)
def _crop_weights(size: int) -> torch.Tensor:
    """Return the bilinear weights of `size` pixels for `size` samples of the crop, float32 `[size, size]`."""
    side = _AREA**0.5
    start, last = (1 - side) / 2 * (size - 1), (1 + side) / 2 * (size - 1)
    places = torch.linspace(start, last, size, dtype=torch.float64)
    left = places.floor().clamp(0, max(size - 2, 0)).to(torch.int64)
    weights = torch.zeros(size, size, dtype=torch.float64)
    rows = torch.arange(size)
    if size == 1:
        return torch.ones(1, 1)
    weights[rows, left + 1] = places - left
    weights[rows, left] = 1 - (places - left)
    return weights.to(torch.float32)
