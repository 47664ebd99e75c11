"""Maps features of RLDS to TED: features of steps to columns, features of episodes to texts.

Rows come from the lists of an Example. Features of an episode, such as those in `episode_metadata`, become its texts.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ...core.errors import CorruptDataError, FormatError
from ...core.format.contracts import Array
from ...core.format.documents import dump_json
from ...core.format.manifest import Dropped
from ...core.ted.schema import (
    LONGEST_ROW,
    NEXT,
    NEXT_DONE,
    NEXT_TERMINATED,
    Field,
    Key,
    Role,
    Timing,
    encode_text,
    key_name,
    length_key,
    text_fields,
)
from ..files.images import ImageForm, Jpeg, decode_image, image_form
from ..files.rlds_steps import IS_FIRST, IS_INIT, IS_LAST, IS_TERMINAL, step_meaning
from .example import Example, ExampleParser, Floats, Ints, Strings, Values
from .shards import STEPS, Leaf

RAGGED, ROW_LENGTHS = "ragged_flat_values", "ragged_row_lengths_0"
"""Suffixes of the lists that hold a ragged sequence: all values, and the number of values of each step."""
_MOST_NESTED = 1 << 20
"""Limit in bytes for a sequence in a step, since every row is padded to the longest."""
_LENGTH_GIVERS = ("is_first", "is_last", "is_terminal", "reward", "discount")


class EpisodeRecord:
    """The record of an episode: the lists of its Example, and its number of steps."""

    def __init__(self, data: bytes, parser: ExampleParser, leaves: Mapping[str, Leaf], what: str) -> None:
        """Parse a record.

        Args:
            data: the bytes of an Example.
            parser: the parser of the dataset.
            leaves: the leaves of a step by name.
            what: the name of the record in messages.

        Raises:
            CorruptDataError: the data is not an Example.
            FormatError: no list tells the number of steps.
        """
        self.what = what
        try:
            self.example = parser.parse(data)
        except CorruptDataError as error:
            raise CorruptDataError(f"{what}: {error.message}") from error
        self._lists: dict[str, Values | None] = {}
        self.steps = self._count(leaves)

    def _count(self, leaves: Mapping[str, Leaf]) -> int:
        """Count the steps, by a flag or else by the first feature with a fixed number of values per step."""
        for name in (*_LENGTH_GIVERS, *leaves):
            leaf = leaves.get(name)
            if leaf is None or leaf.why or (leaf.kind == "numbers" and (leaf.nested or leaf.size <= 0)):
                continue
            found = self.find(name)
            if found is not None:
                return len(found) // (1 if isinstance(found, Strings) else leaf.size)
        if any(name.startswith(f"{STEPS}/") for name in self.example.names):
            raise FormatError(f"{self.what}: no feature states how many steps there are")
        return 0

    def find(self, name: str) -> Values | None:
        """Return the list of a feature of the steps, None if there is none."""
        if name not in self._lists:
            try:
                self._lists[name] = self.example.get(f"{STEPS}/{name}")
            except CorruptDataError as error:
                raise self.damaged(name, error.message) from error
        return self._lists[name]

    def damaged(self, name: str, why: str) -> CorruptDataError:
        """Return the error for damage in a feature."""
        return CorruptDataError(f"{self.what}: '{STEPS}/{name}': {why}")

    def numbers(self, name: str, size: int) -> Floats | Ints:
        """Return the list of a feature with `size` numbers per step; an empty list if no numbers are expected."""
        found = self.find(name)
        found = self._of_equal_rows(name) if found is None else found
        if found is None and not size * self.steps:
            return Floats(np.zeros(0, np.float32))
        if found is None or isinstance(found, Strings):
            raise FormatError(f"{self.what} has no numbers '{STEPS}/{name}'")
        self._require_count(name, len(found), size * self.steps)
        return found

    def _of_equal_rows(self, name: str) -> Values | None:
        """Return the list of a sequence of fixed length that is stored in the form of a ragged one."""
        found = self.find(f"{name}/{RAGGED}")
        if found is not None:
            lengths = self.read_numbers(f"{name}/{ROW_LENGTHS}", 1, 0, self.steps, np.dtype(np.int64))
            if (lengths != lengths[:1]).any():
                raise self.damaged(name, "its steps have sequences of several lengths")
        return found

    def strings(self, name: str) -> Strings:
        """Return the list of a feature with one byte string per step."""
        found = self.find(name)
        if found is None and not self.steps:
            return Strings(b"", np.zeros((0, 2), np.int64))
        if not isinstance(found, Strings):
            raise FormatError(f"{self.what} has no byte strings '{STEPS}/{name}'")
        self._require_count(name, len(found), self.steps)
        return found

    def _require_count(self, name: str, found: int, expected: int) -> None:
        if found != expected:
            raise FormatError(
                f"{self.what}: '{STEPS}/{name}' has {found:,} values for {self.steps:,} steps, not {expected:,}"
            )

    def flags(self, name: str) -> Array:
        """Return a flag, bool `[steps]`; False if the record does not have it."""
        if self.find(name) is None:
            return np.zeros(self.steps, bool)
        return self.read_numbers(name, 1, 0, self.steps, np.dtype(bool))

    def read_numbers(self, name: str, size: int, start: int, stop: int, dtype: np.dtype[Any]) -> Array:
        """Return the numbers of steps `[start, stop)` as a flat array."""
        found = self.numbers(name, size)
        if not len(found):
            return np.zeros(0, dtype)
        try:
            return found.read(start * size, stop * size, dtype)
        except CorruptDataError as error:
            raise self.damaged(name, error.message) from error


@dataclass(slots=True)
class StepColumn:
    """A feature of the steps, and the column that it becomes.

    The survey passes each sound episode to `look` before any row is read.

    Attributes:
        leaf: the feature.
        key: the key in TED.
        role: the role of the field.
        timing: when its rows are known.
        why: why the column cannot be kept, "" if it can; `look` may set it.
        longest: of text and ragged sequences, the length of the longest row.
        found: of images without a stated shape, the form of the first image, in the record `seen_in`.
        jpeg: how its JPEG images are decoded.
    """

    leaf: Leaf
    key: Key
    role: Role
    timing: Timing
    why: str = ""
    longest: int = 0
    found: ImageForm | None = None
    seen_in: str = ""
    jpeg: Jpeg = "exact"

    @property
    def kind(self) -> str:
        """How it is read: `numbers`, `encoded`, `ragged`, `text` or `image`."""
        if self.leaf.kind != "numbers":
            return self.leaf.kind
        if self.leaf.encoding != "none":
            return "encoded"
        return "ragged" if self.leaf.nested else "numbers"

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of a row."""
        if self.kind == "ragged":
            return (max(1, self.longest), *self.leaf.shape)
        if self.kind == "image":
            return self._pixel_shape()
        return () if self.role == "reward" else self.leaf.shape

    def fields(self) -> list[Field]:
        """The source fields that it becomes: two for text and ragged sequences, values and lengths."""
        if self.kind == "text":
            return text_fields(self.key, max(1, self.longest))
        made = [Field(self.key, self.leaf.dtype, self.shape, self.role)]
        return [*made, Field(length_key(self.key), "int32", (), self.role)] if self.kind == "ragged" else made

    def require(self, record: EpisodeRecord) -> None:
        """Raise FormatError for an episode whose number of values does not fit its number of steps."""
        if self.kind == "numbers":
            record.numbers(self.leaf.name, self.leaf.size)
        elif self.kind == "ragged":
            self._row_lengths(record)
        elif self.kind != "encoded" or self.leaf.size >= 0:
            record.strings(self.leaf.name)

    def look(self, record: EpisodeRecord) -> None:
        """Update the column for a sound episode: longest row, form of images, and whether it can be kept."""
        if self.kind == "text":
            self._look_at_length(record.strings(self.leaf.name).longest, LONGEST_ROW, "bytes of text", record)
        elif self.kind == "ragged":
            size = max(1, self.leaf.size * self.leaf.numpy.itemsize)
            longest = int(self._row_lengths(record).max(initial=0))
            self._look_at_length(longest, _MOST_NESTED // size, "values in a step", record)
        elif self.kind == "image" and self.leaf.size < 0:
            self._look_at_images(record)
        elif self.kind == "encoded" and self.leaf.size < 0:
            self.why = f"its shape is {list(self.leaf.shape)}: tensors of different shapes are not supported"

    def _look_at_length(self, longest: int, most: int, what: str, record: EpisodeRecord) -> None:
        self.longest = max(self.longest, longest)
        if longest > most and not self.why:
            self.why = f"it has {longest:,} {what} in {record.what}; up to {most:,} can be kept"

    def _look_at_images(self, record: EpisodeRecord) -> None:
        """Find the common form of all images, as their shape is not stated."""
        frames = record.strings(self.leaf.name)
        for row in range(0 if self.why else len(frames)):
            found = image_form(frames.read(row, row + 1)[0], self._what(record, row))
            if self.found is None:
                self.found, self.seen_in = found, record.what
            elif found != self.found:
                self.why = f"its images are {found} in {record.what}, and {self.found} in {self.seen_in}"
                return

    def _what(self, record: EpisodeRecord, row: int) -> str:
        return f"{record.what}: '{STEPS}/{self.leaf.name}', step {row:,}"

    @property
    def _form(self) -> ImageForm:
        """The form of the image files; pixels of float32 are stored as four channels of bytes."""
        if self.found is not None:
            return self.found
        height, width, channels = (*self.leaf.shape, 1)[:3]
        if self.leaf.dtype == "float32":
            return ImageForm("uint8", (height, width, 4 * channels))
        return ImageForm(self.leaf.dtype, (height, width, channels))

    def _pixel_shape(self) -> tuple[int, ...]:
        if self.found is None:
            return self.leaf.shape
        height, width, channels = self.found.shape
        return (height, width, channels // 4) if self.leaf.dtype == "float32" else self.found.shape

    def read(self, record: EpisodeRecord, start: int, stop: int) -> dict[Key, Array]:
        """Return the rows `[start, stop)` of an episode by key."""
        name = self.leaf.name
        if self.kind == "text":
            return self._texts(record, start, stop)
        if self.kind == "image":
            return {self.key: self._pixels(record, start, stop)}
        if self.kind == "ragged":
            return self._ragged(record, start, stop)
        if self.kind == "encoded":
            return {self.key: self._decoded(record, start, stop)}
        flat = record.read_numbers(name, self.leaf.size, start, stop, self.leaf.numpy)
        return {self.key: flat.reshape(stop - start, *self.shape)}

    def _texts(self, record: EpisodeRecord, start: int, stop: int) -> dict[Key, Array]:
        strings = record.strings(self.leaf.name).read(start, stop)
        try:
            b"\0".join(strings).decode()
        except UnicodeDecodeError as error:
            raise record.damaged(self.leaf.name, f"it is not UTF-8 text: {error.reason}") from error
        characters, lengths = encode_text(strings, max(1, self.longest))
        return {self.key: characters, length_key(self.key): lengths}

    def _pixels(self, record: EpisodeRecord, start: int, stop: int) -> Array:
        form = self._form
        made = np.empty((stop - start, *form.shape), form.dtype)
        for row, frame in enumerate(record.strings(self.leaf.name).read(start, stop)):
            made[row] = decode_image(frame, form, self._what(record, start + row), self.jpeg)
        return made.view(self.leaf.numpy).reshape(stop - start, *self.shape)

    def _row_lengths(self, record: EpisodeRecord) -> Array:
        """Return the number of values of each step, int64 `[steps]`."""
        lengths = record.read_numbers(f"{self.leaf.name}/{ROW_LENGTHS}", 1, 0, record.steps, np.dtype(np.int64))
        if (lengths < 0).any():
            raise record.damaged(self.leaf.name, "a step has a negative number of values")
        found = record.find(f"{self.leaf.name}/{RAGGED}")
        expected = int(lengths.sum()) * self.leaf.size
        if isinstance(found, Strings) or (0 if found is None else len(found)) != expected:
            raise record.damaged(self.leaf.name, "the lengths of its steps do not add up to its number of values")
        return lengths

    def _ragged(self, record: EpisodeRecord, start: int, stop: int) -> dict[Key, Array]:
        lengths, size = self._row_lengths(record), self.leaf.size
        ends = np.cumsum(lengths)
        first = int(ends[start - 1]) if start else 0
        found = record.find(f"{self.leaf.name}/{RAGGED}")
        made = np.zeros((stop - start, *self.shape), self.leaf.numpy)
        if isinstance(found, Floats | Ints):
            try:
                flat = found.read(first * size, int(ends[stop - 1]) * size, self.leaf.numpy)
            except CorruptDataError as error:
                raise record.damaged(self.leaf.name, error.message) from error
            rows = flat.reshape(-1, *self.leaf.shape)
            for row in range(start, stop):
                last = int(ends[row])
                made[row - start, : int(lengths[row])] = rows[last - int(lengths[row]) - first : last - first]
        return {self.key: made, length_key(self.key): lengths[start:stop].astype(np.int32)}

    def _decoded(self, record: EpisodeRecord, start: int, stop: int) -> Array:
        """Return tensors that are stored as bytes, compressed or not."""
        made = np.empty((stop - start, *self.leaf.shape), self.leaf.numpy)
        expected = math.prod(self.leaf.shape) * self.leaf.numpy.itemsize
        for row, stored in enumerate(record.strings(self.leaf.name).read(start, stop)):
            data = stored
            if self.leaf.encoding == "zlib":
                try:
                    data = zlib.decompressobj().decompress(stored, expected + 1)
                except zlib.error as error:
                    raise record.damaged(
                        self.leaf.name, f"step {start + row:,} cannot be unpacked ({error})"
                    ) from error
            if len(data) != expected:
                raise record.damaged(
                    self.leaf.name, f"step {start + row:,} has {len(data):,} bytes, expected {expected:,}"
                )
            made[row] = np.frombuffer(data, self.leaf.numpy).reshape(self.leaf.shape)
        return made


def _without_clashes(columns: Sequence[StepColumn]) -> None:
    """Append `_` to keys that clash with another key, with a key of lengths, or with `is_init`."""
    taken = {IS_INIT, *(length_key(column.key) for column in columns if column.kind in ("text", "ragged"))}
    given: set[Key] = set()
    for column in columns:
        while column.key in taken or column.key in given:
            column.key = (*column.key[:-1], column.key[-1] + "_")
        given.add(column.key)


def columns_of_steps(
    leaves: Sequence[Leaf], *, images: bool = True
) -> tuple[list[StepColumn], list[Dropped], dict[str, str]]:
    """Return the columns of the features of steps, the features that are left out, and keys that differ from names."""
    columns: list[StepColumn] = []
    dropped: list[Dropped] = []
    for leaf in leaves:
        meaning = step_meaning(leaf.path)
        if meaning is None:
            continue
        key, role, timing = meaning
        why = leaf.why or ("--images skip leaves it out" if leaf.kind == "image" and not images else "")
        if role == "reward" and (leaf.kind != "numbers" or leaf.nested or leaf.size != 1):
            why = why or "a reward must be one number per step"
        if why:
            dropped.append(Dropped(source_name(leaf), why))
        else:
            columns.append(StepColumn(leaf, key, role, timing))
    _without_clashes(columns)
    names = {
        ".".join(one.leaf.path): key_name((NEXT, *one.key) if one.timing == "result" else one.key) for one in columns
    }
    renamed = {name: key for name, key in names.items() if name != key}
    flags = {IS_FIRST: key_name(IS_INIT), IS_LAST: key_name(NEXT_DONE), IS_TERMINAL: key_name(NEXT_TERMINATED)}
    return columns, dropped, renamed | flags


def source_name(leaf: Leaf) -> str:
    """Return the name of a feature of the steps in `features.json`."""
    return f"{STEPS}/{leaf.name}"


METADATA, _INVALID = "episode_metadata", "invalid"
NUMBER, SEED = "episode", "seed"
OWN = frozenset({f"{METADATA}/{NUMBER}", f"{METADATA}/{SEED}"})
"""Features of episodes in exports of rbtool that are not texts."""
_LONGEST = 64 << 10
_SHOWN_VALUES = 1 << 13


@dataclass(slots=True)
class MetadataTexts:
    """Reads the features of episodes as texts; numbers become JSON.

    Attributes:
        names: the features by the name of their text, which lacks `episode_metadata`.
        dropped: features that cannot be texts.
        too_long: features that were too long in some episode, with the reason.
    """

    names: dict[str, Leaf] = field(default_factory=dict)
    dropped: list[Dropped] = field(default_factory=list)
    too_long: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, leaves: Sequence[Leaf]) -> MetadataTexts:
        """Choose the names of the texts for these features."""
        made = cls()
        for leaf in leaves:
            why = leaf.why or _why_not(leaf)
            if why:
                made.dropped.append(Dropped(leaf.name, why))
                continue
            short = leaf.path[1:] if leaf.path[0] == METADATA and len(leaf.path) > 1 else leaf.path
            name = ".".join(short)
            while name in made.names:
                name += "_"
            made.names[name] = leaf
        return made

    def take(self, example: Example, what: str) -> bool:
        """Check the features of an episode; return whether the recorder marked it as invalid."""
        found = self.read(example, what)
        return any(
            found.get(name) == "true"
            for name, leaf in self.names.items()
            if leaf.path[-1] == _INVALID and leaf.dtype == "bool"
        )

    def read(self, example: Example, what: str) -> dict[str, str]:
        """Return the texts of an episode by name; `what` names it in messages. CorruptDataError for a wrong type."""
        texts = {}
        for name, leaf in self.names.items():
            try:
                text = _text(example, leaf)
            except CorruptDataError as error:
                raise CorruptDataError(f"{what}: {leaf.name!r}: {error.message}") from error
            if text is None:
                continue
            if len(text) > _LONGEST:
                self.too_long.setdefault(leaf.name, f"it has more than {_LONGEST:,} characters in {what}")
            else:
                texts[name] = text
        return texts


def stored_seed(example: Example) -> int | None:
    """Return the seed of an episode in an export of rbtool, None if it has none."""
    found = example.get(f"{METADATA}/{SEED}")
    text = found.read(0, 1)[0] if isinstance(found, Strings) and len(found) == 1 else b""
    return int(text) if text.isdigit() and len(text) <= 20 and int(text) < 1 << 64 else None


def _why_not(leaf: Leaf) -> str:
    if leaf.kind == "image":
        return "it is an image of an episode"
    if leaf.encoding != "none":
        return "it is an encoded tensor of an episode"
    if leaf.size > _SHOWN_VALUES:
        return f"it has {leaf.size:,} values per episode"
    return ""


def _text(example: Example, leaf: Leaf) -> str | None:
    """Return the value of a feature as text, None if the episode does not have it."""
    values = example.get(leaf.name)
    if values is None:
        return None
    if isinstance(values, Strings) != (leaf.kind == "text"):
        raise CorruptDataError("it is not text" if leaf.kind == "text" else "it is not a number")
    if isinstance(values, Strings):
        if len(values) != 1:
            raise CorruptDataError(f"it has {len(values):,} texts, expected one")
        try:
            return values.read(0, 1)[0].decode()
        except UnicodeDecodeError as error:
            raise CorruptDataError(f"it is not UTF-8 text: {error.reason}") from error
    if len(values) > _SHOWN_VALUES:
        return " " * (_LONGEST + 1)
    size = math.prod(leaf.shape)
    if not leaf.nested and len(values) != size:
        raise CorruptDataError(f"it has {len(values):,} values, expected {size:,}")
    array = values.read(0, len(values), leaf.numpy)
    if leaf.nested and leaf.size > 0 and len(array) % leaf.size:
        raise FormatError(f"{leaf.name!r} has {len(array):,} values, which are not rows of {leaf.size:,}")
    shape = (-1, *leaf.shape) if leaf.nested else leaf.shape
    value = array.reshape(shape).tolist() if array.size else []
    return dump_json(value)
