"""Episodes of shards that are read one after the other: in order or shuffled, and continued from a state exactly."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from ...errors import CorruptDataError


@dataclass(frozen=True, slots=True)
class RawEpisode:
    """The bytes of an episode; `place` is its number in the shard."""

    shard: int
    place: int
    name: str
    data: bytes


class EpisodeSource(Protocol):
    """Where shards are read from; `identity` is a text that other shards do not have."""

    identity: str
    count: int

    def episodes(self, shard: int, start: int) -> Iterator[RawEpisode]:
        """Yield the episodes of a shard from the one in place `start` on."""


class _Mark(NamedTuple):
    epoch: int
    taken: int
    place: int
    following: int
    held: tuple[RawEpisode, ...]


class EpisodeStream:
    """Yields all episodes of shards, pass after pass, in their order or shuffled.

    A shuffled pass reads the shards in a random order, and draws each episode from a window of as many as `window`
    and `window_bytes` allow. Random numbers depend on seed, pass and place alone, so that a state is a few numbers:
    the places of the episodes in the window. To continue, their shards are read again.
    """

    def __init__(
        self, shards: EpisodeSource, *, shuffle: bool, seed: int, window: int = 64, window_bytes: int = 256 << 20
    ) -> None:
        self.shards, self.shuffle, self.seed = shards, shuffle, seed
        self._window, self._window_bytes = (window, window_bytes) if shuffle else (1, 1)
        self.restart(0)

    def restart(self, epoch: int) -> None:
        """Begin a pass."""
        self.epoch, self.taken = epoch, 0
        self._place = self._next = 0
        self._held: list[RawEpisode] = []
        self._reading: Iterator[RawEpisode] | None = None
        order = np.arange(self.shards.count)
        self._order = self._random(0, 0).permutation(order) if self.shuffle else order

    def random(self, below: int) -> int:
        """Draw a number below `below` for the episode that was taken last; the same for the same state."""
        return int(self._random(1, self.taken).integers(below))

    def _random(self, purpose: int, number: int) -> np.random.Generator:
        return np.random.default_rng((self.seed, self.epoch, purpose, number))

    @property
    def has_more(self) -> bool:
        """Whether the pass has more episodes; may read one."""
        self._fill()
        return bool(self._held)

    def take(self) -> RawEpisode | None:
        """Return the next episode; None at the end of the pass."""
        self._fill()
        if not self._held:
            return None
        at = int(self._random(2, self.taken).integers(len(self._held)))
        self._held[at], self._held[-1] = self._held[-1], self._held[at]
        self.taken += 1
        return self._held.pop()

    def _fill(self) -> None:
        size = sum(len(one.data) for one in self._held)
        while len(self._held) < self._window and (size < self._window_bytes or not self._held):
            found = self._read()
            if found is None:
                return
            self._held.append(found)
            size += len(found.data)

    def _read(self) -> RawEpisode | None:
        while self._place < len(self._order):
            if self._reading is None:
                self._reading = iter(self.shards.episodes(int(self._order[self._place]), self._next))
            reading, self._reading = self._reading, None  # one that fails is opened again
            found = next(reading, None)
            if found is not None:
                self._reading, self._next = reading, found.place + 1
                return found
            self._place, self._next = self._place + 1, 0
        return None

    def mark(self) -> _Mark:
        """Return where the stream is, for `go_back` in this process."""
        return _Mark(self.epoch, self.taken, self._place, self._next, tuple(self._held))

    def go_back(self, mark: _Mark) -> None:
        """Continue from where the stream was; nothing is read again but the shard that comes next."""
        self.restart(mark.epoch)
        self.taken, self._place, self._next, self._held = mark.taken, mark.place, mark.following, [*mark.held]

    def state(self) -> list[int]:
        """Return where the stream is, as numbers."""
        held = [number for one in self._held for number in (one.shard, one.place)]
        return [self.epoch, self.taken, self._place, self._next, *held]

    def load(self, state: Sequence[int]) -> None:
        """Continue from a state; the episodes of its window are read again."""
        epoch, taken, place, following, *held = state
        wanted = list(zip(held[::2], held[1::2], strict=True))
        found = {(one.shard, one.place): one for one in self.fetch(wanted)}
        self.go_back(_Mark(epoch, taken, place, following, tuple(found[one] for one in wanted)))

    def fetch(self, wanted: Sequence[tuple[int, int]]) -> Iterator[RawEpisode]:
        """Read the episodes in these places of shards; CorruptDataError for one that is not there."""
        for shard in sorted({shard for shard, _ in wanted}):
            places = {place for one, place in wanted if one == shard}
            for one in self.shards.episodes(shard, min(places)):
                if one.place in places:
                    places.remove(one.place)
                    yield one
                if not places:
                    break
            if places:
                raise CorruptDataError(f"shard {shard} has no episode in place {min(places)} any more")
