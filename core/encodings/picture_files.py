"""Frames written as files that people open: MP4 by PyAV, GIF and a sheet of small pictures by Pillow.

Videos are encoded frame by frame, so that memory does not grow with their length.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterable, Iterator, Sequence
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ..errors import UsageError
from ..format import fs
from ..format.contracts import Array
from .video import require_pyav

if TYPE_CHECKING:
    from PIL.Image import Image

_TILE, _WIDEST = 96, 320  # pixels of the shorter side of a picture on a sheet at least, and of the longer at most
_MARGIN, _LABEL = 6, 16
_PAPER, _INK = (255, 255, 255), (31, 35, 40)
_ACROSS = 1.6  # the width of a sheet over its height
_FASTEST_GIF = 50


def rgb(frame: Array) -> Array:
    """Return a frame, `[height, width]` or `[height, width, 3]` of bytes, as RGB."""
    return frame if frame.ndim == 3 else np.repeat(frame[..., None], 3, axis=2)


def enlarged(frame: Array, scale: int) -> Array:
    """Repeat each pixel of a frame `scale` times across and down."""
    return frame if scale == 1 else frame.repeat(scale, axis=0).repeat(scale, axis=1)


def write_mp4(path: Path, frames: Iterable[Array], rate: Fraction) -> None:
    """Encode frames as H.264, which shows on every device; the last column and row of odd sizes are repeated once.

    UsageError where PyAV, or its encoder, is not installed.
    """
    av = require_pyav()
    if "libx264" not in av.codecs_available:
        raise UsageError(
            "this PyAV has no encoder of H.264 (libx264)", hint="write a .gif, or pip install --upgrade av"
        )
    with fs.created(path) as file, av.open(file, "w", format="mp4") as container:
        stream = container.add_stream("libx264", rate=rate, options={"crf": "18"})
        stream.pix_fmt = "yuv420p"
        for number, frame in enumerate(frames):
            even = np.pad(rgb(frame), [(0, frame.shape[0] % 2), (0, frame.shape[1] % 2), (0, 0)], mode="edge")
            if not number:
                stream.height, stream.width = even.shape[:2]
            picture = av.VideoFrame.from_ndarray(np.ascontiguousarray(even), format="rgb24")
            picture.pts, picture.time_base = number, 1 / rate
            container.mux(stream.encode(picture))
        container.mux(stream.encode())


def require_gif_rate(rate: Fraction) -> None:
    """Raise UsageError for a rate that viewers of GIF do not follow: they show such files at 10 frames a second."""
    if rate > _FASTEST_GIF:
        raise UsageError(
            f"fps is {float(rate):g}, expected at most {_FASTEST_GIF} for a GIF",
            hint="write a .mp4, or choose a lower --fps",
        )


def write_gif(path: Path, frames: Iterable[Array], rate: Fraction) -> None:
    """Write frames as a GIF that repeats: grey ones as they are, RGB ones in the 256 colours that fit each best.

    A GIF counts hundredths of a second: each frame starts at the one nearest to its time.
    """
    descriptor = fs.create(path)
    try:
        for part in _gif_parts(frames, rate):
            fs.write(descriptor, memoryview(part), path)
    finally:
        fs.close(descriptor, path)


def _gif_parts(frames: Iterable[Array], rate: Fraction) -> Iterator[bytes]:
    from PIL import GifImagePlugin, Image

    for number, frame in enumerate(frames):
        picture = Image.fromarray(np.ascontiguousarray(frame))
        picture = picture.convert("P") if frame.ndim == 2 else picture.quantize(256)
        if not number:
            yield from GifImagePlugin.getheader(picture, info={"loop": 0})[0]
        start, stop = (round(place * 100 / rate) for place in (number, number + 1))
        yield from GifImagePlugin.getdata(picture, duration=10 * (stop - start), include_color_table=True)
    yield b";"


def sheet(frames: Sequence[Array], names: Sequence[str]) -> bytes:
    """Draw frames of one size in rows, each with its name below, as a PNG; a single one is drawn alone as it is."""
    from PIL import Image

    if len(frames) == 1:
        return _png(Image.fromarray(np.ascontiguousarray(frames[0])))
    from PIL import ImageDraw, ImageFont

    tiles = [_tile(frame) for frame in frames]
    width, height = tiles[0].width + _MARGIN, tiles[0].height + _MARGIN + _LABEL
    columns = min(len(tiles), math.ceil(math.sqrt(len(tiles) * _ACROSS * height / width)))
    rows = math.ceil(len(tiles) / columns)
    page = Image.new("RGB", (columns * width + _MARGIN, rows * height + _MARGIN), _PAPER)
    draw, font = ImageDraw.Draw(page), ImageFont.load_default()
    for place, (tile, name) in enumerate(zip(tiles, names, strict=True)):
        left, top = _MARGIN + place % columns * width, _MARGIN + place // columns * height
        page.paste(tile, (left, top))
        draw.text((left, top + tile.height + 2), name, fill=_INK, font=font)
    return _png(page)


def _tile(frame: Array) -> Image:
    """Make a frame as large as one on a sheet: pixels are repeated if it is small, and averaged if it is large."""
    from PIL import Image

    height, width = frame.shape[:2]
    picture = Image.fromarray(np.ascontiguousarray(rgb(enlarged(frame, max(1, _TILE // min(height, width))))))
    picture.thumbnail((_WIDEST, _WIDEST), Image.Resampling.LANCZOS)
    return picture


def _png(picture: Image) -> bytes:
    file = io.BytesIO()
    picture.save(file, format="PNG")
    return file.getvalue()
