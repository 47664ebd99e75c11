"""The log of a recording: one small record an episode, appended when all its rows are on the disk.

Each record says where the rows of the episode end, carries their digest and its own, and is written at once, so that
whatever stops the recording leaves a log whose longest sound beginning names whole episodes.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import xxhash

from ..errors import FormatError
from ..ted import EndReason, Field, Key, Role
from . import fs
from .digest import digest_bytes
from .episodes import EpisodeRow
from .manifest import HIDDEN
from .packed_schema import EXPLICIT, RECORDS, PackedSchema
from .strict_json import dump_json, load_json

__all__ = [
    "COMMITS",
    "RECORDING",
    "Commit",
    "CommitLog",
    "episode_digest",
    "fields_bytes",
    "file_widths",
    "read_commits",
    "read_fields",
]

COMMITS = f"{HIDDEN}/commits.bin"
RECORDING = f"{HIDDEN}/recording.json"

_RECORD = np.dtype([
    ("number", "<i8"), ("episode", "<i8"), ("length", "<i8"), ("return", "<f8"), ("seed", "<u8"),
    ("steps", "<i8"), ("explicit_start", "<i8"), ("explicit_stop", "<i8"),
    ("terminated", "?"), ("truncated", "?"), ("end_reason", "u1"), ("has_seed", "?"), ("padding", "V4"),
    ("data", "S32"), ("own", "<u8"),
])  # fmt: skip


class Commit(NamedTuple):
    """An episode that is on the disk: `steps` and `explicit_stop` count what is there with it; `data` is its digest."""

    row: EpisodeRow
    steps: int
    explicit_start: int
    explicit_stop: int
    data: str

    def to_bytes(self, number: int) -> bytes:
        """The record of episode `number` of the recording, counted from 0."""
        row = self.row
        record = np.zeros(1, _RECORD)
        values: dict[str, Any] = {
            "number": number, "episode": row.episode, "length": row.length, "return": row.total_reward,
            "seed": row.seed or 0, "steps": self.steps, "explicit_start": self.explicit_start,
            "explicit_stop": self.explicit_stop, "terminated": row.terminated, "truncated": row.truncated,
            "end_reason": int(row.end_reason), "has_seed": row.seed is not None, "data": self.data.encode(),
        }  # fmt: skip
        for name, value in values.items():
            record[name] = value
        record["own"] = _own_digest(record.tobytes())
        return record.tobytes()


def _own_digest(data: bytes) -> int:
    return int(xxhash.xxh3_64_intdigest(data[: _RECORD.fields["own"][1]]))  # type: ignore[index]


class CommitLog:
    """Appends records to the log of a recording."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / COMMITS
        self._descriptor = fs.create(self._path)
        self._count = 0

    def append(self, commit: Commit) -> None:
        """Write one record at once, and wait until it is on the disk."""
        fs.write(self._descriptor, memoryview(commit.to_bytes(self._count)), self._path)
        fs.fsync(self._descriptor, self._path)
        self._count += 1

    def close(self) -> None:
        """Close the file; harmless when done twice."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def read_commits(folder: Path) -> tuple[list[Commit], int]:
    """Read the longest sound beginning of a log; return it and how many records lie behind it, sound or not."""
    data = (folder / COMMITS).read_bytes()
    size, found, steps = _RECORD.itemsize, [], 0
    for number in range(len(data) // size):
        part = data[number * size : (number + 1) * size]
        record = np.frombuffer(part, _RECORD)[0]
        steps += int(record["length"])
        if int(record["own"]) != _own_digest(part) or int(record["number"]) != number or int(record["steps"]) != steps:
            break
        row = EpisodeRow(
            int(record["episode"]), int(record["length"]), float(record["return"]), bool(record["terminated"]),
            bool(record["truncated"]), EndReason(int(record["end_reason"])),
            int(record["seed"]) if record["has_seed"] else None,
        )  # fmt: skip
        stop = int(record["explicit_stop"])
        found.append(Commit(row, steps, int(record["explicit_start"]), stop, record["data"].decode()))
    return found, -(-len(data) // size) - len(found)


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


def fields_bytes(fields: Sequence[Field]) -> bytes:
    """The document that says what is recorded."""
    entries = [{"key": f.key, "dtype": f.dtype, "shape": f.shape, "role": f.role} for f in fields]
    return (dump_json({"format": "rbtool recording", "version": 1, "fields": entries}, indent=1) + "\n").encode()


def read_fields(folder: Path) -> tuple[Field, ...]:
    """Read what is recorded in a folder; FormatError for one that nothing was recorded in."""
    path = folder / RECORDING
    if not path.is_file() or not (folder / COMMITS).is_file():
        raise FormatError(
            f"{folder} is no recording: it has no {RECORDING if not path.is_file() else COMMITS}",
            hint="what was converted or downloaded is made again from its source",
        )
    document = load_json(path)
    try:
        return tuple(
            _field(entry["key"], entry["dtype"], entry["shape"], entry["role"]) for entry in document["fields"]
        )
    except (KeyError, TypeError) as error:
        raise FormatError(f"{path} does not say what is recorded: {error!r}") from error


def _field(key: Key, dtype: str, shape: Sequence[int], role: Role) -> Field:
    return Field(tuple(key), dtype, tuple(shape), role)
