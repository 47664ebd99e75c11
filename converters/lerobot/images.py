"""Columns of encoded images."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from ...core.errors import FormatError
from ...core.format.contracts import Array
from ..files.images import ImageForm, decode_image
from .fields import FeatureColumn, as_stated
from .rows import column_of


def column_images(table: Any, column: FeatureColumn, path: Path, start: int) -> Array:
    """Decode a column of structs with the bytes of images into uint8 `[rows, *shape]`; `start` is the first row."""
    shape = column.field.shape
    height, width, channels = (*shape[1:], shape[0]) if column.channels_first else shape
    form = ImageForm("uint8", (height, width, channels))
    images = np.empty((table.num_rows, *shape), np.uint8)
    for row, value in enumerate(column_of(table, column.name).to_pylist()):
        what = f"{path}: {column.name!r}, row {start + row:,}"
        data = value.get("bytes") if isinstance(value, dict) else value
        if not isinstance(data, bytes) or not data:
            raise FormatError(f"{what} has no bytes of an image")
        images[row] = as_stated(decode_image(data, form, what), column, what)
    return images
