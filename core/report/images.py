"""Fields that hold images: which they are, their pixels as RGB, and sheets of frames within a budget of bytes."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ..encodings.pictures import as_bytes, looks_like_picture, picture_layout
from ..encodings.video import referred_frames
from ..format.contracts import Array, StepReader
from ..format.videos import image_key, reference_keys
from ..ted.schema import NEXT, Field, Key, as_numbers, key_name

if TYPE_CHECKING:
    from PIL.Image import Image

_SIDE = 112
"""Pixels of the longer side of a frame in a sheet."""
_LEAST = 16
_QUALITY = 72
_BETWEEN = (128, 128, 128)


def is_image(field: Field) -> bool:
    """Whether rows of a field look like images; at the root, because those under `next` repeat them."""
    return field.key[0] != NEXT and looks_like_picture(field)


def as_rgb(rows: Array) -> Array:
    """Return images `[n, …]` as RGB of bytes, `[n, height, width, 3]`; of stacked frames the newest.

    Real numbers are taken to be from 0 to 1, or to 255 where one is above 1.
    """
    layout = picture_layout(rows.shape[1:])
    if layout is None:
        raise ValueError(f"rows of shape {list(rows.shape[1:])} are no images")
    newest = layout.seen(rows[0]).newest(rows)
    high = 255.0 if newest.dtype.kind != "f" or np.nanmax(newest, initial=0.0) > 1 else 1.0
    found = as_bytes(newest, 0.0, high)
    return found if found.ndim == 4 else np.repeat(found[..., None], 3, axis=3)


class ImageSource:
    """The images of one field: pixels in its rows, or frames of videos that the dataset keeps."""

    def __init__(self, reader: StepReader, key: Key, *, reference: bool) -> None:
        self.name = key_name(image_key(key) if reference else key)
        self._reader = reader
        self._key = key
        self._reference = reference
        self._dtype = next(field.dtype for field in reader.fields if field.key == key)

    def frames(self, steps: Sequence[int]) -> Array:
        """Return the frames of these steps as RGB; CorruptDataError for one that cannot be read.

        UsageError where frames are in videos and PyAV is not installed.
        """
        rows = np.concatenate([self._reader.read(self._key, step, step + 1) for step in steps])
        if not self._reference:
            return as_rgb(as_numbers(rows, self._dtype))
        return referred_frames(self._reader.path, rows)


def image_sources(reader: StepReader) -> list[ImageSource]:
    """Find the fields with images."""
    references = [key for key in reference_keys(reader.fields) if key[0] != NEXT]
    found = [ImageSource(reader, field.key, reference=False) for field in reader.fields if is_image(field)]
    return found + [ImageSource(reader, key, reference=True) for key in references]


@dataclass(frozen=True, slots=True)
class Sheet:
    """Frames in one image, `columns` of them in a row.

    `data` is the URL of the image, `width` and `height` are the pixels of a frame.
    """

    data: str
    count: int
    columns: int
    width: int
    height: int


def sheet_of(frames: Array, columns: int, most_bytes: int, *, gap: int = 0) -> Sheet:
    """Put frames, RGB `[n, height, width, 3]`, into an image whose URL takes at most about so many bytes.

    Frames are scaled down to `_SIDE` pixels, and further until they fit; `gap` pixels are between them.
    """
    side = _SIDE
    while True:
        sheet = _sheet(frames, columns, side, gap)
        if len(sheet.data) <= most_bytes or side <= _LEAST:
            return sheet
        side = max(_LEAST, int(side * max(0.5, 0.95 * (most_bytes / len(sheet.data)) ** 0.5)))


def _sheet(frames: Array, columns: int, side: int, gap: int) -> Sheet:
    from PIL import Image  # needed only where there are images

    height, width = frames.shape[1:3]
    scale = min(1.0, side / max(height, width))
    size = max(1, round(width * scale)), max(1, round(height * scale))
    rows, columns = -(-len(frames) // columns), min(columns, len(frames))
    apart = size[0] + gap, size[1] + gap
    whole = Image.new("RGB", (apart[0] * columns - gap, apart[1] * rows - gap), _BETWEEN)
    for number, frame in enumerate(frames):
        image = Image.fromarray(np.ascontiguousarray(frame))
        image = image if image.size == size else image.resize(size, Image.Resampling.BOX)
        whole.paste(image, (number % columns * apart[0], number // columns * apart[1]))
    return Sheet(_url(whole), len(frames), columns, *size)


def _url(image: Image) -> str:
    """Write an image as PNG or JPEG, whichever takes fewer bytes."""
    files = []
    for form, options in (("PNG", {"optimize": True}), ("JPEG", {"quality": _QUALITY})):
        file = io.BytesIO()
        image.save(file, form, **options)
        files.append((file.getvalue(), form.lower()))
    data, form = min(files, key=lambda one: len(one[0]))
    return f"data:image/{form};base64,{base64.b64encode(data).decode()}"
