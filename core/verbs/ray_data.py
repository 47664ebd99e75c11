"""Conversion of datasets to Ray Data, with whole episodes in each block, and back."""

from __future__ import annotations

import functools
import importlib
import itertools
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..engine.ray_cluster import connect, imported_ray
from ..errors import CorruptDataError, SchemaError, UsageError, not_installed, require_flags, suggests_keywords
from ..format import fs
from ..format.contracts import EpisodeBlock, StepReader
from ..format.locate import find_dataset
from ..format.manifest import Layout, Manifest, Request
from ..format.memmap.builder import Origin, OverlappedBuilder, provenance_step
from ..format.packed.builder import row_builder
from ..format.packed.schema import parse_codecs
from ..format.returns import Ingest
from ..format.staging import Outcome, Publication, Staging
from ..format.videos import refuse_videos
from ..open_steps import open_steps
from ..options import PathLike
from ..results import Published, published_entries, require_layout
from ..ted.episodes import Final
from ..ted.schema import (
    EPISODE,
    FLAGS,
    NEXT,
    NEXT_DONE,
    NEXT_REWARD,
    NEXT_TERMINATED,
    NEXT_TRUNCATED,
    REWARD,
    SINGLETONS,
    Array,
    Field,
    Key,
    Timing,
    key_name,
    role_of,
    row_bytes,
    ted_fields,
    unknown_field,
)

_STEP = "step"
_BLOCK_BYTES = 64 << 20


def _data(user: str) -> Any:
    """Import Ray Data."""
    ray = imported_ray(user)
    try:
        importlib.import_module("ray.data")
    except ImportError as error:
        raise not_installed(f"{user} needs Ray Data", "ray", error) from error
    return ray


@suggests_keywords()
def to_ray_dataset(
    dataset: PathLike,
    *,
    fields: Sequence[str] | None = None,
    block_bytes: int = _BLOCK_BYTES,
    root: PathLike | None = None,
) -> Any:
    """Return a dataset as a `ray.data.Dataset` whose blocks have whole episodes.

    A row is a step. Columns have the names that `inspect` shows, with dots, such as `next.reward`; arrays are Arrow
    tensors. The column `episode` is the number of the episode, and `step` counts its rows from 0. Rows keep their
    order. Blocks are read by the nodes that need them: all nodes need rbtool, and the dataset under the same path. If
    Ray is not initialised, the cluster of RAY_ADDRESS is connected to, or a local one is started.

    Args:
        dataset: a path or `source:id`.
        fields: names of fields; default: all. `episode` and the end flags are always included.
        block_bytes: about how large blocks are; blocks may be larger, because episodes are not divided.
        root: where stored datasets are.

    Raises:
        UsageError: Ray is not installed or cannot be reached, a field does not exist, or the dataset keeps videos.
        SchemaError: Ray Data cannot represent the dtype or the name of a field.
    """
    if block_bytes < 1:
        raise UsageError(f"block_bytes is {block_bytes}, expected a number from 1")
    ray = _data("to_ray_dataset")
    path = find_dataset(dataset, root).resolve()
    with open_steps(path) as reader:
        refuse_videos(reader, "a Ray dataset")
        chosen = _chosen(reader, fields)
        spans = _spans(reader, max(1, block_bytes // max(1, row_bytes(chosen))))
        read = functools.partial(_rows, path, reader.manifest.content_digest, tuple(one.key for one in chosen))
    if not ray.is_initialized():
        connect(ray)
    made = ray.data.from_items(
        [{"first": first, "stop": stop} for first, stop in spans], override_num_blocks=len(spans)
    )
    made.context.execution_options.preserve_order = True
    return made.map_batches(read, batch_size=None, batch_format="numpy")


def _chosen(reader: StepReader, names: Sequence[str] | None) -> list[Field]:
    """Return the named fields and those that are always included; SchemaError for fields that Ray cannot represent."""
    known = {field.name: field for field in reader.fields}
    if names is not None:
        if unknown := set(names) - known.keys():
            raise unknown_field(min(unknown), known)
        always = [EPISODE, *((NEXT, *flag) for flag in FLAGS)]
        known = {name: one for name, one in known.items() if name in names or one.key in always}
    if key_name(EPISODE) not in known or _STEP in known:
        raise SchemaError(
            f"{reader.path} has the fields {', '.join(known)}, expected episode, and no {_STEP}, which is added"
        )
    for name, one in known.items():
        if tuple(name.split(".")) != one.key or one.numpy.kind not in "biuf" or one.dtype != one.numpy.name:
            raise SchemaError(
                f"{name} is {one.dtype}, which a Ray dataset cannot hold", hint="leave it out: fields=[…]"
            )
    return list(known.values())


def _spans(reader: StepReader, rows: int) -> list[tuple[int, int]]:
    """Divide the episodes, in order, into spans of about `rows` rows: first episode and the one after the last."""
    table = reader.episodes
    spans: list[tuple[int, int]] = []
    first = 0
    while first < len(table):
        stop = int(np.searchsorted(table.start + table.length, table.start[first] + rows, side="right"))
        spans.append((first, max(first + 1, stop)))
        first = spans[-1][1]
    if not spans:
        raise UsageError(f"{reader.path} has no steps")
    return spans


def _rows(path: Path, digest: str, keys: Sequence[Key], spans: Mapping[str, Array]) -> dict[str, Array]:
    """Read the episodes of spans; this runs on any node."""
    with open_steps(path) as reader:
        if reader.manifest.content_digest != digest:
            raise CorruptDataError(f"{path} has changed since it was opened")
        table, found = reader.episodes, []
        for first, stop in zip(spans["first"].tolist(), spans["stop"].tolist(), strict=True):
            start, end = int(table.start[first]), int(table.start[stop - 1] + table.length[stop - 1])
            columns = {key_name(key): _plain(key, reader.read(key, start, end)) for key in keys}
            steps = np.arange(start, end) - np.repeat(table.start[first:stop], table.length[first:stop])
            found.append(columns | {_STEP: steps})
    return {name: np.concatenate([columns[name] for columns in found]) for name in found[0]}


def _plain(key: Key, rows: Array) -> Array:
    """Return rewards and flags without their trailing singleton dimension."""
    return rows.reshape(-1) if key[1:] in SINGLETONS and rows.shape[1:] == (1,) else rows


@suggests_keywords()
def from_ray_dataset(
    rows: Any, dest: PathLike, *, layout: Layout = "ted", compress: Sequence[str] = (), force: bool = False
) -> Published:
    """Write a `ray.data.Dataset` of steps as a dataset to `dest`, which appears when it is complete, or not at all.

    The columns have the form that `to_ray_dataset` gives them, and names with dots become nested keys. `episode` is
    required; `next.terminated` and `next.truncated` are the end flags (a `next.done` alone means terminated). A column
    that also exists under `next.` is a state. An episode without an end flag on its last step is marked truncated. The
    steps of an episode must follow each other; a column `step`, if there is one, must increase, and is not written.
    Rows are taken in the order of the dataset, in memory bounded by two blocks and an episode. Seeds, texts and
    metadata of the original dataset are not in the rows, and are lost.

    Args:
        rows: the steps.
        dest: the folder to write.
        layout, compress: as in `convert`.
        force: replace what is at `dest`.

    Raises:
        UsageError: Ray is not installed, arguments make no sense, or something else is at `dest`.
        SchemaError: columns are missing or are not arrays of numbers of one shape, or the steps are not in order.
    """
    started = time.perf_counter()
    require_flags(force=force)
    _data("from_ray_dataset")
    require_layout(layout, compress)
    destination = fs.expanded(dest).absolute()

    def build(staging: Staging) -> Outcome[Manifest]:
        return Outcome(write_blocks(_blocks(rows), staging.path, layout, compress, destination.name))

    publication = Publication[Manifest](staging=Staging(destination, replace=force))
    publication.staging.refuse_if_taken()
    manifest, entries = publication.publish(build)
    return Published(**(published_entries(manifest, destination, started) | dict(entries)))


def write_blocks(
    blocks: Iterable[Mapping[str, Array]], folder: Path, layout: Layout, compress: Sequence[str], name: str
) -> Manifest:
    """Write the columns of blocks, whose borders may be inside episodes, as a dataset `name` to a new folder."""
    whole = _whole_episodes(_alike(blocks))
    first = next(whole, None)
    if first is None:
        raise SchemaError("the Ray dataset has no rows")
    source = _source(first)
    fields = ted_fields(source)
    with OverlappedBuilder(row_builder(folder, fields, layout, parse_codecs(tuple(compress), fields))) as builder:
        ingest = Ingest(builder, source)
        seen: set[int] = set()
        for columns in itertools.chain([first], whole):
            block = _block(columns, source)
            for number in block.episodes.tolist():
                if number in seen:
                    raise SchemaError(f"the steps of episode {number} do not follow each other")
                seen.add(number)
            ingest.add_block(block)
        request = Request("ray", name, name, layout=layout)
        step = provenance_step("from_ray_dataset", {"layout": layout, "compress": list(compress)}, {})
        return builder.finish(ingest.table, Origin(request, (step,)))


def _blocks(rows: Any) -> Iterator[Mapping[str, Array]]:
    """Yield the columns of each block, in order."""
    options = rows.context.execution_options
    before, options.preserve_order = options.preserve_order, True
    try:
        yield from rows.iter_batches(batch_size=None, batch_format="numpy")
    finally:
        options.preserve_order = before


def _alike(blocks: Iterable[Mapping[str, Array]]) -> Iterator[Mapping[str, Array]]:
    """Yield the blocks that have rows; SchemaError unless all have the same columns, dtypes and shapes."""
    first: dict[str, Any] = {}
    for columns in blocks:
        forms = {name: f"{array.dtype} {list(array.shape[1:])}" for name, array in columns.items()}
        if not first:
            _require_numbers(columns)
            first = forms
        if forms != first:
            name = min(name for name in forms | first if forms.get(name) != first.get(name))
            found, expected = (one.get(name, "missing") for one in (forms, first))
            raise SchemaError(f"{name} differs between rows: {expected}, then {found}")
        if len(columns[key_name(EPISODE)]):
            yield columns


def _require_numbers(columns: Mapping[str, Array]) -> None:
    if (episode := columns.get(key_name(EPISODE))) is None or episode.dtype.kind not in "iu" or episode.ndim != 1:
        raise SchemaError(
            f"the columns are {', '.join(columns)}, expected episode, the number of the episode of each row"
        )
    for name, array in columns.items():
        if array.dtype.kind not in "biuf":
            raise SchemaError(f"{name} is {array.dtype}, expected arrays of numbers of one shape")


def _whole_episodes(blocks: Iterable[Mapping[str, Array]]) -> Iterator[dict[str, Array]]:
    """Regroup blocks so that each has whole episodes: the last episode of a block waits for the next block.

    Each input block is cut where its last episode begins (`last`); that rest is kept, because the episode may continue:

        in    | 0 0 1 1 | 1 1 2 | 2 2 |
        out   | 0 0 | 1 1 1 1 | 2 2 2 |
    """
    kept: list[dict[str, Array]] = []
    for columns in blocks:
        episode = columns[key_name(EPISODE)]
        last = len(episode) - int(np.argmax(episode[::-1] != episode[-1])) if (episode != episode[-1]).any() else 0
        if kept and kept[-1][key_name(EPISODE)][-1] != episode[0]:
            yield _joined(kept)
            kept = []
        if last:
            yield _joined([*kept, {name: array[:last] for name, array in columns.items()}])
            kept = []
        kept.append({name: array[last:] for name, array in columns.items()})
    if kept:
        yield _joined(kept)


def _joined(parts: Sequence[Mapping[str, Array]]) -> dict[str, Array]:
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def _source(columns: Mapping[str, Array]) -> list[tuple[Field, Timing]]:
    """Return the fields by their root keys, with their timing: states, results of a step, or known before the step."""
    forms = {tuple(name.split(".")): (array.dtype.name, array.shape[1:]) for name, array in columns.items()}
    found: list[tuple[Field, Timing]] = []
    for key, (dtype, shape) in forms.items():
        timing: Timing = "step"
        inner = key
        if key[0] == NEXT:
            inner, timing = key[1:], "result"
            if inner in forms and inner not in SINGLETONS:
                if forms[inner] != (dtype, shape):
                    raise SchemaError(f"{'.'.join(key)} is {dtype} {list(shape)}, and {'.'.join(inner)} is not")
                continue
        elif (NEXT, *key) in forms and key not in SINGLETONS:
            timing = "state"
        if key == REWARD and NEXT_REWARD in forms:
            raise SchemaError(
                "there are columns reward and next.reward, expected one reward of each step",
                hint="leave reward out, or give it another name",
            )
        if inner not in FLAGS and key not in (EPISODE, (_STEP,)):
            found.append((Field(inner, dtype, () if inner in SINGLETONS else shape, role_of(inner)), timing))
    return found


def _block(columns: Mapping[str, Array], source: Sequence[tuple[Field, Timing]]) -> EpisodeBlock:
    """Return whole episodes as a block."""
    episode = columns[key_name(EPISODE)]
    ends = np.append(np.flatnonzero(np.diff(episode)), len(episode) - 1)
    if (step := columns.get(_STEP)) is not None and (np.delete(np.diff(step), ends[:-1]) <= 0).any():
        raise SchemaError("the steps of an episode are not in their order", hint="sort the rows by episode and step")
    terminated, truncated = (_flag(columns, key) for key in (NEXT_TERMINATED, NEXT_TRUNCATED))
    if key_name(NEXT_DONE) in columns and key_name(NEXT_TERMINATED) not in columns:
        terminated = _flag(columns, NEXT_DONE) & ~truncated
    rows, following = dict[Key, Array](), dict[Key, Array]()
    for one, timing in source:
        array = columns[key_name((NEXT, *one.key) if timing == "result" else one.key)]
        rows[one.key] = array.reshape(len(episode)) if one.key in SINGLETONS else array
        if timing == "state":
            following[one.key] = columns[key_name((NEXT, *one.key))]
    final = np.full(len(ends), Final.OBSERVED, np.uint8)
    return EpisodeBlock(episode[ends].astype(np.int64), ends + 1, rows, terminated, truncated, final, following)


def _flag(columns: Mapping[str, Array], key: Key) -> Array:
    found = columns.get(key_name(key))
    rows = len(columns[key_name(EPISODE)])
    if found is None:
        return np.zeros(rows, bool)
    if found.size != rows:
        raise SchemaError(f"{key_name(key)} has {found.size // rows} numbers a step, expected one")
    flags: Array = found.reshape(rows) != 0
    return flags
