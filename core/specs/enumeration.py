"""All combinations of a few numbered choices."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from ..errors import UsageError

__all__ = ["combinations"]

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
