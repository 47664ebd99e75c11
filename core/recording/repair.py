"""`repair`: restore the longest sound beginning of a recording that was cut short; and continue recordings."""

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
    """The restored dataset at `path`: `steps` in `episodes`.

    `lost_episodes` were finished and are damaged, or follow a damaged one; `cut_bytes` belong to no valid episode. The
    files `remade` were damaged and could be rebuilt without loss. `repaired` is False if there was nothing to do or
    with `dry_run`.
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

    Every byte is compared with the digest that was recorded when its episode was finished. The unfinished episode is
    cut. A recording that is a valid dataset already is left as it is.

    Args:
        path: the folder of the recording.
        yes: discard finished episodes that are damaged, follow a damaged one, or are missing from the log.
        dry_run: do everything but writing.
        progress: shows how far it is; default: nothing is shown.

    Returns:
        What was kept and what was discarded.

    Raises:
        DatasetNotFoundError: nothing is at `path`.
        FormatError: it is not a recording.
        CorruptDataError: episodes would be discarded without `yes`, none would be kept, or the contents cannot be
            determined.
        UsageError: another process records there.
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
        raise CorruptDataError(_loss(folder, state), hint="add --yes to keep what can be, and to give up the rest")
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
        f"{COMMITS} was cut, and nothing is left to compare the others with"
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
    """The combined content of log and copy.

    `commits` is their longest sound beginning. `promised` counts the complete records of the longer one; a torn record
    at the end promised nothing. `mark` identifies the schema, None if no record has it. `damaged` lists the files that
    lack a record which the other one has.
    """

    commits: list[Commit]
    promised: int
    mark: int | None
    damaged: tuple[str, ...]


def read_commits(folder: Path) -> CommitsFound:
    """Read log and copy, each of which may be missing, record by record from whichever has it sound."""
    logs = {name: records_in(_bytes(folder / name)) for name in (COMMITS, COMMITS_COPY)}
    promised = max(len(log) for log in logs.values())
    commits: list[Commit] = []
    damaged: set[str] = set()
    mark, steps = 0, 0
    for number in range(promised):
        found = {name: _is_sound(log, number, steps) for name, log in logs.items()}
        if not any(found.values()):
            break
        # The copy may end early: the system writes it when it likes to.
        damaged |= {
            name for name, sound in found.items() if not sound and (name == COMMITS or number < len(logs[name]))
        }
        record = next(logs[name][number] for name, sound in found.items() if sound)
        commits.append(commit_of(record))
        mark, steps = mark or int(record["schema"]), commits[-1].steps
    return CommitsFound(commits, promised, mark or None, tuple(sorted(damaged)))


def log_bytes(commits: list[Commit], schema: PackedSchema) -> bytes:
    """The log, and the copy, of these episodes."""
    mark = schema_mark(schema)
    return b"".join(commit.to_bytes(number, mark) for number, commit in enumerate(commits))


def _is_sound(log: Array, number: int, steps: int) -> bool:
    """Return whether record `number`, preceded by `steps` steps, is as it was written."""
    if number >= len(log):
        return False
    record = log[number]
    return (int(record["own"]), int(record["number"]), int(record["steps"])) == (
        record_digest(record.tobytes()), number, steps + int(record["length"]),
    )  # fmt: skip


def _bytes(path: Path) -> bytes:
    return read_regular(path) if path.is_file() else b""


class _Recording(NamedTuple):
    """The document `recording.json`, but for its version and its digest."""

    fields: tuple[FieldEntry, ...]


class RecordedFields(NamedTuple):
    """The leaves of a recording and their layout; `damaged` is the file, if any, that does not describe it."""

    fields: tuple[Field, ...]
    schema: PackedSchema
    damaged: tuple[str, ...]


def read_fields(folder: Path, mark: int | None) -> RecordedFields:
    """Read what is recorded in a folder from `recording.json`, or, where that is damaged, from `schema.json`.

    `mark` is what the log states about the schema, None where it does not. FormatError for a folder that nothing was
    recorded in, and for newer versions; CorruptDataError where neither file is whole.
    """
    if not any((folder / name).is_file() for name in (RECORDING, COMMITS, COMMITS_COPY)):
        raise FormatError(
            f"{folder} is not a recording: it has no {RECORDING}",
            hint="what was converted or downloaded is made again from its source"
            if (folder / HIDDEN).is_dir()
            else "name the folder that episodes were recorded in",
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
        f"{folder} does not say what was recorded: {RECORDING} and {SCHEMA} are both missing, damaged, or of another "
        "recording"
    )


def _described(path: Path) -> tuple[Field, ...] | None:
    """The leaves that `recording.json` names; None where it is not as it was written."""
    document = _document(path)
    if not isinstance(document, dict) or document.get("digest") != document_digest(document, "digest"):
        return None
    if document.get("version") != RECORDING_VERSION:
        raise newer_version(str(path), document.get("version"), RECORDING_VERSION)
    try:
        fields = decode(_Recording, document, str(path)).fields
    except FormatError:
        return None
    return fields if fields_bytes(fields) == read_regular(path) else None  # a digest sees through white space


def _laid_out(path: Path) -> tuple[Field, ...] | None:
    """The leaves that `schema.json` has a place for, those under `next` last; None where it contradicts itself."""
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
    """Count the finished episodes after the logged ones, which take `sizes` bytes of the files.

    An episode is written when it has ended, and logged before the next one is written. A crash can thus leave one
    unlogged episode, which is not counted. An end is a step with a flag, followed by the record of the last state,
    whose step fields are zero; nothing is known about rows without flags.
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


_FROM_A_COPY = "if there is a copy of the folder, take what is damaged from there"


@dataclass(frozen=True)
class RecordingState:
    """What is in a recording: the episodes of its longest sound beginning, and what else was found.

    Attributes:
        lost: finished episodes after that. The first of them is damaged, or, with `unlisted`, neither log nor copy
            lists it, although its rows exist or the manifest refers to it.
        surplus: bytes that belong to no sound episode.
        damaged: files that can be restored from an undamaged twin.
        missing: data files that do not exist although there are rows for them.
        sealed: the folder is a sound dataset as it is.
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
        """Bytes of each data file that the sound episodes take."""
        steps = self.commits[-1].steps if self.commits else 0
        explicit = self.commits[-1].explicit_stop if self.commits else 0
        rows = {"record": steps + len(self.commits), "step": steps, "explicit": explicit}
        return {name: width * rows[kind] for name, (width, kind) in file_widths(self.schema).items()}


def examine_recording(folder: Path, progress: Callable[[int], None] = lambda episodes: None) -> RecordingState:
    """Read all of a recording and find its longest sound beginning; changes nothing.

    `progress` receives the episodes read. FormatError for a folder that nothing was recorded in, CorruptDataError
    where it is not known any more what was recorded.
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
    """Raise CorruptDataError where repairing would keep no episode of those that were finished."""
    if state.commits or not (state.lost or state.missing):
        return
    many = f"{state.lost:,} finished episode{'s' * (state.lost > 1)}"
    many = f"at least {many}" if state.unlisted else many
    what = f"not one of {many} can be restored" if state.lost else "every episode needs it"
    if state.missing:
        hint = f"bring {' and '.join(state.missing)} back, from a copy for example"
        raise CorruptDataError(f"{folder / state.missing[0]} is missing: {what}", hint=hint)
    why = f"{COMMITS} and {COMMITS_COPY} do not name them" if state.unlisted else "the first one is damaged"
    raise CorruptDataError(f"{folder}: {what}, because {why}; nothing was changed", hint=_FROM_A_COPY)


def _missing(folder: Path, widths: Mapping[str, tuple[int, str]], commits: Sequence[Commit]) -> Iterator[str]:
    """Return the missing data files; files of explicit next rows only if an episode has some."""
    explicit = bool(commits) and commits[-1].explicit_stop > 0
    for name, (_, kind) in widths.items():
        if (kind != "explicit" or explicit) and not (folder / name).is_file():
            yield name


def repair_recording(folder: Path, state: RecordingState) -> Manifest:
    """Cut the files of a recording to the episodes that were found sound, and make a dataset of it.

    Cut short itself, it can be run again. UsageError while another process is recording there, CorruptDataError, and
    nothing changes, where no episode of those that were finished would be kept.
    """
    require_restorable(folder, state)
    lock = lock_folder(folder)
    if lock < 0:
        raise UsageError(f"{folder} is being recorded to by another process", hint="wait until it is done")
    try:
        fs.remove(folder / MANIFEST)  # no dataset from here on, until it is whole again
        data = restore_files(folder, state)
        manifest = seal(folder, state.fields, state.commits, data, {})
        with PackedReader(folder) as reader:
            ranges = _ranges(reader)
        return seal(folder, state.fields, state.commits, data, ranges) if manifest.steps else manifest
    finally:
        os.close(lock)


def restore_files(folder: Path, state: RecordingState) -> list[FileRecord]:
    """Cut the data files of a locked recording to its sound episodes, remake the other files; list the data files."""
    _make(folder / RECORDING, fields_bytes(state.fields))
    _make(folder / SCHEMA, state.schema.to_bytes())
    data = [record for name, size in state.sizes.items() if (record := _cut(folder, name, size))]
    log = log_bytes(list(state.commits), state.schema)
    for name in (COMMITS, COMMITS_COPY):
        _make(folder / name, log)
    return data


def _unlisted(folder: Path, state: RecordingState) -> int:
    """Count finished episodes, at least, that neither log nor copy names."""
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
    """Give a small file these bytes, unless it has them: there is the old one or the new one at any instant."""
    if not path.is_file() or read_regular(path) != data:
        fs.replace_file(path, data)


def _cut(folder: Path, name: str, size: int) -> FileRecord | None:
    """Cut a file; return it as a manifest lists it. One that no episode needs goes."""
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
    """Compute the ranges of the present values."""
    rows = max(1, _CHUNK_BYTES // max(1, row_bytes(recorder.fields)))
    for start in range(0, recorder.steps, rows):
        for field in recorder.fields:
            values, known = recorder.read(field.key, start, min(start + rows, recorder.steps)), recorder.rows.ranges
            known[field.key] = range_of(values, field, known[field.key])
