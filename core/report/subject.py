"""What a report shows about one dataset: its figures, the episodes chosen for the player, and sheets of images."""

from __future__ import annotations

import base64
import contextlib
import io
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from ..encodings.video import referred_frames
from ..errors import CorruptDataError, FormatError, SchemaError, UsageError
from ..format.contracts import Array, StepReader
from ..format.documents import parse_json
from ..format.episodes import EpisodeTable
from ..format.manifest import Manifest
from ..format.returns import return_field_of
from ..format.videos import image_key, reference_keys
from ..progress import Progress, counted
from ..remote.hub_address import Transfer, transfers_of
from ..ted.episodes import EndReason
from ..ted.rules import Finding
from ..ted.schema import NEXT, Field, Key, as_numbers, key_name
from .figures import Figures, is_image, measure
from .pictures import as_bytes, picture_layout

if TYPE_CHECKING:
    from PIL.Image import Image


_SIDE = 112
"""Longest side of a frame in a sheet, in pixels."""
_LEAST = 16
_QUALITY = 72
_BETWEEN = (128, 128, 128)


def as_rgb(rows: Array) -> Array:
    """Return images `[n, …]` as RGB, uint8 `[n, height, width, 3]`; of stacked frames, the newest.

    Floats are assumed to range from 0 to 1, or from 0 to 255 if any is above 1, or to the largest value above that, as
    in depth maps.
    """
    layout = picture_layout(rows.shape[1:])
    if layout is None:
        raise ValueError(f"rows of shape {list(rows.shape[1:])} are not images")
    newest = layout.seen(rows[0]).newest(rows)
    top = float(np.nanmax(newest, initial=0))
    high = 1.0 if newest.dtype.kind == "f" and top <= 1 else max(255.0, top)
    found = as_bytes(newest, 0.0, high)
    return found if found.ndim == 4 else np.repeat(found[..., None], 3, axis=3)


class ImageSource:
    """The images of one field: pixels in its rows, or frames of the dataset's videos."""

    def __init__(self, reader: StepReader, key: Key, *, reference: bool) -> None:
        self.name = key_name(image_key(key) if reference else key)
        self._reader = reader
        self._key = key
        self._reference = reference
        self._dtype = next(field.dtype for field in reader.fields if field.key == key)

    def frames(self, steps: Sequence[int]) -> Array:
        """Return the frames of these steps as RGB.

        Raises:
            CorruptDataError: a frame cannot be read.
            UsageError: the frames are in videos and PyAV is not installed.
        """
        rows = np.concatenate([self._reader.read(self._key, step, step + 1) for step in steps])
        if not self._reference:
            return as_rgb(as_numbers(rows, self._dtype))
        return as_rgb(referred_frames(self._reader.path, rows))


def image_sources(reader: StepReader) -> list[ImageSource]:
    """Return the fields with images."""
    references = [key for key in reference_keys(reader.fields) if key[0] != NEXT]
    found = [ImageSource(reader, field.key, reference=False) for field in reader.fields if is_image(field)]
    return found + [ImageSource(reader, key, reference=True) for key in references]


@dataclass(frozen=True, slots=True)
class Sheet:
    """Frames tiled in one image, `columns` per row.

    `data` is the image as a data URL; `width` and `height` are the size of a frame in pixels.
    """

    data: str
    count: int
    columns: int
    width: int
    height: int


def sheet_of(frames: Array, columns: int, most_bytes: int, *, gap: int = 0) -> Sheet:
    """Tile frames, RGB `[n, height, width, 3]`, into an image whose data URL has at most about `most_bytes` bytes.

    Frames are scaled down to `_SIDE` pixels, and further until they fit, with `gap` pixels between them.
    """
    side = _SIDE
    while True:
        sheet = _sheet(frames, columns, side, gap)
        if len(sheet.data) <= most_bytes or side <= _LEAST:
            return sheet
        side = max(_LEAST, int(side * max(0.5, 0.95 * (most_bytes / len(sheet.data)) ** 0.5)))


def _sheet(frames: Array, columns: int, side: int, gap: int) -> Sheet:
    from PIL import Image  # imported only if there are images

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
    """Return an image as a data URL, PNG or JPEG, whichever is smaller."""
    files = []
    for form, options in (("PNG", {"optimize": True}), ("JPEG", {"quality": _QUALITY})):
        file = io.BytesIO()
        image.save(file, form, **options)
        files.append((file.getvalue(), form.lower()))
    data, form = min(files, key=lambda one: len(one[0]))
    return f"data:image/{form};base64,{base64.b64encode(data).decode()}"


_STEPS = 500
"""Most steps of an episode that are shown; of longer episodes every second, third, … step."""
_FRAMES = 40
_COLUMNS = 8
"""Most columns of observations, and of actions, that are shown."""
_TOGETHER = 16 << 20
"""Bytes read at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """The values of one column at the steps shown, float64 `[n]`; `kind` is observation, action or reward."""

    kind: str
    name: str
    values: Array


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownEpisode:
    """An episode in the player.

    Args:
        row: its index in storage order; `why`: the reason it was chosen.
        steps, stride: the steps shown and their distance; the last step is always included.
        traces: columns of observations and actions, and the reward, at these steps; `left_out` counts the others.
        frames, frame_steps: frames of some of the steps.
    """

    row: int
    number: int
    why: str
    length: int
    total: float | None
    end: str
    stride: int
    steps: Array
    traces: tuple[Trace, ...]
    left_out: str
    frames: Sheet | None = None
    frame_steps: tuple[int, ...] = ()
    note: str = ""


def chosen_episodes(table: EpisodeTable, most: int, *, returns: bool) -> list[tuple[int, str]]:
    """Choose at most `most` episodes worth a look; return their rows in the episode table with the reasons."""
    if not len(table):
        return []
    reasons: dict[int, list[str]] = {}

    def add(row: int, why: str) -> None:
        reasons.setdefault(row, []).append(why)

    known = np.flatnonzero(np.isfinite(table.total_reward)) if returns else np.zeros(0, np.int64)
    if len(known):
        order = known[np.argsort(table.total_reward[known], kind="stable")]
        add(int(order[-1]), "highest return")
        add(int(order[0]), "lowest return")
        add(int(order[(len(order) - 1) // 2]), "median return")
    add(int(table.length.argmax()), "longest")
    add(0, "first")
    add(len(table) - 1, "last")
    return [(row, ", ".join(why)) for row, why in list(reasons.items())[:most]]


def show_episodes(
    reader: StepReader, figures: Figures, sources: list[ImageSource], most: int, frame_bytes: int
) -> list[ShownEpisode]:
    """Read the chosen episodes, with frames of the first image field in at most `frame_bytes` per episode."""
    if figures.episodes is None or not figures.episodes.table.covers(figures.steps):
        return []
    table = figures.episodes.table
    returns = figures.episodes.returns is not None
    found = []
    for row, why in chosen_episodes(table, most, returns=returns):
        try:
            found.append(_shown(reader, table, row, why, sources, frame_bytes, returns=returns))
        except (CorruptDataError, FormatError):
            continue  # the findings report the damage
    return found


def _shown(
    reader: StepReader, table: EpisodeTable, row: int, why: str, sources: list[ImageSource], frame_bytes: int, *,
    returns: bool,
) -> ShownEpisode:  # fmt: skip
    start, length = int(table.start[row]), int(table.length[row])
    stride = -(-length // _STEPS)
    steps = np.union1d(np.arange(0, length, stride), [length - 1])
    traces, left_out = _traces(reader, start, steps)
    sheet, frame_steps, note = None, np.zeros(0, np.int64), ""
    if sources and frame_bytes:
        frame_steps = np.unique(np.linspace(0, length - 1, min(length, _FRAMES)).round().astype(np.int64))
        try:
            sheet = sheet_of(sources[0].frames((start + frame_steps).tolist()), len(frame_steps), frame_bytes)
        except (CorruptDataError, SchemaError, UsageError) as error:
            note = str(error)
    return ShownEpisode(
        row=row, number=int(table.episode[row]), why=why, length=length,
        total=float(table.total_reward[row]) if returns else None,
        end=EndReason(int(table.end_reason[row])).name.lower().replace("_", " "),
        stride=stride, steps=steps, traces=traces, left_out=left_out, frames=sheet,
        frame_steps=tuple(frame_steps.tolist()) if sheet else (), note=note,
    )  # fmt: skip


def _traces(reader: StepReader, start: int, steps: Array) -> tuple[tuple[Trace, ...], str]:
    """Return the first columns of observations and actions, and the reward; and a text on the columns left out."""
    traces, left_out = list[Trace](), list[str]()
    for kind in ("observation", "action"):
        columns = 0
        for one in reader.fields:
            numeric = one.row_bytes and "complex" not in one.dtype
            if one.role != kind or one.key[0] == NEXT or not numeric or is_image(one):
                continue
            width, room = math.prod(one.shape), max(0, _COLUMNS - columns)
            columns += width
            if room:
                values = _values(reader, one, start, steps, room)
                names = [one.name] if width == 1 else [f"{one.name}[{place}]" for place in range(values.shape[1])]
                traces += [Trace(kind=kind, name=name, values=values[:, place]) for place, name in enumerate(names)]
        if columns > _COLUMNS:
            left_out.append(counted(columns - _COLUMNS, f"{kind} column"))
    reward = return_field_of(reader.manifest)
    if reward is not None:
        traces.append(Trace(kind="reward", name="reward", values=_values(reader, reward, start, steps, 1)[:, 0]))
    return tuple(traces), ", ".join(left_out)


def _values(reader: StepReader, field: Field, start: int, steps: Array, columns: int) -> Array:
    """Return the first columns of an episode's rows at these ascending steps as float64 `[n, columns]`."""
    found, last, together = [], int(steps[-1]) + 1, max(1, _TOGETHER // field.row_bytes)
    for low in range(0, last, together):
        high = min(low + together, last)
        wanted = steps[(steps >= low) & (steps < high)] - low
        if len(wanted):
            rows = as_numbers(reader.read(field.key, start + low, start + high), field.dtype)[wanted]
            found.append(rows.reshape(len(rows), -1)[:, :columns].astype(np.float64))
    return np.concatenate(found)


_EVIDENCE, _OF_A_RULE = 12, 2
"""The largest number of findings with evidence, in all and for one rule."""
_SHOWN_FRAMES, _AROUND = 8, 3
"""The largest number of frames of a finding, and the number of steps shown before and after the marked ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """The evidence for a finding: values and frames of one of its episodes.

    Args:
        number, length: the number and the length of the episode.
        steps: the steps shown, counted from the beginning of the episode.
        traces: the components that the finding names, at these steps.
        usual: the same components of an episode without the finding, spread over its length; empty if there is none.
        marks: the steps of the finding, as half-open ranges in the episode.
        frames, frame_steps, camera: frames of some of these steps, and the field that they are from.
    """

    number: int
    length: int
    steps: Array
    traces: tuple[Trace, ...] = ()
    usual: tuple[Array, ...] = ()
    marks: tuple[tuple[int, int], ...] = ()
    frames: Sheet | None = None
    frame_steps: tuple[int, ...] = ()
    camera: str = ""


def evidence_of(
    reader: StepReader,
    findings: Sequence[Finding],
    table: EpisodeTable,
    sources: Sequence[ImageSource],
    most_bytes: int,
) -> dict[int, Evidence]:
    """Return evidence for the first findings of each rule that name components, by their index in the list."""
    count: dict[str, int] = {}
    found: dict[int, Evidence] = {}
    for place, one in enumerate(findings):
        if len(found) < _EVIDENCE and one.components and (one.episodes or one.steps):
            count[one.rule] = count.get(one.rule, 0) + 1
            if count[one.rule] > _OF_A_RULE:
                continue
            with contextlib.suppress(CorruptDataError, FormatError, SchemaError, UsageError):
                found[place] = _evidence(reader, one, table, sources, most_bytes // _EVIDENCE)
    return found


def _evidence(
    reader: StepReader, finding: Finding, table: EpisodeTable, sources: Sequence[ImageSource], most_bytes: int
) -> Evidence:
    if finding.episodes:
        row = int(np.flatnonzero(table.episode == finding.episodes[0])[0])
    else:
        row = int(table.index_of_step(np.array([finding.steps[0][0]]))[0])
    start, length = int(table.start[row]), int(table.length[row])
    within = ((max(low, start) - start, min(high, start + length) - start) for low, high in finding.steps)
    marks = [(low, high) for low, high in within if low < high]
    marks = [] if marks == [(0, length)] else marks[:_MARKS]
    steps = np.union1d(np.arange(0, length, -(-length // _STEPS)), [length - 1])
    traces = list(_named(reader, finding.components, start, steps))
    others = np.flatnonzero(~np.isin(table.episode, list(finding.episodes)) & (table.length > 1))
    usual: list[Array] = []
    if len(others) and finding.episodes:
        other = int(others[np.argmin(np.abs(table.length[others] - length))])
        places = np.unique((steps / max(1, length - 1) * (int(table.length[other]) - 1)).round().astype(np.int64))
        usual = [one.values for one in _named(reader, finding.components, int(table.start[other]), places)]
    cameras = [source for source in sources if source.name in finding.components] or list(sources[:1])
    sheet, chosen = None, np.zeros(0, np.int64)
    if cameras and most_bytes:
        low, high = marks[0] if marks else (0, length)
        low, high = max(0, low - _AROUND), min(length, high + _AROUND)
        chosen = np.unique(np.linspace(low, high - 1, min(high - low, _SHOWN_FRAMES)).round().astype(np.int64))
        sheet = sheet_of(cameras[0].frames((start + chosen).tolist()), len(chosen), most_bytes, gap=2)
    return Evidence(
        number=int(table.episode[row]), length=length, steps=steps, traces=tuple(traces), usual=tuple(usual),
        marks=tuple(marks), frames=sheet, frame_steps=tuple(chosen.tolist()) if sheet else (),
        camera=cameras[0].name if sheet else "",
    )  # fmt: skip


def _named(reader: StepReader, components: Sequence[str], start: int, steps: Array) -> Iterator[Trace]:
    """Yield traces of the components that are columns of a field, such as `action` or `observation.state[2]`."""
    fields = {one.name: one for one in reader.fields}
    for name in components:
        match = _COMPONENT.fullmatch(name)
        one = fields.get(match[1] if match else name)
        if one is None or is_image(one) or not one.row_bytes or "complex" in one.dtype:
            continue
        column = int(match[2]) if match else 0
        if column < math.prod(one.shape) and (match or math.prod(one.shape) == 1):
            values = _values(reader, one, start, steps, column + 1)[:, column]
            yield Trace(kind=one.role, name=name, values=values)


_MARKS = 200
_COMPONENT = re.compile(r"(.+)\[(\d+)\]")
_SHEET_FRAMES, _SHEET_COLUMNS = 24, 8
_STRIP_FRAMES = 32
_FIELDS = 4
"""Most fields with images that are shown."""
_STATED = ("license", "licence", "citation", "author", "author_email", "algorithm_name", "code_permalink", "env_id")
"""Entries of the source's own metadata that are shown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedSubject:
    """The result of `check`: the findings, how many rules ran, rules that could not run, and notes."""

    findings: tuple[Finding, ...] = ()
    rules: int = 0
    skipped: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def errors(self) -> int:
        """The number of errors among the findings."""
        return sum(finding.severity == "error" for finding in self.findings)

    @property
    def warnings(self) -> int:
        """The number of warnings among the findings."""
        return len(self.findings) - self.errors


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownImages:
    """A field with images: frames spread over all steps, and consecutive frames of one episode.

    Both are None if they cannot be read; `note` says why.
    """

    name: str
    sheet: Sheet | None = None
    strip: Sheet | None = None
    episode: int | None = None
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """One dataset in a report; `manifest` and `figures` are None if it cannot be opened.

    `evidence` belongs to findings, by their index in the list. `share` is the dataset's weight in a mixture. `stated`
    has selected entries of the source's own metadata.
    """

    name: str
    path: str
    checked: CheckedSubject
    manifest: Manifest | None = None
    figures: Figures | None = None
    images: tuple[ShownImages, ...] = ()
    more_images: int = 0
    shown: tuple[ShownEpisode, ...] = ()
    evidence: Mapping[int, Evidence] = field(default_factory=dict)
    transfers: tuple[Transfer, ...] = ()
    stated: Mapping[str, str] = field(default_factory=dict)
    share: float | None = None


def subject_of(
    reader: StepReader, name: str, checked: CheckedSubject, progress: Progress, *, image_bytes: int, episodes: int,
    share: float | None = None,
) -> Subject:  # fmt: skip
    """Measure a dataset, and read up to `episodes` episodes and about `image_bytes` of images for the report."""
    figures = measure(reader, progress)
    sources = image_sources(reader) if reader.manifest.steps else []
    chosen = sources[:_FIELDS]
    frame_bytes = image_bytes // (2 * max(1, episodes)) if chosen else 0
    shown = show_episodes(reader, figures, chosen, episodes, frame_bytes)
    half = image_bytes // (4 * max(1, len(chosen)))
    seen: dict[int, Evidence] = {}
    if figures.episodes is not None and figures.episodes.table.covers(figures.steps):
        seen = evidence_of(reader, checked.findings, figures.episodes.table, sources, image_bytes // 4)
    return Subject(
        name=name, path=str(reader.path), checked=checked, manifest=reader.manifest, figures=figures,
        images=tuple(_images_of(source, figures, shown, half) for source in chosen),
        more_images=len(sources) - len(chosen), shown=tuple(shown), evidence=seen,
        transfers=tuple(transfers_of(reader.path)),
        stated=dict(_stated(reader)), share=share,
    )  # fmt: skip


def _images_of(source: ImageSource, figures: Figures, shown: list[ShownEpisode], most_bytes: int) -> ShownImages:
    steps = np.unique(np.linspace(0, figures.steps - 1, min(figures.steps, _SHEET_FRAMES)).round().astype(np.int64))
    try:
        sheet = sheet_of(source.frames(steps.tolist()), _SHEET_COLUMNS, most_bytes, gap=2)
        strip, number = None, None
        if shown and figures.episodes is not None:
            start, number = int(figures.episodes.table.start[shown[0].row]), shown[0].number
            count = min(shown[0].length, _STRIP_FRAMES)
            strip = sheet_of(source.frames(list(range(start, start + count))), count, most_bytes)
    except (CorruptDataError, FormatError, SchemaError, UsageError) as error:
        return ShownImages(name=source.name, note=f"{error}{f'; {error.hint}' if error.hint else ''}")
    return ShownImages(name=source.name, sheet=sheet, strip=strip, episode=number)


def _stated(reader: StepReader) -> Iterator[tuple[str, str]]:
    """Yield the entries of the source's own metadata about origin, licence and authors."""
    with contextlib.suppress(CorruptDataError):
        for name, data in sorted(reader.documents().items()):
            document: Any = None
            if name.endswith(".json"):
                with contextlib.suppress(FormatError, ValueError):
                    document = parse_json(data, name)
            for key in _STATED if isinstance(document, dict) else ():
                value = document.get(key)
                if value and isinstance(value, str | list):
                    yield key, ", ".join(map(str, value)) if isinstance(value, list) else value
