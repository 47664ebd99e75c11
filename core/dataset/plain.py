"""Reads a TED memory-map directory that has no manifest: what TorchRL caches, or a hand-made tensordict.

Nothing is recorded about such a folder, so the episodes are found from the `episode` leaf or, without one, from
`("next", "done")`.
"""

from __future__ import annotations

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
    Field,
    Key,
    end_reason,
    role_of,
)
from .builder import created_by
from .contracts import Array, StepReader
from .digest import digest_of_stats
from .episodes import EpisodeRow, EpisodeTable
from .manifest import Manifest, Request
from .returns import sum_rewards
from .ted_reader import pread_file_rows
from .tree import leaf_path, read_tree

__all__ = ["PlainReader"]


class PlainReader(StepReader):
    """Rows of a tensordict folder of batch `[N]` that nobody vouches for."""

    def __init__(self, path: Path) -> None:
        self.path = path
        leaves = read_tree(path)
        rows = {leaf.shape[0] for leaf in leaves.values() if leaf.shape}
        if len(rows) != 1 or any(leaf.nested or not leaf.shape for leaf in leaves.values()):
            raise FormatError(f"{path} is a tensordict folder, but not one row a step: its leaves differ in length")
        fields = tuple(Field(key, leaf.dtype, leaf.shape[1:], role_of(key)) for key, leaf in leaves.items())
        self._steps = rows.pop()
        self._keys = {field.key for field in fields}
        files = digest_of_stats(path / leaf_path(key) for key in leaves)
        self.manifest = Manifest(
            kind="dataset", layout="ted", request=Request("tensordict", str(path), path.name), steps=self._steps,
            episodes=0, fields=fields, files=(), content_digest=files, created_by=created_by(),
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
        return pread_file_rows(self.path / leaf_path(key), self._leaf(key, start, stop), start, stop)

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
        else:
            raise FormatError(f"{self.path} has neither 'episode' nor 'next.done': its episodes cannot be told apart")
        return [0, *starts.tolist(), self._steps] if self._steps else [0]

    def _row(self, number: int, start: int, stop: int) -> EpisodeRow:
        terminated, truncated = (
            key in self._keys and bool(self.read(key, stop - 1, stop).any())
            for key in (NEXT_TERMINATED, NEXT_TRUNCATED)
        )
        if EPISODE in self._keys:
            number = int(self.read(EPISODE, start, start + 1).reshape(-1)[0])
        return EpisodeRow(number, stop - start, 0.0, terminated, truncated, end_reason(terminated, truncated))
