"""Reads HDF5 files of ALOHA and ACT, RoboTwin and RoboMIND: one file for each episode, pictures as arrays or JPEG.

It imports h5py, but neither torch nor OpenCV.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from ...core.errors import FormatError, RbtoolError, UsageError
from ...core.format.contracts import Array, SourceFacts
from ...core.format.documents import dump_json, parse_json
from ...core.format.files import read_regular
from ...core.format.language import TASK
from ...core.format.manifest import Dropped
from ...core.progress import counted
from ...core.ted.schema import ACTION, Key, Role, Timing, key_name, safe_part
from ..files.episode_groups import (
    GroupColumn,
    GroupEpisode,
    GroupFiles,
    GroupReader,
    GroupRows,
    GroupSurvey,
    MappedColumns,
    Paths,
    Places,
    SurveyedColumns,
    places_of,
)
from ..files.hdf5 import (
    MARK,
    SINGLE,
    GroupFile,
    StoredGroup,
    h5_files_in,
    names_in,
    plain_value,
    require_whole_h5,
)
from ..files.images import ImageForm, decode_image, image_form, is_image, require_images
from ..files.readers import (
    ColumnForm,
    ColumnPath,
    StoredColumn,
    column_name,
    natural_order,
    notes_on_identical,
    reading,
    why_no_key,
)

_ACTION: ColumnPath = ("action",)
_BASE_ACTION: ColumnPath = ("base_action",)
_LENGTHS: ColumnPath = ("compress_len",)
_VECTOR: ColumnPath = ("joint_action", "vector")
_JOINTS: tuple[ColumnPath, ...] = tuple(
    ("joint_action", name) for name in ("left_arm", "left_gripper", "right_arm", "right_gripper")
)
_JOINT_STATES: tuple[ColumnPath, ...] = (("qpos",), ("qvel",), ("effort",))
_NUMBER = re.compile(r"(\d{1,18})$")
_SHOWN = _LOOKED_AT = 8
_DEPTH = "depth"


@dataclass(frozen=True, slots=True)
class _Layout:
    """The layout of a family of files.

    `action` lists the columns that are joined to the action. If `is_next` is true, the action is taken from the next
    row, so a file has one row more than steps.
    """

    name: str
    action: tuple[ColumnPath, ...]
    is_next: bool = False


_ACT = _Layout("ALOHA", (_ACTION,))
_ROBOTWIN = _Layout("RoboTwin", (_VECTOR,), is_next=True)
_ROBOTWIN_JOINTS = _Layout("RoboTwin", _JOINTS, is_next=True)
_ALIGNED = _Layout("RoboTwin v1.0", ())
_ROBOMIND = _Layout("RoboMIND", ())


def _layout_of(file: Path) -> _Layout | None:
    """Return the layout of a file by the names of its groups; None for other files, and for damaged ones."""
    names = set(names_in(file))
    if {"joint_action", "observation"} <= names:
        joints = set(names_in(file, "joint_action"))
        return _ROBOTWIN if "vector" in joints else _ROBOTWIN_JOINTS if "left_arm" in joints else None
    if {"state", "action", "vision"} <= names:
        return _ALIGNED
    if "observations" not in names:
        return None
    inside = set(names_in(file, "observations"))
    if "action" in names and "qpos" in inside:
        return _ACT
    return _ROBOMIND if "puppet" in names and inside & {"rgb_images", "depth_images"} else None


class AlohaReader(GroupReader):
    """Reads a file of ALOHA, ACT, RoboTwin or RoboMIND, a folder of such files, or a folder with them in `data`.

    The number of an episode is the one at the end of its file's name. `observations/qpos` becomes `observation.qpos`,
    `observations/images/top` becomes `observation.image.top`, and `action` is the action; RoboTwin's action is the
    joint vector of the next row. JPEG and PNG pictures are decoded. Episodes end truncated.

    Options: `images` may be `skip`; `jpeg` may be `opencv`, which swaps red and blue; `id` is the id of the published
    dataset.

    Raises FormatError for files of another layout, CorruptDataError for damaged ones. An episode that does not fit the
    others raises an error when it is read.
    """

    option_names = frozenset({"images", "jpeg", "id"})

    @classmethod
    def recognises(cls, path: Path) -> bool:
        """Return whether the file, or one of the first files in the folder, has one of the layouts."""
        return any(_layout_of(file) is not None for file in _files_at(path)[:_LOOKED_AT])

    def on_open(self) -> None:
        """Find the files; the first one that can be read decides about the layout of all."""
        files = _files_at(self.path)
        if not files:
            raise FormatError(f"{self.path} is neither an HDF5 file nor a folder with one")
        self._images = require_images(self.options.get("images"), known=("decode", "skip")) == "decode"
        self._swaps = _asked_swap(self.options.get("jpeg"))
        layout = next(filter(None, map(_layout_of, files)), None)
        if layout is None:
            require_whole_h5(files[0])
            raise FormatError(f"{files[0]} does not have the groups of ALOHA, RoboTwin or RoboMIND")
        self._layout = layout
        self.opened = GroupFiles(files)

    def survey(self, progress: Callable[[int], None]) -> SourceFacts:
        """Examine the structure of every file, and the first picture of each camera."""
        found = _Files(self._layout, self._texts(), images=self._images)
        for index, path in enumerate(self.opened.paths):
            found.examine(index, path, self.opened)
            progress(1)
        columns = found.survey.finish()
        mapped = _keys_of(columns, self._layout, found.packed, swapped=self._swaps)
        self.columns = mapped.columns
        self.episodes = found.episodes(_numbers_of(self.opened.paths))
        if not self.episodes:
            raise FormatError(f"{self.path} has no episodes with steps")
        kept = list(self.episodes.values())
        return SourceFacts(
            source="aloha",
            id=self.id_or(self.path.absolute().name if self.path.is_dir() else self.path.stem),
            fields=self.fields,
            episode_numbers=list(self.episodes),
            steps=sum(episode.steps for episode in kept),
            renamed_keys=mapped.renamed,
            dropped_keys=tuple(sorted((*columns.dropped, *mapped.dropped, *found.dropped()), key=lambda one: one.key)),
            notes=(
                *found.notes(),
                *mapped.notes,
                *self._picture_notes(found),
                "the files have no flags: all episodes end truncated",
                *notes_on_identical(self.opened.paths),
            ),
            lengths=[episode.steps for episode in kept],
            final_missing=self.lacks_final,
            last_terminated=[False] * len(kept) if self.lacks_final else None,
            keeps_last=True,
        )

    def _picture_notes(self, found: _Files) -> Iterator[str]:
        names = ", ".join(
            sorted({path[-1] if path[-1] not in ("rgb", "colors") else path[-2] for path in found.packed})
        )
        if names and self._swaps:
            yield f"red and blue of the encoded pictures ({names}) are swapped, as OpenCV decodes them (--jpeg opencv)"
        elif names:
            yield (
                f"encoded pictures ({names}) are decoded as their standard says; recorders that passed RGB arrays to "
                "OpenCV swapped red and blue, which the files do not state: --jpeg opencv swaps them back"
            )

    def _texts(self) -> dict[str, Path]:
        """Return the files with RoboTwin's instructions, by the stem of the episode's file name."""
        beside = self.opened.paths[0].parent
        folder = (beside.parent if beside.name == "data" else beside) / "instructions"
        return {file.stem: file for file in sorted(folder.glob("*.json")) if file.is_file()}

    def files(self) -> list[Path]:
        """Return the files of episodes, and the files of their instructions."""
        stems = {path.stem for path in self.opened.paths}
        return [*self.opened.paths, *(file for stem, file in self._texts().items() if stem in stems)]


@dataclass(frozen=True, slots=True)
class ImageColumn(GroupColumn):
    """Pictures of a camera, stored as arrays or encoded (and then perhaps padded); `swaps` exchanges red and blue."""

    swaps: bool = False

    def read(self, group: GroupRows, start: int, stop: int, steps: int) -> tuple[Array, Array | None]:
        """Decode the pictures of steps; and the picture after each step, if the file has one after the last step."""
        if self.longer:
            rows = self._decoded(group, start, stop + 1)
            return rows[:-1], rows[1:]
        return self._decoded(group, start, min(stop + 1, steps)), None

    def _decoded(self, group: GroupRows, start: int, stop: int) -> Array:
        stored = group.stored.form(self.path)
        if stored == self.form:
            return group.array(self.path, start, stop, self.form)
        height, width, channels = (*self.form.shape, 1)[:3]
        form = ImageForm(self.form.dtype, (height, width, channels))
        found = np.empty((stop - start, height, width, channels), self.form.dtype)
        for row, data in enumerate(group.stored.encoded(self.path, start, stop)):
            found[row] = _picture(data, form, f"{column_name(self.path)!r} of {group.name}, row {start + row:,}")
        if self.swaps and channels >= 3:
            found[..., [0, 2]] = found[..., [2, 0]]
        return found.reshape(stop - start, *self.form.shape)


def _picture(data: bytes, form: ImageForm, what: str) -> Array:
    """Decode a picture; some frames of RoboMIND are raw pixels among encoded ones."""
    height, width, channels = form.shape
    if not is_image(data) and len(data) == height * width * channels * np.dtype(form.dtype).itemsize:
        return np.frombuffer(data, form.dtype).reshape(form.shape)
    return decode_image(data, form, what)


@dataclass(frozen=True, slots=True)
class NextRows(GroupColumn):
    """An action that joins columns of the next row to a vector."""

    parts: tuple[tuple[ColumnPath, ColumnForm], ...] = ()

    def read(self, group: GroupRows, start: int, stop: int, steps: int) -> tuple[Array, Array | None]:
        """Read the rows after steps `[start, stop)`."""
        rows = [group.array(path, start + 1, stop + 1, form).reshape(stop - start, -1) for path, form in self.parts]
        return np.concatenate(rows, axis=1, dtype=self.form.dtype), None


@dataclass(slots=True)
class _Episode:
    """The findings about one file, which holds an episode."""

    index: int
    steps: int = 0
    text: dict[str, str] = field(default_factory=dict)
    places: Places = ((), array("q"))
    problem: RbtoolError | None = None


class _Files:
    """Examines one file after the other; `packed` collects the columns with encoded pictures."""

    def __init__(self, layout: _Layout, texts: Mapping[str, Path], *, images: bool) -> None:
        self._layout, self._texts, self._images = layout, texts, images
        self.survey = GroupSurvey(
            lambda path: _is_required(path, layout), (_ACTION,) if layout is _ACT else (),
            lambda path: 1 if _is_state(path, layout) else None,
        )  # fmt: skip
        self.packed: set[ColumnPath] = set()
        self._found: list[_Episode] = []
        self._names: list[str] = []
        self._empty: list[str] = []
        self._cut: dict[str, int] = {}
        self._dropped: dict[ColumnPath, str] = {}
        self._paths: dict[Paths, Paths] = {}
        self._real = 0

    def examine(self, index: int, path: Path, files: GroupFiles) -> None:
        """Record the structure of a file, or what is wrong with it."""
        one = _Episode(index)
        self._found.append(one)
        self._names.append(path.name)
        try:
            require_whole_h5(path)
            file = files.open(index)
            if _layout_of(path) != self._layout:
                raise FormatError(f"{path.name} has other groups than the files of {self._layout.name} beside it")
            self._look_at(one, path, file)
        except RbtoolError as error:
            one.problem = error

    def _look_at(self, one: _Episode, path: Path, file: GroupFile) -> None:
        group = file.group(b"/", path.name)
        stored = group.columns()
        one.text = {**self._values(file, stored, path), **self._attributes(group), **self._instructions(path)}
        if TASK not in one.text and (task := _first_instruction(one.text.get("instructions"))):
            one.text[TASK] = task
        one.places = places_of(stored, self._paths)
        columns = self._columns(group, stored, path)
        one.steps = self._steps(path.name, columns)
        if one.steps <= 0:
            self._empty.append(path.name)
            self._found.pop()
            return
        self.survey.add(path.name, self._even(path.name, columns, one.steps), one.steps)

    def _columns(
        self, group: StoredGroup, stored: Mapping[ColumnPath, StoredColumn], path: Path
    ) -> dict[ColumnPath, StoredColumn]:
        """Return the columns that have data; those with encoded pictures get the form of the decoded ones."""
        found = {}
        for name, column in stored.items():
            if name == _LENGTHS:
                self._dropped[name] = "encoded pictures state where they end"
                continue
            if column.form == SINGLE:
                continue
            if column.form.kind == "array" and (not column.rows or 0 in column.form.shape):
                self._dropped.setdefault(name, f"it is empty in {path.name}")
                continue
            if _is_of_camera(name, self._layout):
                if not self._images:
                    self._dropped[name] = "images are left out (--images skip)"
                    continue
                if _is_picture(column):
                    column = self._decoded(group, name, column, path)
            found[name] = column
        return self._of_steps(found, path)

    def _of_steps(self, columns: dict[ColumnPath, StoredColumn], path: Path) -> dict[ColumnPath, StoredColumn]:
        """Leave out arrays beside the observations that do not have a row for each step, such as a camera matrix."""
        known = {column.rows for name, column in columns.items() if _counts(name, self._layout) and _has_rows(column)}
        known |= {count - 1 for count in known if self._layout.is_next}
        found = {}
        for name, column in columns.items():
            is_other = _is_state(name, self._layout) and not _counts(name, self._layout) and _has_rows(column)
            if is_other and column.rows not in known:
                self._dropped[name] = f"it has {counted(column.rows, 'row')} in {path.name}, not one a step"
            else:
                found[name] = column
        return found

    def _decoded(self, group: StoredGroup, name: ColumnPath, column: StoredColumn, path: Path) -> StoredColumn:
        if column.form.kind == "array" and len(column.form.shape) > 1:
            return column
        what = f"{column_name(name)!r} of {path.name}"
        if not column.rows:
            raise FormatError(f"{what} has no picture")
        at, (data,) = 0, group.encoded(name, 0, 1)
        if column.form.kind == "array" and not is_image(data):
            return column
        while not is_image(data) and at + 1 < column.rows:  # the first frames of RoboMIND may be raw pixels
            at += 1
            (data,) = group.encoded(name, at, at + 1)
        form = image_form(data, f"{what}, row {at:,}")
        self.packed.add(name)
        shape = form.shape if form.shape[2] > 1 else form.shape[:2]
        return StoredColumn(ColumnForm("array", form.dtype, shape), column.rows)

    def _steps(self, name: str, columns: Mapping[ColumnPath, StoredColumn]) -> int:
        """Return the number of steps: the rows that all columns have, or one less if actions come from the next row."""
        layout = self._layout
        for path in layout.action:
            if path not in columns:
                raise FormatError(f"{name} has no {column_name(path)!r}")
        if layout.is_next:
            return max(columns[layout.action[0]].rows - 1, 0)
        rows = {path: one.rows for path, one in columns.items() if _counts(path, layout) and _has_rows(one)}
        states = {count for path, count in rows.items() if _is_state(path, layout)}
        actions = {count for path, count in rows.items() if not _is_state(path, layout)}
        if len(actions) == 1 and states == {min(actions) + 1}:
            return min(actions)
        return min(states | actions, default=0)

    def _even(
        self, name: str, columns: Mapping[ColumnPath, StoredColumn], steps: int
    ) -> Mapping[ColumnPath, StoredColumn]:
        """Cut longer columns to the steps that all columns of an episode have; a note counts the rows."""
        if self._layout.is_next:
            return columns
        layout = self._layout
        rows = {path: one.rows for path, one in columns.items() if _is_required(path, layout) and _has_rows(one)}
        if all(count == steps + _is_state(path, layout) for path, count in rows.items()):
            return columns
        longest = max(rows.values(), default=steps)
        if longest > steps:
            self._cut[name] = longest - steps
        return {path: one._replace(rows=steps) if rows.get(path, 0) > steps else one for path, one in columns.items()}

    def _attributes(self, group: StoredGroup) -> dict[str, str]:
        found = {}
        for name in group.attribute_names():
            if name not in ("compress", MARK):
                value = plain_value(group.attribute(name))
                found[name] = value if isinstance(value, str) else dump_json(value)
        self._real += found.get("sim") in ("false", "False", "0")
        return found

    def _values(self, file: GroupFile, stored: Mapping[ColumnPath, StoredColumn], path: Path) -> dict[str, str]:
        """Read single values, which become texts of the episode."""
        found = {}
        for name, column in stored.items():
            if column.form == SINGLE:
                with reading(f"{column_name(name)!r} of {path.name}", path):
                    value = plain_value(file.values.dataset(column_name(name))[()])
                found[column_name(name)] = value if isinstance(value, str) else dump_json(value)
        return found

    def _instructions(self, path: Path) -> dict[str, str]:
        file = self._texts.get(path.stem)
        if file is None:
            return {}
        document = parse_json(read_regular(file), str(file))
        return {"instructions": dump_json(document)}

    def dropped(self) -> Iterator[Dropped]:
        """Yield the columns that were left out."""
        for path, why in self._dropped.items():
            yield Dropped(column_name(path), why)

    def episodes(self, numbers: Sequence[int]) -> dict[int, GroupEpisode]:
        """Return the episodes by number; `numbers` has the number of each file."""
        found = {}
        for one in sorted(self._found, key=lambda one: numbers[one.index]):
            name = self._names[one.index]
            found[numbers[one.index]] = GroupEpisode(
                numbers[one.index], name, one.index, b"/", one.steps, text=one.text, places=one.places,
                problem=one.problem or self.survey.problems.get(name),
            )  # fmt: skip
        return found

    def notes(self) -> Iterator[str]:
        """Yield sentences about the actions, and about rows and files that are left out."""
        if self._layout.is_next:
            yield "the action is made of the joints of the next row: an episode has one step less than rows"
        elif self._layout is _ACT and self._real:
            yield (
                f"{counted(self._real, 'episode')} of a real robot: ACT trains on these with the action of the row "
                "before; rows are kept as they are"
            )
        elif self._layout is _ROBOMIND:
            yield (
                "actions come from the master arm, if there is one; the authors train some robots on the puppet arm's "
                "state in the next row"
            )
        if self._cut:
            name, count = next(iter(self._cut.items()))
            yield (
                f"{counted(len(self._cut), 'episode')} with columns of different lengths: rows that some columns lack "
                f"are left out ({counted(count, 'row')} of {name})"
            )
        if self._empty:
            more = ", …" if len(self._empty) > _SHOWN else ""
            shown = ", ".join(self._empty[:_SHOWN])
            yield f"{counted(len(self._empty), 'episode')} without steps left out: {shown}{more}"


def _has_rows(column: StoredColumn) -> bool:
    return column.form.kind == "array"


def _is_required(path: ColumnPath, layout: _Layout) -> bool:
    return _key_of(path, layout)[1] in ("action", "observation")


def _is_state(path: ColumnPath, layout: _Layout) -> bool:
    return _key_of(path, layout)[2] == "state"


def _counts(path: ColumnPath, layout: _Layout) -> bool:
    """Whether a column has a row for each step: joints, actions and pictures do."""
    if _is_of_camera(path, layout) or path in layout.action:
        return True
    if layout is _ACT:
        return path == _BASE_ACTION or (path[0] == "observations" and path[1:] in _JOINT_STATES)
    return path[0] in ("joint_action", "state", "action", "puppet", "master")


def _is_of_camera(path: ColumnPath, layout: _Layout) -> bool:
    """Whether a column has pictures or depth maps of a camera."""
    return _key_of(path, layout)[0][:2] in (("observation", "image"), ("observation", _DEPTH))


def _is_picture(column: StoredColumn) -> bool:
    """Whether a column of a camera may hold encoded pictures, or holds arrays with colours."""
    return column.form.kind in ("text", "bytes") or (column.form.dtype == "uint8" and len(column.form.shape) in (1, 3))


def _key_of(path: ColumnPath, layout: _Layout) -> tuple[Key, Role, Timing]:
    """Return the key of a column, its role, and its timing."""
    parts: Key = tuple(map(safe_part, path))
    if layout is _ACT:
        if path == _ACTION:
            return ACTION, "action", "step"
        if path == _BASE_ACTION:
            return parts, "action", "step"
        if path[:2] == ("observations", "images") and len(path) > 2:
            return _pictures(parts[2:]), "observation", "state"
        if path[0] == "observations" and len(path) > 1:
            return ("observation", *parts[1:]), "observation", "state"
    elif layout.is_next:
        if path[0] == "observation" and len(path) > 2 and path[-1] in ("rgb", _DEPTH):
            kind = "image" if path[-1] == "rgb" else _DEPTH
            return ("observation", kind, *parts[1:-1]), "observation", "state"
        return ("observation", *(parts[1:] if path[0] == "observation" else parts)), "observation", "state"
    elif layout is _ALIGNED:
        if path[0] == "vision" and len(path) > 2 and path[-1] in ("colors", "depths"):
            kind = "image" if path[-1] == "colors" else _DEPTH
            return ("observation", kind, *parts[1:-1]), "observation", "state"
        if path[0] in ("state", "vision"):
            return ("observation", *(parts[1:] if path[0] == "vision" else parts)), "observation", "state"
        if path[0] == "action":
            return parts, "action", "step"
    else:
        if path[:2] in (("observations", "rgb_images"), ("observations", "depth_images")) and len(path) > 2:
            kind = "image" if path[1] == "rgb_images" else _DEPTH
            return ("observation", kind, *parts[2:]), "observation", "state"
        if path[0] == "puppet":
            return ("observation", *parts), "observation", "state"
        if path[0] == "master":
            return ("action", *parts[1:]), "action", "step"
    return ("info", *parts), "info", "step"


def _pictures(parts: Key) -> Key:
    kind = _DEPTH if parts[-1].endswith(f"_{_DEPTH}") else "image"
    return ("observation", kind, *parts)


def _keys_of(
    found: SurveyedColumns, layout: _Layout, packed: set[ColumnPath], *, swapped: bool
) -> MappedColumns:  # fmt: skip
    """Map every column to its key in TED."""
    mapped, taken = MappedColumns(), []
    if layout.is_next and found.required:
        joints = tuple((path, found.required[path]) for path in layout.action if path in found.required)
        size = sum(int(np.prod(form.shape, dtype=np.int64)) for _, form in joints)
        dtype = np.result_type(*(form.dtype for _, form in joints)).name
        form = ColumnForm("array", dtype, (size,))
        mapped.columns.append(NextRows(layout.action[0], ACTION, "action", "step", form, parts=joints))
        taken.append(ACTION)
    for path, form in sorted({**found.required, **found.others}.items()):
        key, role, timing = _key_of(path, layout)
        if why := why_no_key(key, taken, "column"):
            mapped.dropped.append(Dropped(column_name(path), why))
            continue
        taken.append(key)
        beyond = path in found.longer
        if path in packed:
            mapped.columns.append(ImageColumn(path, key, role, timing, form, longer=beyond, swaps=swapped))
        else:
            mapped.columns.append(GroupColumn(path, key, role, timing, form, longer=beyond))
        if key_name(key) != column_name(path):
            mapped.renamed[column_name(path)] = key_name(key)
    return mapped


def _asked_swap(choice: object) -> bool:
    if choice not in (None, "exact", "opencv"):
        raise UsageError(f"--jpeg is {str(choice)!r}, expected exact or opencv")
    return choice == "opencv"


def _first_instruction(text: str | None) -> str:
    """Return the first instruction of a JSON list, or of the list `seen` of RoboTwin."""
    if text is None:
        return ""
    try:
        found = parse_json(text, "instructions")
    except FormatError:
        return text
    found = found.get("seen") if isinstance(found, dict) else found
    first = found[0] if isinstance(found, list) and found else found
    return first if isinstance(first, str) else ""


def _numbers_of(files: Sequence[Path]) -> list[int]:
    """Return the number at the end of each file's name; or 0, 1, … if some names have none, or share one."""
    found = [match and int(match[1]) for match in (_NUMBER.search(file.stem) for file in files)]
    if None in found or len(set(found)) < len(found):
        return list(range(len(files)))
    return [number for number in found if number is not None]


def _files_at(path: Path) -> list[Path]:
    """Return the file itself, or all HDF5 files in a folder or in its folder `data`, in natural order."""
    if path.is_file():
        return [path]
    if not path.is_dir():
        return []
    folders = (path, path / "data")
    found = next((found for folder in folders if folder.is_dir() and (found := list(h5_files_in(folder)))), [])
    return sorted(found, key=lambda file: natural_order(file.name))
