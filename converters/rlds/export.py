"""Exports to RLDS in the form of TensorFlow Datasets; `tfds.builder_from_directory(DEST)` opens the result.

An episode of T steps becomes a record of T + 1 steps:

    step                 0      1      ...    T - 1    T
    observation          o_0    o_1    ...    o_T-1    o_T   the observation after the episode
    action               a_0    a_1    ...    a_T-1    0
    reward, discount     r_0    r_1    ...    r_T-1    0     what followed the action of the same step
    other results        0      x_0    ...    x_T-2    x_T-1
    is_last                                            set, unless the source does not state how the episode ended
    is_terminal                                        the termination

The feature `steps/truncated` is written only if it does not follow from `is_last` and `is_terminal`: if an episode is
both terminated and truncated, or a flag is set inside one. Images of bytes `[height, width, channels]` become PNG; rows
of many integers, and types that an Example cannot hold, are stored as bytes of tensors. A ragged sequence of a dataset
that was converted from RLDS is written without the padding that TED needs. Texts, number and seed of episodes are under
`episode_metadata`.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ...core.errors import FormatError, SchemaError
from ...core.format import fs
from ...core.format.contracts import Array
from ...core.format.converter import Sink
from ...core.format.documents import dump_json, parse_json
from ...core.format.files import read_regular
from ...core.format.manifest import Dropped
from ...core.ted.episodes import EndReason, rows_equal
from ...core.ted.schema import (
    ACTION,
    EPISODE,
    FLAGS,
    NEXT,
    NEXT_DONE,
    NEXT_REWARD,
    NEXT_TERMINATED,
    NEXT_TRUNCATED,
    REWARD,
    Field,
    Key,
    Timing,
    key_name,
    length_key,
    state_keys,
)
from ..files.exports import ExportColumn, columns_of, decoded
from ..files.rlds_steps import IS_FIRST, IS_INIT, IS_LAST, IS_TERMINAL, STEP_FLAGS
from .columns import METADATA, NUMBER, RAGGED, ROW_LENGTHS, SEED, columns_of_steps
from .example import Listed, example_bytes, framed
from .shards import FEATURES, INFO, STEPS, TRUNCATED, WRITTEN_HERE, parse_features

_SPLIT, _VERSION = "train", "1.0.0"
_SHARD_BYTES = 256 << 20
_CLASS, _PACKAGE = "pythonClassName", "tensorflow_datasets.core.features."
_CHANNELS = (1, 3, 4)
_SMALLEST_IMAGE = 8
_MOST_NUMBERS = 64
_AS_BYTES = frozenset({"float16", "float64", "uint64", "complex64", "complex128"})
_FLAG_ROWS = 1 << 20
_BLOCK_BYTES = 4 << 20
_SHARD_NAME = re.compile(r"\w+-train\.tfrecord-\d{5}-of-\d{5}", re.ASCII)


@dataclass(frozen=True, slots=True)
class StepFeature:
    """A leaf that becomes a feature of the steps, under `path`.

    `lengths` is the leaf with the length of each row without padding, for a ragged sequence.
    """

    column: ExportColumn
    path: Key
    timing: Timing
    lengths: ExportColumn | None = None

    @property
    def field(self) -> Field:
        """The leaf."""
        return self.column.field

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of a value; a reward is a single number."""
        return () if self.field.key == NEXT_REWARD else self.field.shape

    @property
    def is_image(self) -> bool:
        """Whether rows are stored as PNG."""
        shape = self.field.shape
        return (
            self.field.dtype == "uint8" and len(shape) == 3 and shape[2] in _CHANNELS
            and min(shape[:2]) >= _SMALLEST_IMAGE
        )  # fmt: skip

    @property
    def as_bytes(self) -> bool:
        """Whether rows are stored as bytes of tensors. Empty ones are, as TensorFlow crashes on an empty list."""
        size = math.prod(self.shape)
        return self.field.dtype in _AS_BYTES or not size or (self.field.numpy.kind in "iu" and size >= _MOST_NUMBERS)

    def described(self) -> dict[str, Any]:
        """Return the description for `features.json`."""
        if self.column.length is not None:
            return _TEXT
        if self.lengths is not None:
            inner = {"dimensions": [str(length) for length in self.shape[1:]]} if self.shape[1:] else {}
            content = {"feature": _tensor(self.field.dtype, inner), "length": "-1"}
            return {_CLASS: f"{_PACKAGE}sequence_feature.Sequence", "sequence": content}
        stated = {"dimensions": [str(length) for length in self.shape]} if self.shape else {}
        if self.is_image:
            image = {"shape": stated, "dtype": "uint8", "encodingFormat": "png"}
            return {_CLASS: f"{_PACKAGE}image_feature.Image", "image": image}
        encoding = "bytes" if self.as_bytes else "none"
        return _tensor(self.field.dtype, stated, encoding)

    def stored(self, rows: Array | list[str]) -> Listed:
        """Return rows in the form in which `described` says they are stored."""
        if isinstance(rows, list):
            return [row.encode() for row in rows]
        if self.is_image:
            return [_png(row) for row in rows]
        return [row.tobytes() for row in np.ascontiguousarray(rows)] if self.as_bytes else rows


def _tensor(dtype: str, shape: Mapping[str, Any], encoding: str = "none") -> dict[str, Any]:
    stated = {"shape": dict(shape), "dtype": dtype, "encoding": encoding}
    return {_CLASS: f"{_PACKAGE}tensor_feature.Tensor", "tensor": stated}


_TEXT: dict[str, Any] = {_CLASS: f"{_PACKAGE}text_feature.Text", "text": {}}


def _png(pixels: Array) -> bytes:
    from PIL import Image  # needed only where there are images

    held = io.BytesIO()
    Image.fromarray(pixels[..., 0] if pixels.shape[2] == 1 else pixels).save(held, "PNG", compress_level=1)
    return held.getvalue()


class RldsExporter(Sink):
    """Writes the folder of a version: `features.json`, `dataset_info.json`, and shards of about 256 MB of rows.

    One episode is in memory at a time.
    """

    @classmethod
    def made(cls, path: Path) -> bool:
        """Return whether rbtool wrote the folder, and nothing else is in it."""
        try:
            names = {entry.name for entry in path.iterdir()}
            documents = {FEATURES, INFO}
            shards = all(_SHARD_NAME.fullmatch(name) for name in names - documents)
            return documents < names and shards and WRITTEN_HERE.encode() in read_regular(path / INFO)
        except OSError:
            return False

    def prepare(self) -> None:
        """Choose the feature of each leaf, and refuse data that RLDS cannot store."""
        self.refuse({"bfloat16"}, "a reader of RLDS without TensorFlow")
        table = self.chosen.table
        if not len(table):
            raise SchemaError("no episode to write: TensorFlow Datasets does not open a dataset without episodes")
        self._require_continuous()
        self._flags_inside = self._look_at_flags()
        self._features = list(self._find_features())
        self._refuse_clashes()
        self._texts = _text_names({name for text in self.chosen.text or () for name in text})
        if table.episode.tolist() != list(range(len(table))):
            self.notes.append("episodes are renumbered from 0; episode_metadata/episode keeps their numbers")

    def _require_continuous(self) -> None:
        """Raise SchemaError if a next observation differs from the observation of the following step."""
        read = self.chosen.reader.read
        for field in self.chosen.fields:
            if field.key not in state_keys(self.chosen.fields):
                continue
            block = max(1, _BLOCK_BYTES // max(1, field.row_bytes))
            for position in range(len(self.chosen.rows)):
                start, stop = self.chosen.episode(position)
                for first in range(start, stop - 1, block):
                    last = min(first + block, stop - 1)
                    after, before = read((NEXT, *field.key), first, last), read(field.key, first + 1, last + 1)
                    if not rows_equal(after, before).all():
                        raise SchemaError(
                            f"{field.name} after a step differs from the one before the next step of that episode, and "
                            "RLDS stores only one of them",
                            hint="export to h5, npz or parquet, which keep both",
                        )

    def _find_features(self) -> Iterator[StepFeature]:
        fields = self.chosen.fields
        states, roots = set(state_keys(fields)), {field.key for field in fields if field.key[0] != NEXT}
        ragged = dict(self._find_ragged())
        lengths = {column.field.key for column in ragged.values()}
        for column in columns_of(fields):
            key = column.field.key
            if key == EPISODE or key in lengths or (key[0] == NEXT and (key[1:] in states or key[1:] in FLAGS)):
                continue
            if key in FLAGS or key == REWARD:
                self.dropped.append(Dropped(key_name(key), "RLDS does not store flags and rewards before a step"))
            elif key == IS_INIT and self._marks_starts(column.field):
                continue
            elif key[0] == NEXT:
                own = key[1:] if key[1:] not in roots else key
                yield StepFeature(column, _path(own), "result")
            else:
                timing: Timing = "state" if key in states else "step"
                if timing == "step" and key[0] != ACTION[0]:
                    self.notes.append(f"{key_name(key)} has no value after the last step: it ends with zeros")
                yield StepFeature(column, _path(key), timing, ragged.get(key))

    def _find_ragged(self) -> Iterator[tuple[Key, ExportColumn]]:
        """Yield the keys of leaves that were ragged sequences in the RLDS source, each with the leaf of its lengths."""
        document = self.chosen.reader.documents().get(FEATURES, b"")
        try:
            leaves = parse_features(parse_json(document, FEATURES), FEATURES).steps
        except FormatError:  # the source is not RLDS
            return
        fields, states = {field.key: field for field in self.chosen.fields}, set(state_keys(self.chosen.fields))
        for column in columns_of_steps(leaves)[0]:
            field, lengths = fields.get(column.key), fields.get(length_key(column.key))
            if column.kind != "ragged" or field is None or not field.shape:
                continue
            if lengths is not None and self._is_padded(field, lengths, is_state=field.key in states):
                yield field.key, ExportColumn(lengths)
            else:
                why = "its lengths or its padding were changed"
                self.notes.append(f"{field.name} stays padded to {field.shape[0]:,} values per step: {why}")

    def _is_padded(self, field: Field, lengths: Field, *, is_state: bool) -> bool:
        """Return whether all rows can be restored, bit for bit, from their values without padding."""
        if field.dtype in ("complex64", "complex128") or lengths.shape or lengths.numpy.kind not in "iu":
            return False
        if is_state != (lengths.key in state_keys(self.chosen.fields)):
            return False
        listed = np.dtype(np.float32 if field.numpy.kind == "f" else np.int64)
        block = max(1, _BLOCK_BYTES // max(1, field.row_bytes))
        for side in ((), (NEXT,)) if is_state else ((),):
            for start, stop in self.chosen.spans():
                for first in range(start, stop, block):
                    last = min(first + block, stop)
                    rows = self.chosen.reader.read((*side, *field.key), first, last)
                    counts = self.chosen.reader.read((*side, *lengths.key), first, last)
                    padding = np.ascontiguousarray(rows[~_within(counts, field.shape[0])])
                    with np.errstate(over="ignore", invalid="ignore"):
                        kept = rows.astype(listed).astype(rows.dtype)
                    if (
                        (counts < 0).any() or (counts > field.shape[0]).any()
                        or padding.view(np.uint8).any() or kept.tobytes() != rows.tobytes()
                    ):  # fmt: skip
                        return False
        return True

    def _marks_starts(self, field: Field) -> bool:
        """Return whether `is_init` is set exactly in the first step of each episode, so that `is_first` replaces it."""
        if field.dtype != "bool" or math.prod(field.shape) != 1:
            return False
        for position in range(len(self.chosen.rows)):
            marks = self.chosen.reader.read(field.key, *self.chosen.episode(position)).reshape(-1)
            if not marks[0] or marks[1:].any():
                return False
        return True

    def _look_at_flags(self) -> bool:
        """Return whether `truncated` must be stored, because it does not follow from `is_last` and `is_terminal`."""
        odd = False
        for position in range(len(self.chosen.rows)):
            start, stop = self.chosen.episode(position)
            for first in range(start, stop, _FLAG_ROWS):
                last = min(first + _FLAG_ROWS, stop)
                keys = (NEXT_TERMINATED, NEXT_TRUNCATED, NEXT_DONE)
                terminated, truncated, done = (self._flag(key, first, last) for key in keys)
                if (done != terminated | truncated).any():
                    raise SchemaError("done is not terminated | truncated, and RLDS does not store it separately")
                odd |= bool(truncated[: len(truncated) - (last == stop)].any())
        return odd or bool((self.chosen.table.end_reason == EndReason.BOTH).any())

    def _flag(self, key: Key, start: int, stop: int) -> Array:
        return self.chosen.reader.read(key, start, stop).reshape(stop - start).astype(bool)

    def _refuse_clashes(self) -> None:
        paths = [feature.path for feature in self._features]
        paths += [(name,) for name in (*STEP_FLAGS, *([TRUNCATED] if self._flags_inside else []))]
        for number, path in enumerate(paths):
            for other in paths[number + 1 :]:
                if path[: len(other)] == other or other[: len(path)] == path:
                    raise SchemaError(f"two leaves would be steps/{'/'.join(min(path, other))}; rename one of them")

    def write_rows(self, target: Path, progress: Callable[[int], None]) -> None:
        """Write the shards, then the documents."""
        fs.make_folder(target)
        lengths = self.chosen.table.length
        count = max(1, min(len(lengths), self.size() // _SHARD_BYTES))
        places = np.minimum(np.cumsum(lengths) * count // max(1, int(lengths.sum())), count - 1)
        row, sizes, total = self.size() // max(1, self.chosen.steps), [], 0
        name = re.sub(r"\W+", "_", self.name, flags=re.ASCII).strip("_").lower() or "dataset"
        for shard in range(count):
            path = target / f"{name}-{_SPLIT}.tfrecord-{shard:05}-of-{count:05}"
            descriptor = fs.create(path)
            try:
                mine = np.flatnonzero(places == shard)
                for position in mine.tolist():
                    data = example_bytes(dict(self._lists(position)))
                    fs.write_parts(descriptor, framed(data), path)
                    total += len(data)
                    progress(int(lengths[position]) * row)
                fs.fsync(descriptor, path)
            finally:
                fs.close(descriptor, path)
            sizes.append(len(mine))
        fs.write_file(target / FEATURES, _document(self._described()))
        fs.write_file(target / INFO, _document(_info(name, sizes, total)))

    def _lists(self, position: int) -> Iterator[tuple[str, Listed]]:
        """Yield the lists of an episode's Example with their names."""
        start, stop = self.chosen.episode(position)
        steps, table = stop - start, self.chosen.table
        first = np.arange(steps + 1) == 0
        terminal = np.concatenate(([False], self._flag(NEXT_TERMINATED, start, stop)))
        ends = table.end_reason[position] != EndReason.END_OF_FILE
        for name, flags in ((IS_FIRST, first), (IS_LAST, first[::-1] & ends), (IS_TERMINAL, terminal)):
            yield f"{STEPS}/{name}", flags
        if self._flags_inside:
            truncated = np.concatenate(([False], self._flag(NEXT_TRUNCATED, start, stop)))
            truncated[-1] &= ends
            yield f"{STEPS}/{TRUNCATED}", truncated
        for feature in self._features:
            name, rows = f"{STEPS}/{'/'.join(feature.path)}", self._rows(feature, start, stop)
            if feature.lengths is not None:
                counts = np.asarray(self._rows(StepFeature(feature.lengths, (), feature.timing), start, stop))
                yield f"{name}/{RAGGED}", np.asarray(rows)[_within(counts, feature.shape[0])]
                yield f"{name}/{ROW_LENGTHS}", counts
            else:
                yield name, feature.stored(rows)
        text = self.chosen.text[position] if self.chosen.text is not None else {}
        for name, stored in self._texts.items():
            yield f"{METADATA}/{stored}", [text.get(name, "").encode()]
        yield f"{METADATA}/{NUMBER}", table.episode[position : position + 1]
        yield f"{METADATA}/{SEED}", [str(table.seed[position]).encode() if table.has_seed[position] else b""]

    def _rows(self, feature: StepFeature, start: int, stop: int) -> Array | list[str]:
        """Return the T + 1 rows of a feature."""
        key = feature.field.key
        rows = self._read(feature.column, key, start, stop)
        if feature.timing == "state":
            last = self._read(feature.column, (NEXT, *key), stop - 1, stop)
            return [*rows, *last] if isinstance(rows, list) else np.concatenate((rows, np.asarray(last)))
        if isinstance(rows, list):
            return [*rows, ""] if feature.timing == "step" else ["", *rows]
        rows = rows.reshape(len(rows), *feature.shape)
        blank = np.zeros((1, *feature.shape), rows.dtype)
        late = feature.timing == "result" and feature.path not in (REWARD, ("discount",))
        return np.concatenate((blank, rows) if late else (rows, blank))

    def _read(self, column: ExportColumn, key: Key, start: int, stop: int) -> Array | list[str]:
        rows = self.chosen.reader.read(key, start, stop)
        if column.length is None:
            return rows
        length = column.length.key if key[0] != NEXT or column.field.key[0] == NEXT else (NEXT, *column.length.key)
        return decoded(rows, self.chosen.reader.read(length, start, stop), key_name(key))

    def _described(self) -> dict[str, Any]:
        scalar = {name: _tensor("bool", {}) for name in STEP_FLAGS}
        if self._flags_inside:
            scalar[TRUNCATED] = _tensor("bool", {})
        steps: dict[str, Any] = dict(scalar)
        for feature in self._features:
            inner = steps
            for part in feature.path[:-1]:
                inner = inner.setdefault(part, {})
            inner[feature.path[-1]] = feature.described()
        metadata = dict.fromkeys((*self._texts.values(), SEED), _TEXT) | {NUMBER: _tensor("int64", {})}
        sequence = {"feature": _nested(steps), "length": "-1"}
        dataset = {_CLASS: f"{_PACKAGE}dataset_feature.Dataset", "sequence": sequence}
        return _nested({STEPS: dataset, METADATA: metadata})


def _within(counts: Array, most: int) -> Array:
    """Return which values of padded rows are not padding, bool `[rows, most]`."""
    return np.arange(most) < counts[:, None]


def _text_names(names: Collection[str]) -> dict[str, str]:
    """Return the name of each text under `episode_metadata`, without slashes and distinct from reserved names."""
    found: dict[str, str] = {}
    for name in sorted(names):
        free = name.replace("/", "_") or "_"
        while free in (NUMBER, SEED, _CLASS) or free in found.values() or (free != name and free in names):
            free += "_"
        found[name] = free
    return found


def _path(key: Key) -> Key:
    for part in key:
        if "/" in part or part in ("", _CLASS):
            raise SchemaError(f"{key_name(key)!r} has a name that RLDS cannot have; rename it first")
    return key


def _nested(parts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the description of a dictionary of features; parts without a class are nested dictionaries."""
    features = {name: part if _CLASS in part else _nested(part) for name, part in sorted(parts.items())}
    return {_CLASS: f"{_PACKAGE}features_dict.FeaturesDict", "featuresDict": {"features": features}}


def _info(name: str, sizes: list[int], total: int) -> dict[str, Any]:
    split = {
        "name": _SPLIT, "shardLengths": [str(size) for size in sizes], "numBytes": str(total),
        "filepathTemplate": "{DATASET}-{SPLIT}.{FILEFORMAT}-{SHARD_X_OF_Y}",
    }  # fmt: skip
    return {"name": name, "version": _VERSION, "fileFormat": "tfrecord", "description": WRITTEN_HERE, "splits": [split]}


def _document(value: Any) -> bytes:
    return (dump_json(value, indent=2) + "\n").encode()
