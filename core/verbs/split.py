"""`split`: divide the episodes of a dataset into parts for training, validation and tests."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from ..errors import RbtoolError, UsageError, suggests_keywords
from ..format import fs
from ..format.contracts import Array, StepReader
from ..format.documents import dump_json, float_from_json, load_json, plain
from ..format.episodes import EpisodeTable
from ..format.locate import find_dataset, require_apart
from ..format.manifest import Layout, Manifest, Provenance
from ..format.memmap.builder import Origin, OverlappedBuilder, RowBuilder, provenance_step
from ..format.merging import runs_text
from ..format.packed.builder import row_builder
from ..format.packed.row_files import RowCodec, parse_codecs
from ..format.packed.schema import PackedSchema, RecordNumbers
from ..format.returns import return_field_of, table_with_returns
from ..format.row_runs import RowSpans
from ..format.staging import PARTS_FILE, Staging, mend
from ..format.videos import videos_of_episodes
from ..open_steps import finished_manifest
from ..progress import Progress, Silent
from ..results import Result, layout_arguments, new_notes, seconds_since
from ..saved_steps import verified_steps
from ..ted.schema import Key
from .episode_digests import identical_episodes
from .merge import SPLIT, PathLike, opened_steps, planned_manifest, result_layout
from .source_conversion import rows_bytes
from .split_plan import assign, episode_returns_of, groups_by, require_shares

_FORMAT = "rbtool split"
_VERSION = 1
_SMALL_FILES = 64 << 10
_CHUNK_BYTES = 4 << 20
_FEW = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitPart:
    """One part: a dataset at `path`. `mean_return` is None where episodes have no returns."""

    name: str
    path: Path
    fraction: float
    steps: int
    episodes: int
    mean_return: float | None
    content_digest: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitResult(Result):
    """The parts of the dataset at `source`, in the folder `path`, or those that would be written (`dry_run`).

    `groups` counts what was kept together: episodes, or values of the key `by`. `duplicates` counts the episodes that
    are byte-identical to one in another part.
    """

    kind: ClassVar[str] = "split"
    path: Path
    source: Path
    layout: str
    steps: int
    episodes: int
    bytes: int
    by: str
    groups: int
    seed: int | None
    duplicates: int
    parts: tuple[SplitPart, ...]
    notes: tuple[str, ...] = ()
    already_there: bool = False
    dry_run: bool = False
    seconds: float = 0.0


@suggests_keywords()
def split(
    dataset: PathLike,
    dest: PathLike | None = None,
    *,
    train: float | None = None,
    val: float | None = None,
    test: float | None = None,
    seed: int | None = None,
    by: str = "episode",
    stratify: str | None = None,
    in_order: bool = False,
    allow_duplicates: bool = False,
    layout: str | None = None,
    compress: tuple[str, ...] | list[str] | None = None,
    root: PathLike | None = None,
    force: bool = False,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> SplitResult:
    """Split `dataset` (a path or `source:id`) into the datasets `dest/train`, `dest/val` and `dest/test`.

    `train`, `val` and `test` are fractions of the episodes that add up to 1; a part without one is not written. An
    episode is never divided, and neither is a group: `by` is `episode`, `content` (episodes with the same rows stay
    together), or a key of which each episode has one value: a field, a key of the episodes' text, or `seed`. Groups
    are drawn at random by `seed` (0 by default); with `stratify="return"` so that all parts have similar returns, with
    `in_order` not at random but one part after the other. Each part keeps the order and the numbers of its episodes.

    Byte-identical episodes in two parts are refused unless `allow_duplicates` is set: a model would be tested on what
    it was trained on. `dest` is by default the folder NAME-split in the current one, after the name of the dataset;
    `layout` and `compress` are those of `convert`, by default those of the dataset if it is in layout `packed`, else
    `ted`. All parts appear at once, with `split.json`, which lists them. `dest` is replaced only with `force`; an equal
    split of the same data is left as it is (`already_there`).

    `merge` of all parts gives the dataset back, with its content digest where layout and compression are the same.
    Raises UsageError for arguments that make no sense, for parts that would be empty and for identical episodes;
    DatasetNotFoundError, CorruptDataError, OutOfSpaceError; `dest` is unchanged in every case.
    """
    started, shares = time.perf_counter(), require_shares(train, val, test)
    chosen_seed = _require_order(seed, stratify, in_order=in_order)
    path = find_dataset(dataset, root)
    destination = (fs.expanded(dest) if dest is not None else _default_folder(path)).absolute()
    require_apart(path, destination)
    with opened_steps(path) as reader:
        wanted, methods = result_layout([reader], layout, compress)
        arguments: dict[str, Any] = {
            "dataset": os.fspath(dataset), "parts": shares, "seed": chosen_seed, "by": by, "stratify": stratify,
            "in_order": in_order, "allow_duplicates": allow_duplicates, "episodes": len(reader.episodes),
            **layout_arguments(wanted, methods),
        }  # fmt: skip
        splitting = _Splitting(
            reader=reader, destination=destination, arguments=arguments, layout=wanted, compress=methods,
            force=force, dry_run=dry_run, progress=progress or Silent(),
        )  # fmt: skip
        return splitting.run(started)


def _require_order(seed: int | None, stratify: str | None, *, in_order: bool) -> int | None:
    """Validate how episodes are drawn; return the seed, None for `in_order`."""
    if stratify not in {None, "return"}:
        raise UsageError(f"--stratify is {stratify!r}, return is the only choice")
    if in_order and (stratify is not None or seed is not None):
        other = "--seed" if stratify is None else "--stratify"
        raise UsageError(f"--in-order takes the episodes as they are, and {other} draws them", hint="leave one out")
    if seed is not None and not 0 <= seed < 1 << 64:
        raise UsageError(f"--seed is {seed}, expected a whole number from 0 to 2^64 - 1")
    return None if in_order else seed or 0


def _default_folder(path: Path) -> Path:
    name = re.sub(r"\.(h5|hdf5)$", "", path.resolve().name)
    return Path(f"{name}-split")


@dataclass(frozen=True, kw_only=True)
class _Splitting:
    """One run of `split`; `arguments` are what the provenance of each part records."""

    reader: StepReader
    destination: Path
    arguments: Mapping[str, Any]
    layout: Layout
    compress: tuple[str, ...]
    force: bool
    dry_run: bool
    progress: Progress

    @property
    def _names(self) -> list[str]:
        return list(self.arguments["parts"])

    def run(self, started: float) -> SplitResult:
        reader, arguments = self.reader, self.arguments
        if not len(reader.episodes):
            raise UsageError(f"{reader.path} has no episodes: there is nothing to split")
        codecs = parse_codecs(self.compress, reader.fields)
        PackedSchema.of(reader.fields, codecs)
        if not self.dry_run:
            mend(self.destination)
        if not self.force and (there := self._already_there()) is not None:
            return self._result(*there, started, already_there=True)
        staging = Staging(self.destination, replace=self.force)
        staging.refuse_if_taken()
        self.progress.start("comparing episodes", reader.manifest.steps, "steps")
        identical = identical_episodes(reader, self.progress.advance)
        self.progress.done()
        groups = groups_by(reader, arguments["by"], identical)
        returns = episode_returns_of(reader) if arguments["stratify"] else None
        part_of = assign(
            groups, arguments["parts"], seed=arguments["seed"] or 0, in_order=arguments["in_order"], returns=returns
        )
        duplicates = self._require_apart(identical, part_of)
        rows = [np.flatnonzero(part_of == part) for part in range(len(self._names))]
        table = table_with_returns(reader)
        sizes = [
            rows_bytes(reader.fields, self.layout, int(table.length[chosen].sum()), len(chosen)) for chosen in rows
        ]
        if not self.compress:
            fs.require_space(self.destination.parent, sum(sizes) + len(rows) * _SMALL_FILES)
        counted = {
            "groups": len(groups.sizes), "duplicates": duplicates,
            "mean_returns": [_mean_return(reader, table.total_reward[chosen]) for chosen in rows],
        }  # fmt: skip
        if self.dry_run:
            planned = [self._planned(table.chosen(chosen)) for chosen in rows]
            return self._result(planned, counted, started, bytes=sum(sizes), dry_run=True)
        with staging:
            made = self._write(staging.path, part_of, rows, table, codecs)
            document = self._document(made, counted)
            fs.write_file(staging.path / PARTS_FILE, (dump_json(document, indent=1) + "\n").encode())
            if staging.publish():
                return self._result(made, counted, started)
        if not self.force and (there := self._already_there()) is not None:
            return self._result(*there, started, already_there=True)
        raise UsageError(f"{self.destination} was just created by another process", hint="add --force to replace it")

    def _require_apart(self, identical: Array, part_of: Array) -> int:
        """Return how many episodes have an equal one in another part; UsageError unless that is allowed."""
        parts: dict[int, set[int]] = defaultdict(set)
        for content, part in zip(identical.tolist(), part_of.tolist(), strict=True):
            parts[content].add(part)
        torn = np.array([len(parts[content]) > 1 for content in identical.tolist()], bool)
        count = int(torn.sum())
        if count and not self.arguments["allow_duplicates"]:
            first = identical[torn][0]
            numbers = self.reader.episodes.episode[identical == first].tolist()
            shown = ", ".join(map(str, numbers[:_FEW])) + (", …" if len(numbers) > _FEW else "")
            raise UsageError(
                f"{count:,} episodes have a byte-identical one in another part: episodes {shown} are the same",
                hint="add --by content to keep identical episodes in one part, or --allow-duplicates",
            )
        return count

    def _planned(self, table: EpisodeTable) -> Manifest:
        return replace(
            self.reader.manifest, steps=table.steps, episodes=len(table), content_digest="", layout=self.layout
        )

    def _write(
        self,
        folder: Path,
        part_of: Array,
        rows: list[Array],
        table: EpisodeTable,
        codecs: Mapping[Key, RowCodec],
    ) -> list[Manifest]:
        """Write all parts in one pass over the dataset; memory is bounded by a few chunks."""
        reader = self.reader
        RecordNumbers(table, reader.manifest.steps, str(reader.path))
        ends = table.start + table.length - 1
        with contextlib.ExitStack() as stack:
            steps = stack.enter_context(contextlib.ExitStack())
            source = steps.enter_context(verified_steps(reader))
            builders = [
                stack.enter_context(
                    OverlappedBuilder(
                        row_builder(folder / name, reader.fields, self.layout, codecs, int(table.length[chosen].sum()))
                    )
                )
                for name, chosen in zip(self._names, rows, strict=True)
            ]
            self.progress.start("splitting", reader.manifest.steps, "steps")
            for start, stop in reader.chunks(_CHUNK_BYTES):
                last = np.zeros(stop - start, bool)
                low, high = np.searchsorted(ends, (start, stop))
                last[ends[low:high] - start] = True
                parts = part_of[table.index_of_step(np.arange(start, stop))]
                columns = {field.key: source.read(field.key, start, stop) for field in reader.fields}
                _route(columns, last, parts, builders)
                self.progress.advance(stop - start)
            steps.close()  # compares what was read with its digests, before any manifest is written
            text = reader.episode_text
            made = []
            for part, (builder, chosen) in enumerate(zip(builders, rows, strict=True)):
                own = None if text is None else [text[row] for row in chosen.tolist()]
                made.append(builder.finish(table.chosen(chosen), self._origin(part, chosen), own))
        self.progress.done()
        return made

    def _origin(self, part: int, chosen: Array) -> Origin:
        reader = self.reader
        manifest = planned_manifest(reader)
        step = self._step(self._names[part], chosen)
        return replace(
            Origin.of(manifest, reader.documents(), videos_of_episodes(reader, chosen)),
            request=replace(manifest.request, layout=self.layout),
            provenance=(*manifest.provenance, step),
        )

    def _step(self, part: str, chosen: Array) -> Provenance:
        """What made a part; where the numbers of its episodes do not give their order, also their positions."""
        arguments = {**self.arguments, "part": part}
        if (np.diff(self.reader.episodes.episode) <= 0).any():
            arguments["positions"] = runs_text(chosen)
        return provenance_step(SPLIT, arguments, {"content_digest": self.reader.manifest.content_digest})

    def _document(self, made: list[Manifest], counted: Mapping[str, Any]) -> dict[str, Any]:
        """The document `split.json`: what was asked for, and the parts."""
        parts = [
            {"name": name, "steps": one.steps, "episodes": one.episodes, "content_digest": one.content_digest}
            for name, one in zip(self._names, made, strict=True)
        ]
        return {"format": _FORMAT, "version": _VERSION, **self._identity(), **counted, "made": parts}

    def _identity(self) -> dict[str, Any]:
        asked = {key: value for key, value in self.arguments.items() if key != "dataset"}
        found: dict[str, Any] = plain(
            {"content_digest": self.reader.manifest.content_digest, "arguments": asked, "layout": self.layout}
        )
        return found

    def _already_there(self) -> tuple[list[Manifest], dict[str, Any]] | None:
        """Return the parts at the destination, and the counts, if an equal split of the same data made them."""
        try:
            document = load_json(self.destination / PARTS_FILE)
            same = all(document[key] == value for key, value in self._identity().items())
            digests = [part["content_digest"] for part in document["made"]]
            counted = {name: document[name] for name in ("groups", "duplicates")}
            counted["mean_returns"] = [float_from_json(mean) for mean in document["mean_returns"]]
        except (RbtoolError, OSError, LookupError, TypeError):
            return None
        there = [finished_manifest(self.destination / name) for name in self._names]
        made = [one for one in there if one is not None]
        return (made, counted) if same and [one.content_digest for one in made] == digests else None

    def _result(self, made: list[Manifest], counted: Mapping[str, Any], started: float, **changes: Any) -> SplitResult:
        arguments, reader, returns = self.arguments, self.reader, counted["mean_returns"]
        parts = tuple(
            SplitPart(
                name=name, path=self.destination / name, fraction=arguments["parts"][name], steps=one.steps,
                episodes=one.episodes, mean_return=mean, content_digest=one.content_digest or None,
            )
            for name, one, mean in zip(self._names, made, returns, strict=True)
        )  # fmt: skip
        entries: dict[str, Any] = {
            "path": self.destination, "source": reader.path, "layout": self.layout, "steps": reader.manifest.steps,
            "episodes": len(reader.episodes), "bytes": sum(one.bytes for one in made), "by": arguments["by"],
            "groups": counted["groups"], "seed": arguments["seed"], "duplicates": counted["duplicates"],
            "parts": parts,
            "notes": new_notes(planned_manifest(reader).notes, reader), "seconds": seconds_since(started),
        }  # fmt: skip
        return SplitResult(**entries | changes)


def _mean_return(reader: StepReader, returns: Array) -> float | None:
    """The mean of some returns; None for a dataset without them."""
    if return_field_of(reader.manifest) is None:
        return None
    with np.errstate(invalid="ignore", over="ignore"):  # infinite rewards are data
        return float(np.mean(returns))


def _route(columns: Mapping[Key, Array], last: Array, parts: Array, builders: Sequence[RowBuilder]) -> None:
    """Append the rows of each part to its builder."""
    for part, builder in enumerate(builders):
        rows = np.flatnonzero(parts == part)
        if len(rows) == len(parts):
            builder.append_fresh(columns, last)
        elif len(rows):
            gaps = np.diff(rows) != 1
            runs = RowSpans(rows[np.append(True, gaps)], rows[np.append(gaps, True)] + 1)
            builder.append_fresh({key: runs.of(values) for key, values in columns.items()}, last[rows])
