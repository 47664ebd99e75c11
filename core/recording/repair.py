"""Repair and continuation of interrupted recordings.

Each finished episode has a record in a log, `COMMITS`, and in a copy of it. A record contains the digests of the
episode's rows. The sound beginning of a recording are the episodes up to the first one whose record or rows are
damaged: `repair` makes a dataset of them, and `continued` appends to them. Rows after the last sound episode are cut.
"""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np

from ..errors import CorruptDataError, DatasetNotFoundError, FormatError, RbtoolError, UsageError, suggests_keywords
from ..format import fs
from ..format.contracts import Array
from ..format.documents import FieldEntry, decode, document_digest, newer_version, parse_json
from ..format.files import FileRecord, digest_file, open_regular, read_regular
from ..format.manifest import HIDDEN, MANIFEST, Manifest, has_manifest
from ..format.memmap.tree import FieldRange, range_of
from ..format.open_files import OpenFiles
from ..format.packed.builder import PackedState
from ..format.packed.reader import PackedReader
from ..format.packed.recording import (
    COMMITS,
    COMMITS_COPY,
    RECORDING,
    RECORDING_VERSION,
    SYNC_SECONDS,
    Commit,
    PackedRecorder,
    Recorded,
    commit_of,
    fields_bytes,
    file_widths,
    is_as_recorded,
    record_digest,
    records_in,
    schema_mark,
    seal,
)
from ..format.packed.schema import EXPLICIT, RECORDS, SCHEMA, PackedSchema, SchemaDocument, StoreState
from ..format.staging import lock_folder, mend
from ..progress import Progress, Silent
from ..results import Result, seconds_since
from ..ted.schema import NEXT, NEXT_DONE, NEXT_TERMINATED, NEXT_TRUNCATED, Field, Key, row_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class RepairResult(Result):
    """The restored dataset at `path`, with `steps` steps in `episodes` episodes.

    Attributes:
        lost_episodes: finished episodes that are damaged, or follow a damaged one.
        cut_bytes: bytes that belong to no valid episode.
        remade: damaged files that could be rebuilt without loss.
        repaired: False if nothing was to be done, and with `dry_run`.
    """

    kind: ClassVar[str] = "repair"
    path: Path
    steps: int
    episodes: int
    lost_episodes: int
    cut_bytes: int
    remade: tuple[str, ...]
    repaired: bool
    dry_run: bool
    content_digest: str | None
    seconds: float


@suggests_keywords()
def repair(
    path: str | os.PathLike[str],
    *,
    yes: bool = False,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> RepairResult:
    """Restore the longest valid prefix of a recording as a dataset.

    Every byte is compared with the digest that was recorded when its episode was finished. The rows of an unfinished
    episode are removed. A recording that is a valid dataset already is left unchanged.

    Args:
        path: the folder of the recording.
        yes: agree to discard finished episodes that are damaged, follow a damaged one, or are missing from the log.
        dry_run: do everything except writing.
        progress: reports the progress. Default: no report.

    Returns:
        The numbers of steps and episodes that were kept, and of those that were discarded.

    Raises:
        DatasetNotFoundError: `path` does not exist.
        FormatError: `path` is not a recording.
        CorruptDataError: episodes would be discarded and `yes` is not set, no episode would be kept, or the contents
            cannot be determined.
        UsageError: another process is recording to this folder.
    """
    started, folder, progress = time.perf_counter(), fs.expanded(path).absolute(), progress or Silent()
    mend(folder)
    if not folder.exists():
        raise DatasetNotFoundError(f"{folder} not found")
    progress.start("looking over", None, "episodes")
    state = examine_recording(folder, progress.advance)
    progress.done()
    require_restorable(folder, state)
    if state.lost and not yes and not dry_run:
        raise CorruptDataError(_loss(folder, state), hint="add --yes to keep these and to discard the rest")
    digest = Manifest.load(folder).content_digest if state.sealed else None
    if not state.sealed and not dry_run:
        digest = repair_recording(folder, state).content_digest
    return RepairResult(
        path=folder,
        steps=state.commits[-1].steps if state.commits else 0,
        episodes=len(state.commits),
        lost_episodes=state.lost,
        cut_bytes=max(0, state.surplus),
        remade=state.damaged,
        repaired=not state.sealed and not dry_run,
        dry_run=dry_run,
        content_digest=digest,
        seconds=seconds_since(started),
    )


def _loss(folder: Path, state: RecordingState) -> str:
    """Return a message that names the episodes that would be discarded, and the reason."""
    least, total = "at least " * state.unlisted, len(state.commits) + state.lost
    reason = (
        f"{COMMITS} was cut, and has no digests of the others"
        if state.unlisted
        else f"{state.missing[0]} is missing"
        if state.missing
        else f"number {len(state.commits) + 1:,} is damaged"
    )
    return (
        f"{folder} has {least}{total:,} finished episode{'s' * (total > 1)}, of which the first {len(state.commits):,} "
        f"can be restored: {reason}"
    )


class CommitsFound(NamedTuple):
    """The combined contents of the log and its copy.

    Attributes:
        commits: the records up to the first one that is damaged in both files.
        promised: the number of complete records in the longer file; an incomplete one at the end does not count.
        mark: identifies the schema; None if there is no record.
        damaged: the files that lack a record of the other file.
    """

    commits: list[Commit]
    promised: int
    mark: int | None
    damaged: tuple[str, ...]


def read_commits(folder: Path) -> CommitsFound:
    """Read the log and its copy, either of which may be missing; take each record from a file in which it is sound."""
    logs = {name: records_in(_bytes(folder / name)) for name in (COMMITS, COMMITS_COPY)}
    promised = max(len(log) for log in logs.values())
    commits: list[Commit] = []
    damaged: set[str] = set()
    mark, steps = 0, 0
    for number in range(promised):
        found = {name: _is_sound(log, number, steps) for name, log in logs.items()}
        if not any(found.values()):
            break
        # The copy may end early: it is only flushed to the disk when the recording ends.
        damaged |= {
            name for name, sound in found.items() if not sound and (name == COMMITS or number < len(logs[name]))
        }
        record = next(logs[name][number] for name, sound in found.items() if sound)
        commits.append(commit_of(record))
        mark, steps = mark or int(record["schema"]), commits[-1].steps
    return CommitsFound(commits, promised, mark or None, tuple(sorted(damaged)))


def log_bytes(commits: list[Commit], schema: PackedSchema) -> bytes:
    """Return the contents of the log, and of its copy, for these episodes."""
    mark = schema_mark(schema)
    return b"".join(commit.to_bytes(number, mark) for number, commit in enumerate(commits))


def _is_sound(log: Array, number: int, steps: int) -> bool:
    """Return whether record `number`, preceded by `steps` steps, is undamaged."""
    if number >= len(log):
        return False
    record = log[number]
    return (int(record["own"]), int(record["number"]), int(record["steps"])) == (
        record_digest(record.tobytes()), number, steps + int(record["length"]),
    )  # fmt: skip


def _bytes(path: Path) -> bytes:
    return read_regular(path) if path.is_file() else b""


class _Recording(NamedTuple):
    """The document `recording.json`, without its version and its digest."""

    fields: tuple[FieldEntry, ...]


class RecordedFields(NamedTuple):
    """The leaves of a recording and their layout; `damaged` is the file, if any, that does not describe them."""

    fields: tuple[Field, ...]
    schema: PackedSchema
    damaged: tuple[str, ...]


def read_fields(folder: Path, mark: int | None) -> RecordedFields:
    """Read the leaves of a recording from `recording.json`, or from `schema.json` if the former is damaged.

    `mark` is the digest of the schema in the log, None if it is not known. FormatError for a folder that is not a
    recording, and for newer versions; CorruptDataError if both files are damaged.
    """
    if not any((folder / name).is_file() for name in (RECORDING, COMMITS, COMMITS_COPY)):
        raise FormatError(
            f"{folder} is not a recording: it has no {RECORDING}",
            hint="a dataset that was converted or downloaded can be made again from its source"
            if (folder / HIDDEN).is_dir()
            else "name the folder of a recording",
        )
    for name, parse in ((RECORDING, _described), (SCHEMA, _laid_out)):
        fields = parse(folder / name)
        if fields is None:
            continue
        schema = PackedSchema.of(fields)
        if mark in {None, schema_mark(schema)}:
            whole = (folder / SCHEMA).is_file() and read_regular(folder / SCHEMA) == schema.to_bytes()
            return RecordedFields(fields, schema, (RECORDING,) if name == SCHEMA else () if whole else (SCHEMA,))
    raise CorruptDataError(
        f"{folder} does not describe its leaves: {RECORDING} and {SCHEMA} are both missing, damaged, or of another "
        "recording"
    )


def _described(path: Path) -> tuple[Field, ...] | None:
    """Return the leaves in `recording.json`; None if the file is damaged."""
    document = _document(path)
    if not isinstance(document, dict) or document.get("digest") != document_digest(document, "digest"):
        return None
    if document.get("version") != RECORDING_VERSION:
        raise newer_version(str(path), document.get("version"), RECORDING_VERSION)
    try:
        fields = decode(_Recording, document, str(path)).fields
    except FormatError:
        return None
    return fields if fields_bytes(fields) == read_regular(path) else None  # the digest ignores white space


def _laid_out(path: Path) -> tuple[Field, ...] | None:
    """Return the leaves in `schema.json`, those under `next` last; None if the file is damaged."""
    try:
        entries = decode(SchemaDocument, _document(path), str(path)).fields
        stored = [Field(entry.key, entry.dtype, entry.shape, entry.role) for entry in entries]
        after = [
            replace(field, key=(NEXT, *field.key))
            for field, entry in zip(stored, entries, strict=True)
            if entry.rows == "record"
        ]
        fields = (*stored, *after)
        return fields if PackedSchema.of(fields).to_bytes() == read_regular(path) else None
    except RbtoolError:
        return None


def _document(path: Path) -> Any:
    try:
        return parse_json(read_regular(path), str(path))
    except (FileNotFoundError, FormatError):
        return None


_CHUNK = 1 << 20
_FLAGS = frozenset({NEXT_DONE, NEXT_TERMINATED, NEXT_TRUNCATED})


def unlisted_episodes(folder: Path, schema: PackedSchema, sizes: Mapping[str, int]) -> int:
    """Count the finished episodes that follow the logged ones, which take `sizes` bytes of the files.

    An episode is written after it has ended, and logged before the next one is written. A crash can therefore leave one
    unlogged episode at the end, which is not counted; more than one means that the log was cut. The end of an episode
    is a step with an end flag, followed by the record of the last state, in which all fields of steps are zero:

        s s s E 0   s s E 0   s s        s: step, E: step with a flag, 0: last state

    Without end flags in the records, episodes cannot be counted.
    """
    path, width = folder / RECORDS, schema.record_bytes
    size = path.stat().st_size if path.is_file() else 0
    ends = list(_ends(path, schema, sizes[RECORDS] // width, size // width))
    if ends and ends[-1] * width == size:
        ends.pop()  # the last episode in the file may be unlogged after a crash
    return len(ends)


def _ends(path: Path, schema: PackedSchema, first: int, stop: int) -> Iterator[int]:
    """Yield the number of the record after each episode among the records `[first, stop)`."""
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
    """Return which records have a byte other than 0 in a field, bool `[records]`."""
    return np.asarray(records[:, offset : offset + size].any(1))


_FROM_A_COPY = "if there is a copy of the folder, restore the damaged files from it"


@dataclass(frozen=True)
class RecordingState:
    """The result of examining a recording: `commits` are the episodes of its sound beginning.

    Attributes:
        lost: the number of finished episodes after the sound beginning.
        unlisted: the first of these is missing in the log and in its copy, although its rows exist or the manifest
            counts it. Otherwise it is damaged.
        surplus: bytes that belong to no sound episode.
        damaged: files that can be rebuilt from another file.
        missing: data files that do not exist although there are rows for them.
        sealed: the folder is a valid dataset as it is.
    """

    fields: tuple[Field, ...]
    schema: PackedSchema
    commits: tuple[Commit, ...]
    lost: int
    unlisted: bool = False
    surplus: int = 0
    damaged: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    sealed: bool = False

    @property
    def sizes(self) -> dict[str, int]:
        """The number of bytes that the sound episodes take in each data file."""
        steps = self.commits[-1].steps if self.commits else 0
        explicit = self.commits[-1].explicit_stop if self.commits else 0
        rows = {"record": steps + len(self.commits), "step": steps, "explicit": explicit}
        return {name: width * rows[kind] for name, (width, kind) in file_widths(self.schema).items()}


def examine_recording(folder: Path, progress: Callable[[int], None] = lambda episodes: None) -> RecordingState:
    """Read a whole recording and find its sound beginning. Nothing is changed.

    `progress` is called with the number of episodes read. FormatError for a folder that is not a recording,
    CorruptDataError if the files that describe its leaves are damaged.
    """
    log = read_commits(folder)
    fields, schema, damaged = read_fields(folder, log.mark)
    widths = file_widths(schema)
    commits: list[Commit] = []
    with OpenFiles.at(folder) as files:
        for number, commit in enumerate(log.commits):
            if not is_as_recorded(files, schema, log.commits, number):
                break
            commits.append(commit)
            progress(1)
    state = RecordingState(fields, schema, tuple(commits), log.promised - len(commits))
    if not state.lost and (unlisted := _unlisted(folder, state)):
        state = replace(state, lost=unlisted, unlisted=True)
    surplus = sum(_size(folder / name) - size for name, size in state.sizes.items() if (folder / name).is_file())
    damaged = tuple(sorted((*damaged, *log.damaged)))
    sealed = not state.lost and not damaged and _is_dataset(folder)
    missing = tuple(_missing(folder, widths, log.commits))
    return replace(state, surplus=surplus, damaged=damaged, missing=missing, sealed=sealed)


def require_restorable(folder: Path, state: RecordingState) -> None:
    """Raise CorruptDataError if there are finished episodes, but none can be restored."""
    if state.commits or not (state.lost or state.missing):
        return
    many = f"{state.lost:,} finished episode{'s' * (state.lost > 1)}"
    many = f"at least {many}" if state.unlisted else many
    what = f"not one of {many} can be restored" if state.lost else "every episode needs it"
    if state.missing:
        hint = f"restore {' and '.join(state.missing)}, for example from a copy"
        raise CorruptDataError(f"{folder / state.missing[0]} is missing: {what}", hint=hint)
    why = f"{COMMITS} and {COMMITS_COPY} do not list them" if state.unlisted else "the first one is damaged"
    raise CorruptDataError(f"{folder}: {what}, because {why}; nothing was changed", hint=_FROM_A_COPY)


def _missing(folder: Path, widths: Mapping[str, tuple[int, str]], commits: Sequence[Commit]) -> Iterator[str]:
    """Yield the missing data files. Files of explicit next rows only count if an episode has such rows."""
    explicit = bool(commits) and commits[-1].explicit_stop > 0
    for name, (_, kind) in widths.items():
        if (kind != "explicit" or explicit) and not (folder / name).is_file():
            yield name


def repair_recording(folder: Path, state: RecordingState) -> Manifest:
    """Cut the files of a recording to its sound episodes, and make a dataset of it.

    If this is interrupted, it can be run again. UsageError if another process is recording to the folder,
    CorruptDataError if no finished episode can be restored. After these errors nothing has changed.
    """
    require_restorable(folder, state)
    lock = lock_folder(folder)
    if lock < 0:
        raise UsageError(f"{folder} is being recorded to by another process", hint="wait until it is done")
    try:
        fs.remove(folder / MANIFEST)  # until the files are complete, the folder must not look like a dataset
        data = restore_files(folder, state)
        manifest = seal(folder, state.fields, state.commits, data, {})
        with PackedReader(folder) as reader:
            ranges = _ranges(reader)
        return seal(folder, state.fields, state.commits, data, ranges) if manifest.steps else manifest
    finally:
        os.close(lock)


def restore_files(folder: Path, state: RecordingState) -> list[FileRecord]:
    """Cut the data files of a locked recording to its sound episodes, and rebuild the others; return the data files."""
    _make(folder / RECORDING, fields_bytes(state.fields))
    _make(folder / SCHEMA, state.schema.to_bytes())
    data = [record for name, size in state.sizes.items() if (record := _cut(folder, name, size))]
    log = log_bytes(list(state.commits), state.schema)
    for name in (COMMITS, COMMITS_COPY):
        _make(folder / name, log)
    return data


def _unlisted(folder: Path, state: RecordingState) -> int:
    """Return a lower bound of the number of finished episodes that are in neither the log nor its copy."""
    found = unlisted_episodes(folder, state.schema, state.sizes)
    try:
        listed = Manifest.load(folder).episodes if has_manifest(folder) else 0
    except (FormatError, OSError):
        listed = 0
    return max(found, listed - len(state.commits))


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0


def _is_dataset(folder: Path) -> bool:
    if not has_manifest(folder):
        return False
    try:
        with PackedReader(folder) as reader:
            reader.verify_files()
    except (ValueError, OSError):
        return False
    return True


def _make(path: Path, data: bytes) -> None:
    """Replace a small file atomically, unless it has these contents already."""
    if not path.is_file() or read_regular(path) != data:
        fs.replace_file(path, data)


def _cut(folder: Path, name: str, size: int) -> FileRecord | None:
    """Cut a file to its size; return its record for the manifest. A file that no episode needs is removed."""
    path = folder / name
    if not size and "explicit" in name:
        fs.remove(path)
        return None
    descriptor = fs.open_to_fill(path)
    try:
        if os.fstat(descriptor).st_size != size:
            fs.truncate(descriptor, size, path)
        fs.fsync(descriptor, path)
    finally:
        os.close(descriptor)
    return FileRecord(name, size, digest_file(path))


def _ranges(reader: PackedReader) -> dict[Key, FieldRange]:
    found: dict[Key, FieldRange] = {}
    for start, stop in reader.chunks(4 << 20):
        for field in reader.fields:
            found[field.key] = range_of(reader.read(field.key, start, stop), field, found.get(field.key))
    return found


_CHUNK_BYTES = 4 << 20


def continued(folder: Path, *, sync_seconds: float = SYNC_SECONDS) -> PackedRecorder:
    """Open an interrupted recording to append episodes. Rows of an unfinished episode are removed.

    UsageError if the recording is a finished dataset, or if another process is recording to it; CorruptDataError if a
    finished episode is damaged; FormatError for a folder that is not a recording.
    """
    if has_manifest(folder):
        raise UsageError(
            f"{folder} is a finished dataset, and no episodes can be added to it",
            hint="record to another folder, and join the two with: rbtool merge",
        )
    lock = lock_folder(folder)
    if lock < 0 and folder.exists():
        raise UsageError(f"{folder} is being recorded to by another process", hint="wait until it is done")
    try:
        state = examine_recording(folder)
        if state.lost or state.missing:
            raise CorruptDataError(
                f"{folder} has finished episodes that are damaged: it cannot be continued",
                hint=f"see which episodes can be restored: rbtool repair {shlex.quote(str(folder))} --dry-run",
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
    """Return the state from which the builder of rows continues."""
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
    """Compute the ranges of the values that were recorded before."""
    rows = max(1, _CHUNK_BYTES // max(1, row_bytes(recorder.fields)))
    for start in range(0, recorder.steps, rows):
        for field in recorder.fields:
            values, known = recorder.read(field.key, start, min(start + rows, recorder.steps)), recorder.rows.ranges
            known[field.key] = range_of(values, field, known[field.key])
