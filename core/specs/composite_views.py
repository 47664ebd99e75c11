"""What `keys()`, `values()` and `items()` of a Composite return."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeAlias, TypeVar

from .base import TensorSpec

if TYPE_CHECKING:
    from .composite_entries import SpecEntries

__all__ = ["Entry", "Key", "Selection", "View", "as_path"]

Key: TypeAlias = str | tuple[str, ...]
Entry: TypeAlias = TensorSpec | None

_Item = TypeVar("_Item", covariant=True)


def as_path(key: Any) -> tuple[str, ...] | None:
    """Return the names a key goes through, or None for what is no key; tuples may be nested."""
    if isinstance(key, str):
        return (key,)
    if not isinstance(key, tuple) or not key:
        return None
    parts = [as_path(part) for part in key]
    return None if None in parts else tuple(name for part in parts if part for name in part)


@dataclass(frozen=True, slots=True)
class Selection:
    """Which entries of a Composite are looked at."""

    include_nested: bool = False
    leaves_only: bool = False
    is_leaf: Callable[[type], bool] | None = None
    step_mdp_static_only: bool = False

    def entries(
        self, spec: SpecEntries, prefix: tuple[str, ...] = (), static: bool = False
    ) -> Iterator[tuple[Key, Entry]]:
        """Yield keys and specs, a Composite before what is in it."""
        for name, entry in spec._specs.items():
            nested = self._is_nested(entry)
            fixed = static or bool(getattr(entry, "step_mdp_static", False))
            path = (*prefix, name)
            if not (nested and self.leaves_only) and (fixed or not self.step_mdp_static_only):
                yield (path if len(path) > 1 else name), entry
            if nested and self.include_nested:
                yield from self.entries(entry, path, fixed)  # type: ignore[arg-type]

    def _is_nested(self, entry: Entry) -> bool:
        if entry is None or entry.domain != "composite":
            return False
        return self.is_leaf is None or not self.is_leaf(type(entry))


class View(Generic[_Item]):
    """A live look at the keys, the specs or both of a Composite, as a dict gives."""

    def __init__(self, spec: SpecEntries, selection: Selection, pick: Callable[[Key, Entry], _Item]) -> None:
        self._spec = spec
        self._selection = selection
        self._pick = pick

    def __iter__(self) -> Iterator[_Item]:
        return (self._pick(key, entry) for key, entry in self._selection.entries(self._spec))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __contains__(self, item: object) -> bool:
        path = as_path(item)
        if path is not None:
            item = path if len(path) > 1 else path[0]
        return any(item is found or item == found for found in self)

    def __eq__(self, other: object) -> bool:
        """Compare as sets of keys are compared."""
        if not hasattr(other, "__iter__") or not hasattr(other, "__len__"):
            return NotImplemented
        found = list(self)
        return len(found) == len(other) and all(item in found for item in other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({list(self)!r})"
