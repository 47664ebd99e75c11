"""Continues a recording that was cut short, or closed before it was made a dataset."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

from ...errors import CorruptDataError, UsageError
from ...ted.schema import row_bytes
from ..digest import FileRecord
from ..manifest import has_manifest
from ..staging import lock_folder
from ..ted.tree import merge_ranges, range_of
from .builder import PackedState
from .recording import SYNC_SECONDS, PackedRecorder, Recorded
from .repair import RecordingState, examine_recording, restore_files
from .row_files import StoreState
from .schema import EXPLICIT, RECORDS

_CHUNK_BYTES = 4 << 20


def continued(folder: Path, *, sync_seconds: float = SYNC_SECONDS) -> PackedRecorder:
    """Open a recording to add episodes; what belongs to no finished episode is cut.

    UsageError for a recording that is a dataset already, or that another process records to; CorruptDataError where a
    finished episode is damaged, FormatError for a folder that nothing was recorded in.
    """
    if has_manifest(folder):
        raise UsageError(
            f"{folder} is a finished dataset, to which no episodes are added",
            hint="record to another folder and join both with: rbtool merge",
        )
    lock = lock_folder(folder)
    if lock < 0 and folder.exists():
        raise UsageError(f"{folder} is being recorded to by another process", hint="wait until it is done")
    try:
        state = examine_recording(folder)
        if state.lost or state.missing:
            raise CorruptDataError(
                f"{folder} has finished episodes that are damaged: it cannot be continued",
                hint=f"see what can be kept: rbtool repair {shlex.quote(str(folder))} --dry-run",
            )
        files = {record.path: record for record in restore_files(folder, state)}
        recorded = Recorded(_stores(state, files), list(state.commits))
        recorder = PackedRecorder(folder, state.fields, sync_seconds=sync_seconds, resumed=recorded, lock=lock)
    except BaseException:
        if lock >= 0:
            os.close(lock)
        raise
    _find_ranges(recorder)
    return recorder


def _stores(state: RecordingState, files: dict[str, FileRecord]) -> PackedState:
    """Return what the builder of rows continues from."""
    schema, sizes = state.schema, state.sizes

    def store(name: str, width: int) -> StoreState:
        return StoreState(sizes[name] // width, (files[name],))

    plain = [store(RECORDS, schema.record_bytes)]
    plain += [store(one.file(), one.field.row_bytes) for one in schema.own_files]
    explicit: list[StoreState] = []
    if EXPLICIT in files:
        explicit = [store(EXPLICIT, schema.record_bytes)]
        explicit += [store(one.file(explicit=True), one.field.row_bytes) for one in schema.own_files if one.state]
    commits = state.commits
    lengths, starts = [commit.row.length for commit in commits], [commit.explicit_start for commit in commits]
    return PackedState(tuple(plain), tuple(explicit), {}, lengths, starts)


def _find_ranges(recorder: PackedRecorder) -> None:
    """Find the ranges of the values that are there."""
    rows = max(1, _CHUNK_BYTES // max(1, row_bytes(recorder.fields)))
    for start in range(0, recorder.steps, rows):
        for field in recorder.fields:
            found = range_of(recorder.read(field.key, start, min(start + rows, recorder.steps)), field)
            recorder.rows.ranges[field.key] = merge_ranges(recorder.rows.ranges[field.key], found)
