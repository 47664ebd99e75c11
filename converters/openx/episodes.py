"""The pickled episodes of Open X-Embodiment: unpickled in a process of their own, and the forms of their steps."""

from __future__ import annotations

import contextlib
import functools
import os
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO, Literal, TypeAlias, cast

import numpy as np

from ...core.errors import CorruptDataError, FormatError
from ...core.format.contracts import Array, Closing
from ..files.archives import Archive, ArchiveMember, CutError, MemberFile
from ..files.images import ImageForm, image_form, is_image
from ..files.pickles import PickledArray, PickledBytes, PickledList, PickleReader, Value

Path: TypeAlias = tuple[str, ...]
Step: TypeAlias = dict[Path, Value]
Kind: TypeAlias = Literal["number", "text", "image", "none", "other"]

_IMAGE_KEYS = frozenset({"bytes", "path"})
_ROWS = 256
_TEXT_KINDS = "SU"
_NUMBER_KINDS = "biuf"
_DEEPEST = 12


@dataclass(frozen=True, slots=True)
class LeafForm:
    """What the values of a leaf are: of a `number` the element type and shape; `python` if it was written by Python.

    `why` states why a leaf of the kind `other` cannot be read.
    """

    kind: Kind
    dtype: str = ""
    shape: tuple[int, ...] = ()
    python: bool = False
    why: str = ""

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}" if self.kind == "number" else self.kind


TEXT, IMAGE, NONE = LeafForm("text"), LeafForm("image"), LeafForm("none")
_SCALARS = {
    bool: LeafForm("number", "bool", python=True),
    int: LeafForm("number", "int64", python=True),
    float: LeafForm("number", "float64", python=True),
    str: TEXT,
    type(None): NONE,
}
_WIDER = {frozenset({"int64", "float64"}): "float64"}
RAGGED = LeafForm("other", why="its values differ in form between the steps of an episode")


def form_of(value: Value) -> LeafForm:
    """Return the form of one value; bytes are an image or text, by how they begin."""
    if isinstance(value, PickledArray):
        return _array_form(value.dtype, value.shape, value.python)
    if isinstance(value, PickledBytes):
        return IMAGE if is_image(value.head) else TEXT
    if isinstance(value, PickledList):
        return LeafForm("other", why="it is a list of something else than numbers of one form")
    if isinstance(value, dict):
        return IMAGE if image_bytes(value) is not None else LeafForm("other", why="it has no values")
    return _SCALARS.get(type(value), LeafForm("other", why=f"it is of type {type(value).__name__}"))


@functools.lru_cache(maxsize=1024)
def _array_form(dtype: np.dtype[Any], shape: tuple[int, ...], python: bool) -> LeafForm:
    if dtype.kind in _TEXT_KINDS and not shape:
        return TEXT
    if dtype.kind not in _NUMBER_KINDS:
        return LeafForm("other", why=f"it is an array of {dtype}")
    return LeafForm("number", dtype.newbyteorder("=").name, shape, python)


def joined_form(one: LeafForm, other: LeafForm) -> LeafForm | None:
    """Return the form that holds values of both; None where there is none."""
    if one == other:
        return one
    if one.kind == other.kind == "number" and one.python and other.python and one.shape == other.shape:
        wider = _WIDER.get(frozenset({one.dtype, other.dtype}))
        return None if wider is None else LeafForm("number", wider, one.shape, python=True)
    return None


def leaves_of(step: Value, what: str) -> Step:
    """Return the leaves of a step by their paths; FormatError for a step that is no dictionary."""
    if not isinstance(step, dict):
        raise FormatError(f"{what} is no dictionary")
    found: Step = {}
    _collect(step, (), found)
    return found


def _collect(nested: Mapping[str, Value], path: Path, found: Step) -> None:
    for name, value in nested.items():
        here = (*path, name)
        if isinstance(value, dict) and value and not value.keys() <= _IMAGE_KEYS and len(here) < _DEEPEST:
            _collect(value, here, found)
        else:
            found[here] = value


def image_bytes(value: Value) -> PickledBytes | None:
    """Return the bytes of an image that is stored as `datasets` does: a dictionary of `bytes` and `path`."""
    data = value.get("bytes") if isinstance(value, dict) and value.keys() <= _IMAGE_KEYS else None
    return data if isinstance(data, PickledBytes) else None


class Episode:
    """An episode that `reader` has loaded: `length` steps and the rest of its dictionary, `others`; `what` names it."""

    def __init__(self, reader: PickleReader, found: Value, what: str) -> None:
        steps = found.get("steps") if isinstance(found, dict) else None
        if not isinstance(found, dict) or not isinstance(steps, PickledList) or len(steps.shape) != 1:
            raise FormatError(f"{what} is no episode, expected a dictionary with a list of steps")
        self.what = what
        self.length = len(steps)
        self.others = {name: value for name, value in found.items() if name != "steps"}
        self._reader, self._steps = reader, steps

    def steps(self, start: int, stop: int) -> Iterator[list[Step]]:
        """Yield the leaves of the steps `[start, stop)`, some hundred steps at a time."""
        for first in range(start, stop, _ROWS):
            values = self._reader.items(self._steps, first, min(first + _ROWS, stop))
            yield [leaves_of(one, f"{self.what}: step {first + at}") for at, one in enumerate(values)]

    def forms(self, steps: Sequence[Step]) -> dict[Path, LeafForm]:
        """Return the form of each leaf of some steps; what differs among them is of the kind `other`."""
        found: dict[Path, LeafForm] = {}
        for number, step in enumerate(steps):
            if number and step.keys() != found.keys():
                for path in step.keys() ^ found.keys():
                    found[path] = RAGGED
            for path, value in step.items():
                form, before = form_of(value), found.get(path)
                if before is not form:
                    found[path] = form if before is None else joined_form(before, form) or RAGGED
        return found

    def fetched(self, values: Sequence[PickledArray | PickledBytes]) -> list[Array | bytes]:
        """Return arrays and bytes by one request."""
        return self._reader.parts(values)

    def image_form(self, value: Value, what: str) -> ImageForm:
        """Return the form of the image that a leaf is."""
        [data] = self.fetched([_image(value)])
        return image_form(cast(bytes, data), what)

    def columns(self, steps: Sequence[Step], forms: Mapping[Path, LeafForm]) -> dict[Path, list[Any]]:
        """Return the values of these leaves in each step: arrays, Python numbers, text in UTF-8, and encoded images."""
        places: list[tuple[Path, int]] = []
        asked: list[PickledArray | PickledBytes] = []
        found: dict[Path, list[Any]] = {}
        for path, form in forms.items():
            found[path] = values = [_image(step[path]) if form.kind == "image" else step[path] for step in steps]
            for at, value in enumerate(values):
                if isinstance(value, PickledArray | PickledBytes):
                    places.append((path, at))
                    asked.append(value)
        for (path, at), data in zip(places, self.fetched(asked), strict=True):
            found[path][at] = data
        for path, form in forms.items():
            if form.kind == "text":
                found[path] = [_utf8(value) for value in found[path]]
        return found


def _image(value: Value) -> PickledBytes:
    data = value if isinstance(value, PickledBytes) else image_bytes(value)
    if data is None:
        raise FormatError("a value is no image")
    return data


def _utf8(value: Any) -> bytes:
    """Return text as it is stored: bytes that are no UTF-8 are taken for Latin-1."""
    if isinstance(value, np.ndarray):
        value = value.item()
    if isinstance(value, str):
        return value.encode("utf-8", "replace")
    try:
        bytes(value).decode("utf-8")
    except UnicodeDecodeError:
        return bytes(value).decode("latin-1").encode("utf-8")
    return bytes(value)


def numbers(values: Sequence[Any], dtype: str, shape: tuple[int, ...], what: str) -> Array:
    """Return values of one leaf as `[n, *shape]`; FormatError where the type or the shape does not hold them."""
    rows = np.array(values) if not shape else np.stack([np.asarray(value) for value in values])
    if rows.shape != (len(values), *shape):
        raise FormatError(f"{what}: values have the shape {list(rows.shape[1:])}, expected {list(shape)}")
    if rows.dtype.name == dtype:
        return rows
    with np.errstate(over="ignore", invalid="ignore"):
        cast_rows = rows.astype(dtype)
        if not np.array_equal(cast_rows.astype(rows.dtype), rows, equal_nan=rows.dtype.kind == "f"):
            raise FormatError(f"{what}: {dtype} does not hold all values, which are {rows.dtype}")
    return cast_rows


def is_single_precision(rows: Array) -> bool:
    """Whether float32 holds every value."""
    with np.errstate(over="ignore", invalid="ignore"):
        return bool(np.array_equal(rows.astype(np.float32).astype(rows.dtype), rows, equal_nan=True))


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
