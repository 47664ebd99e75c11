"""Text and other values that are not tensors: as bytes in columns of a storage, and as NonTensorStacks."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack

from ..errors import CorruptDataError, SchemaError


class Values(NonTensorStack):
    """A NonTensorStack that makes its members when they are first used, from one value or from the rows of a column.

    Making a member takes as long as a row of tensors, and most batches are used without their members. Members are
    distinct objects, so that editing one does not change the others. Once they exist, this is a plain NonTensorStack.
    """

    @classmethod
    def of(cls, value: Any, shape: torch.Size, device: torch.device | None = None) -> Any:
        """Return a value for elements of this shape; a NonTensorData for an empty shape."""
        return cls._made(shape, value, None, device)

    @classmethod
    def of_rows(cls, rows: torch.Tensor, device: torch.device | None = None) -> Any:
        """Return the values whose bytes are in rows, uint8 `[..., width]`; a NonTensorData for a single row."""
        return cls._made(rows.shape[:-1], None, rows, device)

    @classmethod
    def _made(cls, shape: torch.Size, value: Any, rows: torch.Tensor | None, device: torch.device | None) -> Any:
        if not shape:
            return NonTensorData(value if rows is None else decoded(rows)[0], device=device)
        if not _INITIAL:
            return NonTensorStack(*_members(shape, value, rows, device))
        found = cls.__new__(cls)
        for name, initial in _INITIAL.items():
            setattr(found, name, initial)
        found._batch_size = shape
        found.contents = value, rows, device
        return found

    contents: tuple[Any, torch.Tensor | None, torch.device | None]
    """The value of all elements, or the rows that hold their bytes, and the device of the members."""

    def __getattr__(self, name: str) -> Any:  # only called for attributes that do not exist
        if name != "tensordicts":
            raise AttributeError(f"a {type(self).__name__} has no attribute {name!r}")
        members = _members(self._batch_size, *self.contents)
        self.__class__ = NonTensorStack
        return self.__dict__.setdefault(name, members)

    def __reduce__(self) -> tuple[Any, ...]:
        return Values._made, (self._batch_size, *self.contents)


def _members(
    shape: torch.Size, value: Any, rows: torch.Tensor | None, device: torch.device | None
) -> list[NonTensorStack | NonTensorData]:
    """Return the members of a stack of values."""
    inner = shape[1:]
    if inner or (rows is None and not isinstance(value, _SCALARS)):
        parts = [None] * shape[0] if rows is None else rows.unbind(0)
        return [Values._made(inner, value, part, device) for part in parts]
    found = decoded(rows) if rows is not None else [value] * shape[0]
    if not all(isinstance(one, _SCALARS) for one in found):
        return [NonTensorData(one, device=device) for one in found]
    members: list[Any] = NonTensorStack(*found).tensordicts  # five times as fast as one by one
    for member in members if device is not None else ():
        member._tensordict._device = device
    return members


_SCALARS = (str, int, float, type(None))


def _initial_stack() -> dict[str, Any]:
    """Return the attributes of a stack, without its members; empty if this version of tensordict works differently."""
    made = vars(NonTensorStack("a", "b"))
    rest = {name: value for name, value in made.items() if name not in ("tensordicts", "_batch_size")}
    hooks = dict.fromkeys(name for name in rest if name.strip("_") in ("hook_in", "hook_out"))
    return rest if rest == {"stack_dim": 0, "_is_locked": None} | hooks and len(made) == len(rest) + 2 else {}


_INITIAL = _initial_stack()


def values_of(data: Any, name: str) -> list[Any]:
    """Return the value of each element of a NonTensorData or a NonTensorStack, the last dimension running fastest.

    Raises:
        SchemaError: it is neither, or rows differ in length.
    """
    if isinstance(data, NonTensorData):
        return [data.data] * data.batch_size.numel()
    if not isinstance(data, NonTensorStack):
        raise SchemaError(f"{name} is a {type(data).__name__}, expected text or other values")
    if -1 in data.batch_size:
        raise SchemaError(
            f"{name} is a NonTensorStack of rows that differ in length, {list(data.batch_size)}",
            hint="a ListStorage or a LazyStackStorage keeps such rows",
        )
    parts = data.tensordicts if not data.stack_dim else data.unbind(0)
    return [value for part in parts for value in values_of(part, name)]


def shared_value(data: Any, name: str) -> list[Any]:
    """Return a list with the value that all elements have; an empty list if they differ, or there are no elements."""
    if type(data) is Values and data.contents[1] is None:
        return [data.contents[0]]
    if isinstance(data, NonTensorData):
        return [data.data]
    first, *others = values_of(data, name) or [None, ...]  # two different values for no elements
    return [first] if all(alike(first, other) for other in others) else []


def alike(one: Any, other: Any) -> bool:
    """Whether two values have the same type and are equal: 1, 1.0 and True are different values."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if type(one) in (list, tuple):
        return len(one) == len(other) and all(map(alike, one, other))
    if type(one) is dict:
        return one.keys() == other.keys() and all(alike(value, other[key]) for key, value in one.items())
    try:
        return bool(one == other)
    except (TypeError, ValueError, RuntimeError):  # arrays
        return False


def encoded(value: Any, name: str) -> bytes:
    """Return a value as bytes that do not end in NUL, which a column is padded with.

    None is no bytes, text is UTF-8, and any other value is NUL followed by JSON.

    Raises:
        SchemaError: JSON cannot hold the value.
    """
    if value is None:
        return b""
    if isinstance(value, str) and value and "\0" not in value:
        with contextlib.suppress(UnicodeEncodeError):  # half of a surrogate pair, which JSON can hold
            return value.encode()
    try:
        require_json(value)
    except SchemaError:
        raise SchemaError(
            f"{name} has a {type(value).__name__}, or one inside of a list or a dict; values that differ "
            "between rows are text, or other values that JSON has",
            hint="a ListStorage keeps any object",
        ) from None
    return b"\0" + json.dumps(value).encode()


def rows_of(data: Any, name: str) -> list[bytes]:
    """Return the bytes of each value of a NonTensorStack, or of the single value of a NonTensorData."""
    values = [data.data] if isinstance(data, NonTensorData) else values_of(data, name)
    return [encoded(value, name) for value in values]


def decoded(rows: torch.Tensor) -> list[Any]:
    """Return the values whose bytes, followed by NULs, are in rows, uint8 `[..., width]`."""
    bare = np.ascontiguousarray(rows.numpy(force=True))
    return [_decoded(row) for row in bare.view(f"S{bare.shape[-1]}").ravel().tolist()]


def _decoded(row: bytes) -> Any:
    if not row:
        return None
    try:
        return json.loads(row[1:]) if row[0] == 0 else row.decode()
    except ValueError as error:
        raise CorruptDataError(f"a row of text is damaged: {error}") from error


def column_of(rows: Sequence[bytes], width: int) -> torch.Tensor:
    """Return the bytes of rows, each padded with NULs, one after another: uint8 `[n * width]`."""
    return torch.from_numpy(np.array(rows, f"S{width}").view(np.uint8))


def width_of(rows: Sequence[bytes]) -> int:
    """Return the width of a column for these rows: a power of two, so that columns seldom have to be made wider."""
    return 1 << (max([_LEAST_WIDTH, *map(len, rows)]) - 1).bit_length()


_LEAST_WIDTH = 32


def require_json(value: Any) -> None:
    """Raise SchemaError unless JSON can hold the value."""
    if isinstance(value, list | dict):
        for item in [*value, *value.values()] if isinstance(value, dict) else value:
            require_json(item)
        if isinstance(value, dict) and not all(isinstance(key, str) for key in value):
            raise SchemaError(
                f"a constant is a dict with the keys {', '.join(map(str, value))}; only text can be saved as keys"
            )
    elif not (value is None or isinstance(value, str | bool | int | float)):
        raise SchemaError(
            f"a constant is a {type(value).__name__}; only text, numbers and lists and dicts of them can be saved",
            hint="rbtool never pickles data, so that loading never unpickles",
        )
