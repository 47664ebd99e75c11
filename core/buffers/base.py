"""The buffer, and its state as a dictionary and as a folder."""

from __future__ import annotations

import contextlib
import copy
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, overload

import torch
from torch.utils.data import IterableDataset

# Checkpointers are found by the class of the storage, once this package is imported.
from .. import checkpointers as _checkpointers  # noqa: F401
from ..errors import FormatError, RbtoolError, SchemaError, require_flags
from ..format.syncing import Durable
from ..ray_session import imported_ray
from ..samplers.consuming import ConsumingSampler
from ..samplers.sample_units import ANCHOR
from ..writers.base import Writer
from .background import BackgroundDump, claimed, in_background
from .checkpoint import BufferFolder, SavedParts, load_folder, refuse_home_of, staged_buffer
from .concurrency import Draw
from .conditional import ConditionalUpdates
from .expansion import ExpandedDraws
from .pytrees import checked_batch_size
from .queries import Queries


class ReplayBuffer(Queries, ConditionalUpdates):
    """Keeps elements in a storage, at rows that a writer chooses, and returns batches that a sampler draws.

    Arguments, all by name:

    - `storage`: a `Storage`, or a callable that makes one; by default `ListStorage(1_000)`.
    - `sampler`, `writer`: likewise; by default `RandomSampler()` and `RoundRobinWriter()`.
    - `sample_unit`: a `SampleUnit` that expands each element that is drawn: `Sequence(8)` to 8 steps of its episode.
    - `collate_fn`: makes a batch of rows of the storage; by default a stack of the elements of a list storage.
    - `pin_memory`: whether batches are in page-locked memory, for fast copies to an accelerator. Entries that are on a
      device already stay as they are. So do batches of a worker of a `DataLoader`, which pins them itself if asked to.
    - `prefetch`: how many batches are made ahead, in as many threads; needs `batch_size`. Indices are always drawn
      in the caller's thread, in the order of its calls: threads do not change batches.
    - `transform`: a `Transform`, one of TorchRL's, a module or any callable, applied to batches that are read (and to
      data that is written, if it has `inv`). `transform_factory` makes one, when a part is first needed.
    - `batch_size`: how many elements `sample()` and iteration return.
    - `consume_after_n_samples`: how often each element is sampled; its slot is written again then, see
      `ConsumingSampler`. `len` is the number of elements that can still be sampled.
    - `dim_extend`: the dimension of the user's data along which a storage of several dimensions grows, by default the
      last. In the storage it is dimension 0.
    - `checkpointer`: saves and loads the storage.
    - `generator`: the random generator of storage, sampler, writer and transforms.
    - `shared`: whether several processes write at the same time. Without it any number of processes may read, and
      forked or spawned children may continue the same ring one after the other.
    - `compilable`: whether the default writer counts in plain ints, which other processes do not see.
    - `delayed_init`: whether the parts are made when one is first needed; by default only with `transform_factory`.

    Readers in all threads and processes get no half-written rows from `sample` and from indexing with numbers; ints
    and slices return views, in which later writes are visible.

    `DataLoader(buffer, batch_size=None)` yields the batches of the buffer, drawn by its sampler. Every worker has its
    own random stream: without a generator that of `torch.initial_seed()` in the worker, with one a stream derived from
    it and the number of the worker. Copies in other processes draw the same batches only if a generator was given.
    UsageError (a ValueError) for contradictory arguments, WrongKindError (a TypeError) for a part of another type.
    Ideas and names are those of TorchRL.

    >>> import torch
    >>> from rbtool import LazyTensorStorage
    >>> buffer = ReplayBuffer(storage=LazyTensorStorage(100), batch_size=4)
    >>> buffer.extend(torch.arange(10))
    tensor([0, 1, 2, 3, 4, 5, 6, 7, 8, 9])
    >>> buffer.sample().shape, len(buffer)
    (torch.Size([4]), 10)
    """

    # State ------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the state of all parts and of the batches drawn ahead; tensors by reference."""
        with self.paused():
            generator, queue = self._rng, tuple(map(_as_dict, self._waiting()))
            return {
                "_storage": self._storage.state_dict(),
                "_sampler": self._sampler.state_dict(),
                "_writer": self._writer.state_dict(),
                "_transforms": self._transform.state_dict(),
                "_batch_size": self._batch_size,
                "_consume_after_n_samples": getattr(self._sampler, "max_sample_count", None),
                "_rng": None if generator is None else (generator.get_state(), str(generator.device)),
                "_prefetch_state": {"version": 1, "capacity": self.batches_ahead, "queue": queue},
            }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what `state_dict`, here or in TorchRL, returned.

        SchemaError (a RuntimeError), with nothing changed, for a state that does not fit: of other parts, of more
        elements than the capacity, of another number of batches made ahead.
        """
        missing = {"_transforms", "_writer", "_sampler", "_storage"} - set(state_dict)
        if missing:
            raise SchemaError(f"not the state of a buffer: {', '.join(sorted(missing))} is missing")
        batch_size = checked_batch_size(state_dict.get("_batch_size", self._batch_size))
        try:
            self._take_over(state_dict, batch_size)
        except RbtoolError:
            raise
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise SchemaError(f"the state is not that of a {type(self).__name__}: {error!r}") from error

    def _take_over(self, state_dict: Mapping[str, Any], batch_size: int | None) -> None:
        ahead = state_dict.get("_prefetch_state") or {"capacity": self.batches_ahead, "queue": ()}
        if ahead["capacity"] != self.batches_ahead:
            raise SchemaError(
                f"the state has {ahead['capacity']} batches made ahead, this buffer makes {self.batches_ahead}"
            )
        with self._all_or_nothing():
            self._transform.load_state_dict(dict(state_dict["_transforms"]))
            self._writer.load_state_dict(state_dict["_writer"])
            self._sampler.load_state_dict(state_dict["_sampler"])
            if state_dict.get("_rng") is not None:
                self._restore_rng(*state_dict["_rng"])
            self._batch_size = batch_size
            with self._loading_ring(self._writer):
                self._storage.load_state_dict(state_dict["_storage"])
            self._writer.sync_cursor()
            self._restore_ahead(self.rotated_draws([as_draw(item) for item in ahead["queue"]]))

    @overload
    def dumps(
        self, path: str | os.PathLike[str], *, durable: Durable = "full", background: Literal[True]
    ) -> BackgroundDump: ...

    @overload
    def dumps(
        self, path: str | os.PathLike[str], *, durable: Durable = "full", background: Literal[False] = False
    ) -> None: ...

    def dumps(
        self, path: str | os.PathLike[str], *, durable: Durable = "full", background: bool = False
    ) -> BackgroundDump | None:
        """Write a checkpoint to the folder `path`; replaces an older checkpoint atomically.

        Of a storage of tensors that saved or loaded the older one, only the rows that changed are written.
        TorchRL reads checkpoints of storages whose checkpointer has `compatible=True`.

        Digests are written, and a process that is killed leaves the older checkpoint or the new one, with any
        `durable`. It states what is on the disk when this returns, in case the machine itself stops (a power cut):

        - "full": everything.
        - "data": the bytes of all files. Either checkpoint is there after a power cut, the new one perhaps
          without some of its files, which `loads` reports.
        - "none": nothing is waited for. After a power cut within about a minute, neither may be whole; `loads` reports
          that, too.

        With `background`, a thread writes the rows as of the call, and `result()` of the `BackgroundDump` that is
        returned raises what went wrong. Writers copy rows of tensors that they replace before these are read, and wait
        where that is more than 64 MiB. What hands out references to rows, as `rb[:]`, waits for all. If that was before
        the call, with save hooks, and for storages and checkpointers of other kinds (lists, packed rows, other
        devices, classes of your own), this returns once all files are written.

        UsageError (a ValueError) for a folder with anything else in it, for the folder of the storage, and for another
        `durable`.
        """
        require_flags(background=background)
        place = Path(path)
        self._prepare_dump(place)
        with contextlib.ExitStack() as stack:
            stack.enter_context(claimed(place))
            with self.paused():
                ahead = self._waiting(), self.batches_ahead
                staged = staged_buffer(stack, self, self._rng, place, *ahead, durable, background=background)
            if not background:
                staged.publish()
                return None
            rest = stack.pop_all()

        def finish() -> None:
            with rest:
                staged.publish()

        return in_background(place, finish)

    def _prepare_dump(self, path: Path) -> None:
        """Refuse a destination in which rows are that are to be saved."""
        refuse_home_of(self._storage, path)

    def loads(self, path: str | os.PathLike[str], *, verify: bool = False) -> None:
        """Load a checkpoint of rbtool or TorchRL, of any capacity, whose elements fit into this buffer.

        Rows of more than 64 MiB are mapped, and read when they are used, where the storage can take such memory over;
        `verify` compares them with their digests, and reads all of them for it. Everything else is always verified.

        Nothing is unpickled. DatasetNotFoundError (a FileNotFoundError) if there is none, FormatError for another or a
        damaged folder, SchemaError (a RuntimeError) for one that does not fit: each with nothing changed. A checkpoint
        that takes the place of another one meanwhile is loaded instead.
        """
        require_flags(verify=verify)
        load_folder(Path(path), partial(self._load_folder, verify=verify))

    dump = save = dumps
    load = loads

    def _load_folder(self, folder: BufferFolder, *, verify: bool) -> None:
        draws = folder.drawn_ahead(self.batches_ahead)
        self.load_saved(replace(folder.saved(), verify=verify), draws)

    def load_saved(self, saved: SavedParts, draws: Sequence[Draw] = ()) -> None:
        """Load what was read of a checkpoint, and the draws made ahead; nothing is changed if that fails."""
        with self._all_or_nothing():
            self._load_saved(saved)
            saved.confirm()
            self._restore_ahead(self.rotated_draws(list(draws)))

    def _load_saved(self, saved: SavedParts) -> None:
        if "members" in saved.notes:
            raise FormatError("a checkpoint of an ensemble was found, expected one of a single buffer")
        if saved.notes.get("consume_after_n_samples") is not None and not isinstance(self._sampler, ConsumingSampler):
            raise SchemaError("the checkpoint is of a buffer that consumes its elements, which this one does not")
        if saved.transforms is not None:
            self._transform.load_state_dict(saved.transforms)
        if saved.writer is not None:
            self._writer.loads(saved.writer)
        if saved.sampler is not None:
            self._sampler.loads(saved.sampler)
        else:
            self._sampler.empty()
        if saved.generator is not None:
            self._restore_rng(*saved.generator)
        self._batch_size = saved.batch_size
        with self._loading_ring(None if saved.writer is None else self._writer):
            if saved.storage is not None:
                self._storage.loads(saved.storage, verify=saved.verify)
            else:
                self._storage.empty()
        if saved.writer is None:
            self._writer.resume_after()
        self._writer.sync_cursor()
        if saved.sampler is None:
            self._introduce()

    @classmethod
    def as_remote(cls, remote_config: Mapping[str, Any] | None = None) -> Any:
        """Return this class as one of Ray actors: `ReplayBuffer.as_remote().remote(storage=…)` makes one.

        `remote_config` are options of `ray.remote`, by default `{"num_cpus": 1}`. A `RayReplayBuffer` is easier to use,
        and faster: here data is sent as Ray sends it, and calls return references. UsageError (a ValueError) without
        Ray.
        """
        return imported_ray("as_remote()").remote(**(remote_config or {"num_cpus": 1}))(cls)

    def register_save_hook(self, hook: Callable[..., Any]) -> None:
        """Call `hook(data, path=…)` on the saved data of the storage; hooks themselves are not saved."""
        self._storage.register_save_hook(hook)

    def register_load_hook(self, hook: Callable[..., Any]) -> None:
        """Call `hook(data, out=…)` on data loaded into the storage; hooks themselves are not saved."""
        self._storage.register_load_hook(hook)

    # A full ring in a larger storage ---------------------------------------------------------------

    @contextlib.contextmanager
    def _loading_ring(self, writer: Writer | None) -> Iterator[None]:
        """Load the storage inside the context, after the state of `writer`, None if it has none.

        A full ring that is loaded into a larger storage is rotated, so that its rows are in the order of time before
        the free ones; afterwards the other parts are rotated too.
        """
        storage = self._storage
        if not self._rings():
            yield
            return
        with storage.loading_ring(None if writer is None else writer.cursor):
            yield
        if (row := storage.rotated) is None:
            return
        self._writer.rotate(row)
        if row:
            self._sampler.on_rotate(row, storage)
            self._renumber_rows()

    def _rings(self) -> bool:
        """Whether the rows are a ring."""
        return self._writer.keeps_order and self._writer.writes

    def _renumber_rows(self) -> None:
        """Store their new row numbers with rotated rows, where rows have numbers."""

    def rotated_draws(self, draws: list[Draw]) -> list[Draw]:
        """Return loaded draws with the numbers that their rows have here; they are changed."""
        row, storage = self._storage.rotated, self._storage
        if not row or not self._rings():
            return draws
        rows = storage.shape[0]
        for draw in draws:
            first, *others = draw.index if isinstance(draw.index, tuple) else (draw.index,)
            first = (first - row) % rows
            draw.index = (first, *others) if isinstance(draw.index, tuple) else first
            draw.info["index"] = draw.index
            if ANCHOR in draw.info:
                draw.info[ANCHOR] = moved = draw.info[ANCHOR].clone()
                times = moved if moved.dim() == 1 else moved[:, 0]
                times.copy_((times - row) % rows)
        return draws

    # Details ---------------------------------------------------------------------------------------

    @property
    def batches_ahead(self) -> int:
        """How many batches are made ahead: `prefetch`, 0 without it."""
        return 0 if self._prefetcher is None else self._prefetcher.capacity

    def _restore_rng(self, state: torch.Tensor, device: str) -> None:
        generator = self._rng
        if generator is None or generator.device.type != torch.device(device).type:
            generator = torch.Generator(device)
        try:
            generator.set_state(state.to("cpu", torch.uint8).contiguous())
        except RuntimeError as error:
            raise SchemaError(f"the state of the generator does not fit one on {device}: {error}") from error
        self.unseeded = False
        self.draw_from(generator)

    def _waiting(self) -> list[Draw]:
        """Return the draws that are not delivered yet, in their order."""
        return [*self._undelivered, *(() if self._prefetcher is None else self._prefetcher)]

    def _restore_ahead(self, draws: list[Draw]) -> None:
        self._ended, self._undelivered = False, [draw for draw in draws if draw.size is not None]
        if isinstance(self._drawing, ExpandedDraws):
            for draw in draws:  # windows are dropped once their rows are written over
                draw.written = self._storage.log.now
        if self._prefetcher is not None:
            self._prefetcher.restore(draw for draw in draws if draw.size is None)

    @contextlib.contextmanager
    def _all_or_nothing(self) -> Iterator[None]:
        """Load inside the context; on failure restore everything but the storage, which restores itself."""
        with self._guard, self._sampling:
            self.settle()  # a saved stream continues unchanged, in any process
            rng, batch_size = self._rng, self._batch_size
            rng_state = None if rng is None else rng.get_state()
            kept = [(part, copy.deepcopy(part.state_dict())) for part in (self._writer, self._sampler, self._transform)]
            try:
                yield
            except BaseException:
                for part, state in kept:
                    part.load_state_dict(state)
                if rng is not None and rng_state is not None:
                    rng.set_state(rng_state)
                self._batch_size = batch_size
                self.draw_from(rng)
                raise


IterableDataset.register(ReplayBuffer)  # else a DataLoader reads single rows, without the sampler


def _as_dict(draw: Draw) -> dict[str, Any]:
    parts = [(member, _as_dict(part)) for member, part in draw.parts]
    more = {"parts": parts} if parts else {} if draw.chances is None else {"chances": draw.chances}
    return {"index": draw.index, "info": draw.info, "last": draw.last, "size": draw.size} | more


def as_draw(item: Any) -> Draw:
    """Read one entry of a queue; TorchRL keeps pairs of a batch and its info."""
    if isinstance(item, Mapping):
        parts = [(member, as_draw(part)) for member, part in item.get("parts", ())]
        index, info, last = item["index"], dict(item["info"]), bool(item["last"])
        return Draw(index, info, last, parts=parts, chances=item.get("chances"), size=item.get("size"))
    if isinstance(item, tuple) and len(item) == 2 and isinstance(item[1], Mapping) and "index" in item[1]:
        return Draw(item[1]["index"], dict(item[1]))
    raise SchemaError(f"a batch that was made ahead is a {type(item).__name__} without an index")
