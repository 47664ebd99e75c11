"""What the exporters of several formats share: columns with text, rows of chosen leaves, and gymnasium spaces."""

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
"""Marks a file or folder as an export of rbtool."""
OUTCOMES: tuple[Key, ...] = (NEXT_REWARD, NEXT_TERMINATED, NEXT_TRUNCATED)
"""Keys of shape `[T, 1]` in TED that other libraries store as `[T]`."""


@dataclass(frozen=True, slots=True)
class ExportColumn:
    """A leaf to export; for text, `length` is the leaf with the number of bytes in each row."""

    field: Field
    length: Field | None = None

    @property
    def bytes(self) -> int:
        """Bytes of a row in the dataset."""
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
    """Return the columns of a dataset: each text with its lengths, and every other leaf by itself."""
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
    """Return the leaves of observations or actions: those below the key `role` or, failing that, with this role.

    Raises SchemaError if there are none, or if an observation is not stored under `next`, too.
    """
    found = [field for field in fields if field.key[0] == role]
    found = found or [field for field in fields if field.role == role and field.key[0] != NEXT]
    if not found:
        raise SchemaError(f"there are no {role}s among {', '.join(field.name for field in fields)}")
    states = state_keys(fields) if role == "observation" else [field.key for field in found]
    for field in found:
        if field.key not in states:
            raise SchemaError(f"{field.name} is an observation, but the one after each step is not stored")
    return found


def only_leaf(fields: tuple[Field, ...], role: Role, what: str) -> Field:
    """Return the only leaf of observations or actions; SchemaError if there are several, which `what` cannot hold."""
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
    """An export that holds rows of some leaves, which `prepare()` passes to `place`; other leaves are reported."""

    def place(self, keys: Iterable[Key], implied: Iterable[Key] = ()) -> None:
        """Set the leaves that are exported, and those that are `implied` by them; report all others as dropped."""
        self._placed = tuple(dict.fromkeys(keys))
        for field in self.chosen.fields:
            if field.key not in {*self._placed, *implied, EPISODE, NEXT_DONE}:
                state = field.key[0] == NEXT and field.key[1:] in self._placed
                why = "only its values before each step are stored" if state else "the format has no place for it"
                self.dropped.append(Dropped(field.name, why))

    def size(self) -> int:
        self.check()
        return self.chosen.steps * sum(field_named(self.chosen.fields, key).row_bytes for key in self._placed)

    @property
    def is_without_ends(self) -> bool:
        """Whether no observation is lost if `next` is left out: each is the following row, or repeated at the end."""
        table = self.chosen.table
        return bool(len(table) and (table.final == Final.REPEATED).all() and not table.explicit_next.any())

    def note_repeated(self) -> None:
        """Note how many final observations are repetitions, as their source did not have them."""
        if count := int((self.chosen.table.final == Final.REPEATED).sum()):
            self.notes.append(
                f"the last observation of {counted(count, 'episode')} is repeated after the last step: the source did "
                "not have the one there"
            )

    def note_unnumbered(self, kept: Collection[str] = ()) -> None:
        """Note which of the numbers, seeds and texts of episodes are lost; `kept` names the texts that are not."""
        table, texts = self.chosen.table, self.chosen.text or ()
        lost = ["seeds"] * bool(table.has_seed.any()) + ["texts"] * any(set(text) - {*kept} for text in texts)
        if lost:
            self.notes.append(f"{' and '.join(lost)} of episodes are not stored")
        if table.episode.tolist() != list(range(len(table))):
            self.notes.append("the numbers of episodes are not stored: they are counted from 0")

    def note_both(self) -> None:
        """Note how many episodes end both terminated and truncated, if the format can state only one of the two."""
        both = int((self.chosen.table.terminated & self.chosen.table.truncated).sum())
        if both:
            self.notes.append(f"{counted(both, 'episode')} that ended terminated and truncated: stored as terminated")

    def flags_inside(self) -> int:
        """Count the flags that are set before the last step of an episode."""
        found = 0
        for key in (NEXT_TERMINATED, NEXT_TRUNCATED):
            found += sum(int(np.count_nonzero(rows)) for rows in self.chosen.chunks(key, 1))
            found -= int(getattr(self.chosen.table, key[-1]).sum())
        return found


# Spaces of gymnasium --------------------------------------------------------------------------------


def space_of_json(document: Mapping[str, Any], role: str) -> Any:
    """Make a gymnasium space from the JSON of Minari or of a manifest; FormatError for an invalid one."""
    from minari.serialization import deserialize_space

    try:
        return deserialize_space(json.dumps(_loose(document)))
    except (KeyError, TypeError, ValueError, AttributeError, AssertionError, NotImplementedError) as error:
        raise FormatError(f"the {role} space is not one that Minari supports: {error}") from error


def _loose(space: Mapping[str, Any]) -> dict[str, Any]:
    """Turn the strict JSON of a manifest into Minari's: infinities are strings there, and uniform bounds one number."""
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
    """Make an unbounded space for these fields: a Box for each, inside a Dict if keys are nested."""
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
        raise SchemaError(f"{field.name} is text in the {role}, and the dataset has no space for it; Minari needs one")
    kind = field.numpy.kind
    if kind == "c" or field.dtype == "bfloat16":
        raise SchemaError(f"{field.name} is {field.dtype}, for which Gymnasium has no space")
    if kind == "b":
        return spaces.Box(0, 1, field.shape, np.bool_)  # newer versions of gymnasium refuse bools as bounds
    if kind == "f":
        return spaces.Box(-math.inf, math.inf, field.shape, field.numpy.type)
    limits = np.iinfo(field.numpy)
    return spaces.Box(limits.min, limits.max, field.shape, field.numpy.type)
