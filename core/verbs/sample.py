"""`sample`: draw a batch of a dataset as a replay buffer does, and measure the sampling speed.

All options are validated before torch is imported, which takes seconds. `SampleRequest` and what it consists of serve
streams as well.
"""

from __future__ import annotations

import math
import os
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np

from ..datasets.mixtures import open_mixture
from ..errors import UsageError, suggests_keywords
from ..format.contracts import Array, StepReader
from ..format.episodes import EpisodeTable
from ..format.locate import find_dataset
from ..format.memmap.reader import TedReader
from ..format.mixture import is_mixture
from ..format.packed.reader import PackedReader
from ..format.videos import reference_keys
from ..open_steps import open_steps
from ..results import Result
from ..saved_steps import has_steps, require_verified
from ..stats import mean_of
from ..ted.schema import NEXT_TRUNCATED, Field, Key, as_numbers, key_called, key_name, state_keys, unknown_field

if TYPE_CHECKING:
    import torch
    from tensordict import TensorDictBase

    from ..buffers.replay_buffer import ReplayBuffer
    from ..buffers.tensordict import TensorDictReplayBuffer
    from ..samplers.base import Sampler
    from ..storages.base import Storage
    from ..transforms.base import Compose


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


_OBSERVATION: Key = ("observation",)
_CHANNELS = (1, 3, 4)


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameStacks:
    """How many frames are stacked, and which: by default all images, else `observation`. None stacks nothing.

    UsageError for a number below 1, and for keys without a number.
    """

    frames: int | None = None
    keys: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.frames is None and self.keys:
            raise UsageError("--frame-key names the frames to stack, and none are stacked", hint="add --frame-stack 4")
        if self.frames is not None and self.frames < 1:
            raise UsageError(f"--frame-stack is {self.frames}, expected a number of frames from 1")

    def given(self) -> dict[str, Any]:
        """Return the options that were given, by name."""
        if self.frames is None:
            return {}
        return {"frame_stack": self.frames} | ({"frame_key": list(self.keys)} if self.keys else {})

    def transform(self, fields: Iterable[Field]) -> Compose | None:
        """Make the transform for steps of these fields; UsageError for a key that is not one of states."""
        if self.frames is None:
            return None
        chosen = self._chosen(list(fields))
        from ..transforms.base import Compose  # lazy: torch takes seconds, and an invalid request fails before
        from ..transforms.windows import StoredFrameStack

        return Compose([StoredFrameStack(self.frames, [field.key], dim=_dimension(field.shape)) for field in chosen])

    def _chosen(self, fields: list[Field]) -> list[Field]:
        states = set(state_keys(fields))
        known = {field.key: field for field in fields if field.key in states}
        chosen = []
        for name in self.keys:
            key = key_called(name, known)
            if key is None:
                raise unknown_field(name, map(key_name, known))
            chosen.append(known[key])
        if chosen:
            return chosen
        images = [field for field in known.values() if len(field.shape) > 1]
        found = images or [field for field in known.values() if field.key == _OBSERVATION]
        if not found:
            raise UsageError(
                f"--frame-stack stacks images, or {key_name(_OBSERVATION)}, and there are none",
                hint=f"--frame-key names others: {', '.join(sorted(map(key_name, known)))}" if known else "",
            )
        return found


def _dimension(shape: tuple[int, ...]) -> int:
    """The dimension to join frames along: that of the channels of an image, for all others a new one in front."""
    if len(shape) != 3:
        return -len(shape) - 1
    return -1 if shape[-1] in _CHANNELS and shape[0] not in _CHANNELS else -3


_DEFAULT_BATCH = 256
ALPHA, BETA = 0.6, 0.4
"""Exponents of the priorities and of the weights, as in Schaul et al. (2015), proportional variant."""

_WORDS = {"weight": ("episode", "step"), "anchor": ("any", "start", "end")}

_EPOCHS = frozenset({"drop_last", "shuffle"})
_SLICES = frozenset({"slice_len", "num_slices", "anchor", "strict", "pad", "batched"})
_PRIORITIES = frozenset({"alpha", "beta", "priority"})
SAMPLERS: Mapping[str, frozenset[str]] = {
    "random": frozenset(),
    "without-replacement": _EPOCHS,
    "slice": _SLICES | {"weight"},
    "slice-without-replacement": _SLICES | _EPOCHS,
    "prioritized": _PRIORITIES,
    "prioritized-slice": _SLICES | _PRIORITIES,
}
"""The options of each sampler, by the name of the sampler on the command line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerOptions:
    """The name of a sampler and its options; None, and False for a switch, mean not given.

    Raises UsageError for an unknown sampler, an option that the sampler does not take, and values out of range.
    """

    sampler: str = "random"
    slice_len: int | None = None
    num_slices: int | None = None
    weight: str | None = None
    anchor: str | None = None
    strict: bool | None = None
    pad: bool = False
    batched: bool = False
    drop_last: bool = False
    shuffle: bool | None = None
    alpha: float | None = None
    beta: float | None = None
    priority: str | None = None

    def __post_init__(self) -> None:
        if self.sampler not in SAMPLERS:
            raise UsageError(f"the sampler is {self.sampler!r}, expected one of {', '.join(SAMPLERS)}")
        for name, value in self.given().items():
            if name not in SAMPLERS[self.sampler]:
                others = [sampler for sampler, known in SAMPLERS.items() if name in known]
                raise UsageError(
                    f"{_flag(name, value)} is no option of the sampler {self.sampler}",
                    hint=f"it is for {', '.join(others)}",
                )
        self._check_values()

    def given(self) -> dict[str, Any]:
        """Return the options that were given, by name."""
        values = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "sampler"}
        return {name: value for name, value in values.items() if value is not None and not _left(name, value)}

    def _check_values(self) -> None:
        for name in ("slice_len", "num_slices"):
            number = getattr(self, name)
            if number is not None and number < 1:
                raise UsageError(f"{_flag(name)} is {number}, expected 1 or more")
        for name in ("alpha", "beta"):
            number = getattr(self, name)
            if number is not None and not (math.isfinite(number) and number >= 0):
                raise UsageError(f"{_flag(name)} is {number}, expected a finite number from 0")
        for name, words in _WORDS.items():
            word = getattr(self, name)
            if word is not None and word not in words:
                raise UsageError(f"{_flag(name)} is {word!r}, expected one of {', '.join(words)}")
        if self.strict and self.pad:
            raise UsageError(
                "--strict and --pad are both set, expected one: --strict leaves short episodes out, --pad fills them up"
            )
        if self.in_slices and self.slice_len is None and self.num_slices is None:
            raise UsageError(
                f"the sampler {self.sampler} needs --slice-len or --num-slices",
                hint="add --slice-len L or --num-slices K",
            )

    @property
    def in_slices(self) -> bool:
        """Whether the sampler draws slices."""
        return "slice_len" in SAMPLERS[self.sampler]

    @property
    def strict_length(self) -> bool:
        """Whether episodes shorter than a slice are left out."""
        return not self.pad if self.strict is None else self.strict

    def batch_size(self, n: int | None) -> int:
        """Return the number of steps of a batch; UsageError if it does not match the slices."""
        length, count = self.slice_len, self.num_slices
        if n is None:
            n = length * count if length and count else _default_for(length or count or 1)
        if n < 1:
            raise UsageError(f"-n is {n}, expected at least 1")
        if length and count and length * count != n:
            raise UsageError(
                f"-n {n}: {count} slices of {length} steps are {length * count}",
                hint=f"-n {length * count}, or leave out -n or one of the others",
            )
        part, what = (length, "the length of a slice") if length else (count, "the number of slices")
        if part and n % part:
            raise UsageError(
                f"a batch is {n} steps, expected a multiple of {what}, {part}",
                hint=f"-n {max(1, round(n / part)) * part}",
            )
        return n

    def steps_of_a_slice(self, batch_size: int) -> int:
        """Return the number of steps of a slice."""
        return self.slice_len or batch_size // (self.num_slices or 1)

    def check_lengths(self, lengths: np.ndarray[Any, Any], batch_size: int) -> None:
        """Raise UsageError if every episode is shorter than a slice and short ones are left out."""
        wanted = self.steps_of_a_slice(batch_size)
        if not self.in_slices or not self.strict_length or wanted <= lengths.max():
            return
        raise UsageError(
            f"slices are {wanted} steps, expected at most {lengths.max():,}: the longest of {len(lengths):,} episodes",
            hint="--pad takes shorter ones and fills them up, --no-strict takes them whole",
        )


def _default_for(part: int) -> int:
    """Return the multiple of `part` that is nearest to the default batch."""
    return max(1, round(_DEFAULT_BATCH / part)) * part


def _left(name: str, value: Any) -> bool:
    """Return whether a switch has its default."""
    return name in {"pad", "batched", "drop_last"} and value is False


def _flag(name: str, value: Any = None) -> str:
    no = "no-" if value is False and name in {"shuffle", "strict"} else ""
    return f"--{no}{name.replace('_', '-')}"


_CHUNK = 1 << 20


def make_sampler(options: SamplerOptions, reader: StepReader) -> Sampler:
    """Make the sampler for the steps of `reader`."""
    # These imports load torch, which takes seconds: an invalid request fails before.
    if options.sampler == "random":
        from ..samplers.uniform import RandomSampler

        return RandomSampler()
    epochs: dict[str, Any] = {"drop_last": options.drop_last, "shuffle": options.shuffle is not False}
    if options.sampler == "without-replacement":
        from ..samplers.uniform import SamplerWithoutReplacement

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
        from ..samplers.slices import SliceSamplerWithoutReplacement

        slices.pop("cache_values")  # it always caches
        return SliceSamplerWithoutReplacement(**slices, **epochs)
    from ..samplers.prioritized import PrioritizedSliceSampler

    return PrioritizedSliceSampler(*priorities, **slices)


def _slice_arguments(options: SamplerOptions) -> dict[str, Any]:
    size = {"num_slices": options.num_slices} if options.slice_len is None else {"slice_len": options.slice_len}
    given = options.given()
    passed: dict[str, Any] = {name: given[name] for name in ("weight", "anchor", "batched") if name in given}
    return {**size, **passed, "strict_length": options.strict_length, **({"pad_output": True} if options.pad else {})}


def _ends(table: EpisodeTable) -> dict[str, Any]:
    """Return the `ends` of trajectories from the episode table; they equal those that a sampler finds in the rows."""
    import torch

    ends = np.zeros(table.steps, bool)
    ends[(table.start + table.length)[table.length > 0] - 1] = True
    return {"ends": torch.from_numpy(ends), "cache_values": True}


def priority_field(reader: StepReader, name: str) -> Field:
    """Return the leaf of the initial priorities; UsageError if it does not exist or does not hold real numbers."""
    fields = {field.key: field for field in reader.fields}
    key = key_called(name, fields)
    if key is None:
        raise unknown_field(name, map(key_name, fields))
    field = fields[key]
    if field.role == "text" or field.dtype == "bool" or "complex" in field.dtype or 0 in field.shape:
        what = "text" if field.role == "text" else f"{field.dtype} {list(field.shape)}"
        raise UsageError(f"--priority is {name!r}, which is {what}, expected real numbers")
    return field


def initial_priorities(reader: StepReader, field: Field) -> np.ndarray[Any, Any]:
    """Return the largest absolute value of a leaf per step, float64 `[steps]`; UsageError if one is not finite."""
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
    from tensordict import is_tensor_collection  # lazy: imports torch, which takes seconds

    references = reference_keys(fields)  # ids of videos: a mean of them says nothing
    for field in fields:
        described = field.role != "text" and field.key not in references
        values = batch.get(field.key)
        if field.name == _INDEX and is_tensor_collection(values):
            continue  # the dataset has a field of that name, for which an ensemble has its own: places in its members
        yield _sampled(field.name, field.dtype, values, described=described)
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
