"""How much is done, in which pieces, and by how many."""

from __future__ import annotations

import os
from dataclasses import dataclass

from ..dataset import Manifest
from ..errors import UsageError
from ..ted import row_bytes
from .crew import Chunk

__all__ = ["Plan"]

_CHUNK_BYTES = 16 << 20
_CHUNK_ROWS = 1 << 16


@dataclass(frozen=True, slots=True)
class Plan:
    """The first `steps` steps in chunks of `chunk_size`, by `workers` processes; 0 means in this one."""

    steps: int
    chunk_size: int
    workers: int

    @classmethod
    def of(cls, source: Manifest, num_workers: int | None, chunk_size: int | None, num_frames: int | None) -> Plan:
        """Fill in what was not said; UsageError for what cannot be.

        The default chunk size depends on the size of a row alone, never on the number of workers: a function may
        see the chunk it is given.
        """
        if not source.steps:
            raise UsageError("the dataset has no steps: there is nothing to preprocess")
        if num_frames is not None and not 1 <= num_frames <= source.steps:
            raise UsageError(f"{num_frames:,} steps asked for (num_frames), the dataset has {source.steps:,}")
        if chunk_size is not None and chunk_size < 1:
            raise UsageError(f"chunks of {chunk_size} steps asked for (chunk_size), at least 1 is needed")
        if num_workers is not None and num_workers < 0:
            raise UsageError(f"{num_workers} workers asked for (num_workers), 0 or more are expected")
        steps = num_frames or source.steps
        size = chunk_size or min(max(1, _CHUNK_BYTES // max(1, row_bytes(source.fields))), _CHUNK_ROWS)
        chunks = -(-steps // size)
        if num_workers is None:
            usable = min(_usable_cores(), chunks)
            num_workers = usable if usable > 1 else 0  # one worker alone would only cost its start
        return cls(steps, size, min(num_workers, chunks))

    def chunks(self) -> list[Chunk]:
        """All chunks in order."""
        return [(start, min(start + self.chunk_size, self.steps)) for start in range(0, self.steps, self.chunk_size)]


def _usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
