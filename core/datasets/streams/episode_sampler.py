"""What makes a buffer of episodes that arrive one by one: a storage without rows, and a sampler that reads on."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import numpy as np
import torch

from ...errors import FormatError, SchemaError
from ...format.contracts import Array
from ...format.digest import digest_text
from ...samplers.base import Index, Sampler
from ...storages.base import Storage
from ...storages.dataset import tensordict_of
from ...ted.schema import NEXT_DONE, NEXT_TRUNCATED, Key
from .episodes import EpisodeStream, RawEpisode

_LOOKED_AT = 4
_MASK: Key = ("collector", "mask")
_INIT: Key = ("is_init",)
_NOWHERE = (-1, -1, 0)


class OpenEpisode(Protocol):
    """An episode that is open."""

    @property
    def length(self) -> int:
        """How many steps it has."""

    @property
    def what(self) -> str:
        """What names it in errors."""

    def rows(self, start: int, stop: int) -> dict[Key, Array]:
        """Return the TED rows `[start, stop)`."""


class EpisodeOpener(Protocol):
    """Opens episodes, one at a time."""

    @property
    def is_decided(self) -> bool:
        """Whether `decide` was called."""

    @property
    def is_here(self) -> bool:
        """Whether an episode that is open can be read: not in a fork."""

    @property
    def text_keys(self) -> frozenset[Key]:
        """The keys of text and of its lengths, also those under `next`."""

    def look_at(self, raw: RawEpisode) -> object:
        """Take the form of an episode."""

    def decide(self) -> None:
        """Decide what the first episodes mean for all."""

    def open(self, raw: RawEpisode) -> OpenEpisode | None:
        """Open an episode; the one before cannot be read any more. None for one without a step."""


class ArrivalStorage(Storage):
    """Has no rows: those of a stream are read by the sampler, in their order, and cannot be looked up."""

    initialized = False
    """Nothing is saved of it."""

    def __init__(self) -> None:
        super().__init__(1)

    def __len__(self) -> int:
        return 1

    def write_rows(self, rows: Any, data: Any) -> None:
        raise SchemaError("a stream cannot be written to")

    def read_rows(self, rows: Any) -> Any:
        raise SchemaError("the rows of a stream come in its order, not by number", hint="download=True stores them")

    def clear_rows(self) -> None:
        """Nothing is stored."""

    def save_state(self) -> dict[str, Any]:
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Nothing is stored."""


@dataclass(frozen=True, slots=True)
class ArrivalSlices:
    """How batches are made of slices: one of the numbers; `pad` fills up an episode that is shorter than a slice."""

    num_slices: int | None = None
    slice_len: int | None = None
    pad: float | None = None
    strict_length: bool = True

    def of(self, batch_size: int) -> tuple[int, int]:
        """Return the number of slices of a batch, and their length."""
        given = self.num_slices or self.slice_len or 1
        if batch_size % given:
            raise SchemaError(f"the batch size {batch_size} is no multiple of {given}")
        other = batch_size // given
        return (given, other) if self.num_slices else (other, given)


class ArrivalSampler(Sampler):
    """Makes batches of the next steps of a stream, or of one slice of each of the next episodes.

    The state is one tensor of numbers. `reset` begins the next pass.
    """

    has_epochs: ClassVar[bool] = True
    rows_come_once: ClassVar[bool] = True

    def __init__(self, stream: EpisodeStream, opener: EpisodeOpener, slices: ArrivalSlices | None) -> None:
        self._stream, self._opener, self._slices = stream, opener, slices
        self._given = 0
        self._open: tuple[RawEpisode, OpenEpisode] | None = None
        self._offset = 0
        self._identity = _number(f"{stream.shards.identity} {stream.shuffle} {stream.seed} {slices}")

    def draw(self, storage: Storage, batch_size: int) -> tuple[Index, dict[str, Any]]:
        raise SchemaError("the rows of a stream are read as they are drawn")

    def draw_rows(self, storage: Storage, batch_size: int) -> tuple[Index, dict[str, Any], Any]:
        """Read the next batch; the last one of a pass may be smaller."""
        self.prepare()
        with self._whole_or_again():
            parts = list(self._steps(batch_size) if self._slices is None else self._taken(self._slices, batch_size))
            if not parts:
                raise SchemaError("the stream has no steps")
            return self._batch(_joined(parts))

    def draw_episode(self) -> tuple[Index, dict[str, Any], Any]:
        """Read the next episode whole, or the rest of one."""
        self.prepare()
        with self._whole_or_again():
            if not self._next_open():
                raise SchemaError("the stream has no steps")
            assert self._open is not None
            return self._batch(_joined(list(self._steps(self._open[1].length - self._offset))))

    @contextlib.contextmanager
    def _whole_or_again(self) -> Iterator[None]:
        """Go back to where the batch began if it is not made: what was read for it is read again with the next one.

        An episode that cannot be used is passed over, for it would be in the way of all batches to come.
        """
        mark, given, opened, offset = self._stream.mark(), self._given, self._open, self._offset
        try:
            yield
        except (FormatError, SchemaError):
            raise
        except BaseException:
            self._stream.go_back(mark)
            self._given, self._offset = given, offset
            self._open = opened
            self._reopen()
            raise

    def _reopen(self) -> None:
        """Open the episode again of which steps are left."""
        opened, self._open = self._open, None
        if opened is not None and self._offset < opened[1].length:
            found = self._opener.open(opened[0])
            self._open = None if found is None else (opened[0], found)

    def prepare(self) -> None:
        """Look at the first episodes, which decide about the form of all, and what their last steps are."""
        if self._opener.is_decided:
            if not self._opener.is_here:
                self._stream.go_back(self._stream.mark())
                self._reopen()
            return
        for shard in range(self._stream.shards.count):
            for looked, raw in enumerate(self._stream.shards.episodes(shard, 0), 1):
                self._opener.look_at(raw)
                if looked == _LOOKED_AT:
                    break
            else:
                continue
            break
        self._opener.decide()

    def _batch(self, rows: dict[Key, Array]) -> tuple[Index, dict[str, Any], Any]:
        count = len(next(iter(rows.values())))
        index = torch.arange(self._given, self._given + count)
        self._given += count
        batch = tensordict_of({key: torch.from_numpy(np.ascontiguousarray(one)) for key, one in rows.items()}, (count,))
        if not self._has_more():
            self.ran_out = True
            self._begin(self._stream.epoch + 1)
        return index, {}, batch

    def _has_more(self) -> bool:
        return (self._open is not None and self._offset < self._open[1].length) or self._stream.has_more

    def _begin(self, epoch: int) -> None:
        self._stream.restart(epoch)
        self._given = self._offset = 0
        self._open = None

    def _next_open(self) -> bool:
        """Open the next episode that has steps, once the one before is used up."""
        while self._open is None or self._offset >= self._open[1].length:
            raw = self._stream.take()
            if raw is None:
                return False
            found = self._opener.open(raw)
            self._open, self._offset = (None if found is None else (raw, found)), 0
        return True

    def _steps(self, count: int) -> Iterator[dict[Key, Array]]:
        while count and self._next_open():
            assert self._open is not None
            stop = min(self._open[1].length, self._offset + count)
            part = self._open[1].rows(self._offset, stop)
            count -= stop - self._offset
            self._offset = stop
            yield part

    def _taken(self, slices: ArrivalSlices, batch_size: int) -> Iterator[dict[Key, Array]]:
        number, length = slices.of(batch_size)
        for _ in range(number):
            self._offset = 0 if self._open is None else self._open[1].length
            if not self._next_open():
                return
            assert self._open is not None
            yield self._slice(slices, self._open[1], length)
            self._offset = self._open[1].length

    def _slice(self, slices: ArrivalSlices, one: OpenEpisode, length: int) -> dict[Key, Array]:
        if one.length < length and slices.pad is None and slices.strict_length:
            raise SchemaError(
                f"{one.what} has {one.length} steps, and slices have {length}",
                hint="pad=VALUE fills it up, strict_length=False takes it whole",
            )
        taken = min(length, one.length)
        start = self._stream.random(one.length - taken + 1) if self._stream.shuffle else 0
        rows = {key: rows.copy() for key, rows in one.rows(start, start + taken).items()}
        rows[_INIT][0] = True
        rows[NEXT_TRUNCATED][-1] = rows[NEXT_DONE][-1] = True
        if slices.pad is None:
            return rows
        texts = self._opener.text_keys
        rows = {key: _padded(one, length, 0 if key in texts else slices.pad) for key, one in rows.items()}
        return rows | {_MASK: np.arange(length) < taken}

    # State ------------------------------------------------------------------------------------------

    def save_state(self) -> dict[str, Any]:
        """Return the place in the stream."""
        raw = None if self._open is None else self._open[0]
        here = _NOWHERE if raw is None else (raw.shard, raw.place, self._offset)
        return {"stream": torch.tensor([self._identity, self._given, *here, *self._stream.state()])}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue from a place; SchemaError, with nothing changed, for that of another stream."""
        numbers: list[int] = state["stream"].tolist() if set(state) == {"stream"} else []
        if numbers[:1] != [self._identity]:
            raise SchemaError("the state is that of another stream: of other shards, another seed or other slices")
        _, given, shard, place, offset, *rest = numbers
        self.prepare()
        opened = None
        if shard >= 0:
            [raw] = self._stream.fetch([(shard, place)])
            found = self._opener.open(raw)
            opened = None if found is None else (raw, found)
        self._stream.load(rest)
        self._given, self._open, self._offset = given, opened, offset

    def reset(self) -> None:
        """Begin the next pass."""
        self._begin(self._stream.epoch + 1)


def _padded(rows: Array, length: int, value: float) -> Array:
    tail = np.full((length - len(rows), *rows.shape[1:]), value).astype(rows.dtype)
    return np.concatenate((rows, tail))


def _number(text: str) -> int:
    return int(digest_text(text).rpartition(":")[2][:15], 16)


def _joined(parts: Sequence[Mapping[Key, Array]]) -> dict[Key, Array]:
    """Put rows of several episodes one after the other; texts get the width of the longest."""
    found = {}
    for key in parts[0]:
        rows = [part[key] for part in parts]
        if len({one.shape[1:] for one in rows}) > 1:
            width = max(one.shape[-1] for one in rows)
            rows = [np.pad(one, ((0, 0), (0, width - one.shape[-1]))) for one in rows]
        found[key] = np.concatenate(rows)
    return found
