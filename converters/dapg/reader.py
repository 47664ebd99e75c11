"""Reads demonstrations of DAPG (hand_dapg): the pickle of a list of paths, each a dictionary of arrays."""

from __future__ import annotations

import contextlib
import io
import os
import pickletools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ...core.errors import FormatError, SchemaError
from ...core.format.contracts import Array, SourceFacts
from ...core.format.converter import require_trust
from ...core.format.documents import dump_json
from ...core.format.files import no_match, open_regular
from ...core.format.manifest import Dropped
from ...core.ted.schema import ACTION, REWARD, Field, Key, Role, Timing, dtype_name, safe_part
from ..files.pickles import PickledArray, PickledList, PickleReader, Value
from ..files.readers import (
    ColumnEpisode,
    ColumnReader,
    EndMeaning,
    EpisodeColumn,
    ReadRows,
    meaning_of_ends,
    refuse_ends,
    require_single,
)

TERMINALS, TIMEOUTS = "terminals", "timeouts"
FLAGS = (TERMINALS, TIMEOUTS)
_BLOCK_ROWS = 1 << 20


@dataclass(frozen=True, slots=True)
class PathFlags:
    """A flag of all paths: whether it is set in the last row of each, and the number of earlier rows with it."""

    last: Sequence[bool]
    before: int


class PathEnds:
    """The ends of all paths: `terminated` and `truncated` have a flag for each path.

    A path without a flag in its last row is truncated if the file has `terminals`; otherwise it ends as `--ends` says.
    """

    def __init__(
        self, path: Path, options: Mapping[str, Any], lengths: Sequence[int], flags: Mapping[str, PathFlags]
    ) -> None:
        self._flags = flags
        none = [False] * len(lengths)
        terminals, timeouts = (flags[name].last if name in flags else none for name in FLAGS)
        open_ends = [
            bool(length) and not (one or other)
            for length, one, other in zip(lengths, terminals, timeouts, strict=True)
        ]  # fmt: skip
        self._open = sum(open_ends)
        self._meaning = self._meaning_of_open(path, options)
        self.terminated = [
            one or (left and self._meaning.terminated) for one, left in zip(terminals, open_ends, strict=True)
        ]
        self.truncated = [
            one or (left and not self._meaning.terminated) for one, left in zip(timeouts, open_ends, strict=True)
        ]

    def _meaning_of_open(self, path: Path, options: Mapping[str, Any]) -> EndMeaning:
        if TERMINALS in self._flags or (self._flags and not self._open):
            refuse_ends(path, options, f"has {' and '.join(self._flags)}, which state how paths end")
            which = "1 path" if self._open == 1 else f"{self._open:,} paths"
            verb = "ends" if self._open == 1 else "end"
            flags = " or ".join(self._flags)
            return EndMeaning(False, f"{which} {verb} without {flags}: taken as truncated" if self._open else "")
        if self._flags:
            return meaning_of_ends(options, "truncated", "nothing states how a path without timeouts ends")
        return meaning_of_ends(
            options, "truncated", "nothing states how an episode ends: the demonstration just stops"
        )  # fmt: skip

    def notes(self) -> Iterator[str]:
        """Yield sentences about paths that end without a flag, and about flags inside paths."""
        if self._meaning.note:
            yield self._meaning.note
        for name, flag in self._flags.items():
            if flag.before:
                steps = "1 step" if flag.before == 1 else f"{flag.before:,} steps"
                yield f"{name} are set in {steps} inside paths, where they end no episode: next.info.{name} has them"


def read_flags(
    path: Path, name: str, arrays: Sequence[PickledArray], rows: Callable[[PickledArray, int, int], Array]
) -> PathFlags:
    """Read a flag of all paths from `arrays`, with a row for each step; FormatError unless rows are numbers."""
    last: list[bool] = []
    before = 0
    for number, array in enumerate(arrays):
        if not len(array):
            last.append(False)
            continue
        if array.dtype.kind not in "biuf" or int(np.prod(array.shape[1:])) != 1:
            raise FormatError(
                f"{path}: {name!r} of path {number} does not have one flag per row ({array.dtype} {list(array.shape)})"
            )
        is_last = False
        for start in range(0, len(array), _BLOCK_ROWS):
            found = rows(array, start, min(start + _BLOCK_ROWS, len(array))).reshape(-1) != 0
            before += int(found.sum())
            is_last = bool(found[-1])
        before -= is_last
        last.append(is_last)
    return PathFlags(last, before)


_HEAD = 4096
_REQUIRED = ("observations", "actions", "rewards")
_PLACES: dict[str, tuple[Key, Role, Timing]] = {
    "observations": (("observation",), "observation", "state"),
    "actions": (ACTION, "action", "step"),
    "rewards": (REWARD, "reward", "result"),
}
_NEXT = "next_observations"
_STATE = "init_state_dict"
_DOCUMENT = "init_states.json"
_MOST_PATHS = 1 << 20
_MOST_NUMBERS = 1 << 16
_DEEPEST = 8


class DapgReader(ColumnReader):
    """Reads a pickle of a list of paths, each of which is an episode.

    `observations` become `observation`, `actions` become `action`, `rewards` become `next.reward`, and any other array
    with a row for each step becomes `info.NAME`. `init_state_dict` of all paths is kept in the document
    `init_states.json`.

    `next_observations`, if all paths have them, become the observation under `next`; without them there is no
    observation after the last step. `terminals` and `timeouts`, if all paths have them, state whether the last step of
    a path is terminated or truncated. A flag inside a path ends no episode, and is kept as `next.info.NAME`.

    Options: `trust_pickle` is required, because the file is a pickle. `ends` states how paths without flags end:
    `terminated` or `truncated` (the default).

    Raises UsageError without `trust_pickle`, FormatError for a pickle of something else, CorruptDataError for a damaged
    one.
    """

    option_names = frozenset({"ends", "trust_pickle"})

    @classmethod
    def recognises(cls, path: Path) -> bool:
        """Return whether the file begins like a pickled list of dictionaries with arrays; nothing is unpickled."""
        try:
            return path.is_file() and _starts_as_paths(path)
        except (OSError, ValueError, FormatError) as error:
            return no_match(error)

    def on_open(self) -> None:
        """Unpickle the file in a process of its own, which keeps the arrays."""
        require_trust(self.path, self.options.get("trust_pickle"))
        size = self.path.stat().st_size
        self._reader = PickleReader(str(self.path), size)
        try:
            with os.fdopen(open_regular(self.path), "rb") as file:
                self._take(self._reader.load(file, size))
        except BaseException:
            self._reader.close()
            raise

    def _take(self, found: Value) -> None:
        if not isinstance(found, PickledList) or not 0 < len(found) <= _MOST_PATHS:
            raise FormatError(f"{self.path} is not a list of paths")
        paths = self._reader.items(found)
        self._paths: list[dict[str, Value]] = []
        self.episodes: list[ColumnEpisode] = []
        for number, path in enumerate(paths):
            if not isinstance(path, dict):
                raise FormatError(f"{self.path}: entry {number} of its list is not a dictionary of arrays")
            self._paths.append(path)
            self.episodes.append(ColumnEpisode(len(self._array(number, "rewards"))))
        if not any(one.length for one in self.episodes):
            raise FormatError(f"{self.path} has no steps")
        self.columns: list[EpisodeColumn] = []
        self._dropped: list[Dropped] = []
        flags: dict[str, PathFlags] = {}
        for name in dict.fromkeys(name for path in self._paths for name in path):
            if name in FLAGS:
                flags[name] = self._flag(name)
            elif name not in (_STATE, _NEXT):
                self._add(name)
        for name in _REQUIRED:
            if not any(name in path for path in self._paths):
                raise FormatError(f"{self.path} has no {name!r} in its paths")
        lengths = [one.length for one in self.episodes]
        self._ends = PathEnds(self.path, self.options, lengths, {name: flags[name] for name in FLAGS if name in flags})
        self.episodes = [
            ColumnEpisode(*one) for one in zip(lengths, self._ends.terminated, self._ends.truncated, strict=True)
        ]

    def _require_in_all(self, name: str) -> None:
        lacking = [number for number, path in enumerate(self._paths) if name not in path]
        if lacking:
            raise FormatError(
                f"{self.path}: {name!r} are in {len(self._paths) - len(lacking):,} of {len(self._paths):,} paths, but "
                f"not in path {lacking[0]}; either all paths or none may have them",
                hint=f"remove {name!r} from all paths, or split the list by them",
            )

    def _flag(self, name: str) -> PathFlags:
        """Read a flag of all paths; if it is set inside a path, add it as a column as well."""
        self._require_in_all(name)
        dtype, shape = self._form(name)
        arrays = [self._array(number, name) for number in range(len(self._paths))]
        found = read_flags(self.path, name, arrays, self._reader.rows)
        if found.before:
            field = Field(("info", name), dtype, shape, "info")
            self.columns.append(EpisodeColumn(field, "result", partial(self._read, name, field)))
        return found

    def _array(self, number: int, name: str) -> PickledArray:
        found = self._paths[number].get(name)
        if not isinstance(found, PickledArray) or not found.shape:
            raise FormatError(f"{self.path}: {name!r} of path {number} is not an array with one row per step")
        return found

    def _add(self, name: str) -> None:
        try:
            dtype, shape = self._form(name)
        except FormatError as error:
            if name in _REQUIRED:
                raise
            self._dropped.append(Dropped(name, error.message.removeprefix(f"{self.path}: ")))
            return
        key, role, timing = _PLACES.get(name, (("info", safe_part(name)), "info", "step"))
        if key == REWARD:
            require_single(f"{self.path}: rewards have", shape)
        field = Field(key, dtype, () if key == REWARD else shape, role)
        after = self._after(field) if timing == "state" else None
        self.columns.append(EpisodeColumn(field, timing, partial(self._read, name, field), after))

    def _after(self, field: Field) -> ReadRows | None:
        """Return a function that reads `next_observations`; None if the paths have none."""
        if not any(_NEXT in path for path in self._paths):
            return None
        self._require_in_all(_NEXT)
        dtype, shape = self._form(_NEXT)
        if (dtype, shape) != (field.dtype, field.shape):
            raise FormatError(
                f"{self.path}: {_NEXT!r} are {dtype} {list(shape)}, and observations {field.dtype} {list(field.shape)}"
            )
        return partial(self._read, _NEXT, field)

    def _form(self, name: str) -> tuple[str, tuple[int, ...]]:
        """Return the element type and the shape of the rows of an array, which have to be the same in all paths."""
        found: tuple[str, tuple[int, ...]] | None = None
        for number, one in enumerate(self.episodes):
            array = self._array(number, name)
            if array.shape[0] != one.length:
                raise FormatError(
                    f"{self.path}: {name!r} of path {number} has {array.shape[0]:,} rows, but rewards {one.length:,}"
                )
            try:
                form = dtype_name(array.dtype), array.shape[1:]
            except (SchemaError, TypeError) as error:
                raise FormatError(f"{self.path}: {name!r} has elements that are not numbers ({array.dtype})") from error
            if found is not None and one.length and form != found:
                raise FormatError(f"{self.path}: rows of {name!r} of path {number} have another form than before")
            found = form if found is None and one.length else found
        if found is None:
            raise FormatError(f"{self.path}: {name!r} has no rows")
        return found

    def _read(self, name: str, field: Field, number: int, start: int, stop: int) -> Array:
        rows = self._reader.rows(self._array(number, name), start, stop)
        return rows.reshape(stop - start, *field.shape)

    def survey(self, progress: Callable[[int], None]) -> SourceFacts:
        """Return the facts; the arrays were checked when the file was opened."""
        progress(len(self.episodes))
        documents = {}
        if any(_STATE in path for path in self._paths):
            states = [self._plain(path.get(_STATE), 0) for path in self._paths]
            documents[_DOCUMENT] = dump_json(states, indent=1).encode()
        return self.facts_of(
            "dapg", self.path.stem, list(self._ends.notes()), dropped=self._dropped, documents=documents
        )

    def _plain(self, value: Value, depth: int) -> Any:
        """Return a value that JSON can hold: arrays as lists of numbers, NaN and infinity as text."""
        if isinstance(value, dict) and depth < _DEEPEST:
            return {name: self._plain(part, depth + 1) for name, part in value.items()}
        if isinstance(value, PickledArray):
            if int(np.prod(value.shape)) > _MOST_NUMBERS or value.dtype.kind not in "biuf":
                return f"array {value.dtype} {list(value.shape)}"
            return _finite(self._reader.rows(value).tolist())
        if isinstance(value, PickledList):
            return [self._plain(part, depth + 1) for part in self._reader.items(value)] if depth < _DEEPEST else "list"
        return _finite(value) if not isinstance(value, bytes) else value.decode("utf-8", "backslashreplace")

    def files(self) -> list[Path]:
        """The one file."""
        return [self.path]

    def on_close(self) -> None:
        """End the process that unpickles."""
        self._reader.close()


def _finite(value: Any) -> Any:
    if isinstance(value, list):
        return [_finite(part) for part in value]
    return str(value) if isinstance(value, float) and not np.isfinite(value) else value


def _starts_as_paths(path: Path) -> bool:
    """Return whether a pickle starts with a list, a dictionary in it, and the name of one of its arrays."""
    with os.fdopen(open_regular(path), "rb") as file:
        head = file.read(_HEAD)
    if head[:1] not in (b"\x80", b"(", b"]"):
        return False
    texts: list[str] = []
    opened: list[str] = []
    with contextlib.suppress(Exception):  # the head ends anywhere, and may not be a pickle at all
        for operation, argument, _ in pickletools.genops(io.BytesIO(head)):
            if operation.name in ("EMPTY_LIST", "EMPTY_DICT", "LIST", "DICT"):
                opened.append(operation.name)
            elif (isinstance(argument, str) and "UNICODE" in operation.name) or "STRING" in operation.name:
                texts.append(str(argument))
            if len(opened) > 1 and texts:
                break
    return [name.removeprefix("EMPTY_") for name in opened[:2]] == ["LIST", "DICT"] and texts[:1] != [] and (
        texts[0] in (*_REQUIRED, *FLAGS, _NEXT, _STATE, "env_infos", "agent_infos", "terminated")
    )  # fmt: skip
