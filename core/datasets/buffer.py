"""The buffer that datasets are read through."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from tensordict import is_tensor_collection

from ..buffers import TensorDictReplayBuffer
from ..buffers.prefetch import Draw
from ..errors import UsageError
from ..writers import ImmutableDatasetWriter, Writer

__all__ = ["DatasetReplayBuffer"]


class DatasetReplayBuffer(TensorDictReplayBuffer):
    """A `TensorDictReplayBuffer` whose default writer refuses to add anything.

    Where the elements are whole trajectories, what is known of one of them, like its `"index"`, is said of every
    step: batches are `[batch, steps]`, and so is that entry. UsageError (a ValueError) for a `batch_size` that is no
    number from 1.
    """

    def __init__(self, *, batch_size: int | None = None, **arguments: Any) -> None:
        if batch_size is not None and (isinstance(batch_size, bool) or not isinstance(batch_size, int)):
            raise UsageError(f"batch_size is {batch_size!r}, a number of elements is expected")
        super().__init__(batch_size=batch_size, **arguments)

    def _default_writer(self) -> Writer:
        return ImmutableDatasetWriter()

    def _completed(self, batch: Any, draw: Draw) -> Any:
        if is_tensor_collection(batch) and batch.ndim > 1:
            known = {key: _of_every_step(value, batch.shape) for key, value in draw.info.items()}
            draw = dataclasses.replace(draw, info=known)
        return super()._completed(batch, draw)


def _of_every_step(value: Any, batch: torch.Size) -> Any:
    """Repeat what is known of elements along the other dimensions of a batch, if it is of elements."""
    if not isinstance(value, torch.Tensor) or value.shape[:1] != batch[:1] or value.shape[: len(batch)] == batch:
        return value
    steps = value.reshape(len(value), *[1] * (len(batch) - 1), *value.shape[1:])
    return steps.expand(*batch, *value.shape[1:]).contiguous()
