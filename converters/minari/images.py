"""Images that Minari stored as JPEG."""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from PIL import Image

from ...core.errors import CorruptDataError, FormatError
from ...core.format import Array

__all__ = ["decode_images"]

_WORTH_THREADS = 8
_DAMAGED = (OSError, ValueError, SyntaxError, Image.DecompressionBombError)


def decode_images(frames: Sequence[bytes], shape: tuple[int, ...], what: str, first: int) -> Array:
    """Decode frames into uint8 `[n, *shape]`; `first` is the row of the first, for messages.

    Raises CorruptDataError for a frame that cannot be decoded, FormatError for one of another shape.
    """
    images = np.empty((len(frames), *shape), np.uint8)

    def decode(number: int) -> None:
        images[number] = _decode(frames[number], shape, f"{what}, row {first + number}")

    if len(frames) < _WORTH_THREADS:
        for number in range(len(frames)):
            decode(number)
    else:
        with ThreadPoolExecutor(min(os.cpu_count() or 1, 8)) as pool:
            list(pool.map(decode, range(len(frames))))
    return images


def _decode(frame: bytes, shape: tuple[int, ...], what: str) -> Array:
    try:
        with Image.open(io.BytesIO(frame), formats=("JPEG",)) as image:
            bands = len(image.getbands())
            found = (image.height, image.width, *([bands] if bands > 1 else []))
            if found == shape:  # before any memory is taken for it
                return np.asarray(image, np.uint8)
    except _DAMAGED as error:
        reason = str(error).partition("<")[0].strip() or type(error).__name__
        raise CorruptDataError(f"{what}: the image is damaged or was cut: {reason}") from error
    raise FormatError(f"{what}: the image has shape {list(found)}, its space says {list(shape)}")
