"""`sample`: draw a batch of a dataset or a stream as a replay buffer does, and measure the sampling speed.

All options are validated before torch is imported, which takes seconds.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np

from ..datasets.mixtures import open_mixture
from ..declarations import from_leaf
from ..encodings.video import require_pyav
from ..errors import MissingKeyError, UsageError
from ..format.contracts import Array, StepReader
from ..format.episodes import SCORE, EpisodeTable
from ..format.locate import find_dataset
from ..format.memmap.reader import TedReader
from ..format.mixture import is_mixture
from ..format.packed.reader import PackedReader
from ..format.videos import reference_keys
from ..open_steps import open_steps
from ..options import takes
from ..results import Result, given_options
from ..saved_steps import has_steps, require_verified
from ..stats import mean_of
from ..ted.schema import NEXT_TRUNCATED, Field, Key, as_numbers, key_called, key_name, state_keys, unknown_field
from .options import SampleOptions

if TYPE_CHECKING:
    import torch
    from tensordict import TensorDictBase

    from ..buffers.replay_buffer import ReplayBuffer
    from ..buffers.tensordict import TensorDictReplayBuffer
    from ..samplers.base import Sampler
    from ..samplers.stream import StreamSampler
    from ..storages.base import Storage
    from ..storages.dataset import StreamStorage
    from ..transforms.base import Compose


@takes(SampleOptions)
def sample(asked: SampleOptions) -> SampleResult:
    """Draw a batch of a dataset, a checkpoint or a mixture, and describe it.

    The batch equals the first one of `load_dataset(…, seed=seed)` with that sampler. Only the sampled rows are read,
    unless `verify` is set.

    Args:
        dataset: a path or `source:id`.
        n: how many steps; default: 256, or the nearest multiple that slices allow.
        sampler: one of

            - `random`: steps, with replacement;
            - `without-replacement`: steps, each once an epoch;
            - `slice`: slices of consecutive steps of an episode;
            - `slice-without-replacement`: slices, each episode once an epoch;
            - `prioritized`: steps, with replacement, by (|`priority`| + 1e-8) ^ `alpha`;
            - `prioritized-slice`: slices whose first steps are drawn by priority.
        slice_len, num_slices: steps per slice, and slices per batch; one of them is enough.
        weight: for `slice`: make each `episode` (the default) or each `step` equally likely.
        anchor: the position of a slice in its episode: `any`, its `start` or its `end`.
        strict: False takes episodes shorter than a slice whole; by default they are left out.
        pad: take episodes shorter than a slice, and repeat their last step.
        batched: give batches the shape `[slices, steps]`.
        drop_last: leave out an incomplete last batch of an epoch.
        shuffle: False takes the steps of an epoch in order.
        alpha: exponent of the priorities; default: 0.6.
        beta: exponent of the weights; default: 0.4.
        priority: the name of a leaf, like `next.reward`, or of a score, like `score.quality`; by default all priorities
            are equal.
        frame_stack: stack so many frames of an episode, as `StoredFrameStack` does.
        frame_keys: the fields to stack; default: images.
        windows: fields to take at several steps around each drawn one, like `action=0:16`; see `Windows`.
        time: measure the sampling speed.
        seconds: about how long to measure; default: 2.
        seed: the same seed gives the same steps; default: a new one, which the result states.
        verify: compare all files with their digests first.
        root: where stored datasets are.

    Returns:
        The drawn steps, a summary of their values and, if `time` is set, the sampling speed.

    Raises:
        UsageError: options contradict each other or the sampler, numbers are out of range, no episode is as long as a
            slice, `priority` is not a leaf of finite numbers, `verify` without digests, a dataset of another library,
            or no steps.
        DatasetNotFoundError, FormatError: there is nothing to sample from.
        CorruptDataError: files are damaged.
    """
    request = SampleRequest.of(asked)
    path = find_dataset(asked.dataset, asked.root)
    if is_mixture(path):
        return _sample_mixture(request, path)
    has_steps(path)
    with open_steps(path) as reader:
        if not reader.manifest.steps:
            raise UsageError(f"{reader.path} has no steps to sample")
        _require(reader, request)
        buffer = _buffer(reader, asked, request.size)
        _require_reach([buffer], [reader.episodes])
        batch = request.batch(buffer)
        rows = np.asarray(batch["index"]).reshape(-1)
        drawn = DrawnRows.of(rows, np.zeros_like(rows), [reader.episodes])
        return request.result(reader.path, buffer, batch, reader.fields, drawn)


def _sample_mixture(request: SampleRequest, path: Path) -> SampleResult:
    """Draw from the ensemble that `load_dataset` would make, so that the same seed gives the same steps."""
    options = _with_slice_length(request)

    def opened(reader: TedReader | PackedReader) -> tuple[ReplayBuffer, EpisodeTable]:
        try:
            _require(reader, request)
            return _buffer(reader, options), reader.episodes
        except UsageError as error:
            raise UsageError(f"{reader.path}: {error.message}", hint=error.hint) from error

    opening = open_mixture(path, opened, options.root)
    _require_reach(*zip(*(one.made for one in opening.datasets), strict=True))
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


_STEPS, _SLICES = "without-replacement", "slice-without-replacement"
_AHEAD = 2


def sample_stream(
    dataset: str,
    raw: Mapping[str, Any],
    *,
    root: str | None = None,
    cache_size: str | None = None,
    n: int | None = None,
    **given: Any,
) -> SampleResult:
    """Draw a batch of `n` steps from a stream; `raw` are options of its reader.

    The batch equals the first one of `load_dataset(…, streaming=True, seed=seed)` with a `StreamSampler` (the sampler
    `without-replacement`, the default) or a `StreamSliceSampler` (`slice-without-replacement`). Only the shards that it
    needs are fetched. Arguments, result and errors are those of `sample`; arguments that work only for datasets on this
    disk raise UsageError, unless they are None or False.
    """
    for name in ("weight", "anchor", "alpha", "beta", "priority", "verify"):
        if given.get(name) not in (None, False):
            raise UsageError(
                f"--{name.replace('_', '-')} works only for datasets on this disk, not for streams",
                hint="leave it out, or leave out --streaming",
            )
    sampler = given.setdefault("sampler", _STEPS)
    if sampler not in (_STEPS, _SLICES):
        raise UsageError(f"the sampler is {sampler}, expected {_STEPS} or {_SLICES} with --streaming")
    options, request = given_options(raw), SampleRequest.of(SampleOptions(dataset, n, **given))
    return _sample_stream(request, from_leaf("open_stream")(dataset, root, cache_size, options))


def _sample_stream(request: SampleRequest, storage: StreamStorage) -> SampleResult:
    # Imported here because torch takes seconds, and an invalid request should fail before.
    from ..buffers.tensordict import TensorDictReplayBuffer
    from ..writers.base import ImmutableDatasetWriter

    transform = reading_transform(request.options, storage)
    buffer = TensorDictReplayBuffer(
        storage=storage, sampler=_stream_sampler(request), writer=ImmutableDatasetWriter(), transform=transform,
        batch_size=request.size,
    )  # fmt: skip
    batch = request.batch(buffer)
    rows, episodes = (np.asarray(batch[key]).reshape(-1) for key in ("index", "episode"))
    before, _ = storage.places_in_episodes(rows)
    drawn = DrawnRows(rows=rows, sources=np.zeros_like(rows), episodes=episodes, steps=before)
    # The batch has the frames of videos instead of the references to them.
    fields = [field for field in storage.fields if batch.get(field.key, None) is not None]
    return request.result(storage.shards.address, buffer, batch, fields, drawn)


def _stream_sampler(request: SampleRequest) -> StreamSampler:
    """Make the sampler. Shards are fetched ahead only if more than one batch is drawn, to measure the speed."""
    from ..samplers.stream import StreamSampler, StreamSliceSampler

    options = request.options
    order: dict[str, Any] = {
        "shuffle": options.shuffle is not False, "drop_last": options.drop_last,
        "ahead": 0 if request.limit is None else _AHEAD,
    }  # fmt: skip
    if not options.in_slices:
        return StreamSampler(**order)
    size = {"num_slices": options.num_slices} if options.slice_len is None else {"slice_len": options.slice_len}
    whole = {"strict_length": options.strict_length, "pad_output": options.pad, "batched": options.batched}
    return StreamSliceSampler(**size, **whole, **order)


def _with_slice_length(request: SampleRequest) -> SampleOptions:
    """Return the options for the members of a mixture, with the length of slices instead of their number.

    Each member gives a part of the batch, in which all slices must have the same length.
    """
    options = request.options
    if not options.in_slices:
        return options
    if not options.strict_length and not options.pad:
        raise UsageError(
            "--no-strict gives slices of different lengths, but a mixture needs slices of one length",
            hint="--pad takes short episodes and repeats their last step",
        )
    return replace(options, slice_len=options.steps_of_a_slice(request.size), num_slices=None)


def _require(reader: StepReader, request: SampleRequest) -> None:
    if request.options.verify:
        require_verified(reader)
    request.options.check_lengths(reader.episodes.length, request.size)


_PADDED = 1_000
"""How far a window may reach even if all episodes are shorter: what is beyond their ends is padded."""


def _require_reach(buffers: Iterable[ReplayBuffer], tables: Iterable[EpisodeTable]) -> None:
    """Raise UsageError for a window far beyond the length of every episode: its padding could fill the memory."""
    from ..transforms.windows import Windows

    longest = max(int(table.length.max(initial=0)) for table in tables)
    for windows in (one for buffer in buffers for one in buffer.transform if isinstance(one, Windows)):
        for key, offsets in windows.windows.items():
            if (farthest := int(np.abs(offsets).max())) > max(longest, _PADDED):
                name = key if isinstance(key, str) else key_name(key)
                raise UsageError(
                    f"the window of {name} reaches {farthest:,} steps away, and the longest episode has {longest:,}"
                )


def _buffer(reader: StepReader, options: SampleOptions, batch_size: int | None = None) -> TensorDictReplayBuffer:
    """Make the buffer to sample from, with its sampler, priorities and transforms."""
    priorities = None if options.priority is None else initial_priorities(reader, options.priority)
    transform = reading_transform(options, reader)
    import torch  # imported here because it takes seconds, and an invalid request should fail before

    from ..buffers.tensordict import TensorDictReplayBuffer
    from ..transforms.video import with_frames
    from ..writers.base import ImmutableDatasetWriter

    with contextlib.suppress(UsageError):  # without PyAV, a batch has references to frames instead
        require_pyav()
        transform = with_frames(reader, transform)
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
    """Return the storage for a reader: mapped leaves for layout `ted`, else one that reads rows from the files."""
    from ..storages.dataset import MappedSteps, StepStorage
    from ..storages.packed import PackedStorage

    if isinstance(reader, TedReader):
        return MappedSteps(reader)
    if isinstance(reader, PackedReader):
        return PackedStorage(reader)
    return StepStorage(reader)


_OBSERVATION: Key = ("observation",)
_CHANNELS = (1, 3, 4)


def reading_transform(asked: SampleOptions, dataset: StepReader | StreamStorage) -> Compose | None:
    """Return the transform that reads windows or stacks frames; None if neither is requested.

    By default all images are stacked, else `observation`. Raises UsageError for a key that is not a field or, for
    stacks, not a state.
    """
    if asked.windows:
        from ..transforms.base import Compose  # lazy: torch takes seconds, and an invalid request fails before
        from ..transforms.windows import Windows

        windows = {key: window for key, _, window in (one.rpartition("=") for one in asked.windows)}
        try:
            return Compose(Windows.of_dataset(windows, dataset))
        except MissingKeyError as error:
            raise UsageError(error.message, hint=error.hint) from None
    if asked.frame_stack is None:
        return None
    chosen = _stacked_fields(asked.frame_keys, list(dataset.fields))
    from ..transforms.base import Compose  # lazy: torch takes seconds, and an invalid request fails before
    from ..transforms.windows import StoredFrameStack

    return Compose([StoredFrameStack(asked.frame_stack, [one.key], dim=_dimension(one.shape)) for one in chosen])


def _stacked_fields(names: Sequence[str], fields: list[Field]) -> list[Field]:
    states = set(state_keys(fields))
    known = {field.key: field for field in fields if field.key in states}
    chosen = []
    for name in names:
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
            f"--frame-stack stacks images, or {key_name(_OBSERVATION)}: the dataset has neither",
            hint=f"--frame-key names others: {', '.join(sorted(map(key_name, known)))}" if known else "",
        )
    return found


def _dimension(shape: tuple[int, ...]) -> int:
    """Return the dimension along which frames are stacked: the channels of an image, otherwise a new first one."""
    if len(shape) != 3:
        return -len(shape) - 1
    return -1 if shape[-1] in _CHANNELS and shape[0] not in _CHANNELS else -3


ALPHA, BETA = 0.6, 0.4
"""Default exponents of the priorities and of the weights, as in Schaul et al. (2015), proportional variant."""
_CHUNK = 1 << 20


def make_sampler(options: SampleOptions, reader: StepReader) -> Sampler:
    """Make the sampler for the steps of `reader`."""
    # Imported here because torch takes seconds, and an invalid request should fail before.
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


def _slice_arguments(options: SampleOptions) -> dict[str, Any]:
    size = {"num_slices": options.num_slices} if options.slice_len is None else {"slice_len": options.slice_len}
    given = options.given()
    passed: dict[str, Any] = {name: given[name] for name in ("weight", "anchor", "batched") if name in given}
    return {**size, **passed, "strict_length": options.strict_length, **({"pad_output": True} if options.pad else {})}


def _ends(table: EpisodeTable) -> dict[str, Any]:
    """Return the `ends` argument of slice samplers, from the episode table instead of the rows."""
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


def initial_priorities(reader: StepReader, name: str) -> np.ndarray[Any, Any]:
    """Return for each step the score of its episode, or the largest absolute value of a leaf, float64 `[steps]`.

    UsageError if there is no such leaf or score, or if a value is not finite.
    """
    if name.startswith(SCORE):
        return np.repeat(reader.episodes.score(name), reader.episodes.length)
    field, steps = priority_field(reader, name), reader.manifest.steps
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


_WARM_UP = 0.1
_LEAST = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleTiming:
    """Timing of `batches` consecutive batches: total `seconds`, and per batch `median_us` and `p95_us`.

    A warm-up of a tenth of the time, in which files are first read and kernels are compiled, is not counted. `threads`
    is the number of torch threads.
    """

    batches: int
    seconds: float
    batches_per_second: float
    steps_per_second: float
    bytes_per_second: float
    median_us: float
    p95_us: float
    threads: int


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

    `min`, `mean` and `max` ignore NaN; they are None for flags, text, complex numbers and references to frames of kept
    videos. `true_fraction` is the share of True in a flag, None for other leaves.
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
    """Steps `first` to `last` of the episode with the source's number `episode`; `start` is the row of the first step.

    `length` is the number of steps, and `padding` how often the last one is repeated after them to fill the slice: its
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
    """A dataset of a mixture, and the number of `steps` in the batch that come from it."""

    name: str
    path: Path
    steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleResult(Result):
    """A batch of `n` steps: storage rows (`indices`), the source's episode numbers, and steps within the episodes.

    `options` are the given options of the sampler. `slices` is empty for a sampler that draws single steps, `timing`
    is None without `time`. `fields` are the leaves of the batch, including those that the sampler adds. For a mixture,
    `datasets` lists its datasets, and `sources` has the number of the dataset of each step; both are empty otherwise.
    For a stream, `path` is its address, and `indices` are the numbers of its elements.
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
    """The drawn rows, and for each its dataset, the source's number of its episode, and its step there; int64 `[n]`."""

    rows: Array
    sources: Array
    episodes: Array
    steps: Array

    @classmethod
    def of(cls, rows: Array, sources: Array, tables: Sequence[EpisodeTable]) -> DrawnRows:
        """Look up the episodes of rows in the tables of their datasets."""
        episodes, steps = np.empty_like(rows), np.empty_like(rows)
        for number, table in enumerate(tables):
            here = sources == number
            which = table.index_of_step(rows[here])
            episodes[here], steps[here] = table.episode[which], rows[here] - table.start[which]
        return cls(rows=rows, sources=sources, episodes=episodes, steps=steps)


def sampled_slices(
    batch: TensorDictBase, drawn: DrawnRows, options: SampleOptions, batch_size: int
) -> tuple[SampledSlice, ...]:
    """Split the rows of a batch into slices; () for a sampler that draws single steps.

    Slices of one length are cut every `steps` rows, and with padding their real lengths are counted in the mask. Slices
    of different lengths (`--no-strict`) end where `truncated` is True.
    """
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
    """Describe the leaves of a batch: first the dataset's, in order, then what the sampler added."""
    from tensordict import is_tensor_collection  # imported here because torch takes seconds

    references = reference_keys(fields)  # ids of videos, whose mean is meaningless
    for field in fields:
        described = field.role != "text" and field.key not in references
        if (values := batch.get(field.key, None)) is None:
            continue  # windows replace next observations
        if field.name == _INDEX and is_tensor_collection(values):
            continue  # an ensemble replaces a field `index` of the dataset by the rows in its members
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


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """A valid request for a batch of `size` steps by a seed; `limit` is the number of seconds to measure, or None."""

    options: SampleOptions
    size: int
    seed: int
    limit: float | None

    @classmethod
    def of(cls, options: SampleOptions) -> Self:
        """Check the size, the time and the seed; UsageError if they are invalid."""
        size, limit = options.batch_size(), options.seconds_to_measure()
        seed = secrets.randbits(63) if options.seed is None else options.seed
        if not 0 <= seed < 1 << 64:
            raise UsageError(f"the seed is {seed}, expected a whole number from 0 to 2^64 - 1")
        return cls(options, size, seed, limit)

    def batch(self, buffer: ReplayBuffer) -> TensorDictBase:
        """Return the first batch of the seed."""
        import torch  # imported here because it takes seconds, and an invalid request should fail before

        buffer.set_rng(torch.Generator().manual_seed(self.seed))
        first: TensorDictBase = buffer.sample()
        return first

    def result(
        self, path: Path | str, buffer: ReplayBuffer, batch: TensorDictBase, fields: Sequence[Field], drawn: DrawnRows
    ) -> SampleResult:
        """Describe a batch of these fields, and measure the sampling speed if that is requested."""
        sampled = tuple(sampled_fields(batch, tuple(fields)))
        step_bytes = sum(field.bytes for field in sampled) / len(drawn.rows)
        return SampleResult(
            path=path, n=len(drawn.rows), seed=self.seed, sampler=self.options.sampler,
            options=self.options.given() | _frames_given(self.options), indices=tuple(drawn.rows.tolist()),
            episodes=tuple(drawn.episodes.tolist()), steps=tuple(drawn.steps.tolist()),
            slices=sampled_slices(batch, drawn, self.options, self.size), fields=sampled,
            timing=None if self.limit is None else _timing(buffer, self.limit, step_bytes),
        )  # fmt: skip


def _frames_given(options: SampleOptions) -> dict[str, Any]:
    given = {
        "frame_stack": options.frame_stack, "frame_key": list(options.frame_keys), "window": list(options.windows),
    }  # fmt: skip
    return {name: value for name, value in given.items() if value}


def _timing(buffer: ReplayBuffer, seconds: float, step_bytes: float) -> SampleTiming:
    import torch

    return timed(lambda: buffer.sample().numel(), seconds, step_bytes=step_bytes, threads=torch.get_num_threads())
