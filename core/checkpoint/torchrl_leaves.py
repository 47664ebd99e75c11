"""The stored leaves of a checkpoint in TorchRL's layout, whatever they are kept in.

A leaf has one row a step, or, if it is a state, one more behind every end of an episode. Which of the two is not
written down; the ends, and with them the two numbers of rows, follow from the done flags.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from ..errors import CorruptDataError, FormatError
from ..format import Array, Closing, OpenFiles
from ..ted import Field, Key, as_numbers, key_name
from .rows import leaf_parts
from .torchrl_header import TorchrlHeader, TorchrlKeys

__all__ = ["Counts", "StoredLeaves"]


class Counts:
    """Rows of every trajectory; trajectories end at `ends` and with every lane.

    Of a storage that is not full, TorchRL leaves the extra row of a trajectory that ends a lane out of its tables and
    groups; `every` counts that, too.
    """

    def __init__(self, header: TorchrlHeader, ends: Array, *, every: bool = False) -> None:
        last = np.union1d(ends, header.lane_ends)
        extra = np.isin(last, ends)
        if not header.full and not every:
            extra &= ~np.isin(last, header.lane_ends)
        self.steps: Array = np.diff(last, prepend=-1)
        self.states: Array = self.steps + extra


class StoredLeaves(Closing, ABC):
    """Leaves by their key in the checkpoint, read by row; `ends` are the steps that have an extra row behind them.

    Steps are counted over the whole capacity, lane after lane. `files` has open all that is read, which this closes.
    """

    header: TorchrlHeader
    fields: Mapping[Key, Field]
    states: frozenset[Key]
    ends: Array

    def __init__(self, path: Path, keys: TorchrlKeys, files: OpenFiles) -> None:
        self.path = path
        self.keys = keys
        self.files = files

    @abstractmethod
    def fetch(self, key: Key, start: int, stop: int) -> Array:
        """Read rows `[start, stop)` of a leaf."""

    def close(self) -> None:
        """Close the files."""
        self.files.close()

    def _find_ends(self) -> Array:
        """Where an episode ends: where the flag is set, and where the layout has it end."""
        done = self.fields.get(self.keys.done)
        if done is None:
            raise FormatError(
                f"{self.path} has no entry {key_name(self.keys.done)!r}, so the ends of episodes are unknown",
                hint="name the flag with done_key=...",
            )
        if done.shape not in {(), (1,)}:
            raise FormatError(
                f"{self.path}: {done.name!r} has {list(done.shape)} numbers a step, one is expected: TorchRL's layout "
                "has no ends of single agents"
            )
        found = [self.header.forced_steps]
        for start, stop in leaf_parts(self.header.steps, done.row_bytes):
            flags = as_numbers(self.fetch(done.key, start, stop), done.dtype).reshape(-1) != 0
            found.append(np.flatnonzero(flags) + start)
        return np.unique(np.concatenate(found))

    def _choose_states(self, rows: Mapping[Key, int], with_ends: int) -> frozenset[Key]:
        """Tell from its number of rows whether a leaf is a state, which has `with_ends`."""
        steps, results = self.header.steps, {*self.keys.dones, *self.keys.rewards}
        for key, found in rows.items():
            if found != steps and (found != with_ends or key in results):
                other = "" if key in results else f", or {with_ends:,} with one more behind every end of an episode,"
                raise CorruptDataError(
                    f"{self.path}: {key_name(key)!r} has {found:,} rows; {steps:,}{other} are expected"
                )
        return frozenset(key for key, found in rows.items() if found != steps)
