"""Where each TED leaf lies in a compact checkpoint. It follows from the fields alone, so that no index is stored.

A state (the same key at the root and under `next`) is one leaf with a row more than steps in every episode. Results
of the step, which are rewards and done flags by their role, lie at the root, as they do in a flat checkpoint of
TorchRL; what else exists only under `next` stays there. Root done flags and root reward, which such a checkpoint
loses, lie under `at_root` where they are not all zero. Where next observations do not follow, they lie in full under
`explicit_next`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

from ..format import HIDDEN
from ..ted import NEXT, SINGLETONS, Field, Key, safe_part, state_keys

__all__ = ["EXPLICIT_EPISODES", "CompactForm", "CompactLayout", "Form"]

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
