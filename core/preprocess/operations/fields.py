"""Which fields there are at one point of a program, what names mean there, and where each came from."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Self

from ...errors import UsageError
from ...ted.schema import EPISODE, FLAGS, NEXT, SINGLETONS, Field, Key, key_name, safe_part, unknown_field

KEPT: tuple[Key, ...] = tuple((NEXT, *flag) for flag in FLAGS)
"""What no operation removes, renames or gives another type: where episodes end."""

LENGTH = "_length"
"""What the name of a text has behind it where its length in bytes is."""


@dataclass(frozen=True)
class Fields:
    """The fields, by key and in order; immutable.

    `origins` has the keys of the source that each is made of, `gone` why a key of the source was removed, `made` the
    fields that the program itself has added.
    """

    by_key: Mapping[Key, Field]
    origins: Mapping[Key, tuple[Key, ...]]
    gone: Mapping[Key, str]
    made: frozenset[Key] = frozenset()

    @classmethod
    def of(cls, fields: Iterable[Field]) -> Self:
        """Begin with the fields of a dataset."""
        by_key = {field.key: field for field in fields}
        return cls(by_key, {key: (key,) for key in by_key}, {})

    def __iter__(self) -> Iterator[Field]:
        return iter(self.by_key.values())

    def __contains__(self, key: Key) -> bool:
        return key in self.by_key

    def __getitem__(self, key: Key) -> Field:
        return self.by_key[key]

    def has_name(self, name: str) -> bool:
        """Return whether a name means any field."""
        return bool(self._meant(name))

    def covered(self, name: str) -> list[Key]:
        """List the fields that a name means: the leaf or group of this name, and what `next` holds of it.

        So `reward` means `next.reward` where the root has none, and `next.reward` means that one alone.
        UsageError names what comes near.
        """
        found = self._meant(name)
        if not found:
            raise unknown_field(name, [field.name for field in self], near=self._names())
        return self._with_lengths(found)

    def twinned(self, name: str) -> list[Key]:
        """Like `covered`, for what has to be done before and after the step alike.

        UsageError for `next.observation` where there is `observation`: the two must stay comparable.
        """
        found = self.covered(name)
        for key in found:
            apart = key[0] == NEXT and key[1:] in self and key[1:] not in SINGLETONS and key[1:] not in found
            if apart:
                raise UsageError(
                    f"{name!r} means what is under next alone, and {key_name(key[1:])!r} has to stay like it",
                    hint=f"name it {name.removeprefix(f'{NEXT}.')!r}: next follows",
                )
        return found

    def _meant(self, name: str) -> list[Key]:
        under = name == NEXT or name.startswith(f"{NEXT}.")
        return [
            key
            for key in self.by_key
            if _named(key, name) or (not under and key[0] == NEXT and len(key) > 1 and _named(key[1:], name))
        ]

    def _names(self) -> list[str]:
        names: dict[str, None] = {}
        for key in self.by_key:
            for path in (key, key[1:]) if key[0] == NEXT else (key,):
                names |= dict.fromkeys(key_name(path[:depth]) for depth in range(len(path), 0, -1))
        return list(names)

    def _with_lengths(self, keys: list[Key]) -> list[Key]:
        """Add the lengths of texts, which are fields of their own."""
        found = dict.fromkeys(keys)
        for key in keys:
            length = (*key[:-1], key[-1] + LENGTH)
            if self[key].role == "text" and length in self:
                found[length] = None
        return list(found)

    def replaced(self, changes: Mapping[Key, Field | None], *, made: Iterable[Key] = ()) -> Fields:
        """Change or add fields; None removes one. UsageError for a field that would be a group too."""
        by_key = {key: field for key, field in self.by_key.items() if changes.get(key, field) is not None}
        by_key |= {key: field for key, field in changes.items() if field is not None}
        for key in by_key:
            for depth in range(1, len(key)):
                if key[:depth] in by_key:
                    raise UsageError(
                        f"{key_name(key[:depth])!r} cannot be a field with {key_name(key)!r}: it would be a group too"
                    )
        return replace(self, by_key=by_key, made=self.made | frozenset(made))

    def traced(self, origins: Mapping[Key, Iterable[Key]], why: str = "") -> Fields:
        """Record which keys before the step each changed key is made of, and why the others were removed."""
        now = {key: self.origins.get(key, ()) for key in self.by_key}
        now |= {key: tuple(o for part in parts for o in self.origins.get(part, ())) for key, parts in origins.items()}
        here = {origin for parts in now.values() for origin in parts}
        lost = {origin: why for parts in self.origins.values() for origin in parts if origin not in here}
        return replace(self, origins=now, gone={**lost, **self.gone})

    def lost(self, source: Iterable[Field]) -> dict[str, str]:
        """Return why each key of the source was removed whose values are in no field any more, by name."""
        here = {origin for parts in self.origins.values() for origin in parts}
        return {field.name: self.gone.get(field.key, "left out") for field in source if field.key not in here}


def in_next(key: Key) -> Key:
    """Name what a field of the root is called after the step."""
    return (NEXT, *key)


def new_key(name: str, what: str) -> Key:
    """Make a key of a dotted name that a field is to get; UsageError for names that cannot be stored."""
    key = tuple(name.split("."))
    if not all(key) or key == (NEXT,):
        raise UsageError(f"{what} would write {name!r}, which is no name for a field")
    for part in key:
        if safe_part(part) != part:
            raise UsageError(f"{what} would write {name!r}, but tensordict keeps {part!r} for itself")
    if key in (EPISODE, *FLAGS, *KEPT):
        raise UsageError(f"{what} would write {name!r}, which is reserved for the layout of episodes")
    return key


def _named(key: Key, name: str) -> bool:
    whole = key_name(key)
    return whole == name or whole.startswith(f"{name}.")
