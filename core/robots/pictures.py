"""Crops, scales and encodes pictures as video, both stored pixels and frames of kept videos.

A picture of a kept video is stored as two numbers, the id of a file and a frame in it (`core/format/videos.py`).
Cropping and scaling replace these numbers by pixels that are decoded only when they are read, so that a long episode is
never in memory as a whole: encoding reads a few frames at a time, and writes a file for each episode and camera.

    kept video          crop, resize            encode
    video.image  --->   image (pixels)   --->   video.image   id, 0, 1, 2, ... of the file of the episode
"""

from __future__ import annotations

import functools
import io
import math
import os
import re
import threading
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from ..encodings.video import CHANNELS, VideoIndex, look_over, referred_frames, require_pyav
from ..engine.tasks import ResultRefused
from ..errors import CorruptDataError, RbtoolError, UsageError, did_you_mean
from ..format.contracts import Array
from ..format.files import digest_bytes, digest_file, read_regular
from ..format.manifest import VIDEOS
from ..format.videos import VIDEO, image_key, index_name, reference_keys, stated_fps, video_id, video_name
from ..open_steps import open_steps
from ..preprocess.operations.base import (
    BoundOperation,
    Columns,
    Derivation,
    Discount,
    FieldChanges,
    Fields,
    LazyBatch,
    LazyColumn,
    Operation,
    RowOperation,
    pairs_of,
    texts_of,
)
from ..preprocess.processor import BlockColumn
from ..ted.schema import NEXT, Field, Key, role_of, row_bytes

_SIZE = re.compile(r"([1-9]\d*)x([1-9]\d*)")
_CROP = re.compile(r"(?:(\d+),(\d+),)?([1-9]\d*)x([1-9]\d*)")
_LAYOUTS = ("hwc", "chw")
_CHANNELS = (1, 3, 4)
_LARGEST = 1 << 26
"""The largest number of pixels of a picture: 8192 x 8192."""
_AT_ONCE = 16
"""The number of frames that are decoded and encoded at a time."""

Change = Callable[[Array], Array]


# Pictures of kept videos ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Frames(LazyColumn):
    """Pictures of kept videos, which are decoded when they are read.

    `references` are the id of a file and a frame for each row, int64 `[n, 2]`; `changes` are applied to the pixels.
    """

    folder: Path
    references: Array
    changes: tuple[Change, ...] = ()

    @property
    def column(self) -> BlockColumn:
        pixels = np.empty((self.rows, *self.shape), np.uint8)
        for start in range(0, self.rows, _AT_ONCE):
            pixels[start : start + _AT_ONCE] = self.read(np.arange(start, min(start + _AT_ONCE, self.rows)))
        return BlockColumn(self.dtype, pixels)

    @property
    def rows(self) -> int:
        return len(self.references)

    def read(self, rows: Array) -> Array:
        """Return the pixels of some rows, uint8 `[k, *shape]`."""
        references = self.references[rows]
        for number in np.unique(references[:, 0]).tolist():
            _require_sound(self.folder / f"{VIDEOS}{video_name(number)}")
        pixels = referred_frames(self.folder, references)
        for change in self.changes:
            pixels = change(pixels)
        if len(pixels) and pixels.shape[1:] != self.shape:
            raise ResultRefused(f"{self.name!r} has pictures of {list(pixels.shape[1:])} and of {list(self.shape)}")
        return pixels

    def cast(self, dtype: str) -> LazyColumn:
        return LazyColumn.of(self.column, self.name).cast(dtype)

    def reshaped(self, shape: tuple[int, ...]) -> LazyColumn:
        return LazyColumn.of(self.column, self.name).reshaped(shape)

    def taken(self, rows: Array) -> LazyColumn:
        return replace(self, references=self.references[rows])


def _require_sound(path: Path) -> None:
    """Raise CorruptDataError if the digest of a kept video differs from its name; verified once for each file state."""
    try:
        state = path.stat()
    except FileNotFoundError:
        return  # the reader raises a better error
    if not _is_sound(path, state.st_ino, state.st_size, state.st_mtime_ns):
        raise CorruptDataError(
            f"{path} is damaged: its digest does not match its name", hint="rbtool check finds other damage"
        )


@functools.lru_cache(maxsize=256)
def _is_sound(path: Path, *state: int) -> bool:
    return video_name(video_id(digest_file(path))) == path.name


def _fields_with_pictures(fields: Fields) -> tuple[Fields, dict[Key, Key]]:
    """Return the fields with the pictures of kept videos added, of a size not known yet; and the key of the references
    for each of these pictures.
    """
    found = {image_key(key): key for key in reference_keys(fields) if image_key(key) not in fields}
    made = {image: Field(image, "uint8", (0, 0, CHANNELS), role_of(image)) for image in found}
    return fields.replaced(made), found


def _require_stored(name: str, fields: Fields, keys: Iterable[Key], references: Mapping[Key, Key]) -> None:
    """Raise UsageError for pictures that an earlier operation encodes, because their videos are not written yet."""
    if encoded := [key for key in keys if references.get(key) in fields.encoded]:
        shown = ".".join(encoded[0])
        if name == EncodeImages.name:
            raise UsageError(f"the pictures {shown} are encoded twice, expected one --encode for each field")
        raise UsageError(f"{name} {shown}: its pictures are already encoded, expected {name} before encode")


def _measured(fields: Fields, references: Mapping[Key, Key]) -> dict[Key, tuple[int, ...]]:
    """Return the shape of the pictures in kept videos, by the key of the picture, from their first frames."""
    if not references:
        return {}
    require_pyav()
    assert fields.source is not None, "fields that refer to videos are those of a dataset"
    with open_steps(fields.source) as reader:
        stored = {field.key for field in reader.fields}
        found = {}
        for image, key in references.items():
            origin = key if key in stored else fields.origins[key][0]  # an earlier operation may have renamed it
            frames = referred_frames(reader.path, reader.read(origin, 0, 1))
            if frames.dtype != np.uint8 or frames.shape[3] != CHANNELS:
                raise UsageError(
                    f"{'.'.join(image)} is a kept video of depths, which cannot be cropped, scaled or encoded again",
                    hint="name the other pictures one by one",
                )
            found[image] = frames.shape[1:]
        return found


class _PictureChange(RowOperation):
    """Changes the size of pictures, at the root and under `next`."""

    key: str
    layout: str | None

    @classmethod
    def from_option(cls, value: Any, discount: Discount) -> Iterable[Operation]:
        for key, text in pairs_of(value, cls.name, cls._form):
            area, _, layout = str(text).partition(":")
            yield cls(key, area, layout or None)  # type: ignore[call-arg]

    _form: ClassVar[str]

    @property
    def rescales(self) -> str:
        return self.key

    def _require_layout(self) -> None:
        if self.layout is not None and self.layout not in _LAYOUTS:
            raise UsageError(
                f"the layout of {self.key!r} is {self.layout!r}, expected hwc or chw"
                f"{did_you_mean(self.layout, _LAYOUTS)}"
            )

    @abstractmethod
    def changed_size(self, height: int, width: int) -> tuple[int, int]:
        """Return the new height and width; UsageError if the change is impossible."""

    @abstractmethod
    def change(self, images: Array) -> Array:
        """Change pictures `[n, channels, height, width]`."""

    def plan(self, fields: Fields) -> BoundOperation:
        pictures, references = _fields_with_pictures(fields)
        keys = pictures.twinned(self.key)
        _require_stored(self.name, fields, keys, references)
        kept = {key: references[key] for key in keys if key in references}
        shapes = _measured(fields, kept)
        before = {key: replace(pictures[key], shape=shapes.get(key, pictures[key].shape)) for key in keys}
        after = fields.replaced(dict.fromkeys(kept.values()) | {key: self._changed(one) for key, one in before.items()})
        after = after.traced({image: (reference,) for image, reference in kept.items()})
        derived = {key: self._derivation(fields, before[key], kept.get(key)) for key in keys}
        return FieldChanges(after, derived)

    def _derivation(self, fields: Fields, before: Field, reference: Key | None) -> Derivation:
        shape, source = self._changed(before).shape, fields.source

        def compute(inputs: Any) -> LazyColumn | Array:
            lazy = inputs[0]
            if reference is not None:
                assert source is not None
                lazy = _Frames(before.name, "uint8", before.shape, (), source, lazy.values)
            if before.shape == shape:
                return lazy  # type: ignore[no-any-return]
            if isinstance(lazy, _Frames):
                change = functools.partial(self._pixels, before)
                return replace(lazy, shape=shape, changes=(*lazy.changes, change))
            return self._pixels(before, lazy.numbers)

        return Derivation((before.key if reference is None else reference,), compute)

    def _pixels(self, field: Field, numbers: Array) -> Array:
        place = self._channels(field)
        images = numbers[:, None] if place is None else np.moveaxis(numbers, 3, 1) if place == 2 else numbers
        changed = self.change(images)
        if place is None:
            changed = changed[:, 0]
        elif place == 2:
            changed = np.moveaxis(changed, 1, 3)
        return np.ascontiguousarray(changed)

    def _changed(self, field: Field) -> Field:
        shape = field.shape
        place = self._channels(field)
        if field.role in ("text", "id", "done") or "complex" in field.dtype or 0 in shape:
            raise UsageError(f"{self.name} {field.name}: its rows are {field.dtype} {list(shape)}, expected images")
        height, width = self.changed_size(*(shape[1:] if place == 0 else shape[:2]))
        return replace(
            field, shape={None: (height, width), 0: (shape[0], height, width), 2: (height, width, shape[-1])}[place]
        )

    def _channels(self, field: Field) -> int | None:
        """Return the dimension of a row that holds the channels, 0 or 2; None if there are no channels."""
        shape = field.shape
        if len(shape) == 2:
            return None
        if len(shape) != 3:
            raise UsageError(
                f"{self.name} {field.name}: its rows are {list(shape)}, expected [H, W], [H, W, C] or [C, H, W]"
            )
        if self.layout is not None:
            return 2 if self.layout == "hwc" else 0
        last, first = shape[2] in _CHANNELS, shape[0] in _CHANNELS
        if last == first:
            raise UsageError(
                f"{self.name} {field.name}: which dimension of {list(shape)} has the channels is unclear",
                hint="add :hwc or :chw after the size",
            )
        return 2 if last else 0


@dataclass(frozen=True)
class CropImages(_PictureChange):
    """Crops images, at the root and under `next`, to an area: `HEIGHTxWIDTH` in the middle, or
    `TOP,LEFT,HEIGHTxWIDTH`.

    Rows are `[H, W]`, `[H, W, C]` or `[C, H, W]`; if it is ambiguous, `layout` is `hwc` or `chw`. Pictures of kept
    videos become pixels, unless they are encoded again.
    """

    name: ClassVar[str] = "crop"
    _form: ClassVar[str] = "field=HEIGHTxWIDTH or field=TOP,LEFT,HEIGHTxWIDTH, like image=0,80,480x480"
    key: str
    area: str
    layout: str | None = None

    def __post_init__(self) -> None:
        if not _CROP.fullmatch(self.area):
            raise UsageError(
                f"crop {self.key}: {self.area!r} is not an area, expected height x width like 84x84, or with top and "
                "left like 0,80,480x480"
            )
        self._require_layout()

    def _area(self, height: int, width: int) -> tuple[int, int, int, int]:
        """Return the first row and column, and the height and width."""
        found = _CROP.fullmatch(self.area)
        assert found is not None
        rows, columns = int(found[3]), int(found[4])
        top, left = ((height - rows) // 2, (width - columns) // 2) if found[1] is None else map(int, found.group(1, 2))
        return top, left, rows, columns

    def changed_size(self, height: int, width: int) -> tuple[int, int]:
        top, left, rows, columns = self._area(height, width)
        if top < 0 or left < 0 or top + rows > height or left + columns > width:
            raise UsageError(f"crop {self.key}: {self.area} is not within {height}x{width}, height x width")
        return rows, columns

    def change(self, images: Array) -> Array:
        top, left, rows, columns = self._area(*images.shape[2:])
        return images[:, :, top : top + rows, left : left + columns]


@dataclass(frozen=True)
class ResizeImages(_PictureChange):
    """Scales images, at the root and under `next`, to `size`, height x width, by antialiased bilinear interpolation.

    Rows are `[H, W]`, `[H, W, C]` or `[C, H, W]`, of floats, or of integers, which are rounded. Channels are a first or
    last dimension of 1, 3 or 4; if it is ambiguous, `layout` is `hwc` or `chw`. The buffer transform of the same name
    scales the images one by one, so that results do not depend on the size of batches. Pictures of kept videos become
    pixels, unless they are encoded again.
    """

    name: ClassVar[str] = "resize"
    _form: ClassVar[str] = "field=HEIGHTxWIDTH, like image=84x84"
    key: str
    size: str
    layout: str | None = None

    def __post_init__(self) -> None:
        if not _SIZE.fullmatch(self.size):
            raise UsageError(f"resize {self.key}: {self.size!r} is not a size, expected height x width like 84x84")
        if (pixels := math.prod(self.changed_size(0, 0))) > _LARGEST:
            raise UsageError(f"resize {self.key}: {self.size} is {pixels:,} pixels, expected at most {_LARGEST:,}")
        self._require_layout()

    def changed_size(self, height: int, width: int) -> tuple[int, int]:
        rows, columns = self.size.split("x")
        return int(rows), int(columns)

    def change(self, images: Array) -> Array:
        import torch  # imported here, because it takes long and only resizing needs it

        from ..transforms.keyed import Resize as Transform

        size = self.changed_size(0, 0)
        transform = Transform(size)
        empty: Any = {}
        images = np.ascontiguousarray(images)
        out = np.empty((*images.shape[:2], *size), images.dtype)
        for row in range(len(images)):  # one by one, because torch may choose kernels by the number of images
            out[row] = transform.change(torch.from_numpy(images[row : row + 1]), ("image",), empty).numpy()[0]
        return out


# Videos ---------------------------------------------------------------------------------------------------

_CODECS: dict[str, tuple[str, Mapping[str, str], int, int]] = {
    "av1": ("libsvtav1", {"crf": "30", "preset": "8", "svtav1-params": "lp=1"}, 32, 1),
    "h264": ("libx264", {"crf": "23", "bf": "0", "sc_threshold": "0", "x264-params": "cpu-independent=1"}, 2, 2),
}
"""The encoder of each codec, its options, the shortest side that it takes, and the number that sides are multiples of.

Without `cpu-independent`, the x86 code of libx264 reads uninitialised memory when it chooses the quality of blocks, so
that the same pictures sometimes give different bytes.
"""


@dataclass(frozen=True)
class EncodeImages(RowOperation):
    """Encodes pictures as video, with a file for each episode and camera, in place of pixels or kept videos.

    It encodes all pictures, uint8 `[H, W, 3]`, or only the field `key`. A next observation that equals the
    observation of the following step is stored once. Frames of a kept video keep their times; pixels get the frame rate
    in the dataset's metadata, else one frame per second. `gop` is the distance between key frames: with 2, at most two
    frames have to be decoded to get any frame.
    """

    name: ClassVar[str] = "encode"
    whole_episodes: ClassVar[bool] = True
    codec: str
    key: str | None = None
    gop: int = 2

    @classmethod
    def from_option(cls, value: Any, discount: Discount) -> Iterable[Operation]:
        for text in texts_of(value, cls.name):
            key, sign, how = text.rpartition("=")
            codec, colon, gop = how.partition(":")
            if (sign and not key.strip()) or (colon and not gop.isdecimal()):
                raise UsageError(f"--encode is {text!r}, expected CODEC, CODEC:GOP or FIELD=CODEC")
            yield cls(codec.strip(), key.strip() or None, int(gop or 2))

    def __post_init__(self) -> None:
        if self.codec not in _CODECS:
            raise UsageError(
                f"the codec is {self.codec!r}, expected {' or '.join(_CODECS)}{did_you_mean(self.codec, _CODECS)}"
            )
        if not 1 <= self.gop <= 1000:
            raise UsageError(f"key frames are {self.gop} frames apart, expected 1 to 1000")

    def plan(self, fields: Fields) -> BoundOperation:
        pictures, references = _fields_with_pictures(fields)
        if self.key is None:
            keys = [field.key for field in pictures if field.key in references or _is_picture(field)]
        else:
            keys = pictures.twinned(self.key)
        _require_stored(self.name, fields, keys, references)
        if not keys:
            raise UsageError("encode: there are no pictures, which are fields of uint8 [height, width, 3]")
        shapes = _measured(fields, {key: references[key] for key in keys if key in references})
        images = [replace(pictures[key], shape=shapes.get(key, pictures[key].shape)) for key in keys]
        for image in images:
            self._require_size(image)
        return _Encoding(self, fields, images, references)

    def _require_size(self, image: Field) -> None:
        _, _, least, multiple = _CODECS[self.codec]
        if not _is_picture(image):
            raise UsageError(
                f"encode {image.name}: its rows are {image.dtype} {list(image.shape)}, expected uint8 "
                "[height, width, 3]"
            )
        height, width, _ = image.shape
        for bad, words in (
            (min(height, width) < least, f"at least {least} pixels"),
            (height % multiple or width % multiple, "an even number of pixels"),
        ):
            if bad:
                raise UsageError(
                    f"encode {image.name}: its pictures are {height}x{width}, but {self.codec} needs {words} a side",
                    hint=f"add --resize {image.name}=HxW or --crop {image.name}=HxW",
                )


def _is_picture(field: Field) -> bool:
    return field.dtype == "uint8" and len(field.shape) == 3 and field.shape[2] == CHANNELS and 0 not in field.shape


class _Encoding(BoundOperation):
    """Encodes pictures of known sizes; a field at the root and under `next` shares one file per episode."""

    def __init__(
        self, asked: EncodeImages, fields: Fields, images: Iterable[Field], references: Mapping[Key, Key]
    ) -> None:
        self._images = {image.key: image for image in images}
        self._asked, self._source = asked, fields.source
        self._inputs = {key: references.get(key, key) for key in self._images}
        self._kept = references
        self._made = {key: ((NEXT, VIDEO, *key[1:]) if key[0] == NEXT else (VIDEO, *key)) for key in self._images}
        changes: dict[Key, Field | None] = dict.fromkeys(self._inputs.values())
        after = fields.replaced(changes | {made: Field(made, "int64", (2,), "id") for made in self._made.values()})
        after = after.traced({self._made[key]: (self._inputs[key],) for key in self._images})
        super().__init__(replace(after, encoded=fields.encoded | set(self._made.values())))
        self._fps: float | None = None
        if fields.source is not None:
            with open_steps(fields.source) as reader:
                self._fps = fields.rate or stated_fps(reader)

    @property
    def row_bytes(self) -> int:
        return row_bytes(self._images.values())

    def _together(self, wanted: frozenset[Key]) -> list[tuple[Key | None, Key | None]]:
        """Return the pictures to encode for these fields, as pairs at the root and under `next`; None if absent."""
        found = {key[key[0] == NEXT :]: None for key, made in self._made.items() if made in wanted}
        return [tuple(key if key in self._images else None for key in (one, (NEXT, *one))) for one in found]  # type: ignore[misc]

    def inputs(self, wanted: frozenset[Key]) -> Iterable[Key]:
        pictures = {key for pair in self._together(wanted) for key in pair if key is not None}
        return (wanted - set(self._made.values())) | {self._inputs[key] for key in pictures}

    def compute(self, batch: LazyBatch, wanted: frozenset[Key]) -> Columns:
        found: dict[Key, LazyColumn | Array] = {key: batch.columns[key] for key in wanted if key in batch.columns}
        for pair in self._together(wanted):
            columns = [None if key is None else self._frames(key, batch.columns[self._inputs[key]]) for key in pair]
            references = [None if key is None else np.zeros((batch.pieces.steps, 2), np.int64) for key in pair]
            for start, rows in zip(batch.pieces.starts.tolist(), batch.pieces.rows.tolist(), strict=True):
                if rows:
                    self._encode(batch, columns, references, start, start + rows)
            found |= {
                self._made[key]: one for key, one in zip(pair, references, strict=True) if key and one is not None
            }
        return {key: found[key] for key in wanted}

    def _frames(self, key: Key, lazy: LazyColumn) -> LazyColumn:
        if key not in self._kept:
            return lazy if isinstance(lazy, _Frames) else LazyColumn.of(lazy.column, lazy.name)
        assert self._source is not None
        image = self._images[key]
        return _Frames(image.name, "uint8", image.shape, (), self._source, lazy.values)

    def _encode(
        self, batch: LazyBatch, columns: list[LazyColumn | None], references: list[Any], start: int, stop: int
    ) -> None:
        """Encode the rows `[start, stop)` of one episode, and fill in their `references` to the file."""
        order, places = _order(columns, start, stop)
        first = next(column for column in columns if column is not None)
        stamps, unit = self._times(columns, order, stop - start)
        images = (_pixels(columns, order[at : at + _AT_ONCE]) for at in range(0, len(order), _AT_ONCE))
        data, index = _encoded(images, first.shape, self._asked, stamps, unit)
        number = video_id(digest_bytes(data))
        batch.videos |= {video_name(number): data, index_name(number): index.to_bytes()}
        for made, place in zip(references, places, strict=True):
            if made is not None:
                made[start:stop, 0], made[start:stop, 1] = number, place

    def _times(self, columns: list[LazyColumn | None], order: Array, rows: int) -> tuple[Array, Fraction]:
        """Return the times of frames, ascending int64 `[n]` from 0, and their unit in seconds.

        Frames of a kept video keep their times. If rows were resampled to another rate than the video's, and each
        row has a frame of its own, frames are evenly spaced at that rate.
        """
        shown = _references(columns, order)
        if shown is not None and (shown[:, 0] == shown[0, 0]).all() and (np.diff(shown[:, 1]) > 0).all():
            assert self._source is not None
            path = self._source / f"{VIDEOS}{index_name(int(shown[0, 0]))}"
            index = VideoIndex.from_bytes(read_regular(path), str(path))
            stamps = index.stamps[shown[:, 1]]
            known = self._fps is not None and 1 < rows <= len(order)
            if not known or abs(np.median(np.diff(index.times)) * (self._fps or 1) - 1) < 0.01:
                return stamps - stamps[0], index.unit
        return np.arange(len(order)), 1 / Fraction(self._fps or 1).limit_denominator(100_000)


def _order(columns: list[LazyColumn | None], start: int, stop: int) -> tuple[Array, list[Any]]:
    """Return the frames of a video in order, and the positions among them of the rows at the root and under `next`.

    A frame is a row and a flag whether it is the picture under `next`, int64 `[n, 2]`. The picture under `next` is a
    frame of its own only if it differs from the picture of the following row, or, in the last row, from the one at the
    root:

        rows          0      1      2              frames     s0  s1  s2  s3
        root, next    s0,s1  s1,s2  s2,s3          positions: root 0 1 2, next 1 2 3
    """
    before, after = columns
    rows = stop - start
    if before is None or after is None:
        own = np.stack([np.arange(start, stop), np.full(rows, before is None)], 1).astype(np.int64)
        return own, [np.arange(rows) if column is not None else None for column in columns]
    following = np.minimum(np.arange(start + 1, stop + 1), stop - 1)
    apart = ~_equal(after, np.arange(start, stop), before, following)
    place = np.arange(rows) + np.cumsum(apart) - apart
    order = np.zeros((rows + int(apart.sum()), 2), np.int64)
    order[place, 0] = np.arange(start, stop)
    order[place[apart] + 1] = np.stack([np.flatnonzero(apart) + start, np.ones(int(apart.sum()))], 1)
    return order, [place, np.where(apart, place + 1, place[following - start])]


def _equal(one: LazyColumn, rows: Array, other: LazyColumn, others: Array) -> NDArray[np.bool_]:
    """Return which rows of two columns have the same pictures."""
    if isinstance(one, _Frames) and isinstance(other, _Frames):
        return (one.references[rows] == other.references[others]).all(1)  # type: ignore[no-any-return]
    equal = np.empty(len(rows), np.bool_)
    for at in range(0, len(rows), _AT_ONCE):
        pixels = [_read(column, which[at : at + _AT_ONCE]) for column, which in ((one, rows), (other, others))]
        equal[at : at + _AT_ONCE] = (pixels[0] == pixels[1]).reshape(len(pixels[0]), -1).all(1)
    return equal


def _read(column: LazyColumn, rows: Array) -> Array:
    return column.read(rows) if isinstance(column, _Frames) else column.parts[0].values[rows]


def _references(columns: list[LazyColumn | None], order: Array) -> Array | None:
    """Return the references to frames of kept videos, int64 `[n, 2]`; None if any picture is stored as pixels."""
    found = np.zeros(order.shape, np.int64)
    for under_next, column in enumerate(columns):
        here = order[:, 1] == under_next
        if here.any():
            if not isinstance(column, _Frames):
                return None
            found[here] = column.references[order[here, 0]]
    return found


def _pixels(columns: list[LazyColumn | None], order: Array) -> Array:
    found = None
    for under_next, column in enumerate(columns):
        here = order[:, 1] == under_next
        if here.any() and column is not None:
            pixels = _read(column, order[here, 0])
            found = np.empty((len(order), *column.shape), np.uint8) if found is None else found
            found[here] = pixels
    assert found is not None
    return found


@contextmanager
def _scheduling_kept() -> Iterator[None]:
    """Restore the scheduling policy of this thread afterwards, and set it for the threads that were started meanwhile.

    If root opens SVT-AV1 (4.1), as in most containers, it makes the calling thread and its own threads realtime
    (SCHED_FIFO, priority 99), which later forks inherit: two busy processes then leave no CPU time to any other.
    """
    tasks = Path("/proc/self/task")
    if not tasks.is_dir():  # not Linux
        yield
        return
    policy, parameters = os.sched_getscheduler(0), os.sched_getparam(0)
    before = set(tasks.iterdir()) - {tasks / str(threading.get_native_id())}
    try:
        yield
    finally:
        for task in set(tasks.iterdir()) - before:
            with suppress(ProcessLookupError):  # it ended
                os.sched_setscheduler(int(task.name), policy, parameters)


def _encoded(
    images: Iterator[Array], shape: tuple[int, ...], asked: EncodeImages, stamps: Array, unit: Fraction
) -> tuple[bytes, VideoIndex]:
    """Encode pictures uint8 `[k, height, width, 3]`, shown at `stamps`; equal pictures give equal bytes."""
    av, target = require_pyav(), io.BytesIO()
    encoder, options, _, _ = _CODECS[asked.codec]
    gop = str(asked.gop)
    os.environ.setdefault("SVT_LOG", "1")  # otherwise the AV1 encoder prints its settings for each file
    try:
        with av.open(target, "w", format="mp4", options={"fflags": "+bitexact"}) as container:
            rate = (1 / unit / int(np.diff(stamps).min(initial=1 << 30))) if len(stamps) > 1 else 1 / unit
            stream = container.add_stream(encoder, rate=rate.limit_denominator(100_000))
            stream.height, stream.width, stream.pix_fmt = shape[0], shape[1], "yuv420p"
            stream.options = {**options, "g": gop, "keyint_min": gop}
            stream.codec_context.time_base, stream.codec_context.thread_count = unit, 1
            stream.codec_context.gop_size = asked.gop
            with _scheduling_kept():
                stream.codec_context.open()
            times = iter(stamps.tolist())
            for part in images:
                for image in part:
                    frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(image), format="rgb24")
                    frame.pts, frame.time_base = next(times), unit
                    container.mux(stream.encode(frame))
            container.mux(stream.encode())
        data = target.getvalue()
        with av.open(io.BytesIO(data)) as container:
            index = look_over(container, container.streams.video[0], "the video")
    except RbtoolError:  # raised while pictures are read
        raise
    except (av.FFmpegError, ValueError) as error:
        raise ResultRefused(f"{asked.codec} cannot encode pictures of {shape[0]}x{shape[1]}: {error}") from error
    shown = [(int(stamp) - int(index.stamps[0])) * index.unit for stamp in index.stamps]
    if shown != [int(stamp) * unit for stamp in stamps]:
        raise ResultRefused(f"{asked.codec} does not keep the times of {len(stamps):,} frames")
    return data, index
