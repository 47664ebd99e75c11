"""One priority an element, of the many numbers that a batch may hold."""

from __future__ import annotations

from collections.abc import Callable

import torch
from tensordict import TensorDictBase

from ..errors import SchemaError, UsageError

__all__ = ["by_element", "one_each"]

_REDUCTIONS: dict[str, Callable[..., torch.Tensor]] = {
    "max": torch.amax,
    "mean": torch.mean,
    "median": lambda priority, dim: priority.median(dim).values,
    "min": torch.amin,
    "sum": torch.sum,
}
_STEPS_OF_SLICES, _STEPS_OF_TRAJECTORIES = ("collector", "mask"), "mask"


def one_each(priority: torch.Tensor, count: int, reduction: str) -> torch.Tensor:
    """Make one number an element of its priorities: `[count]` of anything that has as many elements in front.

    SchemaError (a RuntimeError) for priorities of another number of elements, UsageError for an unknown reduction.
    """
    if not priority.numel() or priority.numel() % count:
        raise SchemaError(f"the priorities are {list(priority.shape)}, expected are those of {count} elements")
    priority = priority.reshape(count, -1)
    if priority.shape[1] == 1:
        return priority[:, 0]
    if reduction not in _REDUCTIONS:
        raise UsageError(f"the sampler's reduction is {reduction!r}, expected one of {', '.join(_REDUCTIONS)}")
    return _REDUCTIONS[reduction](priority if priority.is_floating_point() else priority.float(), dim=1)


def by_element(
    batch: TensorDictBase, index: torch.Tensor, priority: torch.Tensor, reduction: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the elements of a batch, int64 `[n, ndim]`, and one priority of each, `[n]`.

    `index` is int64 `[*batch.shape, ndim]`. Where one index stands at all steps of a row the elements are whole
    trajectories, and have one priority of all their steps. Steps that only pad the batch count for nothing.
    """
    elements, steps = index.reshape(-1, index.shape[-1]), batch.get(_STEPS_OF_SLICES, None)
    if steps is not None:
        real, priority = steps.reshape(-1), one_each(priority, len(elements), reduction)
        return elements[real.to(elements.device)], priority[real.to(priority.device)]
    rows = elements.reshape(len(index), -1, index.shape[-1]) if batch.ndim > 1 else elements.unsqueeze(1)
    if rows.shape[1] == 1 or not bool((rows == rows[:, :1]).all()):
        return elements, one_each(priority, len(elements), reduction)
    steps = batch.get(_STEPS_OF_TRAJECTORIES, None)
    if steps is None or steps.dtype != torch.bool or steps.shape != batch.shape:
        return rows[:, 0], one_each(priority, len(rows), reduction)
    each = zip(priority, steps.to(priority.device), strict=True)
    return rows[:, 0], torch.cat([one_each(row[real], 1, reduction) for row, real in each])
