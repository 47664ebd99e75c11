"""The declared formats: each package in `rbtool.converters` lists its own in `FORMATS`.

The one module of core that imports from `rbtool.converters`. The command line reads all declarations when it starts,
so that the packages themselves must import nothing else.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from dataclasses import dataclass
from typing import Literal

__all__ = ["FormatDeclaration", "declared", "declared_sources", "source_example"]

_CONVERTERS = "rbtool.converters"


@dataclass(frozen=True, slots=True)
class FormatDeclaration:
    """A format: `reader`, `source` and `sink` are `module:Class` inside `package`, None where there is none.

    `order` is its position in lists. `written` describes an export; `opened` has what follows its path, and a line of
    Python that opens it, with `{}` for the path.
    """

    name: str
    package: str
    order: int
    reader: str | None = None
    source: str | None = None
    sink: str | None = None
    written: str = ""
    opened: tuple[str, str] = ("", "")

    def target(self, kind: Literal["reader", "source", "sink"]) -> str | None:
        """The class of that kind as `module:Class` with the full name of the module; None where there is none."""
        found = {"reader": self.reader, "source": self.source, "sink": self.sink}[kind]
        return None if found is None else f"{self.package}.{found}"


@functools.cache
def declared() -> tuple[FormatDeclaration, ...]:
    """All declarations of this package, in their order."""
    converters = importlib.import_module(_CONVERTERS)
    packages = [found.name for found in pkgutil.iter_modules(converters.__path__) if found.ispkg]
    found: list[FormatDeclaration] = []
    for name in packages:
        found += importlib.import_module(f"{_CONVERTERS}.{name}").FORMATS
    return tuple(sorted(found, key=lambda one: (one.order, one.name)))


def source_example() -> str:
    """The name of the first source, for examples in help and hints."""
    return next(one.name for one in declared() if one.source is not None)


def declared_sources() -> str:
    """The names of all sources, for help."""
    return ", ".join(one.name for one in declared() if one.source is not None)
