"""Reads Zarr stores of Diffusion Policy, UMI and DP3: rows in `data/NAME`, ends of episodes in `meta/episode_ends`.

The module `store` decodes chunks without the zarr library.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from ...core.encodings.video import VideoFile
from ...core.errors import CorruptDataError, FormatError, RbtoolError, UsageError, did_you_mean
from ...core.format.contracts import Array, SourceFacts
from ...core.format.converter import refuse_damaged
from ...core.format.documents import dump_json, json_file
from ...core.format.files import LEAVES_OUT, digest_file
from ...core.format.language import TASK
from ...core.format.manifest import Dropped
from ...core.format.videos import VIDEO_SUFFIX, VIDEOS_KEPT, index_name, reference_field, video_id, video_name
from ...core.progress import counted
from ...core.ted.schema import (
    ACTION,
    EPISODE,
    FLAGS,
    NEXT,
    REWARD,
    Field,
    Key,
    Role,
    Timing,
    is_real,
    key_name,
    role_of,
    safe_part,
)
from ..files.hdf5 import MARK
from ..files.images import require_images
from ..files.readers import ColumnEpisode, ColumnReader, EpisodeColumn, ReadRows, natural_order, why_no_key
from .store import DATA, ENDS, META, META_TYPES, OURS, StoreFiles, ZarrArray, arrays_of, is_store

_ROLES: tuple[Role, ...] = ("observation", "action", "info", "state")
_MOST_EPISODES = 1 << 26
_REWARDS = frozenset({"reward", "rewards"})
_STEPS = re.compile(r"timestamp|stage|robot\d+_demo_(start|end)_pose")
"""Names of arrays that become infos of a step, not observations."""
_POSES = re.compile(r"robot(\d+)_(eef_pos|eef_rot_axis_angle|gripper_width)")
_POSE_PARTS = ("eef_pos", "eef_rot_axis_angle", "gripper_width")
_TASKS = frozenset({"task", "instruction", "language", TASK})
"""Names of texts that hold the instruction of an episode."""
_TIME: Key = ("timestamp",)
_TAKEN = frozenset({NEXT, *EPISODE, *(flag[0] for flag in FLAGS)})
_NEXT_ROW = "next:"
_SHOWN = 8


@dataclass(frozen=True, slots=True)
class _Action:
    """An action joined from other arrays, of the same row or, with `is_next`, of the following row."""

    names: tuple[str, ...]
    is_next: bool


@dataclass(frozen=True, slots=True)
class _Take:
    """The video of one camera in one episode, and the frame that belongs to each row.

    A kept video also has its id, `number`, and the bytes of its frame index.
    """

    path: Path
    frames: Array
    shape: tuple[int, ...]
    number: int = 0
    index: bytes = b""


@dataclass(slots=True)
class _Takes:
    """All videos of a store.

    `cameras` maps camera and episode to a take, `damaged` an episode to the error of its videos. `held` counts the rows
    after the last frame of a video, which repeat that frame.
    """

    cameras: dict[str, dict[int, _Take]] = field(default_factory=dict)
    damaged: dict[int, RbtoolError] = field(default_factory=dict)
    held: int = 0


@dataclass(slots=True)
class _Found:
    """What opening a store found: columns, left-out and renamed arrays, notes, and the texts of episodes.

    `types` maps the arrays of `meta` that became texts to their element types.
    """

    columns: list[EpisodeColumn] = field(default_factory=list)
    dropped: list[Dropped] = field(default_factory=list)
    renamed: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    texts: list[dict[str, str]] = field(default_factory=list)
    types: dict[str, str] = field(default_factory=dict)


class ZarrReader(ColumnReader):
    """Reads a Zarr store of format 2 or 3, in a folder or a zip file, or the only store in a folder.

    Row t holds the observation before the action of row t. `data/action` is the action; `timestamp` keeps its name;
    `stage` and UMI's start and end poses are infos; any other array of numbers is `observation.NAME`. An array of
    strings that is constant within each episode becomes a text of the episodes. Episodes end truncated.

    Recordings of a real robot keep videos in a folder beside the store. They are read if `path` is the folder around
    both: each row refers to the first frame that is not before its `timestamp`.

    Options:
        images: `keep` the videos as files, `decode` them to pixels, or `skip` them.
        map: `action=NAME,…` joins arrays of the same row to an action. `action=next:NAME,…` joins them of the following
            row; the last row of an episode is then only the observation after its last step.
        id: the id of the published dataset that the store is a copy of.

    Raises:
        FormatError: `episode_ends` does not ascend, an array is shorter than the last end, or a codec is unknown.
        CorruptDataError: a chunk is damaged.
    """

    option_names = frozenset({"map", "images", "id"})

    @classmethod
    def recognises(cls, path: Path) -> bool:
        """Return whether `path` is a store with `meta/episode_ends`, or a folder with exactly one such store."""
        return _store_at(path) is not None

    def on_open(self) -> None:
        """Read the metadata, the ends of the episodes, and all texts."""
        store = _store_at(self.path)
        if store is None:
            raise FormatError(f"{self.path} is neither a Zarr store with {ENDS} nor a folder with exactly one")
        self._action = _asked_action(self.options.get("map"))
        self._images = require_images(self.options.get("images"), known=("keep", "decode", "skip"))
        self._takes: _Takes | None = None
        self._open: dict[str, VideoFile] = {}
        self._store = StoreFiles(store)
        try:
            self._look()
        except BaseException:
            self._store.close()
            raise

    def _look(self) -> None:
        found = arrays_of(self._store)
        if ENDS in found.problems:
            raise found.problems[ENDS]
        if ENDS not in found.arrays:
            raise FormatError(f"{self._store.path} has no array {ENDS}")
        ends = _ends_of(found.arrays[ENDS], self._store.path)
        self._starts = np.concatenate(([0], ends[:-1])) if len(ends) else ends
        self._found = _Found(texts=[{} for _ in ends])
        self._attributes = found.attributes
        for name, problem in found.problems.items():
            if name.startswith(DATA):
                raise problem
            self._found.dropped.append(Dropped(name, problem.message))
        arrays = dict(sorted(found.arrays.items()))
        self._take_data({name.removeprefix(DATA): one for name, one in arrays.items() if name.startswith(DATA)}, ends)
        for name, one in arrays.items():
            if name.startswith(META) and name != ENDS:
                self._take_meta(name, one, len(ends))
            elif not name.startswith((DATA, META)):
                self._found.dropped.append(Dropped(name, "it is neither in data nor in meta"))
        self.columns = self._found.columns
        lengths = np.diff(ends, prepend=0)
        after = self._action is not None and self._action.is_next
        if after and (short := int((lengths == 1).sum())):
            self._found.notes.append(f"{counted(short, 'episode')} of one row without a row after it: no step is left")
        lengths = np.maximum(lengths - 1, 0) if after else lengths
        self.episodes = [
            ColumnEpisode(length, truncated=True, observed=after, text=said)
            for length, said in zip(lengths.tolist(), self._found.texts, strict=True)
        ]

    def _take_data(self, arrays: Mapping[str, ZarrArray], ends: Array) -> None:
        rows = int(ends[-1]) if len(ends) else 0
        kept = {name: one for name, one in arrays.items() if not _why_not(one)}
        for name, one in arrays.items():
            if why := _why_not(one):
                self._found.dropped.append(Dropped(DATA + name, why))
        short = {name: one.rows for name, one in kept.items() if one.rows < rows}
        if short:
            name, count = next(iter(short.items()))
            more = f" ({len(short) - 1:,} more arrays are too short)" if len(short) > 1 else ""
            raise FormatError(
                f"{self._store.path}: {DATA}{name} has {count:,} rows, and the last of {ENDS} is {rows:,}{more}",
                hint="the recording was cut or copied in part: fetch the store again, or lower its ends",
            )
        if not kept:
            raise FormatError(f"{self._store.path} has no arrays of rows in data")
        self._note_rows(kept, rows)
        numbers = {}
        for name, one in kept.items():
            if one.form.kind == "text":
                self._take_text(name, one, ends)
            else:
                numbers[name] = one
        self._take_numbers(numbers)

    def _note_rows(self, kept: Mapping[str, ZarrArray], rows: int) -> None:
        """Note the rows after the last episode, and the chunks without a file."""
        behind: dict[int, list[str]] = {}
        for name, one in kept.items():
            behind.setdefault(one.rows - rows, []).append(name)
            if absent := one.absent(rows):
                self._store.require_names()
                self._found.notes.append(
                    f"{counted(absent, 'chunk')} of {name} without a file: their rows have its fill value"
                )
        for count, names in behind.items():
            if count:
                self._found.notes.append(
                    f"{counted(count, 'row')} of {_listed(names)} behind the last of {ENDS} belong to no episode"
                )

    def _take_numbers(self, arrays: Mapping[str, ZarrArray]) -> None:
        found, taken = self._found, []
        action = next((name for name in ("action", "actions") if name in arrays), None)
        if self._action is not None:
            if action is not None:
                raise UsageError(f"{self._store.path} has {DATA}{action}", hint="leave out --map")
            found.columns.append(_joined_action(self._action, arrays, self._rows_of))
            found.notes.append(f"action is made of {'the next ' * self._action.is_next}{', '.join(self._action.names)}")
            taken.append(ACTION)
        elif action is None:
            found.notes.append(_no_action(arrays))
        for name, one in arrays.items():
            key, timing = self._key_of(name, one, is_action=name == action)
            if why := why_no_key(key, taken, "array"):
                found.dropped.append(Dropped(DATA + name, why))
                continue
            taken.append(key)
            shape = () if key == REWARD else one.shape[1:]
            found.columns.append(
                EpisodeColumn(
                    Field(key, one.form.dtype.name, shape, _role(key, one)), timing, self._rows_of(one, shape)
                )
            )
            if key_name(key) != name:
                found.renamed[name] = key_name((NEXT, *key)) if timing == "result" else key_name(key)

    def _key_of(self, name: str, one: ZarrArray, *, is_action: bool) -> tuple[Key, Timing]:
        if (ours := _as_written(one)) is not None and (ours[0] != ACTION or is_action):
            return ours
        if is_action:
            return ACTION, "step"
        if name in _REWARDS and _is_reward(one):
            return REWARD, "result"
        if name == "timestamp":
            return _TIME, "step"
        parts = tuple(map(safe_part, name.split("/")))
        if _STEPS.fullmatch(name) or parts[0] in _TAKEN:
            return ("info", *parts), "step"
        return (parts, "state") if parts[0] == "observation" else (("observation", *parts), "state")

    def _rows_of(self, one: ZarrArray, shape: tuple[int, ...], ahead: int = 0) -> ReadRows:
        """Return a function that reads rows of an array by episode; `ahead` 1 reads the following rows instead."""

        def read(number: int, start: int, stop: int) -> Array:
            begin = int(self._starts[number]) + ahead
            return one.read(begin + start, begin + stop).reshape(stop - start, *shape)

        return read

    def _take_text(self, name: str, one: ZarrArray, ends: Array) -> None:
        """Take an array of strings as a text of each episode, if it is constant within every episode."""
        if one.shape[1:] not in ((), (1,)):
            self._found.dropped.append(Dropped(DATA + name, "it is text of several values a row"))
            return
        seen: list[str | None] = [None] * len(ends)
        for start in range(0, int(ends[-1]) if len(ends) else 0, one.chunk_rows):
            stop = min(start + one.chunk_rows, int(ends[-1]))
            owners = np.searchsorted(ends, np.arange(start, stop), side="right").tolist()
            for episode, text in zip(owners, one.texts(start, stop), strict=True):
                if seen[episode] not in (None, text):
                    self._found.dropped.append(Dropped(DATA + name, f"it is text that varies in episode {episode}"))
                    return
                seen[episode] = text
        for episode, found in enumerate(seen):
            if found is not None:
                self._found.texts[episode][_text_name(name)] = found

    def _take_meta(self, name: str, one: ZarrArray, episodes: int) -> None:
        """Take an array with one value per episode as a text of each episode."""
        if one.form.kind == "odd" or one.shape not in ((episodes,), (episodes, 1)):
            self._found.dropped.append(Dropped(name, one.form.why or "it is not one value an episode"))
            return
        self._found.types[name.removeprefix(META)] = "" if one.form.kind == "text" else one.form.dtype.str
        values = one.texts(0, episodes) if one.form.kind == "text" else [
            repr(value) if isinstance(value, float | complex) else dump_json(value)
            for value in one.whole().reshape(episodes).tolist()
        ]  # fmt: skip
        for texts, value in zip(self._found.texts, values, strict=True):
            texts.setdefault(_text_name(name.removeprefix(META)), str(value))

    def survey_state(self) -> _Takes | None:
        """Return what the survey of the videos found, for readers in other processes."""
        return self._takes

    def take_survey(self, state: _Takes) -> None:
        """Take over the survey of another process."""
        self._take_videos(state)

    def survey(self, progress: Callable[[int], None]) -> SourceFacts:
        """Find the frames of all rows in the videos, and return the facts of the store."""
        progress(len(self.episodes))
        if not any(one.length for one in self.episodes):
            raise FormatError(
                f"{self._store.path} has no episodes with steps: {ENDS} has {len(self.episodes):,} values"
            )
        self._take_videos(self._look_at_videos())
        found = self._found
        name = self._store.path.name.removesuffix(".zip").removesuffix(".zarr")
        notes = [*found.notes, "there are no flags: all episodes end truncated", *self._video_notes()]
        kept = {}
        if types := {name: one for name, one in found.types.items() if one}:
            kept[META_TYPES] = json_file(types)
        if attributes := dict(self._others()):
            kept["attributes.json"] = json_file(attributes)
        facts = self.facts_of(
            "zarr", self.id_or(name), notes, dropped=found.dropped, renamed=found.renamed, documents=kept
        )
        return replace(facts, keeps_last=all(column.field.key != REWARD for column in self.columns))

    def _others(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield the attributes of groups and arrays that rbtool has not written."""
        for node, stated in self._attributes.items():
            if found := {name: value for name, value in stated.items() if name not in (OURS, MARK)}:
                yield node, found

    @property
    def _folder_of_videos(self) -> Path:
        return self._store.path.parent / "videos"

    def _video_notes(self) -> Iterator[str]:
        takes, folder = self._takes, self._folder_of_videos
        if takes is not None and takes.cameras:
            if self._images == "keep":
                yield f"{VIDEOS_KEPT} ({', '.join(takes.cameras)})"
            if takes.held:
                yield f"{counted(takes.held, 'row')} at the end of videos have the last frame, less than a step before"
        elif folder.is_dir() and (count := sum(1 for _ in folder.glob(f"*/*{VIDEO_SUFFIX}"))):
            how = "--images skip" if self._images == "skip" else "rows have no timestamp"
            if self.path == self._store.path:
                how = f"rbtool convert {folder.parent} reads them, too"
            yield f"{counted(count, 'video')} in {folder} beside the store left out: {how}"

    def _look_at_videos(self) -> _Takes:
        """Find the frames of all rows in the videos beside the store, if `path` is the folder around both."""
        takes = _Takes()
        if self.path == self._store.path or self._images == "skip" or not self._folder_of_videos.is_dir():
            return takes
        stamps = next((one for one in self.columns if one.field.key == _TIME), None)
        numbers = [number for number, one in enumerate(self.episodes) if one.length]
        folders = {number: self._folder_of_videos / str(number) for number in numbers}
        found = {number: sorted(folder.glob(f"*{VIDEO_SUFFIX}")) for number, folder in folders.items()}
        names = sorted({file.stem for files in found.values() for file in files}, key=natural_order)
        if stamps is None or not names:
            return takes
        takes.cameras = {name: {} for name in names}
        for number in numbers:
            rows = self.episodes[number].length + self.episodes[number].observed
            times = stamps.read(number, 0, rows).reshape(rows).astype(np.float64)
            try:
                for name in names:
                    path = folders[number] / f"{name}{VIDEO_SUFFIX}"
                    take, held = _take_of(path, times - times[0], keep=self._images == "keep")
                    first = next(iter(takes.cameras[name].values()), take)
                    if take.shape != first.shape:
                        raise FormatError(f"{path} has frames {list(take.shape)}, and {first.path} {list(first.shape)}")
                    takes.cameras[name][number] = take
                    takes.held += held
            except RbtoolError as error:
                error.hint = error.hint or f"--images skip takes the steps without images{LEAVES_OUT}"
                takes.damaged[number] = error
        return takes

    def _take_videos(self, takes: _Takes) -> None:
        """Add the columns of the cameras."""
        self._takes = takes
        self.columns = list(self._found.columns)
        for name, known in takes.cameras.items():
            if not known:
                continue
            pixels = Field(
                ("observation", "image", safe_part(name)), "uint8", next(iter(known.values())).shape, "observation"
            )
            kept = reference_field(pixels) if self._images == "keep" else pixels
            self.columns.append(EpisodeColumn(kept, "state", self._frames_of(name, known)))

    def _frames_of(self, name: str, known: Mapping[int, _Take]) -> ReadRows:
        """Return a function that reads the frames of a camera: references to a kept video, or pixels."""

        def read(number: int, start: int, stop: int) -> Array:
            take = known[number]
            frames = take.frames[start:stop]
            if take.index:
                return np.stack((np.full(len(frames), take.number), frames), axis=1)
            video = self._open.get(name)
            if video is None or video.path != take.path:
                if video is not None:
                    video.close()
                video = self._open[name] = VideoFile(take.path)
            return video.read(frames)

        return read

    def require_sound(self, numbers: Sequence[int], *, everything: bool) -> None:
        """Raise the error of the first of these episodes whose videos are damaged."""
        refuse_damaged(numbers, {} if self._takes is None else self._takes.damaged)

    def videos_of(self, numbers: Sequence[int]) -> dict[str, Path | bytes]:
        """The kept videos of these episodes, and their frame indexes."""
        found: dict[str, Path | bytes] = {}
        chosen = set(numbers)
        for number, take in self._all_takes():
            if number in chosen and take.index:
                found[video_name(take.number)] = take.path
                found[index_name(take.number)] = take.index
        return found

    def _all_takes(self) -> Iterator[tuple[int, _Take]]:
        for known in {} if self._takes is None else self._takes.cameras.values():
            yield from known.items()

    def files(self) -> list[Path]:
        """All files of the store, and the videos that are read."""
        return [*self._store.files(), *sorted({take.path for _, take in self._all_takes()})]

    def on_close(self) -> None:
        """Close the zip file and the videos."""
        self._store.close()
        while self._open:
            self._open.popitem()[1].close()


_EARLY = 1e-4
"""Tolerance in seconds: a frame this much before the time of a row still counts, as both times are sums of floats."""


def _take_of(path: Path, times: Array, *, keep: bool) -> tuple[_Take, int]:
    """Find the frame of each row, given the times of the rows, and count the rows after the last frame.

    As in Diffusion Policy, the frame of a row is the first one that is not before it. A recording may end between the
    last frame and the last rows: these rows get the last frame if it is less than one step before them; otherwise
    FormatError.
    """
    if not path.is_file():
        raise CorruptDataError(f"{path} is missing: the other episodes have a video of that camera")
    if len(times) and not (np.diff(times) > 0).all():
        raise FormatError(f"the timestamp of an episode does not ascend: its frames in {path} cannot be found")
    with VideoFile(path) as video:
        index = video.index
        known = index.times
        frames = np.searchsorted(known, times - _EARLY)
        held = int((frames == len(known)).sum())
        step = float(np.diff(times).max(initial=0.0))
        if not len(known) or (held and times[-1] - known[-1] >= max(step, _EARLY)):
            last = f"the last of {len(known):,} frames is at {known[-1]:.3f} s" if len(known) else "it has no frames"
            raise FormatError(f"{path}: {last}, and the last row at {times[-1]:.3f} s")
        frames = np.minimum(frames, len(known) - 1).astype(np.int64)
        if not keep:
            return _Take(path, frames, video.shape), held
        return _Take(path, frames, video.shape, video_id(digest_file(path)), index.to_bytes()), held


def _store_at(path: Path) -> Path | None:
    """Return `path` if it is a store, or the only store in that folder; None for anything else."""
    if is_store(path):
        return path
    if not path.is_dir():
        return None
    names = (one for one in sorted(path.iterdir()) if one.name.endswith((".zarr", ".zarr.zip")))
    found = [one for one in names if is_store(one)]
    return found[0] if len(found) == 1 else None


def _ends_of(array: ZarrArray, path: Path) -> Array:
    """Return the exclusive end row of each episode, int64 `[episodes]`; FormatError for anything but ascending ends."""
    if len(array.shape) != 1 or array.form.dtype.kind not in "iu" or array.form.kind != "number":
        raise FormatError(f"{path}: {ENDS} is {array.form.dtype} {list(array.shape)}, expected integers [episodes]")
    if array.rows > _MOST_EPISODES:
        raise FormatError(f"{path}: {ENDS} has {array.rows:,} values, at most {_MOST_EPISODES:,} are read")
    if array.absent(array.rows):
        raise FormatError(f"{path}: chunks of {ENDS} are not there")
    stored = array.whole()
    ends: Array = stored.astype(np.int64)
    if stored.dtype == np.uint64 and (ends < 0).any():
        raise FormatError(f"{path}: {ENDS} has {int(stored.max()):,}, which is not a number of rows")
    down = np.flatnonzero(np.diff(ends, prepend=0) < 0)
    if len(down):
        at = int(down[0])
        before = int(ends[at - 1]) if at else 0
        raise FormatError(
            f"{path}: {ENDS} goes from {before:,} down to {int(ends[at]):,} at episode {at}, expected ascending end "
            "rows, one for each episode"
        )
    return ends


def _role(key: Key, one: ZarrArray) -> Role:
    """Return the role of a key: fixed for action and reward, else the stored one, else the usual one of its name."""
    usual: Role = "info" if key == _TIME else role_of(key)
    stated = one.attributes.get(OURS)
    if key in (ACTION, REWARD) or not isinstance(stated, dict):
        return usual
    return next((role for role in _ROLES if role == stated.get("role")), usual)


def _why_not(one: ZarrArray) -> str:
    """Return why the rows of an array cannot be kept, or an empty string."""
    if one.form.why or not one.shape:
        return one.form.why or "it is a single value, not one per row"
    return "its rows are empty" if 0 in one.shape[1:] else ""


def _is_reward(one: ZarrArray) -> bool:
    return one.shape[1:] in ((), (1,)) and is_real(one.form.dtype.name)


def _as_written(one: ZarrArray) -> tuple[Key, Timing] | None:
    """Return the key and the timing that rbtool wrote with an array; None if it wrote none or they are invalid."""
    stated = one.attributes.get(OURS)
    if not isinstance(stated, dict):
        return None
    parts = stated.get("key")
    if not isinstance(parts, list) or not parts or not all(isinstance(part, str) and part for part in parts):
        return None
    key, timing = tuple(map(safe_part, parts)), stated.get("timing")
    if key == REWARD and timing == "result":
        return (key, timing) if _is_reward(one) else None
    return (key, timing) if key != REWARD and key[0] not in _TAKEN and timing in ("state", "step", "result") else None


def _asked_action(stated: Any) -> _Action | None:
    """Parse the option `map`; UsageError for anything but a definition of the action."""
    if not stated:
        return None
    given = dict(stated) if isinstance(stated, Mapping) else {}
    if not given:
        for one in [stated] if isinstance(stated, str) else stated:
            key, _, value = str(one).partition("=")
            given[key] = value
    if set(given) != {"action"} or not given["action"]:
        raise UsageError(
            f"--map is {str(stated)[:80]!r}; for a Zarr store it names the arrays that make the action",
            hint="write --map action=next:robot0_eef_pos,robot0_eef_rot_axis_angle,robot0_gripper_width",
        )
    value = given["action"]
    text = value if isinstance(value, str) else ",".join(map(str, value))
    names = tuple(name.strip().removeprefix(DATA) for name in text.removeprefix(_NEXT_ROW).split(","))
    return _Action(names, text.startswith(_NEXT_ROW))


def _joined_action(
    asked: _Action, arrays: Mapping[str, ZarrArray], rows_of: Callable[[ZarrArray, tuple[int, ...], int], ReadRows]
) -> EpisodeColumn:
    """Return the column of an action whose vectors are the joined rows of several arrays."""
    parts, sizes = [], []
    for name in asked.names:
        if name not in arrays:
            raise UsageError(
                f"--map names {name!r}, which the store does not have{did_you_mean(name, arrays)}",
                hint=f"there are {', '.join(arrays)}",
            )
        one = arrays[name]
        size = int(np.prod(one.shape[1:], dtype=np.int64))
        sizes.append(size)
        parts.append(rows_of(one, (size,), int(asked.is_next)))
    common = np.result_type(*(arrays[name].form.dtype for name in asked.names))

    def read(number: int, start: int, stop: int) -> Array:
        return np.concatenate([part(number, start, stop) for part in parts], axis=1, dtype=common)

    return EpisodeColumn(Field(ACTION, common.name, (sum(sizes),), role_of(ACTION)), "step", read)


def _no_action(arrays: Mapping[str, ZarrArray]) -> str:
    """Return the note on a store without actions; for a store of UMI it shows how to make them of poses."""
    robots = sorted({int(found[1]) for name in arrays if (found := _POSES.fullmatch(name))})
    names = [f"robot{robot}_{part}" for robot in robots for part in _POSE_PARTS if f"robot{robot}_{part}" in arrays]
    how = f": --map action=next:{','.join(names)} makes one of the pose of the next row" if names else ""
    return f"there is no action{how}"


def _text_name(name: str) -> str:
    return TASK if name in _TASKS else name


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN:,} more" if len(names) > _SHOWN else "")
