"""`diff`: compare two datasets by schema, counts, episodes and values."""

from __future__ import annotations

import contextlib
import math
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, NamedTuple

import numpy as np

from ..errors import UsageError, suggests_keywords
from ..format.contracts import Array, StepReader
from ..format.locate import find_dataset
from ..format.mixture import FieldDifference, field_differences
from ..options import PathLike
from ..progress import Progress, Silent, counted
from ..results import Result, seconds_since
from ..ted.episodes import EndReason, Final, rows_equal
from ..ted.schema import EPISODE, Field, Key, as_numbers, key_name
from .merge import opened_steps
from .split import content_keys, episode_digests

_PIECE_BYTES = 4 << 20
_END, _FINAL = "end reason", "final observation"


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueDifference:
    """A field whose values differ in matched episodes: the number of those steps and episodes, and by how much.

    `largest` is the largest finite absolute difference; None if there is none, because of NaN or infinite values.
    """

    key: str
    steps: int
    episodes: int
    largest: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeDifference:
    """Two episodes with the same number and different rows: their numbers and lengths, and the fields that differ."""

    a: int
    b: int
    lengths: tuple[int, int]
    what: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DiffResult(Result):
    """Whether two datasets are equal, and what differs.

    `same` counts the episodes whose rows are byte-identical in all common fields, `close` those that differ within the
    tolerances. `only_a` and `only_b` are the numbers of episodes that the other dataset lacks. `reordered` is True if
    the matched episodes have another order, `renumbered` counts those with another number. `entries` names other
    differences: spaces, texts, and end reasons, final observations and seeds in the episode table.
    """

    kind: ClassVar[str] = "diff"
    a: Path
    b: Path
    equal: bool
    steps: tuple[int, int]
    episodes: tuple[int, int]
    fields: tuple[FieldDifference, ...]
    values: tuple[ValueDifference, ...]
    same: int
    close: int
    changed: tuple[EpisodeDifference, ...]
    only_a: tuple[int, ...]
    only_b: tuple[int, ...]
    reordered: bool
    renumbered: int
    entries: tuple[str, ...]
    rtol: float
    atol: float
    seconds: float = 0.0


@suggests_keywords()
def diff(
    a: PathLike,
    b: PathLike,
    *,
    rtol: float = 0.0,
    atol: float = 0.0,
    ignore_order: bool = False,
    root: PathLike | None = None,
    progress: Progress | None = None,
) -> DiffResult:
    """Compare two datasets or checkpoints in any layouts.

    Two episodes are the same, wherever they are, if their rows are byte-identical in all fields that both datasets have
    with one dtype and shape. The others are compared value by value with the episode of the same number. Scores, notes,
    provenance and the source's own documents are not compared.

    Args:
        a, b: paths or `source:id`.
        rtol, atol: two numbers are equal if `|a - b| <= atol + rtol * |b|`, and NaN equals NaN. Without tolerances bits
            are compared, so that 0.0 differs from -0.0.
        ignore_order: do not count differences in the order and the numbers of episodes.
        root: where stored datasets are.
        progress: shows how far it is; default: nothing is shown.

    Returns:
        The differences.

    Raises:
        UsageError, DatasetNotFoundError, CorruptDataError: arguments make no sense, or a dataset does not exist or is
            damaged.
    """
    started = time.perf_counter()
    for name, tolerance in (("rtol", rtol), ("atol", atol)):
        if not (tolerance >= 0 and math.isfinite(tolerance)):
            raise UsageError(f"--{name} is {tolerance}, expected a finite number from 0")
    with contextlib.ExitStack() as stack:
        one, other = (stack.enter_context(opened_steps(find_dataset(name, root))) for name in (a, b))
        comparison = _ContentComparison(one, other, rtol, atol, progress or Silent())
        return comparison.result(started, ignore_order=ignore_order)


class _Pair(NamedTuple):
    """Rows of the two episode tables that are the same episode, and whether its rows have the same digest."""

    a: int
    b: int
    same: bool


class _ContentComparison:
    """The comparison of two datasets."""

    def __init__(self, a: StepReader, b: StepReader, rtol: float, atol: float, progress: Progress) -> None:
        self._a, self._b = a, b
        self._rtol, self._atol = rtol, atol
        self._progress = progress
        there = {field.key: field for field in b.fields}
        common = [(field, there[field.key]) for field in a.fields if field.key in there and field.key != EPISODE]
        self._alike = [(x, y) for x, y in common if (x.dtype, x.shape) == (y.dtype, y.shape)]
        self._retyped = [(x, y) for x, y in common if x.dtype != y.dtype and x.shape == y.shape]
        self._steps: dict[Key, int] = defaultdict(int)
        self._episodes: dict[Key, int] = defaultdict(int)
        self._largest: dict[Key, float] = {}

    def result(self, started: float, *, ignore_order: bool) -> DiffResult:
        """Compare everything."""
        a, b = self._a, self._b
        pairs = self._pairs()
        changed, close = [], 0
        if apart := sum(not pair.same for pair in pairs):
            self._progress.start("comparing values", apart, "episodes")
        for pair in pairs:
            compared = self._retyped if pair.same else [*self._alike, *self._retyped]
            what = self._compare(pair, compared) if compared or not pair.same else ()
            if what:
                changed.append(self._changed(pair, what))
            elif not pair.same:
                close += 1
            if not pair.same:
                self._progress.advance(1)
        self._progress.done()
        numbers = [table.episode for table in (a.episodes, b.episodes)]
        rows = [np.array([pair[side] for pair in pairs], np.int64) for side in (0, 1)]
        alone = [np.setdiff1d(np.arange(len(own)), row) for own, row in zip(numbers, rows, strict=True)]
        reordered = bool((np.diff(rows[1]) < 0).any())
        renumbered = int((numbers[0][rows[0]] != numbers[1][rows[1]]).sum())
        fields = tuple(field_differences([a.fields, b.fields]).values())
        entries = (*self._entries(rows[0], rows[1]), *self._texts(pairs), *self._spaces())
        differs = changed or len(alone[0]) or len(alone[1]) or fields or entries
        return DiffResult(
            a=a.path, b=b.path, equal=not (differs or (not ignore_order and (reordered or renumbered))),
            steps=(a.manifest.steps, b.manifest.steps), episodes=(len(numbers[0]), len(numbers[1])), fields=fields,
            values=self._values(), same=sum(pair.same for pair in pairs), close=close, changed=tuple(changed),
            only_a=tuple(numbers[0][alone[0]].tolist()), only_b=tuple(numbers[1][alone[1]].tolist()),
            reordered=reordered, renumbered=renumbered, entries=entries, rtol=self._rtol, atol=self._atol,
            seconds=seconds_since(started),
        )  # fmt: skip

    def _pairs(self) -> list[_Pair]:
        """Match episodes by their rows, then by their numbers; in the order of the first dataset."""
        common = {field.key for field, _ in self._alike}
        keys = [key for key in content_keys(self._a) if key in common]
        self._progress.start("comparing episodes", self._a.manifest.steps + self._b.manifest.steps, "steps")
        here, there = (episode_digests(reader, keys, progress=self._progress.advance) for reader in (self._a, self._b))
        self._progress.done()
        lengths = [reader.episodes.length.tolist() for reader in (self._a, self._b)]
        by_content: dict[object, list[int]] = defaultdict(list)
        for row in reversed(range(len(there))):
            by_content[lengths[1][row], there[row]].append(row)
        pairs = [
            _Pair(row, found.pop(), same=True)
            for row, digest in enumerate(here)
            if (found := by_content.get((lengths[0][row], digest)))
        ]
        known = {pair.a for pair in pairs}
        by_number: dict[int, list[int]] = defaultdict(list)
        numbers = [reader.episodes.episode.tolist() for reader in (self._a, self._b)]
        for row in sorted({*range(len(there))} - {pair.b for pair in pairs}, reverse=True):
            by_number[numbers[1][row]].append(row)
        pairs += [
            _Pair(row, found.pop(), same=False)
            for row in range(len(here))
            if row not in known and (found := by_number.get(numbers[0][row]))
        ]
        return sorted(pairs)

    def _changed(self, pair: _Pair, what: Sequence[str]) -> EpisodeDifference:
        here, there = self._a.episodes, self._b.episodes
        return EpisodeDifference(
            a=int(here.episode[pair.a]), b=int(there.episode[pair.b]),
            lengths=(int(here.length[pair.a]), int(there.length[pair.b])), what=tuple(what),
        )  # fmt: skip

    def _compare(self, pair: _Pair, fields: Sequence[tuple[Field, Field]]) -> tuple[str, ...]:
        """Return the names of the fields that differ beyond the tolerances between two episodes, and count them."""
        lengths = [int(reader.episodes.length[row]) for reader, row in ((self._a, pair.a), (self._b, pair.b))]
        if lengths[0] != lengths[1]:
            return ("length",)
        found = []
        for x, y in fields:
            steps = sum(self._differing(x, y, one, other) for one, other in self._pieces(pair, x, y, lengths[0]))
            if steps:
                self._steps[x.key] += steps
                self._episodes[x.key] += 1
                found.append(x.name)
        return tuple(found)

    def _pieces(self, pair: _Pair, x: Field, y: Field, length: int) -> Iterator[tuple[Array, Array]]:
        starts = int(self._a.episodes.start[pair.a]), int(self._b.episodes.start[pair.b])
        step = max(1, _PIECE_BYTES // max(1, x.row_bytes))
        for low in range(0, length, step):
            high = min(low + step, length)
            yield (
                self._a.read(x.key, starts[0] + low, starts[0] + high),
                self._b.read(y.key, starts[1] + low, starts[1] + high),
            )

    def _differing(self, x: Field, y: Field, one: Array, other: Array) -> int:
        """Count the rows that differ beyond the tolerances."""
        if x.dtype == y.dtype:
            rows = ~rows_equal(one, other)
            one, other = one[rows], other[rows]
        if not one.size:
            return 0
        left, right = _wide(one, x), _wide(other, y)
        whole = {x.numpy.kind, y.numpy.kind} <= set("iu") and "bfloat16" not in {x.dtype, y.dtype}
        with np.errstate(invalid="ignore", over="ignore"):
            apart = _whole_distance(one, other) if whole else np.abs(left - right)
            equal = (apart == 0 if whole else left == right) | (np.isnan(left) & np.isnan(right))
            near = apart <= self._atol + self._rtol * np.abs(right)
            equal |= near & np.isfinite(apart)  # nothing is near infinity, whose own tolerance is infinite
        if x.dtype == y.dtype and not self._rtol and not self._atol:
            equal[:] = False  # their bits differ
        rows = ~equal.reshape(len(one), -1).all(1)
        sizes = apart[~equal]
        sizes = sizes[np.isfinite(sizes)]
        if sizes.size:
            self._largest[x.key] = max(self._largest.get(x.key, 0.0), float(sizes.max()))
        return int(rows.sum())

    def _values(self) -> tuple[ValueDifference, ...]:
        return tuple(
            ValueDifference(
                key=key_name(key), steps=steps, episodes=self._episodes[key], largest=self._largest.get(key)
            )
            for key, steps in self._steps.items()
        )

    def _entries(self, here: Array, there: Array) -> Iterator[str]:
        """Name the entries of the episode table that differ between the matched episodes."""
        one, other = self._a.episodes, self._b.episodes
        names = {"end_reason": (_END, EndReason), "final": (_FINAL, Final)}
        for column, (what, words) in names.items():
            left, right = getattr(one, column)[here], getattr(other, column)[there]
            rows = np.flatnonzero(left != right)
            if len(rows):
                pair = " and ".join(words(int(side[rows[0]])).name.lower().replace("_", " ") for side in (left, right))
                yield f"{what} in {counted(len(rows), 'episode')}: {pair} in episode {int(one.episode[here[rows[0]]])}"
        seeds = (one.seed[here] != other.seed[there]) | (one.has_seed[here] != other.has_seed[there])
        if seeds.any():
            yield f"seed in {counted(int(seeds.sum()), 'episode')}"

    def _texts(self, pairs: Sequence[_Pair]) -> Iterator[str]:
        here, there = (reader.episode_text for reader in (self._a, self._b))
        count = sum((here[p.a] if here else {}) != (there[p.b] if there else {}) for p in pairs)
        if count:
            yield f"text in {counted(count, 'episode')}"

    def _spaces(self) -> Iterator[str]:
        here, there = self._a.manifest.spaces, self._b.manifest.spaces
        for name in dict.fromkeys([*here, *there]):
            if here.get(name) != there.get(name):
                yield f"space {name}"


def _whole_distance(one: Array, other: Array) -> Array:
    """Return the distance of integers as float64, above 0 where they differ, even if they are equal as float64."""
    if one.dtype == other.dtype:
        low, high = np.minimum(one, other).astype(np.uint64), np.maximum(one, other).astype(np.uint64)
        return (high - low).astype(np.float64)  # modulo 2^64, which a distance stays below
    apart = np.abs(one.astype(np.float64) - other.astype(np.float64))
    return np.where(one == other, 0.0, np.maximum(apart, 1.0))


def _wide(array: Array, field: Field) -> Array:
    """Return the values as float64 or complex128; large integers are rounded."""
    numbers = as_numbers(array, field.dtype)
    return numbers.astype(np.complex128 if numbers.dtype.kind == "c" else np.float64)
