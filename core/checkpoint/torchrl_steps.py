"""What TorchRL saved, as a dataset has it: every episode ends with a flag, and every step names its episode."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import numpy as np

from ..dataset import Array, EpisodeTable, StepReader
from ..ted import DONE, EPISODE, NEXT_DONE, NEXT_TERMINATED, NEXT_TRUNCATED, Field, Key
from .torchrl_header import TorchrlKeys
from .torchrl_reader import TorchrlReader

__all__ = ["TorchrlSteps"]


class TorchrlSteps(StepReader):
    """The rows of a `TorchrlReader`, with what TED asks for and a buffer need not have, without made-up root flags.

    The last step of an episode that was not finished becomes `truncated` and `done`, as in every dataset; its end
    reason says that the recording stops there. Where `terminated` or `truncated` is missing it follows from `done`, and
    where `episode` is missing it is the row of the episode table.
    """

    def __init__(self, path: Path, keys: TorchrlKeys | None = None) -> None:
        chosen = keys or TorchrlKeys()
        self._raw = TorchrlReader(path, chosen, frozenset(chosen.dones))
        self.path = path
        self._known = {field.key for field in self._raw.fields}
        shape = next((field.shape for field in self._raw.fields if field.key == NEXT_DONE), (1,))
        made = [Field(EPISODE, "int64", (), "id")] if EPISODE not in self._known else []
        if NEXT_DONE in self._known:
            lacking = [key for key in (NEXT_TERMINATED, NEXT_TRUNCATED) if key not in self._known]
            made += [Field(key, "bool", shape, "done") for key in lacking]
        self.manifest = replace(self._raw.manifest, fields=(*self._raw.fields, *made))

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.path, self._raw.keys)

    @cached_property
    def episodes(self) -> EpisodeTable:
        """The episodes as the done flags tell them, with the numbers that the rows name."""
        columns = self._raw.episodes.columns()
        lacking = np.isin(columns["start"] + columns["length"] - 1, self._unfinished)
        truncated = columns["truncated"] | lacking
        return EpisodeTable.from_columns(columns | {"truncated": truncated, "episode": self._numbers(columns["start"])})

    @property
    def episode_text(self) -> list[dict[str, str]] | None:
        """TorchRL keeps none."""
        return None

    def read(self, key: Key, start: int, stop: int) -> Array:
        """Read rows of one TED leaf."""
        leaf = self._leaf(key, start, stop)
        if key == EPISODE and key not in self._known:
            return np.searchsorted(self._ends, np.arange(start, stop)).astype(np.int64)
        if key in self._known:
            rows = self._raw.read(key, start, stop)
        else:
            other = NEXT_TRUNCATED if key == NEXT_TERMINATED else NEXT_TERMINATED
            rows = self._raw.read(NEXT_DONE, start, stop) != 0
            if other in self._known:
                rows &= self._raw.read(other, start, stop).reshape(rows.shape) == 0
            elif key == NEXT_TRUNCATED:
                rows = np.zeros((stop - start, *leaf.shape), bool)
        if key in {NEXT_DONE, NEXT_TRUNCATED}:
            low, high = np.searchsorted(self._unfinished, (start, stop))
            rows[self._unfinished[low:high] - start] = True
        return rows

    def pieces(self, key: Key, start: int, stop: int) -> Iterator[Array]:
        """Yield rows of one TED leaf."""
        yield self.read(key, start, stop)

    def documents(self) -> dict[str, bytes]:
        """TorchRL keeps none."""
        return {}

    def verify_files(self) -> None:
        """There are no digests to compare with."""

    def close(self) -> None:
        """Close what is open."""
        self._raw.close()

    @cached_property
    def _ends(self) -> Array:
        table = self._raw.episodes
        ends: Array = table.start + table.length - 1
        return ends

    @cached_property
    def _unfinished(self) -> Array:
        """The last steps of episodes that no flag ends."""
        if NEXT_DONE not in self._known or self._raw.keys.done != DONE:
            return np.empty(0, np.int64)
        unfinished: Array = self._ends[~self._raw.flagged]
        return unfinished

    def _numbers(self, starts: Array) -> Array:
        """What the rows call the episodes; their places in the table if that is not one number for each."""
        places = np.arange(len(starts))
        field = next((field for field in self._raw.fields if field.key == EPISODE), None)
        if field is None or field.shape or "int" not in field.dtype:
            return places
        numbers = np.concatenate([self._raw.read(EPISODE, int(start), int(start) + 1) for start in starts])
        return numbers.astype(np.int64) if len(np.unique(numbers)) == len(numbers) else places
