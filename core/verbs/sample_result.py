"""What `sample` returns: the drawn steps and slices, the leaves of the batch, and the sampling speed."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from ..errors import UsageError
from ..format.contracts import Array
from ..format.episodes import EpisodeTable
from ..format.videos import reference_keys
from ..results import Result
from ..stats import mean_of
from ..ted.schema import NEXT_TRUNCATED, Field, Key, as_numbers, key_name
from .sampler_options import SamplerOptions

if TYPE_CHECKING:
    import torch
    from tensordict import TensorDictBase

SECONDS = 2.0
_WARM_UP = 0.1
_LEAST = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleTiming:
    """Timing of `batches` consecutive batches: total `seconds`, and per batch `median_us` and `p95_us`.

    A warm-up of a tenth of the time is left out: it reads files and compiles kernels. `threads` is the number of
    threads of torch.
    """

    batches: int
    seconds: float
    batches_per_second: float
    steps_per_second: float
    bytes_per_second: float
    median_us: float
    p95_us: float
    threads: int


def checked_seconds(seconds: float | None, *, asked: bool) -> float | None:
    """Return for how many seconds to measure, None to measure nothing; UsageError for an invalid time."""
    if seconds is None:
        return SECONDS if asked else None
    if not asked:
        raise UsageError("--seconds needs --time", hint="add --time")
    if not (math.isfinite(seconds) and seconds > 0):
        raise UsageError(f"--seconds is {seconds}, expected a time above 0")
    return seconds


def timed(draw: Callable[[], int], seconds: float, *, step_bytes: float, threads: int) -> SampleTiming:
    """Call `draw`, which returns the number of steps it drew, repeatedly for about `seconds`."""
    _until(draw, seconds * _WARM_UP)
    durations, steps = _until(draw, seconds)
    total = float(durations.sum())
    return SampleTiming(
        batches=len(durations),
        seconds=round(total, 6),
        batches_per_second=len(durations) / total,
        steps_per_second=steps / total,
        bytes_per_second=steps * step_bytes / total,
        median_us=float(np.median(durations)) * 1e6,
        p95_us=float(np.percentile(durations, 95)) * 1e6,
        threads=threads,
    )


def _until(draw: Callable[[], int], seconds: float) -> tuple[np.ndarray[tuple[int], np.dtype[np.float64]], int]:
    """Draw for `seconds`, and at least `_LEAST` batches; return the seconds of each, and the total number of steps."""
    durations: list[float] = []
    steps = 0
    stop = time.perf_counter() + seconds
    while len(durations) < _LEAST or time.perf_counter() < stop:
        started = time.perf_counter()
        drawn = draw()
        durations.append(time.perf_counter() - started)
        steps += drawn
    return np.array(durations), steps


_INDEX = "index"
_SOURCE_ID = "source_id"
_MASK = ("collector", "mask")


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledField:
    """One leaf of the batch: its full shape, its bytes, and a summary of its values.

    `min`, `mean` and `max` leave NaN out; they are None for flags, text, complex numbers and references to frames of
    kept videos. `true_fraction` is the share of True in a flag, None for anything else.
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
    """Steps `first` to `last` of the episode with the source's number `episode`; `start` is the row of the first.

    `length` is the number of steps, `padding` the number of repetitions of the last one that fill the slice up: the
    mask is `length` times True, then `padding` times False. `source` is the number of the dataset in a mixture.
    """

    episode: int
    first: int
    last: int
    start: int
    length: int
    padding: int = 0
    source: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledDataset:
    """A dataset of a mixture, and how many steps of the batch are of it."""

    name: str
    path: Path
    steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleResult(Result):
    """A batch of `n` steps: storage rows (`indices`), the source's episode numbers, and steps within the episodes.

    `options` are the given options of the sampler. `slices` is empty for a sampler that draws single steps, `timing`
    None without `time`. `fields` are the leaves of the batch, with those that the sampler adds. Of a mixture,
    `datasets` are its datasets and `sources` the number of that of each step, whose rows, episodes and steps are named;
    both are empty for a dataset. `path` is the address of a stream, and `indices` are the numbers of its elements.
    """

    kind: ClassVar[str] = "sample"
    path: Path | str
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
    datasets: tuple[SampledDataset, ...] = ()
    sources: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnRows:
    """The drawn rows, the dataset of each, the source's number of its episode, and the step in it, all int64 `[n]`."""

    rows: Array
    sources: Array
    episodes: Array
    steps: Array

    @classmethod
    def of(cls, rows: Array, sources: Array, tables: Sequence[EpisodeTable]) -> DrawnRows:
        """Find the episodes of rows in the tables of the datasets."""
        episodes, steps = np.empty_like(rows), np.empty_like(rows)
        for number, table in enumerate(tables):
            here = sources == number
            which = table.index_of_step(rows[here])
            episodes[here], steps[here] = table.episode[which], rows[here] - table.start[which]
        return cls(rows=rows, sources=sources, episodes=episodes, steps=steps)


def sampled_slices(
    batch: TensorDictBase, drawn: DrawnRows, options: SamplerOptions, batch_size: int
) -> tuple[SampledSlice, ...]:
    """Split the rows of a batch into its slices."""
    if not options.in_slices:
        return ()
    steps, places = options.steps_of_a_slice(batch_size), np.arange(len(drawn.rows))
    mask = batch.get(_MASK, None)
    runs: list[tuple[Array, int]]
    if mask is not None and (options.pad or options.batched):
        real = mask.numpy(force=True).reshape(-1, steps).sum(1)
        runs = [(run[:length], steps - length) for run, length in zip(places.reshape(-1, steps), real, strict=True)]
    elif options.strict_length:
        runs = [(run, 0) for run in places.reshape(-1, steps)]
    else:
        ends = np.flatnonzero(batch.get(NEXT_TRUNCATED).numpy(force=True).reshape(-1)) + 1
        runs = [(run, 0) for run in np.split(places, ends[:-1])]
    return tuple(_slice(run, int(padding), drawn) for run, padding in runs)


def _slice(run: Array, padding: int, drawn: DrawnRows) -> SampledSlice:
    begin = run[0]
    first = int(drawn.steps[begin])
    return SampledSlice(
        episode=int(drawn.episodes[begin]), first=first, last=first + len(run) - 1, start=int(drawn.rows[begin]),
        length=len(run), padding=padding, source=int(drawn.sources[begin]),
    )  # fmt: skip


def sampled_fields(batch: TensorDictBase, fields: tuple[Field, ...]) -> Iterator[SampledField]:
    """Describe the leaves of a batch: those of the dataset in order, then those that the sampler added."""
    references = reference_keys(fields)  # ids of videos: a mean of them says nothing
    for field in fields:
        described = field.role != "text" and field.key not in references
        yield _sampled(field.name, field.dtype, batch.get(field.key), described=described)
    known = {_INDEX, _SOURCE_ID, *(field.name for field in fields)}
    keys: Iterable[str | Key] = batch.keys(include_nested=True, leaves_only=True)
    for key in keys:
        name = key if isinstance(key, str) else key_name(key)
        if name not in known and not name.startswith(f"{_INDEX}."):
            values = batch.get(key)
            yield _sampled(name, str(values.dtype).removeprefix("torch."), values)


def _sampled(name: str, dtype: str, values: torch.Tensor, *, described: bool = True) -> SampledField:
    import torch

    shape, size = tuple(values.shape), values.numel() * values.element_size()
    known: dict[str, Any] = {"key": name, "dtype": dtype, "shape": shape, "bytes": size}
    bits = values.view(torch.uint16) if dtype == "bfloat16" else values
    numbers = as_numbers(bits.numpy(force=True), dtype)
    if not numbers.size or "complex" in dtype or not described:
        return SampledField(**known)
    if dtype == "bool":
        return SampledField(**known, true_fraction=float(numbers.mean()))
    numbers = numbers[~np.isnan(numbers)] if numbers.dtype.kind == "f" else numbers
    if not numbers.size:
        return SampledField(**known)
    return SampledField(**known, min=numbers.min().item(), mean=mean_of(numbers), max=numbers.max().item())
