"""Finds the reader of a format by name. The one place where core reaches up to `rbtool.converters`."""

from __future__ import annotations

import importlib
from pathlib import Path

from ..errors import DatasetNotFoundError, FormatError
from .contracts import Reader

__all__ = ["open_source", "reader_class", "reader_names"]

_BUILT_IN = {"minari": "rbtool.converters.minari:MinariReader"}
_GROUP = "rbtool.readers"


def _targets() -> dict[str, str]:
    from importlib.metadata import entry_points  # 10 ms that a command which converts nothing need not wait for

    plugged = {entry.name: entry.value for entry in entry_points(group=_GROUP) if entry.name not in _BUILT_IN}
    return _BUILT_IN | dict(sorted(plugged.items()))


def reader_names() -> list[str]:
    """Names of all formats that can be read: ours first, then those that installed packages add."""
    return list(_targets())


def reader_class(name: str) -> type[Reader]:
    """Load the reader of one format."""
    targets = _targets()
    if name not in targets:
        raise FormatError(f"no reader for format {name!r}; there are {', '.join(sorted(targets))}")
    module, _, attribute = targets[name].partition(":")
    found = getattr(importlib.import_module(module), attribute)
    if not (isinstance(found, type) and issubclass(found, Reader)):
        raise FormatError(f"{targets[name]} is no Reader")
    return found


def open_source(path: Path) -> Reader:
    """Open a dataset in whatever known format lies at `path`, recognised by its content."""
    if not path.exists():
        raise DatasetNotFoundError(f"there is nothing at {path}")
    for name in reader_names():
        reader = reader_class(name)
        if reader.recognises(path):
            return reader(path)
    raise FormatError(f"{path} is in no format that is known here ({', '.join(reader_names())})")
