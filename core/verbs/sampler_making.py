"""Makes the sampler that `sample` draws with, and the priorities it begins with."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ..dataset import EpisodeTable, StepReader
from ..errors import UsageError
from ..ted import Field, as_numbers, unknown_field
from .sampler_options import ALPHA, BETA, SamplerOptions

if TYPE_CHECKING:
    from ..samplers import Sampler

__all__ = ["initial_priorities", "make_sampler", "priority_field"]

_CHUNK = 1 << 20


def make_sampler(options: SamplerOptions, reader: StepReader) -> Sampler:
    """Make the sampler for the steps of `reader`."""
    # Torch, which takes seconds, comes with these: what is wrong with a request is told before.
    if options.sampler == "random":
        from ..samplers import RandomSampler

        return RandomSampler()
    epochs: dict[str, Any] = {"drop_last": options.drop_last, "shuffle": options.shuffle is not False}
    if options.sampler == "without-replacement":
        from ..samplers import SamplerWithoutReplacement

        return SamplerWithoutReplacement(**epochs)
    priorities = (
        reader.manifest.steps,
        ALPHA if options.alpha is None else options.alpha,
        BETA if options.beta is None else options.beta,
    )
    if options.sampler == "prioritized":
        from ..samplers.prioritized import PrioritizedSampler

        return PrioritizedSampler(*priorities)
    slices = _slice_arguments(options) | _ends(reader.episodes)
    if options.sampler == "slice":
        from ..samplers.slices import SliceSampler

        return SliceSampler(**slices)
    if options.sampler == "slice-without-replacement":
        from ..samplers.slices_without_replacement import SliceSamplerWithoutReplacement

        slices.pop("cache_values")  # it always does
        return SliceSamplerWithoutReplacement(**slices, **epochs)
    from ..samplers.prioritized_slices import PrioritizedSliceSampler

    return PrioritizedSliceSampler(*priorities, **slices)


def _slice_arguments(options: SamplerOptions) -> dict[str, Any]:
    size = {"num_slices": options.num_slices} if options.slice_len is None else {"slice_len": options.slice_len}
    given = options.given()
    passed: dict[str, Any] = {name: given[name] for name in ("weight", "anchor", "batched") if name in given}
    return {**size, **passed, "strict_length": options.strict_length, **({"pad_output": True} if options.pad else {})}


def _ends(table: EpisodeTable) -> dict[str, Any]:
    """Say where episodes end, as the table has it: that is where a sampler finds it in a dataset, too."""
    import torch

    ends = np.zeros(table.steps, bool)
    ends[(table.start + table.length)[table.length > 0] - 1] = True
    return {"ends": torch.from_numpy(ends), "cache_values": True}


def priority_field(reader: StepReader, name: str) -> Field:
    """Find the leaf that initial priorities are taken from; UsageError if there is none or it holds no numbers."""
    field = next((field for field in reader.fields if field.name == name), None)
    if field is None:
        raise unknown_field(name, [field.name for field in reader.fields])
    if field.role == "text" or field.dtype == "bool" or "complex" in field.dtype or 0 in field.shape:
        what = "text" if field.role == "text" else f"{field.dtype} {list(field.shape)}"
        raise UsageError(f"--priority is {name!r}, which is {what}: real numbers are expected")
    return field


def initial_priorities(reader: StepReader, field: Field) -> np.ndarray[Any, Any]:
    """Return the largest absolute value of a leaf at each step, float64 `[steps]`; UsageError for one not finite."""
    steps = reader.manifest.steps
    found = np.empty(steps)
    rows = max(1, min(_CHUNK, (8 << 20) // max(1, field.row_bytes)))
    for start in range(0, steps, rows):
        stop = min(start + rows, steps)
        values = as_numbers(reader.read(field.key, start, stop), field.dtype).astype(np.float64)
        found[start:stop] = np.abs(values).reshape(stop - start, -1).max(1)
    odd = np.flatnonzero(~np.isfinite(found))
    if len(odd):
        raise UsageError(
            f"--priority is {field.name!r}, which is {found[odd[0]]} at step {odd[0]:,} and not finite at "
            f"{len(odd):,} of {steps:,} steps: priorities are finite numbers"
        )
    return found
