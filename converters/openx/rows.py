"""The process that unpickles episodes, and the rows of their columns."""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, BinaryIO, cast

import numpy as np

from ...core.encodings.pickles import PickleReader
from ...core.errors import CorruptDataError, FormatError
from ...core.format.contracts import Array, Closing
from ...core.ted.schema import Field, Key, encode_text, key_name
from ..files.archives import Archive, ArchiveMember, CutError, MemberFile
from ..files.images import decode_image
from .steps import Episode, Step, numbers
from .survey import Column, keys_of

_LARGEST = 512 << 20


class EpisodeUnpickler(Closing):
    """Loads one episode after the other, all in one process that does nothing else. Not for several threads.

    The process ends with this object, or when it is closed. A fork, or a copy in another process, starts one of its
    own.
    """

    def __init__(self) -> None:
        self._reader: PickleReader | None = None
        self._owner = os.getpid()
        self._end: Callable[[], object] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {"_reader": None, "_owner": 0, "_end": None}

    @property
    def is_here(self) -> bool:
        """Whether the process was started by this one; what a fork inherits must not be used."""
        return self._owner == os.getpid()

    def load(self, file: BinaryIO, size: int, what: str) -> Episode:
        """Unpickle the next `size` bytes of a file; the episode before is gone. `what` names it in errors."""
        with self.explained(what):
            if self._reader is None or not self.is_here:
                self._reader = reader = PickleReader("the episode", _LARGEST)
                self._owner, self._end = os.getpid(), weakref.finalize(self, reader.close)
            return Episode(self._reader, self._reader.load(file, size, pack=True), what)

    @contextlib.contextmanager
    def explained(self, what: str) -> Iterator[None]:
        """Name the episode in errors about it."""
        try:
            yield
        except CutError:
            raise
        except FormatError as error:
            if error.message.startswith(what):
                raise
            kind = CorruptDataError if isinstance(error, CorruptDataError) else FormatError
            raise kind(f"{what}: {error.message}", hint=error.hint) from error

    def close(self) -> None:
        """End the process."""
        if self._end is not None and self.is_here:
            self._end()
        self._reader = self._end = None


def load_episode(unpickler: EpisodeUnpickler, archive: Archive, member: ArchiveMember) -> Episode:
    """Unpickle the episode in a member of an archive."""
    file = cast(BinaryIO, MemberFile(archive, member.start, member.size))
    return unpickler.load(file, member.size, f"{archive.path}: {member.name}")


def read_rows(
    episode: Episode,
    columns: Sequence[Column],
    fields: Mapping[Key, Field],
    span: tuple[int, int],
    carried: Mapping[Key, Array] | None = None,
) -> dict[Key, Array]:
    """Read the rows of `span` of these columns, by the keys of their fields; those in `carried` are the first of them.

    Raises FormatError for values that a field does not hold, CorruptDataError for images that are damaged.
    """
    start, stop = span
    keys = [key for column in columns for key in keys_of(column)]
    held = {key: np.empty((stop - start, *fields[key].shape), fields[key].numpy) for key in keys}
    at = 0
    for key, array in (carried or {}).items():
        at = len(array)
        held[key][:at] = array
    for steps in episode.steps(start + at, stop):
        _fill(episode, steps, columns, held, at)
        at += len(steps)
    return held


def _fill(
    episode: Episode, steps: Sequence[Step], columns: Sequence[Column], held: Mapping[Key, Array], at: int
) -> None:
    """Put the values of some steps into the rows from `at` on."""
    forms = {column.path: column.form for column in columns}
    for path in forms:
        if any(path not in step for step in steps):
            raise FormatError(f"{episode.what}: {key_name(path)} is not in every step")
    values = episode.columns(steps, forms)
    rows = slice(at, at + len(steps))
    for column in columns:
        found, keys, what = values[column.path], keys_of(column), f"{episode.what}: {column.name}"
        target = held[keys[0]][rows]
        if column.image is not None:
            for number, data in enumerate(found):
                target[number] = decode_image(data, column.image, what)
        elif column.form.kind == "text":
            if max(map(len, found)) > column.width:
                raise FormatError(f"{what} is longer than any text before")
            target[...], held[keys[1]][rows] = encode_text(found, column.width)
        else:
            target[...] = numbers(found, column.dtype, column.shape, what).reshape(target.shape)
