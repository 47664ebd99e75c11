"""Reads robomimic's HDF5 files: a group `data/demo_N` for each episode, in the variants of several tools.

Imports h5py; never robomimic, robosuite or torch.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from ...core.errors import FormatError, RbtoolError, UsageError
from ...core.format.contracts import SourceFacts
from ...core.format.manifest import Dropped
from ..files.columns import ColumnForm, ColumnPath, StoredColumn
from ..files.episode_groups import (
    GroupEpisode,
    GroupFiles,
    GroupReader,
    GroupRows,
    GroupSurvey,
    Paths,
    Places,
    places_of,
    zero_or_one,
)
from ..files.hdf5 import GroupFile, h5_file_at, names_in, other_files_note, require_whole_h5, text_of_name
from .columns import ACTIONS, DONES, INITIAL, REWARDS, is_required, keys_of, most_more_rows
from .contents import DATA, DEMO, MASK, DemoAttributes, FileAttributes, Splits, listed

_BLOCK_ROWS = 1 << 20
_ENDS = ("terminated", "truncated")


class RobomimicReader(GroupReader):
    """A robomimic file, or a folder that has one and no other HDF5 file; also those of MimicGen, LIBERO, Isaac Lab.

    `obs/NAME` becomes `observation.NAME`, and what is under `next` is `next_obs/NAME` where the file has it. Files
    without `obs` have `states` as observations. Episodes bear the numbers of their groups, `demo_N`, in numeric order.

    Options: `filter_key` is the split (below `mask`) whose episodes are read; `ends` states whether the end of every
    group is `terminated` or `truncated`; `reward` may be `zero` for a file without rewards; `id` is the published
    dataset that the file is.

    Raises FormatError for groups without steps in common, CorruptDataError for damaged files, UsageError for a split
    that is not there. An episode that does not fit the others is refused once it is asked for.
    """

    option_names = frozenset({"filter_key", "ends", "reward", "id"})

    @classmethod
    def recognises(cls, path: Path) -> bool:
        """Return whether it is a whole HDF5 file with a group `data` in which there is `demo_N`."""
        file = h5_file_at(path)
        return file is not None and any(DEMO.fullmatch(_bytes(name)) for name in names_in(file, DATA.decode()))

    def on_open(self) -> None:
        """Open the file."""
        file = h5_file_at(self.path)
        if file is None:
            raise FormatError(f"{self.path} is no HDF5 file, and has not one inside")
        if self.options.get("ends") not in (None, *_ENDS):
            raise UsageError(f"--ends is {self.options['ends']!r}, expected {' or '.join(_ENDS)}")
        if self.options.get("reward") not in (None, "zero"):
            raise UsageError(f"--reward is {self.options['reward']!r}, expected zero")
        require_whole_h5(file)
        self.opened = GroupFiles([file])
        self.opened.open(0)

    def survey(self, progress: Callable[[int], None]) -> SourceFacts:
        """Look at the structure, the rewards and the flags of every episode."""
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
        self.episodes = demos.episodes(self.options.get("ends"))
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
            *mapped.notes, *demos.notes(attributes.total if key is None else None), *demos.end_notes(self.options),
        ]  # fmt: skip
        return SourceFacts(
            source="robomimic",
            id=str(self.options.get("id") or file.path.stem),
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
    """What was found in one group."""

    steps: int = 0
    text: Mapping[str, str] = field(default_factory=dict)
    seed: int | None = None
    done: bool = False
    done_before: int = 0
    last_reward: float = math.nan
    places: Places = ((), array("q"))
    problem: RbtoolError | None = None


class _Demos:
    """Looks at one demonstration after the other."""

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
        """Take the structure of a group, its attributes, rewards and flags; remember what is wrong with it."""
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
        """Read rewards and flags, some at a time."""
        forms = {path: _single(columns[path].form, path, name) for path in (REWARDS, DONES) if path in columns}
        for start in range(0, demo.steps, _BLOCK_ROWS):
            stop = min(start + _BLOCK_ROWS, demo.steps)
            if REWARDS in forms:
                rewards = rows.array(REWARDS, start, stop, forms[REWARDS]).reshape(stop - start)
                self._sparse &= bool(np.isin(rewards, (0, 1)).all())
                self._nan += int(np.isnan(rewards).sum()) if rewards.dtype.kind == "f" else 0
                demo.last_reward = float(rewards[-1])
            if DONES in forms:
                self._has_dones = True
                flags = zero_or_one(rows.array(DONES, start, stop, forms[DONES]), DONES, name, start)
                demo.done_before += int(flags.sum())
                demo.done = bool(flags[-1])
        demo.done_before -= demo.done

    def episodes(self, ends: object) -> dict[int, GroupEpisode]:
        """The episodes by number; `ends` is the option."""
        found = {}
        for number, demo in self._found.items():
            name = f"demo_{number}"
            found[number] = GroupEpisode(
                number, name, 0, _group(number), demo.steps, places=demo.places,
                terminated=self._is_terminated(demo) if ends is None else ends == "terminated",
                seed=demo.seed, text=demo.text, problem=demo.problem or self.survey.problems.get(name),
            )  # fmt: skip
        return found

    def _is_terminated(self, demo: _Demo) -> bool:
        return demo.done and ((self._sparse and demo.last_reward == 1) or _has_succeeded(demo))

    def notes(self, total: int | None) -> Iterator[str]:
        """Sentences on counts that are wrong in the file, empty groups, and rewards."""
        steps = sum(demo.steps for demo in self._found.values())
        if total is not None and total != steps:
            yield f"the file claims {total:,} steps, and its groups have {steps:,}"
        if self._claims:
            yield f"num_samples is not the number of steps in {self._claims:,} of {len(self._found):,} episodes"
        if self._empty:
            yield f"{listed(self._empty)} {'has' if len(self._empty) == 1 else 'have'} no steps: left out"
        if self._nan:
            yield f"the reward is NaN in {self._nan:,} of {steps:,} steps"

    def end_notes(self, options: Mapping[str, object]) -> Iterator[str]:
        """Sentences on how episodes end, and why."""
        count, ends = len(self._found), options.get("ends")
        demos = self._found.values()
        if ends is not None:
            yield f"all episodes end {ends}, as --ends states"
        elif not self._has_dones:
            successes = sum(map(_has_succeeded, demos))
            also = f", also the {successes:,} of {count:,} with success" if successes else ""
            yield f"there are no dones: episodes end truncated{also} (--ends terminated states otherwise)"
        else:
            marked, terminated = sum(demo.done for demo in demos), sum(map(self._is_terminated, demos))
            yield f"{_marked(marked, terminated, count)} (--ends states otherwise)"
        if before := sum(demo.done_before for demo in demos):
            yield f"dones is set in {before:,} {_steps(before)} inside episodes: next.info.dones has them"


def _group(number: int) -> bytes:
    return DATA + b"/demo_%d" % number


def _has_succeeded(demo: _Demo) -> bool:
    return demo.text.get("success") in ("true", "True", "1")


def _with_initial_rows(columns: Mapping[ColumnPath, StoredColumn], steps: int) -> dict[ColumnPath, StoredColumn]:
    """Count the single row of a column of `initial_state` as fitting, and any other number as not."""
    return {
        path: StoredColumn(column.form, steps if column.rows == 1 else -1) if path[0] == INITIAL else column
        for path, column in columns.items()
    }


def _single(form: ColumnForm, path: ColumnPath, name: str) -> ColumnForm:
    if math.prod(form.shape) != 1:
        raise FormatError(f"{name}: {path[0]!r} has rows of shape {list(form.shape)}, expected one number")
    return form


def _others(file: GroupFile) -> Sequence[str]:
    return sorted(text_of_name(name, str(file.path)) for name in file.names() if name not in (DATA, MASK))


def _marked(marked: int, terminated: int, count: int) -> str:
    """Describe how many of `count` episodes end with dones, and how many of these are terminated."""
    if not marked:
        return "dones is set in no last step: episodes end truncated"
    text = f"dones is set in the last step of {marked:,} of {count:,} episodes"
    if not terminated:
        return f"{text}, without a sparse reward of 1 or success: episodes end truncated"
    which = "these" if terminated == marked else f"{terminated:,} of them"
    text += f", and {which} end terminated, by a sparse reward of 1 or success"
    return f"{text}; the others end truncated" if terminated < count else text


def _steps(count: int) -> str:
    return "step" if count == 1 else "steps"


def _bytes(name: str) -> bytes:
    return name.encode(errors="surrogateescape")
