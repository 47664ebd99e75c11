"""Records episodes, as they are finished, into a folder that becomes a dataset in layout `packed`.

The log of a recording has one small record for each episode, which is appended after all rows of the episode:

    records.bin      | rows of episode 0 | rows of episode 1 | rows of epi        interrupted here
    commits.bin      | record 0          | record 1          |
    record           number, length, return, flags, where its rows end, digest of its rows, own digest

Whatever stops the recording, the longest sound beginning of the log lists the complete episodes. After a power failure
the disk may have a record but not its rows, which then differ from the digest. A copy of the log is written after it,
so that damage to one of the two loses nothing. A document states the origin of the episodes, for the process that
turns the recording into a dataset.
"""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import shlex
import struct
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Self

import numpy as np
import xxhash

from ...errors import CorruptDataError, FormatError, SchemaError, UsageError
from ...ted.episodes import EndReason, end_reason
from ...ted.schema import NEXT_TERMINATED, NEXT_TRUNCATED, Field, Key, field_named, key_name
from .. import fs
from ..contracts import Array
from ..documents import Check, decode, document_digest, json_file, load_json
from ..episodes import EPISODES, EpisodeRow, EpisodeTable
from ..files import FileRecord, Hasher, digest_bytes
from ..manifest import HIDDEN, MANIFEST, SOURCE_DOCUMENTS, Dropped, Manifest, Request, is_space
from ..memmap.builder import Origin, provenance_step, write_manifest
from ..memmap.tree import FieldRange, record_file
from ..open_files import OpenFiles
from ..returns import episode_return
from ..staging import lock_folder
from .builder import PackedRowBuilder, PackedState
from .schema import EXPLICIT, RECORDS, SCHEMA, AppendedFile, PackedSchema, RecordNumbers

ORIGIN = f"{SOURCE_DOCUMENTS}recorded.json"
"""The document with the `RecordedOrigin`; as metadata it is not part of the content digest."""
SOURCE = "recording"

_Space = Annotated[Any, Check("the document of a space", is_space)]


@dataclass(frozen=True, slots=True)
class RecordedOrigin:
    """The origin of a recording for its manifest: the environment's id (`asked`), its spaces, renamed and dropped keys.

    `arguments` go to the provenance, for example the environment's spec and the first seed.
    """

    asked: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    spaces: Mapping[str, _Space] = field(default_factory=dict)
    renamed_keys: Mapping[str, str] = field(default_factory=dict)
    dropped_keys: tuple[Dropped, ...] = ()
    notes: tuple[str, ...] = ()

    def save(self, folder: Path) -> None:
        """Write the document atomically."""
        document: dict[str, Any] = {name: getattr(self, name) for name in self.__slots__}
        document["dropped_keys"] = [{"key": one.key, "why": one.why} for one in self.dropped_keys]
        document["digest"] = document_digest(document, "digest")
        fs.make_folder((folder / ORIGIN).parent)
        fs.replace_file(folder / ORIGIN, json_file(document))

    @classmethod
    def load(cls, folder: Path) -> RecordedOrigin:
        """Read the document of a recording; FormatError for one that was changed, FileNotFoundError for none."""
        document = load_json(folder / ORIGIN)
        if not isinstance(document, dict) or document.get("digest") != document_digest(document, "digest"):
            raise FormatError(f"{folder / ORIGIN} was changed after it was written: its digest does not match")
        return decode(cls, document, str(folder / ORIGIN))


def origin_of(folder: Path) -> Origin:
    """Return the origin of the episodes recorded in a folder; if its document is damaged, a note says so."""
    request = Request(SOURCE, str(folder), folder.name, layout="packed")
    try:
        found = RecordedOrigin.load(folder)
    except FileNotFoundError:
        return Origin(request, (provenance_step("record", {}, {}),))
    except FormatError as error:
        return Origin(request, (provenance_step("record", {}, {}),), notes=(str(error),))
    return Origin(
        replace(request, asked=found.asked), (provenance_step("record", found.arguments, {}),), spaces=found.spaces,
        renamed_keys=found.renamed_keys, dropped_keys=found.dropped_keys, notes=found.notes,
    )  # fmt: skip


COMMITS = f"{HIDDEN}/commits.bin"
COMMITS_COPY = f"{HIDDEN}/commits_copy.bin"
RECORDING = f"{HIDDEN}/recording.json"
RECORDING_VERSION = 1
_CHUNK = 1 << 20

_RECORD = np.dtype([
    ("number", "<i8"), ("episode", "<i8"), ("length", "<i8"), ("return", "<f8"), ("seed", "<u8"),
    ("steps", "<i8"), ("explicit_start", "<i8"), ("explicit_stop", "<i8"),
    ("terminated", "?"), ("truncated", "?"), ("end_reason", "u1"), ("has_seed", "?"), ("schema", "<u4"),
    ("data", "S32"), ("own", "<u8"),
])  # fmt: skip
_PACKED = struct.Struct("<qqqdQqqq??B?I32s")
"""The form of a record without its own digest; the same layout as `_RECORD`."""


class Commit(NamedTuple):
    """A recorded episode: `steps` and `explicit_stop` are totals including it, `data` is the digest of its rows."""

    row: EpisodeRow
    steps: int
    explicit_start: int
    explicit_stop: int
    data: str

    def to_bytes(self, number: int, mark: int) -> bytes:
        """Return the record of episode `number` of the recording, counted from 0; `mark` identifies its schema."""
        row = self.row
        body = _PACKED.pack(
            number, row.episode, row.length, row.total_reward, row.seed or 0, self.steps, self.explicit_start,
            self.explicit_stop, row.terminated, row.truncated, int(row.end_reason), row.seed is not None, mark,
            self.data.encode(),
        )  # fmt: skip
        return body + record_digest(body).to_bytes(8, "little")


def record_digest(data: bytes) -> int:
    """Return the digest of a record without its own digest."""
    return int(xxhash.xxh3_64_intdigest(data[: _RECORD.fields["own"][1]]))  # type: ignore[index]


def schema_mark(schema: PackedSchema) -> int:
    """Return a hash of the schema, never 0, by which each record of the log identifies the layout of its rows."""
    return int(xxhash.xxh3_64_intdigest(schema.to_bytes())) & 0xFFFFFFFF or 1


class CommitLog:
    """Appends records to the log of a recording and to its copy, which have `count` records already."""

    def __init__(self, folder: Path, schema: PackedSchema, count: int | None = None) -> None:
        self.moved(folder)
        self._mark = schema_mark(schema)
        opened = fs.create if count is None else fs.open_to_append
        self._descriptors: list[int] = []
        self._count = count or 0
        try:
            for path in self._paths:
                self._descriptors.append(opened(path))
        except BaseException:
            self.close()
            raise

    def moved(self, folder: Path) -> None:
        """Set the paths after the folder was moved."""
        self._paths = [folder / name for name in (COMMITS, COMMITS_COPY)]

    def append(self, commit: Commit) -> None:
        """Write one record to the log, and then to the copy."""
        record = memoryview(commit.to_bytes(self._count, self._mark))
        for descriptor, path in zip(self._descriptors, self._paths, strict=True):
            fs.write(descriptor, record, path)
        self._count += 1

    def sync(self) -> None:
        """Wait until the log, but not its copy, is on the disk; does nothing after `finish`."""
        if self._descriptors:
            fs.fsync(self._descriptors[0], self._paths[0])

    def finish(self) -> None:
        """Wait until log and copy are on the disk, and close; harmless when done twice."""
        for descriptor, path in zip(self._descriptors, self._paths, strict=False):  # an earlier call closed some
            fs.fsync(descriptor, path)
        self.close()

    def close(self) -> None:
        """Close the files; harmless when done twice."""
        while self._descriptors:
            descriptor = self._descriptors.pop()
            fs.close(descriptor, self._paths[len(self._descriptors)])


def records_in(data: bytes) -> Array:
    """Return the complete records of a log as a structured array `[n]`; a cut one at the end is left out."""
    return np.frombuffer(data[: len(data) // _RECORD.itemsize * _RECORD.itemsize], _RECORD)


def commit_of(record: Any) -> Commit:
    """Return the episode of a sound record."""
    row = EpisodeRow(
        int(record["episode"]), int(record["length"]), float(record["return"]), bool(record["terminated"]),
        bool(record["truncated"]), EndReason(int(record["end_reason"])),
        int(record["seed"]) if record["has_seed"] else None,
    )  # fmt: skip
    steps, start, stop = (int(record[name]) for name in ("steps", "explicit_start", "explicit_stop"))
    return Commit(row, steps, start, stop, record["data"].decode())


def episode_digest(parts: Mapping[str, str]) -> str:
    """Combine the digests of an episode's bytes in each file into one, 32 hexadecimal digits."""
    lines = "".join(f"{name}\0{digest}\n" for name, digest in sorted(parts.items()))
    return digest_bytes(lines.encode()).rpartition(":")[2]


def file_widths(schema: PackedSchema) -> dict[str, tuple[int, str]]:
    """Return for each data file of a recording the bytes of a row, and whether rows are by record, step or explicit."""
    found = {RECORDS: (schema.record_bytes, "record"), EXPLICIT: (schema.record_bytes, "explicit")}
    for one in schema.own_files:
        found[one.file()] = one.field.row_bytes, "record" if one.state else "step"
        if one.state:
            found[one.file(explicit=True)] = one.field.row_bytes, "explicit"
    return found


def commits_in(data: bytes, schema: PackedSchema) -> list[Commit]:
    """Return the episodes of an undamaged log; none if the log belongs to another schema."""
    records = records_in(data)
    return [commit_of(record) for record in records] if (records["schema"] == schema_mark(schema)).all() else []


def is_as_recorded(files: OpenFiles, schema: PackedSchema, commits: Sequence[Commit], number: int) -> bool:
    """Return whether all bytes of episode `number` of the log are as they were written."""
    before, commit = commits[number - 1] if number else None, commits[number]
    steps = (before.steps if before else 0), commit.steps
    spans = {
        "step": steps,
        "record": (steps[0] + number, steps[1] + number + 1),
        "explicit": (before.explicit_stop if before else 0, commit.explicit_stop),
    }
    found = {}
    for name, (width, kind) in file_widths(schema).items():
        start, stop = (row * width for row in spans[kind])
        if stop > start:
            if (files.size(name) or 0) < stop:
                return False
            found[name] = _digest_of(files.descriptor(name), start, stop)
    return episode_digest(found) == commit.data


def _digest_of(descriptor: int, start: int, stop: int) -> str:
    hasher = Hasher()
    while data := os.pread(descriptor, min(_CHUNK, stop - start), start):
        hasher.update(data)
        start += len(data)
    return hasher.digest


def fields_bytes(fields: Sequence[Field]) -> bytes:
    """Return the document with the recorded fields and its own digest."""
    entries = [{"key": f.key, "dtype": f.dtype, "shape": f.shape, "role": f.role} for f in fields]
    document = {"format": "rbtool recording", "version": RECORDING_VERSION, "fields": entries}
    return json_file({**document, "digest": document_digest(document, "digest")})


SYNC_SECONDS = 1.0
"""The least time between two syncs; syncing every episode would take several times as long as writing it."""


def unfinished_recording(path: Path) -> CorruptDataError | None:
    """Return the error for an unfinished recording, of which little may be left; None for other folders."""
    if not any((path / name).is_file() for name in (RECORDING, COMMITS, COMMITS_COPY)):
        return None
    hint = f"restore it with: rbtool repair {shlex.quote(str(path))}"
    return CorruptDataError(f"{path} is a recording that was not finished: {MANIFEST} is missing", hint=hint)


class Recorded(NamedTuple):
    """The state of a recording that is continued: the states of its files, and its episodes."""

    files: PackedState
    commits: list[Commit]


class RecordedEpisode(NamedTuple):
    """An episode of a recording: `states` `[n + 1, *shape]` by root key, and the other leaves `[n, *shape]` by key."""

    commit: Commit
    states: dict[Key, Array]
    steps: dict[Key, Array]


class PackedRecorder:
    """Appends whole episodes to a new folder. An episode survives the death of the process once `add_episode` returns.

    Episodes are synced to the disk, rows before the log, when an episode is added `sync_seconds` or more after the last
    sync, and by `sync` and `finish`. A power failure loses at most the episodes since the last sync. With 0 every
    episode is synced.

    `finish` makes a dataset of the folder; if the recording process no longer exists, `rbtool repair` does. Nothing is
    compressed; `rbtool convert` can do that afterwards. Leaving the context without an error calls `finish`.

    Args:
        folder: a new or empty folder; it is empty after an error.
        fields: the TED leaves.
        sync_seconds: the least time between two syncs.
        resumed: the state of a recording to continue; this process must hold its `lock`.
        lock: the descriptor of that lock.

    Raises:
        UsageError: `folder` exists already.
        SchemaError: two leaves need the same file.
    """

    def __init__(
        self,
        folder: Path,
        fields: Sequence[Field],
        *,
        sync_seconds: float = SYNC_SECONDS,
        resumed: Recorded | None = None,
        lock: int = -1,
    ) -> None:
        self.folder = folder
        self.commits: list[Commit]
        self._sync_seconds = sync_seconds
        self._synced_at = -math.inf
        self._unnamed = False  # whether the names of new files still have to be synced
        self.fields = tuple(fields)
        self.schema = PackedSchema.of(fields)
        self._torn = False
        self._process = os.getpid()
        if resumed is not None:
            self.commits, self._lock = resumed.commits, lock
            self.rows = PackedRowBuilder(folder, self.fields, self.schema, resumed.files)
            self._log = CommitLog(folder, self.schema, len(self.commits))
            return
        self.commits, self._lock = [], -1
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise _taken(folder)
        fs.make_folder(folder / HIDDEN)
        with contextlib.ExitStack() as undo:
            self._lock = lock_folder(folder)
            undo.callback(self._unlock)
            if self._lock < 0 or any(path != folder / HIDDEN for path in folder.rglob("*")):
                raise _taken(folder)  # by another process, a moment ago
            undo.callback(_remove_contents, folder)
            self.rows = PackedRowBuilder(folder, self.fields, self.schema)
            undo.callback(self.rows.close)
            fs.write_file(folder / SCHEMA, self.schema.to_bytes())
            fs.write_file(folder / RECORDING, fields_bytes(self.fields))
            self._log = CommitLog(folder, self.schema)
            undo.callback(self._log.close)
            for place in (folder / HIDDEN, folder, folder.parent):
                fs.sync_folder(place)
            undo.pop_all()

    @property
    def steps(self) -> int:
        """The number of steps of all added episodes."""
        return self.commits[-1].steps if self.commits else 0

    def add_episode(
        self, columns: Mapping[Key, Array], *, episode: int, seed: int | None = None, cut_off: bool = False
    ) -> None:
        """Write a whole episode, and sync it if it is time for that.

        SchemaError, with nothing changed, for no rows, and for rows of other leaves, types or shapes.

        Args:
            columns: rows `[n, *shape]` of every leaf by key.
            episode: the number of the episode.
            seed: its seed, if known.
            cut_off: whether the episode continued after the recording ended.
        """
        length = {len(array) for array in columns.values()}
        if len(length) != 1 or not max(length):
            raise SchemaError(f"episode {episode} has leaves of {sorted(length)} rows, expected one number, from 1")

        def write() -> None:
            self.rows.append(columns, np.arange(row.length) == row.length - 1)
            self.rows.write()

        row = _row(columns, episode, seed, cut_off, self.fields)
        self._add(row, write)

    def add_states(
        self,
        states: Mapping[Key, Array],
        steps: Mapping[Key, Array],
        *,
        episode: int,
        seed: int | None = None,
        cut_off: bool = False,
    ) -> None:
        """Write a whole episode with each state stored once, which is cheaper if next observations follow.

        `states` has rows `[n + 1, *shape]` of every state by its root key, `steps` rows `[n, *shape]` of all other
        leaves by their keys.
        """
        _require_rows(self.schema, states, steps, len(next(iter(steps.values()), ())))
        row = _row(steps, episode, seed, cut_off, self.fields)
        self._add(row, lambda: self.rows.append_episode(states, steps, row.length))

    def _add(self, row: EpisodeRow, write: Callable[[], None]) -> None:
        """Write the rows of an episode with `write`, then its record in the log."""
        self._require_whole()
        self._torn = True
        had_explicit = self.rows.explicit is not None
        try:
            write()
        except SchemaError:  # raised before anything is written
            self._torn = False
            raise
        explicit = self.rows.explicit
        self._unnamed |= explicit is not None and not had_explicit
        commit = Commit(
            row,
            self.steps + row.length,
            self.rows.explicit_starts[-1],
            explicit.rows if explicit else 0,
            episode_digest({file.name: digest for file in self._files() if (digest := file.cut())}),
        )
        self._log.append(commit)
        if time.monotonic() - self._synced_at >= self._sync_seconds:
            self.sync()
        self.commits.append(commit)
        self._torn = False

    def sync(self) -> None:
        """Wait until all added episodes are on the disk; also works after `finish` failed half-way."""
        files = self._files()
        for file in files:
            file.sync()
        if self._unnamed:
            for folder in sorted({file.path.parent for file in files}):
                fs.sync_folder(folder)
            self._unnamed = False
        self._log.sync()
        self._synced_at = time.monotonic()

    def _files(self) -> list[AppendedFile]:
        explicit = self.rows.explicit
        return [*self.rows.files.files, *(explicit.files if explicit else ())]

    def episodes(self) -> Iterator[RecordedEpisode]:
        """Yield the episodes, which must not have explicit next rows, in fresh arrays."""
        first = 0
        for number, commit in enumerate(self.commits):
            states: dict[Key, Array] = {}
            steps: dict[Key, Array] = {}
            for one in self.schema.fields:
                start, length = first + number * (one.state or one.stem is None), commit.row.length
                stop = start + length + (one.state or one.stem is None)
                empty = np.empty((length + one.state, *one.field.shape), one.field.numpy)
                rows = self.rows.files.read(one, start, stop) if one.field.row_bytes else empty
                (states if one.state else steps)[one.field.key] = rows[: length + one.state]
            yield RecordedEpisode(commit, states, steps)
            first += commit.row.length

    def read(self, key: Key, start: int, stop: int) -> Array:
        """Read rows `[start, stop)` of a leaf of the added episodes into a fresh array."""
        leaf = field_named(self.fields, key)
        if start == stop or not leaf.row_bytes:
            return np.empty((stop - start, *leaf.shape), leaf.numpy)
        one, after = self.schema.place(leaf)
        if not one.state and one.stem is not None:
            return self.rows.files.read(one, start, stop)

        def fetch(low: int, high: int, explicit: bool) -> Array:
            files = self.rows.explicit if explicit and self.rows.explicit else self.rows.files
            return files.read(one, low, high)

        numbers = RecordNumbers(recording_table(self.commits), self.steps, str(self.folder))
        return numbers.rows(start, stop, after, fetch)

    def finish(self) -> Manifest:
        """Make a dataset of the folder and close the recorder. SchemaError if an episode is written only in part.

        After an error, such as a full disk, it can be called again.
        """
        self._require_whole()
        data = self.rows.finish()
        self._log.finish()
        manifest = seal(self.folder, self.fields, self.commits, data, self.rows.ranges)
        self.close()
        return manifest

    def _require_whole(self) -> None:
        """Raise SchemaError if an episode was written only in part, as on a full disk."""
        if self._torn:
            raise SchemaError(
                f"the recording {self.folder} stopped in the middle of an episode: nothing more can be recorded there",
                hint=f"make a dataset of what is whole: rbtool repair {shlex.quote(str(self.folder))}",
            )

    def moved(self, folder: Path, sync_seconds: float) -> None:
        """Continue at another path after the folder was moved, with another time between syncs."""
        self.folder, self._sync_seconds = folder, sync_seconds
        for file in self._files():
            file.path = folder / file.name
        self.rows.moved(folder)
        self._log.moved(folder)

    def close(self) -> None:
        """Close the files without making a dataset of them; harmless when done twice."""
        self.rows.close()
        self._log.close()
        self._unlock()

    def _unlock(self) -> None:
        if self._lock >= 0:
            if os.getpid() == self._process:  # a process that was forked meanwhile has the lock as well
                fs.lock(self._lock, fcntl.LOCK_UN, self.folder)
            os.close(self._lock)
            self._lock = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *raised: object) -> None:
        try:
            if kind is None and self._lock >= 0:
                self.finish()
        finally:
            self.close()


def _taken(folder: Path) -> UsageError:
    return UsageError(f"{folder} already exists, a recording needs a new folder", hint="choose another one")


def _remove_contents(folder: Path) -> None:
    with contextlib.suppress(OSError):  # the error that is under way is the one to show
        for path in folder.iterdir():
            fs.remove(path)


def _require_rows(schema: PackedSchema, states: Mapping[Key, Array], steps: Mapping[Key, Array], length: int) -> None:
    """Raise SchemaError if leaves, types or shapes differ from the recording's."""
    given = (*states, *steps)
    if len(given) != len(schema.fields):
        odd = {key_name(key) for key in given} ^ {key_name(one.field.key) for one in schema.fields}
        raise SchemaError(f"rows have other leaves than the recording: {', '.join(sorted(odd))}")
    for one in schema.fields:
        field, found = one.field, (states if one.state else steps).get(one.field.key)
        if found is None or found.shape != (length + one.state, *field.shape) or found.dtype != field.numpy:
            what = "missing" if found is None else f"{found.dtype} {list(found.shape)}"
            expected = f"{field.numpy} {[length + one.state, *field.shape]}"
            raise SchemaError(f"rows of {field.name!r} are {what}, expected {expected}")


def _row(
    columns: Mapping[Key, Array], episode: int, seed: int | None, cut_off: bool, fields: Sequence[Field]
) -> EpisodeRow:
    """Return the row of the episode table of an episode; without a flag its end reason is the end of the recording."""
    terminated = NEXT_TERMINATED in columns and bool(columns[NEXT_TERMINATED][-1].any())
    truncated = NEXT_TRUNCATED in columns and bool(columns[NEXT_TRUNCATED][-1].any())
    total = episode_return(columns, fields)
    length = len(next(iter(columns.values())))
    reason = EndReason.END_OF_FILE if cut_off else end_reason(terminated, truncated)
    return EpisodeRow(episode, length, total, terminated, truncated, reason, seed)


def recording_table(commits: Sequence[Commit]) -> EpisodeTable:
    """Return the episode table of the recorded episodes."""
    table = EpisodeTable.from_rows([commit.row for commit in commits])
    return replace(table, explicit_start=np.array([commit.explicit_start for commit in commits], np.int64))


def seal(
    folder: Path,
    fields: Sequence[Field],
    commits: Sequence[Commit],
    data: Sequence[FileRecord],
    ranges: Mapping[Key, FieldRange],
) -> Manifest:
    """Make a dataset of a recording whose data files are complete: write the episodes and, atomically, the manifest."""
    fs.remove(folder / EPISODES)  # from an earlier attempt
    for place in (folder, folder / HIDDEN):
        for leftover in place.glob(".*.new"):
            fs.remove(leftover)
    table = recording_table(commits)
    names = [SCHEMA, RECORDING, COMMITS, COMMITS_COPY, *((ORIGIN,) if (folder / ORIGIN).is_file() else ())]
    kept = [*data, *(record_file(folder / name, name) for name in names)]
    origin = origin_of(folder)
    explicit = int((table.explicit_start >= 0).sum())
    boundary = replace(table.counts(), explicit_next=explicit)
    manifest = write_manifest(
        folder, fields, kept, ranges, table, origin, layout="packed", boundary=boundary, at_once=True
    )
    fs.sync_folder(folder)
    return manifest
