"""Integers: uniform draws from any range, and the nearest in a range."""

from __future__ import annotations

import torch

__all__ = ["as_int64", "nearest_integers", "uniform_integers", "whole"]

_LOWEST, _HIGHEST = -(2**63), 2**63 - 1
_EVEN_ENOUGH = 2**40  # the modulus below is off from even by less than this over 2**63


def whole(value: torch.Tensor) -> torch.Tensor:
    """Return which elements are integers; bool."""
    if not value.is_floating_point():
        return torch.ones_like(value, dtype=torch.bool)
    return value == value.floor()


def uniform_integers(
    low: torch.Tensor, high: torch.Tensor, shape: torch.Size, generator: torch.Generator | None = None
) -> torch.Tensor:
    """Draw from `low` to `high`, both included and int64, element by element; they broadcast to `shape`.

    Ranges may be as wide as int64 itself: wide ones are drawn again until they fall inside.
    """
    low, high = low.expand(shape), high.expand(shape)
    span = high - low + 1  # wraps around where the range is wider than 2**63
    narrow = (span > 0) & (span <= _EVEN_ENOUGH)
    bits = _random_bits(shape, low.device, generator)
    drawn = low + (bits & _HIGHEST) % torch.where(narrow, span, 1)
    if bool(narrow.all()):
        return drawn
    drawn = torch.where(narrow, drawn, _scaled(bits, span) + low)
    while bool((outside := (drawn < low) | (drawn > high)).any()):
        again = _scaled(_random_bits(shape, low.device, generator), span) + low
        drawn = torch.where(outside, again, drawn)
    return drawn


def _random_bits(shape: torch.Size, device: torch.device, generator: torch.Generator | None) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.int64, device=device).random_(_LOWEST, None, generator=generator)


def _scaled(bits: torch.Tensor, span: torch.Tensor) -> torch.Tensor:
    """Cut 64 random bits down to as many as a span needs, or one more; the span is unsigned, and 0 is 2**64."""
    needed = span.clamp(min=1).double().log2().floor().add(1).clamp(max=63).long()
    return bits & torch.where(span > 0, (1 << needed) - 1, -1)


def as_int64(value: torch.Tensor) -> torch.Tensor:
    """Return whole numbers as int64; those of a uint64 that are too large become the largest."""
    if value.dtype is torch.uint64:
        found = value.view(torch.int64)
        return torch.where(found < 0, _HIGHEST, found)
    return value.to(torch.int64)


def nearest_integers(value: torch.Tensor, low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    """Return the int64 between `low` and `high` next to each element; NaN counts as zero."""
    if not value.is_floating_point():
        return torch.maximum(torch.minimum(as_int64(value), high), low)
    wide = value.double().nan_to_num(0.0, posinf=torch.inf, neginf=-torch.inf)
    below, above = wide <= low.double(), wide >= high.double()
    middle = torch.where(below | above, 0.0, wide).round().to(torch.int64)
    found = torch.where(below, low, torch.where(above, high, middle))
    return torch.maximum(torch.minimum(found, high), low)
