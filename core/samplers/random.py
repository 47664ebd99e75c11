"""Uniform sampling with replacement."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from ..storages import Storage
from .base import Index, Sampler
from .without_replacement import SamplerWithoutReplacement

__all__ = ["RandomSampler"]


class RandomSampler(Sampler):
    """Draws every valid element with the same probability, with replacement.

    Indices are int64, `[batch_size]`; for a storage of several dimensions one such tensor a dimension, each
    coordinate uniform over `storage.shape`. Draws come from the generator a buffer set, else from torch's own.
    An empty storage raises SchemaError (a RuntimeError), a batch of less than one element UsageError (a ValueError).
    `RandomSampler(replacement=False)` makes a `SamplerWithoutReplacement`, with its arguments.

    >>> import torch
    >>> from rbtool.core.storages import TensorStorage
    >>> index, info = RandomSampler().sample(TensorStorage(torch.arange(10)), 4)
    >>> index.shape, info
    (torch.Size([4]), {})
    """

    reads_rows: ClassVar[bool] = False
    without_replacement: ClassVar[type[Sampler]] = SamplerWithoutReplacement

    def draw(self, storage: Storage, batch_size: int) -> tuple[Index, dict[str, Any]]:
        """Draw `batch_size` elements."""
        generator, count = self.generator, (batch_size,)
        if generator is None and storage.ndim == 1:
            return torch.randint(len(storage), count), {}  # keyword arguments cost a tenth of the time
        device = None if generator is None else generator.device
        if storage.ndim == 1:
            return torch.randint(len(storage), count, generator=generator, device=device), {}
        return tuple(torch.randint(size, count, generator=generator, device=device) for size in storage.shape), {}
