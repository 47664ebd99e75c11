"""Records episodes, as they are finished, into a folder that becomes a dataset in layout `packed`."""

from __future__ import annotations

import contextlib
import math
import os
import shlex
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, Self

import numpy as np

from ...errors import CorruptDataError, SchemaError, UsageError
from ...ted.episodes import EndReason, end_reason
from ...ted.schema import NEXT_TERMINATED, NEXT_TRUNCATED, Field, Key, field_named, key_name
from .. import fs
from ..contracts import Array
from ..digest import FileRecord
from ..episodes import EPISODES, EpisodeRow, EpisodeTable
from ..manifest import HIDDEN, MANIFEST, Manifest
from ..returns import episode_return
from ..staging import lock_folder
from ..ted.builder import write_manifest
from ..ted.tree import FieldRange, record_file
from .builder import PackedRowBuilder, PackedState
from .commits import COMMITS, COMMITS_COPY, RECORDING, Commit, CommitLog, episode_digest, fields_bytes
from .recorded_origin import ORIGIN, origin_of
from .row_files import AppendedFile
from .schema import SCHEMA, PackedSchema, RecordNumbers

SYNC_SECONDS = 1.0
"""How long after a sync the next one waits: a sync of every episode takes several times as long as writing it."""


def unfinished_recording(path: Path) -> CorruptDataError | None:
    """The error for a folder without a manifest in which something was recorded, however little of it is left."""
    if not any((path / name).is_file() for name in (RECORDING, COMMITS, COMMITS_COPY)):
        return None
    hint = f"restore it with: rbtool repair {shlex.quote(str(path))}"
    return CorruptDataError(f"{path} is a recording that was not finished: {MANIFEST} is missing", hint=hint)


class Recorded(NamedTuple):
    """What a recording that is continued has: the states of its files, and its episodes."""

    files: PackedState
    commits: list[Commit]


class RecordedEpisode(NamedTuple):
    """An episode of a recording: `states` `[n + 1, *shape]` by root key, and the other leaves `[n, *shape]` by key."""

    commit: Commit
    states: dict[Key, Array]
    steps: dict[Key, Array]


class PackedRecorder:
    """Appends whole episodes to a new folder. Each survives the death of the process once `add_episode` returns.

    What was added is synced, rows before the log, by the first episode that ends `sync_seconds` or more after the last
    sync, by `sync`, and by `finish`: a power failure loses at most the episodes that ended within that time of the last
    sync. With 0 each episode is synced when it is added.

    `finish` makes a dataset of the folder; `rbtool repair` does so where the recording process is no more. Nothing is
    compressed here: `rbtool convert` does that afterwards. A context manager: leaving without an error finishes.

    With `resumed`, the folder has a recording that this process has locked, as `continued` leaves it.

    UsageError where something is at `folder` already, SchemaError for leaves that need the same file. The folder is
    empty after an error.
    """

    def __init__(
        self,
        folder: Path,
        fields: Sequence[Field],
        *,
        sync_seconds: float = SYNC_SECONDS,
        resumed: Recorded | None = None,
        lock: int = -1,
    ) -> None:
        self.folder = folder
        self.commits: list[Commit]
        self._sync_seconds = sync_seconds
        self._synced_at = -math.inf
        self._unnamed = False  # files are there whose names are not on the disk
        self.fields = tuple(fields)
        self.schema = PackedSchema.of(fields)
        self._torn = False
        if resumed is not None:
            self.commits, self._lock = resumed.commits, lock
            self.rows = PackedRowBuilder(folder, self.fields, self.schema, resumed.files)
            self._log = CommitLog(folder, self.schema, len(self.commits))
            return
        self.commits, self._lock = [], -1
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise _taken(folder)
        fs.make_folder(folder / HIDDEN)
        with contextlib.ExitStack() as undo:
            self._lock = lock_folder(folder)
            undo.callback(self._unlock)
            if self._lock < 0 or any(path != folder / HIDDEN for path in folder.rglob("*")):
                raise _taken(folder)  # by another process, a moment ago
            undo.callback(_remove_contents, folder)
            self.rows = PackedRowBuilder(folder, self.fields, self.schema)
            undo.callback(self.rows.close)
            fs.write_file(folder / SCHEMA, self.schema.to_bytes())
            fs.write_file(folder / RECORDING, fields_bytes(self.fields))
            self._log = CommitLog(folder, self.schema)
            undo.callback(self._log.close)
            for place in (folder / HIDDEN, folder, folder.parent):
                fs.sync_folder(place)
            undo.pop_all()

    @property
    def steps(self) -> int:
        """Steps of all episodes that were added."""
        return self.commits[-1].steps if self.commits else 0

    def add_episode(
        self, columns: Mapping[Key, Array], *, episode: int, seed: int | None = None, cut_off: bool = False
    ) -> None:
        """Write a whole episode, rows `[n, *shape]` of every leaf; sync it with others, see `PackedRecorder`.

        `episode` is its number; `cut_off` states that it went on where the recording ends.
        SchemaError, and nothing changes, for rows of other leaves, types or shapes, or none.
        """
        length = {len(array) for array in columns.values()}
        if len(length) != 1 or not max(length):
            raise SchemaError(f"episode {episode} has leaves of {sorted(length)} rows, expected one number, from 1")

        def write() -> None:
            self.rows.append(columns, np.arange(row.length) == row.length - 1)
            self.rows.write()

        row = _row(columns, episode, seed, cut_off, self.fields)
        self._add(row, write)

    def add_states(
        self,
        states: Mapping[Key, Array],
        steps: Mapping[Key, Array],
        *,
        episode: int,
        seed: int | None = None,
        cut_off: bool = False,
    ) -> None:
        """Write a whole episode as `add_episode` does, each state once: cheaper where next observations follow.

        `states` has rows `[n + 1, *shape]` of every state by its root key, `steps` rows `[n, *shape]` of all other
        leaves by their keys.
        """
        _require_rows(self.schema, states, steps, len(next(iter(steps.values()), ())))
        row = _row(steps, episode, seed, cut_off, self.fields)
        self._add(row, lambda: self.rows.append_episode(states, steps, row.length))

    def _add(self, row: EpisodeRow, write: Callable[[], None]) -> None:
        """Write the rows of an episode with `write`, then the record of it."""
        self._require_whole()
        self._torn = True
        had_explicit = self.rows.explicit is not None
        try:
            write()
        except SchemaError:  # raised before anything is written
            self._torn = False
            raise
        explicit = self.rows.explicit
        self._unnamed |= explicit is not None and not had_explicit
        commit = Commit(
            row,
            self.steps + row.length,
            self.rows.explicit_starts[-1],
            explicit.rows if explicit else 0,
            episode_digest({file.name: digest for file in self._files() if (digest := file.cut())}),
        )
        self._log.append(commit)
        if time.monotonic() - self._synced_at >= self._sync_seconds:
            self.sync()
        self.commits.append(commit)
        self._torn = False

    def sync(self) -> None:
        """Wait until all episodes that were added are on the disk, also where `finish` failed half-way."""
        files = self._files()
        for file in files:
            file.sync()
        if self._unnamed:
            for folder in sorted({file.path.parent for file in files}):
                fs.sync_folder(folder)
            self._unnamed = False
        self._log.sync()
        self._synced_at = time.monotonic()

    def _files(self) -> list[AppendedFile]:
        explicit = self.rows.explicit
        return [*self.rows.files.files, *(explicit.files if explicit else ())]

    def episodes(self) -> Iterator[RecordedEpisode]:
        """Read the episodes, which have no explicit next rows, one after the other into fresh arrays."""
        first = 0
        for number, commit in enumerate(self.commits):
            states: dict[Key, Array] = {}
            steps: dict[Key, Array] = {}
            for one in self.schema.fields:
                start, length = first + number * (one.state or one.stem is None), commit.row.length
                stop = start + length + (one.state or one.stem is None)
                empty = np.empty((length + one.state, *one.field.shape), one.field.numpy)
                rows = self.rows.files.read(one, start, stop) if one.field.row_bytes else empty
                (states if one.state else steps)[one.field.key] = rows[: length + one.state]
            yield RecordedEpisode(commit, states, steps)
            first += commit.row.length

    def read(self, key: Key, start: int, stop: int) -> Array:
        """Read rows `[start, stop)` of a leaf of the episodes that were added, into a fresh array."""
        leaf = field_named(self.fields, key)
        if start == stop or not leaf.row_bytes:
            return np.empty((stop - start, *leaf.shape), leaf.numpy)
        one, after = self.schema.place(leaf)
        if not one.state and one.stem is not None:
            return self.rows.files.read(one, start, stop)

        def fetch(low: int, high: int, explicit: bool) -> Array:
            files = self.rows.explicit if explicit and self.rows.explicit else self.rows.files
            return files.read(one, low, high)

        numbers = RecordNumbers(recording_table(self.commits), self.steps, str(self.folder))
        return numbers.rows(start, stop, after, fetch)

    def finish(self) -> Manifest:
        """Make a dataset of the folder; the recorder is closed then. SchemaError where an episode is half written.

        After an error, as of a full disk, it can be called again.
        """
        self._require_whole()
        data = self.rows.finish()
        self._log.finish()
        manifest = seal(self.folder, self.fields, self.commits, data, self.rows.ranges)
        self.close()
        return manifest

    def _require_whole(self) -> None:
        """Refuse to continue after an episode that could not be written to its end, as on a full disk."""
        if self._torn:
            raise SchemaError(
                f"the recording {self.folder} stopped in the middle of an episode: nothing more can be recorded there",
                hint=f"make a dataset of what is whole: rbtool repair {shlex.quote(str(self.folder))}",
            )

    def moved(self, folder: Path, sync_seconds: float) -> None:
        """Continue at another path, to which the folder was moved, and with other times between syncs."""
        self.folder, self._sync_seconds = folder, sync_seconds
        for file in self._files():
            file.path = folder / file.name
        self.rows.moved(folder)
        self._log.moved(folder)

    def close(self) -> None:
        """Close the files without making a dataset of them; harmless when done twice."""
        self.rows.close()
        self._log.close()
        self._unlock()

    def _unlock(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *raised: object) -> None:
        try:
            if kind is None and self._lock >= 0:
                self.finish()
        finally:
            self.close()


def _taken(folder: Path) -> UsageError:
    return UsageError(f"{folder} already exists, a recording needs a new folder", hint="choose another one")


def _remove_contents(folder: Path) -> None:
    with contextlib.suppress(OSError):  # the error that is under way is the one to show
        for path in folder.iterdir():
            fs.remove(path)


def _require_rows(schema: PackedSchema, states: Mapping[Key, Array], steps: Mapping[Key, Array], length: int) -> None:
    """Raise SchemaError for other leaves, types or shapes than those of the recording."""
    given = (*states, *steps)
    if len(given) != len(schema.fields):
        odd = {key_name(key) for key in given} ^ {key_name(one.field.key) for one in schema.fields}
        raise SchemaError(f"rows have other leaves than the recording: {', '.join(sorted(odd))}")
    for one in schema.fields:
        field, found = one.field, (states if one.state else steps).get(one.field.key)
        if found is None or found.shape != (length + one.state, *field.shape) or found.dtype != field.numpy:
            what = "missing" if found is None else f"{found.dtype} {list(found.shape)}"
            expected = f"{field.numpy} {[length + one.state, *field.shape]}"
            raise SchemaError(f"rows of {field.name!r} are {what}, expected {expected}")


def _row(
    columns: Mapping[Key, Array], episode: int, seed: int | None, cut_off: bool, fields: Sequence[Field]
) -> EpisodeRow:
    """Summarise an episode; one whose last step bears neither flag ends with the recording."""
    terminated = NEXT_TERMINATED in columns and bool(columns[NEXT_TERMINATED][-1].any())
    truncated = NEXT_TRUNCATED in columns and bool(columns[NEXT_TRUNCATED][-1].any())
    total = episode_return(columns, fields)
    length = len(next(iter(columns.values())))
    reason = EndReason.END_OF_FILE if cut_off else end_reason(terminated, truncated)
    return EpisodeRow(episode, length, total, terminated, truncated, reason, seed)


def recording_table(commits: Sequence[Commit]) -> EpisodeTable:
    """The episode table of what was committed."""
    table = EpisodeTable.from_rows([commit.row for commit in commits])
    return replace(table, explicit_start=np.array([commit.explicit_start for commit in commits], np.int64))


def seal(
    folder: Path,
    fields: Sequence[Field],
    commits: Sequence[Commit],
    data: Sequence[FileRecord],
    ranges: Mapping[Key, FieldRange],
) -> Manifest:
    """Make a dataset of a recording whose data files are complete: write episodes and, at once, the manifest."""
    fs.remove(folder / EPISODES)  # that of an earlier attempt
    for place in (folder, folder / HIDDEN):
        for leftover in place.glob(".*.new"):
            fs.remove(leftover)
    table = recording_table(commits)
    names = [SCHEMA, RECORDING, COMMITS, COMMITS_COPY, *((ORIGIN,) if (folder / ORIGIN).is_file() else ())]
    kept = [*data, *(record_file(folder / name, name) for name in names)]
    origin = origin_of(folder)
    explicit = int((table.explicit_start >= 0).sum())
    boundary = replace(table.counts(), explicit_next=explicit)
    manifest = write_manifest(
        folder, fields, kept, ranges, table, origin, layout="packed", boundary=boundary, at_once=True
    )
    fs.sync_folder(folder)
    return manifest
