"""`split`: divide the episodes of a dataset into parts for training, validation and testing.

Episodes that belong together form groups, which are never divided; `assign` assigns each group to a part.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TypeAlias

import numpy as np
import xxhash

from ..errors import RbtoolError, UsageError, did_you_mean
from ..format import fs
from ..format.contracts import Array, StepReader
from ..format.documents import float_from_json, json_file, load_json, plain
from ..format.episodes import SCORE, EpisodeTable
from ..format.files import bytes_of
from ..format.locate import find_dataset, require_apart
from ..format.manifest import Layout, Manifest, Provenance
from ..format.memmap.builder import Origin, OverlappedBuilder, RowBuilder, provenance_step
from ..format.memmap.tree import RowSpans
from ..format.packed.builder import row_builder, rows_bytes
from ..format.packed.schema import PackedSchema, RecordNumbers, RowCodec, parse_codecs
from ..format.returns import return_field_of, sum_rewards, table_with_returns
from ..format.staging import PARTS_FILE, Outcome, Publication, Staging
from ..format.videos import videos_of_episodes
from ..open_steps import finished_manifest
from ..options import takes
from ..progress import some_of
from ..results import Result, layout_arguments, new_notes, seconds_since
from ..saved_steps import verified_steps
from ..ted.episodes import runs_text
from ..ted.schema import EPISODE, Field, Key, key_called, key_name
from .merge import SPLIT, opened_steps, planned_manifest, result_layout
from .options import SplitOptions

_FORMAT = "rbtool split"
_VERSION = 1
_CHUNK_BYTES = 4 << 20
_FEW = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitPart:
    """One part, a dataset at `path`. `mean_return` is None if episodes have no returns."""

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

    `groups` counts the groups that were kept together: episodes, or values of the key `by`. `duplicates` counts the
    episodes that are byte-identical to one in another part.
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


@takes(SplitOptions)
def split(asked: SplitOptions) -> SplitResult:
    """Split a dataset into the datasets `dest/train`, `dest/val` and `dest/test`.

    Each part keeps the order and the numbers of its episodes. All parts appear at once, with `split.json`, which lists
    them. `merge` of all parts restores the dataset, with its content digest if layout and compression are the same.

    Args:
        dataset: a path or `source:id`.
        dest: the folder of the parts; default: `NAME-split` in the current folder, for a dataset NAME.
        train, val, test: fractions of the episodes, which add up to 1; a part without a fraction is not written.
        seed: seed of the random division; default: 0.
        by: which episodes stay in one part: `episode` divides freely, `content` keeps episodes with the same rows
            together, and a key keeps those with the same value together. A key is a field, a key of the episodes' text,
            a score, or `seed`, with one value per episode.
        stratify: `return` gives all parts similar returns, the name of a score like `score.quality` similar scores.
        in_order: divide in order, one part after the other, instead of at random.
        allow_duplicates: allow byte-identical episodes in two parts. By default they are refused, because a model would
            be tested on data that it was trained on.
        layout, compress: as in `convert`. Default: as in the dataset if it is packed, else `ted`.
        root: where stored datasets are.
        force: replace what is at `dest`.
        dry_run: do everything but writing.
        progress: shows how far it is; default: nothing is shown.

    Returns:
        The parts. An equal split of the same data is left as it is, and `already_there` is True.

    Raises:
        UsageError: arguments make no sense, a part would be empty, or identical episodes would be in two parts. `dest`
            is unchanged after any error.
        DatasetNotFoundError, CorruptDataError: the dataset does not exist, or is damaged.
        OutOfSpaceError: the disk has no room for the result.
    """
    started, shares = time.perf_counter(), require_shares(asked.train, asked.val, asked.test)
    seed = _require_order(asked)
    path = find_dataset(asked.dataset, asked.root)
    destination = (fs.expanded(asked.dest) if asked.dest is not None else _default_folder(path)).absolute()
    require_apart(path, destination)
    with opened_steps(path) as reader:
        layout, compress = result_layout([reader], asked)
        return _Splitting(asked, reader, destination, shares, seed, layout, compress).run(started)


def _require_order(asked: SplitOptions) -> int | None:
    """Validate how episodes are drawn; return the seed, None for `in_order`."""
    seed, stratify = asked.seed, asked.stratify
    if stratify not in {None, "return"} and not str(stratify).startswith(SCORE):
        raise UsageError(f"--stratify is {stratify!r}, expected return or a score like score.quality")
    if asked.in_order and (stratify is not None or seed is not None):
        other = "--seed" if stratify is None else "--stratify"
        raise UsageError(f"--in-order and {other} are both set, expected one", hint="leave one out")
    if seed is not None and not 0 <= seed < 1 << 64:
        raise UsageError(f"--seed is {seed}, expected a whole number from 0 to 2^64 - 1")
    return None if asked.in_order else seed or 0


def _default_folder(path: Path) -> Path:
    name = re.sub(r"\.(h5|hdf5)$", "", path.resolve().name)
    return Path(f"{name}-split")


class _Division(NamedTuple):
    """The part of each episode, the rows of the episode table that each part gets, and the counts for the result."""

    part_of: Array
    rows: list[Array]
    table: EpisodeTable
    counted: Mapping[str, Any]


class _Parts(NamedTuple):
    """The manifests of the parts, and the counts for the result."""

    made: list[Manifest]
    counted: Mapping[str, Any]


@dataclass(frozen=True)
class _Splitting:
    """One run of `split`."""

    asked: SplitOptions
    reader: StepReader
    destination: Path
    shares: Shares
    seed: int | None
    layout: Layout
    compress: tuple[str, ...]

    @property
    def _names(self) -> list[str]:
        return list(self.shares)

    @property
    def _arguments(self) -> dict[str, Any]:
        """The arguments that the provenance of each part records."""
        asked = self.asked
        return {
            "dataset": os.fspath(asked.dataset), "parts": self.shares, "seed": self.seed, "by": asked.by,
            "stratify": asked.stratify, "in_order": asked.in_order, "allow_duplicates": asked.allow_duplicates,
            "episodes": len(self.reader.episodes), **layout_arguments(self.layout, self.compress),
        }  # fmt: skip

    def run(self, started: float) -> SplitResult:
        reader = self.reader
        if not len(reader.episodes):
            raise UsageError(f"{reader.path} has no episodes to split")
        codecs = parse_codecs(self.compress, reader.fields)
        PackedSchema.of(reader.fields, codecs)
        publication = Publication(
            staging=Staging(self.destination, replace=self.asked.force),
            find=self._already_there,
            needed=lambda: None if self.compress else self._size,
            dry_run=self.asked.dry_run,
        )
        parts, entries = publication.run(self._plan, lambda staging: Outcome(self._write(staging.path, codecs)))
        return self._result(parts, started, entries)

    @cached_property
    def _division(self) -> _Division:
        """Compare the episodes and assign each to a part; UsageError for identical ones in two parts."""
        reader, asked = self.reader, self.asked
        self.asked.reporter.start("comparing episodes", reader.manifest.steps, "steps")
        identical = identical_episodes(reader, self.asked.reporter.advance)
        self.asked.reporter.done()
        groups = groups_by(reader, asked.by, identical)
        returns = None
        if asked.stratify is not None:
            scored = asked.stratify.startswith(SCORE)
            returns = reader.episodes.score(asked.stratify) if scored else episode_returns_of(reader)
        part_of = assign(groups, self.shares, seed=self.seed or 0, in_order=asked.in_order, returns=returns)
        duplicates = self._require_apart(identical, part_of)
        rows = [np.flatnonzero(part_of == part) for part in range(len(self._names))]
        table = table_with_returns(reader)
        counted = {
            "groups": len(groups.sizes), "duplicates": duplicates,
            "mean_returns": [_mean_return(reader, table.total_reward[chosen]) for chosen in rows],
        }  # fmt: skip
        return _Division(part_of, rows, table, counted)

    @property
    def _size(self) -> int:
        """The bytes of all rows."""
        _, rows, table, _ = self._division
        lengths = [(int(table.length[chosen].sum()), len(chosen)) for chosen in rows]
        return sum(rows_bytes(self.reader.fields, self.layout, *one) for one in lengths)

    def _plan(self) -> Outcome[_Parts]:
        _, rows, table, counted = self._division
        planned = [self._planned(table.chosen(chosen)) for chosen in rows]
        return Outcome(_Parts(planned, counted), {"bytes": self._size})

    def _require_apart(self, identical: Array, part_of: Array) -> int:
        """Return the number of episodes with an identical one in another part; UsageError unless that is allowed."""
        parts: dict[int, set[int]] = defaultdict(set)
        for content, part in zip(identical.tolist(), part_of.tolist(), strict=True):
            parts[content].add(part)
        torn = np.array([len(parts[content]) > 1 for content in identical.tolist()], bool)
        count = int(torn.sum())
        if count and not self.asked.allow_duplicates:
            first = identical[torn][0]
            numbers = self.reader.episodes.episode[identical == first].tolist()
            shown = some_of(numbers, _FEW)
            raise UsageError(
                f"{count:,} episodes have a byte-identical one in another part: episodes {shown} are the same",
                hint="add --by content to keep identical episodes in one part, or --allow-duplicates",
            )
        return count

    def _planned(self, table: EpisodeTable) -> Manifest:
        return replace(
            self.reader.manifest, steps=table.steps, episodes=len(table), content_digest="", layout=self.layout
        )

    def _write(self, folder: Path, codecs: Mapping[Key, RowCodec]) -> _Parts:
        """Write all parts in one pass over the dataset; memory is bounded by a few chunks."""
        reader, (part_of, rows, table, counted) = self.reader, self._division
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
            self.asked.reporter.start("splitting", reader.manifest.steps, "steps")
            for start, stop in reader.chunks(_CHUNK_BYTES):
                last = np.zeros(stop - start, bool)
                low, high = np.searchsorted(ends, (start, stop))
                last[ends[low:high] - start] = True
                parts = part_of[table.index_of_step(np.arange(start, stop))]
                columns = {field.key: source.read(field.key, start, stop) for field in reader.fields}
                _route(columns, last, parts, builders)
                self.asked.reporter.advance(stop - start)
            steps.close()  # compares what was read with its digests, before any manifest is written
            text = reader.episode_text
            made = []
            for part, (builder, chosen) in enumerate(zip(builders, rows, strict=True)):
                own = None if text is None else [text[row] for row in chosen.tolist()]
                made.append(builder.finish(table.chosen(chosen), self._origin(part, chosen), own))
        self.asked.reporter.done()
        document = self._document(made, counted)
        fs.write_file(folder / PARTS_FILE, json_file(document))
        return _Parts(made, counted)

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
        """Return the provenance step of a part, with the positions of its episodes unless their numbers ascend.

        `merge` restores the order of the dataset from the positions or, without them, from the episode numbers.
        """
        arguments = {**self._arguments, "part": part}
        if (np.diff(self.reader.episodes.episode) <= 0).any():
            arguments["positions"] = runs_text(chosen)
        return provenance_step(SPLIT, arguments, self.reader.manifest.inputs)

    def _document(self, made: list[Manifest], counted: Mapping[str, Any]) -> dict[str, Any]:
        """Return the document `split.json`: the arguments, the counts, and the parts."""
        parts = [
            {"name": name, "steps": one.steps, "episodes": one.episodes, "content_digest": one.content_digest}
            for name, one in zip(self._names, made, strict=True)
        ]
        return {"format": _FORMAT, "version": _VERSION, **self._identity(), **counted, "made": parts}

    def _identity(self) -> dict[str, Any]:
        asked = {key: value for key, value in self._arguments.items() if key != "dataset"}
        found: dict[str, Any] = plain({**self.reader.manifest.inputs, "arguments": asked, "layout": self.layout})
        return found

    def _already_there(self) -> _Parts | None:
        """Return the parts and the counts at the destination if an equal split of the same data wrote them."""
        try:
            document = load_json(self.destination / PARTS_FILE)
            same = all(document.get(key) == value for key, value in {"scores": None, **self._identity()}.items())
            digests = [part["content_digest"] for part in document["made"]]
            counted = {name: document[name] for name in ("groups", "duplicates")}
            counted["mean_returns"] = [float_from_json(mean) for mean in document["mean_returns"]]
        except (RbtoolError, OSError, LookupError, TypeError):
            return None
        there = [finished_manifest(self.destination / name) for name in self._names]
        made = [one for one in there if one is not None]
        return _Parts(made, counted) if same and [one.content_digest for one in made] == digests else None

    def _result(self, found: _Parts, started: float, changes: dict[str, Any]) -> SplitResult:
        made, counted = found
        reader, returns = self.reader, counted["mean_returns"]
        parts = tuple(
            SplitPart(
                name=name, path=self.destination / name, fraction=self.shares[name], steps=one.steps,
                episodes=one.episodes, mean_return=mean, content_digest=one.content_digest or None,
            )
            for name, one, mean in zip(self._names, made, returns, strict=True)
        )  # fmt: skip
        entries: dict[str, Any] = {
            "path": self.destination, "source": reader.path, "layout": self.layout, "steps": reader.manifest.steps,
            "episodes": len(reader.episodes), "bytes": sum(one.bytes for one in made), "by": self.asked.by,
            "groups": counted["groups"], "seed": self.seed, "duplicates": counted["duplicates"],
            "parts": parts,
            "notes": new_notes(planned_manifest(reader).notes, reader), "seconds": seconds_since(started),
        }  # fmt: skip
        return SplitResult(**entries | changes)


def _mean_return(reader: StepReader, returns: Array) -> float | None:
    """Return the mean of some returns; None for a dataset without returns."""
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


Shares: TypeAlias = Mapping[str, float]
"""The fraction of the episodes that each part gets, by the name of the part."""

PARTS = ("train", "val", "test")
_NEAR = 1e-9


def require_shares(train: float | None, val: float | None, test: float | None) -> dict[str, float]:
    """Return the given fractions by name; UsageError unless there are two or more, all above 0, that add up to 1."""
    given = {name: share for name, share in zip(PARTS, (train, val, test), strict=True) if share is not None}
    for name, share in given.items():
        if not 0 < share < 1:
            raise UsageError(
                f"--{name} is {share:g}, expected a fraction above 0 and below 1",
                hint=f"leave --{name} out for a split without that part" if share == 0 else "",
            )
    if len(given) < 2:
        found = f"--{next(iter(given))} is the only fraction" if given else "no fraction"
        raise UsageError(
            f"{found}, expected two parts or more", hint="write: rbtool split DATASET --train 0.8 --val 0.2"
        )
    total = sum(Fraction(repr(float(share))) for share in given.values())
    if abs(float(total) - 1) > _NEAR:
        shown = " + ".join(f"{share:g}" for share in given.values())
        raise UsageError(f"the fractions {shown} add up to {float(total):g}, expected 1")
    return given


@dataclass(frozen=True, slots=True)
class Groups:
    """Groups of episodes that stay together: the group of each episode, int64 `[episodes]`, by first appearance."""

    of_episode: Array
    what: str = "episode"

    @property
    def sizes(self) -> Array:
        """The number of episodes in each group, int64 `[groups]`."""
        return np.bincount(self.of_episode)


def groups_by(reader: StepReader, by: str, identical: Array | None = None) -> Groups:
    """Group the episodes: each alone (`episode`), those with the same rows (`content`), or by a key.

    A key is looked up among the fields, then the keys of the episodes' text, the scores, and `seed`. Raises UsageError
    for a key that does not exist, that changes within an episode, or that some episode lacks.
    """
    table = reader.episodes
    fields = {field.key: field for field in reader.fields}
    if by == EPISODE[0]:
        return Groups(np.arange(len(table)))
    key = key_called(by, fields)
    if key is not None:
        return Groups(_values_of_field(reader, fields[key]), by)
    if by == "content" and identical is not None:
        return Groups(_numbered(identical.tolist()), by)
    texts = reader.episode_text or []
    if any(by in text for text in texts):
        _require_all([by in text for text in texts], table.episode, f"no text {by!r}")
        return Groups(_numbered([text[by] for text in texts]), by)
    if by.startswith(SCORE):
        return Groups(_numbered(table.score(by).tolist()), by)
    if by == "seed" and table.has_seed.any():
        _require_all(table.has_seed.tolist(), table.episode, "no seed")
        return Groups(_numbered(table.seed.tolist()), by)
    known = list(
        dict.fromkeys([*map(key_name, fields), *(name for text in texts for name in text), "episode", "content"])
    )
    known += ["seed"] if table.has_seed.any() and "seed" not in known else []
    raise UsageError(
        f"--by {by!r} names no field, no text of the episodes and no entry of the episode table"
        f"{did_you_mean(by, known)}",
        hint=f"choose from {', '.join(known)}",
    )


def _require_all(there: Sequence[bool], numbers: Array, lacking: str) -> None:
    if not all(there):
        number = int(numbers[list(there).index(False)])
        raise UsageError(f"episode {number} has {lacking}, so it belongs to no group")


def _numbered(values: Sequence[object]) -> Array:
    names: dict[object, int] = {}
    return np.array([names.setdefault(value, len(names)) for value in values], np.int64).reshape(len(values))


def _values_of_field(reader: StepReader, field: Field) -> Array:
    """Return a number for the value of each episode in a field, equal for values with equal bits.

    The value of an episode is the value of its first row; UsageError if another row of the episode differs. A chunk may
    start inside an episode, whose value is then known from an earlier chunk.
    """
    table, width = reader.episodes, field.row_bytes
    values: list[bytes] = [b""] * len(table)
    if not width:
        return _numbered(values)
    for start, stop in reader.chunks():
        rows = np.frombuffer(bytes_of(reader.view(field.key, start, stop)), np.uint8).reshape(stop - start, width)
        which = table.index_of_step(np.arange(start, stop))
        first = np.flatnonzero(np.diff(which, prepend=-1))
        for row in first.tolist():
            if which[row] != which[0] or table.start[which[row]] >= start:
                values[which[row]] = rows[row].tobytes()
        heads = np.frombuffer(b"".join(values[episode] for episode in which[first]), np.uint8).reshape(-1, width)
        same = (rows == np.repeat(heads, np.diff(first, append=len(which)), axis=0)).all(1)
        if not same.all():
            number = int(table.episode[which[int((~same).argmax())]])
            raise UsageError(
                f"{field.name} changes within episode {number}, expected one value per episode to split by"
            )
    return _numbered(values)


def episode_returns_of(reader: StepReader) -> Array:
    """Return the return of every episode, float64 `[episodes]`; UsageError if the dataset has no returns."""
    if return_field_of(reader.manifest) is None:
        raise UsageError(
            "the dataset has no returns: no field has the reward of each step", hint="leave out --stratify"
        )
    return sum_rewards(reader, reader.episodes.start, reader.episodes.length)


def targets(shares: Shares, episodes: int) -> list[int]:
    """Return the number of episodes of each part, by largest remainder; UsageError if a part would be empty."""
    exact = [Fraction(repr(float(share))) * episodes for share in shares.values()]
    counts = [int(part) for part in exact]
    rest = sorted(range(len(exact)), key=lambda part: (counts[part] - exact[part], part))
    for part in rest[: episodes - sum(counts)]:
        counts[part] += 1
    for (name, share), count in zip(shares.items(), counts, strict=True):
        if not count:
            raise UsageError(
                f"the part {name} would be empty: {share:g} of {episodes} episode{'' if episodes == 1 else 's'}",
                hint="give it a larger fraction" if episodes >= len(counts) else "split into fewer parts",
            )
    return counts


def assign(groups: Groups, shares: Shares, *, seed: int, in_order: bool = False, returns: Array | None = None) -> Array:
    """Return the part of each episode, int64 `[episodes]`, as a position in `shares`.

    Groups are taken in a random order (by `seed`), and each goes to the part that is furthest behind its share, so that
    the sizes of the parts are as close to their shares as the groups allow. `in_order` fills one part after the other
    instead. With `returns`, float64 `[episodes]`, groups are sorted by mean return, cut into strata, and shuffled only
    within a stratum, so that all parts get similar returns. A stratum has as many groups as are needed for one group of
    the smallest part. Raises UsageError if there are fewer groups than parts.
    """
    sizes = groups.sizes
    wanted = targets(shares, int(sizes.sum()))
    if len(sizes) < len(wanted):
        raise UsageError(
            f"{len(sizes)} group{'' if len(sizes) == 1 else 's'} by {groups.what} cannot fill {len(wanted)} parts",
            hint="split into fewer parts, or by something else",
        )
    draws = np.random.Philox(key=seed).random_raw(len(sizes))  # raw draws are the same in every version of NumPy
    if in_order:
        order = np.arange(len(sizes))
    elif returns is None:
        order = np.argsort(draws, kind="stable")
    else:
        means = np.bincount(groups.of_episode, weights=returns) / sizes
        ranks = np.argsort(np.lexsort((draws, means)))
        stratum = ranks // round(1 / min(shares.values()))
        order = np.lexsort((draws, stratum))
    part_of_group = _filled(sizes[order], wanted, in_order=in_order)
    found = np.empty(len(sizes), np.int64)
    found[order] = part_of_group
    return np.asarray(found[groups.of_episode])


def _filled(sizes: Array, wanted: Sequence[int], *, in_order: bool) -> list[int]:
    """Choose a part for each group in turn, so that no part stays empty.

    The last groups go to empty parts. Otherwise the group goes to the part with the largest deficit: the episodes that
    it should have by now, in proportion to the episodes seen, minus those that it has.
    """
    total, seen = sum(wanted), 0
    have = [0] * len(wanted)
    found: list[int] = []
    for place, size in enumerate(sizes.tolist()):
        seen += size
        empty = [part for part, count in enumerate(have) if not count]
        if len(empty) >= len(sizes) - place:
            part = empty[0]
        elif in_order:
            part = next(part for part, count in enumerate(have) if count < wanted[part])
        else:
            below = [part for part, count in enumerate(have) if count < wanted[part]]
            part = max(below, key=lambda part: (wanted[part] * seen / total - have[part], wanted[part], -part))
        have[part] += size
        found.append(part)
    return found


# Digests of single episodes, which do not depend on the layout of the dataset ------------------------------


def content_keys(reader: StepReader) -> list[Key]:
    """Return the keys of the fields that are the content of an episode: all except `episode`, sorted."""
    return sorted(field.key for field in reader.fields if field.key != EPISODE)


def episode_digests(
    reader: StepReader,
    keys: Sequence[Key],
    wanted: Array | None = None,
    progress: Callable[[int], None] = lambda steps: None,
) -> list[bytes]:
    """Return a digest of the rows of each episode in these fields, in table order.

    With `wanted`, bool `[episodes]`, only the marked episodes are read; the others have b"". Memory is bounded by a
    chunk: the hashers of an episode that continues in the next chunk are kept in `under_way`. `progress` receives the
    steps read.
    """
    table = reader.episodes
    chosen = np.ones(len(table), bool) if wanted is None else wanted
    stops = table.start + table.length
    found = [b""] * len(table)
    under_way: dict[Key, xxhash.xxh3_128] = {}
    for start, stop in reader.chunks():
        first, last = table.index_of_step(np.array([start, stop - 1])).tolist()
        rows = [row for row in range(first, last + 1) if chosen[row]]
        if rows:
            columns = {key: bytes_of(reader.view(key, start, stop)) for key in keys}
        for row in rows:
            low, high = max(start, int(table.start[row])), min(stop, int(stops[row]))
            if low == table.start[row]:
                under_way = {key: xxhash.xxh3_128() for key in keys}
            for key, hasher in under_way.items():
                width = len(columns[key]) // (stop - start)
                hasher.update(columns[key][(low - start) * width : (high - start) * width])
            if high == stops[row]:
                found[row] = b"".join(hasher.digest() for hasher in under_way.values())
        progress(stop - start)
    return found


def identical_episodes(reader: StepReader, progress: Callable[[int], None] = lambda steps: None) -> Array:
    """Return the class of each episode, int64 `[episodes]`: equal for episodes whose rows are byte-identical.

    The field `episode` is ignored. Episodes whose length and sum of rewards are unique cannot be identical to another
    one, and are not read.
    """
    table = reader.episodes
    totals = sum_rewards(reader, table.start, table.length).view(np.int64)
    shapes = list(zip(table.length.tolist(), totals.tolist(), strict=True))
    counts = Counter(shapes)
    wanted = np.array([counts[shape] > 1 for shape in shapes], bool)
    digests = [b""] * len(table)
    if wanted.any():
        digests = episode_digests(reader, content_keys(reader), wanted, progress)
    else:
        progress(table.steps)  # none of them needs to be read
    names: dict[object, int] = {}
    keys = zip(shapes, digests, strict=True)
    return np.array([names.setdefault(key, len(names)) for key in keys], np.int64).reshape(len(table))
