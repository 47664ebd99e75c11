"""The folder in which a run builds its result: files of rows, and a journal from which another run can resume.

    dataset/              the result, the only part that is published
    work/placed/          leaf files in which each task has its own range of rows; they become the result
    work/parts/           one file for each task whose number of rows is not known in advance
    work/journal.jsonl    the finished tasks

Each line of the journal is a digest, a space and a JSON document. The first line identifies the run, every other one
describes a finished task. A line that does not match its digest was not completely written; it is ignored, and so are
all lines after it.
"""

from __future__ import annotations

import base64
import contextlib
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import FormatError, RbtoolError, SchemaError, UsageError
from ..format import fs
from ..format.contracts import Array, Closing
from ..format.documents import decode, dump_json, parse_json, plain
from ..format.files import Hasher, bytes_of, digest_bytes, read_regular
from ..format.staging import Staging, may_be_shared
from ..progress import Progress
from ..ted.schema import Field, Key

RESULT = "dataset"
"""The folder of the result, the only part that is published."""


def result_folder(folder: Path) -> Path:
    """Return the folder of the result, the only part that is published."""
    return folder / RESULT


def work_folder(folder: Path) -> Path:
    """Return the folder of the files that are not part of the result."""
    return folder / "work"


def placed_folder(folder: Path) -> Path:
    """Return the folder of the leaf files in which tasks with as many rows as steps write their rows."""
    return work_folder(folder) / "placed"


def parts_folder(folder: Path) -> Path:
    """Return the folder of the files of tasks whose number of rows is not known in advance."""
    return work_folder(folder) / "parts"


def part_path(folder: Path, *numbers: int) -> Path:
    """Return the path of a file with rows of a task: `numbers` are its index and, if there are several, the part."""
    return parts_folder(folder) / f"{'-'.join(map(str, numbers))}.rows"


def journal_path(folder: Path) -> Path:
    """Return the file of the journal."""
    return work_folder(folder) / "journal.jsonl"


def revert_publication(folder: Path, sizes: Mapping[str, int]) -> None:
    """Undo the completion or publication of a result, so that only leaf files remain into which tasks write.

    `sizes` has the largest possible size of each of these files, by path. If the result replaced an older one, that one
    was moved into this folder; its files are removed. So are files that may belong to other datasets, too, because
    tasks would write into them.
    """
    placed, result = placed_folder(folder), result_folder(folder)
    if placed.is_dir() or not result.is_dir():
        fs.remove(result)
    else:
        fs.rename(result, placed)
    for path in sorted(placed.rglob("*")):
        if path.is_dir() and not path.is_symlink():
            continue
        found = path.lstat()
        if (
            not stat.S_ISREG(found.st_mode)
            or found.st_size > sizes.get(path.relative_to(placed).as_posix(), -1)
            or may_be_shared(found)
        ):
            fs.remove(path)
    fs.make_folder(placed)
    fs.make_folder(parts_folder(folder))


def write_part(path: Path, arrays: Sequence[Array]) -> None:
    """Write the rows of all leaves to a file, one leaf after the other; replace a file of an interrupted run."""
    fs.remove(path)
    descriptor = fs.create(path)
    try:
        parts = [bytes_of(array) for array in arrays if array.size]
        for first in range(0, len(parts), 1000):
            fs.write_parts(descriptor, parts[first : first + 1000], path)
    finally:
        fs.close(descriptor, path)


def rows_digest(arrays: Iterable[Array]) -> str:
    """Digest the bytes of all leaves in order, for the journal."""
    hasher = Hasher()
    for array in arrays:
        if array.size:
            hasher.update(bytes_of(array))
    return hasher.digest


class PartFile:
    """Reads and changes a file of `write_part` with `rows` rows of each field."""

    def __init__(self, path: Path, fields: Sequence[Field], rows: int) -> None:
        self._path = path
        self._fields = {field.key: field for field in fields}
        sizes = np.array([rows * field.row_bytes for field in fields], np.int64)
        self._start = dict(zip(self._fields, (np.cumsum(sizes) - sizes).tolist(), strict=True))

    def read(self, key: Key, start: int, stop: int) -> Array:
        """Read rows `[start, stop)` of one leaf."""
        field = self._fields[key]
        shape = (stop - start, *field.shape)
        if not field.row_bytes or start == stop:
            return np.empty(shape, field.numpy)
        count = (stop - start) * (field.row_bytes // field.numpy.itemsize)
        offset = self._start[key] + start * field.row_bytes
        return np.fromfile(self._path, field.numpy, count, offset=offset).reshape(shape)

    def write(self, key: Key, start: int, array: Array) -> None:
        """Overwrite rows of one leaf from row `start`."""
        descriptor = fs.open_to_change(self._path)
        try:
            offset = self._start[key] + start * self._fields[key].row_bytes
            fs.pwrite(descriptor, bytes_of(array), offset, self._path)
        finally:
            fs.close(descriptor, self._path)


def field_entries(fields: Sequence[Field]) -> list[dict[str, Any]]:
    """Return fields as JSON."""
    return [{"key": list(f.key), "dtype": f.dtype, "shape": list(f.shape), "role": f.role} for f in fields]


_VERSION = 3


@dataclass(frozen=True, slots=True)
class _Header:
    """The first line: the identity of the run, and further facts that are known at its start."""

    version: int
    run: Mapping[str, Any]
    about: Mapping[str, Any]


class Journal(Closing):
    """Appends to the journal at `path`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor = fs.open_to_append(path)

    def begin(self, run: Mapping[str, Any], about: Mapping[str, Any]) -> None:
        """Begin the journal of a new run; `run` is its identity as JSON."""
        self.append({"version": _VERSION, "run": run, "about": about})

    def append(self, document: Mapping[str, Any]) -> None:
        """Record a finished task, after its rows were written."""
        text = dump_json(document)
        fs.write(self._descriptor, memoryview(f"{digest_bytes(text.encode())} {text}\n".encode()), self._path)

    def close(self) -> None:
        """Close the file; may be called twice."""
        if self._descriptor >= 0:
            descriptor, self._descriptor = self._descriptor, -1  # it is invalid even if closing it fails
            fs.close(descriptor, self._path)


def read_journal(
    path: Path, take_about: Callable[[Any], None], take_entry: Callable[[Any], None]
) -> dict[str, Any] | None:
    """Read a journal and return the identity of its run; None without a journal, or if its first line is damaged.

    `take_about` is called with the facts in the first line, `take_entry` with each entry; a ValueError of either
    rejects the line. Everything after the last valid line is cut off, so that entries can be appended.
    """
    try:
        data = read_regular(path)
    except FileNotFoundError:
        return None
    header: _Header | None = None
    sound = 0
    for line in data.split(b"\n")[:-1]:
        try:
            document = _document(line, path)
            if header is None:
                first = decode(_Header, document, str(path))
                take_about(first.about)
                header = first
            else:
                take_entry(document)
        except ValueError:  # also FormatError, and errors of base64 and NumPy about invalid bytes
            break
        sound += len(line) + 1
    if header is None or header.version != _VERSION:
        return None
    if sound < len(data):
        descriptor = fs.open_to_change(path)
        try:
            fs.truncate(descriptor, sound, path)
        finally:
            fs.close(descriptor, path)
    return dict(header.run)


def _document(line: bytes, path: Path) -> Any:
    digest, _, text = line.partition(b" ")
    if digest_bytes(text) != digest.decode(errors="replace"):
        raise FormatError(f"a line of {path} does not fit its digest")
    return parse_json(text, str(path))


def require_same_run(found: Mapping[str, Any], identity: Mapping[str, Any], folder: Path) -> None:
    """Raise UsageError, which lists the differences, if the journal belongs to another run than `identity`."""
    different = [name for name in identity if name not in found or found[name] != plain(identity[name])]
    if different:
        raise UsageError(
            f"the unfinished run at {folder} is another one: {', '.join(different)} differ",
            hint="leave --resume out to start over",
        )


_NOT_RESUMABLE = (SchemaError, FormatError, UsageError)
"""Errors that another run of the same tasks would raise again."""


@contextlib.contextmanager
def keeping(
    staging: Staging, progress: Progress, count: Callable[[], tuple[int, int]], how: str = "add --resume"
) -> Iterator[None]:
    """Keep the finished tasks in `staging` after an error, unless another run would end in the same error.

    `count` returns the number of finished tasks and of all tasks. `how` says how to continue; it is added to the hint
    of the error, or to the notes of an error without hints, such as KeyboardInterrupt.
    """
    staging.kept = staging.taken_up
    if staging.unusable is not None and not staging.taken_up:
        progress.note(f"the unfinished run at {staging.unusable} has no journal to resume from: all is done again")
    try:
        yield
        staging.kept = False
    except BaseException as error:
        finished, tasks = count()
        worth = (finished > 0 or staging.taken_up) and journal_path(staging.path).exists()
        staging.kept = worth and not isinstance(error, _NOT_RESUMABLE)
        if staging.kept and finished:
            are = "is" if finished == 1 else "are"
            kept = f"{finished:,} of {tasks:,} chunks {are} kept: {how} to continue from there"
            if isinstance(error, RbtoolError):
                error.hint = f"{error.hint}; {kept}" if error.hint else kept
            else:
                error.add_note(f"hint: {kept}")
        raise


def array_text(array: Any, dtype: Any) -> str:
    """Return the elements of an array, as `dtype`, in base64."""
    return base64.b64encode(np.ascontiguousarray(array, dtype).tobytes()).decode()


def array_of(text: str, dtype: Any) -> Array:
    """Undo `array_text`; ValueError for invalid text. The array is one-dimensional and may be written to."""
    return np.frombuffer(base64.b64decode(text, validate=True), dtype).copy()
