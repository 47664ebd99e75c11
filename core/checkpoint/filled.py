"""What a checkpoint says of the storage that its rows filled, so that every row comes back to its place."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import CorruptDataError

__all__ = ["STORAGE", "FilledStorage"]

STORAGE = "storage"
"""What the manifest of a storage's checkpoint names as its source."""


@dataclass(frozen=True, slots=True)
class FilledStorage:
    """A storage of `shape`: its valid rows, then the other dimensions that count elements.

    `capacity` counts elements there is room for. `cursor` is the row behind the one that was written last, and None
    where nobody knows. `structure` says how the data is made, None for plain nested dictionaries.
    """

    shape: tuple[int, ...]
    capacity: int
    cursor: int | None
    structure: Mapping[str, Any] | None = None

    @classmethod
    def of_dataset(cls, steps: int) -> FilledStorage:
        """The storage that a dataset fills to the last row; the next write goes to row 0."""
        return cls((steps,), steps, 0)

    @property
    def length(self) -> int:
        """The number of valid elements."""
        return math.prod(self.shape)

    @property
    def rows(self) -> int:
        """How many rows there is room for."""
        return self.capacity // max(math.prod(self.shape[1:]), 1)

    @property
    def full(self) -> bool:
        """Whether the next row takes the place of an older one."""
        return self.length >= self.capacity

    @property
    def oldest(self) -> int:
        """The row that was written first of those that are valid; the rows before it are newer than all others."""
        return self.cursor or 0 if self.full else 0

    @property
    def last_row(self) -> int | None:
        """The row that was written last."""
        if self.cursor is None or not self.shape[0] or (self.cursor == 0 and not self.full):
            return None
        return (self.cursor or self.shape[0]) - 1

    def to_bytes(self) -> bytes:
        """The document as it is written: what TorchRL writes, and the rest."""
        document = {
            "metadata": {}, "is_pytree": False, "len": self.length, "cursor": self.cursor,
            "capacity": self.capacity, "shape": self.shape,
        }  # fmt: skip
        return json.dumps(document | ({} if self.structure is None else {"structure": self.structure})).encode()

    @classmethod
    def from_document(cls, document: Any, steps: int, origin: str) -> FilledStorage:
        """Undo `to_bytes` for a checkpoint of so many steps, or raise CorruptDataError; `origin` names it there."""
        try:
            found = cls(
                tuple(map(_count, document["shape"])), _count(document["capacity"]),
                None if document["cursor"] is None else _count(document["cursor"]), document.get("structure"),
            )  # fmt: skip
            lengths = {found.length, _count(document["len"])}
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise CorruptDataError(f"{origin} does not describe a storage: {error!r}") from error
        last = found.shape[0] - found.full if found.shape else -1
        inside = found.cursor is None or found.cursor <= max(last, 0)
        if lengths != {steps} or not found.shape or found.capacity < steps or not inside:
            raise CorruptDataError(
                f"{origin} says that {list(found.shape)} of {found.capacity:,} elements are filled and row "
                f"{found.cursor} is next, which does not fit {steps:,} steps"
            )
        return found


def _count(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is no count")
    return value
