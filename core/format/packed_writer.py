"""Writes the rows of a dataset again, in either layout."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from ..errors import SchemaError
from ..ted import Field, Key
from .builder import DatasetBuilder, Origin, RowBuilder
from .codecs import Codec
from .contracts import StepReader
from .manifest import Layout, Manifest
from .packed_builder import PackedBuilder
from .record_numbers import RecordNumbers
from .returns import table_with_returns

__all__ = ["row_builder", "write_dataset"]

_CHUNK_BYTES = 4 << 20


def row_builder(
    folder: Path, fields: tuple[Field, ...], layout: Layout, codecs: Mapping[Key, Codec] | None = None
) -> RowBuilder:
    """Make what builds a dataset of that layout in a new folder; SchemaError for the layouts of checkpoints."""
    if layout == "packed":
        return PackedBuilder(folder, fields, codecs)
    if layout != "ted":
        raise SchemaError(f"datasets have the layout ted or packed, found {layout!r}")
    return DatasetBuilder(folder, fields)


def write_dataset(
    source: StepReader,
    folder: Path,
    layout: Layout,
    origin: Origin,
    codecs: Mapping[Key, Codec] | None = None,
    progress: Callable[[int], None] = lambda steps: None,
) -> Manifest:
    """Write all rows of `source`, its episodes and their text to a new folder; memory is bounded by a few chunks.

    `progress` hears of the steps done. CorruptDataError where the episode table of the source does not lay its
    episodes one after the other.
    """
    # a checkpoint has to give the table that it was saved with, whatever that says
    table = source.episodes if source.manifest.kind == "checkpoint" else table_with_returns(source)
    steps = source.manifest.steps
    RecordNumbers(table, steps, str(source.path))
    ends = table.start + table.length - 1
    with row_builder(folder, source.fields, layout, codecs) as builder:
        for start, stop in source.chunks(_CHUNK_BYTES):
            last = np.zeros(stop - start, bool)
            low, high = np.searchsorted(ends, (start, stop))
            last[ends[low:high] - start] = True
            builder.append({field.key: source.read(field.key, start, stop) for field in source.fields}, last)
            progress(stop - start)
        return builder.finish(table, origin, source.episode_text)
