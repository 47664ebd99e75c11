"""Trajectories of the imitation library as columns, whatever holds them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ...core.errors import FormatError, SchemaError
from ...core.format.contracts import Array, Closing
from ...core.format.manifest import Dropped
from ...core.ted.schema import ACTION, REWARD, Field, Key, Role, Timing, dtype_name
from ..files.column_reader import EpisodeColumn

OBS, ACTS, REWS, TERMINAL, INFOS = "obs", "acts", "rews", "terminal", "infos"
TIME_LIMIT = "TimeLimit.truncated"
"""What gym puts in the infos of a step that reaches the time limit."""
PLACES: dict[str, tuple[Key, Role, Timing]] = {
    OBS: (("observation",), "observation", "state"),
    ACTS: (ACTION, "action", "step"),
    REWS: (REWARD, "reward", "result"),
}


class Trajectories(Closing):
    """The trajectories of a file or a folder: `lengths` in steps, `terminal` and `limits` of each.

    `limits` states whether infos mark its last step as the time limit, None where they are not known.
    """

    path: Path
    columns: Sequence[EpisodeColumn]
    lengths: list[int]
    terminal: list[bool]
    limits: list[bool] | None = None
    dropped: Sequence[Dropped] = ()

    @abstractmethod
    def files(self) -> list[Path]:
        """The files that are read."""

    def verify_read(self) -> None:
        """Raise CorruptDataError if what was read has another checksum than is stated of it, where there is one."""


def field_of(path: Path, name: str, dtype: np.dtype[Any], shape: Sequence[int]) -> tuple[Field, Timing]:
    """Return the field of a column; FormatError for elements that are no numbers, or more than one reward a step."""
    key, role, timing = PLACES[name]
    try:
        element = dtype_name(dtype)
    except (SchemaError, TypeError) as error:
        raise FormatError(f"{path}: {name!r} has elements of type {dtype}, which are no numbers") from error
    if name == REWS and tuple(shape):
        raise FormatError(f"{path}: rews have rows of shape {list(shape)}, expected one number")
    return Field(key, element, tuple(shape), role), timing


def numbers_of(name: str, values: Sequence[Any]) -> Array | str:
    """Return one value a row as an array, or why it cannot be one."""
    try:
        array = np.array(values)
    except ValueError:
        return "its values have different shapes"
    if array.dtype.kind not in "biuf":
        return f"its values are {'text' if array.dtype.kind in 'US' else 'no numbers'}"
    return array
