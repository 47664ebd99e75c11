"""Exports: columns, rows and spaces, as the exporters of several formats write them."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...core.errors import CorruptDataError, FormatError, SchemaError
from ...core.format.contracts import Array
from ...core.format.converter import Chosen, Sink
from ...core.format.documents import float_from_json
from ...core.format.manifest import Dropped
from ...core.progress import counted
from ...core.ted.episodes import Final
from ...core.ted.schema import (
    EPISODE,
    NEXT,
    NEXT_DONE,
    NEXT_REWARD,
    NEXT_TERMINATED,
    NEXT_TRUNCATED,
    Field,
    Key,
    Role,
    field_named,
    state_keys,
)

FORMAT = "rbtool export"
"""Identifies a file or folder as an export."""
OUTCOMES: tuple[Key, ...] = (NEXT_REWARD, NEXT_TERMINATED, NEXT_TRUNCATED)
"""What other libraries have as one number a row, without a dimension of its own."""


@dataclass(frozen=True, slots=True)
class ExportColumn:
    """A leaf of the data; for text, `length` is the leaf with the number of bytes of each row."""

    field: Field
    length: Field | None = None

    @property
    def bytes(self) -> int:
        """Bytes of a row as it is stored here."""
        return self.field.row_bytes + (self.length.row_bytes if self.length else 0)

    def chunks(self, chosen: Chosen) -> Iterator[Array | list[str]]:
        """Yield all rows in chunks: arrays, or strings where the leaf is text."""
        rows = chosen.chunks(self.field.key, self.bytes)
        if self.length is None:
            yield from rows
            return
        lengths = chosen.chunks(self.length.key, self.bytes)
        for characters, sizes in zip(rows, lengths, strict=True):
            yield decoded(characters, sizes, self.field.name)


def columns_of(fields: tuple[Field, ...]) -> list[ExportColumn]:
    """Pair text with its lengths; everything else is a column of its own."""
    by_key = {field.key: field for field in fields}
    texts: dict[Key, Field] = {}
    for field in fields:
        length = by_key.get((*field.key[:-1], field.key[-1] + "_length"))
        if field.role == "text" and field.dtype == "uint8" and len(field.shape) == 1 and length and not length.shape:
            texts[field.key] = length
    lengths = {length.key for length in texts.values()}
    return [ExportColumn(field, texts.get(field.key)) for field in fields if field.key not in lengths]


def decoded(characters: Array, lengths: Array, name: str) -> list[str]:
    """Return rows of UTF-8 bytes as strings."""
    try:
        return [row[:size].tobytes().decode() for row, size in zip(characters, lengths.tolist(), strict=True)]
    except UnicodeDecodeError as error:
        raise CorruptDataError(f"{name} is text, but not UTF-8: {error.reason}") from error


def leaves_of(fields: tuple[Field, ...], role: Role) -> list[Field]:
    """Return the leaves with observations or actions: those below that key or, where there are none, of that role.

    SchemaError where there are none at all, or for an observation that is not known after each step.
    """
    found = [field for field in fields if field.key[0] == role]
    found = found or [field for field in fields if field.role == role and field.key[0] != NEXT]
    if not found:
        raise SchemaError(f"there are no {role}s among {', '.join(field.name for field in fields)}")
    states = state_keys(fields) if role == "observation" else [field.key for field in found]
    for field in found:
        if field.key not in states:
            raise SchemaError(f"{field.name} is an observation, and there is none after each step")
    return found


def only_leaf(fields: tuple[Field, ...], role: Role, what: str) -> Field:
    """Return the one leaf with observations or actions; SchemaError where there are several, which `what` lacks."""
    found = leaves_of(fields, role)
    if len(found) > 1:
        names = ", ".join(field.name for field in found)
        raise SchemaError(
            f"{what} has one array of {role}s, and there are {names}",
            hint="make one vector of them: rbtool preprocess SRC --dest DEST "
            + ("--flatten" if role == "observation" else f"--cat {role}={names.replace(' ', '')}"),
        )
    return found[0]


class RowSink(Sink):
    """An export with rows of some leaves, each of which `prepare()` gives a place; others are named as left out."""

    def place(self, keys: Iterable[Key], implied: Iterable[Key] = ()) -> None:
        """Say which leaves the file has rows of, and which are `implied` by those."""
        self._placed = tuple(dict.fromkeys(keys))
        for field in self.chosen.fields:
            if field.key not in {*self._placed, *implied, EPISODE, NEXT_DONE}:
                state = field.key[0] == NEXT and field.key[1:] in self._placed
                why = "it is stored as known before the step alone" if state else "it has no place there"
                self.dropped.append(Dropped(field.name, why))

    def size(self) -> int:
        self.check()
        return self.chosen.steps * sum(field_named(self.chosen.fields, key).row_bytes for key in self._placed)

    @property
    def is_without_ends(self) -> bool:
        """Whether what came after a step is the following row, and for each last step nothing is known of it."""
        table = self.chosen.table
        return bool(len(table) and (table.final == Final.REPEATED).all() and not table.explicit_next.any())

    def note_repeated(self) -> None:
        """Note how many next observations are written that no source had."""
        if count := int((self.chosen.table.final == Final.REPEATED).sum()):
            self.notes.append(
                f"the last observation of {counted(count, 'episode')} is there once more, as the one after the last "
                "step, which the source did not have"
            )

    def note_unnumbered(self, kept: Collection[str] = ()) -> None:
        """Note which of the numbers, seeds and texts of episodes are lost; texts called `kept` are not."""
        table, texts = self.chosen.table, self.chosen.text or ()
        lost = ["seeds"] * bool(table.has_seed.any()) + ["texts"] * any(set(text) - {*kept} for text in texts)
        if lost:
            self.notes.append(f"{' and '.join(lost)} of episodes have no place there")
        if table.episode.tolist() != list(range(len(table))):
            self.notes.append("episodes have no numbers there: they are counted from 0")

    def note_both(self) -> None:
        """Note how many episodes end terminated and truncated, where one of them is all that can be said."""
        both = int((self.chosen.table.terminated & self.chosen.table.truncated).sum())
        if both:
            self.notes.append(f"{counted(both, 'episode')} that ended terminated and truncated: terminated there")

    def flags_inside(self) -> int:
        """Count the flags that are set in steps that are not the last of an episode."""
        found = 0
        for key in (NEXT_TERMINATED, NEXT_TRUNCATED):
            found += sum(int(np.count_nonzero(rows)) for rows in self.chosen.chunks(key, 1))
            found -= int(getattr(self.chosen.table, key[-1]).sum())
        return found


# Spaces of gymnasium --------------------------------------------------------------------------------


def space_of_json(document: Mapping[str, Any], role: str) -> Any:
    """Make a gymnasium space from Minari's document or a manifest's strict one; FormatError for an invalid one."""
    from minari.serialization import deserialize_space

    try:
        return deserialize_space(json.dumps(_loose(document)))
    except (KeyError, TypeError, ValueError, AttributeError, AssertionError, NotImplementedError) as error:
        raise FormatError(f"the {role} space is not one that Minari supports: {error}") from error


def _loose(space: Mapping[str, Any]) -> dict[str, Any]:
    """Undo `strict_space`: infinities as strings, and uniform bounds as one number."""
    loose = dict(space)
    for bound in ("low", "high"):
        if bound in loose:
            values = _numbers(loose[bound])
            whole = loose.get("type") == "Box" and not isinstance(values, list)
            loose[bound] = np.full([int(size) for size in loose["shape"]], values).tolist() if whole else values
    children = loose.get("subspaces")
    if isinstance(children, Mapping):
        loose["subspaces"] = {name: _loose(child) for name, child in children.items()}
    elif children is not None:
        loose["subspaces"] = [_loose(child) for child in children]
    return loose


def _numbers(value: Any) -> Any:
    if isinstance(value, list):
        return [_numbers(part) for part in value]
    return float_from_json(value) if isinstance(value, str) else value


def space_of_fields(fields: Sequence[Field], role: str) -> Any:
    """Make a space that contains every value of these fields: a Box for each, in a Dict where keys are nested."""
    return _nest({field.key[1:]: _unbounded_box(field, role) for field in fields})


def _nest(leaves: Mapping[tuple[str, ...], Any]) -> Any:
    from gymnasium import spaces

    if () in leaves:
        return leaves[()]
    names = dict.fromkeys(key[0] for key in leaves)
    return spaces.Dict(
        {name: _nest({key[1:]: leaf for key, leaf in leaves.items() if key[0] == name}) for name in names}
    )


def _unbounded_box(field: Field, role: str) -> Any:
    from gymnasium import spaces

    if field.role == "text":
        raise SchemaError(f"{field.name} is text of the {role} without a space that says so; Minari needs one")
    kind = field.numpy.kind
    if kind == "c" or field.dtype == "bfloat16":
        raise SchemaError(f"{field.name} is {field.dtype}, for which Gymnasium has no space")
    if kind == "b":
        return spaces.Box(0, 1, field.shape, np.bool_)  # newer versions of gymnasium refuse bools as bounds
    if kind == "f":
        return spaces.Box(-math.inf, math.inf, field.shape, field.numpy.type)
    limits = np.iinfo(field.numpy)
    return spaces.Box(limits.min, limits.max, field.shape, field.numpy.type)
