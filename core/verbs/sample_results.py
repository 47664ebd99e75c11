"""The document of `sample`: the steps that were drawn, the slices they make, and what the batch is like."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from ..dataset import EpisodeTable
from ..stats import mean_of
from ..ted import NEXT_TRUNCATED, Field, Key, as_numbers, key_name
from .results import Result
from .sample_timing import SampleTiming
from .sampler_options import SamplerOptions

if TYPE_CHECKING:
    import torch
    from tensordict import TensorDictBase

__all__ = ["SampleResult", "SampledField", "SampledSlice", "sampled_fields", "sampled_slices"]

_INDEX = "index"
_MASK = ("collector", "mask")


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledField:
    """One leaf of the batch: its whole shape, its bytes, and what its values are like.

    `min`, `mean` and `max` leave NaN out; they are None for flags, text and complex numbers. `true_fraction` is
    how much of a flag is set, None for anything else.
    """

    key: str
    dtype: str
    shape: tuple[int, ...]
    bytes: int
    min: float | None = None
    mean: float | None = None
    max: float | None = None
    true_fraction: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledSlice:
    """Steps `first` to `last` of an episode, the source's number of which is `episode`; row `start` is the first.

    `length` counts the steps, and `padding` how often the last one was repeated to fill the slice up: the mask of
    the slice is `length` times true, `padding` times false.
    """

    episode: int
    first: int
    last: int
    start: int
    length: int
    padding: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleResult(Result):
    """A batch of `n` steps: storage rows, the source's numbers of their episodes, steps within those.

    `options` are those that the sampler was given. `slices` is empty for a sampler that draws single steps, `timing`
    None where no time was taken. `fields` are the leaves of the batch, with what the sampler adds to it.
    """

    kind: ClassVar[str] = "sample"
    path: Path
    n: int
    seed: int
    sampler: str
    options: Mapping[str, Any]
    indices: tuple[int, ...]
    episodes: tuple[int, ...]
    steps: tuple[int, ...]
    slices: tuple[SampledSlice, ...]
    fields: tuple[SampledField, ...]
    timing: SampleTiming | None


def sampled_slices(
    batch: TensorDictBase, rows: np.ndarray[Any, Any], table: EpisodeTable, options: SamplerOptions, batch_size: int
) -> tuple[SampledSlice, ...]:
    """Take the rows of a batch apart into its slices."""
    if not options.in_slices:
        return ()
    steps = options.steps_of_a_slice(batch_size)
    mask = batch.get(_MASK, None)
    runs: list[tuple[np.ndarray[Any, Any], int]]
    if mask is not None and (options.pad or options.batched):
        real = mask.numpy(force=True).reshape(-1, steps).sum(1)
        runs = [(run[:length], steps - length) for run, length in zip(rows.reshape(-1, steps), real, strict=True)]
    elif options.strict_length:
        runs = [(run, 0) for run in rows.reshape(-1, steps)]
    else:
        ends = np.flatnonzero(batch.get(NEXT_TRUNCATED).numpy(force=True).reshape(-1)) + 1
        runs = [(run, 0) for run in np.split(rows, ends[:-1])]
    return tuple(_slice(run, int(padding), table) for run, padding in runs)


def _slice(rows: np.ndarray[Any, Any], padding: int, table: EpisodeTable) -> SampledSlice:
    which = int(table.index_of_step(rows[:1])[0])
    first = int(rows[0] - table.start[which])
    return SampledSlice(
        episode=int(table.episode[which]),
        first=first,
        last=first + len(rows) - 1,
        start=int(rows[0]),
        length=len(rows),
        padding=padding,
    )


def sampled_fields(batch: TensorDictBase, fields: tuple[Field, ...]) -> Iterator[SampledField]:
    """Describe the leaves of a batch: those of the dataset in its order, then what the sampler added."""
    for field in fields:
        yield _sampled(field.name, field.dtype, batch.get(field.key), is_text=field.role == "text")
    known = {_INDEX, *(field.name for field in fields)}
    keys: Iterable[str | Key] = batch.keys(include_nested=True, leaves_only=True)
    for key in keys:
        name = key if isinstance(key, str) else key_name(key)
        if name not in known:
            values = batch.get(key)
            yield _sampled(name, str(values.dtype).removeprefix("torch."), values)


def _sampled(name: str, dtype: str, values: torch.Tensor, *, is_text: bool = False) -> SampledField:
    import torch

    shape, size = tuple(values.shape), values.numel() * values.element_size()
    known: dict[str, Any] = {"key": name, "dtype": dtype, "shape": shape, "bytes": size}
    bits = values.view(torch.uint16) if dtype == "bfloat16" else values
    numbers = as_numbers(bits.numpy(force=True), dtype)
    if not numbers.size or "complex" in dtype or is_text:
        return SampledField(**known)
    if dtype == "bool":
        return SampledField(**known, true_fraction=float(numbers.mean()))
    numbers = numbers[~np.isnan(numbers)] if numbers.dtype.kind == "f" else numbers
    if not numbers.size:
        return SampledField(**known)
    return SampledField(**known, min=numbers.min().item(), mean=mean_of(numbers), max=numbers.max().item())
