"""Records episodes, as they are finished, into a folder that becomes a dataset in layout `packed`."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Self

import numpy as np

from ...errors import SchemaError, UsageError
from ...ted.episodes import EndReason, end_reason
from ...ted.schema import NEXT_TERMINATED, NEXT_TRUNCATED, Field, Key, field_named
from .. import fs
from ..contracts import Array
from ..digest import FileRecord
from ..episodes import EPISODES, EpisodeRow, EpisodeTable
from ..manifest import HIDDEN, Manifest, Request
from ..packed.builder import PackedRowBuilder
from ..packed.schema import SCHEMA, PackedSchema, RecordNumbers
from ..returns import episode_return
from ..staging import lock_folder
from ..ted.builder import Origin, provenance_step, write_manifest
from ..ted.tree import FieldRange, record_file
from .log import COMMITS, COMMITS_COPY, RECORDING, Commit, CommitLog, episode_digest, fields_bytes


class PackedRecorder:
    """Appends whole episodes to a new folder. Each is safe when `add_episode` returns: a crash loses none of them.

    `finish` makes a dataset of the folder; `rbtool repair` does so where the recording process is no more. Nothing is
    compressed here: `rbtool convert` does that afterwards. A context manager: leaving without an error finishes.

    UsageError where something is at `folder` already, SchemaError for leaves that need the same file.
    """

    def __init__(self, folder: Path, fields: Sequence[Field]) -> None:
        self.folder = folder
        self.fields = tuple(fields)
        self.schema = PackedSchema.of(fields)
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise UsageError(f"{folder} is there already, a recording needs a new folder", hint="choose another one")
        self.commits: list[Commit] = []
        fs.make_folder(folder / HIDDEN)
        self._lock = lock_folder(folder)
        self._torn = False
        self.rows = PackedRowBuilder(folder, self.fields, self.schema)
        fs.write_file(folder / SCHEMA, self.schema.to_bytes())
        fs.write_file(folder / RECORDING, fields_bytes(self.fields))
        self._log = CommitLog(folder, self.schema)
        for place in (folder / HIDDEN, folder, folder.parent):
            fs.sync_folder(place)

    @property
    def steps(self) -> int:
        """Steps of all episodes that are safe."""
        return self.commits[-1].steps if self.commits else 0

    def add_episode(
        self, columns: Mapping[Key, Array], *, episode: int, seed: int | None = None, cut_off: bool = False
    ) -> None:
        """Write a whole episode, rows `[n, *shape]` of every leaf, and wait until it is safe on the disk.

        `episode` is its number; `cut_off` states that it went on where the recording ends.
        SchemaError, and nothing changes, for rows of other leaves, types or shapes, or none.
        """
        length = {len(array) for array in columns.values()}
        if len(length) != 1 or not max(length):
            raise SchemaError(f"episode {episode} has leaves of {sorted(length)} rows; one number, from 1, is expected")
        self._require_whole()
        self._torn = True
        try:
            commit = self._written(columns, _row(columns, episode, seed, cut_off, self.fields))
        except SchemaError:  # raised before anything is written
            self._torn = False
            raise
        self._log.append(commit)
        self.commits.append(commit)
        self._torn = False

    def _written(self, columns: Mapping[Key, Array], row: EpisodeRow) -> Commit:
        """Bring an episode to the disk, all but the record of it."""
        had_explicit = self.rows.explicit is not None
        self.rows.append(columns, np.arange(row.length) == row.length - 1)
        self.rows.write()
        explicit = self.rows.explicit
        files = [*self.rows.files.files, *(explicit.files if explicit else ())]
        for file in files:
            file.sync()
        if explicit is not None and not had_explicit:  # the names of new files have to be safe, too
            for folder in sorted({file.path.parent for file in files}):
                fs.sync_folder(folder)
        return Commit(
            row,
            self.steps + row.length,
            self.rows.explicit_starts[-1],
            explicit.rows if explicit else 0,
            episode_digest({file.name: digest for file in files if (digest := file.cut())}),
        )

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
        """Make a dataset of the folder; the recorder is closed then. SchemaError where an episode is half written."""
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

    def close(self) -> None:
        """Close the files without making a dataset of them; harmless when done twice."""
        self.rows.close()
        self._log.close()
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *raised: object) -> None:
        if kind is None and self._lock >= 0:
            self.finish()
        else:
            self.close()


def _row(
    columns: Mapping[Key, Array], episode: int, seed: int | None, cut_off: bool, fields: Sequence[Field]
) -> EpisodeRow:
    """Summarise an episode; one whose last step bears neither flag ends with the recording."""
    terminated, truncated = (
        key in columns and bool(np.any(columns[key][-1])) for key in (NEXT_TERMINATED, NEXT_TRUNCATED)
    )
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
    kept = [*data, *(record_file(folder / name, name) for name in (SCHEMA, RECORDING, COMMITS, COMMITS_COPY))]
    request = Request("recording", str(folder), folder.name)
    origin = Origin(replace(request, layout="packed"), (provenance_step("record", {}, {}),))
    explicit = int((table.explicit_start >= 0).sum())
    boundary = replace(table.counts(), explicit_next=explicit)
    manifest = write_manifest(
        folder, fields, kept, ranges, table, origin, layout="packed", boundary=boundary, at_once=True
    )
    fs.sync_folder(folder)
    return manifest
