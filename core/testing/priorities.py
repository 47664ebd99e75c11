"""What a prioritised buffer draws, seen from outside."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from ..buffers import PrioritizedReplayBuffer, ReplayBuffer, TensorDictPrioritizedReplayBuffer
from ..storages import LazyTensorStorage

__all__ = ["EXPONENTS", "draw_many", "drawn_weights", "expected", "of_steps", "plain", "steps"]

EXPONENTS: dict[str, Any] = {"alpha": 1.0, "beta": 1.0, "eps": 0.0}
"""With these, weights are priorities, and what is known of elements tells them."""


def draw_many(buffer: ReplayBuffer, draws: int = 4000) -> tuple[Any, dict[str, Any]]:
    """Draw one large batch, whatever the buffer's own batch size, and return it with what is known of its elements."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the buffer has another batch size
        found: tuple[Any, dict[str, Any]] = buffer.sample(draws, return_info=True)
    return found


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


def plain(size: int = 10, **more: Any) -> PrioritizedReplayBuffer:
    """Make a buffer whose weights are the priorities themselves."""
    return PrioritizedReplayBuffer(**EXPONENTS | {"storage": LazyTensorStorage(size), "batch_size": 4} | more)


def of_steps(size: int = 10, **more: Any) -> TensorDictPrioritizedReplayBuffer:
    """Make such a buffer of tensordicts."""
    return TensorDictPrioritizedReplayBuffer(**EXPONENTS | {"storage": LazyTensorStorage(size), "batch_size": 4} | more)


def steps(count: int = 4, **more: Any) -> TensorDict:
    """Make rows that carry their numbers."""
    return TensorDict({"a": torch.arange(count), **more}, [count])


def expected(*priorities: float) -> Any:
    """Return what `drawn_weights` finds of elements of these priorities."""
    return pytest.approx([priority / sum(priorities) for priority in priorities], abs=1e-6)
