"""What is recorded of an episode's infos, and the leaves of a recording, which widen when an episode needs it.

An environment states spaces for observations and actions, and nothing for infos. So the leaves of infos follow from the
values: a new entry is a new leaf, longer text and wider numbers widen one, and an entry that is a number in one episode
and an array in another gets a leaf for each form, `info.x_number` and `info.x_3`. Each such change stores the
recording again (`EpisodeWriter`), which is why sizes of text grow in powers of two.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, NamedTuple

import numpy as np

from ..errors import SchemaError
from ..format.contracts import Array
from ..format.memmap.tree import FieldRange, merge_ranges
from ..format.packed.recording import RecordedEpisode
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
from .spaces import RecordedLeaf

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
                    self._drop(key, f"it nests deeper than {_MOST_LEVELS} levels")
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
        """Forget all rows, but not `dropped` and `renamed`."""
        self._found.clear()

    def take(self, length: int) -> dict[Key, RecordedInfo]:
        """Return the columns of the first `length + 1` rows, and forget all rows."""
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
    """Leave out the row of a step that was interrupted before it was recorded completely."""
    count = sum(row <= length for row in rows) if rows[-1] > length else len(rows)
    return rows[:count], values[:count]


def _part(name: Any) -> str:
    """Return a name as part of a key; a name that ends like a mask's gets a trailing `_`."""
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
    """Return whether the type holds these numbers exactly. Booleans and numbers never mix."""
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
"""Most forms of one entry; the limit exists because every new form rewrites the recording."""
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


def forms_there(key: Key, names: Iterable[Key]) -> int:
    """Count the leaves that an entry with several forms has."""
    pattern = re.compile(rf"{re.escape(key[-1])}_(?:{_FORM})")
    return sum(name[:-1] == key[:-1] and pattern.fullmatch(name[-1]) is not None for name in names)


def entries_of_many_forms(known: Mapping[Key, str], infos: Mapping[Key, RecordedInfo]) -> set[Key]:
    """Return the entries whose leaves have to be named by their form, among an episode's and the known ones.

    These are entries that have a different form than in earlier episodes, that are a value in one place and a dict in
    another, and texts whose leaf of lengths would collide with another entry. `known` maps the entries of earlier
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
    """Return the item of `renamed_keys` in the manifest that says where one form of an entry is stored."""
    shown = form if form in {"text", "number"} else f"shape {form}"
    return f"{key_name(key)} ({shown})", key_name(named_by_form(key, form))


def entries_renamed(renamed: Mapping[str, str], names: Iterable[Key]) -> Iterator[Key]:
    """Yield the entries with leaves named by form, given `renamed_keys` and all leaves: the inverse of `renaming`."""
    by_name = {key_name(name): name for name in names}
    for stated, name in renamed.items():
        found, leaf = _RENAMED.fullmatch(stated), by_name.get(name)
        if found is not None and leaf is not None and leaf[-1].endswith(f"_{found['form']}"):
            entry = (*leaf[:-1], leaf[-1].removesuffix(f"_{found['form']}"))
            if key_name(entry) == found["entry"]:
                yield entry


_WIDEST_ROW = 64 << 20
"""Most bytes of a padded value; every row takes the space of the longest."""
_STEP_FIELDS = (
    Field(EPISODE, "int64", (), "id"), Field(NEXT_REWARD, "float64", (1,), "reward"),
    Field(NEXT_DONE, "bool", (1,), "done"), Field(NEXT_TERMINATED, "bool", (1,), "done"),
    Field(NEXT_TRUNCATED, "bool", (1,), "done"),
)  # fmt: skip


class RowLeaf(NamedTuple):
    """A leaf of the environment. If `state` is set, n steps have n + 1 rows (observations), otherwise n (actions)."""

    leaf: RecordedLeaf
    state: bool


@dataclass(slots=True)
class RawEpisode:
    """An episode of `length` steps in memory: `states` `[length + 1, *shape]`, `steps` `[length, *shape]`, infos."""

    length: int
    leaves: tuple[RowLeaf, ...]
    states: dict[Key, Array]
    steps: dict[Key, Array]
    infos: dict[Key, RecordedInfo]
    seed: int | None = None
    cut_off: bool = False


class InfoTiming(Enum):
    """Which of the `length + 1` rows have an entry of the infos."""

    STEPS = "steps"
    """All but the row of `reset`: stored under `next` only."""
    ALL = "all"
    SOME = "some"
    """Some rows; a mask beside the entry marks them."""


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
    """The leaves of a recording: leaves of the spaces, and leaves of infos under the names by which they are stored.

    Entries in `several` have different forms in different episodes, and one leaf for each form, see `named_by_form`.
    A layout is immutable; `separated` and `grown` return the layout that also holds one more episode.
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
        """Return the layout in which entries that need it for this episode have one leaf per form."""
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
        """Return the layout widened to hold this episode; this object if it holds the episode already."""
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
        """Return the states and steps of an episode in the form in which they are stored."""
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
        """Return a stored episode in the form that recorded it: the inverse of `columns`."""
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
    """Return the range of an entry. An episode's first row is at the root only, its last under `next` only."""
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
        if key == named_by_form(entry, form_of(column)) and forms_there(entry, layout.infos) >= MOST_FORMS:
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
    """Return a type that holds `values` and all numbers of `dtype` within a range exactly; None if there is none."""
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
    """Return the next power of two, so that values that keep growing rewrite the recording only a few times."""
    return 1 << (size - 1).bit_length() if size else 0


def _grown(leaf: RecordedLeaf, shape: tuple[int, ...]) -> RecordedLeaf:
    if not leaf.ragged or all(needed <= there for needed, there in zip(shape, leaf.shape, strict=True)):
        return leaf
    sizes = tuple(there if needed <= there else _power(needed) for needed, there in zip(shape, leaf.shape, strict=True))
    if int(np.prod(sizes, dtype=np.float64)) * np.dtype(leaf.dtype).itemsize > _WIDEST_ROW:
        raise SchemaError(
            f"{key_name(leaf.key)} has a value of shape {list(shape)}, too large to be recorded: "
            f"every row takes the space of the longest, and that is limited to {_WIDEST_ROW >> 20} MiB"
        )
    return replace(leaf, shape=sizes)


def _fitted(rows: Array, shape: tuple[int, ...]) -> Array:
    """Pad rows with zeros to this shape."""
    if rows.shape[1:] == shape:
        return rows
    found = np.zeros((len(rows), *shape), rows.dtype)
    found[tuple(map(slice, rows.shape))] = rows
    return found
