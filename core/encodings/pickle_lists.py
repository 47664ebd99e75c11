"""Packs lists of numbers in a pickle as arrays: loaded by `pickle_worker`, so only the standard library is imported."""

from __future__ import annotations

import sys
from array import array

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

_DEEPEST = 8
_MOST = 1 << 24
_EXACT = 1 << 53
_ORDER = "<" if sys.byteorder == "little" else ">"
_CODES = {float: ("d", "f8"), int: ("q", "i8"), bool: ("B", "b1")}


class Numbers:
    """An array: the text of its element type, its shape, and its bytes in C order; `python` if it was a list."""

    __slots__ = ("data", "kind", "python", "shape")

    def __init__(self, kind: str, shape: tuple[int, ...], data: Any, python: bool = True) -> None:
        self.kind, self.shape, self.data, self.python = kind, shape, data, python


def packed(value: Any, built: type) -> Numbers | None:
    """Return a list of numbers, or of lists of as many numbers each, as an array; None for any other list.

    `built` is the class of the arrays in it; those of one form are stacked. A list of integers that 64 bits do not
    hold, and one of flags and other numbers, is not packed.
    """
    kinds = set(map(type, value))
    if len(kinds) == 1 and not kinds.isdisjoint(_CODES):
        return _numbers((len(value),), value, kinds.pop())
    found = _leaves(value, built, 0)
    if found is None:
        return None
    shape, leaves = found
    kinds = set(map(type, leaves))
    if kinds == {built}:
        return _stacked(shape, leaves)
    if kinds == {int, float} and all(type(leaf) is float or abs(leaf) <= _EXACT for leaf in leaves):
        kinds = {float}
    if len(kinds) != 1 or not kinds <= _CODES.keys():
        return None
    return _numbers(shape, leaves, kinds.pop())


def _numbers(shape: tuple[int, ...], leaves: Sequence[Any], kind: type) -> Numbers | None:
    code, name = _CODES[kind]
    try:
        return Numbers(_ORDER + name, shape, memoryview(array(code, leaves)).cast("B"))
    except OverflowError:
        return None


def _leaves(value: Sequence[Any], built: type, depth: int) -> tuple[tuple[int, ...], list[Any]] | None:
    """Return the shape of nested lists and the values in them; None where they are ragged or empty."""
    kinds = set(map(type, value))
    if not kinds or depth == _DEEPEST:
        return None
    if kinds <= {list, tuple}:
        first = _leaves(value[0], built, depth + 1)
        if first is None or len(value) * len(first[1]) > _MOST:  # the same list may be in it a million times
            return None
        parts = [first, *(_leaves(part, built, depth + 1) for part in value[1:])]
        if any(part is None or part[0] != first[0] for part in parts):
            return None
        return (len(value), *first[0]), [leaf for part in parts if part is not None for leaf in part[1]]
    if kinds == {built} or kinds <= _CODES.keys():
        return (len(value),), list(value)
    return None


def _stacked(shape: tuple[int, ...], arrays: Sequence[Any]) -> Numbers | None:
    first = arrays[0]
    form = str(first.kind), first.shape
    if first.kind.kind == "O" or any((str(one.kind), one.shape) != form or one.fortran for one in arrays):
        return None
    return Numbers(form[0], (*shape, *first.shape), memoryview(b"".join(one.data for one in arrays)), python=False)
