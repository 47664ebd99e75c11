"""Fields that hold images, and their pixels as RGB."""

from __future__ import annotations

from ..ted.schema import NEXT, Field

_LEAST = 8
"""Pixels on a side: less than that is no image."""
_CHANNELS = frozenset({1, 2, 3, 4})


def is_image(field: Field) -> bool:
    """Whether rows of a field look like images: bytes, `[height, width]` with channels before or after, or without."""
    if field.dtype != "uint8" or field.key[0] == NEXT or field.role in {"action", "text", "id", "done"}:
        return False
    sides = {2: field.shape, 3: _sides(field.shape)}.get(len(field.shape))
    return sides is not None and min(sides) >= _LEAST


def _sides(shape: tuple[int, ...]) -> tuple[int, ...] | None:
    return shape[:2] if shape[2] in _CHANNELS else shape[1:] if shape[0] in _CHANNELS else None
