"""RLlib's JSON lines: a batch or a transition a line, in a file or in the one member of a zip archive."""

from __future__ import annotations

import json
import os
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np

from ...core.errors import CorruptDataError, FormatError
from ...core.format.contracts import Closing
from ...core.format.files import open_regular
from .blocks import MARKS, REQUIRED, REWARDS, RowBlock, Unpacker, batch_block, is_packed, joined, row_block

_BLOCK_BYTES = 256 << 10
_LONGEST_LINE = 256 << 20
_HEAD_BYTES = 1 << 20
_BATCHES = ("SampleBatch", "MultiAgentBatch")
_SUFFIXES = (".json", ".jsonl")


def looks_like_lines(path: Path) -> bool:
    """Return whether the first line of a file is one of RLlib's; raises OSError and what zipfile raises."""
    with _opened(path) as file:
        head = file.read(_HEAD_BYTES).lstrip()
    if not head.startswith(b"{"):
        return False
    line, end, _ = head.partition(b"\n")
    start = line[:4096].replace(b" ", b"")
    if any(f'"type":"{name}"'.encode() in start for name in _BATCHES):
        return True
    if not end and len(head) == _HEAD_BYTES:
        return False
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return False
    return isinstance(found, dict) and found.keys() >= set(REQUIRED) and bool(found.keys() & set(MARKS))


def is_other_document(path: Path) -> bool:
    """Return whether a file without RLlib's lines is one of JSON all the same, and so none of RLlib's that was cut."""
    with os.fdopen(open_regular(path), "rb") as file:
        head = file.read(_HEAD_BYTES)
    for text in (head, head.lstrip().partition(b"\n")[0]):
        try:
            json.loads(text)
        except (ValueError, RecursionError):
            continue
        return True
    return False


def _opened(path: Path) -> IO[bytes]:
    """Open the lines of a file: its own, or the lines of the one JSON file in an archive."""
    file = os.fdopen(open_regular(path), "rb", buffering=1 << 20)
    if file.read(4) != b"PK\x03\x04":
        file.seek(0)
        return file
    with file, zipfile.ZipFile(path) as archive:
        members = [one for one in archive.infolist() if one.filename.lower().endswith(_SUFFIXES)]
        if len(members) != 1 or members[0].flag_bits & 1:
            raise FormatError(f"{path} is an archive of {len(members)} JSON files, expected a single one")
        return archive.open(members[0])  # which keeps the file open


class JsonLines(Closing):
    """One file of JSON lines. A place is the offset of the first line, the number of bytes, and the number of the line.

    A line that is no JSON, or whose compressed columns are damaged, is left out; `damage` has the errors, by the
    numbers of the lines read so far. Transitions after it are another batch than those before.
    """

    def __init__(self, path: Path, *, trusted: bool) -> None:
        self.path = path
        self._file = _opened(path)
        self._unpacker = Unpacker(path, trusted=trusted)
        self.damage: dict[int, CorruptDataError] = {}
        self.part = "line"

    def blocks(self) -> Iterator[tuple[tuple[int, int, int], RowBlock]]:
        """Yield the lines in blocks with their places."""
        self._file.seek(0)
        offset, number = 0, 1
        while lines := self._some_lines():
            size = sum(map(len, lines))
            block = self._parsed(lines, number)
            if block.rows:
                yield (offset, size, number), block
            offset += size
            number += len(lines)
            if self._file.tell() != offset:
                self._file.seek(offset)

    def _some_lines(self) -> list[bytes]:
        lines: list[bytes] = []
        size = 0
        while size < _BLOCK_BYTES and (line := self._file.readline(_LONGEST_LINE + 1)):
            if len(line) > _LONGEST_LINE:
                raise FormatError(f"{self.path} has a line of more than {_LONGEST_LINE >> 20} MiB")
            lines.append(line)
            size += len(line)
        return lines

    def block(self, place: tuple[int, int, int]) -> RowBlock:
        """Read the lines at a place again."""
        offset, size, number = place
        if self._file.tell() != offset:
            self._file.seek(offset)
        data = self._file.read(size)
        if len(data) < size:
            raise CorruptDataError(f"{self.path} has become shorter while it was read")
        return self._parsed(data.splitlines(keepends=True), number)

    def _parsed(self, lines: list[bytes], first: int) -> RowBlock:
        parts: list[RowBlock] = []
        rows: list[tuple[int, dict[str, Any]]] = []
        for number, line in enumerate(lines, first):
            if not line.strip():
                continue
            what = f"{self.path}, line {number:,}"
            try:
                found = _document(line, what)
                if (
                    "type" not in found
                    and not isinstance(found.get(REWARDS), list)
                    and not is_packed(found.get(REWARDS))
                ):
                    rows.append((number, found))
                    continue
                batch = batch_block(_single_policy(found, what), self._unpacker, what, number)
            except CorruptDataError as error:
                parts += self._transitions(rows)
                rows = []
                self.damage[number] = error
                continue
            parts += [*self._transitions(rows), batch]
            rows = []
        parts += self._transitions(rows)
        parts = [part for part in parts if part.rows]
        return joined(parts) if parts else RowBlock(0)

    def _transitions(self, rows: list[tuple[int, dict[str, Any]]]) -> list[RowBlock]:
        """Make blocks of transitions: one, or several around those that are damaged."""
        if not rows:
            return []
        try:
            block = row_block([row for _, row in rows], self._unpacker)
        except CorruptDataError as error:
            if len(rows) == 1:
                self.damage[rows[0][0]] = error
                return []
            half = len(rows) // 2
            return [*self._transitions(rows[:half]), *self._transitions(rows[half:])]
        block.batches = np.full(len(rows), -len(self.damage), np.int64)
        block.lines = np.array([number for number, _ in rows], np.int64)
        return [block]

    def close(self) -> None:
        self._file.close()
        self._unpacker.close()


def _reason(error: Exception) -> str:
    """Describe an error of the JSON parser, without its line, which is always 1."""
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg.removesuffix(' at')} at character {error.pos + 1:,}"
    return " ".join(str(error).split())[:100]


def _document(line: bytes, what: str) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise CorruptDataError(f"{what} is no JSON ({_reason(error)}): it was cut, or is damaged") from error
    if not isinstance(found, dict):
        raise CorruptDataError(f"{what} is no object of JSON")
    return found


def _single_policy(batch: dict[str, Any], what: str) -> dict[str, Any]:
    kind = batch.get("type", "SampleBatch")
    if kind == "SampleBatch":
        return batch
    policies = batch.get("policy_batches")
    if kind != "MultiAgentBatch" or not isinstance(policies, dict):
        raise FormatError(f"{what} is of type {str(kind)[:40]!r}, expected SampleBatch")
    if len(policies) != 1 or not isinstance(only := next(iter(policies.values())), dict):
        names = ", ".join(map(str, sorted(policies)))[:100]
        raise FormatError(
            f"{what} has batches of {len(policies)} policies ({names}), those of a single one can be read",
            hint="write the lines of each policy to a file of its own",
        )
    return only
