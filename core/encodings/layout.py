"""Which leaves a compact checkpoint stores, where, and which storage its rows filled.

The layout follows from the fields alone, so no index is stored. A state (the same key at the root and under `next`)
is one leaf with one row more than steps in every episode. Rewards and done flags are at the root, as in a flat
checkpoint of TorchRL; what else exists only under `next` stays there. Root done flags and a root reward, which TorchRL
does not keep, are under `at_root` where they are not all zero. Where next observations do not follow, they are stored
in full under `explicit_next`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from ..errors import CorruptDataError
from ..format.manifest import HIDDEN
from ..ted.schema import NEXT, SINGLETONS, Field, Key, safe_part, state_keys

Form: TypeAlias = Literal["ted", "flat", "nested", "h5"]
CompactForm: TypeAlias = Literal["flat", "nested", "h5"]

AT_ROOT = "at_root"
EXPLICIT_NEXT = "explicit_next"
EXPLICIT_EPISODES = Field(("explicit_episodes",), "int64", (), "id")
"""Row numbers in the episode table of the episodes whose next rows are stored in full."""

_NAMES = frozenset({AT_ROOT, EXPLICIT_NEXT, EXPLICIT_EPISODES.name, NEXT, *(key[0] for key in SINGLETONS)})
_TAKEN: dict[str, frozenset[str]] = {
    "flat": _NAMES | {HIDDEN, "storage_metadata.json", "env_metadata.json"},
    "nested": _NAMES | {HIDDEN, "storage_metadata.json", "env_metadata.json"},
    "h5": _NAMES | {"episodes", "episodes_text", "source", "storage"},
}
_TABLE = ".shape"


@dataclass(frozen=True, slots=True)
class CompactLayout:
    """The leaves of a checkpoint by the TED key whose values they hold; the key of each field is its place there.

    `states`: by root key, one row more than steps in every episode. `steps`: one row a step. `at_root`: one row a
    step, stored only where some byte is not zero. `explicit`: by root key, the next rows of the episodes that do
    not follow, one episode after the other.
    """

    states: Mapping[Key, Field]
    steps: Mapping[Key, Field]
    at_root: Mapping[Key, Field]
    explicit: Mapping[Key, Field]

    @classmethod
    def of(cls, fields: Iterable[Field], form: CompactForm) -> CompactLayout:
        """Lay the fields out for a form."""
        leaves = {field.key: field for field in fields}
        results = _results(leaves.values())
        states = dict.fromkeys(key for key in state_keys(leaves.values()) if key not in results)
        after = {(NEXT, *key) for key in states}
        steps = [key for key in leaves if key not in states and key not in after and key not in results]
        at_root = [key for key in results if key in leaves]
        moved = _moved_to_root(leaves, results, _TAKEN[form])
        places = {key: _place(key, _TAKEN[form], moved) for key in (*states, *steps)}
        places |= {key: _safe(key) for key in at_root}

        def stored(keys: Iterable[Key], *prefix: str) -> dict[Key, Field]:
            return {key: _moved(leaves[key], (*prefix, *places[key])) for key in keys}

        return cls(
            states=stored(states),
            steps=stored(steps),
            at_root=stored(at_root, AT_ROOT),
            explicit=stored(states, EXPLICIT_NEXT),
        )

    def stored(self, *, with_explicit: bool) -> list[Field]:
        """List the leaves that there can be."""
        leaves = [*self.states.values(), *self.steps.values(), *self.at_root.values()]
        return [*leaves, EXPLICIT_EPISODES, *self.explicit.values()] if with_explicit else leaves

    def bytes(self, steps: int, episodes: int) -> int:
        """Bytes of all rows, as long as every next observation follows and `at_root` is empty."""
        per_state = sum(field.row_bytes for field in self.states.values())
        return per_state * (steps + episodes) + sum(field.row_bytes for field in self.steps.values()) * steps


def _moved(field: Field, place: Key) -> Field:
    return Field(place, field.dtype, field.shape, field.role)


def _results(fields: Iterable[Field]) -> dict[Key, None]:
    """Keys of rewards and done flags, below `next` and at the root: there they mean something else."""
    named = [field.key[1:] for field in fields if field.key[0] == NEXT and field.role in {"reward", "done"}]
    return dict.fromkeys((*SINGLETONS, *(key for key in named if key)))


def _moved_to_root(leaves: Collection[Key], results: Iterable[Key], taken: frozenset[str]) -> frozenset[Key]:
    """Which results lie at the root: all of TED's own, and of others those that nothing there is in the way of."""
    folders = {key[:depth] for key in leaves if key[0] != NEXT for depth in range(1, len(key))}

    def free(key: Key) -> bool:
        above = any(key[:depth] in leaves for depth in range(1, len(key)))
        return not above and key not in folders and key[0].rstrip("_") not in taken and key == _safe(key)

    return frozenset(key for key in results if key in SINGLETONS or free(key))


def _place(key: Key, taken: frozenset[str], moved: frozenset[Key]) -> Key:
    """Where a leaf goes: results of the step to the root, the rest to its own key, apart from the names taken."""
    if key[0] == NEXT and len(key) > 1:
        return key[1:] if key[1:] in moved else _safe(key)
    first = key[0] + "_" if key[0].rstrip("_") in taken else key[0]
    return _safe((first, *key[1:]))


def _safe(key: Key) -> Key:
    """Keep a leaf `x.shape` apart from the table of row shapes of the leaf `x`, and `shape` from what is no leaf."""
    *folders, name = map(safe_part, key)
    return (*folders, name + "_") if name.rstrip("_").endswith(_TABLE) else (*folders, name)


STORAGE = "storage"
"""What the manifest of a storage's checkpoint names as its source."""

SEGMENTS_FILE = "segments.json"
"""Describes the checkpoint of a storage of tensors in segments."""

ENSEMBLE_FILE = "ensemble.json"
"""Lists the members in the checkpoint of a storage of several storages."""


@dataclass(frozen=True, slots=True)
class FilledStorage:
    """A storage of `shape`: its valid rows, then the other dimensions that count elements.

    `capacity` counts elements there is room for. `cursor` is the row behind the one that was written last, and None
    where that is not known. `structure` describes how the data is made, None for plain nested dictionaries.
    """

    shape: tuple[int, ...]
    capacity: int
    cursor: int | None
    structure: Mapping[str, Any] | None = None

    @classmethod
    def of_dataset(cls, steps: int) -> FilledStorage:
        """The storage that a dataset fills to the last row; the next write goes to row 0."""
        return cls((steps,), steps, 0)

    @property
    def length(self) -> int:
        """The number of valid elements."""
        return math.prod(self.shape)

    @property
    def rows(self) -> int:
        """How many rows there is room for."""
        return self.capacity // max(math.prod(self.shape[1:]), 1)

    @property
    def full(self) -> bool:
        """Whether the next row takes the place of an older one."""
        return self.length >= self.capacity

    @property
    def oldest(self) -> int:
        """The row that was written first of those that are valid; the rows before it are newer than all others."""
        return self.cursor or 0 if self.full else 0

    @property
    def last_row(self) -> int | None:
        """The row that was written last."""
        if self.cursor is None or not self.shape[0] or (self.cursor == 0 and not self.full):
            return None
        return (self.cursor or self.shape[0]) - 1

    def to_bytes(self) -> bytes:
        """The document as it is written: what TorchRL writes, and the rest."""
        document = {
            "metadata": {}, "is_pytree": False, "len": self.length, "cursor": self.cursor,
            "capacity": self.capacity, "shape": self.shape,
        }  # fmt: skip
        return json.dumps(document | ({} if self.structure is None else {"structure": self.structure})).encode()

    @classmethod
    def from_document(cls, document: Any, steps: int, origin: str) -> FilledStorage:
        """Undo `to_bytes` for a checkpoint of so many steps, or raise CorruptDataError; `origin` names it there."""
        try:
            found = cls(
                tuple(map(_count, document["shape"])), _count(document["capacity"]),
                None if document["cursor"] is None else _count(document["cursor"]), document.get("structure"),
            )  # fmt: skip
            lengths = {found.length, _count(document["len"])}
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise CorruptDataError(f"{origin} does not describe a storage: {error!r}") from error
        last = found.shape[0] - found.full if found.shape else -1
        inside = found.cursor is None or found.cursor <= max(last, 0)
        if lengths != {steps} or not found.shape or found.capacity < steps or not inside:
            raise CorruptDataError(
                f"{origin} says that {list(found.shape)} of {found.capacity:,} elements are filled and row "
                f"{found.cursor} is next, which does not fit {steps:,} steps"
            )
        return found


def _count(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is no count")
    return value
