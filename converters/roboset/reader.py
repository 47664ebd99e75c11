"""Reads and downloads RoboSet's HDF5 files, with a group `TrialN` for each episode, in one file or one for each seed.

It imports h5py, but neither robohive nor torch.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ...core.errors import FormatError, RbtoolError
from ...core.format.contracts import Array, SourceFacts
from ...core.format.converter import FinalStep
from ...core.format.documents import dump_json, json_file
from ...core.format.manifest import Dropped
from ...core.progress import counted, some_of
from ...core.remote.hub import HubFolderSource
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
from ..files.hdf5 import GroupFile, h5_files_in, has_name, plain_value, require_whole_h5, text_of_name
from ..files.readers import ColumnPath, column_name, natural_order, notes_on_identical, stated_ends

_TRIAL = re.compile(rb"Trial(0|[1-9]\d{0,17})")
_SEED = re.compile(r"(?:^|[^a-z])seed_?(\d{1,18})(?!\d)", re.IGNORECASE)
_OBSERVATIONS: ColumnPath = ("observations",)
_ACTIONS: ColumnPath = ("actions",)
_REWARDS: ColumnPath = ("rewards",)
_DONE: ColumnPath = ("done",)
_REQUIRED: Mapping[ColumnPath, tuple[Key, Role, Timing]] = {
    _OBSERVATIONS: (("observation",), "observation", "state"),
    _ACTIONS: (ACTION, "action", "step"),
    _REWARDS: (REWARD, "reward", "result"),
}
_INFOS = "env_infos"
_OWN_KEYS = frozenset({("time",), ("user_cmd",)})
_BLOCK_ROWS = 1 << 20
_EPISODES = "episodes.json"
_SHOWN = 8


class RobosetReader(GroupReader):
    """Reads a file of RoboSet, or all files in a folder, but not those in its subfolders, which are other datasets.

    `env_infos/NAME` becomes `info.NAME`, `time` and `user_cmd` keep their names. In a single file, episodes have the
    numbers of their groups, `TrialN`. In several files, they are numbered from 0 in the order of the files and of the
    trials in each; the document `episodes.json` lists them. The seed of an episode is taken from the name of its file.

    Options: `ends` states whether `done` marks steps that are `terminated` (the default) or `truncated`; `id` is the id
    of the published dataset.

    Raises FormatError for files of another layout, CorruptDataError for damaged ones. An episode that does not fit the
    others raises an error when it is read.
    """

    option_names = frozenset({"ends", "id"})
    surveyed = ("episodes", "columns", "_done_form")

    @classmethod
    def recognises(cls, path: Path) -> bool:
        """Return whether the file, or the first HDF5 file in the folder, is whole and has a group `TrialN`."""
        file = next(_files_at(path), None)
        return file is not None and has_name(_TRIAL, file)

    def on_open(self) -> None:
        """Find the files, all of which must be whole."""
        files = list(_files_at(self.path))
        if not files:
            raise FormatError(f"{self.path} is neither an HDF5 file nor a folder with one")
        self._ends = stated_ends(self.options)
        for file in files:
            require_whole_h5(file)
        self.opened = GroupFiles(files)
        self.opened.open(0)

    def survey(self, progress: Callable[[int], None]) -> SourceFacts:
        """Examine the structure and the flags of every episode of every file, and return the facts."""
        trials = _Trials()
        for index, path in enumerate(self.opened.paths):
            trials.examine(index, path, self.opened.open(index), progress)
        columns = trials.survey.finish()
        mapped = _keys_of(columns)
        self.columns = mapped.columns
        self._done_form = columns.required.get(_DONE)
        self.episodes, mapping = trials.episodes(self._ends)
        if not self.episodes:
            raise FormatError(f"{self.path} has no trials with steps")
        documents = {} if len(trials.files) == 1 else {_EPISODES: json_file(mapping)}
        kept = self.episodes.values()
        return SourceFacts(
            source="roboset",
            id=self.id_or(self.path.name if self.path.is_dir() else self.path.stem),
            fields=self.fields,
            episode_numbers=list(self.episodes),
            steps=sum(episode.steps for episode in kept),
            renamed_keys=mapped.renamed,
            dropped_keys=(*columns.dropped, *mapped.dropped, *trials.dropped),
            notes=(
                *trials.notes(self._ends, mapping, self.final_step),
                *notes_on_identical(self.opened.paths),
            ),
            documents=documents,
            lengths=[episode.steps for episode in kept],
            final_missing=True,
            last_terminated=[episode.terminated for episode in kept],
        )

    def read_flags(self, episode: GroupEpisode, group: GroupRows, start: int, stop: int) -> tuple[Array, Array]:
        """Read `done` with the meaning that the option `ends` gives it; a group that ends without it is truncated."""
        done, none = np.zeros((2, stop - start), bool)
        if self._done_form is not None:
            done = flags_of(group.array(_DONE, start, stop, self._done_form), _DONE, episode.name, start)
        terminated, truncated = (none, done.copy()) if self._ends == "truncated" else (done, none)
        if stop == episode.steps:
            truncated[-1] = not terminated[-1]
        return terminated, truncated


class _Trial:
    """The findings about one group, which is an episode."""

    def __init__(self, file: int, number: int, seed: int | None) -> None:
        self.file, self.number, self.seed = file, number, seed
        self.steps = self.done_before = 0
        self.done = self.done_next_to_last = False
        self.text: dict[str, str] = {}
        self.problem: RbtoolError | None = None
        self.places: Places = ((), array("q"))


class _Trials:
    """Examines one file after the other; `files` has their names."""

    def __init__(self) -> None:
        self.files: list[str] = []
        alike = (*_REQUIRED, _DONE)
        self.survey = GroupSurvey(lambda path: path in alike, alike)
        self.dropped: list[Dropped] = []
        self._found: list[_Trial] = []
        self._empty: list[str] = []
        self._paths: dict[Paths, Paths] = {}

    def examine(self, index: int, path: Path, file: GroupFile, progress: Callable[[int], None]) -> None:
        """Examine all trials of a file, in the order of their numbers."""
        name = path.name
        self.files.append(name)
        found = {one: _TRIAL.fullmatch(one) for one in file.names()}
        others = [text_of_name(one, name) for one, match in sorted(found.items()) if not match]
        self.dropped += [Dropped(f"{name}/{one}", "its name is not TrialN") for one in others]
        numbers = sorted(int(match[1]) for match in found.values() if match)
        if not numbers:
            raise FormatError(f"{path} has no groups TrialN, which RoboSet's files have")
        seed = _SEED.search(path.stem)
        for number in numbers:
            trial = _Trial(index, number, int(seed[1]) if seed else None)
            try:
                self._look_at(trial, file)
            except RbtoolError as error:
                trial.problem = error
            progress(1)

    def _look_at(self, trial: _Trial, file: GroupFile) -> None:
        self._found.append(trial)
        name = f"Trial{trial.number} of {self.files[trial.file]}"
        group = file.group(b"Trial%d" % trial.number, name)
        columns = group.columns()
        for path in _REQUIRED:
            if path not in columns:
                raise FormatError(f"{name} has no {column_name(path)!r}")
        trial.steps = columns[_ACTIONS].rows
        trial.text = {one: _written(group.attribute(one)) for one in group.attribute_names()}
        if not trial.steps:
            self._empty.append(name)
            self._found.pop()
            return
        single_forms(columns, (_REWARDS, _DONE), name)
        self.survey.add(name, columns, trial.steps)
        trial.places = places_of(columns, self._paths)
        for start in range(0, trial.steps if _DONE in columns else 0, _BLOCK_ROWS):
            stop = min(start + _BLOCK_ROWS, trial.steps)
            flags = flags_of(group.array(_DONE, start, stop, columns[_DONE].form), _DONE, name, start)
            trial.done_before += int(flags.sum())
            trial.done_next_to_last = bool(flags[-2]) if len(flags) > 1 else trial.done
            trial.done = bool(flags[-1])
        trial.done_before -= trial.done

    def episodes(self, ends: object) -> tuple[dict[int, GroupEpisode], list[dict[str, object]]]:
        """Return the episodes by number, and a list of the file and the trial of each."""
        found: dict[int, GroupEpisode] = {}
        mapping: list[dict[str, object]] = []
        several = len(self.files) > 1
        for count, trial in enumerate(self._found):
            number, file = count if several else trial.number, self.files[trial.file]
            name = f"Trial{trial.number} of {file}"
            mapping.append({"episode": number, "file": file, "trial": trial.number})
            found[number] = GroupEpisode(
                number, name, trial.file, b"Trial%d" % trial.number, trial.steps,
                terminated=trial.done and ends != "truncated", seed=trial.seed,
                text={**trial.text, "file": file, "trial": str(trial.number)} if several else trial.text,
                places=trial.places, problem=trial.problem or self.survey.problems.get(name),
            )  # fmt: skip
        return found, mapping

    def notes(self, ends: object, mapping: Sequence[Mapping[str, object]], final_step: FinalStep) -> Iterator[str]:
        """Yield sentences about the numbers of episodes, about `done` in the steps that are kept, and empty trials."""
        if len(self.files) > 1:
            ranges = ", ".join(_ranges(self.files, mapping))
            yield f"{len(self.files):,} files: {ranges}; the document {_EPISODES} lists all episodes"
        yield from self._done_notes(ends, final_step)
        if self._empty:
            shown = some_of(self._empty, _SHOWN)
            yield f"{counted(len(self._empty), 'trial')} without steps left out: {shown}"

    def _done_notes(self, ends: object, final_step: FinalStep) -> Iterator[str]:
        whole: list[_Trial] = []
        cut: list[_Trial] = []
        for trial in self._found:
            keeps = final_step == "repeat" or (final_step == "auto" and trial.done and ends != "truncated")
            (whole if keeps else cut).append(trial)
        early = sum(trial.done_next_to_last for trial in cut)
        marked, count = sum(trial.done for trial in whole) + early, len(whole) + sum(one.steps > 1 for one in cut)
        if not marked:
            yield "done is never set at the end of an episode: episodes end truncated"
        else:
            taken = ends or "terminated"
            how = "as --ends says" if ends else "--ends truncated changes this"
            yield f"done is set in the last step of {marked:,} of {count:,} episodes: those end {taken} ({how})"
        if early and ends != "truncated":
            yield f"{early:,} of them {'is' if early == 1 else 'are'} also truncated: the step after is left out"
        if left := sum(trial.done for trial in cut):
            yield f"done is set in {counted(left, 'last step')} that --final-step leaves out"
        if before := sum(trial.done_before for trial in self._found) - early:
            yield f"done is set in {counted(before, 'step')} inside episodes, and stays a flag there"


def _keys_of(found: SurveyedColumns) -> MappedColumns:
    """Map every column to its key in TED; columns with unknown names become infos, unless the key is taken."""
    mapped = MappedColumns()
    if not found.required:  # every episode has a problem
        return mapped
    mapped.columns += [GroupColumn(path, *meaning, found.required[path]) for path, meaning in _REQUIRED.items()]
    infos = {path: form for path, form in found.others.items() if path[0] == _INFOS and len(path) > 1}
    taken = {("info", *map(safe_part, path[1:])) for path in infos}
    for path, form in infos.items():
        mapped.columns.append(GroupColumn(path, ("info", *map(safe_part, path[1:])), "info", "state", form))
    for path, form in found.others.items():
        if path in infos:
            continue
        key: Key = path if path in _OWN_KEYS else ("info", *map(safe_part, path))
        if any(key[: len(one)] == one or one[: len(key)] == key for one in taken):
            mapped.dropped.append(Dropped(column_name(path), f"{_INFOS}/{column_name(path)} has the same name"))
            continue
        mapped.columns.append(GroupColumn(path, key, "info", "step", form))
        if path not in _OWN_KEYS:
            mapped.renamed[column_name(path)] = key_name(key)
    return mapped


def _ranges(files: Sequence[str], mapping: Sequence[Mapping[str, object]]) -> Iterator[str]:
    """Yield which episodes the first files have."""
    for file in files[:_SHOWN]:
        numbers = [one["episode"] for one in mapping if one["file"] == file]
        yield f"{file} has episodes {numbers[0]}..{numbers[-1]}" if numbers else f"{file} has none"
    if len(files) > _SHOWN:
        yield "…"


def _written(value: object) -> str:
    plain = plain_value(value)
    return plain if isinstance(plain, str) else dump_json(plain)


def _files_at(path: Path) -> Iterator[Path]:
    """Yield the file itself, or all HDF5 files in a folder, in natural order: seed2 comes before seed10."""
    if path.is_file():
        yield path
    elif path.is_dir():
        yield from sorted(h5_files_in(path), key=lambda file: natural_order(file.name))


class RobosetSource(HubFolderSource):
    """Downloads from the repository `jdvakil/RoboSet_Sim`, in which every folder with HDF5 files is a dataset."""

    name = "roboset"
    repository = "jdvakil/RoboSet_Sim"
    suffixes = (".h5", ".hdf5")

    def reader_options(self, dataset_id: str) -> Mapping[str, Any]:
        """Return the id, which the folder of the files does not tell."""
        return {"id": dataset_id}
