"""Integers: uniform draws from any range, and the nearest in a range."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from ..errors import UsageError

_MOST = 2**26  # numbers in one listing; more is asked for by mistake


def combinations(counts: Sequence[int], device: torch.device | None = None) -> torch.Tensor:
    """List the rows of numbers below `counts`, the last column changing fastest; int64 of shape `[rows, columns]`.

    UsageError if that would be more than 2**26 numbers.
    """
    rows = math.prod(counts)
    if rows * max(len(counts), 1) > _MOST:
        raise UsageError(f"{rows} values of {len(counts)} numbers each are too many to list")
    columns, repeats = [], rows
    for count in counts:
        repeats //= max(count, 1)
        columns.append(torch.arange(rows, device=device).div(max(repeats, 1), rounding_mode="floor") % max(count, 1))
    return torch.stack(columns, -1) if columns else torch.zeros(rows, 0, dtype=torch.int64, device=device)


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


def draw_categories(
    counts: torch.Tensor, allowed: torch.Tensor | None, shape: torch.Size, generator: torch.Generator | None
) -> torch.Tensor:
    """Draw evenly among the allowed categories of each element; int64 of `shape`."""
    if allowed is None:
        return uniform_integers(torch.zeros_like(counts), counts - 1, shape, generator)
    in_front = allowed.to(torch.uint8).argsort(dim=-1, descending=True, stable=True)
    numbers = allowed.sum(-1)
    return _looked_up(in_front, uniform_integers(torch.zeros_like(numbers), numbers - 1, shape, generator))


def are_categories(value: torch.Tensor, counts: torch.Tensor, allowed: torch.Tensor | None) -> torch.Tensor:
    """Return which elements are the number of an existing, allowed category; bool."""
    safe = value.nan_to_num(-1.0, posinf=-1.0, neginf=-1.0) if value.is_floating_point() else value
    number = as_int64(safe)
    found = whole(safe) & (number >= 0) & (number < counts)
    if allowed is None:
        return found
    return found & _looked_up(allowed, number.clamp(0, allowed.shape[-1] - 1))


def nearest_categories(value: torch.Tensor, counts: torch.Tensor, allowed: torch.Tensor | None) -> torch.Tensor:
    """Return the nearest category of each element, the lower of two as near; int64."""
    number = nearest_integers(value, torch.zeros_like(counts), counts - 1)
    if allowed is None:
        return number
    places = torch.arange(allowed.shape[-1], device=allowed.device)
    distance = (places[:, None] - places).abs()
    nearest = distance.where(allowed.unsqueeze(-2), allowed.shape[-1]).argmin(-1)
    return _looked_up(nearest, number)


def _looked_up(table: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
    """Return `table[..., number]` for each element."""
    return table.expand(*number.shape, table.shape[-1]).gather(-1, number.unsqueeze(-1)).squeeze(-1)
