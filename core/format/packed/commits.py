"""The log of a recording: one small record an episode, appended when all its rows are written.

Each record states where the rows of the episode end, carries their digest and its own, and is written at once, so that
whatever stops the recording leaves a log whose longest sound beginning names whole episodes. That holds also where a
power failure has kept a record without its rows: their digest differs. Next to the log is a copy, written after it:
damage to one of the two costs nothing.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import xxhash

from ...ted.episodes import EndReason
from ...ted.schema import Field
from .. import fs
from ..contracts import Array
from ..digest import Hasher, digest_bytes
from ..documents import document_digest, dump_json
from ..episodes import EpisodeRow
from ..manifest import HIDDEN
from ..open_files import OpenFiles
from .schema import EXPLICIT, RECORDS, PackedSchema

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
"""A record but for its own digest, as `_RECORD` has it."""


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
        body = _PACKED.pack(
            number, row.episode, row.length, row.total_reward, row.seed or 0, self.steps, self.explicit_start,
            self.explicit_stop, row.terminated, row.truncated, int(row.end_reason), row.seed is not None, mark,
            self.data.encode(),
        )  # fmt: skip
        return body + record_digest(body).to_bytes(8, "little")


def record_digest(data: bytes) -> int:
    """The digest of a record, but for the digest in it."""
    return int(xxhash.xxh3_64_intdigest(data[: _RECORD.fields["own"][1]]))  # type: ignore[index]


def schema_mark(schema: PackedSchema) -> int:
    """A number, never 0, by which each record of the log identifies the layout of its rows."""
    return int(xxhash.xxh3_64_intdigest(schema.to_bytes())) & 0xFFFFFFFF or 1


class CommitLog:
    """Appends records to the log of a recording, and to its copy; `count` records are in both already."""

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
        """Take note of another path of the folder."""
        self._paths = [folder / name for name in (COMMITS, COMMITS_COPY)]

    def append(self, commit: Commit) -> None:
        """Write one record at once, and then its copy."""
        record = memoryview(commit.to_bytes(self._count, self._mark))
        for descriptor, path in zip(self._descriptors, self._paths, strict=True):
            fs.write(descriptor, record, path)
        self._count += 1

    def sync(self) -> None:
        """Wait until the log is on the disk, where `finish` has brought it; nobody waits for the copy."""
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
