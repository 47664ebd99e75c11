"""Reads and writes Lance tables with pylance in a separate process.

pylance can abort its process when a damaged file makes it panic, and its threads do not survive a fork. So it is never
imported here: another process answers requests, and if it ends, the table is reported as damaged.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from ...core.errors import CorruptDataError, FormatError, OutOfSpaceError, not_installed
from ...core.format import fs
from ...core.format.contracts import Closing
from ...core.format.files import FETCH_AGAIN
from ..files.pickles import end_process, framed_answer

_VERSIONS, _MANIFEST = "_versions", ".manifest"
_PIECE = 4 << 20
_SECONDS = 120.0
_LONGEST_WRITE = 7 * 24 * 3600.0
_LONGEST_LINE = 256 << 20
_FULL = re.compile(r"os error (27|28|122)\b")
_RUST = re.compile(r",? ?/[^ ,]*\.rs:\d+(:\d+)?")


def require_pylance() -> None:
    """Raise UsageError if pylance is not installed."""
    if importlib.util.find_spec("lance") is None:
        raise not_installed("Lance tables need pylance", "lance", ImportError("No module named 'lance'"))


def is_table(path: Path) -> bool:
    """Return whether a folder is a Lance table, by its manifests of versions. Raises OSError."""
    folder = path / _VERSIONS
    return folder.is_dir() and any(one.suffix == _MANIFEST for one in folder.iterdir())


class LanceProcess(Closing):
    """A process that reads and writes tables. It is started by the first request, and again after a crash."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def ask(self, path: Path, do: str, *arguments: Any) -> tuple[dict[str, Any], bytes]:
        """Send a request about a table, and return the answer and its data.

        Raises CorruptDataError for a damaged table, FormatError for one that refers to files outside its folder.
        """
        answer, data = self._exchange(path, do, arguments, _SECONDS)
        if "refused" in answer:
            raise FormatError(f"{path}: {answer['refused']}")
        if "broken" in answer:
            raise _damaged(path, _RUST.sub("", answer["broken"])[:300])
        return answer, data

    def write(self, path: Path, do: str, *arguments: Any) -> int:
        """Write a new table, and return its number of rows; OutOfSpaceError if the disk is full."""
        try:
            answer, _ = self._exchange(path, do, arguments, _LONGEST_WRITE)
            why = answer.get("broken")
        except CorruptDataError:
            why = "its process ended"
        if why is None:
            return int(answer["rows"])
        if _FULL.search(why):
            raise OutOfSpaceError(f"no space is left for {path}", hint="free some space and run it again")
        raise FormatError(f"{path} cannot be written: {_RUST.sub('', why)[:300]}")

    def _exchange(self, path: Path, do: str, given: Sequence[Any], seconds: float) -> tuple[dict[str, Any], bytes]:
        request = {"path": str(path.absolute()), "do": do, "with": given}
        with self._lock:
            return self._exchanged(request, path, seconds)

    def _exchanged(self, request: dict[str, Any], path: Path, seconds: float) -> tuple[dict[str, Any], bytes]:
        process = self._process = self._process or self._started()
        late = threading.Event()

        def end() -> None:
            late.set()
            process.kill()

        watch = threading.Timer(seconds, end)
        watch.daemon = True
        watch.start()
        whole = False
        try:
            assert process.stdin is not None
            process.stdin.write(json.dumps(request).encode() + b"\n")
            process.stdin.flush()
            answer, data = framed_answer(process, _LONGEST_LINE, 1 << 40)
            whole = True
            return answer, data
        except (BrokenPipeError, EOFError) as error:
            how = f"took more than {seconds:.0f} s" if late.is_set() else "ended"
            raise _damaged(path, f"the process that reads it {how}") from error
        finally:
            watch.cancel()
            if not whole:
                self.close()

    def _started(self) -> subprocess.Popen[bytes]:
        program = Path(__file__).with_name("table_process.py")
        return subprocess.Popen(
            [sys.executable, "-P", str(program)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL, env={**os.environ, "RUST_BACKTRACE": "0"},
        )  # fmt: skip

    def close(self) -> None:
        """End the process; the next request starts another one."""
        process, self._process = self._process, None
        if process is not None:
            end_process(process)


def _damaged(path: Path, why: str) -> CorruptDataError:
    return CorruptDataError(f"{path} cannot be read, it is damaged or was cut: {why}", hint=FETCH_AGAIN)


class LanceTable:
    """The newest version of a table, with its rows in order and without deleted ones.

    Raises CorruptDataError for a damaged table, FormatError for one that refers to files outside its folder.
    """

    def __init__(self, process: LanceProcess, path: Path) -> None:
        if not is_table(path):
            raise CorruptDataError(f"{path} is not a Lance table: it has no {_VERSIONS}", hint=FETCH_AGAIN)
        self.path = path
        self._process = process
        found, schema = process.ask(path, "describe")
        self.rows = int(found["rows"])
        self.schema = pa.ipc.read_schema(pa.py_buffer(schema))
        self._blobs, self._files, self._version = set(found["blobs"]), found["files"], int(found["version"])

    def read(self, names: Sequence[str], start: int, stop: int) -> Any:
        """Read rows `[start, stop)` of these columns as an Arrow table; blobs are included as bytes."""
        found, data = self._process.ask(self.path, "read", list(names), start, stop)
        if found["rows"] != stop - start:
            raise CorruptDataError(f"{self.path} ends before its row {stop:,}", hint=FETCH_AGAIN)
        return pa.ipc.open_stream(pa.py_buffer(data)).read_all()

    def copy_bytes(self, name: str, row: int, descriptor: int, target: Path) -> None:
        """Write the bytes of one row to an open file; a blob is copied in parts."""
        if name not in self._blobs:
            value = self.read([name], row, row + 1).column(0)[0].as_py()
            fs.write(descriptor, memoryview(bytes_of(value, f"{self.path}: {name!r}, row {row}")), target)
            return
        answer, data = self._process.ask(self.path, "blob", name, row, 0, _PIECE)
        start, size = 0, int(answer["size"])
        fs.require_space(target.parent, size)
        while True:
            fs.write(descriptor, memoryview(data), target)
            start += len(data)
            if start >= size:
                return
            data = self._process.ask(self.path, "blob", name, row, start, _PIECE)[1]
            if not data:
                raise CorruptDataError(f"{self.path}: {name!r} is shorter in row {row} than it states")

    def files(self) -> Iterator[Path]:
        """Yield the files of this version: its manifest, its data files, and the lists of deleted rows."""
        for name in (f"{(1 << 64) - 1 - self._version:020}{_MANIFEST}", f"{self._version}{_MANIFEST}"):
            if (self.path / _VERSIONS / name).is_file():
                yield self.path / _VERSIONS / name
        for name in self._files:
            yield self.path / name
            apart = (self.path / name).with_suffix("")  # the folder of blobs in separate files
            yield from (file for file in sorted(apart.rglob("*")) if file.is_file())


def bytes_of(value: Any, what: str) -> bytes:
    """Return a value that must be bytes; FormatError if it is not."""
    if not isinstance(value, bytes):
        raise FormatError(f"{what} has no bytes")
    return value
