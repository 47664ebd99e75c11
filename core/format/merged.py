"""Several datasets as one: their episodes one after the other, or in a given order, with the fields of one schema."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path

import numpy as np

from ..errors import UsageError
from ..ted.episodes import Continuity
from ..ted.schema import EPISODE, NEXT, Field, Key, as_numbers, state_keys
from .contracts import Array, StepReader
from .episodes import FINAL, EpisodeTable
from .manifest import Dropped, Manifest
from .returns import table_with_returns

MASK = "mask"
"""The group of the fields that mark where values are filled in."""


def mask_key(key: Key) -> Key:
    """The key of the field that states where `key` has values: `mask.info.x`, `next.mask.info.x`."""
    return (NEXT, MASK, *key[1:]) if key[0] == NEXT else (MASK, *key)


@dataclass(frozen=True, slots=True)
class MergedSchema:
    """The fields of a merged dataset, and what of its sources they do not keep as it is.

    `masks` maps the key of each mask, bool `[rows]`, to the key whose values it marks: a source without this mask has
    all the values, or none. `dropped` and `notes` name the fields that are left out, converted or filled in.
    """

    fields: tuple[Field, ...]
    masks: Mapping[Key, Key] = field(default_factory=dict)
    dropped: tuple[Dropped, ...] = ()
    notes: tuple[str, ...] = ()


class MergedSteps(StepReader):
    """The rows of several datasets, `members`, under the fields of `schema`; `manifest` states what the result is.

    `order`, int64 `[episodes]`, lists the episodes of all members, counted through, as the result has them; those of
    one member keep their order. `numbers` are new episode numbers. Values of another element type are converted, and
    fields that a member lacks are zero. The members are closed by their owner.
    """

    def __init__(
        self,
        members: Sequence[StepReader],
        schema: MergedSchema,
        manifest: Manifest,
        *,
        order: Array | None = None,
        numbers: Array | None = None,
    ) -> None:
        self.members = tuple(members)
        self.schema = schema
        self.manifest = manifest
        self.path = members[0].path
        self._renumbered = numbers is not None
        tables = [table_with_returns(member) for member in members]
        joined = joined_table(tables)
        chosen = np.arange(len(joined)) if order is None else np.asarray(order, np.int64)
        owner = np.repeat(np.arange(len(tables)), [len(table) for table in tables])[chosen]
        _require_kept_order(owner, chosen)
        columns = joined.columns() | {FINAL: joined.final}
        first = columns["start"][chosen]
        columns = {name: column[chosen] for name, column in columns.items()}
        columns["start"] = np.cumsum(columns["length"]) - columns["length"]
        if numbers is not None:
            columns["episode"] = numbers
        self._table = EpisodeTable.from_columns(columns)
        self._chosen = chosen
        self._owner = owner
        self._shift = first - self._table.start  # from steps here to steps of the member
        self._keys = [{leaf.key: leaf for leaf in member.fields} for member in members]
        self._span: tuple[int, int, list[tuple[int, int, RowPlaces | None]]] = (0, 0, [])
        if self._states_change():
            self._table = replace(self._table, explicit_next=self._explicit_episodes())

    def _states_change(self) -> bool:
        """Whether a member has other states than the merged fields make of its own."""
        merged = set(state_keys(self.fields))
        return any(
            set(state_keys(member.fields)) != {key for key in merged if key in keys or (NEXT, *key) in keys}
            for member, keys in zip(self.members, self._keys, strict=True)
        )

    def _explicit_episodes(self) -> Array:
        """Mark the episodes in which some state under `next` is not that of the following row."""
        found = np.zeros(len(self._table), bool)
        last = self._table.start + self._table.length - 1
        continuity = Continuity()
        for start, stop in self.chunks():
            which = self._table.index_of_step(np.arange(start - 1, stop - 1))  # of the row that leads to each
            inside = ~np.isin(np.arange(start - 1, stop - 1), last)
            for key in state_keys(self.fields):
                follows = continuity.see(key, self.read(key, start, stop), self.read((NEXT, *key), start, stop))
                found[which[inside & ~follows]] = True
        return found

    @property
    def episodes(self) -> EpisodeTable:
        return self._table

    @cached_property
    def episode_text(self) -> list[dict[str, str]] | None:
        """The text of every episode, empty for those of members without text."""
        texts = [member.episode_text for member in self.members]
        if all(text is None for text in texts):
            return None
        joined = [
            one
            for member, text in zip(self.members, texts, strict=True)
            for one in (text or [{}] * len(member.episodes))
        ]
        return [joined[row] for row in self._chosen.tolist()]

    def read(self, key: Key, start: int, stop: int) -> Array:
        leaf = self._leaf(key, start, stop)
        if key == EPISODE and (self._renumbered or not all(EPISODE in own for own in self._keys)):
            which = self._table.index_of_step(np.arange(start, stop))
            numbers = self._table.episode[which].astype(leaf.numpy)
            return np.broadcast_to(numbers.reshape(-1, *[1] * len(leaf.shape)), (stop - start, *leaf.shape)).copy()
        spans = self._spans(start, stop)
        if len(spans) == 1:
            return self._rows(spans[0][0], leaf, spans[0][1], spans[0][1] + stop - start)
        found = np.empty((stop - start, *leaf.shape), leaf.numpy)
        for member, first, places in spans:
            assert places is not None
            places.put(found, self._rows(member, leaf, first, first + len(places.rows)))
        return found

    def _rows(self, member: int, leaf: Field, start: int, stop: int) -> Array:
        """Rows of one member as the merged field has them."""
        key = self.schema.masks.get(leaf.key)
        own = self._keys[member].get(leaf.key)
        if own is None and key is not None:
            return np.full((stop - start, *leaf.shape), key in self._keys[member], leaf.numpy)
        if own is None:
            return np.zeros((stop - start, *leaf.shape), leaf.numpy)
        rows = self.members[member].read(leaf.key, start, stop)
        return rows if own.dtype == leaf.dtype else as_numbers(rows, own.dtype).astype(leaf.numpy)

    def _spans(self, start: int, stop: int) -> list[tuple[int, int, RowPlaces | None]]:
        """Of each member with rows in `[start, stop)`: its number, its first row there, and where its rows go."""
        if self._span[:2] == (start, stop):
            return self._span[2]
        low, high = self._table.index_of_step(np.array([start, max(start, stop - 1)])).tolist()
        owners = self._owner[low : high + 1]
        if start == stop or (owners == owners[0]).all():
            owner = int(owners[0]) if len(owners) else 0
            first = start + int(self._shift[low]) if len(owners) else 0
            found: list[tuple[int, int, RowPlaces | None]] = [(owner, first, None)]
        else:
            starts = np.maximum(self._table.start[low : high + 1], start)
            stops = np.minimum(self._table.start[low : high + 1] + self._table.length[low : high + 1], stop)
            by_row = np.repeat(owners, stops - starts)
            shifts = self._shift[low : high + 1] + starts
            found = [
                (int(owner), int(shifts[int((owners == owner).argmax())]), RowPlaces(np.flatnonzero(by_row == owner)))
                for owner in np.unique(owners)
            ]
        self._span = (start, stop, found)
        return found

    def documents(self) -> dict[str, bytes]:
        return joined_documents([member.documents() for member in self.members])

    def videos(self) -> dict[str, Path | bytes]:
        return {name: content for member in self.members for name, content in member.videos().items()}

    def verify_files(self) -> None:
        for member in self.members:
            member.verify_files()


def _require_kept_order(owner: Array, chosen: Array) -> None:
    for number in np.unique(owner):
        if (np.diff(chosen[owner == number]) != 1).any():
            raise UsageError("an order of episodes has to keep all those of a dataset, and their order")


class RowPlaces:
    """Some rows of an array, ascending; runs of several rows are moved at once."""

    def __init__(self, rows: Array) -> None:
        self.rows = rows
        edges = _edges(rows)
        self._runs = list(pairwise(edges)) if len(edges) <= len(rows) // _LONG_RUN else None

    def put(self, target: Array, values: Array) -> None:
        """Write `values`, one for each of the rows, into `target`."""
        if self._runs is None:
            target[self.rows] = values
            return
        for low, high in self._runs:
            first = int(self.rows[low])
            target[first : first + high - low] = values[low:high]


_LONG_RUN = 16
"""Rows of a run from which on a copy of its own costs less than an index for each row."""


def _edges(values: Array) -> list[int]:
    """Where runs of consecutive numbers start, and the end."""
    return [0, *(np.flatnonzero(np.diff(values) != 1) + 1).tolist(), len(values)]


def joined_table(tables: Sequence[EpisodeTable]) -> EpisodeTable:
    """The rows of several tables, one table after the other; `start` is that in the dataset of each."""
    names = [*tables[0].columns(), *([FINAL] if any(table.final.any() for table in tables) else [])]
    columns = {
        name: np.concatenate([(table.columns() | {FINAL: table.final})[name] for table in tables])
        for name in dict.fromkeys(names)
    }
    columns["explicit_start"] = np.full(len(columns["start"]), -1, np.int64)
    return EpisodeTable.from_columns(columns)


def joined_documents(each: Sequence[Mapping[str, bytes]]) -> dict[str, bytes]:
    """The documents of several datasets: under their names where all have the same, else below the dataset's number."""
    names = dict.fromkeys(name for documents in each for name in documents)
    common = {name for name in names if len({documents.get(name) for documents in each}) == 1}
    for kept in (common, set[str]()):
        found = [
            (name if name in kept else f"{number}/{name}", data)
            for number, documents in enumerate(each)
            for name, data in documents.items()
            if name not in kept or not number
        ]
        if len(dict(found)) == len(found):
            break
    return dict(found)


def runs_text(numbers: Sequence[int] | Array) -> str:
    """Write episode numbers in their order as runs: `0:40,57,52:55`."""
    values = np.asarray(numbers, np.int64)
    return ",".join(_run_text(int(values[low]), high - low) for low, high in pairwise(_edges(values)) if low < high)


def _run_text(first: int, count: int) -> str:
    return str(first) if count == 1 else f"{first}:{first + count}"


def numbers_of_runs(text: str) -> Array:
    """Undo `runs_text`. ValueError for other text."""
    parts = [part.split(":") for part in text.split(",")] if text else []
    runs = [np.arange(int(part[0]), int(part[-1]) + (len(part) == 1)) for part in parts]
    return np.concatenate([np.empty(0, np.int64), *runs])
