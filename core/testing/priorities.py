"""What a prioritised buffer draws, seen from outside."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ..buffers import ReplayBuffer

__all__ = ["draw_many", "drawn_weights"]


def draw_many(buffer: ReplayBuffer, draws: int = 4000) -> tuple[Any, dict[str, Any]]:
    """Draw one large batch, whatever the buffer's own batch size, and return it with what is known of its elements."""
    size, buffer._batch_size = buffer._batch_size, None
    try:
        found: tuple[Any, dict[str, Any]] = buffer.sample(draws, return_info=True)
        return found
    finally:
        buffer._batch_size = size


def drawn_weights(buffer: ReplayBuffer) -> list[float]:
    """Return the weights of all elements in parts of their sum; of a sampler whose beta is 1, that has some tens.

    They are read off the importance weights of many draws: an element that is not among them has weight 0.
    """
    torch.manual_seed(0)
    _, info = draw_many(buffer)
    index = info["index"]
    if isinstance(index, tuple):
        index = torch.from_numpy(np.ravel_multi_index(tuple(map(np.asarray, index)), buffer.storage.shape))
    found = torch.zeros(len(buffer), dtype=torch.float64)
    found[index] = 1 / info["priority_weight"].double()
    return [float(weight) for weight in found / found.sum()]
