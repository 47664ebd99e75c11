"""Batches mixed from an offline dataset and online data, and buffers that start with offline data."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Iterator
from typing import Any, Literal, overload

import torch
from tensordict import TensorDictBase

from ..buffers.checkpoint import BackgroundDump, SavedParts
from ..buffers.ensemble import Joiner, Policy, ReplayBufferEnsemble, part_of_index, schema_of
from ..buffers.pytrees import checked_batch_size
from ..buffers.replay_buffer import ReplayBuffer
from ..buffers.tensordict import TensorDictReplayBuffer
from ..errors import (
    FormatError,
    SchemaError,
    UsageError,
    WrongKindError,
    keywords_of,
    refuse_misspelt,
    require_flags,
    require_number,
    require_share,
    suggests_keywords,
)
from ..format.syncing import Durable
from ..options import PathLike
from ..storages.base import Storage
from ..storages.cursors import oldest_row
from ..storages.lazy_tensor import LazyTensorStorage
from ..torchrl_classes import Rebased, counterpart, described
from ..transforms.base import divided
from .load_dataset import load_dataset

_FRACTIONS = "offline_fractions"


class _Mixture(ReplayBufferEnsemble):
    """The ensemble of both sides; its checkpoint includes the current and the initial fraction of the dataset."""

    fraction = base = 0.0

    def folder_notes(self) -> dict[str, Any]:
        """Return the notes of an ensemble, and the fractions."""
        return super().folder_notes() | {_FRACTIONS: [self.fraction, self.base]}

    def _load_saved(self, saved: SavedParts) -> None:
        found = saved.notes.get(_FRACTIONS)
        if not (isinstance(found, list) and len(found) == 2 and all(map(_is_fraction, found))):
            raise FormatError(
                "the checkpoint is not that of an OfflineToOnlineReplayBuffer: it has no offline_fraction"
            )
        super()._load_saved(saved)
        self.fraction, self.base = found

    @contextlib.contextmanager
    def _all_or_nothing(self) -> Iterator[None]:
        before = self.fraction, self.base
        try:
            with super()._all_or_nothing():
                yield
        except BaseException:
            self.fraction, self.base = before
            raise


@counterpart
class OfflineToOnlineReplayBuffer(Rebased):
    """A buffer whose batches mix rows of a dataset with rows of a ring that `extend` writes to.

    - `offline_dataset`: a buffer, also an ensemble, or the path or name of a dataset, which is opened with
      `dataset_kwargs`, the arguments of `load_dataset`; then `batch_size` is needed.
    - `online_storage`, `online_capacity`: one of them: the storage of the ring, or its number of elements.
    - `offline_fraction`: the fraction of the dataset, above 0 and below 1; `anneal(step, total_steps)` lowers it to 0.
    - `transform`: applied to whole batches. If the dataset is given by name, leading transforms that read earlier
      steps, like `StoredFrameStack`, are applied in both buffers instead. If it is given as a buffer, that buffer has
      its own ones; pass the same ones to `online_buffer.append_transform`.
    - `schema`: the policy for entries that only one side has, see `ReplayBufferEnsemble`; by default they are refused.

    A batch `[batch_size]` has `round(offline_fraction * batch_size)` rows of the dataset, then rows of the ring. While
    the ring is empty, all rows are of the dataset. `"source_id"` is 0 for rows of the dataset and 1 for rows of the
    ring; with an ensemble of k datasets it is k for rows of the ring. `len` is the number of elements of both.

    UsageError (a ValueError) for arguments that contradict each other, and for a batch without a size. Names are those
    of TorchRL.
    """

    def __init__(
        self,
        offline_dataset: ReplayBuffer | PathLike,
        *,
        online_storage: Storage | None = None,
        online_capacity: int | None = None,
        offline_fraction: float = 0.5,
        batch_size: int | None = None,
        transform: Any = None,
        schema: Policy | None = None,
        generator: torch.Generator | None = None,
        **dataset_kwargs: Any,
    ) -> None:
        refuse_misspelt(OfflineToOnlineReplayBuffer, dataset_kwargs, keywords_of(load_dataset))
        if (online_storage is None) == (online_capacity is None):
            raise UsageError("online_storage and online_capacity, expected exactly one of them")
        fraction = _checked_fraction(offline_fraction)
        looking_back = None
        if isinstance(offline_dataset, ReplayBuffer):
            if dataset_kwargs:
                raise UsageError(f"{', '.join(dataset_kwargs)}: arguments of load_dataset are for names of datasets")
            offline = offline_dataset
        else:
            if not isinstance(offline_dataset, str | os.PathLike):
                raise WrongKindError(f"offline_dataset is {described(offline_dataset, 'a buffer or a name')}")
            if batch_size is None:
                raise UsageError("batch_size is None, expected a number with the name of a dataset")
            if dataset_kwargs.get("windows") is not None:
                raise UsageError(
                    "windows is set, expected as a transform, of the rows that are added, too",
                    hint="transform=rbtool.Windows(…)",
                )
            looking_back, transform = divided(transform)
            offline = load_dataset(offline_dataset, batch_size, transform=looking_back, **dataset_kwargs)
        self.batch_size = checked_batch_size(batch_size)
        self._offline_buffer = offline
        storage = LazyTensorStorage(online_capacity) if online_storage is None else online_storage  # type: ignore[arg-type]
        self._online_buffer = TensorDictReplayBuffer(storage=storage, transform=looking_back)
        self._mixture = _Mixture(
            offline, self._online_buffer, batch="exact", transform=transform, schema=schema, generator=generator
        )
        self._mixture.base = self._mixture.fraction = fraction

    @property
    def offline_buffer(self) -> ReplayBuffer:
        """The buffer of the dataset."""
        return self._offline_buffer

    @property
    def online_buffer(self) -> TensorDictReplayBuffer:
        """The ring that `extend` writes to."""
        return self._online_buffer

    @property
    def offline_fraction(self) -> float:
        """The fraction of a batch that comes from the dataset."""
        return self._mixture.fraction

    @offline_fraction.setter
    def offline_fraction(self, fraction: float) -> None:
        self._mixture.fraction = require_share("offline_fraction", fraction)

    _offline_fraction = offline_fraction  # the names in TorchRL, whose trainer saves and loads these attributes

    @property
    def _base_offline_fraction(self) -> float:
        return self._mixture.base

    @_base_offline_fraction.setter
    def _base_offline_fraction(self, fraction: float) -> None:
        self._mixture.base = _checked_fraction(fraction)

    @suggests_keywords()
    def anneal(self, step: int, total_steps: int) -> None:
        """Set the fraction for a step of training: the initial one at 0, less later, and 0 from `total_steps` on."""
        if total_steps <= 0:
            raise UsageError(f"total_steps is {total_steps}, expected a number above 0")
        base = self._mixture.base
        self.offline_fraction = min(base, base * max(0.0, 1 - step / total_steps))

    def extend(self, data: Any) -> torch.Tensor:
        """Write a batch to the ring; return the indices of its elements, int64 `[n]`."""
        return self.online_buffer.extend(data)

    @overload
    def sample(
        self, batch_size: int | None = None, *, return_info: Literal[True]
    ) -> tuple[TensorDictBase, dict[Any, Any]]: ...

    @overload
    def sample(self, batch_size: int | None = None, return_info: Literal[False] = False) -> TensorDictBase: ...

    @overload
    def sample(self, batch_size: int | None = None, return_info: bool = False) -> Any: ...

    def sample(self, batch_size: int | None = None, return_info: bool = False) -> Any:
        """Draw a batch; with `return_info`, a pair of batch and info.

        SchemaError (a RuntimeError) for a fraction of 0 while the ring is empty, and for entries with different element
        types in the two sides.
        """
        size = self.batch_size if batch_size is None else checked_batch_size(batch_size)
        if size is None:
            raise UsageError("no batch size is known", hint="give sample(batch_size) or the buffer a batch size")
        offline = round(self.offline_fraction * size)
        if not len(self.online_buffer):
            if not self.offline_fraction:
                raise SchemaError(
                    "Cannot sample from an empty storage: offline_fraction is 0, the ring has no elements"
                )
            offline = size
        return self._mixture.sample_counts([offline, size - offline], return_info=return_info)

    def __len__(self) -> int:
        return _elements_of(self.offline_buffer) + len(self.online_buffer)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of both sides and the fraction."""
        mixture = self._mixture
        return {"mixture": mixture.state_dict(), "offline_fraction": mixture.fraction, "base": mixture.base}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what `state_dict` returned; see `ReplayBufferEnsemble.load_state_dict`.

        SchemaError (a RuntimeError), with nothing changed, for the state of something else.
        """
        fractions: list[Any] = [state.get(name) for name in ("offline_fraction", "base")]
        if "mixture" not in state or not all(map(_is_fraction, fractions)):
            raise SchemaError("the state is not that of an OfflineToOnlineReplayBuffer: it has no offline_fraction")
        self._mixture.load_state_dict(state["mixture"])
        self._mixture.fraction, self._mixture.base = fractions

    @overload
    def dumps(self, path: PathLike, *, durable: Durable = "full", background: Literal[True]) -> BackgroundDump: ...

    @overload
    def dumps(self, path: PathLike, *, durable: Durable = "full", background: Literal[False] = False) -> None: ...

    def dumps(self, path: PathLike, *, durable: Durable = "full", background: bool = False) -> BackgroundDump | None:
        """Write a checkpoint of both sides and the fraction to the folder `path`; see `ReplayBuffer.dumps`."""
        require_flags(background=background)
        if background:
            return self._mixture.dumps(path, durable=durable, background=True)
        self._mixture.dumps(path, durable=durable)
        return None

    def loads(self, path: PathLike) -> None:
        """Load what `dumps` wrote; see `ReplayBuffer.loads`. FormatError for the checkpoint of another buffer."""
        self._mixture.loads(path)

    dump = save = dumps
    load = loads

    def __repr__(self) -> str:
        offline = _elements_of(self.offline_buffer)
        return (
            f"{type(self).__name__}(offline_fraction={self.offline_fraction}, offline={offline}, "
            f"online={len(self.online_buffer)})"
        )


def _is_fraction(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= 1


def _checked_fraction(fraction: Any) -> float:
    if not isinstance(fraction, int | float) or not 0 < fraction < 1:
        raise UsageError(f"offline_fraction is {fraction!r}, expected a number above 0 and below 1")
    return float(fraction)


@suggests_keywords()
def prefill_replay_buffer(
    rb: ReplayBuffer, dataset: ReplayBuffer, n_samples: int | None = None, chunk_size: int = 1000
) -> ReplayBuffer:
    """Write elements of a dataset into a buffer, in chunks, and return the buffer.

    Without `n_samples`, or if it is at least the number of elements, all elements are written, each once and in order;
    a full ring begins with its oldest element. Otherwise the sampler of the dataset draws that many. Entries that the
    sampler adds to batches, such as `"index"`, are not written. Of an ensemble, such as a mixture, all elements of its
    members are written, one member after the other, or elements drawn by its weights; its `schema` applies to entries
    that differ between members, and without one they are refused.

    UsageError (a ValueError) for numbers below 1; SchemaError (a RuntimeError) for members that differ, and, with
    nothing written, for chunks that the sampler of the dataset cannot draw.
    """
    chunk_size = require_number("chunk_size", chunk_size, 1)
    size = _elements_of(dataset)
    if n_samples is None or require_number("n_samples", n_samples, 1) >= size:
        for rows in _all_rows(dataset, chunk_size):
            rb.extend(rows)
        return rb
    for count in {min(chunk_size, n_samples), n_samples % chunk_size} - {0}:
        dataset.sampler.check_batch_size(count)  # before anything is written
    missing = n_samples
    while missing:
        with warnings.catch_warnings():  # drawing chunks instead of batches is intended
            warnings.filterwarnings("ignore", message="a batch of .* is drawn, the buffer's batch_size")
            index = dataset.sample(min(chunk_size, missing), return_info=True)[1]["index"]
        rows = _picked(dataset, index)
        rb.extend(rows)
        missing -= len(rows)
    return rb


def _elements_of(buffer: ReplayBuffer) -> int:
    """Return the number of elements of a buffer, or of all members of an ensemble."""
    return sum(buffer.storage.sizes) if isinstance(buffer, ReplayBufferEnsemble) else len(buffer)


def _all_rows(buffer: ReplayBuffer, chunk_size: int) -> Iterator[Any]:
    """Yield the elements of a buffer, oldest first if it is a full ring; for an ensemble, member after member."""
    if isinstance(buffer, ReplayBufferEnsemble):
        joiner = _joiner_of(buffer)
        for number in range(len(buffer)):
            yield from (joiner.join([(number, rows)]) for rows in _all_rows(buffer[number], chunk_size))
        return
    size, storage = len(buffer), buffer.storage
    oldest = oldest_row(storage) if size == len(storage) else 0
    for start in range(0, size, chunk_size):
        yield _picked(buffer, (torch.arange(start, min(start + chunk_size, size)) + oldest) % size)


def _picked(buffer: ReplayBuffer, index: Any) -> Any:
    """Return these elements as they are stored; for an ensemble, `index` is the index of a batch."""
    if isinstance(buffer, ReplayBufferEnsemble):
        parts = part_of_index(index, buffer.storage)
        return _joiner_of(buffer).join([(number, _picked(buffer[number], rows)) for number, _, rows, _ in parts])
    rows = buffer[index]
    return rows.exclude("index") if hasattr(rows, "exclude") else rows


def _joiner_of(buffer: ReplayBufferEnsemble) -> Joiner:
    """Return a joiner of the members' elements that knows the schemas of all members."""
    joiner = Joiner(buffer.schema or "error", stack=False)
    for number in range(len(buffer)):
        first = next(_all_rows(buffer[number], 1), None)
        if first is not None:
            joiner.learn({number: schema_of(first)})
    return joiner
