"""Datasets of any fields, written from arrays."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from rbtool.core.format.contracts import Piece
from rbtool.core.format.manifest import Request
from rbtool.core.format.memmap.builder import DatasetBuilder, Origin, provenance_step
from rbtool.core.format.returns import Ingest
from rbtool.core.ted.schema import REWARD, Field, dtype_name, role_of, ted_fields

__all__ = ["write_fields"]


def write_fields(folder: Path, *episodes: Mapping[str, np.ndarray]) -> Path:
    """Write episodes by the dotted names of their fields, those of `state` T + 1 rows long; rewards count steps."""
    steps = [len(one["reward"]) for one in episodes]
    first = {tuple(name.split(".")): rows for name, rows in episodes[0].items()}
    fields = [
        (
            Field(key, dtype_name(rows.dtype), () if key == REWARD else rows.shape[1:], role_of(key)),
            "result" if key == REWARD else "state" if len(rows) > steps[0] else "step",
        )
        for key, rows in first.items()
    ]
    with DatasetBuilder(folder, ted_fields(fields)) as builder:
        ingest = Ingest(builder, fields)
        for number, (one, count) in enumerate(zip(episodes, steps, strict=True)):
            columns = {tuple(name.split(".")): rows for name, rows in one.items()}
            ended = np.arange(count) == count - 1
            ingest.add(Piece(number, columns, ended, ended & False, first=True, last=True, seed=None, text={}))
        origin = Origin(Request("made", "made", "made/v0"), (provenance_step("made", {}, {}),), spaces={}, documents={})
        builder.finish(ingest.table, origin, ingest.text)
    return folder
