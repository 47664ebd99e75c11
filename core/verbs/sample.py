"""`sample`: a batch of a dataset, as a buffer would give it, and how fast such batches come."""

from __future__ import annotations

import os
import secrets
from typing import TYPE_CHECKING

import numpy as np

from ..checkpoint import open_steps
from ..dataset import PackedReader, StepReader, TedReader, find_dataset
from ..errors import UsageError
from .readable import has_steps
from .sample_results import SampledField, SampledSlice, SampleResult, sampled_fields, sampled_slices
from .sample_timing import SampleTiming, checked_seconds, timed
from .sampler_making import initial_priorities, make_sampler, priority_field
from .sampler_options import SamplerOptions

if TYPE_CHECKING:
    from ..buffers import TensorDictReplayBuffer
    from ..storages import Storage

__all__ = ["SampleResult", "SampleTiming", "SampledField", "SampledSlice", "sample"]


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

    The same seed draws the same steps, which are those of the first batch of `load_dataset(…, seed=seed)` with that
    sampler; without one a fresh seed is drawn and reported. Only the rows drawn are read, unless `verify` asks for
    all files to be compared with their digests first.

    `sampler` is one of

    - `random`: steps, with replacement;
    - `without-replacement`: steps, each once an epoch, shuffled unless `shuffle=False`; `drop_last` leaves out what
      is less than a batch at the end of an epoch;
    - `slice`: `num_slices` runs of `slice_len` consecutive steps of one episode (one of the two is enough). Episodes
      are equally likely unless `weight="step"`;
    - `slice-without-replacement`: such runs, every episode once an epoch;
    - `prioritized`: steps, with replacement, by (|`priority`| + 1e-8) ^ `alpha` (0.6), where `priority` is the name
      of a leaf, like `next.reward`; all equal without one. `beta` (0.4) is the exponent of the weights;
    - `prioritized-slice`: runs whose first steps are drawn by priority.

    Slices lie anywhere in their episode, or at its `anchor`, `start` or `end`. Episodes shorter than a slice are left
    out, unless `strict=False`, which takes them whole, or `pad`, which fills them up with their last step.
    `batched` makes batches `[slices, steps]`. `time` also measures, for about `seconds` (2), how fast batches come.

    Raises UsageError for a sampler that is none, options that it does not take or that contradict each other, an `n`
    below 1, no episode as long as a slice, a priority that is no leaf of finite numbers, a seed that is no number
    from 0 to 2^64 - 1, `verify` of what has no digests, a dataset without steps, a raw dataset, and the checkpoint of
    a buffer that is not one of steps; DatasetNotFoundError or FormatError where there is nothing to draw from, and
    CorruptDataError for damaged files.
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
    """Make the buffer that the steps are drawn from."""
    field = None if options.priority is None else priority_field(reader, options.priority)
    priorities = None if field is None else initial_priorities(reader, field)
    import torch  # not before: it takes seconds, and what is wrong with the request is told at once

    from ..buffers import TensorDictReplayBuffer
    from ..writers import ImmutableDatasetWriter

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
    """Map the leaves where they lie as tensors; else read the rows out of whatever holds them."""
    from ..storages import PackedStorage, StepStorage, TensorStorage, dataset_tensors

    if isinstance(reader, TedReader):
        return TensorStorage(dataset_tensors(reader, copy_on_write=False))
    if isinstance(reader, PackedReader):
        return PackedStorage(reader)
    return StepStorage(reader)
