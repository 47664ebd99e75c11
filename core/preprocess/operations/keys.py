"""Operations that choose and rename fields."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from ...errors import UsageError
from ...ted import EPISODE, NEXT, NEXT_REWARD, Field, Key, key_name
from .base import Derivation, FieldStep, RowOperation, Step
from .fields import KEPT, LENGTH, Fields, new_key
from .lazy import Lazy

__all__ = ["Exclude", "Rename", "Select"]

_STAY = (*KEPT, NEXT_REWARD, EPISODE)


@dataclass(frozen=True)
class Rename(RowOperation):
    """Gives a field, or a group of them, another name; what `next` holds of it is renamed with it."""

    name: ClassVar[str] = "rename"
    key: str
    to: str

    def bind(self, fields: Fields) -> Step:
        moves = {old: self._moved(old) for old in fields.twinned(self.key)}
        for old, new in moves.items():
            if old in (EPISODE, *KEPT):
                raise UsageError(f"{key_name(old)!r} cannot be renamed: it is reserved for the layout of episodes")
            if new in fields and new not in moves:
                raise UsageError(f"{key_name(old)!r} was to be renamed to {key_name(new)!r}, which is there already")
        return _moving(fields, moves)

    def _moved(self, old: Key) -> Key:
        apart = self.key.startswith(f"{NEXT}.")
        if apart != self.to.startswith(f"{NEXT}."):
            raise UsageError(
                f"{self.key!r} was to be renamed to {self.to!r}, but what is known before the step and what is known "
                "after it stay apart"
            )
        target = new_key(self.to, self.name)
        side, path = ((NEXT,), old[1:]) if old[0] == NEXT and not apart else ((), old)
        for depth in range(1, len(path) + 1):
            if key_name(path[:depth]) == self.key:
                return (*side, *target, *path[depth:])
        return (*side, *target[:-1], target[-1] + LENGTH)  # the lengths beside a text


def _moving(fields: Fields, moves: Mapping[Key, Key]) -> Step:
    changes: dict[Key, Field | None] = dict.fromkeys(moves)
    changes |= {new: Field(new, fields[old].dtype, fields[old].shape, fields[old].role) for old, new in moves.items()}
    after = fields.replaced(changes, made={new for old, new in moves.items() if old in fields.made})
    after = after.traced({new: (old,) for old, new in moves.items()})
    return FieldStep(after, {new: Derivation((old,), _renamed(key_name(new))) for old, new in moves.items()})


def _renamed(name: str) -> Callable[[Sequence[Lazy]], Lazy]:
    def compute(inputs: Sequence[Lazy]) -> Lazy:
        lazy = inputs[0]
        return Lazy(name, lazy.dtype, lazy.shape, lazy.parts)

    return compute


@dataclass(frozen=True)
class Select(RowOperation):
    """Keeps the fields and groups named, with what `next` holds of them.

    Kept besides are `next.reward`, the flags under `next` that say where episodes end, `episode`, and what the
    program itself has added before; to let go of these, exclude them.
    """

    name: ClassVar[str] = "select"
    keys: tuple[str, ...]

    def bind(self, fields: Fields) -> Step:
        _require_names(self.keys, self.name)
        kept = {key for name in self.keys for key in fields.covered(name)}
        kept |= fields.made.union(_STAY)
        return _without(fields, [field.key for field in fields if field.key not in kept], "not selected")


@dataclass(frozen=True)
class Exclude(RowOperation):
    """Lets go of the fields and groups named, with what `next` holds of them.

    A field named with `next.` in front is let go of there alone. The flags under `next` stay whatever is named, for
    they say where episodes end; UsageError where nothing but them was meant.
    """

    name: ClassVar[str] = "exclude"
    keys: tuple[str, ...]

    def bind(self, fields: Fields) -> Step:
        _require_names(self.keys, self.name)
        lost = []
        for name in self.keys:
            found = [key for key in fields.covered(name) if key not in KEPT]
            if not found or name == NEXT:
                raise UsageError(
                    f"{name!r} was to be excluded, but the flags under next say where episodes end: "
                    f"{', '.join(map(key_name, KEPT))} stay"
                )
            lost += found
        return _without(fields, lost, "excluded")


def _require_names(names: tuple[str, ...], operation: str) -> None:
    if not names:
        raise UsageError(f"{operation} names no fields, one at least is expected")


def _without(fields: Fields, lost: Sequence[Key], why: str) -> Step:
    return FieldStep(fields.replaced(dict.fromkeys(lost)).traced({}, why), {})
