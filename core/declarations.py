"""What formats there are: each is declared by a module of `rbtool.converters` whose name ends in `_format`.

The one place where core reaches up to `rbtool.converters`. Declarations are read when the command line starts, so they
import nothing.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from dataclasses import dataclass
from typing import Literal

__all__ = ["FormatDeclaration", "declared", "declared_sources", "source_example"]

_PACKAGE = "rbtool.converters"


@dataclass(frozen=True, slots=True)
class FormatDeclaration:
    """A format: `reader`, `source` and `sink` are `module:Class`, inside `rbtool.converters`, where there is one.

    `order` is its place in lists. `written` says what an export is; `opened` has what is added to its path, and a line
    of Python that opens it, with `{}` for the path.
    """

    name: str
    order: int
    reader: str | None = None
    source: str | None = None
    sink: str | None = None
    written: str = ""
    opened: tuple[str, str] = ("", "")

    def target(self, kind: Literal["reader", "source", "sink"]) -> str | None:
        """The class of that kind as `module:Class` with the full name of the module; None where there is none."""
        found = {"reader": self.reader, "source": self.source, "sink": self.sink}[kind]
        return None if found is None else f"{_PACKAGE}.{found}"


@functools.cache
def declared() -> tuple[FormatDeclaration, ...]:
    """All declarations of this package, in their order."""
    package = importlib.import_module(_PACKAGE)
    modules = [found.name for found in pkgutil.iter_modules(package.__path__) if found.name.endswith("_format")]
    found: list[FormatDeclaration] = [importlib.import_module(f"{_PACKAGE}.{name}").DECLARATION for name in modules]
    return tuple(sorted(found, key=lambda one: (one.order, one.name)))


def source_example() -> str:
    """The name of the first source, for examples in help and hints."""
    return next(one.name for one in declared() if one.source is not None)


def declared_sources() -> str:
    """The names of all sources, for help."""
    return ", ".join(one.name for one in declared() if one.source is not None)
