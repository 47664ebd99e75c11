"""The journal of a run: what is finished, so that another run continues from there.

Each line is a digest, a space and a JSON document. The first identifies the run, every other describes what is
finished. A line that does not match its digest was not completely written: it and what follows are ignored.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np

from ..errors import FormatError, RbtoolError, UsageError
from ..format import fs
from ..format.contracts import Array, Closing
from ..format.digest import digest_bytes, read_regular
from ..format.documents import decode, dump_json, parse_json, plain
from ..format.staging import Staging
from ..progress import Progress

_VERSION = 2


@dataclass(frozen=True, slots=True)
class _Header:
    """The first line: the identity of the run, and what else is known from its start."""

    version: int
    run: Mapping[str, Any]
    about: Mapping[str, Any]


class Journal(Closing):
    """Appends to the journal at `path`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor = fs.open_to_append(path)

    @classmethod
    def begin(cls, path: Path, run: Mapping[str, Any], about: Mapping[str, Any]) -> Self:
        """Create the journal of a new run; `run` is its identity as JSON."""
        made = cls(path)
        made.append({"version": _VERSION, "run": run, "about": about})
        return made

    def append(self, document: Mapping[str, Any]) -> None:
        """Record what is finished, after its rows are written."""
        text = dump_json(document)
        fs.write(self._descriptor, memoryview(f"{digest_bytes(text.encode())} {text}\n".encode()), self._path)

    def close(self) -> None:
        """Close the file; may be called twice."""
        if self._descriptor >= 0:
            descriptor, self._descriptor = self._descriptor, -1  # it is gone even where closing it fails
            fs.close(descriptor, self._path)


def read_journal(
    path: Path, take_about: Callable[[Any], None], take_entry: Callable[[Any], None]
) -> dict[str, Any] | None:
    """Return the identity of a journal's run; None without a journal, and for one whose first line is damaged.

    `take_about` gets what is known from the start of the run, `take_entry` each entry; ValueError from either rejects
    the line. All after the last valid line is cut off, so that entries can be appended.
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
    """Raise UsageError where the run of a journal is not that of `identity`, naming what differs."""
    different = [name for name in identity if name not in found or found[name] != plain(identity[name])]
    if different:
        raise UsageError(
            f"the unfinished run at {folder} is another one: {', '.join(different)} differ",
            hint="leave --resume out to start over",
        )


def note_unusable(staging: Staging, progress: Progress) -> None:
    """Note that a run starts over because the journal of the unfinished one is damaged, missing or another run's."""
    if staging.unusable is not None and not staging.taken_up:
        progress.note(f"the unfinished run at {staging.unusable} has no journal to resume from: all is done again")


def note_kept(error: BaseException, finished: int, tasks: int, progress: Progress, how: str = "add --resume") -> None:
    """Add `how` to continue with what is finished to the error's hint or, where a signal ends the run, as a note."""
    are = "is" if finished == 1 else "are"
    kept = f"{finished:,} of {tasks:,} chunks {are} kept: {how} to continue from there"
    if isinstance(error, RbtoolError):
        error.hint = f"{error.hint}; {kept}" if error.hint else kept
    else:
        progress.note(kept)


def array_text(array: Any, dtype: Any) -> str:
    """Return the elements of an array, as `dtype`, in base64."""
    return base64.b64encode(np.ascontiguousarray(array, dtype).tobytes()).decode()


def array_of(text: str, dtype: Any) -> Array:
    """Undo `array_text`; ValueError for invalid text. The array is one-dimensional and may be written to."""
    return np.frombuffer(base64.b64decode(text, validate=True), dtype).copy()
