"""Image fields as 8-bit pictures: finds the dimensions of height, width, colours and stacked frames."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np

from ..ted.schema import Field

Array: TypeAlias = np.ndarray[Any, Any]

_LEAST = 8
"""The smallest shorter side, in pixels, of a field that is recognised as an image."""
_COLOURS = (1, 3)
_MOST_CHANNELS = 16


@dataclass(frozen=True, slots=True)
class PictureLayout:
    """How a row of an image field is laid out.

    Attributes:
        colours: 1 (grey) or 3 (RGB).
        stacked: the number of frames in a row, the newest last.
        channels_first: whether channels come before height and width.
        apart: whether frames have a dimension of their own, the first; otherwise they are joined along the channels.
        alpha: whether there is a last channel of opacity, which is left out.
    """

    height: int
    width: int
    colours: int
    stacked: int
    channels_first: bool
    apart: bool
    alpha: bool = False

    def newest(self, rows: Array) -> Array:
        """Return the newest frame of each row: `[n, height, width]` for grey, `[n, height, width, 3]` for RGB."""
        if self.apart:
            rows = rows[:, -1]
        if rows.ndim == 3:
            return rows
        rows = np.moveaxis(rows, 1, -1) if self.channels_first else rows
        rows = rows[..., :-1] if self.alpha else rows
        rows = rows[..., -self.colours :]
        return rows[..., 0] if self.colours == 1 else rows

    def seen(self, row: Array) -> PictureLayout:
        """Return the layout that a row implies: two or four channels with an opaque last one are a single picture."""
        channels = self.colours * self.stacked
        if self.apart or self.channels_first or row.ndim != 3 or channels not in {2, 4} or (row[..., -1] != 255).any():
            return self
        return replace(self, colours=channels - 1, stacked=1, alpha=True)


def picture_layout(shape: tuple[int, ...]) -> PictureLayout | None:
    """Find the layout of image rows of this shape; None if it is not an image.

    Accepted are `[height, width]`, with channels before or after, and frames of such a shape stacked in front. 1 and 3
    channels are grey and RGB; 6, 9 and so on are stacked RGB frames, other numbers stacked grey frames, as in `[4, 84,
    84]`.
    """
    if 0 in shape or not 2 <= len(shape) <= 4:
        return None
    if len(shape) == 2:
        return PictureLayout(*shape, 1, 1, channels_first=False, apart=False)
    if len(shape) == 4:
        inner = picture_layout(shape[1:])
        if inner is None or inner.stacked > 1:
            return None
        return PictureLayout(inner.height, inner.width, inner.colours, shape[0], inner.channels_first, apart=True)
    first = _are_channels_first(shape)
    channels, (height, width) = (shape[0], shape[1:]) if first else (shape[2], shape[:2])
    if channels > _MOST_CHANNELS:
        return None
    colours = 3 if channels % 3 == 0 else 1
    return PictureLayout(height, width, colours, channels // colours, first, apart=False)


def _are_channels_first(shape: tuple[int, ...]) -> bool:
    """Whether channels come first: as the dimension of 1 or 3, or as the smaller of the first and last dimension."""
    if (shape[0] in _COLOURS) != (shape[2] in _COLOURS):
        return shape[0] in _COLOURS
    return shape[0] <= shape[2]


def looks_like_picture(field: Field) -> bool:
    """Whether a field may hold images, judging by type and shape: bytes, or real numbers with channels."""
    if field.role in {"text", "id", "done", "action"}:
        return False
    layout = picture_layout(field.shape)
    if layout is None or min(layout.height, layout.width) < _LEAST:
        return False
    return field.dtype == "uint8" or ("float" in field.dtype and len(field.shape) > 2)


def as_bytes(frames: Array, low: float, high: float) -> Array:
    """Convert frames to uint8: `low` becomes 0 and `high` 255, with rounding; bytes stay as they are, NaN becomes 0."""
    if frames.dtype == np.uint8 and (low, high) == (0, 255):
        return frames
    scale = 255 / (high - low) if high > low else 0.0
    scaled = (frames.astype(np.float64) - low) * scale
    pixels: Array = np.clip(np.rint(np.nan_to_num(scaled, nan=0.0, posinf=255.0, neginf=0.0)), 0, 255).astype(np.uint8)
    return pixels
