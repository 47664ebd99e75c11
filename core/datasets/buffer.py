"""The buffer that datasets are read through."""

from __future__ import annotations

from typing import Any

from ..buffers import TensorDictReplayBuffer
from ..errors import UsageError
from ..writers import ImmutableDatasetWriter, Writer

__all__ = ["DatasetReplayBuffer"]


class DatasetReplayBuffer(TensorDictReplayBuffer):
    """A `TensorDictReplayBuffer` whose default writer refuses to add anything.

    UsageError (a ValueError) for a `batch_size` that is no number from 1.
    """

    def __init__(self, *, batch_size: int | None = None, **arguments: Any) -> None:
        if batch_size is not None and (isinstance(batch_size, bool) or not isinstance(batch_size, int)):
            raise UsageError(f"batch_size is {batch_size!r}, a number of elements is expected")
        super().__init__(batch_size=batch_size, **arguments)

    def _default_writer(self) -> Writer:
        return ImmutableDatasetWriter()
