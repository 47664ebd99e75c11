"""The operation that changes the representation of actions: relative or absolute, rotations, grippers."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from ..engine.tasks import ResultRefused
from ..errors import UsageError
from ..format.contracts import StepReader
from ..format.documents import dump_json
from ..preprocess.operations.base import (
    BoundOperation,
    Columns,
    Discount,
    Fields,
    LazyBatch,
    Operation,
    RowOperation,
    in_next,
    texts_of,
)
from ..preprocess.operations.built_in import Rename
from ..ted.schema import NEXT, Field, Key
from .representations import OF_CHUNKS, Array, Group, Layout, Place, Runs


@dataclass(frozen=True)
class ChangeActionSpace(RowOperation):
    """Changes what the numbers of an action mean, group by group: from absolute to relative, from Euler angles to six
    numbers, from a gripper of 0 and 1 to one of -1 and 1.

    `groups` are texts such as `0:6=pose,from=euler-xyz,to=6d-rows,as=delta,state=observation.state[0:6]`. Numbers in no
    group stay as they are. The result is float64 where the action is, else float32. What is to be relative to the state
    at the start of a chunk (`as=relative`, `as=chunk-delta`) stays absolute in the rows, as a row does not know which
    chunks it will be in: the transform of `rbtool.action_space` makes it relative in batches.

    Where rows were dropped before, the row after the gap is the first of an episode.
    """

    name: ClassVar[str] = "action-space"
    whole_episodes: ClassVar[bool] = True
    groups: tuple[str, ...]
    key: str = "action"

    @classmethod
    def from_option(cls, value: Any, discount: Discount) -> Iterable[Operation]:
        by_key: dict[str, list[str]] = {}
        for text in texts_of(value, cls.name):
            by_key.setdefault(Group.parsed(text).place.key, []).append(text)
        return [cls(tuple(texts), key) for key, texts in by_key.items()]

    def __post_init__(self) -> None:
        if not self.groups:
            raise UsageError(
                "action-space has no groups, expected one at least, like 0:6=pose,from=euler-xyz,to=6d-rows"
            )
        for text in self.groups:
            if (found := Group.parsed(text, self.key).place.key) != self.key:
                raise UsageError(f"action-space changes {self.key}, and {text!r} is in {found}: use two operations")

    @property
    def rescales(self) -> str:
        return self.key

    @property
    def notes(self) -> Iterable[str]:
        groups = [Group.parsed(text, self.key) for text in self.groups]
        if chunks := [str(group.place) for group in groups if group.becomes in OF_CHUNKS]:
            yield (
                f"action-space: {', '.join(chunks)} stays absolute in the rows; the transform of "
                "rbtool.action_space(DATASET) makes it relative to the start of each chunk"
            )
        if all(group.place.stop is not None for group in groups):
            rows = Layout(self.key, max(int(group.place.stop or 0) for group in groups), tuple(groups))
            undone = rows.with_groups(Group.of_rows).inverted().groups
            yield f"action-space: undone by {' '.join(f'--action-space {group.text}' for group in undone)}"

    def settled(self, reader: StepReader, before: Sequence[Operation]) -> ChangeActionSpace:
        layout = self.layout(fields_after(reader, before), names_of_numbers(reader, before))
        return replace(self, groups=tuple(group.text for group in layout.groups))

    def documents(self, documents: Mapping[str, bytes]) -> Mapping[str, bytes]:
        found = {name: data for name, data in documents.items() if not name.endswith(_OF_OLD_ACTIONS)}
        about = json.loads(found.get(_INFO, b"{}"))
        feature = about.get("features", {}).get(self.key) if isinstance(about, dict) else None
        turned = any(Group.parsed(text, self.key).kind in ("rotation", "pose") for text in self.groups)
        if turned and isinstance(feature, dict) and feature.get("names"):
            feature["names"] = None  # such as roll, pitch and yaw
            found[_INFO] = dump_json(about).encode()
        return found

    def layout(self, fields: Iterable[Field], names: Mapping[str, Sequence[str]]) -> Layout:
        """Return the groups with the numbers of their ends; UsageError where they do not fit the fields."""
        widths = {
            field.name: field.shape[0]
            for field in fields
            if len(field.shape) == 1 and field.key[0] != NEXT and field.role != "text" and "complex" not in field.dtype
        }
        if self.key not in widths:
            raise UsageError(
                f"action-space changes {self.key!r}, which is not a field with some numbers a row",
                hint=f"there are {', '.join(sorted(widths))}",
            )
        return Layout.of(self.key, self.groups, widths, names)

    def plan(self, fields: Fields) -> BoundOperation:
        layout = self.layout(fields, {})
        if any(group.was in OF_CHUNKS for group in layout.groups):
            raise UsageError(f"rows of {self.key} are in no chunks: was is absolute, delta or step")
        key: Key = tuple(self.key.split("."))
        if in_next(key) in fields:
            raise UsageError(
                f"action-space changes {self.key}, and next.{self.key} would stay as it is",
                hint=f"leave it out first: --exclude next.{self.key}",
            )
        return _BoundActionSpace(fields, layout.with_groups(Group.of_rows), key)


class _BoundActionSpace(BoundOperation):
    def __init__(self, before: Fields, layout: Layout, key: Key) -> None:
        old = before[key]
        dtype = "float64" if old.dtype == "float64" else "float32"
        shape = (layout.made,)
        super().__init__(before.replaced({key: replace(old, dtype=dtype, shape=shape)}))
        self._key, self._layout = key, layout
        self._states = frozenset(tuple(place.key.split(".")) for place in layout.states())

    def inputs(self, wanted: frozenset[Key]) -> Iterable[Key]:
        return wanted | self._states if self._key in wanted else wanted

    def compute(self, batch: LazyBatch, wanted: frozenset[Key]) -> Columns:
        found: dict[Key, Any] = {key: batch.columns[key] for key in wanted}
        if self._key in wanted:
            rows, runs = batch.columns[self._key].numbers, Runs.of(batch.pieces.rows)
            self._require_rotations(batch, rows)

            def states(place: Place) -> tuple[Array, Array]:
                every = place.of(batch.columns[tuple(place.key.split("."))].numbers)
                return every, every[runs.starts]

            numbers = self._layout.changed(rows, runs, states)
            found[self._key] = numbers if self.after[self._key].dtype == "float64" else numbers.astype(np.float32)
        return found

    def _require_rotations(self, batch: LazyBatch, rows: Array) -> None:
        """Refuse what is said to be a rotation and is none: the place or the representation is then wrong."""
        for group in self._layout.groups:
            checks = [(group.place, rows, group.given)]
            if group.needs_state and group.state is not None:
                stored = batch.columns[tuple(group.state.key.split("."))].numbers
                checks.append((group.state, stored, group.state_given or group.given))
            for place, values, how in checks:
                if (bad := group.flaw(place.of(values), how)).any():
                    numbers = ", ".join(f"{number:.4g}" for number in place.of(values)[int(bad.argmax())])
                    raise ResultRefused(f"{place} is not a {group.kind} in {how} everywhere: {numbers}")


_INFO = "meta/info.json"
_OF_OLD_ACTIONS = ("stats.json", "stats.jsonl", "modality.json")
"""The ends of the names of LeRobot's files that state what actions were: their statistics, and GR00T's groups."""


def fields_after(reader: StepReader, before: Iterable[Operation]) -> Fields:
    """Return what operations make of the fields of a dataset; those that do not fit them say so when they are bound."""
    fields = Fields.of(reader.fields, reader.path)
    with suppress(UsageError):
        for one in before:
            fields = one.bind(fields).after if isinstance(one, RowOperation) else fields
    return fields


def rotations_after(reader: StepReader, before: Iterable[Operation]) -> dict[str, list[tuple[Place, str]]]:
    """Return where fields have rotations, and how they are written, after all `--action-space` that have made the
    dataset, and the operations `before` this one.
    """
    past = [one for made in reader.manifest.provenance for one in made.arguments.get("operations") or ()]
    found: dict[str, list[tuple[Place, str]]] = {}
    for document in [*past, *(one.describe() for one in before)]:
        if document["name"] == Rename.name:
            old, new = document["key"], document["to"]
            for key in [key for key in found if f"{key}.".startswith(f"{old}.")]:
                name = new + key[len(old) :]
                found[name] = [(replace(place, key=name), how) for place, how in found.pop(key)]
        if document["name"] == ChangeActionSpace.name:
            key = document.get("key", "action")
            groups = sorted((Group.parsed(text, key) for text in document["groups"]), key=lambda one: one.place.start)
            layout = Layout(key, int(groups[-1].place.stop or 0), tuple(groups))
            kept = [(moved, how) for place, how in found.get(key, ()) if (moved := layout.moved(place)) is not None]
            found[key] = kept + [
                (replace(group.place, start=group.place.start + 3 * (group.kind == "pose")), str(group.given))
                for group in layout.inverted().groups
                if group.kind in ("rotation", "pose")
            ]
    widths = {field.name: field.shape[0] for field in fields_after(reader, before) if len(field.shape) == 1}
    return {
        key: [(place, how) for place, how in places if int(place.stop or 0) <= widths.get(key, 0)]
        for key, places in found.items()
    }


def names_of_numbers(reader: StepReader, before: Iterable[Operation] = ()) -> dict[str, list[str]]:
    """Return what LeRobot's metadata call the numbers of fields, by the name of the field.

    Numbers that operations before have changed have no names.
    """
    try:
        features = json.loads(reader.documents().get(_INFO, b"{}")).get("features", {})
    except (ValueError, AttributeError):
        return {}
    found = {}
    for name, about in features.items() if isinstance(features, dict) else ():
        names = about.get("names") if isinstance(about, dict) else None
        if isinstance(names, dict) and len(names) == 1:  # such as {"motors": [...]}
            names = next(iter(names.values()))
        if isinstance(names, list) and all(isinstance(one, str) for one in names):
            found[name] = names
    for one in before:
        if isinstance(one, ChangeActionSpace):
            found.pop(one.key, None)
    return found
