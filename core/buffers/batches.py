"""Batches: the draws of a sampler, and what is made of their rows."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any, ClassVar

import torch
from tensordict import is_tensor_collection
from torch.utils.data import get_worker_info

from ..storages.columns import fill
from ..storages.write_log import Written
from .concurrency import Draw, Prefetcher
from .cuda_streams import StreamedBatch
from .parts import BufferParts
from .pytrees import map_tensors

_CPU = torch.device("cpu")


class Batches(BufferParts):
    """Draws, reads and makes batches.

    A draw whose batch cannot be made, because a read fails or is interrupted, is kept: the next call for as many
    elements delivers it, so that an epoch loses no element.
    """

    def _deliver(self, size: int, out: Any = None) -> tuple[Draw, Any]:
        """Return the next draw of this size, and its batch, which is copied to `out` if that is given."""
        draw: Draw | None = None
        future: Future[Any] | None = None
        with self._sampling:
            self.settle()
            kept = self._undelivered  # `forget_drawn` replaces it: what is forgotten meanwhile is not kept
            if not kept and self._prefetcher is None and not self._drawing.reads_rows:
                draw = self._draw(size)
        if draw is None:
            draw, future = self._next_draw(size)
        try:
            if future is None:
                return draw, self.batch_of(draw) if out is None else self._filled(out, draw)
            made = future.result()
            rows = made.received() if isinstance(made, StreamedBatch) else made
            batch = self._changed(rows, draw) if self._transform.draws else rows
            return draw, batch if out is None else fill(out, batch, self._storage.may_hold)
        except BaseException:
            if not (self._sampler.has_epochs or draw.parts):  # older ones, of other sizes, may never be asked for
                kept.clear()
            draw.size = size
            kept.append(draw)
            raise

    def _next_draw(self, size: int) -> tuple[Draw, Future[Any] | None]:
        """Return the next draw, and its batch if a thread makes it, or its rows if a transform draws."""
        if self._undelivered and (draw := self._kept(size)) is not None:
            return draw, None
        prefetcher = self._prefetcher
        if prefetcher is None or size != self._batch_size:
            return self._draw(size), None
        with self._rows_stay(), self._sampling:
            make = self._rows_of if self._transform.draws else self.batch_of
            while True:
                newest = prefetcher.newest
                # One more than the capacity: the oldest is removed only after all draws succeeded.
                while newest is None or (len(prefetcher) <= prefetcher.capacity and not newest.last):
                    newest = self._draw_ahead(prefetcher, size, make)
                draw, future = prefetcher.oldest
                valid = future is not None or self.restored(draw)
                prefetcher.pop()
                if valid:
                    return draw, future

    def _draw_ahead(self, prefetcher: Prefetcher, size: int, make: Callable[[Draw], Any]) -> Draw:
        """Draw once more, and have a thread make the batch."""
        waiting = len(self._undelivered)
        try:
            draw = self._draw(size)
        except BaseException:
            for kept in self._undelivered[waiting:]:  # its turn comes after those in the queue
                kept.size = None
                prefetcher.push(kept, None)
            del self._undelivered[waiting:]
            raise
        prefetcher.push(draw, make)
        return draw

    def _rows_stay(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context in which nobody writes, if the sampler reads rows.

        Writers take the guard before they notify the sampler: in the other order two threads wait for each other.
        """
        return self._guard.hold() if self._drawing.reads_rows else contextlib.nullcontext()

    def _kept(self, size: int, *, or_fewer: bool = False) -> Draw | None:
        """Remove a draw of this size whose batch was not made, and return it; None if there is none."""
        with self._rows_stay(), self._sampling:
            place = 0
            while place < len(self._undelivered):
                draw = self._undelivered[place]
                if draw.size != size and not (or_fewer and draw.size is not None and draw.size < size):
                    place += 1
                    continue
                valid = self.restored(draw)  # if this fails, the draw stays where it is
                del self._undelivered[place]
                if valid:
                    return draw
        return None

    def restored(self, draw: Draw) -> bool:
        """Read the rows of a draw again, whose batch was started; return False if they were written over since.

        A transform may have changed the rows that were read with the draw.
        """
        if draw.written is None or self._sampler.rows_come_once:
            return True
        with self._guard.hold():
            storage, index = self._storage, draw.index
            rows = index[0] if isinstance(index, tuple) else index
            if not storage.log.left_alone(rows, draw.written, storage.capacity_rows):
                return False
            draw.rows = self.with_past(index, None)
            return True

    carries_info: ClassVar[bool] = False
    """Whether batches have the info of the sampler as entries."""

    draws_apart: ClassVar[bool] = False
    """Whether a draw of it has more than the index and info of its sampler."""

    def draw(self, size: int, *, with_rows: bool = True, or_fewer: bool = False) -> Draw:
        """Draw the index of a batch that `batch_of` makes; batches made ahead are left alone.

        Without `with_rows`, the caller excludes writers, and reads the rows that a sampler would have read. What was
        passed to `keep` comes first; with `or_fewer` also if it is of fewer elements.
        """
        with self._sampling:
            self.settle()
        if self._undelivered and self._sampler.has_epochs:
            draw = self._kept(size, or_fewer=or_fewer)
            if draw is not None:
                return draw
        return self._draw(size, with_rows)

    def keep(self, draw: Draw, size: int) -> None:
        """Keep a draw whose batch was not made, if the sampler would not draw its elements again in this epoch."""
        if self._sampler.has_epochs:
            with self._sampling:
                draw.size = size
                self._undelivered.append(draw)

    _reads_by_index: ClassVar[bool] = True
    """Whether rows are what the storage returns for the index of a draw."""

    def _draw(self, size: int, with_rows: bool = True) -> Draw:
        """Draw an index; for a sampler that reads rows, with the rows of the same instant."""
        storage, sampler = self._storage, self._drawing
        if sampler.reads_rows and with_rows:
            return self._undisturbed(size) or self._locked(size)
        with self._sampling:
            index, found = sampler.sample(storage, size)
            last = sampler.has_epochs and sampler.ran_out
            written = storage.log.now if sampler.reads_rows else None
        return self._with_info(index, found, last, None, written)

    def _with_info(
        self, index: Any, found: Mapping[Any, Any], last: bool = False, rows: Any = None, written: Written | None = None
    ) -> Draw:
        """Complete the info of an index."""
        storage = self._storage
        info = dict(found)
        info["index"] = index
        if self._writer.tracks_generations:
            info["index_generation"] = self._writer.generations_of(index)
        device = getattr(storage, "device", None)
        if device is not None and device != _CPU and torch.device(device).type != "cpu":
            info = {key: map_tensors(lambda value: value.to(device), value) for key, value in info.items()}
        return Draw(index, info, bool(last), rows, written=written)

    def _locked(self, size: int) -> Draw:
        storage, sampler = self._storage, self._drawing
        with self._guard.hold(), self._sampling:
            index, found, rows = sampler.sample_rows(storage, size)
            last, self._seen = sampler.has_epochs and sampler.ran_out, storage.log.now
            try:
                return self._with_info(index, found, last, self.with_past(index, rows), self._seen)
            except BaseException:
                self.keep(self._with_info(index, found, last, None, self._seen), size)
                raise

    def _undisturbed(self, size: int) -> Draw | None:
        """Draw with rows, without the lock that other processes wait for; None if that is not safe, or was disturbed.

        It is safe if nothing was written since the last draw: what the sampler derives from rows is complete then. A
        sampler with epochs must not draw twice.
        """
        sampler, storage, guard, seen = self._drawing, self._storage, self._guard, self._seen
        if not self.shared or sampler.has_epochs or (before := guard.sequence) & 1 or storage.log.now != seen:
            return None
        try:
            with self._sampling:
                index, found, rows = sampler.sample_rows(storage, size)
                rows = self.with_past(index, rows)
        except Exception:
            if guard.sequence == before:
                raise
            return None
        return self._with_info(index, found, False, rows, seen) if guard.sequence == before else None

    def _rows_of(self, draw: Draw, collate: Callable[[Any], Any] | None = None) -> Any:
        rows = self._drawn_rows(draw)
        collate = collate or self._collate_fn
        return rows if collate is None else collate(rows)

    def _drawn_rows(self, draw: Draw) -> Any:
        """Return the rows of a draw, before they are collated."""
        if draw.rows is None:
            return self._guard.read(self._read, draw.index)
        if self._sampler.rows_come_once and not self.returns_rows:
            return map_tensors(lambda value: value.clone(), draw.rows)  # they are needed again if this fails
        return draw.rows

    def _read(self, index: Any) -> Any:
        """Read rows, with the steps before them where transforms look back; the guard makes them of one moment."""
        return self._storage.get(index) if self._transform.is_empty else self.with_past(index, None)

    @property
    def _looking_back(self) -> list[Any]:
        """The transforms that are applied as rows are read."""
        return self._transform.looking_back

    def with_past(self, index: Any, rows: Any, dim_extend: int = 0) -> Any:
        """Return rows that were just read, or with None are read now, as the transforms that look back make them.

        The caller excludes writers, or reads again if there was one.
        """
        rows = self._storage.get(index) if rows is None else rows
        if self._transform.is_empty or not (transforms := self._looking_back):
            return rows
        return self._history.complete(transforms, self._storage, index, rows, dim_extend)

    def batch_of(self, draw: Draw, collate: Callable[[Any], Any] | None = None) -> Any:
        """Make the batch of a draw, as `sample` returns it; `collate` is used instead of the buffer's own."""
        if draw.rows is None and collate is None and self._reads_by_index and self.returns_rows:
            return self._completed(self._guard.read(self._storage.get, draw.index), draw)
        return self._changed(self._rows_of(draw, collate), draw)

    def _filled(self, out: Any, draw: Draw) -> Any:
        """Make the batch of a draw in the memory of another one: without a copy in between, if it is rows alone."""
        storage, added = self._storage, draw.info if self.carries_info else {}
        plain = draw.rows is None and self._reads_by_index and self.returns_rows
        if plain and all(type(value) is torch.Tensor for value in added.values()):
            return self._guard.read(lambda index: storage.read_into(out, index, added), draw.index)
        return fill(out, self.batch_of(draw), storage.may_hold)

    @property
    def returns_rows(self) -> bool:
        """Whether batches are rows as the storage returns them, but for the info."""
        return self.rows_are_batches and self._transform.is_empty

    def _changed(self, rows: Any, draw: Draw) -> Any:
        """Make a batch of collated rows."""
        batch = self._completed(self._transformed(rows), draw)
        return self._pinned(batch) if self._pin_memory else batch

    def _completed(self, batch: Any, draw: Draw) -> Any:
        """Add the info to a batch; the default returns it unchanged."""
        return batch

    def _transformed(self, rows: Any) -> Any:
        transform = self._transform
        if transform.is_empty:
            return rows
        done = len(self._looking_back)
        if done:
            return transform(rows, done)
        if is_tensor_collection(rows) and rows.is_locked:
            with rows.unlock_():
                return transform(rows)
        return transform(rows)

    def _pinned(self, batch: Any) -> Any:
        if get_worker_info() is not None:  # the loader's process would get a copy that is not pinned
            return batch
        if not torch.accelerator.is_available():
            warnings.warn("pin_memory=True has no effect: there is no accelerator to copy to", stacklevel=3)
            return batch
        return map_tensors(_pin, batch)


def _pin(value: Any) -> Any:
    """Pin what is on the CPU, also next to tensors on a device, which stay there and are used as they are."""
    if value.device is None and any(leaf.device != _CPU for leaf in value.values(True, True)):
        return value.apply(_pin)
    return value.pin_memory() if value.device in (None, _CPU) else value
