"""Texts of episodes that differ from row to row, in JSON: tasks, and LeRobot's language.

    language_instructions  {"0": "pick", "3": "place"}  the tasks of an episode that has several, by `task_index`
    language_persistent    [...]                        language of all rows of an episode
    language_events        {"12": [...]}                language of single rows, by `frame`
                           {"0.3s:0.4s": [...]}         by `timestamp`, after a change of rate: after 0.3 s up to 0.4 s

Language is a list of objects with `role`, `content`, `style`, `camera` and `tool_calls`; persistent language also has
the `timestamp` from which it applies.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np

from ..errors import CorruptDataError
from .contracts import Array
from .documents import parse_json

TASK = "language_instruction"
TASKS = f"{TASK}s"
PERSISTENT, EVENTS = "language_persistent", "language_events"


def tasks_of(text: Mapping[str, str]) -> list[str]:
    """Return the tasks of an episode, given its texts."""
    if TASK in text:
        return [text[TASK]]
    several = parse_json(text.get(TASKS, "[]"), TASKS)
    return list(map(str, several.values() if isinstance(several, dict) else several))


Said: TypeAlias = Mapping[int | tuple[float, float] | None, list[Any]]
"""Language by frame, by a range of time stamps (after the first, up to the second), or for all rows (None)."""


def parse_said(text: str, name: str) -> Said:
    """Parse the text of that name; CorruptDataError if it is not in the form of LeRobot's language."""
    found: Any = parse_json(text, name)
    if isinstance(found, list):
        return {None: found}
    try:
        return {_rows_of(key): [*value] for key, value in found.items()}
    except (AttributeError, TypeError, ValueError):
        raise CorruptDataError(f"the text {name} of an episode is not LeRobot's language: {text[:80]!r}") from None


def _rows_of(key: str) -> int | tuple[float, float]:
    if ":" not in key:
        return int(key)
    low, high = (float(part.removesuffix("s")) for part in key.split(":"))
    return low, high


def said_in_rows(said: Said, frames: Array, times: Array) -> list[list[Any]]:
    """Return the language of each of some rows of an episode, given their `frame` and their `timestamp`, `[n]`."""
    if None in said:
        return [said[None]] * len(frames)
    found, times = [said.get(frame, []) for frame in frames.tolist()], np.asarray(times, np.float64)
    for at, value in said.items():
        if isinstance(at, tuple):
            for row in np.flatnonzero((at[0] < times) & (times <= at[1])).tolist():
                found[row] = found[row] + value
    return found
