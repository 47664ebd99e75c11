"""Where each TED leaf lies in a compact checkpoint. It follows from the fields alone, so that no index is stored.

A state (the same key at the root and under `next`) is one leaf with a row more than steps in every episode. Reward
and done flags of the step lie at the root, as they do in a flat checkpoint of TorchRL; what else exists only under
`next` stays there. Root done flags and root reward, which such a checkpoint loses, lie under `at_root` where they
are not all zero. Where next observations do not follow, they lie in full under `explicit_next`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

from ..dataset import HIDDEN
from ..ted import NEXT, SINGLETONS, Field, Key, state_keys

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
    "h5": _NAMES | {"episodes", "episodes_text", "source"},
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
        states = dict.fromkeys(state_keys(leaves.values()))
        after = {(NEXT, *key) for key in states}
        steps = [key for key in leaves if key not in states and key not in after and key not in SINGLETONS]
        places = {key: _place(key, _TAKEN[form]) for key in (*states, *steps)}

        def stored(keys: Iterable[Key], *prefix: str) -> dict[Key, Field]:
            return {key: _moved(leaves[key], (*prefix, *places.get(key, key))) for key in keys}

        return cls(
            states=stored(states),
            steps=stored(steps),
            at_root=stored((key for key in SINGLETONS if key in leaves), AT_ROOT),
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


def _place(key: Key, taken: frozenset[str]) -> Key:
    """Where a leaf goes: results of the step to the root, the rest to its own key, apart from the names taken."""
    if key[0] == NEXT and len(key) > 1:
        return key[1:] if key[1:] in SINGLETONS else _beside_tables(key)
    first = key[0] + "_" if key[0].rstrip("_") in taken else key[0]
    return _beside_tables((first, *key[1:]))


def _beside_tables(key: Key) -> Key:
    """Keep a leaf `x.shape` apart from the table of row shapes of the leaf `x`."""
    name = key[-1]
    return (*key[:-1], name + "_") if name.rstrip("_").endswith(_TABLE) else key
