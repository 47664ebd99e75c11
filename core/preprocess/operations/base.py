"""What an operation is: a line of a program, which becomes a step once the fields that reach it are known."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from ...format import EpisodeTable
from ...ted import Field, Key
from .fields import Fields
from .lazy import LazyBatch, LazyColumn

__all__ = ["BoundFieldOperation", "BoundOperation", "Derivation", "EpisodeChoice", "Operation", "RowOperation"]


@dataclass(frozen=True)
class Operation(ABC):
    """One operation and its arguments. Two that are equal do the same, and `describe` says all there is to say."""

    name: ClassVar[str]
    """What options, pipeline files and manifests call it."""

    def describe(self) -> dict[str, Any]:
        """Return it as JSON: its name, and its arguments where they are given."""
        arguments = {part.name: getattr(self, part.name) for part in dataclasses.fields(self)}
        return {
            "name": self.name,
            **{name: list(value) if isinstance(value, tuple) else value for name, value in arguments.items()
               if value is not None and value != ()},
        }  # fmt: skip


class EpisodeChoice(Operation):
    """Chooses episodes before any row is read, by what the episode table says."""

    @abstractmethod
    def keeps(self, table: EpisodeTable) -> Any:
        """Tell of each episode whether it takes part, bool `[episodes]`; UsageError where it asks for none there is."""


class RowOperation(Operation):
    """Does something to rows."""

    whole_episodes: ClassVar[bool] = False
    """Whether it has to see all rows of an episode at once."""

    @abstractmethod
    def bind(self, fields: Fields) -> BoundOperation:
        """Work out what it does to these fields. UsageError for what makes no sense with them."""


class BoundOperation(ABC):
    """An operation that knows which fields reach it; `after` are those that leave it."""

    def __init__(self, after: Fields) -> None:
        self.after = after

    @abstractmethod
    def needs(self, wanted: frozenset[Key]) -> frozenset[Key]:
        """Name the fields that have to reach it for these to leave it."""

    @abstractmethod
    def apply(self, batch: LazyBatch, wanted: frozenset[Key]) -> None:
        """Do it to some rows, of which the fields of `needs(wanted)` are there."""


@dataclass(frozen=True, slots=True)
class Derivation:
    """How a field comes of others, row by row: `compute` gets them in the order of `inputs`."""

    inputs: tuple[Key, ...]
    compute: Callable[[Sequence[LazyColumn]], LazyColumn]


class BoundFieldOperation(BoundOperation):
    """A step in which rows stay rows, and some fields are derived from others."""

    def __init__(self, after: Fields, derived: Mapping[Key, Derivation]) -> None:
        super().__init__(after)
        self._derived = derived

    @classmethod
    def changing(
        cls,
        before: Fields,
        keys: Iterable[Key],
        field: Callable[[Field], Field],
        compute: Callable[[Field, LazyColumn], LazyColumn],
    ) -> BoundFieldOperation:
        """Change the values of some fields: `field` says what each becomes, `compute` does it."""
        chosen = [before[key] for key in keys]
        derived = {old.key: Derivation((old.key,), partial(_of_one, compute, old)) for old in chosen}
        return cls(before.replaced({old.key: field(old) for old in chosen}), derived)

    def needs(self, wanted: frozenset[Key]) -> frozenset[Key]:
        direct = {key for key in wanted if key not in self._derived}
        return frozenset(direct.union(*(self._derived[key].inputs for key in wanted - direct)))

    def apply(self, batch: LazyBatch, wanted: frozenset[Key]) -> None:
        found = {}
        for key in wanted:
            how = self._derived.get(key)
            found[key] = batch.columns[key] if how is None else how.compute([batch.columns[i] for i in how.inputs])
        batch.columns = found


def _of_one(
    compute: Callable[[Field, LazyColumn], LazyColumn], field: Field, inputs: Sequence[LazyColumn]
) -> LazyColumn:
    return compute(field, inputs[0])
