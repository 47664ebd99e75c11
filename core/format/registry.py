"""Finds readers, sources and export formats by name: those that are declared here, then those of other packages."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Literal, TypeVar

from ..declarations import declared
from ..errors import DatasetNotFoundError, FormatError, UsageError, did_you_mean
from .reader import Reader
from .sinks import Sink
from .sources import Source

__all__ = [
    "open_source",
    "reader_class",
    "reader_names",
    "sink_class",
    "sink_names",
    "source_class",
    "source_names",
]

_Contract = TypeVar("_Contract")


def _targets(kind: Literal["reader", "source", "sink"]) -> dict[str, str]:
    from importlib.metadata import entry_points  # 10 ms that a command which converts nothing need not wait for

    built_in = {one.name: target for one in declared() if (target := one.target(kind)) is not None}
    plugged = {entry.name: entry.value for entry in entry_points(group=f"rbtool.{kind}s") if entry.name not in built_in}
    return built_in | dict(sorted(plugged.items()))


def _load(target: str, contract: type[_Contract]) -> type[_Contract]:
    module, _, attribute = target.partition(":")
    found = getattr(importlib.import_module(module), attribute)
    if not (isinstance(found, type) and issubclass(found, contract)):
        raise FormatError(f"{target} is no {contract.__name__}")
    return found


def reader_names() -> list[str]:
    """Names of all formats that can be read: ours first, then those that installed packages add."""
    return list(_targets("reader"))


def reader_class(name: str) -> type[Reader]:
    """Load the reader of one format."""
    targets = _targets("reader")
    if name not in targets:
        raise FormatError(f"no reader for format {name!r}; there are {', '.join(sorted(targets))}")
    return _load(targets[name], Reader)  # type: ignore[type-abstract]  # only asked for subclasses


def source_names() -> list[str]:
    """Names of all sources that datasets can be fetched from: ours first, then those that installed packages add."""
    return list(_targets("source"))


def source_class(name: str) -> type[Source]:
    """Load the source of that name; raise UsageError for one that is not known."""
    targets = _targets("source")
    if name not in targets:
        meant = did_you_mean(name, targets)
        raise UsageError(f"source {name!r} is unknown{meant}", hint=f"known are {', '.join(sorted(targets))}")
    return _load(targets[name], Source)  # type: ignore[type-abstract]


def sink_names() -> list[str]:
    """Names of all formats that can be written: ours first, then those that installed packages add."""
    return list(_targets("sink"))


def sink_class(name: str) -> type[Sink]:
    """Load what writes one format; raise UsageError for one that is not known."""
    targets = _targets("sink")
    if name not in targets:
        raise UsageError(f"there is no format {name!r} to export to", hint=f"take one of {', '.join(targets)}")
    return _load(targets[name], Sink)  # type: ignore[type-abstract]


def open_source(path: Path, *, final_step: str = "auto") -> Reader:
    """Open a dataset in whatever known format is at `path`, recognised by its content; `final_step` as for `Reader`."""
    if not path.exists():
        raise DatasetNotFoundError(f"there is nothing at {path}")
    for name in reader_names():
        reader = reader_class(name)
        if reader.recognises(path):
            return reader(path, final_step=final_step)
    raise FormatError(f"{path} is in no format that is known here ({', '.join(reader_names())})")
