"""Runs of episodes that are in files of their own: the shards of a stream."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from .metadata import EpisodeEntry

SHARD_BYTES = 64 << 20
"""Bytes of files that a run has, unless a file of rows has more."""


def runs_of(entries: Sequence[EpisodeEntry], sizes: Mapping[str, int]) -> Iterator[list[EpisodeEntry]]:
    """Divide episodes, at the ends of files of rows; `sizes` are those of all files, by path."""
    run: list[EpisodeEntry] = []
    files: set[str] = set()
    for entry in entries:
        if run and entry.data != run[-1].data and sum(sizes[path] for path in files) >= SHARD_BYTES:
            yield run
            run, files = [], set()
        run.append(entry)
        files.update(paths_of(entry, sizes))
    yield run


def paths_of(entry: EpisodeEntry, sizes: Mapping[str, int]) -> list[str]:
    """Return the files of an episode that there are."""
    return [path for path in (entry.data, *(place.path for place in entry.videos.values())) if path in sizes]
