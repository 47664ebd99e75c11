"""Finds finished episodes in the records of a recording that its log does not name, because it was cut."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from ..ted import NEXT_DONE, NEXT_TERMINATED, NEXT_TRUNCATED
from .contracts import Array
from .packed_schema import RECORDS, PackedSchema
from .regular import open_regular

__all__ = ["unlisted_episodes"]

_CHUNK = 1 << 20
_FLAGS = frozenset({NEXT_DONE, NEXT_TERMINATED, NEXT_TRUNCATED})


def unlisted_episodes(folder: Path, schema: PackedSchema, sizes: Mapping[str, int]) -> int:
    """Count the finished episodes behind those that the log names, which take `sizes` bytes of the files.

    An episode is written when it has ended and named before the next one is written: a crash leaves one behind the
    named ones, and that is not counted. An end is a step with a flag and behind it the record of the last state, whose
    fields of steps are zero; of rows without flags nothing is known.
    """
    path, width = folder / RECORDS, schema.record_bytes
    size = path.stat().st_size if path.is_file() else 0
    ends = list(_ends(path, schema, sizes[RECORDS] // width, size // width))
    if ends and ends[-1] * width == size:
        ends.pop()  # nothing comes after it, so it may be the one under way
    return len(ends)


def _ends(path: Path, schema: PackedSchema, first: int, stop: int) -> Iterator[int]:
    """Yield the number of the record behind each episode among the records `[first, stop)`."""
    steps = [one for one in schema.in_records if not one.state]
    flags = [one for one in steps if one.field.key in _FLAGS and one.field.dtype == "bool"]
    if not flags or stop <= first:
        return
    width, chunk = schema.record_bytes, max(1, _CHUNK // schema.record_bytes)
    flagged_before = False
    with os.fdopen(open_regular(path), "rb") as file:
        file.seek(first * width)
        for start in range(first, stop, chunk):
            data = file.read(min(chunk, stop - start) * width)
            records = np.frombuffer(data, np.uint8).reshape(-1, width)
            empty = ~np.any([_nonzero(records, one.offset or 0, one.field.row_bytes) for one in steps], axis=0)
            flagged = np.any([_nonzero(records, one.offset or 0, one.field.row_bytes) for one in flags], axis=0)
            before = np.append(flagged_before, flagged[:-1])
            yield from (start + np.flatnonzero(empty & before) + 1).tolist()
            flagged_before = bool(flagged[-1])


def _nonzero(records: Array, offset: int, size: int) -> Array:
    """Mark the records that have a bit set in some of their bytes."""
    return np.asarray(records[:, offset : offset + size].any(1))
