"""Operations that select, rename and join fields."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from ...errors import UsageError
from ...ted.schema import EPISODE, NEXT, NEXT_REWARD, SINGLETONS, Field, Key, key_name
from .base import (
    KEPT,
    LENGTH,
    BoundOperation,
    Derivation,
    Discount,
    FieldChanges,
    Fields,
    LazyColumn,
    Operation,
    RowOperation,
    in_next,
    names_of,
    new_key,
    pairs_of,
    promoted,
)

_STAY = (*KEPT, NEXT_REWARD, EPISODE)


@dataclass(frozen=True)
class Rename(RowOperation):
    """Gives a field, or a group of them, another name; what `next` holds of it is renamed with it."""

    name: ClassVar[str] = "rename"
    key: str
    to: str

    @classmethod
    def from_option(cls, value: Any, discount: Discount) -> Iterable[Operation]:
        return [cls(old, new) for old, new in pairs_of(value, cls.name, "old=new")]

    @property
    def makes(self) -> str:
        return self.to

    def plan(self, fields: Fields) -> BoundOperation:
        moves = {old: self._moved(old) for old in fields.twinned(self.key)}
        for old, new in moves.items():
            if old in (EPISODE, *KEPT):
                raise UsageError(f"{key_name(old)!r} cannot be renamed: it is reserved for the layout of episodes")
            if new in fields and new not in moves:
                raise UsageError(f"rename {key_name(old)}={key_name(new)}: {key_name(new)!r} already exists")
        return _moving(fields, moves)

    def _moved(self, old: Key) -> Key:
        apart = self.key.startswith(f"{NEXT}.")
        if apart != self.to.startswith(f"{NEXT}."):
            raise UsageError(
                f"rename {self.key}={self.to}: fields before the step and those after it, under next, stay apart"
            )
        target = new_key(self.to, self.name)
        side, path = ((NEXT,), old[1:]) if old[0] == NEXT and not apart else ((), old)
        for depth in range(1, len(path) + 1):
            if key_name(path[:depth]) == self.key:
                return (*side, *target, *path[depth:])
        return (*side, *target[:-1], target[-1] + LENGTH)  # the lengths of a text


def _moving(fields: Fields, moves: Mapping[Key, Key]) -> BoundOperation:
    changes: dict[Key, Field | None] = dict.fromkeys(moves)
    changes |= {new: Field(new, fields[old].dtype, fields[old].shape, fields[old].role) for old, new in moves.items()}
    after = fields.replaced(changes, made={new for old, new in moves.items() if old in fields.made})
    after = after.traced({new: (old,) for old, new in moves.items()})
    return FieldChanges(after, {new: Derivation((old,), _renamed(key_name(new))) for old, new in moves.items()})


def _renamed(name: str) -> Callable[[Sequence[LazyColumn]], LazyColumn]:
    def compute(inputs: Sequence[LazyColumn]) -> LazyColumn:
        lazy = inputs[0]
        return LazyColumn(name, lazy.dtype, lazy.shape, lazy.parts)

    return compute


@dataclass(frozen=True)
class Select(RowOperation):
    """Keeps the fields and groups named, with what `next` holds of them.

    `next.reward`, the flags under `next`, `episode`, and fields that the program itself has added before are kept as
    well; exclude them to remove them.
    """

    name: ClassVar[str] = "select"
    keys: tuple[str, ...]

    @classmethod
    def from_option(cls, value: Any, discount: Discount) -> Iterable[Operation]:
        return [cls(names_of(value, cls.name))]

    def plan(self, fields: Fields) -> BoundOperation:
        _require_names(self.keys, self.name)
        kept = {key for name in self.keys for key in fields.covered(name)}
        kept |= fields.made.union(_STAY)
        return _without(fields, [field.key for field in fields if field.key not in kept], "not selected")


@dataclass(frozen=True)
class Exclude(RowOperation):
    """Removes the fields and groups named, with what `next` holds of them.

    A field named with `next.` in front is removed there alone. The flags under `next` stay, because they mark where
    episodes end; UsageError where nothing but them was meant.
    """

    name: ClassVar[str] = "exclude"
    keys: tuple[str, ...]

    @classmethod
    def from_option(cls, value: Any, discount: Discount) -> Iterable[Operation]:
        return [cls(names_of(value, cls.name))]

    def plan(self, fields: Fields) -> BoundOperation:
        _require_names(self.keys, self.name)
        lost = []
        for name in self.keys:
            found = [key for key in fields.covered(name) if key not in KEPT]
            if not found or name == NEXT:
                raise UsageError(f"exclude {name}: {', '.join(map(key_name, KEPT))} mark where episodes end, and stay")
            lost += found
        return _without(fields, lost, "excluded")


def _require_names(names: tuple[str, ...], operation: str) -> None:
    if not names:
        raise UsageError(f"{operation} names no fields, expected one at least")


def _without(fields: Fields, lost: Sequence[Key], why: str) -> BoundOperation:
    return FieldChanges(fields.replaced(dict.fromkeys(lost)).traced({}, why), {})


OBSERVATION: Key = ("observation",)


@dataclass(frozen=True)
class Cat(RowOperation):
    """Joins fields into one along their last dimension, in the order given, and likewise what `next` holds of them.

    The parts are removed; a group means all fields in it, sorted by name. Types are promoted as NumPy does. Where
    `next` lacks one of the parts, it keeps those it has and gets no joined field.
    """

    name: ClassVar[str] = "cat"
    key: str
    parts: tuple[str, ...]

    @classmethod
    def from_option(cls, value: Any, discount: Discount) -> Iterable[Operation]:
        pairs = pairs_of(value, cls.name, "new=part,part, like obs=observation.a,observation.b")
        return [cls(key, names_of(parts, cls.name)) for key, parts in pairs]

    @property
    def makes(self) -> str:
        return self.key

    def plan(self, fields: Fields) -> BoundOperation:
        if not self.parts:
            raise UsageError(f"cat {self.key}: no parts, expected at least one")
        out = new_key(self.key, self.name)
        parts = list(dict.fromkeys(key for part in self.parts for key in sorted(self._part(fields, part))))
        if len({key[0] == NEXT for key in parts} | {out[0] == NEXT}) > 1:
            raise UsageError(
                f"cat {self.key}={','.join(map(key_name, parts))}: fields before the step and those after it, under "
                "next, stay apart"
            )
        for key in parts:
            if key in (EPISODE, *KEPT) or fields[key].role == "text":
                raise UsageError(f"{key_name(key)!r} cannot become part of {self.key!r}: it is no number to learn from")
        return _joining(fields, out, parts, lambda found: _cat_field(fields, out, found))

    def _part(self, fields: Fields, name: str) -> list[Key]:
        found = fields.twinned(name)
        root = [key for key in found if key[0] != NEXT]
        return root or found


def _cat_field(fields: Fields, out: Key, parts: Sequence[Key]) -> Field:
    """The field that parts make when they are joined."""
    shapes = [fields[key].shape or (1,) for key in parts]
    if len({shape[:-1] for shape in shapes}) > 1:
        listed = ", ".join(f"{key_name(key)} {list(shape)}" for key, shape in zip(parts, shapes, strict=True))
        raise UsageError(f"{key_name(out)!r} cannot be joined along the last dimension of {listed}")
    roles = {fields[key].role for key in parts}
    role = roles.pop() if len(roles) == 1 else "observation"
    shape = (*shapes[0][:-1], sum(shape[-1] for shape in shapes))
    return Field(out, promoted([fields[key].dtype for key in parts]), shape, role)


@dataclass(frozen=True)
class Flatten(RowOperation):
    """Makes one vector `observation` of all observations, sorted by name, row-major, and likewise under `next`.

    Observations are the fields of that role that are both at the root and under `next`, or, without any, those at the
    root. The vector is float64 where one of them is, else float32, in which whole numbers that are not exact are
    refused. Values stay what they are: the numbers of discrete spaces do not become one-hot.
    """

    name: ClassVar[str] = "flatten"

    @classmethod
    def from_option(cls, value: Any, discount: Discount) -> Iterable[Operation]:
        return [cls()]

    def plan(self, fields: Fields) -> BoundOperation:
        root = sorted(
            f.key for f in fields if f.role == "observation" and f.key[0] != NEXT and f.key not in fields.made
        )
        parts = [key for key in root if in_next(key) in fields and key not in SINGLETONS] or root
        if not parts:
            raise UsageError("flatten found no field with the role of an observation")
        bad = [key for key in parts if "complex" in fields[key].dtype]
        if bad:
            raise UsageError(f"{key_name(bad[0])!r} is complex and cannot become part of a vector of floats")
        if OBSERVATION in fields and OBSERVATION not in parts:
            raise UsageError("flatten would write 'observation', which exists on one side of the step only")
        _refuse_rest_of_group(fields, parts)
        wide = any(fields[key].dtype == "float64" for key in parts)
        dtype = "float64" if wide else "float32"

        def flat(found: Sequence[Key]) -> Field:
            out = OBSERVATION if found[0][0] != NEXT else in_next(OBSERVATION)
            return Field(out, dtype, (sum(_width(fields[key]) for key in found),), "observation")

        return _joining(fields, OBSERVATION, parts, flat, flatten=True)


def _refuse_rest_of_group(fields: Fields, parts: Sequence[Key]) -> None:
    """Raise UsageError where the group `observation` keeps a field, text for one: the vector takes its place."""
    sides = [(OBSERVATION, list(parts))]
    if all(in_next(key) in fields for key in parts):
        sides.append((in_next(OBSERVATION), [in_next(key) for key in parts]))
    rest = [
        key for group, found in sides for key in fields.by_key
        if len(key) > len(group) and key[: len(group)] == group and key not in found
    ]  # fmt: skip
    following = {in_next(key) for key in rest}
    lengths = {(*key[:-1], key[-1] + LENGTH) for key in rest if fields[key].role == "text"}
    left = [key_name(key) for key in rest if key not in following | lengths]
    if left:
        renamed = " ".join(f"--rename {name}={_outside(fields, name)}" for name in left)
        raise UsageError(
            f"flatten would write 'observation', a group in which {', '.join(left)} would stay behind",
            hint=f"add {renamed}, too",
        )


def _outside(fields: Fields, name: str) -> str:
    """Find a free name outside of the group `observation`."""
    group = f"{OBSERVATION[0]}."
    short = name.replace(group, "", 1)
    taken = {".".join(key[:depth]) for key in fields.by_key for depth in range(1, len(key) + 1)}
    return short if short not in taken else name.replace(group, f"{OBSERVATION[0]}_", 1)


def _width(field: Field) -> int:
    return field.row_bytes // field.numpy.itemsize


def _joining(
    fields: Fields, out: Key, parts: Sequence[Key], field: Callable[[Sequence[Key]], Field], *, flatten: bool = False
) -> BoundOperation:
    """Make the step that joins `parts`, and their counterparts under `next` if all of them exist."""
    sides = [(out, list(parts))]
    after = [in_next(key) for key in parts]
    if out[0] != NEXT and all(key in fields for key in after):
        sides.append((in_next(out), after))
    changes: dict[Key, Field | None] = {key: None for _, found in sides for key in found}
    for key, found in sides:
        if key in fields and key not in changes:
            raise UsageError(f"cat would write {key_name(key)!r}, which already exists and is no part of it")
        made = field(found)
        changes[key] = Field(key, made.dtype, made.shape, made.role)
    derived = {key: Derivation(tuple(found), _joined(changes[key], flatten)) for key, found in sides}
    return FieldChanges(fields.replaced(changes).traced(dict(sides)), derived)


def _joined(field: Field | None, flatten: bool) -> Callable[[Sequence[LazyColumn]], LazyColumn]:
    assert field is not None

    def compute(inputs: Sequence[LazyColumn]) -> LazyColumn:
        lazies = [lazy.reshaped((lazy.width,)) for lazy in inputs] if flatten else inputs
        return LazyColumn.joined(field.name, field.dtype, lazies)

    return compute
