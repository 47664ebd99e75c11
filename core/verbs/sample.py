"""`sample`: draw a batch of a dataset as a replay buffer does, describe it, and measure the sampling speed."""

from __future__ import annotations

import math
import os
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from ..errors import UsageError
from ..format.contracts import StepReader
from ..format.episodes import EpisodeTable
from ..format.locate import find_dataset
from ..format.packed.reader import PackedReader
from ..format.ted.reader import TedReader
from ..opening import open_steps
from ..stats.moments import mean_of
from ..ted.schema import NEXT_TRUNCATED, Field, Key, as_numbers, key_name
from .results import Result
from .sampler_options import SamplerOptions, initial_priorities, make_sampler, priority_field
from .saved_steps import has_steps

if TYPE_CHECKING:
    import torch
    from tensordict import TensorDictBase

    from ..buffers.tensordict import TensorDictReplayBuffer
    from ..storages.base import Storage

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
        raise UsageError("--seconds says for how long to measure, and no time is taken", hint="add --time")
    if not (math.isfinite(seconds) and seconds > 0):
        raise UsageError(f"--seconds is {seconds}, a time above 0 is expected")
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
_MASK = ("collector", "mask")


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledField:
    """One leaf of the batch: its full shape, its bytes, and a summary of its values.

    `min`, `mean` and `max` leave NaN out; they are None for flags, text and complex numbers. `true_fraction` is the
    share of True in a flag, None for anything else.
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
    mask is `length` times True, then `padding` times False.
    """

    episode: int
    first: int
    last: int
    start: int
    length: int
    padding: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleResult(Result):
    """A batch of `n` steps: storage rows (`indices`), the source's episode numbers, and steps within the episodes.

    `options` are the given options of the sampler. `slices` is empty for a sampler that draws single steps, `timing`
    None without `time`. `fields` are the leaves of the batch, with those that the sampler adds.
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
    """Split the rows of a batch into its slices."""
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
    """Describe the leaves of a batch: those of the dataset in order, then those that the sampler added."""
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


def sample(
    dataset: str | os.PathLike[str],
    n: int | None = None,
    *,
    sampler: str = "random",
    slice_len: int | None = None,
    num_slices: int | None = None,
    weight: str | None = None,
    anchor: str | None = None,
    strict: bool | None = None,
    pad: bool = False,
    batched: bool = False,
    drop_last: bool = False,
    shuffle: bool | None = None,
    alpha: float | None = None,
    beta: float | None = None,
    priority: str | None = None,
    time: bool = False,
    seconds: float | None = None,
    seed: int | None = None,
    verify: bool = False,
    root: str | os.PathLike[str] | None = None,
) -> SampleResult:
    """Draw a batch of `n` steps, 256 by default, of a dataset or a checkpoint (a path or `source:id`).

    The same seed gives the same steps, equal to the first batch of `load_dataset(…, seed=seed)` with that sampler; by
    default a new seed is generated and reported. Only the sampled rows are read, unless `verify` is set, which first
    compares all files with their digests.

    `sampler` is one of

    - `random`: steps, with replacement;
    - `without-replacement`: steps, each once an epoch, shuffled unless `shuffle=False`; `drop_last` leaves out what
      is less than a batch at the end of an epoch;
    - `slice`: `num_slices` slices of `slice_len` consecutive steps of one episode (one of the two is enough). Episodes
      are equally likely unless `weight="step"`;
    - `slice-without-replacement`: slices, each episode once an epoch;
    - `prioritized`: steps, with replacement, by (|`priority`| + 1e-8) ^ `alpha` (0.6), where `priority` is the name
      of a leaf, like `next.reward`; by default all are equal. `beta` (0.4) is the exponent of the weights;
    - `prioritized-slice`: slices whose first steps are drawn by priority.

    `anchor` places slices at `any` position of their episode, its `start` or its `end`. Episodes shorter than a slice
    are left out, unless `strict=False`, which takes them whole, or `pad`, which repeats their last step. `batched`
    gives batches of shape `[slices, steps]`. `time` also measures the sampling speed for about `seconds` (2).

    Raises UsageError for an unknown sampler, options that it does not take or that contradict each other, an `n`
    below 1, no episode as long as a slice, a priority that is not a leaf of finite numbers, a seed outside
    0 … 2^64 - 1, `verify` without digests, a dataset without steps, a raw dataset, and the checkpoint of a buffer
    without steps; DatasetNotFoundError or FormatError if there is nothing to sample from, and CorruptDataError for
    damaged files.
    """
    options = SamplerOptions(
        sampler=sampler, slice_len=slice_len, num_slices=num_slices, weight=weight, anchor=anchor, strict=strict,
        pad=pad, batched=batched, drop_last=drop_last, shuffle=shuffle, alpha=alpha, beta=beta, priority=priority,
    )  # fmt: skip
    size, limit = options.batch_size(n), checked_seconds(seconds, asked=time)
    seed = secrets.randbits(63) if seed is None else seed
    if not 0 <= seed < 1 << 64:
        raise UsageError(f"the seed {seed} was given, a number of 64 bits without sign is expected")
    path = find_dataset(dataset, root)
    has_steps(path)
    with open_steps(path) as reader:
        if not reader.manifest.steps:
            raise UsageError(f"{reader.path} has no steps: there is nothing to sample")
        if verify:
            _verify(reader)
        options.check_lengths(reader.episodes.length, size)
        return _drawn(reader, options, size, seed, limit)


def _verify(reader: StepReader) -> None:
    if not reader.has_digests:
        hint = "sample it without verifying, or convert it: a dataset has digests"
        raise UsageError(f"{reader.path} has no digests to compare its files with", hint=hint)
    reader.verify_files()


def _drawn(reader: StepReader, options: SamplerOptions, size: int, seed: int, limit: float | None) -> SampleResult:
    buffer = _buffer(reader, options, size, seed)
    batch = buffer.sample()
    rows = np.asarray(batch["index"]).reshape(-1)
    table = reader.episodes
    which = table.index_of_step(rows)
    fields = tuple(sampled_fields(batch, tuple(reader.fields)))
    return SampleResult(
        path=reader.path,
        n=len(rows),
        seed=seed,
        sampler=options.sampler,
        options=options.given(),
        indices=tuple(rows.tolist()),
        episodes=tuple(table.episode[which].tolist()),
        steps=tuple((rows - table.start[which]).tolist()),
        slices=sampled_slices(batch, rows, table, options, size),
        fields=fields,
        timing=None if limit is None else _timing(buffer, limit, sum(field.bytes for field in fields) / len(rows)),
    )


def _timing(buffer: TensorDictReplayBuffer, seconds: float, step_bytes: float) -> SampleTiming:
    import torch

    return timed(lambda: buffer.sample().numel(), seconds, step_bytes=step_bytes, threads=torch.get_num_threads())


def _buffer(reader: StepReader, options: SamplerOptions, size: int, seed: int) -> TensorDictReplayBuffer:
    """Make the buffer to sample from."""
    field = None if options.priority is None else priority_field(reader, options.priority)
    priorities = None if field is None else initial_priorities(reader, field)
    import torch  # lazy: takes seconds, and an invalid request fails before

    from ..buffers.tensordict import TensorDictReplayBuffer
    from ..writers.base import ImmutableDatasetWriter

    buffer = TensorDictReplayBuffer(
        storage=_storage(reader),
        sampler=make_sampler(options, reader),
        writer=ImmutableDatasetWriter(),
        batch_size=size,
        generator=torch.Generator().manual_seed(seed),
    )
    if priorities is not None:
        buffer.update_priority(torch.arange(len(priorities)), torch.from_numpy(priorities))
    return buffer


def _storage(reader: StepReader) -> Storage:
    """Map the leaves if they are stored as tensors; else use a storage that reads rows from the files."""
    from ..storages.dataset import StepStorage, dataset_tensors
    from ..storages.packed import PackedStorage
    from ..storages.tensor import TensorStorage

    if isinstance(reader, TedReader):
        return TensorStorage(dataset_tensors(reader, copy_on_write=False))
    if isinstance(reader, PackedReader):
        return PackedStorage(reader)
    return StepStorage(reader)
