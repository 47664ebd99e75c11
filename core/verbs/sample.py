"""`sample`: draw a batch of a dataset as a replay buffer does, and measure the sampling speed."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ..datasets.mixtures import open_mixture
from ..errors import UsageError, suggests_keywords
from ..format.contracts import StepReader
from ..format.episodes import EpisodeTable
from ..format.locate import find_dataset
from ..format.memmap.reader import TedReader
from ..format.mixture import is_mixture
from ..format.packed.reader import PackedReader
from ..open_steps import open_steps
from ..saved_steps import has_steps, require_verified
from .frame_stacks import FrameStacks
from .sample_request import SampleRequest
from .sample_result import DrawnRows, SampledDataset, SampleResult
from .sampler_options import SamplerOptions, initial_priorities, make_sampler, priority_field

if TYPE_CHECKING:
    from ..buffers.replay_buffer import ReplayBuffer
    from ..buffers.tensordict import TensorDictReplayBuffer
    from ..storages.base import Storage


@suggests_keywords()
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
    frame_stack: int | None = None,
    frame_keys: Sequence[str] = (),
    time: bool = False,
    seconds: float | None = None,
    seed: int | None = None,
    verify: bool = False,
    root: str | os.PathLike[str] | None = None,
) -> SampleResult:
    """Draw a batch of `n` steps, 256 by default, of a dataset, a checkpoint or a mixture (a path or `source:id`).

    The same seed gives the same steps, equal to the first batch of `load_dataset(…, seed=seed)` with that sampler; by
    default a new seed is generated and reported. Only the sampled rows are read, unless `verify` is set, which first
    compares all files with their digests.

    `sampler` is one of

    - `random`: steps, with replacement;
    - `without-replacement`: steps, each once an epoch, shuffled unless `shuffle=False`; `drop_last` leaves out what
      is less than a batch at the end of an epoch;
    - `slice`: `num_slices` slices of `slice_len` consecutive steps of an episode; `weight` is `episode` or `step`;
    - `slice-without-replacement`: slices, each episode once an epoch;
    - `prioritized`: steps, with replacement, by (|`priority`| + 1e-8) ^ `alpha` (0.6), where `priority` is the name
      of a leaf, like `next.reward`; by default all are equal. `beta` (0.4) is the exponent of the weights;
    - `prioritized-slice`: slices whose first steps are drawn by priority.

    `anchor` places slices at `any` position of their episode, its `start` or its `end`. Episodes shorter than a slice
    are left out, unless `strict=False`, which takes them whole, or `pad`, which repeats their last step. `batched`
    gives batches of shape `[slices, steps]`. `frame_stack` joins so many frames of an episode (`frame_keys`, by default
    images) as `StoredFrameStack` does. `time` also measures the sampling speed for about `seconds` (2).

    Raises UsageError for options that contradict each other or the sampler, numbers out of range, no episode as long
    as a slice, a priority that is not a leaf of finite numbers, `verify` without digests, a raw dataset, and one or a
    checkpoint without steps; DatasetNotFoundError or FormatError if there is nothing to sample from, and
    CorruptDataError for damaged files.
    """
    options = SamplerOptions(
        sampler=sampler, slice_len=slice_len, num_slices=num_slices, weight=weight, anchor=anchor, strict=strict,
        pad=pad, batched=batched, drop_last=drop_last, shuffle=shuffle, alpha=alpha, beta=beta, priority=priority,
    )  # fmt: skip
    frames = FrameStacks(frames=frame_stack, keys=tuple(frame_keys))
    drawing = _Drawing(SampleRequest.of(options, frames, n, seed=seed, time=time, seconds=seconds), verify)
    path = find_dataset(dataset, root)
    if is_mixture(path):
        return drawing.of_mixture(path, root)
    has_steps(path)
    with open_steps(path) as reader:
        if not reader.manifest.steps:
            raise UsageError(f"{reader.path} has no steps: there is nothing to sample")
        return drawing.of_dataset(reader)


@dataclass(frozen=True, slots=True)
class _Drawing:
    """One run of `sample`."""

    request: SampleRequest
    verify: bool

    def of_dataset(self, reader: StepReader) -> SampleResult:
        request = self.request
        self._require(reader)
        buffer = _buffer(reader, request.options, request.frames, request.size)
        batch = request.batch(buffer)
        rows = np.asarray(batch["index"]).reshape(-1)
        drawn = DrawnRows.of(rows, np.zeros_like(rows), [reader.episodes])
        return request.result(reader.path, buffer, batch, reader.fields, drawn)

    def of_mixture(self, path: Path, root: str | os.PathLike[str] | None) -> SampleResult:
        """Draw from an ensemble as `load_dataset` makes it: the same seed gives the same steps."""
        request, options = self.request, self._of_exact_length()

        def opened(reader: TedReader | PackedReader) -> tuple[ReplayBuffer, EpisodeTable]:
            try:
                self._require(reader)
                return _buffer(reader, options, request.frames), reader.episodes
            except UsageError as error:
                raise UsageError(f"{reader.path}: {error.message}", hint=error.hint) from error

        opening = open_mixture(path, opened, root)
        buffer = opening.ensemble(lambda made: made[0], batch_size=request.size)
        batch = request.batch(buffer)
        sources, rows = (np.asarray(batch[key]).reshape(-1) for key in ("source_id", ("index", "index")))
        drawn = DrawnRows.of(rows, sources, [one.made[1] for one in opening.datasets])
        counts = np.bincount(sources, minlength=len(opening.datasets)).tolist()
        datasets = tuple(
            SampledDataset(name=one.member.name, path=one.path, steps=count)
            for one, count in zip(opening.datasets, counts, strict=True)
        )
        found = request.result(path, buffer, batch, opening.fields, drawn)
        return replace(found, datasets=datasets, sources=tuple(sources.tolist()))

    def _of_exact_length(self) -> SamplerOptions:
        """Return the options for datasets that each give a part of the batch: slices have the same length in all."""
        options = self.request.options
        if not options.in_slices:
            return options
        if not options.strict_length and not options.pad:
            raise UsageError(
                "--no-strict takes slices of any length, and the parts of a batch of a mixture have exact lengths",
                hint="--pad takes short episodes and fills them up",
            )
        return replace(options, slice_len=options.steps_of_a_slice(self.request.size), num_slices=None)

    def _require(self, reader: StepReader) -> None:
        if self.verify:
            require_verified(reader)
        self.request.options.check_lengths(reader.episodes.length, self.request.size)


def _buffer(
    reader: StepReader, options: SamplerOptions, frames: FrameStacks, batch_size: int | None = None
) -> TensorDictReplayBuffer:
    """Make the buffer to sample from."""
    field = None if options.priority is None else priority_field(reader, options.priority)
    priorities = None if field is None else initial_priorities(reader, field)
    transform = frames.transform(reader.fields)
    import torch  # lazy: takes seconds, and an invalid request fails before

    from ..buffers.tensordict import TensorDictReplayBuffer
    from ..writers.base import ImmutableDatasetWriter

    buffer = TensorDictReplayBuffer(
        storage=_storage(reader),
        sampler=make_sampler(options, reader),
        writer=ImmutableDatasetWriter(),
        transform=transform,
        batch_size=batch_size,
    )
    if priorities is not None:
        buffer.update_priority(torch.arange(len(priorities)), torch.from_numpy(priorities))
    return buffer


def _storage(reader: StepReader) -> Storage:
    """Map the leaves if they are stored as tensors; else use a storage that reads rows from the files."""
    from ..storages.dataset import MappedSteps, StepStorage
    from ..storages.packed import PackedStorage

    if isinstance(reader, TedReader):
        return MappedSteps(reader)
    if isinstance(reader, PackedReader):
        return PackedStorage(reader)
    return StepStorage(reader)
