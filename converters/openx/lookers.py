"""Looks into the episodes of shards in their order: several at a time, each unpickled by a process of its own."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from queue import SimpleQueue
from typing import TypeAlias

from ...core.errors import FormatError
from ...core.format.contracts import Closing
from ..files.archives import ArchiveMember
from .rows import EpisodeUnpickler, load_episode
from .shards import EpisodeArchive, EpisodeArchives, is_episode
from .survey import Look, look_into

_AHEAD = 3
"""Episodes for each thread that are looked into before their turn comes."""
FoundLook: TypeAlias = tuple[ArchiveMember, Callable[[], Look]]


class EpisodeLookers(Closing):
    """`workers` threads, each with its own archives and its own process that unpickles; without, this thread alone.

    While a process unpickles, this one looks into an episode of another. `skipped` counts the files that are none.
    `first` is one of the processes, and stays open: it takes longer to start than to unpickle most episodes.
    """

    def __init__(
        self, shards: Sequence[EpisodeArchive], workers: int, *, images: bool, first: EpisodeUnpickler
    ) -> None:
        self.skipped = 0
        self._images = images
        self._shards = EpisodeArchives(shards)
        self._own = [EpisodeUnpickler() for _ in range(workers - 1)]
        self._all = [(EpisodeArchives(shards), unpickler) for unpickler in (first, *self._own)]
        self._free: SimpleQueue[tuple[EpisodeArchives, EpisodeUnpickler]] = SimpleQueue()
        for one in self._all:
            self._free.put(one)
        self._pool = ThreadPoolExecutor(workers, "look") if workers > 1 else None

    def looks(self, place: int) -> Iterator[FoundLook]:
        """Yield the members of a shard that are episodes, each with a function that returns the look or raises.

        Raises, after them, what `Archive.members` does.
        """
        waiting: deque[tuple[ArchiveMember, Future[Look]]] = deque()
        wrong: FormatError | None = None
        members = self._episodes(place)
        try:
            while True:
                try:
                    member = next(members, None)
                except FormatError as error:  # those before it come first
                    member, wrong = None, error
                if member is None:
                    break
                if self._pool is None:
                    yield member, lambda member=member: self._look(place, member)  # type: ignore[misc]
                    continue
                waiting.append((member, self._pool.submit(self._look, place, member)))
                if len(waiting) > _AHEAD * len(self._all):
                    first, look = waiting.popleft()
                    yield first, look.result
            while waiting:
                first, look = waiting.popleft()
                yield first, look.result
        finally:
            for _, look in waiting:
                look.cancel()
        if wrong is not None:
            raise wrong

    def _episodes(self, place: int) -> Iterator[ArchiveMember]:
        for member in self._shards.members(place):
            if is_episode(member):
                yield member
            else:
                self.skipped += 1

    def _look(self, place: int, member: ArchiveMember) -> Look:
        archives, unpickler = one = self._free.get()
        try:
            episode = load_episode(unpickler, archives.archive(place), member)
            with unpickler.explained(episode.what):
                return look_into(episode, member, images=self._images)
        finally:
            self._free.put(one)

    def close(self) -> None:
        """Wait for the looks that are under way, and end all processes but the first."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
        self._shards.close()
        for archives, _ in self._all:
            archives.close()
        for unpickler in self._own:
            unpickler.close()
