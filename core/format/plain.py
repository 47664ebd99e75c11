"""Reads a TED memory-map directory that has no manifest: what TorchRL caches, or a hand-made tensordict.

Nothing is recorded about such a folder, so the episodes are found from the `episode` leaf or, without one, from
`("next", "done")`. Padded trajectories, batch `[N, T]` with a mask, are read without their padding.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path

import numpy as np

from ..errors import FormatError
from ..ted import (
    EPISODE,
    NEXT_DONE,
    NEXT_TERMINATED,
    NEXT_TRUNCATED,
    EndReason,
    Field,
    Key,
    end_reason,
    key_name,
    role_of,
)
from .builder import created_by
from .contracts import Array, StepReader
from .episodes import EpisodeRow, EpisodeTable
from .manifest import Dropped, Manifest, Request
from .opened import OpenFiles
from .returns import sum_rewards
from .strict_json import parse_json
from .tree import Leaf, batch_of, leaf_path, read_tree

__all__ = ["PlainReader"]


_MASKS: tuple[Key, ...] = (("mask",), ("collector", "mask"))
"""The masks that mark steps, not padding, in trajectories padded by `split_trajectories` or a collector."""


class PlainReader(StepReader):
    """Rows of a tensordict folder of batch `[N]`, which has no digests.

    Of a batch `[N, T]` of padded trajectories those rows count that a mask marks, one trajectory after the other, and
    the mask goes. FormatError for a batch of more dimensions without a mask, or with one that has gaps: whether its
    rows are steps is not known.
    """

    def __init__(self, path: Path, files: OpenFiles | None = None) -> None:
        self.path = path
        self._files = files or OpenFiles(path)
        leaves = read_tree(self._files)
        rows = {leaf.shape[0] for leaf in leaves.values() if leaf.shape}
        if len(rows) != 1 or any(leaf.nested or not leaf.shape for leaf in leaves.values()):
            raise FormatError(f"{path} is a tensordict folder, but not one row a step: its leaves differ in length")
        mask = _mask_of(self._files, leaves)
        skip = 1 if mask is None else 2
        fields = tuple(
            Field(key, leaf.dtype, leaf.shape[skip:], role_of(key)) for key, leaf in leaves.items() if key != mask
        )
        self._spans = _Spans.whole(rows.pop()) if mask is None else _Spans.of(self._files, mask, leaves[mask])
        self._steps = self._spans.steps
        self._keys = {field.key for field in fields}
        dropped = () if mask is None else (Dropped(key_name(mask), "it marks padding, which is not kept"),)
        self.manifest = Manifest(
            kind="dataset", layout="ted", request=Request("tensordict", str(path), path.name), steps=self._steps,
            episodes=0, fields=fields, files=(), content_digest=self._files.state(), created_by=created_by(),
            dropped_keys=dropped,
        )  # fmt: skip

    @cached_property
    def episodes(self) -> EpisodeTable:
        """The table as the data tell it."""
        bounds = self._bounds()
        table = EpisodeTable.from_rows([self._row(number, *span) for number, span in enumerate(pairwise(bounds))])
        return replace(table, total_reward=sum_rewards(self, table.start, table.length))

    @property
    def episode_text(self) -> list[dict[str, str]] | None:
        """Such a folder has none."""
        return None

    def read(self, key: Key, start: int, stop: int) -> Array:
        """Read rows of one leaf by position."""
        leaf, name = self._leaf(key, start, stop), leaf_path(key)
        parts = [self._files.rows(name, leaf, *span) for span in self._spans.between(start, stop)]
        return parts[0] if len(parts) == 1 else np.concatenate([np.empty((0, *leaf.shape), leaf.numpy), *parts])

    def files_state(self) -> str:
        """Tell one state of the files from another without reading them."""
        return self._files.state()

    def close(self) -> None:
        """Close the files."""
        self._files.close()

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.path, self._files)

    def again(self) -> PlainReader:
        """Return a reader of the very same files."""
        return type(self)(self.path, self._files.again())

    def documents(self) -> dict[str, bytes]:
        """Such a folder has none."""
        return {}

    def verify_files(self) -> None:
        """There are no digests to compare with."""

    def _bounds(self) -> list[int]:
        """Rows at which episodes begin, and the end of the last."""
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
    """Where the steps lie among the rows of the files: runs of rows, and how many steps come before each run."""

    def __init__(self, starts: Array, lengths: Array) -> None:
        self._starts = starts
        self._ends = np.cumsum(lengths)
        self.before = self._ends - lengths
        self.steps = int(lengths.sum())

    @classmethod
    def whole(cls, rows: int) -> _Spans:
        """All rows."""
        return cls(np.zeros(1, np.int64), np.array([rows]))

    @classmethod
    def of(cls, files: OpenFiles, key: Key, leaf: Leaf) -> _Spans:
        """One run for each trajectory of a padded batch that has steps."""
        count, time = leaf.shape[:2]
        mask = files.rows(leaf_path(key), Field(key, leaf.dtype, (time,), "info"), 0, count)
        edges = np.diff(mask.astype(np.int8), axis=1, prepend=0, append=0)
        if ((edges == 1).sum(1) > 1).any():
            raise FormatError(f"{files.root} holds padded trajectories, but its mask {key_name(key)!r} has gaps")
        lanes, first = np.nonzero(edges == 1)
        return cls(lanes * time + first, np.nonzero(edges == -1)[1] - first)

    def between(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """The rows of the files, half-open, that hold the steps `[start, stop)`."""
        first, last = np.searchsorted(self._ends, [start, max(start, stop - 1)], side="right").tolist()
        for run in range(first, min(last + 1, len(self._starts)) if stop > start else first):
            shift = int(self._starts[run] - self.before[run])
            yield max(start, int(self.before[run])) + shift, min(stop, int(self._ends[run])) + shift


def _mask_of(files: OpenFiles, leaves: Mapping[Key, Leaf]) -> Key | None:
    """The mask of padded trajectories; None where the batch has one dimension, and every row is a step."""
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
