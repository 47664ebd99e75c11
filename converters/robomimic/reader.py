"""Reads and downloads robomimic's HDF5 files, which have a group `data/demo_N` for each episode.

It also reads the variants of MimicGen, LIBERO and Isaac Lab, and the attributes, simulator models and splits beside the
rows. It imports h5py, but neither robomimic nor robosuite nor torch.
"""

from __future__ import annotations

import hashlib
import math
import re
from array import array
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ...core.errors import FormatError, RbtoolError, UsageError, did_you_mean
from ...core.format.contracts import SourceFacts
from ...core.format.documents import dump_json, json_file, parse_json
from ...core.format.manifest import Dropped
from ...core.progress import counted
from ...core.remote.hub import HubFile, HubFolderSource
from ...core.ted.schema import ACTION, REWARD, Key, Role, Timing, key_name, safe_part
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
    flags_of,
    places_of,
    single_forms,
)
from ..files.hdf5 import (
    MARK,
    GroupFile,
    StoredGroup,
    h5_file_at,
    has_name,
    other_files_note,
    plain_value,
    require_whole_h5,
    text_of_name,
)
from ..files.readers import ColumnForm, ColumnPath, StoredColumn, column_name, stated_ends

ACTIONS: ColumnPath = ("actions",)
REWARDS: ColumnPath = ("rewards",)
DONES: ColumnPath = ("dones",)
INITIAL = "initial_state"
_OBS, _NEXT_OBS, _STATES = "obs", "next_obs", "states"
_SINGLE = frozenset({ACTIONS, REWARDS, DONES})
_NESTED = frozenset({_OBS, _NEXT_OBS, _STATES, INITIAL})


def is_required(path: ColumnPath) -> bool:
    """Whether episodes must agree on a column."""
    return path in _SINGLE or path[0] in _NESTED


def most_more_rows(path: ColumnPath) -> int | None:
    """Return how many rows more than steps a column may have; None if it may have any number of rows."""
    return {_OBS: 1, _NEXT_OBS: 0}.get(path[0])


def keys_of(found: SurveyedColumns, file: Path, *, zero_reward: bool) -> MappedColumns:
    """Map every column to its key in TED; `zero_reward` adds rewards of 0 to a file without rewards.

    Raises FormatError if there are neither observations nor states, UsageError for `zero_reward` if there are rewards.
    """
    mapped, required = MappedColumns(), found.required
    if not required:  # every episode has a problem
        return mapped
    observations = [path for path in required if path[0] == _OBS]
    states = [path for path in required if path[0] == _STATES]
    _require_all_longer(found.longer, observations, file)
    mapped.columns += _observed(required, observations, mapped, longer=bool(found.longer))
    if not observations:
        if not states:
            raise FormatError(f"{file} has no observations: neither obs nor states with a row for each step")
        mapped.notes.append("there is no obs: the states are the observations")
    mapped.columns += _states(required, states, mapped, as_observation=not observations)
    mapped.columns.append(GroupColumn(ACTIONS, ACTION, "action", "step", required[ACTIONS]))
    if REWARDS in required and zero_reward:
        raise UsageError(f"{file} has rewards of its own", hint="leave out --reward")
    if REWARDS in required:
        mapped.columns.append(GroupColumn(REWARDS, REWARD, "reward", "result", required[REWARDS]))
    elif zero_reward:
        mapped.columns.append(GroupColumn((), REWARD, "reward", "result", ColumnForm("array", "float32")))
        mapped.notes.append("there are no rewards: all are 0, as --reward zero says")
    else:
        mapped.notes.append("there are no rewards in the file, and no next.reward (--reward zero adds rewards of 0)")
    if DONES in required:
        mapped.columns.append(GroupColumn(DONES, ("info", "dones"), "info", "result", required[DONES]))
    for path, form in found.others.items():
        key = ("info", *map(safe_part, path))
        mapped.columns.append(GroupColumn(path, key, "info", "step", form))
        mapped.renamed[column_name(path)] = key_name(key)
    return mapped


def _require_all_longer(longer: Collection[ColumnPath], observations: list[ColumnPath], file: Path) -> None:
    if longer and len(longer) < len(observations):
        one, other = (
            next(column_name(path) for path in observations if (path in longer) is kind) for kind in (True, False)
        )
        raise FormatError(
            f"{file}: {one!r} has a row more than steps in every episode, but {other!r} has a row for each step: it is "
            "not known which rows belong together"
        )


def _observed(
    required: Mapping[ColumnPath, ColumnForm], observations: list[ColumnPath], mapped: MappedColumns, *, longer: bool
) -> Iterator[GroupColumn]:
    shifted = []
    for path in observations:
        after: ColumnPath = (_NEXT_OBS, *path[1:])
        if longer and after in required:
            raise FormatError(
                f"{column_name(path)!r} has a row more than steps, and there is {column_name(after)!r}: both have the "
                "observation after each step"
            )
        if after not in required:
            shifted.append(column_name(path))
        elif required[after] != required[path]:
            raise FormatError(f"{column_name(path)!r} and {column_name(after)!r} have rows of different forms")
        key: Key = ("observation", *map(safe_part, path[1:]))
        stored = after if after in required else None
        yield GroupColumn(path, key, "observation", "state", required[path], stored, longer=longer)
    if shifted and len(shifted) < len(observations):
        mapped.notes.append(f"next_obs lacks {', '.join(name.removeprefix('obs/') for name in shifted)}")
    if longer:
        mapped.notes.append("obs has a row more than steps: the last one is the observation after the last step")
    for path in required:
        if path[0] == _NEXT_OBS and (_OBS, *path[1:]) not in required:
            mapped.dropped.append(Dropped(column_name(path), "obs has no array of that name"))


def _states(
    required: Mapping[ColumnPath, ColumnForm], states: list[ColumnPath], mapped: MappedColumns, *, as_observation: bool
) -> Iterator[GroupColumn]:
    """Yield the columns of states: robosuite stores states before each step, Isaac Lab a group of states after each."""
    role: Role = "observation" if as_observation else "state"
    used = set()
    for path in states:
        key: Key = (role, *map(safe_part, path[1:]))
        initial: ColumnPath = (INITIAL, *path[1:])
        if len(path) == 1:
            timing: Timing = "state" if as_observation else "step"
            yield GroupColumn(path, key, role, timing, required[path])
        elif required.get(initial) == required[path]:
            used.add(initial)
            yield GroupColumn(path, key, role, "state", required[path], initial=initial)
        else:
            yield GroupColumn(path, key, role, "result", required[path])
    if any(len(path) > 1 for path in states):
        mapped.notes.append(
            "states are those after each step, as Isaac Lab records them; initial_state is the state before the first "
            "step"
        )
    for path in required:
        if path[0] == INITIAL and path not in used:
            mapped.dropped.append(
                Dropped(column_name(path), "it is a single row for each episode, and states has no array of that name")
            )


DATA = b"data"
MASK = b"mask"
DEMO = re.compile(rb"demo_(0|[1-9]\d{0,17})")
_ENVIRONMENT = "env_args"
_MODEL = "model_file"
_SHORT = 1 << 10
_FEW_NUMBERS = 16
_MOST_DOCUMENTS = 64 << 20
_NAME = re.compile(r"[\w-]{1,100}", re.ASCII)
_SHOWN = 10


class FileAttributes:
    """The attributes of the file and of `data`, in `documents`, with the description of the environment as it is.

    `total` is the number of steps that the file states; None if it states none.
    """

    def __init__(self, file: GroupFile) -> None:
        self.documents: dict[str, bytes] = {}
        self.dropped: list[Dropped] = []
        document: dict[str, Any] = {}
        for name in (b"/", DATA):
            where = name.decode()
            found = self._values(file.group(name, "the file" if where == "/" else repr(where)), where)
            if found:
                document["attributes" if where == "/" else where] = found
        inside = document.get(DATA.decode(), {})
        self.total = _count(inside.get("total"))
        environment = inside.pop(_ENVIRONMENT, None)
        if environment is not None:
            self.documents[f"{_ENVIRONMENT}.json"] = str(environment).encode()
            document[_ENVIRONMENT] = _parsed(environment)
        if document:
            self.documents["metadata.json"] = json_file(document)

    def _values(self, group: StoredGroup, where: str) -> dict[str, Any]:
        found = {}
        for name in group.attribute_names():
            if name == MARK:
                continue
            value = group.attribute(name)
            if isinstance(value, np.ndarray) and value.size > _FEW_NUMBERS:
                self.dropped.append(Dropped(f"{where}@{name}", "it is an attribute with many values"))
            else:
                found[name] = plain_value(value)
        return found


class DemoAttributes:
    """The attributes of demonstrations: short ones become episode texts, long ones documents, which equal ones share.

    `terminated` has, by name, whether a demonstration is terminated, if the file is an export of rbtool.
    """

    def __init__(self) -> None:
        self.documents: dict[str, bytes] = {}
        self.dropped: dict[str, str] = {}
        self.terminated: dict[str, bool] = {}
        self._by_content: dict[tuple[str, bytes], str] = {}
        self._taken = 0

    def take(self, demo: str, group: StoredGroup) -> tuple[dict[str, str], int | None, int | None]:
        """Return the texts of a demonstration, its seed, and the number of steps that `num_samples` states."""
        text: dict[str, str] = {}
        seed = claimed = None
        for name in group.attribute_names():
            value = group.attribute(name)
            if isinstance(value, np.ndarray) and value.size > _FEW_NUMBERS:
                self.dropped.setdefault(name, "it is an attribute with many values")
                continue
            plain = plain_value(value)
            if name == "num_samples" and _count(plain) is not None:
                claimed = _count(plain)
            elif name == "seed" and isinstance(plain, int) and not isinstance(plain, bool):
                seed = plain
            elif name == MARK:
                self.terminated[demo] = plain == "terminated"
            else:
                self._put(text, demo, name, plain)
        return text, seed, claimed

    def _put(self, text: dict[str, str], demo: str, name: str, value: Any) -> None:
        written = value if isinstance(value, str) else dump_json(value)
        if len(written) <= _SHORT and name != _MODEL:
            text[name] = written
            return
        data = written.encode("utf-8", "backslashreplace")
        known = (name, hashlib.sha256(data).digest())
        if known not in self._by_content:
            if not _NAME.fullmatch(name):
                self.dropped.setdefault(name, "it is a long attribute whose name cannot be a file name")
                return
            self._taken += len(data)
            if self._taken > _MOST_DOCUMENTS:
                self.dropped.setdefault(
                    name, f"long attributes are larger than {_MOST_DOCUMENTS >> 20} MiB together: some are left out"
                )
                return
            suffix = "xml" if name == _MODEL else "txt"
            self._by_content[known] = f"{name}/{demo}.{suffix}"
            self.documents[self._by_content[known]] = data
        text[name] = self._by_content[known]


class Splits:
    """The splits of a file, in `mask`: the names of demonstrations in each split."""

    def __init__(self, file: GroupFile) -> None:
        self.path = file.path
        self.demos: dict[str, list[str]] = {}
        self.dropped: list[Dropped] = []
        if not file.has_group(MASK):
            return
        group = file.group(MASK, "'mask'")
        for path, column in sorted(group.columns().items()):
            if column.form.kind != "text":
                why = column.form.why or "it does not hold names of demonstrations"
                self.dropped.append(Dropped(f"mask/{column_name(path)}", why))
                continue
            names = group.strings(path, 0, column.rows)
            self.demos[column_name(path)] = [_name(name, column_name(path)) for name in names]

    def document(self) -> dict[str, bytes]:
        """Return the splits as a document, if there are any."""
        return {"mask.json": json_file(self.demos)} if self.demos else {}

    def choose(self, key: str, known: Mapping[str, int]) -> list[int]:
        """Return the episodes of a split; UsageError for an unknown split, FormatError for missing episodes."""
        names = self.demos.get(key)
        if names is None:
            there = f"there are {', '.join(self.demos)}" if self.demos else "it has no mask"
            raise UsageError(
                f"{self.path} has no split {key!r}{did_you_mean(key, self.demos)}: {there}",
                hint="leave out --filter-key",
            )
        absent = [name for name in names if name not in known]
        if absent:
            raise FormatError(
                f"{self.path}: the split {key!r} names {listed(absent)}, which the file does not have",
                hint="choose existing episodes: --episodes A:B,C",
            )
        return sorted({known[name] for name in names})

    def notes(self, known: Mapping[str, int]) -> Iterable[str]:
        """Yield sentences about the splits, and about those with missing demonstrations."""
        if self.demos:
            counts = ", ".join(f"{key} ({len(names):,})" for key, names in self.demos.items())
            yield f"splits are {counts}: --filter-key chooses one"
        for key, names in self.demos.items():
            absent = [name for name in names if name not in known]
            if absent:
                yield f"the split {key!r} names {listed(absent)}, which the file does not have"


def listed(names: list[str]) -> str:
    """Return the first names as text, and how many more there are."""
    return ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN:,} more" if len(names) > _SHOWN else "")


def _name(value: bytes, key: str) -> str:
    return text_of_name(value.rstrip(b"\0"), f"the split {key!r}")


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def _parsed(value: Any) -> Any:
    try:
        return parse_json(str(value).encode(), _ENVIRONMENT)
    except FormatError:
        return value


_BLOCK_ROWS = 1 << 20


class RobomimicReader(GroupReader):
    """Reads a file of robomimic, MimicGen, LIBERO or Isaac Lab, or a folder with one and no other HDF5 file.

    `obs/NAME` becomes `observation.NAME`, and `next_obs/NAME`, if the file has it, the observation under `next`. In
    files without `obs`, the `states` are the observations. Episodes have the numbers of their groups, `demo_N`, in
    numeric order.

    Options: `filter_key` is the split (in `mask`) whose episodes are read; `ends` states whether the end of every group
    is `terminated` or `truncated`; `reward` may be `zero` for a file without rewards; `id` is the id of the published
    dataset.

    Raises FormatError for files without observations or steps, CorruptDataError for damaged files, UsageError for an
    unknown split. An episode that does not fit the others raises an error when it is read.
    """

    option_names = frozenset({"filter_key", "ends", "reward", "id"})

    @classmethod
    def recognises(cls, path: Path) -> bool:
        """Return whether the path is a whole HDF5 file with a group `data/demo_N`."""
        file = h5_file_at(path)
        return file is not None and has_name(DEMO, file, DATA.decode())

    def on_open(self) -> None:
        """Open the file."""
        file = h5_file_at(self.path)
        if file is None:
            raise FormatError(f"{self.path} is neither an HDF5 file nor a folder with exactly one")
        self._ends = stated_ends(self.options)
        if self.options.get("reward") not in (None, "zero"):
            raise UsageError(f"--reward is {self.options['reward']!r}, expected zero")
        require_whole_h5(file)
        self.opened = GroupFiles([file])
        self.opened.open(0)

    def survey(self, progress: Callable[[int], None]) -> SourceFacts:
        """Examine the structure, the rewards and the flags of every episode, and return the facts."""
        file = self.opened.open(0)
        if not file.has_group(DATA):
            raise FormatError(f"{file.path} has no group 'data' with demonstrations")
        found = {text_of_name(name, str(file.path)): DEMO.fullmatch(name) for name in file.names(DATA)}
        known = {name: int(match[1]) for name, match in found.items() if match}
        splits, attributes, demos = Splits(file), FileAttributes(file), _Demos(file)
        key = self.options.get("filter_key")
        numbers = sorted(known.values()) if key is None else splits.choose(str(key), known)
        for number in numbers:
            demos.look_at(number)
            progress(1)
        columns = demos.survey.finish()
        mapped = keys_of(columns, file.path, zero_reward=self.options.get("reward") == "zero")
        self.columns = mapped.columns
        self.episodes = demos.episodes(self._ends)
        kept = [self.episodes[number] for number in numbers if number in self.episodes]
        if not kept:
            raise FormatError(
                f"{file.path} has no demonstrations with steps" + (f" in the split {key!r}" if key else "")
            )
        dropped = [
            *(Dropped(f"data/{name}", "its name is not demo_N") for name, match in sorted(found.items()) if not match),
            *(Dropped(name, "it is neither data nor mask") for name in _others(file)),
            *splits.dropped, *attributes.dropped, *columns.dropped, *mapped.dropped,
            *(Dropped(f"data/demo_N@{name}", why) for name, why in demos.attributes.dropped.items()),
        ]  # fmt: skip
        notes = [
            *(splits.notes(known) if key is None else [f"only the episodes of the split {key!r} are read"]),
            *mapped.notes, *demos.notes(attributes.total if key is None else None), *demos.end_notes(self._ends),
        ]  # fmt: skip
        return SourceFacts(
            source="robomimic",
            id=self.id_or(file.path.stem),
            fields=self.fields,
            episode_numbers=[episode.number for episode in kept],
            steps=sum(episode.steps for episode in kept),
            renamed_keys=mapped.renamed,
            dropped_keys=tuple(dropped),
            notes=(*notes, *other_files_note(self.path, file.path)),
            documents={**attributes.documents, **demos.attributes.documents, **splits.document()},
            lengths=[episode.steps for episode in kept],
            final_missing=self.lacks_final,
            last_terminated=[episode.terminated for episode in kept] if self.lacks_final else None,
        )


@dataclass(slots=True)
class _Demo:
    """The findings about one group, which is an episode."""

    steps: int = 0
    text: Mapping[str, str] = field(default_factory=dict)
    seed: int | None = None
    done: bool = False
    done_before: int = 0
    last_reward: float = math.nan
    places: Places = ((), array("q"))
    problem: RbtoolError | None = None


class _Demos:
    """Examines one demonstration after the other."""

    def __init__(self, file: GroupFile) -> None:
        self._file = file
        self._found: dict[int, _Demo] = {}
        self.attributes = DemoAttributes()
        self.survey = GroupSurvey(is_required, (ACTIONS, REWARDS, DONES), most_more_rows)
        self._empty: list[str] = []
        self._claims = 0
        self._sparse = True
        self._nan = 0
        self._has_dones = False
        self._paths: dict[Paths, Paths] = {}

    def look_at(self, number: int) -> None:
        """Record the structure of a group, its attributes, rewards and flags, or what is wrong with it."""
        name, demo = f"demo_{number}", _Demo()
        self._found[number] = demo
        try:
            group = self._file.group(_group(number), name)
            columns = group.columns()
            if ACTIONS not in columns:
                raise FormatError(f"{name} has no 'actions'")
            demo.steps = columns[ACTIONS].rows
            demo.text, demo.seed, claimed = self.attributes.take(name, group)
            if not demo.steps:
                self._empty.append(name)
                del self._found[number]
                return
            self._claims += claimed is not None and claimed != demo.steps
            self.survey.add(name, _with_initial_rows(columns, demo.steps), demo.steps)
            demo.places = places_of(columns, self._paths)
            places = dict(zip(*demo.places, strict=True))
            self._read_ends(demo, name, GroupRows(self._file, _group(number), name, places), columns)
        except RbtoolError as error:
            demo.problem = error

    def _read_ends(self, demo: _Demo, name: str, rows: GroupRows, columns: Mapping[ColumnPath, StoredColumn]) -> None:
        """Read rewards and flags in blocks."""
        forms = single_forms(columns, (REWARDS, DONES), name)
        for start in range(0, demo.steps, _BLOCK_ROWS):
            stop = min(start + _BLOCK_ROWS, demo.steps)
            if REWARDS in forms:
                rewards = rows.array(REWARDS, start, stop, forms[REWARDS]).reshape(stop - start)
                self._sparse &= bool(np.isin(rewards, (0, 1)).all())
                self._nan += int(np.isnan(rewards).sum()) if rewards.dtype.kind == "f" else 0
                demo.last_reward = float(rewards[-1])
            if DONES in forms:
                self._has_dones = True
                flags = flags_of(rows.array(DONES, start, stop, forms[DONES]), DONES, name, start)
                demo.done_before += int(flags.sum())
                demo.done = bool(flags[-1])
        demo.done_before -= demo.done

    def episodes(self, ends: object) -> dict[int, GroupEpisode]:
        """Return the episodes by number; `ends` is the option."""
        found = {}
        for number, demo in self._found.items():
            name = f"demo_{number}"
            found[number] = GroupEpisode(
                number, name, 0, _group(number), demo.steps, places=demo.places,
                terminated=self._ends_terminated(name, demo) if ends is None else ends == "terminated",
                seed=demo.seed, text=demo.text, problem=demo.problem or self.survey.problems.get(name),
            )  # fmt: skip
        return found

    def _ends_terminated(self, name: str, demo: _Demo) -> bool:
        return self.attributes.terminated.get(name, self._is_terminated(demo))

    def _is_terminated(self, demo: _Demo) -> bool:
        return demo.done and ((self._sparse and demo.last_reward == 1) or _has_succeeded(demo))

    def notes(self, total: int | None) -> Iterator[str]:
        """Yield sentences about wrong counts in the file, empty groups, and rewards."""
        steps = sum(demo.steps for demo in self._found.values())
        if total is not None and total != steps:
            yield f"the file states {total:,} steps, but its groups have {steps:,}"
        if self._claims:
            yield f"num_samples is not the number of steps in {self._claims:,} of {len(self._found):,} episodes"
        if self._empty:
            yield f"{listed(self._empty)} {'has' if len(self._empty) == 1 else 'have'} no steps: left out"
        if self._nan:
            yield f"the reward is NaN in {self._nan:,} of {steps:,} steps"

    def end_notes(self, ends: str | None) -> Iterator[str]:
        """Yield sentences about how episodes end, and why."""
        count, demos = len(self._found), self._found.values()
        if ends is not None:
            yield f"all episodes end {ends}, as --ends says"
        elif self.attributes.terminated:
            yield f"the attribute {MARK} states how episodes end"
        elif not self._has_dones:
            successes = sum(map(_has_succeeded, demos))
            also = f", also the {successes:,} of {count:,} with success" if successes else ""
            yield f"there are no dones: episodes end truncated{also} (--ends terminated changes this)"
        else:
            marked, terminated = sum(demo.done for demo in demos), sum(map(self._is_terminated, demos))
            yield f"{_marked(marked, terminated, count)} (--ends changes this)"
        if before := sum(demo.done_before for demo in demos):
            yield f"dones is set in {counted(before, 'step')} inside episodes: next.info.dones has them"


def _group(number: int) -> bytes:
    return DATA + b"/demo_%d" % number


def _has_succeeded(demo: _Demo) -> bool:
    return demo.text.get("success") in ("true", "True", "1")


def _with_initial_rows(columns: Mapping[ColumnPath, StoredColumn], steps: int) -> dict[ColumnPath, StoredColumn]:
    """Return the columns; one of `initial_state` counts as fitting if it has a single row, and as misfit otherwise."""
    return {
        path: StoredColumn(column.form, steps if column.rows == 1 else -1) if path[0] == INITIAL else column
        for path, column in columns.items()
    }


def _others(file: GroupFile) -> Sequence[str]:
    return sorted(text_of_name(name, str(file.path)) for name in file.names() if name not in (DATA, MASK))


def _marked(marked: int, terminated: int, count: int) -> str:
    """Describe how many of `count` episodes end with dones, and how many of these are terminated."""
    if not marked:
        return "dones is never set in a last step: episodes end truncated"
    text = f"dones is set in the last step of {marked:,} of {count:,} episodes"
    if not terminated:
        return f"{text}, without a sparse reward of 1 or success: episodes end truncated"
    which = "these" if terminated == marked else f"{terminated:,} of them"
    text += f", and {which} end terminated, by a sparse reward of 1 or success"
    return f"{text}; the others end truncated" if terminated < count else text


_RELEASE = re.compile(r"v\d+(\.\d+)*/")
_VERSION = re.compile(r"_v\d+$")


class RobomimicSource(HubFolderSource):
    """Downloads from the repository `robomimic/robomimic_datasets`, in which every HDF5 file is a dataset.

    The id of `v1.5/lift/ph/low_dim_v15.hdf5` is `lift/ph/low_dim`. If two files would have the same id, both keep their
    version, as in `lift/ph/low_dim_v15`, and if these are the same as well, their whole path.
    """

    name = "robomimic"
    repository = "robomimic/robomimic_datasets"
    suffixes = (".hdf5", ".h5")

    def datasets_among(self, files: Sequence[HubFile]) -> Mapping[str, Sequence[HubFile]]:
        """Return every file by its id."""
        data = {file.path: file for file in self.data_files(files)}
        return {name: [data[path]] for name, path in ids_of(data).items()}

    def place_of(self, dataset_id: str) -> str | None:
        """Return None, because the file of an id depends on the other files."""
        return None

    def reader_options(self, dataset_id: str) -> Mapping[str, Any]:
        """Return the id, which the name of the file does not tell."""
        return {"id": dataset_id}


def ids_of(paths: Iterable[str]) -> dict[str, str]:
    """Return the path of each file by its id, the shortest one that no other file could have."""
    left, found = sorted(paths), dict[str, str]()
    for shorten in (_without_version, _without_release, _without_suffix):
        alike = defaultdict(list)
        for path in left:
            alike[shorten(path)].append(path)
        single = {name: same[0] for name, same in alike.items() if len(same) == 1 and name not in found}
        found |= single
        left = [path for path in left if path not in single.values()]
    return found | {path: path for path in left}


def _without_suffix(path: str) -> str:
    return path.rpartition(".")[0]


def _without_release(path: str) -> str:
    return _RELEASE.sub("", _without_suffix(path), count=1)


def _without_version(path: str) -> str:
    return _VERSION.sub("", _without_release(path))
