"""The documents of observation and action spaces, as Minari and gymnasium write them and manifests keep them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, TypeAlias

import numpy as np

from ..errors import FormatError
from .decoding import Check, Count, decode

__all__ = ["is_space", "require_space"]

_ELEMENTS = 1 << 31
"""No row of a dataset is larger."""


def _is_bound(value: Any) -> bool:
    """Tell whether this is a number, or lists of numbers that nest evenly; infinities may be words."""
    try:
        array = np.asarray(value)
        return array.dtype.kind in "biuf" or len(list(_numbers(value))) == array.size
    except (ValueError, TypeError, OverflowError):
        return False


def _numbers(value: Any) -> Iterator[float]:
    if isinstance(value, list | tuple):
        for part in value:
            yield from _numbers(part)
    elif isinstance(value, str) and value not in ("inf", "-inf", "nan"):
        raise ValueError(f"{value!r} is no number")
    else:
        yield float(value)


def _are_whole(value: Any) -> bool:
    try:
        return np.asarray(value).dtype.kind in "iu" or value == []
    except ValueError:
        return False


def _is_type(name: str) -> bool:
    try:
        return np.dtype(name).kind in "biufc"
    except (TypeError, ValueError):
        return False


_Type: TypeAlias = Annotated[str, Check("an element type", _is_type)]
_Shape: TypeAlias = Annotated[
    tuple[Count, ...],
    Check("a shape", lambda shape: len(shape) <= 32 and math.prod(max(1, size) for size in shape) < _ELEMENTS),
]
_Bound: TypeAlias = Annotated[Any, Check("a number, or lists of numbers", _is_bound)]
_Wholes: TypeAlias = Annotated[Any, Check("a whole number, or lists of them", _are_whole)]


@dataclass(frozen=True, slots=True)
class _Space:
    """The entries of all types of spaces; which of them a type needs is known where the space is used."""

    type: str
    dtype: _Type | None = None
    shape: _Shape | None = None
    low: _Bound | None = None
    high: _Bound | None = None
    n: Count | _Shape | None = None
    nvec: _Wholes | None = None
    start: _Wholes | None = None
    min_length: Count | None = None
    max_length: Count | None = None
    subspaces: Mapping[str, Any] | tuple[Any, ...] | None = None


def require_space(document: Any, origin: str) -> None:
    """Raise FormatError, which names `origin`, for what is no document of a space: one schema for all who read them.

    A subspace may be null.
    """
    space = decode(_Space, document, origin)
    for name in ("low", "high"):
        bound = np.shape(document.get(name) or 0)
        if space.type == "Box" and space.shape is not None and bound not in {(), space.shape}:
            raise FormatError(f"{origin} has a Box of shape {list(space.shape)} whose {name} is of {list(bound)}")
    children = () if space.subspaces is None else space.subspaces
    if space.type == "Dict" and not isinstance(children, Mapping):
        raise FormatError(f"{origin} has a Dict whose subspaces are a list, an object is expected")
    named: Iterable[tuple[object, Any]] = children.items() if isinstance(children, Mapping) else enumerate(children)
    for place, child in named:
        if child is not None:
            require_space(child, f"{origin}, at {place},")


def is_space(document: Any) -> bool:
    """Tell whether this is the document of a space, or null."""
    try:
        if document is not None:
            require_space(document, "")
    except FormatError:
        return False
    return True
