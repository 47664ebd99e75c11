"""The log of a recording: one small record an episode, appended when all its rows are on the disk.

Each record states where the rows of the episode end, carries their digest and its own, and is written at once, so that
whatever stops the recording leaves a log whose longest sound beginning names whole episodes. Next to the log is a
copy, written after it: what happens to one of the two, later, costs nothing.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import xxhash

from ...errors import CorruptDataError, FormatError, RbtoolError
from ...ted.episodes import EndReason
from ...ted.schema import NEXT, Field
from .. import fs
from ..contracts import Array
from ..digest import Hasher, digest_bytes, read_regular
from ..documents import FieldEntry, decode, dump_json, parse_json
from ..episodes import EpisodeRow
from ..manifest import HIDDEN, MANIFEST
from ..open_files import OpenFiles
from ..packed.schema import EXPLICIT, RECORDS, SCHEMA, PackedSchema, SchemaDocument

COMMITS = f"{HIDDEN}/commits.bin"
COMMITS_COPY = f"{HIDDEN}/commits_copy.bin"
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
        record["own"] = _own_digest(record.tobytes())
        return record.tobytes()


def _own_digest(data: bytes) -> int:
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
        """Write one record at once, and wait until it is on the disk; nobody waits for the copy."""
        record = memoryview(commit.to_bytes(self._count, self._mark))
        (log, copy), (log_path, copy_path) = self._descriptors, self._paths
        fs.write(log, record, log_path)
        fs.fsync(log, log_path)
        fs.write(copy, record, copy_path)
        self._count += 1

    def finish(self) -> None:
        """Wait until the copy is on the disk, too, and close."""
        fs.fsync(self._descriptors[1], self._paths[1])
        self.close()

    def close(self) -> None:
        """Close the files; harmless when done twice."""
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._descriptors = []


class CommitsFound(NamedTuple):
    """The combined content of log and copy.

    `commits` is their longest sound beginning, `promised` counts the whole records of the longer one: a torn record at
    the end promised nothing. `mark` is that of the schema, None where no record states it; `damaged` names the files
    that lack a record which the other one has.
    """

    commits: list[Commit]
    promised: int
    mark: int | None
    damaged: tuple[str, ...]


def read_commits(folder: Path) -> CommitsFound:
    """Read log and copy, each of which may be missing, record by record from whichever has it sound."""
    logs = {name: _records(folder / name) for name in (COMMITS, COMMITS_COPY)}
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
        commits.append(_commit(record))
        mark, steps = mark or int(record["schema"]), commits[-1].steps
    return CommitsFound(commits, promised, mark or None, tuple(sorted(damaged)))


def log_bytes(commits: list[Commit], schema: PackedSchema) -> bytes:
    """The log, and the copy, of these episodes."""
    mark = schema_mark(schema)
    return b"".join(commit.to_bytes(number, mark) for number, commit in enumerate(commits))


def _records(path: Path) -> Array:
    data = read_regular(path) if path.is_file() else b""
    return np.frombuffer(data[: len(data) // _RECORD.itemsize * _RECORD.itemsize], _RECORD)


def _is_sound(log: Array, number: int, steps: int) -> bool:
    """Return whether record `number`, which `steps` steps come before, is there as it was written."""
    if number >= len(log):
        return False
    record = log[number]
    return (int(record["own"]), int(record["number"]), int(record["steps"])) == (
        _own_digest(record.tobytes()), number, steps + int(record["length"]),
    )  # fmt: skip


def _commit(record: Any) -> Commit:
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
    records = np.frombuffer(data[: len(data) // _RECORD.itemsize * _RECORD.itemsize], _RECORD)
    return [_commit(record) for record in records] if (records["schema"] == schema_mark(schema)).all() else []


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


RECORDING = f"{HIDDEN}/recording.json"
_VERSION = 1


class _Recording(NamedTuple):
    """The document `recording.json`, but for its version and its digest."""

    fields: tuple[FieldEntry, ...]


class RecordedFields(NamedTuple):
    """The leaves of a recording and how they lie; `damaged` names the file, if one, that does not state so."""

    fields: tuple[Field, ...]
    schema: PackedSchema
    damaged: tuple[str, ...]


def fields_bytes(fields: Sequence[Field]) -> bytes:
    """The document that states what is recorded, with its own digest."""
    entries = [{"key": f.key, "dtype": f.dtype, "shape": f.shape, "role": f.role} for f in fields]
    document = {"format": "rbtool recording", "version": _VERSION, "fields": entries}
    return (dump_json({**document, "digest": _digest(document)}, indent=1) + "\n").encode()


def unfinished_recording(path: Path) -> CorruptDataError | None:
    """The error for a folder without a manifest in which something was recorded, however little of it is left."""
    if not any((path / name).is_file() for name in (RECORDING, COMMITS, COMMITS_COPY)):
        return None
    hint = f"restore it with: rbtool repair {shlex.quote(str(path))}"
    return CorruptDataError(f"{path} is a recording that was not finished: {MANIFEST} is missing", hint=hint)


def read_fields(folder: Path, mark: int | None) -> RecordedFields:
    """Read what is recorded in a folder from `recording.json`, or, where that is damaged, from `schema.json`.

    `mark` is what the log states about the schema, None where it does not. FormatError for a folder that nothing was
    recorded in, and for newer versions; CorruptDataError where neither file is whole.
    """
    if not any((folder / name).is_file() for name in (RECORDING, COMMITS, COMMITS_COPY)):
        raise FormatError(
            f"{folder} is no recording: it has no {RECORDING}",
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
    if not isinstance(document, dict) or document.get("digest") != _digest(document):
        return None
    if document.get("version") != _VERSION:
        raise FormatError(
            f"{path} has version {document.get('version')}, this rbtool reads up to {_VERSION}",
            hint="upgrade with: pip install --upgrade rbtool",
        )
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


def _digest(document: Mapping[str, Any]) -> str:
    """Digest of a document, of which the field that holds it is left out."""
    rest = {key: value for key, value in document.items() if key != "digest"}
    return digest_bytes(dump_json(rest, sort_keys=True).encode())
