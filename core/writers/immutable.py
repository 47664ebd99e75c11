"""The writer of what must not be written."""

from __future__ import annotations

from typing import Any, ClassVar, NoReturn

from .base import Writer

__all__ = ["ImmutableDatasetWriter"]


class ImmutableDatasetWriter(Writer):
    """Refuses every write, and emptying: SchemaError (a RuntimeError), with nothing changed. It has no state.

    Buffers on datasets have it.

    >>> ImmutableDatasetWriter().add(0)
    Traceback (most recent call last):
    ...
    rbtool.core.errors.SchemaError: This dataset doesn't allow writing.
    hint: copy the rows into a buffer of your own
    """

    writes: ClassVar[bool] = False

    def place(self, data: Any, count: int, capacity: int) -> NoReturn:
        """Never called: nothing can be written."""
        raise NotImplementedError

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"
