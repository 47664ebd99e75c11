"""Remembers which tasks are finished, so that a run that was cut short can go on.

A line each: the digest of the rest, a space, a JSON document. The first says what the run is, every other what is known
of one task. A line that does not fit its digest was being written when the run ended: it and what follows count as
not there.
"""

from __future__ import annotations

import base64
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np

from ..errors import FormatError
from ..format import Count, FieldEntry, FieldRange, decode, digest_bytes, dump_json, fs, parse_json, read_regular
from ..ted import Field
from .block import Pieces
from .job import Finished

__all__ = ["Journal", "read_journal"]

_VERSION = 1
_OF_PIECES = ("episode", "rows", "begins", "ends")
_ARRAYS = {
    "episode": np.int64, "rows": np.int64, "begins": np.bool_, "ends": np.bool_, "ids": np.int64,
    "returns": np.float64, "terminated": np.bool_, "truncated": np.bool_, "broken": np.bool_,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Header:
    """The first line: which run this is, and the fields of its result."""

    version: int
    run: Mapping[str, Any]
    fields: tuple[FieldEntry, ...]


@dataclass(frozen=True, slots=True)
class _Entry:
    """Every other line: a task that is finished. The arrays of `runs` are in base64."""

    task: Count
    rows: Count
    placed: bool
    digest: str
    ranges: tuple[FieldRange, ...]
    runs: Mapping[str, str]


class Journal:
    """Appends to the journal at `path`; closing it is leaving the context."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor = fs.open_to_append(path)

    @classmethod
    def begin(cls, path: Path, run: Mapping[str, Any], fields: Sequence[Field]) -> Self:
        """Make a journal of a run that is just beginning: `run` says which, as JSON."""
        journal = cls(path)
        journal._append({"version": _VERSION, "run": run, "fields": [_field_document(field) for field in fields]})
        return journal

    def add(self, index: int, finished: Finished) -> None:
        """Note that a task is finished, when its rows are written."""
        columns = {name: getattr(finished.pieces if name in _OF_PIECES else finished, name) for name in _ARRAYS}
        self._append(
            {
                "task": index,
                "rows": finished.rows,
                "placed": finished.placed,
                "digest": finished.digest,
                "ranges": list(finished.ranges.values()),
                "runs": {name: _packed(columns[name], dtype) for name, dtype in _ARRAYS.items()},
            }
        )

    def _append(self, document: Mapping[str, Any]) -> None:
        text = dump_json(document)
        fs.write(self._descriptor, memoryview(f"{digest_bytes(text.encode())} {text}\n".encode()), self._path)

    def close(self) -> None:
        """Close the file; harmless when done twice."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()


def read_journal(path: Path) -> tuple[dict[str, Any], tuple[Field, ...], dict[int, Finished]] | None:
    """Read which run a journal is of, the fields of its result, and what is finished; None where there is none.

    What follows the last sound line is cut off, so that more can be appended.
    """
    try:
        data = read_regular(path)
    except OSError:
        return None
    header: _Header | None = None
    tasks: dict[int, Finished] = {}
    sound = 0
    for line in _lines(data):
        try:
            document = _document(line, path)
            if header is None:
                header = decode(_Header, document, str(path))
            else:
                entry = decode(_Entry, document, str(path))
                tasks[entry.task] = _finished_of(entry, header.fields)
        except ValueError:  # a FormatError is one, and what base64 and NumPy say of bytes that they cannot take
            break
        sound += len(line)
    if header is None or header.version != _VERSION:
        return None
    if sound < len(data):
        descriptor = fs.open_to_change(path)
        try:
            fs.truncate(descriptor, sound, path)
        finally:
            os.close(descriptor)
    return dict(header.run), header.fields, tasks


def _lines(data: bytes) -> Iterator[bytes]:
    start = 0
    while (end := data.find(b"\n", start)) >= 0:
        yield data[start : end + 1]
        start = end + 1


def _document(line: bytes, path: Path) -> Any:
    digest, _, text = line.rstrip(b"\n").partition(b" ")
    if digest_bytes(text) != digest.decode(errors="replace"):
        raise FormatError(f"a line of {path} does not fit its digest")
    return parse_json(text, str(path))


def _packed(array: Any, dtype: Any) -> str:
    return base64.b64encode(np.ascontiguousarray(array, dtype).tobytes()).decode()


def _finished_of(entry: _Entry, fields: Sequence[Field]) -> Finished:
    arrays: dict[str, Any] = {
        name: np.frombuffer(base64.b64decode(entry.runs.get(name, "")), dtype).copy() for name, dtype in _ARRAYS.items()
    }
    if len({len(array) for array in arrays.values()}) > 1:
        raise ValueError("the arrays of a task differ in length")
    ranges = {field.key: found for field, found in zip(fields, entry.ranges, strict=True)}
    pieces = Pieces.of(*(arrays.pop(name) for name in _OF_PIECES))
    return Finished(rows=entry.rows, placed=entry.placed, digest=entry.digest, ranges=ranges, pieces=pieces, **arrays)


def _field_document(field: Field) -> dict[str, Any]:
    return {"key": list(field.key), "dtype": field.dtype, "shape": list(field.shape), "role": field.role}
