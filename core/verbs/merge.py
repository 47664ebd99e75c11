"""`merge`: join datasets into one, and `MergedSteps`, which reads several datasets as if they were one."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from ..errors import DatasetNotFoundError, SchemaError, UsageError
from ..format import fs
from ..format.checks import damage_explained
from ..format.contracts import Array, StepReader
from ..format.episodes import FINAL, EpisodeTable
from ..format.locate import find_dataset, require_apart
from ..format.manifest import Dropped, Layout, Manifest, Provenance, Request, has_manifest
from ..format.memmap.builder import Origin, provenance_step
from ..format.mixture import FieldDifference, Policy, field_differences, fields_by_key, require_policy, reward_meanings
from ..format.packed.builder import rows_bytes, write_dataset
from ..format.packed.reader import PackedReader
from ..format.packed.schema import PackedSchema, parse_codecs
from ..format.returns import table_with_returns
from ..format.staging import Outcome, Publication, Staging, share_files
from ..open_steps import BufferSteps, finished_manifest
from ..options import PathLike, takes
from ..results import Published, layout_arguments, published_entries, require_layout, seconds_since
from ..saved_steps import has_steps, is_of_buffer, open_saved, verified_steps
from ..ted.episodes import Continuity, runs_text
from ..ted.schema import EPISODE, NEXT, Field, Key, as_numbers, key_name, state_keys
from .options import MergeOptions, SplitOptions

SPLIT = "split"
_SAME_ROWS = frozenset({"convert", "checkpoint save", "checkpoint load"})


@dataclass(frozen=True, slots=True, kw_only=True)
class MergedSource:
    """A dataset that was merged: its path and digest, its `steps`, and the `count` of its episodes.

    `numbers` are the episode numbers in the source and `episodes` those in the result, in the same order, as runs such
    as `0:40,57`.
    """

    path: Path
    content_digest: str
    steps: int
    count: int
    numbers: str
    episodes: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeResult(Published):
    """The dataset at `path`, made of `sources`.

    `renumbered` is True if episodes have new numbers, because some numbers occur in several sources. `restored` is True
    if all parts of a split were merged and have the content digest of the dataset that was split; None for other
    sources.
    """

    kind: ClassVar[str] = "merge"
    sources: tuple[MergedSource, ...]
    renumbered: bool
    restored: bool | None = None


@takes(MergeOptions)
def merge(asked: MergeOptions) -> MergeResult:
    """Join datasets into one: the episodes of each, in their order.

    Episode numbers are kept if no number occurs twice; else all episodes are numbered from 0, and `sources` and the
    provenance list the old and the new numbers. Parts of one split get the order and the numbers of the dataset that
    was split.

    Args:
        datasets: two or more, each a path or `source:id`.
        dest: the folder to write.
        schema: what to do with fields that differ between datasets. `error` refuses them; `intersect` keeps the fields
            that all have with one shape, and lists the others in `dropped_keys`; `union` keeps all, with zeros where a
            dataset lacks a field, and adds `mask.<field>`, bool, which is False there.
        cast: convert fields whose dtypes differ to a dtype that holds all values exactly; otherwise they are refused.
        layout, compress: as in `convert`. Default: `packed`, with the same compression, if all datasets are, else
            `ted`.
        root: where stored datasets are.
        force: replace what is at `dest`.
        dry_run: do everything but writing.
        progress: shows how far it is; default: nothing is shown.

    Returns:
        What was written. An equal merge of the same datasets is left as it is, and `already_there` is True.

    Raises:
        UsageError: arguments make no sense, or something else is at `dest`, which is unchanged after any error.
        DatasetNotFoundError: a dataset does not exist.
        SchemaError: fields differ.
        CorruptDataError: a dataset is damaged.
        OutOfSpaceError: the disk has no room for the result.
    """
    started, policy, datasets = time.perf_counter(), require_policy(asked.schema), asked.datasets
    if isinstance(datasets, str | os.PathLike) or len(datasets) < 2:
        one = "one dataset" if isinstance(datasets, str | os.PathLike) or datasets else "no dataset"
        raise UsageError(f"{one} to merge, expected two or more", hint="write: rbtool merge A B DEST")
    destination = fs.expanded(asked.dest).absolute()
    with contextlib.ExitStack() as stack:
        paths = [_found(name, destination, asked.root) for name in datasets]
        for path in paths:
            require_apart(path, destination)
        readers = [stack.enter_context(opened_steps(path)) for path in paths]
        layout, compress = result_layout(readers, asked)
        return _Merging(asked, readers, destination, policy, layout, compress).run(started)


def _found(name: PathLike, destination: Path, root: PathLike | None) -> Path:
    try:
        return find_dataset(name, root)
    except DatasetNotFoundError as error:
        if has_manifest(destination):  # named first, where a dataset was expected
            error.hint = "the destination comes last: rbtool merge A B DEST"
        raise


@contextlib.contextmanager
def opened_steps(path: Path) -> Iterator[StepReader]:
    """Open the dataset or checkpoint at `path`, also the steps of a saved buffer."""
    if not is_of_buffer(path):
        has_steps(path)  # raises the best error for anything else
    with damage_explained(path, can_skip=False), open_saved(path) as reader:
        yield reader


def result_layout(readers: Sequence[StepReader], asked: MergeOptions | SplitOptions) -> tuple[Layout, tuple[str, ...]]:
    """Return the layout and codecs: the given ones, else those that all datasets share, else `ted` without codecs."""
    layout, compress = asked.layout, asked.compress
    packed = [reader.schema.codecs if isinstance(reader, PackedReader) else None for reader in readers]
    if layout is None:
        alike = all(codecs is not None for codecs in packed) or bool(compress)
        layout = "packed" if alike else "ted"
    if compress is None and layout == "packed" and packed[0] is not None and all(one == packed[0] for one in packed):
        compress = sorted(f"{'.'.join(key)}={codec}" for key, codec in packed[0].items())
    return require_layout(layout, compress or ()), tuple(compress or ())


def planned_manifest(reader: StepReader) -> Manifest:
    """Return the manifest of the steps; for the steps of a buffer, the one that they will get."""
    return reader.planned if isinstance(reader, BufferSteps) else reader.manifest


@dataclass(frozen=True)
class _Merging:
    """One run of `merge`."""

    asked: MergeOptions
    readers: Sequence[StepReader]
    destination: Path
    policy: Policy
    layout: Layout
    compress: tuple[str, ...]

    @property
    def _names(self) -> list[str]:
        return [os.fspath(dataset) for dataset in self.asked.datasets]

    def run(self, started: float) -> MergeResult:
        schema = merged_schema(self.readers, self._names, self.policy, cast=self.asked.cast)
        codecs = parse_codecs(self.compress, schema.fields)
        PackedSchema.of(schema.fields, codecs)
        parts = _parts_of_one_split(self.readers)
        order = None if parts is None else _original_order(self.readers, parts)
        numbers, renumbered = _episode_numbers(self.readers, schema, order)
        sources = self._sources(order, numbers)
        step = self._step(schema, sources, renumbered=renumbered)
        manifest = self._manifest(schema, step)
        size = rows_bytes(schema.fields, self.layout, manifest.steps, manifest.episodes)

        def build(staging: Staging) -> Outcome[Manifest]:
            with contextlib.ExitStack() as stack:  # leaving it compares what was read with its digests
                members = [stack.enter_context(verified_steps(reader)) for reader in self.readers]
                new = numbers if renumbered else None
                merged = MergedSteps(members, schema, manifest, order=order, numbers=new)
                self.asked.reporter.start("merging", manifest.steps, "steps")
                origin = Origin.of(manifest, merged.documents(), merged.videos())
                made = write_dataset(merged, staging.path, self.layout, origin, codecs, self.asked.reporter.advance)
            self.asked.reporter.done()
            return Outcome(made, {"shared_bytes": share_files(staging.path, made, self.readers, links=True)})

        publication = Publication(
            staging=Staging(self.destination, replace=self.asked.force),
            find=lambda: self._already_there(step),
            needed=lambda: None if self.compress else size,
            dry_run=self.asked.dry_run,
        )
        planned = Outcome(manifest, {"bytes": size, "content_digest": None, "layout": self.layout})
        made, entries = publication.run(lambda: planned, build)
        return self._result(made, sources, renumbered, parts, started, entries)

    def _sources(self, order: Array | None, numbers: Array) -> tuple[MergedSource, ...]:
        counts = [len(reader.episodes) for reader in self.readers]
        owner = np.repeat(np.arange(len(counts)), counts)
        owner = owner if order is None else owner[order]
        return tuple(
            MergedSource(
                path=reader.path, content_digest=reader.manifest.content_digest, steps=reader.manifest.steps,
                count=len(reader.episodes), numbers=runs_text(reader.episodes.episode),
                episodes=runs_text(numbers[owner == number]),
            )
            for number, reader in enumerate(self.readers)
        )  # fmt: skip

    def _step(self, schema: MergedSchema, sources: Sequence[MergedSource], *, renumbered: bool) -> Provenance:
        shared = len(_common_steps(self.readers))
        arguments: dict[str, Any] = {
            "datasets": self._names, "schema": self.policy, "cast": self.asked.cast,
            **layout_arguments(self.layout, self.compress),
            "steps_of_each": [len(reader.manifest.provenance) - shared for reader in self.readers],
        }  # fmt: skip
        if renumbered:
            arguments["origin"] = [
                {"source": number, "numbers": one.numbers, "episodes": one.episodes}
                for number, one in enumerate(sources)
            ]
        each = enumerate(reader.manifest.inputs for reader in self.readers)
        inputs = {f"{name}.{number}": digest for number, one in each for name, digest in one.items()}
        return provenance_step("merge", arguments, inputs)

    def _already_there(self, step: Provenance) -> Manifest | None:
        """Return the manifest at the destination if an equal merge of the same datasets has made it."""
        there = finished_manifest(self.destination)
        if there is None or not there.provenance:
            return None
        made = there.provenance[-1]
        asked, known = ({k: v for k, v in one.arguments.items() if k != "datasets"} for one in (step, made))
        same = (made.verb, known, dict(made.inputs)) == (step.verb, asked, dict(step.inputs))
        return there if same else None

    def _manifest(self, schema: MergedSchema, step: Provenance) -> Manifest:
        """Return the manifest of the result, with the entries that it takes over from its sources."""
        each = [planned_manifest(reader) for reader in self.readers]
        notes = list(dict.fromkeys([*(note for one in each for note in one.notes), *schema.notes]))
        spaces = self._common("space", [one.spaces for one in each], notes)
        renamed = self._common("renamed key", [one.renamed_keys for one in each], notes, missing_is_equal=True)
        dropped = dict.fromkeys([*(one for each_one in each for one in each_one.dropped_keys), *schema.dropped])
        if len({one.content_digest for one in each}) < len(each):
            notes.append("two of the merged datasets have the same content: their episodes are there twice")
        tables = [reader.episodes for reader in self.readers]
        return replace(
            each[0], kind="dataset", layout=self.layout, request=_request(each, self._names, self.layout),
            steps=sum(table.steps for table in tables), episodes=sum(map(len, tables)), fields=schema.fields,
            files=(), content_digest="", spaces=spaces, renamed_keys=renamed,
            dropped_keys=tuple(dropped), boundary=joined_table(tables).counts(),
            notes=tuple(notes), provenance=(*_all_steps(self.readers), step), ranges={}, parts=(),
            resolved_revision=_only({one.resolved_revision for one in each}),
        )  # fmt: skip

    def _common(
        self,
        what: str,
        each: Sequence[Mapping[str, Any]],
        notes: list[str],
        *,
        missing_is_equal: bool = False,
    ) -> dict[str, Any]:
        """Keep the entries that do not differ between the datasets; note the others."""
        found: dict[str, Any] = {}
        for name in dict.fromkeys(name for one in each for name in one):
            values = [one.get(name) for one in each if name in one or not missing_is_equal]
            if all(value == values[0] for value in values):
                found[name] = values[0]
            else:
                notes.append(f"{what} {name} differs between {' and '.join(self._names)} and is left out")
        return found

    def _result(
        self,
        manifest: Manifest,
        sources: tuple[MergedSource, ...],
        renumbered: bool,
        parts: Sequence[Provenance] | None,
        started: float,
        changes: Mapping[str, Any],
    ) -> MergeResult:
        entries = {**published_entries(manifest, self.destination, started, *self.readers), **changes}
        entries["seconds"] = seconds_since(started)
        restored = None
        if parts is not None and manifest.content_digest and manifest.episodes == parts[0].arguments["episodes"]:
            restored = manifest.content_digest == parts[0].inputs["content_digest"]
        return MergeResult(**entries, sources=sources, renumbered=renumbered, restored=restored)


def _only(values: set[Any]) -> Any:
    return values.pop() if len(values) == 1 else None


def _request(each: Sequence[Manifest], asked: Sequence[str], layout: Layout) -> Request:
    """Return the request of the datasets if all have the same, else one that names all of them."""
    requests = [replace(one.request, layout=layout) for one in each]
    if len({request.identity() for request in requests}) == 1:
        return requests[0]
    ids = "+".join(dict.fromkeys(one.request.id for one in each))
    return Request("merge", " ".join(asked), ids, layout=layout)


def _common_steps(readers: Sequence[StepReader]) -> tuple[Provenance, ...]:
    """Return the steps with which the provenance of every dataset starts."""
    found = []
    for steps in zip(*(reader.manifest.provenance for reader in readers), strict=False):
        if any(step != steps[0] for step in steps):
            break
        found.append(steps[0])
    return tuple(found)


def _all_steps(readers: Sequence[StepReader]) -> list[Provenance]:
    shared = _common_steps(readers)
    return [*shared, *(step for reader in readers for step in reader.manifest.provenance[len(shared) :])]


def _parts_of_one_split(readers: Sequence[StepReader]) -> list[Provenance] | None:
    """Return for each dataset the provenance step that split it off; None unless all are parts of one split."""
    found: list[Provenance] = []
    for reader in readers:
        steps = [step for step in reader.manifest.provenance if step.verb not in _SAME_ROWS or _drops(step)]
        if not steps or steps[-1].verb != SPLIT:
            return None
        found.append(steps[-1])
    apart = dict.fromkeys(("part", "positions", "dataset"))
    splits = [({**step.arguments, **apart}, dict(step.inputs)) for step in found]
    names = {step.arguments.get("part") for step in found}
    alike = all(split == splits[0] for split in splits) and len(names) == len(found)
    return found if alike and type(found[0].arguments.get("episodes")) is int else None


def _drops(step: Provenance) -> bool:
    return bool(step.arguments.get("skip_bad") or step.arguments.get("episodes"))


def _original_order(readers: Sequence[StepReader], parts: Sequence[Provenance]) -> Array | None:
    """Return the order of the episodes in the dataset that was split: by recorded positions, else by episode number.

    None if these do not match the episodes, which are then merged as for any datasets.
    """
    places: list[Array] = []
    for reader, step in zip(readers, parts, strict=True):
        text = step.arguments.get("positions")
        try:
            own = numbers_of_runs(text) if isinstance(text, str) else reader.episodes.episode
        except ValueError:
            return None
        if len(own) != len(reader.episodes) or (np.diff(own) <= 0).any():
            return None
        places.append(own)
    joined = np.concatenate(places)
    return np.argsort(joined, kind="stable") if len(np.unique(joined)) == len(joined) else None


def _episode_numbers(readers: Sequence[StepReader], schema: MergedSchema, order: Array | None) -> tuple[Array, bool]:
    """Return the number of each episode in the result, and whether they are new."""
    numbers = np.concatenate([reader.episodes.episode for reader in readers])
    if order is not None:
        return numbers[order], False
    if len(np.unique(numbers)) == len(numbers):
        return numbers, False
    _require_room(schema, len(numbers))
    return np.arange(len(numbers)), True


def _require_room(schema: MergedSchema, episodes: int) -> None:
    for leaf in schema.fields:
        if leaf.key == ("episode",) and leaf.numpy.kind in "iu" and episodes > np.iinfo(leaf.numpy).max:
            raise SchemaError(
                f"{episodes:,} episodes need new numbers, and {leaf.dtype} has no room for them",
                hint="convert the field first: rbtool preprocess --cast episode=int64",
            )


# Several datasets as one: the schema that a policy makes of them, and their rows in order ---------------

MASK = "mask"
"""The group of the fields that mark where values are filled in."""


def mask_key(key: Key) -> Key:
    """Return the key of the mask of a field: `mask.info.x` for `info.x`, `next.mask.info.x` for `next.info.x`."""
    return (NEXT, MASK, *key[1:]) if key[0] == NEXT else (MASK, *key)


@dataclass(frozen=True, slots=True)
class MergedSchema:
    """The fields of a merged dataset, and how they differ from the fields of its sources.

    `masks` maps the key of each mask, bool `[rows]`, to the key whose values it marks. A source without this mask has
    either all values of that key or none. `dropped` and `notes` describe the fields that are left out, converted or
    filled in.
    """

    fields: tuple[Field, ...]
    masks: Mapping[Key, Key] = field(default_factory=dict)
    dropped: tuple[Dropped, ...] = ()
    notes: tuple[str, ...] = ()


class MergedSteps(StepReader):
    """The rows of several datasets, `members`, with the fields of `schema`; `manifest` describes the result.

    `order`, int64 `[episodes]`, is the order of the episodes in the result, as positions in the concatenation of all
    members; the episodes of one member keep their order. `numbers` are new episode numbers. Values of other dtypes are
    converted, and fields that a member lacks are zero. The caller closes the members.
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
        """Return whether the set of states (fields that also exist under `next`) differs from the states of a member.

        A field becomes a state if one member has it at the root and another one under `next`. Then the stored
        `explicit_next` of the members does not tell whether its next values equal the following rows.
        """
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
            which = self._table.index_of_step(np.arange(start - 1, stop - 1))  # the episode of each row's predecessor
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
        """The text of every episode; {} for episodes of members without text."""
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
        """Read rows of one member, with the dtype of the merged field; zeros if the member lacks the field."""
        key = self.schema.masks.get(leaf.key)
        own = self._keys[member].get(leaf.key)
        if own is None and key is not None:
            return np.full((stop - start, *leaf.shape), key in self._keys[member], leaf.numpy)
        if own is None:
            return np.zeros((stop - start, *leaf.shape), leaf.numpy)
        rows = self.members[member].read(leaf.key, start, stop)
        return rows if own.dtype == leaf.dtype else as_numbers(rows, own.dtype).astype(leaf.numpy)

    def _spans(self, start: int, stop: int) -> list[tuple[int, int, RowPlaces | None]]:
        """Return for each member with rows in `[start, stop)`: its number, its first row, and where its rows go.

        The rows of one member are consecutive in the member, because its episodes keep their order, but rows of
        other members may lie between them in the result:

            result   | a a | b b b | a |    rows 0 to 5
            spans    (a, first row of a, places 0 1 5), (b, first row of b, places 2 3 4)

        If all rows are of one member, the places are None. The last answer is kept, because all fields are read in
        the same range.
        """
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
            raise UsageError("the order must keep all episodes of each dataset, in their order")


class RowPlaces:
    """Ascending row numbers of an array to write to; long runs of consecutive rows are copied at once."""

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
"""The mean length of runs from which copying each run is faster than indexing each row."""


def _edges(values: Array) -> list[int]:
    """Return the positions at which runs of consecutive numbers start, and the end."""
    return [0, *(np.flatnonzero(np.diff(values) != 1) + 1).tolist(), len(values)]


def joined_table(tables: Sequence[EpisodeTable]) -> EpisodeTable:
    """Join the rows of several tables, one after another; `start` still counts within each member."""
    columns = EpisodeTable.joined_columns(tables)
    columns["explicit_start"] = np.full(len(columns["start"]), -1, np.int64)
    return EpisodeTable.from_columns(columns)


def joined_documents(each: Sequence[Mapping[str, bytes]]) -> dict[str, bytes]:
    """Join the documents of several datasets: `NAME` if all have the same content, else `NUMBER/NAME` for each."""
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


def numbers_of_runs(text: str) -> Array:
    """Undo `runs_text`. ValueError for other text."""
    parts = [part.split(":") for part in text.split(",")] if text else []
    runs = [np.arange(int(part[0]), int(part[-1]) + (len(part) == 1)) for part in parts]
    return np.concatenate([np.empty(0, np.int64), *runs])


_FEW = 8
_OBSERVATIONS = frozenset({"observation", "state", "pixels"})


def merged_schema(readers: Sequence[StepReader], names: Sequence[str], policy: Policy, *, cast: bool) -> MergedSchema:
    """Return the fields of the merged dataset.

    The policy `error` requires the same fields in all datasets; `intersect` keeps the fields that all have with one
    shape; `union` keeps all fields, with a mask for each that some dataset lacks. Masks of an earlier union are
    extended. With `cast`, a field of several dtypes gets one that holds all values. SchemaError names every difference
    that the policy does not resolve.
    """
    each = [reader.fields for reader in readers]
    differences = field_differences(each)
    marked = _marked(readers)
    rewards = reward_meanings([reader.manifest for reader in readers], names)
    unresolved = [one for one in differences.values() if not _resolved(one, policy, cast)]
    if unresolved or (rewards and policy == "error"):
        left_out = [one.key for one in differences.values() if policy == "intersect" and one not in unresolved]
        raise _refusal(unresolved, rewards, names, policy, left_out)
    fields: list[Field] = []
    masks: dict[Key, Key] = {}
    dropped: list[Dropped] = []
    notes = list(rewards)
    for key, found in fields_by_key(each):
        there = [one for one in found if one is not None]
        missing = [name for name, one in zip(names, found, strict=True) if one is None]
        if missing and key in marked and (policy == "union" or _is_kept(marked[key], each)):
            masks[key] = marked[key]  # a mask of an earlier union: datasets without it have all values or none
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
            notes.append(f"episode is not in {' and '.join(missing)}: it is filled with the numbers of the episodes")
        elif missing:
            mask = key_name(mask_key(key))
            notes.append(f"{key_name(key)} is not in {' and '.join(missing)}: zeros there, and {mask} is false")
            if mask_key(key) not in marked:
                _require_free(mask_key(key), each, names)
            masks[mask_key(key)] = key
    if not fields:
        raise SchemaError(f"{' and '.join(names)} have no field in common")
    _require_observation(each, fields, differences, names)
    known = {one.key for one in fields}
    fields += [Field(key, "bool", (), "info") for key in masks if key not in known]
    _require_tree(each, fields, names)
    return MergedSchema(tuple(fields), masks, tuple(dropped), tuple(notes))


def _marked(readers: Sequence[StepReader]) -> dict[Key, Key]:
    """Return the masks that earlier merges with `union` have made, with the key whose values each marks."""
    found: dict[Key, Key] = {}
    for reader in readers:
        steps = reader.manifest.provenance
        if any(step.verb == "merge" and step.arguments.get("schema") == "union" for step in steps):
            flags = {one.key for one in reader.fields if (one.dtype, one.shape) == ("bool", ())}
            found |= {mask_key(one.key): one.key for one in reader.fields if mask_key(one.key) in flags}
    return found


def _is_kept(key: Key, each: Sequence[Sequence[Field]]) -> bool:
    """Return whether all datasets have the field, with one shape."""
    shapes = [one.shape for fields in each for one in fields if one.key == key]
    return len(shapes) == len(each) and len(set(shapes)) == 1


def _require_free(mask: Key, each: Sequence[Sequence[Field]], names: Sequence[str]) -> None:
    for fields, name in zip(each, names, strict=True):
        if any(one.key == mask for one in fields):
            raise SchemaError(
                f"{key_name(mask)} would be a mask, but is already a field of {name}",
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
            hints.append("--cast converts to a dtype that holds all values")
        else:
            hints.append("no dtype holds all values: convert one field with rbtool preprocess --cast")
    if any(len(_shapes_of(one)) > 1 for one in unresolved):
        hints.append("--schema intersect leaves out fields of different shapes")
    return SchemaError(
        f"the datasets differ in {len(lines)} field{'' if len(lines) == 1 else 's'}: {'; '.join(lines[:_FEW])}{more}",
        hint="; ".join(hints),
    )


def _require_observation(
    each: Sequence[Sequence[Field]], left: Sequence[Field], differences: Mapping[Key, FieldDifference],
    names: Sequence[str],
) -> None:  # fmt: skip
    """Raise SchemaError if the datasets have observations but the result would have none."""
    had = {key for fields in each for key in _observations(fields)}
    if had and not _observations(left):
        lines = [one.sentence(names) for key, one in differences.items() if key in had]
        raise SchemaError(
            f"the merged dataset would have no observation: {'; '.join(lines[:_FEW])}",
            hint="merge only datasets with the same observations, and keep those of other tasks apart",
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
    """Return the dtype that represents every value of all `types` exactly; None if there is none."""
    plain = ["float32" if name == "bfloat16" else name for name in types]
    if len(set(types)) == 1:
        return types[0]
    found = np.result_type(*map(np.dtype, plain))
    return found.name if all(_holds(found, np.dtype(name)) for name in plain) else None


def _holds(wide: np.dtype[np.generic], narrow: np.dtype[np.generic]) -> bool:
    """Return whether `wide` represents every value of `narrow` exactly."""
    if wide.kind in "fc" and narrow.kind in "iu":
        parts = 2 if wide.kind == "c" else 1
        return 8 * narrow.itemsize <= {2: 11, 4: 24, 8: 53}[wide.itemsize // parts]
    return bool(np.can_cast(narrow, wide, "safe"))


def _require_tree(each: Sequence[Sequence[Field]], kept: Sequence[Field], names: Sequence[str]) -> None:
    """Raise SchemaError for a name that would be both a field and a group of fields."""
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
