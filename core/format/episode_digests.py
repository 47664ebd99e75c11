"""Digests of the content of single episodes, by which episodes of any dataset and layout are compared."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
import xxhash

from ..ted.schema import EPISODE, Key
from .contracts import Array, StepReader
from .files import bytes_of
from .returns import sum_rewards


def content_keys(reader: StepReader) -> list[Key]:
    """The fields that make up what an episode holds: all but its number, in the order of their names."""
    return sorted(field.key for field in reader.fields if field.key != EPISODE)


def episode_digests(
    reader: StepReader,
    keys: Sequence[Key],
    wanted: Array | None = None,
    progress: Callable[[int], None] = lambda steps: None,
) -> list[bytes]:
    """Return a digest of the rows of each episode in these fields, in table order; equal bytes have equal digests.

    Only for the episodes marked in `wanted`, bool `[episodes]`, where it is given; the others have b"". Memory is
    bounded by a chunk; `progress` receives the steps read.
    """
    table = reader.episodes
    chosen = np.ones(len(table), bool) if wanted is None else wanted
    stops = table.start + table.length
    found = [b""] * len(table)
    under_way: dict[Key, xxhash.xxh3_128] = {}
    for start, stop in reader.chunks():
        first, last = table.index_of_step(np.array([start, stop - 1])).tolist()
        rows = [row for row in range(first, last + 1) if chosen[row]]
        if rows:
            columns = {key: bytes_of(reader.view(key, start, stop)) for key in keys}
        for row in rows:
            low, high = max(start, int(table.start[row])), min(stop, int(stops[row]))
            if low == table.start[row]:
                under_way = {key: xxhash.xxh3_128() for key in keys}
            for key, hasher in under_way.items():
                width = len(columns[key]) // (stop - start)
                hasher.update(columns[key][(low - start) * width : (high - start) * width])
            if high == stops[row]:
                found[row] = b"".join(hasher.digest() for hasher in under_way.values())
        progress(stop - start)
    return found


def identical_episodes(reader: StepReader, progress: Callable[[int], None] = lambda steps: None) -> Array:
    """Return the class of each episode, int64 `[episodes]`: equal where all rows but the number are byte-identical.

    Episodes whose length and sum of rewards occur once are not read further.
    """
    table = reader.episodes
    totals = sum_rewards(reader, table.start, table.length).view(np.int64)
    shapes = list(zip(table.length.tolist(), totals.tolist(), strict=True))
    counts = Counter(shapes)
    wanted = np.array([counts[shape] > 1 for shape in shapes], bool)
    digests = [b""] * len(table)
    if wanted.any():
        digests = episode_digests(reader, content_keys(reader), wanted, progress)
    else:
        progress(table.steps)  # none of them needs to be read
    names: dict[object, int] = {}
    keys = zip(shapes, digests, strict=True)
    return np.array([names.setdefault(key, len(names)) for key in keys], np.int64).reshape(len(table))
