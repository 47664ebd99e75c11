"""Reads CALVIN's folders: an npz file for each frame, and lists of the frames that belong together.

`ep_start_end_ids.npy` has the first and the last frame (inclusive) of each recording. Recordings are play data without
tasks, rewards and ends; frames outside of them are not used. `lang_annotations/auto_lang_ann.npy` has spans of frames
(inclusive) with a text each; spans overlap, and most frames are in none of them. It is a pickle, and so are
`scene_info.npy` and the embeddings.
"""

from __future__ import annotations

import io
import itertools
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ...core.errors import CorruptDataError, FormatError, RbtoolError, SchemaError, UsageError
from ...core.format.contracts import Array, Piece, SourceFacts
from ...core.format.converter import require_trust
from ...core.format.documents import dump_json
from ...core.format.files import no_match, read_regular
from ...core.format.language import TASK
from ...core.format.manifest import Dropped
from ...core.progress import counted
from ...core.ted.episodes import Final
from ...core.ted.schema import ACTION, Field, Key, Role, Timing, dtype_name, safe_part
from ..files.images import require_images
from ..files.numpy_files import MOST_BYTES, NpyFile, NpzFile, damaged
from ..files.pickles import PickledArray, PickledList, PickleReader, Value
from ..files.readers import OUTCOME_ROWS, FileReader

_RECORDINGS, _LENGTHS, _SCENES, _STATISTICS = "ep_start_end_ids.npy", "ep_lens.npy", "scene_info.npy", "statistics.yaml"
_SPLITS = ("training", "validation")
_ANNOTATIONS, _LANGUAGE = "auto_lang_ann.npy", "lang_annotations"
_BY = ("recording", "annotation")
_FRAME = re.compile(r"(.*?)(\d+)\.npz")
_PICKLED_FRAME = re.compile(r".*\d\.pkl")
_PICTURES = ("rgb_", "depth_")
_ACTIONS, _RELATIVE = "actions", "rel_actions"
_NUMBER: Key = ("info", "frame")
ANNOTATIONS = "annotations"
"""The name of the text that lists the annotated spans of a recording: first and last frame, text, and task."""
_MOST_NUMBERS = 64 << 20
_MOST_STATISTICS = 1 << 20
_MOST_FRAME = 1 << 30
_MOST_EPISODES = 1 << 24
_MOST_FRAMES = 1 << 61
_MOST_MISSING = 1000
"""The number of missing frames up to which they are counted: a damaged list may state any number of frames."""


@dataclass(frozen=True, slots=True)
class _Split:
    """A folder of frames in files `<prefix><number>.npz`, with `digits` digits; `name` is "" without splits."""

    name: str
    folder: Path
    prefix: str
    digits: int
    recordings: tuple[tuple[int, int], ...]

    def file(self, frame: int) -> Path:
        return self.folder / f"{self.prefix}{frame:0{self.digits}d}.npz"

    def recording_of(self, first: int, last: int) -> tuple[int, int] | None:
        """Return the recording that contains the frames from `first` to `last`, or None."""
        return next((one for one in self.recordings if one[0] <= first <= last <= one[1]), None)


@dataclass(frozen=True, slots=True)
class _Span:
    """An episode: the frames of a split from `first` to `last` (inclusive); `end` is the last of their recording."""

    split: _Split
    first: int
    last: int
    end: int
    text: Mapping[str, str]
    problem: str = ""

    def __len__(self) -> int:
        return self.last - self.first + 1

    @property
    def is_followed(self) -> bool:
        """Whether the recording has a frame after the last one, which holds the observation after the last action."""
        return self.last < self.end and self.split.file(self.last + 1).is_file()


@dataclass(frozen=True, slots=True)
class _Annotation:
    first: int
    last: int
    text: str
    task: str


class CalvinReader(FileReader):
    """Reads a folder of frames, or a folder with the splits `training` and `validation`.

    `actions` (absolute) become `action`, `rel_actions` keep their name, all other arrays become `observation.NAME`, and
    `info.frame` is the number of the frame. There are no rewards and no ends: all episodes are truncated.

    By default each recording is an episode. With `episodes_by="annotation"` each annotated span is an episode, with its
    text as `language_instruction`; the observation after its last action is the next frame of the recording.

    Options: `episodes_by` is `recording` or `annotation`. `trust_pickle` reads annotations and scenes, which are
    pickles. `filter_key` is the name of a split. `images="skip"` leaves out pictures and depth maps.

    Raises FormatError for files that contradict each other, CorruptDataError for frames that are missing or damaged.
    """

    option_names = frozenset({"episodes_by", "trust_pickle", "filter_key", "images"})

    @classmethod
    def recognises(cls, path: Path) -> bool:
        """Return whether a folder, or one of its splits, has a list of recordings."""
        try:
            return path.is_dir() and any((folder / _RECORDINGS).is_file() for _, folder in _folders(path))
        except (RbtoolError, OSError) as error:
            return no_match(error)

    def on_open(self) -> None:
        """Read the lists of recordings and annotations, and the first frame of each recording."""
        self._by = self.options.get("episodes_by") or _BY[0]
        if self._by not in _BY:
            raise UsageError(f"--episodes-by is {self._by!r}, expected {' or '.join(_BY)}")
        skips = require_images(self.options.get("images"), known=("decode", "skip")) == "skip"
        self._notes: list[str] = []
        self._dropped: dict[str, Dropped] = {}
        self._documents: dict[str, bytes] = {}
        self._lists: list[Path] = []
        self._kept: tuple[Path, dict[str, Array]] | None = None
        self._splits = list(self._find_splits())
        self._spans = [span for split in self._splits for span in self._spans_of(split)]
        if not self._spans:
            none = "recordings" if self._by == _BY[0] else f"annotations in {_LANGUAGE}/{_ANNOTATIONS}"
            raise FormatError(f"{self.path} has no {none}")
        self._columns = self._lay_out(skips)

    # The lists -----------------------------------------------------------------------------------

    def _find_splits(self) -> Iterator[_Split]:
        found = [(name, folder) for name, folder in _folders(self.path) if (folder / _RECORDINGS).is_file()]
        if not found:
            raise FormatError(f"{self.path} has no {_RECORDINGS}, which lists the recordings in CALVIN's folders")
        wanted = self.options.get("filter_key")
        if wanted is not None and wanted not in {name for name, _ in found}:
            there = ", ".join(name for name, _ in found if name) or "none: it is one split"
            raise UsageError(f"{self.path} has no split {wanted!r}", hint=f"its splits are {there}")
        for name, folder in found:
            if wanted in (None, name):
                yield self._split(name, folder)

    def _split(self, name: str, folder: Path) -> _Split:
        path = folder / _RECORDINGS
        edges = self._numbers(path)
        if edges.ndim != 2 or edges.shape[1] != 2 or len(edges) > _MOST_EPISODES:
            raise FormatError(
                f"{path} has shape {list(edges.shape)}, expected the first and the last frame of each recording"
            )
        recordings = tuple((int(first), int(last)) for first, last in edges)
        for first, last in recordings:
            if not 0 <= first <= last < _MOST_FRAMES:
                raise FormatError(f"{path} has a recording from frame {first} to {last}")
        in_order = sorted(recordings)
        if shared := sum(first <= last for (_, last), (first, _) in itertools.pairwise(in_order)):
            self._notes.append(
                f"recordings overlap: frames of {counted(shared, 'recording')} are in the recording before as well"
            )
        if (folder / _LENGTHS).is_file():
            lengths = self._numbers(folder / _LENGTHS).reshape(-1)
            if lengths.tolist() != (edges[:, 1] - edges[:, 0] + 1).tolist():
                self._notes.append(f"the lengths in {_LENGTHS} differ from those in {_RECORDINGS}, which are used")
        prefix, digits = _name_of_frames(folder, recordings)
        statistics = folder / _STATISTICS
        if statistics.is_file() and statistics.stat().st_size <= _MOST_STATISTICS:
            self._documents[f"{name}_{_STATISTICS}" if name else _STATISTICS] = read_regular(statistics)
        return _Split(name, folder, prefix, digits, recordings)

    def _numbers(self, path: Path) -> Array:
        """Read a small file of whole numbers."""
        self._lists.append(path)
        file = NpyFile(path)
        try:
            if file.is_pickled or file.header.dtype.kind not in "iu":
                raise FormatError(f"{path} has elements of type {file.header.dtype}, expected whole numbers")
            return file.whole(_MOST_NUMBERS)
        finally:
            file.close()

    def _spans_of(self, split: _Split) -> Iterator[_Span]:
        """Yield the episodes of a split, which are its recordings or its annotated spans."""
        annotations, scenes = self._annotations(split), self._scenes(split)

        def text_of(first: int, last: int, **more: str) -> dict[str, str]:
            scene = next((name for name, (low, high) in scenes.items() if low <= first and last <= high), "")
            found = {"split": split.name, "scene": scene, **more}
            return {name: text for name, text in found.items() if text}

        if self._by == _BY[0]:
            yield from self._recordings(split, annotations, text_of)
            return
        for one in annotations:
            within = split.recording_of(one.first, one.last)
            problem = "" if within else f"no recording contains all its frames {one.first} to {one.last}"
            text = text_of(one.first, one.last, task=one.task) | {TASK: one.text}
            last = max(one.first, one.last)
            yield _Span(split, one.first, last, within[1] if within else last, text, problem)

    def _recordings(
        self, split: _Split, annotations: Sequence[_Annotation], text_of: Callable[..., dict[str, str]]
    ) -> Iterator[_Span]:
        inside: dict[tuple[int, int], list[dict[str, Any]]] = {}
        for one in annotations:
            within = split.recording_of(one.first, one.last)
            if within is not None:
                said = {"first": one.first, "last": one.last, "text": one.text, "task": one.task}
                inside.setdefault(within, []).append(said)
        if outside := len(annotations) - sum(map(len, inside.values())):
            self._notes.append(f"{counted(outside, 'annotation')} left out: no recording contains all their frames")
        for first, last in split.recordings:
            spans = inside.get((first, last), [])
            text = text_of(first, last, **({ANNOTATIONS: dump_json(spans)} if spans else {}))
            yield _Span(split, first, last, last, text)

    # Pickles -------------------------------------------------------------------------------------

    def _annotations(self, split: _Split) -> list[_Annotation]:
        wanted = self._by == _BY[1]
        folders = [folder for folder in sorted(split.folder.glob("lang_*")) if (folder / _ANNOTATIONS).is_file()]
        folders.sort(key=lambda folder: folder.name != _LANGUAGE)
        if not folders:
            if wanted:
                self._notes.append(f"{split.folder.name} has no annotations: {_LANGUAGE}/{_ANNOTATIONS} is missing")
            return []
        path = folders[0] / _ANNOTATIONS
        shown = path.relative_to(self.path).as_posix()
        if wanted:
            require_trust(path, self.options.get("trust_pickle"))
        elif not self.options.get("trust_pickle"):
            self._notes.append(f"annotations are not read: {shown} is a pickle, which --trust-pickle reads")
            return []
        others = [folder.name for folder in folders[1:]]
        if others:
            self._notes.append(f"annotations come from {shown}; not read: {', '.join(others)}")
        self._drop(f"{shown}: language.emb", "embeddings depend on a model, and can be computed from the texts")
        self._lists.append(path)
        with PickleReader(str(path), path.stat().st_size) as reader:
            return _annotations_in(reader, _unpickled(reader, path), path)

    def _scenes(self, split: _Split) -> dict[str, tuple[int, int]]:
        """Return the first and the last frame of each scene; {} if the pickle must not be read."""
        path = split.folder / _SCENES
        if not path.is_file() or not self.options.get("trust_pickle"):
            return {}
        self._lists.append(path)
        with PickleReader(str(path), path.stat().st_size) as reader:
            found = _unpickled(reader, path)
            if not isinstance(found, dict):
                raise FormatError(f"{path} is not a dictionary of scenes")
            return {name: _pairs(reader, [value], path)[0] for name, value in found.items()}

    def _drop(self, name: str, why: str) -> None:
        self._dropped.setdefault(name, Dropped(name, why))

    # The frames ----------------------------------------------------------------------------------

    def _lay_out(self, skips: bool) -> dict[str, tuple[Field, Timing]]:
        """Return the fields for the arrays that the first frames of all recordings have in common."""
        forms: list[dict[str, tuple[np.dtype[Any], tuple[int, ...]]]] = []
        damage: FormatError | None = None
        for split in self._splits:
            for first, _ in split.recordings:
                try:
                    with _opened(split.file(first)) as file, file.damage_first():
                        forms.append({name: file.form(name) for name in file.names})
                except FormatError as error:  # raised when its episode is read
                    damage = damage or error
        if not forms:
            raise damage or CorruptDataError(f"{self.path} has no frames")
        found: dict[str, tuple[Field, Timing]] = {}
        self._passed_over: set[str] = set()
        for name in dict.fromkeys(name for one in forms for name in one):
            why = self._why_not(name, [one.get(name) for one in forms])
            if skips and name.startswith(_PICTURES):
                why = "it is left out (--images skip)"
            if why:
                self._drop(name, why)
                self._passed_over.add(name)
                continue
            dtype, shape = next(one[name] for one in forms if name in one)
            key, role, timing = _place(name)
            found[name] = (Field(key, dtype_name(dtype), shape, role), timing)
        if _ACTIONS not in found and _RELATIVE in found:
            field, timing = found[_RELATIVE]
            found[_RELATIVE] = (Field(ACTION, field.dtype, field.shape, "action"), timing)
            self._notes.append(f"there are no {_ACTIONS}: action has the {_RELATIVE}")
        keys = [field.key for field, _ in found.values()]
        if ACTION not in keys or not any(timing == "state" for _, timing in found.values()):
            there = ", ".join(sorted({name for one in forms for name in one})[:12]) or "no arrays"
            raise FormatError(f"{self.path}: its frames have {there}, expected {_ACTIONS} and observations")
        return found

    def _why_not(self, name: str, forms: Sequence[tuple[np.dtype[Any], tuple[int, ...]] | None]) -> str:
        there = [form for form in forms if form is not None]
        if len(there) < len(forms):
            return f"{len(forms) - len(there):,} of {len(forms):,} recordings do not have it"
        if len(set(there)) > 1:
            shown = " and ".join(sorted(f"{dtype} {list(shape)}" for dtype, shape in set(there))[:3])
            if name in (_ACTIONS, _RELATIVE):
                raise FormatError(f"{self.path}: {name} are {shown} in different recordings")
            return f"it is {shown} in different recordings"
        try:
            dtype_name(there[0][0])
        except (SchemaError, TypeError) as error:
            return str(error)
        return ""

    def _frame(self, split: _Split, frame: int) -> dict[str, Array]:
        """Read a frame; the latest one is cached, because two consecutive pieces share a frame."""
        path = split.file(frame)
        if self._kept is not None and self._kept[0] == path:
            return self._kept[1]
        with _opened(path) as file, file.damage_first():
            for name in file.names:
                if name not in self._columns and name not in self._passed_over:
                    raise FormatError(f"{path} has an array {name!r}, which the first frames do not have")
            found = {}
            for name, (field, _) in self._columns.items():
                if name not in file.names:
                    raise FormatError(f"{path} has no {name!r}, which the first frames have")
                dtype, shape = file.form(name)
                if dtype != field.numpy or shape != field.shape:
                    raise FormatError(
                        f"{path}: {name} is {dtype} {list(shape)}, before {field.dtype} {list(field.shape)}"
                    )
                found[name] = file.whole(name, _MOST_FRAME)
        self._kept = path, found
        return found

    # The contract --------------------------------------------------------------------------------

    @property
    def _fields(self) -> tuple[tuple[Field, Timing], ...]:
        return (*self._columns.values(), (Field(_NUMBER, "int64", (), "info"), "step"))

    def survey(self, progress: Callable[[int], None]) -> SourceFacts:
        """Return the facts; the lists were read when the folder was opened."""
        progress(len(self._spans))
        by = (
            "each recording is an episode: play, without tasks (--episodes-by annotation takes annotated spans)"
            if self._by == _BY[0]
            else "each annotated span is an episode; a frame that is in several spans is stored several times"
        )
        return SourceFacts(
            source="calvin", id=self.path.name, fields=self._fields, episode_numbers=range(len(self._spans)),
            steps=sum(map(len, self._spans)), lengths=[len(span) for span in self._spans],
            renamed_keys={name: field.name for name, (field, _) in self._columns.items() if (name,) != field.key},
            dropped_keys=tuple(sorted(self._dropped.values(), key=lambda one: one.key)), notes=(by, *self._notes),
            documents=self._documents, final_missing=True, keeps_last=True,
        )  # fmt: skip

    def require_sound(self, numbers: Sequence[int], *, everything: bool) -> None:
        """Raise the error of the first of these episodes that cannot be read, such as a missing frame."""
        for number in numbers:
            span = self._spans[number]
            if span.problem:
                raise FormatError(f"{self.path}: annotation {number}: {span.problem}")
            frames = range(span.first, span.last + 1)
            absent = (frame for frame in frames if not span.split.file(frame).is_file())
            missing = list(itertools.islice(absent, _MOST_MISSING))
            if missing:
                least = "at least " if len(missing) == _MOST_MISSING else ""
                more = f", and {least}{len(missing) - 1:,} more of its frames" if len(missing) > 1 else ""
                where = f"{self._by} {number} ({span.first} to {span.last})"
                raise CorruptDataError(
                    f"{self.path}: {span.split.file(missing[0]).name} of {where} is missing{more}",
                    hint="fetch the folder again",
                )

    def read_episode(self, number: int) -> Iterator[Piece]:
        """Yield the steps of one episode, about `piece_bytes` at a time."""
        span, rows = self._spans[number], self.piece_rows(self._fields)
        for start in range(0, len(span), rows):
            stop = min(start + rows, len(span))
            last = stop == len(span)
            more = not last or span.is_followed
            columns: dict[Key, Array] = {
                field.key: np.empty((stop - start + (more and timing == "state"), *field.shape), field.numpy)
                for field, timing in self._columns.values()
            }
            for row in range(stop - start + more):
                frame = self._frame(span.split, span.first + start + row)
                for name, (field, _) in self._columns.items():
                    if row < len(columns[field.key]):
                        columns[field.key][row] = frame[name]
            columns[_NUMBER] = np.arange(span.first + start, span.first + stop)
            yield self._piece(number, start, stop, columns)

    def read_outcomes(self, number: int) -> Iterator[Piece]:
        """Yield the flags of one episode; CALVIN has no rewards."""
        for start in range(0, len(self._spans[number]), OUTCOME_ROWS):
            yield self._piece(number, start, min(start + OUTCOME_ROWS, len(self._spans[number])), {})

    def _piece(self, number: int, start: int, stop: int, columns: Mapping[Key, Array]) -> Piece:
        span = self._spans[number]
        last = stop == len(span)
        truncated = np.zeros(stop - start, bool)
        truncated[-1] = last
        final = Final.MISSING if last and not span.is_followed else Final.OBSERVED
        none = np.zeros(stop - start, bool)
        return Piece(
            number, columns, none, truncated, first=not start, last=last, text={} if start else span.text, final=final
        )

    def files(self) -> Iterator[Path]:
        """Yield the lists that were read, and the existing frames of all episodes."""
        yield from self._lists
        for split in self._splits:
            frames = {
                frame for span in self._spans if span.split is split and not span.problem
                for frame in _frames_there(span)
            }  # fmt: skip
            yield from (split.file(frame) for frame in sorted(frames))


def _frames_there(span: _Span) -> Iterator[int]:
    """Yield the existing frames of a span, until too many are missing."""
    missing = 0
    for frame in range(span.first, span.last + 1 + span.is_followed):
        if span.split.file(frame).is_file():
            yield frame
        elif (missing := missing + 1) == _MOST_MISSING:
            return


def _folders(path: Path) -> list[tuple[str, Path]]:
    if (path / _RECORDINGS).is_file():
        return [("", path)]
    return [(name, path / name) for name in _SPLITS]


def _name_of_frames(folder: Path, recordings: Sequence[tuple[int, int]]) -> tuple[str, int]:
    """Return the prefix of the names of frames and the digits of their numbers, from the first file that is found.

    The usual name is tried first, because listing a folder of a million files takes minutes.
    """
    if recordings and (folder / f"episode_{recordings[0][0]:07d}.npz").is_file():
        return "episode_", 7
    pickled = False
    with os.scandir(folder) as entries:
        for entry in entries:
            if found := _FRAME.fullmatch(entry.name):
                return found[1], len(found[2])
            pickled = pickled or _PICKLED_FRAME.fullmatch(entry.name) is not None
    if pickled:
        raise FormatError(
            f"{folder} has frames as pickles (save_format: pkl), which are not read", hint="save them as npz"
        )
    raise CorruptDataError(f"{folder} has no frames: there are no files such as episode_0000000.npz")


def _opened(path: Path) -> NpzFile:
    try:
        return NpzFile(path)
    except FileNotFoundError:
        raise CorruptDataError(f"{path} is missing", hint="fetch the folder again") from None


def _place(name: str) -> tuple[Key, Role, Timing]:
    if name == _ACTIONS:
        return ACTION, "action", "step"
    if name == _RELATIVE:
        return (_RELATIVE,), "action", "step"
    return ("observation", safe_part(name)), "observation", "state"


def _unpickled(reader: PickleReader, path: Path) -> Value:
    """Unpickle the single object in an npy file."""
    file = NpyFile(path)
    try:
        if not file.is_pickled or file.header.shape:
            raise FormatError(f"{path} has {file.header.dtype} {list(file.header.shape)}, expected one pickled object")
        data = file.raw(MOST_BYTES)
    finally:
        file.close()
    found = reader.load(io.BytesIO(data), len(data), pack=True)
    if not isinstance(found, PickledList) or len(found) != 1:
        raise damaged(str(path), "its pickle is not the array that its header states")
    return reader.items(found)[0]


def _annotations_in(reader: PickleReader, found: Value, path: Path) -> list[_Annotation]:
    language = found.get("language") if isinstance(found, dict) else None
    info = found.get("info") if isinstance(found, dict) else None
    if not isinstance(language, dict) or not isinstance(info, dict) or "ann" not in language or "indx" not in info:
        raise FormatError(
            f"{path} has no texts at language/ann or no spans at info/indx, which CALVIN's annotations have"
        )
    texts = _texts(reader, language["ann"], path, "language/ann")
    tasks = _texts(reader, language["task"], path, "language/task") if "task" in language else [""] * len(texts)
    spans = _pairs(reader, info["indx"], path)
    if not len(texts) == len(tasks) == len(spans):
        raise FormatError(f"{path} has {len(texts):,} texts, {len(tasks):,} tasks and {len(spans):,} spans")
    return [_Annotation(*span, text, task) for span, text, task in zip(spans, texts, tasks, strict=True)]


def _texts(reader: PickleReader, found: Value, path: Path, what: str) -> list[str]:
    if isinstance(found, PickledArray):
        values: list[Any] = reader.rows(found).reshape(-1).tolist()
    else:
        values = reader.items(found) if isinstance(found, PickledList) else []
    if not all(isinstance(value, str) for value in values):
        raise FormatError(f"{path}: {what} has values that are not text")
    return values


def _pairs(reader: PickleReader, found: Value | list[Value], path: Path) -> list[tuple[int, int]]:
    """Return pairs of frame numbers, stored as an array, or as a list of pairs in any form."""
    if isinstance(found, PickledArray):
        rows = reader.rows(found)
    elif isinstance(found, PickledList | list):
        parts = reader.items(found) if isinstance(found, PickledList) else found
        rows = np.array([_pair(reader, part, path) for part in parts]).reshape(-1, 2)
    else:
        rows = np.zeros(0)
    if rows.ndim != 2 or rows.shape[1] != 2 or (rows.dtype.kind not in "iu" and rows.size):
        raise FormatError(f"{path} has spans that are not a first and a last frame")
    return [(int(first), int(last)) for first, last in rows]


def _pair(reader: PickleReader, part: Value, path: Path) -> Array:
    found = reader.rows(part) if isinstance(part, PickledArray) else np.zeros(0)
    if isinstance(part, PickledList) and len(part) == 2:
        inner = [reader.rows(one) if isinstance(one, PickledArray) else one for one in reader.items(part)]
        if all(isinstance(one, int) or (isinstance(one, np.ndarray) and not one.ndim) for one in inner):
            found = np.array(inner)
    if found.shape != (2,) or found.dtype.kind not in "iu":
        raise FormatError(f"{path} has spans that are not a first and a last frame")
    return found
