"""Buffers whose elements are consumed: which parts they can have."""

from __future__ import annotations

from typing import Any

from ..errors import UsageError
from ..samplers.base import Sampler
from ..samplers.consuming import ConsumedTypeError, ConsumingSampler, checked_sample_count
from ..samplers.uniform import RandomSampler
from ..writers.base import Writer
from ..writers.round_robin import RoundRobinWriter


def consuming(count: Any, sampler: Sampler) -> Sampler:
    """Return the sampler of a buffer that is made with `consume_after_n_samples`, None for one that is not.

    ConsumedTypeError (a TypeError) and UsageError for an invalid count, UsageError for a sampler of another kind.
    """
    if count is None:
        return sampler
    count = checked_sample_count("consume_after_n_samples", count)
    if type(sampler) is RandomSampler:
        return ConsumingSampler(count)
    if not isinstance(sampler, ConsumingSampler):
        raise UsageError(f"consume_after_n_samples is {count}, expected None for a {type(sampler).__name__}")
    if sampler.max_sample_count != count:
        raise UsageError(
            f"consume_after_n_samples is {count}, the sampler consumes after {sampler.max_sample_count} samples"
        )
    return sampler


def check_consumption(writer: Writer, *, prefetches: bool, shared: bool) -> None:
    """Raise UsageError for a buffer that cannot consume its elements, also a TypeError for its writer."""
    if not isinstance(writer, RoundRobinWriter):
        raise ConsumedTypeError(f"a {type(writer).__name__} cannot write to the slots of consumed elements")
    if prefetches:
        raise UsageError("prefetch draws ahead, and elements that are not used yet would be consumed")
    if shared:
        raise UsageError("elements are consumed by one process, and the buffer is shared by several")
