"""Records episodes, as they are finished, into a folder that becomes a dataset in layout `packed`.

The log of a recording has one small record an episode, appended when all its rows are written. Each record states where
the rows of the episode end, carries their digest and its own, and is written at once, so that whatever stops the
recording leaves a log whose longest sound beginning names whole episodes. That holds also where a power failure has
kept a record without its rows: their digest differs. Next to the log is a copy, written after it: what happens to one
of the two, later, costs nothing.
"""

from __future__ import annotations

import math
import os
import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import xxhash

from ...errors import CorruptDataError, SchemaError, UsageError
from ...ted.episodes import EndReason, end_reason
from ...ted.schema import NEXT_TERMINATED, NEXT_TRUNCATED, Field, Key, field_named
from .. import fs
from ..contracts import Array
from ..digest import FileRecord, Hasher, digest_bytes
from ..documents import document_digest, dump_json
from ..episodes import EPISODES, EpisodeRow, EpisodeTable
from ..manifest import HIDDEN, MANIFEST, Manifest, Request
from ..open_files import OpenFiles
from ..returns import episode_return
from ..staging import lock_folder
from ..ted.builder import Origin, provenance_step, write_manifest
from ..ted.tree import FieldRange, record_file
from .builder import PackedRowBuilder
from .row_files import AppendedFile
from .schema import EXPLICIT, RECORDS, SCHEMA, PackedSchema, RecordNumbers

COMMITS = f"{HIDDEN}/commits.bin"
COMMITS_COPY = f"{HIDDEN}/commits_copy.bin"
RECORDING = f"{HIDDEN}/recording.json"
RECORDING_VERSION = 1
SYNC_SECONDS = 1.0
"""How long after a sync the next one waits: a sync of every episode takes several times as long as writing it."""
_CHUNK = 1 << 20

_RECORD = np.dtype([
    ("number", "<i8"), ("episode", "<i8"), ("length", "<i8"), ("return", "<f8"), ("seed", "<u8"),
    ("steps", "<i8"), ("explicit_start", "<i8"), ("explicit_stop", "<i8"),
    ("terminated", "?"), ("truncated", "?"), ("end_reason", "u1"), ("has_seed", "?"), ("schema", "<u4"),
    ("data", "S32"), ("own", "<u8"),
])  # fmt: skip


class Commit(NamedTuple):
    """An episode that is on the disk: `steps` and `explicit_stop` count what is there with it; `data` is its digest."""

    row: EpisodeRow
    steps: int
    explicit_start: int
    explicit_stop: int
    data: str

    def to_bytes(self, number: int, mark: int) -> bytes:
        """The record of episode `number` of the recording, counted from 0; `mark` is that of its schema."""
        row = self.row
        record = np.zeros(1, _RECORD)
        values: dict[str, Any] = {
            "number": number, "episode": row.episode, "length": row.length, "return": row.total_reward,
            "seed": row.seed or 0, "steps": self.steps, "explicit_start": self.explicit_start,
            "explicit_stop": self.explicit_stop, "terminated": row.terminated, "truncated": row.truncated,
            "end_reason": int(row.end_reason), "has_seed": row.seed is not None, "schema": mark,
            "data": self.data.encode(),
        }  # fmt: skip
        for name, value in values.items():
            record[name] = value
        record["own"] = record_digest(record.tobytes())
        return record.tobytes()


def record_digest(data: bytes) -> int:
    """The digest of a record, but for the digest in it."""
    return int(xxhash.xxh3_64_intdigest(data[: _RECORD.fields["own"][1]]))  # type: ignore[index]


def schema_mark(schema: PackedSchema) -> int:
    """A number, never 0, by which each record of the log identifies the layout of its rows."""
    return int(xxhash.xxh3_64_intdigest(schema.to_bytes())) & 0xFFFFFFFF or 1


class CommitLog:
    """Appends records to the log of a recording, and to its copy."""

    def __init__(self, folder: Path, schema: PackedSchema) -> None:
        self._paths = [folder / name for name in (COMMITS, COMMITS_COPY)]
        self._mark = schema_mark(schema)
        self._descriptors = [fs.create(path) for path in self._paths]
        self._count = 0

    def append(self, commit: Commit) -> None:
        """Write one record at once, and then its copy."""
        record = memoryview(commit.to_bytes(self._count, self._mark))
        for descriptor, path in zip(self._descriptors, self._paths, strict=True):
            fs.write(descriptor, record, path)
        self._count += 1

    def sync(self) -> None:
        """Wait until the log is on the disk; nobody waits for the copy."""
        fs.fsync(self._descriptors[0], self._paths[0])

    def finish(self) -> None:
        """Wait until log and copy are on the disk, and close."""
        for descriptor, path in zip(self._descriptors, self._paths, strict=True):
            fs.fsync(descriptor, path)
        self.close()

    def close(self) -> None:
        """Close the files; harmless when done twice."""
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._descriptors = []


def records_in(data: bytes) -> Array:
    """The whole records of a log, one dimension of a structured type; a torn one at the end does not count."""
    return np.frombuffer(data[: len(data) // _RECORD.itemsize * _RECORD.itemsize], _RECORD)


def commit_of(record: Any) -> Commit:
    """The episode of a sound record."""
    row = EpisodeRow(
        int(record["episode"]), int(record["length"]), float(record["return"]), bool(record["terminated"]),
        bool(record["truncated"]), EndReason(int(record["end_reason"])),
        int(record["seed"]) if record["has_seed"] else None,
    )  # fmt: skip
    steps, start, stop = (int(record[name]) for name in ("steps", "explicit_start", "explicit_stop"))
    return Commit(row, steps, start, stop, record["data"].decode())


def episode_digest(parts: Mapping[str, str]) -> str:
    """One digest, 32 hexadecimal digits, over those of what each file got of an episode."""
    lines = "".join(f"{name}\0{digest}\n" for name, digest in sorted(parts.items()))
    return digest_bytes(lines.encode()).rpartition(":")[2]


def file_widths(schema: PackedSchema) -> dict[str, tuple[int, str]]:
    """Bytes of a row of each data file of a recording, and what it has a row of: record, step or explicit."""
    found = {RECORDS: (schema.record_bytes, "record"), EXPLICIT: (schema.record_bytes, "explicit")}
    for one in schema.own_files:
        found[one.file()] = one.field.row_bytes, "record" if one.state else "step"
        if one.state:
            found[one.file(explicit=True)] = one.field.row_bytes, "explicit"
    return found


def commits_in(data: bytes, schema: PackedSchema) -> list[Commit]:
    """The episodes of a log that is as it was written; none of a log of another schema."""
    records = records_in(data)
    return [commit_of(record) for record in records] if (records["schema"] == schema_mark(schema)).all() else []


def is_as_recorded(files: OpenFiles, schema: PackedSchema, commits: Sequence[Commit], number: int) -> bool:
    """Return whether all bytes of episode `number` of the log are there as they were written."""
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
    """The document that states what is recorded, with its own digest."""
    entries = [{"key": f.key, "dtype": f.dtype, "shape": f.shape, "role": f.role} for f in fields]
    document = {"format": "rbtool recording", "version": RECORDING_VERSION, "fields": entries}
    return (dump_json({**document, "digest": document_digest(document, "digest")}, indent=1) + "\n").encode()


def unfinished_recording(path: Path) -> CorruptDataError | None:
    """The error for a folder without a manifest in which something was recorded, however little of it is left."""
    if not any((path / name).is_file() for name in (RECORDING, COMMITS, COMMITS_COPY)):
        return None
    hint = f"restore it with: rbtool repair {shlex.quote(str(path))}"
    return CorruptDataError(f"{path} is a recording that was not finished: {MANIFEST} is missing", hint=hint)


class PackedRecorder:
    """Appends whole episodes to a new folder. Each survives the death of the process once `add_episode` returns.

    What was added is synced, rows before the log, by the first episode that ends `sync_seconds` or more after the last
    sync, by `sync`, and by `finish`: a power failure loses at most the episodes that ended within that time of the last
    sync. With 0 each episode is synced when it is added.

    `finish` makes a dataset of the folder; `rbtool repair` does so where the recording process is no more. Nothing is
    compressed here: `rbtool convert` does that afterwards. A context manager: leaving without an error finishes.

    UsageError where something is at `folder` already, SchemaError for leaves that need the same file.
    """

    def __init__(self, folder: Path, fields: Sequence[Field], *, sync_seconds: float = SYNC_SECONDS) -> None:
        self.folder = folder
        self._sync_seconds = sync_seconds
        self._synced_at = -math.inf
        self._unnamed = False  # files are there whose names are not on the disk
        self.fields = tuple(fields)
        self.schema = PackedSchema.of(fields)
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise UsageError(f"{folder} is there already, a recording needs a new folder", hint="choose another one")
        self.commits: list[Commit] = []
        fs.make_folder(folder / HIDDEN)
        self._lock = lock_folder(folder)
        self._torn = False
        self.rows = PackedRowBuilder(folder, self.fields, self.schema)
        fs.write_file(folder / SCHEMA, self.schema.to_bytes())
        fs.write_file(folder / RECORDING, fields_bytes(self.fields))
        self._log = CommitLog(folder, self.schema)
        for place in (folder / HIDDEN, folder, folder.parent):
            fs.sync_folder(place)

    @property
    def steps(self) -> int:
        """Steps of all episodes that were added."""
        return self.commits[-1].steps if self.commits else 0

    def add_episode(
        self, columns: Mapping[Key, Array], *, episode: int, seed: int | None = None, cut_off: bool = False
    ) -> None:
        """Write a whole episode, rows `[n, *shape]` of every leaf; sync it with others, see `PackedRecorder`.

        `episode` is its number; `cut_off` states that it went on where the recording ends.
        SchemaError, and nothing changes, for rows of other leaves, types or shapes, or none.
        """
        length = {len(array) for array in columns.values()}
        if len(length) != 1 or not max(length):
            raise SchemaError(f"episode {episode} has leaves of {sorted(length)} rows, expected one number, from 1")
        self._require_whole()
        self._torn = True
        try:
            commit = self._written(columns, _row(columns, episode, seed, cut_off, self.fields))
        except SchemaError:  # raised before anything is written
            self._torn = False
            raise
        self._log.append(commit)
        if time.monotonic() - self._synced_at >= self._sync_seconds:
            self.sync()
        self.commits.append(commit)
        self._torn = False

    def sync(self) -> None:
        """Wait until all episodes that were added are on the disk."""
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

    def _written(self, columns: Mapping[Key, Array], row: EpisodeRow) -> Commit:
        """Write an episode, all but the record of it."""
        had_explicit = self.rows.explicit is not None
        self.rows.append(columns, np.arange(row.length) == row.length - 1)
        self.rows.write()
        explicit = self.rows.explicit
        self._unnamed |= explicit is not None and not had_explicit
        return Commit(
            row,
            self.steps + row.length,
            self.rows.explicit_starts[-1],
            explicit.rows if explicit else 0,
            episode_digest({file.name: digest for file in self._files() if (digest := file.cut())}),
        )

    def read(self, key: Key, start: int, stop: int) -> Array:
        """Read rows `[start, stop)` of a leaf of the episodes that were added, into a fresh array."""
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
        """Make a dataset of the folder; the recorder is closed then. SchemaError where an episode is half written."""
        self._require_whole()
        data = self.rows.finish()
        self._log.finish()
        manifest = seal(self.folder, self.fields, self.commits, data, self.rows.ranges)
        self.close()
        return manifest

    def _require_whole(self) -> None:
        """Refuse to continue after an episode that could not be written to its end, as on a full disk."""
        if self._torn:
            raise SchemaError(
                f"the recording {self.folder} stopped in the middle of an episode: nothing more can be recorded there",
                hint=f"make a dataset of what is whole: rbtool repair {shlex.quote(str(self.folder))}",
            )

    def close(self) -> None:
        """Close the files without making a dataset of them; harmless when done twice."""
        self.rows.close()
        self._log.close()
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *raised: object) -> None:
        if kind is None and self._lock >= 0:
            self.finish()
        else:
            self.close()


def _row(
    columns: Mapping[Key, Array], episode: int, seed: int | None, cut_off: bool, fields: Sequence[Field]
) -> EpisodeRow:
    """Summarise an episode; one whose last step bears neither flag ends with the recording."""
    terminated, truncated = (
        key in columns and bool(np.any(columns[key][-1])) for key in (NEXT_TERMINATED, NEXT_TRUNCATED)
    )
    total = episode_return(columns, fields)
    length = len(next(iter(columns.values())))
    reason = EndReason.END_OF_FILE if cut_off else end_reason(terminated, truncated)
    return EpisodeRow(episode, length, total, terminated, truncated, reason, seed)


def recording_table(commits: Sequence[Commit]) -> EpisodeTable:
    """The episode table of what was committed."""
    table = EpisodeTable.from_rows([commit.row for commit in commits])
    return replace(table, explicit_start=np.array([commit.explicit_start for commit in commits], np.int64))


def seal(
    folder: Path,
    fields: Sequence[Field],
    commits: Sequence[Commit],
    data: Sequence[FileRecord],
    ranges: Mapping[Key, FieldRange],
) -> Manifest:
    """Make a dataset of a recording whose data files are complete: write episodes and, at once, the manifest."""
    fs.remove(folder / EPISODES)  # that of an earlier attempt
    for place in (folder, folder / HIDDEN):
        for leftover in place.glob(".*.new"):
            fs.remove(leftover)
    table = recording_table(commits)
    kept = [*data, *(record_file(folder / name, name) for name in (SCHEMA, RECORDING, COMMITS, COMMITS_COPY))]
    request = Request("recording", str(folder), folder.name)
    origin = Origin(replace(request, layout="packed"), (provenance_step("record", {}, {}),))
    explicit = int((table.explicit_start >= 0).sum())
    boundary = replace(table.counts(), explicit_next=explicit)
    manifest = write_manifest(
        folder, fields, kept, ranges, table, origin, layout="packed", boundary=boundary, at_once=True
    )
    fs.sync_folder(folder)
    return manifest
