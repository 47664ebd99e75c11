"""Recording of environments: each lane has a buffer for its current episode, and one writer appends whole episodes.

    env.reset, env.step  ->  EnvironmentRecorder  ->  EpisodeBuffer of the lane  ->  EpisodeWriter  ->  recording
                             (`begin, act, observe`)  (the current episode)          (layout, resume)   (packed folder)

The wrappers of single and of vector environments both use `EnvironmentRecorder`.

An environment declares spaces for observations and actions, but none for infos. The leaves of infos therefore follow
from the values. A new entry adds a leaf. Longer text and wider numbers widen a leaf. An entry that is a number in one
episode and an array in another gets a leaf for each form, such as `info.x_number` and `info.x_3`. Each such change
rewrites the whole recording (`EpisodeWriter`), so the sizes of text grow in powers of two to make it rare.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import shlex
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..errors import RbtoolError, SchemaError, UsageError
from ..format import fs
from ..format.contracts import Array
from ..format.documents import dump_json, parse_json
from ..format.manifest import Dropped, Manifest, has_manifest
from ..format.memmap.tree import FieldRange, merge_ranges
from ..format.packed.recording import PackedRecorder, RecordedEpisode, RecordedOrigin, unfinished_recording
from ..format.staging import mend, new_sibling, sweep
from ..open_steps import open_steps
from ..progress import counted
from ..ted.episodes import EndReason
from ..ted.schema import (
    DTYPES,
    EPISODE,
    NEXT,
    NEXT_DONE,
    NEXT_REWARD,
    NEXT_TERMINATED,
    NEXT_TRUNCATED,
    Field,
    Key,
    key_name,
    length_key,
    safe_part,
)
from .repair import continued
from .spaces import Encoder, RecordedLeaf, renamed_entries, space_document, space_encoder, stack_padded

INFO = "info"
PRESENT = "_present"
"""Suffix of the mask of an entry that is missing in some rows."""
_SCALARS = frozenset({float, int, bool})
_LARGEST = (1 << 63) - 1
_EXACT = 1 << 53
_LONGEST_NAME = 200
_MOST_LEVELS = 20


@dataclass(slots=True)
class RecordedInfo:
    """One entry of the infos of an episode of n steps as a column of n + 1 rows; row 0 is the info of `reset`.

    `values` is `[n + 1, *shape]`, with zeros in rows that lack the entry; `present` is `[n + 1]`. Text is stored as
    UTF-8 bytes `[n + 1, longest]` with its `lengths`, `[n + 1]`.
    """

    values: Array
    present: Array
    lengths: Array | None = None


class InfoRows:
    """Collects the infos of an episode row by row, and turns them into columns.

    `dropped` maps the names of entries that cannot be stored to the reasons; `renamed` maps names that had to change to
    the new names.
    """

    def __init__(self) -> None:
        self.dropped: dict[str, str] = {}
        self.renamed: dict[str, str] = {}
        self._found: defaultdict[Key, tuple[list[int], list[Any]]] = defaultdict(lambda: ([], []))

    def put(self, row: int, info: Mapping[Any, Any], prefix: Key = (INFO,)) -> None:
        """Add the info of a row. Arrays are copied, because environments may reuse them."""
        for name, value in info.items():
            key = (*prefix, _part(name))
            if key[-1] != name:
                self.renamed[key_name((*prefix, str(name)))] = key_name(key)
            kind = type(value)
            if kind in _SCALARS or isinstance(value, str):
                kept = value
            elif kind is np.ndarray or isinstance(value, np.generic):
                if value.dtype.name not in DTYPES:
                    self._drop(key, f"it has elements of type {value.dtype}")
                    continue
                kept = np.array(value)
            elif isinstance(value, Mapping):
                if len(key) > _MOST_LEVELS:
                    self._drop(key, f"it is nested more than {_MOST_LEVELS} levels deep")
                else:
                    self.put(row, value, key)
                continue
            elif value is None:
                continue
            elif (kept := _listed(value)) is None:
                self._drop(key, f"it is a {kind.__name__}")
                continue
            rows, values = self._found[key]
            if rows and rows[-1] == row:
                self._drop(key, "two entries of one info have this name")
                continue
            rows.append(row)
            values.append(kept)

    def _drop(self, key: Key, why: str) -> None:
        self.dropped.setdefault(key_name(key), why)

    def clear(self) -> None:
        """Remove all rows; `dropped` and `renamed` stay."""
        self._found.clear()

    def take(self, length: int) -> dict[Key, RecordedInfo]:
        """Return the columns of the first `length + 1` rows, and remove all rows."""
        columns = {}
        found = {key: whole for key, each in self._found.items() if (whole := _first_rows(*each, length))[0]}
        self._found = defaultdict(lambda: ([], []))
        keys = set(found)
        for key, (rows, values) in found.items():
            if len(key[-1].encode()) > _LONGEST_NAME:
                self._drop(key, f"its name has more than {_LONGEST_NAME} bytes")
            elif any(key[:depth] in keys for depth in range(1, len(key))):
                self._drop(key, "it is in a dict that is a value in other steps")
            elif (column := self._column(key, np.array(rows), values, length)) is not None:
                columns[key] = column
        return columns

    def _column(self, key: Key, rows: Array, values: Sequence[Any], length: int) -> RecordedInfo | None:
        if isinstance(values[0], str):
            return self._text(key, rows, values, length)
        stacked = _stack(values)
        if stacked is None:
            first = np.asarray(values[0])
            alike = [one for one, value in enumerate(values) if _is_like(value, first)]
            odd = next(value for one, value in enumerate(values) if one not in set(alike))
            self._drop(key, f"in some steps: {_shown(odd)} where it is {_shown(first)} in others")
            rows, stacked = rows[alike], _stack([values[one] for one in alike])
        if stacked is None or stacked.dtype.name not in DTYPES:
            self._drop(key, "its numbers need more than 64 bits")
            return None
        if np.array_equal(rows, np.arange(length + 1)):
            return RecordedInfo(stacked, np.ones(length + 1, bool))
        column = RecordedInfo(np.zeros((length + 1, *stacked.shape[1:]), stacked.dtype), np.zeros(length + 1, bool))
        column.values[rows], column.present[rows] = stacked, True
        return column

    def _text(self, key: Key, rows: Array, values: Sequence[Any], length: int) -> RecordedInfo | None:
        texts = {row: value for row, value in zip(rows, values, strict=True) if isinstance(value, str)}
        data = {row: value.encode(errors="surrogatepass") for row, value in texts.items()}
        odd = next((value for value in values if not isinstance(value, str)), None)
        if odd is not None:
            self._drop(key, f"in some steps: {_shown(odd)} where it is text in others")
        longest = max(1, *map(len, data.values())) if data else 1
        lengths = np.zeros(length + 1, np.int32)
        column = RecordedInfo(np.zeros((length + 1, longest), np.uint8), np.zeros(length + 1, bool), lengths)
        for row, text in data.items():
            column.values[row, : len(text)] = np.frombuffer(text, np.uint8)
            column.present[row] = True
            lengths[row] = len(text)
        return column


def _first_rows(rows: list[int], values: list[Any], length: int) -> tuple[list[int], list[Any]]:
    """Return the rows up to `length`: a later one belongs to a step that was interrupted while it was recorded."""
    count = sum(row <= length for row in rows) if rows[-1] > length else len(rows)
    return rows[:count], values[:count]


def _part(name: Any) -> str:
    """Return a name as part of a key. A name with the suffix of masks gets a trailing `_`."""
    part = safe_part(str(name))
    return f"{part}_" if part.endswith(PRESENT) else part


def _listed(value: Any) -> Array | None:
    """Return a list or tuple of numbers as an array; None for anything else."""
    if not isinstance(value, list | tuple):
        return None
    try:
        found = np.asarray(value)
        if found.dtype.kind == "f" and (np.abs(found) >= _EXACT).any():  # numpy turns large integers into floats
            each = np.asarray(value, object)
            if all(isinstance(one, int | np.integer) for one in each.flat):
                found = each.astype(np.uint64 if min(each.flat) >= 0 else np.int64)
            elif any(isinstance(one, int | np.integer) and int(one) != float(one) for one in each.flat):
                return None
    except (ValueError, OverflowError):
        return None
    return found if found.dtype.name in DTYPES and found.size else None


def _stack(values: Sequence[Any]) -> Array | None:
    """Stack values of one shape in a type that holds all their numbers exactly; None if that is impossible."""
    kinds = {type(value) for value in values}
    if kinds == {int} and max(values) > _LARGEST >= min(values):  # numpy would turn these into floats
        if min(values) < 0:
            return None
        return np.array(values, np.uint64 if max(values) <= 2 * _LARGEST + 1 else object)
    if len(kinds) == 1 and kinds <= _SCALARS:
        return np.array(values)
    arrays = [np.asarray(value) for value in values if not isinstance(value, str)]
    if len(arrays) < len(values) or len({array.shape for array in arrays}) > 1:
        return None
    dtypes = {array.dtype for array in arrays}
    wide = np.result_type(*dtypes) if not any(dtype.hasobject for dtype in dtypes) else np.dtype(object)
    return np.array(arrays, wide) if all(holds(wide, array) for array in arrays) else None


def holds(dtype: np.dtype[Any], values: Array) -> bool:
    """Return whether a type represents these numbers exactly. Booleans and numbers are never mixed."""
    if dtype == values.dtype:
        return True
    if "b" in (dtype.kind, values.dtype.kind) or np.result_type(dtype, values.dtype) != dtype:
        return False
    with np.errstate(all="ignore"):
        back = values.astype(dtype).astype(values.dtype)
    return bool(np.array_equal(back, values, equal_nan=values.dtype.kind in "fc"))


def _is_like(value: Any, first: Array) -> bool:
    array = np.asarray(value)
    return bool(array.shape == first.shape and array.dtype == first.dtype)


def _shown(value: Any) -> str:
    array = np.asarray(value)
    return "text" if array.dtype.kind == "U" else f"{array.dtype} {list(array.shape)}"


MOST_FORMS = 16
"""The largest number of forms of one entry; limited because every new form rewrites the recording."""
_FORM = r"text|number|\d+(?:x\d+)*"
_RENAMED = re.compile(rf"(?P<entry>.+) \((?:shape )?(?P<form>{_FORM})\)")


def form_name(shape: tuple[int, ...], text: bool) -> str:
    """Return the name of an entry's form: `text`, `number`, or its shape, such as `2x3`."""
    return "text" if text else "x".join(map(str, shape)) or "number"


def form_of(column: RecordedInfo) -> str:
    """Return the name of a column's form."""
    return form_name(column.values.shape[1:], column.lengths is not None)


def named_by_form(key: Key, form: str) -> Key:
    """Return the key of the leaf for one form of an entry that has several forms."""
    return (*key[:-1], f"{key[-1]}_{form}")


def count_forms(key: Key, names: Iterable[Key]) -> int:
    """Count the leaves of an entry with several forms."""
    pattern = re.compile(rf"{re.escape(key[-1])}_(?:{_FORM})")
    return sum(name[:-1] == key[:-1] and pattern.fullmatch(name[-1]) is not None for name in names)


def entries_of_many_forms(known: Mapping[Key, str], infos: Mapping[Key, RecordedInfo]) -> set[Key]:
    """Return the entries, known ones or of a new episode, whose leaves must be named by their form.

    These are entries whose form differs from earlier episodes, entries that are a value in one place and a dict in
    another, and texts whose leaf of lengths would have the name of another entry. `known` maps the entries of earlier
    episodes to their forms. The result does not depend on the order of the episodes.
    """
    found = {key: form_of(column) for key, column in infos.items()}
    if all(known.get(key) == form for key, form in found.items()):
        return set()
    several = {key for key, form in found.items() if known.get(key, form) != form}
    every = {**known, **found}
    dicts = {key[:depth] for key in every for depth in range(1, len(key))}
    several |= every.keys() & dicts
    texts = {key for forms in (known, found) for key, form in forms.items() if form == "text"}
    return several | {key for key in texts if length_key(key) in dicts or length_key(key) in every}


def renaming(key: Key, form: str) -> tuple[str, str]:
    """Return the item of the manifest's `renamed_keys` for one form of an entry: its description and its leaf."""
    shown = form if form in {"text", "number"} else f"shape {form}"
    return f"{key_name(key)} ({shown})", key_name(named_by_form(key, form))


def entries_renamed(renamed: Mapping[str, str], names: Iterable[Key]) -> Iterator[Key]:
    """Yield the entries whose leaves are named by form, from `renamed_keys` and all leaves; inverts `renaming`."""
    by_name = {key_name(name): name for name in names}
    for stated, name in renamed.items():
        found, leaf = _RENAMED.fullmatch(stated), by_name.get(name)
        if found is not None and leaf is not None and leaf[-1].endswith(f"_{found['form']}"):
            entry = (*leaf[:-1], leaf[-1].removesuffix(f"_{found['form']}"))
            if key_name(entry) == found["entry"]:
                yield entry


_WIDEST_ROW = 64 << 20
"""The largest size of a padded value in bytes. Every row has the size of the longest value."""
_STEP_FIELDS = (
    Field(EPISODE, "int64", (), "id"), Field(NEXT_REWARD, "float64", (1,), "reward"),
    Field(NEXT_DONE, "bool", (1,), "done"), Field(NEXT_TERMINATED, "bool", (1,), "done"),
    Field(NEXT_TRUNCATED, "bool", (1,), "done"),
)  # fmt: skip


class RowLeaf(NamedTuple):
    """A leaf of an environment. For n steps it has n + 1 rows if `state` is set (observations), else n (actions)."""

    leaf: RecordedLeaf
    state: bool


@dataclass(slots=True)
class RawEpisode:
    """An episode of `length` steps in memory, as it was recorded.

    `states` are `[length + 1, *shape]`, `steps` are `[length, *shape]`. `cut_off` says that the episode was interrupted
    before it ended.
    """

    length: int
    leaves: tuple[RowLeaf, ...]
    states: dict[Key, Array]
    steps: dict[Key, Array]
    infos: dict[Key, RecordedInfo]
    seed: int | None = None
    cut_off: bool = False


class InfoTiming(Enum):
    """The rows, of `length + 1`, in which an entry of the infos is present."""

    STEPS = "steps"
    """All rows except the first, which is the info of `reset`. The entry is stored under `next` only."""
    ALL = "all"
    SOME = "some"
    """Some rows. They are marked by a mask that is stored beside the entry."""


def _timing(present: Array) -> InfoTiming:
    if present.all():
        return InfoTiming.ALL
    return InfoTiming.STEPS if present[1:].all() else InfoTiming.SOME


@dataclass(frozen=True, slots=True)
class InfoLeaf:
    """An entry of the infos as it is stored."""

    dtype: str
    shape: tuple[int, ...]
    text: bool
    timing: InfoTiming

    @property
    def form(self) -> str:
        """The name of the form: `text`, `number`, or a shape."""
        return form_name(self.shape, self.text)

    def fields(self, key: Key) -> list[Field]:
        """Return the fields that store the entry, at the root and under `next`."""
        found = [Field(key, self.dtype, self.shape, "text" if self.text else "info")]
        found += [Field(length_key(key), "int32", (), "text")] if self.text else []
        found += [Field(mask_key(key), "bool", (), "info")] if self.timing is InfoTiming.SOME else []
        after = [replace(one, key=(NEXT, *one.key)) for one in found]
        return after if self.timing is InfoTiming.STEPS else [*found, *after]


def _name(key: Key, form: str, several: frozenset[Key]) -> Key:
    return named_by_form(key, form) if key in several else key


def mask_key(key: Key) -> Key:
    """Return the key of an entry's mask."""
    return (*key[:-1], key[-1] + PRESENT)


@dataclass(frozen=True)
class RowLayout:
    """The leaves of a recording: `leaves` belong to the spaces, `infos` to the infos, by stored name.

    Entries in `several` have different forms in different episodes, and one leaf for each form, see `named_by_form`.
    A layout is immutable: `separated` and `grown` return a new layout, which can also hold one more episode.
    """

    leaves: tuple[RowLeaf, ...]
    infos: Mapping[Key, InfoLeaf] = field(default_factory=dict)
    several: frozenset[Key] = frozenset()

    def fields(self) -> tuple[Field, ...]:
        """Return the fields of the TED dataset."""
        found = []
        for leaf, state in self.leaves:
            one = Field(leaf.key, leaf.dtype, leaf.shape, leaf.role)
            found += [one, replace(one, key=(NEXT, *one.key))] if state else [one]
        found += [one for key, info in self.infos.items() for one in info.fields(key)]
        return tuple(sorted((*found, *_STEP_FIELDS), key=lambda one: (one.key[0] == NEXT, one.key)))

    @classmethod
    def of_fields(cls, fields: Sequence[Field], leaves: Sequence[RowLeaf], where: str) -> RowLayout:
        """Return the layout of a recording that is resumed; SchemaError if the environment has other leaves."""
        by_key = {one.key: one for one in fields}
        grown = []
        for leaf, state in leaves:
            found = by_key.get(leaf.key)
            fits = found is not None and found.dtype == leaf.dtype and len(found.shape) == len(leaf.shape)
            fits = fits and found is not None and found.shape[leaf.ragged :] == leaf.shape[leaf.ragged :]
            if not fits or found is None or ((NEXT, *leaf.key) in by_key) != state:
                there = "missing" if found is None else f"{found.dtype} {list(found.shape)}"
                raise SchemaError(
                    f"{where} was recorded from another environment: {key_name(leaf.key)} is {there} there, "
                    f"expected {leaf.dtype} {list(leaf.shape)}"
                )
            grown.append(RowLeaf(replace(leaf, shape=found.shape), state))
        infos = {}
        for key, one in by_key.items():
            root = key[1:] if key[0] == NEXT else key
            is_mask = root[-1].endswith(PRESENT)
            if root[0] != INFO or root in infos or is_mask or (one.role == "text" and one.dtype == "int32"):
                continue
            timing = InfoTiming.ALL if root in by_key else InfoTiming.STEPS
            timing = InfoTiming.SOME if mask_key(root) in by_key else timing
            infos[root] = InfoLeaf(one.dtype, one.shape, one.role == "text", timing)
        known = {one.key for one in (*cls(tuple(grown), infos).fields(),)}
        if known != by_key.keys():
            odd = ", ".join(sorted(map(key_name, known ^ by_key.keys())))
            raise SchemaError(f"{where} was recorded from another environment: only one of the two has {odd}")
        return cls(tuple(grown), infos)

    def separated(self, infos: Mapping[Key, RecordedInfo]) -> RowLayout:
        """Return the layout with a leaf for each form of those entries whose form in this episode is new."""
        known = {key: leaf.form for key, leaf in self.infos.items()}
        found = entries_of_many_forms(known, {key: one for key, one in infos.items() if key not in self.several})
        if not found:
            return self
        several = self.several | found
        return RowLayout(
            self.leaves, {_name(key, leaf.form, several): leaf for key, leaf in self.infos.items()}, several
        )

    def named(self, infos: Mapping[Key, RecordedInfo]) -> dict[Key, RecordedInfo]:
        """Return the infos of an episode under the names of their leaves."""
        return {_name(key, form_of(one), self.several): one for key, one in infos.items()}

    def moved(self, before: RowLayout) -> dict[Key, Key]:
        """Return the info leaves of an earlier layout that have a new name in this one, mapped to that name."""
        names = {key: _name(key, leaf.form, self.several) for key, leaf in before.infos.items()}
        return {key: name for key, name in names.items() if name != key}

    def grown(self, raw: RawEpisode, ranges: Mapping[Key, FieldRange], *, first: bool = False) -> RowLayout:
        """Return the layout widened so that it can hold this episode; this object if it can already."""
        leaves = tuple(
            RowLeaf(_grown(leaf, (raw.states if state else raw.steps)[leaf.key].shape[1:]), state)
            for leaf, state in self.leaves
        )
        infos = dict(self.infos)
        for key in self.infos.keys() | raw.infos.keys():
            column = raw.infos.get(key)
            known = infos.get(key)
            if column is None:
                infos[key] = replace(infos[key], timing=InfoTiming.SOME)
            elif known is None:
                timing = _timing(column.present) if first else InfoTiming.SOME
                text = column.lengths is not None
                shape = (_power(column.values.shape[1]),) if text else column.values.shape[1:]
                infos[key] = InfoLeaf(column.values.dtype.name, shape, text, timing)
            else:
                infos[key] = _widened(known, column, _range(key, ranges))
        same = leaves == self.leaves and infos == self.infos
        return self if same else RowLayout(leaves, dict(sorted(infos.items())), self.several)

    def columns(self, raw: RawEpisode, number: int) -> tuple[dict[Key, Array], dict[Key, Array]]:
        """Convert an episode to the states and steps that are stored."""
        states: dict[Key, Array] = {}
        steps = dict(raw.steps)
        for leaf, state in self.leaves:
            rows = (raw.states if state else raw.steps)[leaf.key]
            (states if state else steps)[leaf.key] = _fitted(rows, leaf.shape) if leaf.ragged else rows
        steps[EPISODE] = np.full(raw.length, number, np.int64)
        for key, info in self.infos.items():
            values = info_columns(key, info, raw.infos.get(key), raw.length)
            if info.timing is InfoTiming.STEPS:
                steps |= {(NEXT, *name): rows[1:] for name, rows in values.items()}
            else:
                states |= values
        return states, steps

    def raw(self, stored: RecordedEpisode) -> RawEpisode:
        """Convert a stored episode back to the recorded form: the inverse of `columns`."""
        states, steps, length = stored.states, stored.steps, stored.commit.row.length
        infos = {}
        for key, info in self.infos.items():

            def rows(name: Key, info: InfoLeaf = info) -> Array:
                if info.timing is not InfoTiming.STEPS:
                    return states[name]
                after = steps[(NEXT, *name)]
                return np.concatenate([np.zeros_like(after[:1]), after])

            present = np.ones(length + 1, bool)
            present[0] = info.timing is not InfoTiming.STEPS
            present = states[mask_key(key)] if info.timing is InfoTiming.SOME else present
            infos[key] = RecordedInfo(rows(key), present, rows(length_key(key)) if info.text else None)
        kept = {leaf.key for leaf, state in self.leaves if not state} | {one.key for one in _STEP_FIELDS}
        row = stored.commit.row
        return RawEpisode(
            length, self.leaves, {leaf.key: states[leaf.key] for leaf, state in self.leaves if state},
            {key: steps[key] for key in kept}, infos, row.seed, row.end_reason is EndReason.END_OF_FILE,
        )  # fmt: skip


def info_columns(key: Key, info: InfoLeaf, column: RecordedInfo | None, length: int) -> dict[Key, Array]:
    """Return the stored columns `[length + 1, …]` of an entry: values, and lengths and mask if it has them."""
    if column is None:
        column = RecordedInfo(np.zeros((length + 1, *info.shape), info.dtype), np.zeros(length + 1, bool))
    values = column.values if column.values.dtype == info.dtype else column.values.astype(info.dtype)
    found = {key: _fitted(values, info.shape) if info.text else values}
    if info.text:
        found[length_key(key)] = np.zeros(length + 1, np.int32) if column.lengths is None else column.lengths
    if info.timing is InfoTiming.SOME:
        found[mask_key(key)] = column.present
    return found


def fit_infos(layout: RowLayout, raw: RawEpisode, ranges: Mapping[Key, FieldRange]) -> dict[str, str]:
    """Remove the infos of an episode that the recording cannot hold; return their names and the reasons."""
    dropped = {}
    for key in list(raw.infos):
        why = _why_not(layout, key, raw.infos, _range(key, ranges))
        if why:
            dropped[key_name(key)] = why
            del raw.infos[key]
    return dropped


def _range(key: Key, ranges: Mapping[Key, FieldRange]) -> FieldRange:
    """Return the range of an entry over its two leaves: the first row is only at the root, the last only in `next`."""
    return merge_ranges(ranges.get(key), ranges.get((NEXT, *key)))


def _why_not(layout: RowLayout, key: Key, infos: Mapping[Key, RecordedInfo], known_range: FieldRange) -> str:
    column, known = infos[key], layout.infos.get(key)
    taken = layout.infos.keys() | {one[:depth] for one in layout.infos for depth in range(1, len(one))}
    if column.lengths is not None and length_key(key) in taken:
        return f"the name of its lengths, {key_name(length_key(key))!r}, belongs to another entry"
    lengths = {length_key(one) for one, other in infos.items() if other.lengths is not None} - taken
    lengths |= {length_key(one) for one, leaf in layout.infos.items() if leaf.text}
    if any(key[:depth] in lengths for depth in range(1, len(key) + 1)):
        return f"{key_name(key)!r} is the name of the lengths of a text"
    for entry in layout.several if known is None else ():
        if key == named_by_form(entry, form_of(column)) and count_forms(entry, layout.infos) >= MOST_FORMS:
            return f"{key_name(entry)!r} has {MOST_FORMS} other forms, and no more are kept"
    others = layout.infos.keys() - {key}
    if any(key == one[: len(key)] or one == key[: len(one)] for one in others):
        return "it is a dict in some episodes and a value in others"
    if known is None:
        return ""
    if known.text != (column.lengths is not None):
        return f"in some episodes: it is {'text' if known.text else 'numbers'} in others"
    if not known.text and known.shape != column.values.shape[1:]:
        return f"in some episodes: its shape is {list(column.values.shape[1:])}, and {list(known.shape)} in others"
    if not known.text and _common(known.dtype, column.values, known_range) is None:
        return f"in some episodes: no type holds its {column.values.dtype} and its {known.dtype} numbers"
    return ""


def _common(dtype: str, values: Array, known_range: FieldRange) -> np.dtype[Any] | None:
    """Return a type that represents `values`, and all numbers of `dtype` within a range, exactly; None if none does."""
    own = np.dtype(dtype)
    if own == values.dtype or holds(own, values):
        return own
    wide = np.result_type(own, values.dtype)
    limits = np.array(known_range, own) if known_range is not None else np.zeros(1, own)
    exact = own.kind not in "iu" or wide.kind in "iu" or bool((np.abs(limits.astype(np.float64)) < 1 << 53).all())
    return wide if holds(wide, values) and holds(wide, limits) and exact else None


def _widened(known: InfoLeaf, column: RecordedInfo, known_range: FieldRange) -> InfoLeaf:
    timing = known.timing if known.timing in (_timing(column.present), InfoTiming.SOME) else InfoTiming.SOME
    if known.text:
        needed = column.values.shape[1]
        return replace(known, timing=timing, shape=known.shape if needed <= known.shape[0] else (_power(needed),))
    common = _common(known.dtype, column.values, known_range)
    return replace(known, timing=timing, dtype=known.dtype if common is None else common.name)


def _power(size: int) -> int:
    """Return the next power of two: values that keep growing then rewrite the recording only a few times."""
    return 1 << (size - 1).bit_length() if size else 0


def _grown(leaf: RecordedLeaf, shape: tuple[int, ...]) -> RecordedLeaf:
    if not leaf.ragged or all(needed <= there for needed, there in zip(shape, leaf.shape, strict=True)):
        return leaf
    sizes = tuple(there if needed <= there else _power(needed) for needed, there in zip(shape, leaf.shape, strict=True))
    if int(np.prod(sizes, dtype=np.float64)) * np.dtype(leaf.dtype).itemsize > _WIDEST_ROW:
        raise SchemaError(
            f"{key_name(leaf.key)} has a value of shape {list(shape)}, too large to be recorded: "
            f"every row takes the space of the longest, which is limited to {_WIDEST_ROW >> 20} MiB"
        )
    return replace(leaf, shape=sizes)


def _fitted(rows: Array, shape: tuple[int, ...]) -> Array:
    """Pad rows with zeros to this shape."""
    if rows.shape[1:] == shape:
        return rows
    found = np.zeros((len(rows), *shape), rows.dtype)
    found[tuple(map(slice, rows.shape))] = rows
    return found


PIXELS = "pixels"
NO_FRAME = "render() gave a frame for some steps and None for others, or for all, expected one for each step"
_ROOM = 64


class EnvironmentRecorder:
    """Records `lanes` environments with the same spaces. Each lane has its own current episode.

    With `max_episodes`, lane k records the episodes k, k + lanes, k + 2 lanes, … below that number and then stops.
    Which episodes are recorded therefore does not depend on the speed of the lanes.

    `resume` also accepts a finished dataset that has all these episodes: nothing is recorded, and `finish` returns its
    manifest.
    """

    def __init__(
        self,
        dest: str | os.PathLike[str],
        observation_space: Any,
        action_space: Any,
        spec: Any,
        *,
        lanes: int,
        resume: bool,
        infos: bool,
        max_episodes: int | None,
        sync_seconds: float,
    ) -> None:
        if not sync_seconds >= 0:
            raise UsageError(f"sync_seconds is {sync_seconds}, expected a number from 0")
        if max_episodes is not None and max_episodes < 1:
            raise UsageError(f"max_episodes is {max_episodes}, expected a number from 1")
        self._spaces = (observation_space, action_space)
        parts = (("observation", observation_space), ("action", action_space))
        encoders = [space_encoder(name, space, name) for name, space in parts]  # type: ignore[arg-type]
        self._lanes = [EpisodeBuffer(*encoders, infos=infos) for _ in range(lanes)]
        self._max_episodes = max_episodes
        name = getattr(spec, "id", None) or "an environment without a spec"
        origin = RecordedOrigin(
            name,
            {"env": name, "env_spec": _spec_document(spec), "num_envs": lanes},
            {name: document for name, space in parts if (document := space_document(space)) is not None},
            renamed_keys=dict(pair for part in parts for pair in renamed_entries(*part)),
            notes=tuple(_notes(parts)),
        )
        self.writer = EpisodeWriter(
            fs.expanded(dest).absolute(), origin, sync_seconds=sync_seconds, resume=resume, wanted=max_episodes
        )
        done = set(self.writer.numbers)
        self.lane: int | None = None
        """The lane whose data are being recorded; None while the environments are stepped."""
        self._open_numbers = [number for number in range(max_episodes or 0) if number not in done]
        self._numbers: list[int | None] = [self._next_number(lane) for lane in range(lanes)]

    def under_way(self) -> str:
        """Name the current episode for messages; all current episodes if the lane is not known."""
        numbers = self._numbers if self.lane is None else [self._numbers[self.lane]]
        known = sorted(number for number in numbers if number is not None) or [self.writer.episodes]
        return f"episode {known[0]}" if len(known) == 1 else f"one of the episodes {', '.join(map(str, known))}"

    def describe(self, arguments: Mapping[str, Any]) -> None:
        """Add arguments to the provenance in the manifest, also when a recording is resumed."""
        self.writer.describe(arguments)

    def _next_number(self, lane: int) -> int | None:
        """Return the number of a lane's next episode; None if it is done, or there is no `max_episodes`."""
        if self._max_episodes is None:
            return None
        lanes = len(self._lanes)
        return next((number for number in self._open_numbers if number % lanes == lane), None)

    def number(self, lane: int) -> int | None:
        """Return the number that a lane's episode gets; None if the lane is done, or there is no `max_episodes`."""
        return self._numbers[lane]

    def records(self, lane: int) -> bool:
        """Return whether a lane still records: it stops after its share of `max_episodes`."""
        return self._max_episodes is None or self._numbers[lane] is not None

    @property
    def is_complete(self) -> bool:
        """Whether all `max_episodes` episodes are written."""
        return not any(map(self.records, range(len(self._lanes))))

    def require_spaces(self, observation_space: Any, action_space: Any) -> None:
        """Raise SchemaError if the environment's spaces changed since the recording began."""
        for name, space, found in zip(
            ("observation", "action"), self._spaces, (observation_space, action_space), strict=True
        ):
            if found is not space and found != space:
                raise SchemaError(
                    f"the {name} space changed: it is {_brief(found)}, and the recording has {_brief(space)}",
                    hint="record each space to a dataset of its own",
                )

    def begin(self, lane: int, observation: Any, info: Any, *, seed: int | None = None, frame: Any = None) -> None:
        """Begin an episode with the result of `reset`; an unfinished episode is cut off first."""
        self.lane = lane
        self.cut_off(lane)
        if self.records(lane):
            self._lanes[lane].begin(observation, info, seed=seed, frame=frame)

    def act(self, lane: int, action: Any) -> None:
        """Check the action of the next step, before the environment is stepped."""
        self.lane = lane
        if self.records(lane):
            self._lanes[lane].act(action)

    def observe(
        self, lane: int, observation: Any, reward: Any, terminated: Any, truncated: Any, info: Any, frame: Any = None
    ) -> bool:
        """Record a step. If it ends the episode, write the episode and return True."""
        self.lane = lane
        if not self.records(lane):
            return bool(terminated or truncated)
        ended = self._lanes[lane].observe(observation, reward, terminated, truncated, info, frame)
        if ended:
            self._write(lane)
        return ended

    def interrupt(self) -> None:
        """Accept no more steps of the current episodes after an error, because a step may be missing.

        Their recorded steps are written, as cut-off episodes, at the next `reset` or `finish`, or at the end of the
        `with` block.
        """
        for buffer in self._lanes:
            buffer.is_open = False

    def cut_off(self, lane: int) -> None:
        """Write the unfinished episode of a lane, if it has a step; its last step is marked truncated."""
        if self._lanes[lane].length and not self.writer.is_closed:
            self._write(lane)
        self._lanes[lane].discard()

    def _write(self, lane: int) -> None:
        buffer = self._lanes[lane]
        raw = buffer.take()
        self.writer.add(raw, self._numbers[lane], buffer.dropped, buffer.renamed)
        number = self._numbers[lane]
        if number is not None:
            self._open_numbers.remove(number)
            self._numbers[lane] = self._next_number(lane)

    def discard(self) -> None:
        """Discard the unfinished episodes."""
        for buffer in self._lanes:
            buffer.discard()

    def finish(self) -> Manifest:
        """Turn the recording into a dataset; unfinished episodes are cut off."""
        for lane in range(len(self._lanes)):
            self.cut_off(lane)
        return self.writer.finish()

    def close(self) -> None:
        """Stop without making a dataset; unfinished episodes are lost. May be called again, and after `finish`."""
        self.discard()
        self.writer.close()

    def leave(self, error: BaseException | None) -> None:
        """Leave a `with` block: finish, or close after an error; unfinished episodes are cut off in both cases."""
        if self.writer.is_closed:
            return
        try:
            if error is None:
                self.finish()
                return
            with contextlib.suppress(RbtoolError, OSError):  # the original error is raised
                for lane in range(len(self._lanes)):
                    self.cut_off(lane)
        except BaseException as raised:
            error = error or raised
            raise
        finally:
            if error is not None:
                self.abandon()
                if self.writer.episodes:
                    error.add_note(f"hint: {self.kept()}")

    def abandon(self) -> None:
        """Close after an error. Errors of closing are suppressed, so that the original error is raised."""
        with contextlib.suppress(RbtoolError, OSError):
            self.close()

    def kept(self) -> str:
        """Return a hint on the episodes that an interrupted recording has, and how to continue or repair it."""
        episodes, dest = self.writer.episodes, self.writer.dest
        many = f"{counted(episodes, 'episode')} {'is' if episodes == 1 else 'are'}"
        return f"{many} kept; make a dataset of {dest}: rbtool repair {shlex.quote(str(dest))}, or continue with resume"


def require_seeds(seeds: Sequence[Any]) -> None:
    """Raise UsageError for a seed that the episode table cannot store."""
    for seed in seeds:
        if seed is not None and not (isinstance(seed, int | np.integer) and 0 <= seed < 1 << 63):
            raise UsageError(f"the seed is {seed!r}, expected a whole number from 0 to 2**63 - 1")


def _notes(parts: Any) -> list[str]:
    return [
        f"the {name} space is not recorded: it is {_brief(space)}"
        for name, space in parts
        if space_document(space) is None
    ]


def _brief(space: Any) -> str:
    text = " ".join(repr(space).split())
    return text if len(text) <= 120 else text[:119] + "…"


def _spec_document(spec: Any) -> Any:
    """Return the spec of an environment as a JSON document, if need be simplified; None without a spec."""
    if spec is None:
        return None
    try:
        return parse_json(spec.to_json(), "the spec of the environment")
    except (TypeError, ValueError, AttributeError):
        kwargs = {name: str(value) for name, value in (spec.kwargs or {}).items()}
        return {"id": spec.id, "max_episode_steps": spec.max_episode_steps, "kwargs": kwargs}


class _Rows:
    """The rows of one leaf in the current episode. The array is reused for the next episode."""

    def __init__(self, leaf: RecordedLeaf) -> None:
        self.leaf = leaf
        self._array = np.empty((_ROOM, *leaf.shape), leaf.dtype) if not leaf.ragged else None
        self._held: list[Array] = []

    def put(self, row: int, value: Any) -> None:
        """Copy a value to a row: the next one, or the last one again if its step was not completed."""
        array = self._array
        if array is None:
            del self._held[row:]
            self._held.append(np.array(value))
            return
        if row == len(array):
            self._array = array = np.concatenate([array, np.empty_like(array)])
        array[row] = value

    def take(self, count: int) -> Array:
        """Return the first rows, `[count, *shape]`; the array is valid until the next `put`."""
        if self._array is not None:
            return self._array[:count]
        return stack_padded(self._held[:count], self.leaf)


class EpisodeBuffer:
    """Collects the steps of one episode at a time in memory.

    A step is recorded in two parts: `act` checks and stores the action before the environment is stepped, `observe`
    stores the result of the step. After an error in either, the earlier steps are kept, and the buffer accepts no
    further step until the next `begin`: otherwise the episode would have a gap.
    """

    def __init__(self, observation: Encoder, action: Encoder, *, infos: bool = True) -> None:
        self.is_open = False
        self.length = 0
        self.seed: int | None = None
        self._observation, self._action = observation, action
        self._states = [_Rows(leaf) for leaf in observation.leaves]
        self._steps = [_Rows(leaf) for leaf in action.leaves]
        self._pixels: _Rows | None = None
        self._rewards: list[float] = []
        self._terminated: list[bool] = []
        self._truncated: list[bool] = []
        self._infos = InfoRows() if infos else None

    @property
    def dropped(self) -> Mapping[str, str]:
        """The names of infos that cannot be stored, mapped to the reasons."""
        return self._infos.dropped if self._infos is not None else {}

    @property
    def renamed(self) -> Mapping[str, str]:
        """The names of infos that are stored under another name, mapped to that name."""
        return self._infos.renamed if self._infos is not None else {}

    @property
    def leaves(self) -> tuple[RowLeaf, ...]:
        """The leaves of the rows."""
        states = [*self._states, *([self._pixels] if self._pixels is not None else [])]
        return (*(RowLeaf(one.leaf, True) for one in states), *(RowLeaf(one.leaf, False) for one in self._steps))

    def begin(self, observation: Any, info: Mapping[Any, Any], *, seed: int | None = None, frame: Any = None) -> None:
        """Begin an episode with the result of `reset`. The steps of an unfinished episode are discarded."""
        self.discard()
        self._put_state(0, observation, info, frame)
        self.seed, self.is_open = seed, True

    def act(self, action: Any) -> None:
        """Check and store the action of the next step. UsageError if no episode has begun."""
        if not self.is_open:
            raise UsageError("step() comes after the end of an episode: call reset() first")
        values = self._action.encode(action)
        for rows, value in zip(self._steps, values, strict=True):
            rows.put(self.length, value)

    def observe(
        self,
        observation: Any,
        reward: Any,
        terminated: Any,
        truncated: Any,
        info: Mapping[Any, Any],
        frame: Any = None,
    ) -> bool:
        """Store the result of a step; return whether the episode ended."""
        self.is_open = False  # until the step is stored completely
        if type(reward) is not float:
            reward = _reward(reward)
        ended = (bool(terminated), bool(truncated))
        self._put_state(self.length + 1, observation, info, frame)
        self._rewards.append(reward)
        self._terminated.append(ended[0])
        self._truncated.append(ended[1])
        self.length += 1
        self.is_open = not (ended[0] or ended[1])
        return not self.is_open

    def _put_state(self, row: int, observation: Any, info: Mapping[Any, Any], frame: Any) -> None:
        values = self._observation.encode(observation)
        for rows, value in zip(self._states, values, strict=True):
            rows.put(row, value)
        if frame is not None:
            self._put_frame(row, frame)
        elif self._pixels is not None:
            raise SchemaError(NO_FRAME)
        if info and self._infos is not None:
            self._infos.put(row, info)

    def _put_frame(self, row: int, frame: Any) -> None:
        found = np.asarray(frame)
        if self._pixels is None:
            if row:
                raise SchemaError(NO_FRAME)
            if found.dtype != np.uint8 or found.ndim != 3:
                raise SchemaError(f"render() gave {found.dtype} {list(found.shape)}, expected uint8 [height, width, 3]")
            self._pixels = _Rows(RecordedLeaf((PIXELS,), "uint8", found.shape, "observation"))
        expected = self._pixels.leaf.shape
        if found.dtype != np.uint8 or found.shape != expected:
            raise SchemaError(
                f"render() gave {found.dtype} {list(found.shape)}, the frames before it are uint8 {list(expected)}"
            )
        self._pixels.put(row, found)

    def take(self) -> RawEpisode:
        """Return the episode, which must have at least one step, and empty the buffer.

        The arrays are valid until the next `begin`. If the episode has not ended, its last step is marked truncated.
        """
        length = self.length
        terminated, truncated = (
            np.array(flags[:length], bool)[:, None] for flags in (self._terminated, self._truncated)
        )
        cut_off = not (terminated[-1, 0] or truncated[-1, 0])
        truncated[-1] |= cut_off
        states = {row.leaf.key: row.take(length + 1) for row in self._states}
        if self._pixels is not None:
            states[PIXELS,] = self._pixels.take(length + 1)
        steps: dict[Key, Array] = {row.leaf.key: row.take(length) for row in self._steps}
        steps[NEXT_REWARD] = np.array(self._rewards[:length], np.float64)[:, None]
        steps |= {NEXT_DONE: terminated | truncated, NEXT_TERMINATED: terminated, NEXT_TRUNCATED: truncated}
        infos = self._infos.take(length) if self._infos is not None else {}
        raw = RawEpisode(length, self.leaves, states, steps, infos, self.seed, bool(cut_off))
        self.discard()
        return raw

    def discard(self) -> None:
        """Discard the current episode."""
        self.is_open, self.length, self.seed = False, 0, None
        self._rewards, self._terminated, self._truncated = [], [], []
        if self._infos is not None:
            self._infos.clear()


def _reward(reward: Any) -> float:
    try:
        found = np.asarray(reward)
        if found.size == 1 and found.dtype.kind in "biuf":
            number = found.item()
            kept = float(number)
            if kept == number or number != number:
                return kept
            raise SchemaError(f"the reward {number} ({found.dtype}) is not exact as float64, the type of rewards")
    except (TypeError, ValueError, OverflowError):
        pass
    shape = f" {list(reward.shape)}" if isinstance(reward, np.ndarray) else ""
    raise SchemaError(f"the reward is a {type(reward).__name__}{shape}, expected one number")


class EpisodeWriter:
    """Appends episodes to a recording at `dest`. When `add` returns, the episode survives the death of the process.

    With `resume`, an unfinished recording at `dest` is continued, and a finished one is left unchanged if it has all
    `wanted` episodes. UsageError for anything else at `dest`.

    `add` first determines the layout that can hold the new episode. If it is the current layout, the episode is
    appended. Otherwise all episodes are rewritten with the wider layout into a sibling folder, which then replaces the
    recording atomically (`_rewritten`).
    """

    def __init__(
        self,
        dest: Path,
        origin: RecordedOrigin,
        *,
        sync_seconds: float,
        resume: bool = False,
        wanted: int | None = None,
    ) -> None:
        self.dest = dest
        self._origin, self._sync_seconds = origin, sync_seconds
        self._recorder: PackedRecorder | None = None
        self._finished: tuple[Manifest, list[int]] | None = None
        self._layout: RowLayout | None = None
        self._dropped = {one.key: one.why for one in origin.dropped_keys}
        self._made = False
        self._next = 0
        self.is_closed = False
        mend(dest)
        sweep(dest)  # removes the leftovers of a process that died while it rewrote a recording
        occupied = dest.exists() and (not dest.is_dir() or any(dest.iterdir()))
        if occupied and resume:
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                self._origin = RecordedOrigin.load(dest)
                self._dropped = {one.key: one.why for one in self._origin.dropped_keys}
                _require_same(self._origin, origin, dest)
            self._finished = None if wanted is None else finished_recording(dest, wanted)
            if self._finished is not None:
                return
            self._recorder = continued(dest, sync_seconds=sync_seconds)
            if self._origin is origin and not self.episodes:  # the process died before it saved the origin
                origin.save(dest)
            self._next = max(self.numbers, default=-1) + 1
        elif occupied:
            raise _occupied(dest)
        elif not dest.exists():
            fs.make_folder(dest)  # so that an error occurs now, not after the environment has run for hours
            self._made = True

    def describe(self, arguments: Mapping[str, Any]) -> None:
        """Add arguments to the provenance."""
        self._origin = replace(self._origin, arguments={**self._origin.arguments, **arguments})
        if self._recorder is not None:
            self._origin.save(self.dest)

    @property
    def episodes(self) -> int:
        """The number of episodes written so far."""
        return len(self.numbers)

    @property
    def steps(self) -> int:
        """The number of steps written so far."""
        if self._finished is not None:
            return self._finished[0].steps
        return self._recorder.steps if self._recorder is not None else 0

    @property
    def numbers(self) -> list[int]:
        """The numbers of the episodes written so far."""
        if self._finished is not None:
            return self._finished[1]
        return [commit.row.episode for commit in self._recorder.commits] if self._recorder is not None else []

    def add(
        self,
        raw: RawEpisode,
        number: int | None = None,
        dropped: Mapping[str, str] | None = None,
        renamed: Mapping[str, str] | None = None,
    ) -> None:
        """Write an episode.

        Args:
            raw: the episode.
            number: the episode's number; by default one more than the highest so far.
            dropped: infos that the episode lacks, mapped to the reasons.
            renamed: infos that are stored under another name, mapped to that name.
        """
        if self.is_closed:
            raise UsageError(f"the recording {self.dest} is closed: nothing can be added")
        recorder = self._recorder
        ranges = recorder.rows.ranges if recorder is not None else {}
        layout = self._layout
        if layout is None:
            layout = RowLayout(raw.leaves)
            if recorder is not None:
                layout = RowLayout.of_fields(recorder.fields, raw.leaves, str(self.dest))
                several = frozenset(entries_renamed(self._origin.renamed_keys, layout.infos))
                layout = replace(layout, several=several)
        before, stated = layout, dict[str, str]()
        layout = layout.separated(raw.infos)
        if layout.several:
            moved = layout.moved(before)
            stated = self._renamings(before, layout, raw)
            raw.infos = layout.named(raw.infos)
            ranges = {_moved(key, moved): found for key, found in ranges.items()}
        lost = dict(dropped or {}) | fit_infos(layout, raw, ranges)
        names = dict(renamed or {}) | {entry: name for entry, name in stated.items() if name not in lost}
        grown = layout.grown(raw, ranges, first=recorder is None)
        noted = bool(lost.keys() - self._dropped.keys() or names.keys() - self._origin.renamed_keys.keys())
        if recorder is None:
            recorder = PackedRecorder(self.dest, grown.fields(), sync_seconds=self._sync_seconds)
            self._recorder = recorder
            self._origin.save(self.dest)
        elif grown is not before:
            if noted:  # save before the rewrite, so that `renamed_keys` has the name of every stored leaf at any time
                self._note(lost, names)
            recorder, noted = self._rewritten(recorder, before, grown), False
        self._layout = grown
        if noted:
            self._note(lost, names)
        states, steps = grown.columns(raw, self._next if number is None else number)
        number = int(steps[("episode",)][0])
        recorder.add_states(states, steps, episode=number, seed=raw.seed, cut_off=raw.cut_off)
        self._next = max(self._next, number + 1)

    def _renamings(self, before: RowLayout, layout: RowLayout, raw: RawEpisode) -> dict[str, str]:
        """Return the items of `renamed_keys` for the forms in this episode and in the earlier ones."""
        forms = [(key, form_of(one)) for key, one in raw.infos.items()]
        forms += [(key, leaf.form) for key, leaf in before.infos.items()]
        return dict(renaming(key, form) for key, form in forms if key in layout.several)

    def _note(self, dropped: Mapping[str, str], renamed: Mapping[str, str]) -> None:
        self._dropped = dict(dropped) | self._dropped
        named = tuple(Dropped(key, why) for key, why in sorted(self._dropped.items()))
        names = {**self._origin.renamed_keys, **renamed}
        self._origin = replace(self._origin, dropped_keys=named, renamed_keys=dict(sorted(names.items())))
        self._origin.save(self.dest)

    def _rewritten(self, old: PackedRecorder, layout: RowLayout, grown: RowLayout) -> PackedRecorder:
        """Rewrite all episodes with the leaves of `grown` into a new folder, and swap it atomically with `dest`."""
        built = new_sibling(self.dest)
        new = PackedRecorder(built, grown.fields(), sync_seconds=math.inf)
        try:
            self._origin.save(built)
            moved = grown.moved(layout)
            for stored in old.episodes():
                raw, row = layout.raw(stored), stored.commit.row
                raw.infos = {moved.get(key, key): one for key, one in raw.infos.items()}
                states, steps = grown.columns(raw, row.episode)
                new.add_states(states, steps, episode=row.episode, seed=row.seed, cut_off=raw.cut_off)
            new.sync()
            aside = _put_in_place(built, self.dest)
        except BaseException:
            with contextlib.suppress(OSError):  # the next process that opens the recording removes leftovers
                new.close()
                fs.remove(built)
            raise
        self._recorder, self._layout = new, grown  # first, because the old recorder's files are no longer at `dest`
        new.moved(self.dest, self._sync_seconds)
        old.close()
        fs.sync_folder(self.dest.parent)
        with contextlib.suppress(OSError):  # the next process that opens the recording removes it
            fs.remove(aside)
        return new

    def sync(self) -> None:
        """Wait until all episodes are on the disk."""
        if self._recorder is not None and not self.is_closed:
            self._recorder.sync()

    def finish(self) -> Manifest:
        """Turn the recording into a dataset. SchemaError if nothing was recorded."""
        if self.is_closed:
            raise UsageError(f"the recording {self.dest} is closed already")
        if self._finished is not None:
            self.is_closed = True
            return self._finished[0]
        if self._recorder is None or not self.episodes:
            self.close()
            raise SchemaError(f"nothing was recorded at {self.dest}: no episode has a step")
        manifest = self._recorder.finish()
        self.is_closed = True
        return manifest

    def close(self) -> None:
        """Stop without making a dataset. Written episodes stay; a new folder without episodes is removed."""
        if self.is_closed:
            return
        self.is_closed = True
        if self._recorder is not None:
            try:
                self._recorder.sync()
            finally:
                self._recorder.close()
        elif self._made:
            with contextlib.suppress(OSError):
                fs.remove_empty_folder(self.dest)


def finished_recording(dest: Path, wanted: int) -> tuple[Manifest, list[int]] | None:
    """Return the manifest and the episode numbers of a finished recording that has all `wanted` episodes.

    None if one is missing, or if `dest` is not a finished recording.
    """
    if not has_manifest(dest):
        return None
    with open_steps(dest) as reader:
        recorded = [step.verb for step in reader.manifest.provenance] == ["record"]
        numbers: list[int] = reader.episodes.episode.tolist()
        return (reader.manifest, numbers) if recorded and set(range(wanted)) <= set(numbers) else None


def _moved(key: Key, moved: Mapping[Key, Key]) -> Key:
    """Return the new key of a leaf, at the root or under `next`, given the new names of infos."""
    return (NEXT, *moved.get(key[1:], key[1:])) if key[0] == NEXT else moved.get(key, key)


def _occupied(dest: Path) -> UsageError:
    unfinished = dest.is_dir() and not has_manifest(dest) and unfinished_recording(dest) is not None
    if not unfinished:
        return UsageError(f"{dest} exists already; recordings need a new folder", hint="choose another destination")
    return UsageError(
        f"{dest} has a recording that was not finished",
        hint=f"continue it with resume (--resume), or finish it: rbtool repair {shlex.quote(str(dest))}",
    )


def _put_in_place(built: Path, dest: Path) -> Path:
    """Replace the folder `dest` by `built`; return where the replaced one is now. An error changes nothing."""
    if fs.exchange(built, dest):
        return built
    aside = new_sibling(dest, aside=True)
    fs.rename(dest, aside)
    try:
        fs.rename(built, dest)
    except BaseException:
        fs.rename(aside, dest)
        raise
    return aside


def _require_same(recorded: RecordedOrigin, found: RecordedOrigin, dest: Path) -> None:
    """Raise UsageError if a recording would be resumed with another environment, SchemaError for other spaces."""
    if recorded.asked != found.asked:
        raise UsageError(f"{dest} was recorded from {recorded.asked}, expected the same environment, not {found.asked}")
    spaces = parse_json(dump_json(dict(found.spaces)), "the spaces")
    for name in sorted(recorded.spaces.keys() | spaces.keys()):
        if recorded.spaces.get(name) != spaces.get(name):
            raise SchemaError(
                f"{dest} was recorded with another {name} space, expected the same to resume it",
                hint="record each space to a dataset of its own",
            )
