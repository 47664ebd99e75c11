"""Categories by number, where each element has its own count and may have a mask.

`counts` (int64, broadcast to the spec's shape) counts them, `allowed` (bool, `[*shape, most]`) is the mask.
"""

from __future__ import annotations

import torch

from .integers import as_int64, nearest_integers, uniform_integers, whole

__all__ = ["are_categories", "draw_categories", "nearest_categories"]


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
