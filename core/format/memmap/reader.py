"""Reads datasets in layout `ted` by position, and TED memory-map directories without a manifest."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cached_property, partial
from itertools import pairwise
from pathlib import Path

import numpy as np

from ...errors import CorruptDataError, FormatError
from ...ted.episodes import EndReason, end_reason
from ...ted.schema import EPISODE, NEXT_DONE, NEXT_TERMINATED, NEXT_TRUNCATED, Field, Key, key_name, role_of
from ..contracts import Array
from ..documents import parse_json
from ..episodes import EPISODES_TEXT, EpisodeRow, EpisodeTable, has_scores, parse_episode_text
from ..files import FileRecord
from ..manifest import (
    ENV_METADATA,
    HIDDEN,
    MANIFEST,
    SOURCE_DOCUMENTS,
    VIDEOS,
    Dropped,
    Manifest,
    Request,
    is_source_document,
)
from ..open_files import ListedFiles, MappedWindow, OpenedReader, OpenFiles
from ..returns import sum_rewards
from ..staging import mend
from .builder import created_by
from .tree import MappedLeaf, batch_of, leaf_path, read_tree


class FolderReader(OpenedReader):
    """Base of the readers of all layouts that are folders: manifest, episode table, text, documents, digests.

    `listed` has the open files. A subclass for damaged datasets sets `_whole` to False; then files of rows may be cut
    or missing.
    """

    _whole = True

    def __init__(self, path: Path, listed: ListedFiles | None = None) -> None:
        mend(path)
        self.path = path
        self.files = self.listed = listed or ListedFiles.at(path)
        self.manifest = self.listed.manifest
        self._table = EpisodeTable.load(self.listed.read, str(path), scored=has_scores(self.manifest.files))
        for file in self.manifest.files:
            if _describes_rows(file):
                self.listed.read(file.path)

    @cached_property
    def episodes(self) -> EpisodeTable:
        """The episode table, whose files were compared with their digests when the folder was opened."""
        return self._read_episodes()

    def _read_episodes(self) -> EpisodeTable:
        table = self._table
        if len(table) != self.manifest.episodes or table.steps != self.manifest.steps:
            raise CorruptDataError(
                f"{self.path}: the episode table holds {len(table)} episodes and {table.steps} steps, the manifest "
                f"states {self.manifest.episodes} and {self.manifest.steps}"
            )
        return table

    @cached_property
    def episode_text(self) -> list[dict[str, str]] | None:
        if EPISODES_TEXT not in self.listed:
            return None
        return parse_episode_text(self.listed.read(EPISODES_TEXT), str(self.path / EPISODES_TEXT))

    def documents(self) -> dict[str, bytes]:
        names = [file.path for file in self.manifest.files if is_source_document(file.path)]
        return {name.removeprefix(SOURCE_DOCUMENTS): self.listed.read(name) for name in names}

    def videos(self) -> dict[str, Path | bytes]:
        names = [file.path for file in self.manifest.files if file.path.startswith(VIDEOS)]
        return {name.removeprefix(VIDEOS): self.listed.place(name) for name in names}

    @property
    def kept_steps(self) -> int:
        """The number of steps at the beginning whose rows are all present although files may be cut or missing."""
        return self.manifest.steps

    def verify_files(self) -> None:
        """Compare every file with its digest in the manifest, and check that the manifest itself is unchanged."""
        self._verify(self.manifest.files)

    def _verify(self, files: Iterable[FileRecord]) -> None:
        """Verify these files, the manifest, and the sizes of all files."""
        for check in self._checks_of(files):
            check()

    def checks(self) -> list[Callable[[], None]]:
        """Return the work of `verify_files` as calls that several threads may share, the largest files first.

        The manifest and the sizes of all files are checked right away.
        """
        return self._checks_of(sorted(self.manifest.files, key=lambda file: -file.size))

    def _checks_of(self, files: Iterable[FileRecord]) -> list[Callable[[], None]]:
        if problem := self.listed.manifest_problem():
            raise CorruptDataError(problem)
        self.listed.check_sizes()
        return [partial(self.listed.verify, [file]) for file in files]

    def read_leaf(self, key: Key, leaf: Field, start: int, stop: int) -> Array:
        """Read rows from the file of `key`; `leaf` states their type and shape."""
        return self.listed.rows(leaf_path(key), leaf, start, stop)


class TedReader(FolderReader):
    """Reads the rows of a dataset or a checkpoint in layout `ted`."""

    def __init__(self, path: Path, listed: ListedFiles | None = None) -> None:
        super().__init__(path, listed)
        if self.manifest.layout != "ted":
            raise FormatError(f"{path} has layout {self.manifest.layout}, expected ted here")
        self._require_listed_leaves()

    def _require_listed_leaves(self) -> None:
        """Compare the sizes of the leaf files in the manifest with those that follow from its fields."""
        for field in self.fields:
            name, expected = leaf_path(field.key), self.manifest.steps * field.row_bytes
            found = self.listed.listed_size(name) or 0
            if found != expected:
                raise CorruptDataError(
                    f"{self.path / MANIFEST} lists {found:,} bytes of {name}, expected {expected:,} for "
                    f"{self.manifest.steps:,} rows of {field.name!r}"
                )

    def verify_leaves(self, keys: Collection[Key]) -> None:
        """Verify the files of these leaves, and all files that belong to no leaf."""
        others = {leaf_path(field.key) for field in self.fields if field.key not in keys}
        if others:
            self._verify(file for file in self.manifest.files if file.path not in others)
        else:
            self.verify_files()

    def read(self, key: Key, start: int, stop: int) -> Array:
        return self.read_leaf(key, self._leaf(key, start, stop), start, stop)

    def view(self, key: Key, start: int, stop: int) -> Array:
        """Return rows of one leaf as a view of the file."""
        name, leaf = leaf_path(key), self._leaf(key, start, stop)
        descriptor = self.listed.descriptor(name) if leaf.row_bytes else -1
        return MappedWindow().rows((descriptor, 0), self.path / name, leaf, start, stop)

    @property
    def kept_steps(self) -> int:
        sized = [field for field in self.fields if field.row_bytes]
        kept = [(self.listed.size(leaf_path(field.key)) or 0) // field.row_bytes for field in sized]
        return min(*kept, self.manifest.steps, self.manifest.steps)

    def check_tree(self, skipped: Collection[str] = ()) -> None:
        """Compare the `meta.json` files and file sizes with the manifest; raise CorruptDataError if they differ.

        The sizes of the files `skipped` are not compared.
        """
        leaves = read_tree(self.listed, skipped=skipped)
        expected = {field.key: (field.dtype, (self.manifest.steps, *field.shape)) for field in self.fields}
        found = {key: (leaf.dtype, leaf.shape) for key, leaf in leaves.items()}
        if found != expected:
            odd = sorted({key_name(key) for key, _ in set(found.items()) ^ set(expected.items())})
            raise CorruptDataError(f"{self.path}: meta.json and the manifest disagree on {', '.join(odd)}")


def _describes_rows(file: FileRecord) -> bool:
    """Return whether a file describes the layout of rows; the files of the episode table are read separately."""
    return file.path.endswith(".json") and not file.path.startswith(f"{HIDDEN}/") and file.path != ENV_METADATA


_MASKS: tuple[Key, ...] = (("mask",), ("collector", "mask"))
"""Keys of masks that are true for steps and false for padding, by `split_trajectories` or a collector."""


class PlainReader(OpenedReader):
    """Reads the rows of a tensordict folder without a manifest, of batch `[N]`, or `[N, T]` with a mask.

    A batch `[N, T]` of padded trajectories is read as the steps that its mask marks, one trajectory after the other;
    the mask itself is left out:

        mask [[1, 1, 0],      rows of the files   0 1 2 | 3 4 5
              [1, 1, 1]]      steps               0 1     2 3 4

    FormatError for a batch of several dimensions without a mask, or with gaps in it, since it is not known which rows
    are steps.
    """

    def __init__(self, path: Path, files: OpenFiles | None = None) -> None:
        self.path = path
        self.files = files or OpenFiles(path)
        leaves = read_tree(self.files)
        rows = {leaf.shape[0] for leaf in leaves.values() if leaf.shape}
        if len(rows) != 1 or any(leaf.nested or not leaf.shape for leaf in leaves.values()):
            raise FormatError(f"{path} is a tensordict folder, but not one row a step: its leaves differ in length")
        mask = _mask_of(self.files, leaves)
        skip = 1 if mask is None else 2
        fields = tuple(
            Field(key, leaf.dtype, leaf.shape[skip:], role_of(key)) for key, leaf in leaves.items() if key != mask
        )
        self._spans = _Spans.whole(rows.pop()) if mask is None else _Spans.of(self.files, mask, leaves[mask])
        self._steps = self._spans.steps
        self._keys = {field.key for field in fields}
        dropped = () if mask is None else (Dropped(key_name(mask), "it marks padding, which is not kept"),)
        self.manifest = Manifest(
            kind="dataset", layout="ted", request=Request("tensordict", str(path), path.name), steps=self._steps,
            episodes=0, fields=fields, files=(), content_digest=self.files.state(), created_by=created_by(),
            dropped_keys=dropped,
        )  # fmt: skip

    @cached_property
    def episodes(self) -> EpisodeTable:
        """The episode table, computed from the rows."""
        bounds = self._bounds()
        table = EpisodeTable.from_rows([self._row(number, *span) for number, span in enumerate(pairwise(bounds))])
        return replace(table, total_reward=sum_rewards(self, table.start, table.length))

    @property
    def episode_text(self) -> list[dict[str, str]] | None:
        """None: such a folder has no texts."""
        return None

    def read(self, key: Key, start: int, stop: int) -> Array:
        leaf, name = self._leaf(key, start, stop), leaf_path(key)
        parts = [self.files.rows(name, leaf, *span) for span in self._spans.between(start, stop)]
        return parts[0] if len(parts) == 1 else np.concatenate([np.empty((0, *leaf.shape), leaf.numpy), *parts])

    def documents(self) -> dict[str, bytes]:
        """Return {}: such a folder has no documents."""
        return {}

    def verify_files(self) -> None:
        """Do nothing: such a folder has no digests."""

    def _bounds(self) -> list[int]:
        """Return the rows at which episodes begin, and the end of the last one."""
        if EPISODE in self._keys:
            numbers = self.read(EPISODE, 0, self._steps).reshape(self._steps, -1)
            starts = np.flatnonzero((numbers[1:] != numbers[:-1]).any(1)) + 1
        elif NEXT_DONE in self._keys:
            starts = np.flatnonzero(self.read(NEXT_DONE, 0, self._steps).reshape(self._steps, -1)[:-1].any(1)) + 1
        elif len(self._spans.before) > 1:
            starts = np.empty(0, np.int64)
        else:
            raise FormatError(f"{self.path} has neither 'episode' nor 'next.done': its episodes cannot be separated")
        bounds: list[int] = np.union1d(starts, [*self._spans.before, self._steps] if self._steps else [0]).tolist()
        return bounds

    def _row(self, number: int, start: int, stop: int) -> EpisodeRow:
        terminated, truncated = (
            key in self._keys and bool(self.read(key, stop - 1, stop).any())
            for key in (NEXT_TERMINATED, NEXT_TRUNCATED)
        )
        if EPISODE in self._keys:
            number = int(self.read(EPISODE, start, start + 1).reshape(-1)[0])
        reason = end_reason(terminated, truncated)
        if reason is EndReason.END_OF_FILE and NEXT_DONE in self._keys and self.read(NEXT_DONE, stop - 1, stop).any():
            reason = EndReason.INFERRED
        return EpisodeRow(number, stop - start, 0.0, terminated, truncated, reason)


class _Spans:
    """Maps steps to rows of the files: runs of rows, and the number of steps before each run."""

    def __init__(self, starts: Array, lengths: Array) -> None:
        self._starts = starts
        self._ends = np.cumsum(lengths)
        self.before = self._ends - lengths
        self.steps = int(lengths.sum())

    @classmethod
    def whole(cls, rows: int) -> _Spans:
        """Return a single run of all rows."""
        return cls(np.zeros(1, np.int64), np.array([rows]))

    @classmethod
    def of(cls, files: OpenFiles, key: Key, leaf: MappedLeaf) -> _Spans:
        """Return a run for each trajectory of a padded batch, without empty ones."""
        count, time = leaf.shape[:2]
        mask = files.rows(leaf_path(key), Field(key, leaf.dtype, (time,), "info"), 0, count)
        edges = np.diff(mask.astype(np.int8), axis=1, prepend=0, append=0)
        if ((edges == 1).sum(1) > 1).any():
            raise FormatError(f"{files.root} holds padded trajectories, but its mask {key_name(key)!r} has gaps")
        lanes, first = np.nonzero(edges == 1)
        return cls(lanes * time + first, np.nonzero(edges == -1)[1] - first)

    def between(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Yield the half-open ranges of rows of the files that hold the steps `[start, stop)`."""
        first, last = np.searchsorted(self._ends, [start, max(start, stop - 1)], side="right").tolist()
        for run in range(first, min(last + 1, len(self._starts)) if stop > start else first):
            shift = int(self._starts[run] - self.before[run])
            yield max(start, int(self.before[run])) + shift, min(stop, int(self._ends[run])) + shift


def _mask_of(files: OpenFiles, leaves: Mapping[Key, MappedLeaf]) -> Key | None:
    """Return the key of the mask of padded trajectories; None if the batch has one dimension, whose rows are steps."""
    origin = str(files.root / "meta.json")
    batch = batch_of(parse_json(files.read("meta.json"), origin), origin)
    if len(batch) < 2:
        return None
    if len(batch) == 2 and all(leaf.shape[:2] == batch for leaf in leaves.values()):
        for key in _MASKS:
            if key in leaves and leaves[key].dtype == "bool" and leaves[key].shape in {batch, (*batch, 1)}:
                return key
    raise FormatError(
        f"{files.root} is a tensordict folder of batch {list(batch)} without a mask, expected one row a step",
        hint="reshape it to one row a step, and leave the padding out",
    )
