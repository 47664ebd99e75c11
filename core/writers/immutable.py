"""The writer of what must not be written."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, NoReturn

from ..errors import SchemaError
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

    def add(self, data: Any) -> NoReturn:
        """Refuse."""
        self._refuse()

    def extend(self, data: Any) -> NoReturn:
        """Refuse."""
        self._refuse()

    def _empty(self, empty_write_count: bool = True) -> NoReturn:
        self._refuse()

    def go_on_behind(self) -> None:
        """Nothing is ever written."""

    def _refuse(self) -> NoReturn:
        raise SchemaError("This dataset doesn't allow writing.", hint="copy the rows into a buffer of your own")

    def state_dict(self) -> dict[str, Any]:
        """Return the state: there is none."""
        return {}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over a state; SchemaError for one that is not empty."""
        if state_dict:
            raise SchemaError(f"{type(self).__name__} has no state, found {', '.join(map(str, state_dict))}")

    def dumps(self, path: str | os.PathLike[str]) -> None:
        """Write nothing."""

    def loads(self, path: str | os.PathLike[str]) -> None:
        """Read nothing."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"
