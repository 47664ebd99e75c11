"""`sample --streaming` and `inspect --streaming`: of a dataset in shards, of which those that are needed are fetched.

What opens a stream is above the verbs, as it needs transport and formats: the verbs get a function that opens one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

import numpy as np

from ..errors import UsageError
from ..format.videos import VIDEO, reference_keys
from ..results import Result
from ..ted.schema import row_bytes
from .options import SampleOptions
from .sample import DrawnRows, SampleRequest, SampleResult, reading_further

if TYPE_CHECKING:
    from ..samplers.stream import StreamSampler
    from ..storages.dataset import StreamStorage

Opened: TypeAlias = "Callable[[], StreamStorage]"
_STEPS, _SLICES = "without-replacement", "slice-without-replacement"
_AHEAD = 2
_ON_DISK = "is for datasets on this disk, and a stream is not"


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamField:
    """One leaf: the type and `shape` of its rows; the `role` of references to frames is `video`."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    role: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamResult(Result):
    """A dataset in shards. `steps`, `episodes` and the `bytes` of all rows are None where they are not known before all
    shards are read. `shard_steps` and `shard_episodes` describe the first shard that has any. `lacking` has a
    sentence on each part that is in no shard, though it should be.
    """

    kind: ClassVar[str] = "stream"
    address: str
    identity: str
    shards: int
    steps: int | None
    episodes: int | None
    bytes: int | None
    fields: tuple[StreamField, ...]
    shard_steps: int
    shard_episodes: int
    lacking: tuple[str, ...] = ()


def inspect_stream(opened: Opened) -> StreamResult:
    """Summarise the stream that `opened` opens; one shard is fetched, which shows the fields.

    Raises what opening it and fetching a shard do.
    """
    storage = opened()
    shards, fields = storage.shards, storage.fields
    lengths = next((found for n in range(len(shards)) if len(found := storage.take(n).lengths)), np.empty(0, np.int64))
    steps, frames = None if shards.rows is None else sum(shards.rows), reference_keys(fields)
    views = [(one, VIDEO if one.key in frames else one.role) for one in fields]
    return StreamResult(
        address=shards.address, identity=shards.identity, shards=len(shards), steps=steps, episodes=shards.episodes,
        bytes=None if steps is None else steps * row_bytes(tuple(fields)),
        fields=tuple(StreamField(key=one.name, dtype=one.dtype, shape=one.shape, role=role) for one, role in views),
        shard_steps=int(lengths.sum()), shard_episodes=len(lengths), lacking=tuple(storage.left_out),
    )  # fmt: skip


def sample_stream(opened: Opened, n: int | None = None, **given: Any) -> SampleResult:
    """Draw a batch of `n` steps of the stream that `opened` opens, once the arguments are checked.

    It is the first batch of `load_dataset(…, streaming=True, seed=seed)` with a `StreamSampler` (the `sampler`
    `without-replacement`, the default) or a `StreamSliceSampler` (`slice-without-replacement`), and needs as many
    shards as hold it. Arguments, result and errors are as in `sample`; arguments for datasets on this disk are refused
    with UsageError unless they are None or False.
    """
    for name in ("weight", "anchor", "alpha", "beta", "priority", "verify", "root"):
        if given.get(name) not in (None, False):
            raise UsageError(f"--{name.replace('_', '-')} {_ON_DISK}", hint="leave it out, or leave out --streaming")
    sampler = given.setdefault("sampler", _STEPS)
    if sampler not in (_STEPS, _SLICES):
        raise UsageError(
            f"the sampler is {sampler}, expected {_STEPS} or {_SLICES} with --streaming: shards come one by one"
        )
    request = SampleRequest.of(SampleOptions("", n, **given))
    return _drawn(request, opened())


def _drawn(request: SampleRequest, storage: StreamStorage) -> SampleResult:
    # These imports load torch, which takes seconds: an invalid request fails before.
    from ..buffers.tensordict import TensorDictReplayBuffer
    from ..writers.base import ImmutableDatasetWriter

    transform = reading_further(request.options, storage)
    buffer = TensorDictReplayBuffer(
        storage=storage, sampler=_sampler(request), writer=ImmutableDatasetWriter(), transform=transform,
        batch_size=request.size,
    )  # fmt: skip
    batch = request.batch(buffer)
    rows, episodes = (np.asarray(batch[key]).reshape(-1) for key in ("index", "episode"))
    before, _ = storage.places_in_episodes(rows)
    drawn = DrawnRows(rows=rows, sources=np.zeros_like(rows), episodes=episodes, steps=before)
    # References to frames of videos are not in the batch, the frames are.
    fields = [field for field in storage.fields if batch.get(field.key, None) is not None]
    return request.result(storage.shards.address, buffer, batch, fields, drawn)


def _sampler(request: SampleRequest) -> StreamSampler:
    """Make the sampler; shards beyond the window are fetched only where more than one batch is drawn."""
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
