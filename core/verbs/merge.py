"""`merge`: make one dataset of several."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

import numpy as np

from ..errors import DatasetNotFoundError, SchemaError, UsageError, suggests_keywords
from ..format import fs
from ..format.checks import damage_explained
from ..format.contracts import Array, StepReader
from ..format.locate import find_dataset, require_apart
from ..format.manifest import Layout, Manifest, Provenance, Request, has_manifest
from ..format.memmap.builder import Origin, provenance_step
from ..format.merging import (
    MergedSchema,
    MergedSteps,
    Policy,
    joined_table,
    merged_schema,
    numbers_of_runs,
    require_policy,
    runs_text,
)
from ..format.packed.builder import rows_bytes, write_dataset
from ..format.packed.reader import PackedReader
from ..format.packed.schema import PackedSchema, parse_codecs
from ..format.staging import Outcome, Publication, Staging, share_files
from ..open_steps import BufferSteps, finished_manifest
from ..progress import Progress, Silent
from ..results import Published, layout_arguments, published_entries, require_layout, seconds_since
from ..saved_steps import has_steps, is_of_buffer, open_saved, verified_steps

PathLike: TypeAlias = str | os.PathLike[str]
SPLIT = "split"
_SAME_ROWS = frozenset({"convert", "checkpoint save", "checkpoint load"})


@dataclass(frozen=True, slots=True, kw_only=True)
class MergedSource:
    """A dataset that was merged: its place, how much of the result is from it, and its episodes there.

    `numbers` are the source's own episode numbers and `episodes` those in the result, in the same order, as runs such
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

    `renumbered` states that episodes have new numbers because some were in several sources. `restored` is True if all
    parts of a split were merged and the content digest is that of the dataset that was split; None for other sources.
    """

    kind: ClassVar[str] = "merge"
    sources: tuple[MergedSource, ...]
    renumbered: bool
    restored: bool | None = None


@suggests_keywords()
def merge(
    datasets: Sequence[PathLike],
    dest: PathLike,
    *,
    schema: str = "error",
    cast: bool = False,
    layout: str | None = None,
    compress: Sequence[str] | None = None,
    root: PathLike | None = None,
    force: bool = False,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> MergeResult:
    """Merge datasets (paths or `source:id`), two or more, into one at `dest`: the episodes of each in its order.

    `schema` is what becomes of fields that are not alike in all: `error` refuses, `intersect` keeps the fields that all
    have in one shape and lists the others in `dropped_keys`, `union` keeps all, with zeros where a dataset lacks a
    field and `mask.<field>`, bool, false there. Fields of different element types are refused unless `cast` is set,
    which converts them to the type that holds all values of each exactly.

    Episode numbers are kept if no number occurs twice; else all episodes are numbered from 0, and `sources` and the
    provenance list which is which. Parts of one split are put back into the order of the dataset that was split, with
    its numbers. `layout` and `compress` are those of `convert`; by default `packed`, compressed alike, if all datasets
    are, else `ted`.

    `dest` is replaced only with `force`; an equal merge of the same datasets is left as it is (`already_there`).
    Raises UsageError, DatasetNotFoundError, SchemaError for fields that differ, CorruptDataError for a damaged source
    and OutOfSpaceError; `dest` is unchanged in every case.
    """
    started, policy = time.perf_counter(), require_policy(schema)
    if isinstance(datasets, str | os.PathLike) or len(datasets) < 2:
        one = "one dataset" if isinstance(datasets, str | os.PathLike) or datasets else "no dataset"
        raise UsageError(f"{one} to merge, expected two or more", hint="write: rbtool merge A B DEST")
    asked = [os.fspath(dataset) for dataset in datasets]
    destination = fs.expanded(dest).absolute()
    with contextlib.ExitStack() as stack:
        paths = [_found(name, destination, root) for name in datasets]
        for path in paths:
            require_apart(path, destination)
        readers = [stack.enter_context(opened_steps(path)) for path in paths]
        wanted, methods = result_layout(readers, layout, compress)
        merging = _Merging(
            readers=readers, asked=tuple(asked), destination=destination, policy=policy, cast=cast, layout=wanted,
            compress=methods, force=force, dry_run=dry_run, progress=progress or Silent(),
        )  # fmt: skip
        return merging.run(started)


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


def result_layout(
    readers: Sequence[StepReader], layout: str | None, compress: Sequence[str] | None
) -> tuple[Layout, tuple[str, ...]]:
    """Return layout and codecs: those given, else those that all datasets share, else `ted`."""
    packed = [reader.schema.codecs if isinstance(reader, PackedReader) else None for reader in readers]
    if layout is None:
        alike = all(codecs is not None for codecs in packed) or bool(compress)
        layout = "packed" if alike else "ted"
    if compress is None and layout == "packed" and packed[0] is not None and all(one == packed[0] for one in packed):
        compress = sorted(f"{'.'.join(key)}={codec}" for key, codec in packed[0].items())
    return require_layout(layout, compress or ()), tuple(compress or ())


def planned_manifest(reader: StepReader) -> Manifest:
    """The manifest of the steps, with what they get where they are those of a buffer."""
    return reader.planned if isinstance(reader, BufferSteps) else reader.manifest


@dataclass(frozen=True, kw_only=True)
class _Merging:
    """One run of `merge`."""

    readers: Sequence[StepReader]
    asked: tuple[str, ...]
    destination: Path
    policy: Policy
    cast: bool
    layout: Layout
    compress: tuple[str, ...]
    force: bool
    dry_run: bool
    progress: Progress

    def run(self, started: float) -> MergeResult:
        schema = merged_schema(self.readers, self.asked, self.policy, cast=self.cast)
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
                self.progress.start("merging", manifest.steps, "steps")
                origin = Origin.of(manifest, merged.documents(), merged.videos())
                made = write_dataset(merged, staging.path, self.layout, origin, codecs, self.progress.advance)
            self.progress.done()
            return Outcome(made, {"shared_bytes": share_files(staging.path, made, self.readers, links=True)})

        publication = Publication(
            staging=Staging(self.destination, replace=self.force),
            find=lambda: self._already_there(step),
            needed=lambda: None if self.compress else size,
            dry_run=self.dry_run,
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
            "datasets": list(self.asked), "schema": self.policy, "cast": self.cast,
            **layout_arguments(self.layout, self.compress),
            "steps_of_each": [len(reader.manifest.provenance) - shared for reader in self.readers],
        }  # fmt: skip
        if renumbered:
            arguments["origin"] = [
                {"source": number, "numbers": one.numbers, "episodes": one.episodes}
                for number, one in enumerate(sources)
            ]
        inputs = {f"content_digest.{number}": one.content_digest for number, one in enumerate(sources)}
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
        """What the result states about itself, carried over from all sources."""
        each = [planned_manifest(reader) for reader in self.readers]
        notes = list(dict.fromkeys([*(note for one in each for note in one.notes), *schema.notes]))
        spaces = self._common("space", [one.spaces for one in each], notes)
        renamed = self._common("renamed key", [one.renamed_keys for one in each], notes, missing_is_equal=True)
        dropped = dict.fromkeys([*(one for each_one in each for one in each_one.dropped_keys), *schema.dropped])
        if len({one.content_digest for one in each}) < len(each):
            notes.append("two of the merged datasets have the same content: their episodes are there twice")
        tables = [reader.episodes for reader in self.readers]
        return replace(
            each[0], kind="dataset", layout=self.layout, request=_request(each, self.asked, self.layout),
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
                notes.append(f"{what} {name} differs between {' and '.join(self.asked)} and is left out")
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
    """The request of all datasets if it is one, else one that names them."""
    requests = [replace(one.request, layout=layout) for one in each]
    if len({request.identity() for request in requests}) == 1:
        return requests[0]
    ids = "+".join(dict.fromkeys(one.request.id for one in each))
    return Request("merge", " ".join(asked), ids, layout=layout)


def _common_steps(readers: Sequence[StepReader]) -> tuple[Provenance, ...]:
    """The steps with which the provenance of every dataset starts."""
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
    """The step of each dataset that split it off, if all are different parts of one dataset; else None."""
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
    """The order of the dataset that was split: by the positions that the split recorded, else by episode numbers.

    None where they do not fit the episodes, which are then merged like those of any datasets.
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
    for field in schema.fields:
        if field.key == ("episode",) and field.numpy.kind in "iu" and episodes > np.iinfo(field.numpy).max:
            raise SchemaError(
                f"{episodes:,} episodes need new numbers, and {field.dtype} has no room for them",
                hint="convert the field first: rbtool preprocess --cast episode=int64",
            )
