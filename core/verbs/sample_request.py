"""What `sample` draws, of a dataset or a stream: the request, checked before anything is opened, and its result."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

from ..errors import UsageError
from ..ted.schema import Field
from .frame_stacks import FrameStacks
from .sample_result import (
    DrawnRows,
    SampleResult,
    SampleTiming,
    checked_seconds,
    sampled_fields,
    sampled_slices,
    timed,
)
from .sampler_options import SamplerOptions

if TYPE_CHECKING:
    from tensordict import TensorDictBase

    from ..buffers.replay_buffer import ReplayBuffer


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRequest:
    """A batch of `size` steps of a seed, and for how many seconds to measure; None measures nothing."""

    options: SamplerOptions
    frames: FrameStacks
    size: int
    seed: int
    limit: float | None

    @classmethod
    def of(
        cls,
        options: SamplerOptions,
        frames: FrameStacks,
        n: int | None,
        *,
        seed: int | None,
        time: bool,
        seconds: float | None,
    ) -> Self:
        """Check the arguments of `sample`; UsageError for those that make no sense."""
        size, limit = options.batch_size(n), checked_seconds(seconds, asked=time)
        seed = secrets.randbits(63) if seed is None else seed
        if not 0 <= seed < 1 << 64:
            raise UsageError(f"the seed is {seed}, expected a number of 64 bits without sign")
        return cls(options=options, frames=frames, size=size, seed=seed, limit=limit)

    def batch(self, buffer: ReplayBuffer) -> TensorDictBase:
        """Return the first batch of the seed."""
        import torch  # lazy: takes seconds, and an invalid request fails before

        buffer.set_rng(torch.Generator().manual_seed(self.seed))
        first: TensorDictBase = buffer.sample()
        return first

    def result(
        self, path: Path | str, buffer: ReplayBuffer, batch: TensorDictBase, fields: Sequence[Field], drawn: DrawnRows
    ) -> SampleResult:
        """Describe a batch of these fields, and measure how fast others come."""
        sampled = tuple(sampled_fields(batch, tuple(fields)))
        step_bytes = sum(field.bytes for field in sampled) / len(drawn.rows)
        return SampleResult(
            path=path, n=len(drawn.rows), seed=self.seed, sampler=self.options.sampler,
            options=self.options.given() | self.frames.given(), indices=tuple(drawn.rows.tolist()),
            episodes=tuple(drawn.episodes.tolist()), steps=tuple(drawn.steps.tolist()),
            slices=sampled_slices(batch, drawn, self.options, self.size), fields=sampled,
            timing=None if self.limit is None else _timing(buffer, self.limit, step_bytes),
        )  # fmt: skip


def _timing(buffer: ReplayBuffer, seconds: float, step_bytes: float) -> SampleTiming:
    import torch

    return timed(lambda: buffer.sample().numel(), seconds, step_bytes=step_bytes, threads=torch.get_num_threads())
