"""How the paths of a pickle end: by the flags of their last rows, where they have flags."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ...core.encodings.pickles import PickledArray
from ...core.errors import FormatError
from ...core.format.contracts import Array
from ..files.end_meaning import EndMeaning, meaning_of_ends, refuse_ends

TERMINALS, TIMEOUTS = "terminals", "timeouts"
FLAGS = (TERMINALS, TIMEOUTS)
_BLOCK_ROWS = 1 << 20


@dataclass(frozen=True, slots=True)
class PathFlags:
    """One flag of all paths: whether the last row of each has it, and how many of the rows before have it."""

    last: Sequence[bool]
    before: int


class PathEnds:
    """The ends of all paths: `terminated` and `truncated` of each.

    A path without a flag in its last row is truncated where `terminals` are stored; else it ends as `--ends` states.
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
            options, "truncated", "nothing states how an episode ends: a demonstration stops there"
        )  # fmt: skip

    def notes(self) -> Iterator[str]:
        """Sentences on ends that no flag states, and on flags inside paths."""
        if self._meaning.note:
            yield self._meaning.note
        for name, flag in self._flags.items():
            if flag.before:
                steps = "1 step" if flag.before == 1 else f"{flag.before:,} steps"
                yield f"{name} are set in {steps} inside paths, and end nothing there: next.info.{name} has them"


def read_flags(
    path: Path, name: str, arrays: Sequence[PickledArray], rows: Callable[[PickledArray, int, int], Array]
) -> PathFlags:
    """Read one flag of all paths, whose `arrays` have a row a step. FormatError for other rows than numbers."""
    last: list[bool] = []
    before = 0
    for number, array in enumerate(arrays):
        if not len(array):
            last.append(False)
            continue
        if array.dtype.kind not in "biuf" or int(np.prod(array.shape[1:])) != 1:
            raise FormatError(
                f"{path}: {name!r} of path {number} has no flag a row ({array.dtype} {list(array.shape)})"
            )
        is_last = False
        for start in range(0, len(array), _BLOCK_ROWS):
            found = rows(array, start, min(start + _BLOCK_ROWS, len(array))).reshape(-1) != 0
            before += int(found.sum())
            is_last = bool(found[-1])
        before -= is_last
        last.append(is_last)
    return PathFlags(last, before)
