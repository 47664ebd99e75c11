"""Many steps or episodes in little memory: sequences of numbers, or of ranges, that are arrays inside."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias, overload

import numpy as np

_Array: TypeAlias = np.ndarray[Any, Any]
_AT_ONCE = 1 << 14


class Places(Sequence[Any]):
    """A sequence of whole numbers, of an array `int64 [N]`, or of half-open ranges as pairs, of `int64 [N, 2]`.

    It takes 8 bytes a number, is equal to any sequence of the same numbers or pairs, and writes itself as JSON piece by
    piece.
    """

    __slots__ = ("_numbers",)

    def __init__(self, numbers: _Array) -> None:
        self._numbers = np.asarray(numbers, np.int64)

    def __len__(self) -> int:
        return len(self._numbers)

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> Places: ...
    def __getitem__(self, index: int | slice) -> Any:
        found = self._numbers[index]
        return Places(found) if isinstance(index, slice) else _item(found.tolist())

    def __iter__(self) -> Iterator[Any]:
        for part in self._parts():
            yield from map(_item, part)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Places):
            return np.array_equal(self._numbers, other._numbers)
        if not isinstance(other, Sequence) or len(other) != len(self):
            return NotImplemented if not isinstance(other, Sequence) else False
        return all(one == another for one, another in zip(self, other, strict=True))

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        shown = ", ".join(map(repr, self[:10]))
        return f"Places({shown}{f', … of {len(self):,}' if len(self) > 10 else ''})"

    def __reduce__(self) -> tuple[Any, ...]:
        return Places, (self._numbers,)

    def tolist(self) -> list[Any]:
        """Return the numbers, or the pairs as lists, as JSON has them."""
        return list(self._numbers.tolist())

    def json_pieces(self) -> Iterator[str]:
        """Yield the JSON text, some thousands of entries at a time."""
        yield "["
        for number, part in enumerate(self._parts()):
            yield f"{', ' if number else ''}{json.dumps(part)[1:-1]}"
        yield "]"

    def _parts(self) -> Iterator[list[Any]]:
        for start in range(0, len(self), _AT_ONCE):
            yield self._numbers[start : start + _AT_ONCE].tolist()


def _item(found: Any) -> Any:
    return tuple(found) if isinstance(found, list) else found
