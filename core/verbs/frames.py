"""`frames`: write the images of an episode as a video (MP4 by PyAV, GIF by Pillow) or as a contact sheet (PNG).

Videos are encoded frame by frame, so that memory does not grow with their length.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from ..encodings.video import referred_frames, require_pyav
from ..errors import UsageError
from ..format import fs
from ..format.contracts import Array, StepReader
from ..format.locate import find_dataset
from ..format.staging import FileStaging, require_suffix
from ..format.videos import image_key, reference_keys, stated_fps
from ..open_steps import open_steps
from ..options import takes
from ..progress import Progress
from ..report.pictures import PictureLayout, as_bytes, looks_like_picture, picture_layout
from ..results import Result
from ..saved_steps import has_steps, row_of_episode
from ..ted.episodes import Final
from ..ted.schema import NEXT, Field, Key, as_numbers, key_called, key_name, unknown_field
from .options import FramesOptions

if TYPE_CHECKING:
    from PIL.Image import Image


_TILE, _WIDEST = 96, 320  # on a sheet: least pixels of the shorter side of an image, most pixels of the longer side
_MARGIN, _LABEL = 6, 16
_PAPER, _INK = (255, 255, 255), (31, 35, 40)
_ACROSS = 1.6  # the width of a sheet over its height
_FASTEST_GIF = 50


def rgb(frame: Array) -> Array:
    """Return a frame, uint8 `[height, width]` or `[height, width, 3]`, as RGB."""
    return frame if frame.ndim == 3 else np.repeat(frame[..., None], 3, axis=2)


def enlarged(frame: Array, scale: int) -> Array:
    """Repeat each pixel of a frame `scale` times across and down."""
    return frame if scale == 1 else frame.repeat(scale, axis=0).repeat(scale, axis=1)


def write_mp4(path: Path, frames: Iterable[Array], rate: Fraction) -> None:
    """Encode frames as H.264, which plays on every device; odd sizes become even by repeating the last column or row.

    Raises UsageError if PyAV or its encoder is not installed.
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
    """Raise UsageError for a rate above 50, because GIF viewers show such files at 10 frames per second."""
    if rate > _FASTEST_GIF:
        raise UsageError(
            f"fps is {float(rate):g}, expected at most {_FASTEST_GIF} for a GIF",
            hint="write a .mp4, or choose a lower --fps",
        )


def write_gif(path: Path, frames: Iterable[Array], rate: Fraction) -> None:
    """Write frames as a GIF that repeats; RGB frames are each reduced to the 256 colours that fit best.

    GIF times are in hundredths of a second: each frame starts at the one nearest to its time.
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
    """Draw frames of one size in rows, each with its name below, as a PNG; a single frame is drawn in its own size."""
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
    """Scale a frame to its size on a sheet: enlarge small frames by repeating pixels, and average large ones."""
    from PIL import Image

    height, width = frame.shape[:2]
    picture = Image.fromarray(np.ascontiguousarray(rgb(enlarged(frame, max(1, _TILE // min(height, width))))))
    picture.thumbnail((_WIDEST, _WIDEST), Image.Resampling.LANCZOS)
    return picture


def _png(picture: Image) -> bytes:
    file = io.BytesIO()
    picture.save(file, format="PNG")
    return file.getvalue()


FRAME_SUFFIXES = (".mp4", ".gif", ".png")
DEFAULT_RATE = 30
_MOST_SCALE = 32
_BLOCK_BYTES = 16 << 20
_ON_SHEET = 40
_STEPS = re.compile(r"(?P<first>\d*)(?P<range>:(?P<stop>\d*))?")


@dataclass(frozen=True, slots=True, kw_only=True)
class FramesResult(Result):
    """The file `output` with images of the field `field` of one episode, at `fps`, which is None for a sheet.

    `steps` are the steps whose frames are in the file; a sheet may have fewer than were requested. The frame of step t
    is the observation before its action, and the frame after the last step's is the final observation. `height`
    and `width` describe a frame before it is enlarged.
    """

    kind: ClassVar[str] = "frames"
    path: Path
    output: Path
    field: str
    episode: int
    steps: tuple[int, ...]
    height: int
    width: int
    fps: float | None
    notes: tuple[str, ...]


@takes(FramesOptions)
def frames(asked: FramesOptions) -> FramesResult:
    """Write the images of an episode as a video (.mp4, .gif), or some of them as a sheet (.png).

    Images may be grey or RGB, of any size, with channels first or last; of stacked frames, the newest is shown. Values
    that are not uint8 are scaled. Memory does not grow with the length of the episode.

    Args:
        dataset: a path or `source:id` of a dataset or a checkpoint of steps.
        output: the file to write; its suffix is the format. A sheet has at most 40 frames, evenly spaced; the frame of
            a single step is written in its own size.
        episode: the number of an episode.
        field: the field of images, or of frames of kept videos; default: the first one.
        steps: a range like `0:100`, or one step; default: all, with the observation after the last step.
        fps: frames per second; default: as the data states, else 30.
        scale: repeat each pixel so often across and down.
        root: where stored datasets are.
        force: replace an existing file, if it has that format.
        progress: shows how far it is; default: nothing is shown.

    Returns:
        Which frames are in the file.

    Raises:
        UsageError: the dataset or the field has no images, the field, the episode or the steps do not exist, `output`
            cannot be written, or PyAV is missing for .mp4.
        DatasetNotFoundError, FormatError, CorruptDataError: the dataset does not exist, cannot be read, or is damaged.
    """
    destination = fs.expanded(asked.output)
    suffix = require_suffix(destination, FRAME_SUFFIXES)
    rate = _rate(asked.fps)
    if not 1 <= asked.scale <= _MOST_SCALE:
        raise UsageError(f"--scale is {asked.scale}, expected a number from 1 to {_MOST_SCALE}")
    staging = FileStaging(destination, replace=asked.force)
    staging.refuse_if_taken()
    if suffix == ".mp4":
        require_pyav()
    path = find_dataset(asked.dataset, asked.root)
    has_steps(path)
    with open_steps(path) as reader:
        notes = list[str]()
        images = _Images.of(reader, asked.field, asked.episode, notes)
        chosen = _chosen(asked.steps, images.count, asked.episode)
        rate = rate or _rate(stated_fps(reader)) or Fraction(DEFAULT_RATE)
        if suffix == ".gif":
            require_gif_rate(rate)
        shown = chosen
        if suffix == ".png" and len(chosen) > _ON_SHEET:
            shown = [chosen[place] for place in np.linspace(0, len(chosen) - 1, _ON_SHEET).round().astype(int)]
            notes.append(f"{len(shown)} of {len(chosen):,} frames are on the sheet; --steps A:B chooses others")
        low, high = images.scale(chosen, notes)
        made = images.bytes_of(shown, low, high, asked.scale, asked.reporter)
        with staging:
            built = staging.path / f"frames{suffix}"
            if suffix == ".png":
                fs.write_file(built, sheet([*made], [str(step) for step in shown]))
            else:
                {".mp4": write_mp4, ".gif": write_gif}[suffix](built, made, rate)
            staging.publish_file(built.name)
        return FramesResult(
            path=reader.path, output=staging.destination, field=key_name(images.key), episode=asked.episode,
            steps=tuple(shown), height=images.layout.height, width=images.layout.width,
            fps=None if suffix == ".png" else float(rate), notes=tuple(notes),
        )  # fmt: skip


def _rate(fps: float | None) -> Fraction | None:
    if fps is None:
        return None
    if not 0 < fps <= 1000:
        raise UsageError(f"--fps is {fps:g}, expected a number above 0 and up to 1,000")
    return Fraction(fps).limit_denominator(1001)


def _chosen(steps: str | None, count: int, episode: int) -> Sequence[int]:
    """Parse steps like `0:100` or `7`; UsageError unless all are among the `count` steps that have frames."""
    if steps is None:
        return range(count)
    found = _STEPS.fullmatch(steps.strip())
    if found is None or not steps.strip() or (not found["range"] and not found["first"]):
        raise UsageError(f"--steps {steps!r} is not understood", hint="write it like 0:100, or 7 for one step")
    first = int(found["first"] or 0)
    stop = (int(found["stop"]) if found["stop"] else count) if found["range"] else first + 1
    if not first < stop <= count:
        raise UsageError(f"--steps {steps} not found: episode {episode} has frames of the steps 0 to {count - 1}")
    return range(first, stop)


@dataclass(frozen=True, slots=True)
class _Images:
    """The images of an episode: `length` rows from `start` on; `after` is True if there is one after the last step."""

    reader: StepReader
    key: Key
    field: Field
    layout: PictureLayout
    start: int
    length: int
    after: bool
    videos: bool

    @classmethod
    def of(cls, reader: StepReader, name: str | None, episode: int, notes: list[str]) -> _Images:
        """Find the field, and its layout from the first image of the episode."""
        referred = {image_key(key): key for key in reference_keys(reader.fields)}
        key = _image_field(reader, referred, name, notes)
        table = reader.episodes
        row = row_of_episode(table, episode)
        leaves = {field.key: field for field in reader.fields}
        field = leaves[referred.get(key, key)]
        after = (NEXT, *field.key) in leaves and table.final[row] == Final.OBSERVED
        start, length = int(table.start[row]), int(table.length[row])
        images = cls(reader, key, field, _ANY, start, length, after, key in referred)
        first = images._rows(0, 1)
        layout = picture_layout(first.shape[1:])
        if layout is None:
            raise _no_image(field, reader.fields, referred)
        layout = layout.seen(first[0])
        if layout.stacked > 1:
            notes.append(f"{key_name(key)} has {layout.stacked} frames per step: the newest is shown")
        return replace(images, layout=layout)

    @property
    def count(self) -> int:
        """The number of frames."""
        return self.length + self.after

    def _rows(self, first: int, stop: int) -> Array:
        """Read the frames `[first, stop)`, at least one."""
        rows = self._read(self.field.key, self.start + first, self.start + min(stop, self.length))
        if stop <= self.length:
            return rows
        end = self.start + self.length
        last = self._read((NEXT, *self.field.key), end - 1, end)
        return np.concatenate([rows, last]) if first < self.length else last

    def _read(self, key: Key, start: int, stop: int) -> Array:
        rows = self.reader.read(key, start, max(start, stop))
        if not self.videos:
            return as_numbers(rows, self.field.dtype)
        return referred_frames(self.reader.path, rows)

    def _blocks(self, steps: Sequence[int]) -> Iterator[Array]:
        """Yield the frames of ascending steps, in blocks of consecutive steps; of stacked frames, the newest."""
        size = self._rows(0, 1).nbytes
        most = max(1, _BLOCK_BYTES // size)
        place = 0
        while place < len(steps):
            stop = place + 1
            while stop < len(steps) and stop - place < most and steps[stop] == steps[stop - 1] + 1:
                stop += 1
            yield self.layout.newest(self._rows(steps[place], steps[stop - 1] + 1))
            place = stop

    def scale(self, steps: Sequence[int], notes: list[str]) -> tuple[float, float]:
        """Return the values that become black and white: the bounds of uint8 or bool, else of the frames.

        Floats that fit into [0, 1], [0, 255] or [-1, 1] are scaled by that range.
        """
        dtype = self._rows(0, 1).dtype.name if self.videos else self.field.dtype
        if dtype in {"uint8", "bool"}:
            return (0, 1) if dtype == "bool" else (0, 255)
        low, high = np.inf, -np.inf
        for block in self._blocks(steps):
            finite = block[np.isfinite(block)].astype(np.float64)
            low, high = min(low, finite.min(initial=np.inf)), max(high, finite.max(initial=-np.inf))
        is_real = "float" in dtype
        if low > high or (is_real and low >= 0 and high <= 1):
            return 0, 1
        if is_real and low >= 0 and high <= 255:
            return 0, 255
        if is_real and low >= -1 and high <= 1:
            low, high = -1.0, 1.0
        notes.append(f"{key_name(self.key)} has values from {low:.4g}, shown as black, to {high:.4g}, shown as white")
        return float(low), float(high)

    def bytes_of(
        self, steps: Sequence[int], low: float, high: float, scale: int, progress: Progress
    ) -> Iterator[Array]:
        """Yield the frames of some steps as uint8, enlarged."""
        progress.start("drawing", len(steps), "frames")
        for block in self._blocks(steps):
            for frame in block:
                yield enlarged(as_bytes(frame, low, high), scale)
                progress.advance(1)
        progress.done()


_ANY = PictureLayout(1, 1, 1, 1, channels_first=False, apart=False)


def _image_field(reader: StepReader, referred: dict[Key, Key], name: str | None, notes: list[str]) -> Key:
    """Return the key of the field with images that `name` means, or of the first one."""
    fields = {one.key: one for one in reader.fields if one.key not in referred.values()}
    images = [key for key in referred if key[0] != NEXT]
    images += [one.key for one in reader.fields if one.key[0] != NEXT and looks_like_picture(one)]
    if name is None:
        if not images:
            raise UsageError(f"{reader.path} has no images", hint="rbtool plot shows fields of numbers")
        if len(images) > 1:
            others = ", ".join(key_name(key) for key in images[1:])
            notes.append(f"{key_name(images[0])} is shown; --field chooses another: {others}")
        return images[0]
    reference = key_called(name, referred.values())
    key = image_key(reference) if reference else key_called(name, [*fields, *referred])
    if key is None:
        raise unknown_field(name, map(key_name, [*fields, *referred]))
    if key in referred:
        return key
    field = fields[key]
    if picture_layout(field.shape) is None or field.role == "text" or "complex" in field.dtype:
        raise _no_image(field, reader.fields, referred)
    return field.key


def _no_image(field: Field, fields: Sequence[Field], referred: dict[Key, Key]) -> UsageError:
    shape = "×".join(map(str, field.shape)) or "one number"
    others = [*map(key_name, referred), *(one.name for one in fields if looks_like_picture(one))]
    hint = f"images are {', '.join(others)}" if others else f"rbtool plot --field {field.name} shows its numbers"
    return UsageError(f"{field.name} holds no images: its rows are {shape} of {field.dtype}", hint=hint)
