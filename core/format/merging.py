"""Several datasets as one: what they differ in, the schema that a policy makes of them, and their episodes in order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Literal, TypeAlias, get_args

import numpy as np

from ..errors import SchemaError, UsageError, did_you_mean
from ..ted.episodes import Continuity
from ..ted.schema import EPISODE, NEXT, Field, Key, as_numbers, key_name, state_keys
from .contracts import Array, StepReader
from .episodes import FINAL, EpisodeTable
from .manifest import Dropped, Manifest
from .returns import return_field_of, table_with_returns

MASK = "mask"
"""The group of the fields that mark where values are filled in."""


def mask_key(key: Key) -> Key:
    """The key of the field that states where `key` has values: `mask.info.x`, `next.mask.info.x`."""
    return (NEXT, MASK, *key[1:]) if key[0] == NEXT else (MASK, *key)


@dataclass(frozen=True, slots=True)
class MergedSchema:
    """The fields of a merged dataset, and what it does not keep of its sources.

    `masks` maps the key of each mask, bool `[rows]`, to the key whose values it marks: a source without this mask has
    all of the values, or none. `dropped` and `notes` describe the fields that are left out, converted or filled in.
    """

    fields: tuple[Field, ...]
    masks: Mapping[Key, Key] = field(default_factory=dict)
    dropped: tuple[Dropped, ...] = ()
    notes: tuple[str, ...] = ()


class MergedSteps(StepReader):
    """The rows of several datasets, `members`, with the fields of `schema`; `manifest` describes the result.

    `order`, int64 `[episodes]`, lists the episodes of all members, numbered consecutively, in the order of the result;
    the episodes of one member keep their order. `numbers` are new episode numbers. Values of other element types are
    converted, and fields that a member lacks are zero. The owner closes the members.
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
        """Mark the episodes in which some state under `next` differs from the following row."""
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
        """The text of every episode; empty for members without text."""
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
    """Join the rows of several tables, one after another; `start` still counts within each member."""
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


Policy: TypeAlias = Literal["error", "intersect", "union"]


@dataclass(frozen=True, slots=True)
class FieldDifference:
    """A field that the datasets do not have alike: what each has, in their order, `nothing` where it is missing."""

    key: str
    found: tuple[str, ...]

    def sentence(self, names: Sequence[str]) -> str:
        """State which dataset has what: `action: float32 [2] in A, float64 [2] in B`."""
        return f"{self.key}: {', '.join(f'{what} in {name}' for what, name in zip(self.found, names, strict=True))}"


def require_policy(schema: str) -> Policy:
    """Validate the name of a policy; UsageError for an unknown one."""
    for policy in get_args(Policy):
        if schema == policy:
            return schema  # type: ignore[return-value]
    raise UsageError(
        f"there is no schema policy {schema!r}{did_you_mean(schema, get_args(Policy))}",
        hint=f"choose from {', '.join(get_args(Policy))}",
    )


def field_differences(each: Sequence[Sequence[Field]]) -> list[FieldDifference]:
    """Return the fields, in order of appearance, that are not in all datasets with the same element type and shape."""
    found = []
    for key, fields in _by_key(each):
        looks = tuple("nothing" if one is None else f"{one.dtype} {list(one.shape)}" for one in fields)
        if len(set(looks)) > 1:
            found.append(FieldDifference(key_name(key), looks))
    return found


def _by_key(each: Sequence[Sequence[Field]]) -> Iterator[tuple[Key, list[Field | None]]]:
    known = [{leaf.key: leaf for leaf in fields} for fields in each]
    for key in dict.fromkeys(leaf.key for fields in each for leaf in fields):
        yield key, [fields.get(key) for fields in known]


_FEW = 8
_OBSERVATIONS = frozenset({"observation", "state", "pixels"})


def merged_schema(readers: Sequence[StepReader], names: Sequence[str], policy: Policy, *, cast: bool) -> MergedSchema:
    """Return the fields that the datasets are merged into.

    `error` takes datasets with the same fields only; `intersect` the fields that all have in one shape; `union` all
    fields, with a mask for each that some dataset lacks. The masks of an earlier union are continued. With `cast`
    fields of different element types get the one that holds all values of each. SchemaError names every difference
    that the policy does not resolve.
    """
    each = [reader.fields for reader in readers]
    differences = field_differences(each)
    marked = _marked(readers)
    rewards = reward_meanings([reader.manifest for reader in readers], names)
    unresolved = [one for one in differences if not _resolved(one, policy, cast)]
    if unresolved or (rewards and policy == "error"):
        left_out = [one.key for one in differences if policy == "intersect" and one not in unresolved]
        raise _refusal(unresolved, rewards, names, policy, left_out)
    fields: list[Field] = []
    masks: dict[Key, Key] = {}
    dropped: list[Dropped] = []
    notes = list(rewards)
    for key, found in _by_key(each):
        there = [one for one in found if one is not None]
        missing = [name for name, one in zip(names, found, strict=True) if one is None]
        if missing and key in marked and (policy == "union" or _is_kept(marked[key], each)):
            masks[key] = marked[key]  # without a mask, no value is filled in
            fields.append(there[0])
            continue
        if policy == "intersect" and (missing or len({one.shape for one in there}) > 1):
            why = f"not in {' and '.join(missing)}" if missing else _shapes(found, names)
            dropped.append(Dropped(key_name(key), why))
            continue
        types = {one.dtype for one in there}
        if len(types) > 1:
            notes.append(f"{key_name(key)} becomes {_common_type(sorted(types))}: it is {_types(found, names)}")
        fields.append(replace(there[0], dtype=_common_type(sorted(types))))
        if missing and key == EPISODE:
            notes.append(f"episode is not in {' and '.join(missing)}: the number of each episode there")
        elif missing:
            mask = key_name(mask_key(key))
            notes.append(f"{key_name(key)} is not in {' and '.join(missing)}: zeros there, and {mask} is false")
            if mask_key(key) not in marked:
                _require_free(mask_key(key), each, names)
            masks[mask_key(key)] = key
    if not fields:
        raise SchemaError(f"{' and '.join(names)} have no field in common: nothing is left to merge")
    _require_observation(each, fields, differences, names)
    known = {one.key for one in fields}
    fields += [Field(key, "bool", (), "info") for key in masks if key not in known]
    _require_tree(each, fields, names)
    return MergedSchema(tuple(fields), masks, tuple(dropped), tuple(notes))


def _marked(readers: Sequence[StepReader]) -> dict[Key, Key]:
    """The masks that earlier merges with `union` made: of each the key whose values it marks."""
    found: dict[Key, Key] = {}
    for reader in readers:
        steps = reader.manifest.provenance
        if any(step.verb == "merge" and step.arguments.get("schema") == "union" for step in steps):
            flags = {one.key for one in reader.fields if (one.dtype, one.shape) == ("bool", ())}
            found |= {mask_key(one.key): one.key for one in reader.fields if mask_key(one.key) in flags}
    return found


def _is_kept(key: Key, each: Sequence[Sequence[Field]]) -> bool:
    """Whether all datasets have the field in one shape."""
    shapes = [one.shape for fields in each for one in fields if one.key == key]
    return len(shapes) == len(each) and len(set(shapes)) == 1


def _require_free(mask: Key, each: Sequence[Sequence[Field]], names: Sequence[str]) -> None:
    for fields, name in zip(each, names, strict=True):
        if any(one.key == mask for one in fields):
            raise SchemaError(
                f"{key_name(mask)} would be a mask, and it is a field of {name}",
                hint="give that field another name: rbtool preprocess --rename",
            )


def _resolved(difference: FieldDifference, policy: Policy, cast: bool) -> bool:
    there = [found.split(" ", 1) for found in difference.found if found != "nothing"]
    shapes = {shape for _, shape in there}
    if policy == "intersect" and (len(there) < len(difference.found) or len(shapes) > 1):
        return True
    types = sorted({dtype for dtype, _ in there})
    castable = len(types) == 1 or (cast and lossless_type(types) is not None)
    return castable and len(shapes) == 1 and (policy == "union" or len(there) == len(difference.found))


def _refusal(
    unresolved: Sequence[FieldDifference], rewards: Sequence[str], names: Sequence[str], policy: Policy,
    left_out: Sequence[str],
) -> SchemaError:  # fmt: skip
    lines = [*(one.sentence(names) for one in unresolved), *rewards]
    rest = ", ".join(one.key for one in unresolved[_FEW:])
    more = f"; and {len(lines) - _FEW} more" if len(lines) > _FEW else ""
    more += f" ({rest})" if rest else ""
    more += f"; --schema intersect would leave out {', '.join(left_out)}" if left_out else ""
    hints = []
    if any("nothing" in one.found for one in unresolved) or (rewards and policy == "error"):
        hints.append("--schema intersect keeps what all have, --schema union keeps all and marks what is missing")
    if any(_only_types_differ(one) for one in unresolved):
        types = [_types_of(one) for one in unresolved if _only_types_differ(one)]
        if all(lossless_type(sorted(found)) for found in types):
            hints.append("--cast converts to the element type that holds all values")
        else:
            hints.append("no element type holds all values: convert one with rbtool preprocess --cast")
    if any(len(_shapes_of(one)) > 1 for one in unresolved):
        hints.append("--schema intersect leaves out fields of different shapes")
    return SchemaError(
        f"the datasets differ in {len(lines)} field{'' if len(lines) == 1 else 's'}: {'; '.join(lines[:_FEW])}{more}",
        hint="; ".join(hints),
    )


def _require_observation(
    each: Sequence[Sequence[Field]], left: Sequence[Field], differences: Sequence[FieldDifference], names: Sequence[str]
) -> None:
    """Raise SchemaError if the datasets have observations but the result would have none."""
    had = {key_name(key) for fields in each for key in _observations(fields)}
    if had and not _observations(left):
        lines = [one.sentence(names) for one in differences if one.key in had]
        raise SchemaError(
            f"the merged dataset would have no observation: {'; '.join(lines[:_FEW])}",
            hint="datasets are merged that have the same observations; those of other tasks stay datasets of their own",
        )


def _observations(fields: Sequence[Field]) -> list[Key]:
    return [*(one.key for one in fields if one.key[0] in _OBSERVATIONS), *state_keys(fields)]


def _types_of(difference: FieldDifference) -> set[str]:
    return {found.split(" ", 1)[0] for found in difference.found if found != "nothing"}


def _shapes_of(difference: FieldDifference) -> set[str]:
    return {found.split(" ", 1)[1] for found in difference.found if found != "nothing"}


def _only_types_differ(difference: FieldDifference) -> bool:
    return len(_types_of(difference)) > 1 and len(_shapes_of(difference)) == 1


def _shapes(found: Sequence[Field | None], names: Sequence[str]) -> str:
    return ", ".join(f"{list(one.shape)} in {name}" for one, name in zip(found, names, strict=True) if one)


def _types(found: Sequence[Field | None], names: Sequence[str]) -> str:
    return ", ".join(f"{one.dtype} in {name}" for one, name in zip(found, names, strict=True) if one)


def _common_type(types: Sequence[str]) -> str:
    return types[0] if len(types) == 1 else lossless_type(types) or types[0]


def lossless_type(types: Sequence[str]) -> str | None:
    """Return the element type that represents every value of all `types` exactly; None if there is none."""
    plain = ["float32" if name == "bfloat16" else name for name in types]
    if len(set(types)) == 1:
        return types[0]
    found = np.result_type(*map(np.dtype, plain))
    return found.name if all(_holds(found, np.dtype(name)) for name in plain) else None


def _holds(wide: np.dtype[np.generic], narrow: np.dtype[np.generic]) -> bool:
    """Whether every value of `narrow` has an equal one in `wide`."""
    if wide.kind in "fc" and narrow.kind in "iu":
        parts = 2 if wide.kind == "c" else 1
        return 8 * narrow.itemsize <= {2: 11, 4: 24, 8: 53}[wide.itemsize // parts]
    return bool(np.can_cast(narrow, wide, "safe"))


def reward_meanings(manifests: Sequence[Manifest], names: Sequence[str]) -> list[str]:
    """Return the datasets whose rewards are sums over several steps, if the rewards of others are not."""
    named = [
        (name, None if (found := return_field_of(manifest)) is None else found.key)
        for manifest, name in zip(manifests, names, strict=True)
        if any(leaf.key == (NEXT, "reward") for leaf in manifest.fields)
    ]
    summed = [name for name, key in named if key != (NEXT, "reward")]
    if not summed or len(summed) == len(named):
        return []
    return [f"next.reward is a sum over n steps in {' and '.join(summed)}, and of one step in the others"]


def _require_tree(each: Sequence[Sequence[Field]], kept: Sequence[Field], names: Sequence[str]) -> None:
    """Raise SchemaError for a name that would be a field and a group of fields."""
    keys = [one.key for one in kept]
    groups = {key[:size] for key in keys for size in range(1, len(key))}
    for key in keys:
        if key not in groups:
            continue
        places = [name for name, fields in zip(names, each, strict=True) if any(one.key == key for one in fields)]
        others = [name for name in names if name not in places]
        raise SchemaError(
            f"{key_name(key)!r} is a field in {' and '.join(places)} and a group of fields in {' and '.join(others)}",
            hint="rename or exclude it in one of them first: rbtool preprocess --rename, --exclude",
        )
